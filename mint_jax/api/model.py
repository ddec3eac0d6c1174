"""``Model`` and ``Policy``: a resident base and the policies that train over it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mint_jax.api import inputs, saved, store
from mint_jax.api.evaluation import Evaluation, Task, evaluate
from mint_jax.api.inputs import Loss, Prompt, Rows
from mint_jax.api.store import Store, Stored
from mint_jax.catalog.packed import Schema, pack
from mint_jax.catalog.records.lookup import Revision
from mint_jax.catalog.records.names import parse_policy
from mint_jax.errors import UserError
from mint_jax.harness import adapters
from mint_jax.harness.adapters import AdapterSource, LoadedAdapter
from mint_jax.harness.start import check_alpha, policy_seed
from mint_jax.lora import peft
from mint_jax.lora.tree import ALL_LINEAR, BIAS, AdapterConfig, Slot, Stacks, spelled_out
from mint_jax.models import hf, transformer
from mint_jax.models.base import Base, public_name
from mint_jax.models.outline import peft_tables
from mint_jax.residency.pool import AdapterBatch, Pool
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train.config import OptimizerConfig, PolicyConfig
from mint_jax.train.metrics import summarise
from mint_jax.train.trainer import Trainer

Revisions = Stored | Sequence[Stored | None] | None


class Policy:
    """A policy in training over a ``Model``, made by ``Model.policy``.

    Attributes:
        name: name under which its revisions are saved.
        draws: number of calls of ``completions`` without a seed; the next seed derives from it.
    """

    def __init__(self, model: "Model", name: str):
        self.model, self.name, self.draws = model, name, 0

    def __repr__(self) -> str:
        if self.model.policies.get(self.name) is not self:
            return f"Policy({self.name!r}, not in training)"
        about = f"{self.config.adapter.size}, {self.config.loss.kind}, {self.steps} steps"
        return f"Policy({self.name!r}, {about})"

    @property
    def trainer(self) -> Trainer:
        """The trainer of all policies of the model; raises ``UserError`` if the policy was removed
        or the model is closed.
        """
        trainer = self.model.need_trainer()
        if self.model.policies.get(self.name) is not self:
            taken = self.name in self.model.policies
            also = ", and another policy has its name now" if taken else ""
            raise UserError(
                f"policy {self.name!r} was removed{also}: make it again with policy(...) or"
                " resume(...)"
            )
        return trainer

    @property
    def config(self) -> PolicyConfig:
        """Its adapter's shape, optimizer, loss and seed."""
        return self.trainer.policies[self.name]

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        slot = self.trainer.slots[self.name]
        return int(self.trainer.state[slot.bucket].steps[slot.index])

    def _alone(self, call: Callable[[Any], dict[str, Any]], rows: Rows) -> Any:
        return call({self: rows})[self.name]

    def train_step(self, rows: Rows) -> dict[str, float]:
        """Runs one update: ``forward_backward`` and ``optim_step``. Returns metrics, means over
        target tokens.

        Args:
            rows: dicts or groups. A dict has ``prompt`` and ``completion``, or ``text``, or
                ``messages``; for loss ``dpo`` it has ``prompt``, ``chosen`` and ``rejected``. The
                loss of dicts is a mean over target tokens, or over pairs. Groups have weights of
                their own: ``mint.groups`` makes them from completions and rewards.

        Raises:
            UserError: the policy's loss cannot learn from these rows.
        """
        return self._alone(self.model.train_step, rows)

    def forward_backward(self, rows: Rows) -> dict[str, float]:
        """Adds the gradient of these rows to the policy's gradient sum; as ``train_step``."""
        return self._alone(self.model.forward_backward, rows)

    def optim_step(self) -> dict[str, float]:
        """Applies the gradient sum with the optimizer, clears it and returns metrics."""
        return self.trainer.optim_step([self.name])[self.name]

    def gradients(self, rows: Rows | None = None) -> Any:
        """Returns the gradients of the policy's loss, a tree of NumPy arrays like ``adapter``.

        Args:
            rows: computes the gradient of these rows alone and changes nothing. None returns the
                sum accumulated since the last update.
        """
        if rows is None:
            return self.trainer.gradient(self.name)
        return self._alone(self.model.gradients, rows)

    def adapter(self) -> Any:
        """Returns the current adapter, a tree of NumPy arrays: ``a`` ``[L, R, D]`` and ``b``
        ``[L, R, F]`` of each projection, ``a`` alone of kind ``basis``, or ``bias`` ``[L, 1, F]``.
        """
        return self.trainer.adapter(self.name)

    def sample(self, prompt: Prompt, **settings: Any) -> str:
        """Returns the text of one completion with the current weights."""
        return self.completions([prompt], **settings)[0][0].text or ""

    def completions(
        self, prompts: Sequence[Prompt], seed: int | None = None, **settings: Any
    ) -> list[list[Completion]]:
        """Returns ``n`` completions of each prompt, as ``Model.completions``. Without a seed each
        call draws new tokens, derived from the model's ``seed``, the policy's name and ``draws``.
        """
        trainer, model = self.trainer, self.model
        encoded = inputs.encoded(model.base, prompts)
        fresh = [trainer.policies[self.name].seed & 0xFFFFFFFF, model.seed, self.draws]
        requests = model.requests(encoded, settings, inputs.seeds(seed, fresh, len(encoded)))
        self.draws += seed is None
        slot, names = trainer.slots[self.name], {"version": trainer.versions[self.name]}
        return model.generate([(request, slot, names) for request in requests], trainer.stacks)

    def evaluate(
        self,
        task: Task,
        prompts: Sequence[Prompt] | None = None,
        examples: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Evaluation:
        """Returns the mean reward on held-out prompts, with its standard error.

        Args:
            task: an environment or its name (``"digit_sum"``), which brings its held-out prompts;
                or a reward function of (completion text, prompt) that returns a number.
            prompts: replace the environment's prompts.
            examples: number of held-out prompts, taken from the start; None takes all.
            seed: fixed by default, so that two evaluations draw with the same seeds.
            settings: sampling settings, as in ``completions``.

        Raises:
            UserError: a reward function comes without prompts, raises, or returns something else
                than a finite number.
        """
        sample = functools.partial(self.completions, seed=seed, **settings)
        return evaluate(self.name, task, prompts, examples, sample)

    def save(self, catalog: Store | str | Path, why: str = "") -> Revision:
        """Saves the current weights as a revision and points ``NAME@latest`` at it.

        Args:
            catalog: an open catalog or a catalog's folder, made if it does not exist.
            why: note for the audit log.
        """
        trainer = self.trainer
        if not isinstance(catalog, Store):
            with store.open(catalog, create=True) as opened:
                return self.save(opened, why)
        config = spelled_out(trainer.policies[self.name].adapter, trainer.specs)
        data = pack(trainer.adapter(self.name), Schema(self.model.base.fingerprint, config))
        return catalog.catalog.export(self.name, data, self.steps, create=True, why=why)

    def export(self, directory: str | Path) -> Path:
        """Writes the current weights as a PEFT directory and returns its path. The directory must
        be empty or not exist.
        """
        adapter = self.trainer.adapter(self.name)
        return self.model.write_peft(adapter, self.config.adapter, directory)

    def save_state(self, file: str | Path) -> Path:
        """Saves the training state for ``Model.resume``: adapter, moments, accumulated gradients,
        counters and seeds. An existing file is replaced.
        """
        return saved.save(file, self.trainer, self.name, self.model.base.fingerprint, self.draws)

    def remove(self) -> None:
        """Removes the policy from training; see ``Model.remove``."""
        self.model.remove(self)


class Model:
    """A resident base and the policies that train over it; a context manager that closes itself.

    Attributes:
        base: the frozen base.
        name: the name given to ``load``.
        policies: policies in training, by name.
        trainer: trainer of all policies; None before the first policy.
        specs: parameter specs of the base, which determine the shapes of adapters.
        seed: seeds of adapters and samples derive from it.
    """

    def __init__(self, base: Base, seed: int = 0):
        self.base, self.name, self.seed = base, base.name, seed
        self.policies: dict[str, Policy] = {}
        self.trainer: Trainer | None = None
        decode = base.tokenizer.decode if base.tokenizer is not None else None
        self.engine = Engine(base, decode, keep_routes=base.cfg.routed)
        self.specs = transformer.abstract(base.cfg)
        self._calls = itertools.count()
        self._closed = False

    def __repr__(self) -> str:
        if self._closed:
            return f"Model({self.name!r}, closed)"
        policies = ", ".join(self.policies) or "none"
        return f"Model({self.name!r}, {self.base.nbytes / 1e6:.0f} MB, policies: {policies})"

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the base, the policies and the sampler's cache. Unsaved training is lost."""
        if not self._closed:
            self._closed = True
            self.trainer = None
            self.policies.clear()
            del self.base, self.engine

    def need_open(self) -> None:
        """Raises ``UserError`` if the model is closed."""
        if self._closed:
            raise UserError(f"the model {self.name!r} was closed: load it again with mint.load")

    def policy(
        self,
        name: str,
        rank: int | None = None,
        *,
        start: Stored | str | Path | None = None,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        kind: str | None = None,
        learning_rate: float | None = None,
        optimizer: OptimizerConfig | None = None,
        loss: Loss = "cross_entropy",
        reference: Stored | str | Path | None = None,
        seed: int | None = None,
        dropout: float = 0.0,
    ) -> Policy:
        """Adds a new policy to training.

        Args:
            name: name under which its revisions are saved.
            rank: adapter rank, 8 by default.
            start: initial adapter: a revision (``store["adder@latest"]``) or a PEFT directory,
                which sets rank, alpha and targets too. None starts from an adapter whose delta is
                zero.
            alpha: the adapter's scale is ``alpha / rank``; twice the rank by default.
            targets: projections to adapt, such as ``["q", "v"]``; all linear ones by default.
            kind: ``lora``, the default; ``bias``: a vector added to the outputs of each target,
                without rank and alpha; ``basis``: LoRA whose B is the same for all policies.
            learning_rate: AdamW's learning rate, 1e-4 by default.
            optimizer: an optimizer with its schedule, in place of ``learning_rate``.
            loss: a name, as ``kind`` of ``mint.LossConfig``; a ``LossConfig``; or a function of
                ``mint.Tokens``, as in ``register_loss``.
            reference: reference adapter of KL terms and DPO: a revision or a PEFT directory. By
                default it is the policy's own start.
            seed: seed of the adapter's initial values and of its dropout, combined with the name;
                the model's by default.
            dropout: probability that an input of the adapter is dropped in training.

        Raises:
            UserError: the name is taken, the base has no such target, or a value has the wrong
                type.
        """
        self.need_open()
        parse_policy(name)
        if name in self.policies:
            raise UserError(
                f"policy {name!r} is in training already: choose another name, or remove it first"
            )
        loss_config = inputs.as_loss(loss)
        if optimizer is not None and learning_rate is not None:
            raise UserError(
                "learning_rate and optimizer are both given: set learning_rate in the"
                " OptimizerConfig"
            )
        if optimizer is None:
            rate = OptimizerConfig().learning_rate if learning_rate is None else learning_rate
            optimizer = OptimizerConfig(rate)
        loaded = None if start is None else self._adapter(start, "start")
        compared = None if reference is None else self._adapter(reference, "reference")
        given: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": targets, "kind": kind}
        given = {field: value for field, value in given.items() if value is not None}
        if loaded is not None:
            adapter = loaded.config
            if given:
                raise UserError(
                    f"{next(iter(given))} and start are both given; start has {adapter}: leave"
                    f" {next(iter(given))} out"
                )
        else:
            usual: dict[str, Any] = {"targets": (ALL_LINEAR,)}
            usual |= {} if kind == BIAS else {"rank": 8}
            adapter = AdapterConfig(**usual | given)
            if alpha is None and adapter.rank:
                adapter = dataclasses.replace(adapter, alpha=2.0 * adapter.rank)
        check_alpha(adapter.alpha)
        if compared is not None:
            if not loss_config.needs_reference:
                raise UserError(
                    f"reference is given, but {loss_config} compares with nothing: leave it out, or"
                    " set kl_kind='k3' and kl"
                )
            named = reference.name if isinstance(reference, Stored) else str(reference)
            loss_config = dataclasses.replace(loss_config, reference=named)
        elif loss_config.needs_reference and loss_config.reference not in ("start", "base"):
            raise UserError(
                f"loss.reference is {loss_config.reference!r}; give the policy its adapter too:"
                " reference=store['policy@3']"
            )
        own_seed = policy_seed(inputs.as_seed(self.seed if seed is None else seed), name)

        def begin(trainer: Trainer) -> None:
            if loaded is not None:
                trainer.load_adapter(name, loaded.adapter)
            if compared is not None:
                trainer.refer(name, compared.config, compared.adapter)

        how = adapter, optimizer, loss_config, own_seed
        return self._join(PolicyConfig(name, *how, dropout=dropout), begin)

    def _join(self, config: PolicyConfig, begin: Callable[[Trainer], None]) -> Policy:
        """Adds a policy to training, and removes it again where ``begin`` fails."""
        if self.trainer is None:
            self.trainer = Trainer(self.base)
        self.trainer.add(config)
        policy = self.policies[config.name] = Policy(self, config.name)
        try:
            begin(self.trainer)
        except BaseException:
            self.remove(policy)
            raise
        return policy

    def need_trainer(self) -> Trainer:
        """Returns the trainer; raises ``UserError`` if no policy is in training."""
        self.need_open()
        if self.trainer is None:
            raise UserError("no policy is in training: make one with policy(name)")
        return self.trainer

    def resume(self, file: str | Path, *, loss: Loss | None = None) -> Policy:
        """Adds a policy with the state that ``Policy.save_state`` wrote. If it trains alone, its
        next step has the same bits as the next step of the saved policy.

        Args:
            file: the state file.
            loss: replaces the policy's loss, if that was a function not registered here.

        Raises:
            UserError: the file does not exist, its policy trained over another base, or the name is
                taken.
        """
        self.need_open()
        own = None if loss is None else inputs.as_loss(loss)
        config, draws, restore = saved.read(file, self.base.fingerprint, self.name, own)
        policy = self._join(config, restore)
        policy.draws = draws
        return policy

    def remove(self, policy: str | Policy) -> None:
        """Removes a policy from training and frees its memory. Unsaved training is lost; the name
        becomes free.
        """
        trainer = self.need_trainer() if isinstance(policy, str) else policy.trainer
        [name] = inputs.by_policy({policy: None}, self.policies)
        trainer.leave(name)
        del self.policies[name]

    def train_step(self, rows: Mapping[str | Policy, Rows]) -> dict[str, dict[str, float]]:
        """Runs one update of several policies in one pass: ``{"a": rows, "b": rows}``.

        Returns:
            the metrics of ``Policy.train_step``, by policy.

        Raises:
            UserError: a policy is not in training, or its loss cannot learn from its rows; no
                policy is updated then.
        """
        return self.need_trainer().update(self._groups(rows))

    def forward_backward(self, rows: Mapping[str | Policy, Rows]) -> dict[str, dict[str, float]]:
        """Adds the gradients of several policies' rows to their gradient sums."""
        totals = self.need_trainer().forward_backward(self._groups(rows))
        return {name: summarise(each) for name, each in totals.items()}

    def optim_step(self, policies: Sequence[str | Policy]) -> dict[str, dict[str, float]]:
        """Applies the gradient sums of these policies with their optimizers and clears them."""
        given = dict.fromkeys(inputs.one_by_one(policies, "policies"))
        return self.need_trainer().optim_step(list(inputs.by_policy(given, self.policies)))

    def gradients(self, rows: Mapping[str | Policy, Rows]) -> dict[str, Any]:
        """Returns the gradients of several policies' rows, from one pass."""
        return self.need_trainer().gradients(self._groups(rows))

    def _groups(self, rows: Any) -> dict[str, Any]:
        trainer = self.need_trainer()
        for policy in rows if isinstance(rows, Mapping) else ():
            if isinstance(policy, Policy):
                policy.trainer  # noqa: B018 - raises if the policy was removed
        by_name = inputs.by_policy(rows, self.policies)
        return {
            name: inputs.to_groups(self.base, name, trainer.policies[name].loss, each)
            for name, each in by_name.items()
        }

    def sample(self, prompt: Prompt, revision: Stored | None = None, **settings: Any) -> str:
        """Returns the text of one completion of the base or of a stored revision."""
        return self.completions([prompt], revision, **settings)[0][0].text or ""

    def completions(
        self,
        prompts: Sequence[Prompt],
        revision: Revisions = None,
        slots: int = 8,
        seed: int | None = None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """Returns ``n`` completions of each prompt, with tokens and log-probabilities.

        Args:
            prompts: each is text, a list of messages, or a list of token ids.
            revision: one for all prompts, or a list with one for each; None is the base.
            slots: device slots of each rank bucket; with more adapters than slots they take turns.
            seed: the same seed gives the same tokens. None draws new tokens in each call, derived
                from the model's ``seed`` and the number of the call.
            settings: fields of ``mint.Request`` such as ``n``, ``max_tokens``, ``temperature``
                (0, greedy, by default), ``top_p`` and ``stop``.

        Raises:
            UserError: a setting is unknown, the number of revisions is not that of the prompts, or
                revisions come from several catalogs.
        """
        self.need_open()
        encoded = inputs.encoded(self.base, prompts)
        seeds = inputs.seeds(seed, [self.seed, next(self._calls)], len(encoded))
        requests = self.requests(encoded, settings, seeds)
        is_list = isinstance(revision, Sequence) and not isinstance(revision, str)
        each: list[Any] = list(revision) if is_list else [revision] * len(encoded)  # type: ignore[arg-type]
        for one in each:
            if one is not None and not isinstance(one, Stored):
                raise UserError(
                    f"revision is {one!r:.80}; expected store['policy@latest'], where store is"
                    " mint.open(...)"
                )
        if len(each) != len(encoded):
            raise UserError(
                f"{len(each)} revisions are given for {len(encoded)} prompts: give one for all, or"
                " one for each"
            )
        stores = {id(one.store): one.store for one in each if one is not None}
        if len(stores) > 1:
            raise UserError(
                f"the revisions come from {len(stores)} catalogs: sample one catalog in a call"
            )
        names = [None if one is None else one.digest for one in each]
        source = AdapterSource(self.base, next(iter(stores.values()), None))
        with Pool(self.base, source, names, slots) as pool:

            def sampled(turn: AdapterBatch) -> list[list[Completion]]:
                own = [(requests[i], names[i]) for i in turn.rows]
                rows = [(one, turn.slot(name), {"revision": name}) for one, name in own]
                return self.generate(rows, turn.stacks)

            return pool.run(sampled)

    def evaluate(
        self,
        task: Task,
        prompts: Sequence[Prompt] | None = None,
        revision: Stored | None = None,
        examples: int | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Evaluation:
        """Returns the mean reward of the base or of a stored revision on held-out prompts; see
        ``Policy.evaluate``.
        """
        who = "the base" if revision is None else str(revision)
        sample = functools.partial(self.completions, revision=revision, seed=seed, **settings)
        return evaluate(who, task, prompts, examples, sample)

    def export(self, revision: Stored, directory: str | Path) -> Path:
        """Writes a revision as a PEFT directory and returns its path. The directory must be empty
        or not exist.

        Raises:
            UserError: the directory is not empty, or the revision belongs to another base.
        """
        self.need_open()
        loaded = self._adapter(revision, "revision")
        return self.write_peft(loaded.adapter, loaded.config, directory)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of text, without the tokenizer's opening token."""
        self.need_open()
        if not isinstance(text, str):
            raise UserError(f"text is {text!r:.80}; expected text")
        return self.base.need_tokenizer().encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        self.need_open()
        [ids] = inputs.encoded(self.base, [tokens]) if not isinstance(tokens, str) else [()]
        if not ids:
            raise UserError(f"tokens is {tokens!r:.80}; expected a list of token ids")
        return self.base.need_tokenizer().decode(list(ids))

    def requests(
        self, prompts: Sequence[tuple[int, ...]], settings: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Request]:
        """Returns one engine request for each prompt."""
        tokenizer = self.base.tokenizer
        given: dict[str, Any] = {"stop_ids": () if tokenizer is None else tokenizer.eos_ids}
        given |= inputs.sampling(settings)
        return [Request(p, seed=s, **given) for p, s in zip(prompts, seeds, strict=True)]

    def generate(
        self, rows: Sequence[tuple[Request, Slot | None, dict[str, Any]]], stacks: Stacks
    ) -> list[list[Completion]]:
        """Samples requests, each with its adapter's slot and the fields that name its weights."""
        placed = [dataclasses.replace(r, adapter=slot, **names) for r, slot, names in rows]
        return [
            [dataclasses.replace(c, request=request) for c in some]
            for (request, _, _), some in zip(rows, self.engine.generate(placed, stacks))
        ]

    def write_peft(self, adapter: Any, config: AdapterConfig, directory: str | Path) -> Path:
        """Writes an adapter of this base as a PEFT directory."""
        if not isinstance(directory, str | Path) or not str(directory):
            raise UserError(f"directory is {directory!r}; expected the path of a new directory")
        directory = Path(directory).expanduser()
        names, _ = peft_tables(self.base.cfg)
        about = public_name(self.base.name), hf.is_moe_type(self.base.cfg)
        try:
            peft.write_peft(directory, adapter, config, names, *about)
        except OSError as error:
            raise UserError(
                f"directory {directory} cannot be written ({error.strerror or error}): choose"
                " another place"
            ) from None
        return directory

    def _adapter(self, place: Stored | str | Path, what: str) -> LoadedAdapter:
        if isinstance(place, Stored):
            return adapters.read_adapter(place.digest, self.base, place.store)
        if not isinstance(place, str | Path):
            raise UserError(
                f"{what} is {place!r:.80}; expected store['policy@latest'], where store is"
                " mint.open(...), or a PEFT directory"
            )
        path = Path(place).expanduser()
        if not peft.is_peft(path):
            raise UserError(
                f"{what} is {str(place)!r}, which is not a PEFT directory ({peft.CONFIG}); for a"
                " revision give store['policy@latest']"
            )
        return adapters.read_adapter(path.absolute(), self.base)

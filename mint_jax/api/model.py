"""A resident base and the policies that train over it, as a notebook holds them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mint_jax.api import inputs, saved, store
from mint_jax.api.evaluation import Evaluation, Task, evaluate
from mint_jax.api.inputs import Loss, Prompt, Rows
from mint_jax.api.store import Store, Stored
from mint_jax.catalog.packed import Schema, pack
from mint_jax.catalog.records.names import parse_policy
from mint_jax.catalog.records.revisions import Revision
from mint_jax.errors import UserError
from mint_jax.jobs import adapters, common
from mint_jax.jobs.adapters import AdapterSource, Loaded
from mint_jax.lora import peft
from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig, Slot, Stacks, spelled_out
from mint_jax.models import hf, transformer
from mint_jax.models.base import Base, public_name
from mint_jax.models.outline import peft_tables
from mint_jax.residency.pool import Pool, Turn
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train.config import OptimizerConfig, PolicyConfig
from mint_jax.train.trainer import Trainer, summarise

Revisions = Stored | Sequence[Stored | None] | None


class Policy:
    """A policy in training over a ``Model``; others train beside it. ``Model.policy`` makes it.

    Attributes:
        model: the base that it trains over, and its other policies.
        name: by which revisions are saved.
        draws: calls of ``completions`` without a seed so far; the next one's seed follows from it.
    """

    def __init__(self, model: "Model", name: str):
        self.model, self.name, self.draws = model, name, 0

    def __repr__(self) -> str:
        if self.model.policies.get(self.name) is not self:
            return f"Policy({self.name!r}, not in training)"
        config = self.config
        return (
            f"Policy({self.name!r}, rank {config.adapter.rank}, {config.loss.kind}, {self.steps}"
            " steps)"
        )

    @property
    def trainer(self) -> Trainer:
        """The training state of all policies of the model.

        Raises:
            UserError: the policy was removed, or the model closed.
        """
        trainer = self.model.need_trainer()
        if self.model.policies.get(self.name) is not self:
            again = (
                ", and another policy has its name now" if self.name in self.model.policies else ""
            )
            raise UserError(
                f"policy {self.name!r} was removed{again}: make it again with policy(...) or"
                " resume(...)"
            )
        return trainer

    @property
    def config(self) -> PolicyConfig:
        """Its adapter's shape, optimizer, loss and seed."""
        return self.trainer.policies[self.name]

    @property
    def steps(self) -> int:
        """Updates behind the policy."""
        slot = self.trainer.slots[self.name]
        return int(self.trainer.state[slot.bucket].steps[slot.index])

    def train_step(self, rows: Rows) -> dict[str, float]:
        """One update: ``forward_backward`` and ``optim_step``. Its metrics are means over target
        tokens.

        Args:
            rows: dicts with ``prompt`` and ``completion``, ``text`` or ``messages``, or for loss
                ``dpo`` ``prompt``, ``chosen`` and ``rejected``: the loss is then a mean over target
                tokens, or over pairs. Or groups with weights of their own, as ``mint.groups`` makes
                of completions and rewards.

        Raises:
            UserError: rows that the policy's loss cannot learn from.
        """
        self.trainer  # noqa: B018 - refuses a policy that was removed
        return self.model.train_step({self.name: rows})[self.name]

    def forward_backward(self, rows: Rows) -> dict[str, float]:
        """Adds the gradient of these rows to the policy's sum; returns their metrics. Arguments and
        errors as in ``train_step``.
        """
        self.trainer  # noqa: B018
        return self.model.forward_backward({self.name: rows})[self.name]

    def optim_step(self) -> dict[str, float]:
        """Applies the gradient sum by AdamW, and clears it."""
        return self.trainer.optim_step([self.name])[self.name]

    def gradients(self, rows: Rows | None = None) -> Any:
        """Gradients of the policy's loss by its adapter, as a tree of NumPy arrays like
        ``adapter``.

        Args:
            rows: the gradient of these alone; nothing changes. Without them the sum that has
                accumulated since the last update.
        """
        trainer = self.trainer
        return (
            trainer.gradient(self.name)
            if rows is None
            else self.model.gradients({self.name: rows})[self.name]
        )

    def adapter(self) -> Any:
        """The adapter as it is now, a tree of NumPy arrays: ``[L, R, D]`` for ``a`` and ``[L, R,
        F]`` for ``b`` of each projection.
        """
        return self.trainer.adapter(self.name)

    def sample(self, prompt: Prompt, **settings: Any) -> str:
        """The text of one completion of the policy as it is now, greedy unless ``temperature`` says
        otherwise.
        """
        return self.completions([prompt], **settings)[0][0].text or ""

    def completions(
        self, prompts: Sequence[Prompt], seed: int | None = None, **settings: Any
    ) -> list[list[Completion]]:
        """``n`` completions of each prompt, with tokens and log-probabilities.

        Args:
            prompts: each is text, a list of messages, or a list of token ids.
            seed: the same seed gives the same tokens. Without one each call draws others, which
                follow from the model's ``seed``, the policy's name and ``draws``.
            settings: of sampling, such as ``n``, ``max_tokens``, ``temperature`` (0, greedy, by
                default), ``top_p``, ``stop``; all are fields of ``mint.Request``.

        Raises:
            UserError: an unknown setting, a value of another type, or ``n`` greedy completions.
        """
        trainer, model = self.trainer, self.model
        encoded = inputs.encoded(model.base, prompts)
        fresh = [trainer.policies[self.name].seed & 0xFFFFFFFF, model.seed, self.draws]
        requests = model.requests(
            encoded, settings, inputs.seeds(model.own_seed(seed), fresh, len(encoded))
        )
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
        """Mean reward on held-out prompts, with its standard error.

        Args:
            task: an environment or the name of one (``"digit_sum"``), which brings its held-out
                prompts; or a reward, a function of (completion's text, prompt) that returns a
                number.
            prompts: in place of the environment's.
            examples: of the held-out prompts the first so many.
            seed: 0 by default, so that two evaluations draw alike.
            settings: of sampling, as in ``completions``.

        Raises:
            UserError: a reward function without prompts, or one that raises or returns what is no
                finite number.
        """
        return evaluate(
            self.name,
            task,
            prompts,
            examples,
            lambda some: self.completions(some, seed=seed, **settings),
        )

    def save(self, catalog: Store | str | Path, why: str = "") -> Revision:
        """Saves the policy as it is now as a revision, which ``NAME@latest`` then names.

        Args:
            catalog: an open one, or the folder of one, which is made where there is none.
        """
        trainer = self.trainer
        if not isinstance(catalog, Store):
            with store.open(catalog, create=True) as opened:
                return self.save(opened, why)
        config = spelled_out(trainer.policies[self.name].adapter, trainer.specs)
        data = pack(trainer.adapter(self.name), Schema(self.model.base.fingerprint, config))
        return catalog.catalog.export(self.name, data, self.steps, create=True, why=why)

    def export(self, directory: str | Path) -> Path:
        """Writes the policy as it is now as a PEFT directory, which must not exist or be empty;
        returns it.
        """
        return self.model.write_peft(
            self.trainer.adapter(self.name), self.config.adapter, directory
        )

    def save_state(self, file: str | Path) -> Path:
        """Saves all that training goes on from: adapter, moments, accumulated gradients, counters
        and seeds. ``Model.resume`` reads it.

        Args:
            file: is replaced where it exists.
        """
        return saved.save(file, self.trainer, self.name, self.model.base.fingerprint, self.draws)

    def remove(self) -> None:
        """Takes the policy out of training; see ``Model.remove``."""
        self.trainer  # noqa: B018
        self.model.remove(self)


class Model:
    """A resident base and the policies that train over it; a context manager, which closes it.

    Attributes:
        base: the frozen base itself.
        name: what ``load`` was given.
        policies: the policies in training, by name.
        trainer: their training state; None before the first policy.
        engine: samples.
        specs: shapes of the base's parameters, from which those of adapters follow.
        seed: adapters and samples derive from it.
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
        return (
            f"Model({self.name!r}, {self.base.nbytes / 1e6:.0f} MB, policies:"
            f" {', '.join(self.policies) or 'none'})"
        )

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the base, the policies and the sampler's cache; training that was not saved is
        lost.
        """
        if not self._closed:
            self._closed = True
            self.trainer = None
            self.policies.clear()
            del self.base, self.engine

    def need_open(self) -> None:
        """Raises ``UserError`` once the model is closed."""
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
        learning_rate: float | None = None,
        optimizer: OptimizerConfig | None = None,
        loss: Loss = "cross_entropy",
        reference: Stored | str | Path | None = None,
        seed: int | None = None,
    ) -> Policy:
        """Takes a new policy into training.

        Args:
            rank: of its adapter, 8 by default.
            start: where it begins: a revision (``store["adder@latest"]``) or a PEFT directory,
                whose rank, alpha and targets it then has. Without one its adapter changes nothing
                yet.
            alpha: the adapter's scale is ``alpha / rank``; twice the rank by default.
            targets: projections that are adapted, such as ``["q", "v"]``; all linear ones by
                default.
            learning_rate: of AdamW, 1e-4 by default; or
            optimizer: all of AdamW's numbers and its schedule.
            loss: a name in ``train.losses.KINDS``, a ``LossConfig``, or a function of
                ``mint.Tokens``, as ``register_loss`` takes.
            reference: what KL terms and DPO compare with: a revision or a PEFT directory; by
                default where the policy began.
            seed: of its adapter; by default the model's. The name enters too.

        Raises:
            UserError: the name is taken, the base has no such target, or a value is of another
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
            optimizer = (
                OptimizerConfig() if learning_rate is None else OptimizerConfig(learning_rate)
            )
        loaded = None if start is None else self._adapter(start, "start")
        compared = None if reference is None else self._adapter(reference, "reference")
        if loaded is not None:
            if given := [
                n
                for n, value in (("rank", rank), ("alpha", alpha), ("targets", targets))
                if value is not None
            ]:
                raise UserError(
                    f"{given[0]} is given beside start, whose adapter is {loaded.config}: leave"
                    f" {given[0]} out"
                )
            adapter = loaded.config
        else:
            rank = 8 if rank is None else rank
            adapter = AdapterConfig(rank, targets=(ALL_LINEAR,) if targets is None else targets)  # type: ignore[arg-type]
            adapter.bucket  # noqa: B018 - refuses a rank out of range
            adapter = dataclasses.replace(adapter, alpha=2.0 * rank if alpha is None else alpha)
        if not 0 < adapter.alpha < float("inf"):
            raise UserError(
                f"alpha is {adapter.alpha}; expected a finite number above 0: the adapter's scale"
                " is alpha / rank"
            )
        if compared is not None and not loss_config.needs_reference:
            raise UserError(
                f"reference is given, but {loss_config} compares with nothing: leave it out, or set"
                " kl_kind='k3' and kl"
            )
        if (
            compared is None
            and loss_config.needs_reference
            and loss_config.reference not in ("start", "base")
        ):
            raise UserError(
                f"loss.reference is {loss_config.reference!r}; give the policy its adapter too:"
                " reference=store['policy@3']"
            )
        if compared is not None:
            loss_config = dataclasses.replace(
                loss_config,
                reference=reference.name if isinstance(reference, Stored) else str(reference),
            )
        own_seed = common.policy_seed(self.seed if seed is None else inputs.as_seed(seed), name)
        config = PolicyConfig(name, adapter, optimizer, loss_config, own_seed)
        policy = self.join(config)
        try:
            if loaded is not None:
                self.need_trainer().load_adapter(name, loaded.adapter)
            if compared is not None:
                self.need_trainer().refer(name, compared.config, compared.adapter)
        except BaseException:
            self.remove(name)
            raise
        return policy

    def join(self, config: PolicyConfig) -> Policy:
        """Takes a policy into training by its config, as jobs make them."""
        self.need_open()
        if self.trainer is None:
            self.trainer = Trainer(self.base, [config])
        else:
            self.trainer.join(config)
        self.policies[config.name] = Policy(self, config.name)
        return self.policies[config.name]

    def need_trainer(self) -> Trainer:
        """The training state.

        Raises:
            UserError: no policy was made yet.
        """
        self.need_open()
        if self.trainer is None:
            raise UserError("no policy is in training: make one with policy(name)")
        return self.trainer

    def resume(self, file: str | Path, *, loss: Loss | None = None) -> Policy:
        """Takes a policy back into training with the state that ``Policy.save_state`` wrote: its
        next step is the one that the saved policy would have taken, bit for bit if it trains alone.

        Args:
            loss: where the policy's own was a function that is not registered here.

        Raises:
            UserError: no such file, a state of another base, or the name is taken.
        """
        self.need_open()
        state = saved.read(
            file, self.base.fingerprint, self.name, None if loss is None else inputs.as_loss(loss)
        )
        policy = self.join(state.config)
        try:
            state.restore(self.need_trainer())
        except BaseException:
            self.remove(policy)
            raise
        policy.draws = state.draws
        return policy

    def remove(self, policy: str | Policy) -> None:
        """Takes a policy out of training and frees its memory; what was not saved is lost. The name
        may be used again.

        Raises:
            UserError: no such policy.
        """
        self.need_open()
        [name] = inputs.by_policy({policy: None}, self.policies)
        self.need_trainer().leave(name)
        del self.policies[name]

    def train_step(self, rows: Mapping[str | Policy, Rows]) -> dict[str, dict[str, float]]:
        """One update of several policies, in one pass through the base: ``{"a": rows, "b": rows}``.

        Returns:
            by policy what ``Policy.train_step`` returns.

        Raises:
            UserError: no such policy, or rows that its loss cannot learn from; no policy is updated
                then.
        """
        trainer, groups = self.need_trainer(), self._groups(rows)
        return trainer.update(groups)

    def forward_backward(self, rows: Mapping[str | Policy, Rows]) -> dict[str, dict[str, float]]:
        """Adds the gradients of several policies' rows to their sums; see
        ``Policy.forward_backward``.
        """
        trainer, groups = self.need_trainer(), self._groups(rows)
        return {
            name: summarise(totals) for name, totals in trainer.forward_backward(groups).items()
        }

    def optim_step(self, policies: Sequence[str | Policy]) -> dict[str, dict[str, float]]:
        """Applies the gradient sums of these policies, and clears them."""
        names = inputs.by_policy(
            dict.fromkeys(inputs.one_by_one(policies, "policies")), self.policies
        )
        return self.need_trainer().optim_step(list(names))

    def gradients(self, rows: Mapping[str | Policy, Rows]) -> dict[str, Any]:
        """The gradients of several policies' rows, from one pass; see ``Policy.gradients``."""
        trainer, groups = self.need_trainer(), self._groups(rows)
        return trainer.gradients(groups)[0]

    def _groups(self, rows: Any) -> dict[str, Any]:
        trainer = self.need_trainer()
        mine = inputs.by_policy(rows, self.policies)
        return {
            name: inputs.to_groups(self.base, name, trainer.policies[name].loss, each)
            for name, each in mine.items()
        }

    def sample(self, prompt: Prompt, revision: Stored | None = None, **settings: Any) -> str:
        """The text of one completion of the base, or of a stored revision over it; settings as
        ``completions`` takes them.
        """
        return self.completions([prompt], revision, **settings)[0][0].text or ""

    def completions(
        self,
        prompts: Sequence[Prompt],
        revision: Revisions = None,
        slots: int = 8,
        seed: int | None = None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """``n`` completions of each prompt, with tokens and log-probabilities.

        Args:
            prompts: each is text, a list of messages, or a list of token ids.
            revision: one for all prompts, or one for each, sampled together; None is the base.
            slots: adapters of a rank bucket that are on the device at once; more take turns.
            seed: the same seed gives the same tokens. Without one each call draws others, which
                follow from the model's ``seed`` and the number of the call.
            settings: of sampling, such as ``n``, ``max_tokens``, ``temperature`` (0, greedy, by
                default), ``top_p``, ``stop``; all are fields of ``mint.Request``.

        Raises:
            UserError: an unknown setting, not one revision for each prompt, or revisions of several
                catalogs.
        """
        self.need_open()
        encoded = inputs.encoded(self.base, prompts)
        requests = self.requests(
            encoded,
            settings,
            inputs.seeds(self.own_seed(seed), [self.seed, next(self._calls)], len(encoded)),
        )
        each = (
            list(revision)
            if isinstance(revision, Sequence) and not isinstance(revision, str)
            else [revision] * len(encoded)
        )
        if wrong := [one for one in each if one is not None and not isinstance(one, Stored)]:
            raise UserError(
                f"revision is {wrong[0]!r:.80}; expected what store['policy@latest'] gives, store"
                " being a mint.open(...)"
            )
        if len(each) != len(encoded):
            raise UserError(
                f"{len(each)} revisions are given for {len(encoded)} prompts: give one for all, or"
                " one for each"
            )
        stores = {id(one.store): one.store for one in each if one is not None}  # type: ignore[union-attr]
        if len(stores) > 1:
            raise UserError(
                f"the revisions are of {len(stores)} catalogs: sample those of each by themselves"
            )
        names = [None if one is None else one.digest for one in each]  # type: ignore[union-attr]
        with Pool(
            self.base, AdapterSource(self.base, next(iter(stores.values()), None)), names, slots
        ) as pool:

            def sampled(turn: Turn) -> list[list[Completion]]:
                rows = [
                    (requests[i], turn.slot(names[i]), {"revision": names[i]}) for i in turn.rows
                ]
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
        """Mean reward of the base, or of a stored revision, on held-out prompts; see
        ``Policy.evaluate``.
        """
        who = "the base" if revision is None else str(revision)
        return evaluate(
            who,
            task,
            prompts,
            examples,
            lambda some: self.completions(some, revision, seed=seed, **settings),
        )

    def export(self, revision: Stored, directory: str | Path) -> Path:
        """Writes a revision as a PEFT directory, which must not exist or be empty; returns it.

        Raises:
            UserError: the directory is not empty, or the revision is of another base.
        """
        self.need_open()
        loaded = self._adapter(revision, "revision")
        return self.write_peft(loaded.adapter, loaded.config, directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of text that continues other text: without the tokenizer's opening token."""
        self.need_open()
        if not isinstance(text, str):
            raise UserError(f"text is {text!r:.80}; expected text")
        return self.base.need_tokenizer().encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        self.need_open()
        [ids] = inputs.encoded(self.base, [tokens]) if not isinstance(tokens, str) else [()]
        if not ids:
            raise UserError(f"tokens is {tokens!r:.80}; expected a list of token ids")
        return self.base.need_tokenizer().decode(list(ids))

    def own_seed(self, seed: int | None) -> int | None:
        """A seed that a caller gave, checked."""
        return None if seed is None else inputs.as_seed(seed)

    def requests(
        self, prompts: Sequence[tuple[int, ...]], settings: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Request]:
        """What is asked of the engine for each prompt."""
        tokenizer = self.base.tokenizer
        given: dict[str, Any] = {
            "stop_ids": () if tokenizer is None else tokenizer.eos_ids
        } | inputs.sampling(settings)
        return [
            Request(prompt, seed=seed, **given) for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def generate(
        self, rows: Sequence[tuple[Request, Slot | None, dict[str, Any]]], stacks: Stacks
    ) -> list[list[Completion]]:
        """Samples requests, each with its adapter's slot and the fields that name its weights."""
        asked = [
            dataclasses.replace(request, adapter=slot, **names) for request, slot, names in rows
        ]
        found = self.engine.generate(asked, stacks)
        return [
            [dataclasses.replace(c, request=request) for c in some]
            for (request, _, _), some in zip(rows, found)
        ]

    def write_peft(self, adapter: Any, config: AdapterConfig, directory: str | Path) -> Path:
        """Writes an adapter of this base as a PEFT directory."""
        if not isinstance(directory, str | Path) or not str(directory):
            raise UserError(f"directory is {directory!r}; expected the path of a new directory")
        directory = Path(directory).expanduser()
        names, _ = peft_tables(self.base.cfg)
        try:
            peft.write_peft(
                directory,
                adapter,
                config,
                names,
                public_name(self.base.name),
                hf.is_moe_type(self.base.cfg),
            )
        except OSError as error:
            raise UserError(
                f"directory {directory} cannot be written ({error.strerror or error}): choose"
                " another place"
            ) from None
        return directory

    def _adapter(self, place: Stored | str | Path, what: str) -> Loaded:
        if isinstance(place, Stored):
            return adapters.read_adapter(place.digest, self.base, place.store)
        if not isinstance(place, str | Path):
            raise UserError(
                f"{what} is {place!r:.80}; expected store['policy@latest'], store being a"
                " mint.open(...), or a PEFT directory"
            )
        path = Path(place).expanduser()
        if not peft.is_peft(path):
            raise UserError(
                f"{what} is {str(place)!r}, which is no PEFT directory ({peft.CONFIG}); of a"
                " revision give store['policy@latest']"
            )
        return adapters.read_adapter(path.absolute(), self.base)

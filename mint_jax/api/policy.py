"""A policy in training, as a notebook holds it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mint_jax.api import inputs, saved, store
from mint_jax.api.evaluation import Evaluation, Task, evaluate
from mint_jax.api.inputs import Prompt, Rows
from mint_jax.api.store import Store
from mint_jax.catalog.packed import Schema, pack
from mint_jax.catalog.records.revisions import Revision
from mint_jax.errors import UserError
from mint_jax.lora.tree import spelled_out
from mint_jax.rollout.request import Completion
from mint_jax.train.config import PolicyConfig
from mint_jax.train.trainer import Trainer

if TYPE_CHECKING:
    from mint_jax.api.model import Model


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
        return f"Policy({self.name!r}, rank {config.adapter.rank}, {config.loss.kind}, {self.steps} steps)"

    @property
    def trainer(self) -> Trainer:
        """The training state of all policies of the model.

        Raises:
            UserError: the policy was removed, or the model closed.
        """
        trainer = self.model.need_trainer()
        if self.model.policies.get(self.name) is not self:
            again = ", and another policy has its name now" if self.name in self.model.policies else ""
            raise UserError(f"policy {self.name!r} was removed{again}: make it again with policy(...) or resume(...)")
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
        """One update: ``forward_backward`` and ``optim_step``. Its metrics are means over target tokens.

        Args:
            rows: dicts with ``prompt`` and ``completion``, ``text`` or ``messages``, or for loss ``dpo`` ``prompt``, ``chosen`` and
                ``rejected``: the loss is then a mean over target tokens, or over pairs. Or groups with weights of their own, as
                ``mint.groups`` makes of completions and rewards.

        Raises:
            UserError: rows that the policy's loss cannot learn from.
        """
        self.trainer  # noqa: B018 - refuses a policy that was removed
        return self.model.train_step({self.name: rows})[self.name]

    def forward_backward(self, rows: Rows) -> dict[str, float]:
        """Adds the gradient of these rows to the policy's sum; returns their metrics. Arguments and errors as in ``train_step``."""
        self.trainer  # noqa: B018
        return self.model.forward_backward({self.name: rows})[self.name]

    def optim_step(self) -> dict[str, float]:
        """Applies the gradient sum by AdamW, and clears it."""
        return self.trainer.optim_step([self.name])[self.name]

    def gradients(self, rows: Rows | None = None) -> Any:
        """Gradients of the policy's loss by its adapter, as a tree of NumPy arrays like ``adapter``.

        Args:
            rows: the gradient of these alone; nothing changes. Without them the sum that has accumulated since the last update.
        """
        trainer = self.trainer
        return trainer.gradient(self.name) if rows is None else self.model.gradients({self.name: rows})[self.name]

    def adapter(self) -> Any:
        """The adapter as it is now, a tree of NumPy arrays: ``[L, R, D]`` for ``a`` and ``[L, R, F]`` for ``b`` of each projection."""
        return self.trainer.adapter(self.name)

    def sample(self, prompt: Prompt, **settings: Any) -> str:
        """The text of one completion of the policy as it is now, greedy unless ``temperature`` says otherwise."""
        return self.completions([prompt], **settings)[0][0].text or ""

    def completions(self, prompts: Sequence[Prompt], seed: int | None = None, **settings: Any) -> list[list[Completion]]:
        """``n`` completions of each prompt, with tokens and log-probabilities.

        Args:
            prompts: each is text, a list of messages, or a list of token ids.
            seed: the same seed gives the same tokens. Without one each call draws others, which follow from the model's ``seed``, the
                policy's name and ``draws``.
            settings: of sampling, such as ``n``, ``max_tokens``, ``temperature`` (0, greedy, by default), ``top_p``, ``stop``; all are
                fields of ``mint.Request``.

        Raises:
            UserError: an unknown setting, a value of another type, or ``n`` greedy completions.
        """
        trainer, model = self.trainer, self.model
        encoded = inputs.encoded(model.base, prompts)
        fresh = [trainer.policies[self.name].seed & 0xFFFFFFFF, model.seed, self.draws]
        requests = model.requests(encoded, settings, inputs.seeds(model.own_seed(seed), fresh, len(encoded)))
        self.draws += seed is None
        slot, names = trainer.slots[self.name], {"version": trainer.versions[self.name]}
        return model.generate([(request, slot, names) for request in requests], trainer.stacks)

    def evaluate(
        self, task: Task, prompts: Sequence[Prompt] | None = None, examples: int | None = None, seed: int = 0, **settings: Any
    ) -> Evaluation:
        """Mean reward on held-out prompts, with its standard error.

        Args:
            task: an environment or the name of one (``"digit_sum"``), which brings its held-out prompts; or a reward, a function of
                (completion's text, prompt) that returns a number.
            prompts: in place of the environment's.
            examples: of the held-out prompts the first so many.
            seed: 0 by default, so that two evaluations draw alike.
            settings: of sampling, as in ``completions``.

        Raises:
            UserError: a reward function without prompts, or one that raises or returns what is no finite number.
        """
        return evaluate(self.name, task, prompts, examples, lambda some: self.completions(some, seed=seed, **settings))

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
        """Writes the policy as it is now as a PEFT directory, which must not exist or be empty; returns it."""
        return self.model.write_peft(self.trainer.adapter(self.name), self.config.adapter, directory)

    def save_state(self, file: str | Path) -> Path:
        """Saves all that training goes on from: adapter, moments, accumulated gradients, counters and seeds. ``Model.resume`` reads it.

        Args:
            file: is replaced where it exists.
        """
        return saved.save(self, file)

    def remove(self) -> None:
        """Takes the policy out of training; see ``Model.remove``."""
        self.trainer  # noqa: B018
        self.model.remove(self)

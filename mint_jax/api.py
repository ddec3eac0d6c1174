"""A notebook's way in: a resident base, policies over it and a catalog, by the very objects that jobs use.

    import mint_jax as mint

    base = mint.load("smollm2-135m-instruct")
    policy = base.policy("adder", rank=8, learning_rate=1e-3)
    for _ in range(8):
        policy.train_step([{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "3 + 4 =", "completion": " 7"}])
    print(base.sample("3 + 5 ="), policy.sample("3 + 5 ="))
    with mint.open("runs/mine") as catalog:
        policy.save(catalog, why="first lesson")
        print(base.sample("3 + 5 =", catalog["adder@latest"]))

The first line of each docstring says what a thing is in the words of the jobs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from mint_jax import compiling, host, launch
from mint_jax import mesh as mesh_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.catalog.records.revisions import Revision
from mint_jax.errors import UserError, choice
from mint_jax.jobs import common, settings, sft, supervised
from mint_jax.jobs.adapters import AdapterSource
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig, Slot, Stacks, spelled_out
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.pool import Pool, Turn
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request
from mint_jax.train.batch import Group
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig
from mint_jax.train.trainer import Trainer, summarise

Prompt = str | list[dict[str, str]]  # text as it is, or messages through the chat template
Row = dict[str, Any]


def load(name: str, dtype: str = "float32", quantise: str = "", mesh: Mesh | None = None) -> "Model":
    """A base, resident on all devices of this process or on those of ``mesh``.

    Args:
        name: a directory, a packaged base or a hub's name.

    Raises:
        UserError: no such base, or one that cannot be read.
    """
    _prepare()
    return Model(base_lib.load(name, mesh or mesh_lib.make_mesh(), dtype, quantise=quantise))


def open(place: str | Path, payloads: str = "") -> "Store":
    """A catalog: a folder, made where there is none, or a database's URL with a place for the payloads."""
    return Store(JobCatalog(place, payloads, create=True))


def config(job: str, **values: Any) -> ConfigDict:
    """A job's config: every setting at its default but for those given, as a file's ``get_config`` returns it.

        mint.config("sft", base="smollm2-135m-instruct", steps=20,
                    policies={"adder": {"data": {"env": "digit_sum"}, "adapter": {"rank": 8}}})

    Raises:
        UserError: an unknown job or setting, or one that is missing; ``docs/settings.md`` has them all.
    """
    return settings.complete(ConfigDict({"job": job, **values}))


def read_config(name: str | Path, **changes: Any) -> ConfigDict:
    """A shipped config or one of yours, ``FILE`` or ``FILE:ARGUMENT``, as ``--config`` takes it, with settings changed.

        mint.read_config("configs/bench/handoff.py:ci", n=3)

    Raises:
        UserError: no such file, an argument that it refuses, an unknown setting, or a value of another type.
    """
    config, declared = launch.load(str(name))
    if declared is None and (unknown := [setting for setting in changes if setting not in config]):  # a bench's are those of its file
        raise choice("setting", unknown[0], list(config))
    try:
        config.update(changes)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from None
    return settings.complete(config)


def run(config: ConfigDict, workdir: str | Path) -> dict[str, Any]:
    """Runs a job as ``python -m mint_jax.launch`` does, in this process; returns its result, which ``WORKDIR/result.json`` keeps."""
    settings.complete(config)
    _prepare()
    return launch.run(config, Path(workdir))


@functools.cache
def _prepare() -> None:
    """Settings of the process, as ``launch`` makes them."""
    host.leave_out_absent_tpu()
    host.threads_for_simulated_devices()
    host.keep_freed_memory()
    host.run_in_the_calling_thread()
    host.use_compilation_cache(base_lib.cache_dir() / "compiled")
    compiling.announce()


class Model:
    """A resident base and the policies that train over it.

    Attributes:
        base: the frozen base itself.
        trainer: of the policies; None before the first.
        engine: samples.
        specs: shapes of the base's parameters, from which those of adapters follow.
    """

    def __init__(self, base: Base):
        self.base = base
        self.trainer: Trainer | None = None
        self.engine = Engine(base, base.tokenizer.decode if base.tokenizer is not None else None)
        self.specs = transformer.abstract(base.cfg)

    def policy(
        self,
        name: str,
        rank: int = 8,
        *,
        alpha: float | None = None,
        targets: tuple[str, ...] = (ALL_LINEAR,),
        learning_rate: float = 1e-4,
        optimizer: OptimizerConfig | None = None,
        loss: LossConfig = LossConfig("cross_entropy"),
        seed: int = 0,
    ) -> "Policy":
        """A new policy, whose adapter changes nothing yet.

        Args:
            alpha: the adapter's scale is ``alpha / rank``; twice the rank by default.
            optimizer: AdamW's numbers and schedule, in place of ``learning_rate`` and the defaults.

        Raises:
            UserError: the name is taken, or the base has no such target.
        """
        adapter = AdapterConfig(rank, 2.0 * rank if alpha is None else alpha, targets)
        config = PolicyConfig(name, adapter, optimizer or OptimizerConfig(learning_rate), loss, common.policy_seed(seed, name))
        if self.trainer is None:
            self.trainer = Trainer(self.base, [config])
        else:
            self.trainer.join(config)
        return Policy(self, self.trainer, name)

    def sample(self, prompt: Prompt, revision: "Stored | None" = None, **settings: Any) -> str:
        """One completion of the base, or of a stored revision over it; settings as ``rollout.request.Request`` names them."""
        return self.completions([prompt], revision, **settings)[0][0].text or ""

    def completions(
        self, prompts: Sequence[Prompt], revision: "Stored | Sequence[Stored | None] | None" = None, slots: int = 8, **settings: Any
    ) -> list[list[Completion]]:
        """``n`` completions of each prompt, with tokens and log-probabilities.

        Args:
            revision: one for all prompts, or one for each, sampled together; None is the base.
            slots: adapters of a rank bucket that are on the device at once; more take turns.

        Raises:
            UserError: not one revision for each prompt, or revisions of several catalogs.
        """
        each = list(revision) if isinstance(revision, Sequence) else [revision] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} revisions are given for {len(prompts)} prompts: give one for all, or one for each")
        stores = {id(one.store): one.store for one in each if one is not None}
        if len(stores) > 1:
            raise UserError(f"the revisions are of {len(stores)} catalogs: sample those of each by themselves")
        names = [None if one is None else one.digest for one in each]
        with Pool(self.base, AdapterSource(self.base, next(iter(stores.values()), None)), names, slots) as pool:

            def sampled(turn: Turn) -> list[list[Completion]]:
                mine = [names[i] for i in turn.rows]
                return self._generate([prompts[i] for i in turn.rows], [turn.slot(name) for name in mine], turn.stacks, settings, mine)

            return pool.run(sampled)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        slots: Sequence[Slot | None],
        stacks: Stacks,
        settings: dict[str, Any],
        revisions: Sequence[str | None],
    ) -> list[list[Completion]]:
        settings = {"stop_ids": self.base.need_tokenizer().eos_ids, "temperature": 0.0} | settings
        encoded = [tuple(common.encode(self.base, prompt)) for prompt in prompts]
        rows = [Request(p, slot, revision=one, **settings) for p, slot, one in zip(encoded, slots, revisions, strict=True)]
        return self.engine.generate(rows, stacks)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy in training over a ``Model``; others train beside it."""

    model: Model
    trainer: Trainer
    name: str

    def sample(self, prompt: Prompt, **settings: Any) -> str:
        """One completion of the policy as it is now, greedy unless ``temperature`` says otherwise."""
        return self.completions([prompt], **settings)[0][0].text or ""

    def completions(self, prompts: Sequence[Prompt], **settings: Any) -> list[list[Completion]]:
        """``n`` completions of each prompt, with tokens and log-probabilities."""
        slot, count = self.trainer.slots[self.name], len(prompts)
        settings = {"version": self.trainer.versions[self.name]} | settings
        return self.model._generate(prompts, [slot] * count, self.trainer.stacks, settings, [None] * count)

    def train_step(self, rows: Sequence[Row] | Sequence[Group]) -> dict[str, float]:
        """One update: ``forward_backward`` and ``optim_step``. Its metrics are means over target tokens."""
        totals = self.forward_backward(rows)
        return summarise(totals) | self.optim_step()

    def forward_backward(self, rows: Sequence[Row] | Sequence[Group]) -> dict[str, float]:
        """Adds the gradient of these rows to the policy's sum; metrics are sums over target tokens.

        Args:
            rows: of SFT (``{"prompt", "completion"}``, ``{"text"}`` or ``{"messages"}``), whose loss is a mean over target tokens; or
                groups with weights of their own, for any loss.

        Raises:
            UserError: a row without what is needed.
        """
        if not rows:
            raise UserError("there are no rows to train on: give at least one")
        groups = [row if isinstance(row, Group) else sft.to_group(self.model.base, row, f"row {n}", True) for n, row in enumerate(rows, 1)]
        if not isinstance(rows[0], Group):
            groups = supervised.weighted(groups)
        return self.trainer.forward_backward({self.name: groups})[self.name]

    def optim_step(self) -> dict[str, float]:
        """Applies the gradient sum, and clears it."""
        return self.trainer.optim_step([self.name])[self.name]

    @property
    def steps(self) -> int:
        """Updates behind the policy."""
        slot = self.trainer.slots[self.name]
        return int(self.trainer.state[slot.bucket].steps[slot.index])

    def save(self, catalog: "Store | str | Path", why: str = "") -> Revision:
        """Makes the policy, as it is now, a revision, which ``NAME@latest`` then names."""
        if not isinstance(catalog, Store):
            with open(catalog) as store:
                return self.save(store, why)
        config = spelled_out(self.trainer.policies[self.name].adapter, self.trainer.specs)
        data = pack(self.trainer.adapter(self.name), Schema(self.model.base.fingerprint, config))
        return catalog.catalog.export(self.name, data, self.steps, create=True, why=why)


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a name stood for when it was looked up."""

    store: JobCatalog
    name: str
    digest: str


class Store:
    """A catalog by names: ``store["adder@latest"]``; ``store.catalog`` has everything else."""

    def __init__(self, place: JobCatalog):
        self._place = place

    @property
    def catalog(self) -> Catalog:
        return self._place.main

    def __getitem__(self, name: str) -> Stored:
        found = self.catalog.resolve(name)
        return Stored(self._place, f"{found.policy}@{found.number}", found.digest)

    def close(self) -> None:
        self._place.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

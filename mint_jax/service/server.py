"""One server: a resident base, its loop, and all that outlives the process, below one folder:

``server.db`` (requests, sessions, models, rows of checkpoints), ``training/`` (states of policies),
``checkpoints/``, ``catalog/`` (revisions, unless a catalog elsewhere is named), and, not needed
after a restart, ``spilled/`` (states of idle policies) and ``fetched/`` (adapters of a bucket). A
server of a fleet also serves the folders of engines that are gone (``Server.adopt``).
"""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from mint_jax import host
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.compiling import Programs
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.residency.admission import Admission
from mint_jax.residency.loads import QueueFull
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.residency import AdapterLease, Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout.embed import Embedder
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.programs import programs as sampling_programs
from mint_jax.rollout.request import Request
from mint_jax.rollout.stream import Stream
from mint_jax.service import checkpoints
from mint_jax.service.adapter_uris import AdapterUris
from mint_jax.service.answers import Answers
from mint_jax.service.book import Book
from mint_jax.service.canaries import Canaries
from mint_jax.service.checkpoints import Checkpoints
from mint_jax.service.costs import Costs, Payer
from mint_jax.service.curves import Curves
from mint_jax.service.durable import Durable
from mint_jax.service.fairness import Counters
from mint_jax.service.futures import Conflict
from mint_jax.service.provenance import Sequences
from mint_jax.service.quotas import OverQuota, Quotas
from mint_jax.service.routes import Routes
from mint_jax.service.server_db import FolderBusy, ServerDatabase
from mint_jax.service.tenancy import Tenancy
from mint_jax.service.tokens import Tokens
from mint_jax.service.training_calls import Call, ForwardBackward, Refused
from mint_jax.service.turns import Turns
from mint_jax.service.weights import Model, Weights
from mint_jax.train.config import BlockShape
from mint_jax.train.programs import programs as training_programs
from mint_jax.train.trainer import Trainer

# of every adapter: its delta is scaled by 32 / rank, whatever its rank (Schulman et al. 2025, "LoRA
# without regret")
ALPHA = 32.0
PIECE_BYTES = 4 << 20  # of an adapter written into a slot between two turns of the loop
MAINTENANCE_S = 5.0
TRIM_S = 60.0  # between two times at which freed memory goes back to the kernel
SAMPLERS = 1 << 16  # that are remembered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of device state, and intervals; see ``Trainer``, ``Engine`` and ``Durable``.

    Attributes:
        slots: number of policies in training by maximum rank.
        adapters: number of adapters to sample from by maximum rank.
        experts: form of all these adapters' factors of routed experts, see ``AdapterConfig``.
        max_rows, speculative_tokens: see ``Engine``.
        wait_cost: of ``auto``, see ``Routes``; None: there is no routing.
        host_bytes: host memory for idle policies' states, and again for cached adapters.
        session_s: seconds without contact after which a session ends.
    """

    slots: Mapping[int, int]
    adapters: Mapping[int, int]
    experts: str = "each"
    shapes: Sequence[BlockShape] = ()
    max_rows: int = 32
    speculative_tokens: int = 0
    cache_bytes: int | None = None
    reuse_decoded: bool = False
    host_bytes: int = 4 << 30
    gap_s: float = 0.5
    idle_gap_s: float = 2.0
    every: int = 16
    every_s: float = 60.0
    session_s: float = 86400.0
    wait_cost: float | None = None


log = logging.getLogger("mint_jax.service")
Progress = Callable[[str, int, int], None]  # what is compiled, done, in all


class Server:
    """Owns the parts of a server, which are public attributes for the routes; ``running`` serves.

    Args:
        folder: of this server; locked by one process at a time.
        catalog: a folder or a database's URL; None: inside ``folder``.
        payloads: see ``Catalog.open``.
        name: the base's name for clients, in addition to its own.
        tokenizer: name on the hub, or folder, from which clients load the tokenizer.
        peft_folder: PEFT adapters below it may be loaded by path; None: none may.
        adapter_uris: see ``AdapterUris``.
        engine: see ``ServerDatabase``.
        on_busy: called while another process serves the folder, until that leaves it; None: that is
            an error, ``FolderBusy``.

    Attributes:
        guests: servers of further folders over the devices of this one, by engine.
    """

    def __init__(
        self,
        base: Base,
        folder: Path,
        sizes: Sizes,
        catalog: str | Path | None = None,
        payloads: str | None = None,
        name: str | None = None,
        tokenizer: str | None = None,
        peft_folder: Path | None = None,
        adapter_uris: Sequence[str] = (),
        quotas: Quotas | None = None,
        engine: str = "",
        on_busy: Callable[[], None] | None = None,
    ):
        self.base, self.sizes, self.quotas = base, sizes, quotas or Quotas()
        self.name, self.tokenizer = name or base.name, tokenizer or name or base.name
        self.specs = transformer.abstract(base.cfg)
        self.families = families(self.specs)
        targets = [target for members in self.families.values() for target in members]
        self.live = Trainer(
            base,
            slots=sizes.slots,
            targets=targets,
            experts=sizes.experts,
            shapes=sizes.shapes,
            host_bytes=sizes.host_bytes,
            folder=folder / "spilled",
        )
        self.metrics, self._counters = CollectorRegistry(), Counters()
        with contextlib.ExitStack() as opened:
            self.catalog = Catalog.open(catalog or folder / "catalog", payloads, actor="service")
            opened.callback(self.catalog.close)
            self.weights = Weights(
                base,
                self.catalog,
                lambda *path: self.checkpoints.digest(*path),
                also=(self.name,),
                folder=peft_folder,
                uris=AdapterUris(adapter_uris, folder / "fetched"),
            )
            self.residency = self._residency(
                AdapterConfig(1, targets=tuple(targets), experts=sizes.experts).names
            )
            opened.callback(self.residency.close)
            self.engine = Engine(
                base,
                None if base.tokenizer is None else base.tokenizer.decode,
                sizes.max_rows,
                keep_routes=base.cfg.routed,
                cache_bytes=sizes.cache_bytes,
                speculative_tokens=sizes.speculative_tokens,
                reuse_decoded=sizes.reuse_decoded,
            )
            self.embedder = None if sizes.wait_cost is None else Embedder(base)
            self.sequences = Sequences(base.cfg.routed)
            opened.enter_context(self._open(folder, engine, on_busy))
            self._opened = opened.pop_all()
        self.training = Turns(self.durable, self.engine.wake)
        self.guests: dict[str, Server] = {}  # replaced as a whole
        self._moving = threading.Lock()  # of changes of ``guests``, and of their maintenance
        self.ready, self.started = False, time.monotonic()
        self.programs: Programs | None = None
        self._ending = threading.Event()

    def _open(
        self, folder: Path, engine: str, on_busy: Callable[[], None] | None
    ) -> contextlib.ExitStack:
        """Opens all that outlives the process; returns what closes it."""
        base, sizes, self.folder = self.base, self.sizes, folder
        with contextlib.ExitStack() as opened:
            self.database = self._database(folder / "server.db", engine, on_busy)
            opened.callback(self.database.close)
            self.book = Book(self.database)
            self.tenancy = Tenancy(self.book, self.quotas, sizes.session_s)
            self.checkpoints = Checkpoints(
                folder / "checkpoints",
                self.book,
                self.catalog,
                base,
                offer=self.residency.offer,
                need_room=self.tenancy.need_room,
            )
            self.costs = Costs(self.database, self.checkpoints.policy_of, self.book.clock)
            self.curves = Curves(self.database, self.book.clock)
            self.canaries = Canaries(self.database, self.catalog, self.book.clock)
            self.routes: Routes | None = None
            if sizes.wait_cost is not None:
                self.routes = Routes(
                    self.database,
                    self.catalog,
                    self.residency,
                    (self.name, base.fingerprint),
                    base.cfg.d_model,
                    sizes.wait_cost,
                    self.book.clock,
                )
            self.durable = Durable(
                folder / "training",
                self.live,
                self.database,
                costs=self.costs,
                counters=self._counters,
                wake=self.engine.wake,
                gap_s=sizes.gap_s,
                idle_gap_s=sizes.idle_gap_s,
                every=sizes.every,
                every_s=sizes.every_s,
                store=self.checkpoints,
                tenant_of=self.book.owner,
                on_result=self.curves.record,
                on_end=self.quotas.end_request,
            )
            opened.callback(self.durable.close)
            self.answers = Answers(start=self.book.count_start(), new_id=self.database.new_id)
            # by tenant and id: rows that never change
            self.sampler = functools.lru_cache(SAMPLERS)(self.book.sampler)
            # to files, as tokens that name them: whoever has a link needs no key
            self.links = Tokens(folder, self.book.clock)
            return opened.pop_all()

    @staticmethod
    def _database(path: Path, engine: str, on_busy: Callable[[], None] | None) -> ServerDatabase:
        while True:
            try:
                return ServerDatabase(path, engine=engine)
            except FolderBusy:
                if on_busy is None:
                    raise
                on_busy()

    def _residency(self, targets: Sequence[str]) -> Residency:
        base, sizes = self.base, self.sizes
        slots = DeviceSlots(
            self.specs, dict(sizes.adapters), targets, mesh=base.mesh, piece_bytes=PIECE_BYTES
        )
        slot_targets = {bucket: slots.targets(bucket) for bucket in slots.stacks}
        return Residency(
            self.weights.fetch,
            unpack,
            Admission(base.fingerprint, self.specs, slot_targets),
            slots,
            sizes.host_bytes,
            workers=os.cpu_count() or 1,
            metrics=Metrics(self.metrics),
            wrote=lambda digest, tenant, s: self.costs.charge(
                "load", s, {Payer(tenant, digest): 1}
            ),
        )

    # -- its life

    def compile(self, progress: Progress = lambda name, done, total: None) -> Programs:
        """Compiles every program in a thread; a request waits only for its own."""
        todo = sampling_programs(self.engine.active, self.residency.stacks)
        todo = [*todo, *training_programs(self.live)]
        todo += [] if self.embedder is None else self.embedder.programs()
        self.programs = Programs(todo, self.engine.wake, progress)
        self.engine.active.compiled = self.live.compiled = self.programs
        self.programs.start()
        return self.programs

    def close(self) -> None:
        """Closes a server that was never ``running``."""
        self._opened.close()

    @contextlib.contextmanager
    def running(self) -> Iterator["Server"]:
        """Serves until the block ends. Unfinished training continues with the next start."""
        # no other process has the folder: the database is open; the loop, which may spill states,
        # does not run yet
        shutil.rmtree(self.folder / "spilled", ignore_errors=True)
        (self.folder / "spilled").mkdir(parents=True)
        self._clean()
        if self.routes is not None:
            self.routes.refresh()
        keeper = threading.Thread(target=self._maintain, name="maintenance", daemon=True)
        try:
            with self.engine.serving(
                residency=self.residency, commit_bytes=PIECE_BYTES, coscheduled=self.training
            ):
                keeper.start()
                self.ready = True
                try:
                    yield self
                finally:
                    self.ready = False
                    if self.programs is not None:
                        self.programs.close()
                    self._ending.set()
                    keeper.join()
        finally:
            self.training.run_between()
            with self._moving:
                for server in (*self.guests.values(), self):
                    server._end()

    def _clean(self) -> None:
        """Removes what a process that was killed left in the folder."""
        self.checkpoints.sweep()
        # a crash came between the end of a session and that of its models' training
        for model in self.durable.restored:
            if self.book.has_ended(model):
                self.durable.forget(model)

    def _end(self) -> None:
        """Closes the folder, once the devices' thread works for it no more."""
        self.durable.stop(UserError("the server was stopped before this ended: ask again"))
        _attempt(self.costs.flush)
        self._opened.close()

    # -- folders of other engines

    def adopt(self, engine: str) -> None:
        """Serves the folder of another engine of the fleet too, until ``release``: its sessions and
        its training go on here. Raises ``FolderBusy``: that engine is alive, or another one serves
        its folder; ``UserError``: there is no such folder.
        """
        with self._moving:
            if engine in self.guests or not self.ready:
                return
            if not ((folder := self.folder.with_name(engine)) / "server.db").exists():
                raise UserError(f"engine is {engine!r}; expected one with a folder {folder}")
            guest = copy.copy(self)
            guest.guests = {}
            with guest._open(folder, engine, None) as opened:  # closed again if cleaning fails
                guest._clean()
                guest._opened = opened.pop_all()
            self.training.add(guest.durable)
            self.guests = {**self.guests, engine: guest}

    def release(self, engine: str) -> None:
        """Gives an adopted folder back. What is unfinished goes on where it is opened next."""
        with self._moving:
            if (guest := self.guests.get(engine)) is None or not self.ready:
                return
            self.guests = {name: one for name, one in self.guests.items() if one is not guest}
            guest.end_waits()

            def leave() -> None:
                self.training.remove(guest.durable)
                guest.durable.stop(UserError(f"engine {engine} has started again: ask again"))
                for policy in self.live.names():
                    if checkpoints.found_or_none(guest.book.owner, policy) is not None:
                        self.live.leave(policy)

            self.training.between(leave).result()
            guest._end()

    def _maintain(self) -> None:
        trimmed = time.monotonic()
        while not self._ending.wait(MAINTENANCE_S):
            if self.routes is not None:  # guests answer no requests for auto
                _attempt(self.routes.refresh)
            with self._moving:
                for server in (self, *self.guests.values()):
                    server.maintain()
            if time.monotonic() - trimmed >= TRIM_S:
                # The heap keeps what was freed (`host.keep_freed_memory`), and long-lived states
                # and adapters between temporaries make holes that the next temporaries do not fit:
                # it grew by 140 MB a minute under load, all of it free.
                host.give_back_freed_memory()
                trimmed = time.monotonic()

    def maintain(self) -> None:
        """Expires old objects and writes new records; failures are logged and tried again."""

        def end_silent() -> None:
            for session in self.tenancy.silent():
                self.end_session(session)

        _attempt(self.durable.futures.expire, self.answers.expire, self.checkpoints.expire)
        _attempt(end_silent, self.costs.flush, self.canaries.catch_up)

    def readiness(self) -> dict[str, Any]:
        """Returns ``status``, ``ready`` once all is compiled, and which requests are served."""
        status, programs = self.trouble(), self.programs
        if programs is None:
            return {"status": status or "ready"}
        if not programs.done:
            status = status or (
                f"compiling {programs.now}: {programs.ready} of {programs.total} programs are ready"
            )
        return {
            "status": status or "ready",
            "programs_ready": programs.ready,
            "programs": programs.total,
            "samples": self.engine.is_ready,
            "trains": self.live.is_ready,
        }

    def trouble(self, sampling: bool = False) -> str:
        """Returns why requests, or samples alone, cannot be served; empty if they can."""
        if not self.ready:
            return "it is starting or being stopped"
        if self.durable.failed is not None:
            return f"training has failed: {self.durable.failed!r}"
        if not self.engine.is_serving:
            return "sampling has failed"
        return "" if sampling else self.database.trouble

    def end_waits(self) -> None:
        """Ends all long polls, as if their time were over: the server is about to stop."""
        self.ready = False
        self.durable.futures.end_waits()
        self.answers.wake_all()
        for guest in self.guests.values():
            guest.end_waits()

    def vectors(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns prompts' vectors for ``routes``, ``[N, D]``, one prompt between two steps."""
        assert self.embedder is not None, "it routes"
        if not all(prompts):
            raise UserError("a prompt has no tokens: give at least one")
        embed = self.embedder
        found = [self.training.between(functools.partial(embed, [one])) for one in prompts]
        return np.concatenate([one.result() for one in found])

    def end_session(self, id: str) -> None:
        """Ends a session: its models leave training, its checkpoints and samplers stay."""
        for model in self.tenancy.end_session(id):
            self.durable.forget(model)

    # -- names and settings that clients send

    def need_base(self, name: str | None) -> None:
        """Raises ``UserError`` for another base than the resident one."""
        if name is not None and name.lower() not in (self.name.lower(), self.base.name.lower()):
            raise UserError(
                f"base_model is {name[:100]!r}; this server has {self.name}: ask for that"
            )

    def adapter_config(self, rank: int, train: Mapping[str, bool]) -> AdapterConfig:
        """Returns the adapter of a rank over families of projections. Raises ``UserError``."""
        most = max(self.sizes.slots)
        if type(rank) is not int or not 1 <= rank <= most:
            raise UserError(f"rank is {str(rank)[:40]}; this server trains ranks from 1 to {most}")
        chosen = [one for family, one in self.families.items() if train.get(family, True)]
        if not (targets := tuple(target for members in chosen for target in members)):
            raise UserError(f"nothing is to be trained: set one of {', '.join(self.families)}")
        form = self.sizes.experts if train.get("train_mlp", True) else "each"
        return AdapterConfig(rank, ALPHA, targets, experts=form)

    def about(self, config: AdapterConfig) -> dict[str, Any]:
        """Returns details of a model: rank, and the bytes of its weights and two moments."""
        nbytes = 3 * params_lib.nbytes(lora_tree.adapter_specs(self.specs, config))
        return {"rank": config.rank, "nbytes": nbytes}

    def trained_families(self, config: AdapterConfig) -> dict[str, bool]:
        """Returns the families of projections that an adapter has."""
        own = set(config.targets)
        return {family: not own.isdisjoint(members) for family, members in self.families.items()}

    def copy(self, tenant: str, source: str, session: str, place: int, ttl_s: int | None) -> str:
        """Returns the path of a copy of a checkpoint. Raises ``NotFound``, ``Conflict``."""
        self.book.session(tenant, session)
        row = self.book.checkpoint(tenant, *checkpoints.parse(source), published=True)
        about = {"metadata": row.details.get("metadata"), "copy_of": source}
        about |= self.about(self.checkpoints.config(row))
        model = self.book.add_model(session, place, tenant, about)
        if model.details.get("copy_of") != source:
            raise Conflict(f"model {model.id!r} is another one: give a copy a new model_seq_id")
        self.book.end_model(model.id)
        return self.checkpoints.copy(tenant, source, model.id, f"copy of {source}", ttl_s)

    def at_once(self, model: Model, tenant: str) -> Model:
        """Returns the model that answers now: in place of one whose adapter is not in a slot its
        stand-in, if that is. Both are loaded meanwhile.
        """
        if model.digest is None or model.stand_in is None:
            return model
        if not self.residency.eta_s(model.digest):
            return model
        is_ready = not self.residency.eta_s(model.stand_in)
        with contextlib.suppress(QueueFull):
            loaded = self.residency.acquire(model.digest if is_ready else model.stand_in, tenant)
            loaded.add_done_callback(_release)
        return dataclasses.replace(model, digest=model.stand_in) if is_ready else model

    # -- requests within the tenants' quotas

    def submit(self, request: Request) -> Stream:
        """Submits a request to the engine, within the tenant's quota of tokens."""
        key = object()
        self.quotas.begin(key, request.tenant, len(request.prompt) + request.n * request.max_tokens)
        try:
            stream = self.engine.submit(request)
        except BaseException:
            self.quotas.end(key)
            raise
        stream.when_done(lambda _: self.quotas.end(key))
        return stream

    async def submit_training(self, model: str, tenant: str, number: int, call: Call) -> str:
        """Returns a request's id; one that exceeds the whole quota fails through its future."""
        if not isinstance(call, ForwardBackward):
            return await asyncio.wrap_future(self.durable.submit(model, number, call))
        new, key = False, (model, number)
        try:
            new = self.quotas.begin(key, tenant, sum(datum.tokens.size for datum in call.data))
        except OverQuota as reason:
            call = Refused(str(reason))
        ended = True
        try:
            id = await asyncio.wrap_future(self.durable.submit(model, number, call))
            ended = self.durable.futures.outcome(id) is not None
        finally:
            if new and ended:  # refused, or the same request again, which has ended already
                self.quotas.end(key)
        return id


def _release(loaded: "Future[AdapterLease]") -> None:
    if not loaded.cancelled() and loaded.exception() is None:
        loaded.result().release()


def _attempt(*steps: Callable[[], Any]) -> None:
    for step in steps:
        try:
            step()
        except Exception:  # a database that is busy, a disk that is full
            log.exception("maintenance failed: %s", step.__qualname__)


def families(specs: Any) -> dict[str, tuple[str, ...]]:
    """Returns Tinker's three families of projections; embedding and router are in none."""
    out: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": ["unembed"]}
    for target, paths in lora_tree.target_paths(specs).items():
        if target not in lora_tree.UNUSUAL:
            is_attention = any("attn" in path.split("/") for path in paths)
            out["train_attn" if is_attention else "train_mlp"].append(target)
    return {family: tuple(targets) for family, targets in out.items()}

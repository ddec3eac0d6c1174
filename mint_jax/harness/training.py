"""A training run: its workdir, metrics and checkpoints, the revisions and rollouts that it writes
to the catalog, and resuming.

A step follows from the config, its number and the adapters alone, so a checkpoint has the training
state and each policy's step. Of several processes the first writes metrics and the catalog; all
write checkpoints, and all make the same calls.
"""

import contextlib
import dataclasses
import functools
import json
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np

from mint_jax import interrupts, metrics, multihost, params, trackers
from mint_jax.catalog.packed import Schema, digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.rollouts import Rollouts, pack_rollouts
from mint_jax.checkpoint import FOLDER, Checkpoints
from mint_jax.data.buckets import ShapeBook
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness import workdir
from mint_jax.harness.adapters import JobCatalog, read_adapter
from mint_jax.harness.options import TrainingSettings
from mint_jax.harness.recorder import CatalogWriter, Snapshot, claim_policies
from mint_jax.harness.start import say
from mint_jax.lora.tree import spelled_out
from mint_jax.train.state import TrainStack
from mint_jax.train.trainer import Trainer

# metrics that revisions record
COUNTED = ("tokens", "effective", "gap", "sampler_kl", "out_of_route")
ADAPTERS = "adapters"  # item of a checkpoint that restores without the rest


class TrainingRun:
    """A context manager that holds the workdir, and from ``begin`` the policies, until it ends.
    Raises ``UserError`` if another process uses the workdir, if that has steps of another config,
    or if a tracker cannot be used.

    Attributes:
        step: updates done, by policy.
        notes: JSON of the recipe, which a resume restores.
        in_flight: returns JSON of work in progress, saved with every checkpoint; a resume puts what
            it finds into ``resumed_work``.
        fixed: digest or PEFT directory that rollouts are drawn from, by policy.
    """

    def __init__(self, config: TrainingSettings, folder: Path):
        self.config, self.workdir, self.notes = config, folder, dict[str, Any]()
        self.in_flight: Callable[[], dict[str, Any]] = dict
        self.resumed_work = dict[str, Any]()
        self._writes: CatalogWriter | None = None  # in the first process
        # policy, step and digest of records from before an interruption, which are not repeated
        self._recorded: set[tuple[str, int, str]] = set()
        self._final: dict[str, tuple[str, int]] = {}  # digest and number of final revisions
        self._snapshots: dict[str, Snapshot] = {}
        self._sizes: dict[str, list[tuple[int, ...]]] = {}  # of shapes, after the last update
        self._saving: dict[str, int] = {}  # steps of the newest checkpoint
        self._durable: dict[str, int] | None = None  # the same, once it is on disk
        self._signal = 0  # the last one received
        self._has_begun = self._is_updating = False
        trackers.check(config.trackers)
        with contextlib.ExitStack() as closing:

            def lock() -> None:
                closing.callback(workdir.WorkdirLock(folder).release)

            multihost.agree("the workdir", lock)
            workdir.claim(config, folder)
            self._closing = closing.pop_all()  # releases the policies, then the workdir

    def begin(
        self,
        trainer: Trainer,
        shapes: Mapping[str, ShapeBook],
        sampling: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Claims the policies and restores the newest checkpoint. Raises ``UserError`` if another
        run trains a policy, or the catalog has it with another base or adapter config.

        Args:
            shapes: padded sizes of each policy's updates, shared by policies that are always
                updated together. Padding decides the order of sums, so a resume restores them too.
            sampling: how a policy's rollouts are drawn; its revisions record it.
        """
        config, base = self.config, trainer.base
        self.trainer, self.shapes, self._sampling = trainer, shapes, sampling
        self.step = dict.fromkeys(trainer.policies, 0)
        self.names = {name: full_name(config.tenant, name) for name in trainer.policies}
        place = config.catalog or self.workdir / "catalog"
        self.catalog = JobCatalog(place, config.payloads, create=True)
        self._closing.callback(self.catalog.close)
        losses = {n: p.loss for n, p in trainer.policies.items() if p.loss.needs_reference}
        start, self.fixed, references, self._writes = claim_policies(
            self.catalog,
            {full: self._schema(name) for name, full in self.names.items()},
            self.workdir / "run.json",
            {n: p.rollout_revision for n, p in config.policies.items() if p.rollout_revision},
            {n: x.reference for n, x in losses.items() if x.reference not in ("start", "base")},
        )
        if self._writes is not None:
            self._closing.callback(self._writes.stop)
        # records add the step of the revision that a policy continues
        self._first_step = {f: start.get(f, {}).get("step", 0) for f in self.names.values()}
        self._numbers = {f: start.get(f, {}).get("number", 0) for f in self.names.values()}
        self._saved = Checkpoints(self.workdir / FOLDER, config.checkpoint.keep, self._committed)
        self.resumed = self._restore()
        if self._writes is not None:
            self._recorded = self._writes.records_since(self._numbers)
        for name, full in self.names.items():
            if full in start:
                self._continue(name, start[full]["digest"])
        for name, text in references.items():
            loaded = read_adapter(text, base, self.catalog)
            trainer.refer(name, loaded.config, loaded.adapter)
        self._rows = self.workdir / "metrics.jsonl"
        multihost.agree("metrics.jsonl", lambda: metrics.truncate_rows(self._rows, self.step))
        self._writer = metrics.MetricsWriter(self.workdir, config.tensorboard)
        wanted = {} if self._all_done else config.trackers
        self._trackers = trackers.Trackers(self.workdir, wanted, workdir.to_json(config))
        self._remember_shapes(self.step)
        policies, before = len(self.step), sum(self.step.values())
        shown: Any = {"done": before, "per": policies, "unit": "steps"}
        self._progress = metrics.Progress(config.job, config.steps * policies, **shown)
        self._due = min(self.step.values()) + config.checkpoint.every
        for name, policy in trainer.policies.items():
            size, stack = self.adapter_bytes(name), trainer.state[trainer.slots[name].bucket]
            whole = params.nbytes(stack) / stack.steps.shape[0]
            say(
                f"policy {name}: {policy.adapter.size}, adapter {size / 1e6:.2f} MB"
                f" ({100 * size / base.full_bytes:.2f} % of the base), {whole / 1e6:.2f} MB with"
                " gradients and optimizer state"
            )
        if self.resumed:
            self._committed(before)
        # a checkpoint does not wait for the revisions of its own step
        for name, step in self.step.items():
            if step and self._is_export_step(step):
                self._export([name], step)
        interrupts.standing(self._resume_hint)
        self._has_begun = True

    @property
    def _all_done(self) -> bool:
        return self.resumed and min(self.step.values()) >= self.config.steps

    def finished(self) -> dict[str, Any] | None:
        """Returns the result of a run whose steps were all done before, if it is there."""

        def read() -> dict[str, Any] | None:
            file = self.workdir / "result.json"
            return json.loads(file.read_text()) if self._all_done and file.is_file() else None

        if (found := multihost.agree("the result of a finished run", read)) is not None:
            self._saved.close()
            self._writer.close()
            say(
                f"all {self.config.steps} steps were done before: this is their result; set"
                " --config.steps higher to train on"
            )
        return found

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the recorded metrics of all steps, by policy."""
        read = multihost.agree("metrics", lambda: self._rows.read_text().splitlines())
        rows = list(map(json.loads, read))
        return {name: [row for row in rows if row["name"] == name] for name in self.names}

    def adapter_bytes(self, name: str) -> int:
        """Returns float32 bytes of a policy's factors at its true rank."""
        return params.nbytes(self.trainer.adapter(name))

    def is_eval_step(self, step: int) -> bool:
        """True where policies are evaluated after this step."""
        return self.config.eval_every > 0 and (step + 1) % self.config.eval_every == 0

    # --- a step ---

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """In this block Ctrl-C and SIGTERM save a checkpoint and raise ``Interrupted``; a second
        signal does not wait for it.

        An update ends first; several processes end the step, since they must agree. Rollouts and
        rewards are dropped, for the same command repeats them. ``interrupts`` bounds the time.
        """

        def note(number: int, frame: FrameType | None) -> None:
            again, self._signal = bool(self._signal), number
            if again or not (self._is_updating or multihost.count() > 1):
                interrupts.interrupt(number, frame)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, note) for number in interrupts.SIGNALS}
        try:
            yield
        except Interrupted:
            if not self._is_updating and multihost.count() == 1:
                self.save()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Wraps a step's update and its ``record``, which signals do not interrupt: no checkpoint
        could be written in between.
        """
        self._is_updating = True
        yield
        self._is_updating = False
        if number := multihost.agree("an interruption", lambda: self._signal):
            if multihost.count() > 1:
                self.save()
            raise Interrupted(signal.Signals(number).name, number)

    def keep(self, name: str, step: int, rollouts: Callable[[], Rollouts]) -> None:
        """Records a policy's rollouts of a step, if ``keep_rollouts`` is set; the writing thread
        calls ``rollouts``.
        """
        if not (keep := self.config.keep_rollouts):
            return
        full = self.names[name]
        recorded = self._first_step[full] + step

        def write(writer: CatalogWriter) -> None:
            made = dataclasses.replace(rollouts(), policy=full, step=recorded)
            data = pack_rollouts(made)
            if (full, recorded, digest_of(data)) not in self._recorded:
                tokens = sum(len(row) for group in made.tokens for row in group)
                about: Any = {"tokens": tokens, "mean_reward": float(np.nanmean(made.rewards))}
                session = writer.sessions[full]
                writer.catalog.rollout(full, recorded, data, session=session, **about)
            if step >= keep:
                writer.catalog.drop_rollouts(full, recorded + 1 - keep)

        self._queue(write)

    def record(
        self,
        step: int,
        rows: dict[str, dict[str, Any]],
        detail: str,
        scores: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Records one update of some policies: metrics, progress, due exports and checkpoints. The
        alias ``best`` moves to a policy's revision with the highest of ``scores``, which are on
        held-out data.
        """
        for name, row in rows.items():
            self.step[name] = step + 1
            self._snapshots.pop(name, None)
            self._writer.write(step, name, row)
            self._trackers.write(step, name, row)
            if row.get("skipped"):
                say(f"policy {name}: step {step + 1} was skipped, its gradient was not finite")
            else:
                self._count(name, row)
        self._remember_shapes(rows)
        self._progress.update(sum(self.step.values()), detail)
        due = min(self.step.values()) >= self._due
        if due and self._writes is not None:
            self._writes.drain()  # a resumed run does not repeat the steps before its checkpoint
        best = self.notes.setdefault("best", {})
        better = {n: s for n, s in scores.items() if n not in best or s > best[n][0]}
        self._export(rows if self._is_export_step(step + 1) else better, step + 1)
        why = f"best on held-out data so far, after step {step + 1}"
        for name, score in better.items():
            best[name] = [score, step + 1]
            full, snapshot = self.names[name], self.snapshot(name)
            self._queue(
                lambda writer, full=full, snapshot=snapshot: writer.catalog.promote(
                    full, snapshot.digest, "best", why=why
                )
            )
        if due:
            self.save()
            self._due = min(self.step.values()) + self.config.checkpoint.every

    def _count(self, name: str, row: Mapping[str, Any]) -> None:
        """Adds an update to the sums that its policy's next revision records; see ``Revision``."""
        sums = self.notes.setdefault("since_export", {}).setdefault(name, {})
        if sums.get("exported"):
            sums.clear()
        for key in COUNTED:
            if math.isfinite(row.get(key, math.nan)):
                sums[key] = sums.get(key, 0.0) + float(row[key])
        sums["updates"] = sums.get("updates", 0) + 1

    def _trained(self, name: str) -> dict[str, float] | None:
        """Returns the means of a policy's updates since its last export, and what they add up to;
        None before the first one.
        """
        sums = self.notes.get("since_export", {}).get(name, {})
        if not sums:
            return None
        sums["exported"] = True
        totals = {key: sums[key] for key in ("updates", "tokens") if key in sums}
        means = {key: sums[key] / sums["updates"] for key in COUNTED if key in sums}
        return means | totals

    # --- the catalog ---

    def _schema(self, name: str) -> Schema:
        config = spelled_out(self.trainer.policies[name].adapter, self.trainer.specs)
        return Schema(self.trainer.base.fingerprint, config)

    def _continue(self, name: str, digest: str) -> None:
        """Loads the revision that the catalog had of a policy before this run. A resumed run has
        the policy's state, and may need that revision as its reference.
        """
        loss = self.trainer.policies[name].loss
        if self.resumed and not (loss.needs_reference and loss.reference == "start"):
            return
        loaded = read_adapter(digest, self.trainer.base, self.catalog)
        if self.resumed:
            self.trainer.refer(name, loaded.config, loaded.adapter)
        else:
            say(f"policy {name} continues from revision {loaded.revision} of the catalog")
            self.trainer.load_adapter(name, loaded.adapter)

    def _queue(self, write: Callable[[CatalogWriter], object]) -> None:
        """Queues a write to the catalog, in the process that has it."""
        if self._writes is not None:
            self._writes.put(functools.partial(write, self._writes))

    def snapshot(self, name: str) -> Snapshot:
        """Returns a policy's present adapter, copied once between two updates."""
        if name not in self._snapshots:
            made = self.trainer.snapshot(name), self._schema(name), self.step[name]
            self._snapshots[name] = Snapshot(*made)
        return self._snapshots[name]

    def _is_export_step(self, step: int) -> bool:
        return step % self.config.export_every == 0 or step == self.config.steps

    def _export(self, names: Iterable[str], step: int, final: bool = False) -> None:
        """Starts the copies to the host; packing and writing overlap the next step."""
        snapshots = {name: self.snapshot(name) for name in names}
        training = {name: self._trained(name) for name in snapshots}

        def write(writer: CatalogWriter) -> None:
            exports = []
            for name, snapshot in snapshots.items():
                full = self.names[name]
                at = step + self._first_step[full]
                if final or (full, at, snapshot.digest) not in self._recorded:
                    about = at, writer.sessions[full], f"{self.config.job} in {self.workdir}"
                    facts = {"sampling": self._sampling.get(name), "training": training[name]}
                    exports.append(Export(full, snapshot.data, *about, **facts))
            for export, revision in zip(exports, writer.catalog.export_many(exports)):
                full = export.policy
                self._numbers[full] = max(self._numbers[full], revision.number)
                if final:  # the alias latest moves to them, even from newer ones
                    self._final[full] = (revision.digest, revision.number)

        if snapshots:
            self._queue(write)

    # --- checkpoints ---

    def _arrays(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns moments, gradient sums and counters by bucket, and the item ``adapters``."""
        rest, factors = {}, {}
        for bucket, stack in self.trainer.state.items():
            rest[str(bucket)] = one = dict(vars(stack))
            factors[str(bucket)] = one.pop(ADAPTERS)
        return rest, factors

    def _remember_shapes(self, names: Iterable[str]) -> None:
        # a resumed run repeats rollouts that a checkpoint finds under way, and must not know their
        # sizes
        self._sizes |= {name: list(self.shapes[name].shapes) for name in names}

    def save(self) -> None:
        """Starts a checkpoint of all policies, unless this state is saved already."""
        number = sum(self.step.values())
        self._saved.wait()
        if not number or self._saved.latest() == number:
            return
        places = {
            name: {
                "bucket": str(slot.bucket),
                "slot": slot.index,  # on axis 1 of the stack
                "schema": json.loads(self._schema(name).to_json()),  # with the true rank
            }
            for name, slot in self.trainer.slots.items()
        }
        extra = {"step": self.step, "notes": self.notes, "shapes": self._sizes}
        extra |= {"exported": self._numbers, ADAPTERS: places, "in_flight": self.in_flight()}
        self._saving = dict(self.step)
        rest, factors = self._arrays()
        self._saved.save(number, rest, json.loads(json.dumps(extra)), {ADAPTERS: factors})

    def _restore(self) -> bool:
        """Restores the newest checkpoint; returns False without one."""
        if (number := self._saved.latest()) is None:
            return False
        arrays, factors = self._arrays()
        _, arrays, extra = self._saved.restore(arrays, number)
        factors = self._saved.restore_item(number, ADAPTERS, factors)
        self.trainer.state = {
            int(bucket): TrainStack(**rest, adapters=factors[bucket])
            for bucket, rest in arrays.items()
        }
        self.step, self.notes = extra["step"], extra["notes"]
        self._saving, self._numbers = dict(self.step), extra["exported"]
        self.resumed_work = extra["in_flight"]
        for name, book in self.shapes.items():
            book.shapes = [tuple(shape) for shape in extra["shapes"][name]]
        say(f"resumed at {_span(self.step)} of {self.config.steps}")
        return True

    def _committed(self, number: int) -> None:
        """Records a durable checkpoint; its number is the sum of all policies' steps."""
        steps = self._durable = self._saving
        place, keep = str(self._saved.directory / f"step_{number}"), self.config.checkpoint.keep

        def write(writer: CatalogWriter) -> None:
            for name, step in steps.items():
                full = self.names[name]
                at = step + self._first_step[full]
                known = [(one.step, one.place) for one in writer.catalog.checkpoints(full, 10)]
                if (at, place) not in known:
                    session = writer.sessions[full]
                    writer.catalog.checkpoint(full, at, place, session=session, keep=keep)

        self._queue(write)

    # --- the end ---

    def close(self) -> dict[str, tuple[str, int]]:
        """Saves everything and releases the policies; returns digest and number of each final
        revision.
        """
        self.save()
        self._saved.close()
        for step in sorted(set(self.step.values())):
            self._export([name for name in self.names if self.step[name] == step], step, final=True)

        def finish() -> dict[str, tuple[str, int]]:
            assert self._writes is not None
            self._writes.drain()
            return {name: self._final[full] for name, full in self.names.items()}

        final = multihost.agree("final revisions", finish)
        self._writer.close()
        self._trackers.close()
        return {name: (digest, number) for name, (digest, number) in final.items()}

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        with self._closing:
            if kind is None or not self._has_begun:
                return
            self._writer.close()
            self._trackers.close(finished=False)
            # a checkpoint in flight is finished; after an error the other processes may be gone
            if multihost.count() == 1 or isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(UserError):  # the first error is raised
                    self._saved.close()
        if isinstance(error, KeyboardInterrupt):
            number = getattr(error, "number", signal.SIGINT)
            raise Interrupted(f"{str(error) or 'SIGINT'}; {self._resume_hint()}", number) from None

    def _resume_hint(self) -> str:
        if self._durable is None:
            return (
                "no checkpoint was written yet: the same command starts from the beginning in"
                f" {self.workdir}"
            )
        return (
            f"the same command goes on from {_span(self._durable)} of {self.config.steps}, which is"
            f" saved in {self._saved.directory}"
        )


def _span(steps: Mapping[str, int]) -> str:
    """Describes the steps of all policies."""
    least, most = min(steps.values()), max(steps.values())
    return f"step {least}" if least == most else f"steps {least} to {most} of its policies"

"""The durable side of a training run: metrics, checkpoints, revisions and rollouts in the catalog,
resuming, progress.

A step follows from the config, its number and the adapters alone, so a checkpoint has the training
state and each policy's step. Of several processes the first writes metrics and the catalog; all
write checkpoints.
"""

import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np

from mint_jax import interrupts, metrics, multihost, trackers
from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records.names import full_name
from mint_jax.catalog.rollouts import Rollouts, pack_rollouts
from mint_jax.checkpoint import FOLDER, Checkpoints
from mint_jax.data.buckets import ShapeBook
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness import adapters, workdir
from mint_jax.harness.catalogs import JobCatalog
from mint_jax.harness.options import TrainingSettings
from mint_jax.harness.recorder import Recorder, Snapshot, claim_policies
from mint_jax.harness.start import say
from mint_jax.harness.workdir import WorkdirLock
from mint_jax.lora.tree import spelled_out
from mint_jax.train.state import TrainStack
from mint_jax.train.trainer import Trainer

ADAPTERS = "adapters"  # item of a checkpoint that restores without the rest


class TrainingRun:
    """One run, a context manager: it holds the workdir from its start, and the policies from
    ``begin``, until it ends.

    Args:
        config: without a ``catalog``, that is ``folder/catalog``.
        folder: the workdir.

    Attributes:
        step: updates done, by policy.
        notes: JSON of the recipe, which a resume restores.
        resumed: whether the run continues from a checkpoint.
        catalog: where the policies are recorded.
        fixed: digest or PEFT directory that rollouts are drawn from, for policies with
            ``rollout_revision``.

    Raises:
        UserError: another process uses the workdir, it has steps of another config, or a tracker
            cannot be used.
    """

    trainer: Trainer
    catalog: JobCatalog
    step: dict[str, int]
    fixed: dict[str, str]
    resumed: bool

    def __init__(self, config: TrainingSettings, folder: Path):
        self.config, self.workdir, self.notes = config, folder, dict[str, Any]()
        self._recorder: Recorder | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._steps_at: dict[int, dict[str, int]] = {}  # by checkpoint, until it is recorded
        self._sizes: dict[str, list[tuple[int, ...]]] = {}  # of shapes, after the last update
        self._durable: dict[str, int] | None = None  # steps of the newest checkpoint on disk
        self._signal = 0  # the last one received
        self._has_begun = self._is_updating = False
        self._lock: WorkdirLock | None = None  # the first process has it
        self._closing = contextlib.ExitStack()  # releases the policies, then the workdir
        trackers.check(config.trackers)
        try:
            multihost.agree("the workdir", self._lock_workdir)
            workdir.claim(config, folder)
        except BaseException:
            self._closing.close()
            raise

    def _lock_workdir(self) -> None:
        self._lock = WorkdirLock(self.workdir)
        self._closing.callback(self._lock.release)

    def _release_policies(self) -> None:
        """Lets other runs claim the policies, once everything submitted is written."""
        if self._recorder is not None:
            self._recorder.stop()
        self.catalog.close()

    def begin(
        self,
        trainer: Trainer,
        shapes: Mapping[str, ShapeBook],
        sampling: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Claims the policies and restores the newest checkpoint.

        Args:
            trainer: its state is saved, and restored here.
            shapes: padded sizes of each policy's updates, shared by policies that are always
                updated together. Padding decides the order of sums, so an exact resume restores
                them too.
            sampling: how a policy's rollouts are drawn; its revisions record it.

        Raises:
            UserError: another run trains a policy, or the catalog has it with another base or
                adapter config.
        """
        config, base = self.config, trainer.base
        self.trainer, self.shapes = trainer, shapes
        self.step = dict.fromkeys(trainer.policies, 0)
        self.names = {name: full_name(config.tenant, name) for name in trainer.policies}
        self._sampling = {self.names[name]: settings for name, settings in sampling.items()}
        place = config.catalog or self.workdir / "catalog"
        self.catalog = JobCatalog(place, config.payloads, create=True)
        self._closing.callback(self._release_policies)
        drawn_from = {n: p.rollout_revision for n, p in config.policies.items()}
        losses = {n: p.loss for n, p in trainer.policies.items() if p.loss.needs_reference}
        start, self.fixed, references, self._recorder = claim_policies(
            self.catalog,
            {full: self._schema(name) for name, full in self.names.items()},
            self.workdir / "run.json",
            {name: revision for name, revision in drawn_from.items() if revision},
            self._lock,
            {n: x.reference for n, x in losses.items() if x.reference not in ("start", "base")},
        )
        self._saved = Checkpoints(self.workdir / FOLDER, config.checkpoint.keep, self._committed)
        exported = self._restore()
        self.resumed = exported is not None
        if self._recorder is not None:
            self._recorder.resume(exported or {})
        self._continue(start)
        for name, text in references.items():
            loaded = adapters.read_adapter(text, base, self.catalog)
            trainer.refer(name, loaded.config, loaded.adapter)
        multihost.agree("metrics.jsonl", lambda: metrics.truncate_rows(self._rows_file, self.step))
        self._writer = metrics.MetricsWriter(self.workdir, config.tensorboard)
        wanted = {} if self._all_done else config.trackers
        self._trackers = trackers.Trackers(self.workdir, wanted, workdir.to_json(config))
        self._remember_shapes(self.step)
        policies, before = len(self.step), sum(self.step.values())
        total = config.steps * policies
        self._progress = metrics.Progress(
            config.job, total, done=before, per=policies, unit="steps"
        )
        self._due = min(self.step.values()) + config.checkpoint.every
        for name in trainer.policies:
            self._introduce(name)
        if self.resumed:
            self._committed(before)
        # a checkpoint does not wait for the revisions of its own step
        for name, step in self.step.items():
            if step and self._is_export_step(step):
                self._export([name], step)
        interrupts.standing(self._resume_hint)
        self._has_begun = True

    @property
    def _rows_file(self) -> Path:
        return self.workdir / "metrics.jsonl"

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the recorded metrics of all steps, by policy."""

        def read() -> dict[str, list[dict[str, Any]]]:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
            for row in map(json.loads, self._rows_file.read_text().splitlines()):
                found[row["name"]].append(row)
            return found

        return multihost.agree("metrics", read)

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
        """Says where the same command continues."""
        if self._durable is None:
            return (
                "no checkpoint was written yet: the same command starts from the beginning in"
                f" {self.workdir}"
            )
        return (
            f"the same command goes on from {_span(self._durable)} of {self.config.steps}, which is"
            f" saved in {self._saved.directory}"
        )

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """In this block Ctrl-C and SIGTERM save a checkpoint; a second signal does not wait for it.

        An update ends first; several processes end the step, since they must agree. Rollouts and
        rewards are dropped, for the same command repeats them. ``interrupts`` bounds the time.

        Raises:
            Interrupted: after the checkpoint.
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

    def _schema(self, name: str) -> Schema:
        config = spelled_out(self.trainer.policies[name].adapter, self.trainer.specs)
        return Schema(self.trainer.base.fingerprint, config)

    def _arrays(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns moments, gradient sums and counters by bucket, and the item ``adapters`` of a
        checkpoint, which restores without them.
        """
        rest, factors = {}, {}
        for bucket, stack in self.trainer.state.items():
            rest[str(bucket)] = one = dict(vars(stack))
            factors[str(bucket)] = one.pop(ADAPTERS)
        return rest, factors

    def _places(self) -> dict[str, Any]:
        """Returns bucket, slot (axis 1 of the stack) and schema, with the true rank, by policy, for
        programs that read the item ``adapters`` alone.
        """
        return {
            name: {
                "bucket": str(slot.bucket),
                "slot": slot.index,
                "schema": json.loads(self._schema(name).to_json()),
            }
            for name, slot in self.trainer.slots.items()
        }

    def _restore(self) -> dict[str, int] | None:
        """Restores the newest checkpoint; returns each policy's revision at that time, None without
        a checkpoint.
        """
        if (number := self._saved.latest()) is None:
            return None
        arrays, factors = self._arrays()
        _, arrays, extra = self._saved.restore(arrays, number)
        factors = self._saved.restore_item(number, ADAPTERS, factors)
        self.trainer.state = {
            int(bucket): TrainStack(**rest, adapters=factors[bucket])
            for bucket, rest in arrays.items()
        }
        self.step, self.notes = extra["step"], extra["notes"]
        self._steps_at[number] = dict(self.step)
        for name, book in self.shapes.items():
            book.shapes = [tuple(shape) for shape in extra["shapes"][name]]
        say(f"resumed at {_span(self.step)} of {self.config.steps}")
        return extra["exported"]

    def _continue(self, start: dict[str, str]) -> None:
        """Loads the last revision of policies that the catalog had before this run; their optimizer
        starts again. A resumed run has its state, and needs only that reference.
        """
        for name, full in self.names.items():
            loss = self.trainer.policies[name].loss
            refers = loss.needs_reference and loss.reference == "start"
            if full not in start or (self.resumed and not refers):
                continue
            loaded = adapters.read_adapter(start[full], self.trainer.base, self.catalog)
            if self.resumed:
                self.trainer.refer(name, loaded.config, loaded.adapter)
            else:
                found = f"it continues from revision {loaded.revision}"
                say(f"policy {name} exists in the catalog: {found}")
                self.trainer.load_adapter(name, loaded.adapter)

    def _introduce(self, name: str) -> None:
        config, bucket = self.trainer.policies[name].adapter, self.trainer.slots[name].bucket
        size, stack = self.adapter_bytes(name), self.trainer.state[bucket]
        share = 100 * size / self.trainer.base.full_bytes
        say(
            f"policy {name}: rank {config.rank}, adapter {size / 1e6:.2f} MB ({share:.2f} % of the"
            f" base), {params_lib.nbytes(stack) / stack.steps.shape[0] / 1e6:.2f} MB with gradients"
            " and optimizer state"
        )

    def adapter_bytes(self, name: str) -> int:
        """Returns float32 bytes of a policy's factors at its true rank."""
        return params_lib.nbytes(self.trainer.adapter(name))

    def snapshot(self, name: str) -> Snapshot:
        """Returns a policy's present adapter, copied once between two updates; all processes call
        it.
        """
        if name not in self._snapshots:
            copied, version = self.trainer.snapshot(name), self.trainer.versions[name]
            self._snapshots[name] = Snapshot(copied, self._schema(name), version)
        return self._snapshots[name]

    def finished(self) -> dict[str, Any] | None:
        """Returns the result of a run whose steps were all done before and whose result is there,
        else None.
        """

        def read() -> dict[str, Any] | None:
            is_there = self._all_done and (self.workdir / "result.json").is_file()
            return json.loads((self.workdir / "result.json").read_text()) if is_there else None

        if (found := multihost.agree("the result of a finished run", read)) is not None:
            self._saved.close()
            self._writer.close()
            say(
                f"all {self.config.steps} steps were done before: this is their result; set"
                " --config.steps higher to train on"
            )
        return found

    @property
    def _all_done(self) -> bool:
        return self.resumed and min(self.step.values()) >= self.config.steps

    def keep(
        self, name: str, step: int, drawn_by: str | int, rollouts: Callable[[str], Rollouts]
    ) -> None:
        """Records a policy's rollouts of a step, in the recorder's thread, if ``keep_rollouts`` is
        set; all processes call it before the step's update.

        Args:
            step: updates done when they were drawn.
            drawn_by: digest of the revision that drew them, or the policy's version.
            rollouts: returns the object, given that digest.

        Raises:
            RuntimeError: the policy was updated since.
        """
        if not self.config.keep_rollouts:
            return
        snapshot = self.snapshot(name) if isinstance(drawn_by, int) else None
        if snapshot is not None and snapshot.version != drawn_by:
            raise RuntimeError(
                f"policy {name} is version {snapshot.version}, its rollouts are of version"
                f" {drawn_by}: none would be named"
            )
        if self._recorder is None:
            return

        def make(recorded: int) -> tuple[bytes, int, float]:
            made = rollouts(str(drawn_by) if snapshot is None else snapshot.digest)
            tokens = sum(len(row) for group in made.tokens for row in group)
            data = pack_rollouts(dataclasses.replace(made, policy=full, step=recorded))
            return data, tokens, float(np.mean(made.rewards))

        full = self.names[name]
        self._recorder.rollout(full, step, make, self.config.keep_rollouts)

    def is_eval_step(self, step: int) -> bool:
        """True where policies are evaluated after this step."""
        return self.config.eval_every > 0 and (step + 1) % self.config.eval_every == 0

    def record(
        self,
        step: int,
        rows: dict[str, dict[str, Any]],
        detail: str,
        scores: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Records one update of some policies: metrics, progress, due exports and checkpoints.

        Args:
            scores: on held-out data after the update, higher is better. The alias ``best`` moves to
                a policy's best revision so far.
        """
        for name, row in rows.items():
            self.step[name] = step + 1
            self._snapshots.pop(name, None)
            self._writer.write(step, name, row)
            self._trackers.write(step, name, row)
            if row.get("skipped"):
                say(
                    f"policy {name}: the gradient of step {step + 1} was not finite; the update was"
                    " skipped"
                )
        self._remember_shapes(rows)
        self._progress.update(sum(self.step.values()), detail)
        due = min(self.step.values()) >= self._due
        if due and self._recorder is not None:
            self._recorder.drain()  # a resumed run does not repeat the steps before its checkpoint
        best = self.notes.setdefault("best", {})
        better = {n: s for n, s in scores.items() if n not in best or s > best[n][0]}
        self._export(rows if self._is_export_step(step + 1) else better, step + 1)
        for name, score in better.items():
            best[name] = [score, step + 1]
            if self._recorder is not None:
                why = f"best on held-out data so far, after step {step + 1}"
                self._recorder.promote(self.names[name], self.snapshot(name), "best", why)
        if due:
            self.save()
            self._due = min(self.step.values()) + self.config.checkpoint.every

    def _remember_shapes(self, names: Iterable[str]) -> None:
        """Keeps the sizes after these policies' updates: a resumed run repeats rollouts that a
        checkpoint finds under way, and must not know their sizes.
        """
        self._sizes |= {name: list(self.shapes[name].shapes) for name in names}

    def _is_export_step(self, step: int) -> bool:
        return step % self.config.export_every == 0 or step == self.config.steps

    def _export(self, names: Iterable[str], step: int, final: bool = False) -> None:
        """Starts the copies to the host; packing and writing overlap the next step."""
        snapshots = {self.names[name]: self.snapshot(name) for name in names}
        if self._recorder is not None and snapshots:
            origin = f"{self.config.job} in {self.workdir}"
            self._recorder.export(snapshots, step, origin, self._sampling, final)

    def save(self) -> None:
        """Starts a checkpoint of all policies, unless this state is saved already."""
        number = sum(self.step.values())
        self._saved.wait()
        if number and self._saved.latest() != number:
            extra = {
                "step": self.step,
                "notes": self.notes,
                "shapes": self._sizes,
                "exported": self._recorder.numbers if self._recorder is not None else {},
                ADAPTERS: self._places(),
            }
            self._steps_at[number] = dict(self.step)
            rest, factors = self._arrays()
            self._saved.save(number, rest, json.loads(json.dumps(extra)), {ADAPTERS: factors})

    def _committed(self, number: int) -> None:
        """Records a durable checkpoint; its number is the sum of all policies' steps."""
        steps = self._durable = self._steps_at.pop(number)
        if self._recorder is not None:
            place = str(self._saved.directory / f"step_{number}")
            by_name = {self.names[name]: step for name, step in steps.items()}
            self._recorder.checkpoint(place, by_name, self.config.checkpoint.keep)

    def close(self) -> dict[str, tuple[str, int]]:
        """Saves everything and releases the policies; returns digest and number of each final
        revision.
        """
        self.save()
        self._saved.close()
        for step in sorted(set(self.step.values())):
            self._export([name for name in self.names if self.step[name] == step], step, final=True)

        def finish() -> dict[str, tuple[str, int]]:
            assert self._recorder is not None
            self._recorder.drain()
            return {name: self._recorder.final[full] for name, full in self.names.items()}

        final = multihost.agree("final revisions", finish)
        self._writer.close()
        self._trackers.close()
        return {name: (digest, number) for name, (digest, number) in final.items()}


def _span(steps: Mapping[str, int]) -> str:
    """Describes the steps of all policies."""
    least, most = min(steps.values()), max(steps.values())
    return f"step {least}" if least == most else f"steps {least} to {most} of its policies"

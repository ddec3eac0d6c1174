"""The side of a training job that survives it: metrics, checkpoints, revisions and rollouts in the
catalog, resuming, progress.

Everything a step does follows from the config, its number and the adapters, so what must be saved
is the training state and where each policy stands. Of several processes the first writes metrics
and the catalog; checkpoints are written by all.
"""

import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from mint_jax.jobs import adapters, common
from mint_jax.jobs.catalogs import JobCatalog
from mint_jax.jobs.common import Config
from mint_jax.jobs.hold import Hold
from mint_jax.jobs.recorder import Recorder, Snapshot, claim_policies
from mint_jax.lora.tree import spelled_out
from mint_jax.train.state import TrainStack
from mint_jax.train.trainer import Trainer

ADAPTERS = "adapters"  # the item of a checkpoint that restores without the rest


class TrainingRun:
    """Bookkeeping of one run, a context manager: the workdir is this process's until it ends; where
    it fails, the policies are given back.

    Args:
        config: of a training job, complete; where it names no ``catalog``, that is
            ``workdir/catalog``.
        workdir: claimed already.
        trainer: its state is saved and restored here.
        shapes: the books of padded sizes that each policy goes by: padding decides the order of
            sums, so an exact resume needs them too, as they were when the policy's last update was
            done. Policies that are always updated together may share.
        sampling: how a policy's rollouts are drawn; its revisions record it.

    Attributes:
        step: updates done by each policy.
        notes: anything JSON that the job wants back after a resume.
        catalog: where the policies' records are.
        fixed: digest or PEFT directory that a policy samples from, for those whose config has
            ``rollout_revision``.

    Raises:
        UserError: another process has the workdir, a policy is trained by another run, or the
            catalog's record of it is of another base or adapter config.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        trainer: Trainer,
        shapes: Mapping[str, Sequence[ShapeBook]],
        sampling: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ):
        self.config, self.workdir, self.trainer, self.shapes = config, workdir, trainer, shapes
        self.step = dict.fromkeys(trainer.policies, 0)
        self.notes: dict[str, Any] = {}
        self.names = {name: full_name(config.tenant, name) for name in trainer.policies}
        self._sampling = {self.names[name]: settings for name, settings in sampling.items()}
        self._recorder: Recorder | None = None
        self._snapshots: dict[str, Snapshot] = {}
        self._steps_at: dict[int, dict[str, int]] = {}  # by checkpoint, until it is recorded
        # what the books held after each policy's last update
        self._seen: dict[str, list[list[tuple[int, ...]]]] = {}
        self._durable: dict[str, int] | None = None  # steps of the newest checkpoint on the disk
        self._signal = 0  # that asked for an end
        self._updating = False
        self._hold: Hold | None = None
        multihost.agree("the workdir", self._take_workdir)
        try:
            self.catalog = JobCatalog(
                config.catalog or workdir / "catalog", config.payloads, create=True
            )
            try:
                self._begin()
            except BaseException:
                self._give_up()
                raise
        except BaseException:
            self._leave_workdir()
            raise

    def _take_workdir(self) -> None:
        self._hold = Hold(self.workdir)

    def _leave_workdir(self) -> None:
        if self._hold is not None:
            self._hold.release()

    def _begin(self) -> None:
        config, workdir = self.config, self.workdir
        schemas = {full: self._schema(name) for name, full in self.names.items()}
        wanted = {
            n: s.rollout_revision
            for n, s in config.policies.items()
            if s.get("rollout_revision", "")
        }
        losses = {n: p.loss for n, p in self.trainer.policies.items() if p.loss.needs_reference}
        named = {
            n: loss.reference
            for n, loss in losses.items()
            if loss.reference not in ("start", "base")
        }
        start, self.fixed, references, self._recorder = claim_policies(
            self.catalog, schemas, workdir / "run.json", wanted, self._hold, named
        )
        self._saved = Checkpoints(workdir / FOLDER, config.checkpoint.keep, self._committed)
        exported = self._restore()
        self.resumed = exported is not None
        if self._recorder is not None:
            self._recorder.resume(exported or {})
        self._continue(start)
        for name, text in references.items():
            loaded = adapters.read_adapter(text, self.trainer.base, self.catalog)
            self.trainer.refer(name, loaded.config, loaded.adapter)
        multihost.agree(
            "metrics.jsonl", lambda: metrics.truncate_rows(workdir / "metrics.jsonl", self.step)
        )
        self._writer = metrics.MetricsWriter(workdir, config.tensorboard)
        done = self.resumed and min(self.step.values()) >= config.steps
        named = {} if done else {"wandb": config.wandb, "mlflow": config.mlflow}
        self._trackers = trackers.Trackers(workdir, named, common.plain(config))
        self._remember_shapes(self.step)
        self._progress = metrics.Progress(
            config.job,
            config.steps * len(self.step),
            done=sum(self.step.values()),
            per=len(self.step),
            unit="steps",
        )
        self._due = min(self.step.values()) + config.checkpoint.every
        for name in self.trainer.policies:
            self._introduce(name)
        if self.resumed:
            self._committed(sum(self.step.values()))
        # a checkpoint does not wait for the revisions of its own step
        for name, step in self.step.items():
            if step and self._exports(step):
                self._export([name], step)

    def __enter__(self) -> "TrainingRun":
        interrupts.standing(self._resumes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        try:
            if kind is not None:
                self._writer.close()
                self._trackers.close(finished=False)
                # otherwise the others may be gone
                if multihost.count() == 1 or isinstance(error, KeyboardInterrupt):
                    with contextlib.suppress(UserError):  # the error that is on its way comes first
                        self._saved.close()  # a checkpoint in flight is finished
                self._give_up()
        finally:
            self._leave_workdir()
        if isinstance(error, KeyboardInterrupt):
            name = str(error) or "SIGINT"
            raise Interrupted(
                f"{name}; {self._resumes()}", getattr(error, "number", signal.SIGINT)
            ) from None

    def _resumes(self) -> str:
        """Where the same command goes on."""
        if self._durable is None:
            return (
                "no checkpoint was written yet: the same command starts from the beginning in"
                f" {self.workdir}"
            )
        steps = sorted(set(self._durable.values()))
        where = (
            f"step {steps[0]}"
            if len(steps) == 1
            else f"steps {steps[0]} to {steps[-1]} of its policies"
        )
        return (
            f"the same command goes on from {where} of {self.config.steps}, which is saved in"
            f" {self._saved.directory}"
        )

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """In this block Ctrl-C and SIGTERM save what the steps so far have learned; a second one
        does not wait for that.

        An update that is under way ends first, as does the whole step where several processes must
        agree. What else a step does (rollouts, rewards) is dropped, for the same command does it
        again; ``interrupts`` bounds all of it.

        Raises:
            Interrupted: after the checkpoint.
        """

        def note(number: int, frame: FrameType | None) -> None:
            again, self._signal = bool(self._signal), number
            if again or not (self._updating or multihost.count() > 1):
                interrupts.interrupt(number, frame)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, note) for number in interrupts.SIGNALS}
        try:
            yield
        except Interrupted:
            if not self._updating and multihost.count() == 1:
                self.save()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """From the update of a step until its ``record``: in between no checkpoint could be
        written, and no signal interrupts.
        """
        self._updating = True
        yield
        self._updating = False
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        number = multihost.agree("an interruption", lambda: self._signal)
        if number:
            if multihost.count() > 1:
                self.save()
            raise Interrupted(signal.Signals(number).name, number)

    def _give_up(self) -> None:
        """Releases the policies for the next run; what was submitted is finished first."""
        if self._recorder is not None:
            self._recorder.stop()
        self.catalog.close()

    def _schema(self, name: str) -> Schema:
        return Schema(
            self.trainer.base.fingerprint,
            spelled_out(self.trainer.policies[name].adapter, self.trainer.specs),
        )

    def _adapters(self) -> dict[str, Any]:
        """What a checkpoint has as its item ``adapters``: stacks by bucket. ``_where`` names the
        policy of each slot.
        """
        return {str(bucket): stack.adapters for bucket, stack in self.trainer.state.items()}

    def _arrays(self) -> dict[str, Any]:
        """The rest of the training state: moments, gradient sums, counters."""
        rest = [field.name for field in dataclasses.fields(TrainStack) if field.name != ADAPTERS]
        return {
            str(bucket): {name: getattr(stack, name) for name in rest}
            for bucket, stack in self.trainer.state.items()
        }

    def _where(self) -> dict[str, Any]:
        """For programs that read the item ``adapters`` alone: a policy's stack, slot (axis 1) and
        schema, with the true rank.
        """
        schemas = {name: json.loads(self._schema(name).to_json()) for name in self.trainer.policies}
        slots = self.trainer.slots
        return {
            name: {
                "bucket": str(slots[name].bucket),
                "slot": slots[name].index,
                "schema": schemas[name],
            }
            for name in schemas
        }

    def _restore(self) -> dict[str, int] | None:
        """Takes up the newest checkpoint; the revisions that each policy had then, None without a
        checkpoint.
        """
        if (number := self._saved.latest()) is None:
            return None
        wanted, apart = self._arrays(), self._saved.has(number, ADAPTERS)
        if not apart:  # written before adapters were an item of their own
            wanted = {
                bucket: rest | {ADAPTERS: self.trainer.state[int(bucket)].adapters}
                for bucket, rest in wanted.items()
            }
        injected = self._saved.has_array(number, "inner_state")
        if injected:
            wanted = {bucket: rest | {"opt": _injected(rest)} for bucket, rest in wanted.items()}
        _, arrays, extra = self._saved.restore(wanted, number)
        if injected:
            arrays = {
                bucket: rest | {"opt": rest["opt"]["inner_state"]}
                for bucket, rest in arrays.items()
            }
        if apart:
            found = self._saved.restore_item(number, ADAPTERS, self._adapters())
            arrays = {bucket: rest | {ADAPTERS: found[bucket]} for bucket, rest in arrays.items()}
        self.trainer.state = {int(bucket): TrainStack(**stack) for bucket, stack in arrays.items()}
        self._steps_at[number] = extra["step"]
        self.step, self.notes = extra["step"], extra["notes"]
        for name, books in self.shapes.items():
            # in checkpoints of before a list, that of updates first: all policies shared their
            # books
            shapes = extra["shapes"]
            held = shapes[::-1] if isinstance(shapes, list) else shapes[name]
            # those of sampling came first, as long as it had some
            for book, seen in zip(books, held[-len(books) :]):
                book.shapes = [tuple(shape) for shape in seen]
        at = sorted(set(self.step.values()))
        policies = (
            ""
            if len(at) == 1
            else ": " + ", ".join(f"{n} at step {s}" for n, s in self.step.items())
        )
        common.say(
            f"resumed at step {' to '.join(map(str, at[:: max(1, len(at) - 1)]))} of"
            f" {self.config.steps}{policies}"
        )
        return extra["exported"]

    def _continue(self, start: dict[str, str]) -> None:
        """Policies that the catalog had before this run go on from their last revision, with a
        fresh optimizer.

        A resumed run has its state already; where its reference is that revision, it is looked up
        again.
        """
        for name, full in self.names.items():
            policy = self.trainer.policies[name]
            refers = policy.loss.needs_reference and policy.loss.reference == "start"
            if full not in start or (self.resumed and not refers):
                continue
            loaded = adapters.read_adapter(start[full], self.trainer.base, self.catalog)
            if self.resumed:
                self.trainer.refer(name, loaded.config, loaded.adapter)
            else:
                common.say(
                    f"policy {name} exists in the catalog: it continues from revision"
                    f" {loaded.revision}"
                )
                self.trainer.load_adapter(name, loaded.adapter)

    def _introduce(self, name: str) -> None:
        config, bucket = self.trainer.policies[name].adapter, self.trainer.slots[name].bucket
        size, stack = self.adapter_bytes(name), self.trainer.state[bucket]
        share = 100 * size / self.trainer.base.full_bytes
        common.say(
            f"policy {name}: rank {config.rank}, adapter {size / 1e6:.2f} MB ({share:.2f} % of the"
            f" base), {params_lib.nbytes(stack) / stack.steps.shape[0] / 1e6:.2f} MB with gradients"
            " and optimizer state"
        )

    def adapter_bytes(self, name: str) -> int:
        """Float32 bytes of a policy's factors at its true rank."""
        return params_lib.nbytes(self.trainer.adapter(name))

    def snapshot(self, name: str) -> Snapshot:
        """A policy's present adapter; one copy for all who ask between two updates. All processes
        must call it.
        """
        if name not in self._snapshots:
            self._snapshots[name] = Snapshot(
                self.trainer.snapshot(name), self._schema(name), self.trainer.versions[name]
            )
        return self._snapshots[name]

    @property
    def finished(self) -> bool:
        """Whether an earlier start of the same command did every step and left its result."""
        done = self.resumed and min(self.step.values()) >= self.config.steps
        return multihost.agree(
            "whether the run is finished", lambda: done and (self.workdir / "result.json").is_file()
        )

    def result(self) -> dict[str, Any]:
        """The result that the finished run left; nothing is written, and ``latest`` stays where it
        is.
        """
        self._saved.close()
        self._writer.close()
        self._give_up()
        common.say(
            f"all {self.config.steps} steps were done before: this is their result; set"
            " --config.steps higher to train on"
        )
        return multihost.agree(
            "the result", lambda: json.loads((self.workdir / "result.json").read_text())
        )

    @property
    def keeps_rollouts(self) -> bool:
        """Whether ``keep`` is wanted."""
        return self.config.keep_rollouts > 0

    def keep(
        self, name: str, step: int, drawn_by: Snapshot | str, rollouts: Callable[[str], Rollouts]
    ) -> None:
        """Records a policy's rollouts of a step, off this thread.

        Args:
            step: updates behind the policy when they were drawn.
            drawn_by: the adapter that drew all their tokens, or its digest.
            rollouts: makes the object from that digest.
        """
        if self._recorder is None:
            return
        full, last = self.names[name], self.config.keep_rollouts

        def make(recorded: int) -> tuple[bytes, int, float]:
            made = rollouts(drawn_by if isinstance(drawn_by, str) else drawn_by.digest)
            tokens = sum(len(row) for group in made.tokens for row in group)
            data = pack_rollouts(dataclasses.replace(made, policy=full, step=recorded))
            return data, tokens, float(np.mean(made.rewards))

        self._recorder.rollout(full, step, make, last)

    def measures(self, step: int) -> bool:
        """Whether policies are measured on held-out data after this step."""
        return self.config.eval_every > 0 and (step + 1) % self.config.eval_every == 0

    def record(
        self,
        step: int,
        rows: dict[str, dict[str, Any]],
        detail: str,
        scores: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Notes one update of some policies: metrics, progress, and exports and a checkpoint when
        they are due.

        Args:
            scores: on held-out data after the update, higher is better. A policy's best so far
                becomes the revision that its alias ``best`` names.
        """
        for name, row in rows.items():
            self.step[name] = step + 1
            self._snapshots.pop(name, None)
            self._writer.write(step, name, row)
            self._trackers.write(step, name, row)
            if row.get("skipped"):
                common.say(
                    f"policy {name}: the gradient of step {step + 1} was not finite; the update was"
                    " skipped"
                )
        self._remember_shapes(rows)
        self._progress.update(sum(self.step.values()), detail)
        due = min(self.step.values()) >= self._due
        if due and self._recorder is not None:
            # a resumed run does not come back to the steps before its checkpoint
            self._recorder.drain()
        best = self.notes.setdefault("best", {})
        better = {
            name: score
            for name, score in scores.items()
            if name not in best or score > best[name][0]
        }
        if self._exports(step + 1):
            self._export(rows, step + 1)
        elif better:
            self._export(better, step + 1)
        for name, score in better.items():
            best[name] = [score, step + 1]
            snapshot = self.snapshot(name)
            if self._recorder is not None:
                self._recorder.promote(
                    self.names[name],
                    snapshot,
                    "best",
                    f"best on held-out data so far, after step {step + 1}",
                )
        if due:
            self.save()
            self._due = min(self.step.values()) + self.config.checkpoint.every

    def _remember_shapes(self, names: Iterable[str]) -> None:
        """A checkpoint comes while other policies' rollouts are under way: these are done again, so
        their sizes must be forgotten.
        """
        for name in names:
            self._seen[name] = [list(book.shapes) for book in self.shapes[name]]

    def _exports(self, step: int) -> bool:
        return step % self.config.export_every == 0 or step == self.config.steps

    def _export(self, names: Iterable[str], step: int, final: bool = False) -> None:
        """The copies to the host begin now; packing and writing run beside the next step."""
        snapshots = {name: self.snapshot(name) for name in names}
        if self._recorder is not None:
            origin = f"{self.config.job} in {self.workdir}"
            self._recorder.export(
                {self.names[name]: s for name, s in snapshots.items()},
                step,
                origin,
                self._sampling,
                final,
            )

    def save(self) -> None:
        """Starts a checkpoint of all policies, unless this very state is saved already."""
        number = sum(self.step.values())
        self._saved.wait()
        if number and self._saved.latest() != number:
            exported = self._recorder.numbers if self._recorder is not None else {}
            extra = {
                "step": self.step,
                "notes": self.notes,
                "shapes": self._seen,
                "exported": exported,
                ADAPTERS: self._where(),
            }
            self._steps_at[number] = dict(self.step)
            self._saved.save(
                number, self._arrays(), json.loads(json.dumps(extra)), {ADAPTERS: self._adapters()}
            )

    def _committed(self, number: int) -> None:
        """Records a checkpoint that is durable. It is of all policies; its number is the sum of
        their steps.
        """
        steps = self._durable = self._steps_at.pop(number)
        if self._recorder is not None:
            place = str(self._saved.directory / f"step_{number}")
            self._recorder.checkpoint(
                place,
                {self.names[name]: step for name, step in steps.items()},
                self.config.checkpoint.keep,
            )

    def close(self) -> dict[str, tuple[str, int]]:
        """Saves, waits for everything in flight, gives the policies back, and returns digest and
        number of each final revision.
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
        self._give_up()
        return {name: (digest, number) for name, (digest, number) in final.items()}


def _injected(rest: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state as checkpoints had it while ``optax.inject_hyperparams`` kept its
    numbers a second time.
    """
    names = ("learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm")
    numbers = {name: getattr(rest["hyper"], name) for name in names}
    return {
        "count": rest["steps"],
        "hyperparams": numbers,
        "hyperparams_states": {},
        "inner_state": rest["opt"],
    }

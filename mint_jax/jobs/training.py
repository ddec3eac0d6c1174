"""The side of a training job that survives it: metrics, checkpoints, exported revisions, resuming, progress.

Everything a step does follows from the config, its number and the adapters, so what must be saved is the training state
and where each policy stands. Of several processes the first writes metrics and revisions; checkpoints are written by all.
"""

import concurrent.futures
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mint_jax import metrics, multihost
from mint_jax import params as params_lib
from mint_jax.catalog.revisions import RevisionStore, Schema, pack
from mint_jax.checkpoint import Checkpoints
from mint_jax.data.buckets import ShapeBook
from mint_jax.jobs import common
from mint_jax.jobs.common import Config
from mint_jax.train.trainer import Trainer


class TrainingRun:
    """Bookkeeping of one run.

    Args:
        config: needs ``job``, ``steps``, ``export_every`` and ``checkpoint.every``, ``checkpoint.keep``.
        workdir: claimed already.
        trainer: its state is saved and restored here.
        shapes: the books of compiled shapes that the run goes by: padding decides the order of sums, so an exact resume
            needs them too.

    Attributes:
        step: updates done by each policy.
        notes: anything JSON that the job wants back after a resume.
    """

    def __init__(self, config: Config, workdir: Path, trainer: Trainer, shapes: Sequence[ShapeBook]):
        self.config, self.workdir, self.trainer, self.shapes = config, workdir, trainer, shapes
        self.step = dict.fromkeys(trainer.policies, 0)
        self.notes: dict[str, Any] = {}
        self.store = RevisionStore(workdir / "revisions")
        self._log = workdir / "revisions.jsonl"
        self._exporter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="export")
        self._exports: list[concurrent.futures.Future] = []
        self._saved = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
        self.resumed = self._restore()
        multihost.agree("metrics.jsonl", lambda: metrics.truncate_rows(workdir / "metrics.jsonl", self.step))
        self._writer = metrics.MetricsWriter(workdir, config.get("tensorboard", True))
        self._progress = metrics.Progress(config.job, config.steps * len(self.step), done=sum(self.step.values()))
        self._due = min(self.step.values()) + config.checkpoint.every
        for name in trainer.policies:
            self._introduce(name)

    def _arrays(self) -> dict[str, Any]:
        return {str(bucket): stack for bucket, stack in self.trainer.state.items()}

    def _restore(self) -> bool:
        if self._saved.latest() is None:
            return False
        number, arrays, extra = self._saved.restore(self._arrays())
        self.trainer.state = {int(bucket): stack for bucket, stack in arrays.items()}
        self.step, self.notes = extra["step"], extra["notes"]
        for book, seen in zip(self.shapes, extra["shapes"]):
            book.seen = [tuple(shape) for shape in seen]
        common.say(f"resumed checkpoint {number}: " + ", ".join(f"{n} at step {s}" for n, s in self.step.items()))
        return True

    def _introduce(self, name: str) -> None:
        config, bucket = self.trainer.policies[name].adapter, self.trainer.slots[name].bucket
        size, stack = self.adapter_bytes(name), self.trainer.state[bucket]
        common.say(
            f"policy {name}: rank {config.rank}, adapter {size / 1e6:.2f} MB ({100 * size / self.trainer.base.nbytes:.2f} % of the base), "
            f"{params_lib.nbytes(stack) / stack.steps.shape[0] / 1e6:.2f} MB with gradients and optimizer state"
        )

    def adapter_bytes(self, name: str) -> int:
        """Float32 bytes of a policy's factors at its true rank."""
        return params_lib.nbytes(self.trainer.adapter(name))

    def packed(self, name: str) -> bytes:
        """A policy's present adapter as a packed revision."""
        schema = Schema(self.trainer.base.fingerprint, self.trainer.policies[name].adapter)
        return pack(self.trainer.adapter(name), schema)

    def record(self, step: int, rows: dict[str, dict[str, Any]], detail: str) -> None:
        """Notes one update of some policies: metrics, progress, and exports and a checkpoint when they are due."""
        for name, row in rows.items():
            self.step[name] = step + 1
            self._writer.write(step, name, row)
            if row.get("skipped"):
                common.say(f"policy {name}: the gradient of step {step + 1} was not finite; the update was skipped")
        self._progress.update(sum(self.step.values()), detail)
        if (step + 1) % self.config.export_every == 0 or step + 1 == self.config.steps:
            self._export(rows, step + 1)
        if min(self.step.values()) >= self._due:
            self.save()
            self._due = min(self.step.values()) + self.config.checkpoint.every

    def _export(self, names: Iterable[str], step: int) -> None:
        for name in names:  # the copy to the host is made now; packing and writing run beside the next step
            data = self.packed(name)
            if multihost.is_main():
                self._exports.append(self._exporter.submit(self._write_revision, name, step, data))

    def _write_revision(self, name: str, step: int, data: bytes) -> str:
        digest = self.store.put(data)
        with self._log.open("a") as file:
            file.write(json.dumps({"policy": name, "step": step, "revision": digest, "bytes": len(data), "time": time.time()}) + "\n")
        return digest

    def save(self) -> None:
        """Starts a checkpoint of all policies, unless this very state is saved already."""
        number = sum(self.step.values())
        self._saved.wait()
        if number and self._saved.latest() != number:
            extra = {"step": self.step, "notes": self.notes, "shapes": [book.seen for book in self.shapes]}
            self._saved.save(number, self._arrays(), json.loads(json.dumps(extra)))

    def close(self) -> dict[str, str]:
        """Saves, waits for everything in flight, and returns each policy's final revision."""
        self.save()
        packed = {name: self.packed(name) for name in self.trainer.policies}

        def finish() -> dict[str, str]:
            for export in self._exports:
                export.result()
            return {name: self.store.put(data) for name, data in packed.items()}  # the last export, found again

        final = multihost.agree("final revisions", finish)
        self._saved.close()
        self._writer.close()
        self._exporter.shutdown()
        return final

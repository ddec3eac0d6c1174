"""What every job does first: claim the workdir, open the base, and turn config sections into
dataclasses.

Where several processes run, all of them run the job; the first alone speaks and writes.
"""

import dataclasses
import hashlib
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mint_jax import host, mesh, multihost, stamp, trackers
from mint_jax.data import chat
from mint_jax.data.order import epoch_indices
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.jobs import hold, preflight, settings
from mint_jax.jobs.settings import Config, build
from mint_jax.lora.tree import AdapterConfig
from mint_jax.metrics import Progress
from mint_jax.models import base as base_lib
from mint_jax.models.base import Base
from mint_jax.models.config import Kernels
from mint_jax.train.config import LossConfig, OptimizerConfig, PolicyConfig

# a resumed run may differ in these
FREE_TO_CHANGE = (
    "steps",
    "export_every",
    "checkpoint",
    "reward_workers",
    "reward_timeout",
    "keep_rollouts",
    "cache_gib",
    "kernels",
    "tensorboard",
    "wandb",
    "mlflow",
)


def kernels_of(config: Config) -> Kernels:
    """``config.kernels``.

    Raises:
        UserError: an implementation that there is not.
    """
    return build(Kernels, config.kernels, "kernels")


def say(message: str) -> None:
    """A line for the person watching; results go to stdout, everything else to stderr."""
    if multihost.is_main():
        print(message, file=sys.stderr, flush=True)


def save_result(result: dict[str, Any], workdir: Path, config: Config) -> None:
    """Writes ``result.json``, with the stamp that says where it comes from at its end.

    A result that has its stamp already, of a run that was finished before, keeps it.
    """
    if multihost.is_main():
        write_file(
            workdir / "result.json",
            json.dumps(result | {"stamp": result.get("stamp") or stamp.stamp(plain(config))})
            + "\n",
        )


def save_config(config: Config, workdir: Path) -> None:
    """Saves the resolved config beside what the job will write.

    Raises:
        UserError: the workdir cannot be written.
    """
    multihost.require_same("the config", lambda: plain(config))
    multihost.agree("config.json", lambda: _write_config(config, workdir))


def _write_config(config: Config, workdir: Path) -> None:
    try:
        write_file(
            workdir / "config.json", json.dumps(plain(config), indent=1, sort_keys=True) + "\n"
        )
    except OSError as error:
        raise UserError(
            f"workdir {workdir} cannot be written ({error}): choose another --workdir"
        ) from None


def claim_workdir(config: Config, workdir: Path) -> None:
    """``save_config`` for a job that resumes what its workdir holds.

    A start that ended before its first step holds nothing: another config may follow it.

    Raises:
        UserError: the workdir holds steps of another config, or a living process has it.
    """
    trackers.check({name: config[name] for name in preflight.TRACKERS})
    hold.refuse_if_held(workdir)

    def look() -> None:
        try:
            _refuse_other_config(workdir / "config.json", plain(config), workdir)
        except UserError:
            if _has_steps(workdir):
                raise
            _forget_start(workdir / "run.json")
            (workdir / "trackers.json").unlink(missing_ok=True)

    multihost.agree("workdir", look)
    save_config(config, workdir)


def _has_steps(workdir: Path) -> bool:
    """Whether a run left anything that depends on its config: a row of metrics, which every step
    writes first, or a checkpoint.
    """
    rows = workdir / "metrics.jsonl"
    return (rows.is_file() and rows.stat().st_size > 0) or any(workdir.glob("checkpoints/*"))


def _forget_start(file: Path) -> None:
    """Keeps the run's identity, by which it takes back its policies; where they began was another
    config's.
    """
    try:
        run = json.loads(file.read_text())
    except FileNotFoundError:
        return
    except ValueError:
        run = {}
    write_file(file, json.dumps({"id": run["id"]}) if "id" in run else "{}")


def plain(config: Config) -> dict[str, Any]:
    plain = json.loads(config.to_json_best_effort())
    if isinstance(plain.get("catalog"), str):  # a database's password stays out of files
        plain["catalog"] = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", plain["catalog"])
    return plain


def _refuse_other_config(path: Path, mine: dict[str, Any], workdir: Path) -> None:
    if not path.is_file():
        return

    def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {prefix: tree}
        return {
            k: v
            for name, child in tree.items()
            for k, v in flat(child, f"{prefix}.{name}" if prefix else name).items()
        }

    # one that was saved before a setting existed has its default
    old, new = (flat(settings.filled(config)) for config in (json.loads(path.read_text()), mine))
    for key in sorted(old.keys() | new.keys()):
        if key.split(".")[0] not in FREE_TO_CHANGE and old.get(key) != new.get(key):
            raise UserError(
                f"workdir {workdir} holds a run with {key}={old.get(key)!r}, this one has"
                f" {new.get(key)!r}: choose another --workdir, or remove that folder, or repeat its"
                " config to resume it"
            )


def cache_bytes(config: Config) -> int | None:
    """Bytes of the sampler's cache; None where the engine is to choose.

    Raises:
        UserError: a negative or infinite size.
    """
    if not 0 <= config.cache_gib < 2**30:
        raise UserError(f"cache_gib is {config.cache_gib}; expected GiB of cache, or 0")
    return int(config.cache_gib * 2**30) or None


def open_base(config: Config) -> Base:
    """Builds the mesh and loads the base, with progress.

    Raises:
        UserError: the devices belong to more processes than have joined, or these have different
            bases.
    """
    if jax.process_count() != multihost.count():
        raise UserError(
            f"these devices belong to {jax.process_count()} processes, of which {multihost.count()}"
            " joined: start all with --distributed"
        )
    if jax.process_index() != multihost.index():
        raise UserError(
            f"MINT_PROCESS is {multihost.index()} on host {jax.process_index()} of this slice: use"
            " --distributed in its place"
        )
    devices = mesh.make_mesh(dict(config.mesh))
    began, progress = time.monotonic(), None

    def report(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or Progress("loading base", total, per=1e6, unit="MB")
        progress.update(done)

    base = base_lib.load(
        config.base,
        devices,
        config.dtype,
        report,
        config.quantise,
        kernels_of(config),
        config.as_stored,
    )
    multihost.require_same("the base", lambda: base.fingerprint)
    processes = f" of {multihost.count()} processes" if multihost.count() > 1 else ""
    say(
        f"base {base.name}: {base.nbytes / 1e6:.0f} MB in {base.weights} on {devices.size}"
        f" device(s){processes} in {time.monotonic() - began:.1f} s, resident"
        f" {host.rss_bytes() / 1e9:.2f} GB"
    )
    return base


def policy_seed(seed: int, name: str) -> int:
    """A policy's own seed, 32 bits, from the run's seed and its name alone: which other policies a
    config names changes nothing.

    Raises:
        UserError: the run's seed is negative.
    """
    if seed < 0:
        raise UserError(f"seed is {seed}; expected a whole number >= 0")
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u4")
    return int(np.random.SeedSequence([seed, *words.tolist()]).generate_state(1)[0])


def policy_config(name: str, section: Config, seed: int) -> PolicyConfig:
    """A ``PolicyConfig`` from ``config.policies.<name>``."""
    where = f"policies.{name}"
    adapter = build(AdapterConfig, section.get("adapter", {}), f"{where}.adapter")
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        raise UserError(
            f"{where}.adapter.alpha is {adapter.alpha}; expected a finite number above 0: the"
            " adapter's scale is alpha / rank"
        )
    optimizer = build(OptimizerConfig, section.get("optimizer", {}), f"{where}.optimizer")
    loss = build(LossConfig, section.get("loss", {}), f"{where}.loss")
    return PolicyConfig(name, adapter, optimizer, loss, int(section.get("seed", seed)))


@dataclasses.dataclass
class PolicyData:
    """What one policy of a run learns from and is measured on.

    Attributes:
        seed: of its order.
        train, held_out: examples as its job takes them: prompts' token ids, or groups with their
            targets.
        per_step: examples of an update.
    """

    name: str
    seed: int
    train: list[Any]
    held_out: list[Any]
    per_step: int

    def chosen(self, step: int) -> list[int]:
        """Which of ``train`` a step takes."""
        return epoch_indices(len(self.train), self.per_step, self.seed, step)


def seed_of(config: Config, name: str) -> int:
    """A policy's seed: its own setting, or ``policy_seed``."""
    return int(config.policies[name].get("seed", policy_seed(config.seed, name)))


def encode(base: Base, prompt: Any) -> list[int]:
    """Token ids of a prompt: text as it is, messages through the chat template with the reply's
    opening.
    """
    tokenizer = base.need_tokenizer()
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat(chat.messages_of(prompt, "prompt", "an example"))

"""The first steps of every recipe: messages, the base, and the policies with their seeds."""

import dataclasses
import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mint_jax import compiling, host, mesh, multihost
from mint_jax.data import chat
from mint_jax.data.order import epoch_indices, further_indices
from mint_jax.errors import UserError
from mint_jax.harness.options import BaseSettings, PolicySettings
from mint_jax.metrics import Progress
from mint_jax.models import base as base_lib
from mint_jax.models.base import Base
from mint_jax.models.names import cache_dir
from mint_jax.train.config import PolicyConfig


@functools.cache
def prepare() -> None:
    """Sets up the process for JAX, once."""
    host.leave_out_absent_tpu()
    host.threads_for_simulated_devices()
    host.keep_freed_memory()
    host.run_in_the_calling_thread()
    host.use_compilation_cache(cache_dir() / "compiled")
    compiling.announce()


def say(message: str) -> None:
    """Prints a line on stderr, in the first process; stdout is for results."""
    if multihost.is_main():
        print(message, file=sys.stderr, flush=True)


def bytes_progress(what: str) -> Callable[[int, int], None]:
    """Returns a function of done and total bytes, which prints the progress in MB."""
    bars: list[Progress] = []

    def report(done: int, total: int) -> None:
        bars[:] = bars or [Progress(what, total, per=1e6, unit="MB")]
        bars[0].update(done)

    return report


def open_base(config: BaseSettings) -> Base:
    """Builds the mesh and loads the base. Raises ``UserError`` if some processes of the devices
    have not joined, or have a different base.
    """
    there = jax.process_index(), jax.process_count()
    joined = multihost.index(), multihost.count()
    if there != joined:
        raise UserError(
            "this is process {} of {} of these devices, and joined as {} of {}: start all with"
            " --distributed".format(*there, *joined)
        )
    devices = mesh.make_mesh(vars(config.mesh))
    began, report = time.monotonic(), bytes_progress("loading base")
    how = config.dtype, report, config.quantise, config.kernels, config.as_stored
    base = base_lib.load(config.base, devices, *how)
    multihost.require_same("the base", lambda: base.fingerprint)
    processes = f" of {multihost.count()} processes" if multihost.count() > 1 else ""
    say(
        f"base {base.name}: {base.nbytes / 1e6:.0f} MB in {base.weights} on {devices.size}"
        f" device(s){processes} in {time.monotonic() - began:.1f} s, resident"
        f" {host.rss_bytes() / 1e9:.2f} GB"
    )
    return base


def encode(base: Base, prompt: Any, variables: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the token ids of a prompt: text as it is, messages through the chat template with its
    variables, opening the reply. Raises ``UserError``: text has no template.
    """
    tokenizer = base.need_tokenizer()
    if not isinstance(prompt, str):
        row = {"messages": prompt, "chat_template_kwargs": dict(variables or {})}
        return chat.prompt_tokens(tokenizer, row, "prompt of an example")
    if variables:
        raise UserError(
            f"chat_template_kwargs sets {', '.join(variables)}, but a prompt is plain text, which"
            f" no chat template renders ({prompt[:40]!r}): leave it out, or give messages"
        )
    return tokenizer.encode(prompt)


def policy_seed(seed: int, name: str) -> int:
    """Returns a policy's 32-bit seed, from the run's seed and its name alone."""
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u4")
    return int(np.random.SeedSequence([seed, *words.tolist()]).generate_state(1)[0])


def check_alpha(alpha: float, where: str = "") -> None:
    if not 0 < alpha < math.inf:
        raise UserError(
            f"{where}alpha is {alpha}; expected a finite number above 0: the adapter's scale is"
            " alpha / rank"
        )


def policy_config(name: str, policy: PolicySettings, run_seed: int) -> PolicyConfig:
    """Returns the trainer's config of a policy."""
    check_alpha(policy.adapter.alpha, f"policies.{name}.adapter.")
    seed = policy_seed(run_seed, name) if policy.seed is None else policy.seed
    how = policy.adapter, policy.optimizer, policy.loss, seed, policy.init, policy.dropout
    return PolicyConfig(name, *how)


@dataclasses.dataclass
class PolicyData:
    """Examples of one policy: token ids of prompts, or groups; ``per_step`` make an update."""

    config: PolicyConfig
    train: list[Any]
    held_out: list[Any]
    per_step: int

    def chosen(self, step: int) -> list[int]:
        """Returns the indices into ``train`` of a step."""
        return epoch_indices(len(self.train), self.per_step, self.config.seed, step)

    def further(self, step: int) -> list[int]:
        """Returns the indices that replace some of a step's, in order."""
        return further_indices(len(self.train), self.chosen(step), self.config.seed, step)

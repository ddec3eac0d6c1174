"""The sampling engine against torch and transformers, against itself, and against memory bandwidth.

``ratio_decode_R``: greedy tokens a second of R cached rows over those of transformers; ``in_full``
is the same with our base in float32. ``ratio_prefill``: prompt tokens a second to the first new
token. ``ratio_continuous``: tokens a second on ragged lengths over a lockstep loop over groups of
equal prompts, ``idle_rows_free`` where its ended rows cost nothing; ``static_rows_busy`` is the
share of its rows and steps that sample. ``ratio_prefix``: one request of n samples over n requests.
``bandwidth_shares``: bytes that a step must read over its time, of the bandwidth of a sum, which is
faster here than a matrix product or a copy (79, 39 and 76 GB/s).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.bases import open_base
from benchmarks.torch_peer import CACHES, TorchPeer, search
from mint_jax.errors import UserError, choice
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request

_tenants = (f"bench {k}" for k in itertools.count())  # each reads its prompts itself


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    for part in config.parts:
        if part not in PARTS:
            raise choice("part of the bench", part, PARTS)
    base = open_base(config)
    report = {"base": base.name, "dtype": config.dtype, "weights": base.weights}
    for part in config.parts:
        rng = np.random.default_rng(config.seed)
        if part == "decode" and base.weights == "blocks":
            report |= _decode(config, base, rng, open_base({**config, "as_stored": False}))
        else:
            report |= PARTS[part](config, base, rng)
    return report


def _prompts(base: Base, rng: np.random.Generator, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(rng.integers(3, base.cfg.vocab_size, length).tolist()) for length in lengths]


def _fixed(base: Base, rows: int, **options: Any) -> Engine:
    """An engine with one program of decoding."""
    return Engine(base, max_rows=rows, rows=(rows,), **options)


# -- against transformers


def _decode(
    config: Any, base: Base, rng: np.random.Generator, in_full: Base | None = None
) -> dict[str, Any]:
    part, out = config.decode, {}
    if part.context % PAGE:
        raise UserError(
            f"config.decode.context is {part.context}: give a multiple of {PAGE}, whole pages stay"
            " in the cache"
        )
    peer = TorchPeer(base.directory)
    x_ND, add_up = jnp.ones((max(1, config.read_bytes >> 12), 1024), jnp.float32), jax.jit(jnp.sum)
    shares: dict[str, timing.Figure] = {}
    for rows in part.rows:
        prompts = _prompts(base, rng, [part.context + 1] * rows)
        tokens = np.array(prompts)
        tried = search(peer, lambda tokens=tokens: peer.decoder(tokens, part.trial_tokens))
        engines = {"ours": _fixed(base, rows)}
        if in_full:
            engines["in_full"] = _fixed(in_full, rows)
        requests = [Request(prompt, max_tokens=part.tokens, temperature=0.0) for prompt in prompts]
        for engine in engines.values():
            engine.generate(requests)
        read = [engine.counts["prefilled_tokens"] for engine in engines.values()]
        last: dict[str, np.ndarray] = {}

        def ours(name: str, asked: Any = requests, of: Any = engines, last: Any = last) -> None:
            last[name] = np.array([c.tokens for [c] in of[name].generate(asked)])

        def peers(draw: Any = peer.decoder(tokens, part.tokens), last: Any = last) -> None:
            last["peer"] = draw()

        sides = {name: functools.partial(ours, name) for name in engines}
        sides |= {"peer": peers, "read": lambda: jax.block_until_ready(add_up(x_ND))}
        times = timing.in_turn(f"decoding {rows} rows", sides, config.n)
        if [engine.counts["prefilled_tokens"] for engine in engines.values()] != read:
            raise RuntimeError("prompts were to stay in the cache, and were read again")
        step = _step_bytes(base, rows, part.context + 1 + (part.tokens - 1) / 2)
        a_byte = {
            "read": [seconds / x_ND.nbytes for seconds in times["read"]],
            "step": [seconds / (part.tokens * step) for seconds in times["ours"]],
        }
        shares[str(rows)] = timing.ratio(a_byte, "read", "step")
        out |= {
            f"ratio_decode_{rows}": timing.ratio(times, "peer", "ours"),
            f"decode_{rows}_seconds": timing.medians_of(times),
            f"decode_{rows}_same_tokens": _same(last),
            f"decode_{rows}_step_bytes": round(step),
            f"peer_options_decode_{rows}": str(peer.options),
            f"peer_candidates_s_decode_{rows}": tried,
        }
        if in_full:
            out[f"ratio_decode_{rows}_in_full"] = timing.ratio(times, "peer", "in_full")
    return out | {"bandwidth_share": shares[str(part.rows[0])], "bandwidth_shares": shares}


def _same(last: dict[str, np.ndarray]) -> float:
    """Returns the share of equal tokens."""
    return round(float((last["ours"] == last["peer"]).mean()), 3)


def _step_bytes(base: Base, rows: int, length: float) -> float:
    """Bytes that a step of a dense base reads at least: weights that multiply, and ``length``
    positions of each row.
    """
    cfg = base.cfg
    # of which a row reads one line
    table = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model * base.dtype.itemsize
    position = device.page_bytes(cfg, base.dtype, False) / PAGE
    return base.nbytes - table + rows * length * position


def _prefill(config: Any, base: Base, rng: np.random.Generator) -> dict[str, Any]:
    part = config.prefill
    peer, engine = TorchPeer(base.directory), _fixed(base, part.rows)
    prompts = _prompts(base, rng, [part.prompt] * part.rows)
    tried = search(peer, lambda: lambda: peer.prefill(np.array(prompts)), CACHES[:1])
    last: dict[str, Any] = {}

    def ours() -> None:
        how = {"max_tokens": 1, "temperature": 0.0, "tenant": next(_tenants)}
        answers = engine.generate([Request(prompt, **how) for prompt in prompts])
        last["ours"] = np.array([c.tokens[0] for [c] in answers])

    def peers() -> None:
        last["peer"] = peer.prefill(np.array(prompts))

    times = timing.in_turn("prefill", {"ours": ours, "peer": peers}, config.n)
    return {
        "ratio_prefill": timing.ratio(times, "peer", "ours"),
        "prefill_seconds": timing.medians_of(times),
        "prefill_tokens": part.rows * part.prompt,
        "prefill_same_tokens": _same(last),
        "peer_options_prefill": str(peer.options),
        "peer_candidates_s_prefill": tried,
    }


# -- against itself without a part


def _continuous(config: Any, base: Base, rng: np.random.Generator) -> dict[str, Any]:
    part = config.continuous
    engine = _fixed(base, part.rows)
    lengths = rng.integers(part.prompt[0], part.prompt[1] + 1, part.requests)
    tokens = rng.integers(part.tokens[0], part.tokens[1] + 1, part.requests).tolist()
    prompts = _prompts(base, rng, lengths.tolist())
    # a group begins when all rows of the one before it have ended
    order = sorted(range(part.requests), key=lambda i: len(prompts[i]))
    groups = [order[k : k + part.rows] for k in range(0, part.requests, part.rows)]
    longest = {i: max(tokens[j] for j in group) for group in groups for i in group}
    said: dict[str, list[list[int]]] = {}

    def side(name: str, groups: list[Sequence[int]], most: Any) -> None:
        how, found = {"temperature": 0.0, "tenant": next(_tenants)}, {}
        for group in groups:
            asked = [Request(prompts[i], max_tokens=most[i], **how) for i in group]
            found |= {i: c.tokens[: tokens[i]] for i, [c] in zip(group, engine.generate(asked))}
        said[name] = [found[i] for i in range(part.requests)]

    engine.warm()
    sides = {
        "continuous": ([range(part.requests)], tokens),
        "lockstep": (groups, longest),
        "static": (groups, tokens),
    }
    calls = {name: functools.partial(side, name, *how) for name, how in sides.items()}
    times = timing.in_turn("ragged lengths", calls, config.n, warm=0)
    return {
        "ratio_continuous": timing.ratio(times, "lockstep", "continuous"),
        "ratio_continuous_idle_rows_free": timing.ratio(times, "static", "continuous"),
        "continuous_seconds": timing.medians_of(times),
        "continuous_tokens": sum(tokens),
        "continuous_same_tokens": said["continuous"] == said["static"] == said["lockstep"],
        "static_rows_busy": round(sum(tokens) / sum(longest.values()), 3),
    }


def _prefix(config: Any, base: Base, rng: np.random.Generator) -> dict[str, Any]:
    part = config.prefix
    engine = _fixed(base, part.samples)
    prompts = _prompts(base, rng, [part.prompt] * part.samples)

    def ask(prompts: Sequence[tuple[int, ...]], n: int) -> None:
        how = {"max_tokens": part.tokens, "tenant": next(_tenants)}
        engine.generate([Request(prompt, n=n, **how) for prompt in prompts])

    engine.warm()
    sides = {"one": lambda: ask(prompts[:1], part.samples), "distinct": lambda: ask(prompts, 1)}
    times = timing.in_turn("samples of one prompt", sides, config.n, warm=0)
    return {
        "ratio_prefix": timing.ratio(times, "distinct", "one"),
        "prefix_seconds": timing.medians_of(times),
        "prefix_samples": part.samples,
        "prefix_prompt": part.prompt,
        "prefix_tokens": part.tokens,
    }


PARTS: dict[str, Callable[[Any, Base, np.random.Generator], dict[str, Any]]] = {
    "decode": _decode,
    "prefill": _prefill,
    "continuous": _continuous,
    "prefix": _prefix,
}

"""The sampling engine against torch and transformers, against itself, and against memory bandwidth.

``ratio_decode_R``: greedy tokens a second of R cached rows over those of transformers; ``in_full``
is the same with our base in float32. ``ratio_prefill``: prompt tokens a second to the first new
token. ``ratio_continuous``: tokens a second on ragged lengths over a lockstep loop over groups of
equal prompts, ``idle_rows_free`` where its ended rows cost nothing; ``static_rows_busy`` is the
share of its rows and steps that sample. ``ratio_prefix``: one request of n samples over n requests.
``bandwidth_share``: bytes that a step must read over its time, of the measured bandwidth.
"""

import dataclasses
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
from benchmarks.torch_peer import TorchPeer
from mint_jax.errors import UserError, choice
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Completion, Request

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


class Bandwidth:
    """A side of ``timing.in_turn``: bytes per second that the machine reads or copies meanwhile, by
    the fastest of a sum, a product with two columns, and a copy, whose bytes count twice.
    """

    def __init__(self, nbytes: int):
        x_ND = jnp.ones((max(1, nbytes // (4 * 1024)), 1024), jnp.float32)
        v_DM = jnp.ones((1024, 2), jnp.float32)
        ways: dict[str, tuple[int, Callable[[Any], Any]]] = {
            "sum": (x_ND.nbytes, jax.jit(jnp.sum)),
            "product": (x_ND.nbytes, jax.jit(lambda x: x @ v_DM)),
            "copy": (2 * x_ND.nbytes, jax.jit(lambda x: x + 1)),
        }
        self._x = x_ND
        self.rates = {name: size / _seconds(fn, x_ND) for name, (size, fn) in ways.items()}
        self.way = max(self.rates, key=lambda name: self.rates[name])
        self.nbytes, self._move = ways[self.way]

    def __call__(self) -> None:
        jax.block_until_ready(self._move(self._x))


def _seconds(fn: Callable[[Any], Any], x: jax.Array) -> float:
    """The shortest of five calls."""
    return min(timing.in_turn("bandwidth", {"": lambda: jax.block_until_ready(fn(x))}, 5)[""])


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
    reading = Bandwidth(config.read_bytes)
    shares: dict[str, timing.Figure] = {}
    for rows in part.rows:
        prompts = _prompts(base, rng, [part.context + 1] * rows)
        tokens = np.array(prompts)
        tried = peer.fastest(lambda tokens=tokens: peer.decoder(tokens, part.trial_tokens))
        draw = peer.decoder(tokens, part.tokens)
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

        def peers(draw: Callable[[], np.ndarray] = draw, last: dict[str, Any] = last) -> None:
            last["peer"] = draw()

        sides = {name: functools.partial(ours, name) for name in engines}
        sides |= {"peer": peers, "read": reading}
        times = timing.in_turn(f"decoding {rows} rows", sides, config.n)
        if [engine.counts["prefilled_tokens"] for engine in engines.values()] != read:
            raise RuntimeError("prompts were to stay in the cache, and were read again")
        step = _step_bytes(base, rows, part.context + 1 + (part.tokens - 1) / 2)
        a_byte = {
            "read": [seconds / reading.nbytes for seconds in times["read"]],
            "step": [seconds / (part.tokens * step) for seconds in times["ours"]],
        }
        shares[str(rows)] = timing.ratio(a_byte, "read", "step")
        out |= {
            f"ratio_decode_{rows}": timing.ratio(times, "peer", "ours"),
            f"decode_{rows}_seconds": timing.medians_of(times),
            f"decode_{rows}_same_tokens": round(float((last["ours"] == last["peer"]).mean()), 3),
            f"decode_{rows}_step_bytes": round(step),
            f"peer_options_decode_{rows}": str(peer.options),
            f"peer_candidates_s_decode_{rows}": tried,
        }
        if in_full:
            out[f"ratio_decode_{rows}_in_full"] = timing.ratio(times, "peer", "in_full")
    first = shares[str(part.rows[0])]
    rates = {name: round(rate / 1e9, 2) for name, rate in reading.rates.items()}
    return out | {
        "bandwidth_share": first,
        "bandwidth_shares": shares,
        "bandwidth_way": reading.way,
        "bandwidth_tried_gb_per_s": rates,
    }


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
    tried = peer.fastest(lambda: lambda: peer.prefill(np.array(prompts)), caches=("dynamic",))
    last: dict[str, Any] = {}

    def ours() -> None:
        tenant = next(_tenants)
        requests = [
            Request(prompt, max_tokens=1, temperature=0.0, tenant=tenant) for prompt in prompts
        ]
        last["ours"] = np.array([c.tokens[0] for [c] in engine.generate(requests)])

    def peers() -> None:
        last["peer"] = peer.prefill(np.array(prompts))

    times = timing.in_turn("prefill", {"ours": ours, "peer": peers}, config.n)
    return {
        "ratio_prefill": timing.ratio(times, "peer", "ours"),
        "prefill_seconds": timing.medians_of(times),
        "prefill_tokens": part.rows * part.prompt,
        "prefill_same_tokens": round(float((last["ours"] == last["peer"]).mean()), 3),
        "peer_options_prefill": str(peer.options),
        "peer_candidates_s_prefill": tried,
    }


# -- against itself without a part


def static_loop(engine: Engine, requests: Sequence[Request], rows: int) -> list[list[Completion]]:
    """Answers requests of n = 1 in groups, each of which begins when all rows of the one before it
    have ended.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    out: dict[int, list[Completion]] = {}
    for k in range(0, len(order), rows):
        group = order[k : k + rows]
        out |= zip(group, engine.generate([requests[i] for i in group]))
    return [out[i] for i in range(len(requests))]


def _continuous(config: Any, base: Base, rng: np.random.Generator) -> dict[str, Any]:
    part = config.continuous
    engine = _fixed(base, part.rows)
    lengths = rng.integers(part.prompt[0], part.prompt[1] + 1, part.requests)
    tokens = rng.integers(part.tokens[0], part.tokens[1] + 1, part.requests).tolist()
    prompts = _prompts(base, rng, lengths.tolist())

    def requests() -> list[Request]:
        tenant = next(_tenants)
        return [
            Request(prompt, max_tokens=most, temperature=0.0, tenant=tenant)
            for prompt, most in zip(prompts, tokens)
        ]

    said: dict[str, list[list[int]]] = {}

    def continuous() -> None:
        said["continuous"] = [c.tokens for [c] in engine.generate(requests())]

    def static() -> None:
        said["static"] = [c.tokens for [c] in static_loop(engine, requests(), part.rows)]

    order = sorted(range(part.requests), key=lambda i: len(prompts[i]))
    groups = [order[k : k + part.rows] for k in range(0, part.requests, part.rows)]
    longest = {i: max(tokens[j] for j in group) for group in groups for i in group}

    def lockstep() -> None:
        long = [dataclasses.replace(one, max_tokens=longest[i]) for i, one in enumerate(requests())]
        made = static_loop(engine, long, part.rows)
        said["lockstep"] = [c.tokens[:most] for [c], most in zip(made, tokens)]

    engine.warm()
    sides = {"continuous": continuous, "lockstep": lockstep, "static": static}
    times = timing.in_turn("ragged lengths", sides, config.n, warm=0)
    steps = sum(longest.values())
    return {
        "ratio_continuous": timing.ratio(times, "lockstep", "continuous"),
        "ratio_continuous_idle_rows_free": timing.ratio(times, "static", "continuous"),
        "continuous_seconds": timing.medians_of(times),
        "continuous_tokens": sum(tokens),
        "continuous_same_tokens": said["continuous"] == said["static"] == said["lockstep"],
        "static_rows_busy": round(sum(tokens) / steps, 3),
    }


def _prefix(config: Any, base: Base, rng: np.random.Generator) -> dict[str, Any]:
    part = config.prefix
    engine = _fixed(base, part.samples)
    prompts = _prompts(base, rng, [part.prompt] * part.samples)

    def one() -> None:
        options = {"max_tokens": part.tokens, "tenant": next(_tenants)}
        engine.generate([Request(prompts[0], n=part.samples, **options)])

    def distinct() -> None:
        tenant = next(_tenants)
        engine.generate(
            [Request(prompt, max_tokens=part.tokens, tenant=tenant) for prompt in prompts]
        )

    engine.warm()
    sides = {"one": one, "distinct": distinct}
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

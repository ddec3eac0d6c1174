"""Time that adapters add to a layer of routed experts, forward and backward.

``forward_backward_overhead``: the time with P policies over the bare base's, less 1.
``ratio_ragged``: the same adapters by ``jax.lax.ragged_dot`` over ours. ``decode_ratio_sliced``: a
decoding step whose experts are inputs of the scan over layers, over ours.

Axes: N tokens, M rows (a token and one of its experts), E experts, X experts of a token, D model
width, F expert width, L layers, P policies, R rank, G groups.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import timing
from benchmarks.bases import shape as shape_of
from mint_jax import params as params_lib
from mint_jax.lora.tree import AdapterStack
from mint_jax.lora.view import AdapterView, attach_blocks
from mint_jax.models import experts, moe, packed_lora, stacked
from mint_jax.models.expert_parallel import routed
from mint_jax.models.experts import sort_rows
from mint_jax.models.layers import rms_norm, swiglu

# as ``expert_parallel.routed``
Routed = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], jax.Array]


class _Stack:
    """A random stack of routed layers, tokens, and the gradient that comes from above."""

    def __init__(self, size: Any, rank: int, seed: int):
        self.size, self.rank = size, rank
        self.cfg = shape_of({"num_heads": 1, "num_kv_heads": 1, "vocab_size": 1} | dict(size))
        specs = moe.specs(self.cfg, size.layers, jnp.float32)
        self.params = params_lib.init(specs, jax.random.key(seed))
        rng = np.random.default_rng(seed)
        self.x_BTD, self.g_BTD = (
            jnp.asarray(rng.normal(size=(size.rows, size.tokens, size.d_model)), jnp.float32)
            for _ in range(2)
        )

    def adapters(self, policies: int) -> AdapterView:
        """``policies`` adapters of all expert projections, both factors random."""
        size, key = self.size, jax.random.key(policies)
        factors = {}
        for i, name in enumerate(experts.NAMES):
            d_in, d_out = self.params["experts"][name]["w"].shape[2:]
            outer = size.layers, policies, size.experts, self.rank
            a, b = (
                jax.random.normal(jax.random.fold_in(key, 2 * i + j), (*outer, d))
                for j, d in enumerate((d_in, d_out))
            )
            factors[name] = {"a": a * d_in**-0.5, "b": 0.01 * b}
        stack = AdapterStack({"experts": factors}, jnp.ones(policies), self.rank)
        return attach_blocks({self.rank: stack}, {self.rank: jnp.arange(policies)})

    def forward(
        self, x_BTD: jax.Array, lora: Any, params: Any, through: Routed, sliced: bool = False
    ) -> jax.Array:
        """``[B, T, D]`` behind all layers; ``through`` computes the experts. ``sliced``: the scan
        slices them out of their stacks.
        """
        layers, stacks = {"moe": params}, {}
        if not sliced:  # as the decoder has them
            layers, stacks = stacked.detach(layers, False)

        def layer(x, inputs):
            p, number = inputs
            p = stacked.attach(p, stacks, number)["moe"]
            h: Any = rms_norm(x, p["norm"], self.cfg.norm_eps)
            assert self.cfg.experts is not None
            route = moe.route(h, p, None, self.cfg.experts)
            delta = None if lora is None else lora.in_layer(number).at("experts")
            return x + through(h, route.ids, route.weights, p["experts"], delta), None

        return jax.lax.scan(layer, x_BTD, (layers, jnp.arange(self.size.layers)))[0]

    def side(
        self, policies: int, through: Routed, backward: bool, sliced: bool = False
    ) -> Callable[[], Any]:
        """One pass as a call that can be timed; backward forms the gradients of the tokens and of
        the adapters.
        """
        lora = self.adapters(policies) if policies else None
        forward = functools.partial(self.forward, through=through, sliced=sliced)

        def both(x, lora, params, g):
            y, vjp = jax.vjp(lambda x, lora: forward(x, lora, params), x, lora)
            return y, vjp(g)

        run = jax.jit(both if backward else forward)
        args = (self.x_BTD, lora, self.params, *((self.g_BTD,) if backward else ()))
        return lambda: jax.block_until_ready(run(*args))


def ragged_routed(
    x_BTD: jax.Array, ids_BTX: jax.Array, weights_BTX: jax.Array, p: Any, lora: Any
) -> jax.Array:
    """``expert_parallel.routed`` with the adapters' factors as one ``ragged_dot`` each over all
    (expert, slot) groups.
    """
    B, T, D = x_BTD.shape
    (bucket,), (P,) = lora.buckets, lora.blocks
    factors = bucket.factors
    p = {name: {"w": leaf["w"][leaf["layer"]]} for name, leaf in p.items()}
    E, X = p["gate"]["w"].shape[0], ids_BTX.shape[-1]
    row = jnp.arange(B * T * X, dtype=jnp.int32)
    order = sort_rows(ids_BTX.reshape(-1), row // (X * T * (B // P)), E, P)
    sizes_G = order.counts.reshape(-1)

    def groups(w_PERD: jax.Array) -> jax.Array:
        return w_PERD.swapaxes(0, 1).reshape(E * P, *w_PERD.shape[2:])

    def project(x_MD: jax.Array, name: str) -> jax.Array:
        y = packed_lora.project(x_MD, [p[name]], jnp.sum(order.counts, axis=1), [])[0]
        h_MR = jax.lax.ragged_dot(x_MD, groups(factors[name]["a"]).swapaxes(1, 2), sizes_G)
        return y + jax.lax.ragged_dot(h_MR, groups(factors[name]["b"]), sizes_G)

    x_MD = x_BTD.reshape(B * T, D)[order.order // X]
    y_MD = project(swiglu(project(x_MD, "gate"), project(x_MD, "up")), "down")[order.inverse]
    return jnp.einsum("BTXD,BTX->BTD", y_MD.reshape(B, T, X, D), weights_BTX)


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report."""
    plain = config.to_dict()
    report: dict[str, Any] = {"rank": config.rank, "size": plain["size"]}
    report |= {"ragged_size": plain["ragged"]}
    report["decode_size"] = plain["decode"] | {"rows": list(config.decode.rows)}
    stack = _Stack(config.size, config.rank, config.seed)
    for name, backward in (("forward", False), ("forward_backward", True)):
        counts = 0, *config.policies
        sides = {str(count): stack.side(count, routed, backward) for count in counts}
        times = timing.in_turn(name, sides, config.n)
        overheads = {n: timing.ratio(times, n, "0", less=1) for n in map(str, config.policies)}
        report[f"{name}_overhead"] = overheads
        report[f"{name}_seconds"] = timing.medians_of(times)
    del stack
    small = _Stack(config.ragged, config.rank, config.seed)
    forms = {"ours": routed, "ragged": ragged_routed}
    sides = {name: small.side(config.ragged_policies, f, True) for name, f in forms.items()}
    times = timing.in_turn("ragged_dot", sides, config.n)
    (ours, _), (theirs, _) = (side() for side in sides.values())
    report["ratio_ragged"] = timing.ratio(times, "ragged", "ours")
    report["ragged_seconds"] = timing.medians_of(times)
    report["ragged_difference"] = float(f"{float(jnp.abs(ours - theirs).max()):.2g}")
    sliced = report["decode_ratio_sliced"] = {}
    for rows in config.decode.rows:
        size = ConfigDict(plain["decode"] | {"rows": rows, "tokens": 1})
        of = _Stack(size, config.rank, config.seed)
        sides = {name: of.side(0, routed, False, name == "sliced") for name in ("sliced", "ours")}
        times = timing.in_turn(f"decode {rows}", sides, config.n)
        sliced[str(rows)] = timing.ratio(times, "sliced", "ours")
    return report

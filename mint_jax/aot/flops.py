"""Matrix FLOPs of a function, counted in its jaxpr before compilation and partitioning.

A scan multiplies its body by its length, a while loop counts its body once, a conditional one of
its branches. Rematerialisation is included; work that partitioning repeats is not.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core


def traced_flops(jaxpr: core.Jaxpr, devices: int = 1, branch: Callable[..., float] = max) -> float:
    """Returns ``2 M N K`` of every matrix product; ``devices`` run each ``shard_map`` body, and
    ``branch`` selects among the FLOPs of a conditional's branches.
    """
    return sum(_equation(eqn, devices, branch) for eqn in jaxpr.eqns)


def _equation(eqn: Any, devices: int, branch: Callable[..., float]) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return (
            2.0
            * eqn.outvars[0].aval.size
            * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        )
    if name == "ragged_dot_general":
        (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        # [rows, K] x [groups, K, N]: a row meets the matrix of its group
        if len(rhs) == len(lhs) + 1:
            return 2.0 * eqn.outvars[0].aval.size * math.prod(lhs[d] for d in contracted)
        # [K, rows] x [rows, N]: a row adds to the matrix of its group
        return 2.0 * math.prod(lhs) * rhs[-1]
    if name == "pallas_call":
        return float(getattr(params.get("cost_estimate"), "flops", 0))
    if name == "cond":
        return branch(traced_flops(one.jaxpr, devices, branch) for one in params["branches"])
    times = {"scan": params.get("length", 1), "shard_map": devices}.get(name, 1)
    inner = [p for key, p in params.items() if key != "cond_jaxpr"]
    return times * sum(
        traced_flops(_open(p), devices, branch) for p in inner if _open(p) is not None
    )


def _open(param: Any) -> Any:
    if isinstance(param, core.ClosedJaxpr):
        return param.jaxpr
    return param if isinstance(param, core.Jaxpr) else None

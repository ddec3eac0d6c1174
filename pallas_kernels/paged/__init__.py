"""Layout of rows' tokens in pages, and the XLA loop over them of both attentions to a paged cache.

A pool ``[L, U, ..., PAGE, X]`` has pages of PAGE positions. A row's table lists its pages in two
parts, the *prefix* and the row's *own* tokens, each of which begins with a new *run* of RUN.

Axes: L layers, U pages, B rows, T new tokens, D table entries, X width, M queries of a row, S
positions of a run.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.partial import Partial, join, nothing

PAGE = 32  # positions of a page
RUN = 128  # positions read in one iteration of the loop
RUN_PAGES = RUN // PAGE


class Rows(NamedTuple):
    """Pages of a pool that each row reads."""

    layer: jax.Array  # int32
    # `[B, D]` int32 pages, D a multiple of RUN_PAGES: those of a row's prefix and, from a new run
    # on, of its own tokens. Entries after a part's pages may be out of range
    table: jax.Array
    prefix: jax.Array  # this and own: `[B]` int32, number of tokens of each part
    own: jax.Array
    first: jax.Array  # `[B]` int32, first run to read


# Attention of queries [B, ..., M, X] to one run of pages [B, RUN_PAGES], with a mask [B, S] or, if
# keys are chosen, [B, tokens, S].
Score = Callable[[Any, jax.Array, jax.Array], Partial]


def read(
    pool: jax.Array, layer: jax.Array, pages: jax.Array, width: int | None = None
) -> jax.Array:
    """Reads a run of each row, ``[B, RUN_PAGES, ..., PAGE, X] -> [B, ..., S, width]``."""
    run = jnp.moveaxis(pool[layer, pages], 1, -3)
    return run.reshape(*run.shape[:-3], RUN, run.shape[-1])[..., :width]


def clean(values: jax.Array, visible: jax.Array) -> jax.Array:
    """Zeroes values ``[..., S, X]`` where no token is: NaN times a weight of 0 is NaN."""
    return jnp.where(visible[..., None], values, jnp.zeros((), values.dtype))


def seen_in_run(prefix: jax.Array, own: jax.Array, run_B: jax.Array) -> jax.Array:
    """Returns which positions of a run hold a token, ``[B, S]``."""
    runs_of_prefix = -(-prefix // RUN)
    there = jnp.where(
        run_B < runs_of_prefix, prefix - RUN * run_B, own - RUN * (run_B - runs_of_prefix)
    )
    return jnp.arange(RUN)[None] < there[:, None]


def run_pages(table: jax.Array, run_B: jax.Array) -> jax.Array:
    """Returns the pages of one run of each row, ``[B, RUN_PAGES]``; at most its last."""
    runs = table.reshape(table.shape[0], -1, RUN_PAGES)
    at = jnp.minimum(run_B, runs.shape[1] - 1)[:, None, None]
    return jnp.take_along_axis(runs, at, axis=1)[:, 0]


def last_run(prefix: jax.Array, own: jax.Array) -> jax.Array:
    """Returns the number of runs of each row, ``[B]``."""
    return -(-prefix // RUN) + -(-own // RUN)


def op_of(queries: Sequence[jax.Array]) -> str:
    """Returns the name of this attention in tables of ``tuning``."""
    return "latent_attention" if len(queries) > 1 else "paged_attention"


def key_of(queries: Sequence[jax.Array], pools: Sequence[jax.Array]) -> str:
    """Returns the tuning key of a call, from ``[B, K, M, H_i]`` and the pools."""
    B, K, M, _ = queries[0].shape
    widths = "+".join(f"{q.shape[3]}/{pool.shape[-1]}" for q, pool in zip(queries, pools))
    return f"{queries[0].dtype} rows {tuning.power(B)} heads {K} queries {tuning.power(M)} {widths}"


def check_rows(B: int, rows: Rows) -> None:
    """Raises ValueError unless these are B rows with tables of whole runs."""
    _, table, *of_rows = rows
    if table.ndim != 2 or table.shape[0] != B or table.shape[1] % RUN_PAGES:
        raise ValueError(
            f"table has shape {table.shape}; expected [{B}, D], D a multiple of {RUN_PAGES}"
        )
    if any(x.shape != (B,) for x in of_rows):
        shapes = " and ".join(str(x.shape) for x in of_rows)
        raise ValueError(f"prefix, own and first have shapes {shapes}; expected [{B}]")


def attend(score: Score, queries: Any, rows: Rows, chosen: jax.Array | None = None) -> Partial:
    """Attends from each row's queries, a tree of ``[B, ..., M, X]``, to its runs from ``first`` on,
    by XLA.

    Args:
        score: attention of queries to one run.
        chosen: ``[B, T, D / RUN_PAGES, S]`` bool, positions that may be attended to; None for all.
    """
    _, table, prefix, own, first = rows
    B = table.shape[0]

    def step(i: jax.Array, total: Partial) -> Partial:
        run_B = first + i
        pages = run_pages(table, run_B)
        visible = _mask(seen_in_run(prefix, own, run_B), chosen, run_B)
        return join(total, score(queries, pages, visible))

    pages, visible = jnp.zeros((B, RUN_PAGES), jnp.int32), jnp.zeros((B, RUN), bool)
    none = nothing(jax.eval_shape(score, queries, pages, visible))
    return jax.lax.fori_loop(0, jnp.max(last_run(prefix, own) - first), step, none)


def _mask(seen_BS: jax.Array, chosen: jax.Array | None, run_B: jax.Array) -> jax.Array:
    if chosen is None:
        return seen_BS
    at = jnp.minimum(run_B, chosen.shape[2] - 1)[:, None, None, None]
    return seen_BS[:, None] & jnp.take_along_axis(chosen, at, axis=2)[:, :, 0]


def require_one_dtype(queries: Sequence[jax.Array], pools: Sequence[jax.Array]) -> None:
    """Raises NotImplementedError with the reason if a kernel cannot serve these dtypes."""
    dtypes = {x.dtype for x in (*queries, *pools)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        raise NotImplementedError(
            f"queries and pools are {sorted(map(str, dtypes))}; all bfloat16 or all float32 are"
            " served"
        )

"""The result of ``draw``, and its XLA form over all rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Drawn(NamedTuple):
    """Result for each row, ``[R]``."""

    # int32; 0 in a row with a NaN, and if the largest number is infinite and the temperature is not
    # 0
    token: jax.Array
    top: jax.Array  # the largest number; meaningless in a row with a NaN
    total: jax.Array  # `log(sum(exp(z)))`; not finite if a number is NaN or infinite
    warm: jax.Array  # `log(sum(exp((z - top) / temperature)))`; at temperature 0 as at 1


def draw(
    z: jax.Array, temperature: jax.Array, keys: jax.Array, rows: jax.Array | None = None
) -> Drawn:
    """Implements ``pallas_kernels.draw.draw``; unused parts of the result are not computed."""
    # The argmax of z / temperature + G as that of exp(z) / E with exponential E = exp(-G): one
    # logarithm, a score of 0 for -inf, and float32's relative precision for the small E that decide
    # (with 32 random bits down to 2**-33; -log(-log(u)) of a float32 u ends at 16.6, and coarsely).
    hot = temperature > 0
    top = jnp.max(z, axis=-1, keepdims=True)
    warm = (z - top) / jnp.where(hot, temperature, 1.0)[:, None]
    score = jax.lax.cond(
        jnp.any(hot), lambda z: jnp.exp(z) / exponential(keys, z.shape[1]), lambda z: z, warm
    )
    token = first_of_largest(jnp.where(hot[:, None], score, z))
    return Drawn(
        token, top[:, 0], jax.nn.logsumexp(z, axis=-1), jnp.log(jnp.sum(jnp.exp(warm), axis=-1))
    )


def exponential(keys: jax.Array, vocab: int) -> jax.Array:
    """Returns standard exponential noise ``[R, V]``, each entry a function of key and token."""

    # The token's id is threefry's counter: a longer vocabulary begins with the same bits.
    def bits(key: jax.Array) -> jax.Array:
        return jax.random.bits(
            jax.random.wrap_key_data(key, impl="threefry2x32"), (vocab,), jnp.uint32
        )

    u = (jax.vmap(bits)(keys).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2**-24)))


def first_of_largest(z: jax.Array) -> jax.Array:
    """Returns the first argmax, ``[R]`` int32; 0 in a row with a NaN."""
    V = z.shape[1]
    # Two plain reductions: XLA's own argmax takes five times as long on a CPU.
    # XLA's max over rows of 4,099 numbers dropped a NaN on a CPU, so NaN is tested explicitly.
    token = jnp.where(jnp.isnan(z), 0, jnp.arange(V, dtype=jnp.int32))
    return jnp.min(jnp.where(z < jnp.max(z, axis=-1, keepdims=True), V, token), axis=-1)

"""An 8-bit base: the values it stores, the bytes it takes, and that it computes what its
dequantised weights would.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import quantised
from mint_jax.models.config import Kernels
from tests.exchange import decoder_logits

# of a channel's largest value; half a step of 8 bits, of a 3-bit mantissa
STEP = {"int8": 0.5 / 127, "float8": 1 / 16}


def run(base, tokens_BT):
    with jax.set_mesh(base.mesh):
        return np.asarray(decoder_logits(base.params, None, tokens_BT, cfg=base.cfg))


def dequantised(params):
    """The same tree with every quantised matrix multiplied out."""
    if not isinstance(params, dict):
        return params
    if "scale" in params and "w" in params:
        return {"w": params["w"].astype(jnp.float32) * params["scale"][..., None, :]}
    return {name: dequantised(child) for name, child in params.items()}


@pytest.mark.parametrize("kind", quantised.KINDS)
def test_values_are_nearest_and_channels_their_own(rng, kind):
    w = (rng.normal(size=(3, 40, 7)) * rng.uniform(0.01, 10, (3, 1, 7))).astype(np.float32)
    w[1, :, 2] = 0
    q, scale = quantised.quantise(w, kind)
    assert q.dtype == quantised.KINDS[kind][0]
    assert scale.shape == (3, 7)
    error = np.abs(q.astype(np.float32) * scale[:, None] - w)
    assert (error <= STEP[kind] * np.abs(w).max(axis=1, keepdims=True) * 1.001).all()
    assert (error[1, :, 2] == 0).all()


@pytest.mark.parametrize("kind", quantised.KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_computes_as_its_dequantised_weights(rng, hf_dirs, mesh, family, kind):
    base = base_lib.load(str(hf_dirs(family)), mesh, quantise=kind)
    tokens = rng.integers(3, 97, (2, 12)).astype(np.int32)
    mine = run(base, tokens)
    plain = base_lib.Base(
        base.name, base.directory, base.cfg, dequantised(base.params), mesh, None, base.fingerprint
    )
    # float32: the scale multiplies the sum instead of every term
    np.testing.assert_allclose(mine, run(plain, tokens), atol=1e-4 * np.abs(mine).max())
    assert base.nbytes < plain.nbytes / 2
    exact = run(base_lib.load(str(hf_dirs(family)), mesh), tokens)
    assert np.abs(mine - exact).max() > 0, "nothing was quantised"


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["auto", "pallas_tpu"])
@pytest.mark.parametrize("kind", quantised.KINDS)
def test_experts_on_a_mesh_are_those_of_one_device(rng, hf_dirs, mesh, kind, kernel):
    """Their scales are split as they are."""
    split = make_mesh({"data": 2, "fsdp": 2, "expert": 2})
    named = {"packed_attention": "xla", "packed_matmul": kernel}
    kernels = Kernels() if kernel == "auto" else Kernels("xla", "xla", **named)
    tokens = rng.integers(3, 97, (2, 12)).astype(np.int32)
    bases = [
        base_lib.load(str(hf_dirs("qwen3_moe_wide")), where, quantise=kind)
        for where in (mesh, split)
    ]
    one, many = (
        run(dataclasses.replace(base, cfg=base.cfg.replace(kernels=kernels)), tokens)
        for base in bases
    )
    # float32, summed in another order
    np.testing.assert_allclose(many, one, atol=1e-4 * np.abs(one).max())

"""Programs of a base as the compiler of the CUDA wheels makes them, without a GPU: how many kernels
a layer of decoding starts.
"""

import jax.numpy as jnp
import pytest

from mint_jax.aot import chips, hlo
from mint_jax.aot.programs import Plan
from mint_jax.aot.settings import RolloutShape
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh
from mint_jax.models.hf_config import from_hf
from pallas_kernels import tuning

COMMON = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
COMMON |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4}
LATENT |= {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT |= {"n_group": 4, "topk_group": 2, "q_lora_rank": 256, "kv_lora_rank": 512}
LATENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "num_experts": 16}
# Fields of a base, layers of its largest stack, and the launches of one of these with adapters on
# all projections, of branches the most. A launch takes an H100 two microseconds.
BASES = {
    "dense": ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}, 4, 29),
    "experts": (EXPERTS, 4, 50),
    "latent": (LATENT, 3, 86),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_a_layer_of_decoding_starts_few_kernels(name):
    try:
        target = chips.target("cuda:h200x1")
    except UserError as missing:
        pytest.skip(str(missing))
    fields, layers, most = BASES[name]
    adapter = AdapterConfig(16, 32.0, ("all-linear",))
    mesh = make_mesh(devices=target.devices)
    plan = Plan(from_hf(COMMON | fields), mesh, jnp.bfloat16, adapter)
    decode = plan.sampling(RolloutShape(1, 16, 1, 128, 64))[1]
    with tuning.on(target.devices[0].device_kind):
        lowered = decode.trace(mesh).lower()
    text = lowered.compile(target.options).as_text()
    assert hlo.Module(text).layer_launches(layers) <= most

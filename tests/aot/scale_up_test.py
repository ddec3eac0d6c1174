"""The scale-up job: a tiny model compiled for four TPU chips, its accounts, and the search for the
smallest pod.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from mint_jax import mesh as mesh_lib
from mint_jax.aot import chips, hlo, scale_up
from mint_jax.aot.measure import Measured
from mint_jax.aot.programs import Plan, device_bytes
from mint_jax.aot.settings import RolloutShape
from mint_jax.errors import UserError
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import names
from mint_jax.models.hf_config import from_hf
from tests.configs import run_config

MAKE_MESH = mesh_lib.make_mesh  # before the fixture of this folder narrows it to one device
CONFIG = Path(__file__).parents[2] / "configs" / "scale_up" / "tiny.py"
PROGRAMS = ("train", "optim", "prefill", "decode")


@pytest.fixture(autouse=True)
def whole_mesh(one_device, monkeypatch):
    monkeypatch.setattr(mesh_lib, "make_mesh", MAKE_MESH)


@pytest.fixture
def config() -> ConfigDict:
    scope: dict = {}
    exec(CONFIG.read_text(), scope)
    return scope["get_config"]()


def test_decoding_reads_and_writes_the_state_of_each_row_once():
    """Bytes of Qwen3.5-35B-A3B by hand, 3 rollouts of 2 prompts of 64 tokens."""
    cfg = from_hf(names.SHAPES["qwen3.5-35b-a3b"])
    mesh = MAKE_MESH({"data": 1}, jax.devices()[:1])
    plan = Plan(cfg, mesh, jnp.bfloat16, AdapterConfig(16, targets=("q",)))
    shape = RolloutShape(adapters=1, prompts=2, rollouts=3, prompt_tokens=64, new_tokens=32)
    prefill, decode = plan.sampling(shape)
    # 30 of 40 layers: float32 of 32 heads, and three tokens of 8,192 channels
    state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    # pages of 32 tokens: ids, and keys and values of two heads of 256 in 10 layers
    page = 32 * (4 + 10 * 2 * 2 * 256 * 2)
    slots, pages = 4 * 6, 2 * 2 + 6
    assert device_bytes(decode.args[2]) == slots * state + pages * page
    assert decode.unread == (slots - 2 * 6) * state
    assert prefill.unread == (slots - 2 * 1) * state + (pages - 2) * page


def test_a_new_cache_goes_through_every_program_and_keeps_its_parts():
    """Also where the first call decodes: a loop needs the parts that its body returns."""
    name = "nemotron-3-nano-30b-a3b"  # some stacks have states, some pages, some nothing
    mesh = MAKE_MESH({"data": 1}, jax.devices()[:1])
    plan = Plan(from_hf(names.SHAPES[name]), mesh, jnp.bfloat16, AdapterConfig(16, targets=("q",)))
    shape = RolloutShape(adapters=1, prompts=2, rollouts=1, prompt_tokens=64, new_tokens=32)
    for program in plan.sampling(shape):
        pool = program.trace(mesh).out_info[0]
        shapes, before = (
            jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (pool, program.args[2])
        )
        assert shapes == before


SMALL = {  # with a state of 16 heads of 16 values
    "qwen3.5-35b-a3b": {"num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 32}
    | {"num_attention_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 8},
    "nemotron-3-nano-30b-a3b": {"hybrid_override_pattern": "M*", "num_attention_heads": 8}
    | {"head_dim": 16, "mamba_num_heads": 16, "mamba_head_dim": 16, "ssm_state_size": 16}
    | {"n_groups": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_decoding_gathers_no_matrix_where_a_cache_splits_rows(name):
    """Two key heads do not divide over four devices, which therefore split rows; layers with a
    state split their projections by heads.
    """
    mesh = MAKE_MESH({"expert": 2, "tensor": 4}, jax.devices())
    cfg = from_hf(names.SHAPES[name] | {"hidden_size": 128, "vocab_size": 64} | SMALL[name])
    plan = Plan(cfg, mesh, jnp.float32, AdapterConfig(4, targets=("q",)))
    decode = plan.sampling(RolloutShape(1, 8, 2, 32, 32))[1]
    module = hlo.Module(decode.trace(mesh).lower().compile().as_text())
    found = [i for each in module.computations.values() for i in each if i.op == "all-gather"]
    assert 0 < max(hlo.nbytes(i.type) for i in found) < 4 * 128 * 256


@pytest.mark.long
def test_a_tiny_model_on_four_chips(config, tmp_path, capsys):
    config.hlo = True
    result = run_config(config, tmp_path)
    assert (result["topology"], result["chips"], result["fits"]) == ("v5e:2x2", 4, 1)
    for name in PROGRAMS:
        m = result[name]
        assert (
            m["bytes_per_device"]
            == m["argument_bytes"] + m["temporary_bytes"] + m["output_bytes"] - m["aliased_bytes"]
        )
        assert m["flops"] >= m["flops_traced"]
        assert (tmp_path / f"{name}.hlo.txt").read_text().startswith("HloModule")
    # Donated state comes back in its own buffers: factors, gradients and two moments, each factor
    # split by fsdp or by tensor.
    state = 4 * 4 * result["adapter_parameters"] * config.train.policies / 2
    for name in ("train", "optim"):
        # and scalars of each policy, padded
        assert state < result[name]["aliased_bytes"] < 1.05 * state
    # two layers' keys and values of a prompt's tokens but the last, shared by its rollouts, and of
    # each one's own
    r = config.rollout
    positions = r.prompts * r.prompt_tokens + r.prompts * r.rollouts * r.new_tokens
    caches = positions * 2 * 2 * 2 * 128 * 2 / 4
    for name in ("prefill", "decode"):
        assert caches <= result[name]["aliased_bytes"] < 1.05 * caches  # and the tokens themselves
    together, most = result["colocated"], max(result[name]["temporary_bytes"] for name in PROGRAMS)
    shared = result["base_bytes_per_device"]  # by training and sampling
    resident = result["train"]["argument_bytes"] + result["decode"]["argument_bytes"] - shared
    assert together["bytes_per_device"] == pytest.approx(
        resident + most, rel=0.01
    )  # and new metrics
    assert together["fits"] == 1
    assert (tmp_path / "scale_up.png").stat().st_size > 10_000
    assert "all-reduce" in capsys.readouterr().err


@pytest.mark.long
def test_adapters_of_experts_are_kernels_on_a_tpu(config, tmp_path):
    """In the whole programs: under the scan over layers, in the shard_map over experts, through
    their gradients.
    """
    sparse = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 128}
    sparse |= {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    sparse |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    config.model = ConfigDict(config.model.to_dict() | sparse)
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 4, "tensor": 1})
    config.hlo = True
    made = run_config(config, tmp_path)
    assert (made["fits"], made["kernels_passed_over"]) == (1, [])
    calls = {name: (tmp_path / f"{name}.hlo.txt").read_text().count for name in PROGRAMS}
    also = {"train": "packed_lora_backward", "prefill": "paged_attention"}
    for name, other in (also | {"decode": "paged_attention"}).items():
        for kernel in ("packed_matmul", other):
            assert calls[name](f"%{kernel}.") > 0, (name, kernel)


def test_the_smallest_pod_that_holds_all(config, tmp_path, monkeypatch):
    config.topology, config.chip = "smallest", "v5e"

    def search(measure):
        monkeypatch.setattr(scale_up, "measure", measure)
        return run_config(config, tmp_path)

    def pretend(program, mesh, target):
        needs = int(1.9 * target.hbm) if program.name == "prefill" else 0
        return Measured(program.name, target.hbm, total=needs * 4 // len(target.devices))

    result = search(pretend)
    assert (result["topology"], result["prefill"]["fits"]) == ("v5e:2x4", 1)
    assert list(result["tried"]) == ["v5e:2x2", "v5e:2x4"]
    assert result["tried"]["v5e:2x2"] == "prefill does not fit: it needs 30.4 of 16.0 GiB a device"
    says = r"no v5e slice holds tiny: .*v5e:4x4: train.policies x train.rows is 4 rows"
    with pytest.raises(UserError, match=says):
        search(lambda p, _, t: dataclasses.replace(pretend(p, _, t), total=2 * t.hbm))
    small = dataclasses.replace(chips.CHIPS["v5e"], hbm=1 << 20, slices=("2x2",))
    monkeypatch.setitem(chips.CHIPS, "v5e", small)
    with pytest.raises(UserError, match=r"v5e:2x2: does not fit: weights alone"):
        search(None)


BATCH = {"mesh.tensor": 1, "mesh.fsdp": 1, "mesh.data": -1, "rollout.prompts": 6}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "v5e:3x3"}, "topology is 'v5e:3x3'; choose one of: v5e-4, "),
        ({"mesh.fsdp": 3}, "mesh .* needs 6 devices but 4 are here"),
        (BATCH, "rollout.prompts is 6 rows"),
    ],
    ids=["topology", "mesh", "rows"],
)
def test_mistakes_are_named(config, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(scale_up, "measure", lambda p, mesh, to: Measured(p.name, to.hbm))
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        run_config(config, tmp_path)

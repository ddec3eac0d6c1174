"""The scale-up job: a tiny model compiled for four TPU chips, its accounts, and the search for the
smallest pod.
"""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from mint_jax import mesh as mesh_lib
from mint_jax.aot import chips, programs
from mint_jax.aot.measure import Measured, colocated, measure
from mint_jax.errors import UserError
from mint_jax.lora.config import AdapterConfig
from mint_jax.models.config import from_hf
from mint_jax.recipes import scale_up
from tests.configs import read, run_config

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


@pytest.mark.long
def test_a_tiny_model_on_four_chips(config, tmp_path, capsys):
    config.hlo = True
    result = run_config(config, tmp_path)
    assert (result["model"], result["topology"], result["chips"], result["fits"]) == (
        "tiny",
        "v5e:2x2",
        4,
        1,
    )
    assert json.loads(json.dumps(result)) == result
    assert result["parameters"] == 2048 * 256 + 256 + 2 * (
        2 * 256 + 2 * 128 + 256 * (512 + 2 * 256 + 512) + 3 * 256 * 512
    )
    for name in PROGRAMS:
        m = result[name]
        assert (
            m["bytes_per_device"]
            == m["argument_bytes"] + m["temporary_bytes"] + m["output_bytes"] - m["aliased_bytes"]
        )
        assert m["free_hbm_fraction"] == pytest.approx(
            1 - m["bytes_per_device"] / chips.CHIPS["v5e"].hbm, abs=1e-4
        )
        assert m["estimate"]["step_s"] == max(
            m["estimate"][f"{term}_s"] for term in ("compute", "memory", "links")
        )
        assert m["flops"] >= m["flops_traced"]
        assert (tmp_path / f"{name}.hlo.txt").read_text().startswith("HloModule")
    assert result["train"]["flops"] < 1.1 * result["train"]["flops_traced"]
    assert [result[name]["loops_counted_once"] for name in PROGRAMS] == [0, 0, 0, 0]
    assert not any(
        sent["at_least"] for name in PROGRAMS for sent in result[name]["collectives"].values()
    )
    assert result["adapter"] == {
        "rank": 4,
        "alpha": 8.0,
        "targets": ["q", "k", "v", "o", "gate", "up", "down"],
    }
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
    assert together["bytes"] == pytest.approx(resident + most, rel=0.01)  # and new metrics
    assert (
        shared + state + caches + most
        < together["bytes"]
        < result["train"]["bytes_per_device"] + result["decode"]["bytes_per_device"]
    )
    assert together["free_hbm_fraction"] == pytest.approx(
        1 - together["bytes"] / chips.CHIPS["v5e"].hbm, abs=1e-4
    )
    assert together["fits"] == 1
    assert (tmp_path / "scale_up.png").stat().st_size > 10_000
    said = capsys.readouterr()
    assert "all-reduce" in said.err
    assert "rank 4 on q, k, v, o, gate, up, down" in " ".join(said.err.split())
    assert said.out == ""


@pytest.mark.long
def test_adapters_of_experts_are_kernels_on_a_tpu(config, tmp_path, capsys):
    """In the whole programs: under the scan over layers, in the shard_map over experts, through
    their gradients.
    """
    sparse = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    config.model = ConfigDict(
        config.model.to_dict()
        | sparse
        | {
            "moe_intermediate_size": 128,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    )
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 4, "tensor": 1})
    config.hlo = True
    made = run_config(config, tmp_path)
    assert (made["fits"], made["kernels_passed_over"]) == (1, [])
    calls = {name: (tmp_path / f"{name}.hlo.txt").read_text().count for name in PROGRAMS}
    for name, kernels in {
        "train": ("packed_matmul", "packed_lora_backward"),
        "prefill": ("packed_matmul", "paged_attention"),
        "decode": ("packed_matmul", "paged_attention"),
    }.items():
        for kernel in kernels:
            assert calls[name](f"%{kernel}.") > 0, (name, kernel)
    config.model.moe_intermediate_size = 192
    made = run_config(config, tmp_path)
    assert {one["reason"] for one in made["kernels_passed_over"]} == {
        "width 192 is not a multiple of 128"
    }
    assert "was passed over" in capsys.readouterr().err
    text = (tmp_path / "train.hlo.txt").read_text()
    assert "%packed_lora" not in text
    assert "%packed_matmul" not in text


def test_what_finds_no_room_says_how_much_it_needs():
    target = chips.target("v5e:2x2")
    mesh = mesh_lib.make_mesh({"data": 4}, target.devices)
    x = jax.ShapeDtypeStruct((65536,), jnp.float32, sharding=NamedSharding(mesh, P()))
    program = programs.Program(
        "sort", lambda x: jnp.sort(jnp.sin(x[:, None] * x[None]), axis=0)[7], (x,), (), None, 1
    )
    m = measure(program, mesh, target)
    assert "exceeds available HBM" in m.refused
    assert (m.arguments, m.fits(-10.0)) == (65536 * 4, False)
    assert m.temporaries >= 65536 * 65536 * 4
    assert m.json(0.05)["free_hbm_fraction"] < -0.5
    assert (
        m.reason(0.05)
        == f"sort does not fit: it needs {m.total / chips.GIB:.1f} of 16.0 GiB a device"
    )


def test_the_reason_given_is_the_one_found():
    tight = Measured("train", 100 * chips.GIB, total=97 * chips.GIB)
    assert not tight.fits(0.05)
    says = "train needs 97.0 of 100.0 GiB a device, which leaves 3.0 % where 5 % are to stay free"
    assert tight.reason(0.05) == says
    refused = Measured("train", 100, total=130, refused="no room for scoped vmem", stated=False)
    assert refused.reason(0.05) == "train was refused by the compiler: no room for scoped vmem"


def test_programs_that_fit_alone_may_not_fit_together():
    # arguments, temporaries, new
    sizes = {"train": (50, 20, 5), "optim": (30, 5, 0), "prefill": (45, 30, 0)}
    sizes["decode"] = (45, 10, 0)
    measured = [
        Measured(name, 100, a, t, outputs=o + 10, aliased=10, total=a + t + o)
        for name, (a, t, o) in sizes.items()
    ]
    assert all(m.fits(0.2) for m in measured)
    together = colocated(measured, base_bytes=10)
    assert (together.arguments, together.temporaries) == (50 + 45 - 10, 30)
    found = together.json(0.0)
    assert (found["bytes"], found["free_hbm_fraction"], found["fits"]) == (115, -0.15, 0)


def test_the_smallest_pod_that_holds_all(config, tmp_path, monkeypatch):
    config.topology, config.chip = "smallest", "v5e"

    def search(measure):
        monkeypatch.setattr(scale_up, "measure", measure)
        return run_config(config, tmp_path)

    def pretend(program, mesh, target):
        needs = int(1.9 * target.hbm) if program.name == "prefill" else 0
        return Measured(program.name, target.hbm, total=needs * 4 // len(target.devices))

    def refuse(program, mesh, target):
        small = len(target.devices) == 4
        total = 2 * target.hbm * small
        why = "no vmem" * small
        return Measured(program.name, target.hbm, total=total, refused=why, stated=False)

    result = search(pretend)
    assert (result["topology"], result["prefill"]["fits"]) == ("v5e:2x4", 1)
    assert list(result["tried"]) == ["v5e:2x2", "v5e:2x4"]
    assert result["tried"]["v5e:2x2"] == "prefill does not fit: it needs 30.4 of 16.0 GiB a device"
    says = "train was refused by the compiler: no vmem"
    assert search(refuse)["tried"]["v5e:2x2"] == says
    says = r"no v5e slice holds tiny: .*v5e:4x4: train.policies x train.rows is 4 rows"
    with pytest.raises(UserError, match=says):
        search(lambda p, _, t: dataclasses.replace(pretend(p, _, t), total=2 * t.hbm))
    small = dataclasses.replace(chips.CHIPS["v5e"], hbm=1 << 20, slices=("2x2",))
    monkeypatch.setitem(chips.CHIPS, "v5e", small)
    with pytest.raises(UserError, match=r"v5e:2x2: does not fit: weights alone"):
        search(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "v5e:3x3"}, "topology is 'v5e:3x3'; choose one of: v5e-4, "),
        ({"topology": "smallest", "chip": "v9"}, "chip is 'v9'"),
        ({"mesh.fsdp": 3}, "mesh .* needs 6 devices but 4 are here"),
        (
            {
                "mesh.tensor": 1,
                "mesh.fsdp": 1,
                "mesh.expert": 1,
                "mesh.data": -1,
                "rollout.prompts": 6,
            },
            "rollout.prompts is 6 rows",
        ),
        ({"model.intermediate_size": 129}, "does not divide dimension 'ffw'"),
        ({"adapter.targets": ("q", "z")}, "target 'z' is not a projection"),
        ({"quantise": "int4"}, "quantise is 'int4'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes_are_named(config, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(
        scale_up, "measure", lambda program, mesh, target: Measured(program.name, target.hbm)
    )
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        run_config(config, tmp_path)


def test_adapters_split_as_the_base_does(config, mesh8):
    plan = programs.Plan(
        from_hf(config.model.to_dict()),
        mesh8,
        jnp.bfloat16,
        AdapterConfig(4, targets=("q", "down", "embed", "unembed")),
    )
    assert {path: tuple(s.spec) for path, s in plan.factors.items()} == {
        "dense/attn/q/a": (None, None, None, "fsdp"),
        "dense/attn/q/b": (None, None, None, "tensor"),
        "dense/mlp/down/a": (None, None, None, "tensor"),
        "dense/mlp/down/b": (None, None, None, "fsdp"),
        "embed/a": (None, None, None, "tensor"),
        "embed/b": (None, None, None, "fsdp"),
        "unembed/a": (None, None, None, "fsdp"),
        "unembed/b": (None, None, None, "tensor"),
    }
    shape = programs.TrainShape(3, 4, 64, 32)
    train, optim = plan.training(shape)
    state = train.args[1]
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert whole / 2 <= programs.device_bytes(state) < 0.55 * whole  # fsdp or tensor, two ways each


SPARSE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_a_base_in_8_bits_takes_about_half(config):
    config.model, config.adapter = (
        ConfigDict(SPARSE),
        ConfigDict({"rank": 8, "alpha": 8.0, "targets": ("all-linear",)}),
    )
    sizes = []
    for config.quantise in ("", "int8", "float8"):
        sizes.append(scale_up.Question(read(config)).plan(chips.target("v5e:2x2")).base_bytes)
    assert sizes[1] == sizes[2]
    assert 0.45 < sizes[1] / sizes[0] < 0.65, "embeddings and routers stay in 16 bits"


def test_another_adapter_costs_its_own_bytes_and_nothing_else(config):
    config.model, config.adapter = (
        ConfigDict(SPARSE),
        ConfigDict({"rank": 4, "alpha": 8.0, "targets": ("all-linear",)}),
    )

    def argument_bytes(adapters):
        config.rollout.adapters, config.rollout.prompts = adapters, 8
        question = scale_up.Question(read(config))
        plan = question.plan(chips.target("v5e:2x2"))
        decode = plan.sampling(question.rollout)[1]
        return programs.device_bytes(decode.args), programs.device_bytes(decode.args[1])

    (one, adapter), (eight, adapters) = argument_bytes(1), argument_bytes(8)
    assert adapters == 8 * adapter
    assert eight - one == 7 * adapter


def test_a_pool_holds_whole_pages_of_every_context_and_plans_what_the_mesh_divides(config):
    config.rollout.update(
        {
            "adapters": 3,
            "prompts": 4,
            "rollouts": 9,
            "prompt_tokens": 66,
            "new_tokens": 40,
            "blocks": 7,
        }
    )
    question = scale_up.Question(read(config))
    plan = question.plan(chips.target("v5e:2x2"))
    prefill, decode = plan.sampling(question.rollout)
    pool = decode.args[2]
    # 65 tokens of a prompt, whose last is each rollout's first
    assert pool["dense"]["k"].shape == (2, 4 * 3 + 36 * 2, 2, 32, 128)
    assert programs.device_bytes(pool["dense"]) == 2 * 2 * 84 * 2 * 32 * 128 * 2 / 4
    assert jax.tree.map(lambda x: (x.shape, x.sharding), prefill.args[2]) == jax.tree.map(
        lambda x: (x.shape, x.sharding), pool
    )
    assert prefill.args[3].tokens.shape == (8, 32)  # two parts: heads are split two ways, and rows
    assert decode.args[3].token.shape == (36,)
    assert decode.args[3].table.shape[1] >= 4 + 4
    # Of each part two prompts, each two teams of up to 8 of its 9 rollouts; at once four.
    assert decode.trips == {"runs": 1, "teams": 1, "teams/runs": 1, "indexer": 2}
    assert (prefill.tokens, decode.tokens) == (8 * 32, 36)
    assert prefill.unread == programs.device_bytes(pool) * (84 - 6) // 84

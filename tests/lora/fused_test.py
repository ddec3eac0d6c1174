"""Fused adapters of routed experts: files by PEFT's ``save_pretrained`` have PEFT's logits here,
other layouts are refused.
"""

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora import tree
from mint_jax.lora.peft import WEIGHTS, read_peft, write_peft
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import transformer
from mint_jax.params import ParamSpec
from tests import oracles
from tests.exchange import (
    assert_same_logits,
    edit_config,
    edit_tensors,
    our_logits,
    peft_model,
    random_adapter,
    tables,
    tokens_off_ties,
)

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
E, D, F = 8, 48, 40  # the tiny Qwen3-MoE
LAYER0 = "base_model.model.model.layers.0.mlp.experts"


IMPORTS = {  # family, LoraConfig, the rank of what we read
    "both": (
        "qwen3_moe",
        {"target_parameters": [GATE_UP, DOWN], "target_modules": ["q_proj", "o_proj"]},
        4,
    ),
    "gate_up only": ("qwen3_moe", {"target_parameters": [GATE_UP]}, 4),
    "down only": ("qwen3_moe", {"target_parameters": [DOWN]}, 4),
    "one layer": ("qwen3_moe", {"target_parameters": ["layers.1.mlp.experts.down_proj"]}, 4),
    "patterns": (
        "qwen3_moe",
        {
            "target_parameters": [GATE_UP, DOWN],
            "rank_pattern": {"experts.gate_up_proj": 3},
            "alpha_pattern": {r".*\.down_proj": 11},
        },
        4,
    ),
    "rslora": ("qwen3_moe", {"target_parameters": [GATE_UP, DOWN], "use_rslora": True}, 4),
    # trained as PEFT converts separate targets: gate and up share 2r, and random B is not
    # block-diagonal
    "separate": (
        "qwen3_moe",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        8,
    ),
    "separate, rslora": (
        "qwen3_moe",
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
        8,
    ),
    "all-linear": ("qwen3_moe", {"target_modules": "all-linear", "r": 2}, 4),
    # matrices as parameters are saved under ordinary names, and patterns see the parameter's name
    "matrices": (
        "qwen3",
        {
            "target_parameters": ["mlp.gate_proj.weight", "1.self_attn.o_proj.weight"],
            "rank_pattern": {"gate_proj.weight": 2, "gate_proj": 3},
        },
        4,
    ),
}


@pytest.mark.parametrize(("family", "fields", "rank"), IMPORTS.values(), ids=IMPORTS)
def test_what_peft_saves_has_its_logits_here(family, fields, rank, rng, saved, tiny_base, hf_dirs):
    base = tiny_base(family)
    directory, model = saved(family, **({"target_modules": []} | fields))
    adapter, config = read_peft(directory, *tables(base))
    assert config.rank == rank
    tree.check_fits(adapter, config, transformer.abstract(base.cfg), "it")
    tokens_BT = (
        tokens_off_ties(model, rng) if family == "qwen3_moe" else rng.integers(0, 97, (2, 9))
    )
    bare = oracles.torch_logits(oracles.torch_model(hf_dirs(family)), tokens_BT)
    assert_same_logits(
        our_logits(base, adapter, config, tokens_BT), oracles.torch_logits(model, tokens_BT), bare
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_unpacked_factors_that_peft_fused_come_back_exactly(
    rslora, rng, tiny_base, hf_dirs, tmp_path
):
    """The block form: PEFT has gate and up in one pair of rank 2r, and writes that; each gets its
    half again.
    """
    base, config = tiny_base("qwen3_moe"), AdapterConfig(3, 5.0, LINEAR_TARGETS, rslora)
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    write_peft(tmp_path / "ours", adapter, config, names)
    peft_model(hf_dirs("qwen3_moe"), tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / "theirs" / WEIGHTS)[f"{LAYER0}.base_layer.lora_A.weight"].shape == (
        E * 2 * config.rank,
        D,
    )
    back, read = read_peft(tmp_path / "theirs", names, shapes)
    assert (read.rank, read.alpha, read.rslora) == (config.rank, config.alpha, rslora)
    for path, leaf in params_lib.leaves_with_path(adapter):
        found = dict(params_lib.leaves_with_path(back))[path]
        if not rslora:
            np.testing.assert_array_equal(found, leaf, err_msg=path)
        else:
            # alpha times sqrt(2) over sqrt(2r) is alpha over sqrt(r) up to float64's last bits, and
            # float32's in B
            np.testing.assert_allclose(found, leaf, rtol=2.4e-7, err_msg=path)


def swap(tensors):
    """A and B of experts as PEFT wrote them before 0.19.1: its A has our B, its B our A; orders are
    those of today.
    """
    for module in {name.split(".lora_")[0] for name in tensors if ".experts." in name}:
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        R = a.shape[0] // E
        new_a, new_b = (
            np.empty((E * R, b.shape[0]), np.float32),
            np.empty((a.shape[1], R * E), np.float32),
        )
        for e in range(E):
            for j in range(R):
                new_a[e * R + j], new_b[:, j * E + e] = b[:, j * E + e], a[e * R + j]
        tensors |= {f"{module}.lora_A.weight": new_a, f"{module}.lora_B.weight": new_b}


@pytest.mark.parametrize("parameters", [[GATE_UP, DOWN], [GATE_UP], [DOWN]])
def test_swapped_files_of_old_peft_read_the_same(parameters, saved, tiny_base):
    names, shapes = tables(tiny_base("qwen3_moe"))
    directory, _ = saved("qwen3_moe", target_modules=[], target_parameters=parameters)
    plain, config = read_peft(directory, names, shapes)
    edit_tensors(directory, swap)
    edit_config(directory, peft_version="0.18.1")
    swapped, same = read_peft(directory, names, shapes)
    assert same == config
    chex.assert_trees_all_equal(swapped, plain)


# experts of a base in which one of the two parameters is square: name -> (model's width, an
# expert's)
SQUARE = {
    "gate_up": (8, 4),
    "down": (6, 6),
}


def square_base(kind):
    width, ffw = SQUARE[kind]
    inward, outward = (
        ParamSpec((2, 3, width, ffw), (None,) * 4),
        ParamSpec((2, 3, ffw, width), (None,) * 4),
    )
    specs = {
        "moe": {"experts": {"gate": {"w": inward}, "up": {"w": inward}, "down": {"w": outward}}}
    }
    shapes = tree.projections(specs, ("gate", "up", "down"))
    names = {
        path: [
            f"model.layers.{i}.mlp.experts.{e}.{path[12:]}_proj" for i in range(2) for e in range(3)
        ]
        for path in shapes
    }
    return names, shapes, width, ffw


def write_fused(directory, rng, kind, parameters, **fields):
    """A file of rank 2 with the parameters named, in today's layout."""
    _, _, width, ffw = square_base(kind)
    ends, tensors = {"gate_up_proj": (width, 2 * ffw), "down_proj": (ffw, width)}, {}
    for layer in range(2):
        for i, parameter in enumerate(parameters):
            d_in, d_out = ends[parameter]
            module = f"base_model.model.model.layers.{layer}.mlp.experts" + (
                ".base_layer" if i + 1 < len(parameters) else ""
            )
            tensors[f"{module}.lora_A.weight"] = rng.normal(size=(6, d_in)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(size=(d_out, 6)).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / "adapter_config.json").write_text("{}")
    edit_config(
        directory, peft_type="LORA", r=2, lora_alpha=4, target_parameters=parameters, **fields
    )


@pytest.mark.parametrize("kind", SQUARE)
def test_square_pairs_are_read_by_the_version_that_wrote_them(kind, rng, tmp_path):
    """Or refused where it does not tell their orientation."""
    names, shapes, *_ = square_base(kind)
    for version in ("0.18.1", "0.19.1.dev0", None):
        write_fused(tmp_path / f"{version}", rng, kind, [f"{kind}_proj"], peft_version=version)
        message = rf"from (8 to 8|6 to 6), and peft_version is {version!r}.*set peft_version"
        with pytest.raises(UserError, match=message):
            read_peft(tmp_path / f"{version}", names, shapes)
    for version in ("0.19.1", "0.20.0.dev0", "1.0"):
        write_fused(tmp_path / version, rng, kind, [f"{kind}_proj"], peft_version=version)
        adapter, _ = read_peft(tmp_path / version, names, shapes)
        a = load_file(tmp_path / version / WEIGHTS)[f"{LAYER0}.lora_A.weight"]
        for name in ("gate", "up") if kind == "gate_up" else ("down",):
            np.testing.assert_array_equal(adapter["moe"]["experts"][name]["a"][0, 1], a[2:4])


@pytest.mark.parametrize("kind", SQUARE)
def test_a_pair_that_is_not_square_decides_for_the_one_that_is(kind, rng, tmp_path):
    names, shapes, *_ = square_base(kind)
    write_fused(tmp_path / "both", rng, kind, ["gate_up_proj", "down_proj"])
    adapter, _ = read_peft(tmp_path / "both", names, shapes)
    tensors = load_file(tmp_path / "both" / WEIGHTS)
    for name, module in (("gate", f"{LAYER0}.base_layer"), ("down", LAYER0)):
        np.testing.assert_array_equal(
            adapter["moe"]["experts"][name]["a"][0, 1], tensors[f"{module}.lora_A.weight"][2:4]
        )


@pytest.fixture
def directory(rng, saved):
    """A sound directory of rank 4 with both parameters, to be spoilt."""
    return saved("qwen3_moe", target_modules=[], target_parameters=[GATE_UP, DOWN])[0]


def cut(tensors, name, experts):
    """The first experts only."""
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    tensors[f"{name}.lora_A.weight"] = a.reshape(E, 4, -1)[:experts].reshape(experts * 4, -1)
    tensors[f"{name}.lora_B.weight"] = b.reshape(-1, 4, E)[:, :, :experts].reshape(-1, 4 * experts)


def without(tensors, *names):
    for name in names:
        for factor in "AB":
            del tensors[f"{name}.lora_{factor}.weight"]


def swap_layer0(tensors):
    layer0 = {name: x for name, x in tensors.items() if name.startswith(LAYER0)}
    swap(layer0)
    tensors |= layer0


NEED = r"this base needs \(8·r, 48\) and \(80, r·8\) for gate_up_proj"
SPOILT = {
    "an expert is missing": (
        lambda t: cut(t, LAYER0, 7),
        (
            r"layers\.0\.mlp\.experts\.down_proj has lora_A \(28, 40\) and lora_B \(48, 28\); 8"
            r" experts of rank 4, .* need 32 rows and columns"
        ),
    ),
    "only A": (
        lambda t: t.pop(f"{LAYER0}.base_layer.lora_B.weight"),
        (
            r"layers\.0\.mlp\.experts\.base_layer has only one of lora_A and lora_B; the file is"
            r" incomplete"
        ),
    ),
    "only gate_up": (
        lambda t: without(t, LAYER0),
        r"has gate_up_proj's factors \(base_layer\) but not down_proj's: the file is incomplete",
    ),
    "a layer without gate_up": (
        lambda t: without(t, f"{LAYER0}.base_layer"),
        (
            r"target_parameters names model\.layers\.0\.mlp\.experts\.gate_up_proj, but the file"
            r" has no factors of moe/moe/experts/gate for it"
        ),
    ),
    "down's pair where gate_up's belongs": (
        lambda t: t.update(
            {f"{LAYER0}.base_layer.lora_{f}.weight": t[f"{LAYER0}.lora_{f}.weight"] for f in "AB"}
        ),
        NEED,
    ),
    "one layer swapped": (
        swap_layer0,
        (
            "some experts have in and out swapped, as PEFT before 0.19.1 wrote them, and others do"
            " not: save the adapter again"
        ),
    ),
    "fused and unpacked": (
        lambda t: t.update(
            {
                f"{LAYER0}.5.up_proj.lora_A.weight": np.ones((4, D), np.float32),
                f"{LAYER0}.5.up_proj.lora_B.weight": np.ones((F, 4), np.float32),
            }
        ),
        (
            r"experts\.5\.up_proj has its own factors and the fused ones of all experts: keep"
            r" one of the two"
        ),
    ),
    "nan": (
        lambda t: t[f"{LAYER0}.lora_B.weight"].__setitem__((0, 0), np.nan),
        "moe/moe/experts/down/b has NaN or infinite values",
    ),
}


@pytest.mark.parametrize(("change", "message"), SPOILT.values(), ids=SPOILT)
def test_weights_that_do_not_fit_are_refused(change, message, directory, tiny_base):
    edit_tensors(directory, change)
    with pytest.raises(UserError, match=message):
        read_peft(directory, *tables(tiny_base("qwen3_moe")))


REFUSED_FIELDS = {
    "rank": (
        {"r": 2},
        r"lora_A \(32, 48\) and lora_B \(80, 32\); 8 experts of rank 2, .* need 16 rows",
    ),
    "pattern": (
        {"rank_pattern": {"down_proj": 8}},
        r"down_proj has lora_A \(32, 40\) .* 8 experts of rank 8, .* need 64 rows",
    ),
    "a layer that is not there": (
        {"target_parameters": [GATE_UP, DOWN, "mlp.gate.weight", "layers.9.mlp.experts.down_proj"]},
        r"of which 'layers\.9\.mlp\.experts\.down_proj' is not adaptable",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED_FIELDS.values(), ids=REFUSED_FIELDS)
def test_configs_that_do_not_fit_are_refused(fields, message, directory, tiny_base):
    edit_config(directory, **fields)
    with pytest.raises(UserError, match=message):
        read_peft(directory, *tables(tiny_base("qwen3_moe")))

"""Published quantised checkpoints: numbers of transformers and compressed-tensors, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mint_jax.errors import UserError
from mint_jax.mesh import make_mesh
from mint_jax.models import hf, published, transformer
from mint_jax.models import words as words_lib
from mint_jax.models.lazy import Computed
from tests import oracles
from tests.exchange import looser
from tests.models.hf_config_test import message

BLOCK = 2  # divides every width of the tiny bases: transformers reads no other blocks
KEPT = ("mlp.gate.weight", "weights_proj.weight", "embed_tokens.weight", "lm_head.weight")
KEPT += ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "shared_expert_gate.weight")


def _write(directory: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _copied(source: Path, directory: Path) -> dict[str, torch.Tensor]:
    return load_file(shutil.copytree(source, directory) / "model.safetensors")


def _matrices(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, w in tensors.items() if w.ndim == 2 and not name.endswith(KEPT)]


def write_fp8(
    source: Path, directory: Path, block: tuple[int, int] = (BLOCK, BLOCK), scales=torch.float32
) -> Path:
    """Writes a checkpoint as DeepSeek-V3 is published: float8 with a scale for each block."""
    tensors = _copied(source, directory)
    for name in _matrices(tensors):
        w = tensors[name]
        rows, columns = (-(-n // b) for n, b in zip(w.shape, block))
        padded = torch.zeros(rows * block[0], columns * block[1])
        padded[: w.shape[0], : w.shape[1]] = w
        blocks = padded.reshape(rows, block[0], columns, block[1])
        scale = (blocks.abs().amax((1, 3)) / 448).to(scales)
        q = (blocks / scale.float()[:, None, :, None]).reshape(padded.shape)
        tensors[name] = q[: w.shape[0], : w.shape[1]].to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scale
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    skipped = ["lm_head", "gate", "weights_proj", "in_proj_a", "in_proj_b", "in_proj_ba"]
    skipped += ["shared_expert_gate"]
    quantization |= {"weight_block_size": list(block), "modules_to_not_convert": skipped}
    return _write(directory, tensors, quantization)


def write_packed(source: Path, directory: Path, bits: int, group: int | None) -> Path:
    """Writes a checkpoint as Kimi-K2-Thinking is published, with compressed-tensors' packing."""
    tensors = _copied(source, directory)
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    weights |= {"group_size": group, "dynamic": False, "actorder": None}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    for name in _matrices(tensors):
        w = tensors.pop(name).bfloat16()
        groups = w.reshape(w.shape[0], -1, group or w.shape[1])
        scale = (groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).bfloat16()
        packed = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
        tensors |= {f"{name.removesuffix('weight')}{part}": x for part, x in packed.items()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"weights": weights, "input_activations": None}},
    }
    return _write(directory, tensors, quantization)


def write_mxfp4(source: Path, directory: Path, rng: np.random.Generator) -> Path:
    """Writes a checkpoint as gpt-oss is published, experts of random bytes."""
    tensors = _copied(source, directory)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, d_in, d_out = tensors.pop(name).shape
        blocks, scales = (E, d_out, d_in // 32, 16), (E, d_out, d_in // 32)
        tensors[f"{name}_blocks"] = torch.tensor(rng.integers(0, 256, blocks, np.uint8))
        tensors[f"{name}_scales"] = torch.tensor(rng.integers(121, 125, scales, np.uint8))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    return _write(directory, tensors, quantization)


def pairs_unpacked(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the tensors of an MXFP4 checkpoint as transformers dequantises them."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        module = name.removesuffix("_blocks")
        parts = tensors.pop(name), tensors.pop(f"{module}_scales")
        tensors[module] = convert_moe_packed_tensors(*parts, dtype=dtype)
    return tensors


def write_floats(source: Path, directory: Path, block: tuple[int, int] | None) -> Path:
    """Writes a checkpoint as GLM-4.5-FP8 is published, in float8 with scales by row or block."""
    tensors = _copied(source, directory)
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel" if block is None else "block", "block_structure": block}
    for name in _matrices(tensors):
        w = tensors[name].bfloat16()
        rows, columns = (1, w.shape[1]) if block is None else block
        parts = w.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        scale = (parts.abs().amax((1, 3)).float() / 448).bfloat16()
        wide = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        tensors[name] = (w.float() / wide).to(torch.float8_e4m3fn)
        tensors[f"{name.removesuffix('weight')}weight_scale"] = scale
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    group = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    quantization |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return _write(directory, tensors, quantization | {"config_groups": {"group_0": group}})


def write_words(
    source: Path, directory: Path, method: str, rng: np.random.Generator, bits: int = 4, **options
) -> Path:
    """Writes a checkpoint as AutoAWQ or GPTQModel does, with random words: zero points differ, and
    with ``desc_act`` inputs are in groups in random order.
    """
    tensors, group, per_word = _copied(source, directory), 8, 32 // bits
    for name in _matrices(tensors):
        outputs, inputs = tensors.pop(name).shape
        words = (inputs, outputs // per_word) if method == "awq" else (inputs // per_word, outputs)
        scales = rng.uniform(1e-3, 1e-2, (inputs // group, outputs))
        zeros = rng.integers(0, (1 << bits) - 1, scales.shape)  # the largest is refused by GPTQ
        packed = sum(zeros[:, i::per_word] << (i * bits) for i in range(per_word))
        parts = {"qweight": rng.integers(0, 1 << 32, words, np.uint32).view(np.int32)}
        parts |= {"qzeros": packed.astype(np.uint32).view(np.int32)}
        parts |= {"scales": scales.astype(np.float16)}
        if method == "gptq":
            of = np.arange(inputs, dtype=np.int32) // group
            parts["g_idx"] = rng.permutation(of) if options.get("desc_act") else of
        module = name.removesuffix("weight")
        tensors |= {f"{module}{part}": torch.tensor(x) for part, x in parts.items()}
    given = {"quant_method": method, "bits": bits, "group_size": group, **options}
    return _write(directory, tensors, given)


def gptq_weight(parts: dict[str, torch.Tensor], bits: int, offset: int) -> torch.Tensor:
    """Returns a matrix ``[out, in]`` by GPTQ's formula, in the dtype of its scales."""
    q, zeros, scales, of = (x.numpy() for x in parts.values())
    shifts = np.arange(0, 32, bits)
    q = (q[:, None] >> shifts[None, :, None] & (1 << bits) - 1).reshape(-1, q.shape[1])
    zeros = (zeros[..., None] >> shifts & (1 << bits) - 1).reshape(scales.shape) + offset
    return torch.tensor(((q - zeros[of]) * scales[of].astype(np.float64)).T).half()


def decompressed(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint as compressed-tensors decompresses them."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    weights = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        parts, compressor = ("weight", "weight_scale"), FloatQuantizationCompressor
        if f"{module}.weight_packed" in tensors:
            parts = ("weight_packed", "weight_scale", "weight_shape")
            compressor = PackedQuantizationCompressor
        state = {part: tensors.pop(f"{module}.{part}") for part in parts}
        tensors[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
    return tensors


def loaded(directory: Path, mesh: Any, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    cfg = hf.read_model(directory)
    return dict(hf.tensors(hf.load(directory, cfg, mesh, dtype), cfg))


def _assert_same(ours: dict[str, np.ndarray], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        want = theirs[key].float().numpy() if torch.is_tensor(theirs[key]) else theirs[key]
        np.testing.assert_array_equal(value, want, err_msg=key)


def _assert_slices(part: Any, rng: np.random.Generator, times: int) -> None:
    """Random slices of a lazy tensor are those of all of it."""
    whole = np.asarray(part[(slice(None),) * len(part.get_shape())])
    assert list(whole.shape) == part.get_shape()
    for _ in range(times):
        ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in whole.shape]
        index = tuple(slice(*map(int, pair)) for pair in ends)
        np.testing.assert_array_equal(part[index], whole[index])


@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm", "qwen3_5_moe", "qwen3_next"],
)
def test_float8_blocks_are_the_numbers_of_transformers(name, hf_dirs, tmp_path, mesh, rng):
    directory = write_fp8(hf_dirs(name), tmp_path / "fp8")
    model = oracles.torch_model(directory)
    cfg = hf.read_model(directory)
    params = hf.load(directory, cfg, mesh)
    ours = dict(hf.tensors(params, cfg))
    theirs = model.state_dict()
    compared = [key for key in ours if key in theirs]  # transformers stacks the experts
    assert len(compared) > 3 * cfg.num_layers
    for key in compared:
        np.testing.assert_array_equal(ours[key], theirs[key].float().numpy(), err_msg=key)
    tokens = rng.integers(1, cfg.vocab_size, (1, 8))  # up to index_topk: every key is attended
    inputs = transformer.DecoderInputs(jnp.asarray(tokens), jnp.arange(8)[None])
    hidden, _ = transformer.hidden_states(params, None, inputs, cfg)
    got = np.asarray(transformer.logits(params, None, hidden, cap=cfg.logit_cap))
    keep = oracles.decided(model, tokens[0].tolist())
    # Sums of float32 in another order, as for the unquantised bases in transformer_test.
    wanted, atol = oracles.torch_logits(model, tokens), 3e-5 * looser(cfg)
    np.testing.assert_allclose(got[:, :keep], wanted[:, :keep], atol=atol, rtol=3e-5)


PACKED, FLOATS = [(4, 4), (8, 2), (4, None)], [(None,), ((2, 4),)]
COMPRESSED = [(write_packed, n, how) for n in ("qwen3_moe", "deepseek_v3") for how in PACKED]
COMPRESSED += [(write_floats, n, how) for n in ("glm4", "qwen3") for how in FLOATS]


@pytest.mark.parametrize(("write", "name", "how"), COMPRESSED)
def test_packed_integers_and_floats_are_the_numbers_of_compressed_tensors(
    write, name, how, hf_dirs, tmp_path, mesh
):
    directory = write(hf_dirs(name), tmp_path / "compressed", *how)
    _assert_same(loaded(directory, mesh), decompressed(directory))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3_dense"])
def test_awq_has_the_numbers_of_compressed_tensors(name, hf_dirs, tmp_path, mesh, rng):
    directory = write_words(hf_dirs(name), tmp_path / "awq", "awq", rng)
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    theirs = AutoAWQConverter(group_size=8).process(load_file(directory / "model.safetensors"))
    ours = loaded(directory, mesh)
    for module in [n.removesuffix("_packed") for n in theirs if n.endswith(".weight_packed")]:
        names = (f"weight_{part}" for part in ("packed", "scale", "shape", "zero_point"))
        state = {n: theirs.pop(f"{module.removesuffix('weight')}{n}") for n in names}
        theirs[module] = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    _assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("bits", "options"),
    [(4, {"desc_act": True}), (8, {}), (2, {"checkpoint_format": "gptq_v2"})],
)
def test_gptq_has_the_numbers_of_its_formula(bits, options, hf_dirs, tmp_path, mesh, rng):
    directory = write_words(hf_dirs("qwen3"), tmp_path / "gptq", "gptq", rng, bits, **options)
    theirs, ours = load_file(directory / "model.safetensors"), loaded(directory, mesh)
    for module in [n.removesuffix("qweight") for n in theirs if n.endswith(".qweight")]:
        parts = {p: theirs.pop(module + p) for p in ("qweight", "qzeros", "scales", "g_idx")}
        theirs[f"{module}weight"] = gptq_weight(parts, bits, 0 if bits == 2 else 1)
    _assert_same(ours, theirs)


@pytest.mark.parametrize("value", [0.0, 1e-3])
def test_a_bias_that_the_model_does_not_have_must_be_zero(value, published_dirs, tmp_path, mesh):
    directory = Path(shutil.copytree(published_dirs["gptq"], tmp_path / "gptq"))
    _replaced(bias=lambda x: torch.full((64,), value))(directory)
    if value:
        with pytest.raises(UserError, match=f"does not read 1 of the tensors.*{Q}bias"):
            loaded(directory, mesh)
    else:
        assert f"{Q}bias" not in loaded(directory, mesh)


def test_the_text_of_a_model_of_pictures_is_read(hf_dirs, tmp_path, mesh):
    """As Kimi-K2.5 is published: packed integers, described in the nested ``text_config``."""
    packed = write_packed(hf_dirs("deepseek_v3"), tmp_path / "packed", 4, 4)
    directory = Path(shutil.copytree(packed, tmp_path / "wrapped"))
    text = json.loads((packed / "config.json").read_text()) | {"model_type": "kimi_k2"}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    outer |= {"text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = load_file(packed / "model.safetensors")
    tensors = {f"language_model.{name}": x for name, x in tensors.items()}
    tensors |= {"vision_tower.w": torch.ones(2), "mm_projector.w": torch.ones(2)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _assert_same(loaded(directory, mesh), loaded(packed, mesh))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_may_reach_beyond_a_matrix(scales, hf_dirs, tmp_path, mesh):
    """Scales cover the 576 rows of DeepSeek-V3's ``kv_a_proj_with_mqa`` in 4.5 blocks."""
    directory = write_fp8(hf_dirs("deepseek_v3"), tmp_path / "fp8", (7, 9), scales)
    raw, ours = load_file(directory / "model.safetensors"), loaded(directory, mesh)
    for key in (k for k in raw if f"{k}_scale_inv" in raw):
        rows, columns = raw[key].shape
        scale = raw[f"{key}_scale_inv"].double().numpy()
        wide = scale[np.arange(rows)[:, None] // 7, np.arange(columns)[None] // 9]
        expected = raw[key].double().numpy() * wide
        np.testing.assert_array_equal(ours[key], expected.astype(np.float32), err_msg=key)


@pytest.mark.parametrize("kind", ["fp8", "packed", "awq", "gptq"])
def test_every_slice_is_that_of_the_whole(kind, hf_dirs, tmp_path, rng):
    source = hf_dirs("qwen3")
    if kind == "fp8":
        directory = write_fp8(source, tmp_path / kind, (7, 9))
    elif kind == "packed":
        directory = write_packed(source, tmp_path / kind, 4, 16)
    else:
        directory = write_words(source, tmp_path / kind, kind, rng, desc_act=True)
    part = hf.Checkpoint(directory).tensor("model.layers.1.mlp.down_proj.weight")
    _assert_slices(part, rng, 50)


@pytest.mark.parametrize("kind", ["fp8", "packed"])
def test_eight_devices_and_other_dtypes_hold_the_same_numbers(kind, hf_dirs, tmp_path, mesh):
    source = hf_dirs("qwen3_moe")
    make = {"fp8": write_fp8, "packed": lambda a, b: write_packed(a, b, 4, 8)}[kind]
    directory = make(source, tmp_path / kind)
    whole = loaded(directory, mesh)
    sharded = loaded(directory, make_mesh({"fsdp": 4, "expert": 2}))
    half = loaded(directory, mesh, jnp.bfloat16)
    for key, value in whole.items():
        np.testing.assert_array_equal(sharded[key], value)
        np.testing.assert_array_equal(half[key], value.astype(jnp.bfloat16))


Q, GATE_UP = "model.layers.1.self_attn.q_proj.", "model.layers.1.mlp.experts.gate_up_proj"


def _replaced(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Returns a change of a checkpoint's tensors of one projection; None removes a tensor."""

    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        for part, alter in changes.items():
            name = Q + part if part[:1].isalpha() else GATE_UP + part
            new = alter(tensors.pop(name, torch.zeros(0)))
            if new is not None:
                tensors[name] = new.contiguous()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return change


def _configured(**changes: Any) -> Callable[[Path], None]:
    """Returns a change of ``quantization_config``; ``a__b`` is a nested field."""

    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        for path, value in changes.items():
            *above, field = path.split("__")
            node = config["quantization_config"]
            for name in above:
                node = node[name]
            node[field] = value
        (directory / "config.json").write_text(json.dumps(config))

    return change


def _truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _dropped(tensor: torch.Tensor) -> None:
    del tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_of_4_bits_are_the_numbers_of_transformers(dtype, hf_dirs, tmp_path, mesh, rng):
    directory = write_mxfp4(hf_dirs("gpt_oss"), tmp_path / "mxfp4", rng)
    meshes = {"float32": mesh, "bfloat16": make_mesh({"fsdp": 4, "expert": 2})}
    ours, kind = loaded(directory, meshes[dtype], jnp.dtype(dtype)), getattr(torch, dtype)
    theirs = pairs_unpacked(directory, kind)
    _assert_same(ours, {name: want.to(kind) for name, want in theirs.items()})


def test_all_pairs_and_scales_and_any_part_of_an_expert(hf_dirs, tmp_path, rng):
    """Each byte of blocks with each byte of scales, infinities and NaN too."""
    every = np.arange(256, dtype=np.uint8)
    pairs = every.repeat(256 * 16).reshape(1, 4096, 16, 16)
    scales = np.tile(every.reshape(1, 16, 16), (1, 256, 1))
    lazy = [_Lazy(pairs), _Lazy(scales)]
    ours = published.Pairs("x", *lazy)[:, :, :]
    theirs = convert_moe_packed_tensors(*map(torch.tensor, (pairs, scales)), dtype=torch.float32)
    np.testing.assert_array_equal(ours, theirs.numpy().swapaxes(1, 2))
    plain, packed = hf_dirs("gpt_oss"), write_mxfp4(hf_dirs("gpt_oss"), tmp_path / "mxfp4", rng)
    for directory in (plain, packed):
        ckpt = hf.Checkpoint(directory)
        for of in (
            "3.gate_proj.weight",
            "7.up_proj.weight",
            "0.down_proj.weight",
            "2.up_proj.bias",
        ):
            _assert_slices(ckpt.tensor(f"model.layers.1.mlp.experts.{of}"), rng, 5)


class _Lazy(Computed):
    """An array as a file gives it."""

    def __init__(self, array: np.ndarray):
        super().__init__(array.shape, "U8")
        self._array = array

    def _part(self, spans: list[slice]) -> np.ndarray:
        return self._array[tuple(spans)]


WEIGHTS = "config_groups__group_0__weights__"
BAD_FP8 = {
    "no scales": (_replaced(weight_scale_inv=_dropped), ["F8_E4M3", Q]),
    "no values": (_replaced(weight=_dropped), ["no " + Q + "weight"]),
    "both scales": (_replaced(weight_scale=lambda x: torch.ones(1)), ["both", "weight_scale"]),
    "packed too": (_replaced(weight_packed=lambda x: torch.ones(1)), ["both", "weight_packed"]),
    "values in float": (_replaced(weight=torch.Tensor.float), ["F32", "F8_E4M3"]),
    "values in integers": (_replaced(weight=lambda x: x.view(torch.int8)), ["I8", "F8_E4M3"]),
    "other float8": (_replaced(weight=lambda x: x.float().to(torch.float8_e5m2)), ["F8_E5M2"]),
    "values of one axis": (_replaced(weight=lambda x: x.reshape(-1)), ["matrix of F8_E4M3"]),
    "half of the rows": (_replaced(weight=lambda x: x[:32]), ["scales", "[16, 24]"]),
    "transposed scales": (_replaced(weight_scale_inv=lambda x: x.T), ["[24, 32]", "[32, 24]"]),
    "one scale": (_replaced(weight_scale_inv=lambda x: x[:1, :1]), ["[1, 1]", "[32, 24]"]),
    "a scale for each row": (_replaced(weight_scale_inv=lambda x: x[:, :1]), ["[32, 1]"]),
    "scales in float64": (_replaced(weight_scale_inv=torch.Tensor.double), ["F64", "F32"]),
    "scales in integers": (_replaced(weight_scale_inv=torch.Tensor.int), ["I32", "F32"]),
    "other blocks": (_configured(weight_block_size=[4, 4]), ["[32, 24]", "[16, 12]"]),
    "no blocks": (_configured(weight_block_size=None), ["weight_block_size is None"]),
    "blocks of nothing": (_configured(weight_block_size=[0, 2]), ["[0, 2]", "positive"]),
    "static activations": (_configured(activation_scheme="static"), ["activation_scheme"]),
    "e5m2": (_configured(fmt="e5m2"), ["fmt is 'e5m2'"]),
    "experts in 4 bits": (_configured(expert_dtype="fp4"), ["expert_dtype is 'fp4'"]),
    "another method": (_configured(quant_method="hqq"), ["'hqq'", "fp8", "compressed-tensors"]),
    "no method": (_configured(quant_method=None), ["quant_method None"]),
    "truncated": (_truncated, ["model.safetensors", "fetch the checkpoint again"]),
}
BAD_PACKED = {
    "no scales": (_replaced(weight_scale=_dropped), ["no " + Q + "weight_scale"]),
    "no words": (_replaced(weight_packed=_dropped), ["no " + Q + "weight_packed"]),
    "no shape": (_replaced(weight_shape=_dropped), ["no " + Q + "weight_shape"]),
    "zero points": (_replaced(weight_zero_point=lambda x: torch.ones(1)), ["weight_zero_point"]),
    "plain too": (_replaced(weight=lambda x: torch.ones(64, 48)), ["both", Q + "weight"]),
    "order of groups": (_replaced(weight_g_idx=lambda x: torch.ones(1)), ["weight_g_idx"]),
    "words in int64": (_replaced(weight_packed=torch.Tensor.long), ["I64", "I32"]),
    "too few words": (_replaced(weight_packed=lambda x: x[:, :5]), ["[64, 5]", "[64, 48]"]),
    "another shape": (_replaced(weight_shape=lambda x: x + 8), ["[64, 6]", "[72, 56]"]),
    "a shape of three": (_replaced(weight_shape=lambda x: torch.ones(3).long()), ["[1, 1, 1]"]),
    "too few scales": (_replaced(weight_scale=lambda x: x[:, :3]), ["[64, 3]", "[64, 6]"]),
    "scales in integers": (_replaced(weight_scale=torch.Tensor.int), ["I32", "BF16"]),
    "other groups": (_configured(**{WEIGHTS + "group_size": 16}), ["[64, 6]", "[64, 3]"]),
    "groups of nothing": (_configured(**{WEIGHTS + "group_size": 0}), ["group_size is 0"]),
    "3 bits": (_configured(**{WEIGHTS + "num_bits": 3}), ["num_bits is 3", "4 or 8"]),
    "8 bits": (_configured(**{WEIGHTS + "num_bits": 8}), ["[64, 6]", "[64, 48]"]),
    "floats": (_configured(**{WEIGHTS + "type": "float"}), ["type is 'float'"]),
    "asymmetric": (_configured(**{WEIGHTS + "symmetric": False}), ["symmetric is False"]),
    "by tensor": (_configured(**{WEIGHTS + "strategy": "tensor"}), ["strategy is 'tensor'"]),
    "by activation": (_configured(**{WEIGHTS + "actorder": "group"}), ["actorder is 'group'"]),
    "dynamic": (_configured(**{WEIGHTS + "dynamic": True}), ["dynamic is True"]),
    "another format": (_configured(format="nvfp4-pack-quantized"), ["format is 'nvfp4-pack"]),
    "8-bit activations": (
        _configured(config_groups__group_0__input_activations={"num_bits": 8}),
        ["input_activations is {'num_bits': 8}"],
    ),
    "no groups": (_configured(config_groups={}), ["config_groups is {}", "one group"]),
    "sparse": (_configured(sparsity_config={"format": "x"}), ["sparsity_config"]),
    "quantised cache": (_configured(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
}
BAD_MXFP4 = {
    "no scales": (_replaced(_scales=_dropped), [f"{GATE_UP}_blocks but no {GATE_UP}_scales"]),
    "no blocks": (_replaced(_blocks=_dropped), [f"{GATE_UP}_scales but no {GATE_UP}_blocks"]),
    "plain too": (_replaced(**{"": lambda x: torch.ones(8, 64, 192)}), ["both", GATE_UP]),
    "blocks of 8": (_replaced(_blocks=lambda x: x[..., :8]), ["U8", "[8, 192, 2, 8]"]),
    "flat blocks": (_replaced(_blocks=lambda x: x.flatten(2)), ["U8", "[8, 192, 32]"]),
    "fewer rows": (_replaced(_blocks=lambda x: x[:, :190]), ["[8, 190, 2, 16]", "[8, 192, 2]"]),
    "fewer scales": (_replaced(_scales=lambda x: x[..., :1]), ["[8, 192, 2, 16]", "[8, 192, 1]"]),
    "float scales": (_replaced(_scales=torch.Tensor.float), ["F32"]),
    "signed blocks": (_replaced(_blocks=lambda x: x.view(torch.int8)), ["I8"]),
    "fewer experts": (
        _replaced(_blocks=lambda x: x[:7], _scales=lambda x: x[:7]),
        ["no tensor 'model.layers.1.mlp.experts.7."],
    ),
    "wider": (
        _replaced(_blocks=lambda x: torch.cat([x, x], 2), _scales=lambda x: torch.cat([x, x], 2)),
        ["has shape (96, 128) but config.json needs (96, 64)"],
    ),
    "no biases": (_replaced(_bias=_dropped), ["no tensor", "experts.0.gate_proj."]),
    "not declared": (_configured(quant_method=None), ["quant_method None"]),
}
BAD_FLOATS = {
    "no scales": (_replaced(weight_scale=_dropped), ["F8_E4M3", Q]),
    "scales of the other form": (
        _replaced(weight_scale_inv=lambda x: torch.ones(1)),
        ["both", "weight_scale_inv"],
    ),
    "scales by group": (_replaced(weight_scale=lambda x: x.repeat(1, 2)), ["[64, 2]", "[64, 1]"]),
    "static activations": (
        _configured(config_groups__group_0__input_activations={"dynamic": False}),
        ["input_activations is {'dynamic': False}"],
    ),
    "by tensor": (_configured(**{WEIGHTS + "strategy": "tensor"}), ["strategy is 'tensor'"]),
    "integers": (_configured(**{WEIGHTS + "type": "int"}), ["type is 'int'"]),
    "no block": (
        _configured(**{WEIGHTS + "strategy": "block"}),
        ["block_structure is None", "two positive integers"],
    ),
    "no format": (_configured(format=None), ["format is None"]),
}
BAD_GPTQ = {
    "no words": (_replaced(qweight=_dropped), ["no " + Q + "qweight"]),
    "no scales": (_replaced(scales=_dropped), ["no " + Q + "scales"]),
    "no order": (_replaced(g_idx=_dropped), ["no " + Q + "g_idx"]),
    "plain too": (_replaced(weight=lambda x: torch.ones(64, 48)), ["both", Q + "weight"]),
    "words in int64": (_replaced(qweight=torch.Tensor.long), ["I64"]),
    "transposed words": (_replaced(qweight=lambda x: x.T), ["[64, 6]"]),
    "flat words": (_replaced(qweight=lambda x: x.flatten()), ["expected matrices"]),
    "a short order": (_replaced(g_idx=lambda x: x[:40]), ["[40]", "[48]"]),
    "fewer zeros": (_replaced(qzeros=lambda x: x[:, :7]), ["[6, 7]", "[6, 8]"]),
    "fewer scales": (_replaced(scales=lambda x: x[:2]), ["[2, 64]", "[6, 64]"]),
    "integer scales": (_replaced(scales=torch.Tensor.int), ["BF16"]),
    "other groups": (_configured(group_size=16), ["[6, 64]", "[3, 64]"]),
    "groups of nothing": (_configured(group_size=0), ["group_size is 0"]),
    "3 bits": (_configured(bits=3), ["bits is 3", "2 or 4 or 8"]),
    "8 bits": (_configured(bits=8), ["[6, 64]", "[24]"]),
    "marlin": (_configured(checkpoint_format="marlin"), ["checkpoint_format is 'marlin'"]),
    "several precisions": (_configured(dynamic={"a": {"bits": 8}}), ["dynamic is {'a'"]),
    "a quantised head": (_configured(lm_head=True), ["lm_head is True"]),
}
BAD_AWQ = {
    "no zeros": (_replaced(qzeros=_dropped), ["no " + Q + "qzeros"]),
    "gptq's order": (_replaced(g_idx=lambda x: torch.ones(1)), ["both", Q + "g_idx"]),
    "words of gptq": (_replaced(qweight=lambda x: x.T), ["[8, 48]"]),
    "symmetric": (_configured(zero_point=False), ["zero_point is False"]),
    "gemv": (_configured(version="GEMV"), ["version is 'gemv'"]),
    "8 bits": (_configured(bits=8), ["bits is 8"]),
    "another program": (_configured(backend="llm-awq"), ["backend is 'llm-awq'"]),
}
BAD = {"fp8": BAD_FP8, "packed": BAD_PACKED, "floats": BAD_FLOATS}
BAD |= {"gptq": BAD_GPTQ, "awq": BAD_AWQ, "mxfp4": BAD_MXFP4}
BAD = [(kind, name, *case) for kind, cases in BAD.items() for name, case in cases.items()]


@pytest.fixture(scope="module")
def published_dirs(hf_dirs, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    source, rng = hf_dirs("qwen3"), np.random.default_rng(0)
    return {
        "gptq": write_words(source, root / "gptq", "gptq", rng),
        "awq": write_words(source, root / "awq", "awq", rng),
        "fp8": write_fp8(source, root / "fp8"),
        "packed": write_packed(source, root / "packed", 4, 8),
        "floats": write_floats(source, root / "floats", None),
        "mxfp4": write_mxfp4(hf_dirs("gpt_oss"), root / "mxfp4", rng),
    }


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [(k, c, w) for k, _, c, w in BAD],
    ids=[f"{k}: {n}" for k, n, *_ in BAD],
)
def test_a_bad_quantised_checkpoint_is_refused_before_a_value_is_read(
    kind, change, words, published_dirs, tmp_path, mesh, monkeypatch
):
    directory = Path(shutil.copytree(published_dirs[kind], tmp_path / kind))
    change(directory)

    def read(*_: Any) -> None:
        pytest.fail("values were read")

    monkeypatch.setattr(published.Dequantised, "__getitem__", read)
    monkeypatch.setattr(published.Pairs, "__getitem__", read)
    monkeypatch.setattr(words_lib.WordMatrix, "__getitem__", read)
    monkeypatch.setattr(jax, "make_array_from_callback", read)
    told = message(lambda: hf.load(directory, hf.read_model(directory), mesh))
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replaced(g_idx=lambda x: x + 1), "g_idx .* is 1 to 6; expected 0 to 5"),
        (_replaced(qzeros=lambda x: torch.full_like(x, -1)), "a zero point of 0"),
    ],
)
def test_gptq_words_that_have_no_meaning_are_refused(
    change, reason, published_dirs, tmp_path, mesh
):
    directory = Path(shutil.copytree(published_dirs["gptq"], tmp_path / "gptq"))
    change(directory)
    with pytest.raises(UserError, match=reason):
        loaded(directory, mesh)

"""Shared by tests of adapter exchange: our logits under one adapter, a base's name tables, PEFT's
files.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
from safetensors.numpy import load_file, save_file

from mint_jax.lora import tree
from mint_jax.lora.peft import CONFIG, WEIGHTS
from mint_jax.models import hf, transformer
from tests import oracles
from tests.views import view_of_one


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def decoder_logits(
    params, lora, tokens_BT, positions_BT=None, segments=None, *, cfg, remat="none"
) -> jax.Array:
    """``[B, T, V]`` of packed rows; without positions each is one text."""
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    inputs = transformer.DecoderInputs(tokens_BT, positions_BT, segments)
    h, _ = transformer.hidden_states(params, lora, inputs, cfg, remat=remat)
    return transformer.logits(params, lora, h, cap=cfg.logit_cap)


def our_logits(base, adapter, config, tokens_BT) -> np.ndarray:
    """``[B, T, V]`` with one adapter for all rows."""
    view = view_of_one(adapter, config.scale)
    return np.asarray(decoder_logits(base.params, view, tokens_BT, cfg=base.cfg))


def tables(base):
    """Module names and projections of everything that can be adapted in a base."""
    specs = transformer.abstract(base.cfg)
    found = tree.projections(specs, tree.target_paths(specs))
    return hf.module_names(base.cfg, found), found


def looser(cfg, factor: float = 20.0) -> float:
    """Factor on tolerances of bases with states. A query nearly orthogonal to all keys of a state
    reads a small output, whose rounding the norm after it enlarges, in torch as here. So do norms
    after layers: if weights change in their last place, torch's logits change by up to 1.6e-5 of
    the largest (Gemma 4 with shared keys; our difference with adapters was 3.6e-5), those of a
    Llama by 1.3e-6. Mamba's states are normalised too: one logit of 1,746 of Nemotron-H differed
    from torch's by 5.1e-6 of the largest.
    """
    if cfg.delta is not None or cfg.shared_keys is not None:
        return factor
    return 5.0 if cfg.post_norms or cfg.state is not None else 1.0


def assert_same_logits(ours, theirs, bare, factor=1.0):
    # float32 sums of 48 to 97 terms over 3 layers, in another order than torch's
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=factor * 5e-6 * np.abs(theirs).max())
    assert np.abs(theirs - bare).max() > 1e-2, (
        "the adapter does nothing, so the comparison says nothing"
    )


def peft_model(directory: str | Path, adapter: str | Path, trainable: bool = False) -> Any:
    """A checkpoint with an adapter, loaded by PEFT; a module without its tensors is an error, where
    PEFT only warns.
    """
    # PEFT refuses out_proj of Mamba-2, whose fused kernels would pass it by; torch's form does not.
    check = "peft.tuners.tuners_utils._check_lora_target_modules_mamba"
    with warnings.catch_warnings(), mock.patch(check):
        warnings.filterwarnings("error", message=".*[Mm]issing.*")
        return peft.PeftModel.from_pretrained(
            oracles.torch_model(directory), adapter, is_trainable=trainable
        ).eval()


def randomise(model: Any) -> Any:
    """Random factors in place of PEFT's zero B: a trained adapter."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(0, 0.5 * p.shape[-1] ** -0.5)
    return model


def peft_gradients(
    model: Any, names: dict[str, list[str]], rank: int, E: int, F: int
) -> dict[str, np.ndarray]:
    """PEFT's gradients by our path, modules in our order; the E experts of width F are cut out of
    its fused pairs row by row.
    """

    def of(module):
        if getattr(module, "lora_embedding_A", None):
            pair = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        else:
            pair = module.lora_A["default"].weight, module.lora_B["default"].weight
        return tuple(p.grad.numpy() for p in pair)

    out = {}
    for path, modules in names.items():
        pairs = []
        for name in modules:
            if ".experts." not in name:
                module = model.get_submodule(f"base_model.model.{name}")
                if not hasattr(module, "lora_A"):
                    break
                a, b = of(module)
            else:
                experts, e, last = name.rsplit(".", 2)
                e, down = int(e), model.get_submodule(f"base_model.model.{experts}")
                a, b = of(down if last == "down_proj" else down.base_layer)
                R = a.shape[0] // E
                a, b = a[e * R : (e + 1) * R], b[:, e::E]
                # gate has the first half of the rank and of the rows, up the second
                if last != "down_proj" and f"{path.rpartition('/')[0]}/gate" in names:
                    half = slice(0, rank) if last == "gate_proj" else slice(rank, None)
                    first = last == "gate_proj"
                    rows = slice(F) if first else slice(F, None)
                    if names.alternate:
                        rows = slice(1 - first, None, 2)
                    a, b = a[half], b[rows, half]
            pairs.append((a, b.T))
        if pairs:
            out |= {
                f"{path}/a": np.stack([a for a, _ in pairs]),
                f"{path}/b": np.stack([b for _, b in pairs]),
            }
    return out


def edit_config(directory: Path, **fields) -> None:
    config = json.loads((directory / CONFIG).read_text()) | fields
    (directory / CONFIG).write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    """``change`` gets the dict of tensors and alters it in place."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(
        {name: np.array(x, order="C") for name, x in tensors.items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )


def decided_tokens(model, cfg, rng) -> np.ndarray:
    """Random tokens ``[2, 9]``; with experts such that rounding cannot change a choice."""
    for _ in range(50):
        tokens_BT = rng.integers(0, 97, (2, 9))
        if not cfg.routed or all(oracles.decided(model, row, 1e-4) == 9 for row in tokens_BT):
            return tokens_BT
    raise AssertionError("every draw has a tie between experts: are the router's weights zero?")

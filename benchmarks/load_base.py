"""Host memory that loading a base takes, and the error of 8-bit weights.

A random sparse checkpoint of ``config.gigabytes`` in several files is loaded in a fresh process,
plain and quantised: peak resident memory over the bytes of the base. Then the logits of
``config.base`` in 8 bits are compared with its own.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks import timing
from benchmarks.alone import alone, scratch
from benchmarks.bases import open_base
from mint_jax import host, params
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import hf, quantised, transformer
from mint_jax.models.base import Base
from mint_jax.models.hf_config import from_hf
from mint_jax.models.precision import as_stored

FILES = 8
TEXT = (
    "The capital of France is Paris. Water boils at one hundred degrees. Two and three make five,"
    " and five and seven make twelve."
)


def write_checkpoint(directory: Path, fields: dict[str, Any], gigabytes: float) -> int:
    """Writes an indexed bfloat16 checkpoint with as many layers as make about ``gigabytes``;
    returns its bytes.
    """

    one, two = (
        params.nbytes(
            transformer.abstract(from_hf(fields | {"num_hidden_layers": n}), jnp.bfloat16)
        )
        for n in (1, 2)
    )
    layers = 1 + round((gigabytes * 1e9 - one) / (two - one))
    fields = fields | {"num_hidden_layers": max(1, layers)}
    cfg, rng = from_hf(fields), np.random.default_rng(0)
    files: list[dict[str, np.ndarray]] = [{} for _ in range(FILES)]
    for path, spec in params.leaves_with_path(transformer.abstract(cfg)):
        source = hf.source_of(path, spec, cfg)
        shape = spec.shape[len(source.stack) :]
        for i, name in enumerate(source.names):
            noise = rng.standard_normal(shape[::-1] if source.transposed else shape, np.float32)
            files[i % FILES][name] = noise.astype(ml_dtypes.bfloat16)
    index = {}
    for i, tensors in enumerate(files):
        save_file(tensors, directory / f"model-{i}.safetensors")
        index |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(fields))
    return sum(x.nbytes for tensors in files for x in tensors.values())


def load_here(directory: str, quantise: str) -> dict[str, float]:
    """Loads onto one device of this process; bytes of the base, and of resident memory before and
    at the peak.
    """
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    jnp.ones(3).block_until_ready()
    before = host.rss_bytes()
    base = base_lib.load(directory, mesh, "bfloat16", quantise=quantise)
    return {"base_bytes": base.nbytes, "rss_before": before, "rss_peak": host.peak_rss_bytes()}


def logits_error(base: Base, kind: str) -> dict[str, Any]:
    """The quantised base's logits on a text against those of ``base``: KL in nats, with an interval
    over the text's tokens, and share of equal argmax.
    """
    small = base_lib.load(base.name, base.mesh, jnp.dtype(base.dtype).name, quantise=kind)
    tokens = jnp.array([base.need_tokenizer().encode(TEXT)], jnp.int32)
    inputs = transformer.DecoderInputs(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])

    @as_stored
    def run(tree: Any) -> jax.Array:
        with jax.set_mesh(base.mesh):
            hidden, _ = transformer.hidden_states(tree, None, inputs, base.cfg)
            return transformer.logits(tree, None, hidden, cap=base.cfg.logit_cap)[0]

    exact, rough = run(base.params), run(small.params)
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(rough)
    return {
        "bytes_ratio": round(small.nbytes / base.nbytes, 4),
        "kl_nats": timing.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1).tolist()),
        "same_argmax": round(float(jnp.mean(jnp.argmax(exact, -1) == jnp.argmax(rough, -1))), 4),
        "tokens": tokens.shape[1],
    }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Writes, loads, compares; see the module."""
    report: dict[str, Any] = {"loads": {}}
    with scratch(workdir / "checkpoint") as folder:
        fields = config.model.to_dict()
        report["checkpoint_bytes"] = write_checkpoint(folder, fields, config.gigabytes)
        sides = {
            kind or "bfloat16": functools.partial(alone, load_here, str(folder), kind)
            for kind in ("", *quantised.KINDS)
        }
        for kind, loads in timing.collect("loading", sides, config.n, warm=0).items():
            shares = ((x["rss_peak"] - x["rss_before"]) / x["base_bytes"] for x in loads)
            own = {"base_bytes": loads[0]["base_bytes"], "rss_over_share": timing.median(shares)}
            report["loads"][kind] = own
    base = open_base(config)
    return report | {"quantised": {kind: logits_error(base, kind) for kind in quantised.KINDS}}

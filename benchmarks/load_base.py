"""Host memory that loading a base takes, and the error of 8-bit weights.

A random sparse checkpoint of ``config.gigabytes`` in several files is loaded in a fresh process,
plain and quantised: peak resident memory over the bytes of the base. Then the logits of
``config.base`` in 8 bits are compared with its own.
"""

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
from mint_jax.metrics import Progress
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

    def size_of(layers: int) -> int:
        return params.nbytes(
            transformer.abstract(from_hf(fields | {"num_hidden_layers": layers}), jnp.bfloat16)
        )

    layer = size_of(2) - size_of(1)
    fields = fields | {
        "num_hidden_layers": max(1, round((gigabytes * 1e9 - (size_of(1) - layer)) / layer))
    }
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
    """The quantised base's logits on a text against those of ``base``: root mean square over their
    spread, KL in nats, argmax.

    The interval of the KL is over the text's tokens.
    """
    small = base_lib.load(base.name, base.mesh, jnp.dtype(base.dtype).name, quantise=kind)
    tokens = jnp.array([base.need_tokenizer().encode(TEXT)], jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    @as_stored
    def run(tree: Any) -> jax.Array:
        with jax.set_mesh(base.mesh):
            return transformer.logits(
                tree,
                None,
                transformer.hidden_states(
                    tree, None, transformer.DecoderInputs(tokens, positions), base.cfg
                )[0],
                cap=base.cfg.logit_cap,
            )[0]

    exact, rough = run(base.params), run(small.params)
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(rough)
    return {
        "bytes_ratio": round(small.nbytes / base.nbytes, 4),
        "rms_error": round(float(jnp.sqrt(jnp.mean((rough - exact) ** 2)) / jnp.std(exact)), 5),
        "kl_nats": timing.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1).tolist()),
        "same_argmax": round(float(jnp.mean(jnp.argmax(exact, -1) == jnp.argmax(rough, -1))), 4),
        "tokens": tokens.shape[1],
    }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Writes, loads, compares; see the module."""
    report: dict[str, Any] = {"loads": {}, "quantised": {}}
    kinds = ["", *quantised.KINDS]
    with scratch(workdir / "checkpoint") as directory:
        report["checkpoint_bytes"] = write_checkpoint(
            directory, config.model.to_dict(), config.gigabytes
        )
        progress = Progress("loading", config.n * len(kinds))
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for k in range(config.n):
            for i, (kind, loads) in enumerate(rows.items()):
                loads.append(alone(load_here, str(directory), kind))
                progress.update(k * len(kinds) + i + 1, kind or "bfloat16")
        for kind, loads in rows.items():
            report["loads"][kind or "bfloat16"] = {
                "base_bytes": loads[0]["base_bytes"],
                "rss_over_share": timing.median(
                    (row["rss_peak"] - row["rss_before"]) / row["base_bytes"] for row in loads
                ),
            }
    base = open_base(config)
    for kind in quantised.KINDS:
        report["quantised"][kind] = logits_error(base, kind)
    return report

"""The programs that ``launch`` runs: config name -> module with ``run(config, workdir) ->
result``.
"""

JOBS = {
    "grpo": "mint_jax.jobs.grpo",
    "sft": "mint_jax.jobs.sft",
    "dpo": "mint_jax.jobs.dpo",
    "evaluate": "mint_jax.jobs.evaluate",
    "sample": "mint_jax.jobs.sample",
    "score": "mint_jax.jobs.score",
    "serve": "mint_jax.jobs.serve",
    "bench": "mint_jax.jobs.bench",
    "pretrain": "mint_jax.jobs.pretrain",
    "scale_up": "mint_jax.jobs.scale_up",
    "schedule": "mint_jax.jobs.schedule",
    "sweep": "mint_jax.jobs.sweep",
}
BENCHES = (  # modules of ``mint_jax.bench``
    "train_vs_peft",
    "concurrent_grpo",
    "handoff",
    "moe_step",
    "kernels",
    "tune_kernels",
    "load_base",
    "packed_load",
    "catalog_scale",
    "switch",
    "revision_stores",
    "engine",
    "active_wave",
    "train_wave",
    "cold_staircase",
    "hot_set",
    "fleet_model",
    "journal",
    "service",
    "service_load",
    "serve_start",
    "decode_vs_vllm",
)
# run in one process: files in, files out, or a measurement of one machine
ALONE = ("bench", "pretrain", "schedule", "sweep")

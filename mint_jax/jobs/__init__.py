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
    "pretrain": "mint_jax.jobs.pretrain",
    "scale_up": "mint_jax.jobs.scale_up",
    "schedule": "mint_jax.jobs.schedule",
}
# run in one process
ALONE = ("pretrain", "schedule")

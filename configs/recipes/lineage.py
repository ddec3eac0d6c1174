"""One policy of rank 64 in four stages and one catalog: SFT on answers, DPO on pairs, GRPO on
rewards, and last a student of rank 4 that learns from it (distillation).

Command: python -m mint_jax.launch --config=configs/recipes/lineage.py:sft
  --workdir=runs/lineage/sft, then lineage.py:dpo, lineage.py:grpo and lineage.py:distill
Hardware: two CPU cores. docs/recipes.md evaluates the revision of each stage.
"""

from ml_collections import ConfigDict

STEPS = {"sft": 4, "dpo": 4, "grpo": 6, "distill": 8}


def get_config(stage: str = "sft") -> ConfigDict:
    """``stage``: ``sft``, ``dpo``, ``grpo`` or ``distill``; each begins where the last ended."""
    if stage not in STEPS:
        raise ValueError(f"lineage stage {stage!r}; expected {', '.join(STEPS)}")
    name, rank, rate = ("extractor", 64, 2e-4) if stage != "distill" else ("student", 4, 1e-3)
    policy = {
        "adapter": {"rank": rank, "alpha": 32.0},
        "optimizer": {"learning_rate": rate, "warmup_steps": 2},
    }
    if stage in ("sft", "dpo"):  # the environment's answers, or pairs of them
        policy |= {"data": {"env": "json_fields"}, "batch_size": 8}
    else:
        sampling = {"prompts": 4, "group_size": 4, "max_tokens": 24}
        policy |= {"env": {"name": "json_fields"}, "loss": {"kind": "ppo"}, "sampling": sampling}
    if stage == "distill":  # no rewards: the teacher's log-probabilities alone
        policy["loss"] |= {"kl_kind": "k1", "kl": 1.0, "reference": "extractor@latest"}
        policy["sampling"]["reward_weight"] = 0.0
    config = ConfigDict({"job": "grpo" if stage == "distill" else stage})
    config.base = "smollm2-135m-instruct"
    config.seed = 0
    config.steps = config.export_every = STEPS[stage]
    config.catalog = "runs/lineage/catalog"
    config.policies = ConfigDict({name: policy})
    return config

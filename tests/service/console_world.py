"""What the console's tests look at: policies of two tenants with lineage, scores, rewards and a
history, over a site.
"""

from typing import Any

import numpy as np
from tinker import types

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.models.base import Base
from tests.service.openai_world import CONFIG, random_adapter

# a name and a reason that pages must show and not obey
EVIL = "<img src=x onerror=alert(1)>'\"&{{7*7}}%2f?#"
STEPS = 6


def furnish(catalog: Catalog, base: Base, rng: np.random.Generator) -> None:
    """``ann/chat`` with three revisions, promoted and rolled back, and a branch; ``bob/secret``;
    and one of ann's that is called EVIL.
    """
    for policy, count in (("ann/chat", 3), ("bob/secret", 1), (f"ann/{EVIL}", 1)):
        for step in range(1, count + 1):
            data = pack(random_adapter(rng, base), Schema(base.fingerprint, CONFIG))
            created = catalog.export(
                policy, data, 10 * step, create=True, by="job", why=f"step {10 * step}"
            )
            score = float(rng.uniform(0.2, 0.9))
            about = {
                "renderer": "chat",
                "scorer": "exact",
                "dataset": "ab" * 32,
                "seed": 1,
                "metrics": {},
            }
            catalog.record_evaluation(
                f"{policy}@{created.number}", isolated=score, shared=score, **about
            )
    catalog.promote("ann/chat", 1, "serving", why="the first that answers")
    catalog.promote("ann/chat", 3, "serving", why=EVIL)
    catalog.branch("ann/chat-short", "ann/chat@2", why="shorter answers")
    for step in range(12):
        reward = 0.1 + 0.07 * step + float(rng.normal(0, 0.03))
        catalog.rollout("ann/chat", step, rng.bytes(64), tokens=100, mean_reward=reward)


def train(site: Any, key: str, rng: np.random.Generator, steps: int = STEPS) -> str:
    """The id of a model of this key's tenant that has made some updates and saved a revision."""
    trainer = (
        site.client(key)
        .create_lora_training_client(site.server.name, 8, user_metadata={"run": EVIL})
        .result()
    )
    for _ in range(steps):
        tokens = rng.integers(5, 50, 9).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        done = trainer.forward_backward(
            [types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy"
        )
        updated = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        done.result(), updated.result()
    trainer.save_weights_for_sampler("first").result()
    return trainer.model_id

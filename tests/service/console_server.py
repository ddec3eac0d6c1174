"""A server with keys and policies to look at, for the console's checks in a browser: prints its url
and keys as one line of JSON, and ends with its input.

python -m tests.service.console_server FOLDER [BASE]
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from tinker import types

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.models.base import Base
from mint_jax.service import keys as keys_lib
from mint_jax.service.keys import Keys
from tests.service.openai_world import CONFIG, random_adapter
from tests.service.sites import Site

SCOPES = {"ann": ("read", "sample", "train"), "reader": ("read",), "root": keys_lib.SCOPES}
# a name and a reason that pages show as text
EVIL = "<img src=x onerror=alert(1)>'\"&{{7*7}}%2f?#"


def furnish(catalog: Catalog, base: Base, rng: np.random.Generator) -> None:
    """``ann/chat`` with three revisions, promoted and rolled back; ``ann/chat-short``;
    ``bob/secret``; and one of ann's that is called EVIL.
    """
    about = {"renderer": "chat", "scorer": "exact", "dataset": "ab" * 32, "seed": 1, "metrics": {}}
    counts = {"ann/chat": 3, "ann/chat-short": 1, "bob/secret": 1, f"ann/{EVIL}": 1}
    for policy, count in counts.items():
        for step in range(10, 10 * count + 1, 10):
            data = pack(random_adapter(rng, base), Schema(base.fingerprint, CONFIG))
            created = catalog.export(policy, data, step, create=True, by="job", why=f"step {step}")
            score, name = float(rng.uniform(0.2, 0.9)), f"{policy}@{created.number}"
            catalog.record_evaluation(name, isolated=score, shared=score, **about)
    catalog.promote("ann/chat", 1, "serving", why="the first that answers")
    catalog.promote("ann/chat", 3, "serving", why=EVIL)
    for step in range(12):
        reward = 0.1 + 0.07 * step + float(rng.normal(0, 0.03))
        catalog.rollout("ann/chat", step, rng.bytes(64), tokens=100, mean_reward=reward)


def main(folder: Path, base: str = "tiny-random", steps: int = 24) -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    rng = np.random.default_rng()
    loaded = base_lib.load(base, single_device_mesh())
    secrets = {tenant: keys_lib.add(folder, tenant, scopes)[1] for tenant, scopes in SCOPES.items()}
    site = Site(loaded, folder / "server", keys=Keys(folder))
    furnish(site.server.catalog, loaded, rng)
    trainer = site.trainer(client=site.client(secrets["ann"]), user_metadata={"run": EVIL})
    for _ in range(steps):
        tokens = rng.integers(5, 50, 9).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        data = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)]
        done = trainer.forward_backward(data, "cross_entropy")
        updated = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        done.result(), updated.result()
    trainer.save_weights_for_sampler("first").result()
    printed = {"url": site.url, "keys": secrets, "model": trainer.model_id}
    print(json.dumps(printed), flush=True)
    sys.stdin.read()
    site.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

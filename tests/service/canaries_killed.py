"""``python -m tests.service.canaries_killed FOLDER BEFORE REWARDS`` gives rewards of a canary until
it kills itself before, or right after, the catalog has counted the last one.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.service.canaries import Canaries
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.weights import Model
from tests.catalog.adapters import packed


@contextlib.contextmanager
def judged(folder: Path):
    with Catalog.open(folder / "catalog") as catalog, ServerDatabase(folder / "server.db") as db:
        yield catalog, db


def begin(folder: Path) -> int:
    """A catalog with an open canary; its id."""
    with Catalog.open(folder / "catalog") as catalog:
        for i in range(2):
            catalog.export("chat", packed(i), i, create=True)
        catalog.promote("chat", 1)
        return catalog.open_canary("chat", 2, share=0.5, guard="reward>=parent-0.1").id


def work(folder: Path, before: bool, rewards: int) -> None:
    with judged(folder) as (catalog, database):
        canaries, observe = Canaries(database, catalog, lambda: 5.0), catalog.observe
        model = Model("chat@serving", canary=catalog.resolve("chat@serving").canary)

        def killing(*args):
            os.kill(os.getpid(), signal.SIGKILL) if before else observe(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        for i in range(rewards):
            canaries.drawn(model, "default", f"{folder.name}-{rewards}-{i}")
            if i == rewards - 1:
                catalog.observe = killing  # type: ignore[method-assign]
            canaries.feedback("default", f"{folder.name}-{rewards}-{i}", 0.5)
            print(i, flush=True)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2] == "1", int(sys.argv[3]))

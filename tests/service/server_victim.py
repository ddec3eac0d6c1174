"""A process that trains eight tenants over one base until it is killed: loop, requests, snapshots,
and the tenants' clients.

``python -m tests.service.server_victim BASE FOLDER SEED``. Every client sends its numbered calls
from the first on, as one does that was cut off: what had run is told again. FOLDER gets ``server``,
``told`` (a line of JSON for each result, synced before the next) and, when all is done, ``states``:
each tenant's adapter, moments and gradients.
"""

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np

from mint_jax import host
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.rollout.engine import Engine
from mint_jax.service.calls import Create, ForwardBackward, Optim
from mint_jax.service.durable import Durable
from mint_jax.service.loop import Loop
from mint_jax.service.server_db import ServerDatabase
from mint_jax.train.blocks import BlockShape, Datum
from mint_jax.train.live import NO_LOSS, Live
from mint_jax.train.state import OptimizerConfig

TENANTS, ROUNDS, WAIT_S = 8, 40, 300.0
SHAPES = (BlockShape(1, 1, 12), BlockShape(4, 1, 12))


def plan(tenant: int, seed: int) -> list:
    """A tenant's calls, the same in every process."""
    rng = np.random.default_rng([seed, tenant])
    calls = [Create(AdapterConfig(1 + tenant % 4, 4.0, ("q", "down")), tenant)]
    for _ in range(ROUNDS):
        for _ in range(int(rng.integers(1, 3))):
            tokens = rng.integers(3, 97, 11).astype(np.int32)
            calls.append(
                ForwardBackward([Datum(tokens[:-1], tokens[1:], np.ones(10, np.float32))], NO_LOSS)
            )
        calls.append(Optim(OptimizerConfig(float(rng.uniform(1e-4, 1e-3)), eps=1e-5)))
    return calls[:-1]  # gradients pend at the end


def main(base_folder: str, folder: Path, seed: int) -> None:
    host.use_compilation_cache(base_lib.cache_dir() / "compiled-tests")
    base = base_lib.load(base_folder, single_device_mesh())
    live = Live(base, {4: 3}, ("q", "down"), SHAPES, host_bytes=0, folder=folder / "spilled")
    loop = Loop(Engine(base, rows=(8,)), live)
    live.warm()
    database = ServerDatabase(folder / "server" / "server.db")
    durable = Durable(folder / "server", loop.training, database, every=3)
    lock = threading.Lock()
    with loop.running(), (folder / "told").open("a") as told:
        print("begun", flush=True)

        def client(tenant: int) -> None:
            for number, call in enumerate(plan(tenant, seed), 1):
                id = durable.submit(f"t{tenant}", number, call)
                result = durable.result(id, WAIT_S)
                assert result is not None, durable.failed
                loss = result.loss if isinstance(call, ForwardBackward) else None
                with lock:
                    told.write(json.dumps([tenant, number, id, loss]) + "\n")
                    told.flush()
                    os.fsync(told.fileno())

        clients = [threading.Thread(target=client, args=(tenant,)) for tenant in range(TENANTS)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        states = {
            f"t{t}": loop.training.do(f"t{t}", lambda live, t=t: live.read_state(f"t{t}")).result(
                WAIT_S
            )
            for t in range(TENANTS)
        }
    durable.close()
    database.close()
    (folder / "states").mkdir(exist_ok=True)
    for name, held in states.items():
        (folder / "states" / name).write_bytes(held.to_bytes())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

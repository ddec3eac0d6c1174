"""kill -9 of the server's process under eight tenants over HTTP: they go on, and nothing is lost,
done twice or told otherwise.
"""

import asyncio
import os
import random
import shutil
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.postgres_server import free_port
from benchmarks.service_client import Served
from mint_jax.train.host_state import HostState
from tests.service.http_tenants import TENANTS, Tenant, serve_all

KILLS = int(os.environ.get("MINT_TEST_KILLS", "3"))
OPTIONS = {"snapshot_every": 3, "snapshot_s": 2.0, "max_rows": 4, "shapes": "((4, 1, 16),)"}
AWAKE_S = (0.3, 4.0)  # seconds that a server lives once it serves
START_S = (0.0, 6.0)  # seconds that each third one lives, which is killed on its way there


def start(folder: Path, port: int) -> Served:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return Served(
        "mint_jax.launch", "configs/serve.py:ci", folder, OPTIONS | {"port": port}, environment
    )


def digests(folder: Path) -> dict[str, str]:
    """Of the bytes of every path, as they are on the disk."""
    if not (folder / "server.db").exists():
        return {}
    with sqlite3.connect(folder / "server.db") as database:
        if not database.execute(
            "SELECT name FROM sqlite_master WHERE name = 'checkpoints'"
        ).fetchone():
            return {}
        return {
            f"tinker://{m}/{k}/{n}": digest
            for m, k, n, digest in database.execute(
                "SELECT model, kind, name, digest FROM checkpoints"
            )
        }


def saved(tenants: list[Tenant]) -> set[str]:
    """Paths that clients were told of."""
    return {path for tenant in tenants for path in (*tenant.sampled, *tenant.states)}


async def killed_again_and_again(
    folder: Path, choice: random.Random, kills: int, seed: int
) -> list[Tenant]:
    """Tenants of a server that is killed so often while they go on."""
    port, ended, kept = free_port(), asyncio.Event(), {}
    served = start(folder, port)
    tenants = asyncio.create_task(serve_all(f"http://127.0.0.1:{port}", seed, None, ended))
    try:
        for kill in range(kills):
            if kill % 3 == 1:
                await asyncio.sleep(choice.uniform(*START_S))
            else:
                await asyncio.to_thread(served.ready)
                await asyncio.wait([tenants], timeout=choice.uniform(*AWAKE_S))
            served.kill()
            if tenants.done():
                tenants.result()
            found = digests(folder)
            assert kept.items() <= found.items()
            kept = found
            print(f"kill {kill + 1} of {kills}: {len(found)} paths", file=sys.stderr, flush=True)
            served = start(folder, port)
        await asyncio.to_thread(served.ready)
        ended.set()
        done = await tenants
    finally:
        tenants.cancel()
        served.kill() if not ended.is_set() else served.stop()
    assert kept.items() <= digests(folder).items()
    assert saved(done) <= digests(folder).keys()
    return done


async def undisturbed(folder: Path, rounds: list[int], seed: int) -> list[Tenant]:
    """The same rounds of a server that nothing happens to."""
    port = free_port()
    served = start(folder, port)
    try:
        await asyncio.to_thread(served.ready)
        return await serve_all(f"http://127.0.0.1:{port}", seed, rounds, asyncio.Event())
    finally:
        served.stop()


def last_state(folder: Path, tenant: Tenant) -> HostState:
    digest = digests(folder)[f"tinker://{tenant.policy.id}/weights/last"]
    return HostState.from_bytes(
        (folder / "checkpoints" / f"{digest}.safetensors").read_bytes(), "it"
    )


@pytest.mark.long
def test_a_server_that_is_killed_goes_on_with_every_client(memory, tmp_path, rng):
    seed, choice = int(rng.integers(1 << 30)), random.Random(int(rng.integers(1 << 30)))
    at, whole = memory / "killed", memory / "whole"
    found = asyncio.run(killed_again_and_again(at, choice, KILLS, seed))
    expected = asyncio.run(undisturbed(whole, [tenant.rounds for tenant in found], seed))
    print(f"asked again: {dict(found[0].client.again)}", file=sys.stderr)
    assert found[0].client.again["connection"] >= KILLS
    most = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.checked > 0
        assert one.told.keys() == other.told.keys()
        for number, told in one.told.items():
            # float32 sums in another order: steps are shared with others than there
            mine, theirs = np.array(told.losses), np.array(other.told[number].losses)
            np.testing.assert_allclose(
                mine, theirs, rtol=1e-5, err_msg=f"request {number} of tenant {one.number}"
            )
            most = max(most, np.abs(mine / theirs - 1).max(initial=0.0))
        assert len(one.sampled) == len(other.sampled)
        for a, b in zip(one.sampled.values(), other.sampled.values()):
            np.testing.assert_allclose(a.prompt_logprobs, b.prompt_logprobs, atol=1e-4)
        mine, theirs = last_state(at, one), last_state(whole, other)
        assert (mine.steps, mine.skipped) == (theirs.steps, theirs.skipped)
        assert set(mine.parts) == set(theirs.parts)
        for part, leaves in mine.parts.items():
            for path, leaf in leaves.items():
                np.testing.assert_allclose(
                    leaf,
                    theirs.parts[part][path],
                    atol=1e-5 * max(1e-3, np.abs(leaf).max()),
                    err_msg=path,
                )
    assert len(found) == TENANTS
    rounds = sum(t.rounds for t in found)
    print(
        f"{KILLS} kills, {rounds} rounds, {sum(t.checked for t in found)} told again, losses within"
        f" {most:.1e}",
        file=sys.stderr,
    )
    shutil.rmtree(whole)

"""The memory of a front does not grow with the catalog's names: a front in a process of its own."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks import catalog_fill
from mint_jax import host
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.fleet.engine import EngineReport
from mint_jax.fleet.front import CACHE_BYTES, Front
from mint_jax.fleet.view import FleetEngine, FleetView

ENGINES, ASKED = 16, 3000


def peak_bytes(folder: Path, names: int) -> int:
    """Peak memory of this process, which resolves and places ``ASKED`` requests."""
    plan = catalog_fill.Plan(names, 1, 500, 0)
    rng = np.random.default_rng(0)

    async def report() -> EngineReport:
        return EngineReport(url="http://127.0.0.1:1", ready=True, serving=True)

    async def main() -> None:
        members = [FleetEngine(f"e{i}", report, print, None) for i in range(ENGINES)]  # type: ignore[arg-type]
        view = FleetView(members)
        front = Front(view, catalog, CollectorRegistry())
        async with view.watching():
            await view.wait(lambda: len(view.up()) == ENGINES, 60.0)
            for number in range(ASKED):
                # as many names of a small catalog as of a large one: 1,000
                name = plan.policy(int(rng.integers(1000)) * (names // 1000))
                key, revision = await front._resolve(name, "default")
                assert key == revision, "the digest"
                first = next(view.choices(key, number))
                with view.sending(view.members[first.engine], key):
                    pass

    with Catalog.open(folder, cache_bytes=CACHE_BYTES) as catalog:
        asyncio.run(main())
    return host.peak_rss_bytes()


@pytest.mark.parametrize(
    "most",
    [pytest.param(3 * 10**4, marks=pytest.mark.long), pytest.param(10**6, marks=pytest.mark.slow)],
)
def test_a_fronts_memory_does_not_grow_with_the_names(tmp_path, most):
    found = []
    for names in (10**3, most):
        folder = tmp_path / str(names)
        folder.mkdir()
        catalog_fill.fill(folder, catalog_fill.Plan(names, 1, 500, 0))
        command = [sys.executable, "-m", "tests.fleet.memory_test", str(folder), str(names)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(int(run.stdout.split()[-1]))
    assert found[1] <= 1.02 * found[0], found


if __name__ == "__main__":
    print(peak_bytes(Path(sys.argv[1]), int(sys.argv[2])))

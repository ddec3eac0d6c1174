"""Shared fixtures. The CPU shows eight devices, implicit rank promotion is an error, compiled
programs are cached.

Random inputs are new in every session: the seed is printed at the top and repeated with
``MINT_TEST_SEED=n``.
"""

import gc
import os
import time

from tests.compiled import quickly

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices are eight threads: on a busy machine the last comes late to a sum, and XLA ends the
# process after 40 s.
if "xla_cpu_collective" not in os.environ.get("XLA_FLAGS", ""):  # workers inherit them
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_force_host_platform_device_count=8"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
        " --xla_cpu_collective_call_terminate_timeout_seconds=900" + quickly()
    )
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# workers inherit it
os.environ.setdefault("MINT_TEST_SEED", str(int.from_bytes(os.urandom(3), "little")))

import zlib
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

from mint_jax import host
from mint_jax import mesh as mesh_lib
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import base as base_lib
from tests.marks import mark_long_cases

# How long an example takes says how busy the machine is; examples are new in every run, and the one
# that failed is printed.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

jax.config.update("jax_numpy_rank_promotion", "raise")
host.threads_for_simulated_devices()
host.use_compilation_cache(base_lib.cache_dir() / "compiled-tests")
# files share their bases, and most programs are small
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# reads XLA_FLAGS once and for all: tests change the variable for processes that they start
jax.devices()

LIGHT = {"catalog", "data", "envs", "benchmarks", "aot", "service"}  # files of seconds


@pytest.hookimpl(tryfirst=True)  # before marks are read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of minutes come first and the light ones last, so that all processes end together.
    Where the time may not suffice for all, each run begins with another one.
    """
    mark_long_cases(items, whole_files=not any("::" in arg for arg in config.args))
    items.sort(key=lambda item: item.path.parent.name in LIGHT or "faults" in item.path.parts)
    if "MINT_TEST_UNTIL" in os.environ:
        begin = int(os.environ["MINT_TEST_SEED"]) % max(len(items), 1)
        items[:] = items[begin:] + items[:begin]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """``MINT_TEST_UNTIL``, seconds of the epoch: what begins later is skipped, and counted as
    such.
    """
    if time.time() > float(os.environ.get("MINT_TEST_UNTIL", "inf")):
        pytest.skip("the time for tests is up; make test-long runs all of them")


def pytest_report_header() -> str:
    return (
        f"MINT_TEST_SEED={os.environ['MINT_TEST_SEED']} jax {jax.__version__}, {jax.device_count()}"
        f" {jax.default_backend()} devices"
    )


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not look through torch, transformers and the tests
    again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # with this a tenth of the tests' time


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees a file's programs behind it: some were traced under settings that its tests had
    replaced, and each keeps memory mapped, of which a process may have only so many mappings.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Fresh randomness: the session's seed and the test's name."""
    return np.random.default_rng(
        [int(os.environ["MINT_TEST_SEED"]), zlib.crc32(request.node.nodeid.encode())]
    )


@pytest.fixture
def form_of_accelerators(monkeypatch):
    """Programs as accelerators run them, on the CPU: ``platform_dependent`` takes its default.
    Gives what it took.
    """
    taken = []

    def default_form(*args, default, **_):
        taken.append(default)
        return default(*args)

    jax.clear_caches()
    monkeypatch.setattr(jax.lax, "platform_dependent", default_form)
    yield taken
    jax.clear_caches()
    assert taken, "nothing has two forms here"


@pytest.fixture(scope="session")
def mesh():
    """One device."""
    return single_device_mesh()


@pytest.fixture
def one_device(monkeypatch):
    """Makes recipes run on one device; they would take all."""
    made = mesh_lib.make_mesh
    monkeypatch.setattr(
        mesh_lib,
        "make_mesh",
        lambda sizes=None, devices=None: made(sizes, devices or jax.devices()[:1]),
    )


@pytest.fixture(scope="session")
def mesh8():
    """Eight devices: data 2, fsdp 2, tensor 2."""
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.fixture(scope="session")
def hf_dirs(tmp_path_factory):
    """``hf_dirs(family)`` -> a directory with a tiny random transformers checkpoint; see
    ``oracles.TINY``.
    """
    # torch and transformers: not in the process that only hands out tests
    from tests import oracles

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = oracles.save_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_base(hf_dirs, mesh):
    """``tiny_base(family)`` -> that checkpoint loaded by us on one device, without a tokenizer."""
    loaded: dict[str, base_lib.Base] = {}

    def get(name: str = "llama") -> base_lib.Base:
        if name not in loaded:
            loaded[name] = base_lib.load(str(hf_dirs(name)), mesh)
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def smollm2(mesh):
    """The real SmolLM2-135M-Instruct, float32, on one device."""
    return base_lib.load("smollm2-135m-instruct", mesh)

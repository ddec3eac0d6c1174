"""Two processes over one mesh: process 0 schedules the requests of ``generate``, the other repeats
its device calls.

Each process has one CPU device, on the loopback interface. The same mesh of two devices in one
process gives the expected completions.
"""

import json
import os
import signal

import pytest

from tests.laws.shardings_equal_test import save_checkpoint
from tests.multihost_test import together

GENERATE = """
import dataclasses, json, sys
from pathlib import Path
from mint_jax import multihost
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests.rollout.invariants import check_schedule

spec = json.loads(Path(sys.argv[1]).read_text())
multihost.POSTS = 16  # so that messages are dropped
multihost.join()
base = base_lib.load(spec["model"], make_mesh(spec["mesh"]))
routes = base.cfg.experts is not None
parts = device.page_parts(base.cfg, base.mesh)
nbytes = spec["pages"] * parts * device.page_bytes(base.cfg, base.dtype, routes)
engine = Engine(
    base, lambda ids: "".join(chr(97 + i % 26) for i in ids), rows=(8,), steps=3,
    cache_bytes=nbytes, reuse_decoded=True, keep_routes=routes,
)
requests = [
    Request(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    for fields in spec["requests"]
]

def fields_of(completion):
    out = dataclasses.asdict(completion)
    for name in ("routes", "prompt_routes"):
        out[name] = None if out[name] is None else out[name].tolist()
    return out

finished = []
found = engine.generate(requests, finished=lambda some: finished.extend(some))
check_schedule(engine.active.schedule)
engine.release()
assert engine.calls.pool is None
[[again]] = engine.generate(requests[-1:])
print(json.dumps({
    "completions": [[fields_of(c) for c in group] for group in found],
    "finished": sorted(finished), "swapped": len(engine.calls._swapped), "counts": engine.counts,
    "again": again.tokens == found[-1][0].tokens,
}))
multihost.barrier("end")
"""


def requests_of(rng) -> list[dict]:
    """Requests of different lengths, samples and settings, more than the cache holds at once."""

    def fields(length, most, **more):
        prompt = rng.integers(0, 96, length).tolist()
        return {"prompt": prompt, "max_tokens": most, "seed": int(rng.integers(2**32)), **more}

    greedy = {"temperature": 0.0, "prompt_logprobs": True, "prompt_alternatives": 2}
    return [
        fields(70, 60, n=2),
        fields(5, 120, n=2),
        fields(33, 50, top_logprobs=3, **greedy),
        fields(9, 40, top_p=0.8, presence_penalty=0.5),
        fields(40, 50, n=2, stop=["q", "zz"]),
        fields(12, 45, n=3, logit_bias=[[3, 1.0]]),
        fields(3, 11, top_logprobs=2, stop=["x"], **greedy),
    ]


def checkpoint(family, folder) -> str:
    """A model of ``FAMILIES`` whose context holds these requests."""
    folder.mkdir()
    save_checkpoint(family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return str(folder)


def processes(count: int, file, folder, timeout: float = 400):
    """Runs ``GENERATE`` in ``count`` processes over two devices in all."""
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={2 // count}"
    fast = {"XLA_FLAGS": devices, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return together([["-c", GENERATE, str(file)]] * count, folder, timeout, **fast)


@pytest.mark.parametrize(
    ("family", "axes", "pages"),
    [
        pytest.param("experts", {"tensor": 2}, 13, marks=pytest.mark.long),
        pytest.param("dense", {"data": 2}, 7, marks=pytest.mark.slow),  # pages of each part
    ],
)
def test_two_processes_generate_as_one_bit_for_bit(family, axes, pages, rng, tmp_path):
    """Samples are preempted meanwhile."""
    spec = {"model": checkpoint(family, tmp_path / "model"), "mesh": axes, "pages": pages}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec | {"requests": requests_of(rng)}))
    two, one = (processes(n, file, tmp_path / f"processes{n}") for n in (2, 1))
    assert [e.status for e in (*two, *one)] == [0, 0, 0]
    main, other, whole = (json.loads(e.out.splitlines()[-1]) for e in (*two, *one))
    assert main == whole
    assert main["counts"]["preempted"] > 0
    assert other["completions"] == whole["completions"]
    assert main["again"], "after its cache was released"
    assert other["finished"] == list(range(7))
    assert (other["swapped"], other["counts"]["drawn_tokens"]) == (0, 0)
    assert (whole["completions"][0][0]["routes"] is None) == (family == "dense")


FAIL = """
import os, signal, sys
from mint_jax import multihost
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request

multihost.join()
base = base_lib.load(sys.argv[1], make_mesh({"tensor": 2}))
engine = Engine(base, rows=(8,))
if multihost.is_main():
    real, calls = engine.active._decode, []
    def decode(*args):
        calls.append(args)
        if len(calls) == 3 and sys.argv[2] == "raises":
            raise ValueError("the third call")
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)
    engine.active._decode = decode
try:
    engine.generate([Request((1, 2, 3), max_tokens=100)])
except (RuntimeError, ValueError) as error:
    print(error, flush=True)
    if sys.argv[2] == "dies":
        os._exit(3)
multihost.barrier("failed")
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_followers_end_when_process_0_fails(how, tmp_path):
    command = ["-c", FAIL, checkpoint("dense", tmp_path / "model"), how]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    fast = {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    main, other = together([command] * 2, tmp_path / "processes", 200, **fast)
    if how == "dies":
        assert main.status == -signal.SIGKILL
        assert other.status not in (0, -signal.SIGKILL), "it must end by itself"
    else:
        assert (main.status, other.status) == (0, 0)
        assert "the third call" in main.out
        assert "process 0 failed: the third call" in other.out

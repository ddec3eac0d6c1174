"""Two processes over one mesh: process 0 schedules the requests of ``generate``, the other repeats
its device calls.

Each process has one CPU device, on the loopback interface. The same mesh of two devices in one
process gives the expected completions.
"""

import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import messages
from mint_jax.lora.tree import Slot
from mint_jax.rollout import completions, plans
from mint_jax.rollout.calls import RECORDS
from mint_jax.rollout.pages import PagePool
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.samples import CachedPrompt
from mint_jax.rollout.scheduler import Scheduler
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
print(json.dumps({
    "completions": [[fields_of(c) for c in group] for group in found],
    "finished": sorted(finished), "swapped": len(engine.calls._swapped), "counts": engine.counts,
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
    return together(
        [["-c", GENERATE, str(file)]] * count,
        folder,
        timeout,
        XLA_FLAGS=devices,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )


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


def test_a_plan_is_the_same_in_the_message(rng):
    """Arrays bit for bit, NaN and -0 included, and few bytes for a plan of large tables."""
    table, vocab = 4096, 150_000
    schedule = Scheduler([PagePool(64, 32), PagePool(64, 32)], 4)
    for slot in (None, Slot(8, 1)):
        request = Request(
            tuple(rng.integers(0, 99, 70).tolist()),
            slot,
            n=3,
            stop_ids=(5, 6),
            logit_bias=((3, -0.0),),
            temperature=0.3,
        )
        schedule.add(CachedPrompt(request, ("tenant", None)), None)
    schedule.admit(lambda s: None, 3)
    todo = schedule.to_prefill(4)
    blocks = plans.blocks_plan(todo, 8, table, (1, 8), scored=True)
    rows, _ = plans.rows_plan(schedule.to_decode(3, lambda s: None), 8, 2, table, vocab, (1, 8))
    assert rows.own.any() or (rows.until > 0).any()
    for plan in (blocks, rows):
        data = messages.pack(("word", plan, 3))
        word, found, steps = messages.unpack(data, RECORDS)
        assert (word, steps) == ("word", 3)
        assert same(found, plan)
        assert len(data) < 10_000
    odd = np.array([[np.nan, -0.0, 0.0], [1.0, -np.inf, 0.0]], np.float32)
    values = {
        8: odd,
        "scalar": np.float32(-0.0),
        "none": np.zeros((0, 3), np.int8),
        "truth": np.array([True, False, False]),
        "half": np.asarray(jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16)),
        "turned": rng.normal(size=(4, 3, 2)).T,
        "deep": [None, "text", 1.5, (2, [odd[0]])],
    }
    assert same(
        messages.unpack(messages.pack(values), {}),
        {**values, "deep": [None, "text", 1.5, [2, [odd[0]]]]},
    )


def test_a_completion_is_the_same_in_the_message(rng):
    drawn = rng.normal(size=5).astype(np.float32).tolist()
    routes = {3: rng.integers(0, 8, (5, 2, 3)), 9: rng.integers(0, 8, (4, 2, 3))}
    pairs = [[(1, drawn[0]), (2, drawn[1])], []]
    rich = Completion(
        [4, 5, 6, 7, 8],
        drawn,
        [-0.0, *drawn[1:]],
        "stop",
        "text",
        routes[3],
        routes[9],
        "digest",
        pairs,
        [float("nan"), drawn[2]],
        pairs,
        [[], drawn],
        pairs,
        7,
    )
    for one in (rich, Completion([], [], [], "cancelled", None)):
        numbers = {id(array): number for number, array in routes.items()}
        found = completions.from_message(
            messages.unpack(messages.pack(completions.to_message(one, numbers)), {}), routes
        )
        assert found.routes is one.routes
        assert found.prompt_routes is one.prompt_routes
        assert repr(found) == repr(one), "NaN and -0 included"


def same(x, y) -> bool:
    if isinstance(y, np.ndarray | np.generic):
        return (
            x.dtype == y.dtype
            and x.shape == y.shape
            and x.tobytes() == np.ascontiguousarray(y).tobytes()
        )
    if isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in y)
    if isinstance(y, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return x == y

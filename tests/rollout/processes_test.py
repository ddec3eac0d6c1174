"""Two processes over one mesh: the first has the schedule, the requests and the streams, the other
does as it is told.

They are two processes of one CPU device each, on the loopback interface; the same mesh of two
devices in one process says what is right.
"""

import json
import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.postgres_server import free_port
from mint_jax import messages
from mint_jax.catalog.packed import Schema, pack
from mint_jax.digest import blake3_of
from mint_jax.lora.tree import Slot
from mint_jax.models import base as base_lib
from mint_jax.rollout import answers, plans
from mint_jax.rollout.calls import RECORDS
from mint_jax.rollout.pages import Pages
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.schedule import Prompt, Schedule
from tests.laws.shardings_equal_test import save_checkpoint
from tests.multihost_test import ROOT, together
from tests.rollout.score_test import random_adapters

SERVE = """
import dataclasses, json, sys, threading
from pathlib import Path
import jax, numpy as np
from mint_jax import host, multihost
from mint_jax.catalog.packed import unpack
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.residency.admission import Admission
from mint_jax.residency.others import Others
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request

asked = json.loads(Path(sys.argv[1]).read_text())
multihost.POSTS = 16  # that messages are dropped is a part of it
multihost.join()
base = base_lib.load(asked["model"], make_mesh(asked["mesh"]))
specs = transformer.abstract(base.cfg)
slots = DeviceSlots(specs, {1: 1, 8: 1}, (lora_tree.ALL_LINEAR, "embed", "unembed"), mesh=base.mesh, piece_bytes=4000)
admission = Admission(base.fingerprint, specs, {b: slots.targets(b) for b in slots.stacks}, ())
store = Path(asked["store"]) / str(multihost.index())

def fetch(digest):
    try:
        return np.frombuffer((store / digest).read_bytes(), np.uint8)
    except FileNotFoundError:
        raise UserError(f"no revision {digest[:12]}") from None

def engine_of(pages, **settings):
    parts = device.page_parts(base.cfg, base.mesh)
    routes = settings.get("keep_routes", False)
    nbytes = pages * parts * device.page_bytes(base.cfg, base.dtype, routes)
    settings |= {"rows": (8,), "steps": 3, "cache_bytes": nbytes, "reuse_decoded": True}
    return Engine(base, lambda ids: "".join(chr(97 + i % 26) for i in ids), **settings)

def request_of(fields):
    return Request(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

def told(completion):
    out = dataclasses.asdict(completion)
    for name in ("routes", "prompt_routes"):
        out[name] = None if out[name] is None else out[name].tolist()
    return out

def serve(engine, residency):
    first, second = ([request_of(fields) for fields in asked[name]] for name in ("first", "second"))
    with engine.serving(residency=residency, commit_bytes=4000):
        streams = [engine.submit(request) for request in first]
        pieces = iter(streams[0])
        next(pieces)  # the others come while the first is running
        streams += [engine.submit(request) for request in second]
        next(pieces)
        streams[1].cancel()
        out = {"answers": [[told(c) for c in stream.result(300)] for stream in streams]}
        if multihost.count() > 1:
            try:
                engine.submit(Request((1, 2), revision=asked["missing"])).result(300)
            except UserError as error:
                out["missing"] = str(error)
            again = engine.submit(second[0]).result(300)
            out["after"] = [told(c) for c in again]
    engine._schedule.check()
    return out | {"counts": engine.counts, "idle": engine._schedule.idle}

engine = engine_of(asked["pages"])
if multihost.is_main():
    residency = Residency(fetch, unpack, admission, slots, 1 << 28, workers=2)
    out = serve(engine, residency)
    residency.close()
else:
    with Others(fetch, unpack, admission, slots, 1 << 28, workers=2) as others:
        engine.follow(residency=others)
    out = {"left": len(others._staged), "kept": len(engine.calls._kept), "idle": engine._schedule.idle}
    out["drawn"] = engine.counts["drawn_tokens"]

each = engine_of(40, keep_routes=base.cfg.experts is not None)
seen = []
found = each.generate([request_of(fields) for fields in asked["all"]], slots.stacks, finished=lambda some: seen.extend(some))
out["all"], out["seen"] = [[told(c) for c in group] for group in found], sorted(seen)
print(json.dumps(out))
multihost.barrier("end")
"""  # noqa: E501


def asked_of(rng, store, base, axes) -> dict:
    """A scenario: what is asked at first, later, and of ``generate``; adapters lie in both
    processes' stores, but for one.
    """
    names = {}
    for folder in ("0", "1"):
        (store / folder).mkdir(parents=True)
    adapters = random_adapters(rng, base.cfg)
    adapters["missing"] = random_adapters(rng, base.cfg)["one"]
    for name, (config, adapter) in adapters.items():
        data = pack(adapter, Schema(base.fingerprint, config))
        names[name] = blake3_of(data)
        for folder in ("0", "1")[: 1 if name == "missing" else 2]:
            (store / folder / names[name]).write_bytes(data)

    def fields(length, most, name=None, **more):
        prompt = rng.integers(0, 96, length).tolist()
        return {
            "prompt": prompt,
            "max_tokens": most,
            "seed": int(rng.integers(2**32)),
            "revision": name and names[name],
            **more,
        }

    first = [
        fields(70, 60, n=2),
        fields(5, 120, "eight", n=2),
        fields(
            33,
            50,
            "eight",
            temperature=0.0,
            top_logprobs=3,
            prompt_logprobs=True,
            prompt_alternatives=2,
        ),
    ]
    second = [
        fields(9, 40, "one", top_p=0.8, presence_penalty=0.5),
        fields(40, 50, "tables", n=2, stop=["q", "zz"]),
        fields(12, 45, n=3, logit_bias=[[3, 1.0]]),
    ]
    both = [
        fields(40, 20, n=3),
        fields(
            3,
            11,
            temperature=0.0,
            top_logprobs=2,
            prompt_logprobs=True,
            prompt_alternatives=2,
            stop=["x"],
        ),
    ]
    return {
        "store": str(store),
        "first": first,
        "second": second,
        "all": both,
        "missing": names["missing"],
        "mesh": axes,
    }


def checkpoint(family, folder) -> str:
    """A model of ``FAMILIES``, whose context holds what is asked here."""
    folder.mkdir()
    save_checkpoint(family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return str(folder)


def processes(count: int, file, folder, timeout: float = 400):
    """How ``SERVE`` ends in so many processes over two devices in all."""
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={2 // count}"
    return together(
        [["-c", SERVE, str(file)]] * count,
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
def test_two_processes_answer_as_one_bit_for_bit(family, axes, pages, rng, mesh, tmp_path):
    """Requests join, one is cancelled, samples are preempted and adapters loaded meanwhile; one of
    them the second process cannot load.
    """
    model = checkpoint(family, tmp_path / "model")
    asked = asked_of(rng, tmp_path / "store", base_lib.load(model, mesh), axes) | {
        "model": model,
        "pages": pages,
    }
    file = tmp_path / "asked.json"
    file.write_text(json.dumps(asked))
    two, one = (processes(n, file, tmp_path / f"processes{n}") for n in (2, 1))
    assert [e.status for e in (*two, *one)] == [0, 0, 0]
    main, other, whole = (json.loads(e.out.splitlines()[-1]) for e in (*two, *one))

    cancelled = 1
    for i, (mine, theirs) in enumerate(zip(main["answers"], whole["answers"], strict=True)):
        for x, y in zip(mine, theirs, strict=True):
            if i == cancelled:  # where depends on when
                assert x["finish"] == y["finish"] == "cancelled"
                n = min(len(x["tokens"]), len(y["tokens"]))
                assert (x["tokens"][:n], x["logprobs"][:n]) == (y["tokens"][:n], y["logprobs"][:n])
            else:
                assert x == y | {"reused": x["reused"]}
                assert x["finish"] in ("length", "stop")
    assert main["idle"]
    assert main["counts"].get("preempted", 0) > 0
    assert f"process 1: no revision {asked['missing'][:12]}" in main["missing"]
    for x, y in zip(main["after"], main["answers"][3], strict=True):
        assert x == y | {"reused": x["reused"]}, "what one process cannot load harms nobody else"
    assert other == {
        "left": 0,
        "kept": 0,
        "idle": True,
        "drawn": 0,
        "all": whole["all"],
        "seen": [0, 1],
    }
    assert main["all"] == whole["all"]
    assert (whole["all"][0][0]["routes"] is None) == (family == "dense")


FAIL = """
import os, sys, time
import jax
from mint_jax import multihost
from mint_jax.mesh import make_mesh
from mint_jax.models import base as base_lib
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request

multihost.join()
base = base_lib.load(sys.argv[1], make_mesh({"tensor": 2}))
engine = Engine(base, rows=(8,))
if multihost.is_main():
    real, calls = engine._decode, []
    def decode(*args):
        calls.append(args)
        if sys.argv[2] == "raises" and len(calls) == 3:
            raise ValueError("the third call")
        real(*args)
    engine._decode = decode
    with engine.serving():
        stream = engine.submit(Request((1, 2, 3), max_tokens=100))
        next(iter(stream))
        if sys.argv[2] == "dies":
            stream.result()
            print("idle", flush=True)
            time.sleep(600)
        try:
            stream.result(60)
        except ValueError as error:
            print(error)
    multihost.barrier("said")
else:
    try:
        engine.follow()
    except RuntimeError as error:
        print(error, flush=True)
        if sys.argv[2] == "dies":
            os._exit(3)
        multihost.barrier("said")
"""


def joined(arguments, folder):
    """Starts two processes of ``FAIL``."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    out = []
    shared = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    for i in range(2):
        names = {"MINT_COORDINATOR": address, "MINT_PROCESSES": "2", "MINT_PROCESS": str(i)}
        with (
            (folder / f"stdout{i}").open("w") as stdout,
            (folder / f"stderr{i}").open("w") as stderr,
        ):
            out.append(
                subprocess.Popen(
                    [sys.executable, "-c", FAIL, *arguments],
                    env=shared | names,
                    stdout=stdout,
                    stderr=stderr,
                )
            )
    return out


@pytest.mark.long
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_those_who_follow_end_when_the_leader_fails(how, tmp_path):
    running = joined([checkpoint("dense", tmp_path / "model"), how], tmp_path / "processes")
    said = [tmp_path / "processes" / f"stdout{i}" for i in range(2)]
    try:
        if how == "dies":
            deadline = time.monotonic() + 200
            while "idle" not in said[0].read_text() and time.monotonic() < deadline:
                time.sleep(0.2)
            running[0].send_signal(signal.SIGKILL)
            assert running[1].wait(60) != 0, "ended, by itself"
        else:
            assert [process.wait(200) for process in running] == [0, 0]
            assert "the third call" in said[0].read_text()
            assert "process 0 failed: the third call" in said[1].read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
        for file in sorted((tmp_path / "processes").iterdir()):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")


def test_a_plan_is_the_same_in_the_message(rng):
    """Arrays bit for bit, NaN and -0 included, and few bytes for a plan of large tables."""
    table, vocab = 4096, 150_000
    schedule = Schedule([Pages(64, 32), Pages(64, 32)], 4)
    for slot in (None, Slot(8, 1)):
        request = Request(
            tuple(rng.integers(0, 99, 70).tolist()),
            slot,
            n=3,
            stop_ids=(5, 6),
            logit_bias=((3, -0.0),),
            temperature=0.3,
        )
        schedule.add(Prompt(request, ("tenant", None)), None)
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
        found = answers.heard(
            messages.unpack(messages.pack(answers.told(one, numbers)), {}), routes
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

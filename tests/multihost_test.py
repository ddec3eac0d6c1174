"""Several processes are one program: here two with four CPU devices each, on the loopback
interface.
"""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from benchmarks.postgres_server import free_port
from mint_jax import mesh as mesh_lib
from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.errors import UserError
from mint_jax.mesh import make_mesh
from mint_jax.params import ParamSpec
from mint_jax.sharding import shardings
from tests.configs import run_config

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny" / "grpo.py"
GOOD = {"MINT_COORDINATOR": "127.0.0.1:8476", "MINT_PROCESSES": "2", "MINT_PROCESS": "1"}


@dataclasses.dataclass
class Ended:
    """How one process ended."""

    status: int
    out: str
    err: str


def together(
    commands: list[list[str]], folder: Path, timeout: float, **environment: str
) -> list[Ended]:
    """Runs one process per command, joined if there are several; all are ended when ``timeout``
    seconds are over.

    The eight devices are shared out evenly. What the processes printed is shown by pytest when the
    test fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("MINT_PROCESS") and k != "MINT_COORDINATOR"
    } | {
        # the last one counts
        "XLA_FLAGS": (
            f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={8 // len(commands)}"
        ),
        "TF_CPP_MIN_LOG_LEVEL": "2",  # the partitioner's and gloo's remarks
        "PYTHONPATH": str(ROOT),
    }
    address = f"127.0.0.1:{free_port()}"
    running, files = [], []
    for i, command in enumerate(commands):
        joined = (
            {
                "MINT_COORDINATOR": address,
                "MINT_PROCESSES": str(len(commands)),
                "MINT_PROCESS": str(i),
            }
            if len(commands) > 1
            else {}
        )
        out, err = (folder / f"{name}{i}" for name in ("out", "err"))
        with out.open("w") as stdout, err.open("w") as stderr:
            running.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdout=stdout,
                    stderr=stderr,
                    env=shared | joined | environment,
                    cwd=folder,
                )
            )
        files.append((out, err))
    deadline = time.monotonic() + timeout
    try:
        for process in running:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"not done after {timeout} s")
    finally:
        for process in running:
            process.kill()
            process.wait()
        for i, pair in enumerate(files):
            for file in pair:
                print(
                    f"--- {file.name} of process {i}, status"
                    f" {running[i].returncode}\n{file.read_text()[-5000:]}"
                )
    return [
        Ended(p.returncode, out.read_text(), err.read_text())
        for p, (out, err) in zip(running, files)
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MINT_PROCESS": None}, "MINT_PROCESS is not set but MINT_COORDINATOR is: set all of"),
        ({"MINT_PROCESSES": ""}, "MINT_PROCESSES is not set"),
        ({"MINT_COORDINATOR": None}, "MINT_COORDINATOR is not set but MINT_PROCESSES is"),
        ({"MINT_COORDINATOR": "10.0.0.2"}, "MINT_COORDINATOR is '10.0.0.2'; expected host:port"),
        ({"MINT_COORDINATOR": "host:99999"}, "expected host:port"),
        ({"MINT_PROCESSES": "two"}, "MINT_PROCESSES is 'two'; expected a whole number"),
        (
            {"MINT_PROCESSES": "0", "MINT_PROCESS": "0"},
            "MINT_PROCESSES is 0; expected .* at least 1",
        ),
        ({"MINT_PROCESS": "2"}, "MINT_PROCESS is 2; with MINT_PROCESSES=2 expected 0 to 1"),
        ({"MINT_PROCESS": "-1"}, "MINT_PROCESS is '-1'; expected a whole number"),
    ],
)
def test_wrong_variables_are_named(changes, says, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    environment = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(UserError, match=says):
        multihost.join(environment)


def test_join_hands_the_variables_to_jax_and_explains_its_errors(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given.update(options))
    multihost.join({})
    assert given == {}
    multihost.join(GOOD, detect=True)  # the variables come first
    assert (given["coordinator_address"], given["num_processes"], given["process_id"]) == (
        "127.0.0.1:8476",
        2,
        1,
    )
    assert given["coordinator_bind_address"] == "127.0.0.1:8476"  # not on every interface
    given.clear()
    multihost.join(GOOD | {"MINT_COORDINATOR": "10.0.0.2:8476"})
    assert "coordinator_bind_address" not in given

    def refuse(error):
        def initialize(**_):
            raise error

        monkeypatch.setattr(jax.distributed, "initialize", initialize)

    refuse(ValueError("coordinator_address should be defined."))
    with pytest.raises(
        UserError, match=r"found no TPU pod.*set MINT_COORDINATOR, MINT_PROCESSES, MINT_PROCESS"
    ):
        multihost.join({}, detect=True)
    refuse(RuntimeError("UNKNOWN: Failed to start RPC server"))
    with pytest.raises(
        UserError,
        match=(
            r"could not join 127\.0\.0\.1:8476 as process 1 of 2 \(UNKNOWN.*the coordinator's port"
        ),
    ):
        multihost.join(GOOD)


def test_another_number_of_processes_than_were_started_is_refused(monkeypatch):
    """As where a cluster's variables are not seen: every host would run the whole job alone."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    multihost.join(GOOD, expected=1)
    with pytest.raises(
        UserError,
        match="1 processes joined, and --distributed=2 expected 2: give the number that is started",
    ):
        multihost.join(GOOD, detect=True, expected=2)


def test_a_process_whose_fellows_do_not_come_ends_with_one_line(tmp_path):
    code = "from mint_jax import multihost; multihost.join(timeout_s=1)"
    alone = {
        "MINT_COORDINATOR": f"127.0.0.1:{free_port()}",
        "MINT_PROCESSES": "2",
        "MINT_PROCESS": "0",
    }
    [ended] = together([["-c", code]], tmp_path, 60, **alone)
    assert ended.status == 1
    assert ended.err.startswith("error: could not join 127.0.0.1")
    assert "as process 0 of 2 (the others did not come in 1 s)" in ended.err
    assert ended.err.count("\n") == 1


def test_a_single_process_agrees_with_itself(rng):
    value = (1, "a")
    assert multihost.agree("x", lambda: value) is value
    assert multihost.is_main()
    assert multihost.replicate(value, None) is value
    multihost.require_same("y", lambda: pytest.fail("computed"))
    multihost.barrier("z")
    multihost.leave(1, "stays")
    values = {"w": rng.normal(size=(64, 32)).astype(np.float32)}
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    array = jax.device_put(values, shardings({"w": ParamSpec((64, 32), ("vocab", "embed"))}, mesh))
    host = multihost.to_host(array)
    assert isinstance(host["w"], np.ndarray)
    np.testing.assert_array_equal(host["w"], values["w"])


MEETING = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.mesh import make_mesh

multihost.FORGET_EVERY = multihost.POSTS = 4
multihost.join()
me = multihost.index()
seen = {"index": me, "count": multihost.count(), "devices": [len(jax.devices()), len(jax.local_devices())]}

def attempt(act):
    try:
        return act()
    except Exception as error:
        return [type(error).__name__, str(error)]

def refuse(): raise UserError("no such thing")
def fail(): raise KeyError("gone")

seen["agreed"] = multihost.agree("value", lambda: {"who": me, "x": 0.1 + 0.2, "pair": (1, None)})
seen["mistake"] = attempt(lambda: multihost.agree("mistake", refuse))
seen["failure"] = attempt(lambda: multihost.agree("failure", fail))
seen["unsendable"] = attempt(lambda: multihost.agree("unsendable", lambda: object()))
multihost.require_same("the weather", lambda: ["fine"])
seen["differs"] = attempt(lambda: multihost.require_same("the process", lambda: me))
seen["many"] = [multihost.agree("many", lambda: i + 100 * me) for i in range(20)]
mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
values = np.arange(64, dtype=np.float32).reshape(16, 4)
split = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(("data", "fsdp"), "tensor")), lambda i: values[i])
whole = multihost.replicate({"v": values}, mesh)
local = jax.numpy.arange(3)
back = multihost.to_host({"split": split, "rows": split[:5], "whole": whole["v"], "local": local})
seen["addressable"] = split.is_fully_addressable
seen["equal"] = [np.array_equal(back["split"], values), np.array_equal(back["rows"], values[:5]), np.array_equal(back["whole"], values)]
seen["local"] = back["local"].tolist()
placed = multihost.place([values, values], [split.sharding, whole["v"].sharding])
seen["placed"] = [np.array_equal(x, values) for x in multihost.to_host(placed)] + [placed[0].sharding == split.sharding]
if me:
    seen["taken"] = [list(multihost.take()) for _ in range(20)]
else:
    for i in range(20):
        multihost.post(bytes([i, 255]))
seen["hosts"] = multihost.topology()
if me:
    multihost.jax.local_device_count = lambda: 3
seen["unequal"] = attempt(multihost.topology)
multihost.barrier("done")
seen["parted"] = attempt(lambda: multihost.agree("left" if me else "right", lambda: 0))
print(json.dumps(seen))
"""  # noqa: E501


def test_two_processes_agree_and_share_arrays(tmp_path):
    ended = together([["-c", MEETING]] * 2, tmp_path, 120)
    assert [e.status for e in ended] == [0, 0]
    main, other = (json.loads(e.out.splitlines()[-1]) for e in ended)
    for i, seen in enumerate((main, other)):
        assert (seen["index"], seen["count"], seen["devices"]) == (i, 2, [8, 4])
        assert seen["agreed"] == {"who": 0, "x": 0.1 + 0.2, "pair": [1, None]}
        assert seen["mistake"] == ["UserError", "no such thing"]
        assert seen["differs"][0] == "UserError"
        assert seen["differs"][1].startswith(
            "the process of process 1 differs from that of process 0"
        )
        assert seen["many"] == list(range(20))
        assert not seen["addressable"]
        assert seen["equal"] == [True] * 3
        assert seen["local"] == [0, 1, 2]
        assert seen["placed"] == [True] * 3
        assert re.fullmatch(r"2 processes with 4 devices each: 0 on (\S+), 1 on \1", seen["hosts"])
        assert seen["unequal"][0] == "UserError"
        assert re.search(
            r"process 1 on \S+ has 3 devices, process 0 on \S+ has 4: see whether",
            seen["unequal"][1],
        )
    assert main["failure"] == ["KeyError", "'gone'"]
    assert other["failure"] == ["RuntimeError", "process 0 failed at 'failure': 'gone'"]
    assert main["unsendable"][0] == "TypeError"
    assert "not JSON serializable" in other["unsendable"][1]
    assert other["taken"] == [[i, 255] for i in range(20)]
    assert main["parted"] == 0
    assert other["parted"] == [
        "RuntimeError",
        "process 1 asks for 'left' where process 0 decided 'right': their programs differ",
    ]


@pytest.mark.long
def test_a_mistake_ends_every_process_with_its_line(tmp_path):
    (tmp_path / "file").write_text("")
    bad, good = (
        ["-m", "mint_jax.launch", f"--config={TINY}", f"--workdir={tmp_path / place}"]
        for place in ("file/work", "work")
    )
    other = [*good, "--config.steps=9"]
    cases = (
        ([bad] * 2, "error: ", "cannot be written"),
        (
            [good, other],
            "error in process {}: ",
            "the config of process 1 differs",
        ),
    )
    for commands, begins, says in cases:  # what each sees by itself is reported before they join
        for i, ended in enumerate(together(commands, tmp_path / "processes", 120)):
            assert ended.status == 2
            assert ended.out == ""
            assert "Traceback" not in ended.err
            assert ended.err.splitlines()[-1].startswith(begins.format(i))
            assert says in ended.err


# A reward that differs between completions, takes its time in no fixed order, and must not be asked
# outside process 0.
ENVIRONMENT = """
import os, random, time
from mint_jax.envs.env import Example, ListEnvironment
from tests.configs import run_config

def score(completion, example):
    assert os.environ.get("MINT_PROCESS", "0") == "0"
    time.sleep(random.SystemRandom().random() / 50)
    return sum(map(ord, completion)) % 7 / 7

def make():
    examples = [Example(" ".join(str(i * 7919)[:3]), "") for i in range(100, 130)]
    return ListEnvironment(examples[2:], examples[:2], score)
"""


def metrics_of(workdir: Path) -> dict[tuple[int, str], dict[str, float]]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    out = {(row.pop("step"), row.pop("name")): row for row in rows}
    assert len(out) == len(rows), "a step was written twice"
    return out


def tiny_grpo(*names: str, **changes):
    """configs/tiny/grpo.py with these policies, which learn from ``ENVIRONMENT``."""
    config = runpy.run_path(str(TINY))["get_config"]()
    for name in set(config.policies) - set(names):
        del config.policies[name]
    config.update({"export_every": 1, **changes})
    for policy in config.policies.values():
        policy.env = {"name": "varied:make"}
        # eps 1 makes the update nearly proportional to the gradient; the usual 1e-8 would blow up
        # the rounding of gradients near 0
        policy.optimizer = {"learning_rate": 0.1, "eps": 1.0}
    return config


def write_config(config, folder: Path) -> Path:
    """A config file that gives this config, beside the environment's module."""
    (folder / "varied.py").write_text(ENVIRONMENT)
    (folder / "config.json").write_text(config.to_json_best_effort())
    (folder / "config.py").write_text(
        "import json, pathlib\nfrom ml_collections import ConfigDict\ndef get_config():\n    return"
        " ConfigDict(json.loads((pathlib.Path(__file__).parent / 'config.json').read_text()))\n"
    )
    return folder / "config.py"


@pytest.mark.long
def test_a_grpo_step_on_two_processes_is_that_of_one_device(tmp_path, monkeypatch):
    """The slow set takes more steps, policies, devices, both schedules, and resumes."""
    config = tiny_grpo("ppo", steps=1)
    one = tmp_path / "one"
    config.mesh.update({"data": 2})
    file = write_config(config, tmp_path)
    command = ["-m", "mint_jax.launch", f"--config={file}", f"--workdir={tmp_path / 'two'}"]
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    ended = together([command] * 2, tmp_path / "processes", 300, **environment)
    assert [e.status for e in ended] == [0, 0]
    assert ended[1].out == ""
    result = json.loads((tmp_path / "two" / "result.json").read_text())

    made = mesh_lib.make_mesh
    monkeypatch.setattr(
        mesh_lib,
        "make_mesh",
        lambda sizes=None, devices=None: made({}, devices or jax.devices()[:1]),
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "varied", raising=False)
    alone = run_config(config, one)

    parts, whole = metrics_of(tmp_path / "two"), metrics_of(one)
    assert parts.keys() == whole.keys() == {(0, "ppo")}
    assert parts[0, "ppo"]["reward"] == whole[0, "ppo"]["reward"], "the same tokens were sampled"
    # float32 sums, in another order between devices than within one
    for name in ("loss", "grad_norm", "logp"):
        np.testing.assert_allclose(
            parts[0, "ppo"][name], whole[0, "ppo"][name], rtol=1e-4, atol=1e-5
        )
    assert whole[0, "ppo"]["grad_norm"] > 1e-3
    adapters = []
    for workdir, done in ((tmp_path / "two", result), (one, alone)):
        with Catalog.open(workdir / "catalog") as catalog:
            adapters.append(unpack(catalog.load(done["policies"][0]["revision"]))[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *adapters)
    assert (
        max(
            float(np.abs(x).max())
            for path, x in params_lib.leaves_with_path(adapters[0])
            if path.endswith("b")
        )
        > 1e-5
    )


@pytest.mark.slow  # every program is compiled for two processes and for one
@pytest.mark.parametrize("schedule", ["overlapped", "batched"])
def test_grpo_on_two_processes_resumed_is_grpo_on_one(schedule, tmp_path):
    names = ("ppo", "cispo")
    config = tiny_grpo(*names, schedule=schedule)
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    config.policies.cispo.sampling.stop = ("e", "a")
    # in the bucket of cispo's 4: the policies share their programs
    config.policies.ppo.adapter.rank = 3
    file = write_config(config, tmp_path)

    def run(processes: int, steps: int, workdir: Path) -> dict:
        command = [
            "-m",
            "mint_jax.launch",
            f"--config={file}",
            f"--workdir={workdir}",
            f"--config.steps={steps}",
        ]
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        ended = together([command] * processes, tmp_path / "processes", 900, PYTHONPATH=path)
        assert [e.status for e in ended] == [0] * processes
        for silent in ended[1:]:
            assert silent.out == ""
            assert "[grpo]" not in silent.err
        result = json.loads((workdir / "result.json").read_text())
        assert result["stamp"]["commit"]
        return {p["name"]: p["revision"] for p in result["policies"]}

    run(2, 2, tmp_path / "two")
    first = metrics_of(tmp_path / "two")
    assert sorted(first) == sorted((s, n) for s in range(2) for n in names)
    two = run(2, 4, tmp_path / "two")
    one = run(1, 4, tmp_path / "one")

    parts, whole = metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one")
    assert sorted(parts) == sorted(whole) == sorted((s, n) for s in range(4) for n in names)
    assert {key: parts[key] for key in first} == first, (
        "the second start went on where the first had ended"
    )
    for key, row in whole.items():
        assert parts[key]["reward"] == row["reward"], "the same tokens were sampled"
        # float32 sums, in another order between processes than within one
        for name in ("loss", "grad_norm", "logp"):
            np.testing.assert_allclose(parts[key][name], row[name], rtol=1e-4, atol=1e-5)
    assert len({row["reward"] for row in whole.values()}) > 2

    catalogs = [Catalog.open(tmp_path / name / "catalog") for name in ("two", "one")]
    for name in names:
        assert [revision.step for revision in catalogs[0].revisions(name)] == [1, 2, 3, 4]
    for name in names:
        (mine, schema), (theirs, other) = (
            unpack(catalogs[0].load(two[name])),
            unpack(catalogs[1].load(one[name])),
        )
        assert schema == other
        # the same reason; four updates of 0.1 times a gradient below 1
        chex.assert_trees_all_close(mine, theirs, rtol=1e-4, atol=1e-6)
        start, _ = unpack(catalogs[0].load(f"{name}@1"))
        moved = max(
            float(np.abs(x - y).max())
            for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(start))
        )
        assert moved > 1e-4, "the later steps moved the policy"
    for catalog in catalogs:
        catalog.close()

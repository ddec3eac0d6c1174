"""Several processes are one program: here two with four CPU devices each, on the loopback
interface.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from benchmarks.postgres_server import free_port
from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from mint_jax.errors import UserError
from tests.configs import tiny
from tests.groups import ENVIRONMENT, rows_of

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
    shared = {k: v for k, v in os.environ.items() if k not in multihost.VARIABLES}
    devices = f"--xla_force_host_platform_device_count={8 // len(commands)}"  # the last one counts
    shared |= {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}", "PYTHONPATH": str(ROOT)}
    shared["TF_CPP_MIN_LOG_LEVEL"] = "2"  # the partitioner's and gloo's remarks
    address = f"127.0.0.1:{free_port()}"
    running, files = [], []
    for i, command in enumerate(commands):
        joined = dict(zip(multihost.VARIABLES, (address, str(len(commands)), str(i))))
        own = shared | (joined if len(commands) > 1 else {}) | environment
        out, err = (folder / f"{name}{i}" for name in ("out", "err"))
        command = [sys.executable, *command]
        with out.open("w") as stdout, err.open("w") as stderr:
            running.append(
                subprocess.Popen(command, stdout=stdout, stderr=stderr, env=own, cwd=folder)
            )
        files.append((out, err))
    deadline = time.monotonic() + timeout
    try:
        for process in running:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"not done after {timeout} s")
    finally:
        for process, pair in zip(running, files):
            process.kill()
            process.wait()
            for file in pair:
                print(f"--- {file.name}, status {process.returncode}\n{file.read_text()[-5000:]}")
    return [
        Ended(p.returncode, out.read_text(), err.read_text())
        for p, (out, err) in zip(running, files)
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MINT_PROCESS": None}, "MINT_PROCESS is not set but MINT_COORDINATOR is: set all of"),
        ({"MINT_COORDINATOR": "10.0.0.2"}, "MINT_COORDINATOR is '10.0.0.2'; expected host:port"),
        ({"MINT_PROCESSES": "two"}, "MINT_PROCESSES is 'two'; expected a whole number"),
        ({"MINT_PROCESS": "2"}, "MINT_PROCESS is 2; with MINT_PROCESSES=2 expected 0 to 1"),
    ],
)
def test_wrong_variables_are_named(changes, says, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    environment = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(UserError, match=says):
        multihost.join(environment)


def test_a_process_whose_fellows_do_not_come_ends_with_one_line(tmp_path):
    code = "from mint_jax import multihost; multihost.join(timeout_s=1)"
    alone = GOOD | {"MINT_COORDINATOR": f"127.0.0.1:{free_port()}", "MINT_PROCESS": "0"}
    [ended] = together([["-c", code]], tmp_path, 60, **alone)
    assert ended.status == 1
    assert ended.err.startswith("error: could not join 127.0.0.1")
    assert "as process 0 of 2 (the others did not come in 1 s)" in ended.err
    assert ended.err.count("\n") == 1


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
    launch = ["-m", "mint_jax.launch", f"--config={TINY}"]
    bad, good = ([*launch, f"--workdir={tmp_path / place}"] for place in ("file/work", "work"))
    other = [*good, "--config.steps=9"]
    cases = (
        ([bad] * 2, "error: ", "cannot be written"),
        ([good, other], "error in process {}: ", "the config of process 1 differs"),
    )
    for commands, begins, says in cases:  # what each sees by itself is reported before they join
        for i, ended in enumerate(together(commands, tmp_path / "processes", 120)):
            assert ended.status == 2
            assert ended.out == ""
            assert "Traceback" not in ended.err
            assert ended.err.splitlines()[-1].startswith(begins.format(i))
            assert says in ended.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "steps", "schedule"),
    [
        (("ppo",), (1,), "batched"),
        pytest.param(("ppo", "cispo"), (2, 4), "overlapped", marks=pytest.mark.slow),
    ],
    ids=["one step", "resumed"],
)
def test_grpo_on_two_processes_is_grpo_on_one(names, steps, schedule, tmp_path):
    """Rewards are scored in process 0 only; each number of steps is one start."""
    axes = {"data": 2} if len(names) == 1 else {"data": 2, "fsdp": 2, "tensor": 2}
    config = tiny("grpo", export_every=1, schedule=schedule)
    for name in set(config.policies) - set(names):
        del config.policies[name]
    config.mesh.update(axes)
    for policy in config.policies.values():
        policy.env = {"name": "varied:make"}
        # eps 1 makes the update nearly proportional to the gradient; the usual 1e-8 would blow up
        # the rounding of gradients near 0
        policy.optimizer = {"learning_rate": 0.1, "eps": 1.0}
        policy.adapter.rank = 3  # one bucket: the policies share their programs
    (tmp_path / "varied.py").write_text(ENVIRONMENT)
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    (tmp_path / "config.py").write_text(
        "import json, pathlib\nfrom ml_collections import ConfigDict\ndef get_config():\n    return"
        " ConfigDict(json.loads((pathlib.Path(__file__).parent / 'config.json').read_text()))\n"
    )
    devices = math.prod(axes.values())

    def run(processes: int, count: int) -> tuple[dict, dict]:
        workdir = tmp_path / f"work{processes}"
        command = ["-m", "mint_jax.launch", f"--config={tmp_path}/config.py"]
        command += [f"--workdir={workdir}", f"--config.steps={count}"]
        environment = {
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        ended = together([command] * processes, tmp_path / "processes", 900, **environment)
        assert [e.status for e in ended] == [0] * processes
        assert all(e.out == "" and "[grpo]" not in e.err for e in ended[1:])
        result = json.loads((workdir / "result.json").read_text())
        rows = {(row["step"], row["name"]): row for row in rows_of(workdir)}
        assert sorted(rows) == sorted((s, n) for s in range(count) for n in names)
        return rows, {p["name"]: p["revision"] for p in result["policies"]}

    starts = [run(2, count) for count in steps]
    parts, two = starts[-1]
    assert {key: parts[key] for key in starts[0][0]} == starts[0][0], "the second start resumed"
    whole, one = run(1, steps[-1])
    for key, row in whole.items():
        assert parts[key]["reward"] == row["reward"], "the same tokens were sampled"
        # float32 sums, in another order between processes than within one
        for name in ("loss", "grad_norm", "logp"):
            np.testing.assert_allclose(parts[key][name], row[name], rtol=1e-4, atol=1e-5)
    for name in names:
        adapters = []
        for processes, digest in ((2, two[name]), (1, one[name])):
            with Catalog.open(tmp_path / f"work{processes}" / "catalog") as catalog:
                adapters.append(unpack(catalog.load(digest)))
        (mine, schema), (theirs, other) = adapters
        assert schema == other
        # the same reason; updates of 0.1 times a gradient below 1
        chex.assert_trees_all_close(mine, theirs, rtol=1e-4, atol=1e-6)
        b = [x for path, x in params_lib.leaves_with_path(mine) if path.endswith("b")]
        assert max(float(np.abs(x).max()) for x in b) > 1e-5, "the policy moved"

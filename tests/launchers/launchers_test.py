"""The programs of ``launch/`` against stand-ins of gcloud, SLURM, kubectl and Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import unpack
from tests import configs
from tests.launchers import stand_ins

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
JOB = ["--", "--config=configs/tiny/sft.py", "--workdir=/runs/it's one", "--config.steps=2"]
WHERE = ["--project=p", "--zone=z", "--accelerator_type=v5p-16", "--runtime_version=v2"]
TPU = ["bash", LAUNCH / "tpu_pod.sh", "--name=run1", *WHERE]
SLURM = ["bash", "launch/slurm.sbatch", "--nodes=2", "--gpus-per-node=0"]
GKE = [sys.executable, LAUNCH / "gke_jobset.py", "--name=run1", "--image=here", "--hosts=2"]
RAY = [sys.executable, LAUNCH / "ray_job.py", "--address=http://head:8265", "--nodes=2"]
# runs in place of mint_jax.launch
REPORT = 'echo "$MINT_PROCESS$SLURM_PROCID of $MINT_PROCESSES$SLURM_NTASKS got $*"'


@pytest.fixture
def place(tmp_path):
    """Returns a folder of stand-ins."""
    stand_ins.repository(tmp_path / "home", f"{REPORT}; exit 0")
    return tmp_path


def launch(place: Path, command: list, **settings) -> subprocess.CompletedProcess[str]:
    env = stand_ins.install(place, **settings) | {"RAY_NODES": str(settings.get("nodes", 2))}
    cwd = place / "home" / "mint_jax"
    return subprocess.run(
        [str(one) for one in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def hosts_run(place: Path, line: str) -> None:
    stand_ins.script(place / "home" / "mint_jax" / ".venv" / "bin" / "python", line)


def verbs(place: Path) -> list[str]:
    """Returns the verbs of gcloud's and kubectl's calls."""
    return [one[4 if one[0] == "gcloud" else 2] for one in stand_ins.calls(place)]


DRY_RUNS = {
    "tpu": (
        [*TPU, "--setup=make it", "--collect=out", "--restarts=1", "--create_flag=--spot"],
        """
gcloud compute tpus queued-resources create run1 --node-id=run1 --project=p --zone=z
--worker=all --ssh-flag=-tt --quiet --command=make\\ it
--distributed=2\\ --config=configs/tiny/sft.py\\ --workdir=/runs/it\\\\\\'s\\\\\\ one
# once more after a failure: 1 times
gcloud compute tpus tpu-vm scp --recurse run1:/runs/it\\'s\\ one out --project=p --zone=z --worker=0
gcloud compute tpus queued-resources delete run1 --project=p --zone=z --force --quiet
# host 1: process 1 of 2
""",
    ),
    "slurm": (
        ["bash", "launch/slurm.sbatch", "--nodes=2", "--gpus-per-node=2", "--partition=x"],
        """
sbatch --nodes=2 --ntasks=4 --ntasks-per-node=2 --gpus-per-node=2 --partition=x launch/slurm.sbatch
srun --kill-on-bad-exit=1 --wait=60 .venv/bin/python -u -m mint_jax.launch --distributed=4 --config=
# process 3, on node 1: SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1; coordinator: node 0
""",
    ),
    "gke": (
        GKE,
        """
kubectl --namespace=default create --filename=-
kubectl --namespace=default delete jobset run1
# host 1: MINT_COORDINATOR=run1-workers-0-0.run1:8476 MINT_PROCESSES=2 MINT_PROCESS=1
""",
    ),
    "gke-tpu": (
        [*GKE, "--accelerator=tpu-v5p-slice", "--topology=2x2x2"],
        """
google.com/tpu: 4
gke-tpu-topology: 2x2x2
# host 1: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES from GKE
""",
    ),
    "ray": (
        [*RAY, "--directory=/r", "--gpus=8"],
        """
ray job submit --address=http://head:8265
-- python ray_job.py --driver --address=http://head:8265 --nodes=2 --directory=/r --gpus=8 --
{'CPU': 1.0, 'GPU': 8.0} on each of 2 nodes
# node 1: MINT_COORDINATOR=ADDRESS_OF_NODE_0:FREE_PORT MINT_PROCESSES=2 MINT_PROCESS=1
""",
    ),
}


@pytest.mark.parametrize("where", DRY_RUNS)
def test_a_dry_run_prints_the_commands_and_the_place_of_each_host_and_runs_nothing(place, where):
    command, says = DRY_RUNS[where]
    done = launch(place, [*command, "--dry_run", *JOB])
    assert (done.returncode, done.stderr) == (0, "")
    assert [one for one in says.strip().splitlines() if one not in done.stdout] == []
    assert stand_ins.calls(place) == []
    if where.startswith("gke"):
        assert stand_ins.unknown_fields(yaml.safe_load(done.stdout)) == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*TPU[:2], "--name=a", *JOB], "--project is missing: give --project=PROJECT"),
        ([*TPU, "--accelerator_type=h100-8", *JOB], "--accelerator_type=h100-8: expected v2-"),
        ([*TPU, "--config=x"], "unknown option --config=x: options stand before --"),
        ([*SLURM[:3], *JOB], "--gpus-per-node=: give the GPUs of a node"),
        ([*GKE[:3], "--hosts=2", *JOB], "--image is missing: give --image=REGISTRY/mint_jax:TAG"),
        ([*GKE, "--", "--config=x", "--workdir=runs/x"], "--workdir is outside /runs"),
        ([*RAY, "--directory=here", *JOB], "--directory=here: expected an absolute path"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(place, command, says):
    done = launch(place, command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1
    assert stand_ins.calls(place) == []


def test_a_tpu_slice_is_made_used_collected_and_deleted(place):
    hosts_run(place, f"{REPORT}; mkdir -p out && touch out/result.json")
    job = ["--", "--config=x.py", "--workdir=out", "--config.name=it's two"]
    states = [["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]]
    options = ["--setup=touch ready", f"--collect={place / 'kept'}"]
    done = launch(place, [*TPU, *options, *job], states=states)
    assert done.returncode == 0, done.stderr
    assert " ".join(verbs(place)) == "list create list list list describe ssh ssh scp delete"
    given = " ".join(["-u -m mint_jax.launch --distributed=2", *job[1:]])
    assert sorted(done.stdout.splitlines()) == [f"{i} of 2 got {given}" for i in range(2)]
    assert (place / "home" / "ready").exists()
    assert (place / "kept" / "out" / "result.json").exists()


ACTIVE = {"states": [["ACTIVE"]]}
MADE = "list create list"
# settings of the stand-ins, options, program of a host, status, message, calls of gcloud
ENDS = {
    # a process fails on a slice that is then preempted: a new one, and no third
    "preempted": (
        {"states": [["ACTIVE", "SUSPENDED"], ["ACTIVE"]]},
        ["--restarts=1", "--setup=true"],
        "exit 7",
        7,
        "the job ended with status 7",
        f"{MADE} describe ssh ssh list delete create list describe ssh ssh delete",
    ),
    "mistake": (ACTIVE, ["--restarts=2"], "exit 2", 2, "status 2", f"{MADE} describe ssh delete"),
    "found": (ACTIVE | {"found": True}, [], "exit 0", 0, "status 0", "list describe ssh"),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_it_ends_a_slice_that_was_made_is_deleted(place, end):
    settings, options, line, status, says, called = ENDS[end]
    hosts_run(place, line)
    done = launch(place, [*TPU, *options, *JOB], **settings)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert verbs(place) == called.split()


def test_an_interrupt_ends_the_hosts_and_deletes_the_slice(place):
    hosts_run(place, "touch begun$MINT_PROCESS; exec /bin/sleep 600")
    env = stand_ins.install(place, states=[["ACTIVE"]])
    # a shell that was started in the background ignores it
    command = ["env", "--default-signal=INT", *map(str, TPU), *JOB]
    process = subprocess.Popen(
        command, cwd=place, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    while not all((place / "home" / "mint_jax" / f"begun{i}").exists() for i in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal's Ctrl-C does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "deleting run1" in said
    assert verbs(place)[-1] == "delete"


def test_a_jobset_whose_pod_refuses_a_mistake_is_not_restarted(place):
    hosts_run(place, "exit 2")
    done = launch(place, [*GKE, "--restarts=1", *JOB])
    assert done.returncode == 1, done.stderr
    assert "failed after 0 restarts: a pod ended with status 2" in done.stdout + done.stderr
    assert (verbs(place)[0], verbs(place)[-1]) == ("create", "delete")


FAILS = "[ $MINT_PROCESS = 0 ] && exec /bin/sleep 1; exit 7"
FEW = "3 nodes with {'CPU': 1.0} free did not come in 1 s; alive are: 10.0.0.0 {'CPU': 1.0}"


@pytest.mark.parametrize(
    ("line", "options", "says", "attempts"),
    [
        (FAILS, ["--restarts=1"], "process 1 ended with status 7", 2),
        (REPORT, ["--nodes=3", "--wait=1"], FEW, 0),
    ],
)
def test_a_ray_job_is_placed_watched_and_ended(place, line, options, says, attempts):
    hosts_run(place, line)
    done = launch(place, [*RAY, f"--directory={place / 'home' / 'mint_jax'}", *options, *JOB])
    assert done.returncode == 1, done.stderr
    assert says in done.stdout + done.stderr
    assert done.stderr.count("the job ended with status") == attempts


# Process 1 dies when it is to write its second checkpoint, unless the file "died" is there.
CONFIG = """
import os, pathlib, runpy, signal
from mint_jax import multihost
from mint_jax.checkpoint import Checkpoints

DIED = pathlib.Path(__file__).with_name("died")
latest = Checkpoints.latest

def latest_or_die(self):
    found = latest(self)
    if found is not None and multihost.index() == 1 and not DIED.exists():
        DIED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return found

def get_config():
    Checkpoints.latest = latest_or_die
    config = runpy.run_path("configs/tiny/sft.py")["get_config"]()
    del config.policies["bracket"]
    config.update({"steps": 2, "export_every": 1})
    config.mesh.data = 2
    config.checkpoint.every = 1
    config.policies.adder.optimizer = {"learning_rate": 0.1, "eps": 1.0}  # steps nearly proportional to the gradient
    return config
"""  # noqa: E501


def train(
    place: Path, command: list, workdir: Path, devices: int, dies: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs the launcher, or the job itself, over a repository with this one's .venv; its processes
    have so many CPU devices.
    """
    home = stand_ins.repository(place / "home", f'exec {sys.executable} "$@"')
    (place / "config.py").write_text(CONFIG)
    if not dies:
        (place / "died").touch()
    env = stand_ins.install(place, states=[["ACTIVE"]]) | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "MINT_JAX_CACHE": str(place.parent / "cache"),
        "RAY_NODES": "2",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    job = [f"--config={place / 'config.py'}", f"--workdir={workdir}"]
    return subprocess.run(
        [*map(str, command), *job], cwd=home, env=env, capture_output=True, text=True, timeout=600
    )


def learned(workdir: Path) -> tuple[list[tuple], np.ndarray]:
    """Returns losses and gradient norms step by step, and the adapter."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    with Catalog.open(workdir / "catalog") as catalog:
        leaves = jax.tree.leaves(unpack(catalog.load("adder"))[0])
    steps = [(row["step"], row["loss"], row["grad_norm"]) for row in rows]
    return steps, np.concatenate([np.ravel(x) for x in leaves])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Trains in one process with two devices."""
    place = tmp_path_factory.mktemp("alone")
    done = train(place, [sys.executable, "-m", "mint_jax.launch"], place / "runs" / "x", 2)
    assert done.returncode == 0, done.stderr
    return learned(place / "runs" / "x")


@pytest.mark.long
@pytest.mark.parametrize("where", ["tpu", "slurm", "gke", "ray"])
def test_two_processes_started_by_the_launcher_learn_what_one_with_two_devices_does(
    where, tmp_path, alone
):
    ray = [*RAY, f"--directory={tmp_path / 'home' / 'mint_jax'}"]
    command = {"tpu": TPU, "slurm": SLURM, "gke": GKE, "ray": ray}[where]
    workdir, dies = tmp_path / "runs" / "x", where == "gke"
    done = train(tmp_path, [*command, "--"], Path("/runs/x") if dies else workdir, 1, dies)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "[launch] 2 processes with 1 devices each: 0 on" in said
    assert (tmp_path / "died").exists()
    assert said.count("resumed at step") == dies, "a JobSet resumes from the last checkpoint"
    steps, adapter = learned(workdir)
    expected, whole = alone
    assert len(expected) == 2
    # float32 sums, in another order between processes
    np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(adapter, whole, rtol=1e-4, atol=1e-6)


def test_the_fleet_on_kubernetes_has_settings_that_a_fleet_has():
    job, service = yaml.safe_load_all((LAUNCH / "fleet_kuberay.yaml").read_text())
    _, *arguments = job["spec"]["entrypoint"].split("mint_jax.launch")[1].split()
    changes = [one for one in arguments if one.startswith("--config.")]
    config = configs.load("configs/fleet.py", *changes)
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    [worker] = workers["template"]["spec"]["containers"]
    assert config.engines * config.gpus == workers["replicas"] * int(
        worker["resources"]["limits"]["nvidia.com/gpu"]
    )
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    [container] = head["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == config.port
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]

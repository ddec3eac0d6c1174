"""gcloud, sbatch, srun, kubectl and ray on this machine, each as far as a launcher uses it.

``install`` puts them on a PATH. They write every call to ``calls.jsonl`` of their folder, keep
their state there, and start the processes of "hosts" here. A folder ``home`` has the repository.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = "STAND_INS"  # the variable that has their folder
OURS = ("MINT_PROCESS", "MINT_COORDINATOR", "SLURM_", "RAY_", "TPU_")


def install(folder: Path, **settings: Any) -> dict[str, str]:
    """Returns the environment in which the stand-ins are found first; they read the settings."""
    (folder / "bin").mkdir(parents=True)
    for name in ("gcloud", "sbatch", "srun", "kubectl", "ray"):
        isolated = "" if name == "kubectl" else "-S"  # starts sooner, without installed packages
        script(folder / "bin" / name, f'exec {sys.executable} {isolated} {__file__} {name} "$@"')
    # launchers wait half a minute between two looks
    script(folder / "bin" / "sleep", "exec /bin/sleep 0.05")
    script(folder / "bin" / "python", f'exec {sys.executable} "$@"')
    (folder / "settings.json").write_text(json.dumps(settings))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, FOLDER: str(folder), "PYTHONPATH": str(ROOT)}


def repository(home: Path, python: str) -> Path:
    """Makes the repository of a host, whose ``.venv`` has this line of a shell as its python."""
    (home / "mint_jax" / ".venv" / "bin").mkdir(parents=True)
    script(home / "mint_jax" / ".venv" / "bin" / "python", python)
    for name in ("configs", "launch"):
        (home / "mint_jax" / name).symlink_to(ROOT / name)
    return home / "mint_jax"


def script(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def free_port(least: int = 20000, most: int = 30000) -> int:
    for port in range(least + os.getpid() % (most - least), most):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def start(
    command: Sequence[str], hosts: Sequence[dict[str, str]], **options: Any
) -> list[subprocess.Popen]:
    """Starts a process for each host's variables, in groups of their own."""
    return [
        subprocess.Popen(command, env=os.environ | one, start_new_session=True, **options)
        for one in hosts
    ]


def end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until_one_fails(processes: Sequence[subprocess.Popen]) -> int:
    """Returns the status of the first to fail, after killing the others."""
    while True:
        statuses = [process.poll() for process in processes]
        if failed := [status for status in statuses if status]:
            end(processes)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return 0
        time.sleep(0.1)


# of JobSet v1alpha2, and of the Job, pods and containers in it
FIELDS = """
apiVersion kind metadata name namespace annotations spec failurePolicy maxRestarts rules action
network onJobFailureReasons enableDNSHostnames publishNotReadyAddresses replicatedJobs
replicas template
parallelism completions backoffLimit completionMode podFailurePolicy onExitCodes containerName
operator values restartPolicy nodeSelector containers image command args env value valueFrom
fieldRef fieldPath resources limits volumeMounts mountPath volumes persistentVolumeClaim claimName
"""


def unknown_fields(tree: Any) -> list[str]:
    """Returns field names of a JobSet that the API does not have."""
    if isinstance(tree, list):
        return [name for item in tree for name in unknown_fields(item)]
    if not isinstance(tree, dict):
        return []
    found = [name for name in tree if name not in FIELDS.split()]
    for name, child in tree.items():
        if name not in ("annotations", "nodeSelector", "limits"):  # names of one's own
            found += unknown_fields(child)
    return found


class Folder:
    """State and settings of the stand-ins."""

    def __init__(self) -> None:
        self.path = Path(os.environ[FOLDER])
        self.settings = self.read("settings.json")

    def read(self, name: str, default: Any = None) -> Any:
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else default

    def write(self, name: str, value: Any) -> None:
        (self.path / f"{name}.new").write_text(json.dumps(value))
        (self.path / f"{name}.new").replace(self.path / name)


def _flags(argv: Sequence[str]) -> dict[str, str]:
    return dict(one[2:].split("=", 1) for one in argv if one.startswith("--") and "=" in one)


def gcloud(folder: Folder, argv: list[str]) -> int:
    """Setting ``states``: a queued resource's state at each look, a list for each one that is made.
    ``found``: one that was there.
    """
    verb, home = argv[3], folder.path / "home"
    made, looks = folder.read("made", 0), folder.read("looks", 0)
    exists = folder.read("exists", folder.settings.get("found", False))
    if verb == "create":
        for name, value in (("made", made + 1), ("looks", 0), ("exists", True)):
            folder.write(name, value)
    elif verb == "list" and exists:
        states = folder.settings["states"][max(made, 1) - 1]
        print(states[min(looks, len(states) - 1)])
        folder.write("looks", looks + 1)
    elif verb == "describe":
        print("READY\t2")
    elif verb == "ssh":
        # the metadata server tells each TPU host the same
        shared = {"MINT_COORDINATOR": f"127.0.0.1:{free_port()}", "MINT_PROCESSES": "2"}
        hosts = [shared | {"MINT_PROCESS": str(i)} for i in range(2)]
        running = start(["bash", "-c", _flags(argv)["command"]], hosts, cwd=home)
        try:
            return next((status for status in [host.wait() for host in running] if status), 0)
        except KeyboardInterrupt:
            end(running)  # their terminals are gone
            return 130
    elif verb == "scp":
        _, source, target = argv[4:7]
        shutil.copytree(home / source.split(":")[1], Path(target) / Path(source).name)
    elif verb == "delete":
        folder.write("exists", False)
    return 0


def sbatch(folder: Folder, argv: list[str]) -> int:
    """Runs the job at once, in the allocation that was asked for, to its end."""
    flags = _flags(argv[: argv.index("--")])
    batch = next(i for i, one in enumerate(argv) if not one.startswith("--"))
    spooled = shutil.copy(argv[batch], folder.path / "slurm_script")
    port = free_port(61440, 65535)
    allocation = {
        "SLURM_JOB_ID": str(port - 61440 + 4096),
        "SLURM_NTASKS": flags["ntasks"],
        "SLURM_JOB_NUM_NODES": flags["nodes"],
    }
    command = ["bash", spooled, *argv[batch + 1 :]]
    return subprocess.run(command, env=os.environ | allocation).returncode


def srun(folder: Folder, argv: list[str]) -> int:
    assert "--kill-on-bad-exit=1" in argv
    command = argv[next(i for i, one in enumerate(argv) if not one.startswith("--")) :]
    tasks = os.environ["SLURM_NTASKS"]
    step = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": tasks, "SLURM_LOCALID": "0"}
    hosts = [step | {"SLURM_PROCID": str(i)} for i in range(int(tasks))]
    return until_one_fails(start(command, hosts))


def ray(folder: Folder, argv: list[str]) -> int:
    """Runs the driver here, with the module of ``ray_module`` as its ray."""
    if argv[:2] == ["job", "stop"]:
        return 0
    path = os.pathsep.join([str(Path(__file__).parent / "ray_module"), os.environ["PYTHONPATH"]])
    driver, where = argv[argv.index("--") + 1 :], _flags(argv)["working-dir"]
    done = subprocess.run(driver, cwd=where, env=os.environ | {"PYTHONPATH": path})
    return int(done.returncode != 0)


def kubectl(folder: Folder, argv: list[str]) -> int:
    """Answers as the API server; ``controller`` runs the pods."""
    verb, *words = [one for one in argv if not one.startswith("--")]
    state = folder.read("jobset.json", {})
    if verb == "create":
        import yaml

        jobset = yaml.safe_load(sys.stdin.read())
        if found := unknown_fields(jobset):
            print(f"unknown fields {found}", file=sys.stderr)
            return 1
        folder.write("jobset.json", {"jobset": jobset, "status": {}, "phases": []})
        command = [sys.executable, __file__, "controller"]
        with (folder.path / "controller.log").open("w") as log:
            [made] = start(command, [{}], stdout=log, stderr=log)
        folder.write("controller.pid", made.pid)
        while not folder.read("jobset.json")["phases"]:
            time.sleep(0.05)
    elif verb == "get" and words[0] == "jobset":
        print(json.dumps({"status": state["status"]}))
    elif verb == "get":
        pods = [
            {"metadata": {"name": f"pod-{i}"}, "status": {"phase": phase}}
            for i, phase in enumerate(state["phases"])
        ]
        print(json.dumps({"items": pods}))
    elif verb == "logs":
        attempt = next(one for one in argv if "restart-attempt" in one).split("=")[-1]
        while "Running" in state["phases"] and int(attempt) == state["status"].get("restarts", 0):
            time.sleep(0.2)
            state = folder.read("jobset.json")
        if "--tail=-1" in argv:
            for file in sorted(folder.path.glob(f"pod-{attempt}-*.log")):
                print(file.read_text())
    elif verb == "delete":
        os.killpg(folder.read("controller.pid"), signal.SIGTERM)
        (folder.path / "jobset.json").unlink()
    return 0


def controller(folder: Folder, argv: list[str]) -> int:
    """Starts the pods' containers as processes, in the repository that stands for the image; again
    after a failure, as JobSet does.
    """
    state = folder.read("jobset.json")
    name, spec = state["jobset"]["metadata"]["name"], state["jobset"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    [volume] = container["volumeMounts"]
    claim = f"={volume['mountPath']}/", f"={folder.path / 'runs'}/"
    command = [one.replace(*claim) for one in [*container["command"], *container["args"]]]
    rules = job["podFailurePolicy"]["rules"]
    mistakes = [code for rule in rules for code in rule["onExitCodes"]["values"]]
    pods: list[subprocess.Popen] = []

    def stop(*_: object) -> None:
        end(pods)
        raise SystemExit(0)

    def report(phase: str, **status: Any) -> None:
        found = {"phases": [phase] * job["completions"], "status": status}
        folder.write("jobset.json", state | found)

    signal.signal(signal.SIGTERM, stop)
    for attempt in range(spec["failurePolicy"]["maxRestarts"] + 1):
        # all pods are on this machine: process 0's name becomes the loopback address
        own = f"{name}-workers-0-0.{name}:8476", f"127.0.0.1:{free_port()}"
        pods.clear()
        for i in range(job["completions"]):  # the index of a pod is the value of a field
            values = {e["name"]: e.get("value", str(i)).replace(*own) for e in container["env"]}
            with (folder.path / f"pod-{attempt}-{i}.log").open("w") as log:
                where = folder.path / "home" / "mint_jax"
                pods += start(command, [values], cwd=where, stdout=log, stderr=subprocess.STDOUT)
        report("Running", restarts=attempt)
        status = until_one_fails(pods)
        if status == 0:
            report("Succeeded", restarts=attempt, terminalState="Completed")
            return 0
        if status in mistakes:
            break
        report("Failed", restarts=attempt)
    said = [{"type": "Failed", "message": f"a pod ended with status {status}"}]
    report("Failed", restarts=attempt, terminalState="Failed", conditions=said)
    return 1


PARTS = {one.__name__: one for one in (gcloud, sbatch, srun, ray, kubectl, controller)}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    part, *rest = sys.argv[1:]
    here = Folder()
    if part != "controller":
        with (here.path / "calls.jsonl").open("a") as file:
            file.write(json.dumps([part, *rest]) + "\n")
    sys.exit(PARTS[part](here, rest))

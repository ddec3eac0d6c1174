"""What the launchers talk to, on this machine: gcloud, sbatch, srun, kubectl and ray, each as far
as a launcher uses it.

``install`` puts them on a PATH. They write every call to ``calls.jsonl`` of their folder, keep
their state there, and start the processes of "hosts" here, told who they are in the way of the real
one. A folder ``home`` has the repository (``repository``).
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAMES = ("gcloud", "sbatch", "srun", "kubectl", "ray")
FOLDER = "STAND_INS"  # the variable that has their folder


def install(folder: Path, **settings: Any) -> dict[str, str]:
    """The environment in which the stand-ins are found first; settings are read by them."""
    (folder / "bin").mkdir(parents=True)
    for name in NAMES:
        script(
            folder / "bin" / name,
            f'exec {sys.executable} {"" if name == "kubectl" else "-S"} {__file__} {name} "$@"',
        )
    # launchers wait half a minute between two looks
    script(folder / "bin" / "sleep", "exec /bin/sleep 0.05")
    script(folder / "bin" / "python", f'exec {sys.executable} "$@"')
    (folder / "settings.json").write_text(json.dumps(settings))
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("MINT_PROCESS", "MINT_COORDINATOR", "SLURM_", "RAY_", "TPU_"))
    }
    return kept | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        FOLDER: str(folder),
        "PYTHONPATH": str(ROOT),
    }


def repository(home: Path, python: str) -> Path:
    """The repository as a host has it, with a .venv whose python is this line of a shell."""
    (home / "mint_jax" / ".venv" / "bin").mkdir(parents=True)
    script(home / "mint_jax" / ".venv" / "bin" / "python", python)
    for name in ("configs", "launch"):
        (home / "mint_jax" / name).symlink_to(ROOT / name)
    return home / "mint_jax"


def script(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


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
    command: Sequence[str], told: Sequence[dict[str, str]], **options: Any
) -> list[subprocess.Popen]:
    """One process for each host, in groups of their own."""
    return [
        subprocess.Popen(command, env=os.environ | one, start_new_session=True, **options)
        for one in told
    ]


def end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until_one_fails(processes: Sequence[subprocess.Popen]) -> int:
    """The status of the first to fail, whose fellows are then killed."""
    while True:
        statuses = [process.poll() for process in processes]
        if failed := [status for status in statuses if status]:
            end(processes)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return 0
        time.sleep(0.1)


def variables(coordinator: str, hosts: int) -> list[dict[str, str]]:
    return [
        {"MINT_COORDINATOR": coordinator, "MINT_PROCESSES": str(hosts), "MINT_PROCESS": str(i)}
        for i in range(hosts)
    ]


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
        self.settings = json.loads((self.path / "settings.json").read_text())

    def read(self, name: str, default: Any = None) -> Any:
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else default

    def write(self, name: str, value: Any) -> None:
        (self.path / f"{name}.new").write_text(json.dumps(value))
        (self.path / f"{name}.new").replace(self.path / name)


def gcloud(folder: Folder, argv: list[str]) -> int:
    """Setting ``states``: what a queued resource is at each look, a list for each one that is made.
    ``found``: one that was there.
    """
    flags = dict(one[2:].split("=", 1) for one in argv if one.startswith("--") and "=" in one)
    verb, home = argv[3], folder.path / "home"
    made, looks = folder.read("made", 0), folder.read("looks", 0)
    exists = folder.read("exists", folder.settings.get("found", False))
    if verb == "create":
        if exists:
            return 1
        folder.write("made", made + 1)
        folder.write("looks", 0)
        folder.write("exists", True)
    elif verb == "list":
        if exists:
            states = folder.settings["states"][max(made, 1) - 1]
            print(states[min(looks, len(states) - 1)])
            folder.write("looks", looks + 1)
    elif verb == "describe":
        print(folder.settings.get("described", "READY\t2"))
    elif verb == "ssh":
        # Stands for the metadata server, which tells each TPU host the same.
        hosts = start(
            ["bash", "-c", flags["command"]], variables(f"127.0.0.1:{free_port()}", 2), cwd=home
        )
        try:
            return next((status for status in [process.wait() for process in hosts] if status), 0)
        except KeyboardInterrupt:
            end(hosts)  # their terminals are gone
            return 130
    elif verb == "scp":
        _, source, target = argv[4:7]
        shutil.copytree(home / source.split(":")[1], Path(target) / Path(source).name)
    elif verb == "delete":
        folder.write("exists", False)
    else:
        raise SystemExit(f"gcloud: unknown {argv}")
    return 0


def sbatch(folder: Folder, argv: list[str]) -> int:
    """Runs the job at once, in the allocation that was asked for, to its end."""
    flags = dict(one[2:].split("=", 1) for one in argv[: argv.index("--")] if "=" in one)
    batch = next(i for i, one in enumerate(argv) if not one.startswith("--"))
    spooled = shutil.copy(argv[batch], folder.path / "slurm_script")
    port = free_port(61440, 65535)
    allocation = {
        "SLURM_JOB_ID": str(port - 61440 + 4096),
        "SLURM_NTASKS": flags["ntasks"],
        "SLURM_JOB_NUM_NODES": flags["nodes"],
    }
    return subprocess.run(
        ["bash", spooled, *argv[batch + 1 :]], env=os.environ | allocation
    ).returncode


def srun(folder: Folder, argv: list[str]) -> int:
    assert "--kill-on-bad-exit=1" in argv
    command = argv[next(i for i, one in enumerate(argv) if not one.startswith("--")) :]
    tasks = int(os.environ["SLURM_NTASKS"])
    step = {
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": str(tasks),
        "SLURM_LOCALID": "0",
    }
    return until_one_fails(start(command, [step | {"SLURM_PROCID": str(i)} for i in range(tasks)]))


def ray(folder: Folder, argv: list[str]) -> int:
    """Runs the driver here, with the module of ``ray_module`` as its ray."""
    if argv[:2] == ["job", "stop"]:
        return 0
    where = next(one.split("=", 1)[1] for one in argv if one.startswith("--working-dir="))
    path = os.pathsep.join([str(Path(__file__).parent / "ray_module"), os.environ["PYTHONPATH"]])
    return (
        1
        if subprocess.run(
            argv[argv.index("--") + 1 :], cwd=where, env=os.environ | {"PYTHONPATH": path}
        ).returncode
        else 0
    )


def kubectl(folder: Folder, argv: list[str]) -> int:
    """The API server's part; ``controller`` runs the pods. Setting ``pending``: pods that never
    start.
    """
    verb, *words = [one for one in argv if not one.startswith("--")]
    state = folder.read("jobset.json")
    if verb == "create":
        import yaml

        jobset = yaml.safe_load(sys.stdin.read())
        if found := unknown_fields(jobset):
            print(f"unknown fields {found}", file=sys.stderr)
            return 1
        folder.write("jobset.json", {"jobset": jobset, "status": {}, "phases": []})
        with (folder.path / "controller.log").open("w") as log:
            made = subprocess.Popen(
                [sys.executable, __file__, "controller"],
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        folder.write("controller.pid", made.pid)
        while not folder.read("jobset.json")["phases"]:
            time.sleep(0.05)
    elif state is None:
        print("not found", file=sys.stderr)
        return 1
    elif verb == "get" and words[0] == "jobset":
        print(json.dumps({"status": state["status"]}))
    elif verb == "get":
        pods = [
            {"metadata": {"name": f"pod-{i}"}, "status": {"phase": phase}}
            for i, phase in enumerate(state["phases"])
        ]
        for pod in pods[:1] if folder.settings.get("pending") else []:
            pod["status"]["conditions"] = [
                {"type": "PodScheduled", "message": "0/3 nodes are available"}
            ]
        print(json.dumps({"items": pods}))
    elif verb == "logs":
        attempt = next(one for one in argv if "restart-attempt" in one).split("=")[-1]
        while "Running" in folder.read("jobset.json")["phases"] and int(attempt) == folder.read(
            "jobset.json"
        )["status"].get("restarts", 0):
            time.sleep(0.2)
        if "--tail=-1" in argv:
            for file in sorted(folder.path.glob(f"pod-{attempt}-*.log")):
                print(file.read_text())
    elif verb == "delete":
        os.killpg(folder.read("controller.pid"), signal.SIGTERM)
        (folder.path / "jobset.json").unlink()
    else:
        raise SystemExit(f"kubectl: unknown {argv}")
    return 0


def controller(folder: Folder, argv: list[str]) -> int:
    """Starts the pods' containers as processes, in the repository that stands for the image; again
    after a failure, as JobSet does.
    """
    state = folder.read("jobset.json")
    spec = state["jobset"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    [volume] = container["volumeMounts"]
    local = str(folder.path / "runs")  # stands for the claim
    command = [
        one.replace(f"={volume['mountPath']}/", f"={local}/")
        for one in [*container["command"], *container["args"]]
    ]
    mistakes = [
        code for rule in job["podFailurePolicy"]["rules"] for code in rule["onExitCodes"]["values"]
    ]
    pods: list[subprocess.Popen] = []

    def stop(*_: object) -> None:
        end(pods)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)

    def report(phase: str, **status: Any) -> None:
        folder.write(
            "jobset.json", state | {"phases": [phase] * job["completions"], "status": status}
        )

    for attempt in range(spec["failurePolicy"]["maxRestarts"] + 1):
        if folder.settings.get("pending"):
            report("Pending")
            time.sleep(600)
        # All pods are on this machine: process 0's name becomes the loopback address, with a port
        # of its own.
        name = f"{state['jobset']['metadata']['name']}-workers-0-0.{state['jobset']['metadata']['name']}:8476"  # noqa: E501
        address = f"127.0.0.1:{free_port()}"
        told = []
        for i in range(job["completions"]):
            values = {
                one["name"]: one.get("value", str(i)).replace(name, address)
                for one in container["env"]
            }
            assert all(
                "completion-index" in one["valueFrom"]["fieldRef"]["fieldPath"]
                for one in container["env"]
                if "value" not in one
            )
            told.append(values)
        pods[:] = []
        for i, one in enumerate(told):
            with (folder.path / f"pod-{attempt}-{i}.log").open("w") as log:
                pods += start(
                    command,
                    [one],
                    cwd=folder.path / "home" / "mint_jax",
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        folder.write("pods.json", [pod.pid for pod in pods])
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


def main(name: str, argv: list[str]) -> int:
    folder = Folder()
    if name != "controller":
        with (folder.path / "calls.jsonl").open("a") as file:
            file.write(json.dumps([name, *argv]) + "\n")
    parts = {
        "gcloud": gcloud,
        "sbatch": sbatch,
        "srun": srun,
        "ray": ray,
        "kubectl": kubectl,
        "controller": controller,
    }
    return parts[name](folder, argv)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1], sys.argv[2:]))

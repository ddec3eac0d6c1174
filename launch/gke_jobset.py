"""Runs one job on every host of a TPU slice, or on GPU or CPU nodes, of a GKE cluster with JobSet.

    .venv/bin/python launch/gke_jobset.py --name=run1 --image=IMAGE --hosts=4
    --accelerator=tpu-v5p-slice --topology=2x2x4 \\
        -- --config=configs/dpo/smollm2.py --workdir=/runs/dpo --config.mesh.fsdp=16

Creates ``gke_jobset.yaml`` with these values, prints the logs and deletes it. On TPUs JAX reads the
hosts from GKE's variables; elsewhere a process has its pod's index and the first pod's name from
the JobSet. Needs kubectl with a context of the cluster.

Status: 0 if the job succeeded, 1 if the job or a host failed, 2 for a mistake in the options.
Ctrl-C deletes the JobSet.
"""

import argparse
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import command
import yaml
from command import Failed, Parser

TEMPLATE = Path(__file__).with_name("gke_jobset.yaml")
PORT = 8476
STARTS_POLL_S, ENDS_POLL_S = 5, 1


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses this program's options and, after ``--``, those of ``mint_jax.launch``.

    Raises:
        Failed: an option is missing or contradicts another.
    """
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--name", metavar="NAME", help="of the JobSet; needed, as are image and hosts")
    add("--image", help="this repository with its .venv, which is its working directory")
    add("--hosts", metavar="N", type=int, help="pods, one for each host")
    add("--accelerator", help="of TPU nodes, such as tpu-v5p-slice")
    add("--topology", help="of the TPU slice, such as 2x2x4")
    cpus = "of a node; without them and --accelerator, CPU nodes"
    add("--gpus", type=int, default=0, help=cpus)
    claim = "PersistentVolumeClaim that many nodes may write, seen at /runs"
    add("--claim", default="mint-jax-runs", help=claim)
    add("--namespace", default="default")
    add("--restarts", type=int, default=3, help="after a failure; the job resumes")
    wait = "seconds until all pods have to run, images and new nodes included"
    add("--wait", type=int, default=3600, help=wait)
    add("--keep", action="store_true", help="leave the JobSet with its logs")
    dry_run = "print the JobSet, every command and each host's variables"
    add("--dry_run", action="store_true", help=dry_run)
    needed = {"name": "my-run", "image": "REGISTRY/mint_jax:TAG", "hosts": "2"}
    args, given, job = parser.parse(argv, needed, "--config=FILE --workdir=/runs/NAME")
    if not given["workdir"].startswith("/runs/"):
        raise Failed("--workdir is outside /runs, which all hosts see: give --workdir=/runs/NAME")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        raise Failed(
            f"--name={args.name}: expected up to 40 lower-case letters, digits and hyphens, a"
            " letter first"
        )
    if args.hosts < 1:
        raise Failed(f"--hosts={args.hosts}: expected at least 1")
    if bool(args.accelerator) != bool(args.topology):
        raise Failed(
            "--accelerator and --topology describe a TPU slice together: give both, or neither for"
            " GPU and CPU nodes"
        )
    if args.accelerator and args.gpus:
        raise Failed("--gpus with --accelerator: a node has TPUs or GPUs, give one of them")
    if args.topology and (
        not re.fullmatch(r"\d+(x\d+){1,2}", args.topology)
        or chips(args) * args.hosts != slice_chips(args)
    ):
        raise Failed(
            f"--topology={args.topology} is not a slice that --hosts={args.hosts} share evenly:"
            " expected AxB or AxBxC chips"
        )
    return args, job


def slice_chips(args: argparse.Namespace) -> int:
    return math.prod(int(side) for side in args.topology.split("x"))


def chips(args: argparse.Namespace) -> int:
    """Returns the number of chips of a host."""
    return slice_chips(args) // args.hosts


def jobset(args: argparse.Namespace, job: list[str]) -> dict[str, Any]:
    """Returns the JobSet to create."""
    out = yaml.safe_load(TEMPLATE.read_text())
    out["metadata"] |= {"name": args.name, "namespace": args.namespace}
    out["spec"]["failurePolicy"]["maxRestarts"] = args.restarts
    [workers] = out["spec"]["replicatedJobs"]
    pods = workers["template"]["spec"]
    pods["parallelism"] = pods["completions"] = args.hosts
    pod = pods["template"]["spec"]
    [container] = pod["containers"]
    container |= {"image": args.image, "args": [f"--distributed={args.hosts}", *job]}
    pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = args.claim
    if args.accelerator:
        selected = {"accelerator": args.accelerator, "topology": args.topology}
        pod["nodeSelector"] = {f"cloud.google.com/gke-tpu-{k}": v for k, v in selected.items()}
        container["resources"]["limits"] = {"google.com/tpu": chips(args)}
        return out
    del out["metadata"]["annotations"], pod["nodeSelector"], container["resources"]
    if args.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": args.gpus}}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    first = f"{args.name}-{workers['name']}-0-0.{args.name}:{PORT}"
    container["env"] = [
        {"name": "MINT_COORDINATOR", "value": first},
        {"name": "MINT_PROCESSES", "value": str(args.hosts)},
        {"name": "MINT_PROCESS", "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]
    return out


def commands(args: argparse.Namespace, attempt: int = 0, tail: int = -1) -> dict[str, list[str]]:
    """Returns all commands of the launcher; logs have the last lines, or all, of one attempt's
    pods.
    """
    kubectl = ["kubectl", f"--namespace={args.namespace}"]
    labels = {"jobset-name": args.name, "restart-attempt": attempt}
    of = "--selector=" + ",".join(f"jobset.sigs.k8s.io/{k}={v}" for k, v in labels.items())
    logs = [*kubectl, "logs", of, "--container=mint-jax", "--prefix"]
    return {
        "create": [*kubectl, "create", "--filename=-"],
        "pods": [*kubectl, "get", "pods", of, "--output=json"],
        "logs": [*logs, f"--tail={tail}", "--follow", f"--max-log-requests={args.hosts}"],
        "status": [*kubectl, "get", "jobset", args.name, "--output=json"],
        "delete": [*kubectl, "delete", "jobset", args.name, "--wait=true"],
    }


def show(args: argparse.Namespace, job: list[str]) -> None:
    created = jobset(args, job)
    print(yaml.safe_dump(created, sort_keys=False), end="")
    notes = {
        "create": "the above",
        "pods": f"until all run, {args.wait} s at most",
        "status": "until Completed or Failed",
    }
    for name, each in commands(args).items():
        if name != "delete" or not args.keep:
            print(f"# {shlex.join(each)}" + (f"  # {notes[name]}" if name in notes else ""))
    for host in range(args.hosts):
        shown = (
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES from GKE; coordinator: the first of these,"
            " port 8482"
        )
        if not args.accelerator:
            pod = created["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            env = pod["containers"][0]["env"]
            shown = " ".join(f"{one['name']}={one.get('value', host)}" for one in env)
        print(f"# host {host}: {shown}")


def follow(args: argparse.Namespace) -> None:
    """Prints the pods' logs until the JobSet ends, restarts included.

    Raises:
        Failed: the JobSet failed, or its pods did not all start in time.
    """
    attempt, tail = -1, -1
    while True:
        state = answer(commands(args)["status"]).get("status", {})
        ended = state.get("terminalState")
        if state.get("restarts", 0) > attempt:
            attempt, tail = state.get("restarts", 0), -1
            if not ended:
                started(args, attempt)
        if not ended or tail == -1:
            # until all pods or the connection end
            subprocess.run(commands(args, attempt, tail)["logs"])
            tail = 0
        if ended == "Completed":
            return
        if ended:
            whys = [
                one.get("message") for one in state.get("conditions", []) if one["type"] == ended
            ]
            why = next(filter(None, whys), "see the log above")
            raise Failed(f"the JobSet {args.name} failed after {attempt} restarts: {why}", 1)
        time.sleep(ENDS_POLL_S)


def started(args: argparse.Namespace, attempt: int) -> None:
    """Waits until all pods run, or one has ended.

    Raises:
        Failed: a timeout, with Kubernetes' report on the first missing pod.
    """
    until = time.monotonic() + args.wait
    while True:
        pods = answer(commands(args, attempt)["pods"])["items"]
        phases = [pod["status"].get("phase") for pod in pods]
        if (len(pods) >= args.hosts and "Pending" not in phases) or "Failed" in phases:
            return
        if time.monotonic() > until:
            which = f"{len(pods)} pods were made"
            if "Pending" in phases:
                late = pods[phases.index("Pending")]
                said = (one.get("message") for one in late["status"].get("conditions", []))
                words = "; ".join(filter(None, said)) or "Pending"
                which = f"{late['metadata']['name']}: {words}"
            raise Failed(f"not all {args.hosts} hosts came in {args.wait} s; {which}", 1)
        time.sleep(STARTS_POLL_S)


def answer(asked: list[str]) -> dict[str, Any]:
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{shlex.join(asked)}: {done.stderr.strip()}", 1)
    return json.loads(done.stdout)


def main(argv: list[str]) -> None:
    args, job = options(argv)
    if args.dry_run:
        show(args, job)
        return
    if shutil.which("kubectl") is None:
        raise Failed(
            "kubectl is not installed: see kubernetes.io, and take the credentials of the cluster"
        )
    run, created = commands(args), yaml.safe_dump(jobset(args, job), sort_keys=False)
    if subprocess.run(run["create"], input=created, text=True).returncode:
        raise Failed(
            "the JobSet was not created (above): is JobSet installed, and is the name free?", 1
        )
    try:
        follow(args)
    finally:
        delete = shlex.join(run["delete"])
        if args.keep:
            print(f"left; delete it with: {delete}", file=sys.stderr)
        elif subprocess.run(run["delete"]).returncode:
            print(
                f"error: the JobSet was not deleted and may hold its nodes: {delete}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    command.run(main)

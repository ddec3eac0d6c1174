"""Runs one job on several nodes of a Ray cluster, one process for each.

    python launch/ray_job.py --address=http://HEAD:8265 --nodes=2 --gpus=8
    --directory=/shared/mint_jax \\
        -- --config=configs/dpo/smollm2.py --workdir=/shared/runs/dpo --config.mesh.fsdp=16

Submits itself with ``ray job submit``. Needs only Ray, here and on the cluster; every node has this
repository with its .venv in DIRECTORY. The driver, inside the cluster, takes one share of resources
on each node, asks the first for its address and a free port, and starts the command everywhere with
them. On TPU nodes JAX reads them from the TPU's metadata.

Status: 0 if the job succeeded, 1 if not (Ray reports no more), 2 for a mistake in the options.
Ctrl-C stops the job.
"""

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import command
from command import Failed, Parser

GRACE_S = 150  # seconds for the other processes to notice a failure: heartbeats take 100 s
MISTAKE = 2  # status of mint_jax.launch for a mistake, which a restart would repeat


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses this program's options and, after ``--``, those of ``mint_jax.launch``.

    Raises:
        Failed: an option is missing or invalid.
    """
    parser = Parser(__doc__)
    add = parser.add_argument
    address = "of the cluster's job server: http://HEAD:8265; needed, as are nodes and directory"
    add("--address", help=address)
    add("--nodes", type=int, help="one process on each")
    directory = "this repository with its .venv, at the same absolute path on every node"
    add("--directory", help=directory)
    add("--gpus", type=int, default=0, help="of a node")
    add("--tpus", type=int, default=0, help="chips of a node")
    add("--wait", type=int, default=600, help="seconds limit until the nodes are free")
    add("--restarts", type=int, default=0, help="after a failure; the job resumes")
    add("--dry_run", action="store_true", help="print every command and each node's variables")
    add("--driver", action="store_true", help=argparse.SUPPRESS)
    needed = {"address": "http://HEAD:8265", "nodes": "2", "directory": "/shared/mint_jax"}
    example = "--config=FILE --workdir=FOLDER, one that all nodes see"
    args, _, job = parser.parse(argv, needed, example)
    if args.nodes < 1:
        raise Failed(f"--nodes={args.nodes}: expected at least 1")
    if not args.directory.startswith("/"):
        raise Failed(
            f"--directory={args.directory}: expected an absolute path, the same on every node"
        )
    if args.gpus and args.tpus:
        raise Failed("--gpus and --tpus: a node has one or the other")
    if not args.address.startswith(("http://", "https://")):
        raise Failed(
            f"--address={args.address}: expected the job server's, such as http://HEAD:8265"
        )
    return args, job


def job_command(args: argparse.Namespace, job: list[str]) -> list[str]:
    """Returns the command that runs on every node, in DIRECTORY."""
    return [".venv/bin/python", "-u", "-m", "mint_jax.launch", f"--distributed={args.nodes}", *job]


def variables(args: argparse.Namespace, coordinator: str, process: int) -> dict[str, str]:
    if args.tpus:
        return {}
    return {
        "MINT_COORDINATOR": coordinator,
        "MINT_PROCESSES": str(args.nodes),
        "MINT_PROCESS": str(process),
    }


def submission(args: argparse.Namespace, argv: list[str], name: str) -> list[str]:
    where = [f"--working-dir={Path(__file__).parent}", f"--submission-id={name}"]
    driver = ["python", Path(__file__).name, "--driver", *argv]
    return ["ray", "job", "submit", f"--address={args.address}", *where, "--", *driver]


def show(args: argparse.Namespace, argv: list[str], job: list[str]) -> None:
    print(shlex.join(submission(args, [one for one in argv if one != "--dry_run"], "NAME")))
    print(
        f"# its driver takes {share(args)} on each of {args.nodes} nodes, which it waits for"
        f" {args.wait} s, and runs in {args.directory}:"
    )
    again = f"once more after a failure: {args.restarts} times"
    print(f"# {shlex.join(job_command(args, job))}  # {again}")
    for i in range(args.nodes):
        own = variables(args, "ADDRESS_OF_NODE_0:FREE_PORT", i)
        shown = " ".join(f"{key}={value}" for key, value in own.items())
        print(f"# node {i}: {shown or 'process numbers and coordinator from the TPU metadata'}")


def submit(args: argparse.Namespace, argv: list[str]) -> None:
    """Submits the job, prints its output and waits until it succeeds.

    Raises:
        Failed: the job failed, or Ray is not available.
    """
    if shutil.which("ray") is None:
        raise Failed(
            "ray is not installed here: pip install 'ray[default]' of the cluster's version"
        )
    name = f"mint_jax-{uuid.uuid4().hex[:8]}"
    try:
        status = subprocess.run(submission(args, argv, name)).returncode
    except KeyboardInterrupt:
        subprocess.run(["ray", "job", "stop", f"--address={args.address}", name])
        raise
    if status:
        raise Failed(f"the job {name} failed (above)", 1)


class Node:
    """Actor on one node that starts the process there and watches it."""

    process: subprocess.Popen | None = None

    def address(self) -> str:
        """Returns this node's address with a free port."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, command: list[str], directory: str, environment: dict[str, str]) -> int:
        """Runs the process and returns its status; its output is the actor's, which Ray shows with
        the node's address.
        """
        own = {"RAY_ADDRESS": "auto"}  # a fleet starts its engines on this cluster
        self.process = subprocess.Popen(command, cwd=directory, env=os.environ | own | environment)
        return self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()


def share(args: argparse.Namespace) -> dict[str, float]:
    """Returns the process's share of a node's resources."""
    wanted = {"CPU": 1, "GPU": args.gpus, "TPU": args.tpus}
    return {name: float(count) for name, count in wanted.items() if count}


def attempt(args: argparse.Namespace, job: list[str]) -> int:
    """Runs the job once on its own nodes; returns the status of the first process to fail.

    Raises:
        Failed: the nodes were not available.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = share(args)
    group = placement_group([wanted] * args.nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(args.wait):
            alive = []
            for one in filter(lambda one: one["Alive"], ray.nodes()):
                have = {key: one["Resources"][key] for key in wanted if key in one["Resources"]}
                alive.append(f"{one['NodeManagerAddress']} {have}")
            raise Failed(
                f"{args.nodes} nodes with {wanted} free did not come in {args.wait} s; alive are:"
                f" {'; '.join(alive)}",
                1,
            )
        taken = {"num_cpus": 1, "num_gpus": args.gpus, "max_concurrency": 2}
        taken["resources"] = {"TPU": args.tpus} if args.tpus else None
        nodes = []
        for i in range(args.nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            nodes.append(ray.remote(Node).options(**taken, scheduling_strategy=place).remote())
        coordinator = ray.get(nodes[0].address.remote(), timeout=args.wait)
        how = job_command(args, job), args.directory
        running = [
            node.run.remote(*how, variables(args, coordinator, i)) for i, node in enumerate(nodes)
        ]
        return watch(running, nodes)
    finally:
        remove_placement_group(group)


def say(message: str) -> None:
    print(f"[ray_job] {message}", file=sys.stderr, flush=True)


def watch(running: list[Any], nodes: list[Any]) -> int:
    """Waits for all processes; after a failure waits ``GRACE_S`` longer, then stops the others."""
    import ray

    waiting, first, until = {ref: i for i, ref in enumerate(running)}, 0, None
    try:
        while waiting and (until is None or time.monotonic() < until):
            done, _ = ray.wait(list(waiting), timeout=5)
            for ref in done:
                i = waiting.pop(ref)
                try:
                    status = ray.get(ref)
                    said = f"ended with status {status}"
                except ray.exceptions.RayError as error:
                    status, said = 1, f"is lost: {str(error).splitlines()[0]}"
                if status and not first:
                    first, until = status, time.monotonic() + GRACE_S
                    say(f"process {i} {said}: the others have {GRACE_S} s to end")
        return first
    finally:
        for i in waiting.values():
            nodes[i].stop.remote()
        if waiting:
            time.sleep(12)


def drive(args: argparse.Namespace, job: list[str]) -> int:
    """Runs the job inside the cluster, again after a failure that is not a mistake."""
    import ray

    ray.init()
    for number in range(1, args.restarts + 2):
        status = attempt(args, job)
        say(f"the job ended with status {status}, attempt {number} of {args.restarts + 1}")
        if status in (0, MISTAKE):
            break
    return status


def main(argv: list[str]) -> None:
    args, job = options(argv)
    if args.driver:
        sys.exit(drive(args, job))
    if args.dry_run:
        show(args, argv, job)
    else:
        submit(args, argv)


if __name__ == "__main__":
    command.run(main)

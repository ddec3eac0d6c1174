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
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

GRACE_S = 150  # seconds for the other processes to notice a failure: heartbeats take 100 s
MISTAKE = 2  # status of mint_jax.launch for a mistake, which a restart would repeat


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failed(message, 2)


class Failed(Exception):
    """Error that ends the program, with a message and a status."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses this program's options and, after ``--``, those of ``mint_jax.launch``.

    Raises:
        Failed: an option is missing or invalid.
    """
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--address",
        help="of the cluster's job server: http://HEAD:8265; needed, as are nodes and directory",
    )
    parser.add_argument("--nodes", type=int, help="one process on each")
    parser.add_argument(
        "--directory",
        help="this repository with its .venv, at the same absolute path on every node",
    )
    parser.add_argument("--gpus", type=int, default=0, help="of a node")
    parser.add_argument("--tpus", type=int, default=0, help="chips of a node")
    parser.add_argument(
        "--wait", type=int, default=600, help="seconds limit until the nodes are free"
    )
    parser.add_argument("--restarts", type=int, default=0, help="after a failure; the job resumes")
    parser.add_argument(
        "--dry_run", action="store_true", help="print every command and each node's variables"
    )
    parser.add_argument("--driver", action="store_true", help=argparse.SUPPRESS)
    before, after = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    args = parser.parse_args(before)
    for needed, example in (
        ("address", "http://HEAD:8265"),
        ("nodes", "2"),
        ("directory", "/shared/mint_jax"),
    ):
        if getattr(args, needed) is None:
            raise Failed(f"--{needed} is missing: give --{needed}={example}", 2)
    for needed in ("config", "workdir"):
        if not any(one.startswith(f"--{needed}=") for one in after):
            raise Failed(
                f"no {needed} behind --: give -- --config=FILE --workdir=FOLDER, one that all nodes see",  # noqa: E501
                2,
            )
    if args.nodes < 1:
        raise Failed(f"--nodes={args.nodes}: expected at least 1", 2)
    if not args.directory.startswith("/"):
        raise Failed(
            f"--directory={args.directory}: expected an absolute path, the same on every node", 2
        )
    if args.gpus and args.tpus:
        raise Failed("--gpus and --tpus: a node has one or the other", 2)
    if not args.address.startswith(("http://", "https://")):
        raise Failed(
            f"--address={args.address}: expected the job server's, such as http://HEAD:8265", 2
        )
    return args, after


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
    driver = ["python", Path(__file__).name, "--driver", *argv]
    where = [
        f"--address={args.address}",
        f"--working-dir={Path(__file__).parent}",
        f"--submission-id={name}",
    ]
    return ["ray", "job", "submit", *where, "--", *driver]


def show(args: argparse.Namespace, argv: list[str], job: list[str]) -> None:
    print(shlex.join(submission(args, [one for one in argv if one != "--dry_run"], "NAME")))
    print(
        f"# its driver takes {share(args)} on each of {args.nodes} nodes, which it waits for {args.wait} s, and runs in {args.directory}:"  # noqa: E501
    )
    print(
        f"# {shlex.join(job_command(args, job))}  # once more after a failure: {args.restarts} times"  # noqa: E501
    )
    for i in range(args.nodes):
        shown = " ".join(
            f"{key}={value}"
            for key, value in variables(args, "ADDRESS_OF_NODE_0:FREE_PORT", i).items()
        )
        print(
            f"# node {i}: {shown or 'process numbers and coordinator from the metadata of the TPU'}"
        )


def submit(args: argparse.Namespace, argv: list[str]) -> None:
    """Submits the job, prints its output and waits until it succeeds.

    Raises:
        Failed: the job failed, or Ray is not available.
    """
    if shutil.which("ray") is None:
        raise Failed(
            "ray is not installed here: pip install 'ray[default]' of the cluster's version", 2
        )
    name = f"mint_jax-{uuid.uuid4().hex[:8]}"
    try:
        status = subprocess.run(submission(args, argv, name)).returncode
    except KeyboardInterrupt:
        subprocess.run(["ray", "job", "stop", f"--address={args.address}", name])
        raise
    if status:
        raise Failed(f"the job {name} failed (above)")


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
    return (
        {"CPU": 1.0}
        | ({"GPU": float(args.gpus)} if args.gpus else {})
        | ({"TPU": float(args.tpus)} if args.tpus else {})
    )


def attempt(args: argparse.Namespace, job: list[str]) -> int:
    """Runs the job once on its own nodes; returns the status of the first process to fail.

    Raises:
        Failed: the nodes were not available.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([share(args)] * args.nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(args.wait):
            free = [
                (one["NodeManagerAddress"], one["Resources"]) for one in ray.nodes() if one["Alive"]
            ]
            alive = [
                f"{address} { ({key: have[key] for key in share(args) if key in have}) }"
                for address, have in free
            ]
            raise Failed(
                f"{args.nodes} nodes with {share(args)} free did not come in {args.wait} s; alive are: {'; '.join(alive)}"  # noqa: E501
            )
        taken = {
            "num_cpus": 1,
            "num_gpus": args.gpus,
            "resources": {"TPU": args.tpus} if args.tpus else None,
            "max_concurrency": 2,
        }
        nodes = []
        for i in range(args.nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            nodes.append(ray.remote(Node).options(**taken, scheduling_strategy=place).remote())
        coordinator = ray.get(nodes[0].address.remote(), timeout=args.wait)
        command = job_command(args, job)
        return watch(
            [
                node.run.remote(command, args.directory, variables(args, coordinator, i))
                for i, node in enumerate(nodes)
            ],
            nodes,
        )
    finally:
        remove_placement_group(group)


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
                    print(
                        f"[ray_job] process {i} {said}: the others have {GRACE_S} s to end",
                        file=sys.stderr,
                        flush=True,
                    )
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
    for number in range(args.restarts + 1):
        status = attempt(args, job)
        print(
            f"[ray_job] the job ended with status {status}, attempt {number + 1} of {args.restarts + 1}",  # noqa: E501
            file=sys.stderr,
            flush=True,
        )
        if status in (0, MISTAKE):
            break
    return status


def main(argv: list[str]) -> int:
    args, job = options(argv)
    if args.driver:
        return drive(args, job)
    if args.dry_run:
        show(args, argv, job)
    else:
        submit(args, argv)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(130)

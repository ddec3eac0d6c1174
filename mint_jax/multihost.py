"""Several processes as one program: joining, agreeing on decisions of process 0, and reading arrays
that span processes. In a single process all of this does nothing.

Every process runs the same code and makes the same device calls in the same order, as JAX requires.
Process 0 decides whatever may differ between hosts, and the others receive it through ``agree``,
over the coordinator's key-value store; or it sends messages (``post``, ``take``). Process 0 writes
files; all write checkpoints, on a folder that all hosts share.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the key-value store of jax.distributed has no public name
from jax.sharding import NamedSharding, PartitionSpec

from mint_jax import host
from mint_jax.errors import UserError

# for machines that JAX does not recognise: host:port of process 0, number of processes, own index
VARIABLES = ("MINT_COORDINATOR", "MINT_PROCESSES", "MINT_PROCESS")
POLL_S = 5  # between looks at the others; a wait has no limit, since a reward may take hours
LEAVE_S = 10  # seconds a failing process 0 waits for others that fail with it
BARRIER_S = 3600  # seconds to wait for the slowest process
FORGET_EVERY = 1024  # agreements kept in the coordinator's memory
POSTS = 256  # messages dropped together once all have taken them; at most twice as many wait
FAILED = "mint/failed"

T = TypeVar("T")
# counters that name keys and barriers, equal in every process
_agreements, _meetings, _posts = itertools.count(), itertools.count(), itertools.count()
_posting = threading.Lock()  # several threads of process 0 post


def join(
    environment: Mapping[str, str] = os.environ,
    detect: bool = False,
    expected: int = 0,
    timeout_s: int = 300,
) -> None:
    """Joins the other processes, before JAX looks for devices. Raises ``UserError``: variables are
    missing or wrong, nothing is detected, the coordinator is unreachable, or the number of
    processes is not ``expected``. Exits with one line if the others do not come in time.

    Args:
        environment: source of ``VARIABLES``; all three or none are set.
        detect: without them, joins the TPU pod, SLURM or MPI job that JAX detects.
        expected: number of started processes; 0 accepts any number.
    """
    settings = _settings(environment)
    if settings is None and not detect:
        return
    options: dict[str, Any] = {}
    where = "the detected cluster"
    if settings is not None:
        coordinator, processes, process = settings
        where = f"{coordinator} as process {process} of {processes}"
        options = {
            "coordinator_address": coordinator,
            "num_processes": processes,
            "process_id": process,
            "cluster_detection_method": "deactivate",
        }
        host, _, port = coordinator.rpartition(":")
        if host in ("localhost", "127.0.0.1"):  # JAX would listen on every interface
            options["coordinator_bind_address"] = f"127.0.0.1:{port}"
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)
    # JAX aborts with a stack trace after its own timeout: exit earlier, with one line
    late = _not_joined(where, f"the others did not come in {timeout_s} s")
    watch = threading.Timer(timeout_s, _give_up, [late])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(**options, initialization_timeout=timeout_s + 60)
    except ValueError as error:  # JAX names the first value that it could not find
        raise UserError(
            f"--distributed found no TPU pod, SLURM or MPI job here ({str(error).rstrip('.')}): set"
            f" {', '.join(VARIABLES)} on every host, or leave --distributed out for a single"
            " process"
        ) from None
    except RuntimeError as error:
        raise UserError(_not_joined(where, str(error).splitlines()[0])) from None
    finally:
        watch.cancel()
    require_same("the number of processes", count)
    # otherwise each would run the whole job in one workdir
    if expected and count() != expected:
        raise UserError(
            f"{count()} processes joined, and --distributed={expected} expected {expected}: give"
            f" the number that is started, or see why {where} has another one"
        )


def topology() -> str:
    """Returns every host with its number of devices, as one log line. Raises ``UserError`` in every
    process if the numbers differ.
    """

    def compare(hosts: list[Any]) -> str:
        for i, (name, devices) in enumerate(hosts):
            if devices != hosts[0][1]:
                raise UserError(
                    f"process {i} on {name} has {devices} devices, process 0 on {hosts[0][0]} has"
                    f" {hosts[0][1]}: see whether that host's accelerators are healthy and given to"
                    " this process"
                )
        placed = ", ".join(f"{i} on {name}" for i, (name, _) in enumerate(hosts))
        return f"{count()} processes with {hosts[0][1]} devices each: {placed}"

    return _together("the hosts", [platform.node(), jax.local_device_count()], compare)


def _not_joined(where: str, reason: str) -> str:
    return (
        f"could not join {where} ({reason}): start every process with the same MINT_COORDINATOR and"
        " MINT_PROCESSES and a MINT_PROCESS of its own, and see that the coordinator's port is"
        " free and reachable"
    )


def _give_up(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _settings(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Returns coordinator, number of processes and own index; None without variables."""
    found = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not found:
        return None
    if lacking := [name for name in VARIABLES if name not in found]:
        raise UserError(
            f"{lacking[0]} is not set but {next(iter(found))} is: set all of"
            f" {', '.join(VARIABLES)}, or none for one process"
        )
    coordinator = found["MINT_COORDINATOR"]
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"MINT_COORDINATOR is {coordinator!r}; expected host:port of process 0, such as"
            " 10.0.0.2:8476"
        )
    for name in ("MINT_PROCESSES", "MINT_PROCESS"):
        if not found[name].isdecimal():
            raise UserError(f"{name} is {found[name]!r}; expected a whole number")
    processes, process = int(found["MINT_PROCESSES"]), int(found["MINT_PROCESS"])
    if process >= processes:
        raise UserError(
            f"MINT_PROCESS is {process}; with MINT_PROCESSES={processes} expected 0 to"
            f" {processes - 1}"
        )
    return coordinator, processes, process


def count() -> int:
    """Returns the number of joined processes, without asking a device."""
    return distributed.global_state.num_processes


def index() -> int:
    """Returns the index of this process."""
    return distributed.global_state.process_id


def is_main() -> bool:
    """Returns true in process 0, which decides, prints and writes files."""
    return index() == 0


def agree(name: str, make: Callable[[], T]) -> T:
    """Returns ``make()`` of process 0, a JSON value, in every process; all call this in the same
    order. If it raises, process 0 raises the same, the others the same ``UserError``, or
    RuntimeError for another exception.
    """
    if count() == 1:
        return make()
    number = next(_agreements)
    if number and number % FORGET_EVERY == 0:
        barrier("forget")  # no process waits for an old one now
        if is_main():
            _client().key_value_delete(f"mint/{number // FORGET_EVERY - 1}")
    key = f"mint/{number // FORGET_EVERY}/{number}"
    return _decide(key, name, make) if is_main() else _hear(key, name)


def _decide(key: str, name: str, make: Callable[[], T]) -> T:
    message: dict[str, Any] = {"name": name}
    try:
        value = make()
        text = json.dumps(message | {"value": value})
    except BaseException as error:
        kind = "mistake" if isinstance(error, UserError) else "failure"
        message[kind] = str(error) or type(error).__name__
        _client().key_value_set(key, json.dumps(message))
        raise
    _client().key_value_set(key, text)
    return value


def _hear(key: str, name: str) -> Any:
    message = json.loads(_wait_for(key))
    if message["name"] != name:
        raise RuntimeError(
            f"process {index()} asks for {name!r} where process 0 decided {message['name']!r}:"
            " their programs differ"
        )
    if "mistake" in message:
        raise UserError(message["mistake"])
    if "failure" in message:
        raise RuntimeError(f"process 0 failed at {name!r}: {message['failure']}")
    return message["value"]


def _wait_for(key: str, kind: str = "") -> Any:
    """Returns the value of a key once another process has set it."""
    while True:
        try:
            return getattr(_client(), f"blocking_key_value_get{kind}")(key, POLL_S * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if failed := _client().key_value_dir_get(FAILED):
            try:
                return getattr(_client(), f"key_value_try_get{kind}")(key)  # set just before that
            except jax.errors.JaxRuntimeError:
                raise RuntimeError(f"another process failed: {failed[0][1]}") from None


def post(message: bytes) -> None:
    """Sends a message from process 0, any thread, to every other process, in order."""
    # On loopback up to 10 KB arrive after 0.35 ms, 1 MB after 11. ``broadcast_one_to_all`` is
    # faster for 1 MB (4 ms), but it waits behind device work and needs all shapes in advance.
    with _posting:
        number = next(_posts)
        block = number // POSTS
        if number % POSTS == 0 and block > 1:
            for other in range(1, count()):
                _wait_for(f"mint/taken/{block - 2}/{other}")
            for folder in ("post", "taken"):
                _client().key_value_delete(f"mint/{folder}/{block - 2}")
        _client().key_value_set_bytes(f"mint/post/{block}/{number}", message)


def take() -> bytes:
    """Returns the next message of process 0. Raises ``RuntimeError``: a process failed."""
    number = next(_posts)
    message = _wait_for(f"mint/post/{number // POSTS}/{number}", "_bytes")
    if (number + 1) % POSTS == 0:
        _client().key_value_set(f"mint/taken/{number // POSTS}/{index()}", "")
    return message


def require_same(what: str, make: Callable[[], Any]) -> None:
    """Raises ``UserError`` in every process if a value that each derives from its own files and
    options differs.
    """
    if count() == 1:
        return
    digest = hashlib.sha256(json.dumps(make(), sort_keys=True).encode()).hexdigest()

    def compare(digests: list[str]) -> None:
        for other, found in enumerate(digests):
            if found != digest:
                raise UserError(
                    f"{what} of process {other} differs from that of process 0: give every host the"
                    " same command, files and seeds"
                )

    _together(what, digest, compare)


def _together(what: str, value: Any, judge: Callable[[list[Any]], T]) -> T:
    """Returns ``judge`` of all processes' values in every process; process 0 calls it."""
    key = f"mint/together/{next(_meetings)}"
    _client().key_value_set(f"{key}/{index()}", json.dumps(value))
    return agree(what, lambda: judge([json.loads(_wait_for(f"{key}/{i}")) for i in range(count())]))


def barrier(name: str) -> None:
    """Waits until every process is here, in the same order, at most ``BARRIER_S`` seconds."""
    if count() > 1:
        _client().wait_at_barrier(f"mint/{name}/{next(_meetings)}", BARRIER_S * 1000)


def to_host(tree: Any) -> Any:
    """Copies a tree of arrays to numpy, complete in every process; all must call it."""
    return jax.tree.map(np.asarray, jax.device_get(whole(tree)))


def whole(tree: Any) -> Any:
    """Returns a tree's arrays complete in this process, gathered on the devices where needed;
    ``jax.device_get`` may then copy them in any thread.
    """
    leaves, treedef = jax.tree.flatten(tree)
    split = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    ]
    if split:
        gathered = _gather(leaves[split[0]].sharding.mesh)([leaves[i] for i in split])
        for i, x in zip(split, gathered):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


@functools.lru_cache(maxsize=8)
def _gather(mesh: Any) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))


def replicate(tree: Any, mesh: Any) -> Any:
    """Puts host arrays, equal in every process, on all devices; no change in a single process."""
    if count() == 1:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    return place(tree, jax.tree.map(lambda _: everywhere, tree))


def place(tree: Any, shardings: Any) -> Any:
    """Puts host arrays that are equal in every process on devices; each process puts its parts."""
    if count() == 1:
        return jax.device_put(tree, shardings)
    # device_put would compare the values in a collective, which must not wait for other threads

    def put(x: Any, where: Any) -> jax.Array:
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, where, lambda part: value[part])

    return jax.tree.map(put, tree, shardings)


def leave(status: int, reason: str) -> None:
    """Ends a failed process; a single one only if it abandons a thread, see ``host.leave``."""
    # A normal exit would wait for the others, which may wait for this one; they read the reason at
    # their next wait. Process 0 holds the key-value store, so it gives the others time to report.
    if count() == 1:
        host.leave(status)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _client().key_value_set(f"{FAILED}/{index()}", f"process {index()}: {reason}")
        deadline = time.monotonic() + LEAVE_S
        if is_main():
            while time.monotonic() < deadline:
                if len(_client().key_value_dir_get(FAILED)) == count():
                    break
                time.sleep(0.1)
            time.sleep(1)  # lets them print before they end
    finally:
        os._exit(status)


def _client() -> Any:
    return distributed.global_state.client

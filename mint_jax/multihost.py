"""Several processes as one program: they join, hear process 0's decisions, and read arrays that
span them.

Every process runs the same code and makes the same device calls in the same order; JAX asks no
more. What could differ from host to host (rewards, which phase is next, when to stop) is decided by
process 0 and heard by the others through ``agree``, over the coordinator's key-value store: no
device is involved and nothing compiles. Where process 0 alone decides what the devices do next,
step by step, the others hear of each step in a row of messages (``post``, ``take``; ``messages.py``
says what is in one). Files are written by process 0, checkpoints by all together, on a folder that
all hosts share. In a single process all of this does nothing.

Environment variables, for machines that JAX does not recognise: ``MINT_COORDINATOR`` (host:port of
process 0), ``MINT_PROCESSES`` (how many), ``MINT_PROCESS`` (which one this is, from 0).
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

VARIABLES = ("MINT_COORDINATOR", "MINT_PROCESSES", "MINT_PROCESS")
# how often a waiting process looks whether another has failed; there is no limit on the wait, a
# reward may take hours
POLL_S = 5
LEAVE_S = 10  # how long process 0, failing, waits for others that fail with it
BARRIER_S = 3600  # how long processes wait for the slowest
# of the agreements in the coordinator's memory, those before the last ``FORGET_EVERY`` are dropped
FORGET_EVERY = 1024
# messages of a row that are dropped together, once every process has taken them; no more than twice
# as many wait
POSTS = 256
FAILED = "mint/failed"

T = TypeVar("T")
# They name keys and barriers: the same in every process. Messages are posted by several threads of
# process 0.
_agreements, _meetings, _posts, _posting = (
    itertools.count(),
    itertools.count(),
    itertools.count(),
    threading.Lock(),
)


def join(
    environment: Mapping[str, str] = os.environ,
    detect: bool = False,
    expected: int = 0,
    timeout_s: int = 300,
) -> None:
    """Joins the other processes; before anything asks JAX for devices. Does nothing for a single
    process.

    Args:
        environment: where ``VARIABLES`` are looked up; all three or none.
        detect: without them, join the TPU pod, SLURM or MPI job that JAX finds itself in.
        expected: how many processes were started, where the caller knows; 0 accepts any number.
        timeout_s: seconds to wait for the others.

    Raises:
        UserError: variables that are missing or wrong, nothing to detect, no way to the
            coordinator, another number of processes than expected. Where the others do not come,
            the process prints one line and ends with status 1, for they may come when the job is
            started again: JAX does not return from that wait.
    """
    settings = _settings(environment)
    if settings is None and not detect:
        return
    options: dict[str, Any] = {}
    if settings is not None:
        coordinator, processes, process = settings
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
    where = (
        "the detected cluster"
        if settings is None
        else f"{settings[0]} as process {settings[2]} of {settings[1]}"
    )
    # JAX aborts the process, with a stack trace, when its own timeout is over: be there first, with
    # a sentence.
    watch = threading.Timer(
        timeout_s, _give_up, [_not_joined(where, f"the others did not come in {timeout_s} s")]
    )
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
    # each of them would run the whole job, all into one workdir
    if expected and count() != expected:
        raise UserError(
            f"{count()} processes joined, and --distributed={expected} expected {expected}: give"
            f" the number that is started, or see why {where} has another one"
        )


def topology() -> str:
    """Every process's host with its number of devices, for a line of the log.

    Raises:
        UserError: in every process, naming the first that has another number of devices than
            process 0.
    """
    number = next(_meetings)
    _client().key_value_set(
        f"mint/host/{number}/{index()}", json.dumps([platform.node(), jax.local_device_count()])
    )

    def compare() -> str:
        hosts = [json.loads(_wait_for(f"mint/host/{number}/{i}")) for i in range(count())]
        for i, (name, devices) in enumerate(hosts):
            if devices != hosts[0][1]:
                raise UserError(
                    f"process {i} on {name} has {devices} devices, process 0 on {hosts[0][0]} has"
                    f" {hosts[0][1]}: see whether that host's accelerators are healthy and given to"
                    " this process"
                )
        placed = ", ".join(f"{i} on {name}" for i, (name, _) in enumerate(hosts))
        return f"{count()} processes with {hosts[0][1]} devices each: {placed}"

    return agree("the hosts", compare)


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
    """Coordinator, number of processes and number of this one; None when no variable is set."""
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
    numbers = {}
    for name in ("MINT_PROCESSES", "MINT_PROCESS"):
        if not found[name].isdecimal():
            raise UserError(f"{name} is {found[name]!r}; expected a whole number")
        numbers[name] = int(found[name])
    processes, process = numbers["MINT_PROCESSES"], numbers["MINT_PROCESS"]
    if processes < 1:
        raise UserError(
            f"MINT_PROCESSES is {processes}; expected how many processes there are, at least 1"
        )
    if process >= processes:
        raise UserError(
            f"MINT_PROCESS is {process}; with MINT_PROCESSES={processes} expected 0 to"
            f" {processes - 1}"
        )
    return coordinator, processes, process


def count() -> int:
    """Processes that joined; asks no device."""
    return distributed.global_state.num_processes


def index() -> int:
    """Which process this is."""
    return distributed.global_state.process_id


def is_main() -> bool:
    """Whether this process decides, prints and writes files."""
    return index() == 0


def agree(name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns on process 0, in every process; the others do not call it.

    Every process must come here in the same order. In a single process this is ``make()``.

    Args:
        name: what is agreed on, for errors.
        make: may return anything that JSON holds; tuples arrive as lists, floats bit for bit.

    Raises:
        Whatever ``make`` raises, on process 0; a ``UserError`` also on all others, any other
        exception there as RuntimeError.
    """
    if count() == 1:
        return make()
    number = next(_agreements)
    if number and number % FORGET_EVERY == 0:
        barrier("forget")  # now no process waits for an old one
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
        _client().key_value_set(
            key, json.dumps(message | {kind: str(error) or type(error).__name__})
        )
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
    """The value of a key, once another process has set it; ``kind`` is ``_bytes`` for one that is
    no text.

    Raises:
        RuntimeError: a process failed, or process 0 is gone.
    """
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
    """Sends a message to every other process, which ``take`` them in this order; for process 0, any
    thread of it.

    On loopback a message of up to 10 KB arrives after 0.35 ms, one of 100 KB after 1.3, of 1 MB
    after 11 (two busy cores). ``multihost_utils.broadcast_one_to_all`` takes 0.95 ms up to 100 KB
    and 4 for 1 MB; but it is a collective of the devices, which waits behind their work, wants all
    shapes known before, and leaves those who wait for work in a collective that times out.
    """
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
    """The next message of process 0; waits for it.

    Raises:
        RuntimeError: a process failed, or process 0 is gone.
    """
    number = next(_posts)
    message = _wait_for(f"mint/post/{number // POSTS}/{number}", "_bytes")
    if (number + 1) % POSTS == 0:
        _client().key_value_set(f"mint/taken/{number // POSTS}/{index()}", "")
    return message


def require_same(what: str, make: Callable[[], Any]) -> None:
    """Compares what every process made of its own files and options.

    Args:
        what: its name in the error.
        make: returns anything that JSON holds; not called in a single process.

    Raises:
        UserError: in every process, naming the first that differs from process 0.
    """
    if count() == 1:
        return
    number = next(_meetings)
    digest = hashlib.sha256(json.dumps(make(), sort_keys=True).encode()).hexdigest()
    if not is_main():
        _client().key_value_set(f"mint/same/{number}/{index()}", digest)

    def compare() -> None:
        for other in range(1, count()):
            if _wait_for(f"mint/same/{number}/{other}") != digest:
                raise UserError(
                    f"{what} of process {other} differs from that of process 0: give every host the"
                    " same command, files and seeds"
                )

    agree(what, compare)


def barrier(name: str) -> None:
    """Returns once every process is here; all must come in the same order.

    Raises:
        JaxRuntimeError: one did not come within ``BARRIER_S`` seconds.
    """
    if count() > 1:
        _client().wait_at_barrier(f"mint/{name}/{next(_meetings)}", BARRIER_S * 1000)


def to_host(tree: Any) -> Any:
    """Copies a tree of arrays to numpy, whole in every process; all processes must call it, with
    the same tree.

    An array that no process holds whole is first gathered on the devices, all of them by one
    program.
    """
    return jax.tree.map(np.asarray, jax.device_get(whole(tree)))


def whole(tree: Any) -> Any:
    """The arrays of a tree, each as one that this process holds whole; ``to_host``'s part on the
    devices, with the same rule.

    ``jax.device_get`` then copies them to the host without the other processes, in any thread.
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
    """Host arrays, equal in every process, as arrays on all devices of the mesh; in a single
    process they stay as they are.
    """
    if count() == 1:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    return place(tree, jax.tree.map(lambda _: everywhere, tree))


def place(tree: Any, shardings: Any) -> Any:
    """``jax.device_put`` of host arrays that are equal in every process: each puts its own parts,
    at a time of its own.

    ``jax.device_put`` would compare the processes' values in a collective, which other threads'
    programs may not wait for.
    """
    if count() == 1:
        return jax.device_put(tree, shardings)

    def put(x: Any, where: Any) -> jax.Array:
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, where, lambda part: value[part])

    return jax.tree.map(put, tree, shardings)


def leave(status: int, reason: str) -> None:
    """Ends a failed process where there are several; a single one only where it abandons a thread,
    see ``host.leave``.

    An ordinary exit would wait for the others, which may be waiting for this one. Process 0 has the
    key-value store, without which the others abort: it gives those that fail for the same reason
    ``LEAVE_S`` seconds to say so. The rest hear the reason where they next wait, or lose their
    connection, and end too.
    """
    if count() == 1:
        host.leave(status)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _client().key_value_set(f"{FAILED}/{index()}", f"process {index()}: {reason}")
        deadline = time.monotonic() + LEAVE_S
        while (
            is_main()
            and time.monotonic() < deadline
            and len(_client().key_value_dir_get(FAILED)) < count()
        ):
            time.sleep(0.1)
        if is_main():
            time.sleep(1)  # between their word and their end
    finally:
        os._exit(status)


def _client() -> Any:
    return distributed.global_state.client

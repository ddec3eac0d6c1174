"""A ``python`` tool for rewards and conversations: runs a snippet in its own process, with limits.

The limits stop what a policy writes by accident: endless loops, gigabytes of output or memory,
forks. They are no security boundary. The snippet runs as the same user, can read that user's files
and use the network; root is not bound by the limit on processes, and may leave the process group.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from mint_jax.errors import UserError

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FILE_BYTES = 64 << 20  # of each file that a snippet writes
# The child limits itself: code between fork and exec may hang in a process with threads. Its alarm
# also ends it if this process is gone.
_START = """
import resource, signal, sys, traceback
memory, files, seconds = map(int, sys.argv[1:])
for name, most in (("AS", memory), ("FSIZE", files), ("NPROC", 0), ("CORE", 0), ("CPU", seconds)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
signal.alarm(seconds)
del sys.argv[1:]
try:
    with open("snippet.py", encoding="utf-8") as file:
        code = compile(file.read(), "snippet.py", "exec")
    exec(code, {"__name__": "__main__"})
except Exception as error:
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""


@dataclasses.dataclass(frozen=True)
class SnippetLimits:
    """Limits of a snippet: seconds by the clock, MiB of address space, bytes of output."""

    timeout_s: float = 5.0
    memory_mib: int = 512
    output_bytes: int = 4096

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(
                    f"{name} of a snippet is {value!r}; expected a number above 0: set it, or leave"
                    " it out"
                )


def code_in(completion: str) -> str | None:
    """Returns the code of the last block between triple backticks; None without one."""
    found = _BLOCK.findall(completion)
    return found[-1] if found else None


def run_python(code: str, limits: SnippetLimits = SnippetLimits()) -> str:
    """Runs a snippet; returns its output and errors as text, and in a last line how it ended unless
    that was well. The same snippet gives the same text if it depends on nothing else, such as time.
    """
    with tempfile.TemporaryDirectory(prefix="snippet-", ignore_cleanup_errors=True) as folder:
        Path(folder, "snippet.py").write_bytes(code.encode("utf-8", "replace"))
        sizes = limits.memory_mib << 20, _FILE_BYTES, int(limits.timeout_s) + 2
        child = subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", _START, *map(str, map(int, sizes))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
            | {"PYTHONIOENCODING": "utf-8:replace", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, ended = _read(child, limits)
        finally:
            _kill(child)
    text = output[: limits.output_bytes].decode("utf-8", "replace")
    if ended and child.returncode:
        status = child.returncode
        ended = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    elif ended:
        return text
    else:
        is_cut = len(output) > limits.output_bytes
        ended = f"stopped after {limits.timeout_s:g} s"
        ended = f"output cut after {limits.output_bytes} bytes" if is_cut else ended
    return f"{text}\n[{ended}]" if text and text[-1] != "\n" else f"{text}[{ended}]"


def _read(child: subprocess.Popen, limits: SnippetLimits) -> tuple[bytes, bool]:
    """Returns the output, at most one byte beyond its limit, and True if the snippet has ended by
    itself.
    """
    assert child.stdout is not None
    output, until = b"", time.monotonic() + limits.timeout_s
    with DefaultSelector() as selector:
        selector.register(child.stdout, EVENT_READ)
        while len(output) <= limits.output_bytes:
            if not selector.select(max(0.0, until - time.monotonic())):
                return output, False
            piece = os.read(child.stdout.fileno(), limits.output_bytes + 1 - len(output))
            if not piece:  # all processes that could write have closed it
                break
            output += piece
        else:
            return output, False
    try:
        child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return output, False
    return output, True


def _kill(child: subprocess.Popen) -> None:
    """Ends the process with all of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()

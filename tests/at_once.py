"""A plugin of pytest: the name of a test that fails, and why, when it fails, for the report comes
at the end, which may not come; and an end for a run that hangs, with the stacks of all its threads.

``faulthandler_exit_on_timeout`` ends a test that hangs. Once a run hung for 75 minutes while no
test ran: two processes had done theirs, and the third waited for its last one.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key


class FailuresAtOnce:
    """Prints a line per failure between the progress."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # behind the letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = (
                getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
                .strip()
                .split("\n")[0]
            )
            self.terminal.write_line(
                f"\n{report.when} of {report.nodeid}: {reason}"[:1000], red=True, bold=True
            )
            self.terminal.flush()


class NothingEnds:
    """Ends a run in which no test has ended for longer than one may take, and prints what all
    processes are at.

    Args:
        seconds: that a test may take.
    """

    def __init__(self, config: pytest.Config, seconds: float):
        self.config, self.seconds = config, seconds
        self.last, self.over = time.monotonic(), threading.Event()
        self.stderr = config.stash[fault_handler_stderr_fd_key]
        threading.Thread(target=self._watch, name="nothing-ends", daemon=True).start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.last = time.monotonic()

    def pytest_unconfigure(self) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(min(5.0, self.seconds)):
            if time.monotonic() > self.last + 1.1 * self.seconds:
                self._end()

    def _end(self) -> None:
        os.write(
            self.stderr,
            f"\nno test has ended for {time.monotonic() - self.last:.0f} s; what all processes are"
            " at:\n".encode(),
        )
        faulthandler.dump_traceback(self.stderr)
        session = self.config.pluginmanager.get_plugin("dsession")
        workers = (
            []
            if session is None
            else [gateway._io.popen.pid for gateway in session.nodemanager.group]
        )
        for name in (signal.SIGUSR1, signal.SIGKILL):
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, name)
                time.sleep(0.5)  # one after another: they write to one place
        os._exit(1)


@pytest.hookimpl(trylast=True)  # behind the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        faulthandler.register(signal.SIGUSR1, config.stash[fault_handler_stderr_fd_key])
        return
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))
    if config.getini("faulthandler_exit_on_timeout"):
        config.pluginmanager.register(
            NothingEnds(config, float(config.getini("faulthandler_timeout")))
        )

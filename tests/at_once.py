"""A plugin of pytest: the name of a test that fails, and why, when it fails. The report comes at the end, which may not come."""

import pytest


class FailuresAtOnce:
    """Prints a line per failure between the progress."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # behind the letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext).strip().split("\n")[0]
            self.terminal.write_line(f"\n{report.when} of {report.nodeid}: {reason}"[:1000], red=True, bold=True)
            self.terminal.flush()


@pytest.hookimpl(trylast=True)  # behind the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")  # none in the workers of xdist
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))

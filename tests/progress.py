"""A progress line in place of dots, and for each failure the command that repeats it."""

from __future__ import annotations

import shlex
import time
from typing import Any, Final

import pytest

SECONDS_BETWEEN_LINES: Final = 10
REPEATED_AT_MOST: Final = 10


class Progress:
    """Counts tests. Rewrites its line on a terminal, and prints a line every ten seconds elsewhere."""

    def __init__(self, config: pytest.Config) -> None:
        # Not sys.stdout, which a test may have replaced.
        self.writer = config.get_terminal_writer()
        self.total = self.ended = self.failed = 0
        self.began = self.printed = time.monotonic()
        self.terminal = self.writer.hasmarkup

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
        # No letter, so pytest prints nothing for it. The word of a failure stands in the summary.
        if report.passed and report.when != "call":
            return None
        category = "error" if report.failed and report.when != "call" else report.outcome
        return category, "", category.upper() if report.failed else ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.writer.line(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self.ended += 1
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self.ended < self.total and now - self.printed < (1 if self.terminal else SECONDS_BETWEEN_LINES):
            return
        self.printed = now
        line = f"{self.ended:,} of {self.total:,} tests, {self.failed} failed, {now - self.began:.0f} s"
        self.writer.write(f"\r{line}" if self.terminal and self.ended < self.total else f"{line}\n", flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="print counts in place of dots")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("progress") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    names = list(dict.fromkeys(shlex.quote(report.nodeid) for report in failed))
    if names:
        terminalreporter.section("to repeat")
        for name in names[:REPEATED_AT_MOST]:
            terminalreporter.line(f"python3 run.py test --randomly-seed={config.getoption('randomly_seed', 0)} {name}")

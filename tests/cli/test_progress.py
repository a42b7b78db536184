"""The progress of long commands: what a person at a terminal sees, and that no pipe and no machine sees any of it."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from flask_idempotency.cli import progress as cli_progress
from flask_idempotency.cli.progress import Counts, Progress, show_progress
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import ResponsesSealed, TenantErased
from flask_idempotency.engine.recovery import StillUnknown
from flask_idempotency.maintenance.janitor import Batcher, BatchResult
from tests import apps
from tests.cli.test_keys import NEW, OLD, run, shop
from tests.cli.test_tasks import turned

WHY = ("--reason", "contract ended", "--yes")


class Terminal(io.StringIO):
    """A stream that says that a person reads it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Each text that stood on the screen, without colour."""
        text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.getvalue())
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return found


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


# The words of a line.


def at(seconds: float, touched: int, total: int | None) -> str:
    clock = Clock()
    progress = Progress("responses", total=total, monotonic=clock)
    clock.now += seconds
    progress(touched)
    return str(progress)


def test_with_a_total_the_line_has_the_rate_and_the_time_left() -> None:
    assert "1,200 of 3,000, 100/s, 18 s left" == at(12, 1200, 3000)


def test_without_a_total_the_line_has_the_time_since_the_beginning() -> None:
    assert "1,200, 100/s, 12 s" == at(12, 1200, None)


def test_a_total_that_was_too_small_is_dropped() -> None:
    """It was counted before the run, and more has come since."""
    assert "1,200, 100/s, 12 s" == at(12, 1200, 1000)
    assert "0, 12 s" == at(12, 0, 0)


def test_the_first_batch_gives_no_time_left() -> None:
    assert "10 of 3,000, 10/s" == at(1, 10, 3000)


# What stands on a terminal.


@pytest.mark.parametrize("total", (3, None))
def test_a_terminal_sees_the_count_move_and_the_counts_at_the_end(terminal: Terminal, total: int | None) -> None:
    with redirect_stderr(terminal), show_progress("responses", as_json=False, total=lambda: total) as progress:
        progress(1)
        progress.counts = Counts(2, 1, 0)

    assert any("1 of 3" in line if total else " 1" in line for line in terminal.lines[:-1]), terminal.lines
    assert re.fullmatch(r"Responses: 2 done, 1 skipped, 0 failed in \d+\.\d s\.", terminal.lines[-1])
    assert max(map(len, terminal.lines)) <= 80


@pytest.mark.parametrize("variable", ("COLUMNS=0", "COLUMNS=", "FORCE_COLOR=", "FORCE_COLOR=1", "NO_COLOR=1", "TERM="))
def test_no_variable_hides_the_progress_from_a_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))

    with redirect_stderr(terminal), show_progress("responses", as_json=False, total=lambda: 3) as progress:
        progress(1)
        progress.counts = Counts(3)

    assert any("1 of 3" in line for line in terminal.lines), terminal.getvalue()
    assert terminal.lines[-1].startswith("Responses: 3 done")


@pytest.mark.parametrize("kind", ("dumb", "unknown"))
def test_a_terminal_that_cannot_rewrite_a_line_sees_the_counts_alone(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind)

    with redirect_stderr(terminal), show_progress("responses", as_json=False) as progress:
        progress(1)
        progress.counts = Counts(1)

    assert "Responses: 1 done, 0 skipped, 0 failed in 0.0 s.\n" == re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())


def test_a_plain_line_that_gets_shorter_leaves_nothing_behind(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_progress, "SHOWN_EVERY_SECONDS", 0.0)

    with redirect_stderr(terminal), show_progress("responses", as_json=False, total=lambda: 1000) as progress:
        progress(999)
        progress(1001)

    first, second, blank, end = terminal.getvalue().split("\r")[1:]
    assert len(first) == len(second) > len(second.rstrip())
    assert ("", "", len(second.rstrip())) == (blank.strip(), end, len(blank))


def test_what_a_resolver_prints_goes_where_it_went_before(terminal: Terminal) -> None:
    """Into the pipe, and not to the terminal of the progress."""
    with redirect_stdout(pipe := io.StringIO()), redirect_stderr(terminal):  # noqa: SIM117 - in this order
        with show_progress("claims", as_json=False) as progress:
            progress(1)
            sys.stdout.write("asked the bank\n")

    assert "asked the bank\n" == pipe.getvalue()
    assert "bank" not in terminal.getvalue()


def test_machines_see_no_progress_even_on_a_terminal(terminal: Terminal) -> None:
    with redirect_stderr(terminal), show_progress("responses", as_json=True, total=never) as progress:
        progress(1)
        progress.counts = Counts(1)

    assert "" == terminal.getvalue()


def test_a_pipe_sees_no_progress_and_nothing_is_counted_for_it() -> None:
    with redirect_stderr(pipe := io.StringIO()), show_progress("responses", as_json=False, total=never) as progress:
        progress(1)
        progress.counts = Counts(1)

    assert "" == pipe.getvalue()


def never() -> int:
    raise AssertionError("only a person at a terminal needs the total, and a count takes the store's time")


def test_a_store_that_cannot_count_costs_the_total_alone(terminal: Terminal) -> None:
    def away() -> int:
        raise StoreUnavailable("it is away")

    with redirect_stderr(terminal), show_progress("responses", as_json=False, total=away) as progress:
        progress(7)

    assert any("7" in line for line in terminal.lines)


# The totals that the commands know.


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """What each command would show to a person."""
    seen: list[tuple[str, int | None]] = []

    def shown(what: str, *, total: Any = lambda: None, **options: Any) -> Any:
        seen.append((what, total()))
        return show_progress(what, total=total, **options)

    for module in ("maintenance", "tenants"):
        monkeypatch.setattr(f"flask_idempotency.cli.{module}.show_progress", shown)
    return seen


def test_the_totals_come_from_what_the_store_counts(totals: list[tuple[str, int | None]]) -> None:
    """An expired record is counted by no store, so `expire` has no total."""
    before = shop({"old": OLD})
    before.post(key="a"), before.post(key="b")
    world = turned(before, {"new": NEW, "old": OLD}, quota_records=5)
    world.post(key="c")

    for command in (("reap",), ("expire",), ("rotate",), ("reconcile",), ("purge", "--no-tenant", *WHY)):
        assert 0 == run(world, *command).exit_code

    assert [("claims", 0), ("expired records", None), ("responses", 2), ("tenants", 1), ("responses", 1)] == totals


def test_without_quotas_no_store_counts_the_responses_of_a_tenant(totals: list[tuple[str, int | None]]) -> None:
    assert 0 == run(shop({"new": NEW}), "purge", "--no-tenant", *WHY).exit_code
    assert [("responses", None)] == totals


def test_seal_knows_how_much_it_looks_at(totals: list[tuple[str, int | None]]) -> None:
    before = shop(None, encryption="off")
    before.post(key="a"), before.post(key="b")

    assert 0 == run(turned(before, {"new": NEW}), "seal", *WHY).exit_code
    assert [("responses", 2)] == totals


def test_a_second_phase_counts_on() -> None:
    """`reap` calls resolvers after it has quarantined: a count must not fall back."""
    world = apps.shop()
    world.idempotency.resolver("pay")(lambda unknown: StillUnknown())
    apps.lapsed(world, "a"), apps.lapsed(world, "b")
    apps.vanished(world, "c"), apps.vanished(world, "d")
    world.clock.advance(apps.LEASE + 1)
    seen: list[int] = []

    class Counted(Progress):
        def __call__(self, touched: int) -> None:
            seen.append(touched)
            super().__call__(touched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_progress, "Progress", Counted)
        assert 0 == run(world, "reap").exit_code

    assert 2 == seen[0]
    assert seen == sorted(seen)
    assert 4 <= seen[-1]


# Ctrl-C.


def interrupted(batches: int) -> Any:
    """A run of steps in which Ctrl-C comes after this many of the first kind."""
    run_steps = Batcher.run

    def stopped(self: Batcher, step: Any, *_: Any, **options: Any) -> Any:
        left = [batches]

        def until(limit: int) -> BatchResult:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return BatchResult(step(1).touched, more=True)

        return run_steps(self, until)

    return stopped


@pytest.mark.parametrize("task", ("reap", "expire", "rotate", "reconcile"))
def test_ctrl_c_ends_a_task_with_what_was_done_and_it_can_run_again(task: str) -> None:
    world = shop({"new": NEW}, quota_records=5)
    world.post()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "run", interrupted(0))
        told, machine = run(world, task), run(world, task, "--json")

    assert (130, "", 130, "") == (told.exit_code, told.stdout, machine.exit_code, machine.stderr)
    why = r"Interrupted after \d+\.\d s\. 0 [a-z ]+ handled\. What was done stays done: run the command again to continue\."
    assert re.fullmatch(why, told.stderr.strip()), told.stderr
    assert re.fullmatch(why, json.loads(machine.stdout)["error"])
    assert not json.loads(run(world, task, "--json").stdout)["busy"]


def test_ctrl_c_in_a_purge_names_what_is_gone_and_leaves_its_audit_event() -> None:
    world = shop({"new": NEW})
    world.post(key="a"), world.post(key="b")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "run", interrupted(1))
        told = run(world, "purge", "--no-tenant", *WHY)

    assert 130 == told.exit_code
    assert "Data keys destroyed: 1. Responses wiped: 1. What was done stays done" in told.stderr
    assert [(1, False)] == [
        (event.wiped, event.finished) for event in world.told(TenantErased) if isinstance(event, TenantErased)
    ]
    again = json.loads(run(world, "purge", "--no-tenant", *WHY, "--json").stdout)
    assert (0, 1) == (again["data_keys"], again["wiped"])


def test_ctrl_c_in_a_purge_counts_the_quarantined_responses_too() -> None:
    """They come last, and the audit event must not leave out what is gone."""
    world = apps.shop()
    for name in ("a", "b", "c"):
        apps.paid(world, name)
    for name in ("a", "b"):
        found = apps.record(world, name)
        assert found is not None
        assert found.payload is not None
        world.store.mark_corrupt(apps.key_of(world, name), found.payload)
    resolve, calls = type(world.store.recovery).resolve, list[object]()

    def stopped(self: Any, *arguments: Any, **options: Any) -> bool:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return resolve(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.store.recovery), "resolve", stopped)
        told = run(world, "purge", "--tenant", "acme", *WHY)

    assert (130, True) == (told.exit_code, "Responses wiped: 2. What was done stays done" in told.stderr), told.stderr
    assert [2] == [event.wiped for event in world.told(TenantErased) if isinstance(event, TenantErased)]


def test_ctrl_c_in_a_seal_names_how_many_are_sealed() -> None:
    before = shop(None, encryption="off")
    before.post(key="a"), before.post(key="b")
    world = turned(before, {"new": NEW})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "run", interrupted(1))
        told = run(world, "seal", *WHY)

    assert (130, True) == (told.exit_code, "Sealed: 1. What was done stays done" in told.stderr)
    assert [False] == [event.finished for event in world.told(ResponsesSealed) if isinstance(event, ResponsesSealed)]
    assert "Sealed: 1." in run(world, "seal", *WHY).output


def test_ctrl_c_leaves_a_terminal_as_it_was(terminal: Terminal) -> None:
    """The sentence is the last line."""

    def interrupt() -> None:
        with redirect_stderr(terminal), show_progress("claims", as_json=False) as progress:
            progress(1)
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        interrupt()

    said = terminal.lines[-1]
    assert said.startswith("Interrupted after "), terminal.lines
    assert said.endswith("1 claims handled. What was done stays done: run the command again to continue.")

"""`flask idempotency stats --since` and `--watch`: what requests did over a time span."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Flask

from flask_idempotency.cli import stats as command
from flask_idempotency.engine.activity import EDGES, HOUR, MINUTE, Counts
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.activity import summary
from flask_idempotency.operations.times import format_edge
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import NAME, World, new_world, paid, refusal, run, said, shop

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60.0
"""Only a failure takes this long."""


def add(world: World, counts: Counts) -> None:
    world.store.activity.add(owner_mark(NAME), counts, token=os.urandom(16))


@pytest.fixture
def world() -> World:
    """Ten minutes of two endpoints."""
    world = shop()
    add(world, {"pay": {"new": 1200, "taken-over": 34, "completed": 1230, "quarantined": 4, "t:new:3": 1234}})
    world.clock.advance(9 * MINUTE)
    add(world, {"pay": {"replayed": 5, "t:replayed:0": 5, "conflict": 2, "mismatch": 1}, "refund": {"missing-key": 7}})
    world.clock.advance(MINUTE)
    return world


def cells(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [re.split(r"  +", line.strip()) for line in result.output.splitlines()]


def test_requests_that_were_only_observed_have_a_line(world: World) -> None:
    assert "observed" not in run(world, "stats", "--since", "30m").stdout
    unseen = {"would:unkeyed@cookie": 9, "would:missing-key@cookie": 9, "would:completed@cookie": 9}
    add(world, {"pay": {"would:new@cookie": 1100, "would:replayed@anonymous": 11, **unseen}})

    line = "1,111 more with a key were only observed: see `flask idempotency report`."
    assert line in run(world, "stats", "--since", "30m").stdout
    assert 1111 == said(run(world, "stats", "--since", "30m", "--json"))["total"]["observed"]


def test_a_table_shows_endpoints_with_outcomes_and_percentiles(world: World) -> None:
    head, *rows = cells(run(world, "stats", "--since", "30m"))

    assert head == ["Activity of the last 30 min, until 2001-09-09T01:56:40.000Z:"]
    assert rows == [
        ["endpoint", "new", "replayed", "refused", "quarantined", "p50", "p99"],
        ["pay", "1,234", "5", "3", "4", "5 ms", "5 ms"],
        ["refund", "0", "0", "7", "0", "-", "-"],
        ["all", "1,234", "5", "10", "4", "5 ms", "5 ms"],
    ]


def test_a_wide_table_has_every_counter_once(world: World) -> None:
    _, head, pay, *_ = cells(run(world, "stats", "--since", "30m", "--wide"))
    row = dict(zip(head, pay, strict=True))

    assert len(head) == len(set(head))
    assert (row["requests"], row["taken-over"], row["completed"], row["conflicts"]) == ("1,242", "34", "1,230", "2")
    assert row["replay p95"] == "1 ms"


def test_the_span_ends_now_and_begins_where_it_says(world: World) -> None:
    assert [row[:3] for row in cells(run(world, "stats", "--since", "5m"))[2:]] == [
        ["pay", "0", "5"],
        ["refund", "0", "0"],
        ["all", "0", "5"],
    ]
    world.clock.advance(HOUR)
    assert cells(run(world, "stats", "--since", "5m")) == [["No request with a key was counted in the last 5 min."]]
    assert len(cells(run(world, "stats", "--since", "24h"))) == 5


def test_one_endpoint_needs_no_total() -> None:
    world = shop()
    add(world, {"pay": {"new": 1}})

    assert [row[0] for row in cells(run(world, "stats", "--since", "1h"))[1:]] == ["endpoint", "pay"]


def test_machines_get_the_same_numbers(world: World) -> None:
    told = said(run(world, "stats", "--since", "10m", "--json"))

    assert (told["now"], told["seconds"], told["bucket_seconds"]) == ("2001-09-09T01:56:40.000Z", 600.0, 60)
    assert (told["total"]["requests"], told["endpoints"]["pay"]["outcomes"]["new"]) == (1249, 1200)
    assert told["endpoints"]["pay"]["times"]["new"] == {"count": 1234, "p50": 0.005, "p95": 0.005, "p99": 0.005}
    assert len(told["series"]) == 11
    assert [point["requests"] for point in told["series"] if point["requests"]] == [1234, 15]
    assert sum(point["new"] for point in told["series"]) == 1234


@pytest.mark.parametrize("span", ("59s", "31d", "0", "2592001"))
def test_a_span_that_the_store_does_not_keep_is_refused_with_the_range(world: World, span: str) -> None:
    refused = run(world, "stats", "--since", span)

    assert refused.exit_code == 2
    assert "must be from 1m to 30d" in refused.stderr


@pytest.mark.parametrize("span", ("1w", "-1h", "an hour", ""))
def test_a_span_that_is_no_duration_is_refused_with_examples(world: World, span: str) -> None:
    refused = run(world, "stats", "--since", span)

    assert refused.exit_code == 2
    assert "90s, 15m, 2h, 3d" in refused.stderr


@pytest.mark.parametrize("options", (("--since", "1h", "--quick"), ("--watch", "--quick"), ("--wide",)), ids=" ".join)
def test_options_that_would_do_nothing_are_refused(world: World, options: tuple[str, ...]) -> None:
    assert run(world, "stats", *options).exit_code == 2


def test_a_store_without_activity_is_refused() -> None:
    poor = new_world(Flask(NAME), store=FaultyStore(MemoryStore()))  # type: ignore[arg-type]

    assert "keeps no activity" in refusal(run(poor, "stats", "--since", "1h"))


def test_an_application_that_counts_nothing_says_why() -> None:
    assert "IDEMPOTENCY_ACTIVITY is False here" in run(shop(activity=False), "stats", "--since", "1h").output


def test_names_of_endpoints_are_escaped() -> None:
    world = shop()
    add(world, {"\x1b[2J[red]pay": {"new": 1}})

    shown = run(world, "stats", "--since", "1h").output
    assert "\x1b" not in shown
    assert "[red]pay" in shown


def test_what_the_application_counts_is_what_the_command_shows() -> None:
    world = shop(activity=True)
    for key in ("a", "a", "b"):
        paid(world, key)
    assert world.app.extensions["idempotency"].activity.flush()

    assert cells(run(world, "stats", "--since", "1h"))[2][:4] == ["pay", "2", "1", "0"]


# `--watch`.


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return a list of functions. Each pause between two pages calls the next. The last pause is Ctrl-C."""
    steps = list[Callable[[], None]]()

    def pause(seconds: float) -> None:
        assert seconds == command.WATCH_SECONDS
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr("flask_idempotency.cli.stats.time.sleep", pause)
    return steps


def test_watching_shows_the_last_hour_again_and_again_until_ctrl_c(
    world: World, pauses: list[Callable[[], None]]
) -> None:
    pauses.append(lambda: add(world, {"pay": {"replayed": 1}}))

    ended = run(world, "stats", "--watch")

    assert (0, "") == (ended.exit_code, ended.stderr)
    assert re.findall(r"(?m)^pay +1,234 +(\d)", ended.output) == ["5", "6"]
    assert ended.output.count("Activity of the last 1 h, until") == 2


def test_watching_a_span_for_machines_prints_an_object_a_line(world: World, pauses: list[Callable[[], None]]) -> None:
    pauses.append(lambda: add(world, {"pay": {"replayed": 1}}))

    ended = run(world, "stats", "--watch", "--since", "5m", "--json")

    objects = [json.loads(line) for line in ended.output.splitlines() if line]
    assert [(each["seconds"], each["total"]["outcomes"]["replayed"]) for each in objects] == [(300.0, 5), (300.0, 6)]
    assert ended.exit_code == 0


def test_an_outage_while_watching_is_shown_and_ends(
    world: World, pauses: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = type(world.store.activity).read

    def down(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer.")

    pauses.append(lambda: monkeypatch.setattr(type(world.store.activity), "read", down))
    pauses.append(lambda: monkeypatch.setattr(type(world.store.activity), "read", read))

    pages = run(world, "stats", "--watch").output.split("Activity of")[1:]

    assert ["does not answer: no answer." in page for page in pages] == [False, True, False]
    assert all("1,234" in page for page in pages)


def test_a_store_that_is_down_from_the_start_ends_the_command(
    world: World, pauses: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(type(world.store.activity), "read", down)

    assert (2, "Error: no answer\n") == ((ended := run(world, "stats", "--watch")).exit_code, ended.stderr)


def test_a_page_fits_the_terminal(world: World) -> None:
    """A page that is higher would scroll, and a person would see its end alone."""
    for number in range(50):
        add(world, {"payments.create_a_payment_with_a_rather_long_name" * 2 + str(number): {"new": 1 + number}})
    found = summary(world.store.activity, owner_mark(NAME), seconds=HOUR)

    with world.app.app_context():
        lines = command._page(found, wide=False, lines=24)

    assert len(lines) <= 23
    assert "33 more endpoints" in str(lines[-1])


SHOP = """
from flask import Flask
from flask_idempotency import Idempotency
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.activity import summary
from flask_idempotency.stores.memory import MemoryStore

app = Flask("shop")
store = MemoryStore()
store.activity.add(owner_mark("shop"), {"pay": {"new": 12, "quarantined": 3, "t:new:3": 12}}, token=bytes(16))
Idempotency(app, store=store, secret="s-9f2c47d1e8b35a60c1d47be2a5583f09", principal=lambda: "alice")
"""

WATCH = """
from flask.cli import ScriptInfo
from flask_idempotency.cli import cli
from shop import app
cli.main(["stats", "--watch"], obj=ScriptInfo(create_app=lambda: app))
"""
"""As `flask` runs the command, without the commands of other packages that it would load."""


class Watching:
    """The command in a terminal of its own, which Ctrl-C reaches as a person types it."""

    def __init__(self, folder: Path, *, term: str = "xterm") -> None:
        (folder / "shop.py").write_text(SHOP)
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "FLASK_VERSION")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCH],
            cwd=folder,
            env=environment | {"TERM": term, "PYTHONPATH": str(ROOT)},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, pattern: str) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, self.text
            if select.select([self._ours], [], [], 1.0)[0]:
                self.text += os.read(self._ours, 10_000).decode()

    def press_ctrl_c(self) -> int:
        os.write(self._ours, b"\x03")
        return self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(WAIT_SECONDS)
        os.close(self._ours)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    found = Watching(tmp_path)
    yield found
    found.close()


@pytest.mark.slow
def test_a_person_ends_the_page_of_a_terminal_with_ctrl_c(watching: Watching) -> None:
    watching.read_until(r"pay +12 .*\n")

    assert watching.press_ctrl_c() == 0
    assert "Traceback" not in watching.text
    assert "\x1b[2J" in watching.text, "each page starts at the top of the screen"
    assert "\x1b[1;31m3\x1b[0m" in watching.text


@pytest.mark.slow
def test_a_dumb_terminal_gets_no_control_sequence(tmp_path: Path) -> None:
    watching = Watching(tmp_path, term="dumb")
    try:
        watching.read_until(r"pay +12 .*\n")
        assert watching.press_ctrl_c() == 0
        assert "\x1b" not in watching.text
    finally:
        watching.close()


def test_times_read_as_a_person_writes_them() -> None:
    assert [format_edge(each, over="> ") for each in (None, EDGES[0], 0.0075, 0.75, 1.0, 7.5, 60.0, float("inf"))] == [
        "-",
        *("1 ms", "7.5 ms", "750 ms", "1 s", "7.5 s", "60 s", "> 60 s"),
    ]

"""`flask idempotency doctor`: what it prints, and how it exits."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import Result
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.admin import MemoryHealth

QUIET = ["--worker-timeout", "0", "--proxy-timeout", "0"]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory store has a fault that only another store can mend."""
    monkeypatch.setattr(MemoryHealth, "findings", lambda self: ())


def shop(store: Any = None, **settings: Any) -> Flask:
    app = Flask("shop")
    app.config["TESTING"] = True
    Idempotency(
        app,
        **{
            "secret": "s-9f2c47d1e8b35a60",
            "store": store or MemoryStore(),
            "effects": "deduplicated",
            **settings,
        },
    )
    app.post("/pay", endpoint="pay")(lambda: "paid")
    return app


def run(app: Flask, *arguments: str) -> Result:
    return app.test_cli_runner().invoke(args=["idempotency", "doctor", *arguments])


@pytest.mark.usefixtures("healthy")
def test_an_application_that_is_well_exits_with_0() -> None:
    """The checks that are fine share one line; `--verbose` shows each."""
    told, verbose = run(shop(), *QUIET), run(shop(), *QUIET, "--verbose")

    assert (0, 0) == (told.exit_code, verbose.exit_code), told.output
    names, empty, summary = told.output.splitlines()
    assert ("fine     store, clock-skew, ", "") == (names[:28], empty)
    assert f"{len(names.split(','))} checks fine" == summary
    *each, empty, summary = verbose.output.splitlines()
    assert {"fine"} == {line.split()[0] for line in each}
    assert ("fine     store: The store answers.", "") == (each[0], empty)
    assert f"{len(each)} checks fine" == summary


@pytest.mark.usefixtures("healthy")
def test_advice_and_what_is_unknown_exit_with_0() -> None:
    told = run(shop(lease=1, secret=["new", "old"]))

    assert 0 == told.exit_code
    assert {"unknown", "advice", "fine"} <= {line.split()[0] for line in told.output.splitlines() if line}
    assert re.fullmatch(r"1 check unknown, 4 pieces of advice, \d+ checks fine", told.output.splitlines()[-1])


@pytest.mark.usefixtures("healthy")
def test_a_fault_exits_with_1_and_comes_first_with_its_remedy() -> None:
    told = run(shop(effects="plain", max_runtime=60), "--worker-timeout", "30")

    first, *more = told.output.splitlines()
    assert (1, True) == (told.exit_code, first.startswith("fault    worker-timeout: "))
    assert more[0].startswith("         → ")
    assert more[-1].startswith("1 fault, ")


@pytest.mark.usefixtures("healthy")
def test_a_store_that_does_not_answer_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell, which is neither in order nor not."""
    store = MemoryStore()
    app = shop(store)

    def away() -> None:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(store.task_log, "now", away)

    told = run(app, *QUIET)

    assert (2, "fault    store") == (told.exit_code, told.output[: len("fault    store")])


def test_a_check_that_crashes_exits_with_2_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: MemoryHealth) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MemoryHealth, "findings", crash)

    told = run(shop(), *QUIET, "--json")

    said = {each["check"]: each for each in json.loads(told.stdout)["findings"]}
    assert (2, "unknown", "fine") == (told.exit_code, said["health"]["verdict"], said["policies"]["verdict"])


def test_machines_are_told_the_same() -> None:
    told = run(shop(), *QUIET, "--json")

    said = json.loads(told.stdout)
    assert (1, False, True) == (told.exit_code, said["in_order"], said["complete"])
    assert {"check", "verdict", "text", "remedy"} == set(said["findings"][0])
    assert ("persistence", "fault") == (said["findings"][0]["check"], said["findings"][0]["verdict"])


def test_where_there_is_no_store_it_is_refused() -> None:
    app = Flask("shop")
    Idempotency(app, enabled=False, secret="s-9f2c47d1e8b35a60")

    told = run(app)

    assert (1, True) == (told.exit_code, "IDEMPOTENCY_ENABLED is False" in told.stderr)


def test_a_terminal_gets_findings_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remedy begins on a line of its own."""
    monkeypatch.setattr("flask_idempotency.cli.output.in_colour", lambda **_: True)
    app = shop(effects="plain", max_runtime=60)

    told = run(app, "--worker-timeout", "30")

    lines = re.sub(r"\x1b\[[\d;]*m", "", told.output).splitlines()
    assert "\x1b[1;31mfault" in told.output
    begin = next(number for number, line in enumerate(lines) if line.startswith("fault    worker-timeout: "))
    assert lines[begin + 1].startswith("         → Give workers longer")

"""The steps of a message: a redelivery goes on after the finished ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency import Step, current_claim
from flask_idempotency.consumers import Dead, Inbox, Later, Processed
from flask_idempotency.engine.ending import work_here
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.memory import MemoryStore
from tests.consumers.messenger import STEP_POINTS, inbox_with_steps
from tests.consumers.messenger import booked as work_of
from tests.forgiving import make_ready
from tests.lab.programs import REDIS_KINDS
from tests.maintenance.stores import empty
from tests.tooling.processes import eventually

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60"}


def inbox(store: Any = None, **policy: Any) -> Inbox:
    config = {**CONFIG, "IDEMPOTENCY_STORE": store or MemoryStore()}
    return Inbox.standalone(config, "billing", **{"steps": ("charge", "mail"), **policy})


def booked(ran: Counter[str], *, ends: str = "") -> Any:
    """Charge, and mail unless it ends before."""

    def act(name: str) -> str:
        ran[name] += 1
        if name == ends:
            raise TimeoutError
        return name

    def work() -> Any:
        current_claim.step("charge", act, "charge")
        if ends == "before mail":
            raise KeyError
        return current_claim.step("mail", act, "mail")

    return work


def test_a_redelivery_goes_on_behind_the_finished_steps() -> None:
    ours, ran = inbox(), Counter[str]()
    with pytest.raises(KeyError):
        ours.process("m-1", booked(ran, ends="before mail"))
    again = ours.process("m-1", booked(ran))
    replayed = ours.process("m-1", booked(ran))

    assert Processed("mail", replayed=False) == again
    assert Processed("mail", replayed=True) == replayed
    assert {"charge": 1, "mail": 1} == ran


def test_a_decision_to_release_pauses() -> None:
    ours, ran = inbox(decide=lambda value, error: "release"), Counter[str]()
    verdict = ours.process("m-1", booked(ran))

    assert isinstance(verdict, Later)
    assert "paused" == verdict.reason


def test_a_message_with_a_step_in_doubt_is_set_aside() -> None:
    ours, ran = inbox(), Counter[str]()
    with pytest.raises(TimeoutError):
        ours.process("m-1", booked(ran, ends="mail"))

    assert Dead("outcome-unknown") == ours.process("m-1", booked(ran))
    assert {"charge": 1, "mail": 1} == ran


@pytest.mark.parametrize("on_error", ("keep", "quarantine", "release"))
def test_a_message_that_meets_an_outage_is_paused_whatever_its_policy_says_of_errors(on_error: str) -> None:
    """Its work has not failed: kept as a failure, the mail would never be sent."""
    store, ran, calls = MemoryStore(), Counter[str](), count(1)
    ours, write = inbox(store, on_error=on_error), store.journals.write

    def once_away(*args: Any, **kwargs: Any) -> None:
        if next(calls) == 3:  # the begin of the mail
            raise StoreUnavailable("the test cut it off")
        write(*args, **kwargs)

    store.journals.write = once_away  # type: ignore[method-assign]
    outage = ours.process("m-1", booked(ran))

    assert isinstance(outage, Later)
    assert "paused" == outage.reason
    assert isinstance(ours.process("m-1", booked(ran)), Processed)
    assert {"charge": 1, "mail": 1} == ran


def test_a_message_that_takes_too_long_is_paused() -> None:
    ours, ran = inbox(), Counter[str]()
    slow = iter((1e6, 0.0))

    def work() -> Any:
        current_claim.step("charge", lambda: ran.update(["charge"]))
        claim = work_here().claim  # type: ignore[union-attr]
        claim._requested_at -= next(slow)  # type: ignore[union-attr]
        return current_claim.step("mail", lambda: ran.update(["mail"]))

    late = ours.process("m-1", work)

    assert isinstance(late, Later)
    assert "paused" == late.reason
    assert isinstance(ours.process("m-1", work), Processed)
    assert {"charge": 1, "mail": 1} == ran


def test_a_message_that_goes_another_way_is_set_aside() -> None:
    ours, ran = inbox(), Counter[str]()
    with pytest.raises(KeyError):
        ours.process("m-1", booked(ran, ends="before mail"))

    assert Dead("outcome-unknown") == ours.process("m-1", lambda: None)


def test_pauses_are_no_attempts_of_vanished_workers() -> None:
    ours, ran = inbox(max_attempts=1), Counter[str]()
    for _ in range(4):
        with pytest.raises(KeyError):
            ours.process("m-1", booked(ran, ends="before mail"))

    assert isinstance(ours.process("m-1", booked(ran)), Processed)
    assert {"charge": 1, "mail": 1} == ran


def test_a_contradiction_is_refused_when_the_inbox_is_made() -> None:
    with pytest.raises(ConfigurationError, match="on_abandoned exclude each other"):
        inbox(on_abandoned="takeover")


@pytest.mark.slow
@pytest.mark.parametrize("kind", (*REDIS_KINDS, "sqlite", "postgres", pytest.param("tiered", marks=pytest.mark.matrix)))
def test_a_message_goes_on_behind_the_finished_steps_of_a_killed_worker(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In doubt about the charge, it is set aside. Effects are counted in a file."""
    config = {"IDEMPOTENCY_STORE": empty("sqlite" if kind == "tiered" else kind, request)}
    if kind == "tiered":
        config["IDEMPOTENCY_REDIS_URL"] = empty(REDIS_KINDS[0], request)
    make_ready(config["IDEMPOTENCY_STORE"])
    effects = tmp_path / "effects"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.consumers.messenger",
        "steps",
        json.dumps(config),
        str(effects),
    ]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert 0 == died.returncode, died.stderr[-3000:]
    ours, verdicts = inbox_with_steps(config), dict[str, Any]()

    def settled(message: str) -> bool:
        verdicts[message] = ours.process(message, work_of(effects, message, lambda point: None))
        return not isinstance(verdicts[message], Later)

    for message in STEP_POINTS:
        assert eventually(lambda message=message: settled(message))  # type: ignore[misc]

    assert Dead("outcome-unknown") == verdicts.pop("charging")
    assert {message: Processed(["charge", "mail"], replayed=False) for message in verdicts} == verdicts
    # The mail of a worker that died in it is sent again, under the same downstream key.
    assert {
        "charge charging": 1,
        "charge charged": 1,
        "mail charged": 1,
        "charge mailing": 1,
        "mail mailing": 2,
    } == Counter(effects.read_text().splitlines())


def test_a_result_that_cannot_be_rebuilt_for_a_moment_is_for_later() -> None:
    away = iter((False, True, False))

    def rebuild(plain: str) -> set[str]:
        if next(away):
            raise ConnectionResetError
        return {plain}

    ours, ran = inbox(steps=(Step("charge", returns=(min, rebuild)), "mail")), Counter[str]()

    def work() -> str:
        def charge() -> set[str]:
            ran["charge"] += 1
            return {"ch_1"}

        (charged,) = current_claim.step("charge", charge)
        if ran["charge"] and ran["work"] == 0:
            ran["work"] += 1
            raise KeyError
        return str(charged)

    with pytest.raises(KeyError):
        ours.process("m-1", work)

    assert "paused" == getattr(ours.process("m-1", work), "reason", None)
    assert Processed("ch_1", replayed=False) == ours.process("m-1", work)
    assert 1 == ran["charge"]

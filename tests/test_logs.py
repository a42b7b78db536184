"""Every event is one line of the log, with its facts in fields; and nothing where nobody listens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from flask import Flask

from flask_idempotency import logs
from flask_idempotency.engine import events
from flask_idempotency.engine.capabilities import RISK
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.logs import LINES, LOGGER, fields_of, log_of
from tests.web.apps import new_world

RESERVED = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})


def made(kind: type[Event]) -> Event:
    plain: dict[str, Any] = {"counts": {"removed": 1}, "limits": {"records": 1}, "attempt": 1, "error": "OSError"}
    return kind("abcd1234", "pay", **{fact: plain.get(fact, fact) for fact in facts_of(kind)})


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_every_event_has_a_level_and_a_sentence(kind: type[Event]) -> None:
    """
    A new event cannot be forgotten.
    """
    line = LINES[kind]

    assert line.sentence.endswith(".")
    assert callable(line.level) == bool(line.levels)


def test_no_two_events_have_one_sentence() -> None:
    assert len(LINES) == len({line.sentence for line in LINES.values()})


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_an_event_is_one_line_with_its_facts_in_fields(kind: type[Event], caplog: pytest.LogCaptureFixture) -> None:
    """
    The sentence is fixed, so that lines can be counted by it; everything else is a field of its own.
    """
    event = made(kind)

    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        log_of("shop")(event)

    [record] = caplog.records
    said = {name: value for name, value in vars(record).items() if name not in RESERVED}
    facts = {field: getattr(event, fact) for fact, field in fields_of(kind).items()}
    who = {"event": name_of(kind), "app": "shop", "record": "abcd1234", "operation": "pay"}
    assert {**who, **facts} == said
    assert LINES[kind].template == record.msg
    assert record.getMessage().startswith(f"{LINES[kind].sentence} record=abcd1234 operation=pay")
    assert record.levelno in (LINES[kind].levels or (LINES[kind].level,))


@pytest.mark.parametrize(
    ("event", "level"),
    (
        pytest.param(events.ClaimGranted("r", "pay", fence=1, attempt=1), logging.DEBUG, id="routine"),
        pytest.param(events.ClaimGranted("r", "pay", fence=2, attempt=2), logging.INFO, id="taken over"),
        pytest.param(events.RenewalFailed("r", "pay", error="StoreUnavailable"), logging.INFO, id="outage"),
        pytest.param(events.RenewalFailed("r", "pay", error="ValueError"), logging.WARNING, id="surprise"),
        pytest.param(events.StoreFailed("r", "pay", error="E", unprotected=False), logging.INFO, id="refused"),
        pytest.param(events.StoreFailed("r", "pay", error="E", unprotected=True), logging.WARNING, id="unprotected"),
        pytest.param(events.TaskRun("", "reap", 0.1, counts={"asked": 0}, finished=True), logging.DEBUG, id="idle"),
        pytest.param(events.TaskRun("", "reap", 0.1, counts={"asked": 1}, finished=True), logging.INFO, id="busy"),
        pytest.param(events.TaskRun("", "reap", 0.1, counts={}, finished=False), logging.INFO, id="behind"),
        pytest.param(
            events.TaskRun("", "reap", 0.1, counts={}, finished=False, error="E"), logging.WARNING, id="failed"
        ),
    ),
)
def test_the_level_is_as_bad_as_what_has_happened(event: Event, level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        log_of("shop")(event)

    assert [level] == [record.levelno for record in caplog.records]


@pytest.mark.parametrize(
    "kind",
    (
        events.Resolved,
        events.TenantErased,
        events.ResponsesSealed,
        events.QuotaSet,
        events.StoreInitialised,
        events.DataLossAcknowledged,
    ),
    ids=name_of,
)
def test_what_people_did_by_hand_is_heard_by_default(kind: type[Event]) -> None:
    """
    An application that sets up no logging at all still shows warnings.
    """
    assert logging.WARNING == LINES[kind].level


def test_a_fact_whose_name_means_something_to_logging_is_renamed() -> None:
    """
    `Logger.makeRecord` raises for such names, and the event would be lost.
    """

    @dataclass(frozen=True, slots=True)
    class Clashing(Event):
        name: str
        module: str
        limit: str

    assert {"name": "event_name", "module": "event_module", "limit": "limit"} == fields_of(Clashing)
    assert not {field for kind in kinds() for field in fields_of(kind).values()} & RESERVED


def test_where_nobody_listens_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """
    Not even the fields: a routine event costs one question to the logger.
    """
    monkeypatch.setattr(logs, "_FIELDS", {})  # looking there would raise
    tell = log_of("shop")

    with caplog.at_level(logging.WARNING, logger=LOGGER):
        tell(events.Completed("r", "pay", status=201, kept=True, byte_size=1))

        with pytest.raises(KeyError):
            tell(events.LeaseExpired("r", "pay"))


def test_an_application_logs_its_events(caplog: pytest.LogCaptureFixture) -> None:
    """
    From the first request on, without anything to switch on but the logger.
    """
    world = new_world(Flask("tests.web.app"))
    world.view()(lambda: "paid")

    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        world.post()
        world.post()

    said = [record for record in caplog.records if record.name == LOGGER]
    assert ["claim-granted", "completed", "replay-served"] == [vars(record)["event"] for record in said]
    assert {("tests.web.app", "<lambda>")} == {(vars(each)["app"], vars(each)["operation"]) for each in said}


def test_who_reads_of_a_loss_is_told_the_command_and_its_risk() -> None:
    """
    In every line that tells of one: of the event, and of each refusal.
    """
    said = [LINES[events.DataLossDetected].sentence, RISK]

    assert all("`flask idempotency redis ack" in line and "run a second time" in line for line in said)

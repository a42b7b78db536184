"""Every event is one line of the log, with its facts in fields; a level that is off costs almost no time."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from flask import Flask

from flask_idempotency import logs
from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.engine.lease import THREAD_NAME
from flask_idempotency.engine.model import RISK
from flask_idempotency.engine.values import valueclass
from flask_idempotency.logs import LOGGER, fields_of, log_of, template_of
from tests.apps import new_world
from tests.conftest import EARLIER_THREADS

RESERVED = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})


def made(kind: type[Event]) -> Event:
    plain: dict[str, Any] = {"counts": {"removed": 1}, "limits": {"records": 1}, "attempt": 1, "error": "OSError"}
    return kind("abcd1234", "pay", **{fact: plain.get(fact, fact) for fact in facts_of(kind)})


def test_every_event_has_its_levels_and_its_sentence() -> None:
    for kind in kinds():
        assert kind.SENTENCE.endswith((".", ").")), kind
        assert list(kind.LEVELS) == sorted(set(kind.LEVELS)), kind
        assert ("level" in vars(kind)) == (len(kind.LEVELS) > 1), kind


def test_no_two_events_share_a_sentence() -> None:
    assert len(kinds()) == len({kind.SENTENCE for kind in kinds()})


def test_an_event_is_one_line_with_its_facts_in_fields(caplog: pytest.LogCaptureFixture) -> None:
    for kind in kinds():
        event = made(kind)
        caplog.clear()

        with caplog.at_level(logging.DEBUG, logger=LOGGER):
            log_of("shop")(event)

        [record] = caplog.records
        written = {name: value for name, value in vars(record).items() if name not in RESERVED}
        facts = {field: getattr(event, fact) for fact, field in fields_of(kind).items()}
        who = {"event": name_of(kind), "app": "shop", "record": "abcd1234", "operation": "pay"}
        assert {**who, **facts} == written, kind
        assert template_of(kind) == record.msg, kind
        assert record.getMessage().startswith(f"{kind.SENTENCE} record=abcd1234 operation=pay"), kind
        assert record.levelno in kind.LEVELS, kind


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
def test_the_level_follows_the_facts_of_the_event(event: Event, level: int, caplog: pytest.LogCaptureFixture) -> None:
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
def test_an_application_without_logging_set_up_shows_audit_events(kind: type[Event]) -> None:
    assert (logging.WARNING,) == kind.LEVELS  # the level that Python's last resort shows


def test_a_fact_whose_name_logging_reserves_is_renamed() -> None:
    """`Logger.makeRecord` raises for such names, and the event would be lost."""

    @valueclass(frozen=True, slots=True)
    class Clashing(Event):
        name: str
        module: str
        limit: str

    assert {"name": "event_name", "module": "event_module", "limit": "limit"} == fields_of(Clashing)
    assert not {field for kind in kinds() for field in fields_of(kind).values()} & RESERVED


def test_an_event_below_the_level_of_the_logger_is_not_formatted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_FIELDS", {})  # a look-up raises
    write = log_of("shop")

    with caplog.at_level(logging.WARNING, logger=LOGGER):
        write(events.Completed("r", "pay", status=201, kept=True, byte_size=1))

        with pytest.raises(KeyError):
            write(events.LeaseExpired("r", "pay"))


def test_an_application_logs_its_events_from_its_first_request(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world(Flask("tests.web.app"))
    world.view()(lambda: "paid")

    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        world.post()
        world.post()

    written = [record for record in caplog.records if record.name == LOGGER]
    assert ["claim-granted", "completed", "replay-served"] == [vars(record)["event"] for record in written]
    assert {("tests.web.app", "<lambda>")} == {(vars(each)["app"], vars(each)["operation"]) for each in written}


def test_every_text_about_a_data_loss_names_the_command_and_its_risk() -> None:
    texts = [events.DataLossDetected.SENTENCE, RISK]

    assert all("`flask idempotency redis ack" in text and "run a second time" in text for text in texts)


@pytest.mark.parametrize("earlier", (False, True))
def test_a_lease_thread_of_an_earlier_test_logs_nothing_here(earlier: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It may retry for half a minute. Other tests count their own lines."""
    logger = logging.getLogger("flask_idempotency.events")
    thread = threading.Thread(target=logger.error, args=("The retries have stopped.",), name=THREAD_NAME)
    if earlier:
        EARLIER_THREADS.add(thread)
    thread.start()
    thread.join()

    assert ([] if earlier else ["The retries have stopped."]) == caplog.messages

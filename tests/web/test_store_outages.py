"""Responses and logs while the store, its keys or a stored response are not available."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest
from flask import Flask
from psycopg import errors
from redis._parsers import BaseParser
from redis.exceptions import (
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from sqlalchemy.exc import DBAPIError

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import CorruptRecord, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.events import ErasedRefused, RecordCorrupt, RefusedAfterDataLoss, StoreFailed
from flask_idempotency.engine.model import CORRUPT, ClaimRequest, Record, State, StoredPayload, StoredResponse
from flask_idempotency.engine.outages import _REDIS_CODES, OutageLog
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.apps import FaultyMemory, World, is_replay, new_world


class Ticks:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def unavailable(cause: Exception | None = None) -> StoreUnavailable:
    error = StoreUnavailable("Redis cannot decide")
    error.__cause__ = cause
    return error


class Pg8000Error(Exception):
    """The driver pg8000 has the fields of the server's message in a mapping."""


def of_driver(error: Exception) -> DBAPIError:
    """Return the error that SQLAlchemy makes of this one of a driver, with a statement and its parameters."""
    wrapped = DBAPIError("INSERT canary", {"canary": "canary"}, error)
    wrapped.__cause__ = error
    return wrapped


def test_a_refusal_because_the_store_is_down_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """By default a silent store means 503 for every keyed request: one line has the endpoint and the cause, and no key."""
    world = new_world()
    world.view()(lambda: "paid")
    world.store.down = True
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            world.post(key=f"canary-{number}")

    (message,) = [message for message in caplog.messages if "503" in message]
    assert "pay" in message or "lambda" in message
    assert "StoreUnavailable" in message
    assert "canary" not in caplog.text


def test_an_outage_is_one_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """With the number of lines left out."""
    ticks = Ticks()
    log = OutageLog(ticks)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            log.refused("pay", unavailable())
        ticks.now += 9.9
        log.refused("pay", unavailable())
        ticks.now += 0.2
        log.refused("refund", unavailable())
        ticks.now += 10
        log.refused("refund", unavailable())

    assert ["pay", "refund", "refund"] == [message.split()[0] for message in caplog.messages]
    assert [False, True, False] == ["4 more" in message for message in caplog.messages]


@pytest.mark.parametrize(
    ("cause", "named"),
    (
        (ResponseError("OOM command not allowed when used memory > 'maxmemory' canary"), "ResponseError: OOM"),
        (ResponseError("READONLY You can't write against a read only replica canary"), "ResponseError: READONLY"),
        (NoPermissionError("this user canary has no permissions"), "NoPermissionError"),
        (ResponseError("Error running script canary"), "ResponseError"),
        (ResponseError("MISCONF"), "ResponseError: MISCONF"),
        (ResponseError(""), "ResponseError"),
        (TimeoutError("TIMEOUT canary"), "TimeoutError"),
        (ReadOnlyError("You can't write against a read only replica canary"), "ReadOnlyError: READONLY"),
        (OutOfMemoryError("command not allowed canary"), "OutOfMemoryError: OOM"),
        (NoScriptError("No matching script canary"), "NoScriptError: NOSCRIPT"),
        (MovedError("3999 canary:6381"), "MovedError: MOVED"),
        (of_driver(errors.ReadOnlySqlTransaction("canary")), "25006 ReadOnlySqlTransaction"),
        (of_driver(errors.UniqueViolation("DETAIL: Key (id)=(canary) already exists.")), "23505 UniqueViolation"),
        (of_driver(Pg8000Error({"S": "ERROR", "C": "53300", "M": "canary"})), "53300 Pg8000Error"),
        (of_driver(sqlite3.OperationalError("database is locked")), "database is locked: SQLite has one writer"),
        (of_driver(sqlite3.OperationalError("unable to open canary")), "OperationalError"),
        (None, "StoreUnavailable"),
    ),
)
def test_the_log_has_the_class_of_an_error_and_the_code_of_a_servers(
    cause: Exception | None, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Never the rest of the text: it may quote arguments."""
    with caplog.at_level(logging.WARNING):
        OutageLog(Ticks()).refused("pay", unavailable(cause))

    assert f"({named})" in caplog.text
    assert "canary" not in caplog.text


def test_the_redis_client_has_these_classes_for_these_codes() -> None:
    known = {kind.__name__: code for code, kind in BaseParser.EXCEPTION_CLASSES.items() if isinstance(kind, type)}

    assert _REDIS_CODES.items() <= known.items()


UNAVAILABLE = (503, "store-unavailable", "2", None)


class Service:
    """A key service that may fail, even when it names its newest key."""

    def __init__(self) -> None:
        self._ring = KeyRing({"a": b"a" * 32})
        self.error: Exception | None = None
        self.mute = False

    @property
    def newest(self) -> str:
        if self.mute:
            raise TimeoutError
        return "a"

    def kids(self) -> Sequence[str]:
        return ["a"]

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        self._answer()
        return self._ring.wrap(kid, key, context=context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        self._answer()
        return self._ring.unwrap(kid, wrapped, context=context)

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


class _Cut:
    """The other parts of a store, behind the same connection."""

    def __init__(self, store: FaultyMemory) -> None:
        self._store, self._keys = store, store.data_keys
        self.locked = False
        """Whether only the data keys fail."""

    def __getattr__(self, name: str) -> Any:
        if self._store.down or self.locked:
            raise StoreUnavailable("the line is cut, as this test asked")
        return getattr(self._keys, name)


class CutOff(FaultyMemory):
    """Its data keys fail too while it is down."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=FrozenClock()))
        self.data_keys = _Cut(self)  # type: ignore[assignment]


def process(service: Service, store: FaultyMemory | None = None, *, encryption: str = "on") -> World:
    """One of several processes. Each caches the data keys that it has read, and no others."""
    world = new_world(
        Flask("tests.web.app"),
        store=store or CutOff(),
        encryption=encryption,
        key_ring=service,
        allow_plaintext_transport=True,
        on_store_down="allow",
    )

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid", 201

    return world


def told(world: World, key: str) -> tuple[int, str, str | None, str | None]:
    answer = world.post(key=key)
    status = answer.headers.get("Idempotency-Status")
    code = answer.get_json()["code"] if answer.is_json else answer.text
    return answer.status_code, code, answer.headers.get("Retry-After"), status


def test_cached_data_keys_serve_while_the_others_cannot_be_read() -> None:
    """A node is down, a table is locked or a store is full: the records are there, and show which requests have run."""
    service = Service()
    plain = new_world(Flask("tests.web.app"), store=CutOff())
    plain.view()(lambda: ("paid", 201))
    plain.post(key="plain")
    before = process(service, plain.store)
    before.post(key="sealed")
    world = process(service, plain.store)
    plain.store.data_keys.locked = True  # type: ignore[attr-defined]

    assert [(201, "paid", None, None), UNAVAILABLE, UNAVAILABLE] == [told(world, k) for k in ("plain", "sealed", "new")]
    assert 422 == world.post(key="sealed", data="another").status_code
    assert [] == world.runs


@pytest.mark.parametrize("encryption", ("on", "required"))
@pytest.mark.parametrize("error", (TimeoutError(), StoreUnavailable("its own word for it")), ids=("raises", "says so"))
def test_nothing_runs_while_only_the_keys_are_away(error: Exception, encryption: str) -> None:
    """The store is up and knows which requests have run: a request that bypasses it would run again."""
    service = Service()
    before = process(service, encryption=encryption)
    before.post(key="known")
    service.error = error
    world = process(service, before.store, encryption=encryption)

    answers = [told(world, key) for key in ("known", "new", "new")]

    assert [UNAVAILABLE] * 3 == answers
    assert [] == world.runs
    assert [False] * 3 == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]
    service.error = None
    assert (True, 201, [1]) == (is_replay(world.post(key="known")), world.post(key="new").status_code, world.runs)


def test_nothing_runs_while_the_service_does_not_name_its_newest_key() -> None:
    service = Service()
    world = process(service)
    world.post(key="known")
    service.mute = True

    # What is known is opened with a key that is remembered, and needs no newest one.
    assert [(201, "paid", None, None), UNAVAILABLE] == [told(world, key) for key in ("known", "new")]
    assert [1] == world.runs


def test_the_log_names_the_key_provider(caplog: pytest.LogCaptureFixture) -> None:
    """The operator looks at the right server."""
    service = Service()
    service.error = TimeoutError("canary")

    with caplog.at_level(logging.WARNING):
        told(process(service), "k")

    (message,) = [message for message in caplog.messages if "503" in message]
    assert "the key provider is not available (TimeoutError)" in message
    assert "canary" not in caplog.text


@pytest.mark.parametrize("keys", ("remembered", "never asked for", "away as well"))
def test_without_the_store_it_runs_unprotected_whatever_is_known_of_the_keys(keys: str) -> None:
    """`on_store_down="allow"` covers a silent store, even if the first read is for a data key."""
    service = Service()
    world = process(service)
    if keys == "remembered":
        world.post(key="before")
    if keys == "away as well":
        service.error = TimeoutError()
    world.store.down = True

    answer = told(world, "k")

    assert (201, "paid", None, "unprotected") == answer
    assert [True] == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]


class Forgetful(MemoryStore):
    """Knows no key, and reports that it lost them."""

    def __init__(self) -> None:
        super().__init__(clock=FrozenClock())
        self.asked: list[ClaimRequest] = []

    def claim(self, request: ClaimRequest, **terms: Any) -> Any:
        self.asked.append(request)
        raise StoreDataLoss("it was emptied", loss="missing")


def a_world(**policy: Any) -> World:
    world = new_world(store=Forgetful(), **policy)  # type: ignore[arg-type]

    @world.view(endpoint="pay")
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    return world


@pytest.mark.parametrize("on_store_down", ("refuse", "allow"))
def test_a_request_is_refused_and_never_run(on_store_down: str) -> None:
    """Even with `on_store_down="allow"`: the store is up, and a request that bypasses it would run again."""
    world = a_world(on_store_down=on_store_down)
    answer = world.post()

    assert (503, "memory-lost", "30") == (
        answer.status_code,
        (answer.json or {})["code"],
        answer.headers["Retry-After"],
    )
    assert [] == world.runs
    assert (["missing"], []) == ([each.loss for each in world.told(RefusedAfterDataLoss)], world.told(StoreFailed))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "born"),
    (
        ("01955eb2-0400-7abc-8def-0123456789ab", 0x01955EB20400 / 1000),
        ("01955EB2-0400-7ABC-BDEF-0123456789AB", 0x01955EB20400 / 1000),
        ("01955eb2-0400-4abc-8def-0123456789ab", None),
        ("01955eb2-0400-7abc-cdef-0123456789ab", None),
        ("01955eb204007abc8def0123456789ab", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1469922850.259),
        ("01arz3ndektsv4rrffq69g5fav", 1469922850.259),
        ("81ARZ3NDEKTSV4RRFFQ69G5FAV", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAU", None),
        ("01ARZ3NDEKTSV4RRFFQ69G5FAVX", None),
        ("order-17", None),
    ),
)
def test_the_claim_has_the_time_in_the_key(key: str, born: float | None) -> None:
    """Only UUIDs of version 7 and ULIDs hold a time."""
    world = a_world()
    world.post(key=key)

    assert [born] == [request.key_timestamp for request in world.store.asked]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("in_flight", "awaited"), (("wait", True), ("reject", False)))
def test_the_claim_has_whether_duplicates_wait(in_flight: str, awaited: bool) -> None:
    world = a_world(in_flight=in_flight)
    world.post()

    assert [awaited] == [request.notify_on_completion for request in world.store.asked]  # type: ignore[attr-defined]


def paid(**options: object) -> World:
    """A payment that ran once, with its response stored."""
    world = new_world(**options)  # type: ignore[arg-type]

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid", 201

    assert 201 == world.post().status_code
    return world


def kept(world: World) -> Record:
    record = world.record()
    assert record is not None
    return record


def spoil(world: World, data: bytes) -> None:
    """Another program has written to the store."""
    payload = kept(world).payload
    assert payload is not None
    spoilt = StoredPayload(data, payload.status, payload.success, payload.byte_size)
    assert world.store.responses.replace(world.store.calls[-1].key, payload, spoilt)


@pytest.mark.parametrize("on_store_down", ("refuse", "allow"))
def test_a_host_without_zstd_refuses_and_leaves_the_record(monkeypatch: pytest.MonkeyPatch, on_store_down: str) -> None:
    """The next retry may reach a host that can read it."""
    world = new_world(compression="zstd", on_store_down=on_store_down)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(1)
        return "paid " * 1000, 201

    first = world.post()
    with monkeypatch.context() as patch:
        patch.setattr("flask_idempotency.codec.compression._zstd", _absent)
        refused = world.post()
    again = world.post()

    assert (503, "store-unavailable") == (refused.status_code, refused.get_json()["code"])
    assert (True, first.data, [1]) == (is_replay(again), again.data, world.runs)


def _absent() -> None:
    raise ImportError


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every opened response unsafe to send: it has a header field with a line end."""

    def opened(self: EnvelopeCodec, *sealed: Any) -> StoredResponse:
        return StoredResponse(201, metadata=(("Location", "/1\r\nSet-Cookie: admin=1"),))

    monkeypatch.setattr(EnvelopeCodec, "open", opened)


def test_an_erased_response_is_410_and_never_run() -> None:
    """Whether it was sealed or not; each time, and with an event."""
    world = paid()
    world.store.data_keys.shred(world.store.calls[-1].key.tid)

    answers = [world.post() for _ in range(2)]

    assert [(410, "response-erased")] * 2 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (2, [1]) == (len(world.told(ErasedRefused)), world.runs)
    assert all("Retry-After" not in answer.headers for answer in answers)


def test_a_damaged_response_is_500_each_time_and_quarantined() -> None:
    """It never expires: the key of a completed payment never becomes new."""
    world = paid()
    spoil(world, b"rubbish")

    answers = [world.post() for _ in range(3)]
    world.clock.advance(100 * 24 * 3600)
    answers.append(world.post())

    assert [(500, "record-corrupt")] * 4 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (State.QUARANTINED, CORRUPT) == (kept(world).state, kept(world).reason)
    assert (1, [1]) == (len(world.told(RecordCorrupt)), world.runs)


def test_a_response_that_must_not_be_sent_is_quarantined_too(splitting: None) -> None:
    """It opens, and must still not be sent: found once, reported once."""
    world = paid()

    answers = [world.post() for _ in range(2)]

    assert [(500, "record-corrupt")] * 2 == [(answer.status_code, answer.get_json()["code"]) for answer in answers]
    assert (State.QUARANTINED, CORRUPT) == (kept(world).state, kept(world).reason)
    assert (1, [1]) == (len(world.told(RecordCorrupt)), world.runs)


def test_during_a_rotation_it_is_quarantined_under_the_secret_it_was_kept_with(splitting: None) -> None:
    """The newest secret's key has no record to mark corrupt."""
    world = paid()
    key = world.store.calls[-1].key
    rotated = new_world(Flask("tests.web.app"), secret=["new", "s"], store=world.store)
    rotated.view()(lambda: "never")

    assert 500 == rotated.post().status_code

    record = world.store.read(key)
    assert record is not None
    assert (State.QUARANTINED, CORRUPT) == (record.state, record.reason)


def test_a_store_that_is_gone_by_then_changes_nothing_for_the_caller(splitting: None) -> None:
    """The response is still damaged, and the next retry finds it again."""
    world = paid(on_store_down="allow")
    world.store.lose_request("mark_corrupt")

    answer = world.post()

    assert (500, "record-corrupt") == (answer.status_code, answer.get_json()["code"])
    assert ([1], State.COMPLETED) == (world.runs, kept(world).state)


@pytest.mark.parametrize("lost", ("key", "mark_corrupt", "read"))
def test_a_completed_request_never_runs_again_even_if_views_may_run_without_a_store(
    lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key service that is away while a response is opened, or a store that fails while a damaged one is examined."""
    world = paid(on_store_down="allow")

    def opened(self: EnvelopeCodec, *sealed: Any) -> StoredResponse:
        raise StoreUnavailable("no answer") if lost == "key" else CorruptRecord("damaged")

    monkeypatch.setattr(EnvelopeCodec, "open", opened)
    if lost != "key":
        world.store.lose_request(lost)

    answer = world.post()

    assert (503, "store-unavailable") == (answer.status_code, answer.get_json()["code"])
    assert ("2", [1]) == (answer.headers["Retry-After"], world.runs)

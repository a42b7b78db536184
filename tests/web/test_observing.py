"""What a request of an observing endpoint gets and does: the same as without a key. What is counted: see the other file."""

from __future__ import annotations

import errno
import gc
import io
import logging
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from threading import Semaphore
from typing import Any

import pytest
from flask import Flask, Response, abort, request, send_file, session
from werkzeug.exceptions import ClientDisconnected

from flask_idempotency import Idempotency, claim_here, current_claim, exempt, idempotent
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.events import Observation
from flask_idempotency.settings.cors import cors_headers
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.web import observing
from flask_idempotency.web.body_copies import TemporaryBody
from flask_idempotency.web.observing import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, WARNINGS, Observer
from flask_idempotency.web.request_state import RequestState
from tests.apps import LONG, FaultyMemory, World, new_world
from tests.web import observed as observed_module
from tests.web.observed import SLOW_SECONDS, Guise, granted, guarded, in_threads, joined, plain, sent

DEEDS = (
    "", "raise", "abort", "point", "point-503", "large", "cookie", "session", "stream", "stream-large", "stream-raises",
    "hook-raises", "hook-500", "file", "200", "204", "302", "401", "422", "500", "503",
)  # fmt: skip


def shop(**settings: Any) -> Guise:
    settings.setdefault("mode", "observe")
    return guarded(FaultyMemory(MemoryStore(clock=FrozenClock())), **settings)


def test_no_response_and_no_run_changes() -> None:
    """Not a byte and no header: the first request, its retry, another payload, a malformed key, and none."""
    for effects in ("plain", "marked", "deduplicated"):
        observed, bare = shop(effects=effects, required=True), plain()
        for do in DEEDS:
            about: dict[str, Any]
            for about in (
                {}, {}, {"data": b"other"}, {"key": "a,b"}, {"key": None}, {"data": b"x" * 5000}, {"data": {"a": "1"}},
            ):  # fmt: skip
                about = {"do": do, "key": f"k{do}", **about}
                assert bare.send(**about) == observed.send(**about), (do, effects)
        assert bare.runs == observed.runs, effects
        assert "failed" not in observed.outcomes(), effects


def test_the_view_has_no_claim() -> None:
    assert b'"claimed":false' in shop().send().body.replace(b" ", b"")
    assert b'"claimed":true' in shop(mode="enforce").send().body.replace(b" ", b"")


def test_nothing_is_written_that_enforcing_would_find() -> None:
    """So the switch to enforce begins with no record."""
    observed = shop()
    observed.send()

    assert [] == observed.store.calls
    enforced = guarded(observed.store, mode="enforce")
    assert "201 CREATED" == enforced.send().status
    assert ["claim", "complete"] == enforced.store.verbs()


def test_each_request_is_counted_as_enforcing_would_treat_it() -> None:
    for requests, expected in (
        ([{}, {}], ["new", "completed", "replayed"]),
        ([{}, {"data": b"x"}], ["new", "completed", "mismatch"]),
        ([{}, {"path": "/other"}], ["new", "completed", "mismatch"]),
        ([{"do": "raise"}, {}], ["new", "quarantined", "unknown"]),
        ([{"do": "500"}, {}], ["new", "quarantined", "unknown"]),
        ([{"do": "503"}, {}], ["new", "released", "new", "completed"]),
        ([{"do": "401"}, {}], ["new", "released", "new", "completed"]),
        ([{"do": "422"}, {}], ["new", "completed", "replayed"]),
        ([{"do": "hook-raises"}, {}], ["new", "quarantined", "unknown"]),
        ([{"do": "hook-500"}, {}], ["new", "quarantined", "unknown"]),
        ([{"do": "large"}, {}], ["new", "completed", "not-kept", "replayed"]),
        ([{"do": "stream"}, {}], ["new", "completed", "replayed"]),
        ([{"do": "stream-large"}, {}], ["new", "completed", "not-kept", "replayed"]),
        ([{"do": "stream-raises"}, {}], ["new", "quarantined", "unknown"]),
        ([{"do": "file"}, {}], ["new", "completed", "replayed"]),
        ([{"do": "cookie"}], ["new", "completed", "sets-cookie"]),
        ([{"do": "session"}], ["new", "completed", "sets-cookie"]),
        ([{"key": "a,b"}], ["bad-request"]),
        ([{"key": "x" * 256}], ["bad-request"]),
        ([{"data": b"x" * 2001}], ["bad-request"]),
        ([{"key": None}], ["unkeyed"]),
        ([{"headers": [("X-User", "bob")]}, {}], ["new", "completed", "new", "completed"]),
        ([{"headers": [("X-Tenant", "acme")]}, {}], ["new", "completed", "new", "completed"]),
        ([{"method": "GET"}], []),
    ):
        observed = shop()

        for about in requests:
            observed.send(**about)

        assert expected == observed.outcomes(), (requests, expected)


@pytest.mark.parametrize(
    ("do", "ending"), (("point", "quarantined"), ("point-503", "quarantined"), ("raise", "released"))
)
def test_a_marked_view_counts_by_its_point_of_no_return(do: str, ending: str) -> None:
    observed = shop(effects="marked")
    observed.send(do=do)

    assert ["new", ending] == observed.outcomes()


def test_the_keys_of_a_tenant_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would fill the store of endpoints that are enforced. What was not recorded is counted, and changes nothing."""
    for settings in ({"quota_records": 2}, {"quota_new_keys": (1, 60)}):
        if "quota_records" not in settings:
            monkeypatch.setattr("flask_idempotency.web.observing.MOST_OBSERVED", 2)
        observed = shop(**settings)
        remembered = observed.store.observations._observations._watched

        for number in range(3):
            observed.send(key=f"released{number}", do="503")
        for number in range(4):
            observed.send(key=f"k{number}")
            observed.send(key="k0")
        observed.send(key="other", headers=[("X-Tenant", "acme")])

        assert 3 == len(remembered), settings
        assert 5 == observed.outcomes().count("over-quota"), settings
        assert "completed" == observed.outcomes()[-1]
        assert 12 == len(observed.runs)


def test_a_required_key_that_is_missing_is_counted() -> None:
    observed = shop(required=True)
    observed.send(key=None)

    assert ["missing-key"] == observed.outcomes()


def test_a_lapsed_lease_counts_by_its_effects() -> None:
    """As after a worker that was killed: no request of its ends."""
    for effects, expected in (("plain", "unknown"), ("deduplicated", "taken-over")):
        clock = FrozenClock()
        observed = guarded(FaultyMemory(MemoryStore(clock=clock)), mode="observe", effects=effects)
        observed.entered = Semaphore(0)
        threads = in_threads(1, lambda guise=observed: guise.send(do="hold"))  # type: ignore[misc]
        assert observed.entered.acquire(timeout=60)
        clock.advance(31)

        observed.send()
        assert expected == observed.outcomes()[1]
        observed.leave.set()
        joined(threads)


def test_a_lease_is_renewed_while_the_view_runs() -> None:
    clock = FrozenClock()
    observed = guarded(FaultyMemory(MemoryStore(clock=clock)), mode="observe")
    observed.entered = Semaphore(0)
    threads = in_threads(1, lambda: observed.send(do="hold"))
    assert observed.entered.acquire(timeout=60)
    renewer = observer_of(observed).renewer
    (watch,) = renewer._due

    clock.advance(20)
    assert watch.run() == 10.0
    clock.advance(20)  # longer than the first lease
    observed.send()

    assert ["new", "conflict"] == observed.outcomes()
    observed.leave.set()
    joined(threads)
    assert "completed" == observed.outcomes()[-1]
    assert not renewer._due


def test_a_concurrent_duplicate_is_counted_with_its_time_apart() -> None:
    clock = FrozenClock()
    observed = guarded(FaultyMemory(MemoryStore(clock=clock)), mode="observe")
    observed.entered = Semaphore(0)
    threads = in_threads(1, lambda: observed.send(do="hold"))
    assert observed.entered.acquire(timeout=60)
    clock.advance(2)

    assert "201 CREATED" == observed.send().status
    (duplicate,) = [event for event in observed.events if event.outcome == "conflict"]
    assert 2.0 == duplicate.apart
    observed.leave.set()
    joined(threads)


@pytest.mark.parametrize(("in_flight", "status"), (("reject", "would-conflict"), ("wait", "would-wait")))
def test_warn_says_what_becomes_of_a_concurrent_duplicate(in_flight: str, status: str) -> None:
    observed = shop(mode="warn", in_flight=in_flight)
    observed.entered = Semaphore(0)
    threads = in_threads(1, lambda: observed.send(do="hold"))
    assert observed.entered.acquire(timeout=60)

    assert status == observed.send().get("Idempotency-Status")
    observed.leave.set()
    joined(threads)


@pytest.mark.parametrize(
    ("requests", "status"),
    (
        ([{}], None),
        ([{}, {}], "would-replay"),
        ([{}, {"data": b"x"}], "would-mismatch"),
        ([{"do": "raise"}, {}], "would-unknown"),
        ([{"do": "503"}, {}], None),
        ([{"key": "a,b"}], "would-refuse"),
        ([{"key": None}], "would-refuse"),
    ),
)
def test_warn_adds_one_header_and_nothing_else(requests: list[dict[str, Any]], status: str | None) -> None:
    observed, bare = shop(mode="warn", required=True), plain()

    for about in requests:
        answer, expected = observed.send(**about), bare.send(**about)
    found = answer.get("Idempotency-Status")
    answer.headers = [pair for pair in answer.headers if pair[0] != "Idempotency-Status"]

    assert (status, expected) == (found, answer)
    assert bare.runs == observed.runs


def test_scripts_of_other_origins_may_read_the_header_of_warn() -> None:
    assert "Idempotency-Status" in cors_headers()["expose_headers"]
    assert set(WARNINGS.values()) == {
        "would-replay", "would-conflict", "would-wait", "would-mismatch", "would-unknown", "would-refuse",
    }  # fmt: skip


# Whatever fails in us.


def failing(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("our own fault")


class Broken:
    """A way in which observing fails, set up on an application."""

    @staticmethod
    def store_is_down(guise: Guise) -> None:
        guise.store.observations.fault = StoreUnavailable("down")

    @staticmethod
    def store_has_a_fault(guise: Guise) -> None:
        guise.store.observations.fault = ZeroDivisionError("damaged")

    @staticmethod
    def loader_raises(guise: Guise) -> None:
        loaders_of(guise).principal = failing

    @staticmethod
    def loader_aborts(guise: Guise) -> None:
        loaders_of(guise).principal = lambda: abort(401)

    @staticmethod
    def loader_returns_nonsense(guise: Guise) -> None:
        loaders_of(guise).tenant = lambda: 7

    @staticmethod
    def fingerprint_fails(guise: Guise) -> None:
        observer_of(guise)._guard.reader.identities = ("nonsense",)

    @staticmethod
    def caller_cannot_be_told(guise: Guise) -> None:
        observer_of(guise)._guard.reader.credentials = None


def loaders_of(guise: Guise) -> Any:
    return guise.app.extensions["idempotency"].loaders


def observer_of(guise: Guise) -> Any:
    return guise.app.extensions["idempotency"].hooks.observer


BREAKS = [name for name in vars(Broken) if not name.startswith("_")]


@pytest.mark.parametrize("mode", ("observe", "warn"))
@pytest.mark.parametrize("broken", BREAKS)
def test_a_failure_of_ours_is_counted_and_changes_nothing(broken: str, mode: str) -> None:
    observed, bare = shop(mode=mode), plain()
    getattr(Broken, broken)(observed)

    for do in ("", "raise", "stream"):
        assert bare.send(do=do, data=b"abc") == observed.send(do=do, data=b"abc")
    assert (bare.runs, ["failed"] * 3) == (observed.runs, observed.outcomes())
    assert 3 == observed.counts()["failed"]


@pytest.mark.parametrize("method", ("capture", "judge_response", "_settle", "session_changed"))
def test_a_failure_after_the_view_is_counted_and_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a stream, and the key counts as new afterwards."""
    observed, bare = shop(), plain()
    match method:
        case "capture":
            monkeypatch.setattr("flask_idempotency.web.guard.capture", failing)
        case "judge_response":
            monkeypatch.setattr(observing, "judge_response", failing)
        case "_settle":
            monkeypatch.setattr(Observer, "_settle", failing)
        case "session_changed":
            monkeypatch.setattr("flask_idempotency.web.request_state.RequestState.session_changed", failing)
    dos = ("stream",) if method == "_settle" else ("", "stream")

    for do in dos:
        assert bare.send(do=do) == observed.send(do=do)

    assert ["new", "failed"] == observed.outcomes()[:2]
    monkeypatch.undo()
    for watch in list(observer_of(observed).renewer._due):
        watch.run()
    observed.send()
    assert ["new", "completed"] == observed.outcomes()[-2:]


def test_a_failing_receiver_of_the_signal_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from flask_idempotency import signals

    observed, bare = shop(), plain()
    signals.observation.connect(failing, sender=observed.app)

    assert bare.send() == observed.send()
    assert any("an observer failed" in message for message in caplog.messages)


def test_a_failing_decide_counts_as_enforcing_would_end_it() -> None:
    """It quarantines the key."""
    observed, bare = shop(decide=failing), plain()

    assert bare.send() == observed.send()
    assert ["new", "quarantined"] == observed.outcomes()


class Faults(Exception):
    """As libraries collect several errors in one: without an entry it is false."""

    def __len__(self) -> int:
        return 0


def test_an_error_that_is_false_is_judged_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(guise: Guise, do: str) -> Any:
        raise Faults

    monkeypatch.setattr(observed_module, "_done", fail)
    observed = shop(decide=lambda response, error: "keep" if error is None else "release")
    observed.send()

    assert ["new", "released"] == observed.outcomes()


def test_how_long_a_view_ran_does_not_count_what_the_store_took_before() -> None:
    observed = shop()
    now = 100.0
    observer_of(observed).paced.monotonic = lambda: now
    real = observed.store.observations._observations.observe

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 0.5
        return real(*arguments, **options)

    observed.store.observations._observations.observe = slow
    observed.send()

    assert [0.0, 0.0] == [event.seconds for event in observed.events if type(event) is Observation]


def test_an_outage_delays_one_request_in_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """The others do not ask the store, and are counted too."""
    observed = shop()
    now = 100.0
    watcher = observer_of(observed)
    watcher.paced.monotonic = lambda: now
    observed.store.observations.fault = StoreUnavailable("down")

    for _ in range(3):
        observed.send()
    assert ["observe"] == observed.store.observations.calls
    now += PAUSE_SECONDS
    observed.store.observations.fault = None
    observed.send()

    assert ["failed", "failed", "failed", "new", "completed"] == observed.outcomes()
    assert 1 == sum("could not observe" in message for message in caplog.messages)


def test_a_fault_of_the_store_is_counted_and_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Enforcing would answer 503, and the log would name the remedy."""
    observed = shop()
    observed.app.testing = False
    observed.store.observations.fault = ConfigurationError("tables are missing: run db upgrade")

    answer = observed.send()

    assert ("201 CREATED", ["failed"]) == (answer.status, observed.outcomes())
    assert [message for message in caplog.messages if "could not observe" in message]
    assert [message for message in caplog.messages if "was refused" in message] == []


def test_after_an_outage_one_request_tries_the_store_and_no_other_waits_beside_it() -> None:
    """A store that is silent, and not refusing, takes seconds to fail."""
    observed = shop()
    now = 100.0
    observer_of(observed).paced.monotonic = lambda: now
    observations, asked = observed.store.observations, []

    def silent(*arguments: Any, **options: Any) -> Any:
        asked.append(now)
        if len(asked) == 2:
            observed.send(key="beside")
        raise StoreUnavailable("down")

    observations._observations.observe = silent
    observed.send()
    now += PAUSE_SECONDS
    observed.send()

    assert [100.0, 100.0 + PAUSE_SECONDS] == asked
    assert ["failed"] * 3 == observed.outcomes()


@pytest.mark.parametrize("fails", (True, False))
@pytest.mark.parametrize("method", ("observe", "end"))
def test_a_slow_store_takes_a_twentieth_of_a_workers_time(
    method: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it answers in the end. A call that took four seconds is followed by eighty without one."""
    monkeypatch.setattr(observing, "SLOW_SECONDS", SLOW_SECONDS)
    observed = shop()
    now = 100.0
    observer_of(observed).paced.monotonic = lambda: now
    # Nothing is repeated in the background, at whatever time the machine has for it.
    monkeypatch.setattr(observer_of(observed).renewer, "add", lambda *arguments, **options: None)
    observations, asked = observed.store.observations, []
    real = getattr(observations._observations, method)

    def slow(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        asked.append(now)
        now += 4
        if fails:
            raise StoreUnavailable("down")
        return real(*arguments, **options)

    setattr(observations._observations, method, slow)
    observed.send()
    for second in range(79):
        now += 1
        observed.send(key=f"k{second}")
    assert [100.0] == asked
    now += 1
    observed.send(key="another")
    assert [100.0, 184.0] == asked
    now += LONGEST_PAUSE_SECONDS
    setattr(observations._observations, method, real)
    observed.send(key="third")
    observed.send(key="fourth")
    assert ["new", "completed"] * 2 == observed.outcomes()[-4:]


def test_a_worker_that_was_stopped_soon_observes_again() -> None:
    observed = shop()
    now = 100.0
    observer_of(observed).paced.monotonic = lambda: now
    observations = observed.store.observations
    real = observations._observations.observe

    def stopped(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 7200
        return real(*arguments, **options)

    observations._observations.observe = stopped
    observed.send()
    observations._observations.observe = real
    now += LONGEST_PAUSE_SECONDS
    observed.send(key="another")

    assert ["new", "completed"] == observed.outcomes()[-2:]


def test_an_end_that_the_store_did_not_take_is_repeated() -> None:
    observed = shop()
    observed.entered = Semaphore(0)
    watcher = observer_of(observed)
    now = 100.0
    watcher.paced.monotonic = lambda: now
    observed.store.observations.fault = None
    threads = in_threads(1, lambda: observed.send(do="hold"))
    assert observed.entered.acquire(timeout=60)
    observed.store.observations.fault = StoreUnavailable("down")
    observed.leave.set()
    joined(threads)
    assert ["new"] == observed.outcomes()

    observed.store.observations.fault = None
    now += PAUSE_SECONDS
    for watch in list(watcher.renewer._due):
        watch.run()
    observed.send()
    assert ["new", "completed", "replayed"] == observed.outcomes()


def test_a_cookie_is_reported_with_the_completion() -> None:
    """Which may come later, or never."""
    observed = shop()
    observations, watcher, now = observed.store.observations._observations, observer_of(observed), 100.0
    watcher.paced.monotonic, real = lambda: now, observations.end

    def lose(*arguments: Any, **options: Any) -> Any:
        raise StoreUnavailable("down")

    observations.end = lose
    observed.send(do="session")
    assert ["new"] == observed.outcomes()

    observations.end = real
    now += PAUSE_SECONDS
    for watch in list(watcher.renewer._due):
        watch.run()
    assert ["new", "completed", "sets-cookie"] == observed.outcomes()


def test_a_note_whose_reply_was_lost_is_taken_back() -> None:
    """Enforcing refuses the request, and its retry is new."""
    observed = shop()
    real = observed.store.observations._observations.observe

    def lose(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        raise StoreUnavailable("the reply was lost")

    watcher = observer_of(observed)
    now = 100.0
    watcher.paced.monotonic = lambda: now
    observed.store.observations._observations.observe = lose
    observed.send()
    observed.store.observations._observations.observe = real
    now += PAUSE_SECONDS
    for watch in list(watcher.renewer._due):
        watch.run()
    observed.send()

    assert ["failed", "new", "completed"] == observed.outcomes()


def test_an_interrupt_is_not_swallowed() -> None:
    """A server ends a thread by one."""
    observed = shop()

    def interrupted() -> str | None:
        raise SystemExit

    loaders_of(observed).principal = interrupted
    with pytest.raises(SystemExit):
        observed.send()


def test_an_error_of_an_application_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    observed = shop()
    loaders_of(observed).principal = failing

    for _ in range(2):
        observed.send()

    (line,) = [record for record in caplog.records if "could not observe" in record.message]
    assert line.levelno == logging.WARNING
    assert line.exc_info is not None


# The body.


class OneWay:
    """A server's stream: it has no position. It ends early, or fails where its data end."""

    def __init__(self, data: bytes, error: Exception | None = None) -> None:
        self._data, self._error = io.BytesIO(data), error

    def read(self, size: int = -1) -> bytes:
        got = self._data.read(size)
        if not got and self._error is not None:
            raise self._error
        return got

    def readline(self, size: int = -1) -> bytes:
        return self._data.readline(size)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")


def reading(guise: Guise, how: str) -> None:
    """Register a view that returns what it reads of its body, and how that ended."""

    @guise.app.post(f"/read/{how}", endpoint=how)
    def read() -> Any:
        got: list[bytes] = []
        try:
            match how:
                case "data":
                    got.append(request.get_data())
                case "pieces":
                    got.extend(iter(lambda: request.stream.read(100), b""))
                case "lines":
                    got.extend(request.stream)
                case "environ":
                    got += [request.environ["wsgi.input"].read(10), request.environ["wsgi.input"].read()]
                case _:
                    got.append(repr(sorted(request.form.items())).encode())
        except (ClientDisconnected, OSError):
            return b"".join([*got, b" and then it was disconnected"]), 400
        return b"".join(got)


BODIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "whole": (lambda: OneWay(b"line\n" * 300), {"CONTENT_LENGTH": "1500"}),
    "large": (lambda: OneWay(b"line of a large body\n" * 3_300), {"CONTENT_LENGTH": "69300"}),
    "truncated": (lambda: OneWay(b"line\n" * 300), {"CONTENT_LENGTH": "1600"}),
    "truncated large": (lambda: OneWay(b"line of a large body\n" * 3_300), {"CONTENT_LENGTH": "69301"}),
    "disconnected": (lambda: OneWay(b"line\n" * 300, OSError("reset")), {"CONTENT_LENGTH": "1600"}),
    "chunked": (
        lambda: OneWay(b"line\n" * 300),
        {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_LENGTH": ""},
    ),
    "chunked over the limit": (
        lambda: OneWay(b"line\n" * 500),
        {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_LENGTH": ""},
    ),
    "chunked disconnected": (
        lambda: OneWay(b"line\n" * 300, OSError("reset")),
        {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_LENGTH": ""},
    ),
    "disconnected large": (
        lambda: OneWay(b"line of a large body\n" * 3_300, OSError("reset")),
        {"CONTENT_LENGTH": "69301"},
    ),
    "seekable truncated": (lambda: io.BytesIO(b"line\n" * 300), {"CONTENT_LENGTH": "1600"}),
    "empty": (lambda: OneWay(b""), {"CONTENT_LENGTH": "0"}),
}


SMALL = [name for name in BODIES if "large" not in name]


@pytest.mark.parametrize(("mode", "most"), (("observe", 2000), ("observe", None), ("warn", 2000)))
def test_the_view_reads_the_body_as_if_it_were_unread(mode: str, most: int | None) -> None:
    """Also one that cannot be compared, because it is truncated or over the limit."""
    observed, bare = shop(mode=mode, form_field="key_field", max_request_body=most), plain()
    ways = ("data", "pieces", "lines", "environ", "form")
    for guise, how in product((observed, bare), ways):
        reading(guise, how)
    # Reading the lines of a large body is slow in Werkzeug: once is enough.
    for body, how in product(BODIES if mode == "observe" else SMALL, ways):
        make, environ = BODIES[body]
        kind = "application/x-www-form-urlencoded" if how == "form" else "text/plain"
        about: Any = {"key": f"{body}-{how}", "content_type": kind}
        answers = [
            guise.send(f"/read/{how}", environ={**environ, "wsgi.input": make()}, **about) for guise in (bare, observed)
        ]
        answers[1].headers = [pair for pair in answers[1].headers if pair[0] != "Idempotency-Status"]

        assert answers[0] == answers[1], (body, how)
        assert observed.outcomes(), (body, how)
        observed.events.clear()


class FullDisk(TemporaryBody):
    """A temporary file on a disk that takes some bytes and then no more."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 70_000

    raw: Any = property(lambda self: self)

    def write(self, data: Any) -> int:
        taken = min(self._left, len(data))
        self._left -= taken
        super().write(bytes(data)[:taken])
        if taken < len(data):
            raise OSError(errno.ENOSPC, "no space left on device")
        return taken


@pytest.mark.parametrize("how", ("data", "pieces", "lines"))
def test_a_full_disk_costs_no_byte_of_a_body(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observed, bare = shop(max_request_body=None), plain()
    monkeypatch.setattr("flask_idempotency.web.body_copies.TemporaryBody", FullDisk)
    answers = []
    for guise in (bare, observed):
        reading(guise, how)
        about = {"CONTENT_LENGTH": str(101 * 800), "wsgi.input": OneWay((b"line" * 24 + b"ends\n") * 800)}
        answers.append(guise.send(f"/read/{how}", environ=about, content_type="text/plain"))

    assert 101 * 800 == len(answers[0].body)
    assert answers[0] == answers[1]
    assert ["failed"] == observed.outcomes()


@pytest.mark.parametrize("method", ("tell", "seek"))
def test_a_stream_that_cannot_be_rewound_is_no_error(method: str) -> None:
    class Odd(io.BytesIO):
        pass

    observed, bare = shop(), plain()
    answers = []
    for guise in (bare, observed):
        stream = Odd(b"abc")
        setattr(stream, method, failing)
        answers.append(guise.send(environ={"wsgi.input": stream, "CONTENT_LENGTH": "3"}, do="201"))

    assert answers[0] == answers[1]


def test_a_body_that_a_hook_has_read_is_no_error() -> None:
    """Enforcing answers 500, because it could not compare the payload."""
    observed, bare = shop(), plain()
    for guise in (observed, bare):
        guise.app.before_request(lambda: request.stream.read(3) and None)
    answers = [guise.send(data=b"abcdef") for guise in (observed, bare)]

    assert answers[0] == answers[1]
    assert ["failed"] == observed.outcomes()


def test_a_body_is_fingerprinted_without_memory_of_it() -> None:
    observed = shop(max_request_body=None)
    for body in (b"x" * 300_000, b"x" * 300_000, b"y" * 300_000):
        observed.send(data=body)

    assert ["new", "completed", "replayed", "mismatch"] == observed.outcomes()


@pytest.mark.parametrize("do", ("", "stream", "409"))
def test_a_body_goes_with_its_request(do: str) -> None:
    """Without a garbage collection, as an enforced one does: each may have 64 KB."""
    observed = shop()
    bodies: list[weakref.ref[Any]] = []
    made = RequestState.__init__

    def remember(shadow: RequestState, *arguments: Any) -> None:
        made(shadow, *arguments)
        bodies.append(weakref.ref(shadow))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestState, "__init__", remember)
            for data in (b"a", b"a", b"b"):
                observed.send(do=do, data=data)
        assert [None] * 6 == [body() for body in bodies]  # the state of each request, and its shadow
    finally:
        gc.enable()


def test_a_key_in_a_form_is_found() -> None:
    observed, bare = shop(form_field="the_key"), plain()
    for form in ({"the_key": "k", "a": "1"}, {"the_key": "k", "a": "1"}, {"a": "1"}):
        for guise in (observed, bare):
            guise.send(key=None, data=form)

    assert ["new", "completed", "replayed", "unkeyed"] == observed.outcomes()
    assert bare.runs == observed.runs


# Sessions and callers.


def test_a_loader_that_reads_the_session_adds_no_vary() -> None:
    """Flask adds `Vary: Cookie` for a session that was read."""
    observed, bare = shop(principal=lambda: session.get("user", "alice")), plain()

    assert bare.send() == observed.send()
    assert ["new", "completed"] == observed.outcomes()


def test_a_session_that_the_view_reads_still_varies() -> None:
    observed, bare = shop(), plain()
    for guise in (observed, bare):

        @guise.app.post("/reads")
        def reads() -> str:
            return str(session.get("user"))

    assert bare.send("/reads") == observed.send("/reads")
    assert "Cookie" == observed.send("/reads").get("Vary")


def test_a_caller_is_counted_by_the_kind_of_its_credential() -> None:
    for headers, environ, kind in (
        ([], {}, "anonymous"),
        ([("Authorization", "Bearer t")], {}, "authorization"),
        ([("Cookie", "a=b")], {}, "cookie"),
        ([("Cookie", "a=b"), ("Authorization", "Bearer t")], {}, "authorization"),
        ([("X-API-Key", "t")], {}, "api-key"),
        ([("X-Forwarded-Client-Cert", "t")], {}, "certificate"),
        ([], {"SSL_CLIENT_S_DN": "CN=a"}, "certificate"),
        ([], {"SSL_CLIENT_VERIFY": "NONE"}, "anonymous"),
        ([], {"REMOTE_USER": "alice"}, "remote-user"),
        ([], {"OIDC_CLAIM_sub": "alice"}, "remote-user"),
        ([("X-Forwarded-User", "alice")], {}, "remote-user"),
        ([("X-Token", "t")], {}, "other"),
        ([("X-Ours", "t")], {}, "other"),
        ([("Authorization", " ")], {}, "anonymous"),
    ):
        observed = shop(credential_headers=["X-Ours"])
        observed.send(headers=headers, environ=environ)

        assert [("new", kind), ("completed", kind)] == observed.seen(), (headers, environ, kind)


def test_a_caller_without_a_name_would_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    observed, bare = shop(principal=lambda: None), plain()
    headers = [("Authorization", "Bearer t")]
    assert bare.send(headers=headers) == observed.send(headers=headers)

    assert [("bad-request", "authorization")] == observed.seen()
    (line,) = [message for message in caplog.messages if "would refuse" in message]
    assert "Bearer" not in line


def test_an_event_shows_no_key_and_no_name() -> None:
    observed = shop()
    observed.send(key="secret-key", headers=[("X-User", "secret-user"), ("X-Tenant", "secret-tenant")], data=b"secret")

    assert "secret" not in repr(observed.events)


# Policies.


def test_an_endpoint_enforces_while_the_application_observes() -> None:
    world = new_world(store=FaultyMemory(MemoryStore()), mode="observe")

    @world.view("/safe")
    @idempotent(mode="enforce")
    def safe() -> str:
        world.runs.append("safe")
        return "paid"

    @world.view("/seen")
    def seen() -> str:
        world.runs.append("seen")
        return "paid"

    for path in ("/safe", "/safe", "/seen", "/seen"):
        world.post(path, key=path)

    assert Counter(seen=2, safe=1) == Counter(world.runs)


def test_a_deferred_claim_is_observed_below_its_decorators() -> None:
    world = new_world(store=FaultyMemory(MemoryStore()), mode="warn")

    @world.view()
    @claim_here
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    answers = [world.post(), world.post()]
    assert (2, [None, "would-replay"]) == (
        len(world.runs),
        [answer.headers.get("Idempotency-Status") for answer in answers],
    )


def test_a_request_that_a_decorator_answers_above_claim_here_is_not_observed() -> None:
    """Enforcing would not look at its key."""
    world = new_world(store=FaultyMemory(MemoryStore()), mode="observe")

    @world.view(endpoint="pay")
    def pay() -> Any:
        return inner() if request.headers.get("X-User") != "mallory" else ("no", 403)

    @claim_here
    def inner() -> str:
        return "paid"

    pay.__dict__.update(inner.__dict__)
    world.post(headers={"X-User": "mallory"})
    assert [] == world.told(Observation)


def test_a_nested_dispatch_is_observed_by_itself() -> None:
    observed, bare = shop(), plain()
    for guise in (observed, bare):

        @guise.app.post("/outer")
        def outer(guise: Guise = guise) -> Any:
            inner = sent(guise.app, "/pay", key="inner")
            return inner.body, 201

    assert bare.send("/outer") == observed.send("/outer")
    assert ["new", "new", "completed", "completed"] == observed.outcomes()


def test_a_dispatch_of_the_same_environ_is_a_concurrent_duplicate() -> None:
    """As under enforce, where the inner one gets 409."""
    observed, bare = shop(), plain()
    for guise in (observed, bare):

        @guise.app.post("/outer")
        def outer(guise: Guise = guise) -> Any:
            if request.environ.get("again"):
                return "inner", 200
            environ = {**request.environ, "again": True}
            return Response.from_app(guise.app, environ)

    assert bare.send("/outer", data=b"abc") == observed.send("/outer", data=b"abc")
    assert ["new", "conflict", "completed"] == observed.outcomes()


def test_exempt_views_are_not_observed() -> None:
    world = new_world(store=FaultyMemory(MemoryStore()), mode="observe")

    @world.view()
    @exempt
    def pay() -> str:
        return "paid"

    world.post()
    assert [] == world.told(Observation)


def test_a_faulty_policy_does_not_close_an_observing_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world(store=FaultyMemory(MemoryStore()), mode="observe")

    @world.view()
    @idempotent(lease=100, max_runtime=50)
    def pay() -> str:
        return "paid"

    assert 200 == world.post().status_code
    assert any("must not be shorter than lease" in message for message in caplog.messages)


@pytest.mark.slow
def test_an_application_that_only_enforces_does_not_load_the_code() -> None:
    """Each process would pay for it, in memory and at its start."""
    program = (
        "import sys, flask, flask_idempotency as f; app = flask.Flask('x'); app.testing = True\n"
        f"f.Idempotency(app, store='memory://', secret={LONG!r})\n"
        "app.post('/pay', endpoint='pay')(lambda: 'paid')\n"
        "app.post('/see', endpoint='see')(f.idempotent(mode='observe')(lambda: 'seen'))\n"
        "for path in ('/pay', '/see'):\n"
        "    app.test_client().post(path, headers={'Idempotency-Key': 'k', 'X-User': 'alice'})\n"
        "    print('flask_idempotency.web.observing' in sys.modules)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert ["False", "True"] == printed.split()


def test_an_observer_that_cannot_be_loaded_changes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment may replace the files below a worker that runs."""
    observed, bare = shop(), plain()
    monkeypatch.setattr(observing, "Observer", failing)

    assert [bare.send(), bare.send()] == [observed.send(), observed.send()]
    assert any("could not observe" in message for message in caplog.messages)


class Forgetful(FaultyMemory):
    """A store that cannot remember observed keys."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        del self.observations


def test_a_store_without_observations_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match='mode="observe" needs a store that remembers observed keys'):
        Idempotency(Flask("x"), store=Forgetful(), secret=LONG, mode="observe")


def test_a_view_that_cannot_be_observed_runs(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged at the start. To close it would be the opposite of a first week without risk."""
    world: World = new_world(store=Forgetful())

    @world.view()
    @idempotent(mode="warn")
    def pay() -> str:
        return "paid"

    assert (200, None) == ((answer := world.post()).status_code, answer.headers.get("Idempotency-Status"))
    assert ["failed"] == [event.outcome for event in world.events if isinstance(event, Observation)]
    assert any('mode="warn" needs a store' in message for message in caplog.messages)


def test_a_switched_off_extension_observes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("tests.off")
    Idempotency(app, store=Forgetful(), secret=LONG, enabled=False, mode="observe")
    app.post("/pay")(lambda: "paid")

    assert b"paid" == sent(app).body
    assert any("IDEMPOTENCY_MODE is observe, and IDEMPOTENCY_ENABLED is False" in each for each in caplog.messages)


def test_quotas_and_replay_guards_are_not_asked() -> None:
    observed = shop(quota_in_flight=1)
    loaders = loaders_of(observed)
    loaders.quota = loaders.replay_guard = failing
    for key in ("a", "b", "b"):
        observed.send(key=key)

    assert ["new", "completed", "new", "completed", "replayed"] == observed.outcomes()


def test_an_enforced_request_makes_no_observation() -> None:
    enforced = shop(mode="enforce")
    for _ in range(2):
        enforced.send()
    enforced.send(key=None)

    assert ([], [], 1) == (enforced.store.observations.calls, enforced.outcomes(), granted(enforced))


def test_a_stream_that_is_dropped_is_judged_later() -> None:
    """No destructor calls the store: the next request does."""
    observed = shop()

    @observed.app.post("/endless")
    def endless() -> Response:
        return Response(iter(["a", "b"]), content_type="text/plain")

    def drop() -> None:
        with observed.app.test_request_context("/endless", method="POST", headers={"Idempotency-Key": "k"}):
            response = observed.app.full_dispatch_request()
            body = response.iter_encoded()
            next(iter(body))

    drop()
    assert ["new"] == observed.outcomes()
    observed.send(key="other")
    assert ["new", "completed", "not-kept", "new", "completed"] == observed.outcomes()


@pytest.mark.parametrize("kind", (bytes, bytearray, memoryview, str))
def test_a_stream_may_send_whatever_its_server_takes(kind: Any) -> None:
    observed, bare = shop(), plain()
    answers = []
    for guise in (observed, bare):
        pieces = [b"abc", b"def"] if kind is not str else ["abc", "def"]
        guise.app.post("/stream")(
            lambda pieces=pieces: Response(kind(piece) for piece in pieces if kind is not str or piece)
        )
        answers.append(guise.send("/stream"))

    assert answers[0] == answers[1]
    assert ["new", "completed"] == observed.outcomes()


class Two:
    """A body with a length, and an attribute that a hook may know."""

    pieces = 2

    def __iter__(self) -> Iterator[bytes]:
        return iter((b"abc", b"def"))

    def __len__(self) -> int:
        return self.pieces


@pytest.mark.parametrize("kind", ("abort", "sized", "empty", "generator", "file"))
def test_a_hook_finds_the_response_as_the_view_left_it(kind: str) -> None:
    """Whether a response is streamed decides, for one, what Flask-Compress compresses."""
    observed, bare = shop(), plain()
    answers, seen = [], []
    for guise in (observed, bare):

        @guise.app.post("/made")
        def made() -> Any:
            match kind:
                case "abort":
                    return abort(409)
                case "file":
                    return send_file(io.BytesIO(b"abcdef"), mimetype="text/plain")
                case "generator":
                    return Response(iter([b"abc"]))
                case _:
                    body = Two()
                    body.pieces = 2 if kind == "sized" else 0
                    return Response(body)

        @guise.app.after_request
        def looks(response: Response) -> Response:
            body = response.response
            about = response.is_streamed, response.is_sequence, bool(body), hasattr(body, "seek")
            seen.append((*about, getattr(body, "pieces", None)))
            return response

        answers.append(guise.send("/made"))

    assert answers[0] == answers[1]
    assert seen[0] == seen[1]
    assert ["new", "released" if kind == "abort" else "completed"] == observed.outcomes()


def test_the_body_of_a_stream_is_not_kept() -> None:
    """Only its length is counted."""
    observed = shop(max_body=10_000)
    taken: list[Any] = []

    @observed.app.post("/pieces")
    def pieces() -> Response:
        response = Response(iter(["a" * 1000, "é" * 500]), content_type="text/plain")
        taken.append(response)
        return response

    assert 2000 == len(observed.send("/pieces").body)
    assert b"" == taken[0].response.copied()
    assert 2000 == taken[0].response.byte_size


def test_steps_just_run() -> None:
    world = new_world(store=FaultyMemory(MemoryStore()), mode="observe")

    @world.app.before_request
    def early() -> None:
        current_claim.step("charge", world.runs.append, "early")

    @world.view()
    @idempotent(steps=("charge",))
    def pay() -> tuple[str, int]:
        current_claim.step("charge", world.runs.append, "in the view")
        return "paid", 201

    for _ in range(2):
        assert 201 == world.post().status_code
    assert ["early", "in the view"] * 2 == world.runs
    outcomes = [event.outcome for event in world.events if isinstance(event, Observation)]
    assert ["new", "completed", "replayed"] == outcomes

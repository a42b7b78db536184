"""The background thread, driven by hand: `tick` is its whole work, and the clock is ours."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import pytest

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.lease import DROPPABLE_LIMIT, FAILED_SECONDS, RETRY_SECONDS, LeaseRenewer


class Time:
    """A monotonic clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Patient:
    """Counts how often it was looked after; `answers` is what it says each time."""

    def __init__(self, answer: Callable[[], float | None] = lambda: 10.0) -> None:
        self.answer = answer
        self.tended = 0

    def run(self) -> float | None:
        self.tended += 1
        return self.answer()


def unavailable() -> float:
    raise StoreUnavailable


def unstartable(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def renewer(time: Time) -> LeaseRenewer:
    return LeaseRenewer(monotonic=time, threaded=False)


def test_tends_when_due_and_not_before(renewer: LeaseRenewer, time: Time) -> None:
    patient = Patient()
    renewer.add(patient, after=10.0)

    for _ in range(35):
        time.now += 1
        renewer.tick()

    assert 3 == patient.tended


def test_forgets_what_is_settled_and_what_says_it_is_done(renewer: LeaseRenewer, time: Time) -> None:
    settled, done = Patient(), Patient(lambda: None)
    renewer.add(settled, after=1.0)
    renewer.add(done, after=1.0)
    renewer.remove(settled)

    for _ in range(5):
        time.now += 10
        renewer.tick()

    assert (0, 1) == (settled.tended, done.tended)


def test_p11_a_failing_store_is_asked_again_soon(renewer: LeaseRenewer, time: Time) -> None:
    """One failed renewal neither ends the renewing nor waits for a third of the lease."""
    patient = Patient(unavailable)
    renewer.add(patient, after=10.0)
    time.now += 10
    renewer.tick()
    patient.answer = lambda: 10.0

    time.now += RETRY_SECONDS
    renewer.tick()

    assert 2 == patient.tended


def test_claims_of_a_node_that_is_gone_keep_nobody_waiting(renewer: LeaseRenewer, time: Time) -> None:
    """Each attempt at it may take seconds: those that failed come last, and one more failure among them ends the round."""
    broken, healthy = [Patient(unavailable) for _ in range(5)], Patient()
    for number, each in enumerate((*broken, healthy)):
        renewer.add(each, after=1.0 + number)
    time.now += 10
    renewer.tick()
    assert ([1] * 5, 1) == ([each.tended for each in broken], healthy.tended)

    time.now += max(RETRY_SECONDS, 10.0)
    renewer.tick()

    assert (6, 2) == (sum(each.tended for each in broken), healthy.tended)


def test_live_claims_take_no_room_from_abandoned_ones(renewer: LeaseRenewer) -> None:
    for _ in range(DROPPABLE_LIMIT):
        renewer.add(Patient(), after=100.0)
    alive = [Patient() for _ in range(3)]
    for each in alive:
        renewer.add(each, after=0.0, droppable=True)
    renewer.tick()

    assert [1, 1, 1] == [each.tended for each in alive]


def test_one_that_raises_anything_does_not_stop_the_rest(
    renewer: LeaseRenewer, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """A record that cannot be read must not let every other claim of this process lapse."""

    def odd() -> float:
        raise CorruptRecord("odd")

    broken, healthy = Patient(odd), Patient()
    renewer.add(broken, after=1.0)
    renewer.add(healthy, after=2.0)

    time.now += 5
    renewer.tick()
    time.now += FAILED_SECONDS
    renewer.tick()

    assert 2 == broken.tended
    assert 1 == healthy.tended
    assert "is tried again" in caplog.text


def test_what_is_watched_anew_while_it_is_tended_stays_watched(renewer: LeaseRenewer, time: Time) -> None:
    """A settlement that begins while the same claim is being renewed must not be forgotten by the renewal's end."""
    patient = Patient()

    def settled_meanwhile() -> None:
        renewer.add(patient, after=0.5)

    patient.answer = settled_meanwhile
    renewer.add(patient, after=1.0)
    time.now += 1
    renewer.tick()

    assert time.now + 0.5 == renewer._due[patient]


def test_a_thread_that_cannot_be_started_is_started_with_the_next_claim(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim is granted, so its view runs; the process must not go without renewals for ever."""
    renewer, tended = LeaseRenewer(), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", unstartable)
        renewer.add(Patient(), after=3600.0)
    assert "no thread can be started" in caplog.text

    renewer.add(Patient(lambda: tended.set()), after=0.0)

    assert tended.wait(60)


def test_spare_work_is_turned_away_when_there_is_too_much(renewer: LeaseRenewer) -> None:
    """A long outage cannot fill the memory with claims to give back; live claims are always watched."""
    for _ in range(DROPPABLE_LIMIT):
        renewer.add(Patient(), after=1.0, droppable=True)
    spare, live = Patient(), Patient()

    renewer.add(spare, after=1.0, droppable=True)
    renewer.add(live, after=1.0)

    assert spare not in renewer._due
    assert live in renewer._due


def test_the_thread_tends_without_being_told() -> None:
    tended = threading.Event()
    renewer = LeaseRenewer()
    renewer.add(Patient(), after=3600.0)

    renewer.add(Patient(lambda: tended.set()), after=0.0)

    assert tended.wait(60)


def test_a_dropped_renewer_is_collected() -> None:
    renewer, gone = LeaseRenewer(), threading.Event()
    renewer.add(Patient(), after=3600.0)
    thread = renewer._thread
    weakref.finalize(renewer, gone.set)

    del renewer

    assert gone.wait(60)
    assert thread is not None
    assert thread.daemon


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_renew_its_parents_claims(renewer: LeaseRenewer, time: Time) -> None:
    """A preloading server forks its workers: a claim whose owner is another process is not the child's to keep."""
    renewer.add(Patient(), after=1.0)

    pid = os.fork()
    if pid == 0:
        os._exit(len(renewer._due))
    _, status = os.waitpid(pid, 0)

    assert 0 == os.waitstatus_to_exitcode(status)
    assert 1 == len(renewer._due)


def test_drain_runs_what_is_not_due_yet_until_nothing_is_left() -> None:
    """A process that ends cannot wait for the next try, and must not leave while a write is on its way."""
    renewer = LeaseRenewer()
    answers = iter([0.01, None])
    twice = Patient(lambda: next(answers))
    renewer.add(twice, after=3600.0)

    assert 0 == renewer.drain(timeout=60.0)
    assert 2 == twice.tended


def test_drain_runs_by_itself_where_no_thread_does(renewer: LeaseRenewer) -> None:
    patient = Patient(lambda: None)
    renewer.add(patient, after=3600.0)

    assert 0 == renewer.drain(timeout=0.0)
    assert 1 == patient.tended


def test_drain_gives_up_after_its_timeout(renewer: LeaseRenewer) -> None:
    renewer.add(Patient(unavailable), after=0.0)

    assert 1 == renewer.drain(timeout=0.0)

"""Each process counts what happened, loses no count while it lives, and adds each count to the store once."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.activity import COUNTERS, FLUSH_SECONDS, FOLD_AT, Activity
from flask_idempotency.engine import events
from flask_idempotency.engine.activity import (
    EDGES,
    ENDINGS,
    LONGEST_COUNTER,
    MOST_ENDPOINTS,
    NEW_TIME,
    NOT_KEPT,
    OTHER_ENDPOINTS,
    OUTCOMES,
    REPLAYED_TIME,
    Counts,
    merged,
    would,
)
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.lease import LeaseRenewer

ROOT = Path(__file__).resolve().parents[1]
OWNER = b"shop"
WAIT_SECONDS = 60.0
"""Only a failure takes this long."""

NOT_COUNTED = {
    *("data-loss-detected", "claim-restored", "committed-early", "lease-expired", "renewal-failed"),
    *("max-runtime-exceeded", "completion-retrying", "completion-failed", "resolved", "resolver-asked"),
    *("step-finished", "step-recalled", "step-failed", "step-result-not-kept", "steps-changed"),
    *("key-voided", "step-settled", "finish-tried", "finish-gave-up", "tenant-erased", "responses-sealed"),
    *("quota-set", "store-initialised"),
    *("data-loss-acknowledged", "task-run", "messages-relayed", "message-dead", "message-settled", "janitor-missing"),
}
"""Events that are no outcome of a request and no ending of a claim."""


class Log:
    """Adds up counts as a store does: once for each token."""

    def __init__(self) -> None:
        self.total: dict[str, dict[str, int]] = {}
        self.sent: list[tuple[bytes, Counts]] = []
        self.error: Exception | None = None
        """What each call raises."""
        self.adds = True
        """Whether a call that raises has added the counts before: then its reply was lost."""
        self._added: set[bytes] = set()
        self._lock = threading.Lock()

    def add(self, owner: bytes, counts: Counts, *, token: bytes) -> None:
        assert owner == OWNER
        with self._lock:
            self.sent.append((token, merged([counts])))
            if token not in self._added and (self.error is None or self.adds):
                self._added.add(token)
                self.total = merged([self.total, counts])
        if self.error is not None:
            raise self.error

    def read(self, owner: bytes, *, length: int, seconds: float) -> Any:
        raise NotImplementedError


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(kind: type[Event], operation: str = "pay", **facts: Any) -> Event:
    return kind("r", operation, **{name: facts.get(name, 1) for name in facts_of(kind)})


REPLAY = made(events.ReplayServed)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def renewer(time: Time) -> LeaseRenewer:
    return LeaseRenewer(monotonic=time, threaded=False)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def activity(log: Log, renewer: LeaseRenewer) -> Activity:
    return Activity(log, owner=OWNER, renewer=renewer)


@pytest.fixture
def later(renewer: LeaseRenewer, time: Time) -> Callable[[], None]:
    """Let the time until the next flush pass."""

    def pass_by() -> None:
        time.now += FLUSH_SECONDS
        renewer.tick()

    return pass_by


def test_every_event_is_counted_or_listed_here() -> None:
    for kind in kinds():
        assert (kind in COUNTERS) != (name_of(kind) in NOT_COUNTED), kind


@pytest.mark.parametrize(
    ("event", "counters"),
    (
        (made(events.ClaimGranted, attempt=1), ["new"]),
        (made(events.ClaimGranted, attempt=2), ["taken-over"]),
        (made(events.ReplayServed), ["replayed"]),
        (made(events.ConflictRefused), ["conflict"]),
        (made(events.MismatchRefused), ["mismatch"]),
        (made(events.UnknownRefused), ["unknown"]),
        (made(events.QuotaRefused), ["over-quota"]),
        (made(events.ErasedRefused), ["erased"]),
        (made(events.VoidedRefused), ["voided"]),
        (made(events.RefusedAfterDataLoss), ["data-loss"]),
        (made(events.RecordCorrupt), ["corrupt"]),
        (made(events.ReplayForbidden), ["forbidden"]),
        (made(events.StoreFailed, unprotected=False, waiting=False), ["store-failed"]),
        (made(events.StoreFailed, unprotected=True, waiting=False), ["unprotected"]),
        (made(events.Completed, kept=True), ["completed"]),
        (made(events.Completed, kept=False), ["completed", "not-kept"]),
        (made(events.Released), ["released"]),
        (made(events.Quarantined), ["quarantined"]),
        (made(events.Reaped), ["quarantined"]),
        (made(events.Paused), ["paused"]),
    ),
    ids=lambda value: name_of(type(value)) if isinstance(value, Event) else ",".join(value),
)
def test_an_event_adds_1_to_its_counters(activity: Activity, log: Log, event: Event, counters: list[str]) -> None:
    activity.event(event)

    assert activity.flush()
    assert log.total == {"pay": dict.fromkeys(counters, 1)}


def test_a_request_that_waits_through_an_outage_is_counted_once(activity: Activity, log: Log) -> None:
    """It publishes an event for the outage, and another for what became of it."""
    activity.event(made(events.StoreFailed, unprotected=False, waiting=True))
    activity.event(made(events.ConflictRefused))

    assert activity.flush()
    assert log.total == {"pay": {"conflict": 1}}


def test_every_counter_of_an_event_has_a_meaning() -> None:
    used = {name for kind, counters in COUNTERS.items() for value in (0, 1, 2) for name in counters(_with(kind, value))}
    used |= {*COUNTERS[events.StoreFailed](made(events.StoreFailed, unprotected=True, waiting=False))}

    used -= {would(str(value), str(value)) for value in (0, 1, 2)}  # those of an observed request are in `OBSERVED`
    used -= {f"in-doubt:{value}" for value in (0, 1, 2)}  # and those of a step have its name
    assert used <= {*OUTCOMES, *ENDINGS, NOT_KEPT}
    assert {*OUTCOMES} - used == {"missing-key", "bad-request"}, "the guard counts these"
    assert max(map(len, used)) <= LONGEST_COUNTER


def _with(kind: type[Event], value: int) -> Event:
    return kind("r", "pay", **dict.fromkeys(facts_of(kind), value))


def test_events_that_are_not_counted_plan_no_flush(activity: Activity, log: Log, renewer: LeaseRenewer) -> None:
    activity.event(made(events.StepRecalled))

    assert not renewer._due
    assert activity.flush()
    assert not log.sent


def test_times_are_counted_by_slot(activity: Activity, log: Log) -> None:
    activity.timed(("pay", NEW_TIME, 0.0))
    activity.timed(("pay", NEW_TIME, EDGES[0]))
    activity.timed(("pay", NEW_TIME, EDGES[0] * 1.01))
    activity.timed(("refund", REPLAYED_TIME, 1e9))

    assert activity.flush()
    assert log.total == {"pay": {"t:new:0": 2, "t:new:1": 1}, "refund": {f"t:replayed:{len(EDGES)}": 1}}


def test_counts_go_to_the_store_every_ten_seconds_while_there_are_any(
    activity: Activity, log: Log, renewer: LeaseRenewer, later: Callable[[], None], time: Time
) -> None:
    activity.event(REPLAY)
    time.now += FLUSH_SECONDS - 0.1
    renewer.tick()
    assert not log.sent

    time.now += 0.1
    renewer.tick()
    assert log.total == {"pay": {"replayed": 1}}

    activity.event(REPLAY)
    activity.event(REPLAY)
    later()
    assert [counts for _, counts in log.sent] == [{"pay": {"replayed": 1}}, {"pay": {"replayed": 2}}]

    later()
    later()
    assert len(log.sent) == 2
    assert not renewer._due

    activity.count("pay", "missing-key")
    later()
    assert log.total == {"pay": {"replayed": 3, "missing-key": 1}}


def test_an_event_during_the_last_look_plans_the_next_flush(log: Log, renewer: LeaseRenewer, time: Time) -> None:
    """Between the empty queue and the end of the run: the renewer must not drop what was added since."""
    activity = Activity(log, owner=OWNER, renewer=renewer)
    activity.event(REPLAY)
    time.now += FLUSH_SECONDS
    renewer.tick()
    run = activity.run

    def interrupted() -> float | None:
        after = run()
        activity.event(REPLAY)
        return after

    activity.run = interrupted  # type: ignore[method-assign]
    time.now += FLUSH_SECONDS
    renewer.tick()
    activity.run = run  # type: ignore[method-assign]
    time.now += FLUSH_SECONDS
    renewer.tick()

    assert log.total == {"pay": {"replayed": 2}}


def test_an_event_that_was_interrupted_does_not_keep_later_ones_from_the_store(
    activity: Activity, log: Log, renewer: LeaseRenewer, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of a task may raise anywhere, also while the flush is planned."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(renewer, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            activity.event(REPLAY)

    activity.event(REPLAY)
    later()
    assert log.total == {"pay": {"replayed": 2}}


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_lose_no_count(log: Log) -> None:
    """Eight threads count, and flush in between: two of them may send the same counts."""
    activity = Activity(log, owner=OWNER, renewer=LeaseRenewer(threaded=False))
    begin = threading.Barrier(8)
    each = 3 * FOLD_AT

    def work() -> None:
        begin.wait(WAIT_SECONDS)
        for number in range(each):
            activity.event(REPLAY)
            activity.count("pay", "missing-key")
            if number % 700 == 0:
                activity.run()

    workers = [threading.Thread(target=work) for _ in range(8)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(WAIT_SECONDS)

    assert activity.flush()
    assert log.total == {"pay": {"replayed": 8 * each, "missing-key": 8 * each}}
    assert len(log.sent) > 8


def test_requests_fold_the_queue_themselves_while_the_store_is_slow(log: Log, renewer: LeaseRenewer) -> None:
    """Or the queue would fill the memory: the thread that folds it waits for the store."""
    activity = Activity(log, owner=OWNER, renewer=renewer)
    for _ in range(5 * FOLD_AT + 1):
        activity.event(REPLAY)

    assert len(activity._pending) == 1
    assert activity.flush()
    assert log.total == {"pay": {"replayed": 5 * FOLD_AT + 1}}


def test_no_event_waits_for_a_thread_that_folds(activity: Activity, log: Log) -> None:
    """A destructor may count while its own thread folds: to wait for the lock would be to wait for ever."""
    with activity._lock:
        for _ in range(FOLD_AT + 5):
            activity.event(REPLAY)

    assert activity.flush()
    assert log.total == {"pay": {"replayed": FOLD_AT + 5}}


def test_only_so_many_endpoints_are_counted_apart(activity: Activity, log: Log) -> None:
    for number in range(MOST_ENDPOINTS + 50):
        activity.count(f"e{number}", "replayed")
    assert activity.flush()
    activity.count("e1", "replayed")
    activity.count("late", "replayed")
    assert activity.flush()

    assert len(log.total) == MOST_ENDPOINTS + 1
    assert log.total[OTHER_ENDPOINTS] == {"replayed": 51}
    assert log.total["e1"] == {"replayed": 2}


def test_the_name_of_an_endpoint_is_cut_to_what_stores_hold(activity: Activity, log: Log) -> None:
    activity.count("e" * (LONGEST_NAME + 1), "replayed")

    assert activity.flush()
    assert list(log.total) == ["e" * LONGEST_NAME]


@pytest.mark.parametrize("adds", (True, False), ids=("reply-lost", "refused"))
@pytest.mark.parametrize("error", (StoreUnavailable("no answer"), RuntimeError("a bug")), ids=("down", "bug"))
def test_counts_reach_the_store_once_although_it_failed(
    activity: Activity, log: Log, later: Callable[[], None], adds: bool, error: Exception
) -> None:
    log.error, log.adds = error, adds
    activity.event(REPLAY)
    later()
    activity.count("pay", "conflict")
    later()
    log.error = None
    later()
    later()

    first, second, third, fourth = log.sent
    assert first == second == third, "the same token and the same counts"
    assert fourth[0] != first[0]
    assert fourth[1] == {"pay": {"conflict": 1}}
    assert log.total == {"pay": {"replayed": 1, "conflict": 1}}


def test_no_request_notices_a_store_that_is_down_and_the_log_says_it_once(
    activity: Activity, log: Log, later: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    log.error = StoreUnavailable("quotes a server")
    for _ in range(3):
        activity.event(REPLAY)
        later()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "(StoreUnavailable)" in lines[0]
    assert "quotes" not in lines[0]

    log.error = None
    later()
    log.error = StoreUnavailable()
    later()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def test_what_waits_for_a_store_that_is_down_is_bounded(
    activity: Activity, log: Log, later: Callable[[], None]
) -> None:
    log.error = StoreUnavailable()
    for number in range(20):
        for endpoint in range(MOST_ENDPOINTS + 10):
            activity.count(f"e{number}-{endpoint}", "replayed")
        later()

    assert len(activity._counts) <= MOST_ENDPOINTS + 1
    assert not activity._pending


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_adds_only_what_it_counted_itself(activity: Activity, log: Log) -> None:
    activity.event(REPLAY)
    activity.timed(("pay", NEW_TIME, 1.0))
    reader, writer = os.pipe()

    with activity._lock:  # held by a thread that the child does not have
        child = os.fork()
    if child == 0:
        try:
            activity.count("pay", "conflict")
            activity.timed(("pay", NEW_TIME, 0.0))
            activity.flush()
            os.write(writer, repr(log.total).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "{'pay': {'conflict': 1, 't:new:0': 1}}"
    os.waitpid(child, 0)

    assert activity.flush()
    assert log.total["pay"]["replayed"] == 1
    assert "conflict" not in log.total["pay"]


def test_a_child_that_was_forked_below_python_and_ends_adds_nothing_of_its_parent(
    activity: Activity, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran no fork hook, and may end before its first request: the parent has the same counts, under another token."""
    from flask_idempotency.engine import forks

    activity.count("pay", "conflict")
    monkeypatch.setattr(forks, "_callbacks", {0: (weakref.ref(activity), Activity._start_empty)})
    monkeypatch.setattr(forks, "pid", -1)

    assert activity.flush()
    assert {} == log.total


ENDING = """
import sys
from flask_idempotency.activity import Activity

class Log:
    calls = 0

    def add(self, owner, counts, *, token):
        self.calls += 1
        print("added", counts if self.calls == 1 else "again", flush=True)
        if sys.argv[1] == "down":
            raise OSError

activity = Activity(Log(), owner=b"shop")
activity.count("pay", "missing-key")
if sys.argv[1] == "down":
    activity.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize("store", ("up", "down"))
def test_a_process_that_ends_adds_its_last_counts_unless_the_store_is_down(store: str) -> None:
    """A command ends long before the first ten seconds are over. A store that is down must not delay it."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, store],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )

    assert done.stdout == "added {'pay': {'missing-key': 1}}\n"
    assert done.stderr.count("did not take the counts") == (store == "down")


def test_a_dropped_application_takes_its_counts_along(log: Log) -> None:
    activity = Activity(log, owner=OWNER)
    activity.event(REPLAY)
    weak = weakref.ref(activity)

    del activity
    gc.collect()

    assert weak() is None

"""Which requests the janitor tries to finish, when, and how it goes through many of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.journal import KEPT_REQUEST, MOST_TRIES, TRY, Entry, Journal, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.maintenance.finish import MOST_ATTEMPTS, PAUSES_SECONDS, FinishReport, finish, next_try
from flask_idempotency.maintenance.janitor import Batcher

NOW = 1000.0
HOUR = 3600.0


def entry(name: str, at: float = 0.0, effects: Any = "pure") -> Entry:
    return Entry(name.encode().ljust(12), name, effects, StepState.FINISHED, in_line=False, began_at=at)


def journal(*tries: float, kept: bool = True, effects: Any = "plain") -> Journal:
    """A journal with one step, the request and these tries."""
    beside = [entry(KEPT_REQUEST)] if kept else []
    return Journal((entry("charge", effects=effects), *beside, *(entry(TRY, at) for at in tries)))


def test_there_is_a_pause_before_each_try() -> None:
    assert MOST_TRIES == len(PAUSES_SECONDS)


@pytest.mark.parametrize(
    ("tries", "ended", "due"),
    (
        ((), 0.0, 0.0),
        ((5.0,), 5.0, 35.0),
        ((5.0, 35.0), 36.0, 155.0),
        ((5.0, 35.0, 155.0), 156.0, 755.0),
        ((5.0, 35.0, 155.0, 755.0), 756.0, 4355.0),
        ((5.0,), 100.0, 100.0),  # the client has come since, and its lease ended later
    ),
)
def test_a_try_is_due_after_its_pause_and_after_the_lease(tries: Sequence[float], ended: float, due: float) -> None:
    assert due == next_try(journal(*tries), ended=ended, within=24 * HOUR)


def test_no_try_is_left_after_the_last() -> None:
    assert inf == next_try(journal(1.0, 2.0, 3.0, 4.0, 5.0), ended=6.0, within=24 * HOUR)


def test_no_try_begins_at_the_end_of_resume_within() -> None:
    assert [inf, 35.0] == [next_try(journal(5.0), ended=5.0, within=within) for within in (30.0, 30.1)]


@pytest.mark.parametrize("left", (journal(kept=False), journal(effects="pure"), Journal()))
def test_what_has_no_effect_or_is_not_kept_is_never_tried(left: Journal) -> None:
    assert inf == next_try(left, ended=0.0, within=HOUR)


class Yard:
    """Records by name, in pages of two, and what became of each."""

    def __init__(self, *names: str, within: float | None = HOUR) -> None:
        self.names = list(names)
        self.seconds = within
        self.journals: dict[bytes, Journal | Exception] = {}
        self.looked: list[str] = []
        self.tried: list[str] = []
        self.outcome: Any = "completed"
        self.later: dict[bytes, tuple[bytes, float]] = {}
        self.on_expiry = OnExpiry.TAKEOVER
        self.attempts = 2
        self.time = 0.0

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        start = int(after or b"0")
        found = [self.seen(name) for name in self.names[start : start + 2]]
        more = start + 2 < len(self.names)
        return RecordPage(tuple(found), b"%d" % (start + 2) if more else None)

    def seen(self, name: str) -> SeenRecord:
        record: Any = SimpleNamespace(
            token=name.encode(), deadline=NOW - 1, on_expiry=self.on_expiry, attempt=self.attempts
        )
        return SeenRecord(StorageKey(name.encode().ljust(32), b"t" * 16), record)

    def read(self, key: StorageKey) -> Journal:
        name = key.rid.strip().decode()
        self.looked.append(name)
        found = self.journals.get(key.rid, journal())
        if isinstance(found, Exception):
            raise found
        return found

    def attempt(self, found: SeenRecord, journal: Journal) -> Any:
        self.tried.append(found.key.rid.strip().decode())
        self.time += 10
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def run(self, *, budget: float = 1000.0, horizon: float = NOW) -> FinishReport:
        recovery: Any = self
        journals: Any = self
        return finish(
            recovery,
            journals,
            horizon=horizon,
            drain=Batcher(budget=budget, sleep=lambda seconds: None, monotonic=lambda: self.time),
            within=lambda found: self.seconds,
            attempt=self.attempt,
            later=self.later,
        )


def test_every_page_is_looked_at() -> None:
    yard = Yard(*"abcde")

    assert FinishReport(completed=5) == yard.run()
    assert list("abcde") == yard.tried


@pytest.mark.parametrize("left_out", ("of another", "quarantined when its lease ends"))
def test_what_is_not_to_be_finished_is_not_looked_at(left_out: str) -> None:
    yard = Yard("a", "b", within=None if left_out == "of another" else HOUR)
    yard.on_expiry = OnExpiry.TAKEOVER if left_out == "of another" else OnExpiry.QUARANTINE

    assert (FinishReport(), []) == (yard.run(), yard.looked)


def test_the_budget_ends_a_run_between_two_requests() -> None:
    yard = Yard(*"abcd")

    assert FinishReport(completed=2, finished=False) == yard.run(budget=15.0)
    assert ["a", "b"] == yard.tried


def test_a_request_that_is_over_or_not_due_waits() -> None:
    yard = Yard("a", "b", "c")
    yard.journals[b"a".ljust(32)] = journal(NOW - 10)
    yard.journals[b"b".ljust(32)] = journal(kept=False)

    assert FinishReport(completed=1, waiting=2) == yard.run()
    assert ["c"] == yard.tried
    yard.seconds = 0.5
    assert FinishReport(waiting=3) == yard.run()


def test_a_record_that_was_claimed_many_times_is_left_to_its_client() -> None:
    """A janitor that starts again for each run cannot remember which claims began no try."""
    yard = Yard("a")
    yard.attempts = MOST_ATTEMPTS

    assert (FinishReport(waiting=1), []) == (yard.run(), yard.looked)


def test_a_journal_is_read_again_when_its_record_has_changed_or_its_try_is_due() -> None:
    yard = Yard("a")
    yard.journals[b"a".ljust(32)] = journal(NOW - 10)
    for _ in range(3):
        yard.run()
    assert ["a"] == yard.looked

    assert FinishReport(completed=1) == yard.run(horizon=NOW + 21)
    assert ["a", "a"] == yard.looked


@pytest.mark.parametrize("outcome", ("overtaken", "unreadable"))
def test_what_cannot_be_finished_is_looked_at_once_an_hour(outcome: str) -> None:
    yard = Yard("a", within=24 * HOUR)
    yard.outcome = outcome
    yard.run()
    yard.run(horizon=NOW + HOUR - 1)

    assert ["a"] == yard.tried
    yard.run(horizon=NOW + HOUR + 1)
    assert ["a", "a"] == yard.tried


def test_a_damaged_journal_hides_no_other() -> None:
    yard = Yard("a", "b")
    yard.journals[b"a".ljust(32)] = CorruptRecord("damaged")

    assert FinishReport(completed=1, unreadable=1) == yard.run()


def test_a_store_that_is_away_ends_the_run() -> None:
    yard = Yard(*"abcdefgh")
    yard.outcome = StoreUnavailable("away")

    with pytest.raises(StoreUnavailable):
        yard.run()
    assert 6 == len(yard.tried)

"""Contract of maintenance: removing expired records, and the task log and locks of the janitor."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Record, Unknown
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.testing.contract.quota import EXTRA, Tenant
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    CapableStore,
    Contract,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    near,
    placed,
    stand,
)
from flask_idempotency.testing.doubles import FrozenClock

AGES = 400 * 86400.0


def swept(store: CapableStore, *, horizon: float, limit: int = 1000) -> int:
    """How many were removed until none was left."""
    total = 0
    while removed := store.expiry.sweep(horizon=horizon, limit=limit):
        assert 0 < removed <= limit
        total += removed
    return total


class ExpiryContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Expiry`. Override `store`: it has `expiry` and `ledger`.

    A store may remove expired records by itself and return 0. It may hold records of other tests too.
    """

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine"))
    def test_what_is_not_settled_is_never_removed(
        self, store: CapableStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """After a year it is unchanged, because only an operator may let it run again."""
        key, _ = placed(store, clock, standing)
        clock.advance(AGES)
        before = found(store, key)
        swept(store, horizon=clock.now + AGES)

        assert before == found(store, key)

    def test_a_corrupt_record_is_never_removed(self, store: CapableStore, clock: FrozenClock) -> None:
        """Even after its response would have expired."""
        key, _ = placed(store, clock, "completed")
        store.mark_corrupt(key, PAYLOAD)
        clock.advance(AGES)
        before = found(store, key)
        swept(store, horizon=clock.now + AGES)

        assert before == found(store, key)
        assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    def test_an_answer_is_not_removed_before_its_life_is_over(self, store: CapableStore, clock: FrozenClock) -> None:
        """A horizon in the future removes no live record: the store's clock decides."""
        key, _ = placed(store, clock, "completed")
        clock.advance(KEEP - 0.125)
        swept(store, horizon=clock.now + AGES)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    def test_an_answer_is_not_removed_before_the_horizon(self, store: CapableStore, clock: FrozenClock) -> None:
        """If an operator had set the clock forward and corrects it, the response is still there."""
        key, _ = placed(store, clock, "completed")
        clock.advance(2 * 86400)
        swept(store, horizon=clock.now - 2 * 86400 + KEEP - 0.125)
        clock.advance(-2 * 86400)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    def test_what_is_over_is_free_before_and_after(self, store: CapableStore, clock: FrozenClock) -> None:
        """A removal only frees space: requests behave the same before and after."""
        removed, lying = a_key(), a_key()
        stand(store, clock, removed, "completed")
        fence = found(store, removed).fence
        clock.advance(KEEP)
        swept(store, horizon=clock.now)
        stand(store, clock, lying, "completed")
        clock.advance(KEEP)

        assert [store.read(key) for key in (removed, lying)] == [None, None]
        again = [granted(store.claim(a_request(key), token=a_token(), lease=LEASE)) for key in (removed, lying)]
        assert ([grant.attempt for grant in again], again[0].fence > fence) == ([1, 1], True)

    def test_a_released_key_keeps_its_fence_rising(self, store: CapableStore, clock: FrozenClock) -> None:
        """Also after its record was removed."""
        key, token = placed(store, clock, "in flight")
        fence = found(store, key).fence
        store.release(key, token)
        clock.advance(AGES)
        swept(store, horizon=clock.now)

        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > fence

    def test_a_key_in_its_next_life_is_not_removed_for_its_last(self, store: CapableStore, clock: FrozenClock) -> None:
        """The first response has expired, and an index entry of it must not remove the second one."""
        answered, flying = a_key(), a_key()
        for key in (answered, flying):
            stand(store, clock, key, "completed")
        clock.advance(KEEP)
        stand(store, clock, answered, "completed")
        stand(store, clock, flying, "in flight")
        swept(store, horizon=clock.now)

        assert isinstance(store.claim(a_request(answered), token=a_token(), lease=LEASE), Record)
        assert found(store, flying).remaining > 0

    @for_each("limit", (1, 3, 1000))
    def test_it_ends(self, store: CapableStore, clock: FrozenClock, limit: int) -> None:
        """If no expired record is left. One call removes at most `limit` records."""
        keys = self.answered(store, 7)
        clock.advance(KEEP)
        swept(store, horizon=clock.now, limit=limit)

        assert store.expiry.sweep(horizon=clock.now, limit=limit) == 0
        assert [store.read(key) for key in keys] == [None] * 7

    def test_several_remove_each_thing_once(self, store: CapableStore, clock: FrozenClock) -> None:
        """As many altogether as one alone would."""
        removed = list[int]()
        # Long after all that others have left here was over, theirs that begins ages from now too: it would be counted
        # in one round, and not in the other.
        clock.advance(10 * AGES)
        for sweepers in (1, 6):
            swept(store, horizon=clock.now)
            self.answered(store, 30)
            clock.advance(KEEP)
            alone = at_once(*[lambda: swept(store, horizon=clock.now, limit=4)] * sweepers)
            # A call that finds the rest locked by other calls may return before them.
            removed.append(sum(alone) + swept(store, horizon=clock.now))

        assert removed[0] == removed[1]

    def test_removal_during_claims_is_harmless(self, store: CapableStore, clock: FrozenClock) -> None:
        """A worker claims an expired key at the moment in which the store removes it."""
        keys = self.answered(store, 20)
        clock.advance(KEEP)

        def claim() -> int:
            for key in keys:
                granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
            return 0

        at_once(claim, *[lambda: swept(store, horizon=clock.now, limit=3)] * 3)
        assert [found(store, key).remaining > 0 for key in keys] == [True] * 20

    def test_the_ledger_is_what_it_was(self, store: CapableStore, clock: FrozenClock) -> None:
        """What was over was counted nowhere, and what is not still is."""
        tenant = Tenant(store)
        tenant.complete()
        clock.advance(KEEP + EXTRA + 1)
        tenant.complete()
        tenant.claim()
        held, token = tenant.claim()
        store.quarantine(held, token, "view-crashed")
        usage = tenant.usage
        swept(store, horizon=clock.now)

        assert (usage, Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        clock.advance(KEEP + EXTRA + 1)
        swept(store, horizon=clock.now)
        assert (Usage(2), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def answered(self, store: CapableStore, number: int) -> list[StorageKey]:
        """Keys whose responses expire together."""
        keys = [a_key() for _ in range(number)]
        for key in keys:
            token = a_token()
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            store.complete(key, token, PAYLOAD, keep=KEEP)
        return keys


# Tasks are written down, and done by one at a time.

LONGEST_NAME = 40
LONGEST_REPORT = 4000
LOCK = 60.0


def a_task() -> str:
    """A task that no other test uses, with the longest possible name."""
    return secrets.token_hex(LONGEST_NAME // 2)


class TaskLogContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.TaskLog`. Override `store`."""

    def test_the_time_is_the_stores(self, store: CapableStore, clock: FrozenClock) -> None:
        """Seconds since the epoch; it passes."""
        assert near(clock.now) == store.task_log.now()
        clock.advance(86400.5)
        assert near(clock.now) == store.task_log.now()

    def test_a_task_that_was_never_reported_is_not_in_the_book(self, store: CapableStore) -> None:
        """Also while another janitor runs the task."""
        task = a_task()
        assert store.task_log.lock(task, a_token(), lease=LOCK)

        assert task not in store.task_log.reports()

    def test_the_last_report_is_returned(self, store: CapableStore, clock: FrozenClock) -> None:
        """How long ago, and every character of it. What was written before is written over."""
        task, other = a_task(), a_task()
        store.task_log.report(task, '{"removed":1}')
        clock.advance(100)
        store.task_log.report(other, "{}")
        assert (near(100), '{"removed":1}') == report_of(store.task_log.reports(), task)
        store.task_log.report(task, '{"removed":2}')
        clock.advance(0.5)

        assert (near(0.5), '{"removed":2}') == report_of(store.task_log.reports(), task)
        assert (near(0.5), "{}") == report_of(store.task_log.reports(), other)

    @for_each(
        "report",
        (
            "",
            json.dumps({"said": "größer: ✓ \\ \" ' % :now"}, ensure_ascii=False),
            json.dumps("x" * (LONGEST_REPORT - 2)),
            json.dumps("é" * (LONGEST_REPORT - 2), ensure_ascii=False),
        ),
        ids=("empty", "odd", "longest", "longest, not ascii"),
    )
    def test_a_report_is_returned_unchanged(self, store: CapableStore, report: str) -> None:
        """Of any length, with any words."""
        task = a_task()
        store.task_log.report(task, report)

        assert report == store.task_log.reports()[task].report

    def test_a_report_outlives_everything(self, store: CapableStore, clock: FrozenClock) -> None:
        """A task that has not run for a year must be reported."""
        task = a_task()
        store.task_log.report(task, "{}")
        clock.advance(400 * 86400)

        assert (near(400 * 86400), "{}") == report_of(store.task_log.reports(), task)

    def test_one_at_a_time(self, store: CapableStore, clock: FrozenClock) -> None:
        """The second is refused, and a third; another task is another's."""
        task, token = a_task(), a_token()

        assert store.task_log.lock(task, token, lease=LOCK)
        assert [store.task_log.lock(task, a_token(), lease=LOCK) for _ in range(2)] == [False, False]
        assert store.task_log.lock(a_task(), a_token(), lease=LOCK)

    def test_a_dead_janitor_keeps_the_lock_until_its_lease_expires(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """The lock ends on time, and a late unlock has no effect."""
        task, dead, next_one = a_task(), a_token(), a_token()
        assert store.task_log.lock(task, dead, lease=LOCK)
        clock.advance(LOCK - 0.125)
        assert not store.task_log.lock(task, next_one, lease=LOCK)
        clock.advance(0.25)
        assert store.task_log.lock(task, next_one, lease=LOCK)
        assert not store.task_log.lock(task, dead, lease=LOCK)
        store.task_log.unlock(task, dead)
        assert not store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_lock_from_a_clock_that_was_set_back_is_free(self, store: CapableStore, clock: FrozenClock) -> None:
        """Or the task would rest for as long as the clock was ahead."""
        task = a_task()
        assert store.task_log.lock(task, a_token(), lease=LOCK)
        clock.advance(-2 * 86400)

        assert store.task_log.lock(task, a_token(), lease=LOCK)

    def test_to_take_it_again_is_to_have_it_as_long_again(self, store: CapableStore, clock: FrozenClock) -> None:
        """After a lost reply, a janitor does not know whether its first call was applied."""
        task, token = a_task(), a_token()
        assert store.task_log.lock(task, token, lease=LOCK)
        clock.advance(LOCK - 1)
        assert store.task_log.lock(task, token, lease=LOCK)
        clock.advance(LOCK - 1)
        assert not store.task_log.lock(task, a_token(), lease=LOCK)
        clock.advance(1.125)
        assert store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_released_lock_is_free_immediately(self, store: CapableStore) -> None:
        """Unlocking twice is harmless, and only the holder of a lock can unlock it."""
        task, token = a_task(), a_token()
        store.task_log.unlock(task, token)
        assert store.task_log.lock(task, token, lease=LOCK)
        store.task_log.unlock(task, a_token())
        assert not store.task_log.lock(task, a_token(), lease=LOCK)
        for _ in range(2):
            store.task_log.unlock(task, token)
        assert store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_lock_is_no_report(self, store: CapableStore, clock: FrozenClock) -> None:
        """Reports, locks and unlocks of two tasks are independent."""
        task, token = a_task(), a_token()
        store.task_log.report(task, '{"removed":1}')
        assert store.task_log.lock(task, token, lease=LOCK)
        clock.advance(10)
        store.task_log.report(task, '{"removed":2}')
        assert not store.task_log.lock(task, a_token(), lease=LOCK)
        store.task_log.unlock(task, token)

        assert (near(0), '{"removed":2}') == report_of(store.task_log.reports(), task)

    def test_of_many_one_has_it(self, store: CapableStore) -> None:
        """All other janitors learn that the lock is taken."""
        for _ in range(ROUNDS):
            task = a_task()
            taken = at_once(
                *[lambda task=task: store.task_log.lock(task, a_token(), lease=LOCK) for _ in range(THREADS)]
            )

            assert [each for each in taken if each] == [True]

    def test_of_many_one_inherits_it(self, store: CapableStore, clock: FrozenClock) -> None:
        """When its holder has died."""
        for _ in range(ROUNDS):
            task = a_task()
            assert store.task_log.lock(task, a_token(), lease=LOCK)
            clock.advance(LOCK + 1)
            taken = at_once(
                *[lambda task=task: store.task_log.lock(task, a_token(), lease=LOCK) for _ in range(THREADS)]
            )

            assert [each for each in taken if each] == [True]


def report_of(reports: Mapping[str, TaskReport], task: str) -> tuple[float, str]:
    return reports[task].ago, reports[task].report

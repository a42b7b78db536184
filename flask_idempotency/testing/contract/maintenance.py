"""Contract of maintenance: removing expired records, and the task log and locks of the janitor."""

from __future__ import annotations

import json
import secrets
from functools import partial

from flask_idempotency.engine.model import Record
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.testing.contract.quota import EXTRA, Tenant
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LONG,
    Contract,
    Kit,
    Quarantined,
    Standing,
    a_token,
    for_each,
    near,
)


class ExpiryContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Expiry`. Override `store`: it has `expiry` and `ledger`.

    A store may remove expired records by itself and return 0. It may hold records of other tests too.
    """

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover", "lapsed, quarantine", "condemned"))
    def test_what_is_not_settled_is_never_removed(self, kit: Kit, standing: Standing | Quarantined) -> None:
        """After a year it is unchanged, because only an operator may let it run again. A corrupt record is, too."""
        seen, _ = kit.stood(standing)
        kit.advance(LONG)
        with kit.unchanged(seen.key):
            kit.sweep(kit.now + LONG)

    def test_an_answer_is_not_removed_before_its_life_is_over(self, kit: Kit) -> None:
        """A horizon in the future removes no live record: the store's clock decides."""
        key, _ = kit.placed("completed")
        kit.advance(KEEP - 0.125)
        kit.sweep(kit.now + LONG)

        assert isinstance(kit.ask(key), Record)

    def test_an_answer_is_not_removed_before_the_horizon(self, kit: Kit) -> None:
        """If an operator had set the clock forward and corrects it, the response is still there."""
        key, _ = kit.placed("completed")
        kit.advance(2 * 86400)
        kit.sweep(kit.now - 2 * 86400 + KEEP - 0.125)
        kit.advance(-2 * 86400)

        assert isinstance(kit.ask(key), Record)

    def test_what_is_over_is_free_before_and_after(self, kit: Kit) -> None:
        """A removal only frees space: requests behave the same before and after."""
        removed = kit.complete()
        fence = kit.found(removed).fence
        kit.advance(KEEP)
        kit.sweep()
        lying = kit.complete()
        kit.advance(KEEP)

        assert [kit.store.read(key) for key in (removed, lying)] == [None, None]
        again = [kit.granted(key) for key in (removed, lying)]
        assert ([grant.attempt for grant in again], again[0].fence > fence) == ([1, 1], True)

    def test_a_released_key_keeps_its_fence_rising(self, kit: Kit) -> None:
        """Also after its record was removed."""
        key, token = kit.placed("in flight")
        fence = kit.found(key).fence
        kit.store.release(key, token)
        kit.advance(LONG)
        kit.sweep()

        assert kit.granted(key).fence > fence

    def test_a_key_in_its_next_life_is_not_removed_for_its_last(self, kit: Kit) -> None:
        """The first response has expired, and an index entry of it must not remove the second one."""
        answered, flying = kit.complete(), kit.complete()
        kit.advance(KEEP)
        kit.complete(answered)
        kit.begin(flying)
        kit.sweep()

        assert isinstance(kit.ask(answered), Record)
        assert kit.found(flying).remaining > 0

    @for_each("limit", (1, 3, 1000))
    def test_it_ends(self, kit: Kit, limit: int) -> None:
        """If no expired record is left. One call removes at most `limit` records."""
        keys = [kit.complete() for _ in range(7)]
        kit.advance(KEEP)
        kit.sweep(limit=limit)

        assert kit.store.expiry.sweep(horizon=kit.now, limit=limit) == 0
        assert [kit.store.read(key) for key in keys] == [None] * 7

    def test_several_remove_each_thing_once(self, kit: Kit) -> None:
        """As many altogether as one alone would."""
        removed = list[int]()
        # Long after all that others have left here was over, theirs that begins ages from now too: it would be counted
        # in one round, and not in the other.
        kit.advance(10 * LONG)
        for sweepers in (1, 6):
            kit.sweep()
            for _ in range(30):
                kit.complete()
            kit.advance(KEEP)
            alone = at_once(*[lambda: kit.sweep(limit=4)] * sweepers)
            # A call that finds the rest locked by other calls may return before them.
            removed.append(sum(alone) + kit.sweep())

        assert removed[0] == removed[1]

    def test_removal_during_claims_is_harmless(self, kit: Kit) -> None:
        """A worker claims an expired key at the moment in which the store removes it."""
        keys = [kit.complete() for _ in range(20)]
        kit.advance(KEEP)

        def claim() -> int:
            for key in keys:
                kit.granted(key)
            return 0

        at_once(claim, *[lambda: kit.sweep(limit=3)] * 3)
        assert [kit.found(key).remaining > 0 for key in keys] == [True] * 20

    def test_the_ledger_is_what_it_was(self, kit: Kit) -> None:
        """What was over was counted nowhere, and what is not still is."""
        tenant = Tenant(kit)
        tenant.complete()
        kit.advance(KEEP + EXTRA + 1)
        tenant.complete()
        tenant.begin()
        tenant.placed("quarantined")
        usage = tenant.usage
        kit.sweep()

        assert (usage, Drift()) == (tenant.usage, tenant.drift)
        kit.advance(KEEP + EXTRA + 1)
        kit.sweep()
        assert (Usage(2), Drift()) == (tenant.usage, tenant.drift)


# Tasks are written down, and done by one at a time.

LONGEST_NAME = 40
LONGEST_REPORT = 4000
LOCK = 60.0


def a_task() -> str:
    """A task that no other test uses, with the longest possible name."""
    return secrets.token_hex(LONGEST_NAME // 2)


class TaskLogContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.TaskLog`. Override `store`."""

    def test_the_time_is_the_stores(self, kit: Kit) -> None:
        """Seconds since the epoch; it passes."""
        assert near(kit.now) == kit.store.task_log.now()
        kit.advance(86400.5)
        assert near(kit.now) == kit.store.task_log.now()

    def test_a_task_that_was_never_reported_is_not_in_the_book(self, kit: Kit) -> None:
        """Also while another janitor runs the task."""
        task = a_task()
        assert kit.store.task_log.lock(task, a_token(), lease=LOCK)

        assert task not in kit.store.task_log.reports()

    def test_the_last_report_is_returned(self, kit: Kit) -> None:
        """How long ago, and every character of it. What was written before is written over."""
        task, other = a_task(), a_task()
        kit.store.task_log.report(task, '{"removed":1}')
        kit.advance(100)
        kit.store.task_log.report(other, "{}")
        assert TaskReport(near(100), '{"removed":1}') == kit.store.task_log.reports()[task]
        kit.store.task_log.report(task, '{"removed":2}')
        kit.advance(0.5)

        assert TaskReport(near(0.5), '{"removed":2}') == kit.store.task_log.reports()[task]
        assert TaskReport(near(0.5), "{}") == kit.store.task_log.reports()[other]

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
    def test_a_report_is_returned_unchanged(self, kit: Kit, report: str) -> None:
        """Of any length, with any words."""
        task = a_task()
        kit.store.task_log.report(task, report)

        assert report == kit.store.task_log.reports()[task].report

    def test_a_report_outlives_everything(self, kit: Kit) -> None:
        """A task that has not run for a year must be reported."""
        task = a_task()
        kit.store.task_log.report(task, "{}")
        kit.advance(LONG)

        assert TaskReport(near(LONG), "{}") == kit.store.task_log.reports()[task]

    def test_one_at_a_time(self, kit: Kit) -> None:
        """The second is refused, and a third; another task is another's."""
        task, token = a_task(), a_token()

        assert kit.store.task_log.lock(task, token, lease=LOCK)
        assert [kit.store.task_log.lock(task, a_token(), lease=LOCK) for _ in range(2)] == [False, False]
        assert kit.store.task_log.lock(a_task(), a_token(), lease=LOCK)

    def test_a_dead_janitor_keeps_the_lock_until_its_lease_expires(self, kit: Kit) -> None:
        """The lock ends on time, and a late unlock has no effect."""
        task, dead, next_one = a_task(), a_token(), a_token()
        assert kit.store.task_log.lock(task, dead, lease=LOCK)
        kit.advance(LOCK - 0.125)
        assert not kit.store.task_log.lock(task, next_one, lease=LOCK)
        kit.advance(0.25)
        assert kit.store.task_log.lock(task, next_one, lease=LOCK)
        assert not kit.store.task_log.lock(task, dead, lease=LOCK)
        kit.store.task_log.unlock(task, dead)
        assert not kit.store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_lock_from_a_clock_that_was_set_back_is_free(self, kit: Kit) -> None:
        """Or the task would rest for as long as the clock was ahead."""
        task = a_task()
        assert kit.store.task_log.lock(task, a_token(), lease=LOCK)
        kit.advance(-2 * 86400)

        assert kit.store.task_log.lock(task, a_token(), lease=LOCK)

    def test_to_take_it_again_is_to_have_it_as_long_again(self, kit: Kit) -> None:
        """After a lost reply, a janitor does not know whether its first call was applied."""
        task, token = a_task(), a_token()
        assert kit.store.task_log.lock(task, token, lease=LOCK)
        kit.advance(LOCK - 1)
        assert kit.store.task_log.lock(task, token, lease=LOCK)
        kit.advance(LOCK - 1)
        assert not kit.store.task_log.lock(task, a_token(), lease=LOCK)
        kit.advance(1.125)
        assert kit.store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_released_lock_is_free_immediately(self, kit: Kit) -> None:
        """Unlocking twice is harmless, and only the holder of a lock can unlock it."""
        task, token = a_task(), a_token()
        kit.store.task_log.unlock(task, token)
        assert kit.store.task_log.lock(task, token, lease=LOCK)
        kit.store.task_log.unlock(task, a_token())
        assert not kit.store.task_log.lock(task, a_token(), lease=LOCK)
        for _ in range(2):
            kit.store.task_log.unlock(task, token)
        assert kit.store.task_log.lock(task, a_token(), lease=LOCK)

    def test_a_lock_is_no_report(self, kit: Kit) -> None:
        """Reports, locks and unlocks of two tasks are independent."""
        task, token = a_task(), a_token()
        kit.store.task_log.report(task, '{"removed":1}')
        assert kit.store.task_log.lock(task, token, lease=LOCK)
        kit.advance(10)
        kit.store.task_log.report(task, '{"removed":2}')
        assert not kit.store.task_log.lock(task, a_token(), lease=LOCK)
        kit.store.task_log.unlock(task, token)

        assert TaskReport(near(0), '{"removed":2}') == kit.store.task_log.reports()[task]

    @for_each("died", (False, True))
    def test_of_many_one_has_it(self, kit: Kit, died: bool) -> None:
        """Also when its holder has died. All other janitors learn that the lock is taken."""
        for _ in range(ROUNDS):
            task = a_task()
            if died:
                assert kit.store.task_log.lock(task, a_token(), lease=LOCK)
                kit.advance(LOCK + 1)
            locks = [partial(kit.store.task_log.lock, task, a_token(), lease=LOCK) for _ in range(THREADS)]

            assert at_once(*locks).count(True) == 1

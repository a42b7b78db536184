"""Journals: the steps of a request, and the releases, pauses and resumptions that follow from them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import DataKeyMissing, StoreUnavailable
from flask_idempotency.engine.journal import (
    EMPTY,
    KEPT_REQUEST,
    LARGEST_ENTRY,
    MOST_TRIES,
    NEVER_RESUMED,
    TRY,
    Effects,
    Entry,
    Journal,
    JournalWrite,
    StepAnswer,
    StepState,
)
from flask_idempotency.engine.keys import StorageKey, paused_token
from flask_idempotency.engine.model import (
    ERASED,
    IN_DOUBT,
    Grant,
    InFlight,
    OnExpiry,
    Record,
    SealedBy,
    State,
    StoredPayload,
    Unknown,
)
from flask_idempotency.testing.contract.support import (
    KEEP,
    KID,
    LEASE,
    PAYLOAD,
    Contract,
    Kit,
    a_token,
    for_each,
    lost,
    near,
    pages,
)

BEGUN, FINISHED = StepState.BEGUN, StepState.FINISHED
RESULT = StoredPayload(data=b'{"id": 7}', status=0, success=True, byte_size=9)


def a_step(name: str = "charge", *, effects: Effects = "plain", state: StepState = BEGUN) -> Entry:
    return Entry(
        id=name.encode().ljust(12, b"\0"),
        name=name,
        effects=effects,
        state=state,
        in_line=True,
        digest=b"d" * 16,
        payload=RESULT if state is FINISHED else None,
    )


SETTLED = JournalWrite(0, [a_step(state=FINISHED)], steps=1)
"""What a resolver writes that has found the step done, and one that has found that it never happened."""
WITHDRAWN = JournalWrite(0, withdraw=[a_step().id])


class Work:
    """A claim of a key by an endpoint with steps, and its journal."""

    def __init__(self, kit: Kit, key: StorageKey | None = None, grant: Grant | None = None) -> None:
        self.kit: Kit = kit
        self.key: StorageKey = key or kit.key()
        self.grant: Grant = grant or kit.granted(self.key, on_expiry=OnExpiry.TAKEOVER)

    def write(
        self, number: int, *enter: Entry, withdraw: Sequence[bytes] = (), steps: int = 1, in_doubt: bool = False
    ) -> None:
        token, fence, writing = (
            self.grant.token,
            self.grant.fence,
            JournalWrite(number, enter, withdraw, steps, in_doubt),
        )
        self.kit.store.journals.write(self.key, token, fence=fence, writing=writing, lease=LEASE)

    def recall(self) -> Journal:
        """Read the journal as the owner of this claim."""
        return self.kit.store.journals.recall(self.key, self.grant.token, fence=self.grant.fence)

    def release(self) -> State | None:
        return self.kit.store.release(self.key, self.grant.token)

    def resume(self, seen: SeenRecord, journal: Journal, writing: JournalWrite) -> bool:
        """Settle steps as a resolver that has seen this record and this journal."""
        return self.kit.store.journals.resume(seen, journal, token=a_token(), writing=writing)

    @property
    def record(self) -> Record:
        return self.kit.found(self.key)

    @property
    def seen(self) -> SeenRecord:
        return self.kit.seen(self.key)

    @property
    def journal(self) -> Journal:
        return self.kit.store.journals.read(self.key)

    @property
    def stored(self) -> tuple[Record, Journal]:
        """All that the store has of this key."""
        return self.record, self.journal

    @property
    def states(self) -> dict[str, StepState]:
        return {entry.name: entry.state for entry in self.journal.entries}


def begun(kit: Kit, *enter: Entry, steps: int = 1, in_doubt: bool = False) -> Work:
    """Return a claim of a new key, after a first write of these steps."""
    work = Work(kit)
    if enter:
        work.write(1, *enter, steps=steps, in_doubt=in_doubt)
    return work


def walked(kit: Kit, tid: bytes, *, limit: int = 100) -> list[StepAnswer]:
    """Return each stored result of this tenant."""
    walk = kit.store.journals.walk
    return [answer for page in pages(lambda after: walk(after=after, limit=limit, tid=tid)) for answer in page.answers]


class JournalsContract(Contract):
    """The contract of `flask_idempotency.engine.journal.Journals`, and of releases that pause.

    Override `store`: it has `journals`, `recovery` and `data_keys`.
    """

    def test_a_journal_returns_what_was_written(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        kit.advance(2)
        finished = replace(a_step(state=FINISHED), took=2.0)
        work.write(2, finished)

        journal = work.recall()

        (entry,) = journal.entries
        assert (work.grant.fence, 2, True, False) == (journal.fence, journal.write, journal.complete, journal.erased)
        assert replace(finished, fence=0) == replace(entry, fence=0, began_at=0.0, finished_at=None)
        assert (work.grant.fence, near(kit.now - 2), near(kit.now)) == (entry.fence, entry.began_at, entry.finished_at)
        assert journal == work.journal

    def test_a_kept_request_of_the_largest_size_returns_beside_the_steps(self, kit: Kit) -> None:
        work = begun(kit)
        data = secrets.token_bytes(LARGEST_ENTRY)
        payload = replace(RESULT, data=data, byte_size=len(data))
        kept = replace(a_step(KEPT_REQUEST, effects="pure", state=FINISHED), in_line=False, payload=payload)
        tries = [
            replace(a_step(TRY, effects="pure", state=FINISHED), id=b"try %08d" % number)
            for number in range(1, MOST_TRIES + 1)
        ]
        work.write(1, a_step(), kept, in_doubt=True)
        work.write(2, a_step(state=FINISHED), kept, *tries)

        journal = work.journal

        assert journal.kept_request is not None
        assert journal.kept_request.payload == payload
        assert [each.id for each in journal.tries] == [each.id for each in tries]
        kit.store.journals.complete(work.key, work.grant.token, PAYLOAD, keep=KEEP)
        assert work.journal == EMPTY

    def test_a_plain_step_that_has_begun_keeps_others_out(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        kit.advance(LEASE + 1)

        assert isinstance(kit.ask(work.key), Unknown)
        assert State.QUARANTINED is work.record.state

    def test_a_finished_step_lets_others_go_on(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        work.write(2, a_step(state=FINISHED))
        kit.advance(LEASE + 1)

        successor = Work(kit, work.key)

        assert successor.grant.attempt == 2
        assert [entry.state for entry in successor.recall().entries] == [FINISHED]

    def test_a_late_finish_ends_the_quarantine(self, kit: Kit) -> None:
        work = begun(kit, a_step(), a_step("pay"), steps=2, in_doubt=True)
        kit.advance(LEASE + 1)
        kit.ask(work.key)

        work.write(2, a_step(state=FINISHED), steps=2, in_doubt=True)
        assert State.QUARANTINED is work.record.state
        work.write(3, a_step("pay", state=FINISHED), steps=2)

        record = work.record
        assert (record.state, record.reason, record.on_expiry) == (State.PROCESSING, "", OnExpiry.TAKEOVER)
        assert near(LEASE) == record.remaining

    @for_each("order", tuple(permutations((1, 2, 3))))
    def test_copies_of_writes_in_any_order_change_nothing(self, kit: Kit, order: tuple[int, ...]) -> None:
        work = begun(kit)

        def write(number: int) -> None:
            match number:
                case 1:
                    work.write(1, a_step(), in_doubt=True)
                case 2:
                    work.write(2, a_step(state=FINISHED))
                case 3:
                    work.write(3, a_step("mail", effects="deduplicated"), steps=2)

        for number in (1, 2, 3):
            write(number)
        before = work.stored
        kit.advance(1)
        for number in order:
            write(number)

        record = replace(work.record, remaining=before[0].remaining)
        assert before == (record, work.journal)

    def test_a_lost_write_is_told_by_the_next(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        work.write(3, a_step(state=FINISHED), a_step("ship"), steps=2, in_doubt=True)
        work.write(2, a_step(state=FINISHED), steps=1)

        assert work.states == {"charge": FINISHED, "ship": BEGUN}
        assert OnExpiry.QUARANTINE is work.record.on_expiry

    def test_what_is_finished_is_never_changed(self, kit: Kit) -> None:
        work = begun(kit, a_step(state=FINISHED))
        before = work.journal.entries
        work.write(2, replace(a_step(state=FINISHED), payload=PAYLOAD, kept=False))
        work.write(3, a_step(), withdraw=[a_step().id])

        assert before == work.journal.entries

    def test_only_this_claim_withdraws_what_it_has_begun(self, kit: Kit) -> None:
        work = begun(kit)
        mail, push = a_step("mail", effects="deduplicated"), a_step("push", effects="deduplicated")
        work.write(1, mail, push, steps=2)
        work.write(2, withdraw=[push.id])
        assert State.PROCESSING is work.release()
        successor = Work(kit, work.key)
        successor.write(1, withdraw=[mail.id])

        assert work.states == {"mail": BEGUN}

    @for_each("other", ("token", "fence"))
    def test_another_claim_writes_and_recalls_nothing(self, kit: Kit, other: str) -> None:
        """A claim that was sent twice may be granted later, under its old token and a new fence."""
        work = begun(kit, a_step(state=FINISHED))
        before = work.stored
        changed: dict[str, Any] = {"token": a_token()} if other == "token" else {"fence": work.grant.fence - 1}
        late = Work(kit, work.key, grant=replace(work.grant, **changed))

        assert lost(lambda: late.write(9, a_step("ship"), steps=2, in_doubt=True))
        assert lost(late.recall)

        assert before == work.stored

    @for_each("effects", ("plain", "deduplicated", "transactional"))
    def test_a_release_pauses_what_has_an_effect(self, kit: Kit, effects: Effects) -> None:
        work = begun(kit, a_step(effects=effects, state=FINISHED))

        assert State.PROCESSING is work.release()

        record = work.record
        assert (record.state, record.on_expiry) == (State.PROCESSING, OnExpiry.TAKEOVER)
        assert paused_token(work.grant.token) == record.token
        assert record.remaining <= 0
        before = work.stored
        assert State.PROCESSING is work.release()
        assert before == work.stored
        successor = Work(kit, work.key)
        assert successor.grant.attempt == 2
        assert [entry.state for entry in successor.recall().entries] == [FINISHED]

    def test_a_paused_token_is_spent(self, kit: Kit) -> None:
        work = begun(kit, a_step(state=FINISHED))
        work.release()
        before = work.stored

        assert kit.accepted(work.key, work.grant.token, "renew", "complete") == []
        assert lost(lambda: work.write(2, a_step("ship"), steps=2, in_doubt=True))
        with pytest.raises(StoreUnavailable):
            kit.ask(work.key, token=work.grant.token)

        assert before == work.stored

    def test_a_release_in_doubt_is_a_quarantine(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)

        for _ in range(2):
            assert State.QUARANTINED is work.release()

        record = work.record
        assert (record.state, record.reason) == (State.QUARANTINED, IN_DOUBT)
        # A call that timed out may still arrive: until the lease is over, no resolver says that it never happened.
        assert near(LEASE) == record.remaining
        assert work.states == {"charge": BEGUN}

    def test_a_journal_without_effects_is_freed(self, kit: Kit) -> None:
        work = begun(kit, a_step("quote", effects="pure", state=FINISHED), steps=0)

        assert work.release() is None

        assert (kit.store.read(work.key), work.journal) == (None, EMPTY)
        again = Work(kit, work.key)
        assert (again.grant.attempt, again.recall().entries) == (1, ())

    def test_a_completion_drops_the_journal(self, kit: Kit) -> None:
        work = begun(kit, a_step(state=FINISHED))

        for _ in range(2):
            kit.store.journals.complete(work.key, work.grant.token, PAYLOAD, keep=KEEP)

        assert (work.record.state, work.record.payload) == (State.COMPLETED, PAYLOAD)
        assert work.journal.entries == ()
        assert lost(lambda: work.write(2, a_step("ship"), in_doubt=True))

    @for_each("verb", ("resolve", "force_release"))
    def test_a_resolution_of_the_whole_drops_the_journal(self, kit: Kit, verb: str) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        work.release()

        if verb == "resolve":
            assert kit.resolve(work.seen)
        else:
            assert kit.store.recovery.force_release(work.seen)

        assert work.journal.entries == ()

    def test_a_settled_step_pauses_the_request(self, kit: Kit) -> None:
        work, fresh = begun(kit, a_step(), in_doubt=True), a_token()
        work.release()
        held, journal = work.seen, work.journal

        for _ in range(2):
            assert kit.store.journals.resume(held, journal, token=fresh, writing=SETTLED)

        record = work.record
        assert (State.PROCESSING, fresh, OnExpiry.TAKEOVER) == (record.state, record.token, record.on_expiry)
        assert record.remaining <= 0
        (entry,) = work.journal.entries
        assert (FINISHED, work.grant.fence, RESULT) == (entry.state, entry.fence, entry.payload)
        assert lost(lambda: work.write(2, a_step(state=FINISHED)))
        assert not work.resume(held, journal, SETTLED)
        assert Work(kit, work.key).grant.attempt == 2

    def test_a_resumed_request_waits_for_its_retry_from_now_on(self, kit: Kit) -> None:
        """Otherwise the janitor gives it up before the client sends its retry: its lease ended long ago."""
        work = begun(kit, a_step(), in_doubt=True)
        work.release()
        kit.advance(10 * LEASE)

        assert work.resume(work.seen, work.journal, SETTLED)

        assert near(0) == work.record.remaining
        assert not kit.store.journals.give_up(work.seen, horizon=kit.now - 1)

    def test_one_of_two_settled_steps_leaves_the_quarantine(self, kit: Kit) -> None:
        work = begun(kit, a_step(), a_step("ship"), steps=2, in_doubt=True)
        work.release()
        writing = JournalWrite(0, withdraw=[a_step("ship").id], steps=1, in_doubt=True)

        assert work.resume(work.seen, work.journal, writing)

        assert State.QUARANTINED is work.record.state
        assert work.states == {"charge": BEGUN}

    def test_a_resolver_loses_to_the_late_worker(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        kit.advance(LEASE + 1)
        kit.ask(work.key)
        held, journal = work.seen, work.journal
        work.write(2, a_step(state=FINISHED))
        before = work.stored

        assert not work.resume(held, journal, WITHDRAWN)

        assert before == work.stored

    def test_a_changed_journal_is_not_resumed(self, kit: Kit) -> None:
        work = begun(kit, a_step(), in_doubt=True)
        journal = work.journal
        work.write(2, a_step("ship"), steps=2, in_doubt=True)
        work.release()

        for other in (journal, replace(work.journal, complete=False)):
            assert not work.resume(work.seen, other, WITHDRAWN)

    @for_each("withdrawn", (True, False))
    def test_a_record_without_a_step_is_not_resumed(self, kit: Kit, withdrawn: bool) -> None:
        """No retry may go on with it: nothing says what it has done."""
        work = begun(kit)
        if withdrawn:
            work.write(1, a_step(), in_doubt=True)
            work.write(2, withdraw=[a_step().id], steps=0)
        kit.store.quarantine(work.key, work.grant.token, "view-crashed")
        before = work.record

        assert not work.resume(work.seen, work.journal, JournalWrite(0))

        assert before == work.record

    def test_what_was_seen_in_another_state_is_neither_resumed_nor_given_up(self, kit: Kit) -> None:
        """Neither while the worker runs nor when it has ended since: token, deadline and journal alone do not show it."""
        work = begun(kit, a_step(), in_doubt=True)
        running, journal = work.seen, work.journal

        assert not work.resume(running, journal, WITHDRAWN)
        kit.store.quarantine(work.key, work.grant.token, "steps-changed")
        before = work.stored
        assert not work.resume(running, journal, WITHDRAWN)
        assert before == work.stored
        assert work.resume(work.seen, journal, SETTLED)
        paused = work.record
        held = SeenRecord(work.key, replace(paused, state=State.QUARANTINED))
        assert not kit.store.journals.give_up(held, horizon=kit.now + 1)
        assert paused == work.record

    @for_each("state", ("running", "in doubt", "no journal", "paused"))
    def test_only_what_is_paused_with_effects_is_given_up(self, kit: Kit, state: str) -> None:
        work = begun(kit)
        if state != "no journal":
            work.write(1, a_step(state=FINISHED if state == "paused" else BEGUN), in_doubt=state != "paused")
        if state != "running":
            kit.advance(LEASE + 1)

        assert (state == "paused") == kit.store.journals.give_up(work.seen, horizon=kit.now)

        if state == "paused":
            assert (work.record.state, work.record.reason) == (State.QUARANTINED, NEVER_RESUMED)
            assert lost(lambda: work.write(2, a_step("ship"), steps=2))
        else:
            assert State.PROCESSING is work.record.state

    def test_a_write_renews_and_never_shortens(self, kit: Kit) -> None:
        work = begun(kit)
        kit.store.renew(work.key, work.grant.token, lease=10 * LEASE)
        work.write(1, a_step(state=FINISHED))
        assert near(10 * LEASE) == work.record.remaining
        kit.advance(10 * LEASE - 1)
        work.write(2)
        assert near(LEASE) == work.record.remaining
        assert isinstance(kit.ask(work.key), InFlight)

    def test_a_walk_finds_each_result_and_replaces_it(self, kit: Kit) -> None:
        tid, sealed = kit.key().tid, replace(RESULT, data=b"sealed again")
        works = [Work(kit, kit.key(tid)) for _ in range(3)]
        for work in works:
            work.write(1, a_step(state=FINISHED))

        assert {each.key.rid for each in works} == {answer.key.rid for answer in walked(kit, tid, limit=2)}
        assert kit.store.journals.replace(work.key, a_step().id, RESULT, sealed)
        assert not kit.store.journals.replace(work.key, a_step().id, RESULT, sealed)
        (entry,) = work.journal.entries
        assert sealed == entry.payload

    def test_a_count_names_the_keys_of_stored_results(self, kit: Kit) -> None:
        """The store may hold the journals of other tests, so only what these steps add counts."""
        work, kid = Work(kit), secrets.token_hex(4)
        assert kit.add_data_key(work.key.tid, 1, kid)
        before = kit.store.journals.count()
        sealed = replace(RESULT, sealed_by=SealedBy(kid, 1))
        steps = [
            a_step("plain", state=FINISHED),
            replace(a_step("sealed", state=FINISHED), payload=sealed),
            replace(a_step("also", state=FINISHED), payload=sealed),
            replace(a_step("erased", state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED)),
            a_step("begun", effects="deduplicated"),
        ]
        work.write(1, *steps, steps=5)

        after = kit.store.journals.count()

        changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert {"": 1, kid: 2} == changed

    @for_each("state", ("running", "paused", "in doubt"))
    def test_a_sweep_keeps_the_journal_of_each_record_that_may_go_on(self, kit: Kit, state: str) -> None:
        works = [begun(kit, a_step(state=FINISHED)) for _ in range(3)]
        for work in works:
            if state == "in doubt":
                work.write(2, a_step("ship"), steps=2, in_doubt=True)
            if state != "running":
                work.release()
        before = [work.journal for work in works]
        kit.advance(2 * KEEP)

        for _ in pages(lambda after: kit.store.journals.sweep(after=after, limit=2)):
            pass

        assert before == [work.journal for work in works]
        assert all(journal.entries for journal in before)

    def test_an_erasure_takes_the_results_of_its_tenant_only(self, kit: Kit) -> None:
        work, other = (begun(kit, a_step(state=FINISHED)) for _ in range(2))
        kit.advance(1)

        kit.store.data_keys.shred(work.key.tid)

        assert (work.journal.erased, other.journal.erased) == (True, False)
        assert work.recall().erased
        assert [answer.erased for answer in walked(kit, work.key.tid)] == [True]
        # That the step has finished is no personal data: it never runs again.
        assert work.states == {"charge": FINISHED}

    def test_a_write_for_an_erased_tenant_changes_nothing(self, kit: Kit) -> None:
        work = Work(kit)
        assert kit.add_data_key(work.key.tid)
        work.write(1, a_step(), in_doubt=True)
        kit.advance(1)
        kit.store.data_keys.shred(work.key.tid)

        sealed = replace(RESULT, sealed_by=SealedBy(KID, 1))
        with pytest.raises(DataKeyMissing) as missing:
            work.write(2, replace(a_step(state=FINISHED), payload=sealed))
        assert missing.value.erased
        assert (work.record.on_expiry, work.states) == (OnExpiry.QUARANTINE, {"charge": BEGUN})

        work.write(3, replace(a_step(state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED)))
        assert work.states == {"charge": FINISHED}

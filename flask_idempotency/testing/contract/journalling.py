"""Journals: the steps of a request, and the releases, pauses and resumptions that follow from them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

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
    a_key,
    a_token,
    for_each,
    lost,
    near,
    pages,
)

BEGUN, FINISHED = StepState.BEGUN, StepState.FINISHED
RESULT = StoredPayload(data=b'{"id": 7}', status=0, success=True, byte_size=9)


def a_step(
    name: str = "charge", *, effects: Effects = "plain", state: StepState = BEGUN, id: bytes | None = None
) -> Entry:
    return Entry(
        id=id or name.encode().ljust(12, b"\0"),
        name=name,
        effects=effects,
        state=state,
        in_line=True,
        digest=b"d" * 16,
        payload=RESULT if state is FINISHED else None,
    )


def claimed(kit: Kit, key: StorageKey) -> Grant:
    """Return a new grant of this key, as an endpoint with steps claims it."""
    return kit.granted(key, on_expiry=OnExpiry.TAKEOVER)


def wrote(
    kit: Kit,
    key: StorageKey,
    grant: Grant,
    number: int,
    *enter: Entry,
    withdraw: Sequence[bytes] = (),
    steps: int = 1,
    in_doubt: bool = False,
) -> None:
    writing = JournalWrite(number, enter, withdraw, steps, in_doubt)
    kit.store.journals.write(key, grant.token, fence=grant.fence, writing=writing, lease=LEASE)


def begun(kit: Kit, *enter: Entry, steps: int = 1, in_doubt: bool = False) -> tuple[StorageKey, Grant]:
    """Return a new key and its grant, after a first write of these steps."""
    key = a_key()
    grant = claimed(kit, key)
    if enter:
        wrote(kit, key, grant, 1, *enter, steps=steps, in_doubt=in_doubt)
    return key, grant


def states(journal: Journal) -> dict[str, StepState]:
    return {entry.name: entry.state for entry in journal.entries}


def walked(kit: Kit, tid: bytes, *, limit: int = 100) -> list[StepAnswer]:
    """Return each stored result of this tenant."""
    walk = kit.store.journals.walk
    return [answer for page in pages(lambda after: walk(after=after, limit=limit, tid=tid)) for answer in page.answers]


class JournalsContract(Contract):
    """The contract of `flask_idempotency.engine.journal.Journals`, and of releases that pause.

    Override `store`: it has `journals`, `recovery` and `data_keys`.
    """

    def test_a_journal_returns_what_was_written(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        kit.advance(2)
        finished = replace(a_step(state=FINISHED), took=2.0)
        wrote(kit, key, grant, 2, finished)

        journal = kit.store.journals.recall(key, grant.token, fence=grant.fence)

        (entry,) = journal.entries
        assert (grant.fence, 2, True, False) == (journal.fence, journal.write, journal.complete, journal.erased)
        assert replace(finished, fence=0) == replace(entry, fence=0, began_at=0.0, finished_at=None)
        assert (grant.fence, near(kit.now - 2), near(kit.now)) == (entry.fence, entry.began_at, entry.finished_at)
        assert journal == kit.store.journals.read(key)

    def test_a_kept_request_of_the_largest_size_returns_beside_the_steps(self, kit: Kit) -> None:
        key, grant = begun(kit)
        data = secrets.token_bytes(LARGEST_ENTRY)
        payload = replace(RESULT, data=data, byte_size=len(data))
        kept = replace(a_step(KEPT_REQUEST, effects="pure", state=FINISHED), in_line=False, payload=payload)
        tries = [
            replace(a_step(TRY, effects="pure", state=FINISHED), id=b"try %08d" % number)
            for number in range(1, MOST_TRIES + 1)
        ]
        wrote(kit, key, grant, 1, a_step(), kept, in_doubt=True)
        wrote(kit, key, grant, 2, a_step(state=FINISHED), kept, *tries)

        journal = kit.store.journals.read(key)

        assert journal.kept_request is not None
        assert journal.kept_request.payload == payload
        assert [each.id for each in journal.tries] == [each.id for each in tries]
        kit.store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)
        assert kit.store.journals.read(key) == EMPTY

    def test_a_plain_step_that_has_begun_keeps_others_out(self, kit: Kit) -> None:
        key, _ = begun(kit, a_step(), in_doubt=True)
        kit.advance(LEASE + 1)

        assert isinstance(kit.ask(key), Unknown)
        assert State.QUARANTINED is kit.found(key).state

    def test_a_finished_step_lets_others_go_on(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        wrote(kit, key, grant, 2, a_step(state=FINISHED))
        kit.advance(LEASE + 1)

        successor = claimed(kit, key)

        assert successor.attempt == 2
        assert states(kit.store.journals.recall(key, successor.token, fence=successor.fence)) == {"charge": FINISHED}

    def test_a_late_finish_ends_the_quarantine(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), a_step("pay"), steps=2, in_doubt=True)
        kit.advance(LEASE + 1)
        kit.ask(key)

        wrote(kit, key, grant, 2, a_step(state=FINISHED), steps=2, in_doubt=True)
        assert State.QUARANTINED is kit.found(key).state
        wrote(kit, key, grant, 3, a_step("pay", state=FINISHED), steps=2)

        record = kit.found(key)
        assert (record.state, record.reason, record.on_expiry) == (State.PROCESSING, "", OnExpiry.TAKEOVER)
        assert near(LEASE) == record.remaining

    @for_each("order", tuple(permutations((1, 2, 3))))
    def test_copies_of_writes_in_any_order_change_nothing(self, kit: Kit, order: tuple[int, ...]) -> None:
        key, grant = begun(kit)

        def write(number: int) -> None:
            match number:
                case 1:
                    wrote(kit, key, grant, 1, a_step(), in_doubt=True)
                case 2:
                    wrote(kit, key, grant, 2, a_step(state=FINISHED))
                case 3:
                    wrote(kit, key, grant, 3, a_step("mail", effects="deduplicated"), steps=2)

        for number in (1, 2, 3):
            write(number)
        before = kit.found(key), kit.store.journals.read(key)
        kit.advance(1)
        for number in order:
            write(number)

        record = replace(kit.found(key), remaining=before[0].remaining)
        assert before == (record, kit.store.journals.read(key))

    def test_a_lost_write_is_told_by_the_next(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        wrote(kit, key, grant, 3, a_step(state=FINISHED), a_step("ship"), steps=2, in_doubt=True)
        wrote(kit, key, grant, 2, a_step(state=FINISHED), steps=1)

        assert states(kit.store.journals.read(key)) == {"charge": FINISHED, "ship": BEGUN}
        assert OnExpiry.QUARANTINE is kit.found(key).on_expiry

    def test_what_is_finished_is_never_changed(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(state=FINISHED))
        before = kit.store.journals.read(key).entries
        wrote(kit, key, grant, 2, replace(a_step(state=FINISHED), payload=PAYLOAD, kept=False))
        wrote(kit, key, grant, 3, a_step(), withdraw=[a_step().id])

        assert before == kit.store.journals.read(key).entries

    def test_only_this_claim_withdraws_what_it_has_begun(self, kit: Kit) -> None:
        key, grant = begun(kit)
        mail, push = a_step("mail", effects="deduplicated"), a_step("push", effects="deduplicated")
        wrote(kit, key, grant, 1, mail, push, steps=2)
        wrote(kit, key, grant, 2, withdraw=[push.id])
        assert State.PROCESSING is kit.store.release(key, grant.token)
        successor = claimed(kit, key)
        wrote(kit, key, successor, 1, withdraw=[mail.id])

        assert states(kit.store.journals.read(key)) == {"mail": BEGUN}

    @for_each("other", ("token", "fence"))
    def test_another_claim_writes_and_recalls_nothing(self, kit: Kit, other: str) -> None:
        """A claim that was sent twice may be granted later, under its old token and a new fence."""
        key, grant = begun(kit, a_step(state=FINISHED))
        before = kit.found(key), kit.store.journals.read(key)
        late = replace(grant, token=a_token()) if other == "token" else replace(grant, fence=grant.fence - 1)

        assert lost(lambda: wrote(kit, key, late, 9, a_step("ship"), steps=2, in_doubt=True))
        assert lost(lambda: kit.store.journals.recall(key, late.token, fence=late.fence))

        assert before == (kit.found(key), kit.store.journals.read(key))

    @for_each("effects", ("plain", "deduplicated", "transactional"))
    def test_a_release_pauses_what_has_an_effect(self, kit: Kit, effects: Effects) -> None:
        key, grant = begun(kit, a_step(effects=effects, state=FINISHED))

        assert State.PROCESSING is kit.store.release(key, grant.token)

        record = kit.found(key)
        assert (record.state, record.on_expiry) == (State.PROCESSING, OnExpiry.TAKEOVER)
        assert paused_token(grant.token) == record.token
        assert record.remaining <= 0
        before = kit.found(key), kit.store.journals.read(key)
        assert State.PROCESSING is kit.store.release(key, grant.token)
        assert before == (kit.found(key), kit.store.journals.read(key))
        successor = claimed(kit, key)
        assert successor.attempt == 2
        assert states(kit.store.journals.recall(key, successor.token, fence=successor.fence)) == {"charge": FINISHED}

    def test_a_paused_token_is_spent(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(state=FINISHED))
        kit.store.release(key, grant.token)
        before = kit.found(key), kit.store.journals.read(key)

        assert lost(lambda: kit.store.renew(key, grant.token, lease=LEASE))
        assert lost(lambda: wrote(kit, key, grant, 2, a_step("ship"), steps=2, in_doubt=True))
        assert lost(lambda: kit.store.complete(key, grant.token, PAYLOAD, keep=KEEP))
        with pytest.raises(StoreUnavailable):
            kit.ask(key, token=grant.token)

        assert before == (kit.found(key), kit.store.journals.read(key))

    def test_a_release_in_doubt_is_a_quarantine(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)

        for _ in range(2):
            assert State.QUARANTINED is kit.store.release(key, grant.token)

        record = kit.found(key)
        assert (record.state, record.reason) == (State.QUARANTINED, IN_DOUBT)
        # A call that timed out may still arrive: until the lease is over, no resolver says that it never happened.
        assert near(LEASE) == record.remaining
        assert states(kit.store.journals.read(key)) == {"charge": BEGUN}

    def test_a_journal_without_effects_is_freed(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step("quote", effects="pure", state=FINISHED), steps=0)

        assert kit.store.release(key, grant.token) is None

        assert (kit.store.read(key), kit.store.journals.read(key)) == (None, EMPTY)
        again = claimed(kit, key)
        assert (again.attempt, kit.store.journals.recall(key, again.token, fence=again.fence).entries) == (1, ())

    def test_a_completion_drops_the_journal(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(state=FINISHED))

        for _ in range(2):
            kit.store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)

        assert (kit.found(key).state, kit.found(key).payload) == (State.COMPLETED, PAYLOAD)
        assert kit.store.journals.read(key).entries == ()
        assert lost(lambda: wrote(kit, key, grant, 2, a_step("ship"), in_doubt=True))

    @for_each("verb", ("resolve", "force_release"))
    def test_a_resolution_of_the_whole_drops_the_journal(self, kit: Kit, verb: str) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        kit.store.release(key, grant.token)

        if verb == "resolve":
            assert kit.resolve(kit.seen(key))
        else:
            assert kit.store.recovery.force_release(kit.seen(key))

        assert kit.store.journals.read(key).entries == ()

    def test_a_settled_step_pauses_the_request(self, kit: Kit) -> None:
        key, fresh = a_key(), a_token()
        grant = claimed(kit, key)
        wrote(kit, key, grant, 1, a_step(), in_doubt=True)
        kit.store.release(key, grant.token)
        held, journal = kit.seen(key), kit.store.journals.read(key)
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)

        for _ in range(2):
            assert kit.store.journals.resume(held, journal, token=fresh, writing=settled)

        record = kit.found(key)
        assert (State.PROCESSING, fresh, OnExpiry.TAKEOVER) == (record.state, record.token, record.on_expiry)
        assert record.remaining <= 0
        (entry,) = kit.store.journals.read(key).entries
        assert (FINISHED, grant.fence, RESULT) == (entry.state, entry.fence, entry.payload)
        assert lost(lambda: wrote(kit, key, grant, 2, a_step(state=FINISHED)))
        assert not kit.store.journals.resume(held, journal, token=a_token(), writing=settled)
        assert claimed(kit, key).attempt == 2

    def test_a_resumed_request_waits_for_its_retry_from_now_on(self, kit: Kit) -> None:
        """Otherwise the janitor gives it up before the client sends its retry: its lease ended long ago."""
        key, grant = begun(kit, a_step(), in_doubt=True)
        kit.store.release(key, grant.token)
        kit.advance(10 * LEASE)
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)

        assert kit.store.journals.resume(kit.seen(key), kit.store.journals.read(key), token=a_token(), writing=settled)

        assert near(0) == kit.found(key).remaining
        assert not kit.store.journals.give_up(kit.seen(key), horizon=kit.now - 1)

    def test_one_of_two_settled_steps_leaves_the_quarantine(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), a_step("ship"), steps=2, in_doubt=True)
        kit.store.release(key, grant.token)
        writing = JournalWrite(0, withdraw=[a_step("ship").id], steps=1, in_doubt=True)

        assert kit.store.journals.resume(kit.seen(key), kit.store.journals.read(key), token=a_token(), writing=writing)

        assert State.QUARANTINED is kit.found(key).state
        assert states(kit.store.journals.read(key)) == {"charge": BEGUN}

    def test_a_resolver_loses_to_the_late_worker(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        kit.advance(LEASE + 1)
        kit.ask(key)
        held, journal = kit.seen(key), kit.store.journals.read(key)
        wrote(kit, key, grant, 2, a_step(state=FINISHED))
        before = kit.found(key), kit.store.journals.read(key)

        writing = JournalWrite(0, withdraw=[a_step().id])
        assert not kit.store.journals.resume(held, journal, token=a_token(), writing=writing)

        assert before == (kit.found(key), kit.store.journals.read(key))

    def test_a_changed_journal_is_not_resumed(self, kit: Kit) -> None:
        key, grant = begun(kit, a_step(), in_doubt=True)
        journal = kit.store.journals.read(key)
        wrote(kit, key, grant, 2, a_step("ship"), steps=2, in_doubt=True)
        kit.store.release(key, grant.token)

        writing = JournalWrite(0, withdraw=[a_step().id])
        for other in (journal, replace(kit.store.journals.read(key), complete=False)):
            assert not kit.store.journals.resume(kit.seen(key), other, token=a_token(), writing=writing)

    @for_each("withdrawn", (True, False))
    def test_a_record_without_a_step_is_not_resumed(self, kit: Kit, withdrawn: bool) -> None:
        """No retry may go on with it: nothing says what it has done."""
        key, grant = begun(kit)
        if withdrawn:
            wrote(kit, key, grant, 1, a_step(), in_doubt=True)
            wrote(kit, key, grant, 2, withdraw=[a_step().id], steps=0)
        kit.store.quarantine(key, grant.token, "view-crashed")
        before = kit.found(key)

        journal = kit.store.journals.read(key)
        assert not kit.store.journals.resume(kit.seen(key), journal, token=a_token(), writing=JournalWrite(0))

        assert before == kit.found(key)

    def test_what_was_seen_in_another_state_is_neither_resumed_nor_given_up(self, kit: Kit) -> None:
        """Neither while the worker runs nor when it has ended since: token, deadline and journal alone do not show it."""
        key, grant = begun(kit, a_step(), in_doubt=True)
        running, journal = kit.seen(key), kit.store.journals.read(key)
        writing = JournalWrite(0, withdraw=[a_step().id])

        assert not kit.store.journals.resume(running, journal, token=a_token(), writing=writing)
        kit.store.quarantine(key, grant.token, "steps-changed")
        before = kit.found(key), kit.store.journals.read(key)
        assert not kit.store.journals.resume(running, journal, token=a_token(), writing=writing)
        assert before == (kit.found(key), kit.store.journals.read(key))
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)
        assert kit.store.journals.resume(kit.seen(key), journal, token=a_token(), writing=settled)
        paused = kit.found(key)
        held = SeenRecord(key, replace(paused, state=State.QUARANTINED))
        assert not kit.store.journals.give_up(held, horizon=kit.now + 1)
        assert paused == kit.found(key)

    @for_each("state", ("running", "in doubt", "no journal", "paused"))
    def test_only_what_is_paused_with_effects_is_given_up(self, kit: Kit, state: str) -> None:
        key, grant = begun(kit)
        if state != "no journal":
            wrote(
                kit, key, grant, 1, a_step(state=FINISHED if state == "paused" else BEGUN), in_doubt=state != "paused"
            )
        if state != "running":
            kit.advance(LEASE + 1)

        assert (state == "paused") == kit.store.journals.give_up(kit.seen(key), horizon=kit.now)

        if state == "paused":
            assert (kit.found(key).state, kit.found(key).reason) == (State.QUARANTINED, NEVER_RESUMED)
            assert lost(lambda: wrote(kit, key, grant, 2, a_step("ship"), steps=2))
        else:
            assert State.PROCESSING is kit.found(key).state

    def test_a_write_renews_and_never_shortens(self, kit: Kit) -> None:
        key, grant = begun(kit)
        kit.store.renew(key, grant.token, lease=10 * LEASE)
        wrote(kit, key, grant, 1, a_step(state=FINISHED))
        assert near(10 * LEASE) == kit.found(key).remaining
        kit.advance(10 * LEASE - 1)
        wrote(kit, key, grant, 2)
        assert near(LEASE) == kit.found(key).remaining
        assert isinstance(kit.ask(key), InFlight)

    def test_a_walk_finds_each_result_and_replaces_it(self, kit: Kit) -> None:
        tid, keys, sealed = secrets.token_bytes(16), [], replace(RESULT, data=b"sealed again")
        for _ in range(3):
            key = a_key(tid=tid)
            keys.append(key)
            wrote(kit, key, claimed(kit, key), 1, a_step(state=FINISHED))

        assert {key.rid for key in keys} == {answer.key.rid for answer in walked(kit, tid, limit=2)}
        assert kit.store.journals.replace(keys[0], a_step().id, RESULT, sealed)
        assert not kit.store.journals.replace(keys[0], a_step().id, RESULT, sealed)
        (entry,) = kit.store.journals.read(keys[0]).entries
        assert sealed == entry.payload

    def test_a_count_names_the_keys_of_stored_results(self, kit: Kit) -> None:
        """The store may hold the journals of other tests, so only what these steps add counts."""
        key, kid = a_key(tid=secrets.token_bytes(16)), secrets.token_hex(4)
        assert kit.add_data_key(key.tid, 1, kid)
        grant = claimed(kit, key)
        before = kit.store.journals.count()
        sealed = replace(RESULT, sealed_by=SealedBy(kid, 1))
        steps = [
            a_step("plain", state=FINISHED),
            replace(a_step("sealed", state=FINISHED), payload=sealed),
            replace(a_step("also", state=FINISHED), payload=sealed),
            replace(a_step("erased", state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED)),
            a_step("begun", effects="deduplicated"),
        ]
        wrote(kit, key, grant, 1, *steps, steps=5)

        after = kit.store.journals.count()

        changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert {"": 1, kid: 2} == changed

    @for_each("state", ("running", "paused", "in doubt"))
    def test_a_sweep_keeps_the_journal_of_each_record_that_may_go_on(self, kit: Kit, state: str) -> None:
        keys = [a_key() for _ in range(3)]
        for key in keys:
            grant = claimed(kit, key)
            wrote(kit, key, grant, 1, a_step(state=FINISHED))
            if state == "in doubt":
                wrote(kit, key, grant, 2, a_step("ship"), steps=2, in_doubt=True)
            if state != "running":
                kit.store.release(key, grant.token)
        before = [kit.store.journals.read(key) for key in keys]
        kit.advance(2 * KEEP)

        for _ in pages(lambda after: kit.store.journals.sweep(after=after, limit=2)):
            pass

        assert before == [kit.store.journals.read(key) for key in keys]
        assert all(journal.entries for journal in before)

    def test_an_erasure_takes_the_results_of_its_tenant_only(self, kit: Kit) -> None:
        key, other = a_key(tid=secrets.token_bytes(16)), a_key(tid=secrets.token_bytes(16))
        grants = [claimed(kit, each) for each in (key, other)]
        for each, grant in zip((key, other), grants, strict=True):
            wrote(kit, each, grant, 1, a_step(state=FINISHED))
        kit.advance(1)

        kit.store.data_keys.shred(key.tid)

        assert (kit.store.journals.read(key).erased, kit.store.journals.read(other).erased) == (True, False)
        assert kit.store.journals.recall(key, grants[0].token, fence=grants[0].fence).erased
        assert [answer.erased for answer in walked(kit, key.tid)] == [True]
        # That the step has finished is no personal data: it never runs again.
        assert states(kit.store.journals.read(key)) == {"charge": FINISHED}

    def test_a_write_for_an_erased_tenant_changes_nothing(self, kit: Kit) -> None:
        key = a_key(tid=secrets.token_bytes(16))
        assert kit.add_data_key(key.tid)
        grant = claimed(kit, key)
        wrote(kit, key, grant, 1, a_step(), in_doubt=True)
        before = kit.found(key), kit.store.journals.read(key)
        kit.advance(1)
        kit.store.data_keys.shred(key.tid)

        sealed = replace(RESULT, sealed_by=SealedBy(KID, 1))
        with pytest.raises(DataKeyMissing) as missing:
            wrote(kit, key, grant, 2, replace(a_step(state=FINISHED), payload=sealed))
        assert missing.value.erased
        record, journal = kit.found(key), kit.store.journals.read(key)
        assert before[0].on_expiry is record.on_expiry
        assert states(before[1]) == states(journal)

        wrote(kit, key, grant, 3, replace(a_step(state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED)))
        assert states(kit.store.journals.read(key)) == {"charge": FINISHED}

"""Journals: the steps of a request, and the releases, pauses and resumptions that follow from them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from flask_idempotency.engine.capabilities import DataKey, SeenRecord
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
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    CapableStore,
    Contract,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    lost,
    near,
    seen,
)
from flask_idempotency.testing.doubles import FrozenClock

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


def claimed(store: Store, key: StorageKey) -> Grant:
    """Return a new grant of this key, as an endpoint with steps claims it."""
    return granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE))


def wrote(
    store: CapableStore,
    key: StorageKey,
    grant: Grant,
    number: int,
    *enter: Entry,
    withdraw: Sequence[bytes] = (),
    steps: int = 1,
    in_doubt: bool = False,
) -> None:
    writing = JournalWrite(number, enter, withdraw, steps, in_doubt)
    store.journals.write(key, grant.token, fence=grant.fence, writing=writing, lease=LEASE)


def begun(store: CapableStore, *enter: Entry, steps: int = 1, in_doubt: bool = False) -> tuple[StorageKey, Grant]:
    """Return a new key and its grant, after a first write of these steps."""
    key = a_key()
    grant = claimed(store, key)
    if enter:
        wrote(store, key, grant, 1, *enter, steps=steps, in_doubt=in_doubt)
    return key, grant


def states(journal: Journal) -> dict[str, StepState]:
    return {entry.name: entry.state for entry in journal.entries}


def walked(store: CapableStore, tid: bytes, *, limit: int = 100) -> list[StepAnswer]:
    """Return each stored result of this tenant. A page may be empty and not the last."""
    after: bytes | None = b""
    answers: list[StepAnswer] = []
    while after is not None:
        page = store.journals.walk(after=after, limit=limit, tid=tid)
        answers += page.answers
        after = page.after
    return answers


class JournalsContract(Contract):
    """The contract of `flask_idempotency.engine.journal.Journals`, and of releases that pause.

    Override `store`: it has `journals`, `recovery` and `data_keys`.
    """

    def test_a_journal_returns_what_was_written(self, store: CapableStore, clock: FrozenClock) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        clock.advance(2)
        finished = replace(a_step(state=FINISHED), took=2.0)
        wrote(store, key, grant, 2, finished)

        journal = store.journals.recall(key, grant.token, fence=grant.fence)

        (entry,) = journal.entries
        assert (grant.fence, 2, True, False) == (journal.fence, journal.write, journal.complete, journal.erased)
        assert replace(finished, fence=0) == replace(entry, fence=0, began_at=0.0, finished_at=None)
        assert (grant.fence, near(clock() - 2), near(clock())) == (entry.fence, entry.began_at, entry.finished_at)
        assert journal == store.journals.read(key)

    def test_a_kept_request_of_the_largest_size_returns_beside_the_steps(self, store: CapableStore) -> None:
        key, grant = begun(store)
        data = secrets.token_bytes(LARGEST_ENTRY)
        payload = replace(RESULT, data=data, byte_size=len(data))
        kept = replace(a_step(KEPT_REQUEST, effects="pure", state=FINISHED), in_line=False, payload=payload)
        tries = [
            replace(a_step(TRY, effects="pure", state=FINISHED), id=b"try %08d" % number)
            for number in range(1, MOST_TRIES + 1)
        ]
        wrote(store, key, grant, 1, a_step(), kept, in_doubt=True)
        wrote(store, key, grant, 2, a_step(state=FINISHED), kept, *tries)

        journal = store.journals.read(key)

        assert journal.kept_request is not None
        assert journal.kept_request.payload == payload
        assert [each.id for each in journal.tries] == [each.id for each in tries]
        store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)
        assert store.journals.read(key) == EMPTY

    def test_a_plain_step_that_has_begun_keeps_others_out(self, store: CapableStore, clock: FrozenClock) -> None:
        key, _ = begun(store, a_step(), in_doubt=True)
        clock.advance(LEASE + 1)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Unknown)
        assert State.QUARANTINED is found(store, key).state

    def test_a_finished_step_lets_others_go_on(self, store: CapableStore, clock: FrozenClock) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        wrote(store, key, grant, 2, a_step(state=FINISHED))
        clock.advance(LEASE + 1)

        successor = claimed(store, key)

        assert successor.attempt == 2
        assert states(store.journals.recall(key, successor.token, fence=successor.fence)) == {"charge": FINISHED}

    def test_a_late_finish_ends_the_quarantine(self, store: CapableStore, clock: FrozenClock) -> None:
        key, grant = begun(store, a_step(), a_step("pay"), steps=2, in_doubt=True)
        clock.advance(LEASE + 1)
        store.claim(a_request(key), token=a_token(), lease=LEASE)

        wrote(store, key, grant, 2, a_step(state=FINISHED), steps=2, in_doubt=True)
        assert State.QUARANTINED is found(store, key).state
        wrote(store, key, grant, 3, a_step("pay", state=FINISHED), steps=2)

        record = found(store, key)
        assert (record.state, record.reason, record.on_expiry) == (State.PROCESSING, "", OnExpiry.TAKEOVER)
        assert near(LEASE) == record.remaining

    @for_each("order", tuple(permutations((1, 2, 3))))
    def test_copies_of_writes_in_any_order_change_nothing(
        self, store: CapableStore, clock: FrozenClock, order: tuple[int, ...]
    ) -> None:
        key, grant = begun(store)

        def write(number: int) -> None:
            match number:
                case 1:
                    wrote(store, key, grant, 1, a_step(), in_doubt=True)
                case 2:
                    wrote(store, key, grant, 2, a_step(state=FINISHED))
                case 3:
                    wrote(store, key, grant, 3, a_step("mail", effects="deduplicated"), steps=2)

        for number in (1, 2, 3):
            write(number)
        before = found(store, key), store.journals.read(key)
        clock.advance(1)
        for number in order:
            write(number)

        record = replace(found(store, key), remaining=before[0].remaining)
        assert before == (record, store.journals.read(key))

    def test_a_lost_write_is_told_by_the_next(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        wrote(store, key, grant, 3, a_step(state=FINISHED), a_step("ship"), steps=2, in_doubt=True)
        wrote(store, key, grant, 2, a_step(state=FINISHED), steps=1)

        assert states(store.journals.read(key)) == {"charge": FINISHED, "ship": BEGUN}
        assert OnExpiry.QUARANTINE is found(store, key).on_expiry

    def test_what_is_finished_is_never_changed(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(state=FINISHED))
        before = store.journals.read(key).entries
        wrote(store, key, grant, 2, replace(a_step(state=FINISHED), payload=PAYLOAD, kept=False))
        wrote(store, key, grant, 3, a_step(), withdraw=[a_step().id])

        assert before == store.journals.read(key).entries

    def test_only_this_claim_withdraws_what_it_has_begun(self, store: CapableStore) -> None:
        key, grant = begun(store)
        mail, push = a_step("mail", effects="deduplicated"), a_step("push", effects="deduplicated")
        wrote(store, key, grant, 1, mail, push, steps=2)
        wrote(store, key, grant, 2, withdraw=[push.id])
        assert State.PROCESSING is store.release(key, grant.token)
        successor = claimed(store, key)
        wrote(store, key, successor, 1, withdraw=[mail.id])

        assert states(store.journals.read(key)) == {"mail": BEGUN}

    @for_each("other", ("token", "fence"))
    def test_another_claim_writes_and_recalls_nothing(
        self, store: CapableStore, clock: FrozenClock, other: str
    ) -> None:
        """A claim that was sent twice may be granted later, under its old token and a new fence."""
        key, grant = begun(store, a_step(state=FINISHED))
        before = found(store, key), store.journals.read(key)
        late = replace(grant, token=a_token()) if other == "token" else replace(grant, fence=grant.fence - 1)

        assert lost(lambda: wrote(store, key, late, 9, a_step("ship"), steps=2, in_doubt=True))
        assert lost(lambda: store.journals.recall(key, late.token, fence=late.fence))

        assert before == (found(store, key), store.journals.read(key))

    @for_each("effects", ("plain", "deduplicated", "transactional"))
    def test_a_release_pauses_what_has_an_effect(
        self, store: CapableStore, clock: FrozenClock, effects: Effects
    ) -> None:
        key, grant = begun(store, a_step(effects=effects, state=FINISHED))

        assert State.PROCESSING is store.release(key, grant.token)

        record = found(store, key)
        assert (record.state, record.on_expiry) == (State.PROCESSING, OnExpiry.TAKEOVER)
        assert paused_token(grant.token) == record.token
        assert record.remaining <= 0
        before = found(store, key), store.journals.read(key)
        assert State.PROCESSING is store.release(key, grant.token)
        assert before == (found(store, key), store.journals.read(key))
        successor = claimed(store, key)
        assert successor.attempt == 2
        assert states(store.journals.recall(key, successor.token, fence=successor.fence)) == {"charge": FINISHED}

    def test_a_paused_token_is_spent(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(state=FINISHED))
        store.release(key, grant.token)
        before = found(store, key), store.journals.read(key)

        assert lost(lambda: store.renew(key, grant.token, lease=LEASE))
        assert lost(lambda: wrote(store, key, grant, 2, a_step("ship"), steps=2, in_doubt=True))
        assert lost(lambda: store.complete(key, grant.token, PAYLOAD, keep=KEEP))
        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=grant.token, lease=LEASE)

        assert before == (found(store, key), store.journals.read(key))

    def test_a_release_in_doubt_is_a_quarantine(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)

        for _ in range(2):
            assert State.QUARANTINED is store.release(key, grant.token)

        record = found(store, key)
        assert (record.state, record.reason) == (State.QUARANTINED, IN_DOUBT)
        # A call that timed out may still arrive: until the lease is over, no resolver says that it never happened.
        assert near(LEASE) == record.remaining
        assert states(store.journals.read(key)) == {"charge": BEGUN}

    def test_a_journal_without_effects_is_freed(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step("quote", effects="pure", state=FINISHED), steps=0)

        assert store.release(key, grant.token) is None

        assert (store.read(key), store.journals.read(key)) == (None, EMPTY)
        again = claimed(store, key)
        assert (again.attempt, store.journals.recall(key, again.token, fence=again.fence).entries) == (1, ())

    def test_a_completion_drops_the_journal(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(state=FINISHED))

        for _ in range(2):
            store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)

        assert (found(store, key).state, found(store, key).payload) == (State.COMPLETED, PAYLOAD)
        assert store.journals.read(key).entries == ()
        assert lost(lambda: wrote(store, key, grant, 2, a_step("ship"), in_doubt=True))

    @for_each("verb", ("resolve", "force_release"))
    def test_a_resolution_of_the_whole_drops_the_journal(self, store: CapableStore, verb: str) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        store.release(key, grant.token)

        if verb == "resolve":
            assert store.recovery.resolve(seen(store, key), token=a_token(), payload=PAYLOAD, keep=KEEP)
        else:
            assert store.recovery.force_release(seen(store, key))

        assert store.journals.read(key).entries == ()

    def test_a_settled_step_pauses_the_request(self, store: CapableStore) -> None:
        key, fresh = a_key(), a_token()
        grant = claimed(store, key)
        wrote(store, key, grant, 1, a_step(), in_doubt=True)
        store.release(key, grant.token)
        held, journal = seen(store, key), store.journals.read(key)
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)

        for _ in range(2):
            assert store.journals.resume(held, journal, token=fresh, writing=settled)

        record = found(store, key)
        assert (State.PROCESSING, fresh, OnExpiry.TAKEOVER) == (record.state, record.token, record.on_expiry)
        assert record.remaining <= 0
        (entry,) = store.journals.read(key).entries
        assert (FINISHED, grant.fence, RESULT) == (entry.state, entry.fence, entry.payload)
        assert lost(lambda: wrote(store, key, grant, 2, a_step(state=FINISHED)))
        assert not store.journals.resume(held, journal, token=a_token(), writing=settled)
        assert claimed(store, key).attempt == 2

    def test_a_resumed_request_waits_for_its_retry_from_now_on(self, store: CapableStore, clock: FrozenClock) -> None:
        """Otherwise the janitor gives it up before the client sends its retry: its lease ended long ago."""
        key, grant = begun(store, a_step(), in_doubt=True)
        store.release(key, grant.token)
        clock.advance(10 * LEASE)
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)

        assert store.journals.resume(seen(store, key), store.journals.read(key), token=a_token(), writing=settled)

        assert near(0) == found(store, key).remaining
        assert not store.journals.give_up(seen(store, key), horizon=clock() - 1)

    def test_one_of_two_settled_steps_leaves_the_quarantine(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(), a_step("ship"), steps=2, in_doubt=True)
        store.release(key, grant.token)
        writing = JournalWrite(0, withdraw=[a_step("ship").id], steps=1, in_doubt=True)

        assert store.journals.resume(seen(store, key), store.journals.read(key), token=a_token(), writing=writing)

        assert State.QUARANTINED is found(store, key).state
        assert states(store.journals.read(key)) == {"charge": BEGUN}

    def test_a_resolver_loses_to_the_late_worker(self, store: CapableStore, clock: FrozenClock) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        clock.advance(LEASE + 1)
        store.claim(a_request(key), token=a_token(), lease=LEASE)
        held, journal = seen(store, key), store.journals.read(key)
        wrote(store, key, grant, 2, a_step(state=FINISHED))
        before = found(store, key), store.journals.read(key)

        writing = JournalWrite(0, withdraw=[a_step().id])
        assert not store.journals.resume(held, journal, token=a_token(), writing=writing)

        assert before == (found(store, key), store.journals.read(key))

    def test_a_changed_journal_is_not_resumed(self, store: CapableStore) -> None:
        key, grant = begun(store, a_step(), in_doubt=True)
        journal = store.journals.read(key)
        wrote(store, key, grant, 2, a_step("ship"), steps=2, in_doubt=True)
        store.release(key, grant.token)

        writing = JournalWrite(0, withdraw=[a_step().id])
        for other in (journal, replace(store.journals.read(key), complete=False)):
            assert not store.journals.resume(seen(store, key), other, token=a_token(), writing=writing)

    @for_each("withdrawn", (True, False))
    def test_a_record_without_a_step_is_not_resumed(self, store: CapableStore, withdrawn: bool) -> None:
        """No retry may go on with it: nothing says what it has done."""
        key, grant = begun(store)
        if withdrawn:
            wrote(store, key, grant, 1, a_step(), in_doubt=True)
            wrote(store, key, grant, 2, withdraw=[a_step().id], steps=0)
        store.quarantine(key, grant.token, "view-crashed")
        before = found(store, key)

        journal = store.journals.read(key)
        assert not store.journals.resume(seen(store, key), journal, token=a_token(), writing=JournalWrite(0))

        assert before == found(store, key)

    def test_what_was_seen_in_another_state_is_neither_resumed_nor_given_up(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Neither while the worker runs nor when it has ended since: token, deadline and journal alone do not show it."""
        key, grant = begun(store, a_step(), in_doubt=True)
        running, journal = seen(store, key), store.journals.read(key)
        writing = JournalWrite(0, withdraw=[a_step().id])

        assert not store.journals.resume(running, journal, token=a_token(), writing=writing)
        store.quarantine(key, grant.token, "steps-changed")
        before = found(store, key), store.journals.read(key)
        assert not store.journals.resume(running, journal, token=a_token(), writing=writing)
        assert before == (found(store, key), store.journals.read(key))
        settled = JournalWrite(0, [a_step(state=FINISHED)], steps=1)
        assert store.journals.resume(seen(store, key), journal, token=a_token(), writing=settled)
        paused = found(store, key)
        held = SeenRecord(key, replace(paused, state=State.QUARANTINED))
        assert not store.journals.give_up(held, horizon=clock() + 1)
        assert paused == found(store, key)

    @for_each("state", ("running", "in doubt", "no journal", "paused"))
    def test_only_what_is_paused_with_effects_is_given_up(
        self, store: CapableStore, clock: FrozenClock, state: str
    ) -> None:
        key, grant = begun(store)
        if state != "no journal":
            wrote(
                store, key, grant, 1, a_step(state=FINISHED if state == "paused" else BEGUN), in_doubt=state != "paused"
            )
        if state != "running":
            clock.advance(LEASE + 1)

        assert (state == "paused") == store.journals.give_up(seen(store, key), horizon=clock())

        if state == "paused":
            assert (found(store, key).state, found(store, key).reason) == (State.QUARANTINED, NEVER_RESUMED)
            assert lost(lambda: wrote(store, key, grant, 2, a_step("ship"), steps=2))
        else:
            assert State.PROCESSING is found(store, key).state

    def test_a_write_renews_and_never_shortens(self, store: CapableStore, clock: FrozenClock) -> None:
        key, grant = begun(store)
        store.renew(key, grant.token, lease=10 * LEASE)
        wrote(store, key, grant, 1, a_step(state=FINISHED))
        assert near(10 * LEASE) == found(store, key).remaining
        clock.advance(10 * LEASE - 1)
        wrote(store, key, grant, 2)
        assert near(LEASE) == found(store, key).remaining
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)

    def test_a_walk_finds_each_result_and_replaces_it(self, store: CapableStore) -> None:
        tid, keys, sealed = secrets.token_bytes(16), [], replace(RESULT, data=b"sealed again")
        for _ in range(3):
            key = a_key(tid=tid)
            keys.append(key)
            wrote(store, key, claimed(store, key), 1, a_step(state=FINISHED))

        assert {key.rid for key in keys} == {answer.key.rid for answer in walked(store, tid, limit=2)}
        assert store.journals.replace(keys[0], a_step().id, RESULT, sealed)
        assert not store.journals.replace(keys[0], a_step().id, RESULT, sealed)
        (entry,) = store.journals.read(keys[0]).entries
        assert sealed == entry.payload

    def test_a_count_names_the_keys_of_stored_results(self, store: CapableStore) -> None:
        """The store may hold the journals of other tests, so only what these steps add counts."""
        key, kid = a_key(tid=secrets.token_bytes(16)), secrets.token_hex(4)
        shelf = store.data_keys.read_keys(key.tid)
        assert store.data_keys.add(key.tid, DataKey(1, kid, bytes(256)), store=shelf.store, after=shelf.last)
        grant = claimed(store, key)
        before = store.journals.count()
        sealed = replace(RESULT, sealed_by=SealedBy(kid, 1))
        steps = [
            a_step("plain", state=FINISHED),
            replace(a_step("sealed", state=FINISHED), payload=sealed),
            replace(a_step("also", state=FINISHED), payload=sealed),
            replace(a_step("erased", state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED)),
            a_step("begun", effects="deduplicated"),
        ]
        wrote(store, key, grant, 1, *steps, steps=5)

        after = store.journals.count()

        changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        assert {"": 1, kid: 2} == changed

    @for_each("state", ("running", "paused", "in doubt"))
    def test_a_sweep_keeps_the_journal_of_each_record_that_may_go_on(
        self, store: CapableStore, clock: FrozenClock, state: str
    ) -> None:
        keys = [a_key() for _ in range(3)]
        for key in keys:
            grant = claimed(store, key)
            wrote(store, key, grant, 1, a_step(state=FINISHED))
            if state == "in doubt":
                wrote(store, key, grant, 2, a_step("ship"), steps=2, in_doubt=True)
            if state != "running":
                store.release(key, grant.token)
        before = [store.journals.read(key) for key in keys]
        clock.advance(2 * KEEP)

        after: bytes | None = b""
        while after is not None:
            after = store.journals.sweep(after=after, limit=2).after

        assert before == [store.journals.read(key) for key in keys]
        assert all(journal.entries for journal in before)

    def test_an_erasure_takes_the_results_of_its_tenant_only(self, store: CapableStore, clock: FrozenClock) -> None:
        key, other = a_key(tid=secrets.token_bytes(16)), a_key(tid=secrets.token_bytes(16))
        grants = [claimed(store, each) for each in (key, other)]
        for each, grant in zip((key, other), grants, strict=True):
            wrote(store, each, grant, 1, a_step(state=FINISHED))
        clock.advance(1)

        store.data_keys.shred(key.tid)

        assert (store.journals.read(key).erased, store.journals.read(other).erased) == (True, False)
        assert store.journals.recall(key, grants[0].token, fence=grants[0].fence).erased
        assert [answer.erased for answer in walked(store, key.tid)] == [True]
        # That the step has finished is no personal data: it never runs again.
        assert states(store.journals.read(key)) == {"charge": FINISHED}

    def test_a_write_for_an_erased_tenant_changes_nothing(self, store: CapableStore, clock: FrozenClock) -> None:
        key = a_key(tid=secrets.token_bytes(16))
        shelf = store.data_keys.read_keys(key.tid)
        assert store.data_keys.add(key.tid, DataKey(1, "2026-11", bytes(256)), store=shelf.store, after=shelf.last)
        grant = claimed(store, key)
        wrote(store, key, grant, 1, a_step(), in_doubt=True)
        before = found(store, key), store.journals.read(key)
        clock.advance(1)
        store.data_keys.shred(key.tid)

        sealed = replace(RESULT, sealed_by=SealedBy("2026-11", 1))
        with pytest.raises(DataKeyMissing) as missing:
            wrote(store, key, grant, 2, replace(a_step(state=FINISHED), payload=sealed))
        assert missing.value.erased
        record, journal = found(store, key), store.journals.read(key)
        assert before[0].on_expiry is record.on_expiry
        assert states(before[1]) == states(journal)

        wrote(
            store, key, grant, 3, replace(a_step(state=FINISHED), payload=replace(RESULT, data=b"", sealed_by=ERASED))
        )
        assert states(store.journals.read(key)) == {"charge": FINISHED}

"""Contract of listing and scanning: records by state, counts, and stored responses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import Answer, DataKey
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, SealedBy, State, StoredPayload
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
    CapableStore,
    Contract,
    Standing,
    a_key,
    a_request,
    a_token,
    condemned,
    for_each,
    found,
    granted,
    near,
    noticed,
    outline,
    seen,
    stand,
    stood,
    walked,
)
from flask_idempotency.testing.doubles import FrozenClock

STATES: dict[Standing, State] = {
    "in flight": State.PROCESSING,
    "completed": State.COMPLETED,
    "quarantined": State.QUARANTINED,
    "lapsed, takeover": State.PROCESSING,
    "lapsed, quarantine": State.PROCESSING,
}


class Listing:
    """`scan` and `counts`. The store may hold records of other tests too."""

    @for_each("standing", STANDINGS)
    def test_a_record_is_met_in_its_state_alone(
        self, store: CapableStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """With its key and its record. A list may leave out the bytes of the response."""
        stood_so, _ = stood(store, clock, standing)
        key, record = stood_so.key, outline(stood_so.record)

        for state in State:
            met = {k: outline(r) for k, r in walked(store, state, tid=key.tid).items()}
            assert ({key: record} if state is STATES[standing] else {}) == met

    def test_the_condemned_are_quarantined(self, store: CapableStore, clock: FrozenClock) -> None:
        """Also if an operator or a resolver completed it."""
        damaged, _ = condemned(store, clock)
        assert [damaged.key] == list(walked(store, State.QUARANTINED, tid=damaged.key.tid))
        assert store.recovery.resolve(damaged, token=a_token(), payload=PAYLOAD, keep=KEEP)

        assert [damaged.key] == list(walked(store, State.COMPLETED, tid=damaged.key.tid))
        assert walked(store, State.QUARANTINED, tid=damaged.key.tid) == {}

    @for_each("state", list(State))
    @for_each("limit", (1, 3, 1000))
    def test_every_record_is_met(self, store: CapableStore, clock: FrozenClock, state: State, limit: int) -> None:
        """However long the sheets are, of this tenant and of no other; without a tenant, of all."""
        standings: dict[State, Standing] = {
            State.PROCESSING: "in flight",
            State.COMPLETED: "completed",
            State.QUARANTINED: "quarantined",
        }
        tid, other = a_key().tid, a_key()
        keys = {a_key(tid=tid) for _ in range(7)}
        for key in (*keys, other):
            stand(store, clock, key, standings[state])

        assert keys == walked(store, state, limit=limit, tid=tid).keys()
        assert {*keys, other} <= walked(store, state).keys()

    def test_what_is_there_throughout_is_met(self, store: CapableStore, clock: FrozenClock) -> None:
        """While others leave, and more come."""
        tid = a_key().tid
        owners = {a_key(tid=tid): a_token() for _ in range(12)}
        for key, token in owners.items():
            granted(store.claim(a_request(key), token=token, lease=LEASE))
        met, leaving, after = set(), list(owners)[::2], b""
        while True:
            sheet = store.recovery.scan(State.PROCESSING, after=after, limit=2, tid=tid)
            met |= {each.key for each in sheet.found}
            if leaving:
                store.release(key := leaving.pop(), owners[key])
            if sheet.after is None:
                break
            after = sheet.after

        assert set(list(owners)[1::2]) <= met <= owners.keys()

    def test_expired_responses_are_left_out(self, store: CapableStore, clock: FrozenClock) -> None:
        """Whether or not they have been removed."""
        answered, _ = stood(store, clock, "completed")
        clock.advance(KEEP - 0.125)
        assert [answered.key] == list(walked(store, State.COMPLETED, tid=answered.key.tid))
        clock.advance(0.125)

        assert walked(store, State.COMPLETED, tid=answered.key.tid) == {}

    def test_what_is_not_completed_is_counted(self, store: CapableStore, clock: FrozenClock) -> None:
        """As it comes, changes, and goes."""
        lapsed, token = stood(store, clock, "lapsed, quarantine")
        counts = store.recovery.counts()

        flying, owner = stood(store, clock, "in flight")
        counts = replace(counts, in_flight=counts.in_flight + 1)
        assert counts == store.recovery.counts()
        store.complete(flying.key, owner, PAYLOAD, keep=KEEP)
        counts = replace(counts, in_flight=counts.in_flight - 1)
        assert counts == store.recovery.counts()
        store.mark_corrupt(flying.key, PAYLOAD)
        now = store.recovery.counts()
        assert counts.quarantined + 1 == now.quarantined
        assert store.recovery.force_release(seen(store, flying.key))
        assert counts == store.recovery.counts()
        store.renew(lapsed.key, token, lease=LEASE)
        now = store.recovery.counts()
        assert (counts.in_flight + 1, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        store.quarantine(lapsed.key, token, "view-crashed")
        now = store.recovery.counts()
        assert (counts.in_flight, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        assert counts.quarantined + 1 == now.quarantined

    def test_a_janitor_moves_an_expired_claim_to_quarantine(self, store: CapableStore, clock: FrozenClock) -> None:
        """And resolving it removes it from the list."""
        lapsed, _ = stood(store, clock, "lapsed, quarantine")
        before = store.recovery.counts()
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        now = store.recovery.counts()

        assert (before.lapsed - 1, before.quarantined + 1) == (now.lapsed, now.quarantined)
        assert before.in_flight == now.in_flight
        assert store.recovery.resolve(seen(store, lapsed.key), token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert before.quarantined == store.recovery.counts().quarantined

    def test_an_expired_lease_is_counted_without_a_write(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its lease has expired at that moment, without a write."""
        stood(store, clock, "in flight")
        before = store.recovery.counts()
        clock.advance(LEASE)
        now = store.recovery.counts()

        assert before.in_flight + before.lapsed == now.in_flight + now.lapsed
        assert now.lapsed > before.lapsed

    def test_the_age_of_the_oldest_quarantine_is_returned(self, store: CapableStore, clock: FrozenClock) -> None:
        """The oldest one sets it; records of other tests may be older."""
        noticed(store, clock)
        stood(store, clock, "lapsed, takeover")
        clock.advance(400 * 86400)
        standing = store.recovery.counts()

        assert standing.lapsed_for is not None
        assert standing.quarantined_for is not None
        assert standing.lapsed_for >= 400 * 86400
        assert standing.quarantined_for >= 400 * 86400
        clock.advance(10)
        later = store.recovery.counts()
        assert later.lapsed_for == near(standing.lapsed_for + 10)
        assert later.quarantined_for == near(standing.quarantined_for + 10)

    def test_without_quarantine_there_is_no_age(self, store: CapableStore, clock: FrozenClock) -> None:
        """And no quarantine has lasted for less than no time: one that is held begins before its lease is over."""
        stood(store, clock, "quarantined")
        standing = store.recovery.counts()

        assert (standing.lapsed_for is None) == (standing.lapsed == 0)
        assert standing.quarantined_for is not None
        assert standing.quarantined_for >= 0


# Scanning the responses of a store, to seal them again or to find a key that is still in use.


def with_keys(store: CapableStore, tid: bytes, *kids: str) -> list[SealedBy]:
    for number, kid in enumerate(kids, start=1):
        shelf = store.data_keys.read_keys(tid)
        assert store.data_keys.add(tid, DataKey(number, kid, b"wrapped"), store=shelf.store, after=shelf.last)
    return [SealedBy(kid, number) for number, kid in enumerate(kids, start=1)]


def complete(store: Store, key: StorageKey, by: SealedBy | None = None) -> StoredPayload:
    token, payload = a_token(), replace(PAYLOAD, sealed_by=by)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, payload, keep=KEEP)
    return payload


def met(
    store: CapableStore, *, limit: int = 1000, tid: bytes | None = None, other_than: str | None = None
) -> list[Answer]:
    after: bytes | None = b""
    answers = list[Answer]()
    while after is not None:
        page = store.responses.scan(after=after, limit=limit, tid=tid, other_than=other_than)
        answers += page.answers
        after = page.after
    return answers


class ResponsesContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Responses`. Override `store`: it has data keys too."""

    @for_each("limit", (1, 3, 1000))
    def test_every_answer_is_met(self, store: CapableStore, limit: int) -> None:
        """With its key and its record, however long the pages are."""
        tid = a_key().tid
        keys = [a_key(tid=tid) for _ in range(7)]
        for key in keys:
            complete(store, key)
        answers = {answer.key: answer.record for answer in met(store, limit=limit, tid=tid)}

        assert set(keys) == set(answers)
        assert {found(store, key).payload for key in keys} == {record.payload for record in answers.values()}
        assert {key: found(store, key).token for key in keys} == {key: each.token for key, each in answers.items()}

    def test_what_has_no_answer_is_not_met(self, store: CapableStore, clock: FrozenClock) -> None:
        """Claims in flight, quarantined records and expired responses."""
        tid = a_key().tid
        complete(store, a_key(tid=tid))
        clock.advance(KEEP)
        stand(store, clock, a_key(tid=tid), "in flight")
        stand(store, clock, a_key(tid=tid), "quarantined")

        assert met(store, tid=tid) == []

    def test_a_scan_returns_only_what_the_filter_allows(self, store: CapableStore) -> None:
        """By tenant, and by the key that they are not sealed under; plain ones are under none."""
        tid, other = a_key().tid, a_key().tid
        old, new = with_keys(store, tid, "old", "new")
        keys = [a_key(tid=tid) for _ in range(3)]
        for key, by in zip(keys, (None, old, new), strict=True):
            complete(store, key, by)
        complete(store, a_key(tid=other))

        assert set(keys) == {answer.key for answer in met(store, tid=tid)}
        assert set(keys[:2]) == {answer.key for answer in met(store, tid=tid, other_than="new")}
        assert set(keys[:2]) <= {answer.key for answer in met(store, other_than="new")}

    def test_a_payload_is_replaced_and_nothing_else(self, store: CapableStore, clock: FrozenClock) -> None:
        """Not even its expiry: a response that is sealed again must not live longer."""
        key = a_key()
        old, new = with_keys(store, key.tid, "old", "new")
        payload = complete(store, key, old)
        clock.advance(KEEP / 2)
        before, resealed = found(store, key), replace(payload, data=b"sealed again", sealed_by=new)

        assert store.responses.replace(key, payload, resealed)
        assert replace(before, payload=resealed) == found(store, key)
        clock.advance(KEEP / 2 - 0.125)
        assert resealed == found(store, key).payload
        clock.advance(0.125)
        assert store.read(key) is None

    def test_a_payload_that_is_not_there_is_not_replaced(self, store: CapableStore, clock: FrozenClock) -> None:
        """Another process was faster, or the key has been used again."""
        key, flying = a_key(), a_key()
        payload = complete(store, key)
        stand(store, clock, flying, "in flight")

        assert not store.responses.replace(key, OTHER_PAYLOAD, PAYLOAD)
        assert not store.responses.replace(flying, PAYLOAD, OTHER_PAYLOAD)
        assert not store.responses.replace(a_key(), PAYLOAD, OTHER_PAYLOAD)
        assert payload == found(store, key).payload
        clock.advance(KEEP)
        assert not store.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)

    def test_a_response_is_not_replaced_by_one_without_a_data_key(self, store: CapableStore) -> None:
        """What could be read would be so no more."""
        key = a_key()
        payload = complete(store, key)
        with pytest.raises(DataKeyMissing):
            store.responses.replace(key, payload, replace(payload, sealed_by=SealedBy("new", 1)))

        assert payload == found(store, key).payload

    def test_wiped_answers_are_not_counted(self, store: CapableStore) -> None:
        """They hold no sealed response and no plain one."""
        key = a_key()
        (by,) = with_keys(store, key.tid, a_token().hex())
        payload, plain = complete(store, key, by), store.responses.count().get("", 0)
        store.data_keys.shred(key.tid)
        wiped = replace(payload, data=b"", sealed_by=ERASED)

        assert store.responses.replace(key, payload, wiped)
        assert (wiped, True) == (found(store, key).payload, found(store, key).erased)
        assert (0, plain) == (store.responses.count().get(by.kid, 0), store.responses.count().get("", 0))

    def test_answers_are_counted_by_the_key_of_the_ring(self, store: CapableStore) -> None:
        """Plain ones under an empty id."""
        kid, key = a_token().hex(), a_key()
        (by,) = with_keys(store, key.tid, kid)
        plain = store.responses.count().get("", 0)
        for each, under in ((key, by), (a_key(tid=key.tid), by), (a_key(), None)):
            complete(store, each, under)

        assert (2, plain + 1) == (store.responses.count()[kid], store.responses.count()[""])

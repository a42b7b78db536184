"""Contract of listing and scanning: records by state, counts, and stored responses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import Answer
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, SealedBy, State, StoredPayload
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    LONG,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
    Contract,
    Kit,
    Standing,
    a_token,
    for_each,
    near,
    outline,
    pages,
)

STATES: dict[Standing, State] = {"completed": State.COMPLETED, "quarantined": State.QUARANTINED}
"""The state of a record that stands so. The others are PROCESSING."""


class Listing(Contract):
    """`scan` and `counts`. The store may hold records of other tests too."""

    @for_each("standing", STANDINGS)
    def test_a_record_is_met_in_its_state_alone(self, kit: Kit, standing: Standing) -> None:
        """With its key and its record. A list may leave out the bytes of the response."""
        stood_so, _ = kit.stood(standing)
        key, record = stood_so.key, outline(stood_so.record)

        for state in State:
            met = {k: outline(r) for k, r in kit.walked(state, tid=key.tid).items()}
            assert ({key: record} if state is STATES.get(standing, State.PROCESSING) else {}) == met

    def test_the_condemned_are_quarantined(self, kit: Kit) -> None:
        """Also if an operator or a resolver completed it."""
        damaged, _ = kit.stood("condemned")
        assert [damaged.key] == list(kit.walked(State.QUARANTINED, tid=damaged.key.tid))
        assert kit.resolve(damaged)

        assert [damaged.key] == list(kit.walked(State.COMPLETED, tid=damaged.key.tid))
        assert kit.walked(State.QUARANTINED, tid=damaged.key.tid) == {}

    @for_each("standing", ("in flight", "completed", "quarantined"))
    @for_each("limit", (1, 3, 1000))
    def test_every_record_is_met(self, kit: Kit, standing: Standing, limit: int) -> None:
        """However long the sheets are, of this tenant and of no other; without a tenant, of all."""
        (other, _), tid, state = kit.placed(standing), kit.key().tid, STATES.get(standing, State.PROCESSING)
        keys = {kit.key(tid) for _ in range(7)}
        for key in keys:
            kit.stand(key, standing)

        assert keys == kit.walked(state, limit=limit, tid=tid).keys()
        assert {*keys, other} <= kit.walked(state).keys()

    def test_what_is_there_throughout_is_met(self, kit: Kit) -> None:
        """While others leave, and more come."""
        tid = kit.key().tid
        owners = {kit.key(tid): a_token() for _ in range(12)}
        for key, token in owners.items():
            kit.granted(key, token=token)
        met, leaving, scan = set(), list(owners)[::2], kit.store.recovery.scan
        for sheet in pages(lambda after: scan(State.PROCESSING, after=after, limit=2, tid=tid)):
            met |= {each.key for each in sheet.found}
            if leaving:
                kit.store.release(key := leaving.pop(), owners[key])

        assert set(list(owners)[1::2]) <= met <= owners.keys()

    def test_expired_responses_are_left_out(self, kit: Kit) -> None:
        """Whether or not they have been removed."""
        answered, _ = kit.stood("completed")
        kit.advance(KEEP - 0.125)
        assert [answered.key] == list(kit.walked(State.COMPLETED, tid=answered.key.tid))
        kit.advance(0.125)

        assert kit.walked(State.COMPLETED, tid=answered.key.tid) == {}

    def test_what_is_not_completed_is_counted(self, kit: Kit) -> None:
        """As it comes, changes, and goes."""
        lapsed, token = kit.stood("lapsed, quarantine")
        counts = kit.store.recovery.counts()

        flying, owner = kit.stood("in flight")
        counts = replace(counts, in_flight=counts.in_flight + 1)
        assert counts == kit.store.recovery.counts()
        kit.store.complete(flying.key, owner, PAYLOAD, keep=KEEP)
        counts = replace(counts, in_flight=counts.in_flight - 1)
        assert counts == kit.store.recovery.counts()
        kit.store.mark_corrupt(flying.key, PAYLOAD)
        now = kit.store.recovery.counts()
        assert counts.quarantined + 1 == now.quarantined
        assert kit.store.recovery.force_release(kit.seen(flying.key))
        assert counts == kit.store.recovery.counts()
        kit.store.renew(lapsed.key, token, lease=LEASE)
        now = kit.store.recovery.counts()
        assert (counts.in_flight + 1, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        kit.store.quarantine(lapsed.key, token, "view-crashed")
        now = kit.store.recovery.counts()
        assert (counts.in_flight, counts.lapsed - 1) == (now.in_flight, now.lapsed)
        assert counts.quarantined + 1 == now.quarantined

    def test_a_janitor_moves_an_expired_claim_to_quarantine(self, kit: Kit) -> None:
        """And resolving it removes it from the list."""
        lapsed, _ = kit.stood("lapsed, quarantine")
        before = kit.store.recovery.counts()
        assert kit.store.recovery.quarantine_expired(lapsed, horizon=kit.now)
        now = kit.store.recovery.counts()

        assert (before.lapsed - 1, before.quarantined + 1) == (now.lapsed, now.quarantined)
        assert before.in_flight == now.in_flight
        assert kit.resolve(kit.seen(lapsed.key))
        assert before.quarantined == kit.store.recovery.counts().quarantined

    def test_an_expired_lease_is_counted_without_a_write(self, kit: Kit) -> None:
        """Its lease has expired at that moment, without a write."""
        kit.stood("in flight")
        before = kit.store.recovery.counts()
        kit.advance(LEASE)
        now = kit.store.recovery.counts()

        assert before.in_flight + before.lapsed == now.in_flight + now.lapsed
        assert now.lapsed > before.lapsed

    def test_the_age_of_the_oldest_quarantine_is_returned(self, kit: Kit) -> None:
        """The oldest one sets it; records of other tests may be older."""
        kit.stood("noticed")
        kit.stood("lapsed, takeover")
        kit.advance(LONG)
        standing = kit.store.recovery.counts()

        assert standing.lapsed_for is not None
        assert standing.quarantined_for is not None
        assert standing.lapsed_for >= LONG
        assert standing.quarantined_for >= LONG
        kit.advance(10)
        later = kit.store.recovery.counts()
        assert later.lapsed_for == near(standing.lapsed_for + 10)
        assert later.quarantined_for == near(standing.quarantined_for + 10)

    def test_without_quarantine_there_is_no_age(self, kit: Kit) -> None:
        """And no quarantine has lasted for less than no time: one that is held begins before its lease is over."""
        kit.stood("quarantined")
        standing = kit.store.recovery.counts()

        assert (standing.lapsed_for is None) == (standing.lapsed == 0)
        assert standing.quarantined_for is not None
        assert standing.quarantined_for >= 0


# Scanning the responses of a store, to seal them again or to find a key that is still in use.


def with_keys(kit: Kit, tid: bytes, *kids: str) -> list[SealedBy]:
    for number, kid in enumerate(kids, start=1):
        assert kit.add_data_key(tid, number, kid)
    return [SealedBy(kid, number) for number, kid in enumerate(kids, start=1)]


def complete(kit: Kit, key: StorageKey, by: SealedBy | None = None) -> StoredPayload:
    payload = replace(PAYLOAD, sealed_by=by)
    kit.complete(key, payload)
    return payload


def met(kit: Kit, *, limit: int = 1000, tid: bytes | None = None, other_than: str | None = None) -> list[Answer]:
    scan = kit.store.responses.scan
    found = pages(lambda after: scan(after=after, limit=limit, tid=tid, other_than=other_than))
    return [answer for page in found for answer in page.answers]


class ResponsesContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Responses`. Override `store`: it has data keys too."""

    @for_each("limit", (1, 3, 1000))
    def test_every_answer_is_met(self, kit: Kit, limit: int) -> None:
        """With its key and its record, however long the pages are."""
        tid = kit.key().tid
        keys = [kit.key(tid) for _ in range(7)]
        for key in keys:
            complete(kit, key)
        answers = {answer.key: answer.record for answer in met(kit, limit=limit, tid=tid)}

        assert set(keys) == set(answers)
        assert {kit.found(key).payload for key in keys} == {record.payload for record in answers.values()}
        assert {key: kit.found(key).token for key in keys} == {key: each.token for key, each in answers.items()}

    def test_what_has_no_answer_is_not_met(self, kit: Kit) -> None:
        """Claims in flight, quarantined records and expired responses."""
        tid = kit.key().tid
        complete(kit, kit.key(tid))
        kit.advance(KEEP)
        kit.stand(kit.key(tid), "in flight")
        kit.stand(kit.key(tid), "quarantined")

        assert met(kit, tid=tid) == []

    def test_a_scan_returns_only_what_the_filter_allows(self, kit: Kit) -> None:
        """By tenant, and by the key that they are not sealed under; plain ones are under none."""
        tid, other = kit.key().tid, kit.key().tid
        old, new = with_keys(kit, tid, "old", "new")
        keys = [kit.key(tid) for _ in range(3)]
        for key, by in zip(keys, (None, old, new), strict=True):
            complete(kit, key, by)
        complete(kit, kit.key(other))

        assert set(keys) == {answer.key for answer in met(kit, tid=tid)}
        assert set(keys[:2]) == {answer.key for answer in met(kit, tid=tid, other_than="new")}
        assert set(keys[:2]) <= {answer.key for answer in met(kit, other_than="new")}

    def test_a_payload_is_replaced_and_nothing_else(self, kit: Kit) -> None:
        """Not even its expiry: a response that is sealed again must not live longer."""
        key = kit.key()
        old, new = with_keys(kit, key.tid, "old", "new")
        payload = complete(kit, key, old)
        kit.advance(KEEP / 2)
        before, resealed = kit.found(key), replace(payload, data=b"sealed again", sealed_by=new)

        assert kit.store.responses.replace(key, payload, resealed)
        assert replace(before, payload=resealed) == kit.found(key)
        kit.advance(KEEP / 2 - 0.125)
        assert resealed == kit.found(key).payload
        kit.advance(0.125)
        assert kit.store.read(key) is None

    def test_a_payload_that_is_not_there_is_not_replaced(self, kit: Kit) -> None:
        """Another process was faster, or the key has been used again."""
        key, flying = kit.key(), kit.key()
        payload = complete(kit, key)
        kit.stand(flying, "in flight")

        assert not kit.store.responses.replace(key, OTHER_PAYLOAD, PAYLOAD)
        assert not kit.store.responses.replace(flying, PAYLOAD, OTHER_PAYLOAD)
        assert not kit.store.responses.replace(kit.key(), PAYLOAD, OTHER_PAYLOAD)
        assert payload == kit.found(key).payload
        kit.advance(KEEP)
        assert not kit.store.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)

    def test_a_response_is_not_replaced_by_one_without_a_data_key(self, kit: Kit) -> None:
        """What could be read would be so no more."""
        key = kit.key()
        payload = complete(kit, key)
        with pytest.raises(DataKeyMissing):
            kit.store.responses.replace(key, payload, replace(payload, sealed_by=SealedBy("new", 1)))

        assert payload == kit.found(key).payload

    def test_wiped_answers_are_not_counted(self, kit: Kit) -> None:
        """They hold no sealed response and no plain one."""
        key = kit.key()
        (by,) = with_keys(kit, key.tid, a_token().hex())
        payload, plain = complete(kit, key, by), kit.store.responses.count().get("", 0)
        kit.store.data_keys.shred(key.tid)
        wiped = replace(payload, data=b"", sealed_by=ERASED)

        assert kit.store.responses.replace(key, payload, wiped)
        assert (wiped, True) == (kit.found(key).payload, kit.found(key).erased)
        assert (0, plain) == (kit.store.responses.count().get(by.kid, 0), kit.store.responses.count().get("", 0))

    def test_answers_are_counted_by_the_key_of_the_ring(self, kit: Kit) -> None:
        """Plain ones under an empty id."""
        kid, key = a_token().hex(), kit.key()
        (by,) = with_keys(kit, key.tid, kid)
        plain = kit.store.responses.count().get("", 0)
        for each, under in ((key, by), (kit.key(key.tid), by), (kit.key(), None)):
            complete(kit, each, under)

        assert (2, plain + 1) == (kit.store.responses.count()[kid], kit.store.responses.count()[""])

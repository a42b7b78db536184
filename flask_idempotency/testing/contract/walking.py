"""All answers of a store, for chores that seal them anew or look for a key that is still in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import pytest

from flask_idempotency.engine.capabilities import Answer, Answers, DataKey
from flask_idempotency.engine.errors import DataKeyGone
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Payload, SealedBy
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.erasing import DataKeyStore
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)


class AnswerStore(DataKeyStore, Protocol):
    """A store that can be walked through."""

    @property
    def answers(self) -> Answers: ...


def with_keys(store: AnswerStore, tid: bytes, *kids: str) -> list[SealedBy]:
    for number, kid in enumerate(kids, start=1):
        shelf = store.data_keys.shelf(tid)
        assert store.data_keys.add(tid, DataKey(number, kid, b"wrapped"), store=shelf.store, after=shelf.last)
    return [SealedBy(kid, number) for number, kid in enumerate(kids, start=1)]


def complete(store: Store, key: StorageKey, by: SealedBy | None = None) -> Payload:
    token, payload = a_token(), replace(PAYLOAD, sealed_by=by)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, payload, keep=KEEP)
    return payload


def met(
    store: AnswerStore, *, limit: int = 1000, tid: bytes | None = None, other_than: str | None = None
) -> list[Answer]:
    return list(_walked(store, limit, tid, other_than))


def _walked(store: AnswerStore, limit: int, tid: bytes | None, other_than: str | None) -> Iterator[Answer]:
    after: bytes | None = b""
    while after is not None:
        page = store.answers.walk(after=after, limit=limit, tid=tid, other_than=other_than)
        yield from page.answers
        after = page.after


class AnswersContract:
    """The specification of `upkeep.Answers`. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

    @pytest.mark.parametrize("limit", (1, 3, 1000))
    def test_every_answer_is_met(self, store: AnswerStore, limit: int) -> None:
        """With its key and its record, however long the pages are."""
        tid = a_key().tid
        keys = [a_key(tid=tid) for _ in range(7)]
        for key in keys:
            complete(store, key)
        answers = {answer.key: answer.record for answer in met(store, limit=limit, tid=tid)}

        assert set(keys) == set(answers)
        assert {found(store, key).payload for key in keys} == {record.payload for record in answers.values()}
        assert {key: found(store, key).token for key in keys} == {key: each.token for key, each in answers.items()}

    def test_what_has_no_answer_is_not_met(self, store: AnswerStore, clock: FrozenClock) -> None:
        """Claims in flight, quarantined ones, and answers whose life is over."""
        tid = a_key().tid
        complete(store, a_key(tid=tid))
        clock.advance(KEEP)
        stand(store, clock, a_key(tid=tid), "in flight")
        stand(store, clock, a_key(tid=tid), "quarantined")

        assert met(store, tid=tid) == []

    def test_only_those_are_met_that_were_asked_for(self, store: AnswerStore) -> None:
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

    def test_a_payload_is_replaced_and_nothing_else(self, store: AnswerStore, clock: FrozenClock) -> None:
        """Its expiry least of all: an answer that is sealed anew must not live longer, or for ever."""
        key = a_key()
        old, new = with_keys(store, key.tid, "old", "new")
        payload = complete(store, key, old)
        clock.advance(KEEP / 2)
        before, anew = found(store, key), replace(payload, data=b"sealed anew", sealed_by=new)

        assert store.answers.replace(key, payload, anew)
        assert replace(before, payload=anew) == found(store, key)
        clock.advance(KEEP / 2 - 0.125)
        assert anew == found(store, key).payload
        clock.advance(0.125)
        assert store.read(key) is None

    def test_a_payload_that_is_not_there_is_not_replaced(self, store: AnswerStore, clock: FrozenClock) -> None:
        """Somebody was faster, or the key has gone into its next life."""
        key, flying = a_key(), a_key()
        payload = complete(store, key)
        stand(store, clock, flying, "in flight")

        assert not store.answers.replace(key, OTHER_PAYLOAD, PAYLOAD)
        assert not store.answers.replace(flying, PAYLOAD, OTHER_PAYLOAD)
        assert not store.answers.replace(a_key(), PAYLOAD, OTHER_PAYLOAD)
        assert payload == found(store, key).payload
        clock.advance(KEEP)
        assert not store.answers.replace(key, PAYLOAD, OTHER_PAYLOAD)

    def test_a_payload_is_not_replaced_by_one_whose_key_is_gone(self, store: AnswerStore) -> None:
        """What could be read would be so no more."""
        key = a_key()
        payload = complete(store, key)
        with pytest.raises(DataKeyGone):
            store.answers.replace(key, payload, replace(payload, sealed_by=SealedBy("new", 1)))

        assert payload == found(store, key).payload

    def test_wiped_answers_are_not_counted(self, store: AnswerStore) -> None:
        """Nothing is sealed in them, and nothing is plain."""
        key = a_key()
        (by,) = with_keys(store, key.tid, a_token().hex())
        payload, plain = complete(store, key, by), store.answers.count().get("", 0)
        store.data_keys.destroy(key.tid)
        wiped = replace(payload, data=b"", sealed_by=ERASED)

        assert store.answers.replace(key, payload, wiped)
        assert (wiped, True) == (found(store, key).payload, found(store, key).erased)
        assert (0, plain) == (store.answers.count().get(by.kid, 0), store.answers.count().get("", 0))

    def test_answers_are_counted_by_the_key_of_the_ring(self, store: AnswerStore) -> None:
        """Plain ones under an empty id."""
        kid, key = a_token().hex(), a_key()
        (by,) = with_keys(store, key.tid, kid)
        plain = store.answers.count().get("", 0)
        for each, under in ((key, by), (a_key(tid=key.tid), by), (a_key(), None)):
            complete(store, each, under)

        assert (2, plain + 1) == (store.answers.count()[kid], store.answers.count()[""])

"""How others than owners come to know of records: for the contracts of what they may do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from flask_idempotency.engine.capabilities import Found, Sheet, Unsettled
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, State, Unknown
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import (
    LEASE,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)

STANDINGS: tuple[Standing, ...] = (
    "in flight",
    "completed",
    "quarantined",
    "lapsed, takeover",
    "lapsed, quarantine",
)


class UnsettledStore(Store, Protocol):
    """A store whose unsettled records can be found."""

    @property
    def unsettled(self) -> Unsettled: ...


def seen(store: Store, key: StorageKey) -> Found:
    """What somebody saw who looked at this key just now."""
    return Found(key, found(store, key))


def stood(store: Store, clock: FrozenClock, standing: Standing) -> tuple[Found, bytes]:
    """A fresh key's record in this state, and its owner's token."""
    key = a_key()
    token = stand(store, clock, key, standing)
    return seen(store, key), token


def condemned(store: Store, clock: FrozenClock) -> tuple[Found, bytes]:
    """A fresh key's record whose answer nobody can open."""
    answered, token = stood(store, clock, "completed")
    store.condemn(answered.key, PAYLOAD)
    return seen(store, answered.key), token


def noticed(store: Store, clock: FrozenClock) -> tuple[Found, bytes]:
    """A record that a retry has quarantined after its lease."""
    lapsed, token = stood(store, clock, "lapsed, quarantine")
    assert isinstance(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE), Unknown)
    return seen(store, lapsed.key), token


def begin_anew(store: Store, key: StorageKey, token: bytes) -> None:
    """Its owner releases it, and somebody else claims it."""
    store.release(key, token)
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


def outline(record: Record) -> Record:
    """A record without its answer's bytes, which may be left out where many are shown."""
    return record if record.payload is None else replace(record, payload=replace(record.payload, data=b""))


def met(sheets: Callable[[bytes], Sheet]) -> Iterator[Found]:
    """All that is on these sheets."""
    after: bytes | None = b""
    while after is not None:
        sheet = sheets(after)
        yield from sheet.found
        after = sheet.after


def stale(store: UnsettledStore, *, horizon: float, limit: int = 1000) -> dict[StorageKey, Record]:
    """By key, for there may be others' beside a test's own."""
    return {
        each.key: each.record
        for each in met(lambda after: store.unsettled.stale(horizon=horizon, after=after, limit=limit))
    }


def walked(
    store: UnsettledStore, state: State, *, limit: int = 1000, tid: bytes | None = None
) -> dict[StorageKey, Record]:
    return {
        each.key: each.record
        for each in met(lambda after: store.unsettled.walk(state, after=after, limit=limit, tid=tid))
    }

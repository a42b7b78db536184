"""Sample keys, requests and responses, and helpers that bring a record into a state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, Protocol, TypeAlias

import pytest

from flask_idempotency.engine.activity import ActivityLog
from flask_idempotency.engine.audit import AuditTrail
from flask_idempotency.engine.capabilities import (
    DataKeys,
    Expiry,
    Ledger,
    RecordPage,
    Recovery,
    Responses,
    SeenRecord,
    TaskLog,
    Void,
)
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    Callers,
    ClaimRequest,
    Grant,
    OnExpiry,
    Record,
    RequestInfo,
    State,
    StoredPayload,
    Unknown,
)
from flask_idempotency.engine.observations import Observations
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.testing.doubles import FrozenClock

LEASE = 30.0
KEEP = 3600.0
LONG = 400 * 86400.0
"""Seconds: longer than any record is kept."""
FINGERPRINT = b"\x01" + b"f" * 16
OTHER_FINGERPRINT = b"\x01" + b"F" * 16
ABOUT = RequestInfo(tenant="acme", principal="alice", method="POST", operation="payments.create")
PAYLOAD = StoredPayload(data=b'{"paid": true}', status=201, success=True, byte_size=31)
OTHER_PAYLOAD = StoredPayload(data=b'{"paid": "twice"}', status=500, success=False, byte_size=99)


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any], *, ids: Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once with each value, as one test. Take the arguments of `pytest.mark.parametrize`.

    The test must use keys of its own for each value. A failure names the value: the other arguments, the store and the
    clock among them, are the same each time.
    """
    every, taken = list(values), (names,) if isinstance(names, str) else names
    labels = ids or [repr(value) for value in every]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def with_each(*arguments: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for value, label in zip(every, labels, strict=True):
                given = {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
                try:
                    test(*arguments, **given, **fixtures)
                except Exception as failure:
                    failure.add_note(f"with {', '.join(taken)}: {label}")
                    raise

        asked = signature(test)
        fixtures = [
            each
            for each in asked.parameters.values()
            if each.name not in ((names,) if isinstance(names, str) else names)
        ]
        with_each.__signature__ = asked.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return with_each

    return decorate


Standing: TypeAlias = Literal["in flight", "completed", "quarantined", "lapsed, takeover", "lapsed, quarantine"]


def a_key(*, tid: bytes | None = None) -> StorageKey:
    return StorageKey(rid=secrets.token_bytes(32), tid=tid or secrets.token_bytes(16))


def a_token() -> bytes:
    return secrets.token_bytes(16)


def a_request(
    key: StorageKey,
    *,
    fingerprint: bytes = FINGERPRINT,
    on_expiry: OnExpiry = OnExpiry.QUARANTINE,
    about: RequestInfo = ABOUT,
    callers: Callers | None = None,
) -> ClaimRequest:
    return ClaimRequest(key=key, fingerprint=fingerprint, on_expiry=on_expiry, info=about, callers=callers)


def granted(outcome: StoreOutcome) -> Grant:
    """Return the grant of a claim that must succeed."""
    assert isinstance(outcome, Grant)
    return outcome


def found(store: Store, key: StorageKey) -> Record:
    """Return the record of a key that must have one."""
    record = store.read(key)
    assert record is not None
    return record


def near(seconds: float) -> Any:
    """Match this number to two milliseconds, the coarsest resolution of a store."""
    return pytest.approx(seconds, abs=0.002, rel=0)


def lost(write: Callable[[], object]) -> bool:
    """Return whether the store refuses this write because its claim is lost."""
    try:
        write()
    except LeaseLost:
        return True
    return False


def stand(store: Store, clock: FrozenClock, key: StorageKey, standing: Standing) -> bytes:
    """Bring the record of a new key into this state. Return its owner's token."""
    token = a_token()
    on_expiry = OnExpiry.TAKEOVER if standing == "lapsed, takeover" else OnExpiry.QUARANTINE
    granted(store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE))
    match standing:
        case "completed":
            store.complete(key, token, PAYLOAD, keep=KEEP)
        case "quarantined":
            store.quarantine(key, token, "view-crashed")
        case "lapsed, takeover" | "lapsed, quarantine":
            clock.advance(LEASE + 1)
        case "in flight":
            pass
    return token


def placed(store: Store, clock: FrozenClock, standing: Standing) -> tuple[StorageKey, bytes]:
    """Return a new key whose record is in this state, and its owner's token."""
    key = a_key()
    return key, stand(store, clock, key, standing)


class CapableStore(Store, Protocol):
    """A store with the capabilities that a contract asks for. Each contract says which those are."""

    @property
    def activity(self) -> ActivityLog: ...
    @property
    def audit(self) -> AuditTrail: ...
    @property
    def data_keys(self) -> DataKeys: ...
    @property
    def expiry(self) -> Expiry: ...
    @property
    def journals(self) -> Journals: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def observations(self) -> Observations: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def responses(self) -> Responses: ...
    @property
    def task_log(self) -> TaskLog: ...
    @property
    def void(self) -> Void: ...


class Contract:
    """What all contracts have: a clock that stands still unless a test advances it."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()


STANDINGS: tuple[Standing, ...] = (
    "in flight",
    "completed",
    "quarantined",
    "lapsed, takeover",
    "lapsed, quarantine",
)


def seen(store: Store, key: StorageKey) -> SeenRecord:
    """Return this key and its record, as the janitor or an operator sees them."""
    return SeenRecord(key, found(store, key))


def stood(store: Store, clock: FrozenClock, standing: Standing) -> tuple[SeenRecord, bytes]:
    """Return the record of a new key in this state, and its owner's token."""
    key, token = placed(store, clock, standing)
    return seen(store, key), token


def condemned(store: Store, clock: FrozenClock) -> tuple[SeenRecord, bytes]:
    """Return the record of a new key that is marked corrupt, and its owner's token."""
    answered, token = stood(store, clock, "completed")
    store.mark_corrupt(answered.key, PAYLOAD)
    return seen(store, answered.key), token


def noticed(store: Store, clock: FrozenClock) -> tuple[SeenRecord, bytes]:
    """Return a record that a retry has quarantined after its lease expired, and its owner's token."""
    lapsed, token = stood(store, clock, "lapsed, quarantine")
    assert isinstance(store.claim(a_request(lapsed.key), token=a_token(), lease=LEASE), Unknown)
    return seen(store, lapsed.key), token


def begin_anew(store: Store, key: StorageKey, token: bytes) -> None:
    """Let the owner release the key and another worker claim it."""
    store.release(key, token)
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


def outline(record: Record) -> Record:
    """Return the record without the bytes of its response, which a list may leave out."""
    return record if record.payload is None else replace(record, payload=replace(record.payload, data=b""))


def met(sheets: Callable[[bytes], RecordPage]) -> Iterator[SeenRecord]:
    """All that is on these sheets."""
    after: bytes | None = b""
    while after is not None:
        sheet = sheets(after)
        yield from sheet.found
        after = sheet.after


def stale(store: CapableStore, *, horizon: float, limit: int = 1000) -> dict[StorageKey, Record]:
    """By key, for there may be others' beside a test's own."""
    return {
        each.key: each.record
        for each in met(lambda after: store.recovery.expired_leases(horizon=horizon, after=after, limit=limit))
    }


def walked(
    store: CapableStore, state: State, *, limit: int = 1000, tid: bytes | None = None
) -> dict[StorageKey, Record]:
    return {
        each.key: each.record
        for each in met(lambda after: store.recovery.scan(state, after=after, limit=limit, tid=tid))
    }

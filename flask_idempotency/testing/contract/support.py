"""Sample keys, requests and responses, and helpers that bring a record into a state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, Final, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, get_args

import pytest

from flask_idempotency.engine.activity import ActivityLog
from flask_idempotency.engine.audit import AuditTrail
from flask_idempotency.engine.capabilities import (
    DataKey,
    DataKeys,
    Expiry,
    Ledger,
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
    VOIDED,
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
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.testing.doubles import FrozenClock

LEASE = 30.0
KEEP = 3600.0
LONG = 400 * 86400.0
"""Seconds: longer than any record is kept."""
FINGERPRINT = b"\x01" + b"f" * 16
OTHER_FINGERPRINT = b"\x01" + b"F" * 16
ABOUT = RequestInfo(tenant="acme", principal="alice", method="POST", operation="payments.create")
KID = "2026-11"
"""The key of the ring that wraps the data keys of these tests."""
WRAPPED = bytes(range(256))
PAYLOAD = StoredPayload(data=b'{"paid": true}', status=201, success=True, byte_size=31)
OTHER_PAYLOAD = StoredPayload(data=b'{"paid": "twice"}', status=500, success=False, byte_size=99)


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any], *, ids: Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once with each value, as one test. Take the arguments of `pytest.mark.parametrize`.

    The test must use keys of its own for each value, and a `Tenant(kit)` of its own in place of a fixture. A failure names
    the value: the other arguments, the store and the clock among them, are the same each time.
    """
    taken = (names,) if isinstance(names, str) else names
    every = [dict(zip(taken, (value,) if isinstance(names, str) else value, strict=True)) for value in values]
    labels = ids or [", ".join(map(repr, given.values())) for given in every]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def with_each(*arguments: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for given, label in zip(every, labels, strict=True):
                try:
                    test(*arguments, **given, **fixtures)
                except Exception as failure:
                    failure.add_note(f"with {', '.join(taken)}: {label}")
                    raise

        asked = signature(test)
        fixtures = [each for each in asked.parameters.values() if each.name not in taken]
        with_each.__signature__ = asked.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return with_each

    return decorate


Standing: TypeAlias = Literal["in flight", "completed", "quarantined", "lapsed, takeover", "lapsed, quarantine"]
STANDINGS: Final[tuple[Standing, ...]] = get_args(Standing)

Quarantined: TypeAlias = Literal["quarantined", "condemned", "noticed", "reaped"]
"""How a record is quarantined: by its owner, for a damaged response, by a retry or a janitor after its lease."""


class Asked(TypedDict, total=False):
    """What `a_request` takes."""

    fingerprint: bytes
    on_expiry: OnExpiry
    about: RequestInfo
    callers: Callers | None


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


PageT = TypeVar("PageT", bound="Page")


class Page(Protocol):
    """A part of what a store holds."""

    @property
    def after(self) -> bytes | None: ...


def pages(page_after: Callable[[bytes], PageT]) -> Iterator[PageT]:
    """Return every page. One may be empty and not the last."""
    after: bytes | None = b""
    while after is not None:
        yield (page := page_after(after))
        after = page.after


class Kit:
    """The store and the clock of a test, and the calls that many tests make."""

    def __init__(self, store: CapableStore, clock: FrozenClock, quota: Quota | None = None) -> None:
        self.store: CapableStore = store
        self.clock: FrozenClock = clock
        self.quota: Quota | None = quota

    def key(self, tid: bytes | None = None) -> StorageKey:
        """Return a key that no request has used, of a new tenant or of this one."""
        return a_key(tid=tid)

    @property
    def now(self) -> float:
        return self.clock.now

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def ask(
        self,
        key: StorageKey | None = None,
        *,
        token: bytes | None = None,
        lease: float = LEASE,
        **request: Unpack[Asked],
    ) -> StoreOutcome:
        """Claim a new key, or this one, with a new token, or this one. The rest of the request is as in `a_request`."""
        asked = a_request(key or self.key(), **request)
        return self.store.claim(asked, token=token or a_token(), lease=lease, quota=self.quota)

    def void(
        self, key: StorageKey, *, token: bytes | None = None, keep: float = KEEP, callers: Callers | None = None
    ) -> StoreOutcome:
        """Void this key with a new token, or this one."""
        asked = a_request(key, fingerprint=VOIDED, callers=callers)
        return self.store.void(asked, token=token or a_token(), keep=keep, quota=self.quota)

    def granted(
        self,
        key: StorageKey | None = None,
        *,
        token: bytes | None = None,
        lease: float = LEASE,
        **request: Unpack[Asked],
    ) -> Grant:
        """Claim a key as `ask` does, and return the grant that it must get."""
        return granted(self.ask(key, token=token, lease=lease, **request))

    def begin(self, key: StorageKey | None = None, **request: Unpack[Asked]) -> tuple[StorageKey, bytes]:
        """Claim a new key, or this one, and return it with its owner's token."""
        key = key or self.key()
        return key, self.granted(key, **request).token

    def complete(self, key: StorageKey | None = None, payload: StoredPayload = PAYLOAD) -> StorageKey:
        """Claim a new key, or this one, complete its request and return it."""
        key, token = self.begin(key)
        self.store.complete(key, token, payload, keep=KEEP)
        return key

    def found(self, key: StorageKey) -> Record:
        """Return the record of a key that must have one."""
        return found(self.store, key)

    @contextmanager
    def unchanged(self, key: StorageKey) -> Iterator[None]:
        """Check that this key has the same record after these calls as before."""
        before = self.found(key)
        yield
        assert before == self.found(key)

    def seen(self, key: StorageKey) -> SeenRecord:
        """Return this key and its record, as the janitor or an operator sees them."""
        return SeenRecord(key, self.found(key))

    def stand(self, key: StorageKey, standing: Standing | Quarantined) -> bytes:
        """Bring the record of a new key into this state. Return its owner's token."""
        on_expiry = OnExpiry.TAKEOVER if standing == "lapsed, takeover" else OnExpiry.QUARANTINE
        token = self.granted(key, on_expiry=on_expiry).token
        if standing in ("completed", "condemned"):
            self.store.complete(key, token, PAYLOAD, keep=KEEP)
        elif standing == "quarantined":
            self.store.quarantine(key, token, "view-crashed")
        elif standing != "in flight":
            self.advance(LEASE + 1)
        if standing == "condemned":
            self.store.mark_corrupt(key, PAYLOAD)
        elif standing == "noticed":
            assert isinstance(self.ask(key), Unknown)
        elif standing == "reaped":
            assert self.store.recovery.quarantine_expired(self.seen(key), horizon=self.now)
        return token

    def placed(self, standing: Standing | Quarantined) -> tuple[StorageKey, bytes]:
        """Return a new key whose record is in this state, and its owner's token."""
        key = self.key()
        return key, self.stand(key, standing)

    def stood(self, standing: Standing | Quarantined) -> tuple[SeenRecord, bytes]:
        """Return the record of a new key in this state, and its owner's token."""
        key, token = self.placed(standing)
        return self.seen(key), token

    def completes(self, key: StorageKey, token: bytes) -> bool:
        """Complete this request. Return whether the store has accepted that."""
        return not lost(lambda: self.store.complete(key, token, PAYLOAD, keep=KEEP))

    def accepted(self, key: StorageKey, token: bytes, *verbs: str) -> list[str]:
        """Make these writes of an owner, or all, in this order on one record. Return those without `LeaseLost`."""
        writes: dict[str, Callable[[], object]] = {
            "renew": lambda: self.store.renew(key, token, lease=20 * LEASE),
            "mark_point_of_no_return": lambda: self.store.mark_point_of_no_return(key, token),
            "complete": lambda: self.store.complete(key, token, OTHER_PAYLOAD, keep=2 * KEEP),
            "release": lambda: self.store.release(key, token),
            "quarantine": lambda: self.store.quarantine(key, token, "late"),
        }
        return [verb for verb in verbs or writes if not lost(writes[verb])]

    def resolve(self, seen: SeenRecord, payload: StoredPayload = PAYLOAD, *, token: bytes | None = None) -> bool:
        """Resolve this record as completed, under a new token or this one. Return whether that was done."""
        return self.store.recovery.resolve(seen, token=token or a_token(), payload=payload, keep=KEEP)

    def changes(self, key: StorageKey, token: bytes) -> dict[str, Callable[[], object]]:
        """Return, by name, what may happen to a record since a janitor or an operator has seen it."""
        return {
            "renewed": lambda: self.store.renew(key, token, lease=LEASE),
            "taken over": lambda: self.granted(key),
            "completed": lambda: self.store.complete(key, token, PAYLOAD, keep=KEEP),
            "held": lambda: self.store.quarantine(key, token, "view-crashed"),
            "begun again": lambda: self.begin_anew(key, token),
        }

    def begin_anew(self, key: StorageKey, token: bytes) -> None:
        """Let the owner release the key and another worker claim it."""
        self.store.release(key, token)
        self.granted(key)

    def add_data_key(self, tid: bytes, number: int = 1, kid: str = KID) -> bool:
        """Add a data key of this tenant, wrapped by this key of the ring. Return whether the store has added it."""
        kept = self.store.data_keys.read_keys(tid)
        return self.store.data_keys.add(tid, DataKey(number, kid, WRAPPED), store=kept.store, after=kept.last)

    def walked(self, state: State, *, limit: int = 1000, tid: bytes | None = None) -> dict[StorageKey, Record]:
        """Return by key all records in this state, or those of one tenant."""
        scan = self.store.recovery.scan
        found = pages(lambda after: scan(state, after=after, limit=limit, tid=tid))
        return {each.key: each.record for page in found for each in page.found}

    def stale(self, *, horizon: float, limit: int = 1000) -> dict[StorageKey, Record]:
        """Return by key what is stale: there may be others' beside a test's own."""
        expired = self.store.recovery.expired_leases
        found = pages(lambda after: expired(horizon=horizon, after=after, limit=limit))
        return {each.key: each.record for page in found for each in page.found}

    def sweep(self, horizon: float | None = None, *, limit: int = 1000) -> int:
        """Let the janitor remove what has expired, until none is left. Return how much that was."""
        total = 0
        while removed := self.store.expiry.sweep(horizon=self.now if horizon is None else horizon, limit=limit):
            assert 0 < removed <= limit
            total += removed
        return total


def stand(store: Any, clock: FrozenClock, key: StorageKey, standing: Standing) -> bytes:
    """Bring the record of a new key into this state. Return its owner's token."""
    return Kit(store, clock).stand(key, standing)


class Contract:
    """What all contracts have: a clock that stands still unless a test advances it."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

    @pytest.fixture
    def kit(self, store: CapableStore, clock: FrozenClock) -> Kit:
        return Kit(store, clock)


def outline(record: Record) -> Record:
    """Return the record without the bytes of its response, which a list may leave out."""
    return record if record.payload is None else replace(record, payload=replace(record.payload, data=b""))

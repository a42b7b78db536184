"""Keys, requests and results to try a store with."""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeAlias

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import About, Claimed, ClaimRequest, Grant, OnLapse, Payload, Record
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.testing.clock import FrozenClock

LEASE = 30.0
KEEP = 3600.0
FINGERPRINT = b"\x01" + b"f" * 16
OTHER_FINGERPRINT = b"\x01" + b"F" * 16
ABOUT = About(tenant="acme", principal="alice", method="POST", operation="payments.create")
PAYLOAD = Payload(data=b'{"paid": true}', status=201, success=True, byte_size=31)
OTHER_PAYLOAD = Payload(data=b'{"paid": "twice"}', status=500, success=False, byte_size=99)

Standing: TypeAlias = Literal["in flight", "completed", "quarantined", "lapsed, takeover", "lapsed, quarantine"]


def a_key(*, tid: bytes | None = None) -> StorageKey:
    return StorageKey(rid=secrets.token_bytes(32), tid=tid or secrets.token_bytes(16))


def a_token() -> bytes:
    return secrets.token_bytes(16)


def a_request(
    key: StorageKey,
    *,
    fingerprint: bytes = FINGERPRINT,
    on_lapse: OnLapse = OnLapse.QUARANTINE,
    about: About = ABOUT,
) -> ClaimRequest:
    return ClaimRequest(key=key, fingerprint=fingerprint, on_lapse=on_lapse, about=about)


def granted(outcome: StoreOutcome) -> Grant:
    """What a claim that must succeed was given."""
    assert isinstance(outcome, Claimed)
    return outcome.held


def found(store: Store, key: StorageKey) -> Record:
    """The record of a key that must have one."""
    record = store.read(key)
    assert record is not None
    return record


def near(seconds: float) -> Any:
    """Equal to this, as far as a store must tell: some count in milliseconds."""
    return pytest.approx(seconds, abs=0.002, rel=0)


def stand(store: Store, clock: FrozenClock, key: StorageKey, standing: Standing) -> bytes:
    """Bring a fresh key's record to where it should stand. Returns its owner's token."""
    token = a_token()
    on_lapse = OnLapse.TAKEOVER if standing == "lapsed, takeover" else OnLapse.QUARANTINE
    granted(store.claim(a_request(key, on_lapse=on_lapse), token=token, lease=LEASE))
    match standing:
        case "completed":
            store.complete(key, token, PAYLOAD, keep=KEEP)
        case "quarantined":
            store.hold(key, token, "view-crashed")
        case "lapsed, takeover" | "lapsed, quarantine":
            clock.advance(LEASE + 1)
        case "in flight":
            pass
    return token

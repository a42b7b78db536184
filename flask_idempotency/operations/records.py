"""What may be told of a record: everything an auditor is told. Never a client's key, and never a body."""

from __future__ import annotations

import binascii
from base64 import b32decode, b32encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flask_idempotency.engine.capabilities import Found, Unsettled, every
from flask_idempotency.engine.keys import TID_BYTES, StorageKey
from flask_idempotency.engine.model import ERASED, Record, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import last_seen, may_live_for
from flask_idempotency.operations.refusal import Refused
from flask_idempotency.operations.spelling import moment

RID_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has claimed a record that is not completed. Seconds."""

    last_seen_ago: float
    may_live_for: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of an answer without opening it."""

    status: int
    success: bool
    byte_size: int
    """As it was sent, before it was compressed or encrypted."""
    sealed_under: str | None
    """The key of the ring. None: it is not encrypted."""
    erased: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """One record. Ages are seconds by the store's clock; times are its own, in UTC."""

    handle: str
    record: str
    """What stands for it in logs and events."""
    state: str
    endpoint: str
    method: str
    tenant: str | None
    """As stored: a name, or what stands for it. None: it has none."""
    principal: str | None
    attempt: int
    fence: int
    requested_at: str
    first_used_ago: float
    lease_ended_ago: float | None
    """None: there is lease left, or the record is completed."""
    on_lapse: str
    reason: str
    owner: Owner | None
    completed_at: str | None
    duration: float | None
    expires_at: str | None
    answer: Answer | None


def handle_of(key: StorageKey) -> str:
    """By this a person finds a record again who does not know the client's key. It is no secret, and has no place in logs."""
    return b32encode(key.rid + key.tid).decode("ascii").rstrip("=").lower()


def key_of(handle: str) -> StorageKey:
    """The record that this handle names. Raises `Refused` for what is no handle, and does not repeat it: it may be a key."""
    try:
        raw = b32decode(handle.upper() + "=" * (-len(handle) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    key = StorageKey(raw[:RID_BYTES], raw[RID_BYTES:])
    if len(raw) != RID_BYTES + TID_BYTES or handle_of(key) != handle.lower():
        raise Refused(
            "That is no handle: `flask idempotency list` shows them, 77 letters and digits long. A client's key is named by "
            "--key."
        )
    return key


def shown(found: Found, policy: Policy, label: str) -> Shown:
    """What may be told of this record, whose endpoint has this policy."""
    record = found.record
    about, now = record.about, _now(record)
    unsettled = record.state is not State.COMPLETED
    return Shown(
        handle=handle_of(found.key),
        record=label,
        state=record.state.value,
        endpoint=about.operation,
        method=about.method,
        tenant=about.tenant or None,
        principal=about.principal or None,
        attempt=record.attempt,
        fence=record.fence,
        requested_at=moment(record.requested_at),
        first_used_ago=age(record),
        lease_ended_ago=round(-record.remaining, 3) if unsettled and record.remaining <= 0 else None,
        on_lapse=record.on_lapse.value,
        reason=record.reason,
        owner=_owner(record, policy) if unsettled else None,
        completed_at=None if record.completed_at is None else moment(record.completed_at),
        duration=None if record.completed_at is None else round(record.completed_at - record.requested_at, 3),
        expires_at=None if unsettled else moment(now + record.remaining),
        answer=_answer(record),
    )


def age(record: Record) -> float:
    """Seconds since the key was first used, by the store's clock."""
    return round(max(_now(record) - record.requested_at, 0.0), 3)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records a list is to have."""

    state: State
    tids: Sequence[bytes | None] = (None,)
    """Of all parts of the tenant, under every secret in use. None: of everybody."""
    older_than: float = 0.0
    endpoint: str | None = None

    def wants(self, record: Record) -> bool:
        return age(record) >= self.older_than and self.endpoint in (None, record.about.operation)


def listed(unsettled: Unsettled, wanted: Wanted, *, one_of_each: bool = True) -> Iterator[Found]:
    """Every record that is wanted, once. Raises `StoreUnavailable` when the store does not answer.

    `one_of_each`: of those that one use of a key has under several secrets, one.
    """
    tokens: set[bytes] = set()
    for found in every(unsettled, wanted.state, tids=wanted.tids):
        if not wanted.wants(found.record) or (one_of_each and found.record.token in tokens):
            continue
        tokens.add(found.record.token)
        yield found


def _now(record: Record) -> float:
    return record.deadline - record.remaining


def _owner(record: Record, policy: Policy) -> Owner:
    lives = may_live_for(record, max_runtime=policy.max_runtime)
    return Owner(round(last_seen(record, lease=policy.lease), 3), round(lives, 3))


def _answer(record: Record) -> Answer | None:
    payload = record.payload
    if payload is None:
        return None
    by = payload.sealed_by
    return Answer(
        status=payload.status,
        success=payload.success,
        byte_size=payload.byte_size,
        sealed_under=None if by is None else by.kid or None,
        erased=record.erased or by == ERASED,
    )

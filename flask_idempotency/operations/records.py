"""Find, show and resolve records: what an operator may know and do, never a client's key or a response body.

A record is named by its handle, by the id in a log line, or by the client's key with its scope. The functions that resolve
refuse with a sentence that says why and what to do.
"""

from __future__ import annotations

import binascii
import re
from base64 import b32decode, b32encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, inf
from typing import Final

from flask_idempotency.engine.capabilities import Recovery, SeenRecord, every
from flask_idempotency.engine.errors import CorruptRecord, IdempotencyError
from flask_idempotency.engine.keys import TID_BYTES, Identity, Scope, StorageKey
from flask_idempotency.engine.model import ERASED, Record, State, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Settler, idle_seconds, max_remaining, releasable_in


class Refused(IdempotencyError):
    """The operation is refused and changed no record. The text says why, and what to do."""


_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: `14 min 48 s`. Less than a second is `0 s`."""
    left = int(max(seconds, 0.0))
    parts: list[tuple[int, str]] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def moment(epoch: float) -> str:
    """Return a time of the store's clock in UTC, to the millisecond."""
    return datetime.fromtimestamp(epoch, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


RID_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class OwnerView:
    """The worker of a record that is not completed. Seconds."""

    last_seen_ago: float
    may_live_for: float


@dataclass(frozen=True, slots=True)
class ResponseView:
    """The facts of a stored response that need no decryption."""

    status: int
    success: bool
    byte_size: int
    """The size as it was sent, before compression and encryption."""
    sealed_under: str | None
    """The key of the ring. None: the response is not encrypted."""
    erased: bool


@dataclass(frozen=True, slots=True)
class RecordView:
    """One record. Ages are seconds by the store's clock; times are its own, in UTC."""

    handle: str
    record: str
    """Its id in logs and events."""
    state: str
    endpoint: str
    method: str
    tenant: str | None
    """As stored: a name or its hash. None: the record has no tenant."""
    principal: str | None
    attempt: int
    fence: int
    requested_at: str
    first_used_ago: float
    lease_ended_ago: float | None
    """None: there is lease left, or the record is completed."""
    on_expiry: str
    reason: str
    owner: OwnerView | None
    completed_at: str | None
    duration: float | None
    expires_at: str | None
    answer: ResponseView | None


def handle_of(key: StorageKey) -> str:
    """Return the handle by which an operator finds a record without the client's key. It is no secret; keep it out of logs."""
    return b32encode(key.rid + key.tid).decode("ascii").rstrip("=").lower()


def key_of(handle: str) -> StorageKey:
    """Return the key of this handle. Raises `Refused` for a malformed one, and does not quote it: it may be a client's key."""
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


def shown(found: SeenRecord, policy: Policy, label: str) -> RecordView:
    """Return what an operator may know of this record, whose endpoint has this policy."""
    record = found.record
    about, now = record.info, _now(record)
    unfinished = record.state is not State.COMPLETED
    return RecordView(
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
        lease_ended_ago=round(-record.remaining, 3) if unfinished and record.remaining <= 0 else None,
        on_expiry=record.on_expiry.value,
        reason=record.reason,
        owner=_owner(record, policy) if unfinished else None,
        completed_at=None if record.completed_at is None else moment(record.completed_at),
        duration=None if record.completed_at is None else round(record.completed_at - record.requested_at, 3),
        expires_at=None if unfinished else moment(now + record.remaining),
        answer=_answer(record),
    )


def age(record: Record) -> float:
    """Return the seconds since the first use of the key, by the store's clock."""
    return round(max(_now(record) - record.requested_at, 0.0), 3)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records a list shows."""

    state: State
    tids: Sequence[bytes | None] = (None,)
    """The ids of all parts of the tenant, under every secret in use. None: of all tenants."""
    older_than: float = 0.0
    endpoint: str | None = None

    def wants(self, record: Record) -> bool:
        return age(record) >= self.older_than and self.endpoint in (None, record.info.operation)


def listed(recovery: Recovery, wanted: RecordFilter, *, one_of_each: bool = True) -> Iterator[SeenRecord]:
    """Yield every record that passes the filter, once. Raises `StoreUnavailable` if the store does not answer.

    `one_of_each`: if one use of a key has records under several secrets, yield one of them.
    """
    tokens: set[bytes] = set()
    for found in every(recovery, wanted.state, tids=wanted.tids):
        if not wanted.wants(found.record) or (one_of_each and found.record.token in tokens):
            continue
        tokens.add(found.record.token)
        yield found


def _now(record: Record) -> float:
    return record.deadline - record.remaining


def _owner(record: Record, policy: Policy) -> OwnerView:
    lives = max_remaining(record, max_runtime=policy.max_runtime)
    return OwnerView(round(idle_seconds(record, lease=policy.lease), 3), round(lives, 3))


def _answer(record: Record) -> ResponseView | None:
    payload = record.payload
    if payload is None:
        return None
    by = payload.sealed_by
    return ResponseView(
        status=payload.status,
        success=payload.success,
        byte_size=payload.byte_size,
        sealed_under=None if by is None else by.kid or None,
        erased=record.erased or by == ERASED,
    )


# Find the records of a handle, an id from a log, or a client's key.

SHORT: Final = re.compile(r"[0-9a-z]{8,76}")
"""An id from a log line, which has 8 characters, or the start of a handle. It may be a client's key by mistake, so no text
quotes it."""

MOST_LOOKED_AT: Final = 100_000
"""The most completed records that a search reads: some ten seconds on Redis, and fewer on a database."""

Read = Callable[[StorageKey], "Record | None"]


@dataclass(frozen=True, slots=True)
class Case:
    """One use of a key: its record, or during a rotation of secrets one record for each secret.

    The record under the oldest secret comes first. It decides, because requests claim it and workers complete it first.
    """

    found: tuple[SeenRecord, ...]

    @property
    def first(self) -> SeenRecord:
        return self.found[0]

    @property
    def also(self) -> tuple[str, ...]:
        """The handles of the other records."""
        return tuple(handle_of(each.key) for each in self.found[1:])


def by_key(read: Read, identities: Sequence[Identity], scopes: Iterable[Scope], client_key: str) -> list[Case]:
    """Return the uses of a client's key in these scopes, under every secret in use. `identities` start with the newest."""
    cases = []
    for scope in scopes:
        keys = [who.storage_key(scope, client_key) for who in reversed(identities)]
        records = [(key, record) for key in keys if (record := read(key)) is not None]
        if records:
            cases.append(Case(tuple(SeenRecord(key, record) for key, record in records)))
    return cases


def by_handle(read: Read, handle: str) -> Case:
    """Return the record of this handle. Raises `Refused` if there is none."""
    key = key_of(handle)
    record = read(key)
    if record is None:
        raise Refused("There is no record under this handle: it was released, or its time is over.")
    return Case((SeenRecord(key, record),))


def by_short(recovery: Recovery, identities: Sequence[Identity], short: str, *, tids: Sequence[bytes | None]) -> str:
    """Return the handle of the one record with this id from a log, or with this start of a handle.

    Read every record of these tenants, because an id leads back to no record. Raises `Refused` if there is no such record,
    if there are several, and after `MOST_LOOKED_AT` completed records.
    """
    found: dict[StorageKey, str] = {}
    for state in (State.PROCESSING, State.QUARANTINED, State.COMPLETED):
        for number, each in enumerate(every(recovery, state, tids=tids)):
            if state is State.COMPLETED and number >= MOST_LOOKED_AT:
                raise Refused(
                    f"This store has more than {MOST_LOOKED_AT:,} completed records, too many to look for an id from a log. "
                    "Say --tenant T or --no-tenant beside it, or name the record by its whole handle or by --key. Nothing was "
                    "changed."
                )
            labelled = any(who.label(each.key) == short for who in identities)
            if labelled or handle_of(each.key).startswith(short):
                found[each.key] = handle_of(each.key)
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        raise Refused(
            f"{len(found)} records have this id. Name one by its whole handle: {', '.join(sorted(found.values()))}."
        )
    raise Refused(
        "No record has this id from a log, or a handle that begins so: it was released, or it expired. Name a client's key "
        "with --key."
    )


def with_rotated(case: Case, recovery: Recovery, read: Read, theirs: Sequence[Sequence[bytes]]) -> Case:
    """Return the case with the records of the same use under other secrets.

    `theirs` are the ids of its tenant's parts under each secret, the newest first.

    Find them by their token among unfinished records. Raises `Refused` for a completed record, which would need a scan of
    all, and if the tenant is unknown.
    """
    first = case.first
    if len(theirs) == 1:
        return case
    # Under each secret, a use of a key is in one part, and these parts differ.
    secret_of = {tid: number for number, parts in enumerate(theirs) for tid in parts}
    if first.record.state is State.COMPLETED or first.key.tid not in secret_of:
        raise Refused(
            "Several secrets are in use, so there may be a record of the same use under another, and both are resolved "
            "together: name it by --key, or add --tenant T or --no-tenant beside the handle of one that is not completed."
        )
    met = {first.key: first}
    for state in (State.PROCESSING, State.QUARANTINED):
        for found in listed(recovery, RecordFilter(state, tids=tuple(secret_of)), one_of_each=False):
            if found.record.token == first.record.token and (record := read(found.key)) is not None:
                met.setdefault(found.key, SeenRecord(found.key, record))
    return Case(tuple(sorted(met.values(), key=lambda found: -secret_of[found.key.tid])))


# Resolve a key for its worker, and warn of the risks.

_UNKNOWN_ENDPOINT: Final = (
    "Its worker may still run, for an unknown time: this application has no endpoint of that name."
)


@dataclass(frozen=True, slots=True)
class AuditNote:
    """Who acts and why, for the audit event. Neither may name a key, a person or a body."""

    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResolveReport:
    """How many records of a case were resolved. `left` were changed by another process first, and stay as they are."""

    settled: int
    left: int


def release_warnings(case: Case, policy: Policy, *, known: bool = True) -> list[str]:
    """Return why this key should not run again, one sentence each. Empty: as far as is known, it neither completed nor runs.

    `known`: the application has the endpoint of the key, so the policy's `max_runtime` applies.
    """
    said = []
    seconds = wait(case, policy)
    if any(found.record.state is State.COMPLETED for found in case.found):
        said.append(
            "Its request completed, and retries get the response. If you release it, the next retry runs again."
        )
    elif any(found.record.payload is not None for found in case.found):
        said.append(
            "Its request completed: the record holds a response that no worker could open. If you release it, the next retry "
            "runs again. See `resolve --reopen` and `resolve --happened`."
        )
    if not known and any(max_remaining(found.record, max_runtime=inf) == inf for found in case.found):
        return [*said, _UNKNOWN_ENDPOINT]
    # A worker that counts as gone may be frozen, but raises no warning: its policy allows a second run.
    lives = [living for found in case.found if seconds > 0 and (living := alive(found.record, policy)) is not None]
    return [*said, *lives[:1]]


def wait(case: Case, policy: Policy) -> float:
    """Return the seconds until its workers count as gone, so that a release needs no force, by the store's clock."""
    return max(releasable_in(found.record, policy) for found in case.found)


def way_out(case: Case, policy: Policy, *, known: bool = True) -> str:
    """Return what an operator may do after a refused release: wait, and for how long, or force it."""
    done = any(found.record.payload is not None or found.record.state is State.COMPLETED for found in case.found)
    seconds = 0 if done or not known else ceil(wait(case, policy))
    if seconds <= 0:
        return "To release it all the same: --force."
    return f"Repeat this in {seconds} s, or release it now all the same: --force."


def alive(record: Record, policy: Policy) -> str | None:
    """Return when the worker was last seen and how long it may run. None: it does not run, or quarantined the key itself."""
    lives = max_remaining(record, max_runtime=policy.max_runtime)
    if lives <= 0:
        return None
    until = moment(record.deadline - record.remaining + lives)
    return (
        "Its worker may still run: it was last seen "
        f"{format_duration(idle_seconds(record, lease=policy.lease))} ago, and may go on "
        f"for {format_duration(lives)}, until {until}."
    )


def release(settler: Settler, case: Case, word: AuditNote, *, forced: bool) -> ResolveReport:
    """Release the key, so that its next retry runs. `forced`: an operator overruled warnings."""
    return _each(
        case.found, lambda found: settler.force_release(found, actor=word.actor, reason=word.reason, forced=forced)
    )


def complete(settler: Settler, case: Case, result: StoredResponse, word: AuditNote, *, keep: float) -> ResolveReport:
    """Complete the key, so that retries get this response. Raises `Refused` unless it is quarantined."""
    check_quarantined(case)
    return _each(
        case.found, lambda found: settler.complete(found, result, keep=keep, actor=word.actor, reason=word.reason)
    )


def reopen(settler: Settler, case: Case, word: AuditNote, *, keep: float) -> ResolveReport:
    """Complete the key with the response that its record holds. Raises `Refused` if that cannot be opened, or is missing."""
    check_quarantined(case)

    def reopened(found: SeenRecord) -> bool:
        try:
            return settler.reopen(found, keep=keep, actor=word.actor, reason=word.reason)
        except CorruptRecord as error:
            if found is not case.first:
                return False
            raise Refused(f"It cannot be reopened: {error}. Nothing was changed.") from error

    return _each(case.found, reopened)


def check_quarantined(case: Case) -> None:
    """Raise `Refused` for a key that is not quarantined."""
    match case.first.record.state:
        case State.QUARANTINED:
            return
        case State.COMPLETED:
            raise Refused("There is nothing to resolve: its request completed, and retries get the response.")
        case State.PROCESSING:
            raise Refused(
                "Only a quarantined key can be resolved, and this one is in progress. When its lease expires, `flask "
                "idempotency reap` quarantines it; `release` frees it."
            )


def _each(found: Sequence[SeenRecord], settle: Callable[[SeenRecord], bool]) -> ResolveReport:
    """Resolve the first record, then the others. If another process changed the first, touch none."""
    if not settle(found[0]):
        return ResolveReport(0, left=len(found))
    rest = [settle(each) for each in found[1:]]
    return ResolveReport(1 + sum(rest), left=rest.count(False))

"""Find, show and resolve records: what an operator may know and do, never a client's key or a response body.

A record is named by its handle, by the id in a log line, or by the client's key with its scope. The functions that resolve
refuse with a sentence that says why and what to do.
"""

from __future__ import annotations

import binascii
import re
from base64 import b32decode, b32encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import pairwise
from math import ceil, inf
from typing import Final

from flask_idempotency.engine.capabilities import Recovery, SeenRecord, every
from flask_idempotency.engine.errors import CorruptRecord, IdempotencyError, RingMismatch
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.journal import EMPTY, Journal, Journals
from flask_idempotency.engine.keys import LONGEST_NAME, TID_BYTES, Identity, Scope, StorageKey
from flask_idempotency.engine.model import ERASED, LATEST, VOIDED, OnExpiry, Record, State, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SettledStep, Settler, resume_fault
from flask_idempotency.engine.values import valueclass
from flask_idempotency.engine.vanished import idle_seconds, max_remaining, releasable_in
from flask_idempotency.operations.times import format_duration, moment


class Refused(IdempotencyError):
    """The operation is refused and changed no record. The text says why, and what to do."""


RID_BYTES: Final = 32


class Condition(Enum):
    """What an operator calls the state of a record, in the order in which records need an operator."""

    QUARANTINED = "quarantined"
    LEASE_EXPIRED = "lease expired"
    PAUSED = "paused"
    """Steps are recorded, and the next retry goes on after them."""
    IN_FLIGHT = "in flight"
    COMPLETED = "completed"

    @property
    def tone(self) -> str:
        """How a face shows it: `bad`, `warning`, `active` or `good`. A word always stands beside it."""
        return _TONES[self]


_TONES: Final = dict(zip(Condition, ("bad", "warning", "warning", "active", "good"), strict=True))


def condition(record: Record) -> Condition:
    return _condition(record.state, over=record.remaining <= 0)


def _condition(state: State, *, over: bool) -> Condition:
    if state is State.PROCESSING:
        return Condition.LEASE_EXPIRED if over else Condition.IN_FLIGHT
    return Condition(state.value)


@valueclass(frozen=True, slots=True)
class OwnerView:
    """The worker of a record that is not completed. Seconds."""

    last_seen_ago: float
    may_live_for: float


@valueclass(frozen=True, slots=True)
class ResponseView:
    """The facts of a stored response that need no decryption."""

    status: int
    success: bool
    byte_size: int
    """The size as it was sent, before compression and encryption."""
    sealed_under: str | None
    """The key of the ring. None: the response is not encrypted."""
    erased: bool


@valueclass(frozen=True, slots=True)
class StepView:
    """One recorded step, without its result. Times are the store's, in UTC."""

    name: str
    item: str | None
    """None: it has none, or it is unreadable."""
    effects: str
    state: str
    """`begun`, `finished` or `in doubt`."""
    attempt: int | None
    """None: one before the last."""
    began_at: str
    finished_at: str | None
    kept: bool
    """False: its result could not be kept, so no retry gets past it."""


@valueclass(frozen=True, slots=True)
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
    lease_left: float | None
    on_expiry: str
    reason: str
    owner: OwnerView | None
    completed_at: str | None
    duration: float | None
    expires_at: str | None
    answer: ResponseView | None
    paused: bool = False
    """Whether steps with effects are recorded and the next retry goes on after them."""
    steps: tuple[StepView, ...] | None = None
    """None: they were not read. A list reads no steps."""
    remembered_until: str | None = None
    """Until when the key is refused after `expires_at`. None: it is free then."""
    tries: int = 0
    """How often the janitor has tried to finish it. At `MOST_TRIES` it has given up."""

    @property
    def condition(self) -> Condition:
        if self.paused:
            return Condition.PAUSED
        return _condition(State(self.state), over=self.lease_ended_ago is not None)


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
            "That is no id of a record: `flask idempotency list` shows the first characters of each, and 4 of them are enough. "
            "Name a client's key with --key."
        )
    return key


def is_paused(record: Record, journal: Journal) -> bool:
    """Return whether the next retry of this record goes on after recorded steps."""
    ended = record.state is State.PROCESSING and record.remaining <= 0 and record.on_expiry is OnExpiry.TAKEOVER
    return ended and any(entry.has_effect for entry in journal.entries)


def shown(
    found: SeenRecord, policy: Policy, label: str, *, journal: Journal = EMPTY, steps: Sequence[StepView] | None = None
) -> RecordView:
    """Return what an operator may know of this record, whose endpoint has this policy."""
    record = found.record
    about, now = record.info, _now(record)
    unfinished = record.state is not State.COMPLETED
    completed_at = None if record.fingerprint == VOIDED else record.completed_at
    idle, lives = idle_seconds(record, lease=policy.lease), max_remaining(record, max_runtime=policy.max_runtime)
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
        lease_left=round(record.remaining, 3) if unfinished and record.remaining > 0 else None,
        on_expiry=record.on_expiry.value,
        reason="voided" if record.fingerprint == VOIDED else record.reason,
        owner=OwnerView(round(idle, 3), round(lives, 3)) if unfinished else None,
        completed_at=None if completed_at is None else moment(completed_at),
        duration=None if completed_at is None else round(completed_at - record.requested_at, 3),
        expires_at=None if unfinished else moment(now + record.remaining),
        answer=_answer(record),
        paused=is_paused(record, journal),
        steps=None if steps is None else tuple(steps),
        remembered_until=None if record.remembered_until is None else moment(record.remembered_until),
        tries=len(journal.tries),
    )


def age(record: Record) -> float:
    """Return the seconds since the first use of the key, by the store's clock."""
    return round(max(_now(record) - record.requested_at, 0.0), 3)


UNFINISHED: Final = (State.PROCESSING, State.QUARANTINED)
"""In this order, because a record goes from the first state to the second: a scan of both misses none on its way."""


_ORDER: Final = list(Condition)

PAGE: Final = 200
"""Records that one call of the store looks at."""
MOST_PAUSED: Final = 2000
"""Expired leases whose journals are read. Some findings are enough to act, so nothing counts more."""


def urgency(found: SeenRecord) -> tuple[int, float, bytes]:
    """Return what sorts records: those first that need an operator most, the oldest first."""
    return _ORDER.index(condition(found.record)), found.record.requested_at, found.key.rid


def expired_leases(recovery: Recovery, *, horizon: float, most: int) -> Iterator[SeenRecord]:
    """Yield the records whose lease expired before this horizon, of about the first `most` that the store looks at.

    Raises `StoreUnavailable` if the store does not answer.
    """
    after = b""
    for _ in range(most // PAGE):
        page = recovery.expired_leases(horizon=horizon, after=after, limit=PAGE)
        yield from page.found
        if page.after is None:
            return
        after = page.after


def paused_among(recovery: Recovery, journals: Journals | None, *, most: int = MOST_PAUSED) -> int:
    """Return how many requests with an expired lease are paused, of the first `most` that it finds."""
    expired = () if journals is None else expired_leases(recovery, horizon=LATEST, most=most)
    return sum(journals is not None and is_paused_in(each, journals) for each in expired)


def is_paused_in(found: SeenRecord, journals: Journals) -> bool:
    """Return whether this record is paused. One whose journal cannot be read is not: the next retry quarantines it."""
    # Read the journal last: a running request has one too.
    if found.record.state is not State.PROCESSING or found.record.remaining > 0:
        return False
    try:
        return is_paused(found.record, journals.read(found.key))
    except CorruptRecord:
        return False


def _now(record: Record) -> float:
    return record.deadline - record.remaining


def _answer(record: Record) -> ResponseView | None:
    payload = record.payload
    if payload is None or record.is_skeleton or record.fingerprint == VOIDED:
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

SHORTEST: Final = 4
"""Characters of a handle that name a record."""
SHOWN: Final = 8
"""Characters of a handle that a list shows."""

SHORT: Final = re.compile(rf"[0-9a-z]{{{SHORTEST},76}}")
"""The start of a handle, or an id from a log line, which has 8 characters. It may be a client's key by mistake, so no text
quotes it."""

MOST_LOOKED_AT: Final = 100_000
"""The most completed records that a search reads: some ten seconds on Redis, and fewer on a database."""

MOST_NAMED: Final = 10
"""Candidates that the error about an ambiguous id lists."""

Read = Callable[[StorageKey], "Record | None"]


@valueclass(frozen=True, slots=True)
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
        raise Refused("There is no record with this id: it was released, or it expired.")
    return Case((SeenRecord(key, record),))


def short_ids(handles: Iterable[str]) -> dict[str, str]:
    """Return for each handle its first 8 characters, or as many more as tell it from the others.

    All handles have the same length.
    """
    ordered = sorted(set(handles))
    lengths = [SHOWN] * len(ordered)
    for number, (one, other) in enumerate(pairwise(ordered)):
        shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        lengths[number], lengths[number + 1] = max(lengths[number], shared + 1), max(SHOWN, shared + 1)
    return {handle: handle[:length] for handle, length in zip(ordered, lengths, strict=True)}


def by_short(recovery: Recovery, identities: Sequence[Identity], short: str, *, tids: Sequence[bytes | None]) -> str:
    """Return the handle of the one record with this start of a handle, or with this id from a log.

    Read every unfinished record of these tenants. If no handle of those starts so, and there are at least 8 characters, read
    the completed ones too: an id from a log leads back to no record. Raises `Refused` if there is no such record, if there
    are several, and after `MOST_LOOKED_AT` completed records.
    """

    def fits(each: SeenRecord) -> bool:
        return handle_of(each.key).startswith(short) or any(who.label(each.key) == short for who in identities)

    unfinished = (each for state in UNFINISHED for each in every(recovery, state, tids=tids))
    found = {each.key: each for each in unfinished if fits(each)}
    if len(short) >= SHOWN and not any(handle_of(key).startswith(short) for key in found):
        for number, each in enumerate(every(recovery, State.COMPLETED, tids=tids)):
            if number >= MOST_LOOKED_AT:
                raise Refused(
                    f"This store has more than {MOST_LOOKED_AT:,} completed records, too many to look for a part of an id or "
                    "an id from a log. Add --tenant T or --no-tenant, or name the record by its whole id or by --key. Nothing "
                    "was changed."
                )
            if fits(each):
                found[each.key] = each
    if len(found) == 1:
        return handle_of(found.popitem()[0])
    if found:
        ids = short_ids(map(handle_of, found))
        lines = [f"{len(found)} records have an id that begins so. Name one of them:"]
        for each in sorted(found.values(), key=urgency)[:MOST_NAMED]:
            about = f"{condition(each.record).value}  {printable(each.record.info.operation)}"
            lines.append(f"  {ids[handle_of(each.key)]}  {about}")
        lines += [f"  and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
        raise Refused("\n".join(lines))
    if len(short) < SHOWN:
        raise Refused(
            "No unfinished record has an id that begins so. Name a completed record by its whole id or by --key. "
            f"{SHOWN} characters of its id do too, if the store holds at most {MOST_LOOKED_AT:,} completed records."
        )
    raise Refused(
        "No record has this id from a log, or an id that begins so: it was released, or it expired. Name a completed record by "
        "its whole id or by --key."
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
            "together: name it by --key, or add --tenant T or --no-tenant beside the id of one that is not completed."
        )
    met = {first.key: first}
    for state in UNFINISHED:
        for found in every(recovery, state, tids=tuple(secret_of)):
            if found.record.token == first.record.token and (record := read(found.key)) is not None:
                met.setdefault(found.key, SeenRecord(found.key, record))
    return Case(tuple(sorted(met.values(), key=lambda found: -secret_of[found.key.tid])))


# Resolve a key for its worker, and warn of the risks.

_UNKNOWN_ENDPOINT: Final = (
    "Its worker may still run, for an unknown time: this application has no endpoint of that name. For a message, let --app "
    "name the module that makes its inbox or calls serve()."
)


@valueclass(frozen=True, slots=True)
class AuditNote:
    """Who acts and why, for the audit event. Neither may name a key, a person or a body."""

    actor: str
    reason: str


def one_line(text: str) -> str | None:
    """Return this reason or name as an audit note holds it: one line, at most 255 characters. None: it is none."""
    text = text.strip()
    return text if text.isprintable() and len(text) <= LONGEST_NAME else None


@valueclass(frozen=True, slots=True)
class ResolveReport:
    """How many records of a case were resolved. `left` were changed by another process first, and stay as they are."""

    settled: int
    left: int


def doubts(case: Case, policy: Policy, *, known: bool = True, recorded: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return why this key should not run again, one sentence each, and what an operator may do: wait, or force it.

    Both are empty if, as far as is known, it neither completed nor runs. `known`: the application has the endpoint of the key,
    so the policy's `max_runtime` applies. `recorded`: the names of its steps that had, or may have had, an effect.
    """
    said, records = [], [found.record for found in case.found]
    if recorded:
        names = ", ".join(dict.fromkeys(recorded))
        said.append(f"Steps of its request are recorded: {names}. If you release it, the next retry runs them again.")
    if any(record.fingerprint == VOIDED for record in records):
        said.append(
            "It was voided: its client relies on it that no request runs under it. If you release it, one may run."
        )
    elif any(record.is_skeleton for record in records):
        said.append("Its request completed, and retries get 410. If you release it, the next retry runs again.")
    elif any(record.state is State.COMPLETED for record in records):
        said.append(
            "Its request completed, and retries get the response. If you release it, the next retry runs again."
        )
    elif any(record.payload is not None for record in records):
        said.append(
            "Its request completed: the record holds a response that no worker could open. If you release it, the next retry "
            "runs again. See `resolve --reopen` and `resolve --happened`."
        )
    seconds, done = wait(case, policy), bool(said)
    if not known and any(max_remaining(record, max_runtime=inf) == inf for record in records):
        said.append(_UNKNOWN_ENDPOINT)
    else:
        # A worker that counts as gone may be frozen, but raises no warning: its policy allows a second run.
        said += [living for record in records if seconds > 0 and (living := alive(record, policy)) is not None][:1]
    if not said:
        return [], ""
    if done or not known or seconds <= 0:
        return said, "To release it all the same: --force."
    return said, f"Repeat this in {ceil(seconds)} s, or release it now all the same: --force."


def wait(case: Case, policy: Policy) -> float:
    """Return the seconds until its workers count as gone, so that a release needs no force, by the store's clock."""
    return max(releasable_in(found.record, policy) for found in case.found)


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
    return _each(case.found, lambda found: settler.force_release(found, forced=forced, **asdict(word)))


def complete(
    settler: Settler, case: Case, response: StoredResponse | None, word: AuditNote, policy: Policy
) -> ResolveReport:
    """Complete the key, so that retries get this response. None: the one that its record holds.

    Raises `Refused` unless the key is quarantined, and if the record's response cannot be opened, or is missing.
    """
    check_quarantined(case)
    options = {"keep": policy.keep, "remember": policy.remember, **asdict(word)}

    def completed(found: SeenRecord) -> bool:
        if response is not None:
            return settler.complete(found, response, **options)
        try:
            return settler.reopen(found, **options)
        except (CorruptRecord, RingMismatch) as error:
            if found is not case.first:
                return False
            raise Refused(f"It cannot be reopened: {error}. Nothing was changed.") from error

    return _each(case.found, completed)


def resume(
    settler: Settler, case: Case, journals: Sequence[Journal], settled: Sequence[Sequence[SettledStep]], word: AuditNote
) -> ResolveReport:
    """Settle these steps of the key, or let its next retry go on. The sequences are in the order of its records.

    Raises `Refused` unless it is quarantined, and if that cannot hold.
    """
    check_quarantined(case)
    parts = list(zip(case.found, journals, settled, strict=True))
    for found, journal, steps in parts:
        if fault := resume_fault(found.record, journal, steps):
            raise Refused(f"{fault} Nothing was changed.")
    of = {found.key: (journal, steps) for found, journal, steps in parts}
    return _each(case.found, lambda found: settler.resume(found, *of[found.key], **asdict(word)))


def check_quarantined(case: Case) -> None:
    """Raise `Refused` for a key that is not quarantined."""
    match case.first.record.state:
        case State.QUARANTINED:
            return
        case State.COMPLETED if case.first.record.fingerprint == VOIDED:
            raise Refused("There is nothing to resolve: the key was voided, and no request runs under it.")
        case State.COMPLETED:
            get = "410" if case.first.record.is_skeleton else "the response"
            raise Refused(f"There is nothing to resolve: its request completed, and retries get {get}.")
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

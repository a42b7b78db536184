"""List records, browse them by pages with bounded work, tell the life of one, and give it a version.

A list that sorts all records, as the command `list` does, reads up to a hundred thousand of them. A page that a browser loads
again and again must not. So it goes through the store's index in the order of the store, and remembers where it stopped.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import Final

from flask_idempotency.engine.audit import (
    JANITOR,
    RESOLVER,
    SAYS_FAILED,
    SAYS_NEVER,
    SAYS_UNKNOWN,
    AuditEntry,
    AuditTrail,
    last_said,
)
from flask_idempotency.engine.capabilities import Recovery, SeenRecord, every
from flask_idempotency.engine.journal import MOST_TRIES, Journal, Journals
from flask_idempotency.engine.keys import Identity, KeyedDigest, encode
from flask_idempotency.engine.model import VOIDED, OnExpiry, Record, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep
from flask_idempotency.engine.values import valueclass
from flask_idempotency.engine.vanished import max_remaining
from flask_idempotency.operations.records import (
    Case,
    Condition,
    Refused,
    age,
    condition,
    handle_of,
    is_paused,
    is_paused_in,
    short_ids,
    urgency,
)
from flask_idempotency.operations.times import format_duration

ROWS: Final = 50
"""Records that a page shows, if it finds so many. It may show up to twice as many, because a store has pages of its own."""
MOST_LOOKED_AT: Final = 1000
"""Records that one page looks at: some tens of milliseconds on every store."""
MOST_CALLS: Final = 40
"""Scans of the store for one page. A scan may find nothing, such as in an empty part of the tenant."""
MOST_JOURNALS: Final = 200
"""Journals that one page reads, or up to a scan more: each is a call of the store."""

LONGEST_CURSOR: Final = 2000
"""Characters. A store's place in an index takes some hundred at most."""
MAC_BYTES: Final = 16

UNFINISHED: Final = frozenset(Condition) - {Condition.COMPLETED}

CONDITIONS: Final = {
    State.QUARANTINED: frozenset({Condition.QUARANTINED}),
    State.PROCESSING: frozenset({Condition.LEASE_EXPIRED, Condition.PAUSED, Condition.IN_FLIGHT}),
    State.COMPLETED: frozenset({Condition.COMPLETED}),
}
"""The states in the order of a list, because a quarantined record needs an operator most; and the conditions of each."""


@valueclass(frozen=True, slots=True)
class Browsing:
    """Which records a list of pages shows."""

    conditions: Collection[Condition] = UNFINISHED
    tids: Sequence[bytes | None] = (None,)
    """The ids of all parts of the tenants, under every secret in use. None: of all tenants."""
    endpoint: str | None = None
    older_than: float = 0.0
    """Seconds since the first use of the key, at least."""
    beginning: str = ""
    """The first characters of the handle, or the whole id from a log."""
    since: float | None = None
    until: float | None = None
    """The first use of the key, from and before these times of the store's clock."""
    stored_tenant: str | None = None
    """The tenant as records hold it. Other than `tids`, it can be a pseudonym."""
    newest: bool = False
    """The last used first, and not those first that need an operator most."""

    @property
    def states(self) -> list[State]:
        return [state for state, conditions in CONDITIONS.items() if conditions & set(self.conditions)]

    def scans(self) -> list[tuple[State, bytes | None]]:
        """Return the parts of the index to go through, in this order."""
        return [(state, tid) for state in self.states for tid in self.tids]

    def encoded(self) -> bytes:
        """Return bytes that no other filter has."""
        names = sorted(each.value for each in self.conditions)
        rest = (self.endpoint, self.older_than, self.beginning, self.since, self.until, self.stored_tenant, self.newest)
        return repr((names, list(self.tids), *rest)).encode()


@valueclass(frozen=True, slots=True)
class Place:
    """Where a list stopped: in which of its scans, and where in that."""

    scan: int = 0
    after: bytes = b""


@valueclass(frozen=True, slots=True)
class BrowsePage:
    """Some of the records of a list, those first that need an operator most."""

    found: tuple[SeenRecord, ...]
    looked_at: int
    """How many records the page looked at."""
    next: Place | None
    """Where the next page begins; None after the last."""
    left_out: int = 0
    """How many of those records pass the filter, and are not among the newest."""


def browse(
    recovery: Recovery,
    wanted: Browsing,
    place: Place,
    *,
    journals: Journals | None = None,
    identities: Sequence[Identity] = (),
) -> BrowsePage:
    """Return the page of this list that begins here.

    `identities` name a record in logs. Raises `StoreUnavailable` if the store does not answer.
    """
    scans, found, looked_at, calls, reads = wanted.scans(), dict[bytes, SeenRecord](), 0, 0, 0
    scan, after = place.scan, place.after

    def paused(each: SeenRecord) -> bool:
        nonlocal reads
        reads += 1
        return journals is not None and is_paused_in(each, journals)

    while (
        scan < len(scans)
        and (wanted.newest or len(found) < ROWS)
        and looked_at < MOST_LOOKED_AT
        and calls < MOST_CALLS
        and reads < MOST_JOURNALS
    ):
        state, tid = scans[scan]
        page = recovery.scan(state, after=after, limit=ROWS, tid=tid)
        looked_at, calls = looked_at + len(page.found), calls + 1
        for each in page.found:
            # One of each: during a rotation of secrets a use of a key has several records.
            if each.record.token not in found and _wants(
                wanted, each, None if journals is None else paused, identities
            ):
                found[each.record.token] = each
        scan, after = (scan + 1, b"") if page.after is None else (scan, page.after)
    ordered = sorted(found.values(), key=order_of(wanted))
    shown = ordered[: 2 * ROWS] if wanted.newest else ordered
    following = None if scan >= len(scans) else Place(scan, after)
    return BrowsePage(tuple(shown), looked_at, following, len(ordered) - len(shown))


def order_of(wanted: Browsing) -> Callable[[SeenRecord], tuple[int, float, bytes]]:
    """Return what sorts the records of this list."""
    return (lambda found: (0, -found.record.requested_at, found.key.rid)) if wanted.newest else urgency


def _wants(
    wanted: Browsing,
    found: SeenRecord,
    paused: Callable[[SeenRecord], bool] | None,
    identities: Sequence[Identity] = (),
) -> bool:
    record = found.record
    if wanted.endpoint not in (None, record.info.operation) or age(record) < wanted.older_than:
        return False
    if wanted.stored_tenant not in (None, record.info.tenant):
        return False
    if (wanted.since is not None and record.requested_at < wanted.since) or (
        wanted.until is not None and record.requested_at >= wanted.until
    ):
        return False
    beginning = wanted.beginning
    labels = (who.label(found.key) for who in identities)
    if beginning and not (handle_of(found.key).startswith(beginning) or beginning in labels):
        return False
    seen = condition(record)
    may_be_paused = seen is Condition.LEASE_EXPIRED and record.on_expiry is OnExpiry.TAKEOVER and paused is not None
    if not may_be_paused or {Condition.LEASE_EXPIRED, Condition.PAUSED} <= set(wanted.conditions):
        return seen in wanted.conditions
    # Last, because it asks the store once more.
    return (Condition.PAUSED if paused is not None and paused(found) else seen) in wanted.conditions


def oldest_quarantined(recovery: Recovery, *, limit: int) -> tuple[SeenRecord, ...]:
    """Return the quarantined records that were used first, the oldest first, of the first `MOST_LOOKED_AT`.

    If one use of a key has records under several secrets, one of them. Raises `StoreUnavailable` if the store does not answer.
    """
    found = {each.record.token: each for each in islice(every(recovery, State.QUARANTINED), MOST_LOOKED_AT)}
    return tuple(nsmallest(limit, found.values(), key=urgency))


def stored_name(recovery: Recovery, tid: bytes) -> str:
    """Return the name of this tenant that its records hold: it is in clear or a pseudonym. Empty: no record has it.

    Raises `StoreUnavailable` if the store does not answer.
    """
    first = (each for state in CONDITIONS for each in islice(every(recovery, state, tids=(tid,)), 1))
    return next((each.record.info.tenant for each in first if each.record.info.tenant), "")


MOST_LISTED: Final = 100_000
"""The most records of a state that a list reads: some ten seconds on Redis, and fewer on a database."""


@valueclass(frozen=True, slots=True)
class Listing:
    """The first records that pass a filter."""

    found: tuple[SeenRecord, ...]
    more: int | None
    """How many others pass it. None: some do, and counting them would take too long."""
    ids: Mapping[str, str]
    """The short id of each handle."""


def listing(recovery: Recovery, wanted: Browsing, *, limit: int, journals: Journals | None = None) -> Listing:
    """Return the records that need an operator first: quarantined, then with an expired lease, the oldest first.

    `newest`: the last used first. Otherwise completed records come in no order, because there may be millions. If one use of a
    key has records under several secrets, the list has one of them. Raises `StoreUnavailable` if the store does not answer.
    """
    paused = None if journals is None else partial(is_paused_in, journals=journals)
    handles, tokens, whole = list[str](), set[bytes](), True

    def matching(state: State) -> Iterator[SeenRecord]:
        for found in every(recovery, state, tids=wanted.tids):
            if found.record.token not in tokens and _wants(wanted, found, paused):
                tokens.add(found.record.token)
                yield found

    if State.COMPLETED in wanted.states and not wanted.newest:
        some = list(islice(matching(State.COMPLETED), limit + 1))
        ids = short_ids(handle_of(each.key) for each in some)
        return Listing(tuple(some[:limit]), None if len(some) > limit else 0, ids)

    def listed() -> Iterator[SeenRecord]:
        nonlocal whole
        # A record goes from processing to quarantined, so a scan in this order misses none on its way. Many records in one
        # state hide none in another.
        for state in reversed(wanted.states):
            before = len(handles)
            for each in islice(matching(state), MOST_LISTED):
                handles.append(handle_of(each.key))
                yield each
            whole = whole and len(handles) - before < MOST_LISTED

    first = nsmallest(limit, listed(), key=order_of(wanted))
    return Listing(tuple(first), len(handles) - len(first) if whole else None, short_ids(handles))


def cursor_of(place: Place, wanted: Browsing, digest: KeyedDigest) -> str:
    """Return this place as a text for a URL. It is signed, and good for this filter only."""
    body = place.scan.to_bytes(4, "big") + place.after
    return urlsafe_b64encode(_signature(body, wanted, digest) + body).decode("ascii").rstrip("=")


def place_of(cursor: str, wanted: Browsing, digests: Sequence[KeyedDigest]) -> Place:
    """Return the place of this cursor. Raises `Refused` for one of another filter, and for one that we did not make."""
    cursor = cursor[:LONGEST_CURSOR]
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    except (binascii.Error, ValueError):
        raw = b""
    signature, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
    ours = [hmac.compare_digest(signature, _signature(body, wanted, digest)) for digest in digests]
    scan = int.from_bytes(body[:4], "big")
    if not any(ours) or len(body) < 4 or scan >= len(wanted.scans()):
        raise Refused("This page of the list does not exist: it belongs to another filter, or its address was changed.")
    return Place(scan, body[4:])


def _signature(body: bytes, wanted: Browsing, digest: KeyedDigest) -> bytes:
    return digest(encode(b"cursor", body, wanted.encoded()))[:MAC_BYTES]


# The version of a record.


def version_of(case: Case, digest: KeyedDigest, *, part: bytes = b"") -> str:
    """Return a text that changes with every change of these records. It does not reveal their tokens.

    `part` is what a form is about, if that is a part of the record.
    """
    seen = [(found.key.rid, found.record) for found in case.found]
    facts = [(rid, each.state.value, each.token, each.fence, each.attempt, each.deadline) for rid, each in seen]
    return digest(encode(b"version", repr(facts).encode(), part)).hex()[:32]


# The life of a record.


@valueclass(frozen=True, slots=True)
class Episode:
    """One thing that happened to a record, or will happen."""

    at: float | None
    """Seconds since the epoch by the store's clock. None: the record does not keep when."""
    what: str
    detail: str = ""
    tone: str = ""
    """`good`, `warning`, `bad` or empty."""
    ahead: bool = False
    """Whether it is still to come."""


_ACTORS: Final = {RESOLVER: "A resolver", JANITOR: "The janitor"}


def timeline(
    record: Record | None, policy: Policy, *, journal: Journal, steps: Sequence[SeenStep], audit: Sequence[AuditEntry]
) -> list[Episode]:
    """Return what is known of the life of this record, the oldest first. None as the record: it is gone.

    What has no time of its own stands where it can have happened at the earliest.
    """
    whole = {each: f"{each} it" for each in ("completed", "released", "reopened", "resumed", "finished")}
    whole |= {"gave-up": "gave up: no try has finished it", "try-failed": "failed to finish it", SAYS_FAILED: "failed"}
    whole |= {SAYS_NEVER: "says that it never happened", SAYS_UNKNOWN: "says that it is still unknown"}
    placed = list(_of_record(record, policy, journal)) if record is not None else []
    for step in steps:
        item = "" if step.item is None else f" of {step.item}"
        what = f"Step {step.name}{item}"
        began = "began again" if step.attempt is not None and step.attempt > 1 else "began"
        placed.append((step.began_at, Episode(step.began_at, f"{what} {began}", f"Effects: {step.effects}.")))
        if step.finished_at is not None:
            kept = "" if step.entry.kept else " Its result could not be kept, so no retry gets past it."
            placed.append((step.finished_at, Episode(step.finished_at, f"{what} finished", kept.strip(), "good")))
        elif step.in_doubt:
            detail = "It has begun and not finished, so its effect may have happened."
            placed.append((step.began_at, Episode(None, f"{what} is in doubt", detail, "bad")))
    for number, tried in enumerate(journal.tries, 1):
        what = f"The janitor tried to finish it, {number} of {MOST_TRIES} times"
        placed.append((tried.began_at, Episode(tried.began_at, what)))
    for entry in audit:
        who = _ACTORS.get(entry.actor, f"Operator {entry.actor}")
        verb = f"settled step {entry.step} as {entry.verb}" if entry.step else whole.get(entry.verb, entry.verb)
        said = [f"It was {entry.was}. Reason: {entry.reason}."]
        said += ["A warning was overruled."] if entry.forced else []
        said += [] if entry.certain else ["The store did not answer, so this may not have happened."]
        tone = "warning" if entry.forced or not entry.certain else ""
        placed.append((entry.at, Episode(entry.at, f"{who} {verb}", " ".join(said), tone)))
    return [episode for _, episode in sorted(placed, key=lambda pair: (pair[1].ahead, pair[0]))]


def _of_record(record: Record, policy: Policy, journal: Journal) -> Iterator[tuple[float, Episode]]:
    now = record.deadline - record.remaining
    about = f"{record.info.method} {record.info.operation}".strip()
    began = record.requested_at
    if record.fingerprint == VOIDED:
        yield began, Episode(began, "Voided", f"{about}. No request runs under its key.", "good")
        yield record.deadline, Episode(record.deadline, "Expires", "Its key then counts as new.", ahead=True)
        return
    yield began, Episode(began, "First used", f"{about}.")
    if record.attempt > 1:
        detail = f"Attempt {record.attempt} holds the claim, with fence {record.fence}. Earlier workers lost theirs."
        yield began, Episode(None, "Taken over", detail, "warning")
    unfinished = record.state is not State.COMPLETED and record.payload is None
    seen = max(record.deadline - policy.lease, began) if unfinished else began
    if unfinished and seen > began:
        yield seen, Episode(seen, "Claimed or renewed last", f"For {policy.lease:g} s, if the lease was that of today.")
    if unfinished and record.on_expiry is OnExpiry.QUARANTINE and policy.on_expiry is OnExpiry.TAKEOVER:
        yield seen, Episode(None, "Past its point of no return", "From here on no retry takes over.", "warning")
    if unfinished:
        ahead = record.remaining > 0
        what = "Lease ends" if ahead else "Lease ended"
        ends = {
            OnExpiry.TAKEOVER: "A retry then takes over.",
            OnExpiry.QUARANTINE: "A retry or the janitor then quarantines it.",
        }[record.on_expiry]
        if record.state is State.QUARANTINED:
            ends = "Until then a call of its worker may still arrive." if ahead else ""
        elif is_paused(record, journal):
            ends = "It is paused: the next retry goes on after its finished steps."
        yield record.deadline, Episode(record.deadline, what, ends, ahead=ahead)
    if record.state is State.QUARANTINED:
        ended = [record.deadline] if record.remaining <= 0 else []
        since = max([seen, *(entry.began_at for entry in journal.entries), *ended])
        detail = f"Why: {record.reason or 'not recorded'}. No retry runs until it is resolved."
        yield min(since, now), Episode(None, "Quarantined", detail, "bad")
    if record.state is State.COMPLETED:
        if record.completed_at is not None:
            payload = None if record.is_skeleton else record.payload
            status = "" if payload is None else f"Status {payload.status}, {payload.byte_size} bytes."
            gone = " The response was erased with its tenant." if record.erased and not record.is_skeleton else ""
            yield record.completed_at, Episode(record.completed_at, "Completed", f"{status}{gone}".strip(), "good")
        until = record.deadline
        if record.remembered_until is not None:
            until, ahead = record.remembered_until, record.remaining > 0
            detail = "A retry is then refused with 410 `key-expired`, and does not run."
            yield record.deadline, Episode(record.deadline, "Response expires", detail, ahead=ahead)
        yield until, Episode(until, "Expires", "Its key then counts as new.", ahead=True)


# What the resolver says.


def never_happened(believed_in: float) -> str:
    """Say that a resolver is not believed yet, and in how many seconds it is. 0: when the janitor calls it next."""
    when = f"in {format_duration(believed_in)}" if believed_in >= 1 else "at its next call"
    return f"the resolver says it never happened; believed {when}"


@valueclass(frozen=True, slots=True)
class ResolverView:
    """What the resolver last said of a quarantined request."""

    verdict: str
    """`never-happened`, `still-unknown` or `failed`."""
    believed_in: float | None
    """Seconds until a "never happened" is believed. 0: when the janitor calls it next."""
    error: str | None
    """What the resolver failed with."""

    @property
    def text(self) -> str:
        if self.believed_in is not None:
            return never_happened(self.believed_in)
        if self.error is not None:
            return f"the resolver failed ({self.error}), and is called again; the janitor's log says how"
        return "the resolver says that it is still unknown, and is called again"


_VERDICTS: Final = {SAYS_NEVER: "never-happened", SAYS_UNKNOWN: "still-unknown", SAYS_FAILED: "failed"}


def resolver_of(audit: AuditTrail | None, found: SeenRecord, policy: Policy) -> ResolverView | None:
    """Return what the resolver last said of this request. None: it was not called, or the request is not quarantined.

    Raises `StoreUnavailable` if the store does not answer.
    """
    record = found.record
    said = last_said(audit, found.key, since=record.requested_at) if record.state is State.QUARANTINED else None
    if said is None:
        return None
    wait = max_remaining(record, max_runtime=policy.max_runtime) if said.verb == SAYS_NEVER else None
    return ResolverView(_VERDICTS[said.verb], wait, said.reason if said.verb == SAYS_FAILED else None)

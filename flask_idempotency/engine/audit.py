"""Remember which operator or resolver changed a record, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import LATEST
from flask_idempotency.engine.values import valueclass

__all__ = ["AuditEntry", "AuditTrail"]

AUDIT_KEPT_SECONDS: Final = 400 * 86400.0
"""How long the store keeps an entry: a year and a month, as auditors of payments ask for."""

RESOLVER: Final = "resolver"
"""The actor of what resolvers changed, so no operator may have this name."""

JANITOR: Final = "janitor"
"""The actor of what the janitor did in a client's place: the verbs `finished`, `try-failed` and `gave-up`."""

SAYS_NEVER: Final = "says-never-happened"
SAYS_UNKNOWN: Final = "says-still-unknown"
SAYS_FAILED: Final = "resolver-failed"
SAYS: Final = (SAYS_NEVER, SAYS_UNKNOWN, SAYS_FAILED)
"""The verbs of what a resolver last said of a key that it did not resolve, or that it failed. None is a change."""

LONGEST_ACTOR: Final = 200
LONGEST_REASON: Final = 1000
"""The most characters of these texts. A store may cut a longer one."""


@valueclass(frozen=True, slots=True)
class AuditEntry:
    """One change of a record. Neither text may name a key, a body or a client."""

    verb: str
    """`completed`, `released`, `reopened`, `resumed`, `voided`, `finished`, `try-failed`, `gave-up`, or a step's
    `completed` or `never-happened`.

    Or one of `SAYS`."""
    was: str
    """The state of the record before."""
    actor: str
    """The operator, or `RESOLVER` or `JANITOR`."""
    reason: str
    step: str = ""
    """The step that was settled. Empty: the record as a whole."""
    forced: bool = False
    """The operator overruled a warning."""
    certain: bool = True
    """False: the store did not answer, so the change may not have happened."""
    at: float = 0.0
    """When, in seconds since the epoch by the store's clock. The store sets it."""


def read_entry(texts: Sequence[Any], forced: Any, certain: Any, at: Any, *, now: float) -> AuditEntry:
    """Return a stored entry. `texts` are verb, state before, actor, reason and step; `at` and `now` are microseconds.

    Whatever stands there, it hides no other entry: a damaged one is the change `unreadable`.
    """
    dated = type(at) is int and 0 <= at <= LATEST * 1_000_000
    moment = (at if dated else now) / 1_000_000
    if not dated or len(texts) != 5 or not all(type(text) is str for text in texts):
        return AuditEntry("unreadable", "unknown", "unknown", "This entry is damaged in the store.", at=moment)
    verb, was, actor, reason, step = texts
    return AuditEntry(verb, was, actor, reason, step, bool(forced), bool(certain), moment)


class AuditTrail(Protocol):
    """Keeps one list of changes for each record. Found as `audit`.

    It outlives the record. Every method raises `StoreUnavailable` if the store does not answer.
    """

    def append(self, key: StorageKey, entry: AuditEntry, *, token: bytes) -> None:
        """Add this entry with the store's time. The same 16-byte token again adds nothing."""
        ...

    def entries(self, key: StorageKey, *, limit: int = 100) -> Sequence[AuditEntry]:
        """Return the latest entries of this record, the oldest first."""
        ...

    def count(self, actor: str, *, seconds: float) -> int:
        """Return how many entries this actor added in the last `seconds`, of all records: at most those of a day.

        A store may count no further than 1,000.
        """
        ...

    def forget(self, tid: bytes) -> None:
        """Remove the entries of this tenant's records. Harmless if there are none."""
        ...


MOST_SAID: Final = 20
"""How often the trail of a record holds what its resolver said, unless it says that the request never happened."""


def all_said(audit: AuditTrail | None, key: StorageKey, *, since: float) -> list[AuditEntry]:
    """Return what the resolver said of this request, or that it failed, of the latest entries. See `last_said`."""
    entries = () if audit is None else audit.entries(key)
    return [entry for entry in entries if entry.verb in SAYS and entry.at >= since]


def last_said(audit: AuditTrail | None, key: StorageKey, *, since: float) -> AuditEntry | None:
    """Return what the resolver last said of this request, or that it failed. None: it was not called, or resolved it.

    `since` is when the record was first used: what a resolver said of an earlier life does not count. Raises
    `StoreUnavailable` if the store does not answer.
    """
    return next(reversed(all_said(audit, key, since=since)), None)


def says_never_happened(audit: AuditTrail | None, key: StorageKey, *, since: float) -> bool:
    """Return whether the resolver last said that this request never happened. It is not believed yet. See `last_said`."""
    said = last_said(audit, key, since=since)
    return said is not None and said.verb == SAYS_NEVER

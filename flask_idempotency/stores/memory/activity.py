"""What the memory store keeps beside its records: activity by minute and hour, observed keys, and the audit trail."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flask_idempotency.engine.activity import KEPT_SECONDS, ActivityBucket, ActivityPage, Counts, merged
from flask_idempotency.engine.audit import AUDIT_KEPT_SECONDS, LONGEST_ACTOR, LONGEST_REASON, AuditEntry
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.observations import Ending, Observed, Sighting
from flask_idempotency.stores.memory.admin import MemoryRecords

_TOKENS_REMEMBERED = 1000


class MemoryActivity:
    """Implement `activity.ActivityLog`. Each call drops what has expired, so no sweep is needed."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._buckets: dict[tuple[bytes, int, int], Counts] = {}
        self._tokens: OrderedDict[bytes, None] = OrderedDict()

    def add(self, owner: bytes, counts: Counts, *, token: bytes) -> None:
        with self._shared.lock:
            if not counts or token in self._tokens:
                return
            self._tokens[token] = None
            if len(self._tokens) > _TOKENS_REMEMBERED:
                self._tokens.popitem(last=False)
            now = self._shared.now()
            for length in KEPT_SECONDS:
                name = owner, length, int(now // length * length)
                self._buckets[name] = merged([self._buckets.get(name, {}), counts])
            for owned, length, start in list(self._buckets):
                if start + length + KEPT_SECONDS[length] <= now:
                    del self._buckets[owned, length, start]

    def read(self, owner: bytes, *, length: int, seconds: float) -> ActivityPage:
        with self._shared.moment() as now:
            oldest = now - min(seconds, KEPT_SECONDS[length])
            found = sorted(
                (start, counts)
                for (owned, long, start), counts in self._buckets.items()
                if owned == owner and long == length and start + length > oldest
            )
            return ActivityPage(now, [ActivityBucket(start, merged([counts])) for start, counts in found])


@dataclass(frozen=True, slots=True)
class _Watched:
    token: bytes
    fingerprint: bytes
    state: Sighting
    """CONFLICT while it runs; then what the next request finds."""
    began: float
    lease_ends: float
    forgotten_at: float
    first: Observed


class MemoryObservations:
    """Implement `observations.Observations`. Each call drops one that has expired, so no sweep is needed."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._watched: OrderedDict[StorageKey, _Watched] = OrderedDict()

    def observe(
        self, key: StorageKey, *, token: bytes, fingerprint: bytes, lease: float, keep: float, hold_lapsed: bool
    ) -> Observed:
        with self._shared.moment() as now:
            self._drop(now)
            seen = self._watched.get(key)
            if seen is None or seen.forgotten_at <= now:
                return self._watch(key, token, fingerprint, Observed(Sighting.NEW), now, lease, keep)
            ago = max(now - seen.began, 0.0)
            if seen.fingerprint != fingerprint:
                return Observed(Sighting.MISMATCH, ago)
            if seen.state is Sighting.CONFLICT and seen.token == token:
                return seen.first
            if seen.state is Sighting.CONFLICT and seen.lease_ends <= now:
                if not hold_lapsed:
                    return self._watch(key, token, fingerprint, Observed(Sighting.TAKEN_OVER, ago), now, lease, keep)
                self._watched[key] = seen = replace(seen, state=Sighting.UNKNOWN, forgotten_at=now + keep)
            return Observed(seen.state, ago)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        with self._shared.lock:
            now, seen = self._shared.now(), self._watched_by(key, token)
            if seen is None:
                return
            later = max(now + lease - seen.lease_ends, 0.0)
            self._watched[key] = replace(
                seen, lease_ends=seen.lease_ends + later, forgotten_at=seen.forgotten_at + later
            )

    def end(self, key: StorageKey, token: bytes, ending: Ending, *, keep: float) -> None:
        with self._shared.lock:
            now, seen = self._shared.now(), self._watched_by(key, token)
            if seen is None:
                return
            if ending is Ending.RELEASED:
                del self._watched[key]
                return
            state = Sighting.REPLAY if ending is Ending.KEPT else Sighting.UNKNOWN
            self._watched[key] = replace(seen, state=state, forgotten_at=now + keep)

    def _watched_by(self, key: StorageKey, token: bytes) -> _Watched | None:
        seen = self._watched.get(key)
        if seen is None or seen.token != token or seen.state is not Sighting.CONFLICT:
            return None
        return None if seen.forgotten_at <= self._shared.now() else seen

    def _watch(
        self, key: StorageKey, token: bytes, fingerprint: bytes, found: Observed, now: float, lease: float, keep: float
    ) -> Observed:
        before = self._watched.get(key)
        began = now if before is None or found.sighting is Sighting.NEW else before.began
        self._watched[key] = _Watched(
            token, fingerprint, Sighting.CONFLICT, began, now + lease, now + lease + keep, found
        )
        return found

    def _drop(self, now: float) -> None:
        """Look at the two that were looked at longest ago, and drop those that have expired."""
        for key in list(self._watched)[:2]:
            if self._watched[key].forgotten_at <= now:
                del self._watched[key]
            else:
                self._watched.move_to_end(key)


class MemoryAuditTrail:
    """Implement `audit.AuditTrail`."""

    def __init__(self, shared: MemoryRecords) -> None:
        self._shared = shared
        self._entries: list[tuple[StorageKey, bytes, AuditEntry]] = []

    def append(self, key: StorageKey, entry: AuditEntry, *, token: bytes) -> None:
        with self._shared.moment() as now:
            self._entries = [each for each in self._entries if each[2].at > now - AUDIT_KEPT_SECONDS]
            if all(token != before for _, before, _ in self._entries):
                short = replace(entry, actor=entry.actor[:LONGEST_ACTOR], reason=entry.reason[:LONGEST_REASON], at=now)
                self._entries.append((key, token, short))

    def entries(self, key: StorageKey, *, limit: int = 100) -> Sequence[AuditEntry]:
        with self._shared.lock:
            since = self._shared.now() - AUDIT_KEPT_SECONDS
            return [entry for of, _, entry in self._entries if of == key and entry.at > since][-limit:]

    def count(self, actor: str, *, seconds: float) -> int:
        with self._shared.lock:
            since = self._shared.now() - seconds
            name = actor[:LONGEST_ACTOR]
            return sum(entry.actor == name and entry.at > since for _, _, entry in self._entries)

    def forget(self, tid: bytes) -> None:
        with self._shared.lock:
            self._entries = [each for each in self._entries if each[0].tid != tid]

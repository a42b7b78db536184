"""Keep what Redis holds beside its records: activity by minute and hour, observed keys, and the audit trail.

Each has keys of its own with a time to live, so no claim, quota or scan of records ever finds one, and nothing need sweep
them. A Redis that lost its data has lost them too. `layout.py` names the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from flask_idempotency.engine.activity import (
    HOUR,
    KEPT_SECONDS,
    MINUTE,
    ActivityBucket,
    ActivityPage,
    Counts,
    read_counts,
)
from flask_idempotency.engine.audit import AUDIT_KEPT_SECONDS, LONGEST_ACTOR, LONGEST_REASON, AuditEntry, read_entry
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import TOKEN_BYTES, StorageKey
from flask_idempotency.engine.observations import Ending, Observed, Sighting
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import duration
from flask_idempotency.stores.redis.executor import Call, RedisCapability, corrupt, whole_number

TOKEN_MS: Final = 600_000
"""How long a repeated `add` is recognised. A client repeats within seconds, or within minutes if it was frozen."""

BUCKETS_AT_ONCE: Final = 60
"""Buckets per run of a script: about a millisecond with thirty endpoints, in which the server answers no other client."""

COUNTED_MS: Final = 86_400_000
MOST_COUNTED: Final = 1000
"""For how long a change of an actor is counted, and how many are."""

TRAILS_AT_ONCE: Final = 200


class RedisActivity(RedisCapability):
    """Implement `activity.ActivityLog`: one hash for each minute and hour, with the counters of each endpoint as JSON.

    A full Redis refuses these writes, so that its memory is left to records.
    """

    def add(self, owner: bytes, counts: Counts, *, token: bytes) -> None:
        if any(set(name) & {'"', "\\"} for counters in counts.values() for name in counters):
            raise ValueError("a counter's name holds no quote and no backslash")
        # The keys say which minute it is, so the time is read first.
        now = self._server.now()
        starts = {length: int(now // length * length) for length in (MINUTE, HOUR)}
        keys = (
            layout.activity_token(owner, token),
            *(layout.activity_bucket(owner, length, start) for length, start in starts.items()),
        )
        kept = [start + length + KEPT_SECONDS[length] - now for length, start in starts.items()]
        pairs = [text for endpoint, counters in counts.items() for text in (_json(endpoint), _json(counters))]
        self._server.run(scripts.ACTIVITY_ADD, keys, TOKEN_MS, *(round(1000 * seconds) for seconds in kept), *pairs)

    def read(self, owner: bytes, *, length: int, seconds: float) -> ActivityPage:
        now = self._server.now()
        oldest = now - min(seconds, KEPT_SECONDS[length])
        last = int(now // length * length)
        # The first one whose end is later than that.
        starts = range(int(oldest // length * length), last + 1, length)
        keys = [layout.activity_bucket(owner, length, start) for start in starts]
        calls = [Call(keys[at : at + BUCKETS_AT_ONCE]) for at in range(0, len(keys), BUCKETS_AT_ONCE)]
        texts = [text for found in self._server.run_all(scripts.ACTIVITY_READ, calls) for text in found]
        buckets = [
            ActivityBucket(start, read_counts(text)) for start, text in zip(starts, texts, strict=True) if text != b"{}"
        ]
        return ActivityPage(now, buckets)


def _json(value: str | Mapping[str, int]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class RedisObservations(RedisCapability):
    """Implement `observations.Observations`: one string for each key, see `lua/lib/observation.lua`."""

    def observe(
        self, key: StorageKey, *, token: bytes, fingerprint: bytes, lease: float, keep: float, hold_lapsed: bool
    ) -> Observed:
        facts = token, fingerprint, duration(lease), duration(keep), b"1" if hold_lapsed else b"0"
        found = self._server.run(scripts.OBSERVE, (layout.observation(key),), *facts)
        if found == b"CORRUPT":
            raise corrupt()
        sighting, ago = found
        return Observed(Sighting(sighting.decode()), ago / 1_000_000)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._server.run(scripts.OBSERVATION_RENEW, (layout.observation(key),), token, duration(lease))

    def end(self, key: StorageKey, token: bytes, ending: Ending, *, keep: float) -> None:
        facts = token, ending.value.encode(), duration(keep)
        self._server.run(scripts.OBSERVATION_END, (layout.observation(key),), *facts)


class RedisAuditTrail(RedisCapability):
    """Implement `audit.AuditTrail`: one list for each record, and the latest changes of each actor.

    A full Redis still takes these writes: few people make few changes.
    """

    def append(self, key: StorageKey, entry: AuditEntry, *, token: bytes) -> None:
        actor = entry.actor[:LONGEST_ACTOR]
        texts = entry.verb, entry.was, actor, entry.reason[:LONGEST_REASON], entry.step
        trail, trails = layout.audit_trail(key), layout.audited_records(key.tid)
        name, kept = layout.name((trail,)), round(AUDIT_KEPT_SECONDS * 1000)
        self._server.run(
            scripts.AUDIT_APPEND,
            (trail, trails),
            name,
            token,
            json.dumps([*texts, entry.forced, entry.certain]).encode(),
            kept,
        )
        # Another slot, so another call: after an error between the two, a repetition counts the change.
        self._server.run(scripts.AUDIT_NOTE_ACTOR, (layout.audit_actor(actor),), token, COUNTED_MS, MOST_COUNTED)

    def entries(self, key: StorageKey, *, limit: int = 100) -> Sequence[AuditEntry]:
        now, found = self._server.run(scripts.AUDIT_READ, (layout.audit_trail(key),), limit)
        entries = [_entry(data, now) for data in found]
        return [entry for entry in entries if entry.at > now / 1_000_000 - AUDIT_KEPT_SECONDS]

    def count(self, actor: str, *, seconds: float) -> int:
        key = layout.audit_actor(actor[:LONGEST_ACTOR])
        return int(self._server.run(scripts.AUDIT_COUNT, (key,), round(seconds * 1000)))

    def forget(self, tid: bytes) -> None:
        trails = layout.audited_records(tid)
        while names := self._server.execute("ZRANGE", trails, 0, TRAILS_AT_ONCE - 1):
            keys = [layout.audit_trail_of(tid, name) for name in names]
            self._server.run(scripts.AUDIT_FORGET, (trails, *keys), *names)


def _entry(data: bytes, now: int) -> AuditEntry:
    at, _, rest = data.partition(b" ")
    try:
        *texts, forced, certain = json.loads(rest[TOKEN_BYTES:])
        return read_entry(texts, forced, certain, whole_number(at), now=now)
    except (ValueError, TypeError, RecursionError, CorruptRecord):
        return read_entry((), None, None, None, now=now)

"""A replay cache in front of a system of record: the system grants all claims, and the cache only replays."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from flask_idempotency.engine.activity import ActivityLog
from flask_idempotency.engine.audit import AuditTrail
from flask_idempotency.engine.capabilities import (
    DataKeys,
    Expiry,
    Finding,
    Health,
    Ledger,
    Recovery,
    Responses,
    SeenRecord,
    Verdict,
    Void,
)
from flask_idempotency.engine.errors import IdempotencyError, NotApplied, StoreUnavailable
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, Mismatched, OtherCaller, Record, State, StoredPayload
from flask_idempotency.engine.observations import Observations
from flask_idempotency.engine.offered import KnowsCache, capabilities_of
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.engine.tasks import TaskLog
from flask_idempotency.engine.values import valueclass
from flask_idempotency.engine.waiting import Notifier

AnswerT = TypeVar("AnswerT")

_log = logging.getLogger("flask_idempotency")

_REMEDY: Final = "Check IDEMPOTENCY_REDIS_URL, and that its server runs and lets this host in."

REMEMBERED_CLAIMS = 4096
"""Claims that this object remembers, so that it can cache their responses when a transaction commits them.

This is more than run in one process at a time. The first replay caches the response of a forgotten claim.
"""


@valueclass(frozen=True, slots=True)
class Missed:
    """The cache has no response for this key. `at` is the time by the cache's clock, or None if it did not answer."""

    at: int | None = None


_UNASKED: Final[Record | Missed] = Missed()
_NOT_CACHED: Final = "the next replay uses the system of record"


@runtime_checkable
class Identified(Protocol):
    """A system of record with an identity, so that several systems can share a cache."""

    def identity(self) -> bytes:
        """Return the same bytes in every process, and no other system's. May query the system and raise its errors."""
        ...


class ReplayCache(Protocol):
    """Keep responses that a system of record has committed. A cache may lose any of them at any time."""

    def get(self, key: StorageKey) -> Record | Missed:
        """Return the completed record of this key if the cache has it and its life has not ended."""
        ...

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        """Keep a completed record until `record.remaining` seconds after `missed_at`.

        `missed_at` is a `Missed.at` from *before* the system returned `remaining`. So the record expires in the cache
        before it expires in the system, however late this call arrives. Never replace a record of a higher fence.
        """
        ...

    def forget(self, key: StorageKey) -> None:
        """Drop the record of this key."""
        ...

    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        """Replay no response of this key with this fence or a lower one from now on.

        This also holds for a response that the system returned before, and whose `put` arrives later. Return False if the
        cache did not answer.
        """
        ...

    def erase(self, tid: bytes) -> bool:
        """Replay no response of this tenant from before this call. Return False if the cache did not answer.

        This also holds for a response that the system returned before, and whose `put` arrives later.
        """
        ...


class TieredStore:
    """Replay frequent keys from a cache, and pass every other call to the system of record.

    The promises are those of the system. The cache holds only completed records that the system has committed and
    returned: in a replay, or after a transaction (`committed`). You may wipe, stop or remove the cache at any time; then
    the system serves all replays. Errors of the cache are logged, never raised.

    Systems that are `Identified` can share a cache, and each finds only its own responses. Until a system has returned its
    identity, the store does not use the cache. It keeps the identity as long as this object, also in forked children.

    A record expires in both by their own clocks. If you set the cache's clock back, it replays for that much longer. If
    you restore the system from a backup, empty the cache.
    """

    data_keys: DataKeys
    responses: Responses
    ledger: Ledger
    recovery: Recovery
    expiry: Expiry
    task_log: TaskLog
    notifier: Notifier
    """Present only if the system has it."""
    health: Health
    journals: Journals
    activity: ActivityLog
    observations: Observations
    audit: AuditTrail
    void: Void
    """Present only if the system has them. The cache never holds any of them."""

    def __init__(self, system: Store, cache: ReplayCache) -> None:
        self._system = system
        # These calls do not affect the cache.
        self.renew = system.renew
        self.mark_point_of_no_return = system.mark_point_of_no_return
        self.complete = system.complete
        self.quarantine = system.quarantine
        self.read = system.read
        offered = capabilities_of(system)
        # The annotations of the class name the capabilities of a tiered store.
        for name in TieredStore.__annotations__:
            if (capability := getattr(offered, name)) is not None:
                setattr(self, name, capability)
        if offered.data_keys is not None:
            self.data_keys = CachedDataKeys(offered.data_keys, cache.erase)
        if offered.responses is not None:
            self.responses = CachedResponses(offered.responses, self._forget)
        if offered.recovery is not None:
            self.recovery = CachedRecovery(offered.recovery, self._invalidate)
        self.process_local: bool | None = offered.process_local
        self.remembers: bool | None = offered.remembers
        self.health = CachedHealth(offered.health, cache)
        self._identified = system if isinstance(system, Identified) else None
        self._identity: bytes | None = None
        self._answered, self._warned = True, False
        self._cache = cache
        self._missed: OrderedDict[bytes, int] = OrderedDict()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        found = self._ask(self._cache.get, request.key, _UNASKED, "this request uses the system of record")
        if isinstance(found, Record):
            if request.callers is not None and request.callers.show(found.info) is False:
                return OtherCaller(first_seen=found.requested_at)
            if found.fingerprint != request.fingerprint:
                return Mismatched(first_seen=found.requested_at)
            return found
        outcome = self._system.claim(request, token=token, lease=lease, quota=quota)
        self._answered = True
        if found.at is not None:
            match outcome:
                case Record() as record if not record.erased:
                    self._ask(self._cache.put, request.key, None, _NOT_CACHED, record, missed_at=found.at)
                case Grant():
                    self._remember(request.key, token, found.at)
                case _:
                    pass
        return outcome

    def committed(self, key: StorageKey, record: Record) -> None:
        """Cache this completed record, which any transaction has committed to the system of record.

        Call it only after the commit has returned: otherwise the cache could replay a response that is rolled back.
        `record` is the result of the completing statement. The call is optional: the first replay caches the record too.
        """
        missed_at = self._missed.pop(key.rid + record.token, None)
        if missed_at is not None:
            self._ask(self._cache.put, key, None, _NOT_CACHED, record, missed_at=missed_at)

    def release(self, key: StorageKey, token: bytes) -> State | None:
        state = self._system.release(key, token)
        self._missed.pop(key.rid + token, None)
        return state

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        # Only the cached copy may be corrupt. The system compares the payload with its own.
        self._forget(key)
        self._system.mark_corrupt(key, payload)

    def _forget(self, key: StorageKey) -> None:
        # A stale copy does not decrypt, or a later request reports it as corrupt again.
        self._ask(self._cache.forget, key, None, "its copy of this response stays until it expires")

    def _invalidate(self, key: StorageKey, fence: int) -> bool:
        return self._ask(self._cache.invalidate, key, False, "nothing is invalidated", fence=fence)

    def _ask(
        self,
        call: Callable[..., AnswerT],
        key: StorageKey,
        otherwise: AnswerT,
        harm: str,
        *arguments: Any,
        **options: Any,
    ) -> AnswerT:
        """Call the cache with its own key. Return `otherwise` if that is unknown, or if the cache fails: the system decides."""
        cache_key = self._cache_key(key)
        if cache_key is None:
            return otherwise
        try:
            return call(cache_key, *arguments, **options)
        except Exception:  # noqa: BLE001 - whatever it is, the system of record still decides
            _log.exception("The replay cache failed: %s", harm)
            return otherwise

    def _cache_key(self, key: StorageKey) -> StorageKey | None:
        """Return the key in the cache, or None while the system's identity is unknown."""
        if self._identified is None:
            return key
        # If the system is down, the claim itself will wait for it. Do not wait twice.
        if self._identity is None and self._answered:
            try:
                identity = self._identified.identity()
                if isinstance(self._identified, KnowsCache):
                    # Do this before the first response is cached, so that hosts without a cache can detect it.
                    self._identified.note_cache()
                self._identity = identity
            except Exception as error:  # noqa: BLE001 - after any error, requests run without the cache
                self._answered = False
                if not self._warned:
                    self._warned = True
                    # Other errors may quote secrets.
                    why = error if isinstance(error, IdempotencyError) else cause_of(error)
                    _log.warning("Cannot read the store's identity (%s): requests run without the replay cache", why)
        if self._identity is None:
            return None
        return StorageKey(sha256(self._identity + key.rid).digest(), key.tid, key.label, key.mark)

    def _remember(self, key: StorageKey, token: bytes, missed_at: int) -> None:
        self._missed[key.rid + token] = missed_at
        if len(self._missed) > REMEMBERED_CLAIMS:
            with suppress(KeyError):  # Another thread emptied it first.
                self._missed.popitem(last=False)


class _Cached:
    """A capability of the system. A subclass changes the calls that affect the cache; the others go to the system."""

    def __init__(self, system: Any, tell_cache: Callable[..., Any]) -> None:
        self._system = system
        self._tell_cache = tell_cache

    def __getattr__(self, name: str) -> Any:
        if name == "_system":  # `copy` looks attributes up before it sets any
            raise AttributeError(name)
        return getattr(self._system, name)


class CachedRecovery(_Cached):
    """Implement `capabilities.Recovery` with the system's, and invalidate the cache before a release or a resolution.

    The cache holds only records with a response, completed or corrupt. All other records need no cache here.
    """

    def resolve(
        self,
        seen: SeenRecord,
        *,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None = None,
    ) -> bool:
        self._forget(seen)
        lives = {"keep": keep} if remember is None else {"keep": keep, "remember": remember}
        return bool(self._system.resolve(seen, token=token, payload=payload, **lives))

    def force_release(self, seen: SeenRecord) -> bool:
        self._forget(seen)
        return bool(self._system.force_release(seen))

    def _forget(self, seen: SeenRecord) -> None:
        # Invalidate before the system changes. If the system then fails, the operator can repeat the call. In the other
        # order, the cache could replay a released record, and a second release would find no record.
        if seen.record.payload is not None and not self._tell_cache(seen.key, seen.record.fence):
            raise NotApplied(
                "The record is unchanged, because the replay cache did not answer and would still replay it. Repeat this when "
                "the cache answers, with the IDEMPOTENCY_REDIS_URL of the web hosts. If the cache is gone for good, see "
                "`A cache that is gone` in docs/operate/records.md."
            )


class CachedDataKeys(_Cached):
    """Implement `capabilities.DataKeys` with the system's, and erase a tenant in the cache too."""

    def shred(self, tid: bytes) -> int:
        gone: int = self._system.shred(tid)
        # Erase the cache last: otherwise a replay between the two calls could fill it again.
        try:
            erased = self._tell_cache(tid)
        except Exception:  # noqa: BLE001 - the error below says that the data keys are destroyed
            _log.exception("The replay cache failed")
            erased = False
        if not erased:
            raise StoreUnavailable(
                "The data keys are destroyed, but the replay cache did not answer. It replays this tenant's encrypted "
                "responses for up to a minute, and unencrypted ones until they expire. Repeat this when the cache answers, or "
                "empty the cache."
            )
        return gone


class CachedResponses(_Cached):
    """Implement `capabilities.Responses` with the system's, and forget a replaced response in the cache."""

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        replaced: bool = self._system.replace(key, old, new)
        if replaced:
            self._tell_cache(key)
        return replaced


class CachedHealth:
    """Implement `capabilities.Health` with the system's findings, and check that the cache answers."""

    def __init__(self, health: Health | None, cache: ReplayCache) -> None:
        self._health = health
        self._cache = cache

    def findings(self) -> Sequence[Finding]:
        found = [] if self._health is None else list(self._health.findings())
        try:
            looked = self._cache.get(StorageKey(os.urandom(32), os.urandom(16)))
        except Exception as error:  # noqa: BLE001 - the system's findings are worth having without it
            why = f"The replay cache failed ({cause_of(error)})"
        else:
            if isinstance(looked, Record) or looked.at is not None:
                return [*found, Finding("replays", Verdict.FINE, "The replay cache answers.")]
            why = "The replay cache does not answer"
        return [*found, Finding("replays", Verdict.ADVICE, f"{why}: the database serves every replay.", _REMEDY)]

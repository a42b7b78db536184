"""A system of record with a cache of its answers before it: the system grants, the cache only replays or denies."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from flask_idempotency.engine.capabilities import (
    DataKeys,
    Expiry,
    Finding,
    Health,
    KnowsCache,
    Ledger,
    Recovery,
    Responses,
    SeenRecord,
    TaskLog,
    Verdict,
    capabilities_of,
)
from flask_idempotency.engine.errors import IdempotencyError, NotApplied, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, Mismatched, Record, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.engine.waiting import Notifier

_log = logging.getLogger("flask_idempotency")

_REMEDY: Final = "Check IDEMPOTENCY_REDIS_URL, and that its server runs and lets this host in."

REMEMBERED_CLAIMS = 4096
"""Claims whose answers may be cached as soon as they are there: more than run at once in any one process. The answer
of one that was forgotten is cached when it is first replayed."""


@dataclass(frozen=True, slots=True)
class Missed:
    """The cache has no answer for this key. `at` is the time by its own clock, or None when it did not say."""

    at: int | None = None


@runtime_checkable
class Identified(Protocol):
    """A system of record that can be told from others, so that they may share a cache."""

    def identity(self) -> bytes:
        """The same in every process, and nobody else's. May ask the system, and raise when it does not answer."""
        ...


class ReplayCache(Protocol):
    """Keeps answers that a system of record has committed, and may forget any of them at any time."""

    def get(self, key: StorageKey) -> Record | Missed:
        """The completed record of this key, if it is here and its life has not ended."""
        ...

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        """Keep a completed record until `record.remaining` seconds after `missed_at`.

        `missed_at` is what `Missed.at` said *before* the system told what remains. So the record has gone from here
        before it goes from the system, however late this call arrives. A record of a higher fence is not replaced.
        """
        ...

    def forget(self, key: StorageKey) -> None:
        """Drop what is kept for this key."""
        ...

    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        """From now on nothing is replayed of what this key was answered under this fence, or a lower one.

        Nor is what a system of record has told until now, and is still on its way to be kept. False: it did not answer.
        """
        ...

    def erase(self, tid: bytes) -> bool:
        """From now on nothing is replayed that was kept for this tenant so far. False: it did not answer."""
        ...


@runtime_checkable
class Telling(Protocol):
    """A store that can tell, in the statement that completes a record, what the record has become."""

    def complete_and_tell(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> Record:
        """As `complete`, and returns the record as it is stored now, whether or not this call has stored it."""
        ...


class TieredStore:
    """A `Store` that answers hot replays without asking the system of record. It promises what the system promises.

    Nothing is cached but completed records, each as the system itself told it after it was committed: when it replays
    one, or, if the system is `Telling`, when it has completed one. So the cache may be wiped, frozen or gone at any
    instant, and the system is asked more often: that is all. What the cache does wrong is logged and never raised.

    A cache may be shared by systems that are `Identified`, each of which finds its own answers only. Until a system has
    said which one it is, its cache is left alone; what it said is kept as long as this object, in forked children too.

    Time ends a record in both, each by its own clock. A cache whose clock is set back replays for so much longer; one
    that stands before a system restored from a backup must be emptied.
    """

    data_keys: DataKeys
    responses: Responses
    ledger: Ledger
    recovery: Recovery
    expiry: Expiry
    task_log: TaskLog
    notifier: Notifier
    """As the system has them; one that it has not, this has not either."""
    health: Health

    def __init__(self, system: Store, cache: ReplayCache) -> None:
        self._system = system
        # No cache is concerned.
        self.renew = system.renew
        self.mark_point_of_no_return = system.mark_point_of_no_return
        self.quarantine = system.quarantine
        self.read = system.read
        offered = capabilities_of(system)
        if offered.data_keys is not None:
            self.data_keys = CachedDataKeys(offered.data_keys, cache)
        if offered.responses is not None:
            self.responses = CachedResponses(offered.responses, self._forget)
        if offered.ledger is not None:
            self.ledger = offered.ledger
        if offered.recovery is not None:
            self.recovery = CachedRecovery(offered.recovery, self._withdraw)
        if offered.expiry is not None:
            self.expiry = offered.expiry
        if offered.task_log is not None:
            self.task_log = offered.task_log
        if offered.notifier is not None:
            self.notifier = offered.notifier
        self.health = CachedHealth(offered.health, cache)
        self._telling = system if isinstance(system, Telling) else None
        self._identified = system if isinstance(system, Identified) else None
        self._identity: bytes | None = None
        self._answers, self._warned = True, False
        self._cache = cache
        self._missed: OrderedDict[bytes, int] = OrderedDict()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        found = self._peek(request.key)
        if isinstance(found, Record):
            if found.fingerprint != request.fingerprint:
                return Mismatched(first_seen=found.requested_at)
            return found
        outcome = self._system.claim(request, token=token, lease=lease, quota=quota)
        self._answers = True
        if found.at is not None:
            match outcome:
                case Record() as record if not record.erased:
                    self._fill(request.key, record, found.at)
                case Grant():
                    self._remember(request.key, token, found.at)
                case _:
                    pass
        return outcome

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        if self._telling is None:
            self._system.complete(key, token, payload, keep=keep)
        else:
            self.committed(key, self._telling.complete_and_tell(key, token, payload, keep=keep))

    def committed(self, key: StorageKey, record: Record) -> None:
        """Say that this completed record has been committed to the system of record, by whatever transaction.

        Never before the commit has returned: an answer that is then rolled back would be replayed. `record` is as the
        completing statement told it. To say nothing is no fault: the first replay will.
        """
        missed_at = self._missed.pop(key.rid + record.token, None)
        if missed_at is not None:
            self._fill(key, record, missed_at)

    def release(self, key: StorageKey, token: bytes) -> None:
        self._system.release(key, token)
        self._missed.pop(key.rid + token, None)

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        # The damage may be the cache's alone; the system compares, and knows.
        self._forget(key)
        self._system.mark_corrupt(key, payload)

    def _peek(self, key: StorageKey) -> Record | Missed:
        place = self._place(key)
        if place is None:
            return Missed()
        try:
            return self._cache.get(place)
        except Exception:  # noqa: BLE001 - whatever it is, the system of record can do without
            _log.exception("The cache of answers failed: the system of record is asked")
            return Missed()

    def _fill(self, key: StorageKey, record: Record, missed_at: int) -> None:
        place = self._place(key)
        if place is None:
            return
        try:
            self._cache.put(place, record, missed_at=missed_at)
        except Exception:  # noqa: BLE001 - the record is committed, and its owner must hear so
            _log.exception("The cache of answers failed: the system of record will be asked again")

    def _forget(self, key: StorageKey) -> None:
        place = self._place(key)
        if place is None:
            return
        try:
            self._cache.forget(place)
        except Exception:  # noqa: BLE001 - what it still holds opens for nobody, or will be found out again
            _log.exception("The cache of answers failed: what it holds stays until its time is over")

    def _withdraw(self, key: StorageKey, fence: int) -> bool:
        place = self._place(key)
        if place is None:
            return False
        try:
            return self._cache.invalidate(place, fence=fence)
        except Exception:  # noqa: BLE001 - whoever asked hears that the cache did not
            _log.exception("The cache of answers failed")
            return False

    def _place(self, key: StorageKey) -> StorageKey | None:
        """What this key is called in the cache. None as long as it is not known whose answers to look for."""
        if self._identified is None:
            return key
        if self._identity is None:
            self._identity = self._ask_identity(self._identified)
        if self._identity is None:
            return None
        return replace(key, rid=sha256(self._identity + key.rid).digest())

    def _ask_identity(self, identified: Identified) -> bytes | None:
        # Whoever waited for a system that is down would wait once more for the claim itself.
        if not self._answers:
            return None
        try:
            identity = identified.identity()
            if isinstance(identified, KnowsCache):
                # Before the first answer is cached: hosts that know no cache must hear of it.
                identified.note_cache()
            return identity
        except Exception as error:  # noqa: BLE001 - whatever it is, the cache can do without
            self._answers = False
            if not self._warned:
                self._warned = True
                # Others may quote what nobody should read.
                why = error if isinstance(error, IdempotencyError) else type(error).__name__
                _log.warning("It is not known whose answers to look for in the cache: the system is asked (%s)", why)
            return None

    def _remember(self, key: StorageKey, token: bytes, missed_at: int) -> None:
        self._missed[key.rid + token] = missed_at
        if len(self._missed) > REMEMBERED_CLAIMS:
            with suppress(KeyError):  # another thread was first
                self._missed.popitem(last=False)


class CachedRecovery:
    """Implements `capabilities.Recovery`: the system's. The cache replays nothing that was released or resolved since.

    Only a record that holds an answer, completed or condemned, can be in the cache: a janitor needs no cache for others.
    """

    def __init__(self, recovery: Recovery, withdraw: Callable[[StorageKey, int], bool]) -> None:
        self._recovery = recovery
        self._withdraw = withdraw
        # No cache is concerned.
        self.expired_leases = recovery.expired_leases
        self.quarantine_expired = recovery.quarantine_expired
        self.next_for_resolver = recovery.next_for_resolver
        self.scan = recovery.scan
        self.counts = recovery.counts

    def resolve(self, seen: SeenRecord, *, token: bytes, payload: StoredPayload, keep: float) -> bool:
        self._forget(seen)
        return self._recovery.resolve(seen, token=token, payload=payload, keep=keep)

    def force_release(self, seen: SeenRecord) -> bool:
        self._forget(seen)
        return self._recovery.force_release(seen)

    def _forget(self, seen: SeenRecord) -> None:
        # Before the system changes: what is withdrawn in vain is cached again when its tombstone is gone, after 90 days, and
        # this may be repeated; what was freed and is replayed could not be freed once more.
        if seen.record.payload is not None and not self._withdraw(seen.key, seen.record.fence):
            raise NotApplied(
                "Nothing was changed, for the cache of answers did not hear of it and would go on replaying this one: repeat "
                "this when the cache answers, where IDEMPOTENCY_REDIS_URL is set as on the web hosts. If it never will again, "
                "see `A cache that is gone` in docs/operations.md."
            )


class CachedDataKeys:
    """Implements `capabilities.DataKeys`: the system's, and the cache is told of what is erased."""

    def __init__(self, keys: DataKeys, cache: ReplayCache) -> None:
        self._keys = keys
        self._cache = cache
        # No cache is concerned.
        self.read_keys = keys.read_keys
        self.add = keys.add
        self.disable = keys.disable
        self.delete = keys.delete
        self.wrapped_by_other = keys.wrapped_by_other
        self.count = keys.count

    def shred(self, tid: bytes) -> int:
        gone = self._keys.shred(tid)
        # Afterwards, so that nothing is filled in between that was told before.
        try:
            erased = self._cache.erase(tid)
        except Exception:  # noqa: BLE001 - the keys are destroyed, and the operator must hear so
            _log.exception("The cache of answers failed")
            erased = False
        if not erased:
            raise StoreUnavailable(
                "The data keys are destroyed, and the cache of answers did not hear of it. What it holds of this tenant is "
                "replayed for a minute at most where it is encrypted, and to its end where it is not: repeat this when the "
                "cache answers, or empty the cache."
            )
        return gone


class CachedResponses:
    """Implements `capabilities.Responses`: the system's, and the cache forgets what is replaced."""

    def __init__(self, responses: Responses, forget: Callable[[StorageKey], None]) -> None:
        self._responses = responses
        self._forget = forget
        # No cache is concerned.
        self.scan = responses.scan
        self.count = responses.count

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        replaced = self._responses.replace(key, old, new)
        if replaced:
            self._forget(key)
        return replaced


class CachedHealth:
    """Implements `capabilities.Health`: the system's findings, and whether the cache answers."""

    def __init__(self, health: Health | None, cache: ReplayCache) -> None:
        self._health = health
        self._cache = cache

    def findings(self) -> Sequence[Finding]:
        found = [] if self._health is None else list(self._health.findings())
        try:
            looked = self._cache.get(StorageKey(os.urandom(32), os.urandom(16)))
        except Exception as error:  # noqa: BLE001 - the system's findings are worth having without it
            why = f"The cache of answers failed ({type(error).__name__})"
        else:
            if isinstance(looked, Record) or looked.at is not None:
                return [*found, Finding("replays", Verdict.FINE, "The cache of answers answers.")]
            why = "The cache of answers does not answer"
        return [*found, Finding("replays", Verdict.ADVICE, f"{why}: every replay is asked of the database.", _REMEDY)]

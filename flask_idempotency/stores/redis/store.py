"""The store that keeps records in Redis or Valkey."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import TID_BYTES, StorageKey, paused_token
from flask_idempotency.engine.model import (
    CALLER_UNKNOWN,
    IN_DOUBT,
    LATEST,
    VOID,
    ClaimRequest,
    Expired,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    OtherCaller,
    OverQuota,
    Record,
    State,
    StoredPayload,
    Unknown,
    Voided,
)
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import make_client
from flask_idempotency.stores.redis.connection import Tries
from flask_idempotency.stores.redis.data_loss import DataLossWatch, RedisDataLossPolicy
from flask_idempotency.stores.redis.encoding import (
    FINGERPRINT_BYTES,
    TOKEN_BYTES,
    about_bytes,
    as_kept,
    callers_of,
    completion,
    decode,
    decode_erasure,
    duration,
    limits_of,
    payload_bytes,
    reason_bytes,
    reason_of,
    trace_in,
    with_erasure,
)
from flask_idempotency.stores.redis.eviction import Eviction
from flask_idempotency.stores.redis.executor import ScriptExecutor, corrupt, refusal
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.redis.task_log import RedisTaskLog

if TYPE_CHECKING:
    from flask_idempotency.engine.quota import Quota
    from flask_idempotency.engine.store import Clock, StoreOutcome

    # Each is imported when it is first used: see `Deferred`.
    from flask_idempotency.stores.redis.activity import RedisActivity, RedisAuditTrail, RedisObservations
    from flask_idempotency.stores.redis.admin.data_keys import RedisDataKeys, RedisResponses
    from flask_idempotency.stores.redis.admin.data_loss import RedisDataLoss
    from flask_idempotency.stores.redis.admin.health import RedisHealth
    from flask_idempotency.stores.redis.admin.janitor import RedisExpiry, RedisRecovery
    from flask_idempotency.stores.redis.journals import RedisJournals
    from flask_idempotency.stores.redis.notifications import RedisNotifier
    from flask_idempotency.stores.redis.quota import RedisLedger

CANCELLED_MS = 60_000
"""How long Redis refuses the token of a cancelled claim.

The claim may still arrive this late, from the buffers of a network or of a frozen server.
"""

_IN_DOUBT = reason_bytes(IN_DOUBT)
_RELEASED = {b"DONE": None, b"ABSENT": None, b"PAUSED": State.PROCESSING, b"HELD": State.QUARANTINED}
_NO_LIMITS = (b"-",) * 5
"""The arguments of `claim.lua` in the place of a quota's limits, if there is none and others follow."""
_USED: Final[Mapping[bytes, type[Expired | Mismatched | OtherCaller | Voided]]] = {
    b"EXPIRED": Expired,
    b"MISMATCHED": Mismatched,
    b"OTHER-CALLER": OtherCaller,
    b"VOIDED": Voided,
}
"""Refusals that say when the key was first used."""
_SIZES = TOKEN_BYTES, FINGERPRINT_BYTES, TID_BYTES


class _Imports:
    """One thread imports at a time. A fork waits for it, and a child that Python does not know of has a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        after_fork(self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


_imports: Final = _Imports()
if hasattr(os, "register_at_fork"):
    # A child that is forked in the middle of an import of another thread would wait for that thread for ever.
    os.register_at_fork(
        before=lambda: _imports.lock.acquire(),
        after_in_parent=lambda: _imports.lock.release(),
        after_in_child=_imports.renew,
    )


class Deferred:
    """Stand in for a capability. Its first use imports its module, and turns this object into the capability itself.

    A worker uses few of them, and their modules are half of the store. After the first use, no call pays for this.
    """

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self._made_of = module, name, arguments

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            # `copy` looks attributes up before it sets any.
            raise AttributeError(attribute)
        with _imports.lock:
            if type(self) is Deferred:
                module, name, arguments = self._made_of
                made = getattr(import_module(f"{__package__}.{module}"), name)(*arguments)
                # One dictionary for both, and both stay: what a fork runs on the one that was made also changes this one.
                # A signal may raise between these lines: then `_made_of` lets the next use try again.
                vars(made).update(_made_of=self._made_of, _made=made)
                self.__dict__ = vars(made)
                # Its class last: another thread may then call any of its methods.
                self.__class__ = type(made)
        return getattr(self, attribute)


def deferred(module: str, name: str, *arguments: Any) -> Any:
    """Return this class of this module as a `Deferred`, which types take for one of its objects."""
    return Deferred(module, name, *arguments)


class RedisStore:
    """Keep the store's contract while Redis loses no data. Every method is one script, and one round trip.

    `server` is a URL, or your own client of redis-py or valkey-py. Give your client a `socket_timeout`: without one, a
    request may wait for a silent server for ever.

    Prepare a new Redis once (`data_loss.initialise`). Redis may lose data in a restart or a fail-over, or when you empty
    it. Afterwards, the store refuses unknown keys, unless the `rules` allow them.

    With `replicas`, a write counts only if this many replicas have it. Otherwise the store raises `StoreUnavailable`.

    A full Redis grants no new claims. It still renews, marks, completes, releases and quarantines, until the operating
    system refuses memory: the effect has happened, so its response must be kept. This holds for every Redis from 6.2 and
    every Valkey.
    """

    remembers = True

    def __init__(
        self, server: Any, *, clock: Clock | None = None, rules: RedisDataLossPolicy | None = None, replicas: int = 0
    ) -> None:
        self._owned = isinstance(server, str)
        self._client = make_client(server) if isinstance(server, str) else server
        if replicas:
            from flask_idempotency.stores.redis.replication import ReplicatedExecutor

            self._server: ScriptExecutor = ReplicatedExecutor(
                self._client, owned=self._owned, clock=clock, replicas=replicas
            )
        else:
            self._server = ScriptExecutor(self._client, owned=self._owned, clock=clock)
        self.replicas = replicas
        self._eviction = Eviction(self._server)
        self._watch = DataLossWatch(self._client, rules or RedisDataLossPolicy())
        self.ledger: RedisLedger = deferred("quota", "RedisLedger", self._server)
        self.data_keys: RedisDataKeys = deferred("admin.data_keys", "RedisDataKeys", self._server)
        self.responses: RedisResponses = deferred("admin.data_keys", "RedisResponses", self._server)
        self.recovery: RedisRecovery = deferred("admin.janitor", "RedisRecovery", self._server, self.responses)
        self.expiry: RedisExpiry = deferred("admin.janitor", "RedisExpiry", self._server)
        self.task_log: RedisTaskLog = RedisTaskLog(self._server)
        self.data_loss: RedisDataLoss = deferred(
            "admin.data_loss", "RedisDataLoss", self._server, self._watch, self._eviction.refuse_claims
        )
        self.journals: RedisJournals = deferred("journals", "RedisJournals", self._server, self._run_as_owner)
        self.tenant_shards: int = self._watch.rules.shards
        # A fakeredis server is an object of the process that made it.
        self.process_local: bool = type(self._client).__module__.partition(".")[0] == "fakeredis"
        self.health: RedisHealth = deferred("admin.health", "RedisHealth", self._server)
        self.activity: RedisActivity = deferred("activity", "RedisActivity", self._server)
        self.observations: RedisObservations = deferred("activity", "RedisObservations", self._server)
        self.audit: RedisAuditTrail = deferred("activity", "RedisAuditTrail", self._server)
        self.notifier: RedisNotifier = deferred("notifications", "RedisNotifier", self._client.pubsub)

    def check(self) -> None:
        """Raise `ConfigurationError` if this Redis may evict records.

        If the server does not answer, or hides its policy, log a warning: your application must start without it. The
        first claim checks again, and the store grants no claim while Redis evicts.
        """
        self._eviction.refuse_to_start()
        if self._watch.rules.after_loss == "run":
            return
        if self._eviction.possible:
            # The server does not answer, and would make this call wait a second time.
            self.data_loss.look_soon()
        else:
            self.data_loss.warn()

    def close(self) -> None:
        """Close the connections if you passed a URL. A client of your own stays open."""
        if not isinstance(self.notifier, Deferred):
            self.notifier.close()
        if self._owned:
            self._client.close()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        if (len(token), len(request.fingerprint), len(request.key.tid)) != _SIZES:
            raise ValueError(
                f"a token has {TOKEN_BYTES} bytes, a fingerprint {FINGERPRINT_BYTES} and a tenant's id {TID_BYTES}"
            )
        if self._eviction.possible:
            self._eviction.refuse_claims()
        if monotonic() >= self._watch.next_look:
            self.data_loss.look()
        (keys, name), tries = layout.keys_of_claim(request.key, token), Tries()
        if request.on_expiry is OnExpiry.TAKEOVER:
            keys = *keys, layout.journal(request.key)
        # Bytes alone: `words` then has nothing to do.
        arguments = (
            name,
            token,
            request.fingerprint,
            b"%d" % (4 * (request.on_expiry is OnExpiry.TAKEOVER) + 2 * request.notify_on_completion),
            request.key.tid + about_bytes(request.info),
            duration(lease),
            *self._watch.arguments(request.key_timestamp),
            *(() if quota is None else limits_of(quota)),
        )
        if request.callers is not None:
            arguments += (*(() if quota is not None else _NO_LIMITS), *callers_of(request.callers))
        result = self._server.run(scripts.CLAIM, keys, *arguments, tries=tries)
        if result == [b"DOUBT"]:
            self.data_loss.judge()
            result = self._server.run(scripts.CLAIM, keys, *arguments, tries=tries)
        first = result[0]
        if tries.repeated and not (type(first) is int or first in (b"CLAIMED", b"REPLAYED")):
            # The first try may still arrive, and claim a free key for a request that has ended. So cancel it here.
            with suppress(LeaseLost, StoreUnavailable):
                self.release(request.key, token)
        if type(first) is int:
            grant = Grant(token, first, 1, lease, result[1])
            self._watch.granted(request, grant)
            return grant
        match result:
            case [b"REPLAYED", data, now, erasure]:
                try:
                    record = decode(data, now=now / 1_000_000)
                    return record if erasure is None else with_erasure(record, decode_erasure(erasure))
                except CorruptRecord:
                    # Scripts read less of a record than `decode`: to them it was a completed record that expires.
                    self._server.run(scripts.MARK_CORRUPT, keys[: layout.OF_RECORD], name, data)
                    raise
            case [b"IN-FLIGHT", left]:
                return InFlight(retry_after=left / 1_000_000)
            case [b"CLAIMED", fence, attempt, left, era, *before]:
                trace = trace_in(before[0]) if before else ""
                grant = Grant(token, fence, attempt, left / 1_000_000, era, trace)
                self._watch.granted(request, grant)
                return grant
            case _:
                return self._refused(result)

    def void(
        self, request: ClaimRequest, *, token: bytes, keep: float, quota: Quota | None = None
    ) -> Voided | Mismatched | OtherCaller | OverQuota:
        self._eviction.refuse_claims()
        kept, _, status, payload, _, bucket_width = completion(VOID, keep=keep)
        keys = layout.keys(request.key)
        arguments = (
            bucket_width,
            token,
            kept,
            status,
            payload,
            request.key.tid + about_bytes(request.info),
            *self._watch.arguments(request.key_timestamp),
            *(_NO_LIMITS if quota is None else limits_of(quota)),
            *(() if request.callers is None else callers_of(request.callers)),
        )
        result = self._server.run(scripts.VOID, keys, *arguments)
        if result == [b"DOUBT"]:
            self.data_loss.judge()
            result = self._server.run(scripts.VOID, keys, *arguments)
        outcome = self._refused(result)
        if isinstance(outcome, Voided | Mismatched | OtherCaller | OverQuota):
            return outcome
        raise corrupt()

    def _refused(self, result: list[Any]) -> StoreOutcome:
        """Return why a script granted no claim. Raise what it raises to a claim."""
        match result:
            case [bytes(word), int(first_seen)] if word in _USED and first_seen <= LATEST * 1000:
                return _USED[word](first_seen=first_seen / 1000)
            case [b"CALLER-UNKNOWN"]:
                return Unknown(CALLER_UNKNOWN)
            case [b"UNKNOWN", reason]:
                return Unknown(reason_of(reason))
            case [b"OVER-QUOTA", limit, allowed, left, window]:
                return OverQuota(limit.decode(), int(allowed), left / 1_000_000, window / 1_000_000 if window else None)
            case [b"DATA-LOSS", loss, noticed]:
                raise self.data_loss.lost(loss, noticed=bool(noticed))
            case [b"DOUBT"]:
                # Redis answers, so this is no outage: the request must not run unprotected.
                raise self.data_loss.lost(b"changed", noticed=False)
            case [b"CANCELLED"]:
                raise StoreUnavailable("the claim was cancelled before it reached the store")
            case _:
                raise corrupt()

    def _run_as_owner(
        self, script: Script, keys: Sequence[bytes], *arguments: bytes | int, done: Container[bytes] = (b"DONE",)
    ) -> Any:
        """Run a script of an owner, and return its result. Raise the reason of a refusal, which is a word not in `done`.

        After a restart of Redis, first check for data loss, then run the script again.
        """
        name = layout.name(keys)
        result = self._server.run(script, keys, name, *arguments)
        if result == b"DOUBT":
            self.data_loss.judge()
            result = self._server.run(script, keys, name, *arguments)
        if not isinstance(result, list) and result not in done:
            raise refusal(result)
        return result

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._run_as_owner(scripts.RENEW, layout.keys(key), token, microseconds(lease))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self._run_as_owner(scripts.MARK_POINT_OF_NO_RETURN, layout.keys(key), token)

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        keys = layout.keys(key) if remember is None else layout.keys_with_memory(key)
        self._run_as_owner(scripts.COMPLETE, keys, token, *completion(payload, keep=keep, remember=remember))

    def release(self, key: StorageKey, token: bytes) -> State | None:
        keys = layout.keys(key)
        concerned = *keys, layout.cancelled(keys, token), layout.journal(key)
        result = self._run_as_owner(
            scripts.RELEASE, concerned, token, CANCELLED_MS, paused_token(token), _IN_DOUBT, done=_RELEASED
        )
        return _RELEASED[result]

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._run_as_owner(scripts.QUARANTINE, layout.keys(key), token, reason_bytes(reason))

    def read(self, key: StorageKey) -> Record | None:
        now, data, erasure = self._server.run(scripts.READ, layout.keys(key))
        if data is None:
            return None
        return as_kept(with_erasure(decode(data, now=now / 1_000_000), decode_erasure(erasure)))

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        facts = int(payload.success), payload.status, payload_bytes(payload)
        keys = layout.keys(key)
        self._server.run(scripts.MARK_CORRUPT, keys, layout.name(keys), b"", *facts)

"""Responses cached in Redis in front of a system of record, behind a circuit breaker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, State
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.store import Clock, store_time
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import make_cache_client
from flask_idempotency.stores.redis.connection import RETRIES
from flask_idempotency.stores.redis.encoding import decode, encode
from flask_idempotency.stores.redis.executor import ScriptExecutor
from flask_idempotency.stores.redis.scan import scan_all
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.tiered import Missed

FIRST_PAUSE_SECONDS = 1.0
"""A call in vain takes tens of milliseconds: once a second, it costs a worker a few hundredths of its time."""

LAST_PAUSE_SECONDS = 30.0
"""The longest time without a call after the server is back."""

_log = logging.getLogger("flask_idempotency")


class CircuitBreaker:
    """Let calls pass until one fails. Then let one call at a time try, after pauses that double, until one succeeds.

    No call waits here. If a call never reports back, the next one may try after the pause.
    """

    def __init__(self, name: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._turn = 0
        self._pause = 0.0
        self._retry_at: float | None = None
        after_fork(self._unlock)

    def turn(self) -> int | None:
        """Return a ticket for one call, or None if the caller must not call now. Report with `succeeded` or `failed`."""
        # The turn first: a ticket of an earlier state does not count.
        turn, closed = self._turn, self._retry_at is None
        if closed:
            return turn
        with self._lock:
            now = self._monotonic()
            if self._retry_at is None or now < self._retry_at:
                return None
            self._turn += 1
            self._retry_at = now + self._pause
            return self._turn

    def succeeded(self, turn: int) -> None:
        """Let all calls pass again, unless another call has failed since this ticket."""
        if self._retry_at is None:
            return
        with self._lock:
            if turn != self._turn:
                return
            self._turn += 1
            self._retry_at = None
        _log.info("%s answers again", self._name)

    def failed(self, turn: int, why: str) -> None:
        """Let no call pass for a while. If several calls fail together, the first counts."""
        with self._lock:
            if turn != self._turn:
                return
            opened = self._retry_at is None
            self._turn += 1
            self._pause = FIRST_PAUSE_SECONDS if opened else min(2 * self._pause, LAST_PAUSE_SECONDS)
            self._retry_at = self._monotonic() + self._pause
        if opened:
            _log.warning("%s does not answer (%s): it is skipped, and retried from time to time", self._name, why)

    def _unlock(self) -> None:
        """Replace the lock in a forked child: the thread that held it exists only in the parent."""
        self._lock = threading.Lock()


LARGEST_BYTES = 1 << 20
"""The cache stores no larger record. This size takes 10 ms at 1 Gbit/s, well within the time-outs of a cache."""

REMEMBERED_MS = 90 * 86_400_000
"""The cache remembers an erasure this long: the longest life of a response that was on its way at that time."""

_SUM_BYTES = 4
_FENCE_BYTES = 7
_TIMES_BYTES = 14
"""Two times before a sealed record: when it ends, and when the cache missed it."""
_INVALIDATED_BYTES = 24
"""The part of a record up to its fence: shorter than any record."""
_ENDLESS = (1 << 52).to_bytes(7, "big")
"""Microseconds: in the future by every clock, and exact in Lua."""
_NO_RESPONSE = _ENDLESS * 2 + bytes(_INVALIDATED_BYTES - _FENCE_BYTES)
"""An entry without a response, up to its fence."""


class _Way:
    """One way to Redis: a client with its time-outs, and a breaker that skips Redis for a while after a failure."""

    def __init__(self, server: ScriptExecutor, breaker: CircuitBreaker) -> None:
        self.server = server
        self._breaker = breaker

    def guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of this call, or None if Redis does not answer or the breaker skips it."""
        turn = self._breaker.turn()
        if turn is None:
            return None
        try:
            result = call(self.server, *arguments)
        except (CorruptRecord, StoreUnavailable) as error:
            # Leave out the error's text: it may quote the command, and so the key.
            self._breaker.failed(turn, cause_of(error))
            return None
        self._breaker.succeeded(turn)
        return result


class RedisReplayCache:
    """A `ReplayCache` in Redis or Valkey, with any eviction policy, with or without persistence.

    `server` is a URL, or your client of redis-py or valkey-py. With a URL, a request waits for tens of milliseconds and
    tries once. `invalidate` and `erase` wait as long as a store does and try again, because an operator, and not a request,
    waits for them. The cache uses your client as it is. After a failure it skips Redis for a while.
    """

    def __init__(
        self, server: Any, *, clock: Clock = store_time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._owned = isinstance(server, str)
        # Both connect when they are first used.
        self._requests, self._operators = (
            _Way(
                ScriptExecutor(
                    make_cache_client(server, patient=retries > 0) if self._owned else server,
                    owned=self._owned,
                    clock=clock,
                    retries=retries,
                ),
                CircuitBreaker(name, monotonic=monotonic),
            )
            for name, retries in (
                ("The Redis that caches responses", 0),
                ("The Redis that caches responses, asked by an operator,", RETRIES),
            )
        )
        self._refusing = False

    def close(self) -> None:
        """Close the connections if the cache made the clients from a URL. Your own client stays open."""
        if self._owned:
            self._requests.server.client.close()
            self._operators.server.client.close()

    def get(self, key: StorageKey) -> Record | Missed:
        names = layout.cached_response(key), layout.cache_erasure(key.tid)
        match self._requests.guarded(self._look, names):
            case [int(now)]:
                return Missed(at=now)
            case [int(now), int(), bytes(sealed)] if len(sealed) == _INVALIDATED_BYTES:
                return Missed(at=now)
            case [int(now), int(left), bytes(sealed)]:
                try:
                    return replace(_opened(key, sealed), remaining=left / 1_000_000)
                except CorruptRecord as error:
                    # In a store, corruption is never absence. In a cache it is: the system of record still decides.
                    _log.error("Dropped a cached response in Redis: %s", error)
                    self._requests.guarded(self._drop, names)
                    return Missed(at=now)
            case _:
                return Missed()

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        try:
            sealed, left = _sealed(key, record), microseconds(record.remaining)
        except ValueError:
            # The text is too long, the attempts too many, or the record expired or erased. Replay it from the system.
            return
        if len(sealed) <= LARGEST_BYTES:
            names = layout.cached_response(key), layout.cache_erasure(key.tid)
            self._requests.guarded(self._keep, names, missed_at, left, sealed)

    def forget(self, key: StorageKey) -> None:
        # The script keeps the entry of an invalidated response, and the fence of any other: a response of an earlier claim
        # may still be on its way here.
        self._requests.guarded(self._drop, (layout.cached_response(key), layout.cache_erasure(key.tid)), _NO_RESPONSE)

    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        return bool(self._operators.guarded(self._invalidate, layout.cached_response(key), fence))

    def erase(self, tid: bytes) -> bool:
        return bool(self._operators.guarded(self._erase, tid))

    def _invalidate(self, server: ScriptExecutor, name: bytes, fence: int) -> bool:
        # Its fence is above `fence`, so `put` does not replace this entry with an older response.
        entry = _NO_RESPONSE + (fence + 1).to_bytes(_FENCE_BYTES, "big")
        return _refusal(server, scripts.CACHE_INVALIDATE, (name,), entry, REMEMBERED_MS) is None

    def _erase(self, server: ScriptExecutor, tid: bytes) -> bool:
        server.run(scripts.CACHE_EXPIRE_TENANT, (layout.cache_erasure(tid),), REMEMBERED_MS)
        # Delete the responses too: they must not stay until they expire, and Redis may evict the note of the erasure.
        for names in scan_all(server, layout.every(b"c", tid)):
            if names:
                server.run(scripts.CACHE_DELETE_TENANT, names, tid)
        return True

    def _look(self, server: ScriptExecutor, names: Sequence[bytes]) -> Any:
        try:
            return server.run(scripts.CACHE_GET, names)
        except CorruptRecord:
            _log.error("Dropped a key of another type in the place of a cached response in Redis")
            return self._drop(server, names)

    def _keep(self, server: ScriptExecutor, names: Sequence[bytes], *arguments: bytes | int) -> None:
        refusal = _refusal(server, scripts.CACHE_PUT, names, *arguments)
        # Redis is full, or a replica, or its ACL refuses writes. It still answers, so the cache still reads from it.
        if refusal is not None and not self._refusing:
            _log.warning("The Redis that caches responses refuses writes (%s)", cause_of(refusal))
        self._refusing = refusal is not None

    def _drop(self, server: ScriptExecutor, names: Sequence[bytes], beginning: bytes = b"") -> None:
        server.run(scripts.CACHE_DELETE, names, _TIMES_BYTES + _INVALIDATED_BYTES, beginning)


def _refusal(
    server: ScriptExecutor, script: Script, names: Sequence[bytes], *arguments: bytes | int
) -> Exception | None:
    """Run a script that writes. Return why a Redis that answers refuses it, or None if it has run."""
    try:
        server.run(script, names, *arguments)
    except (CorruptRecord, StoreUnavailable) as error:
        if not isinstance(error.__cause__, server.errors.refused):
            raise
        return error
    return None


def _sealed(key: StorageKey, record: Record) -> bytes:
    if record.payload is None:
        raise ValueError("only a completed record can be replayed")
    data = encode(record, tid=key.tid)
    return data + _sum(key, data)


def _opened(key: StorageKey, sealed: bytes) -> Record:
    if len(sealed) > LARGEST_BYTES:
        raise CorruptRecord("it is longer than the cache allows")
    data = sealed[:-_SUM_BYTES]
    if sealed[-_SUM_BYTES:] != _sum(key, data):
        raise CorruptRecord("its checksum is wrong, or it belongs to another key")
    record = decode(data, now=0.0)
    if record.payload is None or record.state is not State.COMPLETED:
        raise CorruptRecord("it is not completed")
    return record


def _sum(key: StorageKey, data: bytes) -> bytes:
    """Return a checksum against accidents. A client that may write to this Redis can compute it too."""
    return crc32(data, crc32(key.rid)).to_bytes(_SUM_BYTES, "big")

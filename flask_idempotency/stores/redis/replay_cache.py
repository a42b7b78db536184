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
from flask_idempotency.engine.store import Clock, store_time
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.admin.data_keys import Scan
from flask_idempotency.stores.redis.client import Errors, line_of, make_cache_client
from flask_idempotency.stores.redis.connection import words
from flask_idempotency.stores.redis.encoding import decode, encode
from flask_idempotency.stores.redis.executor import ScriptExecutor
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.tiered import Missed

FIRST_PAUSE_SECONDS = 1.0
"""A worker that waits in vain does so for tens of milliseconds: once a second takes a few hundredths of its time."""

LAST_PAUSE_SECONDS = 30.0
"""How long a server that is back may go unused."""

_log = logging.getLogger("flask_idempotency")


class CircuitBreaker:
    """Lets calls pass until one fails; from then on one at a time, after pauses that double, until one succeeds.

    Nobody ever waits here. A call that never reports back holds up nobody either: the next may try after the pause.
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
        """A ticket for one call, to be given back by `succeeded` or `failed`; None for no call now."""
        turn = self._turn  # Before the state: a ticket of a state that has passed counts for nothing.
        if self._retry_at is None:
            return turn
        with self._lock:
            return self._probe()

    def succeeded(self, turn: int) -> None:
        """Everybody may call again, unless others have failed since this ticket was given out."""
        if self._retry_at is None:
            return
        with self._lock:
            if turn != self._turn:
                return
            self._turn += 1
            self._retry_at = None
        _log.info("%s answers again", self._name)

    def failed(self, turn: int, why: str) -> None:
        """Nobody calls for a while. Of many that fail together the first counts."""
        with self._lock:
            if turn != self._turn:
                return
            opened = self._retry_at is None
            self._turn += 1
            self._pause = FIRST_PAUSE_SECONDS if opened else min(2 * self._pause, LAST_PAUSE_SECONDS)
            self._retry_at = self._monotonic() + self._pause
        if opened:
            _log.warning("%s does not answer (%s): it is left alone, and tried again now and then", self._name, why)

    def _unlock(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._lock = threading.Lock()

    def _probe(self) -> int | None:
        now = self._monotonic()
        if self._retry_at is None or now < self._retry_at:
            return None
        self._turn += 1
        self._retry_at = now + self._pause
        return self._turn


LARGEST_BYTES = 1 << 20
"""Records above this are left to the system of record. One of this size takes 10 ms on a gigabit line: well within the
time-outs that a cache has, and not long for others that wait for the same Redis."""

REMEMBERED_MS = 90 * 86_400_000
"""For how long it is known when a tenant was erased: as long as an answer may be kept that was on its way then."""

_SUM_BYTES = 4
_FENCE_BYTES = 7
_PLACE_BYTES = 14
"""Before what is sealed: until when it is good, and when it was looked for."""
_WITHDRAWN_BYTES = 24
"""As much of a record as ends with its fence: shorter than any record."""
_ENDLESS = (1 << 52).to_bytes(7, "big")
"""Microseconds, by every clock in the future, and exact in Lua."""


class RedisReplayCache:
    """A `ReplayCache` in Redis or Valkey, with any eviction policy, persistence or none.

    `server` is a URL or a ready-made client of redis-py or valkey-py. One made from a URL waits for tens of
    milliseconds and tries once; a ready-made one is used as it is. After a failure Redis is left alone for a while.
    """

    def __init__(
        self, server: Any, *, clock: Clock = store_time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._owned = isinstance(server, str)
        self._client = make_cache_client(server) if isinstance(server, str) else server
        self._errors = Errors(self._client)
        self._failures: tuple[type[Exception], ...] = (*self._errors.unavailable, StoreUnavailable)
        self._line = line_of(self._client, owned=self._owned, retries=0)
        self._breaker = CircuitBreaker("The Redis that caches answers", monotonic=monotonic)
        self._refusing = False
        self._scan = Scan(ScriptExecutor(self._client, owned=self._owned, clock=clock))

    def close(self) -> None:
        """Close the connections of a client that was made from a URL. Another's client is left alone."""
        if self._owned:
            self._client.close()

    def get(self, key: StorageKey) -> Record | Missed:
        names = layout.cached_response(key), layout.cache_erasure(key.tid)
        match self._guarded(self._look, names):
            case [int(now)]:
                return Missed(at=now)
            case [int(now), int(), bytes(sealed)] if len(sealed) == _WITHDRAWN_BYTES:
                return Missed(at=now)
            case [int(now), int(left), bytes(sealed)]:
                try:
                    return replace(_opened(key, sealed), remaining=left / 1_000_000)
                except CorruptRecord as error:
                    # In a store corruption is never absence. In a cache it is: the system of record still decides.
                    _log.error("An answer cached in Redis was dropped: %s", error)
                    self._guarded(self._drop, names)
                    return Missed(at=now)
            case _:
                return Missed()

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        try:
            sealed, left = _sealed(key, record), microseconds(record.remaining)
        except ValueError:
            # Too long a text about it, too many attempts, over already, erased: rare, and the system of record copes.
            return
        if len(sealed) <= LARGEST_BYTES:
            names = layout.cached_response(key), layout.cache_erasure(key.tid)
            self._guarded(self._keep, names, missed_at, left, sealed)

    def forget(self, key: StorageKey) -> None:
        # Whoever withdrew an answer did so for good.
        self._guarded(self._drop, (layout.cached_response(key), layout.cache_erasure(key.tid)))

    def invalidate(self, key: StorageKey, *, fence: int) -> bool:
        """From now on nothing is replayed of what this key was answered under this fence, or a lower one.

        Nor is what a system of record has told until now, and is still on its way to be kept. False: it did not answer.
        """
        return bool(self._guarded(self._withdraw, layout.cached_response(key), fence))

    def erase(self, tid: bytes) -> bool:
        """From now on nothing is replayed that was kept for this tenant so far. False: it did not answer.

        Nor is what a system of record has told until now, and is still on its way to be kept.
        """
        return bool(self._guarded(self._erase, tid))

    def _withdraw(self, name: bytes, fence: int) -> bool:
        try:
            self._run(scripts.CACHE_INVALIDATE, (name,), _withdrawn(fence), REMEMBERED_MS)
        except self._errors.refused:
            return False
        return True

    def _erase(self, tid: bytes) -> bool:
        self._run(scripts.CACHE_EXPIRE_TENANT, (layout.cache_erasure(tid),), REMEMBERED_MS)
        # What is erased must not wait for its end; and what says that it was may be evicted before it.
        for names in self._scan.all(layout.cached_responses_of(tid)):
            if names:
                self._run(scripts.CACHE_DELETE_TENANT, names, tid)
        return True

    def _look(self, names: Sequence[bytes]) -> Any:
        try:
            return self._run(scripts.CACHE_GET, names)
        except self._errors.refused as error:
            if "WRONGTYPE" not in str(error):
                raise
            _log.error("Something that is not ours was in the place of an answer cached in Redis, and was dropped")
            return self._drop(names)

    def _keep(self, names: Sequence[bytes], *arguments: bytes | int) -> None:
        try:
            self._run(scripts.CACHE_PUT, names, *arguments)
            self._refusing = False
        except self._errors.refused as error:
            # Full, or a replica, or for others to write to. It does answer, so it may still be asked.
            if not self._refusing:
                self._refusing = True
                _log.warning("The Redis that caches answers takes no more of them (%s)", type(error).__name__)

    def _drop(self, names: Sequence[bytes]) -> None:
        self._run(scripts.CACHE_DELETE, names, _PLACE_BYTES + _WITHDRAWN_BYTES)

    def _guarded(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """What Redis returned, or None when it does not answer or is being left alone."""
        turn = self._breaker.turn()
        if turn is None:
            return None
        try:
            answer = ask(*arguments)
        except self._failures as error:
            # Not the error's text: it may quote the command, and so the key.
            self._breaker.failed(turn, type(error).__name__)
            return None
        self._breaker.succeeded(turn)
        return answer

    def _run(self, script: Script, names: Sequence[bytes], *arguments: bytes | int) -> Any:
        told = self._clock()
        now = b"" if told is None else round(told * 1_000_000)
        rest = words((len(names), *names, now, *arguments))
        try:
            return self._line("EVALSHA", script.sha, *rest)
        except self._errors.no_script:
            return self._line("EVAL", script.text, *rest)


def _sealed(key: StorageKey, record: Record) -> bytes:
    if record.payload is None:
        raise ValueError("only what is completed may be replayed")
    data = encode(record, tid=key.tid)
    return data + _sum(key, data)


def _withdrawn(fence: int) -> bytes:
    """An entry in the place of an answer: nothing to replay, but of a fence that the answer is too old for."""
    return _ENDLESS * 2 + bytes(_WITHDRAWN_BYTES - _FENCE_BYTES) + (fence + 1).to_bytes(_FENCE_BYTES, "big")


def _opened(key: StorageKey, sealed: bytes) -> Record:
    if len(sealed) > LARGEST_BYTES:
        raise CorruptRecord("it is longer than anything that is kept here")
    data = sealed[:-_SUM_BYTES]
    if sealed[-_SUM_BYTES:] != _sum(key, data):
        raise CorruptRecord("it is not what was put there, or was put there for another key")
    record = decode(data, now=0.0)
    if record.payload is None or record.state is not State.COMPLETED:
        raise CorruptRecord("it is not completed")
    return record


def _sum(key: StorageKey, data: bytes) -> bytes:
    """Against accidents. Whoever may write to this Redis can make one too."""
    return crc32(data, crc32(key.rid)).to_bytes(_SUM_BYTES, "big")

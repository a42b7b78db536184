"""The store that keeps records in Redis or Valkey."""

from __future__ import annotations

from typing import Any

from flask_idempotency.engine.clock import Clock, store_time
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, LeaseLost, StoreUnavailable
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.outcome import Claimed, Grant, InFlight, Mismatched, Replayed, Unknown
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.record import OnLapse, Payload, Record, State
from flask_idempotency.engine.request import ClaimRequest
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import BorrowedLine, Errors, Line, OwnLine, make_client
from flask_idempotency.stores.redis.eviction import Eviction
from flask_idempotency.stores.redis.record import (
    FINGERPRINT_BYTES,
    TOKEN_BYTES,
    about_bytes,
    decode,
    payload_bytes,
    reason_of,
)
from flask_idempotency.stores.redis.scripts import Script


class RedisStore:
    """Keeps the contract while Redis remembers: every method is one script, and one round trip.

    `server` is a URL or a ready-made client of redis-py or valkey-py. A ready-made one is used as it is: give it a
    `socket_timeout`, or a request waits for a silent server for ever. What Redis forgets, by restarting without
    persistence, by fail-over or by eviction, may run again.

    A Redis that is out of memory grants no new claims. Renewing, marking, completing, releasing and holding still work
    until the operating system says no: the effect has happened, and its answer must not be lost. This holds on every
    Redis from 6.2 and every Valkey.
    """

    def __init__(self, server: Any, *, clock: Clock = store_time) -> None:
        self._clock = clock
        self._owned = isinstance(server, str)
        self._client = make_client(server) if isinstance(server, str) else server
        self._errors = Errors(self._client)
        self._line: Line = OwnLine(self._client) if self._owned else BorrowedLine(self._client)
        self._eviction = Eviction(self._client, self._errors)

    def check(self) -> None:
        """Raises `ConfigurationError` when this Redis may evict records.

        A server that cannot be reached, or will not tell, is only logged: an application must start without it. It is
        asked again before the first claim, and grants none while it evicts.
        """
        self._eviction.refuse_to_start()

    def close(self) -> None:
        """Close the connections of a client that was made from a URL. Another's client is left alone."""
        if self._owned:
            self._client.close()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        if quota is not None:
            raise ConfigurationError("this store cannot count yet")
        if len(token) != TOKEN_BYTES or len(request.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes and a fingerprint {FINGERPRINT_BYTES}")
        if self._eviction.possible:
            self._eviction.refuse_claims()
        answer = self._run(
            scripts.CLAIM,
            request.key,
            token,
            request.fingerprint,
            int(request.on_lapse is OnLapse.TAKEOVER),
            about_bytes(request.about),
            microseconds(lease),
        )
        match answer:
            case [b"CLAIMED", fence, attempt, left]:
                return Claimed(Grant(token, fence, attempt, lease=left / 1_000_000))
            case [b"REPLAYED", record, now]:
                return Replayed(decode(record, now=now / 1_000_000))
            case [b"IN-FLIGHT", left]:
                return InFlight(retry_after=left / 1_000_000)
            case [b"MISMATCHED", first_seen]:
                return Mismatched(first_seen=first_seen / 1000)
            case [b"UNKNOWN", reason]:
                return Unknown(reason_of(reason))
            case _:
                raise _corrupt()

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        _settled(self._run(scripts.RENEW, key, token, microseconds(lease)))

    def mark(self, key: StorageKey, token: bytes) -> None:
        _settled(self._run(scripts.MARK, key, token))

    def complete(self, key: StorageKey, token: bytes, payload: Payload, *, keep: float) -> None:
        facts = microseconds(keep), int(payload.success), payload.status
        _settled(self._run(scripts.COMPLETE, key, token, *facts, payload_bytes(payload)))

    def release(self, key: StorageKey, token: bytes) -> None:
        answer = self._run(scripts.RELEASE, key, token)
        if answer != b"ABSENT":
            _settled(answer)

    def hold(self, key: StorageKey, token: bytes, reason: str) -> None:
        _settled(self._run(scripts.HOLD, key, token, reason.encode()))

    def read(self, key: StorageKey) -> Record | None:
        answer = self._run(scripts.READ, key)
        if len(answer) < 2 or answer[1] is None:
            return None
        record = decode(answer[1], now=answer[0] / 1_000_000)
        return None if record.state is State.COMPLETED and record.remaining <= 0 else record

    def condemn(self, key: StorageKey, payload: Payload) -> None:
        """Follows with the next change of this store."""

    def _run(self, script: Script, key: StorageKey, *arguments: bytes | int) -> Any:
        told = self._clock()
        now = b"" if told is None else round(told * 1_000_000)
        keys = layout.keys(key)
        rest = (4, *keys, now, layout.name(keys), *arguments)
        try:
            try:
                return self._line("EVALSHA", script.sha, *rest)
            except self._errors.no_script:
                # EVAL and not SCRIPT LOAD: the server may restart, or a fail-over happen, between two commands.
                return self._line("EVAL", script.text, *rest)
        except self._errors.unavailable as error:
            if "WRONGTYPE" in str(error):
                raise _corrupt() from error
            raise StoreUnavailable(f"Redis cannot decide ({type(error).__name__})") from error


def _settled(answer: bytes) -> None:
    match answer:
        case b"DONE":
            return
        case b"ABSENT":
            raise LeaseLost("the record is gone")
        case b"LOST":
            raise LeaseLost("the record belongs to somebody else, or is completed")
        case _:
            raise _corrupt()


def _corrupt() -> CorruptRecord:
    return CorruptRecord("what Redis holds for this key was not written by this release, or not by us")

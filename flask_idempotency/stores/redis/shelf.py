"""Tenants' data keys, in the same slot as the records that are sealed with them."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, DataKey, KeyShelf
from flask_idempotency.engine.errors import CorruptRecord, DataKeyGone
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.scan import Scan
from flask_idempotency.stores.redis.server import Server, corrupt, whole_number

_ID_BYTES = 16
_LAST, _SHRED, _CLOSED = (layout.FIELDS[name].encode() for name in ("LAST", "SHRED", "CLOSED"))

_log = logging.getLogger("flask_idempotency")


class RedisShelf:
    """Implements `upkeep.DataKeys`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scan = Scan(server)

    def shelf(self, tid: bytes) -> KeyShelf:
        now, store, fields = self._look(tid)
        keys = tuple(_key(number, fields, now) for number in _numbers(fields))
        return KeyShelf(store, keys, whole_number(fields.get(_LAST, b"0")))

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        kid = key.kid.encode()
        if len(kid) > 255:
            raise ValueError("the id of a key has 255 bytes at most")
        kept = bytes((len(kid),)) + kid + key.wrapped
        keys = layout.memory(tid), layout.data_keys(tid)
        answer = self._server.run(scripts.ADD, keys, store, key.number, kept, after)
        if answer == b"CORRUPT":
            raise corrupt()
        return bool(answer == b"DONE")

    def close(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.CLOSE, (layout.data_keys(tid),), number)

    def retire(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.RETIRE, (layout.data_keys(tid),), number)

    def others(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        return [(tid, key) for tid, key in self._all() if key.kid != kid]

    def destroy(self, tid: bytes) -> int:
        return int(self._server.run(scripts.DESTROY, (layout.data_keys(tid),)))

    def count(self) -> Mapping[str, int]:
        return Counter(key.kid for _, key in self._all())

    def _all(self) -> Iterator[tuple[bytes, DataKey]]:
        """Every tenant's data keys, as far as they can be read. SCAN may meet a tenant twice, and then it is told once."""
        unreadable, seen = 0, set[bytes]()
        for names in self._scan.all(layout.EVERY_SHELF):
            for name in names:
                tid = layout.tid(name)
                if tid is None or tid in seen:
                    continue
                seen.add(tid)
                keys, spoilt = self._readable(tid)
                unreadable += spoilt
                yield from ((tid, key) for key in keys)
        if unreadable:
            _log.error(
                "%d data keys in Redis, or whole shelves of them, cannot be read and were passed over: restore them, or "
                "the answers that they have sealed are lost",
                unreadable,
            )

    def _readable(self, tid: bytes) -> tuple[list[DataKey], int]:
        """Those of this tenant's data keys that can be read, and of how many that is not so."""
        try:
            now, _, fields = self._look(tid)
        except CorruptRecord:
            return [], 1
        keys, spoilt = list[DataKey](), 0
        for number in _numbers(fields):
            try:
                keys.append(_key(number, fields, now))
            except CorruptRecord:
                spoilt += 1
        return keys, spoilt

    def _look(self, tid: bytes) -> tuple[int, bytes, dict[bytes, bytes]]:
        keys = layout.memory(tid), layout.data_keys(tid)
        now, store, told = self._server.run(scripts.SHELF, keys, secrets.token_bytes(_ID_BYTES))
        return now, store, dict(zip(told[::2], told[1::2], strict=True))


class Erasures:
    """What the erasures of tenants mean for records, each looked up once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known = dict[bytes, bytes | None]()

    def told(self, tid: bytes, record: Record) -> Record:
        if record.payload is None:
            return record
        if tid not in self._known:
            self._known[tid] = self._server.ask("HGET", layout.data_keys(tid), _SHRED)
        return told(record, self._known[tid])


def told(record: Record, erasure: bytes | None) -> Record:
    """This record, with what its tenant's erasure means for it."""
    if erasure is None or record.payload is None:
        return record
    destroyed, _, erased_at = erasure.partition(b" ")
    by = record.payload.sealed_by
    if by is None:
        erased = round(record.requested_at * 1000) * 1000 <= whole_number(erased_at)
    else:
        erased = by.number <= whole_number(destroyed)
    return replace(record, erased=True) if erased else record


def refused_for_want_of_a_key(answer: Any) -> DataKeyGone | None:
    """What a script has said of the data key that a payload is sealed with, if that was in its way."""
    if answer == b"ERASED":
        return DataKeyGone("the tenant's answers were erased since the key was first used", erased=True)
    if answer == b"KEYLESS":
        return DataKeyGone("there is no open data key of this number", erased=False)
    return None


def _numbers(fields: Mapping[bytes, bytes]) -> list[bytes]:
    """The fields that hold a key: the lowest number first."""
    return sorted((field for field in fields if field.isdigit()), key=lambda field: (len(field), field))


def _key(number: bytes, fields: Mapping[bytes, bytes], now: int) -> DataKey:
    closed = fields.get(_CLOSED + number)
    closed_for = None if closed is None else (now - whole_number(closed)) / 1_000_000
    return DataKey(whole_number(number), *_kid_and_wrapped(fields[number]), closed_for)


def _kid_and_wrapped(kept: bytes) -> tuple[str, bytes]:
    if not kept or len(kept) < 1 + kept[0]:
        raise corrupt()
    end = 1 + kept[0]
    if len(kept) > end + LARGEST_WRAPPED:
        raise corrupt()
    try:
        return kept[1:end].decode(), kept[end:]
    except UnicodeDecodeError as error:
        raise corrupt() from error

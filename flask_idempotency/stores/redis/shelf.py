"""Tenants' data keys, in the same slot as the records that are sealed with them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flask_idempotency.engine.errors import DataKeyGone
from flask_idempotency.engine.record import Record
from flask_idempotency.engine.upkeep import DataKey, KeyShelf
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.scan import Scan
from flask_idempotency.stores.redis.server import Server, corrupt

_ID_BYTES = 16
_LAST, _SHRED, _CLOSED = (layout.FIELDS[name].encode() for name in ("LAST", "SHRED", "CLOSED"))


class RedisShelf:
    """Implements `upkeep.DataKeys`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scan = Scan(server)

    def shelf(self, tid: bytes) -> KeyShelf:
        now, store, fields = self._look(layout.memory(tid), layout.data_keys(tid))
        return KeyShelf(store, tuple(_keys(fields, now)), _number(fields.get(_LAST, b"0")))

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
        """Every tenant's data keys. SCAN may meet a tenant twice, and then it is told once."""
        seen = set[bytes]()
        for names in self._scan.all(layout.EVERY_SHELF):
            for name in names:
                tid = layout.tid(name)
                if tid is None or tid in seen:
                    continue
                seen.add(tid)
                for key in self.shelf(tid).keys:
                    yield tid, key

    def _look(self, memory: bytes, keys: bytes) -> tuple[int, bytes, dict[bytes, bytes]]:
        now, store, told = self._server.run(scripts.SHELF, (memory, keys), secrets.token_bytes(_ID_BYTES))
        return now, store, dict(zip(told[::2], told[1::2], strict=True))


def told(record: Record, erasure: bytes | None) -> Record:
    """This record, with what its tenant's erasure means for it."""
    if erasure is None or record.payload is None:
        return record
    destroyed, _, erased_at = erasure.partition(b" ")
    by = record.payload.sealed_by
    if by is None:
        erased = round(record.requested_at * 1000) * 1000 <= _number(erased_at)
    else:
        erased = by.number <= _number(destroyed)
    return replace(record, erased=True) if erased else record


def refused_for_want_of_a_key(answer: Any) -> DataKeyGone | None:
    """What a script has said of the data key that a payload is sealed with, if that was in its way."""
    if answer == b"ERASED":
        return DataKeyGone("the tenant's answers were erased since the key was first used", erased=True)
    if answer == b"KEYLESS":
        return DataKeyGone("there is no open data key of this number", erased=False)
    return None


def _keys(fields: Mapping[bytes, bytes], now: int) -> Iterator[DataKey]:
    numbers = sorted(int(field) for field in fields if field.isdigit())
    for number in numbers:
        closed = fields.get(_CLOSED + b"%d" % number)
        closed_for = None if closed is None else (now - _number(closed)) / 1_000_000
        yield DataKey(number, *_kid_and_wrapped(fields.get(b"%d" % number, b"")), closed_for)


def _kid_and_wrapped(kept: bytes) -> tuple[str, bytes]:
    if not kept or len(kept) < 1 + kept[0]:
        raise corrupt()
    end = 1 + kept[0]
    try:
        return kept[1:end].decode(), kept[end:]
    except UnicodeDecodeError as error:
        raise corrupt() from error


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise corrupt()
    return int(text)

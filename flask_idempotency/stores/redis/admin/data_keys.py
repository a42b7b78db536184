"""Tenants' data keys, in the same slot as the records that are sealed with them, and a scan of all responses."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Final

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, Answer, DataKey, Page, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, State, StoredPayload, kid_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import LARGEST_BYTES, as_kept, payload_bytes
from flask_idempotency.stores.redis.executor import Call, RedisCapability, corrupt, refusal, text_in, whole_number
from flask_idempotency.stores.redis.scan import BATCH, ErasureCache, scan_all, scan_page, seen_record

_ID_BYTES = 16
_LAST_KEY, _DISABLED = (layout.FIELDS[name].encode() for name in ("LAST_KEY", "DISABLED"))

_log = logging.getLogger("flask_idempotency")


class RedisDataKeys(RedisCapability):
    """Implement `capabilities.DataKeys`."""

    def read_keys(self, tid: bytes) -> TenantKeys:
        now, store, fields = self._look(tid)
        keys = tuple(_key(number, fields, now) for number in _numbers(fields))
        return TenantKeys(store, keys, whole_number(fields.get(_LAST_KEY, b"0")))

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        kid = key.kid.encode()
        if len(kid) > 255:
            raise ValueError(f"the id of a wrapping key has {len(kid)} bytes; the limit is 255")
        value = bytes((len(kid),)) + kid + key.wrapped
        keys = layout.facts_in(layout.number(tid)), layout.data_keys(tid)
        result = self._server.run(scripts.DATA_KEYS_ADD, keys, store, key.number, value, after)
        if result == b"CORRUPT":
            raise corrupt()
        return bool(result == b"DONE")

    def disable(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.DATA_KEYS_DISABLE, (layout.data_keys(tid),), number)

    def delete(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.DATA_KEYS_DELETE, (layout.data_keys(tid),), number)

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        return [(tid, key) for tid, key in self._all() if key.kid != kid]

    def sample(self, kid: str, *, limit: int) -> Sequence[tuple[bytes, DataKey]]:
        return list(islice(((tid, key) for tid, key in self._all() if key.kid == kid), limit))

    def shred(self, tid: bytes) -> int:
        return int(self._server.run(scripts.DATA_KEYS_SHRED, (layout.data_keys(tid),)))

    def count(self) -> Mapping[str, int]:
        return Counter(key.kid for _, key in self._all())

    def _all(self) -> Iterator[tuple[bytes, DataKey]]:
        """Yield every tenant's readable data keys, each once, and log how many are not readable."""
        unreadable = 0
        for names in scan_all(self._server, layout.every(b"k")):
            for tid in filter(None, map(layout.tid, names)):
                try:
                    now, _, fields = self._look(tid)
                except CorruptRecord:
                    unreadable += 1
                    continue
                for number in _numbers(fields):
                    try:
                        key = _key(number, fields, now)
                    except CorruptRecord:
                        unreadable += 1
                    else:
                        yield tid, key
        if unreadable:
            _log.error(
                "skipped %d corrupt data keys, or tenants' sets of data keys, in Redis: restore them, or the responses that "
                "they encrypt are lost",
                unreadable,
            )

    def _look(self, tid: bytes) -> tuple[int, bytes, dict[bytes, bytes]]:
        keys = layout.facts_in(layout.number(tid)), layout.data_keys(tid)
        now, store, pairs = self._server.run(scripts.DATA_KEYS_READ, keys, secrets.token_bytes(_ID_BYTES))
        return now, store, dict(zip(pairs[::2], pairs[1::2], strict=True))


def _numbers(fields: Mapping[bytes, bytes]) -> list[bytes]:
    """Return the fields that hold a data key, the lowest number first."""
    return sorted((field for field in fields if field.isdigit()), key=lambda field: (len(field), field))


def _key(number: bytes, fields: Mapping[bytes, bytes], now: int) -> DataKey:
    closed = fields.get(_DISABLED + number)
    closed_for = None if closed is None else (now - whole_number(closed)) / 1_000_000
    kept = fields[number]
    end = 1 + kept[0] if kept else 1
    if not end <= len(kept) <= end + LARGEST_WRAPPED:
        raise corrupt()
    return DataKey(whole_number(number), text_in(kept[1:end]), kept[end:], closed_for)


KEYS_AT_ONCE: Final = 2000
"""Keys that one SCAN of a tenant's page looks at: about a millisecond of the server's time."""
MOST_KEYS: Final = 20_000
"""Keys that a tenant's page looks at: some ten milliseconds."""

BATCH_BYTES = 1 << 20
"""Bytes per MGET: less than a millisecond of the server's time. A larger record gets an MGET alone."""


class RedisResponses(RedisCapability):
    """Implement `capabilities.Responses`.

    `scan` uses SCAN, so it may miss records if a replica replaces a primary. If you must not miss one, call `count`
    afterwards, and scan again.
    """

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        names, following = scan_page(self._server, layout.every(b"r", tid), after=after, count=min(limit, BATCH))

        def is_wanted(answer: Answer) -> bool:
            is_live = answer.record.remaining > 0 and tid in (None, answer.key.tid)
            return is_live and (other_than is None or kid_of(answer.record.payload) != other_than)

        wanted = [glanced for glanced in self._glanced(names) if is_wanted(glanced.answer)]
        return Page(tuple(self._told(filter(is_wanted, self._whole(wanted)))), after=following)

    def glance(self, *, after: bytes, limit: int, tid: bytes | None) -> Page:
        """Scan without reading the responses: their bytes are empty.

        A tenant may have few of many records. So look at as many keys as probably hold the page, and stop after
        `MOST_KEYS`, however few were found.
        """
        names, looked, count = dict[bytes, None](), 0, min(limit, BATCH)
        following: bytes | None = after
        while following is not None and looked < MOST_KEYS and (looked == 0 or 2 * len(names) < limit):
            found, following = scan_page(self._server, layout.every(b"r", tid), after=following, count=count)
            names.update(dict.fromkeys(found))
            looked += count
            wanted = (limit - len(names)) * looked // max(len(names), 1)
            count = max(min(wanted, KEYS_AT_ONCE), min(limit, BATCH))
        of_tenant = (each.answer for each in self._glanced(list(names)) if tid in (None, each.answer.key.tid))
        kept = (Answer(each.key, shown) for each in of_tenant if (shown := as_kept(each.record)) is not None)
        return Page(tuple(self._told(kept)), after=following)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        keys = layout.keys(key)
        facts = (int(old.success), old.status, payload_bytes(old), int(new.success), new.status, payload_bytes(new))
        number = 0 if new.sealed_by is None else new.sealed_by.number
        result = self._server.run(scripts.REPLACE_RESPONSE, keys, layout.name(keys), *facts, number)
        if result not in (b"DONE", b"OTHER"):
            raise refusal(result)
        return bool(result == b"DONE")

    def count(self) -> Mapping[str, int]:
        counts = Counter[str]()
        for names in scan_all(self._server, layout.every(b"r")):
            for glanced in self._glanced(names):
                payload = glanced.answer.record.payload
                counts[kid_of(payload)] += payload is None or payload.sealed_by != ERASED
        return counts

    def _glanced(self, names: Sequence[bytes]) -> Iterator[_Glanced]:
        """Yield the readable completed records under these names."""
        calls = [Call(list(group)) for _, group in groupby(sorted(names), layout.partition)]
        for call, (now, *found) in zip(calls, self._server.run_all(scripts.SCAN_COMPLETED, calls), strict=True):
            for key, size, data in zip(call.keys, found[::2], found[1::2], strict=True):
                # Skip a record that is too long: a claim reports it as corrupt.
                answer = _answer(key, data, now) if size <= LARGEST_BYTES else None
                if answer is not None:
                    yield _Glanced(key, size, now, answer)

    def _whole(self, glanced: Sequence[_Glanced]) -> Iterator[Answer]:
        """Read these records whole, a few at a time, because a long read blocks all other clients of the server."""
        for batch in _batches(glanced):
            found = self._server.execute("MGET", *(each.name for each in batch))
            for each, data in zip(batch, found, strict=True):
                answer = None if data is None else _answer(each.name, data, each.looked_at)
                if answer is not None:
                    yield answer

    def _told(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        erasures = ErasureCache(self._server)
        for answer in answers:
            yield Answer(answer.key, erasures.mark(answer.key.tid, answer.record))


@valueclass(frozen=True, slots=True)
class _Glanced:
    """A completed record without the bytes of its response."""

    name: bytes
    byte_size: int
    looked_at: int
    answer: Answer


def _batches(glanced: Sequence[_Glanced]) -> Iterator[list[_Glanced]]:
    """Yield batches of one partition and about `BATCH_BYTES` each."""
    for _, group in groupby(glanced, lambda each: layout.partition(each.name)):
        batch, size = list[_Glanced](), 0
        for each in group:
            if batch and size + each.byte_size > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(each)
            size += each.byte_size
        yield batch


def _answer(key: bytes, data: bytes, now: int) -> Answer | None:
    seen = seen_record(key, data, now)
    return Answer(seen.key, seen.record) if seen is not None and seen.record.state is State.COMPLETED else None

"""Tenants' data keys, in the same slot as the records that are sealed with them, and a scan of all responses."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, Answer, DataKey, Page, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord, DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Record, State, StoredPayload
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import LARGEST_BYTES, decode, payload_bytes, tid_of
from flask_idempotency.stores.redis.executor import ScriptExecutor, corrupt, whole_number

BATCH = 500
"""Keys that a server looks at for one answer: less than a millisecond of its time."""


class Scan:
    """Goes through the keys of a server, or of each primary of a Cluster in turn, as SCAN does.

    A key that is there from beginning to end is met at least once, as long as the same servers are there. Where a
    primary has been replaced meanwhile, or slots have moved, some may be passed over.
    """

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server

    def page(self, pattern: bytes, *, after: bytes, count: int) -> tuple[list[bytes], bytes | None]:
        """About `count` keys are looked at. What comes with them is where the next page begins; None after the last."""
        name, _, cursor = after.rpartition(b" ")
        nodes = self._server.primaries()
        names = [each for each, _ in nodes]
        at = names.index(name) if name in names else 0
        begin = int(cursor) if cursor and names[at] == name else 0
        following, keys = self._server.scan(begin, pattern, count, node=nodes[at][1])
        if following == 0:
            at += 1
        return keys, None if at == len(nodes) else b"%b %d" % (names[at], following)

    def all(self, pattern: bytes) -> Iterator[list[bytes]]:
        """All of them, in batches, some of which may be empty."""
        after: bytes | None = b""
        while after is not None:
            keys, after = self.page(pattern, after=after, count=BATCH)
            yield keys


_ID_BYTES = 16
_LAST_KEY, _ERASURE, _DISABLED = (layout.FIELDS[name].encode() for name in ("LAST_KEY", "ERASURE", "DISABLED"))

_log = logging.getLogger("flask_idempotency")


class RedisDataKeys:
    """Implements `capabilities.DataKeys`."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._scan = Scan(server)

    def read_keys(self, tid: bytes) -> TenantKeys:
        now, store, fields = self._look(tid)
        keys = tuple(_key(number, fields, now) for number in _numbers(fields))
        return TenantKeys(store, keys, whole_number(fields.get(_LAST_KEY, b"0")))

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        kid = key.kid.encode()
        if len(kid) > 255:
            raise ValueError("the id of a key has 255 bytes at most")
        kept = bytes((len(kid),)) + kid + key.wrapped
        keys = layout.memory(tid), layout.data_keys(tid)
        answer = self._server.run(scripts.DATA_KEYS_ADD, keys, store, key.number, kept, after)
        if answer == b"CORRUPT":
            raise corrupt()
        return bool(answer == b"DONE")

    def disable(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.DATA_KEYS_DISABLE, (layout.data_keys(tid),), number)

    def delete(self, tid: bytes, number: int) -> None:
        self._server.run(scripts.DATA_KEYS_DELETE, (layout.data_keys(tid),), number)

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        return [(tid, key) for tid, key in self._all() if key.kid != kid]

    def shred(self, tid: bytes) -> int:
        return int(self._server.run(scripts.DATA_KEYS_SHRED, (layout.data_keys(tid),)))

    def count(self) -> Mapping[str, int]:
        return Counter(key.kid for _, key in self._all())

    def _all(self) -> Iterator[tuple[bytes, DataKey]]:
        """Every tenant's data keys, as far as they can be read. SCAN may meet a tenant twice, and then it is told once."""
        unreadable, seen = 0, set[bytes]()
        for names in self._scan.all(layout.EVERY_TENANT_KEYS):
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
        now, store, told = self._server.run(scripts.DATA_KEYS_READ, keys, secrets.token_bytes(_ID_BYTES))
        return now, store, dict(zip(told[::2], told[1::2], strict=True))


class ErasureCache:
    """What the erasures of tenants mean for records, each looked up once."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._known = dict[bytes, bytes | None]()

    def told(self, tid: bytes, record: Record) -> Record:
        if record.payload is None:
            return record
        if tid not in self._known:
            self._known[tid] = self._server.ask("HGET", layout.data_keys(tid), _ERASURE)
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


def refused_for_want_of_a_key(answer: Any) -> DataKeyMissing | None:
    """What a script has said of the data key that a payload is sealed with, if that was in its way."""
    if answer == b"ERASED":
        return DataKeyMissing("the tenant's answers were erased since the key was first used", erased=True)
    if answer == b"KEYLESS":
        return DataKeyMissing("there is no open data key of this number", erased=False)
    return None


def _numbers(fields: Mapping[bytes, bytes]) -> list[bytes]:
    """The fields that hold a key: the lowest number first."""
    return sorted((field for field in fields if field.isdigit()), key=lambda field: (len(field), field))


def _key(number: bytes, fields: Mapping[bytes, bytes], now: int) -> DataKey:
    closed = fields.get(_DISABLED + number)
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


BATCH_BYTES = 1 << 20
"""Read in one go: less than a millisecond of a server's time. A longer answer is read alone."""


class RedisResponses:
    """Implements `capabilities.Responses`.

    A walk is one of SCAN: where a primary is replaced meanwhile it may miss some. Whoever must not miss one counts
    afterwards, and walks again.
    """

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._scan = Scan(server)

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        names, following = self._scan.page(layout.records_of(tid), after=after, count=min(limit, BATCH))

        def is_wanted(answer: Answer) -> bool:
            return _is_live(answer, tid) and (other_than is None or _kid(answer.record) != other_than)

        wanted = [glanced for glanced in self._glanced(names) if is_wanted(glanced.answer)]
        return Page(tuple(self._told(filter(is_wanted, self._whole(wanted)))), after=following)

    def glance(self, *, after: bytes, limit: int, tid: bytes | None) -> Page:
        """As `walk`, without the bytes of any answer: they are empty."""
        names, following = self._scan.page(layout.records_of(tid), after=after, count=min(limit, BATCH))
        answers = (glanced.answer for glanced in self._glanced(names))
        return Page(tuple(self._told(answer for answer in answers if _is_live(answer, tid))), after=following)

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        keys = layout.keys(key)
        facts = (int(old.success), old.status, payload_bytes(old), int(new.success), new.status, payload_bytes(new))
        number = 0 if new.sealed_by is None else new.sealed_by.number
        answer = self._server.run(scripts.REPLACE_RESPONSE, keys, layout.name(keys), *facts, number)
        if gone := refused_for_want_of_a_key(answer):
            raise gone
        if answer == b"CORRUPT":
            raise corrupt()
        return bool(answer == b"DONE")

    def count(self) -> Mapping[str, int]:
        seen = set[bytes]()
        counts = Counter[str]()
        for names in self._scan.all(layout.records_of(None)):
            for answer in (glanced.answer for glanced in self._glanced(names)):
                if answer.key.rid not in seen:
                    seen.add(answer.key.rid)
                    counts[_kid(answer.record)] += not _is_wiped(answer.record)
        return counts

    def _glanced(self, names: Sequence[bytes]) -> Iterator[_Glanced]:
        """The completed records under these names, as far as they can be read."""
        for _, group in groupby(sorted(names), layout.partition):
            keys = list(group)
            now, *found = self._server.run(scripts.SCAN_COMPLETED, keys)
            for key, size, data in zip(keys, found[::2], found[1::2], strict=True):
                # One that is too long is told as corrupt by a claim. It is not read here.
                answer = _answer(key, data, now) if size <= LARGEST_BYTES else None
                if answer is not None:
                    yield _Glanced(key, size, now, answer)

    def _whole(self, glanced: Sequence[_Glanced]) -> Iterator[Answer]:
        """What has become of these by now, a few at a time: a server that copies much keeps everybody else waiting."""
        for batch in _batches(glanced):
            found = self._server.ask("MGET", *(each.name for each in batch))
            for each, data in zip(batch, found, strict=True):
                answer = None if data is None else _answer(each.name, data, each.looked_at)
                if answer is not None:
                    yield answer

    def _told(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        erasures = ErasureCache(self._server)
        for answer in answers:
            yield Answer(answer.key, erasures.told(answer.key.tid, answer.record))


@dataclass(frozen=True, slots=True)
class _Glanced:
    """A completed record of which the answer's bytes were not read."""

    name: bytes
    byte_size: int
    looked_at: int
    answer: Answer


def _batches(glanced: Sequence[_Glanced]) -> Iterator[list[_Glanced]]:
    """Such that each is of one partition, and of about as many bytes as may be read in one go."""
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
    try:
        record = decode(data, now=now / 1_000_000)
    except CorruptRecord:
        return None
    rid = layout.rid(key)
    if rid is None or record.state is not State.COMPLETED:
        return None
    return Answer(StorageKey(rid, tid_of(data)), record)


def _is_live(answer: Answer, tid: bytes | None) -> bool:
    return answer.record.remaining > 0 and tid in (None, answer.key.tid)


def _is_wiped(record: Record) -> bool:
    return record.payload is not None and record.payload.sealed_by == ERASED


def _kid(record: Record) -> str:
    return "" if record.payload is None or record.payload.sealed_by is None else record.payload.sealed_by.kid

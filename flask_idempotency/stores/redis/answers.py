"""A walk through all answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from flask_idempotency.engine.capabilities import Answer, Page
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Payload, Record, State
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.record import LARGEST_BYTES, decode, payload_bytes, tid_of
from flask_idempotency.stores.redis.scan import BATCH, Scan
from flask_idempotency.stores.redis.server import Server, corrupt
from flask_idempotency.stores.redis.shelf import Erasures, refused_for_want_of_a_key

BATCH_BYTES = 1 << 20
"""Read in one go: less than a millisecond of a server's time. A longer answer is read alone."""


class RedisAnswers:
    """Implements `upkeep.Answers`.

    A walk is one of SCAN: where a primary is replaced meanwhile it may miss some. Whoever must not miss one counts
    afterwards, and walks again.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scan = Scan(server)

    def walk(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
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

    def replace(self, key: StorageKey, old: Payload, new: Payload) -> bool:
        keys = layout.keys(key)
        facts = (int(old.success), old.status, payload_bytes(old), int(new.success), new.status, payload_bytes(new))
        number = 0 if new.sealed_by is None else new.sealed_by.number
        answer = self._server.run(scripts.REPLACE, keys, layout.name(keys), *facts, number)
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
            now, *found = self._server.run(scripts.SURVEY, keys)
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
        erasures = Erasures(self._server)
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

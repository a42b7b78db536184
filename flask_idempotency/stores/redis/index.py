"""What the indexes of all partitions name: the records in flight or in quarantine, without a look at any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, Final

from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.server import Server

PARTITIONS_AT_ONCE: Final = 128
"""Asked in one round trip: eight are all of them, and each is over in a fraction of a millisecond."""

FIRST: Final = -(2**53)
LAST: Final = 2**53
"""Scores are milliseconds. An entry outside of these, an infinite one say, was not written by us, and is never met."""


@dataclass(frozen=True, slots=True, order=True)
class IndexEntry:
    """A record as an index names it."""

    partition: int
    score: int
    name: bytes


class Index:
    """One index of every partition.

    A page ends at an entry, and the next begins behind it: behind its score and its name, which hold when others
    leave the index or the entry itself does. What stays, or moves towards the end, is met at least once.
    """

    def __init__(self, server: Server, key: Callable[[int], bytes]) -> None:
        self._server = server
        self._key = key

    def page(
        self, *, after: bytes, limit: int, upto: int = LAST, only: int | None = None
    ) -> tuple[list[IndexEntry], bytes | None]:
        """Up to `limit` entries with scores up to this one, of one partition if it is named, and where the next begins."""
        begin, end = (0, layout.PARTITIONS) if only is None else (only, only + 1)
        place = _place(after) if after else IndexEntry(begin, 0, b"")
        entries = list[IndexEntry]()
        while place.partition < end and len(entries) < limit:
            left = limit - len(entries)
            more, place = self._rest(place, left, upto) if place.name else self._chunk(place.partition, end, left, upto)
            entries += more
        return entries, _cursor(place) if place.partition < end else None

    def first(self, *, upto: int, limit: int) -> list[IndexEntry]:
        """The entries with the lowest scores of all partitions, none of them above this one."""
        heads = list[IndexEntry]()
        for chunk in _chunks(0, layout.PARTITIONS):
            told = self._server.ask_all([self._range(partition, FIRST, upto, 1) for partition in chunk])
            heads += _entries(chunk, told)
        # No other partition has one of them: as many entries stand before its first.
        chosen = [head.partition for head in sorted(heads, key=_by_score)[:limit]]
        told = self._server.ask_all([self._range(partition, FIRST, upto, limit) for partition in chosen])
        return sorted(_entries(chosen, told), key=_by_score)[:limit]

    def all(self, partitions: Sequence[int]) -> list[IndexEntry]:
        """Everything that these partitions' indexes name."""
        told = self._server.ask_all([self._range(partition, FIRST, LAST, -1) for partition in partitions])
        return list(_entries(partitions, told))

    def _chunk(self, begin: int, end: int, limit: int, upto: int) -> tuple[list[IndexEntry], IndexEntry]:
        """Of some partitions that nothing was read of yet. They are counted first: most have nothing to read."""
        chunk = next(_chunks(begin, end))
        counts = self._server.ask_all([("ZCOUNT", self._key(partition), FIRST, upto) for partition in chunk])
        wanted, following, cut = dict[int, int](), chunk.stop, -1
        for partition, count in zip(chunk, counts, strict=True):
            if limit == 0:
                following = partition
                break
            if count:
                wanted[partition] = min(count, limit)
                limit -= wanted[partition]
                cut = partition if wanted[partition] < count else -1
        told = self._server.ask_all([self._range(each, FIRST, upto, count) for each, count in wanted.items()])
        entries = list(_entries(list(wanted), told))
        if entries and entries[-1].partition == cut:
            return entries, entries[-1]
        return entries, IndexEntry(following, 0, b"")

    def _rest(self, place: IndexEntry, limit: int, upto: int) -> tuple[list[IndexEntry], IndexEntry]:
        """Of a partition that a page has ended in."""
        # Scores of ours are whole. One that is not must not keep the page where it is for ever.
        passed = self._server.ask("ZCOUNT", self._key(place.partition), place.score, f"({place.score + 1}")
        told = self._server.ask_all([self._range(place.partition, place.score, upto, limit + passed)])
        entries = list(_entries([place.partition], told))
        fresh = sorted(entry for entry in entries if entry > place)
        if len(entries) < limit + passed and len(fresh) <= limit:
            return fresh, IndexEntry(place.partition + 1, 0, b"")
        return fresh[:limit], fresh[:limit][-1] if fresh else place

    def _range(self, partition: int, least: int, most: int, count: int) -> tuple[bytes | str | int, ...]:
        return "ZRANGEBYSCORE", self._key(partition), least, most, "WITHSCORES", "LIMIT", 0, count


def in_flight(partition: int) -> bytes:
    return layout.indexes_in(partition)[0]


def quarantined(partition: int) -> bytes:
    return layout.indexes_in(partition)[1]


def _chunks(begin: int, end: int) -> Iterator[range]:
    for first in range(begin, end, PARTITIONS_AT_ONCE):
        yield range(first, min(first + PARTITIONS_AT_ONCE, end))


def _entries(partitions: Sequence[int], told: Sequence[Any]) -> Iterator[IndexEntry]:
    for partition, answer in zip(partitions, told, strict=True):
        # With the newer protocol a name and its score come together.
        paired = bool(answer) and not isinstance(answer[0], bytes)
        pairs = answer if paired else zip(answer[::2], answer[1::2], strict=True)
        for name, score in pairs:
            yield IndexEntry(partition, floor(float(score)), name)


def _by_score(entry: IndexEntry) -> int:
    return entry.score


def _cursor(place: IndexEntry) -> bytes:
    return b"%d %d %b" % (place.partition, place.score, place.name)


def _place(cursor: bytes) -> IndexEntry:
    partition, score, name = cursor.split(b" ", 2)
    return IndexEntry(int(partition), int(score), name)

"""Find, resolve and release the records of lost workers. Redis itself removes expired records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import floor
from operator import attrgetter
from typing import Any, Final, NamedTuple

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord, UnfinishedCounts
from flask_idempotency.engine.keys import new_token
from flask_idempotency.engine.model import OnExpiry, State, StoredPayload
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.admin.data_keys import RedisResponses
from flask_idempotency.stores.redis.encoding import NUMBERS, completion
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor, milliseconds, refusal
from flask_idempotency.stores.redis.scan import ErasureCache, batches, seen_record
from flask_idempotency.stores.redis.scripts import Script

PARTITIONS_AT_ONCE: Final = 128
"""Partitions per round trip: eight cover all, and each takes a fraction of a millisecond."""

FIRST: Final = -(2**53)
LAST: Final = 2**53
"""Scores are milliseconds. The store never writes a score outside these limits, such as infinity, and never reads one."""


class IndexEntry(NamedTuple):
    """A record in an index."""

    partition: int
    score: int
    name: bytes


class Index:
    """One index over all partitions, read in pages.

    A page ends at an entry, and the next begins after its score and name. So the cursor holds if this entry or others
    leave the index. Pages return each entry that stays, or moves towards the end, at least once.
    """

    def __init__(self, server: ScriptExecutor, key: Callable[[int], bytes]) -> None:
        self._server = server
        self._key = key

    def page(
        self, *, after: bytes, limit: int, upto: int = LAST, only: int | None = None
    ) -> tuple[list[IndexEntry], bytes | None]:
        """Return up to `limit` entries with scores up to `upto`, and the next cursor. `only` selects one partition."""
        begin, end = (0, layout.PARTITIONS) if only is None else (only, only + 1)
        place = _place(after) if after else IndexEntry(begin, FIRST, b"")
        entries = list[IndexEntry]()
        while place.partition < end and len(entries) < limit:
            more, place = self._after(place, end, limit - len(entries), upto)
            entries += more
        return entries, _cursor(place) if place.partition < end else None

    def first(self, *, upto: int, limit: int) -> list[IndexEntry]:
        """Return the `limit` entries with the lowest scores of all partitions, none above `upto`."""
        heads = list[IndexEntry]()
        for chunk in _chunks(0, layout.PARTITIONS):
            replies = self._server.execute_all([self._range(partition, FIRST, upto, 1) for partition in chunk])
            heads += _entries(chunk, replies)
        # No other partition holds one of them: before its first entry come `limit` others.
        chosen = [head.partition for head in sorted(heads, key=attrgetter("score"))[:limit]]
        replies = self._server.execute_all([self._range(partition, FIRST, upto, limit) for partition in chosen])
        return sorted(_entries(chosen, replies), key=attrgetter("score"))[:limit]

    def all(self, partitions: Sequence[int]) -> list[IndexEntry]:
        """Return all entries of these partitions."""
        replies = self._server.execute_all([self._range(partition, FIRST, LAST, -1) for partition in partitions])
        return list(_entries(partitions, replies))

    def _after(self, place: IndexEntry, end: int, limit: int, upto: int) -> tuple[list[IndexEntry], IndexEntry]:
        """Return up to `limit` entries of some partitions, and the place that they end at."""
        chunk = next(_chunks(place.partition, end))
        least = {each: place.score if each == place.partition else FIRST for each in chunk}
        # Of the entries with the score of the place, some may stand before it. The store's scores are whole numbers, but a
        # fractional one must not stop the pages here for ever.
        equal = "ZCOUNT", self._key(place.partition), place.score, f"({place.score + 1}"
        passed = self._server.execute(*equal) if place.name else 0
        # Count first, because most partitions have none.
        counts = self._server.execute_all([("ZCOUNT", self._key(each), low, upto) for each, low in least.items()])
        wanted, left = dict[int, int](), limit + passed
        for each, count in zip(chunk, counts, strict=True):
            if count and left:
                # Not as many as were counted: an entry that has come since may stand before one that stays.
                wanted[each] = left + 1
                left -= min(count, left)
        replies = self._server.execute_all(
            [self._range(each, least[each], upto, most) for each, most in wanted.items()]
        )
        fresh, is_all = list[IndexEntry](), sum(counts) <= limit + passed
        for each, reply in zip(wanted, replies, strict=True):
            found = list(_entries([each], [reply]))
            fresh += sorted(entry for entry in found if entry > place)
            if len(found) == wanted[each]:
                is_all = False
                break
        if is_all and len(fresh) <= limit:
            return fresh, IndexEntry(chunk.stop, FIRST, b"")
        return fresh[:limit], fresh[:limit][-1] if fresh else place

    def _range(self, partition: int, least: int, most: int, count: int) -> tuple[bytes | str | int, ...]:
        return "ZRANGEBYSCORE", self._key(partition), least, most, "WITHSCORES", "LIMIT", 0, count


class RedisExpiry:
    """Implement `capabilities.Expiry`: Redis itself removes expired records, and the janitor their earlier responses."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._remembered = Index(server, layout.remembered_in)

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Remove expired responses from records that are remembered for longer.

        A record has a time to live, a minute more than its life, and `release` deletes it. A tenant's next new key drops
        its ended quota buckets; `reconcile` drops those of a tenant without new keys. Until then, no count includes them.
        """
        entries, _ = self._remembered.page(after=b"", limit=limit, upto=milliseconds(horizon))
        calls = [
            Call(
                (layout.remembered_in(batch[0].partition), *_records(batch)),
                (round(horizon * 1_000_000), *(entry.name for entry in batch)),
            )
            for batch in _batches(entries)
        ]
        return sum(self._server.run_all(scripts.REMOVE_RESPONSES, calls))


def in_flight(partition: int) -> bytes:
    return layout.indexes_in(partition)[0]


def quarantined(partition: int) -> bytes:
    return layout.indexes_in(partition)[1]


def _chunks(begin: int, end: int) -> Iterator[range]:
    for first in range(begin, end, PARTITIONS_AT_ONCE):
        yield range(first, min(first + PARTITIONS_AT_ONCE, end))


def _some(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the partitions that have entries, as many as are read at once."""
    some = [partition for partition, size in enumerate(sizes) if size]
    return batches(some, PARTITIONS_AT_ONCE, lambda _: None)


def _entries(partitions: Sequence[int], replies: Sequence[Any]) -> Iterator[IndexEntry]:
    for partition, reply in zip(partitions, replies, strict=True):
        # RESP3 returns pairs of name and score, RESP2 a flat list.
        paired = bool(reply) and not isinstance(reply[0], bytes)
        pairs = reply if paired else zip(reply[::2], reply[1::2], strict=True)
        for name, score in pairs:
            yield IndexEntry(partition, floor(float(score)), name)


def _cursor(place: IndexEntry) -> bytes:
    return b"%d %d %b" % (place.partition, place.score, place.name)


def _place(cursor: bytes) -> IndexEntry:
    partition, score, name = cursor.split(b" ", 2)
    return IndexEntry(int(partition), int(score), name)


RECORDS_AT_ONCE: Final = 200
"""Records per run of a script: about a millisecond, in which the server answers no other client."""

SAMPLED: Final = 2000
"""Keys that an estimate is made from. It is off by half a percent, and takes about a millisecond of the server's time."""

FREED_MS: Final = 600_000
"""A client may repeat `force_release` for this long: it gives up after seconds, or after minutes if it was frozen."""


class RedisRecovery:
    """Implement `capabilities.Recovery`.

    The scripts remove an index entry if its record is gone or has another state. Every method raises `CorruptRecord` if
    an index has the wrong type, because then no one can list the unfinished records.
    """

    def __init__(self, server: ScriptExecutor, answers: RedisResponses) -> None:
        self._server = server
        self._answers = answers
        self._in_flight = Index(server, in_flight)
        self._quarantined = Index(server, quarantined)

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        entries, following = self._in_flight.page(after=after, limit=limit, upto=milliseconds(horizon))
        stale = (
            found
            for found in self._list_by_state(State.PROCESSING, entries)
            if found.record.remaining <= 0 and found.record.deadline <= horizon
        )
        return RecordPage(tuple(stale), following)

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        facts = seen.record.token, milliseconds(seen.record.deadline), round(horizon * 1_000_000)
        keys = layout.keys(seen.key)
        return bool(self._server.run(scripts.QUARANTINE_EXPIRED, keys, layout.name(keys), *facts) == b"DONE")

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        latest = milliseconds(min(horizon, self._server.now()))
        # At least the unit of a turn: otherwise this loop would return the same record again.
        pauses = max(milliseconds(least), 1), max(milliseconds(most), 1)
        due, others = list[SeenRecord](), set[IndexEntry]()
        while len(due) < limit:
            # Records of other owners keep their turns, so they stay at the head of the index.
            wanted = limit - len(due) + len(others)
            entries = self._quarantined.first(upto=latest, limit=wanted)
            fresh = [each for each in entries if each not in others]
            results = list(self._run_each(scripts.NEXT_FOR_RESOLVER, fresh, latest, *pauses, owner or b""))
            turns = {layout.record_in(each.partition, each.name): each for each in fresh}
            # A first turn is never later than the end of the lease; all others are.
            due += [
                replace(found, returned_before=turn.score > milliseconds(found.record.deadline))
                for found in self._found(State.QUARANTINED, results)
                for turn in (turns[layout.keys(found.key)[0]],)
            ]
            others |= {turns[key] for key, data, _ in results if data == b"OTHER"}
            if len(entries) < wanted:
                break
        return due

    def resolve(
        self,
        seen: SeenRecord,
        *,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None = None,
    ) -> bool:
        as_seen = seen.record.token, milliseconds(seen.record.deadline), NUMBERS[seen.record.state]
        keys = layout.keys_with_memory(seen.key)
        lives = completion(payload, keep=keep, remember=remember)
        result = self._server.run(scripts.RESOLVE, keys, layout.name(keys), token, *as_seen, *lives)
        if result in (b"DONE", b"OTHER"):
            return bool(result == b"DONE")
        raise refusal(result)

    def force_release(self, seen: SeenRecord) -> bool:
        record = seen.record
        facts = NUMBERS[record.state], record.token, milliseconds(record.deadline)
        keys = layout.keys(seen.key)
        # A new token identifies this call: if its reply is lost, a repetition finds that this call did it.
        concerned = *keys, layout.freed(seen.key), layout.journal(seen.key)
        taken_over = int(record.on_expiry is OnExpiry.TAKEOVER)
        arguments = *facts, new_token(), FREED_MS, taken_over
        result = self._server.run(scripts.FORCE_RELEASE, concerned, layout.name(keys), *arguments)
        return bool(result == b"DONE")

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        if state is State.COMPLETED:
            page = self._answers.glance(after=after, limit=limit, tid=tid)
            return RecordPage(tuple(SeenRecord(answer.key, answer.record) for answer in page.answers), page.after)
        named = self._in_flight if state is State.PROCESSING else self._quarantined
        only = None if tid is None else layout.number(tid)
        entries, following = named.page(after=after, limit=limit, only=only)
        listed = self._list_by_state(state, entries)
        return RecordPage(tuple(found for found in listed if tid in (None, found.key.tid)), following)

    def counts(self) -> UnfinishedCounts:
        """Count the index entries, and read the deadlines of quarantined records: a millisecond for some hundreds."""
        # Most partitions have neither, and a run of a script takes as long as twenty of these.
        keys = [key for partition in range(layout.PARTITIONS) for key in layout.indexes_in(partition)]
        sizes = self._server.execute_all([("ZCARD", key) for key in keys])
        quarantined = sum(sizes[1::2])
        busy = lapsed = lapsed_for = quarantined_for = 0
        for chunk in _some(sizes[::2]):
            calls = [Call(layout.indexes_in(partition)) for partition in chunk]
            for count, ended, longest, _ in self._server.run_all(scripts.COUNT_UNFINISHED, calls):
                busy, lapsed, lapsed_for = busy + count, lapsed + ended, max(lapsed_for, longest)
        for chunk in _some(sizes[1::2]):
            calls = [Call(_records(batch)) for batch in _batches(self._quarantined.all(chunk))]
            quarantined_for = max([quarantined_for, *self._server.run_all(scripts.OLDEST_QUARANTINED, calls)])
        return UnfinishedCounts(
            in_flight=busy - lapsed,
            lapsed=lapsed,
            quarantined=quarantined,
            lapsed_for=lapsed_for / 1_000_000 if lapsed else None,
            quarantined_for=quarantined_for / 1_000_000 if quarantined else None,
        )

    def about_completed(self) -> int | None:
        """Estimate it from a sample: from how many of some hundred keys are completed records, and how many keys there are.

        SCAN goes through the keys in the order of their hashes, which is random. A small Redis is counted. None in a Cluster:
        its servers go through one slot after the other, so a sample of one says little about all.
        """
        ((_, node), *others) = self._server.primaries()
        if node is not None or others:
            return None
        following, keys = self._server.scan(0, b"*", SAMPLED)
        found = [key for key in keys if layout.is_record(key)]
        completed: int = self._server.run(scripts.COUNT_COMPLETED, found)
        if following == 0:
            return completed
        return round(completed / len(keys) * self._server.execute("DBSIZE")) if keys else None

    def _list_by_state(self, state: State, entries: Sequence[IndexEntry]) -> Iterator[SeenRecord]:
        return self._found(state, self._run_each(scripts.LIST_BY_STATE, entries, NUMBERS[state]))

    def _run_each(
        self, script: Script, entries: Sequence[IndexEntry], *arguments: int | bytes
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """Run this script on each entry. Yield the record's key, the script's result and the time, in order."""
        calls = [
            Call(
                (*layout.indexes_in(batch[0].partition), *_records(batch)),
                (*arguments, *(entry.name for entry in batch)),
            )
            for batch in _batches(entries)
        ]
        for call, (now, *values) in zip(calls, self._server.run_all(script, calls), strict=True):
            yield from ((key, data, now) for key, data in zip(call.keys[2:], values, strict=True))

    def _found(self, state: State, results: Iterable[tuple[bytes, bytes, int]]) -> Iterator[SeenRecord]:
        erasures = ErasureCache(self._server)
        for key, data, now in results:
            found = seen_record(key, data, now) if data else None
            if found is not None and found.record.state is state:
                yield SeenRecord(found.key, erasures.mark(found.key.tid, found.record))


def _batches(entries: Sequence[IndexEntry]) -> Iterator[list[IndexEntry]]:
    return batches(entries, RECORDS_AT_ONCE, lambda entry: entry.partition)


def _records(batch: Sequence[IndexEntry]) -> list[bytes]:
    return [layout.record_in(entry.partition, entry.name) for entry in batch]

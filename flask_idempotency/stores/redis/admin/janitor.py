"""The log and the locks of maintenance tasks, and recovery. Redis itself removes what has expired."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import floor
from typing import Any, Final

from flask_idempotency.engine.capabilities import (
    LONGEST_LOCK_SECONDS,
    RecordPage,
    SeenRecord,
    TaskReport,
    UnfinishedCounts,
)
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import State, StoredPayload
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.admin.data_keys import ErasureCache, RedisResponses, refused_for_want_of_a_key
from flask_idempotency.stores.redis.encoding import NUMBERS, completion, decode, tid_of
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor, corrupt, whole_number
from flask_idempotency.stores.redis.scripts import Script


class RedisTaskLog:
    """Implements `capabilities.TaskLog`. A Redis that is full still writes it: what is done must be known then too."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server

    def now(self) -> float:
        return self._server.now()

    def report(self, chore: str, report: str) -> None:
        self._server.run(scripts.TASK_REPORT, (layout.TASKS,), chore.encode(), report.encode())

    def reports(self) -> Mapping[str, TaskReport]:
        now, told = self._server.run(scripts.TASK_REPORTS, (layout.TASKS,))
        notes = dict(zip(told[::2], told[1::2], strict=True))
        return {_name(chore): _entry(note, now) for chore, note in notes.items()}

    def lock(self, chore: str, token: bytes, *, lease: float) -> bool:
        longest = microseconds(LONGEST_LOCK_SECONDS)
        answer = self._server.run(scripts.TASK_LOCK, (layout.task_lock(chore),), token, microseconds(lease), longest)
        return bool(answer == b"TAKEN")

    def unlock(self, chore: str, token: bytes) -> None:
        self._server.run(scripts.TASK_UNLOCK, (layout.task_lock(chore),), token)


class RedisExpiry:
    """Implements `capabilities.Expiry`: there is never anything to remove."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        """0. Redis drops an answer by its time to live, a minute after its end, and a released key at once.

        Indexes hold only what is not completed. The buckets of a tenant's ledger that have ended are dropped by its next
        new key, and those of a tenant that has none any more by `reconcile`; until then nobody counts them.
        """
        return 0


def _entry(note: bytes, now: int) -> TaskReport:
    at, _, report = note.partition(b" ")
    try:
        return TaskReport(max(now - whole_number(at), 0) / 1_000_000, report.decode())
    except UnicodeDecodeError as error:
        raise corrupt() from error


def _name(chore: bytes) -> str:
    try:
        return chore.decode()
    except UnicodeDecodeError as error:
        raise corrupt() from error


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

    def __init__(self, server: ScriptExecutor, key: Callable[[int], bytes]) -> None:
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


RECORDS_AT_ONCE: Final = 200
"""Looked at by one run of a script: about a millisecond of a server's time, in which nobody else is answered."""

FREED_MS: Final = 600_000
"""For how long a call that frees may be repeated: a client gives up after seconds, and one that has been frozen since after
minutes."""


class RedisRecovery:
    """Implements `capabilities.Recovery`.

    What the indexes name and is not there, or has another state by now, is taken out of them on the way. Raises
    `CorruptRecord` where an index is of another type than ours: nobody can tell what is in flight there.
    """

    def __init__(self, server: ScriptExecutor, answers: RedisResponses) -> None:
        self._server = server
        self._answers = answers
        self._in_flight = Index(server, in_flight)
        self._quarantined = Index(server, quarantined)

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        entries, following = self._in_flight.page(after=after, limit=limit, upto=_ms(horizon))

        def is_stale(found: SeenRecord) -> bool:
            return found.record.remaining <= 0 and found.record.deadline <= horizon

        return RecordPage(tuple(filter(is_stale, self._met(State.PROCESSING, entries))), following)

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        facts = seen.record.token, _ms(seen.record.deadline), round(horizon * 1_000_000)
        return bool(self._run(scripts.QUARANTINE_EXPIRED, seen.key, *facts) == b"DONE")

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        latest = _ms(min(horizon, self._server.now()))
        # Not less than the unit of a turn: the same one would come again at once.
        pauses = max(_ms(least), 1), max(_ms(most), 1)
        due, others = list[SeenRecord](), set[IndexEntry]()
        while len(due) < limit:
            # Those of others keep their turns, and so stand in the way of ours.
            wanted = limit - len(due) + len(others)
            entries = self._quarantined.first(upto=latest, limit=wanted)
            asked = [each for each in entries if each not in others]
            given = list(self._ask(scripts.NEXT_FOR_RESOLVER, asked, latest, *pauses, owner or b""))
            due += self._turns(entries, iter(given))
            left = {key for key, data, _ in given if data == b"OTHER"}
            others |= {each for each in entries if layout.record_in(each.partition, each.name) in left}
            if len(entries) < wanted:
                break
        return due

    def resolve(self, seen: SeenRecord, *, token: bytes, payload: StoredPayload, keep: float) -> bool:
        as_seen = seen.record.token, _ms(seen.record.deadline), NUMBERS[seen.record.state]
        answer = self._run(scripts.RESOLVE, seen.key, token, *completion(payload, keep=keep), *as_seen)
        if answer in (b"DONE", b"OTHER"):
            return bool(answer == b"DONE")
        raise refused_for_want_of_a_key(answer) or corrupt()

    def force_release(self, seen: SeenRecord) -> bool:
        record = seen.record
        facts = NUMBERS[record.state], record.token, _ms(record.deadline)
        keys = layout.keys(seen.key)
        # A token of its own, so that a reply that was lost is not taken for somebody else's work.
        told = self._server.run(
            scripts.FORCE_RELEASE, (*keys, layout.freed(seen.key)), layout.name(keys), *facts, new_token(), FREED_MS
        )
        return bool(told == b"DONE")

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        if state is State.COMPLETED:
            page = self._answers.glance(after=after, limit=limit, tid=tid)
            return RecordPage(tuple(SeenRecord(answer.key, answer.record) for answer in page.answers), page.after)
        named = self._in_flight if state is State.PROCESSING else self._quarantined
        only = None if tid is None else layout.number(tid)
        entries, following = named.page(after=after, limit=limit, only=only)
        met = self._met(state, entries)
        return RecordPage(tuple(found for found in met if tid in (None, found.key.tid)), following)

    def counts(self) -> UnfinishedCounts:
        """Counts what the indexes name. Of what is quarantined every record's deadline is read as well: a millisecond
        for some hundreds."""
        busy = lapsed = quarantined = lapsed_for = quarantined_for = 0
        for begin in range(0, layout.PARTITIONS, PARTITIONS_AT_ONCE):
            chunk = range(begin, min(begin + PARTITIONS_AT_ONCE, layout.PARTITIONS))
            told = self._server.run_all(scripts.COUNT_UNFINISHED, [Call(layout.indexes_in(each)) for each in chunk])
            busy += sum(count for count, *_ in told)
            lapsed += sum(count for _, count, *_ in told)
            lapsed_for = max(lapsed_for, *(longest for _, _, longest, _ in told))
            with_some = [each for each, (*_, count) in zip(chunk, told, strict=True) if count]
            quarantined += sum(count for *_, count in told)
            quarantined_for = max(quarantined_for, self._longest(with_some))
        return UnfinishedCounts(
            in_flight=busy - lapsed,
            lapsed=lapsed,
            quarantined=quarantined,
            lapsed_for=lapsed_for / 1_000_000 if lapsed else None,
            quarantined_for=quarantined_for / 1_000_000 if quarantined else None,
        )

    def _turns(self, entries: Sequence[IndexEntry], told: Iterator[tuple[bytes, bytes, int]]) -> Iterator[SeenRecord]:
        """Those that were given. The first turn of each is no later than the end of its lease, and all others are."""
        turns = {layout.record_in(entry.partition, entry.name): entry.score for entry in entries}
        for found in self._found(State.QUARANTINED, told):
            turn = turns[layout.keys(found.key)[0]]
            yield replace(found, asked=turn > _ms(found.record.deadline))

    def _longest(self, partitions: Sequence[int]) -> int:
        batches = list(_batches(self._quarantined.all(partitions)))
        told = self._server.run_all(scripts.OLDEST_QUARANTINED, [Call(_records(batch)) for batch in batches])
        return max(told, default=0)

    def _met(self, state: State, entries: Sequence[IndexEntry]) -> Iterator[SeenRecord]:
        return self._found(state, self._ask(scripts.LIST_BY_STATE, entries, NUMBERS[state]))

    def _ask(
        self, script: Script, entries: Sequence[IndexEntry], *arguments: int | bytes
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """The keys of records, what the script tells of each, and when that was. In their order."""
        batches = list(_batches(entries))
        calls = [
            Call(
                (*layout.indexes_in(batch[0].partition), *_records(batch)),
                (*arguments, *(entry.name for entry in batch)),
            )
            for batch in batches
        ]
        for call, (now, *told) in zip(calls, self._server.run_all(script, calls), strict=True):
            yield from ((key, data, now) for key, data in zip(call.keys[2:], told, strict=True))

    def _found(self, state: State, told: Iterator[tuple[bytes, bytes, int]]) -> Iterator[SeenRecord]:
        erasures = ErasureCache(self._server)
        for key, data, now in told:
            found = _read(key, data, now) if data else None
            if found is not None and found.record.state is state:
                yield SeenRecord(found.key, erasures.told(found.key.tid, found.record))

    def _run(self, script: Script, key: StorageKey, *arguments: bytes | int) -> Any:
        keys = layout.keys(key)
        return self._server.run(script, keys, layout.name(keys), *arguments)


def _read(key: bytes, data: bytes, now: int) -> SeenRecord | None:
    try:
        record = decode(data, now=now / 1_000_000)
    except CorruptRecord:
        return None
    rid = layout.rid(key)
    return None if rid is None else SeenRecord(StorageKey(rid, tid_of(data)), record)


def _batches(entries: Sequence[IndexEntry]) -> Iterator[list[IndexEntry]]:
    """Each of one partition."""
    for _, group in groupby(entries, lambda entry: entry.partition):
        of_one = list(group)
        for begin in range(0, len(of_one), RECORDS_AT_ONCE):
            yield of_one[begin : begin + RECORDS_AT_ONCE]


def _records(batch: Sequence[IndexEntry]) -> list[bytes]:
    return [layout.record_in(entry.partition, entry.name) for entry in batch]


def _ms(seconds: float) -> int:
    return round(seconds * 1_000_000) // 1000

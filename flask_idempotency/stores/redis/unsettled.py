"""Records that are not completed, and what others than their owners may do with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from flask_idempotency.engine.capabilities import Found, Sheet, UnfinishedCounts
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import Payload, State
from flask_idempotency.stores.redis import index, layout, scripts
from flask_idempotency.stores.redis.answers import RedisAnswers
from flask_idempotency.stores.redis.completion import completion
from flask_idempotency.stores.redis.index import PARTITIONS_AT_ONCE, Index, IndexEntry
from flask_idempotency.stores.redis.record import NUMBERS, decode, tid_of
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.redis.server import Call, Server, corrupt
from flask_idempotency.stores.redis.shelf import Erasures, refused_for_want_of_a_key

RECORDS_AT_ONCE: Final = 200
"""Looked at by one run of a script: about a millisecond of a server's time, in which nobody else is answered."""

FREED_MS: Final = 600_000
"""For how long a call that frees may be repeated: a client gives up after seconds, and one that has been frozen since after
minutes."""


class RedisUnsettled:
    """Implements `unsettled.Unsettled`.

    What the indexes name and is not there, or has another state by now, is taken out of them on the way. Raises
    `CorruptRecord` where an index is of another type than ours: nobody can tell what is in flight there.
    """

    def __init__(self, server: Server, answers: RedisAnswers) -> None:
        self._server = server
        self._answers = answers
        self._in_flight = Index(server, index.in_flight)
        self._quarantined = Index(server, index.quarantined)

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        entries, following = self._in_flight.page(after=after, limit=limit, upto=_ms(horizon))

        def is_stale(found: Found) -> bool:
            return found.record.remaining <= 0 and found.record.deadline <= horizon

        return Sheet(tuple(filter(is_stale, self._met(State.PROCESSING, entries))), following)

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        facts = seen.record.token, _ms(seen.record.deadline), round(horizon * 1_000_000)
        return bool(self._run(scripts.LAPSE, seen.key, *facts) == b"DONE")

    def due(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[Found]:
        latest = _ms(min(horizon, self._server.now()))
        # Not less than the unit of a turn: the same one would come again at once.
        pauses = max(_ms(least), 1), max(_ms(most), 1)
        due, others = list[Found](), set[IndexEntry]()
        while len(due) < limit:
            # Those of others keep their turns, and so stand in the way of ours.
            wanted = limit - len(due) + len(others)
            entries = self._quarantined.first(upto=latest, limit=wanted)
            given = list(
                self._ask(scripts.DUE, [each for each in entries if each not in others], latest, *pauses, owner or b"")
            )
            due += self._turns(entries, iter(given))
            left = {key for key, data, _ in given if data == b"OTHER"}
            others |= {each for each in entries if layout.record_in(each.partition, each.name) in left}
            if len(entries) < wanted:
                break
        return due

    def settle(self, seen: Found, *, token: bytes, payload: Payload, keep: float) -> bool:
        as_seen = seen.record.token, _ms(seen.record.deadline), NUMBERS[seen.record.state]
        answer = self._run(scripts.SETTLE, seen.key, token, *completion(payload, keep=keep), *as_seen)
        if answer in (b"DONE", b"OTHER"):
            return bool(answer == b"DONE")
        raise refused_for_want_of_a_key(answer) or corrupt()

    def free(self, seen: Found) -> bool:
        record = seen.record
        facts = NUMBERS[record.state], record.token, _ms(record.deadline)
        keys = layout.keys(seen.key)
        # A token of its own, so that a reply that was lost is not taken for somebody else's work.
        told = self._server.run(
            scripts.FREE, (*keys, layout.freed(seen.key)), layout.name(keys), *facts, new_token(), FREED_MS
        )
        return bool(told == b"DONE")

    def walk(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> Sheet:
        if state is State.COMPLETED:
            page = self._answers.glance(after=after, limit=limit, tid=tid)
            return Sheet(tuple(Found(answer.key, answer.record) for answer in page.answers), page.after)
        named = self._in_flight if state is State.PROCESSING else self._quarantined
        only = None if tid is None else layout.number(tid)
        entries, following = named.page(after=after, limit=limit, only=only)
        met = self._met(state, entries)
        return Sheet(tuple(found for found in met if tid in (None, found.key.tid)), following)

    def standing(self) -> UnfinishedCounts:
        """Counts what the indexes name. Of what is quarantined every record's deadline is read as well: a millisecond
        for some hundreds."""
        busy = lapsed = quarantined = lapsed_for = quarantined_for = 0
        for begin in range(0, layout.PARTITIONS, PARTITIONS_AT_ONCE):
            chunk = range(begin, min(begin + PARTITIONS_AT_ONCE, layout.PARTITIONS))
            told = self._server.run_all(scripts.STANDING, [Call(layout.indexes_in(each)) for each in chunk])
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

    def _turns(self, entries: Sequence[IndexEntry], told: Iterator[tuple[bytes, bytes, int]]) -> Iterator[Found]:
        """Those that were given. The first turn of each is no later than the end of its lease, and all others are."""
        turns = {layout.record_in(entry.partition, entry.name): entry.score for entry in entries}
        for found in self._found(State.QUARANTINED, told):
            turn = turns[layout.keys(found.key)[0]]
            yield replace(found, asked=turn > _ms(found.record.deadline))

    def _longest(self, partitions: Sequence[int]) -> int:
        batches = list(_batches(self._quarantined.all(partitions)))
        told = self._server.run_all(scripts.LONGEST, [Call(_records(batch)) for batch in batches])
        return max(told, default=0)

    def _met(self, state: State, entries: Sequence[IndexEntry]) -> Iterator[Found]:
        return self._found(state, self._ask(scripts.MEET, entries, NUMBERS[state]))

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

    def _found(self, state: State, told: Iterator[tuple[bytes, bytes, int]]) -> Iterator[Found]:
        erasures = Erasures(self._server)
        for key, data, now in told:
            found = _read(key, data, now) if data else None
            if found is not None and found.record.state is state:
                yield Found(found.key, erasures.told(found.key.tid, found.record))

    def _run(self, script: Script, key: StorageKey, *arguments: bytes | int) -> Any:
        keys = layout.keys(key)
        return self._server.run(script, keys, layout.name(keys), *arguments)


def _read(key: bytes, data: bytes, now: int) -> Found | None:
    try:
        record = decode(data, now=now / 1_000_000)
    except CorruptRecord:
        return None
    rid = layout.rid(key)
    return None if rid is None else Found(StorageKey(rid, tid_of(data)), record)


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

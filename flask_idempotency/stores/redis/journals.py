"""Keep the steps of requests and their results in Redis: one journal for each record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.journal import (
    EMPTY,
    NEVER_RESUMED,
    Journal,
    JournalWrite,
    StepAnswer,
    StepPage,
    SweptJournals,
)
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, State, StoredPayload, kid_of
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import completion, duration, reason_bytes
from flask_idempotency.stores.redis.executor import ScriptExecutor, milliseconds
from flask_idempotency.stores.redis.scan import BATCH, ErasureCache, batches, scan_all, scan_page
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.redis.step_encoding import (
    decode_entries,
    decode_entry,
    decode_journal,
    fence_bytes,
    step_arguments,
    step_bytes,
)

JOURNALS_AT_ONCE: Final = 20
"""Journals per run of a script: a journal has up to 1 MiB, and the server answers no other client while a script reads."""


class RedisJournals:
    """Implement `journal.Journals`. Every write is one script, and one round trip."""

    def __init__(self, server: ScriptExecutor, run_as_owner: Callable[..., Any]) -> None:
        """`run_as_owner` is `RedisStore._run_as_owner`."""
        self._server = server
        self._run_as_owner = run_as_owner

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        facts = fence_bytes(fence), b"%d" % writing.number, duration(lease)
        keys = layout.keys_with_journal(key)
        self._run_as_owner(scripts.WRITE_STEPS, keys, token, *facts, *_changes(writing))

    def recall(self, key: StorageKey, token: bytes, *, fence: int) -> Journal:
        keys = layout.keys_with_journal(key)
        return decode_journal(self._run_as_owner(scripts.READ_STEPS, keys, token, fence_bytes(fence), done=()))

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        keys = layout.keys_with_journal(key) if remember is None else layout.keys_with_memory(key)
        self._run_as_owner(scripts.COMPLETE, keys, token, *completion(payload, keep=keep, remember=remember))

    def read(self, key: StorageKey) -> Journal:
        keys = layout.keys_with_journal(key)
        found = self._run_as_owner(scripts.READ_STEPS, keys, b"", b"", done=(b"ABSENT",))
        return decode_journal(found) if isinstance(found, list) else EMPTY

    def resume(self, seen: SeenRecord, journal: Journal, *, token: bytes, writing: JournalWrite) -> bool:
        if seen.record.state is not State.QUARANTINED or not journal.complete or not journal.entries:
            return False
        as_seen = seen.record.token, milliseconds(seen.record.deadline), fence_bytes(journal.fence), journal.write
        return self._changed(scripts.RESUME_STEPS, seen.key, token, *as_seen, *_changes(writing))

    def give_up(self, seen: SeenRecord, *, horizon: float) -> bool:
        if seen.record.state is not State.PROCESSING:
            return False
        as_seen = seen.record.token, milliseconds(seen.record.deadline), round(horizon * 1_000_000)
        return self._changed(scripts.GIVE_UP_STEPS, seen.key, *as_seen, reason_bytes(NEVER_RESUMED))

    def walk(
        self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None
    ) -> StepPage:
        names, following = scan_page(self._server, layout.every(b"s", tid), after=after, count=min(limit, BATCH))
        return StepPage(
            tuple(
                answer
                for answer in self._answers(names)
                if tid in (None, answer.key.tid) and (other_than is None or kid_of(answer.entry.payload) != other_than)
            ),
            following,
        )

    def replace(self, key: StorageKey, step: bytes, old: StoredPayload, new: StoredPayload) -> bool:
        data = self._server.execute("HGET", layout.journal(key), step)
        entry = None if data is None else decode_entry(step, data)
        if entry is None or entry.payload != old:
            return False
        changed = replace(entry, payload=new)
        _, _, size, number, _ = step_arguments(changed)
        return self._changed(scripts.REPLACE_STEP, key, step, data, size, number, step_bytes(changed))

    def count(self) -> Mapping[str, int]:
        counts = Counter[str]()
        for names in scan_all(self._server, layout.every(b"s")):
            for answer in self._answers(names):
                payload = answer.entry.payload
                counts[kid_of(payload)] += payload is not None and payload.sealed_by != ERASED
        return counts

    def sweep(self, *, after: bytes = b"", limit: int) -> SweptJournals:
        names, following = scan_page(self._server, layout.every(b"s"), after=after, count=min(limit, BATCH))
        removed = sum(self._server.run(scripts.SWEEP_JOURNALS, _pairs(batch)) for batch in _batches(names))
        return SweptJournals(removed, following)

    def _answers(self, names: Sequence[bytes]) -> Iterator[StepAnswer]:
        """Yield every readable payload of these journals."""
        erasures = ErasureCache(self._server)
        for batch in _batches(names):
            for name, found in zip(batch, self._server.run(scripts.SCAN_STEPS, _pairs(batch)), strict=True):
                rid = layout.rid(name)
                if rid is None or not isinstance(found, list):
                    continue
                tid, token, fingerprint, requested_ms, fields = found
                erasure = erasures.of(tid)
                try:
                    entries = decode_entries(fields)
                except CorruptRecord:
                    continue
                for entry in entries:
                    if entry.payload is not None:
                        erased = erasure is not None and erasure.covers(entry.payload, requested_ms=requested_ms)
                        yield StepAnswer(StorageKey(rid, tid), token, fingerprint, entry, erased)

    def _changed(self, script: Script, key: StorageKey, *arguments: bytes | int) -> bool:
        """Run a script that changes a record or its journal as they were seen. Return False if they have changed."""
        keys = layout.keys_with_journal(key)
        return bool(self._run_as_owner(script, keys, *arguments, done=(b"DONE", b"OTHER")) == b"DONE")


def _changes(writing: JournalWrite) -> tuple[bytes, ...]:
    """Return what a write changes, as the last arguments of `write_steps.lua` and `resume_steps.lua`."""
    return (
        b"1" if writing.in_doubt else b"0",
        b"%d" % writing.steps,
        b"%d" % len(writing.withdraw),
        *writing.withdraw,
        *chain.from_iterable(map(step_arguments, writing.enter)),
    )


def _batches(names: Sequence[bytes]) -> Iterator[list[bytes]]:
    return batches(sorted(names), JOURNALS_AT_ONCE, layout.partition)


def _pairs(journals: Sequence[bytes]) -> list[bytes]:
    """Return the keys of their records and of the journals, one after the other."""
    return [key for journal in journals for key in (layout.record_of_journal(journal), journal)]

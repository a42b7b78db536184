"""Keep the steps of requests and their results in this process's memory. See `engine.journal.Journals`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.journal import (
    EMPTY,
    NEVER_RESUMED,
    Entry,
    Journal,
    JournalWrite,
    StepAnswer,
    StepPage,
    StepState,
    SweptJournals,
)
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, ERASED, LAPSED, OnExpiry, Record, State, StoredPayload, kid_of
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.memory.admin import KeptJournal, MemoryRecords


class MemoryJournals:
    """Implement `journal.Journals`."""

    def __init__(self, shared: MemoryRecords, *, complete: Callable[..., None]) -> None:
        self._shared = shared
        self.complete: Callable[..., None] = complete
        """`MemoryStore.complete`, which drops the journal with the record's other facts."""

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        seconds = microseconds(lease) / 1_000_000
        with self._shared.moment() as now:
            record = self._held(key, token, fence, now)
            if record.state is State.QUARANTINED and record.reason != LAPSED:
                raise LeaseLost("the record is quarantined")
            before = self._shared.journals.get(key)
            if before is not None and before.fence == fence and writing.number <= before.write:
                return
            entries = dict(before.entries) if before is not None else {}
            for step in writing.withdraw:
                old = entries.get(step)
                if old is not None and old.state is StepState.BEGUN and old.fence == fence:
                    del entries[step]
            for entry in writing.enter:
                self._check(key, record, entry)
                old = entries.get(entry.id)
                if old is None or old.state is StepState.BEGUN:
                    finished = entry.state is StepState.FINISHED
                    began = old.began_at if old is not None and finished else now - entry.took
                    entries[entry.id] = replace(
                        entry, fence=fence, began_at=began, finished_at=now if finished else None
                    )
            self._shared.journals[key] = KeptJournal(entries, fence, writing.number, writing.steps)
            stays = record.state is State.QUARANTINED and writing.in_doubt
            changed = replace(
                record,
                state=State.QUARANTINED if stays else State.PROCESSING,
                reason=record.reason if stays else "",
                on_expiry=OnExpiry.QUARANTINE if writing.in_doubt else OnExpiry.TAKEOVER,
                deadline=max(now + seconds, record.deadline),
            )
            self._shared.put(key, changed)

    def recall(self, key: StorageKey, token: bytes, *, fence: int) -> Journal:
        with self._shared.moment() as now:
            record = self._held(key, token, fence, now)
            return self._journal(key, record)

    def read(self, key: StorageKey) -> Journal:
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            return EMPTY if record is None else self._journal(key, record)

    def resume(self, seen: SeenRecord, journal: Journal, *, token: bytes, writing: JournalWrite) -> bool:
        key = seen.key
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            if record is not None and record.token == token:
                return True
            if (record := self._shared.as_seen(seen, now)) is None:
                return False
            kept = self._shared.journals.get(key)
            if record.state is not State.QUARANTINED or record.reason == CORRUPT or record.payload is not None:
                return False
            if kept is None or not kept.entries or not journal.complete:
                return False
            if (kept.fence, kept.write) != (journal.fence, journal.write):
                return False
            entries = dict(kept.entries)
            for step in writing.withdraw:
                if step in entries and entries[step].state is StepState.BEGUN:
                    del entries[step]
            for entry in writing.enter:
                self._check(key, record, entry)
                old = entries.get(entry.id)
                if old is not None and old.state is StepState.BEGUN:
                    entries[entry.id] = replace(
                        entry, fence=old.fence, began_at=old.began_at, finished_at=now, took=0.0
                    )
            self._shared.journals[key] = replace(kept, entries=entries, write=kept.write + 1, steps=writing.steps)
            if writing.in_doubt:
                self._shared.put(key, replace(record, token=token))
            else:
                # Not when its lease ended, which may be long ago: the client has all of `resume_within` from here on.
                self._shared.put(key, paused(replace(record, deadline=now), token, now))
            return True

    def give_up(self, seen: SeenRecord, *, horizon: float) -> bool:
        with self._shared.moment() as now:
            record = self._shared.as_seen(seen, now)
            if record is None or record.state is not State.PROCESSING or record.on_expiry is not OnExpiry.TAKEOVER:
                return False
            journal = self._shared.journals.get(seen.key)
            if journal is None or journal.steps == 0:
                return False
            if record.deadline > min(horizon, now):
                return False
            self._shared.quarantine(seen.key, record, NEVER_RESUMED)
            return True

    def walk(
        self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None
    ) -> StepPage:
        with self._shared.moment() as now:
            records, following = self._shared.page(self._shared.journals, now, after=after, limit=limit, tid=tid)
            found = (
                StepAnswer(key, record.token, record.fingerprint, entry, journal.erased)
                for key, record in records
                for journal in (self._journal(key, record),)
                for entry in journal.entries
                if entry.payload is not None and (other_than is None or kid_of(entry.payload) != other_than)
            )
            return StepPage(tuple(found), following)

    def replace(self, key: StorageKey, step: bytes, old: StoredPayload, new: StoredPayload) -> bool:
        with self._shared.moment() as now:
            record, kept = self._shared.live(key, now), self._shared.journals.get(key)
            if record is None or kept is None or step not in kept.entries or kept.entries[step].payload != old:
                return False
            self._shared.data_keys.check(key.tid, record, new)
            entries = {**kept.entries, step: replace(kept.entries[step], payload=new)}
            self._shared.journals[key] = replace(kept, entries=entries)
            return True

    def count(self) -> Mapping[str, int]:
        with self._shared.lock:
            payloads = [entry.payload for kept in self._shared.journals.values() for entry in kept.entries.values()]
            return Counter(kid_of(each) for each in payloads if each is not None and each.sealed_by != ERASED)

    def sweep(self, *, after: bytes = b"", limit: int) -> SweptJournals:
        # A journal goes with its record, and with the life of its record.
        return SweptJournals(0, None)

    def _held(self, key: StorageKey, token: bytes, fence: int, now: float) -> Record:
        record = self._shared.live(key, now)
        if record is None or record.token != token or record.fence != fence or record.payload is not None:
            raise LeaseLost("the record has another claim, is completed or is gone")
        return record

    def _journal(self, key: StorageKey, record: Record) -> Journal:
        kept = self._shared.journals.get(key)
        if kept is None:
            return EMPTY
        entries = tuple(sorted(kept.entries.values(), key=lambda entry: entry.began_at))
        erased = self._shared.data_keys.erased_since(key.tid, record.requested_at)
        return Journal(entries, kept.fence, kept.write, erased=erased)

    def _check(self, key: StorageKey, record: Record, entry: Entry) -> None:
        if entry.payload is not None:
            self._shared.data_keys.check(key.tid, record, entry.payload)


def paused(record: Record, token: bytes, now: float) -> Record:
    """Return this record as a pause leaves it: its lease ends, and the next retry takes it over."""
    return replace(
        record,
        state=State.PROCESSING,
        token=token,
        reason="",
        on_expiry=OnExpiry.TAKEOVER,
        deadline=min(record.deadline, now),
    )

"""Keep the steps of requests and their results in this process's memory. See `engine.journal.Journals`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

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
from flask_idempotency.engine.lease import LAPSED
from flask_idempotency.engine.model import CORRUPT, ERASED, OnExpiry, Record, State, StoredPayload, kid_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.memory.admin import MemoryDataKeys, MemoryRecords, as_seen, page_of


@valueclass(frozen=True, slots=True)
class _Kept:
    """The journal of one life of a record. `steps` is how many entries have effects, as its worker says."""

    requested_at: float
    entries: Mapping[bytes, Entry]
    fence: int
    write: int
    steps: int


class Completing(Protocol):
    """Completes a record, as `Store.complete` does."""

    def __call__(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None: ...


class MemoryJournals:
    """Implement `journal.Journals`. The store passes its own `put` and `complete`, which also update the quota."""

    def __init__(
        self,
        shared: MemoryRecords,
        data_keys: MemoryDataKeys,
        *,
        put: Callable[[StorageKey, Record | None], None],
        complete: Completing,
    ) -> None:
        self._shared = shared
        self._data_keys = data_keys
        self._put = put
        self._complete = complete
        self.kept: dict[StorageKey, _Kept] = {}
        """By record. The store looks here first: most stores never keep a journal."""

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        seconds = microseconds(lease) / 1_000_000
        with self._shared.moment() as now:
            record = self._held(key, token, fence, now)
            if record.state is State.QUARANTINED and record.reason != LAPSED:
                raise LeaseLost("the record is quarantined")
            before = self._of(key, record)
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
            self.kept[key] = _Kept(record.requested_at, entries, fence, writing.number, writing.steps)
            stays = record.state is State.QUARANTINED and writing.in_doubt
            changed = replace(
                record,
                state=State.QUARANTINED if stays else State.PROCESSING,
                reason=record.reason if stays else "",
                on_expiry=OnExpiry.QUARANTINE if writing.in_doubt else OnExpiry.TAKEOVER,
                deadline=max(now + seconds, record.deadline),
            )
            self._put(key, changed)

    def recall(self, key: StorageKey, token: bytes, *, fence: int) -> Journal:
        with self._shared.lock:
            record = self._held(key, token, fence, self._shared.now())
            return self._journal(key, record)

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        self._complete(key, token, payload, keep=keep, remember=remember)

    def read(self, key: StorageKey) -> Journal:
        with self._shared.lock:
            record = self._shared.live(key, self._shared.now())
            return EMPTY if record is None else self._journal(key, record)

    def resume(self, seen: SeenRecord, journal: Journal, *, token: bytes, writing: JournalWrite) -> bool:
        key = seen.key
        with self._shared.moment() as now:
            record = self._shared.live(key, now)
            if record is not None and record.token == token:
                return True
            kept = None if record is None else self._of(key, record)
            if record is None or kept is None or not as_seen(record, seen.record):
                return False
            if record.state is not State.QUARANTINED or record.reason == CORRUPT or record.payload is not None:
                return False
            if (kept.fence, kept.write) != (journal.fence, journal.write) or not journal.complete or not kept.entries:
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
            self.kept[key] = replace(kept, entries=entries, write=kept.write + 1, steps=writing.steps)
            if writing.in_doubt:
                self._put(key, replace(record, token=token))
            else:
                # Not when its lease ended, which may be long ago: the client has all of `resume_within` from here on.
                self._put(key, paused(replace(record, deadline=now), token, now))
            return True

    def give_up(self, seen: SeenRecord, *, horizon: float) -> bool:
        with self._shared.moment() as now:
            record = self._shared.live(seen.key, now)
            if record is None or not as_seen(record, seen.record) or not self.effects(seen.key, record):
                return False
            if record.state is not State.PROCESSING or record.on_expiry is not OnExpiry.TAKEOVER:
                return False
            if record.deadline > min(horizon, now):
                return False
            self._put(seen.key, replace(record, state=State.QUARANTINED, reason=NEVER_RESUMED))
            return True

    def walk(
        self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None
    ) -> StepPage:
        with self._shared.moment() as now:
            keys, following = page_of(self.kept, after, limit)
            found = []
            for key in keys:
                record = self._shared.live(key, now)
                if record is None or tid not in (None, key.tid):
                    continue
                journal = self._journal(key, record)
                found += [
                    StepAnswer(key, record.token, record.fingerprint, entry, journal.erased)
                    for entry in journal.entries
                    if entry.payload is not None and (other_than is None or kid_of(entry.payload) != other_than)
                ]
            return StepPage(tuple(found), following)

    def replace(self, key: StorageKey, step: bytes, old: StoredPayload, new: StoredPayload) -> bool:
        with self._shared.lock:
            record = self._shared.live(key, self._shared.now())
            kept = None if record is None else self._of(key, record)
            if record is None or kept is None or step not in kept.entries or kept.entries[step].payload != old:
                return False
            self._data_keys.check(key.tid, record, new)
            entries = {**kept.entries, step: replace(kept.entries[step], payload=new)}
            self.kept[key] = replace(kept, entries=entries)
            return True

    def count(self) -> Mapping[str, int]:
        with self._shared.lock:
            payloads = [entry.payload for kept in self.kept.values() for entry in kept.entries.values()]
            return Counter(kid_of(each) for each in payloads if each is not None and each.sealed_by != ERASED)

    def sweep(self, *, after: bytes = b"", limit: int) -> SweptJournals:
        with self._shared.moment() as now:
            keys, following = page_of(self.kept, after, limit)
            removed = 0
            for key in keys:
                record = self._shared.live(key, now)
                if record is None or record.state is State.COMPLETED or self._of(key, record) is None:
                    del self.kept[key]
                    removed += 1
            return SweptJournals(removed, following)

    # The store and the ledger call the methods below, and hold the lock.

    def effects(self, key: StorageKey, record: Record) -> bool:
        """Return whether an effect of this record is recorded, so that a release must keep it."""
        kept = self._of(key, record)
        return kept is not None and kept.steps > 0

    def drop(self, key: StorageKey) -> None:
        """Remove the journal of this key."""
        self.kept.pop(key, None)

    def byte_size(self, tid: bytes) -> int:
        """Return the bytes of all journals of this tenant that its quota counts."""
        total = 0
        for key, kept in self.kept.items():
            record = self._shared.records.get(key)
            if key.tid == tid and record is not None and record.in_quota:
                total += sum(entry.payload.byte_size for entry in kept.entries.values() if entry.payload is not None)
        return total

    def _held(self, key: StorageKey, token: bytes, fence: int, now: float) -> Record:
        record = self._shared.live(key, now)
        if record is None or record.token != token or record.fence != fence or record.payload is not None:
            raise LeaseLost("the record has another claim, is completed or is gone")
        return record

    def _of(self, key: StorageKey, record: Record) -> _Kept | None:
        kept = self.kept.get(key)
        return kept if kept is not None and kept.requested_at == record.requested_at else None

    def _journal(self, key: StorageKey, record: Record) -> Journal:
        kept = self._of(key, record)
        if kept is None:
            return EMPTY
        entries = tuple(sorted(kept.entries.values(), key=lambda entry: entry.began_at))
        erased = self._data_keys.erased_since(key.tid, record.requested_at)
        return Journal(entries, kept.fence, kept.write, erased=erased)

    def _check(self, key: StorageKey, record: Record, entry: Entry) -> None:
        if entry.payload is not None:
            self._data_keys.check(key.tid, record, entry.payload)


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

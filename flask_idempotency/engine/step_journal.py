"""Keep the journal of one record of a claim in memory, and write its new entries to the store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from flask_idempotency.engine import errors
from flask_idempotency.engine.journal import Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import step_id
from flask_idempotency.engine.model import ERASED, SealContext, StoredPayload
from flask_idempotency.engine.store import StepCodec

_ERASED: Final = StoredPayload(b"", 0, True, 0, ERASED)


@dataclass(slots=True, eq=False, repr=False)
class Unsent:
    """An entry that the store has not confirmed yet, with what its payload is sealed from."""

    entry: Entry
    item: bytes
    result: bytes | None
    payload: StoredPayload | None = None


@dataclass(slots=True, eq=False, repr=False)
class ClaimJournal:
    """The journal of one record of the claim, with the entries that the store has not confirmed yet."""

    context: SealContext
    attempt: int
    sealer: StepCodec
    entries: dict[bytes, Entry] = field(default_factory=dict)
    earlier: frozenset[bytes] = frozenset()
    """The ids that earlier attempts recorded."""
    erased: bool = False
    """Whether the results of earlier attempts were erased with their tenant."""
    keeps: set[bytes] = field(default_factory=set)
    """The ids of the requests that the store has beside the steps, one for each set of records that claims had."""
    tries: int = 0
    """How often the janitor has tried to finish it."""
    unsent: dict[bytes, Unsent] = field(default_factory=dict)
    aside: list[Unsent] = field(default_factory=list)
    """What goes with the next write that enters a step: it is no step."""
    withdrawn: set[bytes] = field(default_factory=set)
    number: int = 0

    @property
    def effects(self) -> int:
        """How many of the entries have an effect."""
        return sum(entry.has_effect for entry in self.entries.values())

    @property
    def in_doubt(self) -> bool:
        """Whether a plain step has begun, and it is unknown whether it happened."""
        return any(entry.in_doubt for entry in self.entries.values())

    def id_of(self, name: str, item: bytes) -> bytes:
        """Return the id of this step here. The same step has another one in another journal."""
        return step_id(self.context.key, name, item)

    def enter(self, entry: Entry, item: bytes, result: bytes | None) -> None:
        """Enter this step, in the place of what is known of it. The next write tells the store."""
        self.entries[entry.id] = entry
        self.unsent[entry.id] = Unsent(entry, item, result)
        self.withdrawn.discard(entry.id)

    def withdraw(self, id: bytes) -> None:
        """Take a step out that did nothing. What an earlier attempt has begun stays: it may have had its effect."""
        self.unsent.pop(id, None)
        if id not in self.earlier and self.entries.pop(id, None) is not None:
            self.withdrawn.add(id)

    def put_aside(self, name: str, item: bytes, result: bytes | None, digest: bytes = b"") -> None:
        """Add an entry that is no step. It goes with the next write that enters one."""
        id, fence = self.id_of(name, item), self.context.fence
        entry = Entry(id, name, "pure", StepState.FINISHED, in_line=False, digest=digest, fence=fence)
        self.aside.append(Unsent(entry, item, result))

    @property
    def is_behind(self) -> bool:
        """Whether the store lacks something that this journal has."""
        return bool(self.unsent or self.withdrawn or (self.aside and self.earlier))

    def writing(self) -> JournalWrite:
        """Return the next write, which brings the store to this state."""
        self.number += 1
        enter = []
        aside = self.aside if self.unsent or self.earlier else ()
        for each in (*self.unsent.values(), *aside):
            payload = self._sealed(each)  # which may find that the result cannot be kept
            enter.append(each.entry.with_payload(payload))
        return JournalWrite(self.number, enter, tuple(self.withdrawn), self.effects, self.in_doubt)

    def _sealed(self, unsent: Unsent) -> StoredPayload:
        if unsent.payload is None:
            context = unsent.entry.context(self.context.key, self.context.fingerprint)
            try:
                unsent.payload = self.sealer.seal(unsent.item, unsent.result, context)
            except errors.NotStorable:
                unsent.result, unsent.entry = None, replace(unsent.entry, kept=False)
                unsent.payload = self.sealer.seal(unsent.item, None, context)
        return unsent.payload

    def seal_again(self, *, erased: bool) -> None:
        """Drop what is sealed under a data key that the store lacks. `erased`: keep nothing of the results."""
        for unsent in (*self.unsent.values(), *self.aside):
            unsent.payload = _ERASED if erased else None

    def sent(self) -> None:
        """Note that the store has taken the last write."""
        if self.unsent or self.earlier:
            self.aside.clear()
        for id, unsent in self.unsent.items():
            if id in self.earlier and unsent.payload is not None:
                # The view may ask for it yet: see `Steps._reconcile`.
                self.entries[id] = unsent.entry.with_payload(unsent.payload)
        self.unsent.clear()
        self.withdrawn.clear()

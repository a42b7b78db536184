"""Records whose owners may be gone: how to find them, and what may become of them by another's hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.record import Payload, Record, State


@dataclass(frozen=True, slots=True)
class Found:
    """A record as somebody met it who is not its owner. Whoever acts on it says that this is what they saw."""

    key: StorageKey
    record: Record
    asked: bool = False
    """Of one that `Unsettled.due` gives: whether it was given to somebody before, since its owner was last heard of."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """Some of many. `after` is where the next sheet begins; None after the last one."""

    found: tuple[Found, ...]
    after: bytes | None


@dataclass(frozen=True, slots=True)
class Standing:
    """How many records are not completed, and since when."""

    in_flight: int = 0
    """PROCESSING, with lease left."""
    lapsed: int = 0
    """PROCESSING, with none left: to be quarantined by a janitor, or taken over by a retry."""
    quarantined: int = 0
    lapsed_for: float | None = None
    """Seconds since the first lease of those ended that have lapsed. None: there are none."""
    quarantined_for: float | None = None
    """Seconds since the first lease of those ended that are quarantined, and never below 0. None: there are none."""


class Unsettled(Protocol):
    """The records of vanished owners, and every other, by state. Found as `unsettled`.

    Nothing here looks through all records of a store to find the few that are not completed: there is an index of them.
    Every change is a compare-and-set on the exact record that was seen (its state, its token and its deadline), so two
    who do the same at once do it once, and an owner who was faster wins. Horizons are seconds since the epoch on the
    store's clock. Every method raises `StoreUnavailable` when the store cannot answer; repeating it is harmless.
    """

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        """PROCESSING records whose lease was over by this horizon, and is over now. Those that cannot be read are left out.

        About `limit` are looked at for one sheet, so it may be empty and not the last. One that is stale from the first
        sheet to the last is met at least once.
        """
        ...

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        """Quarantine this record, with the reason `lease-expired`, if it stands as it was seen and its rule says so.

        False: it does not, or its lease was not over by this horizon, or is not over now, or its rule is to be taken over.
        """
        ...

    def due(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[Found]:
        """Quarantined records whose turn it is to be asked about. Each is given to one caller, and then has to wait.

        The first turn is at once. The next comes after as many seconds as it has been quarantined for (since the end of
        its lease), but not before `least` nor after `most`: so the pauses double, and a caller that dies delays one turn.
        They are counted from the horizon or from now, whichever is earlier. The one that has waited longest comes first, as
        far as the store can tell.

        `owner`: only those whose tokens begin with these `token.OWNER_BYTES` bytes. The others keep their turns: they are
        another application's in the same store.
        """
        ...

    def settle(self, seen: Found, *, token: bytes, payload: Payload, keep: float) -> bool:
        """Complete this record in its owner's place, if it is quarantined and stands as it was seen.

        `token` is a fresh one: the owner learns that it has lost its claim, and is told this answer. Otherwise as
        `Store.complete`, and raises `DataKeyGone` as that does. False: something else is there by now, and stays. Repeated
        with the same token after a lost reply, it is True.
        """
        ...

    def free(self, seen: Found) -> bool:
        """The key may run again, whatever state its record is in, if it stands as it was seen.

        Whether that is wise is not asked here. False: something else is there by now, and stays, or nothing is.
        """
        ...

    def walk(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> Sheet:
        """Every record in this state, of this tenant if one is named. The answers may be left out of their payloads.

        As with `stale`, a sheet may be empty and not the last; what is there throughout is met at least once. Completed
        records whose life is over are left out.
        """
        ...

    def standing(self) -> Standing:
        """How many records are not completed. Quick."""
        ...


@runtime_checkable
class KnowsUnsettled(Protocol):
    """A store whose unsettled records can be found and settled by others than their owners."""

    @property
    def unsettled(self) -> Unsettled: ...


PAGE: Final = 200
"""Records looked at in one step: some tens of milliseconds of the store's time."""


def every(unsettled: Unsettled, state: State, *, tids: Iterable[bytes | None] = (None,)) -> Iterator[Found]:
    """All records in this state, sheet by sheet: of these tenants, or of everybody. Some may be met twice.

    Raises `StoreUnavailable` when the store does not answer.
    """
    for tid in tids:
        after: bytes | None = b""
        while after is not None:
            sheet = unsettled.walk(state, after=after, limit=PAGE, tid=tid)
            yield from sheet.found
            after = sheet.after

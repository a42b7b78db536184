"""The key ring: what stands under which key, and which may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flask_idempotency.engine.capabilities import Answers, DataKeys


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """One key of the ring, or one that is missing there. `records` and `data_keys` are what stands under it."""

    kid: str
    records: int
    data_keys: int
    newest: bool
    known: bool

    @property
    def may_go(self) -> bool:
        """Whether it can be taken out of the ring, and nothing will miss it."""
        return self.known and not self.newest and self.records == self.data_keys == 0


@dataclass(frozen=True, slots=True)
class KeysReport:
    """What is sealed under which key, in the order of the ring; what the ring has not comes last."""

    keys: tuple[KeyStatus, ...]
    plain_records: int

    @property
    def in_order(self) -> bool:
        """Whether everything that is sealed can be opened."""
        return all(key.known for key in self.keys)


class Ring(Protocol):
    """As much of a key provider as it takes to say how its keys stand."""

    @property
    def newest(self) -> str: ...

    def kids(self) -> Sequence[str]: ...


def keys_status(ring: Ring, answers: Answers, data_keys: DataKeys) -> KeysReport:
    """How the keys of the ring stand. Raises `StoreUnavailable` when the store cannot be asked."""
    # Data keys last: an answer that is sealed meanwhile has its data key already.
    records, wrapped = dict(answers.count()), dict(data_keys.count())
    plain = records.pop("", 0)
    known = list(ring.kids())
    missing = sorted({kid for counted in (records, wrapped) for kid, n in counted.items() if n} - set(known))
    return KeysReport(
        tuple(
            KeyStatus(kid, records.get(kid, 0), wrapped.get(kid, 0), newest=kid == ring.newest, known=kid in known)
            for kid in [*known, *missing]
        ),
        plain,
    )

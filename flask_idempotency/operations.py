"""Verbs for people. What they return is said by whoever was asked: the command line, a console.

Nothing here prints, asks back, or knows Flask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.ports import Schema
from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.engine.upkeep import Answers, DataKeys, Ledger


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """How the schema stands, and what was done to bring it there."""

    done: tuple[str, ...]
    faults: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def in_order(self) -> bool:
        return not self.faults


def db_upgrade(schema: Schema) -> SchemaReport:
    """Bring the schema to this release, and look at it afterwards: what an upgrade cannot mend is a fault still."""
    return _report(schema, done=schema.upgrade())


def db_check(schema: Schema) -> SchemaReport:
    """How the schema stands. Never writes."""
    return _report(schema, done=[])


def _report(schema: Schema, *, done: list[str]) -> SchemaReport:
    return SchemaReport(done=tuple(done), faults=tuple(schema.faults()), advice=tuple(schema.advice()))


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


def holds_sealed(data_keys: DataKeys, tids: Iterable[bytes]) -> bool:
    """Whether anything was ever encrypted for this tenant, whatever the settings say of what is stored from now on."""
    return any(data_keys.shelf(tid).last for tid in tids)


def shred(data_keys: DataKeys, tids: Iterable[bytes]) -> int:
    """Erase the answers of a tenant, under all that stands for it. Returns how many data keys it had.

    Raises `StoreUnavailable` when one of them may be left, or is still remembered by a cache; the others are erased.
    """
    destroyed, failures = 0, []
    for tid in tids:
        try:
            destroyed += data_keys.destroy(tid)
        except StoreUnavailable as error:
            failures.append(error)
    if failures:
        raise StoreUnavailable(" ".join(dict.fromkeys(map(str, failures)))) from failures[0]
    return destroyed


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has, and its own limits as an operator has set them. `name` is None for no tenant."""

    name: str | None
    usage: Usage
    limits: Quota


def quota_show(ledger: Ledger, tids: Sequence[bytes], *, name: str | None) -> TenantUsage:
    """What a tenant has under all that stands for it: a key is counted under the secret that is the newest to its host.

    During a rotation those are two, and a recount finds a key under both. So the larger number of each is told.
    """
    usages = [asdict(ledger.usage(tid)) for tid in tids]
    most = {count: max(usage[count] for usage in usages) for count in usages[0]}
    return TenantUsage(name, Usage(**most), _own_limits(ledger, tids))


def quota_set(ledger: Ledger, tids: Sequence[bytes], named: Quota, *, clear: bool = False) -> Quota:
    """Set these limits of a tenant, and leave those that are not named. `clear`: take those back. Returns what holds now."""
    limits = named if clear else _own_limits(ledger, tids).overlaid(named)
    for tid in tids:
        ledger.limit(tid, limits)
    return limits


def _own_limits(ledger: Ledger, tids: Sequence[bytes]) -> Quota:
    """Of the newest secret under which there are any: they are set under all at once."""
    every = (ledger.limits(tid) for tid in tids)
    return next((limits for limits in every if not limits.unlimited), Quota())

"""How many records there are, and whether anybody looks after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flask_idempotency.engine.capabilities import Answers, ChoreBook, DataKeys, Ledger, UnfinishedCounts, Unsettled
from flask_idempotency.operations.shape import Change


@dataclass(frozen=True, slots=True)
class LastRun:
    """A chore when it was last reported. `did` is its report; empty if another release wrote what this one cannot read."""

    ago: float
    did: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds. None is what was not asked for, or what this store cannot tell."""

    standing: UnfinishedCounts
    completed: int | None
    """Includes those whose life has ended and that have not been removed yet."""
    data_keys: int | None
    tenants: int | None
    """Those with a ledger."""
    chores: Mapping[str, LastRun] | None
    identity: tuple[Change, ...] | None = None
    """Changes of the identity of keys whose retries are still at risk."""


def stats(
    unsettled: Unsettled,
    *,
    answers: Answers | None,
    data_keys: DataKeys | None,
    ledger: Ledger | None,
    chores: ChoreBook | None,
    identity: tuple[Change, ...] | None = None,
) -> Stats:
    """How this store stands. Counting the answers is what takes long: leave them out where it must not.

    Raises `StoreUnavailable` when it does not answer.
    """
    return Stats(
        standing=unsettled.standing(),
        completed=None if answers is None else sum(answers.count().values()),
        data_keys=None if data_keys is None else sum(data_keys.count().values()),
        tenants=None if ledger is None else len(ledger.tenants()),
        chores=None
        if chores is None
        else {chore: LastRun(entry.ago, entry.facts()) for chore, entry in chores.last().items()},
        identity=identity,
    )

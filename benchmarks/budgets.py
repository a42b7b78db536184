"""What SPEC section 14 allows, as numbers, and whether a measurement keeps within it."""

from __future__ import annotations

from dataclasses import dataclass

ADDED_MICROSECONDS = 10.0
FIRST_TO_FLOOR = 1.25
REPLAY_TO_FLOOR = 1.25
REPLAY_P99_MICROSECONDS = 2_000.0
REFUSAL_P99_MICROSECONDS = 5_000.0
FIRST_OF_BARE_RATE = 0.55
REPLAY_OF_BARE_RATE = 0.80
OVERHEAD_BYTES = 64
RECORD_BYTES = 1.1 * 1024
FULL_TO_EMPTY = 2.0
LEDGER_BYTES = 4 * 1024
FLOODED_TO_QUIET = 1.10
REMOVING_TO_RESTING = 2.0
# Of our own process, on top of bare Flask; of transactional effects, on top of the business alone. Targets, for a table
# to show: other machines and other SQLAlchemys take other times.
SQL_FIRST_ADDED_CPU = 350.0
SQL_REPLAY_ADDED_CPU = 140.0
# Section 7: what goes to the store and comes back, by path.
TRIPS = {"first": 2, "replay": 1, "conflict": 1, "mismatch": 1}
# On PostgreSQL by the strategy `insert`, which is what SPEC promises; the others lock first, and SQLite has one writer.
SQL_STATEMENTS = {"first": 2, "replay": 1, "conflict": 1, "mismatch": 1}
# The claim's own, and the one that ends the request: transactional effects wait for the disk no more often.
SQL_COMMITS = {"first": 2, "replay": 0, "conflict": 0, "mismatch": 0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One budget and what was measured against it."""

    budget: str
    measured: float
    within: bool

    def __str__(self) -> str:
        return f"{self.budget} {'✓' if self.within else '✗ OVER'}"


def at_most(budget: str, measured: float, limit: float) -> Verdict:
    return Verdict(budget, measured, measured <= limit)


def at_least(budget: str, measured: float, limit: float) -> Verdict:
    return Verdict(budget, measured, measured >= limit)

"""Every store, held to the same contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from flask_idempotency.engine.store import Store
from flask_idempotency.testing import contract
from flask_idempotency.testing.contract import (
    ActivityContract,
    AuditTrailContract,
    DataKeysContract,
    ExpiryContract,
    JournalsContract,
    ObservationsContract,
    RecoveryContract,
    RemembersContract,
    ResponsesContract,
    SettledContract,
    StoreContract,
    TaskLogContract,
    VoidContract,
)
from flask_idempotency.testing.contract.quota import Counting, Limiting
from flask_idempotency.testing.contract.settling import Settling
from flask_idempotency.testing.contract.stress import Modelled, Racing, Recounted
from flask_idempotency.testing.contract.support import Kit
from flask_idempotency.testing.doubles import FrozenClock
from tests.backends import BACKENDS, HELD_TO, held_to
from tests.long import LONG
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["maria_database", "sql_databases", "sql_stores"]
FEWER = {"MACHINE_EXAMPLES": 8, "RECOUNT_EXAMPLES": 6, "ROUNDS": 3, "SCHEDULES": 60}
"""How much chance is given on every push. The shipped contract has more, and so has this suite before a release."""


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        contract.activity,
        contract.encryption,
        contract.maintenance,
        contract.recovery,
        contract.resolution,
        contract.voiding,
    ]
    for module in [] if LONG else [contract.stress, *parts]:
        for name in FEWER.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, FEWER[name])


def store_of(part: str) -> Any:
    """Return the fixture of a contract: a store of each kind that is held to this part, see `HELD_TO`."""

    @pytest.fixture(params=held_to(part))
    def store(self: object, request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Store]:
        with ExitStack() as ends:
            yield BACKENDS[request.param](request, ends)(clock)

    return store


def test_each_store_is_held_to_a_part() -> None:
    assert BACKENDS.keys() == HELD_TO.keys()


class TestStores(StoreContract):
    store = store_of("store")


class TestReached(Settling, Racing, Limiting, Modelled):
    """What comes through any connection: every answer to the byte, many at once, and a bit of everything."""

    store = store_of("reached")


class TestLedgers(Counting, Limiting):
    store = store_of("quotas")


class TestRecounts(Recounted):
    """Where others settle too, `TestUnsettled` has the same calls among more."""

    store = store_of("recount")


class TestSystems(DataKeysContract, ResponsesContract):
    store = store_of("upkeep")


class TestUnsettled(RecoveryContract, SettledContract):
    store = store_of("upkeep")


class TestExpiry(ExpiryContract):
    store = store_of("upkeep")


class TestRemembered(RemembersContract):
    store = store_of("upkeep")


class TestTaskLogs(TaskLogContract):
    store = store_of("upkeep")


class TestActivity(ActivityContract):
    store = store_of("upkeep")


class TestObservations(ObservationsContract):
    store = store_of("upkeep")


class TestAuditTrails(AuditTrailContract):
    store = store_of("upkeep")


class TestVoids(VoidContract):
    """Every store voids keys."""

    store = store_of("upkeep")

    @pytest.mark.soak
    @pytest.mark.timeout(3600)
    def test_no_schedule_of_very_many_runs_a_voided_key(self, kit: Kit) -> None:
        """The same as the shipped contract, with 100,000 schedules."""
        for seed in range(100_000):
            contract.voiding.run_schedule(kit, seed)


class TestJournals(JournalsContract):
    """Each store with `journals` is held to them: one that loses them must fail, and not be skipped."""

    store = store_of("journals")

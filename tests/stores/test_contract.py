"""Every store, held to the same contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract import (
    ActivityContract,
    AuditTrailContract,
    DataKeysContract,
    ExpiryContract,
    JournalsContract,
    ObservationsContract,
    RecoveryContract,
    ResponsesContract,
    SettledContract,
    StoreContract,
    TaskLogContract,
)
from flask_idempotency.testing.contract.quota import Counting, Limiting
from flask_idempotency.testing.contract.settling import Settling
from flask_idempotency.testing.contract.stress import Modelled, Racing, Recounted
from flask_idempotency.testing.doubles import FrozenClock
from tests.backends import BACKENDS, MakeStore, make_kept, make_owned, make_reached, make_store, make_system
from tests.lab.programs import REDIS_KINDS
from tests.sql_backends import sql_databases, sql_stores

__all__ = ["make_kept", "make_owned", "make_reached", "make_store", "make_system", "sql_databases", "sql_stores"]


class TestStores(StoreContract):
    @pytest.fixture
    def store(self, make_store: MakeStore, clock: FrozenClock) -> Store:
        return make_store(clock)


class TestReached(Settling, Racing, Limiting, Modelled):
    """What comes through any connection: every answer to the byte, many at once, and a bit of everything."""

    @pytest.fixture
    def store(self, make_reached: MakeStore, clock: FrozenClock) -> Store:
        return make_reached(clock)


class TestLedgers(Counting, Limiting):
    @pytest.fixture
    def store(self, make_system: MakeStore, clock: FrozenClock) -> Store:
        return make_system(clock)


class TestRecounts(Recounted):
    """Where nobody else settles. Where others do, `TestUnsettled` has the same calls among more."""

    @pytest.fixture
    def store(self, make_owned: MakeStore, clock: FrozenClock) -> Store:
        return make_owned(clock)


class TestSystems(DataKeysContract, ResponsesContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestUnsettled(RecoveryContract, SettledContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestExpiry(ExpiryContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestTaskLogs(TaskLogContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestActivity(ActivityContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestObservations(ObservationsContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestAuditTrails(AuditTrailContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestJournals(JournalsContract):
    """Each store with `journals` is named here: one that loses them must fail, and not be skipped."""

    @pytest.fixture(
        params=[
            "memory",
            "fakeredis",
            *(f"{kind}-{way}" for kind in REDIS_KINDS for way in ("url", "cluster")),
            f"tiered-{REDIS_KINDS[0]}-telling",
        ]
    )
    def store(self, request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Store]:
        with ExitStack() as ends:
            yield BACKENDS[request.param](request, ends)(clock)

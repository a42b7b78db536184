"""Every store, held to the same contract."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract import (
    DataKeysContract,
    ExpiryContract,
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
from tests.backends import MakeStore, make_kept, make_owned, make_reached, make_store, make_system
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

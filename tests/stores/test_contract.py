"""Every store, held to the same contract."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.ports import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract import (
    AnswersContract,
    ChoreBookContract,
    DataKeysContract,
    ExpiryContract,
    LedgerContract,
    SettledContract,
    StoreContract,
    UnsettledContract,
)
from tests.backends import MakeStore


class TestStores(StoreContract):
    @pytest.fixture
    def store(self, make_store: MakeStore, clock: FrozenClock) -> Store:
        return make_store(clock)


class TestSystems(DataKeysContract, AnswersContract, LedgerContract):
    @pytest.fixture
    def store(self, make_system: MakeStore, clock: FrozenClock) -> Store:
        return make_system(clock)


class TestUnsettled(UnsettledContract, SettledContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestExpiry(ExpiryContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)


class TestChoreBooks(ChoreBookContract):
    @pytest.fixture
    def store(self, make_kept: MakeStore, clock: FrozenClock) -> Store:
        return make_kept(clock)

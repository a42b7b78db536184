"""Every store, held to the same contract."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.ports import Store
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract import StoreContract
from tests.backends import MakeStore


class TestStores(StoreContract):
    @pytest.fixture
    def store(self, make_store: MakeStore, clock: FrozenClock) -> Store:
        return make_store(clock)

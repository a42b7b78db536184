"""What a store must do, as tests: subclass `StoreContract`, give it a `store` and a `clock`, and run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, clock):
            return MyStore(clock=clock)

The store must take its time from `clock`, a `FrozenClock` that stands still unless a test advances it. It need not be
empty: every test works on keys of its own, and of tenants of its own. Times are compared to two milliseconds, the
coarsest a store may count in.

A store that can do more than that subclasses more: `DataKeysContract` when it keeps data keys, `ResponsesContract` when it
can be walked through, `LedgerContract` when it counts, `RecoveryContract` when others than owners may settle,
`ExpiryContract` when it has to be cleared, `TaskLogContract` when it knows its janitor. One that has data keys, a ledger
and unsettled records subclasses `SettledContract` too: what others settle is counted and sealed as what owners do.
"""

import pytest

# Before the imports below, or their assertions would fail without saying what they compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in ("claiming", "fencing", "giving_up", "keeping", "lapsing", "machine", "owning", "racing", "walking")
    ),
    *(
        f"{__name__}.{part}"
        for part in ("condemning", "counting", "erasing", "examples", "limiting", "recounting", "settling")
    ),
    *(
        f"{__name__}.{part}"
        for part in ("expiring", "finding", "freeing", "noting_chores", "reaping", "settled_upkeep")
    ),
    *(f"{__name__}.{part}" for part in ("settling_for_others", "surveying", "taking_turns")),
)

from flask_idempotency.testing.contract.claiming import Cancelling, Claiming, Fencing, Ownership
from flask_idempotency.testing.contract.encryption import DataKeysContract, SettledLedger, SettledSecrets
from flask_idempotency.testing.contract.inspection import Listing, ResponsesContract
from flask_idempotency.testing.contract.leases import LeaseExpiry, Retention
from flask_idempotency.testing.contract.maintenance import ExpiryContract, TaskLogContract
from flask_idempotency.testing.contract.quota import Counting, Limiting
from flask_idempotency.testing.contract.recovery import Reaping, ResolverQueue
from flask_idempotency.testing.contract.resolution import ForceReleasing, Resolving
from flask_idempotency.testing.contract.settling import MarkingCorrupt, Settling
from flask_idempotency.testing.contract.stress import Modelled, Racing, Recounted
from flask_idempotency.testing.doubles import FrozenClock

__all__ = [
    "DataKeysContract",
    "ExpiryContract",
    "LedgerContract",
    "RecoveryContract",
    "ResponsesContract",
    "SettledContract",
    "StoreContract",
    "TaskLogContract",
]


class StoreContract(
    Claiming, Ownership, Settling, LeaseExpiry, Retention, Fencing, Racing, MarkingCorrupt, Cancelling, Modelled
):
    """The specification of `flask_idempotency.engine.store.Store`. Override `store`; the rest is here."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()


class LedgerContract(Counting, Limiting, Recounted):
    """The specification of `flask_idempotency.engine.capabilities.Ledger`, and of claims with a quota. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()


class RecoveryContract(Reaping, ResolverQueue, Resolving, ForceReleasing, Listing):
    """The specification of `flask_idempotency.engine.capabilities.Unsettled`. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()


class SettledContract(SettledLedger, SettledSecrets):
    """What `Recovery` owes to the ledger and to the data keys of a store that has them. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

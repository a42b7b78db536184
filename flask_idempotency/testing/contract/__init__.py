"""The tests that every store must pass: subclass `StoreContract`, add a `store` and a `clock`, and run pytest.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, clock):
            return MyStore(clock=clock)

Your store must read its time from `clock`, a `FrozenClock`, which stands still unless a test advances it. It need not be
empty: every test uses its own keys and tenants. Tests compare times to two milliseconds, the coarsest resolution that a
store may have.

If your store has optional features, subclass their contracts too: `DataKeysContract` for data keys, `ResponsesContract` for
scanning, `LedgerContract` for quotas, `RecoveryContract` for resolving the claims of vanished workers, `ExpiryContract` for
removing expired records, `JournalsContract` for durable steps, `TaskLogContract` for the task log of the janitor,
`ActivityContract` for what happens at each endpoint, `ObservationsContract` for observe mode, `AuditTrailContract` for who
changed a record, `VoidContract` for voided keys, `RemembersContract` for keys that are refused after their response has
expired. If it has data keys, quotas and recovery, subclass `SettledContract`: a resolved record is counted and sealed as a
completed one.
"""

from pkgutil import iter_modules

import pytest

# Before the imports below: pytest rewrites the assertions of modules that are imported later.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from flask_idempotency.testing.contract.activity import ActivityContract, AuditTrailContract, ObservationsContract
from flask_idempotency.testing.contract.claiming import Cancelling, Claiming, Fencing, Ownership
from flask_idempotency.testing.contract.encryption import DataKeysContract, SettledLedger, SettledSecrets
from flask_idempotency.testing.contract.inspection import Listing, ResponsesContract
from flask_idempotency.testing.contract.journalling import JournalsContract
from flask_idempotency.testing.contract.leases import LeaseExpiry, Retention
from flask_idempotency.testing.contract.maintenance import ExpiryContract, TaskLogContract
from flask_idempotency.testing.contract.quota import Counting, Limiting
from flask_idempotency.testing.contract.recovery import Reaping, ResolverQueue
from flask_idempotency.testing.contract.remembering import RemembersContract
from flask_idempotency.testing.contract.resolution import ForceReleasing, Resolving
from flask_idempotency.testing.contract.settling import MarkingCorrupt, Settling
from flask_idempotency.testing.contract.stress import Modelled, Racing, Recounted
from flask_idempotency.testing.contract.voiding import VoidContract

__all__ = [
    "ActivityContract",
    "AuditTrailContract",
    "DataKeysContract",
    "ExpiryContract",
    "JournalsContract",
    "LedgerContract",
    "ObservationsContract",
    "RecoveryContract",
    "RemembersContract",
    "ResponsesContract",
    "SettledContract",
    "StoreContract",
    "TaskLogContract",
    "VoidContract",
]


class StoreContract(
    Claiming,
    Ownership,
    Settling,
    LeaseExpiry,
    Retention,
    Fencing,
    Racing,
    MarkingCorrupt,
    Cancelling,
    Modelled,
):
    """The contract of `flask_idempotency.engine.store.Store`. Override `store`."""


class LedgerContract(Counting, Limiting, Recounted):
    """The contract of `flask_idempotency.engine.capabilities.Ledger`, and of claims with a quota. Override `store`."""


class RecoveryContract(Reaping, ResolverQueue, Resolving, ForceReleasing, Listing):
    """The contract of `flask_idempotency.engine.capabilities.Recovery`. Override `store`."""


class SettledContract(SettledLedger, SettledSecrets):
    """The contract of `Recovery` for a store that also has quotas and data keys. Override `store`."""

"""For whoever tests an application or writes a store.

Nothing in the library imports this room. `flask_idempotency.testing.contract` needs pytest and hypothesis; the rest
needs nothing.
"""

from flask_idempotency.testing.doubles import FaultyStore, FrozenClock, Points
from flask_idempotency.testing.oracle import Oracle
from flask_idempotency.testing.proxy import TcpProxy

__all__ = ["FaultyStore", "FrozenClock", "Oracle", "Points", "TcpProxy"]

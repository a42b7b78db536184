"""Tools to test your application, or a store that you write.

The rest of the library does not import this package. `flask_idempotency.testing.contract` needs pytest and hypothesis; the
other modules need no further package.
"""

from flask_idempotency.testing.crashes import Crash, CrashPoint, CrashReport, every_crash
from flask_idempotency.testing.doubles import FaultyStore, FrozenClock, Points, stopped
from flask_idempotency.testing.oracle import Oracle
from flask_idempotency.testing.proxy import TcpProxy

__all__ = [
    "Crash",
    "CrashPoint",
    "CrashReport",
    "FaultyStore",
    "FrozenClock",
    "Oracle",
    "Points",
    "TcpProxy",
    "every_crash",
    "stopped",
]

"""Records in this process's memory: for tests, and for applications that are one process."""

from flask_idempotency.stores.memory.store import DROPPED_PER_CLAIM, MemoryStore

__all__ = ["DROPPED_PER_CLAIM", "MemoryStore"]

"""Records in this process's memory: for tests, and for applications that are one process."""

from flask_idempotency.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]

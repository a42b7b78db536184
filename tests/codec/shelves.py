"""A shelf of data keys that tests may damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flask_idempotency.codec.encryption import DataKeyring
from flask_idempotency.codec.keyring import KeyProvider, KeyRing
from flask_idempotency.engine.capabilities import DataKey, TenantKeys
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.admin import MemoryDataKeys
from tests.codec.sealing import NEW, OLD, RING, Monotonic

OLD_FIRST = KeyRing({"old": OLD, "new": NEW})


def as_it_is(shelf: TenantKeys) -> TenantKeys:
    return shelf


@dataclass
class Shelf:
    """A store's shelf that counts, can be silent, and can be changed by somebody with rights to it."""

    inner: MemoryDataKeys = field(default_factory=lambda: MemoryStore().data_keys)
    looks: int = 0
    error: Exception | None = None
    changed: Callable[[TenantKeys], TenantKeys] = as_it_is
    refuses: int = 0

    def read_keys(self, tid: bytes) -> TenantKeys:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.changed(self.inner.read_keys(tid))

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        return self.inner.add(tid, key, store=store, after=after)

    def disable(self, tid: bytes, number: int) -> None:
        self.inner.disable(tid, number)

    def delete(self, tid: bytes, number: int) -> None:
        self.inner.delete(tid, number)

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        return self.inner.wrapped_by_other(kid)

    def shred(self, tid: bytes) -> int:
        return self.inner.shred(tid)

    def count(self) -> Mapping[str, int]:
        return self.inner.count()


def ring_on(
    shelf: Shelf, provider: KeyProvider = RING, monotonic: Monotonic | None = None, *, limit: int = 4096
) -> DataKeyring:
    """The data keys as another process knows them."""
    return DataKeyring(provider, shelf, monotonic=monotonic or Monotonic(), step=lambda: 1, limit=limit)

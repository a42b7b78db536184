"""What the tests of encryption seal, with which keys, and for whom."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyProvider, KeyRing
from flask_idempotency.engine.capabilities import DataKey, DataKeys, TenantKeys
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import SealContext, StoredResponse
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.admin import MemoryDataKeys

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
RING = KeyRing({"new": NEW, "old": OLD})
TENANT, OTHER_TENANT = b"tenant-one-tid..", b"tenant-two-tid.."
KEY = StorageKey(rid=b"r" * 32, tid=TENANT)
BINDING = SealContext(KEY, token=b"token-of-owner..", fence=17, fingerprint=b"f" * 32)
RESULT = StoredResponse(201, "", (("Content-Type", "application/json"), ("Location", "/payments/1")), b'{"id":"pay_1"}')
PLAIN = EnvelopeCodec(compression=None)


def text(key: bytes) -> str:
    return b64encode(key).decode("ascii")


@dataclass
class Monotonic:
    """Time passes by assignment."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Service:
    """A remote provider that records calls and can fail."""

    def __init__(self, ring: KeyRing = RING) -> None:
        self.ring = ring
        self.error: Exception | None = None
        self.asked: list[str] = []

    @property
    def newest(self) -> str:
        return self.ring.newest

    def kids(self) -> tuple[str, ...]:
        return tuple(self.ring.kids())

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        self._ask("wrap")
        return self.ring.wrap(kid, key, context=context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        self._ask("unwrap")
        return self.ring.unwrap(kid, wrapped, context=context)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error


def keyring(
    shelf: DataKeys | None = None, *, provider: KeyProvider = RING, monotonic: Callable[[], float] | None = None
) -> DataKeyring:
    """The data keys as one process knows them."""
    return DataKeyring(provider, shelf or MemoryStore().data_keys, monotonic=monotonic or Monotonic(), step=lambda: 1)


def codec(
    shelf: DataKeys | None = None, *, provider: KeyProvider = RING, plain_allowed: bool = True, sealing: bool = True
) -> EncryptedCodec:
    """One process's codec."""
    return EncryptedCodec(PLAIN, keyring(shelf, provider=provider), plain_allowed=plain_allowed, sealing=sealing)


OLD_FIRST = KeyRing({"old": OLD, "new": NEW})


def as_it_is(shelf: TenantKeys) -> TenantKeys:
    return shelf


@dataclass
class Shelf:
    """The data keys of a store, with a call counter, errors and changes by an attacker."""

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

    def sample(self, kid: str, *, limit: int) -> Sequence[tuple[bytes, DataKey]]:
        return self.inner.sample(kid, limit=limit)

    def shred(self, tid: bytes) -> int:
        return self.inner.shred(tid)

    def count(self) -> Mapping[str, int]:
        return self.inner.count()


def ring_on(
    shelf: Shelf, provider: KeyProvider = RING, monotonic: Monotonic | None = None, *, limit: int = 4096
) -> DataKeyring:
    """The data keys as another process knows them."""
    return DataKeyring(provider, shelf, monotonic=monotonic or Monotonic(), step=lambda: 1, limit=limit)

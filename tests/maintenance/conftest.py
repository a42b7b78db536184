"""A store, and a codec whose ring a test can turn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import pytest

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, Record, SealContext, StoredResponse
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Clock, Codec, Store
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.rotate import RotateReport, SealReport, rotate, seal_plain
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql.schema import meta, metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, a_key, a_request, a_token, found
from tests.backends import BACKENDS, MakeStore
from tests.lab.programs import REDIS_KINDS
from tests.maintenance.neglected import store_at
from tests.maintenance.stores import SHARED, empty
from tests.maintenance.yard import Yard
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["maria_database", "sql_databases", "sql_stores"]

KEYS = {kid: os.urandom(32) for kid in ("2024", "2025", "2026")}
ANSWER = StoredResponse(201, metadata=(("Location", "/payments/1"),), body=b"paid")


class Office:
    """One process: its ring, its codec, and the store it shares with others."""

    def __init__(self, store: MemoryStore, clock: FrozenClock, kids: Sequence[str] | None = ("2025",)) -> None:
        self.store, self.clock = store, clock
        self.turn(kids)

    def turn(self, kids: Sequence[str] | None, *, required: bool = False) -> None:
        """A restart with this ring, the newest key first; or with encryption off."""
        self.ring = KeyRing({kid: KEYS[kid] for kid in kids or ("2025",)})
        keys = DataKeyring(self.ring, self.store.data_keys, monotonic=lambda: self.clock.now)
        self.codec = EncryptedCodec(
            EnvelopeCodec(compression=None), keys, sealing=kids is not None, plain_allowed=not required
        )

    def claim(
        self, key: StorageKey | None = None, *, quota: Quota | None = None
    ) -> tuple[StorageKey, bytes, SealContext]:
        key, token = key or a_key(), a_token()
        request = a_request(key)
        outcome = self.store.claim(request, token=token, lease=LEASE, quota=quota)
        assert isinstance(outcome, Grant)
        return key, token, SealContext(key, token, outcome.fence, request.fingerprint)

    def answer(
        self, result: StoredResponse = ANSWER, *, key: StorageKey | None = None, quota: Quota | None = None
    ) -> StorageKey:
        """A key that has been answered, in this process's way."""
        key, token, binding = self.claim(key, quota=quota)
        self.store.complete(key, token, self.codec.seal(result, binding), keep=KEEP)
        return key

    def opened(self, key: StorageKey) -> StoredResponse:
        record = found(self.store, key)
        assert record.payload is not None
        return self.codec.open(record.payload, SealContext(key, record.token, record.fence, record.fingerprint))

    def damage(self, key: StorageKey) -> Record:
        """Somebody else wrote to the store."""
        record = found(self.store, key)
        assert record.payload is not None
        assert self.store.responses.replace(
            key, record.payload, replace(record.payload, data=record.payload.data[::-1])
        )
        return found(self.store, key)

    def kid(self, key: StorageKey) -> str | None:
        payload = found(self.store, key).payload
        return None if payload is None or payload.sealed_by is None else payload.sealed_by.kid

    def rotate(self, *, batch: int = 2, codec: Codec | None = None, grace: float = 0.0, **parts: Any) -> RotateReport:
        parts.setdefault("drain", Batcher(batch))
        store = self.store
        return rotate(store.responses, store.data_keys, codec or self.codec, self.ring, grace=grace, **parts)

    def seal_plain(self, **parts: Any) -> SealReport:
        return seal_plain(self.store.responses, self.codec, self.ring, **{"drain": Batcher(), **parts})


def empty_store(kind: str, request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
    """Makes a store of this kind that has nothing of other tests' in it: a janitor looks at everything."""
    if kind in REDIS_KINDS:
        url = empty(kind, request)

        def make(clock: Clock) -> Store:
            store = store_at(url, clock)
            ends.callback(store.close)
            return cast(Store, store)

        return make
    make_store = BACKENDS[{"postgres": "postgres-insert"}.get(kind, kind)](request, ends)
    if kind not in SHARED:
        return make_store

    def lend(clock: Clock) -> Store:
        store = cast(SqlStore, make_store(clock))
        with store.database.base.begin() as connection:
            for table in reversed(metadata.sorted_tables):
                if table is not meta:
                    connection.execute(table.delete())
        return cast(Store, store)

    return lend


@pytest.fixture(params=("memory", f"tiered-{REDIS_KINDS[0]}", *SHARED))
def make_empty(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    with ExitStack() as ends:
        yield empty_store(request.param, request, ends)


@pytest.fixture
def office(clock: FrozenClock) -> Office:
    return Office(MemoryStore(clock), clock)


@pytest.fixture
def yard(clock: FrozenClock) -> Yard:
    return Yard(MemoryStore(clock), clock)

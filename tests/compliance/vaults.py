"""Stores that can be looked into and written to behind the library's back, as whoever has their password can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import MetaData, create_engine, select, update

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, StoredPayload
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.encoding import decode, encode
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.schema import records
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis, connect
from tests.stores.cached import PATIENT

FILES = "files"
"""The place of what stands in the files of a SQLite database, whatever its tables say."""

Change = Callable[[Record], Record]


@dataclass
class Vault:
    """One store. `config` makes an application use it."""

    config: dict[str, Any]
    places: Callable[[], dict[str, bytes]]
    """Everything that is in it, names included: by SQL table, and by the letter of Redis keys."""
    forge: Callable[[StorageKey, Change], None]
    """Put a changed record in the place of this key's."""
    garble: Callable[[StorageKey], None]
    """Make the whole record something that nobody can read."""
    ends: ExitStack = field(default_factory=ExitStack)
    url: str | None = None
    """Of its database, if it has one: an outbox is in that."""

    def dump(self) -> bytes:
        return b"".join(self.places().values())


def memory(request: pytest.FixtureRequest, ends: ExitStack) -> Vault:
    store = MemoryStore()
    room = store._shared

    def forge(key: StorageKey, change: Change) -> None:
        room.records[key] = change(room.records[key])

    def places() -> dict[str, bytes]:
        tenants = store.data_keys._tenants
        held = [asdict(record) for record in room.records.values()] + [list(room.records), tenants]
        return {"": repr(held).encode()}

    def garble(key: StorageKey) -> None:
        # The nearest to garbage that a dictionary of records can hold.
        room.records[key] = replace(room.records[key], payload=None)

    return Vault({"IDEMPOTENCY_STORE": store}, places, forge, garble)


def on_redis(request: pytest.FixtureRequest, ends: ExitStack) -> Vault:
    start: StartRedis = request.getfixturevalue("start_redis")
    url = start(REDIS_KINDS[0]).url
    client: redis.Redis = ends.enter_context(connect(url))

    def forge(key: StorageKey, change: Change) -> None:
        name = layout.keys(key)[0]
        client.set(name, encode(change(decode(client.get(name), now=0.0)), tid=key.tid), keepttl=True)  # type: ignore[arg-type]

    def garble(key: StorageKey) -> None:
        name = layout.keys(key)[0]
        held: Any = client.get(name)
        client.set(name, b"\xff" + held[1:], keepttl=True)

    return Vault(
        {"IDEMPOTENCY_STORE": url, "IDEMPOTENCY_AFTER_LOSS": "run"}, lambda: redis_places(client), forge, garble
    )


def redis_places(client: redis.Redis) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in client.scan_iter(count=1000):
        match client.type(name):
            case b"hash":
                content: Any = client.hgetall(name)
            case b"zset":
                content = client.zrange(name, 0, -1, withscores=True)
            case b"list":
                content = client.lrange(name, 0, -1)
            case _:
                content = client.get(name)
        letter = name.partition(b"}:")[2][:1].decode()
        # Both as it is and as its repr: a canary must not hide behind an escape.
        text = bytes(name) + (content if isinstance(content, bytes) else repr(content).encode())
        found[letter] = found.get(letter, b"") + text
    return found


def on_sqlite(request: pytest.FixtureRequest, ends: ExitStack) -> Vault:
    folder: Path = request.getfixturevalue("tmp_path")
    return _sql(f"sqlite:///{folder / 'records.db'}", ends, lambda: _files(folder))


def _files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def on_postgresql(request: pytest.FixtureRequest, ends: ExitStack) -> Vault:
    return _sql(request.getfixturevalue("postgres_url"), ends, lambda: b"")


def _sql(url: str, ends: ExitStack, files: Callable[[], bytes]) -> Vault:
    engine = create_engine(url)
    ends.callback(engine.dispose)
    upgrade(engine)

    def forge(key: StorageKey, change: Change) -> None:
        from flask_idempotency.stores.sql.database import Database
        from flask_idempotency.stores.sql.store import SqlStore

        store = SqlStore(Database(engine))
        record = store.read(key)
        store.close()
        assert record is not None
        changed = change(record)
        payload = changed.payload or StoredPayload(b"", 0, False, 0)
        by = payload.sealed_by
        columns = {"token": changed.token, "fence": changed.fence, "fingerprint": changed.fingerprint}
        columns |= {"response": payload.data, "status": payload.status, "response_size": payload.byte_size}
        columns |= {
            "wrapping_key_id": None if by is None else by.kid,
            "data_key_number": None if by is None else by.number,
        }
        columns |= {"state": "completed" if payload.success else "failed"}
        with engine.begin() as connection:
            connection.execute(update(records).where(records.c.record_id == key.rid).values(columns))

    def garble(key: StorageKey) -> None:
        with engine.begin() as connection:
            connection.execute(update(records).where(records.c.record_id == key.rid).values(fingerprint=b"?"))

    def places() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        metadata = MetaData()
        with engine.connect() as connection:
            metadata.reflect(connection)
            for name, table in metadata.tables.items():
                rows = [tuple(row) for row in connection.execute(select(table))]
                raw = [value for row in rows for value in row if isinstance(value, bytes)]
                found[name] = repr((name, rows)).encode() + b"".join(raw)
        return {**found, FILES: files()}

    return Vault({"IDEMPOTENCY_STORE": url}, places, forge, garble, url=url)


def tiered(request: pytest.FixtureRequest, ends: ExitStack) -> Vault:
    """SQLite with a Redis in front. What is forged is forged in the system of record, and the cache is empty."""
    start: StartRedis = request.getfixturevalue("start_redis")
    url = start(REDIS_KINDS[0]).url
    client: redis.Redis = ends.enter_context(connect(url))
    system = on_sqlite(request, ends)

    def forge(key: StorageKey, change: Change) -> None:
        system.forge(key, change)
        client.flushall()

    def garble(key: StorageKey) -> None:
        system.garble(key)
        client.flushall()

    config = {**system.config, "IDEMPOTENCY_REDIS_URL": url + PATIENT}
    return Vault(config, lambda: system.places() | redis_places(client), forge, garble, url=system.url)


VAULTS = {"memory": memory, "redis": on_redis, "sqlite": on_sqlite, "postgresql": on_postgresql, "tiered": tiered}

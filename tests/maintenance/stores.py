"""Stores that janitors of several processes may look after, and where they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers
from tests.sql_backends import make_tables

SHARED = (*REDIS_KINDS, "sqlite", "postgres")


def empty(kind: str, request: pytest.FixtureRequest) -> str:
    """The URL of a store of this kind, with nothing of other tests' in it: a janitor looks at everything."""
    if kind in REDIS_KINDS:
        servers: RedisServers = request.getfixturevalue("redis_servers")
        return servers.get(kind).url
    if kind == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        url = f"sqlite:///{folder / 'records.sqlite'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        name = f"janitors_{random.getrandbits(64):x}"
        server.create_database(name)
        url = server.url(name)
    make_tables(url)
    return url

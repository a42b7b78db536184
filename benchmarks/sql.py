"""Everything about records in SQL: on PostgreSQL first, and on SQLite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis

from benchmarks import databases, sql_requests, sql_trips
from benchmarks.cases import Case
from benchmarks.databases import MISSING, POSTGRESQL, Database, NotEmpty
from benchmarks.machine import Cores
from benchmarks.sql_cases import PLAIN, TIERED, TRANSACTIONAL, our_sql_cases
from benchmarks.table import Section

PROFILED: Final = {"insert": PLAIN, "transactional": TRANSACTIONAL, "tiered": TIERED}


def sections(
    url: str | None, client: redis.Redis, redis_url: str, cores: Cores, *, rounds: int, requests: int
) -> list[Section]:
    """Two tables for each database. Without a PostgreSQL there is a sentence where its tables would be."""

    def both(database: Database) -> list[Section]:
        return [
            sql_requests.section(database, client, redis_url, rounds=rounds, requests=requests),
            sql_trips.section(database, client, redis_url),
        ]

    with _postgresql(url, cores) as database:
        shown = [_missing()] if database is None else both(database)
    with databases.sqlite() as file:
        return [*shown, *both(file)]


@contextmanager
def one_case(name: str, path: str, url: str | None, redis_url: str, cores: Cores) -> Iterator[Case]:
    """One path through this library, for a profiler."""
    with _postgresql(url, cores) as found, databases.sqlite() as file, our_sql_cases(found or file, redis_url) as cases:
        chosen = [case for case, _ in cases if (case.app, case.path) == (PROFILED[name], path)]
        if not chosen:
            sys.exit(f"{PROFILED[name]}: {path} is not among what is measured")
        yield chosen[0]


@contextmanager
def _postgresql(url: str | None, cores: Cores) -> Iterator[Database | None]:
    try:
        with databases.postgresql(url, cores) as database:
            yield database
    except NotEmpty as error:
        sys.exit(str(error))


def _missing() -> Section:
    print(MISSING, file=sys.stderr)
    return Section(f"Records in {POSTGRESQL}", MISSING)

"""What is timed on a SQL database: each path through each application, and the floor that each is held against."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, TypeAlias

import redis

from benchmarks import apps, sql_apps
from benchmarks.cases import (
    BARE,
    CONFLICT,
    FIRST,
    MISMATCH,
    REPLAY,
    Case,
    conflict_case,
    first_case,
    keyed_cases,
    no_key_case,
    replay_case,
)
from benchmarks.databases import POSTGRESQL, Database
from benchmarks.sql_apps import SqlApp

BUSINESS = "business alone"
BY_HAND, BY_HAND_TRANSACTIONAL, BY_HAND_REDIS = "by hand", "by hand, transactional", "by hand, Redis"
PLAIN, ROW_LOCK, ADVISORY = "ours, insert", "ours, row_lock", "ours, advisory"
TRANSACTIONAL, TIERED, REDIS_GONE = "ours, transactional", "ours, tiered", "ours, tiered, Redis gone"

Path: TypeAlias = tuple[str, str]

# The hand-written case with the same statements. A mismatch is read like a replay; a cache that is gone is to cost
# nothing on top of the store behind it.
FLOORS: Final[dict[Path, Path]] = {
    **{(app, FIRST): (BY_HAND, FIRST) for app in (PLAIN, ROW_LOCK, ADVISORY)},
    **{(app, FIRST): (BY_HAND_TRANSACTIONAL, FIRST) for app in (TRANSACTIONAL, TIERED)},
    **{(app, REPLAY): (BY_HAND, REPLAY) for app in (PLAIN, ROW_LOCK, ADVISORY, TRANSACTIONAL)},
    (TIERED, REPLAY): (BY_HAND_REDIS, REPLAY),
    (REDIS_GONE, REPLAY): (TRANSACTIONAL, REPLAY),
    (PLAIN, CONFLICT): (BY_HAND, CONFLICT),
    (PLAIN, MISMATCH): (BY_HAND, REPLAY),
}


SqlCase: TypeAlias = tuple[Case, SqlApp]


@contextmanager
def sql_cases(database: Database, client: redis.Redis, redis_url: str) -> Iterator[list[SqlCase]]:
    """Every case on this database, ready to be sent, with the application that it goes through."""
    with ExitStack() as ends:
        rows = _until(ends, sql_apps.business(database.url))
        writing = _until(ends, sql_apps.by_hand_writing(database.url))
        joined = _until(ends, sql_apps.by_hand_transactional(database.url))
        reading = _until(ends, sql_apps.by_hand_reading(database.url))
        bare, cached = SqlApp(apps.bare()), SqlApp(apps.by_hand_reading(client))
        yield [
            (no_key_case(BARE, bare.flask), bare),
            (no_key_case(BUSINESS, rows.flask), rows),
            (first_case(BY_HAND, writing.flask), writing),
            (first_case(BY_HAND_TRANSACTIONAL, joined.flask), joined),
            (replay_case(BY_HAND, reading.flask), reading),
            (conflict_case(BY_HAND, writing.flask), writing),
            (replay_case(BY_HAND_REDIS, cached.flask), cached),
            *ends.enter_context(our_sql_cases(database, redis_url)),
        ]


@contextmanager
def our_sql_cases(database: Database, redis_url: str) -> Iterator[list[SqlCase]]:
    """The same of this library only."""
    with ExitStack() as ends:
        cases: list[SqlCase] = []
        for name, make, paths in _ours(database, redis_url, ends.enter_context(_nobody())):
            gate = apps.Gate()
            app = _until(ends, make(gate))
            keyed = ends.enter_context(keyed_cases(name, app.flask, gate))
            cases += [(case, app) for case in keyed if case.path in paths]
        yield cases


Ours: TypeAlias = tuple[str, Callable[[apps.Gate], SqlApp], tuple[str, ...]]


def _ours(database: Database, redis_url: str, nobody: str) -> Iterator[Ours]:
    url = database.url
    yield PLAIN, lambda gate: sql_apps.ours_plain(url, gate), (FIRST, REPLAY, CONFLICT, MISMATCH)
    if database.kind == POSTGRESQL:
        yield ROW_LOCK, lambda gate: sql_apps.ours_plain(url, gate, strategy="row_lock"), (FIRST, REPLAY)
        yield ADVISORY, lambda gate: sql_apps.ours_plain(url, gate, strategy="advisory"), (FIRST, REPLAY)
    yield TRANSACTIONAL, lambda gate: sql_apps.ours_transactional(url, gate), (FIRST, REPLAY)
    yield TIERED, lambda gate: sql_apps.ours_transactional(url, gate, redis_url=redis_url), (FIRST, REPLAY)
    yield REDIS_GONE, lambda gate: sql_apps.ours_transactional(url, gate, redis_url=nobody), (REPLAY,)


@contextmanager
def _nobody() -> Iterator[str]:
    """The URL of a port of our own on which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{closed.getsockname()[1]}/0"


def _until(ends: ExitStack, app: SqlApp) -> SqlApp:
    ends.callback(app.close)
    return app

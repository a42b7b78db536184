"""When a test runs: `core` on every push, `slow` and `matrix` after it, `soak` before a release.

A test is of the matrix if a store, server, or strategy that it uses differs from the seven that stand for all: see CORE. What
a test shows on SQLite, it shows again on PostgreSQL in the slow stage; the contract of stores and the compiled
statements have all of theirs in the core.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.lab.programs import REDIS_KINDS

FIRST: Final = REDIS_KINDS[0]

CORE: Final = (
    "memory",
    "fakeredis",
    "sqlite",
    "postgres-insert",
    "mariadb-insert",
    f"{FIRST}-url",
    f"tiered-{FIRST}-telling",
)
"""The stores that every push is tested on: one of each kind. `tests/backends.py` has all."""

STRATEGIES: Final = ("row_lock", "advisory")
"""The ways to claim on PostgreSQL that an application has to choose."""

SQLITE: Final = frozenset({"sqlite", "sqlite_url"})
SERVERS: Final = frozenset({"postgresql", "postgres", "postgres_url", "postgres-insert", "mariadb-insert"})
"""Names in parameters of the SQL stores of the core. A server takes a test three times as long as SQLite."""

CONTRACT: Final = "tests/stores/test_contract.py"
STATEMENTS: Final = "tests/stores/sql/test_statements.py::test_each_statement_reads_as_it_did_and_is_compiled_once"
"""It starts no server: SQLite shows nothing of what is sent to PostgreSQL."""

WHOLE: Final = (CONTRACT, STATEMENTS)
"""Of the core on each of its stores."""

RIGS: Final = frozenset({"cluster_rig", "cluster_rigs", "sentinel_rig", "sentinel_rigs", "clusters"})
POOLERS: Final = frozenset({"pgbouncer", "pgbouncer_url", "start_pgbouncer"})

TIME_IS_OVER: Final = "the time of this stage is over: other tests are left out at another commit"

SLOW_FOLDERS: Final = ("e2e", "lab", "benchmarks")
"""Their tests start servers and applications in processes, or measure."""

BY_FIXTURES: Final = ("compliance", "example_app", "maintenance", "outbox", "stores")
"""Folders in which a fixture may choose the database of a test."""

MAY_BE_SLOW: Final = re.compile(r"mark\.slow|[Pp]ostgres|BACKENDS|CORE|STORES")
"""What a file of tests of the slow stage has in its text, outside of those folders."""

TOGETHER: Final = re.compile(
    r"(tests/consumers/test_celery)(?:_workers)?\.py::"
    r"|(tests/browser)/test_(?:accessibility|chromium|console)\w*\.py::"
    r"|tests/(?:lab|stores/sql|e2e)/test_(galera)\.py::"
    r"|(tests/e2e/test_bad_input)\.py::.*?\[(gevent|gthread|sync|waitress)\b"
    r"|(tests/e2e/test_steps?(?:_losses)?)\.py::.*?\[(sqlite|postgresql|tiered|valkey|redis)"
)
"""Tests that start a server or a browser once for all of them. Those with equal groups run in one process of a run."""


def is_further(value: object) -> bool:
    """Return True if this parameter of a test names a store, server, or strategy that is not of the core."""
    if isinstance(value, tuple):
        return any(map(is_further, value))
    if not isinstance(value, str) or value in CORE:
        return False
    # To make a database of MariaDB takes each test a fifth of a second. Those of its own file are of the core.
    families = (f"{FIRST}-", "tiered-", "sqlite-", "postgres-", "pgbouncer-", "mariadb")
    return value in STRATEGIES or value.startswith(families) or any(kind in value for kind in REDIS_KINDS[1:])


def further_stages(item: pytest.Item) -> Iterator[str]:
    """Return the marks that this test gets for what it uses, beside those that stand in its file."""
    callspec = getattr(item, "callspec", None)
    fixtures = set(getattr(item, "fixturenames", ()))
    if (RIGS | POOLERS) & fixtures or (callspec is not None and any(map(is_further, callspec.params.values()))):
        yield "matrix"
    if any(folder in SLOW_FOLDERS for folder in item.nodeid.partition("::")[0].split("/")):
        yield "slow"


def is_on(item: pytest.Item, databases: frozenset[str]) -> bool:
    callspec = getattr(item, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    return any(isinstance(value, str) and value in databases for value in values)


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def repeated_on_servers(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests that show on a server for databases what the same function shows on SQLite."""
    shown = {function_of(item) for item in items if is_on(item, SQLITE) and not is_on(item, SERVERS)}
    for item in items:
        if is_on(item, SERVERS) and function_of(item) in shown and not item.nodeid.startswith(WHOLE):
            yield item


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_relative_to(config.rootpath):
        return None
    return True if is_of_no_use(collection_path, config.rootpath, config.getoption("markexpr")) else None


def is_of_no_use(path: Path, root: Path, stage: str) -> bool:
    """Return True if nothing in this file or folder is of the stage. To import all test files takes each process a minute."""
    slow = path.relative_to(root).parts[1:2] in [(folder,) for folder in SLOW_FOLDERS]
    if stage.startswith("slow ") and path.name.startswith("test_"):
        by_fixtures = path.relative_to(root).parts[1] in BY_FIXTURES
        return not slow and not by_fixtures and MAY_BE_SLOW.search(path.read_text(encoding="utf-8")) is None
    return slow and stage == "core"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stages")
    group.addoption(
        "--until", type=float, default=math.inf, help="skip the tests that begin after time.monotonic() is this"
    )
    group.addoption("--sooner", action="append", default=[], metavar="FILE", help="run the tests of this file first")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.getoption("until"):
        pytest.skip(TIME_IS_OVER)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_run_sooner(config: pytest.Config, items: list[pytest.Item]) -> None:
    # After pytest-randomly, whose order stays among those of the named files and among the rest.
    if sooner := frozenset(config.getoption("sooner")):
        items.sort(key=lambda item: item.location[0] not in sooner)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for stage in further_stages(item):
            item.add_marker(stage)
    for item in repeated_on_servers(items):
        if item.get_closest_marker("slow") is None:
            # By this name, the stage of the oldest SQLAlchemy finds what is quick enough for it.
            item.add_marker("repeated")
        item.add_marker("slow")
    for item in items:
        if not any(item.get_closest_marker(stage) for stage in ("slow", "matrix", "soak")):
            item.add_marker("core")


class Grouped(LoadGroupScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Runs tests that share a server in one process.

    The mark `xdist_group` would do that, but pytest 9.2 keeps the id of a test where pytest-xdist 3.8 does not look for it, and
    the mark has no effect.
    """

    def _split_scope(self, nodeid: str) -> str:
        found = TOGETHER.match(nodeid)
        return nodeid if found is None else " ".join(filter(None, found.groups()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    return Grouped(config, log) if config.getvalue("dist") == "loadgroup" else None

"""Each test runs at some stage, and every store is held to the contract on every push."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.__main__ import STAGES
from tests.backends import BACKENDS, REACHED, STORES
from tests.lab.programs import REDIS_KINDS
from tests.stages import (
    CONTRACT,
    CORE,
    SLOW_FOLDERS,
    STATEMENTS,
    TIME_IS_OVER,
    Grouped,
    is_further,
    is_of_no_use,
    pytest_collection_modifyitems,
    repeated_on_servers,
)

ROOT = Path(__file__).parents[2]


def test_the_contract_runs_on_every_store() -> None:
    assert set(BACKENDS) == {*STORES, *REACHED}


def test_a_store_that_is_not_of_the_core_is_of_the_matrix() -> None:
    assert [name for name in BACKENDS if not is_further(name)] == [name for name in BACKENDS if name in CORE]


def test_the_first_server_and_strategy_stand_for_the_others() -> None:
    assert not is_further(REDIS_KINDS[0])
    assert not is_further(("postgresql", "insert"))
    assert is_further(("postgresql", "advisory"))
    assert is_further("mariadb")


def test_a_test_is_of_the_core_only_if_it_is_of_no_other_stage(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        further = {"slow", "matrix", "soak"} & {mark.name for mark in item.iter_markers()}
        assert bool(further) != (item.get_closest_marker("core") is not None)


def test_a_stage_collects_every_file_that_has_tests_of_it(request: pytest.FixtureRequest) -> None:
    """The slow stage finds its files by a text in them: the mark, or where the databases of its tests come from."""
    stages = {"core": "core", "slow": "slow and not matrix and not soak"}
    missed = {
        (item.location[0], name)
        for item in request.session.items
        for name, stage in stages.items()
        if item.get_closest_marker(name) and is_of_no_use(item.path, ROOT, stage)
    }
    assert set() == missed
    assert is_of_no_use(ROOT / "tests" / "engine" / "test_policy.py", ROOT, stages["slow"])
    assert all(is_of_no_use(ROOT / "tests" / folder, ROOT, "core") for folder in SLOW_FOLDERS)


@pytest.mark.parametrize(
    ("file", "databases", "repeated"),
    [
        ("tests/outbox/test_a.py", ("sqlite", "postgresql"), ["postgresql"]),
        (
            "tests/web/test_a.py",
            ("memory", "sqlite", "postgres-insert", "mariadb-insert"),
            ["postgres-insert", "mariadb-insert"],
        ),
        ("tests/outbox/test_a.py", ("postgresql",), []),
        (CONTRACT, ("sqlite", "postgres-insert"), []),
    ],
)
def test_sqlite_stands_for_the_servers_where_a_test_has_both(
    file: str, databases: tuple[str, ...], repeated: list[str]
) -> None:
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{file}::test_a[{name}]", callspec=SimpleNamespace(params={"database": name}))
        for name in databases
    ]
    items.append(SimpleNamespace(nodeid=f"{file}::test_b"))

    assert [f"{file}::test_a[{name}]" for name in repeated] == [item.nodeid for item in repeated_on_servers(items)]


class Collected(SimpleNamespace):
    """A test of pytest, as far as stages look at it."""

    def add_marker(self, name: str) -> None:
        self.marks.add(name)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_the_oldest_sqlalchemy_meets_what_a_server_repeats() -> None:
    """Drivers of PostgreSQL differ more from one SQLAlchemy to the next than that of SQLite."""
    items: Any = [
        Collected(
            nodeid=f"tests/outbox/test_a.py::{test}[{name}]",
            callspec=SimpleNamespace(params={"database": name}),
            marks=set(own),
        )
        for test, own in (("test_a", ()), ("test_b", ("slow",)))
        for name in ("sqlite", "postgresql")
    ]

    pytest_collection_modifyitems(items)

    assert [{"core"}, {"slow", "repeated"}, {"slow"}, {"slow"}] == [item.marks for item in items]
    (stage,) = (each for each in STAGES if each.name == "oldest SQLAlchemy")
    assert "core or (repeated and not matrix and not soak)" in stage.arguments


def test_the_core_compares_the_statements_of_each_database() -> None:
    """That needs no server, and shows a change of what PostgreSQL gets before it is merged."""
    file, _, function = STATEMENTS.partition("::")
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{STATEMENTS}[{name}]", callspec=SimpleNamespace(params={"database": name}))
        for name in ("sqlite", "postgresql")
    ]

    assert [] == list(repeated_on_servers(items))
    assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("consumers/test_celery.py::test_a[x]", "consumers/test_celery_workers.py::test_b", True),
        ("e2e/test_bad_input.py::test_a[gthread-x]", "e2e/test_bad_input.py::TestB::test_b[gthread-y]", True),
        ("e2e/test_bad_input.py::test_a[gthread-x]", "e2e/test_bad_input.py::test_a[gevent-x]", False),
        ("e2e/test_bad_input.py::test_a[x]", "e2e/test_bad_input.py::test_a[y]", False),
        ("e2e/test_steps.py::test_a[valkey-9.1]", "e2e/test_steps.py::test_b[valkey-9.1-x]", True),
        ("e2e/test_steps.py::test_a[valkey-9.1]", "e2e/test_steps.py::test_a[sqlite]", False),
        ("e2e/test_steps.py::test_a[sqlite]", "e2e/test_step_losses.py::test_a[sqlite]", False),
        ("browser/test_console.py::test_a", "browser/test_accessibility.py::test_b[x]", True),
        ("browser/test_console.py::test_a", "browser/test_browser.py::test_b", False),
        ("e2e/test_race.py::test_a[sqlite]", "e2e/test_race.py::test_b[sqlite]", False),
    ],
)
def test_tests_that_share_a_server_run_in_one_process(first: str, second: str, together: bool) -> None:
    group = Grouped._split_scope
    scheduler = Grouped.__new__(Grouped)
    assert (group(scheduler, f"tests/{first}") == group(scheduler, f"tests/{second}")) == together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("-n", "0", "--until=0"), [TIME_IS_OVER, "2 skipped"]),
        (("-n", "1", "--until=0"), [TIME_IS_OVER, "2 skipped"]),
        (("-n", "0", "--until=inf", "--sooner=test_b.py"), ["ran test_b", "ran test_a"]),
    ],
)
def test_what_has_not_begun_in_time_is_left_out_and_said(
    tmp_path: Path, options: tuple[str, ...], shown: list[str]
) -> None:
    for name in ("test_a", "test_b"):
        (tmp_path / f"{name}.py").write_text(f"def {name}(): print('ran {name}')")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-s", "-p", "tests.stages", "-p", "xdist"]
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", *options, "."]

    # The other plugins take two seconds to load.
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)

    assert re.findall(f"ran test_.|2 skipped|{TIME_IS_OVER}", done.stdout) == shown

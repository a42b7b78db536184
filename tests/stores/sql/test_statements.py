"""What is sent, to the letter. Run with REWRITE_SNAPSHOTS=1 to have the files say what the code says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Dialect as Driver
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.sql.elements import CompilerElement

from flask_idempotency.stores.sql import completion, quota, statements, store
from flask_idempotency.stores.sql.admin import data_keys, janitor
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL, SQLITE

SNAPSHOTS = Path(__file__).parent / "snapshots"
DRIVERS: dict[str, Callable[[], Driver]] = {POSTGRESQL: PGDialect_psycopg, SQLITE: SQLiteDialect_pysqlite}

BOTH, ONLY_POSTGRESQL, ONLY_SQLITE = (POSTGRESQL, SQLITE), (POSTGRESQL,), (SQLITE,)
MODULES = (statements, completion, data_keys, quota, janitor, store)
PARTS = {
    "chosen",
    "given_up",
    "has_lapsed",
    "if_as_seen",
    "inserted",
    "is_absent",
    "is_answer",
    "may_be_sealed",
    "others_update",
    "owners",
    "regranted",
}
"""What several statements share."""
Made: TypeAlias = Callable[..., Any]
NOT_ON_BOTH: dict[Made, tuple[str, ...]] = {
    statements.claim_or_read: ONLY_POSTGRESQL,
    statements.read_locked: ONLY_POSTGRESQL,
    statements.advisory_lock: ONLY_POSTGRESQL,
    statements.wait_to_reclaim: ONLY_POSTGRESQL,
    statements.has_written: ONLY_POSTGRESQL,
    statements.next_fence: ONLY_SQLITE,
    quota.insert_within: ONLY_POSTGRESQL,
    quota.reclaim_within: ONLY_POSTGRESQL,
    quota.tenant_lock: ONLY_POSTGRESQL,
}
FORMS = [form for number in range(4) for form in combinations(("sealed", "counted", "tells"), number)]


def public(module: ModuleType) -> Iterator[Made]:
    for name, made in vars(module).items():
        if not isfunction(made) or made.__module__ != module.__name__ or name.startswith("_") or name in PARTS:
            continue
        # Others than statements stand beside them.
        if next(iter(signature(made).parameters), None) in ("dialect", "_"):
            yield made


def named() -> dict[str, tuple[Made, tuple[str, ...]]]:
    """Every statement by the name of its snapshot, and where it is sent."""
    found: dict[str, tuple[Made, tuple[str, ...]]] = {}
    for module in MODULES:
        folder = "" if module is statements else f"{module.__name__.rpartition('.')[2].removesuffix('_statements')}_"
        for made in public(module):
            if made not in (completion.complete, completion.settle):
                found[f"{folder}{made.__name__}"] = made, NOT_ON_BOTH.get(made, BOTH)
    for form in FORMS:
        options: dict[str, Any] = dict.fromkeys(form, True)
        found["_".join(("complete", *form))] = partial(completion.complete, **options), BOTH
        if "tells" not in form:
            found["_".join(("settle", *form))] = partial(completion.settle, **options), BOTH
    return found


STATEMENTS = named()
EVERY = [(name, database) for name, (_, databases) in STATEMENTS.items() for database in databases]


@pytest.mark.parametrize(("name", "database"), EVERY)
def test_a_statement_reads_as_it_did(name: str, database: str) -> None:
    """A change of what is sent is seen by whoever reviews it, on every SQLAlchemy that we work with."""
    made: CompilerElement = STATEMENTS[name][0](DIALECTS[database])
    text = f"{made.compile(dialect=DRIVERS[database]())}\n"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    snapshot = SNAPSHOTS / database / f"{name}.sql"
    if os.environ.get("REWRITE_SNAPSHOTS") == "1":
        snapshot.write_text(text)

    assert snapshot.read_text() == text


def test_every_snapshot_is_of_a_statement() -> None:
    """No file is left of one that is gone."""
    kept = {path.relative_to(SNAPSHOTS).as_posix() for path in SNAPSHOTS.rglob("*.sql")}

    assert {f"{database}/{name}.sql" for name, database in EVERY} == kept


@pytest.mark.parametrize(("name", "database"), EVERY)
def test_a_statement_is_compiled_once(name: str, database: str) -> None:
    """What makes SQLAlchemy's cache recognise it is there."""
    assert STATEMENTS[name][0](DIALECTS[database])._generate_cache_key() is not None

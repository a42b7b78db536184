"""What is sent, to the letter. Run with REWRITE_SNAPSHOTS=1 to have the files say what the code says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Dialect as Driver
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.sql.elements import CompilerElement

from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL, SQLITE, Dialect

SNAPSHOTS = Path(__file__).parent / "snapshots"
DRIVERS: dict[str, Callable[[], Driver]] = {POSTGRESQL: PGDialect_psycopg, SQLITE: SQLiteDialect_pysqlite}

BOTH, ONLY_POSTGRESQL, ONLY_SQLITE = (POSTGRESQL, SQLITE), (POSTGRESQL,), (SQLITE,)
STATEMENTS: dict[Callable[[Dialect], Any], tuple[str, ...]] = {
    statements.read: BOTH,
    statements.standing: BOTH,
    statements.renew: BOTH,
    statements.mark: BOTH,
    statements.mark_early: BOTH,
    statements.complete: BOTH,
    statements.complete_and_tell: BOTH,
    statements.release: BOTH,
    statements.hold: BOTH,
    statements.insert: BOTH,
    statements.take_over: BOTH,
    statements.reclaim: BOTH,
    statements.quarantine: BOTH,
    statements.claim_or_read: ONLY_POSTGRESQL,
    statements.read_locked: ONLY_POSTGRESQL,
    statements.advisory_lock: ONLY_POSTGRESQL,
    statements.has_written: ONLY_POSTGRESQL,
    statements.next_fence: ONLY_SQLITE,
}
EVERY = [(statement, database) for statement, databases in STATEMENTS.items() for database in databases]


@pytest.mark.parametrize(("statement", "database"), EVERY, ids=[f"{made.__name__}-{on}" for made, on in EVERY])
def test_a_statement_reads_as_it_did(statement: Callable[[Dialect], CompilerElement], database: str) -> None:
    """
    A change of what is sent is seen by whoever reviews it, on every SQLAlchemy that we work with.
    """
    text = f"{statement(DIALECTS[database]).compile(dialect=DRIVERS[database]())}\n"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    snapshot = SNAPSHOTS / database / f"{statement.__name__}.sql"
    if os.environ.get("REWRITE_SNAPSHOTS") == "1":
        snapshot.write_text(text)

    assert snapshot.read_text() == text


def test_every_statement_has_a_snapshot() -> None:
    """
    None is sent that nobody has seen, and no file is left of one that is gone.
    """
    public = {name for name, made in vars(statements).items() if getattr(made, "__module__", "") == statements.__name__}
    functions = {name for name in public if not name.startswith("_") and name.islower()}
    kept = {path.relative_to(SNAPSHOTS).as_posix() for path in SNAPSHOTS.rglob("*.sql")}

    assert {made.__name__ for made in STATEMENTS} == functions
    assert {f"{database}/{made.__name__}.sql" for made, database in EVERY} == kept


@pytest.mark.parametrize(("statement", "database"), EVERY, ids=[f"{made.__name__}-{on}" for made, on in EVERY])
def test_a_statement_is_compiled_once(statement: Callable[[Dialect], Any], database: str) -> None:
    """
    What makes SQLAlchemy's cache recognise it is there.
    """
    assert statement(DIALECTS[database])._generate_cache_key() is not None

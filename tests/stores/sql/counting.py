"""What a store sends while something is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from flask_idempotency.stores.sql.store import SqlStore


@contextmanager
def sent(store: SqlStore) -> Iterator[list[str]]:
    """The first words of every statement that goes out in the meantime, without the schema of our tables."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(" ".join(statement.replace("public.", "").split()[:2]))

    engine = store.database.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)

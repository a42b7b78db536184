"""What SQLAlchemy's own logging must not tell: at DEBUG it writes each row, whatever its engine was told of parameters.

In ours there are tenants, principals, tokens and answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine

EngineT = TypeVar("EngineT", bound=Engine)


def keep_rows_to_itself(engine: EngineT) -> EngineT:
    """The same engine, that from now on logs what it sends, and never what it gets."""
    engine._should_log_debug = _never  # type: ignore[method-assign]
    return engine


@contextmanager
def unlogged(connection: Connection) -> Iterator[None]:
    """On a connection of the application's, whose engine may log parameters as well: in here nothing is logged."""
    told = connection._echo
    connection._echo = False
    try:
        yield
    finally:
        connection._echo = told


def _never() -> bool:
    return False

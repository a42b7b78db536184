"""Find the schema of our tables once, and name it in every statement.

An application may lead each request of a tenant to a schema of that tenant: `SET LOCAL search_path`, a
`schema_translate_map`, a listener on its pool. That is for its own tables. Our statements run on the same connections, and
name the schema in which the tables were found when the store opened its first connection.

Statements of SQLAlchemy's have no schema until they are sent. They get it from an execution option of the call, which
replaces the translate map of the connection and its engine. Text gets it from `named`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, TextClause, bindparam, text
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import StatementError

from flask_idempotency.stores.sql.dialects import MYSQL, SQLITE, kind_of

PATH: Final = "flask_idempotency_path"
"""The entry of a connection's `info` with the schemas of its search path, as the application's connect listeners left it."""

SCHEMA: Final = "flask_idempotency_schema"
"""The execution option of our connections with the name of the schema."""

_PLAIN: Final = re.compile(r"[^'\":%\[\]\\{}]+")
"""Names that may stand in text and in a literal of it. Other names stay out of the statements."""

READ_PATH: Final = "SELECT array_to_json(current_schemas(false))::text"

_FOUND: Final = text(
    "SELECT c.relname, n.nspname FROM pg_catalog.pg_class c"
    " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.relkind IN ('r', 'p', 'v', 'f')"
    " AND c.relname IN (SELECT json_array_elements_text(CAST(:names AS json)))"
    " AND (n.nspname IN (SELECT json_array_elements_text(CAST(:path AS json))) OR pg_table_is_visible(c.oid))"
)

_FOUND_MYSQL: Final = text(
    "SELECT table_schema FROM information_schema.tables WHERE table_schema = database() AND table_name IN :names LIMIT 1"
).bindparams(bindparam("names", expanding=True))


def find(connection: Connection, tables: Iterable[str]) -> tuple[bool, str | None]:
    """Return whether our tables are there yet, and their schema. None: do not name it. They are not there, or a listener of
    the application's pool chooses it for each checkout.

    On PostgreSQL, look in the search path that the connection had before the application's pool gave it out: a tenant may
    have tables of the same names. The first of `tables` that is there decides. On MySQL it is the database of the URL.
    """
    if connection.dialect.name == SQLITE:
        # A name without a schema means the main file, whatever is attached. In RETURNING, SQLite knows no other name.
        return True, None
    if kind_of(connection.dialect.name) == MYSQL:
        database: str | None = connection.execute(_FOUND_MYSQL, {"names": list(tables)}).scalar()
        return database is not None, database if _PLAIN.fullmatch(database or "") else None
    path: str = connection.info.get(PATH) or connection.exec_driver_sql(READ_PATH).scalar_one()
    rows = connection.execute(_FOUND, {"path": path, "names": json.dumps(list(tables))}).all()
    order = {name: number for number, name in enumerate(json.loads(path))}
    nearest: dict[str, str] = {}
    for table, schema in sorted((row for row in rows if row.nspname in order), key=lambda row: order[row.nspname]):
        nearest.setdefault(table, schema)
    if not nearest:
        return bool(rows), None
    home = next(nearest[table] for table in tables if table in nearest)
    # An upgrade under another search path may have made some of the tables elsewhere.
    several = len(set(nearest.values())) > 1
    return True, None if several or not _PLAIN.fullmatch(home) else home


def options(schema: str | None) -> dict[str, Any]:
    """Return the execution options that name this schema, and keep every translate map of the application away."""
    return {"schema_translate_map": {} if schema is None else {None: schema}, SCHEMA: schema}


def schema_of(connection: Connection) -> str | None:
    """Return the schema that the statements of this connection name. None: its search path decides."""
    schema: str | None = connection.get_execution_options().get(SCHEMA)
    return schema


def prefix(connection: Connection) -> str:
    """Return what stands before the name of a table in text: the schema and a dot, or nothing."""
    schema = schema_of(connection)
    return "" if schema is None else f"{connection.dialect.identifier_preparer.quote_schema(schema)}."


def named(connection: Connection, sql: str) -> TextClause:
    """Return this SQL with the schema of our tables for each `{schema}`."""
    return text(sql.replace("{schema}", prefix(connection)))


class NamedConnection:
    """The connection of an application's session, for our statements: its translate maps do not reach them."""

    __slots__ = ("_connection", "_options", "dialect")

    def __init__(self, connection: Connection, options: Mapping[str, Any]) -> None:
        self._connection = connection
        self._options: Any = options
        self.dialect: EngineDialect = connection.dialect

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        try:
            return self._connection.execute(statement, parameters, execution_options=self._options)
        except StatementError as error:
            # The application's engine may show parameters, and these hold tokens and responses.
            error.hide_parameters = True
            raise

    def scalar(self, statement: Any, parameters: Any = None) -> Any:
        return self.execute(statement, parameters).scalar()

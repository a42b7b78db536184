"""Add to a database what it lacks of the declared tables, and of the rows and settings that go with them.

Each part looks first and adds only what is missing: on PostgreSQL even `CREATE INDEX IF NOT EXISTS` waits for all writers, and
new writers wait for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import Connection, Table, inspect
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable, SetColumnComment, SetTableComment

from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.dialects import MYSQL, POSTGRESQL, kind_of
from flask_idempotency.stores.sql.schema import FENCES, SEEDED


def add_parts(connection: Connection, tables: Collection[Table]) -> None:
    """Create what the database lacks of these tables, of their later columns and of their indexes."""
    gaps = schema.lacks(connection, [table.name for table in tables])

    def run(before: str, element: Any) -> None:
        # As text: an application's `schema_translate_map` would lead an element to another schema.
        connection.exec_driver_sql(f"{before}{element.compile(dialect=connection.dialect)}")

    for table in tables:
        if table.name in gaps.tables:
            run("", CreateTable(table, if_not_exists=True))
        for name in schema.LATER.get(table.name, ()):
            if f"{table.name}.{name}" in gaps.columns:
                run(f"ALTER TABLE {table.name} ADD COLUMN ", CreateColumn(table.columns[name]))
    # Before the indexes, because it takes the strongest lock: to raise a weaker one later could end in a deadlock.
    if connection.dialect.name == POSTGRESQL:
        _store(connection, {table.name for table in tables})
    for table in tables:
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            if table.name in gaps.tables or index.name in gaps.indexes:
                run("", CreateIndex(index, if_not_exists=kind_of(connection.dialect.name) != MYSQL))


# A fillfactor that an operator has set stays.
_NO_FILLFACTOR: Final = "NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false) FROM pg_class WHERE oid"
_STORED_OTHERWISE: Final = "attstorage <> 'e' FROM pg_attribute WHERE attname = 'payload' AND attrelid"


def _store(connection: Connection, names: set[str]) -> None:
    """Set the storage parameters of these tables."""
    for name, statement in schema.STORAGE.items():
        missing = _STORED_OTHERWISE if name == schema.steps.name else _NO_FILLFACTOR
        if name in names and connection.exec_driver_sql(f"SELECT {missing} = to_regclass('{name}')").scalar():
            connection.exec_driver_sql(statement % {"fullname": name})


def add_facts(connection: Connection) -> None:
    """Add the number of the store and the source of its fences. Fences only rise."""
    for statement in schema.facts(kind_of(connection.dialect.name), schema.meta.name):
        connection.exec_driver_sql(statement)
    if connection.dialect.name == POSTGRESQL:
        for condition, *statements in _SEQUENCE:
            if connection.exec_driver_sql(condition).scalar():
                for statement in statements:
                    connection.exec_driver_sql(statement)


_SEQUENCE: Final = (
    (
        f"SELECT to_regclass('{FENCES}') IS NULL",
        f"CREATE SEQUENCE {FENCES} AS BIGINT OWNED BY idempotency_fence_numbers.number",
        f"ALTER TABLE idempotency_fence_numbers ALTER COLUMN number SET DEFAULT nextval('{FENCES}')",
    ),
    (
        f"SELECT seqcache <> 1 OR last_value < {SEEDED} FROM pg_sequence, {FENCES} WHERE seqrelid = to_regclass('{FENCES}')",  # noqa: S608 - our own words
        # A session that caches numbers would give a later claim a lower fence. Until the commit, this statement also locks
        # the sequence: otherwise setval could go below a fence that another session takes now.
        f"ALTER SEQUENCE {FENCES} CACHE 1",
        f"SELECT setval('{FENCES}', clock.us) FROM {FENCES} AS fences,"  # noqa: S608
        " (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) AS clock WHERE fences.last_value < clock.us",
    ),
)
"""Conditions, and the statements to run if they are true: these lock even if they change nothing."""


def comment(connection: Connection, tables: Collection[Table]) -> None:
    """Give tables and columns the comments of this release. SQLite keeps none.

    Change only those that differ: a change locks the table.
    """
    if connection.dialect.name != POSTGRESQL:
        return
    inspector, names = inspect(connection), [table.name for table in tables]
    comments, columns = inspector.get_multi_table_comment(None, names), inspector.get_multi_columns(None, names)
    for table in tables:
        if comments[None, table.name]["text"] != table.comment:
            connection.execute(SetTableComment(table))
        for found in columns[None, table.name]:
            column = table.columns.get(found["name"])
            if column is not None and column.comment not in (None, found["comment"]):
                connection.execute(SetColumnComment(column))

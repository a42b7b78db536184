"""Everything a database says about its own tables, in a form that two databases can be compared by."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, Row, text

from flask_idempotency.stores.sql.migrations import version

Catalogue = dict[str, list[tuple[object, ...]]]

_POSTGRESQL = {
    "tables": """
        SELECT relname, relkind, reloptions, obj_description(oid, 'pg_class') FROM pg_class
        WHERE relnamespace = 'public'::regnamespace ORDER BY 1""",
    "columns": """
        SELECT attrelid::regclass::text, attname, format_type(atttypid, atttypmod), attnotnull, attstorage, attcollation,
               pg_get_expr(adbin, adrelid), col_description(attrelid, attnum)
        FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND attnum > 0 ORDER BY 1, attnum""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, contype, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
    "sequences": """
        SELECT sequencename, data_type::text, start_value, min_value, max_value, increment_by, cycle, cache_size,
               last_value > 10 ^ 15 FROM pg_sequences ORDER BY 1""",
    "facts": "SELECT name, CASE name WHEN 'store' THEN -1 ELSE value END FROM idempotency_meta ORDER BY 1",
}

_SQLITE = {
    "made": "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY 1, 2",
    "facts": """
        SELECT name, CASE name WHEN 'fence' THEN value > 1e15 WHEN 'store' THEN -1 ELSE value END
        FROM idempotency_meta ORDER BY 1""",
}


def catalogue(connection: Connection) -> Catalogue:
    """What was made, without what differs by when it was made, or by how its statement was laid out."""
    queries = _POSTGRESQL if connection.dialect.name == "postgresql" else _SQLITE
    found = {what: [_plain(row) for row in connection.execute(text(sql))] for what, sql in queries.items()}
    if "made" in found:
        found["made"] = [(*row, _parts(sql)) for *row, sql in found["made"]]
    return found


def _parts(sql: object) -> object:
    """The columns and constraints in any order: SQLite writes a column that is added later behind the constraints."""
    head, _, body = str(sql).removesuffix(")").partition("(")
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(body):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(body[begin:index])
            begin = index + 1
    return head, tuple(sorted([*parts, body[begin:]]))


def _plain(row: Row[Any]) -> tuple[object, ...]:
    return tuple("".join(value.split()) if isinstance(value, str) else value for value in row)


def found(engine: Engine) -> Catalogue:
    with engine.connect() as connection:
        return catalogue(connection)


def reached(engine: Engine) -> int:
    """The schema's version."""
    with engine.connect() as connection:
        return version(connection)

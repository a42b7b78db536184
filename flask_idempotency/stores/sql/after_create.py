"""What a `MetaData` cannot say, for those who make the tables with `create_all`: the same as the migrations make."""

from __future__ import annotations

from typing import Final

from sqlalchemy import DDL, Table, event

# Responses arrive compressed, so the server need not try. A record is written twice and grows in between: free space on
# the page keeps both versions there.
_STORAGE: Final = "ALTER TABLE %(fullname)s SET (fillfactor = 80), ALTER COLUMN response SET STORAGE EXTERNAL"
# Its rows are updated often: with free space on the page, an update touches no index.
_ROOM: Final = "ALTER TABLE %(fullname)s SET (fillfactor = 50)"
_VERSION: Final = "INSERT INTO %(fullname)s (name, value) VALUES ('schema_version', %(version)s)"
# Random, so that no two databases have the same: answers in a Redis that they share are told apart by it.
_STORE_POSTGRESQL: Final = (
    "INSERT INTO %(fullname)s (name, value) SELECT 'store',"
    " ('x' || left(hex, 12) || right(hex, 4))::bit(64)::bigint & 9223372036854775807"
    " FROM replace(gen_random_uuid()::text, '-', '') AS hex"
)
_STORE_SQLITE: Final = "INSERT INTO %(fullname)s (name, value) VALUES ('store', random() & 9223372036854775807)"
# From the clock and not from one, so that fences rise even over tables that were dropped and made anew.
_FENCE_FACT: Final = (
    "INSERT INTO %(fullname)s (name, value)"
    " VALUES ('fence', CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)"
)
_FENCE_SEQUENCE: Final = (
    "SELECT setval(pg_get_serial_sequence('%(fullname)s', 'number'),"
    " (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
)


def complete(records: Table, meta: Table, fence_numbers: Table, quota_buckets: Table, *, version: int) -> None:
    """From now on `create_all` also sets how rows are stored, and writes version, store number and first fence."""
    _after(records, _STORAGE, dialect="postgresql")
    _after(quota_buckets, _ROOM, dialect="postgresql")
    _after(meta, _VERSION, version=version)
    _after(meta, _STORE_POSTGRESQL, dialect="postgresql")
    _after(meta, _STORE_SQLITE, dialect="sqlite")
    _after(meta, _FENCE_FACT, dialect="sqlite")
    _after(fence_numbers, _FENCE_SEQUENCE, dialect="postgresql")


def _after(target: Table, statement: str, *, dialect: str | None = None, **words: object) -> None:
    ddl = DDL(statement, context=words)  # type: ignore[no-untyped-call]
    event.listen(target, "after_create", ddl.execute_if(dialect=dialect))

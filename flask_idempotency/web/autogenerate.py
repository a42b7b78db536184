"""Whether `flask db migrate` would write a migration that drops the store's tables.

Alembic drops what the application's metadata lacks. From here Flask-Migrate's arguments can be seen, and the text of its
`env.py`. What another `env.py` does cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from flask import Flask

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.store import Schema

_REMEDY: Final = (
    "Pass include_object=flask_idempotency.sql.include_object to Migrate(…), or to context.configure(…) in env.py; or "
    "declare the tables with flask_idempotency.sql.include_in(metadata)."
)
_DECIDES: Final = ("include_object", "include_name", "flask_idempotency")
"""Words in `env.py` that show that it may choose by itself which tables are compared."""


def autogenerate(app: Flask, schema: Schema | None) -> list[Finding]:
    """Empty for a store without tables. Must be called in an application context."""
    if schema is None:
        return []
    # Needs a package that is optional; a store with tables of ours has it.
    from flask_idempotency.stores.sql.admin.schema_check import SqlSchema

    if not isinstance(schema, SqlSchema):
        return []
    migrate = app.extensions.get("migrate")
    if migrate is None:
        return [_without_flask_migrate(schema)]
    if any(_names() <= set(metadata.tables) for metadata in _metadatas(migrate.db)):
        return [_fine("Flask-Migrate knows the tables as the application's own.")]
    return [_with_flask_migrate(migrate, schema)]


def _without_flask_migrate(schema: Any) -> Finding:
    if not schema.knows_alembic():
        return _fine("No migration of Alembic's was ever run in this database.")
    text = "Alembic is used on this database. Its env.py cannot be seen from here, and may drop the tables."
    return Finding(
        "autogenerate",
        Verdict.UNKNOWN,
        text,
        "See that `alembic check` names none of them. If it does: in env.py pass "
        "include_object=flask_idempotency.sql.include_object to context.configure(…), or declare the tables with "
        "flask_idempotency.sql.include_in(metadata).",
    )


def _with_flask_migrate(migrate: Any, schema: Any) -> Finding:
    certain = _is_same(migrate.db, schema)
    if certain is False:
        return _fine("The tables are in another database than those that Flask-Migrate compares.")
    left_alone = _leaves_alone(migrate.configure_args)
    if left_alone:
        return _fine("Flask-Migrate leaves the tables alone.")
    text = (
        "`flask db migrate` writes a migration that drops the tables: they are in its database and not in its metadata."
    )
    if certain and left_alone is False and not _env_decides(migrate.directory):
        return Finding("autogenerate", Verdict.FAULT, text, _REMEDY)
    why = "the database may be another one" if certain is None else "env.py or a function of yours may leave them alone"
    unknown = f"`flask db migrate` may write a migration that drops the tables; it cannot be seen from here: {why}."
    return Finding("autogenerate", Verdict.UNKNOWN, unknown, f"Read the next migration before you run it. {_REMEDY}")


def _metadatas(db: Any) -> Iterable[Any]:
    # Flask-SQLAlchemy 3 has one for each bind; other extensions have one, or none.
    several = getattr(db, "metadatas", None)
    if several is not None:
        return list(several.values())
    metadata = getattr(db, "metadata", None)
    return [] if metadata is None else [metadata]


def _is_same(db: Any, schema: Any) -> bool | None:
    """Whether Flask-Migrate compares the store's database. None: the names are the same, and the hosts differ."""
    from flask_idempotency.stores.sql.admin.schema_check import place_of

    ours = schema.place()
    engines = getattr(db, "engines", None)
    theirs = [place_of(engine.url) for engine in (engines.values() if engines else [db.engine])]
    if ours in theirs:
        return True
    # One server may have several names.
    return None if any(each[:2] == ours[:2] for each in theirs) else False


def _leaves_alone(arguments: Any) -> bool | None:
    """What Flask-Migrate's own arguments say of the tables. None: the application's function failed on them."""
    from flask_idempotency.stores.sql.schema import metadata

    include_object, include_name = arguments.get("include_object"), arguments.get("include_name")
    try:
        for name, table in metadata.tables.items():
            parents = {"schema_name": None, "table_name": name, "schema_qualified_table_name": name}
            compared = include_name is None or include_name(name, "table", parents)
            if compared and (include_object is None or include_object(table, name, "table", True, None)):
                return False
    except Exception:  # noqa: BLE001 - a function of the application's, which was made for Alembic alone
        return None
    return True


def _env_decides(directory: str) -> bool:
    try:
        text = (Path(directory) / "env.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return any(word in text for word in _DECIDES)


def _names() -> set[str]:
    from flask_idempotency.stores.sql.schema import metadata

    return set(metadata.tables)


def _fine(text: str) -> Finding:
    return Finding("autogenerate", Verdict.FINE, text)

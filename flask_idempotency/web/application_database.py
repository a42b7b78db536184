"""The database that Flask-SQLAlchemy keeps for an application, found when it is needed: `flask-sqlalchemy://`."""

from __future__ import annotations

from typing import Any

from flask import Flask, appcontext_pushed

from flask_idempotency.engine.errors import ConfigurationError


def declare_tables(app: Flask) -> None:
    """Declare the store's tables in `db.metadata`: now, or when the first application context is pushed.

    Without them Flask-Migrate would write a migration that drops them. Every `flask` command, `db.create_all()` and
    every request pushes a context first, so Flask-SQLAlchemy may be set up after us.
    """
    if not _declared(app):
        appcontext_pushed.connect(_at_context, app)


def _at_context(app: Flask, **_: Any) -> None:
    if _declared(app):
        appcontext_pushed.disconnect(_at_context, app)


def _declared(app: Flask) -> bool:
    # Needs a package that is optional; a store on Flask-SQLAlchemy has it.
    from flask_idempotency.stores.sql.schema import include_in

    database = app.extensions.get("sqlalchemy")
    if database is None:
        return False
    # Of the default bind. Other extensions that are registered by this name keep no metadata.
    metadata = getattr(database, "metadata", None)
    if metadata is not None:
        include_in(metadata)
    return True


class ApplicationDatabase:
    """Implements `assembly.ApplicationDatabase`. Knows Flask-SQLAlchemy by its entry in `app.extensions` only."""

    def __init__(self, app: Flask) -> None:
        self._app = app

    def engine(self) -> Any:
        """The engine of the default bind: where the application's rows are, and our records with them."""
        with self._app.app_context():
            return self._extension().engine

    def engines(self) -> list[Any]:
        """Every engine that its sessions may use by now, those of other binds and applications included.

        A forked child asks before it does anything else. So no context is entered here: to leave one would run the
        application's own teardown functions.
        """
        made: Any = getattr(self._app.extensions.get("sqlalchemy"), "_app_engines", {})
        return [engine for engines in made.values() for engine in engines.values()]

    def session(self) -> Any:
        """The scoped session that views write with, `db.session`."""
        return self._extension().session

    def _extension(self) -> Any:
        try:
            return self._app.extensions["sqlalchemy"]
        except KeyError:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE is flask-sqlalchemy://, and this application has no Flask-SQLAlchemy. Call "
                "db.init_app(app) before the first request, or give the URL of a database."
            ) from None

"""The application's own database, in Flask-SQLAlchemy or Flask-SQLAlchemy-Lite: its engines, its session and its metadata."""

from __future__ import annotations

import logging
from typing import Any

from flask import Flask, appcontext_pushed, g, has_app_context

from flask_idempotency.assembly import engines_made
from flask_idempotency.engine.errors import ConfigurationError

_log = logging.getLogger("flask_idempotency")


def declare_tables(app: Flask) -> None:
    """Declare the store's tables in `db.metadata`: now, or when the first application context is pushed.

    If the records are elsewhere, declare only that of the outbox.

    Without them Flask-Migrate would write a migration that drops them. Every `flask` command, `db.create_all()` and
    every request pushes a context first, so Flask-SQLAlchemy may be set up after us.
    """
    if not _declared(app):
        appcontext_pushed.connect(_declare_late, app)


def _declare_late(app: Flask, **_: Any) -> None:
    """Declare the tables while a context is pushed. Never raises: Flask would leave it to the next request of the thread."""
    try:
        if not _declared(app):
            return
    except Exception as error:  # noqa: BLE001 - whatever it is; a claim raises it again where it matters
        _log.error("The tables of the store are not in the metadata of the application: %s", error)
    appcontext_pushed.disconnect(_declare_late, app)


def _declared(app: Flask) -> bool:
    # Needs a package that is optional; a store on Flask-SQLAlchemy has it.
    from flask_idempotency.stores.sql.schema import include_in

    database = app.extensions.get("sqlalchemy")
    if database is None:
        return False
    _refuse_others(database)
    # This is the metadata of the default bind. Another extension of this name may have none.
    metadata = getattr(database, "metadata", None)
    if metadata is not None:
        include_in(metadata, records=app.extensions["idempotency"].settings.of_application)
    return True


class ContextSessions:
    """What Flask-SQLAlchemy-Lite keeps for the current application context, in the shape of a `scoped_session`.

    It has the four attributes that transactional work uses: a call, `registry`, `has` and `session_factory`.
    """

    def __init__(self, database: Any) -> None:
        self._database = database
        self.registry = self

    def __call__(self) -> Any:
        return self._database.session

    def has(self) -> bool:
        """Return whether this context has used its session."""
        return has_app_context() and "default" in g.get("_sqlalchemy_sessions", ())

    @property
    def session_factory(self) -> Any:
        return self._database.sessionmaker


class ApplicationDatabase:
    """Implements `assembly.ApplicationDatabase`. Knows the extension by its entry in `app.extensions` only.

    That is Flask-SQLAlchemy or Flask-SQLAlchemy-Lite, or has the same attributes: `engine` and `engines`; and `session`, a
    `scoped_session`, or `session` and `sessionmaker`.
    """

    def __init__(self, app: Flask) -> None:
        self._app = app

    def engine(self) -> Any:
        """Return the engine of the default bind, which holds the application's rows and the records."""
        with self._app.app_context():
            return self.here()

    def here(self) -> Any:
        """Return the same engine, in the current application context."""
        try:
            return self._extension().engine
        except KeyError:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE is flask-sqlalchemy://, and Flask-SQLAlchemy-Lite has no default engine: set "
                'SQLALCHEMY_ENGINES["default"].'
            ) from None

    def engines(self) -> list[Any]:
        """Return every engine that its sessions may use by now, also of other binds and applications.

        A forked child calls this first. It enters no application context, because leaving one would run the application's
        teardown functions.
        """
        return engines_made(self._app.extensions.get("sqlalchemy"))

    def binds(self) -> Any:
        """Return the engines of the current application by the names of their binds, that of the default one being None."""
        return getattr(self._extension(), "engines", {})

    def session(self) -> Any:
        """Return the scoped session that views write with, `db.session`."""
        database = self._extension()
        return ContextSessions(database) if _is_lite(database) else database.session

    def testing(self) -> bool:
        """Return whether a session may stand on a connection of a test."""
        return self._app.testing

    def _extension(self) -> Any:
        found = self._app.extensions.get("sqlalchemy")
        if found is None:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE is flask-sqlalchemy://, or the application has an outbox, and this application has no "
                "Flask-SQLAlchemy. Call db.init_app(app) before the first request, or give the URL of a database."
            )
        _refuse_others(found)
        return found


def _is_lite(database: Any) -> bool:
    # By its class: outside of an application context its attributes raise. Flask-SQLAlchemy's session is the object's own.
    return hasattr(type(database), "sessionmaker") and "session" not in getattr(database, "__dict__", ())


def _refuse_others(database: Any) -> None:
    """Raise `ConfigurationError` for an extension that is neither Flask-SQLAlchemy nor Flask-SQLAlchemy-Lite, nor like them."""
    if not _is_lite(database) and not hasattr(getattr(database, "session", None), "session_factory"):
        raise ConfigurationError(
            f'app.extensions["sqlalchemy"] is a {type(database).__name__}, and the store needs the `session` and `engine` of '
            "Flask-SQLAlchemy or Flask-SQLAlchemy-Lite. Use one of these, or set IDEMPOTENCY_STORE to the URL of the database."
        )

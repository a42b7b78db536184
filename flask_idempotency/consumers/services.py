"""What the inboxes of an application work with: of a Flask application, or made from configuration without one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from flask_idempotency.activity import activity_of
from flask_idempotency.assembly import Services, build, identities, log_faults
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.operations import Operations
from flask_idempotency.engine.outages import OutageLog
from flask_idempotency.logs import log_of
from flask_idempotency.settings import Settings, load_settings
from flask_idempotency.settings.consumers import ConsumerPolicy

OF_APPLICATION: Final = "flask-sqlalchemy://"
NAMESPACE: Final = "flask_idempotency"
"""The namespace of inboxes without a Flask application, unless IDEMPOTENCY_NAMESPACE names another."""

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True)
class ConsumerServices:
    """What the inboxes and tasks of one application work with."""

    settings: Settings
    built: Services | None
    """None: the extension is switched off, and has no store."""
    operations: Operations
    observers: Observers
    outages: OutageLog = field(default_factory=lambda: OutageLog(said="is kept for later"))

    @cached_property
    def identities(self) -> tuple[Identity, ...]:
        """One for each secret, the newest first."""
        return identities(self.settings)

    def check(self, policy: ConsumerPolicy) -> None:
        """Raise `ConfigurationError` if this policy cannot hold in the application."""
        if self.built is not None:
            joint = self.built.engine.transactions is not None
            policy.check(joint=joint, journals=self.built.journals is not None)

    def strict(self) -> bool:
        """Return whether a step result that cannot be kept raises: in debug mode and in tests of a Flask application."""
        if "flask" not in sys.modules:
            return False
        from flask import current_app, has_app_context

        return has_app_context() and bool(current_app.debug or current_app.testing)


def services_of_current_app() -> ConsumerServices:
    """Return what the current Flask application has for consumers. Raises `ConfigurationError` if there is none."""
    # A consumer without Flask does not load it.
    from flask import current_app, has_app_context

    if not has_app_context():
        raise ConfigurationError(
            "This inbox belongs to a Flask application. Process messages in its context: `with app.app_context():`."
        )
    if (state := current_app.extensions.get("idempotency")) is None:
        raise ConfigurationError("Idempotency is not set up on the current application: call init_app first.")
    services: ConsumerServices = state.consumers
    return services


def standalone_services(config: Mapping[str, Any], session: Any) -> ConsumerServices:
    """Build the services from `IDEMPOTENCY_*` configuration. `session`: the `scoped_session` of transactional work.

    Raises `ConfigurationError` with every fault.
    """
    settings = load_settings(config, {}, app_name=NAMESPACE, lenient=False)
    for warning in settings.warnings:
        _log.warning(warning)
    database = None
    if session is not None:
        if not hasattr(session, "registry") or not hasattr(session, "session_factory"):
            raise ConfigurationError(
                f"session is a {type(session).__name__}, and must be the scoped_session that the work writes with: "
                "scoped_session(sessionmaker(engine))."
            )
        if not settings.may_be_joint or not isinstance(settings.store, str):
            raise ConfigurationError(
                "session=…: the records must be in the database of the session. Set IDEMPOTENCY_STORE to the URL of that "
                "database, or leave session out."
            )
        database = _SessionDatabase(session, settings.store)
        settings = replace(settings, store=OF_APPLICATION)
    observers = Observers([log_of(settings.namespace)])
    built = build(settings, observers=observers, database=database)
    activity_of(settings, built, observers)
    if built.schema is not None and database is None:
        log_faults(built.schema)
    needed = settings.enabled or built.engine.transactions is not None
    return ConsumerServices(settings, built if needed else None, Operations(), observers)


class _SessionDatabase:
    """Implements `assembly.ApplicationDatabase` with a `scoped_session` that the caller made."""

    def __init__(self, session: Any, store: str) -> None:
        self._session = session
        self._store = store

    def engine(self) -> Any:
        """Return the engine of the session. Raises `ConfigurationError` if that is not the store's database."""
        # Only a caller with a session needs SQLAlchemy.
        from sqlalchemy import make_url
        from sqlalchemy.exc import UnboundExecutionError

        try:
            engine = self._session.get_bind().engine
        except UnboundExecutionError as error:
            raise ConfigurationError(
                "session=…: it is bound to no engine. Make it with sessionmaker(engine)."
            ) from error
        if self._store != OF_APPLICATION and _place(make_url(self._store)) != _place(engine.url):
            raise ConfigurationError(
                "session=…: it writes to another database than IDEMPOTENCY_STORE names, so a record could not be committed "
                "together with its rows. Name the database of the session."
            )
        return engine

    def engines(self) -> list[Any]:
        """Return the engines whose connections a forked child must not use."""
        bind = self._session.session_factory.kw.get("bind")
        return [] if bind is None else [bind.engine]

    def binds(self) -> Any:
        """Return no names: only Flask-SQLAlchemy has some."""
        return {}

    def session(self) -> Any:
        """Return the scoped session."""
        return self._session

    def testing(self) -> bool:
        """Return False: only a Flask application says so."""
        return False


def _place(url: Any) -> tuple[object, ...]:
    """Return which database a URL names, whatever driver and user reach it."""
    database = url.database
    if url.get_backend_name() == "sqlite" and database not in (None, "", ":memory:"):
        database = str(Path(database).resolve())
    return url.get_backend_name(), url.host, url.port, database or None

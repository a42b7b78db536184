"""The extension class `Idempotency`: set up an application, and register its loaders, policies and resolvers.

The extension object holds what you register on it and no state of an application, so one object can serve several. The state
of one application is frozen in `app.extensions["idempotency"]`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Blueprint, Flask, appcontext_pushed

from flask_idempotency.assembly import Services, build, identities
from flask_idempotency.cli import cli
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.events import Observers
from flask_idempotency.engine.model import Record
from flask_idempotency.engine.policy import Override, Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.recovery import Resolution, UnknownOutcome
from flask_idempotency.engine.store import Schema
from flask_idempotency.logs import log_of
from flask_idempotency.settings import Settings, load_override, load_settings, summary
from flask_idempotency.signals import sender_for
from flask_idempotency.web.callbacks import Callbacks, check_counted
from flask_idempotency.web.current_claim import idempotency_field
from flask_idempotency.web.guard import Guard
from flask_idempotency.web.hooks import Hooks
from flask_idempotency.web.janitor import shape_watch_of, watch_of
from flask_idempotency.web.policies import Policies, mark_configured
from flask_idempotency.web.principals import identifies


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
    # This is the metadata of the default bind. Another extension of this name may have none.
    metadata = getattr(database, "metadata", None)
    if metadata is not None:
        include_in(metadata)
    return True


class ApplicationDatabase:
    """Implements `assembly.ApplicationDatabase`. Knows Flask-SQLAlchemy by its entry in `app.extensions` only."""

    def __init__(self, app: Flask) -> None:
        self._app = app

    def engine(self) -> Any:
        """Return the engine of the default bind, which holds the application's rows and the records."""
        with self._app.app_context():
            return self._extension().engine

    def engines(self) -> list[Any]:
        """Return every engine that its sessions may use by now, also of other binds and applications.

        A forked child calls this first. It enters no application context, because leaving one would run the application's
        teardown functions.
        """
        made: Any = getattr(self._app.extensions.get("sqlalchemy"), "_app_engines", {})
        return [engine for engines in made.values() for engine in engines.values()]

    def session(self) -> Any:
        """Return the scoped session that views write with, `db.session`."""
        return self._extension().session

    def _extension(self) -> Any:
        try:
            return self._app.extensions["sqlalchemy"]
        except KeyError:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE is flask-sqlalchemy://, and this application has no Flask-SQLAlchemy. Call "
                "db.init_app(app) before the first request, or give the URL of a database."
            ) from None


if TYPE_CHECKING:
    from flask_idempotency.metrics import Meter  # needs a package that is optional

EXTENSION = "idempotency"

_log = logging.getLogger("flask_idempotency")

LoaderT = TypeVar("LoaderT", bound="Callable[[], str | None]")
QuotaLoaderT = TypeVar("QuotaLoaderT", bound="Callable[[str | None], Quota | None]")
GuardT = TypeVar("GuardT", bound="Callable[[Record], bool]")
ResolverT = TypeVar("ResolverT", bound="Callable[[UnknownOutcome], Resolution]")


@dataclass(frozen=True, slots=True)
class AppState:
    """The state of one application, in `app.extensions["idempotency"]`."""

    settings: Settings
    loaders: Callbacks
    hooks: Hooks | None = None
    built: Services | None = None
    """The engine and its services. The command line uses them even if the guard is switched off."""
    policies: Policies | None = None
    observers: Observers = field(default_factory=Observers)

    @property
    def engine(self) -> Engine | None:
        """The engine, or None if the guard is switched off."""
        return self.built.engine if self.built is not None and self.settings.enabled else None

    @property
    def schema(self) -> Schema | None:
        """The tables of a SQL store."""
        return None if self.built is None else self.built.schema


class Idempotency:
    """Run each keyed request of your application once, and send every retry the same response.

    Pass `principal` and `tenant` as functions that return a stable subject id and the acting tenant of the current request.
    All other keywords are policy keywords or settings. They override `IDEMPOTENCY_<UPPER>` in the configuration.

    Raises `ConfigurationError`, which lists every fault.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        principal: Callable[[], str | None] | None = None,
        tenant: Callable[[], str | None] | None = None,
        **settings: Any,
    ) -> None:
        self._loaders = Callbacks(principal=principal, tenant=tenant)
        self._settings = settings
        self._overrides: dict[Blueprint, Override] = {}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Guard this application. You can add blueprints, hooks and other extensions before or after this call."""
        if EXTENSION in app.extensions:
            raise ConfigurationError("Idempotency is already set up on this application: call init_app once per app.")
        settings = load_settings(
            app.config,
            self._settings,
            app_name=app.name,
            lenient=app.debug or app.testing,
            has_principal=self._loaders.principal is not None or identifies(app),
        )
        for warning in settings.warnings:
            _log.warning(warning)
        app.jinja_env.globals.setdefault("idempotency_field", idempotency_field)
        app.cli.add_command(cli)
        state = app.extensions[EXTENSION] = self._guard(app, settings)
        if settings.of_application:
            # Also if the guard is switched off: a migration may be generated there.
            declare_tables(app)
        _log.info("%s: %s", app.name, summary(settings, quota_loader=self._loaders.quota is not None))
        if state.schema is not None and state.hooks is not None and not _log_faults(state.schema):
            # Flask-SQLAlchemy is set up later: log faults at the first request.
            state.hooks.at_first = partial(_log_faults, state.schema)

    def _guard(self, app: Flask, settings: Settings) -> AppState:
        if not settings.enabled and not settings.may_be_joint:
            return AppState(settings, self._loaders)
        meter = _meter(app, settings)
        counting = [] if meter is None else [meter.event]
        observers = Observers([log_of(settings.namespace), sender_for(app), *counting])
        timing = None if meter is None else meter.call
        built = build(settings, observers=observers, database=ApplicationDatabase(app), timing=timing)
        joint = built.engine.transactions is not None
        self._check_policies(settings, joint=joint)
        check_counted(self._loaders, settings.quota, counts=built.ledger is not None)
        policies = Policies(
            app,
            base=settings.written,
            overrides=self._overrides,
            joint=joint,
            origins=settings.origins,
            chosen_only=settings.guard == "chosen",
        )
        guard = Guard(
            app,
            engine=built.engine,
            identities=identities(settings),
            settings=settings,
            callbacks=self._loaders,
            observers=observers,
        )
        hooks = Hooks(
            app,
            guard,
            policies,
            settings,
            self._loaders,
            counts=built.ledger is not None,
            janitor=watch_of(built, settings, observers),
            identity=shape_watch_of(app, built, settings, self._loaders, policies),
        )
        if settings.enabled or joint:
            hooks.install()
            hooks.report()
        return AppState(settings, self._loaders, hooks, built, policies, observers)

    def _check_policies(self, settings: Settings, *, joint: bool) -> None:
        """Raise `ConfigurationError` for faulty policies of the application or blueprints. Views are checked at first use."""
        faults = settings.policy.faults(joint=joint)
        for blueprint, override in self._overrides.items():
            effects = Policy(effects=override.get("effects", "plain"))
            faults += [f"configure({blueprint.name!r}): {fault}" for fault in effects.faults(joint=joint)]
        if faults:
            raise ConfigurationError(*faults)

    def configure(self, blueprint: Blueprint, **policy: Any) -> None:
        """Set the policy of every view of this blueprint. Nested blueprints inherit it unless you configure them.

        A second call adds to the first. Call it before the first request.
        """
        override = load_override(policy, where=f"configure({blueprint.name!r})")
        self._overrides[blueprint] = {**self._overrides.get(blueprint, {}), **override}
        mark_configured(blueprint, self._overrides[blueprint])

    def principal_loader(self, loader: LoaderT) -> LoaderT:
        """Register the function that returns a stable subject id for the current request, or None for an anonymous one.

        Do not return a cookie or a token: they rotate, and after a rotation a retry would run a payment twice.
        """
        self._loaders.principal = loader
        return loader

    def tenant_loader(self, loader: LoaderT) -> LoaderT:
        """Register the function that returns the tenant of the current request, or None."""
        self._loaders.tenant = loader
        return loader

    def quota_loader(self, loader: QuotaLoaderT) -> QuotaLoaderT:
        """Register the function that returns a tenant's `Quota`, or None for the limits in `IDEMPOTENCY_QUOTA_*`.

        The engine calls it with the tenant (or None) for every keyed request, so make it fast. The configuration supplies
        limits that it leaves out. Once you register it, the store counts every record, even without a limit.
        """
        self._loaders.quota = loader
        return loader

    def replay_guard(self, guard: GuardT) -> GuardT:
        """Register a function that may refuse a replay: it returns False, and the client gets 403. The record stays."""
        self._loaders.replay_guard = guard
        return guard

    def resolver(self, endpoint: str) -> Callable[[ResolverT], ResolverT]:
        """Register the function that finds out whether this endpoint's quarantined requests happened, such as at the bank.

        It takes an `UnknownOutcome` and returns `Happened(response)`, `NeverHappened()` or `StillUnknown()`. The janitor
        calls it in an application context, for one key at a time: soon after the quarantine, then less and less often. If
        it raises, the janitor calls it again later. Raises `ConfigurationError` if the endpoint has a resolver already.
        """

        def register(resolver: ResolverT) -> ResolverT:
            if endpoint in self._loaders.resolvers:
                raise ConfigurationError(
                    f"resolver({endpoint!r}): this endpoint has one already. Remove one of the two."
                )
            self._loaders.resolvers[endpoint] = resolver
            return resolver

        return register

    def problem_renderer(self, renderer: Callable[..., Any]) -> Callable[..., Any]:
        """Register a function that turns a problem into this application's own error format, such as a page.

        It is called as `renderer(problem, *, profile, docs_url, response_class)`, in the request that is refused. `problem`
        has a `code`, a `status`, a `title` and a `text`. Return what a view may return, or None to leave this problem as it
        is. `Cache-Control: no-store` and `Retry-After` are added unless the response has these fields.
        """
        self._loaders.problem_renderer = renderer
        return renderer


def _meter(app: Flask, settings: Settings) -> Meter | None:
    """Return the Prometheus meter, or None if `IDEMPOTENCY_METRICS` is off."""
    if not settings.metrics:
        return None
    try:
        from flask_idempotency.metrics import Meter
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise ConfigurationError(
            "IDEMPOTENCY_METRICS is True, and the prometheus_client package is not installed: "
            "pip install 'flask-idempotency[metrics]'."
        ) from error
    return Meter(app, name=settings.namespace)


def _log_faults(schema: Schema) -> bool:
    """Log what is wrong with the tables. Do not raise: the command that repairs them must be able to start.

    Returns False if it is not known yet which database they are in.
    """
    try:
        for fault in schema.faults():
            _log.error(fault)
        for advice in schema.advice():
            _log.warning(advice)
    except ConfigurationError:
        return False
    except StoreUnavailable as error:
        _log.warning("%s Keyed requests are refused until it responds.", error)
    return True

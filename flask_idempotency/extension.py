"""The extension class `Idempotency`: set up an application, and register its loaders, policies and resolvers.

The extension object holds what you register on it and no state of an application, so one object can serve several. The state
of one application is frozen in `app.extensions["idempotency"]`. The object refers to each application weakly: to refuse a
`configure` that comes too late, and to give it the outbox if you ask for that after `init_app`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakSet

from flask import Blueprint, Flask

from flask_idempotency.activity import Activity, activity_of
from flask_idempotency.assembly import Services, build, build_outbox, identities, log_faults
from flask_idempotency.cli import cli, completing, migrating
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import ConfigurationError, importing
from flask_idempotency.engine.model import Record
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Override, Policy
from flask_idempotency.engine.registrations import Registrations, is_same
from flask_idempotency.engine.values import fits
from flask_idempotency.logs import log_of
from flask_idempotency.settings import Settings, load_override, load_settings, summary
from flask_idempotency.signals import RECEIVERS, sender_for
from flask_idempotency.web.callbacks import RESOLVER, ActFor, Callbacks, SharedCallbacks, check_counted
from flask_idempotency.web.guard import Guard
from flask_idempotency.web.hooks import Hooks
from flask_idempotency.web.policies import Policies, mark_configured
from flask_idempotency.web.principals import identifies
from flask_idempotency.web.problems import PAGES_PATH
from flask_idempotency.web.responses import LostFields

if TYPE_CHECKING:
    from flask_idempotency.consumers.inbox import Inbox
    from flask_idempotency.consumers.services import ConsumerServices
    from flask_idempotency.engine.capabilities import Finding
    from flask_idempotency.engine.quota import Quota
    from flask_idempotency.engine.recovery import Resolution, UnknownOutcome
    from flask_idempotency.engine.store import Schema

    # These need packages that are optional.
    from flask_idempotency.metrics import Meter
    from flask_idempotency.otel import Telemetry
    from flask_idempotency.outbox import Outbox

EXTENSION = "idempotency"

_log = logging.getLogger("flask_idempotency")

LoaderT = TypeVar("LoaderT", bound="Callable[[], str | None]")
QuotaLoaderT = TypeVar("QuotaLoaderT", bound="Callable[[str | None], Quota | None]")
GuardT = TypeVar("GuardT", bound="Callable[[Record], bool]")
ActForT = TypeVar("ActForT", bound="Callable[[str | None, str | None], Any]")
ResolverT = TypeVar("ResolverT", bound="Callable[[UnknownOutcome], Resolution]")


@dataclass(frozen=True)
class AppState:
    """The state of one application, in `app.extensions["idempotency"]`."""

    settings: Settings
    loaders: Callbacks
    hooks: Hooks | None = None
    built: Services | None = None
    """The engine and its services. The command line uses them even if the guard is switched off."""
    policies: Policies | None = None
    observers: Observers = field(default_factory=Observers)
    activity: Activity | None = None
    """What counts the activity of this process. None: it is off."""
    lost_fields: LostFields = field(default_factory=LostFields)
    """The response headers that replays lack, as far as this process has seen."""
    extension: Idempotency | None = None
    """The object that was set up on the application. One of a module serves every application of its factory."""
    checks: list[Callable[[], Iterable[Finding]]] = field(default_factory=list)
    """Checks for `flask idempotency doctor` that others have added, such as those of Celery workers."""
    app: Flask | None = None
    """None: it is disabled."""

    @cached_property
    def consumers(self) -> ConsumerServices:
        """What the inboxes and tasks of this application work with. Made for the first of them."""
        from flask_idempotency.consumers.services import ConsumerServices  # for the applications that have consumers

        return ConsumerServices(self.settings, self.built, self.loaders.operations, self.observers)

    @property
    def due_tasks(self) -> Mapping[str, float]:
        """Seconds between two runs of each task that should run. Remembered when requests come: it is complete then."""
        from flask_idempotency.web.janitor import due_tasks  # for a scrape and the console, and no request

        known: Mapping[str, float] | None = self.__dict__.get("_due_tasks")
        if known is None:
            known = {} if self.app is None else due_tasks(self.app)
            if self.policies is not None and self.policies.in_use:
                self.__dict__["_due_tasks"] = known
        return known

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

    Pass the application, or call `init_app` later. `principal` and `tenant` are functions that return a stable subject id
    and the acting tenant of the current request. All other keywords are policy keywords or settings, and override
    `IDEMPOTENCY_<UPPER>` in the configuration. Durations are seconds or a `timedelta`.

    One object can serve several applications. Raises `ConfigurationError`, which lists every fault.
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
        self._callbacks = SharedCallbacks(self._loaders)
        self._settings = settings
        self._overrides: dict[Blueprint, Override] = {}
        self._configured = Registrations()
        self._outbox: Outbox | None = None
        self._apps: WeakSet[Flask] = WeakSet()
        """Each application that was set up, as long as it lives."""
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Guard this application. You can add blueprints, hooks and other extensions before or after this call.

        Raises `ConfigurationError` with all faults of the configuration, and for a second call on the same application.
        """
        if EXTENSION in app.extensions:
            raise ConfigurationError("Idempotency is already set up on this application: call init_app once per app.")
        settings = load_settings(
            app.config,
            self._settings,
            app_name=app.name,
            lenient=app.debug or app.testing,
            has_principal=self._loaders.principal is not None or identifies(app),
        )
        for warning in () if completing() else settings.warnings:
            _log.warning(warning)
        for name in ("idempotency_field", "idempotency_script"):
            app.jinja_env.globals.setdefault(name, partial(_in_template, name))
        app.cli.add_command(cli)
        state = app.extensions[EXTENSION] = self._guard(app, settings)
        self._apps.add(app)
        if self._outbox is not None:
            self._serve_outbox(app, self._outbox)
        if settings.serves_problem_pages:
            _serve_pages(app)
        if settings.publish and settings.enabled:
            from flask_idempotency.openapi.policy_document import publish  # for the applications that want it

            publish(app, state)
        if settings.status_url is not None:
            from flask_idempotency.web.key_status import register  # for the applications that want it

            register(app, settings.status_url)
        if settings.browser_module is not None:
            from flask_idempotency.web.browser import serve_module  # for the applications that want it

            serve_module(app, settings.browser_module)
        if settings.of_application:
            from flask_idempotency.web.application_database import declare_tables  # for Flask-SQLAlchemy

            # Also if the guard is switched off: a migration may be generated there.
            declare_tables(app)
        _log.info("%s: %s", app.name, summary(settings, quota_loader=self._loaders.quota is not None))
        if completing() or migrating() or state.schema is None or state.hooks is None:
            return
        if not log_faults(state.schema):
            # Flask-SQLAlchemy is set up later: log faults at the first request.
            state.hooks.at_first = partial(log_faults, state.schema)

    def _guard(self, app: Flask, settings: Settings) -> AppState:
        callbacks = self._callbacks.set_up()
        if not settings.enabled and not settings.may_be_joint:
            return AppState(settings, callbacks, extension=self)
        meter, spans = _meter(app, settings), _telemetry(app, settings)
        observers = Observers([log_of(settings.namespace)])
        observers.add(sender_for(app), receivers=RECEIVERS)
        for counting in (meter, spans):
            if counting is not None:
                observers.add(counting.event)
        timing = None if meter is None else meter.call
        database = None
        if settings.may_be_joint:
            from flask_idempotency.web.application_database import ApplicationDatabase  # for Flask-SQLAlchemy

            database = ApplicationDatabase(app)
        built = build(settings, observers=observers, database=database, timing=timing)
        joint = built.engine.transactions is not None
        activity = activity_of(settings, built, observers, testing=app.testing)
        # Where the guard is switched off, nothing is observed, voided or remembered.
        offered = {
            "joint": joint,
            "journals": built.journals is not None,
            "observations": built.observations is not None or not settings.enabled,
            "voids": built.void is not None or not settings.enabled,
            "remembers": built.remembers or not settings.enabled,
        }
        self._check_policies(settings, offered)
        check_counted(callbacks, settings.quota, counts=built.ledger is not None)
        policies = Policies(
            app,
            base=settings.written,
            overrides=self._overrides,
            offered=offered,
            origins=settings.origins,
            chosen_only=settings.guard == "chosen",
            kept=self._configured.set_up(self._overrides.keys()),
        )
        lost_fields = LostFields(None if activity is None else activity.count)
        guard = Guard(app, settings, callbacks, built, observers, lost_fields, activity=activity, tracing=spans)
        hooks = Hooks(guard, policies)
        if settings.enabled or joint:
            hooks.install()
            hooks.report()
        # Not before the report: an application registers act_for after it has set us up.
        policies.finishing = (callbacks, settings)
        return AppState(settings, callbacks, hooks, built, policies, observers, activity, lost_fields, self, app=app)

    def _check_policies(self, settings: Settings, offered: Mapping[str, bool]) -> None:
        """Raise `ConfigurationError` for faulty policies of the application or blueprints. Views are checked at first use.

        `offered`: what the store offers, as `Policy.faults` takes it.
        """
        faults = settings.policy.faults(**offered)
        for blueprint, override in self._overrides.items():
            asking = Policy(
                **{name: override[name] for name in ("effects", "steps", "mode", "void") if name in override}
            )
            found = asking.faults(**offered)
            faults += [f"configure({blueprint.name!r}): {fault}" for fault in found]
        if faults:
            raise ConfigurationError(*faults)

    def configure(self, blueprint: Blueprint, **policy: Any) -> None:
        """Set the policy of every view of this blueprint. Nested blueprints inherit it unless you configure them.

        Call it before the first request. A second call adds to the first. Raises `ConfigurationError` for a wrong keyword
        or value, and for a change after the first request of an application with this blueprint. It names the blueprint.
        """
        override = load_override(policy, where=f"configure({blueprint.name!r})")
        merged = {**self._overrides.get(blueprint, {}), **override}
        # The closures of a factory are the same functions for its next application.
        former = self._overrides.get(blueprint)
        same = is_same(merged, former)
        states: list[AppState] = [app.extensions[EXTENSION] for app in list(self._apps)]
        if not same and any(state.policies is not None and state.policies.serves(blueprint) for state in states):
            raise ConfigurationError(
                f"configure({blueprint.name!r}): an application with this blueprint has had its first request, so some views "
                "would keep their policy and others not. Call it before, for example where you register the blueprint."
            )
        if same and merged != former:
            self._configured.replace(blueprint, former)
        self._overrides[blueprint] = merged
        mark_configured(blueprint, self._overrides[blueprint])

    def principal_loader(self, loader: LoaderT) -> LoaderT:
        """Register the function that returns a stable subject id for the current request, or None for an anonymous one.

        Do not return a cookie or a token: they rotate, and after a rotation a retry would run a payment twice.
        """
        self._callbacks.put("principal", loader)
        return loader

    def tenant_loader(self, loader: LoaderT) -> LoaderT:
        """Register the function that returns the acting tenant of the current request, or None if there is none.

        Keys, quotas and data keys of one tenant are apart from those of every other.
        """
        self._callbacks.put("tenant", loader)
        return loader

    def quota_loader(self, loader: QuotaLoaderT) -> QuotaLoaderT:
        """Register the function that returns a tenant's `Quota`, or None for the limits in `IDEMPOTENCY_QUOTA_*`.

        The engine calls it with the tenant (or None) for every keyed request, so make it fast. The configuration supplies
        the limits that it leaves out. Once you register it, the store counts every record, even without a limit.
        """
        self._callbacks.put("quota", loader)
        return loader

    def replay_guard(self, guard: GuardT) -> GuardT:
        """Register a function that may refuse a replay, for example because a permission was revoked.

        It takes the stored `Record`. If it returns False, the client gets 403 `replay-forbidden`, and the record stays.
        """
        self._callbacks.put("replay_guard", guard)
        return guard

    def resolver(self, endpoint: str) -> Callable[[ResolverT], ResolverT]:
        """Register the function that finds out whether this endpoint's quarantined requests happened, such as at the bank.

        For messages, name the operation instead of an endpoint, such as `inbox:billing`. It takes an `UnknownOutcome` and
        returns `Happened(response)`, `NeverHappened()` or `StillUnknown()`; of a message, `Happened(value)`. For durable
        steps it returns `unknown.step(name).completed(result)` or `.never_happened()`, and `Resume()`. The janitor calls it
        in an application context, for one key at a time: soon after the quarantine, then less and less often. If it
        raises, the janitor calls it again later. Raises `ConfigurationError` if the endpoint has another resolver already;
        the same function of a factory, registered for its next application, replaces the former one.
        """

        def register(resolver: ResolverT) -> ResolverT:
            self._callbacks.put(RESOLVER + endpoint, resolver)
            return resolver

        return register

    @overload
    def act_for(self, function: ActForT, /) -> ActForT: ...

    @overload
    def act_for(self, /, *, instead_of: Sequence[Callable[..., Any] | str]) -> Callable[[ActForT], ActForT]: ...

    def act_for(self, function: Any = None, /, *, instead_of: Sequence[Callable[..., Any] | str] = ()) -> Any:
        """Register the function that lets the janitor act for a caller, for endpoints with `finish="janitor"`.

        It takes the principal and the tenant of the record, and runs before all hooks in the context of the janitor's request.
        It may sign the caller in, set what your views read, or return header fields for this request, such as a token of a
        minute. `instead_of` names the `before_request` hooks that cannot pass without a client: the functions, or their
        names. Only these do not run.

        The request must come out with this principal and tenant, or its view does not run. Raises `ConfigurationError` for a
        function that does not take two arguments.
        """

        def register(function: ActForT) -> ActForT:
            if not fits(function, None, None):
                raise ConfigurationError("act_for: register a function of two arguments: the principal and the tenant.")
            self._callbacks.put("act_for", ActFor(function, tuple(instead_of)))
            return function

        return register if function is None else register(function)

    def inbox(self, name: str, **policy: Any) -> Inbox:
        """Make the inbox of one consumer, which does the work of each message once: see `Inbox.process`.

        `name` is that of the consumer, not of a queue. The policy keywords are those of consumers: no setting and no policy of
        endpoints reaches an inbox. Raises `ConfigurationError` for a wrong keyword or value, and for a second inbox of this
        name with another policy.
        """
        from flask_idempotency.consumers.inbox import Inbox  # for the applications that have consumers

        inbox = Inbox(name, **policy)
        self._loaders.operations.add(inbox.catalogued)
        return inbox

    def outbox(self, keep: float | timedelta = 0) -> Outbox:
        """Return the outbox, whose messages are sent if the transaction that publishes them commits.

        It is in the database of `db.session` (the default bind), wherever the keys are. `keep` says for how many seconds a
        confirmed message stays in the table; the janitor's `expire` deletes it then. With 0 it is deleted at once.

        Call it before or after `init_app`; a second call returns the same outbox. Raises `ConfigurationError` without
        SQLAlchemy, and for another `keep` than before.
        """
        seconds: Any = keep.total_seconds() if isinstance(keep, timedelta) else keep
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e10:
            raise ConfigurationError(f"outbox(): keep must be seconds from 0 on, or a timedelta, not {keep!r}.")
        if self._outbox is None:
            missing = "outbox() needs Flask-SQLAlchemy: pip install 'flask-idempotency[sql]'."
            with importing("sqlalchemy", otherwise=missing):
                import sqlalchemy  # noqa: F401 - optional, and first needed by the table

                from flask_idempotency.outbox.outbox import Outbox as Made
            self._outbox = Made(keep=float(seconds))
            for app in list(self._apps):
                self._serve_outbox(app, self._outbox)
        elif self._outbox.keep != seconds:
            raise ConfigurationError(
                f"outbox(): keep is {self._outbox.keep:g} already. Call it once, or with the same value."
            )
        return self._outbox

    def _serve_outbox(self, app: Flask, outbox: Outbox) -> None:
        """Give this application the services of the outbox, and declare its table."""
        from flask_idempotency.engine.outbox import SealsBodies
        from flask_idempotency.outbox.outbox import SERVICES, OutboxServices  # needs SQLAlchemy
        from flask_idempotency.web.application_database import ApplicationDatabase, declare_tables

        state: AppState = app.extensions[EXTENSION]
        settings, database = state.settings, ApplicationDatabase(app)
        codec: Any = None if state.built is None else state.built.codec
        names, table = build_outbox(settings, database, keep=outbox.keep)
        app.extensions[SERVICES] = OutboxServices(
            outbox,
            table,
            session=lambda: database.session()(),
            engine=database.here,
            names=names,
            identities=identities(settings),
            sealer=codec if isinstance(codec, SealsBodies) else None,
            data_keys=None if state.built is None else getattr(state.built.data_keys, "within", None),
            encrypts=settings.encryption != "off",
            observers=state.observers,
            context=app.app_context,
            kept=outbox.set_up(),
        )
        if not settings.of_application:
            declare_tables(app)

    def problem_renderer(self, renderer: Callable[..., Any]) -> Callable[..., Any]:
        """Register a function that turns a problem into this application's own error format, such as a page.

        It is called as `renderer(problem, *, profile, docs_url, response_class)`, in the request that is refused. `problem`
        has a `code`, a `status`, a `title` and a `text`. Return what a view may return, or None to leave this problem as it
        is. `Cache-Control: no-store` and `Retry-After` are added unless the response has these fields.
        """
        self._callbacks.put("problem_renderer", renderer)
        return renderer


def _in_template(name: str, *args: Any, **kwargs: Any) -> Any:
    from flask_idempotency.web import current_claim  # for the applications whose pages have forms

    return getattr(current_claim, name)(*args, **kwargs)


def _serve_pages(app: Flask) -> None:
    """Serve a page on each problem, on every host and subdomain that the application serves."""
    url = f"{PAGES_PATH}<code>"
    if app.url_map.host_matching or app.subdomain_matching:
        from flask_idempotency.web.key_status import route_everywhere  # for the applications that have several hosts

        route_everywhere(app, url, "idempotency_problem", _page_of_problem)
    else:
        app.add_url_rule(url, "idempotency_problem", _page_of_problem)


def _page_of_problem(code: str, **_: Any) -> Any:
    from flask_idempotency.web.problem_pages import page_of  # for the people who follow the link of a problem

    return page_of(code)


# It belongs into no document of an API. APIFlask lists every other route.
_page_of_problem._spec = {"hide": True}  # type: ignore[attr-defined]


def _meter(app: Flask, settings: Settings) -> Meter | None:
    """Return the Prometheus meter, or None if `IDEMPOTENCY_METRICS` is off."""
    if not settings.metrics:
        return None
    missing = (
        "IDEMPOTENCY_METRICS is True, and the prometheus_client package is not installed: "
        "pip install 'flask-idempotency[metrics]'."
    )
    with importing("prometheus_client", otherwise=missing):
        from flask_idempotency.metrics import Meter
    return Meter(app, name=settings.namespace)


def _telemetry(app: Flask, settings: Settings) -> Telemetry | None:
    """Return what speaks to OpenTelemetry, or None if `IDEMPOTENCY_OPENTELEMETRY` is off: then it is not imported."""
    if not settings.opentelemetry:
        return None
    missing = (
        "IDEMPOTENCY_OPENTELEMETRY is True, and the package of {missing} is not installed: "
        "pip install 'flask-idempotency[otel]'."
    )
    with importing("opentelemetry", "prometheus_client", otherwise=missing):
        from flask_idempotency.otel import Telemetry
    return Telemetry(app, name=settings.namespace)

"""Run `doctor` on one application, and check its settings, its policies, its resolvers and its migrations.

To add a check of the application, write a function with `@check(...)` here and describe it in docs/operate/doctor.md. A
check of what the store holds belongs in `operations/doctor.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from shutil import disk_usage
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from flask import Flask

from flask_idempotency.assembly import Services, is_process_local
from flask_idempotency.engine.activity import EDGES, HOUR, NEW_TIME, UNKEPT, merged
from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey, owner_mark
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.store import Schema
from flask_idempotency.operations.doctor import gunicorn_timeout
from flask_idempotency.operations.examination import (
    DoctorReport,
    Endpoint,
    Found,
    Target,
    cannot,
    check,
    checks_of,
    examine,
    some,
)
from flask_idempotency.operations.identity import look
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.settings import Settings, derived_secret
from flask_idempotency.settings.profiles import lost_names
from flask_idempotency.settings.security import is_same, secret_weaknesses
from flask_idempotency.settings.transport import exposure
from flask_idempotency.web.body_copies import TemporaryBody
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.janitor import due_tasks, unknown_operations
from flask_idempotency.web.monitors import shape_in
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.request_body import MEMORY_BYTES, BodyNotKept
from flask_idempotency.web.responses import LostFields, keeping
from flask_idempotency.web.unreached import unprotected

if TYPE_CHECKING:
    from flask_idempotency.stores.sql.outbox import OutboxTable  # needs a package that is optional


@dataclass(frozen=True, kw_only=True)
class Application(Target):
    """A Flask application as the checks look at it."""

    app: Flask
    services: Services
    settings: Settings
    callbacks: Callbacks
    policies: Policies
    schema: Schema | None
    lost_fields: LostFields
    outbox: OutboxTable | None
    """None: the application publishes no messages."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        found: list[Endpoint] = []
        for name, method in self.policies.pairs():
            resolved = self.policies.resolve(name, method)
            if not resolved.exempt and (endpoint := Endpoint(name, resolved.policy)) not in found:
                found.append(endpoint)
        return found

    @property
    def ran(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        with suppress(StoreUnavailable):  # what is not known is no fault
            for endpoint, counters in (self.counted or {}).items():
                slots = [int(name.removeprefix(NEW_TIME)) for name in counters if name.startswith(NEW_TIME)]
                found[endpoint] = EDGES[max(slots) - 1] if max(slots, default=0) else 0.0
        return found

    @property
    def counted(self) -> Mapping[str, Mapping[str, int]] | None:
        """The counters of each endpoint in the last days. None: activity is not counted. Raises `StoreUnavailable`."""
        log = self.services.activity
        if self.settings.activity is False or log is None:
            return None
        page = log.read(owner_mark(self.settings.namespace), length=HOUR, seconds=SEEN_SECONDS)
        return merged(bucket.counts for bucket in page.buckets)

    @property
    def intervals(self) -> Mapping[str, float]:
        return due_tasks(self.app)


def run_checks(
    app: Flask,
    *,
    worker_timeout: float | None = None,
    proxy_timeout: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DoctorReport:
    """Run every check on this application, which must be set up and enabled.

    Your timeouts go before those of the settings, and these before gunicorn's arguments. They are seconds; 0 is never.
    """
    state: Any = app.extensions["idempotency"]
    services: Services = state.built
    settings: Settings = state.settings
    parts = ("health", "recovery", "journals", "responses", "data_keys", "data_loss", "schema")
    worker = _first(worker_timeout, settings.worker_timeout)
    if worker is None:
        worker = gunicorn_timeout(environ.get("GUNICORN_CMD_ARGS", ""))
    target = Application(
        **{name: getattr(services, name) for name in parts},
        task_log=services.tasks,
        outbox=None if (outbox := app.extensions.get("idempotency_outbox")) is None else outbox.table,
        key_ring=settings.key_ring,
        encryption=settings.encryption,
        process_local=is_process_local(settings),
        heartbeat_interval=None if is_process_local(settings) else settings.heartbeat_interval,
        worker_timeout=worker,
        proxy_timeout=_first(proxy_timeout, settings.proxy_timeout),
        lenient=app.debug or app.testing,
        app=app,
        services=services,
        settings=settings,
        callbacks=state.loaders,
        policies=state.policies,
        lost_fields=state.lost_fields,
    )

    def reach() -> None:
        if services.tasks is not None:
            services.tasks.now()
        else:  # read a key that no request has used
            services.engine.read(StorageKey(os.urandom(32), os.urandom(16)))

    return examine(checks_of(target), reach=reach)


def _first(option: float | None, setting: float | None) -> float | None:
    """Return the option, or else the setting. 0 is never."""
    seconds = option if option is not None else setting
    return seconds if seconds is None or seconds > 0 else inf


@check("store-kind")
def store_kind(settings: Settings, *, lenient: bool) -> Iterator[Found]:
    """Report a store that one process keeps to itself."""
    if is_process_local(settings) and not lenient:
        text = "One process keeps the keys in its memory: every other process, and this one after a restart, runs them again."
        remedy = "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money."
        yield Verdict.FAULT, text, remedy
    else:
        kind = urlsplit(settings.store).scheme if isinstance(settings.store, str) else type(settings.store).__name__
        yield Verdict.FINE, f"The store is {kind or 'made by a function'}.", ""


_ROTATE = (
    "Set IDEMPOTENCY_SECRET to [a new random value, the one in use], and drop the second after the longest `keep` or "
    "`remember`."
)
_DROP = (
    "Drop the last one from IDEMPOTENCY_SECRET when the longest `keep` or `remember` has passed since every process knows the "
    "first."
)


@check("secret", fine="One secret names the records, and it is not SECRET_KEY.")
def secret(settings: Settings, app: Flask, *, lenient: bool) -> Iterator[Found]:
    """Report a secret that is weak, or that is also Flask's SECRET_KEY or one of SECRET_KEY_FALLBACKS."""
    required = settings.encryption == "required"
    faults, unwise = secret_weaknesses(settings.secrets, required=required, lenient=False)
    verdict = Verdict.ADVICE if lenient and not required else Verdict.FAULT
    yield from ((verdict, fault, _ROTATE) for fault in faults)
    yield from ((Verdict.ADVICE, text, _DROP) for text in unwise)
    keys = [app.config.get("SECRET_KEY"), *(app.config.get("SECRET_KEY_FALLBACKS") or ())]
    if any(is_same(secret, keys) for secret in settings.secrets[:1]):
        text = (
            "IDEMPOTENCY_SECRET is SECRET_KEY itself. If you rotate one, you rotate the other, and retries run again."
        )
        yield Verdict.ADVICE, text, _ROTATE
    elif any(key and settings.secrets[0] == derived_secret(key) for key in keys):
        text = "The secret is derived from SECRET_KEY: if you rotate that, every key is new, and retries run again."
        remedy = (
            "Set IDEMPOTENCY_SECRET to [a value of its own, flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop "
            "the second after the longest `keep` or `remember`."
        )
        yield Verdict.ADVICE, text, remedy
    if len(settings.secrets) > 1:
        text = (
            f"A rotation of the secret has not finished: {len(settings.secrets)} are listed, and each request claims its key "
            "under every one."
        )
        yield Verdict.ADVICE, text, _DROP


@check("identity", asks_store=True, fine="Keys have the same names as before, as far as is known.")
def identity(
    app: Flask, services: Services, settings: Settings, callbacks: Callbacks, policies: Policies
) -> Iterator[Found]:
    """Report a change of the names that keys are claimed under. Record nothing: this process may not serve requests."""
    if services.task_log is None:
        yield cannot("identity", "task_log")
        return
    history = look(services.task_log, shape_in(app, settings, callbacks, policies), note=False)
    for each in history.changes:
        yield Verdict.FAULT if each.certain else Verdict.ADVICE, each.text, each.remedy
    former = settings.former_identity
    if former is not None and not history.wrong:
        text = "Every request claims its key under a former name too: IDEMPOTENCY_FORMER_IDENTITY is set."
        if callable(former.tenant) or callable(former.principal):
            text += " Whether its function returns the former names cannot be verified."
        if history.former_until is None:
            remedy = "Remove it: no key that the store knows of needs it."
        else:
            remedy = f"Remove it after {moment(history.former_until)}."
        yield Verdict.ADVICE, text, remedy


@check("transport", fine="The connections to the store are encrypted or local.")
def transport(settings: Settings, app: Flask) -> Iterator[Found]:
    """Report a connection to a store that others on the network could read."""
    if settings.allow_plaintext_transport:
        yield Verdict.FINE, "This check is off: IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT is True.", ""
        return
    for name in ("store", "redis_url"):
        choice = getattr(settings, name)
        found = None if choice is None else exposure(f"IDEMPOTENCY_{name.upper()}", choice, app.config)
        if found is not None:
            remedy = (
                f"{found.remedy}; or, if something else protects the connection, set "
                "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True."
            )
            yield Verdict.ADVICE if found.certain else Verdict.UNKNOWN, f"{found.setting}: {found.what}.", remedy


@check("policies", fine="The policy of every endpoint can hold.")
def policy_faults(app: Flask, policies: Policies) -> Iterator[Found]:
    """Report every policy that cannot hold, and every annotation that no endpoint leads to."""
    remedy = "Change the policy there: @idempotent(…), idempotency.configure(…), or the IDEMPOTENCY_* setting it names."
    yield from ((Verdict.FAULT, fault, remedy) for fault in policies.faults())
    for certain, text, cure in unprotected(app, policies):
        yield Verdict.FAULT if certain else Verdict.ADVICE, text, cure


@check("mode", fine="Every endpoint in scope is protected: none is only observed.")
def mode(policies: Policies) -> Iterator[Found]:
    """Report endpoints that are only observed."""
    observed = sorted({name for name, method in policies.pairs() if policies.resolve(name, method).observed})
    if observed:
        text = f"Endpoints that are only observed, so a retry runs again: {some(observed)}."
        remedy = "Read `flask idempotency report`, and set mode to enforce where its counts are as you expect."
        yield Verdict.ADVICE, text, remedy


LITTLE_BYTES: Final = 64 * 1024 * 1024
"""Less room than this is soon used up by a few uploads."""


@check("temporary-files")
def temporary_files() -> Iterator[Found]:
    """Report whether a temporary file takes a body, as this process sees it."""
    remedy = (
        "Set TMPDIR to a folder that the workers can write to, with room for the uploads that come at the same time; in a "
        "container, mount one (`--tmpfs /tmp`). Then run `flask idempotency doctor` there again."
    )
    limit = f"{MEMORY_BYTES // 1024} KiB"
    try:
        with TemporaryBody() as file:
            file.write(b"\0" * 2 * MEMORY_BYTES)
            file.flush()
        left = disk_usage(gettempdir()).free
    except OSError as error:
        text = f"No temporary file takes a body ({BodyNotKept(error)}): requests above {limit} with a key get 503."
        yield Verdict.FAULT, text, remedy
        return
    if left < LITTLE_BYTES:
        text = f"The disk of temporary files has {left // 1024:,} KiB left: when it is full, requests above {limit} get 503."
        yield Verdict.ADVICE, text, remedy
    else:
        yield Verdict.FINE, f"Bodies above {limit} find room in a temporary file of this process.", ""


SEEN_SECONDS: Final = 7 * 86400.0
"""How long a header that a view has set is reported. A process counts each header once."""


@check("headers", asks_store=True)
def headers(
    endpoints: Sequence[Endpoint], lost_fields: LostFields, counted: Mapping[str, Mapping[str, int]] | None
) -> Iterator[Found]:
    """Report response headers that a view has set and its replays lack, by the present policy of the endpoint."""
    seen = {endpoint: dict(named) for endpoint, named in lost_fields.named.items()}
    for endpoint, counters in (counted or {}).items():
        names = [name.removeprefix(UNKEPT) for name in counters if name.startswith(UNKEPT)]
        seen.setdefault(endpoint, {}).update((name.lower(), name) for name in names)
    found = False
    for name, policy in endpoints:
        known = seen.get(name, {})
        lost = [known[lower] for lower in sorted(lost_names(frozenset(known), policy.keep_headers))]
        if lost:
            text = f"The view of {name} sets headers that its replays lack: {', '.join(lost)}."
            remedy = (
                f"Keep what a client acts on: {keeping(lost, policy)} in @idempotent(…), or IDEMPOTENCY_KEEP_HEADERS. Set what "
                "belongs to one exchange in an after_request hook, which runs on replays too."
            )
            found = True
            yield Verdict.ADVICE, text, remedy
    if not found:
        far = "" if counted is not None else " Other processes name them in their logs only: activity is not counted."
        yield Verdict.FINE, f"No view is known to set a header that its replays lack.{far}", ""


@check("resolvers", fine="Every endpoint, inbox and task that can be quarantined has a resolver.")
def resolvers(app: Flask, callbacks: Callbacks, endpoints: Iterable[Endpoint]) -> Iterator[Found]:
    """Report resolvers of unknown endpoints, and endpoints that may need a resolver."""
    elsewhere, nowhere = unknown_operations(app, callbacks)
    if elsewhere:
        text = f"Resolvers are registered for messages that this process does not handle ({some(elsewhere)})."
        remedy = (
            "Import the modules that make these inboxes and tasks where the janitor runs: it frees none of their keys."
        )
        yield Verdict.ADVICE, text, remedy
    if nowhere:
        text = f"Resolvers are registered for unknown endpoints ({some(nowhere)}): no janitor can start."
        remedy = (
            "Name an endpoint in @idempotency.resolver(…) as `url_for` would: blueprint and view, with a dot between."
        )
        yield Verdict.FAULT, text, remedy
    unresolved = [
        each.name for each in endpoints if _may_be_quarantined(each.policy) and each.name not in callbacks.resolvers
    ]
    for name in callbacks.operations.names():
        operation = callbacks.operations.get(name)
        if operation is not None and name not in callbacks.resolvers:
            unresolved += [name] if _may_be_quarantined(operation.policy) else []
    if unresolved:
        text = (
            f"If a worker vanishes, only an operator can resolve its keys of {some(unresolved)}: there is no resolver."
        )
        remedy = (
            "Register @idempotency.resolver(…) that finds out what happened, or be ready for `flask idempotency resolve`; or "
            'declare effects="deduplicated" or "transactional", of the view or of its plain steps, where that is true.'
        )
        yield Verdict.ADVICE, text, remedy


def _may_be_quarantined(policy: Policy) -> bool:
    """Return whether a worker that vanishes may leave an unknown outcome: past a point of no return, or in a plain step."""
    doubtful = policy.effects == "marked" or policy.has_plain_step
    return doubtful or policy.on_expiry is OnExpiry.QUARANTINE


@check("celery")
def celery(app: Flask) -> list[Finding]:
    """Report what is wrong with the Celery workers that `consumers.celery.serve` has been called for."""
    return [finding for look in app.extensions["idempotency"].checks for finding in look()]


LATE_SECONDS: Final = 60.0
OVERDUE_SECONDS: Final = 600.0
"""The longest pause between two attempts. A message that waits longer has no relay."""


@check("outbox")
def outbox(outbox: OutboxTable) -> Iterator[Found]:
    """Report messages that are not sent: the table is missing, no relay runs, or they fail, for now or for good."""
    remedy = "Do what this says, and run `flask idempotency doctor` again."
    faults = [(Verdict.FAULT, fault, remedy) for fault in outbox.faults()]
    if faults:
        yield from faults
        return
    counts, failing = outbox.counts(), outbox.failing(since=LATE_SECONDS)
    if counts.dead:
        text = f"Messages that can never be sent: {counts.dead}. Later ones of their topics and keys wait behind them."
        remedy = (
            "Run `flask idempotency outbox list --dead`, repair what it names, and run `outbox retry`. `outbox discard` is for "
            "what must not be sent any more: the message is lost."
        )
        yield Verdict.FAULT, text, remedy
    if counts.oldest > LATE_SECONDS:
        verdict = Verdict.FAULT if counts.oldest > OVERDUE_SECONDS else Verdict.ADVICE
        text = f"Messages that wait: {counts.waiting}. The oldest has been due for {format_duration(counts.oldest)}."
        remedy = "Check that `flask idempotency relay` runs, and run more of them if it does not keep up."
        yield verdict, text, remedy
    if failing:
        one, oldest = failing[0], max(each.oldest for each in failing)
        text = (
            f"Messages that fail and are tried again: {sum(each.messages for each in failing)}, of "
            f"{some(each.topic for each in failing)}. The oldest was published {format_duration(oldest)} ago. One of "
            f"{one.topic} failed with: {one.error}."
        )
        remedy = (
            "Run `flask idempotency outbox list`, and repair the receiver. They are sent within 10 minutes then, or at once "
            "after `flask idempotency outbox retry --topic`."
        )
        yield Verdict.ADVICE, text, remedy
    if not (counts.dead or failing or counts.oldest > LATE_SECONDS):
        yield Verdict.FINE, f"Messages that wait: {counts.waiting}. None is late or dead.", ""


@check("docs-url", fine="The `type` of a problem is a URL.")
def docs_url(settings: Settings) -> Iterator[Found]:
    """Report a base address that the code of a problem cannot follow."""
    url = settings.docs_url
    parts = urlsplit(url)
    remedy = "Set IDEMPOTENCY_DOCS_URL to https://… that ends with a slash, or remove it."
    if parts.scheme not in ("http", "https") or not parts.netloc:
        yield Verdict.ADVICE, "IDEMPOTENCY_DOCS_URL is no URL, so the `type` of a problem leads nowhere.", remedy
    elif not url.endswith(("/", "#", "=")):
        text = "IDEMPOTENCY_DOCS_URL does not end with a slash, and the code of a problem follows it directly."
        yield Verdict.ADVICE, text, remedy


# Migrations of Alembic.

_REMEDY: Final = (
    "Pass include_object=flask_idempotency.sql.include_object to Migrate(…), or to context.configure(…) in env.py; or "
    "declare the tables with flask_idempotency.sql.include_in(metadata)."
)
_DECIDES: Final = ("include_object", "include_name", "flask_idempotency")
"""Words in `env.py` by which it may choose which tables Alembic compares."""


@check("autogenerate", asks_store=True)
def autogenerate(app: Flask, schema: Schema) -> list[Found]:
    """Report whether `flask db migrate` would write a migration that drops the store's tables.

    Alembic drops every table that the application's metadata lacks. The check sees the arguments of Flask-Migrate and the
    text of its `env.py`, and no other `env.py`. Call it in an application context.
    """
    # SQLAlchemy is optional; a store with our tables has it.
    from flask_idempotency.stores.sql.admin.schema_check import SqlSchema
    from flask_idempotency.stores.sql.schema import metadata as ours

    if not isinstance(schema, SqlSchema):
        return []
    migrate = app.extensions.get("migrate")
    if migrate is None and schema.knows_alembic():
        text = "Alembic is used on this database. This check cannot see its env.py, which may drop the tables."
        remedy = (
            "Make sure that `alembic check` names none of them. If it does: in env.py pass "
            "include_object=flask_idempotency.sql.include_object to context.configure(…), or declare the tables with "
            "flask_idempotency.sql.include_in(metadata)."
        )
        return [(Verdict.UNKNOWN, text, remedy)]
    if migrate is None:
        return [(Verdict.FINE, "Alembic has run no migration in this database.", "")]
    # Flask-SQLAlchemy 3 has one for each bind; other extensions have one or none.
    several = getattr(migrate.db, "metadatas", None) or {None: getattr(migrate.db, "metadata", None)}
    if any(set(ours.tables) <= set(metadata.tables) for metadata in several.values() if metadata is not None):
        return [(Verdict.FINE, "Flask-Migrate knows the tables as the application's own.", "")]
    certain = _is_same(migrate.db, schema)
    if certain is False:
        return [(Verdict.FINE, "The tables are in another database than those that Flask-Migrate compares.", "")]
    left_alone = _leaves_alone(migrate.configure_args, ours)
    if left_alone:
        return [(Verdict.FINE, "Flask-Migrate leaves the tables alone.", "")]
    text = (
        "`flask db migrate` writes a migration that drops the tables: they are in its database and not in its metadata."
    )
    env = ""
    with suppress(OSError, UnicodeDecodeError):
        env = (Path(migrate.directory) / "env.py").read_text(encoding="utf-8")
    if certain and left_alone is False and not any(word in env for word in _DECIDES):
        return [(Verdict.FAULT, text, _REMEDY)]
    why = "the database may be another one" if certain is None else "env.py or your own function may leave them alone"
    unknown = f"`flask db migrate` may write a migration that drops the tables; this check cannot tell: {why}."
    return [(Verdict.UNKNOWN, unknown, f"Read the next migration before you run it. {_REMEDY}")]


def _is_same(db: Any, schema: Any) -> bool | None:
    """Return whether Flask-Migrate compares the store's database. None: the names are equal, but the hosts differ."""
    from flask_idempotency.stores.sql.admin.schema_check import place_of

    ours = schema.place()
    engines = getattr(db, "engines", None)
    theirs = [place_of(engine.url) for engine in (engines.values() if engines else [db.engine])]
    if ours in theirs:
        return True
    # One server may have several names.
    return None if any(each[:2] == ours[:2] for each in theirs) else False


def _leaves_alone(arguments: Any, ours: Any) -> bool | None:
    """Return whether Flask-Migrate's arguments leave our tables alone. None: the application's function failed on them."""
    include_object, include_name = arguments.get("include_object"), arguments.get("include_name")
    try:
        for name, table in ours.tables.items():
            parents = {"schema_name": None, "table_name": name, "schema_qualified_table_name": name}
            compared = include_name is None or include_name(name, "table", parents)
            if compared and (include_object is None or include_object(table, name, "table", True, None)):
                return False
    except Exception:  # noqa: BLE001 - a function of the application, written for Alembic alone
        return None
    return True

"""What there is to check of one application: its store, its settings, its policies, and who serves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from flask import Flask

from flask_idempotency.assembly import Services, is_process_local
from flask_idempotency.engine.capabilities import DataLossDetector, Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.store import Schema
from flask_idempotency.operations import doctor
from flask_idempotency.operations.admin import keys_status
from flask_idempotency.operations.doctor import Check, DoctorReport, Endpoint, examine, some
from flask_idempotency.operations.identity import look
from flask_idempotency.operations.records import moment
from flask_idempotency.settings import Settings, derived_secret
from flask_idempotency.settings.security import exposure, is_same, secret_weaknesses
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.janitor import intervals, shape_in, work_of
from flask_idempotency.web.policies import Policies

# Whether `flask db migrate` would write a migration that drops the store's tables.
#
# Alembic drops what the application's metadata lacks. From here Flask-Migrate's arguments can be seen, and the text of its
# `env.py`. What another `env.py` does cannot.

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


def run_checks(
    app: Flask,
    *,
    worker_timeout: float | None = None,
    proxy_timeout: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DoctorReport:
    """Everything `doctor` looks at. The timeouts go before what the settings and gunicorn's arguments say; 0 is never.

    The application must be guarded, or have been put together at least: its state has `built` and `policies`.
    """
    state: Any = app.extensions["idempotency"]
    built: Services = state.built
    settings: Settings = state.settings
    worker = _first(worker_timeout, settings.worker_timeout)
    if worker is None:
        worker = doctor.gunicorn_timeout(environ.get("GUNICORN_CMD_ARGS", ""))
    endpoints = partial(_endpoints, state.policies)
    checks = [
        *_of_store(app, built, settings, state.loaders, state.policies),
        Check("store-kind", lambda: _store_kind(settings, lenient=app.debug or app.testing)),
        Check("secret", lambda: _secret(settings, app.config, lenient=app.debug or app.testing)),
        _identity(app, built, settings, state.loaders, state.policies),
        Check("transport", lambda: _transport(settings, app.config)),
        Check("worker-timeout", lambda: doctor.worker_timeout(endpoints(), seconds=worker)),
        Check(
            "proxy-timeout",
            lambda: doctor.proxy_timeout(endpoints(), seconds=_first(proxy_timeout, settings.proxy_timeout)),
        ),
        Check("lease", lambda: doctor.lease(endpoints())),
        *_of_memory(built.data_loss, endpoints, lenient=app.debug or app.testing),
        Check("autogenerate", lambda: autogenerate(app, built.schema), asks_store=True),
        Check("policies", lambda: _policies(state.policies)),
        Check("resolvers", lambda: _resolvers(app, state.loaders, endpoints())),
        Check("docs-url", lambda: _docs_url(settings.docs_url)),
    ]
    return examine(checks, reach=partial(_reach, built))


def _reach(built: Services) -> None:
    """Ask the store for the time; or for a key that nobody has ever used, where it does not tell the time."""
    if built.chores is not None:
        built.chores.now()
    else:
        built.engine.read(StorageKey(os.urandom(32), os.urandom(16)))


def _of_store(
    app: Flask, built: Services, settings: Settings, loaders: Callbacks, policies: Policies
) -> Iterable[Check]:
    """What the store says of itself, and what stands in it."""

    def asking(name: str, look: Callable[[], Iterable[Finding]]) -> Check:
        return Check(name, look, asks_store=True)

    if built.health is None:
        yield asking("health", lambda: [_cannot("health", "health")])
    else:
        yield asking("health", built.health.findings)
    if (book := built.chores) is None:
        for name in ("clock-skew", "clock-step", "janitor", "chores", "backlog"):
            yield asking(name, partial(lambda name: [_cannot(name, "chores")], name))
    else:
        yield asking("clock-skew", lambda: doctor.clock_skew(book))
        yield asking("clock-step", lambda: doctor.clock_step(book))
        if is_process_local(settings):
            alone = "No janitor is expected: no other process could see these records."
            yield Check("janitor", lambda: [Finding("janitor", Verdict.FINE, alone)])
        else:
            yield asking(
                "janitor", lambda: doctor.janitor(book.reports(), heartbeat_interval=settings.heartbeat_interval)
            )
        if settings.heartbeat_interval is not None and not is_process_local(settings):
            every = partial(_intervals, app, built, settings, loaders, policies)
            patience = 2 * settings.heartbeat_interval
            yield asking("chores", lambda: doctor.chores(book.reports(), every=every(), patience=patience))
            yield asking("backlog", lambda: doctor.backlog(book.reports()))
    if (unsettled := built.recovery) is None:
        for name in ("quarantined", "lapsed"):
            yield asking(name, partial(lambda name: [_cannot(name, "unsettled")], name))
    else:
        yield asking("quarantined", lambda: doctor.quarantined(unsettled))
        if book is not None:
            yield asking("lapsed", lambda: doctor.lapsed(unsettled, now=book.now()))
    ring, answers, data_keys = settings.key_ring, built.responses, built.data_keys
    if ring is not None and answers is not None and data_keys is not None:
        required = settings.encryption == "required"
        yield Check("newest-key", lambda: doctor.newest_key(ring))
        yield asking("keys", lambda: doctor.keys(keys_status(ring, answers, data_keys), required=required))


def _of_memory(
    memory: DataLossDetector | None, endpoints: Callable[[], list[Endpoint]], *, lenient: bool
) -> Iterable[Check]:
    """Of a store that can lose it."""
    if memory is not None:
        yield Check("canary", lambda: doctor.canary(memory), asks_store=True)
        yield Check("after-loss", lambda: doctor.after_loss(memory, endpoints(), lenient=lenient), asks_store=True)


def _cannot(name: str, port: str) -> Finding:
    text = f"This store cannot tell: it has no `{port}`."
    return Finding(
        name, Verdict.UNKNOWN, text, "Set IDEMPOTENCY_STORE to a store of this package, or add that to yours."
    )


def _intervals(
    app: Flask, built: Services, settings: Settings, loaders: Callbacks, policies: Policies
) -> Mapping[str, float]:
    """Of the chores that there is anything to do for. The heartbeat is looked at by itself."""
    try:
        work = work_of(app, built, settings, loaders, policies, lambda event: None)
    except ConfigurationError:
        return {}  # of the resolvers, which are a check of their own
    return {c: seconds for c, seconds in intervals(settings).items() if c in work and c != "heartbeat"}


def _endpoints(policies: Policies) -> list[Endpoint]:
    """Every endpoint that is guarded, once for each policy that its methods have."""
    resolved = ((endpoint, policies.resolve(endpoint, method)) for endpoint, method in policies.pairs())
    found: list[Endpoint] = []
    for name, each in resolved:
        if not each.exempt and (endpoint := Endpoint(name, each.policy)) not in found:
            found.append(endpoint)
    return found


def _store_kind(settings: Settings, *, lenient: bool) -> list[Finding]:
    if is_process_local(settings) and not lenient:
        text = (
            "Keys are in the memory of one process: every other process, and this one after a restart, runs them again."
        )
        remedy = "Set IDEMPOTENCY_STORE to flask-sqlalchemy:// or a redis:// URL before this application moves money."
        return [Finding("store-kind", Verdict.FAULT, text, remedy)]
    kind = urlsplit(settings.store).scheme if isinstance(settings.store, str) else type(settings.store).__name__
    return [Finding("store-kind", Verdict.FINE, f"The store is {kind or 'made by a function'}.")]


def _secret(settings: Settings, config: Mapping[str, Any], *, lenient: bool) -> list[Finding]:
    """Whether the secret is one of its own, and strong. Flask's SECRET_KEY_FALLBACKS are keys of the application too."""
    required = settings.encryption == "required"
    faults, unwise = secret_weaknesses(settings.secrets, required=required, lenient=False)
    verdict = Verdict.ADVICE if lenient and not required else Verdict.FAULT
    findings = [Finding("secret", verdict, fault, _ROTATE) for fault in faults]
    findings += [Finding("secret", Verdict.ADVICE, text, _DROP) for text in unwise]
    keys = [config.get("SECRET_KEY"), *(config.get("SECRET_KEY_FALLBACKS") or ())]
    if any(is_same(secret, keys) for secret in settings.secrets[:1]):
        text = (
            "IDEMPOTENCY_SECRET is SECRET_KEY itself. If you rotate one, you rotate the other, and retries run again."
        )
        findings.append(Finding("secret", Verdict.ADVICE, text, _ROTATE))
    elif any(key and settings.secrets[0] == derived_secret(key) for key in keys):
        text = "The secret is derived from SECRET_KEY: whoever rotates that makes every key new, and retries run again."
        remedy = (
            "Set IDEMPOTENCY_SECRET to [a value of its own, flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop "
            "the second after one `keep`."
        )
        findings.append(Finding("secret", Verdict.ADVICE, text, remedy))
    if len(settings.secrets) > 1:
        text = (
            f"A rotation of the secret is not at its end: {len(settings.secrets)} are listed, and every new key is claimed "
            "under each."
        )
        findings.append(Finding("secret", Verdict.ADVICE, text, _DROP))
    return findings or [Finding("secret", Verdict.FINE, "One secret names the records, and it is not SECRET_KEY.")]


_ROTATE = "Set IDEMPOTENCY_SECRET to [a new random value, the one in use], and drop the second after one `keep`."
_DROP = "Drop the last one from IDEMPOTENCY_SECRET when one `keep` has passed since every process knows the first."


def _identity(app: Flask, built: Services, settings: Settings, loaders: Callbacks, policies: Policies) -> Check:
    """Whether keys go by the names that they had before. Notes nothing: the application may not be in use as it is here."""

    def findings() -> list[Finding]:
        if built.book is None:
            return [_cannot("identity", "chores")]
        history = look(built.book, shape_in(app, settings, loaders, policies), note=False)
        found = [
            Finding("identity", Verdict.FAULT if each.certain else Verdict.ADVICE, each.text, each.remedy)
            for each in history.changes
        ]
        former = settings.former_identity
        if former is not None and not history.wrong:
            text = "Every key is claimed under a former name too: IDEMPOTENCY_FORMER_IDENTITY is set."
            if callable(former.tenant) or callable(former.principal):
                text += " Whether its function returns the former names cannot be verified."
            if history.former_until is None:
                remedy = "Remove it: no key that the store knows of needs it."
            else:
                remedy = f"Remove it after {moment(history.former_until)}."
            found.append(Finding("identity", Verdict.ADVICE, text, remedy))
        return found or [Finding("identity", Verdict.FINE, "Keys go by the same names as before, as far as is noted.")]

    return Check("identity", findings, asks_store=True)


def _transport(settings: Settings, config: Mapping[str, Any]) -> list[Finding]:
    if settings.allow_plaintext_transport:
        text = "Nobody looks at how the stores are reached: IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT is True."
        return [Finding("transport", Verdict.FINE, text)]
    findings = []
    for name in ("store", "redis_url"):
        choice = getattr(settings, name)
        found = None if choice is None else exposure(f"IDEMPOTENCY_{name.upper()}", choice, config)
        if found is not None:
            verdict = Verdict.ADVICE if found.certain else Verdict.UNKNOWN
            remedy = (
                f"{found.remedy}; or, if something else protects the way there, set "
                "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True."
            )
            findings.append(Finding("transport", verdict, f"{found.setting}: {found.what}.", remedy))
    return findings or [Finding("transport", Verdict.FINE, "Nobody can read what is sent to the store on its way.")]


def _policies(policies: Policies) -> list[Finding]:
    remedy = "Change the policy there: @idempotent(…), idempotency.configure(…), or the IDEMPOTENCY_* setting it names."
    faults = [Finding("policies", Verdict.FAULT, fault, remedy) for fault in policies.faults()]
    return faults or [Finding("policies", Verdict.FINE, "Every endpoint's policy can be kept.")]


def _resolvers(app: Flask, loaders: Callbacks, endpoints: Iterable[Endpoint]) -> list[Finding]:
    """`endpoints` are those that are guarded."""
    findings = []
    nowhere = [name for name in loaders.resolvers if name not in app.view_functions]
    if nowhere:
        text = f"Resolvers are registered for endpoints that are not there ({some(nowhere)}): no janitor can start."
        remedy = (
            "Name an endpoint in @idempotency.resolver(…) as `url_for` would: blueprint and view, with a dot between."
        )
        findings.append(Finding("resolvers", Verdict.FAULT, text, remedy))
    # One that is taken over is quarantined as well, once its view has passed the point of no return.
    asking = [
        each.name
        for each in endpoints
        if (each.policy.on_expiry is OnExpiry.QUARANTINE or each.policy.effects == "marked")
        and each.name not in loaders.resolvers
    ]
    if asking:
        text = f"Nobody but a person can settle what a vanished worker leaves of {some(asking)}: there is no resolver."
        remedy = (
            "Register @idempotency.resolver(…) that asks the other side, or be ready for `flask idempotency resolve`; or "
            'declare effects="deduplicated" or "transactional" where they are.'
        )
        findings.append(Finding("resolvers", Verdict.ADVICE, text, remedy))
    return findings or [Finding("resolvers", Verdict.FINE, "Whatever can be quarantined has a resolver to ask.")]


def _docs_url(url: str) -> list[Finding]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        text = "IDEMPOTENCY_DOCS_URL is no address, so the `type` of a problem leads nowhere."
    elif not url.endswith(("/", "#", "=")):
        text = "IDEMPOTENCY_DOCS_URL does not end with a slash, and the code of a problem is put right behind it."
    else:
        return [Finding("docs-url", Verdict.FINE, "The `type` of a problem is an address.")]
    remedy = "Set IDEMPOTENCY_DOCS_URL to https://… that ends with a slash, or leave it away."
    return [Finding("docs-url", Verdict.ADVICE, text, remedy)]


def _first(option: float | None, setting: float | None) -> float | None:
    """What was said first. 0 is never."""
    said = option if option is not None else setting
    return said if said is None or said > 0 else inf

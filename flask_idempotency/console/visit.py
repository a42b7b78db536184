"""One request to the console: who asks, what the store of this application is, and how the answer is sent.

The console has templates, files and an error page of its own, and sets its headers after every hook of the application has
run. So no setting and no extension of the application changes what protects the pages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from math import inf
from secrets import token_urlsafe
from typing import Any, Final

from flask import Response, current_app, request, url_for
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from werkzeug.exceptions import HTTPException

from flask_idempotency.console import access, wording
from flask_idempotency.console.access import Action, Attempts, Authorize, Operator, Stopped
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.records import RecordView, Refused, key_of
from flask_idempotency.web.operator import is_spelled, read, show_of, tids

EXTENSION: Final = "idempotency_console"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of every page: only the files of this package, and no frame around it."""

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with that a browser sends `Origin: null` with the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Robots-Tag": "noindex",
}

MEDIA_TYPES: Final[Mapping[str, str]] = {
    "console.css": "text/css",
    "console.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    **{f"icon-{count}.svg": "image/svg+xml" for count in ("1", "2", "3", "4", "5", "6", "7", "8", "9", "more")},
}
"""The files of the console. An icon with a number says how many requests need a person."""

_BADGE: Final = (
    '<circle cx="22" cy="10" r="10" fill="#a4161a"/><text x="22" y="15" fill="#fff" font-family="sans-serif" font-size="15" '
    'font-weight="bold" text-anchor="middle">{}</text></svg>'
)


class ConsoleResponse(Response):
    """A response that keeps its own headers: hooks of the application run before they are written."""

    cached: str = "no-store"

    def get_wsgi_headers(self, environ: Any) -> Any:
        headers = super().get_wsgi_headers(environ)
        headers.update(HEADERS)
        headers["Cache-Control"] = self.cached
        # Such as those of Flask-CORS, which may let any site read what the operator's browser may.
        for name in [name for name in headers.keys() if name.lower().startswith("access-control-")]:  # noqa: SIM118
            del headers[name]
        return headers


def add_missing_headers(response: Response) -> Response:
    """Protect a response that the application made in the console's place, such as its page for `abort(401)`."""
    if not isinstance(response, ConsoleResponse):
        response.headers["Cache-Control"] = "no-store"
        response.headers.setdefault("X-Frame-Options", "DENY")
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("Content-Security-Policy", "frame-ancestors 'none'")
    return response


@lru_cache
def static_file(name: str) -> tuple[bytes, str]:
    """Return a file of the console, and its hash."""
    plain, _, count = name.removesuffix(".svg").partition("-")
    content = files("flask_idempotency.console").joinpath("static", f"{plain}.svg" if count else name).read_bytes()
    if count:
        content = content.replace(b"</svg>", _BADGE.format("+" if count == "more" else count).encode())
    return content, sha256(content).hexdigest()[:16]


_pages = Environment(
    loader=PackageLoader("flask_idempotency.console"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    # Whatever a template shows is bounded and printable, also where its author forgot a filter.
    finalize=wording.finalize,
)
_pages.filters.update(wording.FILTERS)


FRESH_SECONDS: Final = 600.0
"""For how long the overview shows what a look at Health found."""

TENANTS_SECONDS: Final = 300.0
"""For how long this process shows the list of tenants that it read."""


class Tenants:
    """Every tenant that is counted, in order, and the name that its records hold: empty until a page shows it.

    Redis looks through all of its keys for them, which no page may repeat.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._found_at = -inf
        self._names = dict[bytes, str]()

    def names(self, find: Callable[[], Iterable[bytes]]) -> dict[bytes, str]:
        """Return them as they were found lately, or find them now."""
        if self._monotonic() - self._found_at > TENANTS_SECONDS:
            self._names = dict.fromkeys(sorted(find()), "")
            self._found_at = self._monotonic()
        return self._names


@valueclass(frozen=True, slots=True)
class Mounted:
    """The console as one application has it, in this process."""

    authorize: Authorize
    any_scheme: bool
    """Whether plain HTTP is accepted, perhaps because this process does not know that its clients use HTTPS."""
    attempts: Attempts
    tenants: Tenants


HANDLE: Final = re.compile(r"[a-z2-7]{77}")


class Visit:
    """One request to the console of the current application."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted
        self.operator: Operator | None = None
        self.cookie: str | None = None
        self._limit: frozenset[str] | None = None
        """The tenants that `authorize` names for the pages about everything. It may name only the operator for a record."""
        self._tids = dict[str, frozenset[bytes]]()
        self.transported = False
        """Whether this request came over HTTPS, or plain HTTP is allowed: else no file of the console is served."""

    # Who asks.

    def admit(self) -> Operator:
        """Return the operator, if they may see the pages about everything. Stop the request if not."""
        self.operator = self._ask_in_general()
        if self.operator is None:
            why = "The application's authorize(…) refused it. Sign in as an operator."
            raise Stopped(403, "You may not see this", why)
        return self.operator

    def _ask_in_general(self) -> Operator | None:
        """Ask for the pages about everything, and remember the tenants that the answer names."""
        operator = access.ask(self.mounted.authorize, "view", None)
        if operator is not None and operator.tenants is not None:
            self._limit = frozenset(operator.tenants)
        return operator

    def _ask(self, action: Action, found: SeenRecord | None, view: RecordView | None) -> Operator | None:
        """Return the operator who may do this to this record of theirs, or to everything. The general answer limits it."""
        operator = access.ask(self.mounted.authorize, action, view)
        if operator is not None and self._limit is not None:
            named = self._limit if operator.tenants is None else self._limit.intersection(operator.tenants)
            operator = Operator(operator.name, named)
        if operator is None or operator.tenants is None:
            return operator
        return operator if found is not None and self._is_of(operator.tenants, found) else None

    def admit_to_all(self) -> None:
        """Stop the request unless the operator may see all tenants."""
        if self.admit().tenants is not None:
            raise Stopped(403, "You may not see this", "This page is about all tenants. Records shows those of yours.")

    def admit_to(self, action: Action, found: SeenRecord | None = None, view: RecordView | None = None) -> None:
        """Stop the request unless the operator may do this. They see this record already."""
        operator = self._ask(action, found, view)
        if operator is None:
            what = "this" if found is None else "this record"
            why = "The application's authorize(…) refused it. Nothing was changed."
            raise Stopped(403, f"You may not {action} {what}", why)
        self.operator = operator

    @property
    def who(self) -> Operator:
        """The operator, who was asked for before."""
        if self.operator is None:
            raise ConfigurationError("This page of the console has not asked who the operator is.")
        return self.operator

    @property
    def tenants(self) -> Collection[str] | None:
        """The tenants that the operator may see. None: all."""
        return self.who.tenants

    @property
    def everything(self) -> bool:
        return self.operator is not None and self.operator.tenants is None

    def sees(self, found: SeenRecord, view: RecordView) -> Operator | None:
        """Return the operator who may see this record.

        An `abort()` refuses too: an answer of its own would show that the record exists.
        """
        try:
            return self._ask("view", found, view)
        except HTTPException:
            return None

    def _is_of(self, tenants: Collection[str], found: SeenRecord) -> bool:
        """Return whether this record is of one of these tenants."""
        own, stored = found.key.tid, found.record.info.tenant
        return any(own in self._tids_of(tenant) and is_spelled(stored, tenant) for tenant in tenants)

    def _tids_of(self, tenant: str) -> frozenset[bytes]:
        """Return the ids of this tenant. Derived once a request: an operator may have a thousand tenants."""
        if tenant not in self._tids:
            self._tids[tenant] = frozenset(tids(tenant))
        return self._tids[tenant]

    def may(self, action: Action) -> bool:
        """Return whether to offer this action, which is about all tenants."""
        return self.everything and access.may(self.mounted.authorize, action, None)

    def find(self, handle: str) -> tuple[StorageKey, SeenRecord | None, RecordView | None]:
        """Return the key of this handle, and its record and what to show of it for an operator who may see it.

        None: it is gone, and this operator may know what became of it.

        A handle that is malformed, one of no record, and one of a record that the operator may not see stop the request
        alike. `authorize` gets the same first question for each.
        """
        general = self._ask_in_general()
        try:
            key = key_of(handle if HANDLE.fullmatch(handle) else "")
        except Refused:
            raise self.not_found() from None
        record = read(key)
        found = None if record is None else SeenRecord(key, record)
        view = None if found is None else show_of(found, steps=True)
        if found is not None and view is not None:
            self.operator = self.sees(found, view)
        else:
            tenants = None if general is None else general.tenants
            known = tenants is None or any(key.tid in self._tids_of(tenant) for tenant in tenants)
            self.operator = general if known else None
        if self.operator is None:
            raise self.not_found()
        return key, found, view

    @staticmethod
    def not_found() -> Stopped:
        return Stopped(
            404,
            "There is no such record",
            "It was released, it expired, or you may not see it. The list shows the records that you may see.",
        )

    def check_application(self) -> None:
        """Stop the request if this application has no store to look into."""
        state = current_app.extensions.get("idempotency")
        if state is None:
            why = "This application has a console and no extension: call idempotency.init_app(app)."
            raise Stopped(503, "Idempotency is not set up", why)
        if state.built is None:
            why = "IDEMPOTENCY_ENABLED is False, so no key is protected and this console has no store to look into."
            raise Stopped(503, "Idempotency is switched off", why)

    # What is sent.

    def url(self, page: str, **values: Any) -> str:
        return url_for(f"{request.blueprint}.{page}", **values)

    def respond(self, made: Response | str | tuple[str, int]) -> Response:
        """Send this page, and the cookie that its forms need."""
        page, status = made if isinstance(made, tuple) else (made, 200)
        response = page if isinstance(page, Response) else ConsoleResponse(page, status=status, mimetype="text/html")
        if self.cookie is not None and access.cookie_of(request) is None:
            path, secure = self.url("overview"), request.is_secure
            response.set_cookie(access.COOKIE, self.cookie, path=path, secure=secure, httponly=True, samesite="Strict")
        return response

    def form_fields(self) -> Markup:
        """Return the hidden fields that every form of the console needs: our token, and that of Flask-WTF if it is there."""
        if self.cookie is None:
            self.cookie = access.cookie_of(request) or token_urlsafe(32)
        hidden = Markup('<input type="hidden" name="{}" value="{}">')
        fields = hidden.format(access.TOKEN_FIELD, access.form_tokens(self.cookie, self.who)[0])
        csrf = current_app.jinja_env.globals.get("csrf_token")
        if callable(csrf):
            fields += hidden.format(current_app.config.get("WTF_CSRF_FIELD_NAME") or "csrf_token", csrf())
        return fields

    def _waiting(self) -> int:
        """Return how many requests have an unknown outcome. 0 for an operator of some tenants, and if the store cannot tell."""
        recovery = current_app.extensions["idempotency"].built.recovery
        if not self.everything or recovery is None:
            return 0
        try:
            return int(recovery.counts().quarantined)
        except IdempotencyError:  # a page that says what is wrong with the store must be shown
            return 0

    def render(self, template: str, **values: Any) -> str:
        """Render a page. Each has the navigation of what this operator may see, and how many requests need a person."""
        waiting, extensions = self._waiting(), current_app.extensions
        root = next(current_app.url_map.iter_rules(f"{request.blueprint}.overview")).rule
        shown = {page for page, _ in PAGES} if self.everything else {"records"}
        shown -= set() if "idempotency_outbox" in extensions else {"outbox"}
        shown -= set() if extensions["idempotency"].loaders.operations.names() else {"messages"}
        return _pages.get_template(template).render(
            visit=self,
            url=self.url,
            static=self._static,
            navigation=[(page, title, self.url(page)) for page, title in PAGES if page in shown],
            here=str(request.url_rule).removeprefix(root).partition("/")[0] or "overview",
            enabled=extensions["idempotency"].settings.enabled,
            application=current_app.name,
            waiting=waiting,
            icon=f"icon-{waiting if waiting < 10 else 'more'}.svg" if waiting else "icon.svg",
            **values,
        )

    def _static(self, name: str) -> str:
        return self.url("static_file", name=name, v=static_file(name)[1])

    def stopped(self, stopped: Stopped) -> Response:
        """Send a page that says why there is no other. It is complete: plain HTTP gets no file of the console."""
        page = _pages.get_template("stopped.html").render(
            stopped=stopped,
            styled=self.transported,
            limited=self._limit is not None,  # and not `everything`, which would show whether a record exists
            url=self.url,
            static=self._static,
        )
        response = ConsoleResponse(page, status=stopped.status, mimetype="text/html")
        response.headers.update(stopped.headers)
        return response


PAGES: Final = (
    ("overview", "Overview"),
    ("records", "Records"),
    ("tenants", "Tenants"),
    ("endpoints", "Endpoints"),
    ("messages", "Messages"),
    ("outbox", "Outbox"),
    ("health", "Health"),
)
"""The pages of the navigation, by endpoint. Their addresses begin those of the pages that belong to them."""

"""One request to the console: who asks, what the store of this application is, and how the answer is sent.

The console has templates, files and an error page of its own, and sets its headers after every hook of the application has
run. So no setting and no extension of the application changes what protects the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

from flask import Response, current_app, request, url_for
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from werkzeug.exceptions import HTTPException

from flask_idempotency.console import wording
from flask_idempotency.console.access import (
    COOKIE,
    TOKEN_FIELD,
    Attempts,
    Authorize,
    Operator,
    Stopped,
    ask,
    cookie_of,
    form_tokens,
    new_cookie,
)
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.records import RecordView

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

MEDIA_TYPES: Final[Mapping[str, str]] = {"console.css": "text/css", "console.js": "text/javascript"}


class ConsoleResponse(Response):
    """A response that keeps its own headers: hooks of the application run before they are written."""

    cached: str = "no-store"

    def get_wsgi_headers(self, environ: Any) -> Any:
        headers = super().get_wsgi_headers(environ)
        for name, value in HEADERS.items():
            headers[name] = value
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
    content = files("flask_idempotency.console").joinpath("static", name).read_bytes()
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
_pages.globals.update(wording.GLOBALS)


@valueclass(frozen=True, slots=True)
class Mounted:
    """The console as one application has it, in this process."""

    authorize: Authorize
    any_scheme: bool
    """Whether plain HTTP is accepted, perhaps because this process does not know that its clients use HTTPS."""
    changes_per_hour: int
    attempts: Attempts


class Visit:
    """One request to the console of the current application."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted
        self.operator: Operator | None = None
        self.cookie: str | None = None

    # Who asks.

    def admit(self) -> Operator:
        """Return the operator, if they may see the pages about everything. Stop the request if not."""
        operator = ask(self.mounted.authorize, "view", None)
        if operator is None:
            raise Stopped(
                403, "You may not see this", "The application's authorize(…) refused it. Sign in as an operator."
            )
        self.operator = operator
        return operator

    def admit_to_all(self) -> Operator:
        """Return the operator, if they may see all tenants."""
        operator = self.admit()
        if operator.tenants is not None:
            raise Stopped(403, "You may not see this", "This page is about all tenants. See Records for yours.")
        return operator

    def may_see(self, record: RecordView) -> Operator | None:
        """Return the operator who may see this record. An `abort()` refuses too: an answer of its own would show that the
        record exists."""
        try:
            return ask(self.mounted.authorize, "view", record)
        except HTTPException:
            return None

    def check_application(self) -> None:
        """Stop the request if this application has no store to look into."""
        if "idempotency" not in current_app.extensions:
            raise Stopped(
                503,
                "Idempotency is not set up",
                "This application has a console and no extension: call idempotency.init_app(app).",
            )
        if current_app.extensions["idempotency"].built is None:
            raise Stopped(
                503,
                "Idempotency is switched off",
                "IDEMPOTENCY_ENABLED is False, so no key is protected and this console has no store to look into.",
            )

    # What is sent.

    def url(self, page: str, **values: Any) -> str:
        return url_for(f"{self._endpoints()}.{page}", **values)

    @staticmethod
    def _endpoints() -> str:
        return str(request.blueprint)

    def respond(self, made: Response | str) -> Response:
        """Send this page, and the cookie that its forms need."""
        response = ConsoleResponse(made, mimetype="text/html") if isinstance(made, str) else made
        if self.cookie is not None and cookie_of(request) is None:
            response.set_cookie(
                COOKIE,
                self.cookie,
                path=self.url("overview"),
                secure=request.is_secure,
                httponly=True,
                samesite="Strict",
            )
        return response

    def form_fields(self) -> Markup:
        """Return the hidden fields that every form of the console needs: our token, and that of Flask-WTF if it is there."""
        if self.operator is None:
            raise ConfigurationError("A form needs an operator.")
        if self.cookie is None:
            self.cookie = cookie_of(request) or new_cookie()
        hidden = Markup('<input type="hidden" name="{}" value="{}">')
        fields = hidden.format(TOKEN_FIELD, form_tokens(self.cookie, self.operator)[0])
        csrf = current_app.jinja_env.globals.get("csrf_token")
        if callable(csrf):
            fields += hidden.format(current_app.config.get("WTF_CSRF_FIELD_NAME") or "csrf_token", csrf())
        return fields

    def render(self, template: str, **values: Any) -> str:
        """Render a page. Each has the navigation of what this operator may see."""
        everything = self.operator is not None and self.operator.tenants is None
        names = pages_of(everything=everything) if self.operator is not None else []
        return _pages.get_template(template).render(
            visit=self,
            url=self.url,
            static=self._static,
            navigation=[(page, title, self.url(page)) for page, title in names],
            here=(request.endpoint or "").rpartition(".")[2],
            enabled=current_app.extensions["idempotency"].settings.enabled,
            application=current_app.name,
            **values,
        )

    def _static(self, name: str) -> str:
        return self.url("static_file", name=name, v=static_file(name)[1])

    def stopped(self, stopped: Stopped) -> Response:
        """Send a page that says why there is no other. It is complete: plain HTTP gets no file of the console."""
        page = _pages.get_template("stopped.html").render(stopped=stopped, url=self.url)
        response = ConsoleResponse(page, status=stopped.status, mimetype="text/html")
        for name, value in stopped.headers.items():
            response.headers[name] = value
        return response


def pages_of(*, everything: bool) -> list[tuple[str, str]]:
    """Return the pages of the navigation, by endpoint."""
    if not everything:
        return [("records", "Records")]
    return [("overview", "Overview"), ("records", "Records")]

"""The blueprint `Console`: mount it on an application, and it serves the pages of operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from flask import Blueprint, Response, current_app, request
from flask.blueprints import BlueprintSetupState

from flask_idempotency.console import actions, lists, pages
from flask_idempotency.console.access import Attempts, Authorize, Stopped
from flask_idempotency.console.visit import (
    EXTENSION,
    MEDIA_TYPES,
    ConsoleResponse,
    Mounted,
    Tenants,
    Visit,
    add_missing_headers,
    static_file,
)
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.operations.records import Refused
from flask_idempotency.web.policies import MARK, Mark

CHANGES_PER_HOUR: Final = 30
YEAR_SECONDS: Final = 365 * 86400
NEEDS_HTTPS: Final = (
    "This request came over plain HTTP, where others can read it and act as you. If a proxy ends TLS, wrap the application in "
    "werkzeug.middleware.proxy_fix.ProxyFix with x_proto=1 and x_host=1. In a trusted network: Console(…, allow_http=True)."
)


def send_file(visit: Visit, name: str) -> Response:
    """Send a file of the console. A browser keeps the version that a page names."""
    if name not in MEDIA_TYPES:
        raise Stopped(404, "There is no such file", "The console has three: console.css, console.js and icon.svg.")
    content, digest = static_file(name)
    response = ConsoleResponse(content, mimetype=MEDIA_TYPES[name])
    response.set_etag(digest)
    fresh = request.args.get("v") == digest
    response.cached = f"private, max-age={YEAR_SECONDS}, immutable" if fresh else "no-cache"
    response.make_conditional(request)
    return response


class Console(Blueprint):
    """A console for operators: it shows what the application's keys do, and settles those whose outcome is unknown.

    Register it as any blueprint: `app.register_blueprint(Console(idempotency, authorize=…))`, before or after `init_app`.

    `authorize(action, record)` decides each request. `action` is `view`, `settle`, `release`, `purge` or `outbox`; `record`
    is an `operations.records.RecordView`, or None for pages about everything. Return the operator's name, an `Operator`, or
    None to refuse. What it raises passes through, such as `abort(401)`. Each operator may make `changes_per_hour` changes.

    It refuses plain HTTP unless the application is in debug or testing mode, or `allow_http` is True. Raises
    `ConfigurationError` without a callable `authorize`, and for other faulty arguments.
    """

    def __init__(
        self,
        idempotency: Any,
        *,
        authorize: Authorize | None = None,
        url_prefix: str = "/idempotency",
        allow_http: bool = False,
        changes_per_hour: int = CHANGES_PER_HOUR,
        name: str = EXTENSION,
    ) -> None:
        faults = []
        if not callable(getattr(idempotency, "init_app", None)):
            faults.append(f"Console(): the first argument must be your Idempotency, not {type(idempotency).__name__}.")
        if not callable(authorize):
            faults.append(
                "Console(): pass authorize, a function of (action, record) that returns the operator's name, or None. "
                "Without it everyone could read and settle your records."
            )
        if not url_prefix.startswith("/") or not url_prefix.strip("/"):
            faults.append('Console(): url_prefix must be a path of its own, such as "/idempotency".')
        if type(changes_per_hour) is not int or changes_per_hour < 1:
            faults.append("Console(): changes_per_hour must be a whole number from 1 on.")
        if faults or authorize is None:
            raise ConfigurationError(*faults)
        super().__init__(name, __name__, url_prefix=url_prefix.rstrip("/"))
        self._allow_http = allow_http

        def mount(setup: BlueprintSetupState) -> None:
            # A blueprint may serve several applications, and has no state: what each of them counts is kept in it.
            setup.app.extensions.setdefault(EXTENSION, {})[self] = Mounted(
                authorize=authorize,
                any_scheme=allow_http or setup.app.debug or setup.app.testing,
                attempts=Attempts(most=changes_per_hour),
                tenants=Tenants(),
            )

        self.record(mount)
        for path, view, methods in (
            ("/", pages.overview, ["GET"]),
            ("/records", pages.records, ["GET"]),
            ("/records/find", lists.find, ["GET", "POST"]),
            ("/records/all/<verb>", lists.bulk, ["GET", "POST"]),
            ("/records/<handle>", pages.record, ["GET"]),
            ("/records/<handle>/settle", actions.settle, ["GET", "POST"]),
            ("/records/<handle>/steps/<int:number>", actions.settle_step, ["GET", "POST"]),
            ("/records/<handle>/release", actions.release, ["GET", "POST"]),
            ("/tenants", pages.tenants, ["GET"]),
            ("/tenants/purge", actions.purge, ["GET", "POST"]),
            ("/endpoints", pages.endpoints, ["GET"]),
            ("/messages", pages.messages, ["GET"]),
            ("/outbox", pages.outbox, ["GET"]),
            ("/outbox/<verb>", actions.outbox_change, ["GET", "POST"]),
            ("/health", pages.health, ["GET"]),
        ):
            self.add_url_rule(path, view.__name__, self._served(view), methods=methods, provide_automatic_options=False)
        file = self._served(send_file, needs_store=False)
        self.add_url_rule("/static/<name>", "static_file", file, provide_automatic_options=False)
        unknown = self._served(pages.unknown)
        for path, methods in (("/<path:rest>", ["GET", "POST"]), ("/", ["POST"])):
            self.add_url_rule(path, "unknown", unknown, methods=methods, provide_automatic_options=False)
        self.after_request(add_missing_headers)

    def _served(self, page: Callable[..., Any], *, needs_store: bool = True) -> Callable[..., Response]:
        """Return a view that runs this page for an operator, and answers what stops it with a page that says why."""

        @wraps(page)
        def view(**arguments: Any) -> Response:
            visit = Visit(current_app.extensions[EXTENSION][self])
            try:
                visit.transported = request.is_secure or self._allow_http or current_app.debug or current_app.testing
                if not visit.transported:
                    raise Stopped(403, "The console needs HTTPS", NEEDS_HTTPS)
                if needs_store:
                    visit.check_application()
                return visit.respond(page(visit, **arguments))
            except Stopped as stopped:
                stop = stopped
            except Refused as refused:
                stop = Stopped(409, "This is refused", str(refused))
            except CorruptRecord as error:
                current_app.logger.error("the console cannot read what the store holds: %s", error)
                stop = Stopped(500, "A part of the store is damaged", f"{error}. See Health.")
            except KeyProviderUnavailable as error:
                current_app.logger.warning("the console cannot encrypt a response: %s", cause_of(error))
                why = "The response was not encrypted, so not stored. Try again."
                stop = Stopped(503, "The key provider does not answer", why)
            except StoreUnavailable as error:
                current_app.logger.warning("the console cannot read the store: %s", cause_of(error))
                why = "Nothing is known now. Try again; see Health when it answers."
                stop = Stopped(503, "The store does not answer", why)
            except ConfigurationError as error:
                if current_app.debug or current_app.testing:
                    raise
                # Not its text: it may be a fault of `authorize`, so this person may be no operator.
                current_app.logger.error("the console cannot show this page: %s", error)
                stop = Stopped(503, "The store or the console is not set up", "The log says what to do. See Health.")
            return visit.stopped(stop)

        # A form of the console claims no key, whatever the application requires of its views.
        setattr(view, MARK, Mark(exempt=True))
        return view

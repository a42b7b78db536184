"""Answer what became of a key, void it, and link from refusals to the view that does both.

A client asks with `GET {status}?method=POST&path=/payments`, and the key in the operation's own header. The key alone does
not name a record: the operation's policy decides header, grammar and scope, and the caller and tenant belong to it too. An
answer for another record would be `absent`, and the client would pay again. So `absent` is only said if the operation would
look for the key under the names that were found here, and whatever is in doubt is refused. `DELETE` voids a key that is
`absent`, so the same holds there.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

from flask import Flask, Request, current_app, url_for
from werkzeug.exceptions import HTTPException
from werkzeug.routing import RequestRedirect
from werkzeug.wrappers import Response

from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, InvalidKey, StoreUnavailable
from flask_idempotency.engine.keys import Scope, one_key
from flask_idempotency.engine.model import Mismatched, OverQuota
from flask_idempotency.engine.outages import LogLimit, OutageLog
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.status import KeyStatus, status_of, void_key
from flask_idempotency.settings import Settings
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.callbacks import Callbacks, Names, former_names, load_quota, load_tenant, named_requests
from flask_idempotency.web.policies import MARK, Mark, Policies, ResolvedPolicy
from flask_idempotency.web.principals import (
    UnknownCaller,
    checked,
    extensions_of,
    is_of_httpauth,
)
from flask_idempotency.web.problems import (
    RETRY_AFTER_CAP_SECONDS,
    STORE_RETRY_SECONDS,
    Problem,
    build,
    failure,
    refusal,
    render,
    text_of,
    whole_seconds,
)
from flask_idempotency.web.request_state import context
from flask_idempotency.web.requests import RequestReader, client_keys, preferred_wait

if TYPE_CHECKING:
    from werkzeug.routing import MapAdapter, Rule

OPEN_ENDED: Final = frozenset(
    {"in-flight", "outcome-unknown", "store-unavailable", "memory-lost", "transaction-conflict", "request-paused"}
)
"""The problems that leave open what becomes of the key. They link to a status view."""

ENDPOINT: Final = "idempotency_status"
"""The endpoint of the route that IDEMPOTENCY_STATUS_URL registers."""

_OUR_HOOKS: Final = "flask_idempotency.web.hooks"
HOST_VARIABLE: Final = "idempotency_host"
SUBDOMAIN_VARIABLE: Final = "idempotency_subdomain"
"""The variables of routes that are on every host or subdomain."""
_MOST_REDIRECTS: Final = 4

_FREE: Final = ("absent", "paused", "voided")
"""The states of a key that may be voided, or is."""
_NOT_VOIDED: Final = {
    "in-flight": ("in-flight", "It was not voided, because its request is running."),
    "paused": ("request-paused", "It was not voided, because a part of its request may be done."),
    "outcome-unknown": ("outcome-unknown", "It was not voided."),
}
"""The code and the detail of the problem for a key in this state that was to be voided."""

_MOUNT: Final = (
    "Register key_status where these callers are authenticated: on the blueprint of the operation, below its decorators. Or "
    "register an @idempotency.principal_loader that finds them everywhere."
)
_ELSEWHERE: Final = (
    "The tenant or the caller of this operation depends on its URL, and is another one here. Ask at the status URL that "
    "stands beside the operation."
)

_OTHER_HOOKS: Final = (
    "Hooks of a blueprint run for this view or for the operation, but not for both, and they may name another caller. "
    "Register key_status on the blueprint of the operation."
)
_NO_DECORATORS: Final = (
    "The operation claims its key below decorators (@claim_here), which may name another caller. Register key_status below "
    "the same decorators."
)
_ONLY_DECORATORS: Final = (
    "This view runs below decorators, and the operation claims its key before its own decorators run. Put @claim_here below "
    "the decorators of the operation, or register key_status without any."
)
_SIGNED_OUT: Final = (
    "A caller who is signed out may not void a key: the request may have come while it was signed in, and its key is another "
    "one. Sign in as the caller of the request. If callers without a name use keys here, set IDEMPOTENCY_ALLOW_ANONYMOUS to "
    "True: a client that has lost its session then hears that the key of a request that ran is voided."
)
_NO_TENANT: Final = (
    "The tenant_loader finds no tenant here, and may find one for the operation. Register key_status where the tenant is "
    "known, and send here what names the tenant in the request itself."
)

_URL_FIELDS: Final = ("url_rule", "view_args", "path", "method", "query_string")
_URL_CACHES: Final = ("args", "values", "full_path", "url", "base_url")
"""What Werkzeug keeps of a URL on a request, once it was read."""

_log = logging.getLogger("flask_idempotency")


class Target(NamedTuple):
    """A method and a URL of this application, and what its URL map finds for them. `path` is decoded, without the mount."""

    rule: Rule
    arguments: Mapping[str, Any]
    method: str
    path: str
    query: str


def key_status(**_: Any) -> Response:
    """Answer what became of a key (GET), or void it (DELETE). Register it wherever your callers are authenticated.

    `IDEMPOTENCY_STATUS_URL` registers it on the application. Register it yourself on a blueprint whose hooks sign callers
    in, or below decorators that do: `blueprint.get("/status")(login_required(key_status))`. With `void=True`, route
    `methods=["GET", "DELETE"]`. It takes and ignores the arguments of any URL. Raises `ConfigurationError` in an application
    without the extension.
    """
    state = current_app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError("key_status: this application has no Idempotency. Call init_app first.")
    if state.hooks is None or not state.settings.enabled:
        # No operation takes keys now.
        return render(
            Problem("unknown-operation"),
            profile=PROFILES[state.settings.policy.profile],
            docs_url=state.settings.docs_url,
            response_class=current_app.response_class,
        )
    answer: Response = state.hooks.key_status.answer(context.get().request)
    return answer


# So that a POST to this view claims nothing. `exempt` would connect a signal, which costs each request of each application.
setattr(key_status, MARK, Mark(exempt=True))


@dataclass(eq=False, repr=False)
class KeyStatusView:
    """What `key_status` does in one application. For GET it only reads, so a client may ask as often as it likes."""

    engine: Engine
    reader: RequestReader
    policies: Policies
    problem: Callable[[Problem, Policy], Response]

    def __post_init__(self) -> None:
        self.app: Flask = self.reader.app
        self.settings: Settings = self.reader.settings
        self.callbacks: Callbacks = self.reader.callbacks
        self._outages = OutageLog()
        self._refused = LogLimit()

    def answer(self, request: Request) -> Response:
        """Return the status of the key in this request, or the problem that a request with this key could get."""
        operation = find_operation(request, context.get().url_adapter)
        if operation is None:
            return self.problem(Problem("unknown-operation"), self.settings.policy)
        endpoint = operation.rule.endpoint
        resolved = self.policies.look(endpoint, operation.method)
        policy, voids = resolved.policy, request.method == "DELETE"
        found: Response | Problem
        # A webhook has an id and no key, under a name that no client has. An endpoint that is only observed runs each request
        # and keeps no record. Of both, every key would be absent, and what ran would be sent again.
        if resolved.exempt or resolved.observed or policy.principal is not None:
            found = Problem("unknown-operation")
        elif resolved.faults:
            found = Problem("misconfigured")
        elif voids and not policy.void:
            found = Problem("void-not-offered", headers=(("Allow", "GET"),))
        else:
            try:
                found = self._look(request, operation, resolved, voids=voids)
            except UnknownCaller as error:
                self._log_once(endpoint, f"{error}. {_MOUNT}")
                found = Problem("principal-required", f"{error}. {_MOUNT}" if self.app.debug else "", status=403)
            except StoreUnavailable as error:
                self._outages.refused(f"The status of a key of {endpoint}", error)
                found = failure(error)
            except (InvalidKey, CorruptRecord) as error:
                found = failure(error)
        return self.problem(found, policy) if isinstance(found, Problem) else found

    def _look(
        self, request: Request, operation: Target, resolved: ResolvedPolicy, *, voids: bool
    ) -> Response | Problem:
        """Name the key as the operation would claim it, and look for it."""
        policy, endpoint = resolved.policy, operation.rule.endpoint
        # Below decorators, a token counts that they have verified. They may read it from other places than the settings name.
        in_view = resolved.deferred and self._is_decorated(request)
        # Only headers: the key of a form is in the operation's own body.
        values = client_keys(request, replace(policy, form_field=None))
        if not values:
            return Problem("missing-key")
        client_key = one_key(values, max_length=policy.max_key_length, key_format=policy.key_format)
        names = (
            load_tenant(self.callbacks, self.app),
            self.reader.credentials.principal(self.callbacks.principal, request, self.app, in_view=in_view),
        )
        with _as_at(request, operation):
            there = _loaded_names(self.callbacks, self.app, names)
        if there != names:
            return Problem("unknown-operation", _ELSEWHERE)
        if names[1] is None and self.settings.allow_anonymous is False:
            return Problem("principal-required", status=403)
        preferred = preferred_wait(request) if "HTTP_PREFER" in request.environ else None
        wait = 0.0 if preferred is None else min(float(preferred), policy.wait)
        requests = named_requests(
            Scope(self.settings.namespace, *names, endpoint if policy.scope == "operation" else None),
            client_key,
            self.reader.identities,
            self.settings,
            policy,
            method=operation.method,
            operation=endpoint,
            before=lambda former: former_names(former, *names, request, self.app, in_view=in_view),
        )
        try:
            status = status_of(self.engine, requests, wait=wait)
            if status.state in (_FREE if voids else ("absent",)):
                problem = self._unsure(request, operation, resolved, names, voids=voids)
                if problem is not None:
                    return problem
            if voids and status.state in _FREE:
                quota = load_quota(self.callbacks, self.settings, names[0], self.app)
                voided = void_key(self.engine, requests, policy, quota=quota)
                if isinstance(voided, OverQuota):
                    return refusal(replace(voided, allowed=voided.allowed * self.settings.tenant_shards))
                status = replace(voided, waited=status.waited)
        except ConfigurationError as error:
            if self.app.debug or self.app.testing:
                raise
            self._outages.refused(f"The status of a key of {endpoint}", error)
            return Problem("store-unavailable", retry_after=STORE_RETRY_SECONDS)
        return self._refusal(request, operation, status, voids=voids) or self._response(status, int(wait))

    def _unsure(
        self, request: Request, operation: Target, resolved: ResolvedPolicy, names: Names, *, voids: bool
    ) -> Problem | None:
        """Return the problem that answers in place of `absent` where the operation may know the key by another name."""
        # Match again: preprocessors remove arguments from `view_args`.
        _, here = context.get().url_adapter.match(return_rule=True)
        if any(here[name] != operation.arguments[name] for name in here.keys() & operation.arguments.keys()):
            # Hooks may have read the tenant from the URL of this request.
            return Problem("unknown-operation", _ELSEWHERE)
        doubt = self._doubt(request, operation.rule.endpoint, resolved, names)
        if not doubt and voids and names[1] is None and self.settings.allow_anonymous is not True:
            # Only an application that can name a caller who signs in. Flask-HTTPAuth does in decorators: see `_doubt`.
            doubt = _SIGNED_OUT if self.callbacks.principal is not None or extensions_of(self.app) else ""
        if not doubt:
            return None
        self._log_once(operation.rule.endpoint, doubt)
        return Problem("principal-required", doubt, status=403)

    def _refusal(self, request: Request, operation: Target, status: KeyStatus, *, voids: bool) -> Problem | None:
        """Return the problem for a key with another's record, one that this caller may not see, or that was not voided."""
        record, state, guard = status.record, status.state, self.callbacks.replay_guard
        if record is not None:
            # A claim finds the key in use if its record is another operation's. An endpoint that was renamed since says
            # nothing: a claim compares the path. A claim of a voided key is refused as that, whatever the operation is.
            info, endpoint = record.info, operation.rule.endpoint
            renamed = info.operation == endpoint or info.operation not in self.app.view_functions
            if state == "of-other" or (state != "voided" and not (info.method == operation.method and renamed)):
                return refusal(Mismatched(first_seen=record.requested_at))
        if state in ("done", "expired") and guard is not None:
            with _as_at(request, operation):
                allowed = self.app.ensure_sync(guard)(record)
            if not allowed:
                return Problem("replay-forbidden")
        if voids and state not in ("voided", "done", "expired"):
            # So that a client which looks at the status alone does not take it for voided.
            code, detail = _NOT_VOIDED[state]
            seconds = None if record is None or code != "in-flight" else min(record.remaining, RETRY_AFTER_CAP_SECONDS)
            return Problem(code, detail, retry_after=seconds, status=409)
        return None

    def _doubt(self, request: Request, endpoint: str, resolved: ResolvedPolicy, names: Names) -> str:
        """Return why the operation may name this caller otherwise, and what to do about it; empty if it cannot.

        Its record would be under that name, so the key must not be called absent. What is found is the caller's in any case.
        """
        tenant, principal = names
        if principal is None and self.reader.credentials.of(request) is not None:
            return _MOUNT
        if _have_hooks(self.app, _blueprints(endpoint) ^ {*request.blueprints}):
            return _OTHER_HOOKS
        if self.callbacks.tenant is not None and tenant is None:
            return _NO_TENANT
        decorated = self._is_decorated(request)
        if resolved.deferred and (not decorated or principal is None):
            # Without a name, the decorators of this view are others: a rate limiter signs no caller in.
            return _NO_DECORATORS
        if not resolved.deferred and decorated and principal is not None:
            # Flask-Login and Flask-JWT-Extended name callers without a decorator. Elsewhere the claim found no caller, and
            # refused the known credentials of this request unless callers may be anonymous.
            by_decorator = self.callbacks.principal is not None or is_of_httpauth(principal)
            refused = self.settings.allow_anonymous is not True and self.reader.credentials.of(request) is not None
            if by_decorator and not refused:
                return _ONLY_DECORATORS
        return ""

    def _is_decorated(self, request: Request) -> bool:
        return self.app.view_functions.get(request.endpoint or "") is not key_status

    def _log_once(self, endpoint: str, why: str) -> None:
        if self._refused.take(f"{endpoint} {why}") is not None:
            _log.warning("The status of a key of %s was refused: %s", endpoint, why)

    def _response(self, status: KeyStatus, waited: int) -> Response:
        document: dict[str, Any] = {"state": status.state}
        fields = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        record = status.record
        if record is not None:
            document["since"] = text_of(record.requested_at)
            document["attempt"] = record.attempt
            if status.state == "in-flight":
                document["seconds_left"] = whole_seconds(record.remaining)
                retry_after = whole_seconds(min(record.remaining, RETRY_AFTER_CAP_SECONDS))
                fields.append(("Retry-After", str(retry_after)))
            elif record.payload is not None and status.state in ("done", "expired", "voided"):
                if status.state != "voided":
                    document["status"] = record.payload.status
                if status.state != "expired":
                    document["seconds_left"] = max(math.floor(record.remaining), 0)
        if status.waited:
            fields.append(("Preference-Applied", f"wait={waited}"))
        return build(self.app.response_class, (json.dumps(document) + "\n").encode(), 200, fields)


@contextmanager
def _as_at(request: Request, target: Target) -> Iterator[None]:
    """Let the application's functions see this method, URL and endpoint on the request.

    A loader that takes the tenant from the URL finds none at a status URL without one, and a record of no tenant.
    """
    seen: dict[str, Any] = vars(request)
    environ = request.environ
    before: dict[str, Any] = {name: seen[name] for name in (*_URL_FIELDS, *_URL_CACHES) if name in seen}
    in_environ = {name: environ.get(name, "") for name in ("PATH_INFO", "QUERY_STRING", "REQUEST_METHOD")}
    query = target.query.encode()
    for name in _URL_CACHES:
        seen.pop(name, None)
    request.url_rule, request.view_args = target.rule, dict(target.arguments)
    request.path, request.method, request.query_string = target.path, target.method, query
    environ["PATH_INFO"] = target.path.encode().decode("latin-1")
    environ["QUERY_STRING"], environ["REQUEST_METHOD"] = query.decode("latin-1"), target.method
    try:
        yield
    finally:
        for name in _URL_CACHES:
            seen.pop(name, None)
        seen.update(before)
        environ.update(in_environ)


def _loaded_names(callbacks: Callbacks, app: Flask, names: Names) -> Names:
    """Return these names as the application's own loaders find them now. Extensions name a caller at all URLs alike."""
    tenant = load_tenant(callbacks, app)
    return tenant, names[1] if callbacks.principal is None else checked(
        app.ensure_sync(callbacks.principal)(), "principal_loader"
    )


def _blueprints(endpoint: str) -> set[str]:
    """Return the names of this endpoint's blueprint and of those around it."""
    parts = endpoint.split(".")[:-1]
    return {".".join(parts[: depth + 1]) for depth in range(len(parts))}


def _have_hooks(app: Flask, blueprints: Iterable[str]) -> bool:
    """Return whether one of these blueprints has hooks before its views. Ours name no caller."""
    return any(
        getattr(hook, "__module__", None) != _OUR_HOOKS
        for name in blueprints
        for hooks in (app.before_request_funcs, app.url_value_preprocessors)
        for hook in hooks.get(name, ())
    )


def find_operation(request: Request, adapter: MapAdapter) -> Target | None:
    """Return what `method` and `path` name, by the application's URL map. None: no operation of this application.

    The path is that of the URL: it includes the mount point, and may be percent-encoded and have a query. The host is that of
    this request. A redirect, such as that to a final slash, leads where the client would have sent its key again.
    """
    methods, paths = request.args.getlist("method"), request.args.getlist("path")
    if len(methods) != 1 or len(paths) != 1:
        return None
    method, (path, _, query) = methods[0].upper(), paths[0].partition("?")
    return _find(adapter, request.root_path, method, path, query)


def _find(adapter: MapAdapter, root: str, method: str, path: str, query: str) -> Target | None:
    for _ in range(_MOST_REDIRECTS):
        path = unquote(path)
        if not path.startswith(f"{root}/"):
            # Another application serves it, and knows the key if any does.
            return None
        path = path[len(root) :]
        try:
            rule, arguments = adapter.match(path, method=method, return_rule=True)
        except RequestRedirect as redirect:
            target = urlsplit(redirect.new_url)
            if target.netloc != adapter.get_host(None):
                return None
            path = target.path
        except HTTPException:
            return None
        else:
            return Target(rule, arguments, method, path, query)
    return None


# The link of a refusal.


def register(app: Flask, url: str) -> None:
    """Register the view on the application. Raises `ConfigurationError` if another view has this path."""
    other = other_view(app, url)
    if other is not None:
        raise ConfigurationError(
            f"IDEMPOTENCY_STATUS_URL is {url!r}, and the view {other!r} has this path already. Change one of the two."
        )
    route_everywhere(app, url, ENDPOINT, key_status, methods=("GET", "DELETE"))


def other_view(app: Flask, url: str) -> str | None:
    """Return the endpoint of a view of the application for GET at this path, or None."""
    for rule in app.url_map.iter_rules():
        if rule.rule == url and rule.endpoint != ENDPOINT and "GET" in (rule.methods or {"GET"}):
            return str(rule.endpoint)
    return None


def route_everywhere(
    app: Flask, url: str, endpoint: str, view: Callable[..., Any], *, methods: Sequence[str] = ("GET",)
) -> None:
    """Register a view on every host and subdomain that the application serves. The view gets their names."""
    if app.url_map.host_matching:
        app.add_url_rule(url, endpoint, view, methods=methods, host=f"<{HOST_VARIABLE}>")
        return
    app.add_url_rule(url, endpoint, view, methods=methods)
    if app.subdomain_matching:
        app.add_url_rule(url, endpoint, view, methods=methods, subdomain=f"<{SUBDOMAIN_VARIABLE}>")


def find_status_views(app: Flask) -> dict[str, str]:
    """Return the endpoint of the first status view of each blueprint, in the order of registration. "" is no blueprint."""
    found: dict[str, str] = {}
    for endpoint, view in app.view_functions.items():
        with suppress(ValueError):  # a decorator that wraps itself
            if inspect.unwrap(view) is key_status:
                name = endpoint.rpartition(".")[0]
                found.setdefault(name if name in app.blueprints else "", endpoint)
    return found


def status_url(views: Mapping[str, str], app: Flask, callbacks: Callbacks, names: Names) -> str:
    """Return the URL at which the client of this request can ask about its key; empty if there is none.

    It leads to the status view of the request's own blueprint, of one around it, of the application, or of another one whose
    hooks differ in nothing. It names the operation and never the key. `names` are those of the claim: a view is not linked
    whose loaders would find others at its URL.
    """
    here: Request = context.get().request
    near = [views[name] for name in (*here.blueprints, "") if name in views]
    if not near:
        near = [views[name] for name in views if not _have_hooks(app, _blueprints(views[name]) ^ {*here.blueprints})]
    if not near:
        return ""
    endpoint, adapter = near[0], context.get().url_adapter
    try:
        arguments = {name for rule in app.url_map.iter_rules(endpoint) for name in rule.arguments}
        known = {**(here.view_args or {}), HOST_VARIABLE: here.host, SUBDOMAIN_VARIABLE: adapter.subdomain}
        url = url_for(
            endpoint, _method="GET", **{name: known[name] for name in arguments if known.get(name) not in (None, "")}
        )
        path = quote(here.root_path + here.path)
        asked = urlencode({"method": here.method, "path": path}, safe="/")
        url = f"{url}{'&' if '?' in url else '?'}{asked}"
        if callbacks.tenant is not None or callbacks.principal is not None:
            parts = urlsplit(url)
            view = None if parts.netloc else _find(adapter, here.root_path, "GET", parts.path, parts.query)
            if view is None:
                # On another host, another operation may have this path.
                return ""
            with _as_at(here, view):
                if _loaded_names(callbacks, app, names) != names:
                    return ""
    except Exception:  # noqa: BLE001 - a converter or a loader may raise anything, and the refusal must be sent
        return ""
    return url

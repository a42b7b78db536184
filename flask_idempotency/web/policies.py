"""The decorators @idempotent, @exempt and @claim_here, and the policy of each endpoint and method.

The decorators only leave a mark, so you can still call a view directly. `Policies` reads the marks, once for each endpoint
and method. In an application without the extension, `refuse_unguarded` closes marked views. A mark is in the function's
`__dict__`, so it survives every decorator that uses `functools.wraps`. A view never inherits the policy of another view
that it calls. If it calls a marked function that is no view, a decorator has hidden the mark, and the endpoint is closed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn, TypeVar, overload

from flask import Blueprint, Flask, current_app, has_request_context, request, request_started
from werkzeug.exceptions import HTTPException
from werkzeug.local import LocalProxy

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, VIEW_FIELDS, Override, Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings import load_override
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import DIALECT_FIELDS, PROFILES, STATUS_LISTS, policy_of, yielding
from flask_idempotency.web.problems import Problem, render
from flask_idempotency.web.request_state import current_state

MARK = "__idempotency__"
"""The attribute that holds the `Mark` of a view."""
_APPLICATION = "application"
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

ViewT = TypeVar("ViewT", bound=Callable[..., Any])
TargetT = TypeVar("TargetT")

_log = logging.getLogger("flask_idempotency")


@valueclass(frozen=True, slots=True)
class Mark:
    """The policy that decorators left on a function or class. `exempt` is None if no decorator decides it."""

    override: Override = field(default_factory=dict)
    exempt: bool | None = None
    deferred: bool = False


@valueclass(frozen=True, slots=True)
class ResolvedPolicy:
    """The policy that the guard applies to one endpoint and method.

    `deferred`: `@claim_here` makes the claim, so the hook must not. `headers` are the WSGI names that carry keys.
    `chosen` is False if it is exempt only because `IDEMPOTENCY_GUARD` is "chosen".
    """

    policy: Policy
    exempt: bool
    deferred: bool
    headers: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    """Why this policy cannot be kept. The endpoint is closed then."""
    chosen: bool = True
    observed: bool = False
    """Whether its requests are only observed, in `mode` `observe` or `warn`."""


@valueclass(frozen=True, slots=True)
class PolicySource:
    """A policy, and by the name of each value the place where it was written."""

    resolved: ResolvedPolicy
    origins: Mapping[str, str]


@valueclass(frozen=True, slots=True)
class _Layer:
    """The values that were written in one place."""

    where: str
    override: Override


@overload
def idempotent(view: ViewT, /) -> ViewT: ...


@overload
def idempotent(**policy: Any) -> Callable[[ViewT], ViewT]: ...


def idempotent(view: Any = None, /, **policy: Any) -> Any:
    """Give a view, a MethodView or one of its methods its own policy. You get the same function back.

    Use it with or without arguments; the keywords are the policy keywords. If you apply several to one function, the
    outermost wins value by value. Raises `ConfigurationError` for a wrong value, and names the view.
    """

    def guard(target: ViewT) -> ViewT:
        return annotate(target, load_override(policy, where=f"@idempotent on {_name(target)}"))

    return guard if view is None else guard(view)


def annotate(target: ViewT, values: Override) -> ViewT:
    """Add these values to the mark of a view or class, and return the view."""
    mark = _mark(target)
    return _annotate(target, replace(mark, override={**mark.override, **values}, exempt=False))


def exempt(view: ViewT) -> ViewT:
    """Do not guard a view, a MethodView or one of its methods, even if its blueprint or application has a policy.

    Use it for views that sign users in or out: a replay carries no cookie, and a token in a stored body stays readable.
    """
    return _annotate(view, replace(_mark(view), exempt=True))


def claim_here(view: ViewT) -> ViewT:
    """Claim the key when this function is called, after the decorators above it have run.

    Use it below authentication and permission checks, directly above the view (in `MethodView.decorators`, first). Each
    retry then passes those checks before it gets a stored response. Raises `ConfigurationError` if you put it on a class.
    """
    if inspect.isclass(view):
        raise ConfigurationError(
            f"@claim_here on {_name(view)}: a request does not call a class. Put it on the method, or first in `decorators`."
        )
    if inspect.iscoroutinefunction(view):

        @wraps(view)
        async def guarded_async(*args: Any, **kwargs: Any) -> Any:
            response = _claim()
            return await view(*args, **kwargs) if response is None else response

        guarded: Any = guarded_async
    else:

        @wraps(view)
        def guarded_sync(*args: Any, **kwargs: Any) -> Any:
            response = _claim()
            return view(*args, **kwargs) if response is None else response

        guarded = guarded_sync
    annotated: ViewT = _annotate(guarded, replace(_mark(view), deferred=True))
    return annotated


def _claim() -> Any:
    """Claim the key of this request. Return None if the view may run, else the response to send."""
    state = current_state()
    if state is None and has_request_context() and (rule := request.url_rule) is not None:
        # Flask-RESTX applies `method_decorators` while it serves a request, so `Policies` could not see this decorator.
        extension = current_app.extensions.get("idempotency")
        if extension is not None and extension.policies is not None and extension.settings.enabled:
            resolved = extension.policies.resolve(rule.endpoint, request.method)
            if not resolved.chosen:
                remedy = (
                    '@claim_here was called, and IDEMPOTENCY_GUARD is "chosen" and does not guard this endpoint: the decorator '
                    "was applied while the request was served. Put @idempotent on the method too, or configure the blueprint."
                )
                _refuse(current_app, rule.endpoint, remedy, resolved.policy)
    response = None if state is None else state.from_view(state)
    if response is None or current_app.config["TRAP_HTTP_EXCEPTIONS"]:
        return response
    # Decorators above may convert what a view returns; an exception without a code passes them and all error handlers.
    raise HTTPException(response=response)


def _refuse(app: Flask, endpoint: str, remedy: str, policy: Policy) -> NoReturn:
    """Raise an exception without a code: Flask sends its response, and no error handler of the application replaces it."""
    _log.error("%s does not run: %s", endpoint, remedy)
    raise HTTPException(
        response=render(
            Problem("misconfigured", remedy),
            profile=PROFILES[policy.profile],
            docs_url=DOCS_URL,
            response_class=app.response_class,
        )
    )


class Policies:
    """The policies of one application, merged in this order: app, blueprint, nested blueprint, class, view, method."""

    def __init__(
        self,
        app: Flask,
        *,
        base: Override,
        overrides: Mapping[Blueprint, Override],
        joint: bool = False,
        journals: bool = True,
        observations: bool = True,
        origins: Mapping[str, str] | None = None,
        chosen_only: bool = False,
    ) -> None:
        """Take what the application wrote for all endpoints (`base`) and where (`origins`).

        `joint`: the store can commit records and the application's rows together. `journals`: it remembers steps.
        `observations`: it remembers the keys of observed requests. `chosen_only`: guard only endpoints that are annotated
        or configured.
        """
        self._app = app
        self._joint = joint
        self._journals = journals
        self._observations = observations
        self._base = base
        self._overrides = overrides
        self._origins = origins or {}
        self._chosen_only = chosen_only
        self.resolved: dict[tuple[str, str], ResolvedPolicy] = {}
        """What `resolve` has found so far. The hook of each request looks here first."""
        self._form_fields: tuple[int, Mapping[str, str]] | None = None
        self.in_use = False
        """Set when the first request arrives. From then on the policies do not change."""

    def resolve(self, endpoint: str, method: str) -> ResolvedPolicy:
        """Return the policy of this endpoint and method. It does not change during the life of the application."""
        resolved = self.resolved.get((endpoint, method))
        if resolved is None:
            resolved = self.resolved[endpoint, method] = self._resolve(endpoint, method)
        return resolved

    def look(self, endpoint: str, method: str) -> ResolvedPolicy:
        """Return the policy as it stands now, and fix nothing: the application may still configure it."""
        return self.resolved.get((endpoint, method)) or self._resolve(endpoint, method)

    def explain(self, endpoint: str, method: str) -> PolicySource:
        """Return the policy, and the place where each value was written."""
        layers = list(self._layers(endpoint, method))
        written = {name: layer.where for layer in layers for name in layer.override}
        values = {name: value for layer in layers for name, value in layer.override.items()}
        written |= {name: self._origins.get(name, "") for name in written if written[name] == _APPLICATION}
        origins = dict.fromkeys(sorted(POLICY_FIELDS | VIEW_FIELDS), "default")
        if "profile" in written:
            brought = f"profile {values['profile']}, of {written['profile']}"
            origins |= dict.fromkeys(DIALECT_FIELDS, brought)
            if less := yielding(values):
                # A profile gives up the statuses that the application decides in another way.
                origins |= dict.fromkeys(STATUS_LISTS, f"{brought}, less what {' and '.join(less)} decides")
        resolved = self.look(endpoint, method)
        if resolved.policy.lease < policy_of({"profile": resolved.policy.profile}).lease:
            origins["lease"] += ", shortened to max_runtime"
        return PolicySource(resolved, origins | written)

    def serves(self, blueprint: Blueprint) -> bool:
        """Return whether requests may have got the policy of this blueprint's views already."""
        return self.in_use and any(each is blueprint for each in self._app.blueprints.values())

    def pairs(self) -> list[tuple[str, str]]:
        """Return every endpoint with every method that it is routed for."""
        rules = self._app.url_map.iter_rules()
        return sorted({(rule.endpoint, method) for rule in rules for method in rule.methods or ()})

    def form_fields(self) -> Mapping[str, str]:
        """Return by endpoint the form field that carries the key of a POST. Browsers send forms with no other unsafe method."""
        rules = len(self._app.view_functions)
        if self._form_fields is None or self._form_fields[0] != rules:
            posted = {endpoint: self.resolve(endpoint, "POST") for endpoint, method in self.pairs() if method == "POST"}
            fields = {endpoint: each.policy.form_field for endpoint, each in posted.items() if not each.exempt}
            self._form_fields = rules, {endpoint: name for endpoint, name in fields.items() if name is not None}
        return self._form_fields[1]

    def faults(self) -> list[str]:
        """Return one sentence for each fault, with the endpoints that have it.

        It resolves each endpoint again and caches nothing: the application may configure more until the first request.
        """
        faults: dict[str, list[str]] = {}
        for endpoint, method in self.pairs():
            for fault in self._resolve(endpoint, method).faults:
                faults.setdefault(fault, []).append(f"{method} {endpoint}")
        return [f"{', '.join(where)}: {fault}" for fault, where in faults.items()]

    def _resolve(self, endpoint: str, method: str) -> ResolvedPolicy:
        marks = [_mark(target) for target in _marked(self._app, endpoint, method)]
        policy = policy_of(*(layer.override for layer in self._layers(endpoint, method)))
        decided = [mark.exempt for mark in marks if mark.exempt is not None]
        deferred = any(mark.deferred for mark in marks)
        unsafe = method in policy.methods
        chosen = not self._chosen_only or bool(decided) or deferred or any(self._of_blueprints(endpoint))
        # If the hook claims, a hidden `@claim_here` loses no protection. It warns when it is called.
        lost = _hidden(self._app, endpoint, method) if unsafe else []
        hidden = [_hides(each) for each in lost if self._chosen_only or _mark(each).exempt is not None]
        exempt = not unsafe or not (chosen or hidden) or (decided[-1] if decided else False)
        return ResolvedPolicy(
            policy=policy,
            exempt=exempt,
            deferred=deferred,
            chosen=chosen or not unsafe,
            headers=tuple("HTTP_" + name.upper().replace("-", "_") for name in policy.header),
            faults=() if exempt else (*hidden, *self._contradictions(policy)),
            observed=not exempt and policy.mode != "enforce",
        )

    def _contradictions(self, policy: Policy) -> list[str]:
        return policy.faults(joint=self._joint, journals=self._journals, observations=self._observations)

    def _layers(self, endpoint: str, method: str) -> Iterator[_Layer]:
        """Yield the layers of this policy, outermost first."""
        yield _Layer(_APPLICATION, self._base)
        yield from self._of_blueprints(endpoint)
        view_class = getattr(self._app.view_functions.get(endpoint), "view_class", None)
        for target in _marked(self._app, endpoint, method):
            # `MethodView.as_view` makes a function that only `decorators` can mark.
            made = view_class is not None and getattr(target, "view_class", None) is view_class
            name = f"the decorators of {_name(view_class)}" if made else _name(target)
            override = _mark(target).override
            yield _Layer(f"{'@webhook' if 'principal' in override else '@idempotent'} on {name}", override)

    def _of_blueprints(self, endpoint: str) -> Iterator[_Layer]:
        """Yield the blueprints' layers, outermost first. Find them by object: a blueprint may have several names."""
        path = endpoint.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            blueprint: Any = self._app.blueprints.get(".".join(path[:depth]))
            if blueprint in self._overrides:
                yield _Layer(f"configure({blueprint.name!r})", self._overrides[blueprint])


def refuse_unguarded(app: Flask, **_: Any) -> None:
    """Refuse to run an annotated view in an application without the extension, which would ignore keys.

    This receives `request_started`, which Flask sends before it calls any hook or view. So you can still call a view as a
    function.
    """
    # Every request of every application in this process runs this line.
    if "idempotency" in app.extensions:
        return
    rule = request.url_rule
    if rule is None or app.config.get("IDEMPOTENCY_ENABLED") is False:
        return
    marks = [_mark(target) for target in _marked(app, rule.endpoint, request.method)]
    decided = [mark.exempt for mark in marks if mark.exempt is not None]
    # An endpoint may have a dot in its name and no blueprint.
    blueprints = [app.blueprints[name] for name in request.blueprints if name in app.blueprints]
    configured = [blueprint for blueprint in blueprints if MARK in vars(blueprint)]
    if not decided and request.method not in SAFE:
        lost = [_mark(each) for each in _hidden(app, rule.endpoint, request.method)]
        marks += [mark for mark in lost if not mark.exempt]
        decided = [mark.exempt for mark in marks if mark.exempt is not None]
    if decided[-1] if decided else not (configured or any(mark.deferred for mark in marks)):
        return
    policy = policy_of(*(_mark(each).override for each in reversed(configured)), *(mark.override for mark in marks))
    if request.method not in policy.methods:
        return
    annotated = any(mark != Mark() for mark in marks)
    who = "@idempotent or @claim_here is on its view" if annotated else "idempotency.configure(…) names its blueprint"
    remedy = (
        f"{who}, and this application has no Idempotency extension, so a retry would run again. Call "
        "Idempotency(app), or idempotency.init_app(app). IDEMPOTENCY_ENABLED=False runs it without protection."
    )
    _refuse(app, rule.endpoint, remedy, policy)


def _marked(app: Flask, endpoint: str, method: str) -> Iterator[Any]:
    """Yield the objects that decorators may have marked, outermost first."""
    view: Any = app.view_functions.get(endpoint)
    view_class = getattr(view, "view_class", None)
    parents = reversed(view_class.__mro__) if inspect.isclass(view_class) else ()
    yield from (*parents, view, *_called(view, [method])[1:])


def _hidden(app: Flask, endpoint: str, method: str) -> list[Any]:
    """Return annotated functions that this endpoint's view calls, and whose marks no view shows.

    A decorator between the route and the mark lacks `functools.wraps`. A function that is a view itself is not hidden: another
    view may call it.
    """
    view = app.view_functions.get(endpoint)
    entered = _called(view, [method])
    seen = [*entered]
    for target in seen:
        seen += [held for held in _held(target) if not any(held is each for each in seen)]
    marked = [each for each in seen[len(entered) :] if isinstance(inspect.getattr_static(each, MARK, None), Mark)]
    # The view's own marks first: they are nearly always all, and a large application has many views.
    for views in ([view], app.view_functions.values()):
        if marked:
            shown = [each for view in views for root in _called(view) for each in _shown_by(root)]
            marked = [each for each in marked if not any(each is other for other in shown)]
    return marked


def _called(view: Any, methods: Iterable[str] | None = None) -> list[Any]:
    """Return the view, and the functions of its class that it calls for these methods. None: for all methods."""
    view_class = getattr(view, "view_class", None)
    if not inspect.isclass(view_class):
        return [view]
    names = (getattr(view_class, "methods", None) or ()) if methods is None else methods
    functions = [getattr(view_class, name, None) for name in ("dispatch_request", *map(str.lower, names))]
    return [view, *(each for each in functions if each is not None)]


def _held(target: Any) -> list[Any]:
    """Return the functions that this function, partial or decorator object holds, and may call.

    It reads closures and attributes, and runs no code of the objects: a closure may hold a proxy without a context.
    """
    held: list[Any] = [target.func] if issubclass(type(target), partial) else []
    if type(target) is FunctionType:
        for cell in target.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                held.append(cell.cell_contents)
    with suppress(AttributeError):  # it has slots
        held += object.__getattribute__(target, "__dict__").values()
    return [
        each for each in held if type(each) is FunctionType or issubclass(type(each), partial) or _is_decorator(each)
    ]


def _is_decorator(held: Any) -> bool:
    """Return whether this is an object that replaces a function, and no application or proxy."""
    return callable(held) and not issubclass(type(held), type | Flask | LocalProxy)


def _shown_by(view: Any) -> Iterator[Any]:
    """Yield the view and the functions that it wraps, as long as the view has their marks."""
    outer, target = _mark(view), view
    while target is not None:
        mark = _mark(target)
        if not mark.override.keys() <= outer.override.keys() or mark.exempt not in (None, outer.exempt):
            return
        if mark.deferred and not outer.deferred:
            return
        yield target
        target = getattr(target, "__wrapped__", None)


def _hides(target: Any) -> str:
    return (
        f"a decorator hides that {_name(target)} is annotated, so its policy would be ignored. Use functools.wraps in that "
        "decorator, or put @idempotent or @exempt above it, next to the route."
    )


def _mark(target: Any) -> Mark:
    """Return this object's own mark. `_marked` visits the classes that a class inherits from."""
    mark: Mark | None = vars(target).get(MARK) if inspect.isclass(target) else getattr(target, MARK, None)
    return mark or Mark()


def mark_configured(blueprint: Blueprint, override: Override) -> None:
    """Mark the blueprint, so that `refuse_unguarded` closes its views in an application without the extension."""
    _annotate(blueprint, Mark(override=override))


def _annotate(target: TargetT, mark: Mark) -> TargetT:
    if _mark(target).exempt is not None and mark.exempt is not _mark(target).exempt:
        raise ConfigurationError(f"{_name(target)} is both @idempotent and @exempt. Remove one of the two.")
    setattr(target, MARK, mark)
    # We do not know yet which application will serve it. A second connection changes nothing.
    request_started.connect(refuse_unguarded)
    return target


def _name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else repr(target)

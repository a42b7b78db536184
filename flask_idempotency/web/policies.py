"""@idempotent, @exempt and @claim_here, and which policy applies to which endpoint.

The decorators only annotate: views stay what they were and can be called directly. `Policies` reads the annotations, once
per endpoint and method. In an application without the extension nothing reads them, so `refuse_unguarded` closes the view.
The mark travels in the function's `__dict__`, so it survives every decorator that uses `functools.wraps`. A view never
inherits a policy from a function that it refers to. But if that function is no view, a decorator has hidden its mark.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn, TypeVar, overload

from flask import Blueprint, Flask, current_app, has_request_context, request, request_started
from werkzeug.exceptions import HTTPException
from werkzeug.local import LocalProxy

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, Override, Policy
from flask_idempotency.settings import load_override
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import DIALECT_FIELDS, PROFILES, STATUS_LISTS, policy_of, yielding
from flask_idempotency.web.problems import Problem, render
from flask_idempotency.web.request_state import current_state

_MARK = "__idempotency__"
_APPLICATION = "application"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

ViewT = TypeVar("ViewT", bound=Callable[..., Any])

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class Mark:
    """What the decorators left on a function or class. `exempt` is None where none of them said anything of it."""

    override: Override = field(default_factory=dict)
    exempt: bool | None = None
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """What the guard goes by for one endpoint and method.

    `deferred`: `@claim_here` will ask for the claim, so the hook must not. `headers` are the WSGI names that carry keys.
    `chosen` is False if it is exempt only because `IDEMPOTENCY_GUARD` is "chosen".
    """

    policy: Policy
    exempt: bool
    deferred: bool
    headers: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    """Why this policy cannot hold. Then nothing runs here: see `Hooks.head`."""
    chosen: bool = True


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Why an endpoint and method have the policy that they have: by the name of each value, where it was written."""

    resolved: ResolvedPolicy
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What was said in one place."""

    where: str
    override: Override


@overload
def idempotent(view: ViewT, /) -> ViewT: ...


@overload
def idempotent(**policy: Any) -> Callable[[ViewT], ViewT]: ...


def idempotent(view: Any = None, /, **policy: Any) -> Any:
    """Give a view, a MethodView or one of its methods a policy of its own. The function itself is returned unchanged.

    Values are checked here and now: a `ConfigurationError` names the view. Where several apply to one function, the
    outermost wins value by value.
    """

    def annotate(target: ViewT) -> ViewT:
        values = load_override(policy, where=f"@idempotent on {_name(target)}")
        mark = _mark(target)
        return _annotated(target, replace(mark, override={**mark.override, **values}, exempt=_one(target, mark, False)))

    return annotate if view is None else annotate(view)


def exempt(view: ViewT) -> ViewT:
    """Leave a view, a MethodView or one of its methods alone, whatever its blueprint and application say.

    Use it for views that sign users in or out: a replay carries no cookie, and a token in a stored body stays readable.
    """
    mark = _mark(view)
    return _annotated(view, replace(mark, exempt=_one(view, mark, True)))


def claim_here(view: ViewT) -> ViewT:
    """Claim the key when this function is entered, and not before the decorators above it have run.

    For authentication and permission checks in view decorators: put it below them, directly above the view (in
    `MethodView.decorators`, first). Each retry then passes those checks before it is given a stored answer.
    """
    if inspect.isclass(view):
        raise ConfigurationError(
            f"@claim_here on {_name(view)}: a class is not entered. Put it on the method, or first in `decorators`."
        )
    if inspect.iscoroutinefunction(view):

        @wraps(view)
        async def guarded_async(*args: Any, **kwargs: Any) -> Any:
            answer = _enter()
            return await view(*args, **kwargs) if answer is None else answer

        guarded: Any = guarded_async
    else:

        @wraps(view)
        def guarded_sync(*args: Any, **kwargs: Any) -> Any:
            answer = _enter()
            return view(*args, **kwargs) if answer is None else answer

        guarded = guarded_sync
    annotated: ViewT = _annotated(guarded, replace(_mark(view), deferred=True))
    return annotated


def _enter() -> Any:
    """Ask for the claim. Returns None when the view is to run."""
    state = current_state()
    if state is None and has_request_context() and request.url_rule is not None:
        _refuse_unchosen(request.url_rule.endpoint)
    answer = None if state is None else state.from_view(state)
    if answer is None or current_app.config["TRAP_HTTP_EXCEPTIONS"]:
        return answer
    # Decorators above may convert what a view returns; an exception without a code passes them and all error handlers.
    raise HTTPException(response=answer)


def _refuse_unchosen(endpoint: str) -> None:
    """Refuse to run where nothing is guarded: `@claim_here` was put on a function while the request was served, so nobody
    could see it. Flask-RESTX applies `method_decorators` then."""
    state = current_app.extensions.get("idempotency")
    if state is None or state.policies is None or not state.settings.enabled:
        return
    resolved = state.policies.resolve(endpoint, request.method)
    if not resolved.chosen:
        remedy = (
            '@claim_here was entered, and IDEMPOTENCY_GUARD is "chosen" and does not guard this endpoint: the decorator was '
            "applied while the request was served. Put @idempotent on the method too, or configure the blueprint."
        )
        _refuse(current_app, endpoint, remedy, resolved.policy)


def _refuse(app: Flask, endpoint: str, remedy: str, policy: Policy) -> NoReturn:
    """Raises an exception without a code: Flask answers with its response, and no error handler of the application turns that
    into something else."""
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
    """Which policy applies where, in one application: app → blueprint → nested blueprint → class → view → method."""

    def __init__(
        self,
        app: Flask,
        *,
        base: Override,
        overrides: Mapping[Blueprint, Override],
        joint: bool = False,
        origins: Mapping[str, str] | None = None,
        chosen_only: bool = False,
    ) -> None:
        """`base`: what the application wrote for all its endpoints, and `origins` where. `joint`: whether records and the
        application's rows can be committed together. `chosen_only`: guard nothing that is not annotated or configured."""
        self._app = app
        self._joint = joint
        self._base = base
        self._overrides = overrides
        self._origins = origins or {}
        self._chosen_only = chosen_only
        self._resolved: dict[tuple[str, str], ResolvedPolicy] = {}
        self._form_fields: tuple[int, Mapping[str, str]] | None = None

    def resolve(self, endpoint: str, method: str) -> ResolvedPolicy:
        """The same object for the same endpoint and method, as long as the application lives."""
        resolved = self._resolved.get((endpoint, method))
        if resolved is None:
            resolved = self._resolved[endpoint, method] = self._resolve(endpoint, method)
        return resolved

    def explain(self, endpoint: str, method: str) -> PolicySource:
        """What `resolve` says, and where each value comes from."""
        layers = list(self._layers(endpoint, method))
        written = {name: layer.where for layer in layers for name in layer.override}
        values = {name: value for layer in layers for name, value in layer.override.items()}
        written |= {name: self._origins.get(name, "") for name in written if written[name] == _APPLICATION}
        origins = dict.fromkeys(sorted(POLICY_FIELDS), "default")
        if "profile" in written:
            brought = f"profile {values['profile']}, of {written['profile']}"
            origins |= dict.fromkeys(DIALECT_FIELDS, brought)
            if less := yielding(values):
                # What the application has settled in other words is taken out of the profile's statuses.
                origins |= dict.fromkeys(STATUS_LISTS, f"{brought}, less what {' and '.join(less)} settles")
        resolved = self.resolve(endpoint, method)
        if resolved.policy.lease < policy_of({"profile": resolved.policy.profile}).lease:
            origins["lease"] += ", shortened to max_runtime"
        return PolicySource(resolved, origins | written)

    def pairs(self) -> list[tuple[str, str]]:
        """Every endpoint of the application with every method that it is routed for."""
        rules = self._app.url_map.iter_rules()
        return sorted({(rule.endpoint, method) for rule in rules for method in rule.methods or ()})

    def form_fields(self) -> Mapping[str, str]:
        """By endpoint, the form field that its policy reads the key of a POST from. Other methods send no forms."""
        rules = len(self._app.view_functions)
        if self._form_fields is None or self._form_fields[0] != rules:
            posted = {endpoint: self.resolve(endpoint, "POST") for endpoint, method in self.pairs() if method == "POST"}
            fields = {endpoint: each.policy.form_field for endpoint, each in posted.items() if not each.exempt}
            self._form_fields = rules, {endpoint: name for endpoint, name in fields.items() if name is not None}
        return self._form_fields[1]

    def faults(self) -> list[str]:
        """One sentence for each combination, on any endpoint, that could not keep its promise, with those that have it.

        Resolves each endpoint afresh and remembers nothing: more may be configured until the first request.
        """
        faults: dict[str, list[str]] = {}
        for endpoint, method in self.pairs():
            for fault in self._resolve(endpoint, method).faults:
                faults.setdefault(fault, []).append(f"{method} {endpoint}")
        return [f"{', '.join(where)}: {fault}" for fault, where in faults.items()]

    def _resolve(self, endpoint: str, method: str) -> ResolvedPolicy:
        marks = [_mark(target) for target in _marked(self._app, endpoint, method)]
        policy = policy_of(*(layer.override for layer in self._layers(endpoint, method)))
        said = [mark.exempt for mark in marks if mark.exempt is not None]
        deferred = any(mark.deferred for mark in marks)
        unsafe = method in policy.methods
        chosen = not self._chosen_only or bool(said) or deferred or any(self._of_blueprints(endpoint))
        # `@claim_here` alone takes nothing away where the hook claims before it: it warns when it is entered.
        lost = _hidden(self._app, endpoint, method) if unsafe else []
        hidden = [_hides(each) for each in lost if self._chosen_only or _mark(each).exempt is not None]
        exempt = not unsafe or not (chosen or hidden) or (said[-1] if said else False)
        return ResolvedPolicy(
            policy=policy,
            exempt=exempt,
            deferred=deferred,
            chosen=chosen or not unsafe,
            headers=tuple("HTTP_" + name.upper().replace("-", "_") for name in policy.header),
            faults=() if exempt else (*hidden, *policy.faults(joint=self._joint)),
        )

    def _layers(self, endpoint: str, method: str) -> Iterator[_Layer]:
        """Outermost first."""
        yield _Layer(_APPLICATION, self._base)
        yield from self._of_blueprints(endpoint)
        view_class = getattr(self._app.view_functions.get(endpoint), "view_class", None)
        for target in _marked(self._app, endpoint, method):
            # The function that a MethodView makes of itself has no name of its own; it is what `decorators` decorate.
            made = view_class is not None and getattr(target, "view_class", None) is view_class
            name = f"the decorators of {_name(view_class)}" if made else _name(target)
            yield _Layer(f"@idempotent on {name}", _mark(target).override)

    def _of_blueprints(self, endpoint: str) -> Iterator[_Layer]:
        """Outer to inner. Looked up by object: one blueprint may be registered under several names."""
        path = endpoint.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            blueprint: Any = self._app.blueprints.get(".".join(path[:depth]))
            if blueprint in self._overrides:
                yield _Layer(f"configure({blueprint.name!r})", self._overrides[blueprint])


def refuse_unguarded(app: Flask, **_: Any) -> None:
    """Refuse to run an annotated view in an application without the extension: nothing there would look at a key.

    A receiver of `request_started`, which Flask sends before it calls any hook or view. So a view that is called as a
    function never gets here.
    """
    # Every request of every application in this process pays for this line.
    if "idempotency" in app.extensions:
        return
    rule = request.url_rule
    if rule is None or app.config.get("IDEMPOTENCY_ENABLED") is False:
        return
    marks = [_mark(target) for target in _marked(app, rule.endpoint, request.method)]
    said = [mark.exempt for mark in marks if mark.exempt is not None]
    # An endpoint may have a dot in its name and no blueprint.
    blueprints = [app.blueprints[name] for name in request.blueprints if name in app.blueprints]
    configured = [blueprint for blueprint in blueprints if _MARK in vars(blueprint)]
    if not said and request.method not in _SAFE:
        lost = [_mark(each) for each in _hidden(app, rule.endpoint, request.method)]
        marks += [mark for mark in lost if not mark.exempt]
        said = [mark.exempt for mark in marks if mark.exempt is not None]
    if said[-1] if said else not (configured or any(mark.deferred for mark in marks)):
        return
    policy = policy_of(*(_mark(each).override for each in reversed(configured)), *(mark.override for mark in marks))
    if request.method not in policy.methods:
        return
    annotated = any(mark != Mark() for mark in marks)
    who = "@idempotent or @claim_here is on its view" if annotated else "idempotency.configure(…) names its blueprint"
    remedy = (
        f"{who}, and this application has no Idempotency extension: nothing would keep a retry from running again. Call "
        "Idempotency(app), or idempotency.init_app(app). IDEMPOTENCY_ENABLED=False runs it without protection."
    )
    _refuse(app, rule.endpoint, remedy, policy)


def _marked(app: Flask, endpoint: str, method: str) -> Iterator[Any]:
    """What decorators may have left a mark on, outermost first."""
    view: Any = app.view_functions.get(endpoint)
    view_class = getattr(view, "view_class", None)
    parents = reversed(view_class.__mro__) if inspect.isclass(view_class) else ()
    yield from (*parents, view, *_entered(view, [method])[1:])


def _hidden(app: Flask, endpoint: str, method: str) -> list[Any]:
    """Find annotated functions that this endpoint's view calls, and whose marks no view shows.

    A decorator between the route and the mark lacks `functools.wraps`. A function that is a view itself is not hidden: another
    view may call it.
    """
    view = app.view_functions.get(endpoint)
    entered = _entered(view, [method])
    seen = [*entered]
    for target in seen:
        seen += [held for held in _held(target) if not any(held is each for each in seen)]
    marked = [each for each in seen[len(entered) :] if isinstance(inspect.getattr_static(each, _MARK, None), Mark)]
    # The view's own marks first: they are nearly always all, and a large application has many views.
    for views in ([view], app.view_functions.values()):
        if marked:
            shown = [each for view in views for root in _entered(view) for each in _shown_by(root)]
            marked = [each for each in marked if not any(each is other for other in shown)]
    return marked


def _entered(view: Any, methods: Iterable[str] | None = None) -> list[Any]:
    """The view, and the functions of its class that it calls for these methods. None: for all that it has."""
    view_class = getattr(view, "view_class", None)
    if not inspect.isclass(view_class):
        return [view]
    names = (getattr(view_class, "methods", None) or ()) if methods is None else methods
    functions = [getattr(view_class, name, None) for name in ("dispatch_request", *map(str.lower, names))]
    return [view, *(each for each in functions if each is not None)]


def _held(target: Any) -> list[Any]:
    """The functions that this function, partial or decorator object holds, and may call.

    Looks at what is stored, and runs no code of the objects: a closure may hold a proxy that has nothing to stand for yet.
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
    """Whether this is an object that stands in for a function, and no application or proxy."""
    return callable(held) and not issubclass(type(held), type | Flask | LocalProxy)


def _shown_by(view: Any) -> Iterator[Any]:
    """The view and the functions that it wraps, as long as the view has their marks."""
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
    """This object's own mark. A class that inherits one is asked after the classes it inherits from."""
    mark: Mark | None = vars(target).get(_MARK) if inspect.isclass(target) else getattr(target, _MARK, None)
    return mark or Mark()


def mark_configured(blueprint: Blueprint, override: Override) -> None:
    """Note on the blueprint itself that its views count on a guard: see `refuse_unguarded`."""
    _leave(blueprint, Mark(override=override))


def _annotated(target: ViewT, mark: Mark) -> ViewT:
    _leave(target, mark)
    return target


def _leave(target: Any, mark: Mark) -> None:
    setattr(target, _MARK, mark)
    # For every application: which one will serve it is not known yet. Connecting it once more changes nothing.
    request_started.connect(refuse_unguarded)


def _one(target: Any, mark: Mark, exempt: bool) -> bool:
    if mark.exempt is (not exempt):
        raise ConfigurationError(f"{_name(target)} is both @idempotent and @exempt. Remove one of the two.")
    return exempt


def _name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}" if hasattr(target, "__qualname__") else repr(target)

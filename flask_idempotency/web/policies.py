"""The decorators @idempotent, @exempt and @claim_here, and the policy of each endpoint and method.

The decorators only leave a mark, so you can still call a view directly. `Policies` reads the marks, once for each endpoint
and method. In an application without the extension, `refuse_unguarded` closes marked views. A mark is in the function's
`__dict__`, so it survives every decorator that uses `functools.wraps`. A view never inherits the policy of another view
that it calls. If it calls a marked function that is no view, a decorator has hidden the mark, and the endpoint is closed.
`web.unreached` finds what no endpoint leads to.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial, partialmethod, wraps
from types import FunctionType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar, overload
from weakref import WeakValueDictionary

from flask import Blueprint, Flask, current_app, has_request_context, request, request_started
from werkzeug.exceptions import HTTPException
from werkzeug.local import LocalProxy

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import POLICY_FIELDS, VIEW_FIELDS, Override, Policy
from flask_idempotency.engine.registrations import Kept
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings import load_override
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import DIALECT_FIELDS, PROFILES, STATUS_LISTS, policy_of, yielding
from flask_idempotency.web.problems import Problem, render
from flask_idempotency.web.request_state import context, current_state

if TYPE_CHECKING:
    from flask_idempotency.settings import Settings
    from flask_idempotency.web.callbacks import Callbacks

MARK = "__idempotency__"
"""The attribute that holds the `Mark` of a view."""
_APPLICATION = "application"
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

_ENTERED: Final = frozenset(
    {"get", "post", "head", "options", "delete", "put", "trace", "patch", "dispatch_request", "__call__"}
)
"""The methods of a class that a request calls."""

annotated_here: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Every object in use that a decorator of ours marked, by its id: it may have no hash."""
served_here: WeakValueDictionary[int, Flask] = WeakValueDictionary()
"""Every application in use that has the extension, by its id."""

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


_Layer: TypeAlias = tuple[str, Override]
"""A place, and the values that were written there."""


@overload
def idempotent(view: ViewT, /) -> ViewT: ...


@overload
def idempotent(**policy: Any) -> Callable[[ViewT], ViewT]: ...


def idempotent(view: Any = None, /, **policy: Any) -> Any:
    """Give a view, a MethodView or one of its methods its own policy. You get the same function back.

    Use it with or without arguments; the keywords are the policy keywords. If you apply several to one function, the
    outermost wins value by value. Raises `ConfigurationError` for a wrong value, and for what cannot carry an annotation,
    such as a `staticmethod`: put it below that.
    """

    def guard(target: ViewT) -> ViewT:
        return annotate(target, load_override(policy, where=f"@idempotent on {name_of(target)}"))

    return guard if view is None else guard(view)


def annotate(target: ViewT, values: Override) -> ViewT:
    """Add these values to the mark of a view or class, and return the view."""
    _check_carrier(target)
    mark = _mark(target)
    annotated = _annotate(target, replace(mark, override={**mark.override, **values}, exempt=False))
    extension = current_app.extensions.get("idempotency") if has_request_context() else None
    if extension is not None and extension.policies is not None and extension.policies.in_use:
        # Close the endpoints that lead to it from now on: a view may have imported it, and runs it without its policy.
        extension.policies.forget()
        _log.warning(
            "%s was annotated while a request was served, which runs without its policy. Import its module before the first "
            "request, or annotate the function that the route gets.",
            name_of(target),
        )
    return annotated


def exempt(view: ViewT) -> ViewT:
    """Do not guard a view, a MethodView or one of its methods, even if its blueprint or application has a policy.

    Use it for views that sign users in or out: a replay carries no cookie, and a token in a stored body stays readable.
    """
    _check_carrier(view)
    return _annotate(view, replace(_mark(view), exempt=True))


def claim_here(view: ViewT) -> ViewT:
    """Claim the key when this function is called, after the decorators above it have run.

    Use it below authentication and permission checks, directly above the view (in `MethodView.decorators`, first). Each
    retry then passes those checks before it gets a stored response. Raises `ConfigurationError` if you put it on a class.
    """
    if inspect.isclass(view):
        raise ConfigurationError(
            f"@claim_here on {name_of(view)}: a request does not call a class. Put it on the method, or first in `decorators`."
        )
    # Flask-RESTful and -RESTX apply `method_decorators` to a bound method, and call what they get.
    if not isinstance(view, MethodType):
        _check_carrier(view)
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
    response = None if state is None else context.get().app.extensions["idempotency"].hooks.from_view(state)
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


@dataclass(eq=False, repr=False)
class Policies:
    """The policies of one application, merged in this order: app, blueprint, nested blueprint, class, view, method."""

    app: Flask
    _: KW_ONLY
    base: Override
    """What the application wrote for all endpoints."""
    overrides: Mapping[Blueprint, Override]
    offered: Mapping[str, bool] = field(default_factory=lambda: {"joint": False})
    """What the store offers, as `Policy.faults` takes it."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where the application wrote each value of `base`."""
    chosen_only: bool = False
    """Guard only endpoints that are annotated or configured."""
    kept: Kept = field(default_factory=Kept)
    """The policies of blueprints that hold for this application instead of `overrides`."""

    def __post_init__(self) -> None:
        self.resolved: dict[tuple[str, str], ResolvedPolicy] = {}
        """What `resolve` has found so far. The hook of each request looks here first."""
        self._form_fields: tuple[int, Mapping[str, str]] | None = None
        self.finishing: tuple[Callbacks, Settings] | None = None
        """What policies with `finish="janitor"` are checked with. None: the application is not set up yet."""
        self.in_use: bool = False
        """Set when the first request arrives. From then on the policies do not change."""
        served_here[id(self.app)] = self.app

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
        written = {name: where for where, override in layers for name in override}
        values = {name: value for _, override in layers for name, value in override.items()}
        written |= {name: self.origins.get(name, "") for name in written if written[name] == _APPLICATION}
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
        if resolved.policy.finish == "janitor" and values.get("max_request_body") is None:
            origins["max_request_body"] = "finish, which keeps the body"
            written.pop("max_request_body", None)
        return PolicySource(resolved, origins | written)

    def forget(self) -> None:
        """Resolve each policy again, because a view was annotated while a request was served."""
        self.resolved.clear()
        self._form_fields = None

    def fix(self) -> None:
        """Keep what is configured now: the first request arrives, and a factory may configure its next application."""
        kept: Mapping[Any, Override] = self.kept.values
        self.overrides = {**self.overrides, **kept}
        self.in_use = True

    def serves(self, blueprint: Blueprint) -> bool:
        """Return whether requests may have got the policy of this blueprint's views already."""
        return self.in_use and any(each is blueprint for each in self.app.blueprints.values())

    def pairs(self) -> list[tuple[str, str]]:
        """Return every endpoint with every method that it is routed for."""
        rules = self.app.url_map.iter_rules()
        return sorted({(rule.endpoint, method) for rule in rules for method in rule.methods or ()})

    def form_fields(self) -> Mapping[str, str]:
        """Return by endpoint the form field that carries the key of a POST. Browsers send forms with no other unsafe method."""
        rules = len(self.app.view_functions)
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
        marks = [_mark(target) for target in _marked(self.app, endpoint, method)]
        policy = policy_of(*(override for _, override in self._layers(endpoint, method)))
        decided = [mark.exempt for mark in marks if mark.exempt is not None]
        deferred = any(mark.deferred for mark in marks)
        unsafe = method in policy.methods
        chosen = not self.chosen_only or bool(decided) or deferred or any(self._of_blueprints(endpoint))
        # If the hook claims, a hidden `@claim_here` loses no protection. It warns when it is called.
        lost = _hidden(self.app, endpoint, method) if unsafe else []
        hidden = [
            f"a decorator hides that {name_of(each)} is annotated, so its policy would be ignored. Use functools.wraps in that "
            "decorator, or put @idempotent or @exempt above it, next to the route. Of a helper that the view calls, remove it."
            for each in lost
            if self.chosen_only or _mark(each).exempt is not None
        ]
        if unsafe and not decided and not deferred:
            view = self.app.view_functions.get(endpoint)
            hidden += [
                f"{name_of(each)} is annotated, and the method that replaces it in {name_of(class_of(view))} is not, so its "
                "policy would be ignored. Put @idempotent or @exempt on that method, or on its class."
                for each in _replaced(view, method)
                if self.chosen_only or _mark(each).exempt is not None
            ]
        exempt = not unsafe or not (chosen or hidden) or (decided[-1] if decided else False)
        faults = [] if exempt else [*hidden, *policy.faults(**self.offered)]
        if not exempt and policy.finish == "janitor" and self.finishing is not None:
            from flask_idempotency.web.acting import finishing_faults  # for the endpoints that the janitor finishes

            faults += finishing_faults(self.app, *self.finishing, policy)
        return ResolvedPolicy(
            policy=policy,
            exempt=exempt,
            deferred=deferred,
            chosen=chosen or not unsafe,
            headers=tuple("HTTP_" + name.upper().replace("-", "_") for name in policy.header),
            faults=tuple(faults),
            observed=not exempt and policy.mode != "enforce",
        )

    def _layers(self, endpoint: str, method: str) -> Iterator[_Layer]:
        """Yield the layers of this policy, outermost first."""
        yield _APPLICATION, self.base
        yield from self._of_blueprints(endpoint)
        view_class = getattr(self.app.view_functions.get(endpoint), "view_class", None)
        for target in _marked(self.app, endpoint, method):
            # `MethodView.as_view` makes a function that only `decorators` can mark.
            made = view_class is not None and getattr(target, "view_class", None) is view_class
            name = f"the decorators of {name_of(view_class)}" if made else name_of(target)
            override = _mark(target).override
            yield f"{'@webhook' if 'principal' in override else '@idempotent'} on {name}", override

    def _of_blueprints(self, endpoint: str) -> Iterator[_Layer]:
        """Yield the blueprints' layers, outermost first. Find them by object: a blueprint may have several names."""
        path = endpoint.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            blueprint: Any = self.app.blueprints.get(".".join(path[:depth]))
            if blueprint in self.overrides:
                override = self.kept.values.get(blueprint, self.overrides[blueprint])
                yield f"configure({blueprint.name!r})", override


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
        lost = _hidden(app, rule.endpoint, request.method)
        lost += _replaced(app.view_functions.get(rule.endpoint), request.method)
        marks += [mark for mark in map(_mark, lost) if not mark.exempt]
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
    """Yield the objects that decorators may have marked, outermost first, and none twice for one mark."""
    view: Any = app.view_functions.get(endpoint)
    if type(view) is FunctionType and class_of(view) is FunctionType:
        yield view
        return
    found: list[Any] = []
    for target in (*reversed(class_of(view).__mro__), *called_by(view, [method])):
        mark = _mark(target)
        # An object has the mark of its class, and a bound method that of its function.
        if not any(mark is each for each in found):
            found.append(mark)
            yield target


def _hidden(app: Flask, endpoint: str, method: str) -> list[Any]:
    """Return annotated functions that this endpoint's view calls, and whose marks no view shows.

    A decorator between the route and the mark lacks `functools.wraps`. A function that is a view itself is not hidden: another
    view may call it.
    """
    view = app.view_functions.get(endpoint)
    entered = called_by(view, [method])
    marked = [each for each in led_to(entered)[len(entered) :] if _has_mark(each)]
    # A helper of its class, which no request calls by itself.
    owner = class_of(view)
    bases = () if owner is FunctionType else reversed(owner.__mro__)
    helpers = {name: each for base in bases for name, each in vars(base).items() if name not in _ENTERED}
    marked += [each for each in helpers.values() if type(each) is FunctionType and _has_mark(each)]
    # The view's own marks first: they are nearly always all, and a large application has many views.
    for views in ([view], app.view_functions.values()):
        if marked:
            shown = [each for view in views for root in called_by(view) for each in _shown_by(root)]
            shown += [each for view in views for each in class_of(view).__mro__]
            marked = [each for each in marked if not any(each is other for other in shown)]
    return marked


def _replaced(view: Any, method: str) -> list[Any]:
    """Return the annotated methods of base classes that this view's class replaces, and so never calls by itself."""
    owner = class_of(view)
    names = ("__call__",) if owner is type(view) else ("dispatch_request", method.lower())
    bases = [vars(each)[name] for name in names for each in owner.__mro__ if name in vars(each)]
    return [each for each in (getattr(base, "__func__", base) for base in bases) if _mark(each) != Mark()]


def class_of(view: Any) -> type:
    """Return the class of a view: itself, that of `as_view`, or that of an object which is called."""
    view_class: Any = view if inspect.isclass(view) else getattr(view, "view_class", None)
    return view_class if inspect.isclass(view_class) else type(view)


def called_by(view: Any, methods: Iterable[str] | None = None) -> list[Any]:
    """Return the view, and the functions of its class that it calls for these methods. None: for all methods."""
    view_class = getattr(view, "view_class", None)
    if not inspect.isclass(view_class):
        if type(view) is FunctionType:
            return [view]
        # Of an object Python calls the `__call__` of its class, of a class its `__init__`, of a bound method its function.
        owner, name = (view, "__init__") if inspect.isclass(view) else (type(view), "__call__")
        call = view if owner is MethodType else inspect.getattr_static(owner, name, None)
        call = getattr(call, "__func__", call)
        return [view, call] if type(call) is FunctionType else [view]
    names = (getattr(view_class, "methods", None) or ()) if methods is None else methods
    functions = [getattr(view_class, name, None) for name in ("dispatch_request", *map(str.lower, names))]
    return [view, *(each.__func__ if type(each) is MethodType else each for each in functions if each is not None)]


def led_to(roots: Iterable[Any]) -> list[Any]:
    """Return these objects, and the annotated classes and all functions that they hold or call in turn."""
    found = {id(each): each for each in roots}
    queue = list(found.values())
    entered = len(queue)
    for number, target in enumerate(queue):
        new = {id(held): held for held in _held(target, of_root=number < entered) if id(held) not in found}
        found |= new
        queue += new.values()
    return queue


def _held(target: Any, *, of_root: bool) -> list[Any]:
    """Return the functions that this function, partial or decorator object holds, and may call.

    Of a view of `as_view` that another function calls, those are also the methods of its class. It reads closures and
    attributes, and runs no code of the objects: a closure may hold a proxy without a context.
    """
    kind = type(target)
    if issubclass(kind, type):
        return []
    classes: list[Any] = []
    held: list[Any] = [target.func] if issubclass(kind, partial | partialmethod) else []
    if kind is FunctionType:
        for cell in target.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                held.append(cell.cell_contents)
    elif kind is MethodType:
        held.append(target.__func__)
    else:
        held.append(inspect.getattr_static(kind, "__call__", None))
        slots = [each for base in kind.__mro__ for each in vars(base).values() if type(each) is MemberDescriptorType]
        for slot in slots:
            with suppress(AttributeError):  # not assigned yet
                held.append(slot.__get__(target))
    with suppress(AttributeError):  # it has slots
        own = object.__getattribute__(target, "__dict__")
        held += own.values()
        if not of_root and kind is FunctionType and inspect.isclass(own.get("view_class")):
            held += called_by(target)
            classes = [each for each in own["view_class"].__mro__ if MARK in vars(each)]
    # Functions, and objects that replace one: no class, application or proxy. Not what is in lists and dictionaries: a table
    # may be a namespace, whose functions this one never calls.
    return classes + [
        each
        for each in held
        if issubclass(type(each), partialmethod)
        or (not issubclass(type(each), type | Flask | LocalProxy) and callable(each))
    ]


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


def _mark(target: Any) -> Mark:
    """Return this object's own mark. `_marked` visits the classes that a class inherits from."""
    mark: Mark | None = vars(target).get(MARK) if inspect.isclass(target) else getattr(target, MARK, None)
    return mark or Mark()


def _has_mark(target: Any) -> bool:
    """Return whether this object has a mark. Runs no code of the object."""
    of_class = issubclass(type(target), type)
    mark = vars(target).get(MARK) if of_class else inspect.getattr_static(target, MARK, None)
    return isinstance(mark, Mark)


def mark_configured(blueprint: Blueprint, override: Override) -> None:
    """Mark the blueprint, so that `refuse_unguarded` closes its views in an application without the extension."""
    _put(blueprint, Mark(override=override))


def _check_carrier(target: Any) -> None:
    """Raise `ConfigurationError` for what is called through another object, where no request would find its mark."""
    kind = type(target).__name__
    if isinstance(target, MethodType):
        raise ConfigurationError(
            f"{name_of(target)} is a bound method, which cannot carry an annotation. Annotate the method in its class, and not "
            "in `method_decorators`, which are applied while a request is served."
        )
    if isinstance(target, Blueprint | Flask):
        raise ConfigurationError(
            f"A {kind} cannot carry an annotation. Annotate its views, or call idempotency.configure(blueprint, …)."
        )
    if isinstance(target, staticmethod | classmethod) or not callable(target):
        parts = (getattr(target, name, None) for name in ("__func__", "fget", "func"))
        inner = next((part for part in parts if callable(part)), None)
        named = "This" if inner is None else name_of(inner)
        raise ConfigurationError(
            f"{named} is a {kind} here, which cannot carry an annotation: no request would find it. Put the decorator directly "
            f"above the function, below @{kind}."
        )


def _annotate(target: TargetT, mark: Mark) -> TargetT:
    if _mark(target).exempt is not None and mark.exempt is not _mark(target).exempt:
        raise ConfigurationError(f"{name_of(target)} is both @idempotent and @exempt. Remove one of the two.")
    try:
        _put(target, mark)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{name_of(target)} cannot carry an annotation, because it takes no attributes. Write a function that calls it, "
            "and annotate that."
        ) from error
    with suppress(TypeError):  # it has slots, and no weak references
        annotated_here[id(target)] = target
    return target


def _put(target: Any, mark: Mark) -> None:
    setattr(target, MARK, mark)
    # We do not know yet which application will serve it. A second connection changes nothing.
    request_started.connect(refuse_unguarded)


def name_of(target: Any) -> str:
    if hasattr(target, "__qualname__"):
        return f"{target.__module__}.{target.__qualname__}"
    if isinstance(target, partial):
        return f"functools.partial({name_of(target.func)}, …)"
    return f"an instance of {name_of(type(target))}"

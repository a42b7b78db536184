"""Find the annotations that protect nothing, because no endpoint of the application leads to them.

A helper that a view calls may be annotated, or a function whose route was forgotten or replaced. `policies` closes the
endpoints of which it knows that they hide an annotation. This finds the others, whatever hides them: everything that was
annotated in this process, without what an endpoint leads to.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from flask import Blueprint, Flask

from flask_idempotency.web.policies import Policies, annotated_here, called_by, class_of, led_to, name_of, served_here

NOT_REACHED: Final = "Annotations protect nothing, because no endpoint of this application leads to what they stand on"
NOT_REGISTERED: Final = "Annotations stand on views of blueprints that this application does not register"


class Unreached(NamedTuple):
    """Annotated functions and classes that no endpoint of an application leads to, by name.

    `elsewhere` are those of blueprints that the application does not register.
    """

    here: list[str]
    elsewhere: list[str]


def unreached(app: Flask) -> Unreached:
    """Return what is annotated and protects nothing in this application.

    It looks in the modules of the application, of its views and of its blueprints, at what these import, and in the packages
    of the application and its blueprints. What another application of this process serves is left out.
    """
    if not _left(app):
        return Unreached([], [])
    # A class is in circles, and so is an application: only the collector sees that those of a former test have ended. It
    # takes up to a second, so it runs only where something would be named.
    gc.collect()
    left = _left(app)
    if not left:
        return Unreached([], [])
    registered = {id(each) for each in app.blueprints.values()}
    blueprints = [each for each in gc.get_objects() if issubclass(type(each), Blueprint)]
    absent = [each for each in blueprints if id(each) not in registered]
    led = {id(each) for blueprint in absent for each in led_to(blueprint.deferred_functions)}
    modules = {each.import_name for each in absent} - _modules(app)
    apart = {key for key, each in left.items() if key in led or _module_of(each) in modules}
    return Unreached(
        sorted({name_of(each) for key, each in left.items() if key not in apart}),
        sorted({name_of(left[key]) for key in apart}),
    )


def _left(app: Flask) -> dict[int, Any]:
    """Return what belongs to this application, and no endpoint of an application leads to."""
    annotated = {ref.key: each for ref in annotated_here.valuerefs() if (each := ref()) is not None}
    left = _related(app, {key: annotated[key] for key in annotated.keys() - _reached(app)}) if annotated else {}
    for other in [each for ref in served_here.valuerefs() if (each := ref()) is not None and each is not app]:
        if not left:
            break
        reached = _reached(other)
        left = {key: each for key, each in left.items() if key not in reached}
    return left


def _reached(app: Flask) -> set[int]:
    """Return the ids of everything that an endpoint of this application leads to."""
    classes, roots = set[int](), list[Any]()
    for view in app.view_functions.values():
        bases, entered = class_of(view).__mro__, called_by(view)
        classes.update(map(id, bases))
        # The view, and the functions of its classes: those it calls, and those that a subclass replaced.
        names = {str(getattr(each, "__name__", "")) for each in entered[1:]}
        replaced = [vars(base)[name] for base in bases for name in names & vars(base).keys()]
        roots += [*entered, *(getattr(each, "__func__", each) for each in replaced)]
    return classes | set(map(id, led_to(roots)))


def _module_of(target: Any) -> str:
    while isinstance(target, partial):
        target = target.func
    return str(getattr(target, "__module__", ""))


def _modules(app: Flask) -> set[str]:
    """Return the names of the modules that the views and blueprints of this application come from."""
    sources = [each for view in app.view_functions.values() for each in (*called_by(view), *class_of(view).__mro__)]
    return {*map(_module_of, sources), *(each.import_name for each in app.blueprints.values())}


def _related(app: Flask, left: dict[int, Any]) -> dict[int, Any]:
    """Return those of these objects that belong to this application, as far as its modules show."""
    named = {app.import_name, *(each.import_name for each in app.blueprints.values())}
    packages = tuple(f"{name}." for name in named if hasattr(sys.modules.get(name), "__path__"))
    modules = named | _modules(app)
    imported = {id(each) for name in modules if name in sys.modules for each in list(vars(sys.modules[name]).values())}

    def is_related(target: Any) -> bool:
        name = _module_of(target)
        module = sys.modules.get(name, target)
        # Of a method, its class is imported.
        outer = getattr(module, getattr(target, "__qualname__", "").partition(".")[0], target)
        return name in modules or name.startswith(packages) or not imported.isdisjoint((id(module), id(outer)))

    return {key: each for key, each in left.items() if is_related(each)}


def without_void_view(app: Flask, policies: Policies) -> list[str]:
    """Return the operations whose policy has `void=True` although no status view of this application takes DELETE."""
    pairs = policies.pairs()
    resolved = {(endpoint, method): policies.look(endpoint, method) for endpoint, method in pairs}
    may_void = [pair for pair, one in resolved.items() if one.policy.void and not one.exempt]
    if not may_void:
        return []
    from flask_idempotency.web.key_status import find_status_views  # for the applications that have such a view

    views = {*find_status_views(app).values()}
    if any(endpoint in views and method == "DELETE" for endpoint, method in pairs):
        return []
    return [f"{method} {endpoint}" for endpoint, method in may_void if endpoint not in views]


def unprotected(app: Flask, policies: Policies) -> Iterator[tuple[bool, str, str]]:
    """Yield what annotations promise and nothing keeps: whether it is a fault for certain, a sentence, and the remedy."""
    if voiding := without_void_view(app, policies):
        remedy = 'Set IDEMPOTENCY_STATUS_URL, or register key_status with methods=["GET", "DELETE"].'
        yield True, f"{', '.join(voiding)}: void=True has no effect, because no status view takes DELETE.", remedy
    here, elsewhere = unreached(app)
    if here:
        remedy = (
            "Annotate the function that the route gets; of a view that is an object, the object or its __call__. Remove the "
            "annotation from a function that is no view."
        )
        yield False, f"{NOT_REACHED}: {', '.join(here)}.", remedy
    if elsewhere:
        remedy = "Register those blueprints, unless they are left out here on purpose."
        yield False, f"{NOT_REGISTERED}: {', '.join(elsewhere)}.", remedy

"""Register again what a factory registers for each application that it makes.

A closure of the factory is a new object each time. It replaces the former one for the applications that are set up from then
on, and for the one that was set up last; the applications before it keep theirs. Another function under the same name is a
mistake of the application: two of one name were registered, and the caller refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet

__all__ = ["Kept", "Registrations", "is_same"]


def is_same(one: Any, other: Any) -> bool:
    """Return whether these come from the same code: equal values, and functions and objects that a factory makes again.

    Two functions are the same if they have one module, one qualified name and one code, so two lambdas of one function differ.
    Of objects, the class counts.
    """
    if one is other or (type(one) is type(other) and not callable(one) and not is_dataclass(one) and one == other):
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    if is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        return all(is_same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return callable(one) and callable(other) and _source(one) == _source(other)


def _source(function: Any) -> object:
    if isinstance(function, partial):
        return partial, _source(function.func)
    if isinstance(function, MethodType):
        return MethodType, _source(function.__func__)
    named = function if hasattr(function, "__code__") or isinstance(function, type) else type(function)
    return named.__module__, named.__qualname__, getattr(named, "__code__", None)


class Kept:
    """The former values that one application keeps, by name, while the newest ones hold for those set up since."""

    def __init__(self, inherited: Collection[Hashable] = ()) -> None:
        self.values: dict[Hashable, Any] = {}
        self.inherited: set[Hashable] = set(inherited)
        """Names whose value was registered for an application before: the next of that name is for this one."""


class Registrations:
    """Decides which applications keep a value when another takes its name. The caller holds the newest values."""

    def __init__(self) -> None:
        self._applications: WeakSet[Kept] = WeakSet()
        self._newest: Kept | None = None
        self._turn = 0
        """How many applications were set up."""
        self._turns: dict[Hashable, int] = {}
        """In which turn each name got its value."""
        self._pending: dict[Hashable, Any] = {}
        """What the newest application had before a registration that is its own, or that of one that is set up next."""

    def set_up(self, names: Collection[Hashable]) -> Kept:
        """Return what the next application keeps. `names` are those that have a value now."""
        self._turn += 1
        if self._newest is not None:
            # A factory that registers first and sets up then: its registrations were not for the application before.
            for name, value in self._pending.items():
                self._newest.values.setdefault(name, value)
        made = Kept() if self._newest is None else Kept(set(names) - self._pending.keys())
        self._pending.clear()
        self._newest = made
        self._applications.add(made)
        return made

    def note(self, name: Hashable) -> bool:
        """Note that this name gets a value. Return whether it has had none since an application was set up.

        If it has, two values are for one application: a factory registers each name once.
        """
        first = self._turns.get(name) != self._turn
        self._turns[name] = self._turn
        return first

    def replace(self, name: Hashable, former: Any) -> None:
        """Let the applications before the newest keep the former value of this name."""
        newest = self._newest
        for each in list(self._applications):
            if each is not newest:
                each.values.setdefault(name, former)
        if newest is not None and name in newest.inherited:
            newest.inherited.discard(name)
        else:
            self._pending.setdefault(name, former)

    def forget(self, name: Hashable) -> None:
        """Let every application use the newest value of this name: another function was registered."""
        self._pending.pop(name, None)
        for each in list(self._applications):
            each.values.pop(name, None)

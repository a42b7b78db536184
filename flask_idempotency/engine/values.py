"""Value classes: frozen for the type checker, and cheap to make at run time.

A frozen dataclass sets each field through `object.__setattr__`, which makes it four times as slow to create. A request
creates a dozen of them. mypy takes `valueclass` for `dataclasses.dataclass`, so it refuses every assignment to a field.

`dataclass` also compiles the source of each method while a module is imported, which took half of the time to import this
package. So only `__init__` is compiled for each class here, because it runs most, and only when it is first used: a process
makes few of the events. The other methods read their fields by an `attrgetter`, which costs some tenths of a microsecond
more per call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["fits", "valueclass"]


def fits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether this function of the application can be called so. True if it does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


if TYPE_CHECKING:
    from dataclasses import dataclass as valueclass
else:
    from dataclasses import dataclass

    def valueclass(*, frozen: bool, slots: bool, repr: bool = True, eq: bool = False, kw_only: bool = False) -> Any:
        """Make a dataclass that is compared and hashed by its fields. Write `frozen=True, slots=True`, for mypy.

        With `eq=True`, its comparison and its hash are compiled too: for a class that each request compares or looks up.
        """
        if not (frozen and slots):
            raise TypeError("a value class is frozen and has slots")

        def made(cls: type) -> type:
            cls = dataclass(slots=True, init=False, repr=False, eq=eq, unsafe_hash=eq, kw_only=kw_only)(cls)
            every = fields(cls)
            names = [each.name for each in every if each.compare]
            # An `attrgetter` of one name returns no tuple. Tuples compare by identity before equality.
            values = (
                attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
            )
            shown = [each.name for each in every if each.repr]

            def equal(self: Any, other: Any) -> bool:
                return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

            def hashed(self: Any) -> int:
                return hash(values(self))

            def described(self: Any) -> str:
                inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
                return f"{self.__class__.__qualname__}({inside})"

            # A method in the body of the class is meant to differ, and stays.
            methods = {"__init__": _Init(cls)} | ({} if eq else {"__eq__": equal, "__hash__": hashed})
            if repr:
                methods["__repr__"] = described
            own = vars(cls)
            for name, method in methods.items():
                if own.get(name) is None:
                    setattr(cls, name, method)
            return cls

        return made

    class _Init:
        """Stand in for the `__init__` of a value class until it is first looked up. Two threads make equal ones."""

        def __init__(self, cls: type) -> None:
            self._cls = cls

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            cls = self._cls
            given: dict[str, Any] = {"_missing": MISSING}
            parameters, lines, every = ["self"], [], fields(cls)
            # A class has only fields of one kind.
            parameters += ["*"] if every and every[0].kw_only else []
            for each in every:
                name, value = each.name, each.name
                if each.default is not MISSING:
                    given[f"_default_{name}"] = each.default
                    name += f"=_default_{each.name}"
                elif each.default_factory is not MISSING:
                    given[f"_made_{name}"] = each.default_factory
                    name, value = f"{name}=_missing", f"_made_{name}() if {name} is _missing else {name}"
                parameters.append(name)
                lines.append(f" self.{each.name}={value}")
            lines.append(" self.__post_init__()" if hasattr(cls, "__post_init__") else "")
            # As `dataclass` does: the names are those of the fields of a class of this package.
            exec(f"def __init__({','.join(parameters)}):\n" + ("\n".join(lines).strip("\n") or " pass"), given)  # noqa: S102
            made = given["__init__"]
            made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
            made.__annotations__ = {each.name: each.type for each in every} | {"return": None}
            cls.__init__ = made
            return made.__get__(instance, owner)

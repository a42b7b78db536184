"""Turn the arguments of a step into bytes, which the engine compares with those of the attempt that recorded it.

They go by value: 10 equals 10.0 and Decimal("10.00"), an aware time equals the same instant in another zone, a list equals a
tuple, and the order of names in a dict does not count. This holds for the names of dicts too. A client's retry, or what a
database returns to it, may differ in these, and still be the same request.

Earlier releases told more values apart. A journal may hold their digests, so `former` returns what they compared.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from types import FunctionType
from typing import Any, Final

from flask_idempotency.engine.errors import NotStorable
from flask_idempotency.engine.keys import encode
from flask_idempotency.steps.values import DEEPEST, tagged

LARGEST_ARGUMENTS: Final = 1024 * 1024
"""Bytes of all arguments that one step compares. A client may send them, so each is counted before it is looked at."""
_MOST_DIGITS: Final = 4300
"""A Decimal with fewer digits is turned into the int or float that it equals. That takes quadratic time."""


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments by the names of their parameters, defaults included. Raises `TypeError` as a call would.

    The names of a function without a signature are its positions.
    """
    signature = signature_of(function)
    if signature is None:
        return {**{str(number): each for number, each in enumerate(args)}, **kwargs}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of this function, or None for one without."""
    if type(function) is FunctionType and "<" not in function.__qualname__:
        return _remembered(function)
    # Each request makes new closures and methods, and the cache would keep them as long as the process runs.
    return _read(function)


def _read(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


_remembered: Final = lru_cache(maxsize=1024)(_read)
# `json.dumps` would make one for each argument.
_ENCODER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), sort_keys=True)


def comparable(step: str, arguments: Mapping[str, Any], *, compare: tuple[str, ...] | None) -> bytes:
    """Return the arguments that this step compares, as bytes that only equal ones give. Empty: it compares none.

    `compare` names them; None: all.

    Raises `TypeError` for a value that cannot be compared or takes too much, and names the argument.
    """
    left = LARGEST_ARGUMENTS
    parts = []
    for name in sorted(arguments if compare is None else set(compare)):
        if name not in arguments:
            raise TypeError(
                f"step {step!r}: compare names {name!r}, and the function has "
                f"{'the parameters ' + ', '.join(arguments) if arguments else 'no parameters'}."
            )
        try:
            left = _left(arguments[name], left)
            value = tagged(_normal(arguments[name]))
        except NotStorable as error:
            raise TypeError(
                f"step {step!r}: its argument {name!r} cannot be compared with that of a retry: {error}. Pass an id, "
                "leave the object to a closure, or name the arguments to compare in compare=(…)."
            ) from error
        parts += [name.encode(), _ENCODER.encode(value).encode()]
    return encode(*parts) if parts else b""


def former(arguments: Mapping[str, Any], *, compare: tuple[str, ...] | None) -> Iterator[bytes]:
    """Yield what earlier releases compared of arguments that `comparable` takes, the latest release first."""
    for leaf in (_formerly_by_value, _formerly_by_type):
        parts = []
        # What those releases could not compare, they have not recorded.
        with suppress(NotStorable):
            for name in sorted(arguments if compare is None else set(compare)):
                value = tagged(_normal(arguments[name], leaf=leaf))
                parts += [name.encode(), _ENCODER.encode(value).encode()]
            yield encode(*parts)


def _left(value: Any, left: int, depth: int = 0) -> int:
    """Return how many bytes are left behind this value, counted before anything is made of it. Raises `NotStorable`."""
    kind = type(value)
    left -= 1
    if kind is str:
        left -= len(value)
    elif kind is bytes:
        left -= len(value) * 4 // 3
    elif kind is int:
        left -= value.bit_length() // 4
    elif kind is Decimal:
        # `_number` writes the zeros that the exponent stands for, if they are not too many.
        left -= max(len(str(value)), min(value.adjusted(), _MOST_DIGITS))
    elif kind is float:
        left -= max(math.frexp(value)[1], 0) // 3
    elif depth < DEEPEST and left >= 0:
        if kind in (list, tuple):
            for each in value:
                left = _left(each, left, depth + 1)
        elif kind is dict:
            for name, each in value.items():
                left = _left(each, _left(name, left, depth + 1), depth + 1)
    if left < 0:
        raise NotStorable(f"all arguments that are compared take more than {LARGEST_ARGUMENTS} bytes")
    return left


def _by_value(value: Any) -> Any:
    kind = type(value)
    if kind is Decimal and not value.is_finite() and not value.is_snan():
        return float(value)
    if kind in (datetime, time) and (offset := value.utcoffset()) is not None:
        if kind is datetime:
            # The first and the last day have no such instant in the calendar.
            with suppress(OverflowError):
                return value.astimezone(UTC)
            return ("instant", value - datetime.min.replace(tzinfo=UTC))
        clock = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
        return ("time", clock - offset)
    return _formerly_by_value(value)


def _formerly_by_value(value: Any) -> Any:
    kind = type(value)
    if kind is float and value.is_integer():
        return int(value)
    if kind is Decimal and value.is_finite():
        return _number(value)
    if kind is datetime and value.utcoffset() is not None:
        with suppress(OverflowError):
            return value.astimezone(UTC)
    return value


def _formerly_by_type(value: Any) -> Any:
    kind = type(value)
    if kind is float and value.is_integer():
        return int(value)
    if kind is Decimal and value.is_finite():
        return Decimal(_stripped(value)) if value else 0
    return value


def _normal(value: Any, depth: int = 0, *, leaf: Callable[[Any], Any] = _by_value) -> Any:
    """Return the one form that all equal values have. A value of another type stays as it is: `tagged` refuses it.

    `leaf` does so for a value that contains no other, as this release does or an earlier one did. A form that no list or dict
    has is a tuple.
    """
    kind = type(value)
    if kind not in (list, tuple, dict):
        return leaf(value)
    if depth >= DEEPEST:
        return value
    if kind is not dict:
        return [_normal(each, depth + 1, leaf=leaf) for each in value]
    if leaf is _by_value and not all(type(name) is str for name in value):
        pairs = [[_normal(name, depth + 1), _normal(each, depth + 1)] for name, each in value.items()]
        return tuple(sorted(pairs, key=lambda pair: _ENCODER.encode(tagged(pair[0], depth))))
    # Their order counts to `tagged`, if a name is not plain text.
    names = sorted(value, key=lambda name: (type(name).__name__, _shown(name)))
    return {name: _normal(value[name], depth + 1, leaf=leaf) for name in names}


def _shown(name: Any) -> str:
    # The repr of a long int takes quadratic time, or raises.
    return hex(name) if type(name) is int and name.bit_length() > 2048 else repr(name)


def _number(value: Decimal) -> int | float | Decimal:
    """Return the int or the float of this value, if it is not too long and one has it; else without final zeros."""
    if not value:
        return 0
    sign, digits, exponent = _stripped(value)
    if len(digits) + abs(exponent) <= _MOST_DIGITS:
        if exponent >= 0:
            return int(value)
        if Decimal(number := float(value)) == value:
            return number
    return Decimal((sign, digits, exponent))


def _stripped(value: Decimal) -> tuple[int, tuple[int, ...], int]:
    """Return sign, digits and exponent of this finite number, which is not zero, without the zeros at its end."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - it is finite
    end = len(digits)
    while digits[end - 1] == 0:
        end -= 1
    return sign, digits[:end], exponent + len(digits) - end

"""The types of values in configuration: what each accepts, and what becomes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from marshmallow import ValidationError, fields, validate

from flask_idempotency.engine.fingerprint import check_pointer
from flask_idempotency.engine.quota import MAX_LIMIT, NewKeys
from flask_idempotency.profiles import faults_of_kept

if TYPE_CHECKING:
    Field = fields.Field
else:

    class Field(fields.Field):
        """A field of marshmallow 3 or 4. Only 4 knows what a field loads."""

        def __class_getitem__(cls, loaded: Any) -> Any:
            return cls


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STATUS_CLASS = re.compile(r"([1-5])xx", re.IGNORECASE)

MAX_WINDOW_SECONDS = 366 * 24 * 3600.0
"""What every store can count to: Redis counts in floating point, and a database stops at 2**63."""

_TOO_MUCH = f"must not be more than 2**53 ({MAX_LIMIT}), which is what stores can count to; for no limit, leave it out."


def count(*, least: int = 0, most: int | None = None, **options: Any) -> fields.Integer:
    """A whole number, from this one up. True is none."""
    error = "must not be negative." if least == 0 else f"must be at least {least}."
    if most is not None:
        error = f"must be from {least} to {most}."
    return fields.Integer(strict=True, validate=validate.Range(min=least, max=most, error=error), **options)


def limit(**options: Any) -> fields.Integer:
    """What a tenant may have of something. None is no limit."""
    field = count(allow_none=True, **options)
    field.validators.append(validate.Range(max=MAX_LIMIT, error=_TOO_MUCH))
    return field


def interval(default: int, doc: str) -> Seconds:
    """Seconds between two times that something is done by itself. None: it is not."""
    return Seconds(allow_none=True, validate=positive(), metadata={"doc": doc, "default": default})


def patience(doc: str) -> Seconds:
    """Seconds after which somebody else gives up. 0 is never; None: nobody has said."""
    error = "must not be negative."
    return Seconds(
        allow_none=True, validate=validate.Range(min=0, error=error), metadata={"doc": doc, "default": "not known"}
    )


def positive() -> validate.Range:
    """For durations that must not be 0."""
    return validate.Range(min=0, min_inclusive=False, error="must be more than 0.")


class Seconds(Field[float]):
    """A duration in seconds, written as a number or a `timedelta`."""

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> float:
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValidationError("must be a number of seconds or a timedelta.")
        return float(value)


class HeaderNames(Field[tuple[str, ...]]):
    """One header name, or several: the first is the one in use, the rest are aliases."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(name, str) and _TOKEN.fullmatch(name) for name in names):
            raise ValidationError("must be a header name such as Idempotency-Key, or a list of them.")
        return names


EXTENSIONS: Final = ("Flask-HTTPAuth", "Flask-JWT-Extended", "Flask-Login", "Flask-Principal")
"""Those that name callers, in the order in which they are asked."""


class Former(Field[dict[str, Any]]):
    """What was otherwise in the identity of keys: a mapping with `namespace`, `tenant` and `principal`, or some of them.

    Extensions that named callers become a tuple.
    """

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> dict[str, Any]:
        names = ("namespace", "tenant", "principal")
        if not isinstance(value, Mapping) or not value or not set(value) <= set(names):
            raise ValidationError(
                'must be a mapping of what was otherwise, such as {"tenant": False}, {"principal": False}, '
                '{"principal": "Flask-Login"} or {"namespace": "old"}.'
            )
        faults = []
        if "namespace" in value and not (isinstance(value["namespace"], str) and value["namespace"]):
            faults.append("namespace must be the former namespace, a non-empty string.")
        loaded = dict(value)
        named = value.get("principal")
        listed = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list | tuple) else ()
        if listed and all(each in EXTENSIONS for each in listed):
            loaded["principal"] = tuple(each for each in EXTENSIONS if each in listed)
        elif "principal" in value and named is not False and not callable(named):
            faults.append(
                "principal must be False if callers had no name; the function that was the principal_loader; or the "
                f"extensions that named callers: one of {', '.join(EXTENSIONS)}, or a list of them."
            )
        if "tenant" in value and value["tenant"] is not False and not callable(value["tenant"]):
            faults.append(
                "tenant must be False if there was no tenant_loader, or else the function that was the loader."
            )
        if faults:
            raise ValidationError(faults)
        return loaded


class KeptHeaders(Field[frozenset[str]]):
    """Names of response headers to keep, in lower case. What belongs to one caller is refused, not ignored."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[str]:
        names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
        if not all(isinstance(name, str) for name in names):
            raise ValidationError("must be a header name, or a list of them.")
        if faults := faults_of_kept(names):
            raise ValidationError(faults)
        return frozenset(name.lower() for name in names)


class HeaderPairs(Field[tuple[tuple[str, str], ...]]):
    """The headers that mark a replay: one name (its value is then `true`), or a mapping of names to values."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[tuple[str, str], ...]:
        pairs = {value: "true"} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
        if pairs is None or not all(
            isinstance(name, str) and _TOKEN.fullmatch(name) and isinstance(text, str) and _is_header_text(text)
            for name, text in pairs.items()
        ):
            raise ValidationError("must be a header name, or a mapping of header names to values.")
        return tuple(pairs.items())


class Statuses(Field[frozenset[int]]):
    """HTTP statuses: numbers, and classes such as "5xx"."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[int]:
        if isinstance(value, str | int) or not isinstance(value, Iterable):
            value = (value,)
        return frozenset(status for item in value for status in _statuses(item))


class Methods(Field[frozenset[str]]):
    """HTTP methods in scope. GET, HEAD and OPTIONS are safe to repeat by definition (RFC 9110) and never in scope."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> frozenset[str]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValidationError('must be a list of methods such as ["POST", "PATCH"].')
        methods = frozenset(str(method).upper() for method in value)
        if safe := methods & {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise ValidationError(
                f"must not contain {', '.join(sorted(safe))}: such requests are safe to repeat anyway."
            )
        return methods


class Pointers(Field[tuple[str, ...]]):
    """JSON Pointers (RFC 6901) of members that may change from one retry to the next."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> tuple[str, ...]:
        pointers = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(pointer, str) for pointer in pointers):
            raise ValidationError('must be a JSON Pointer such as "/sent_at", or a list of them.')
        for pointer in pointers:
            try:
                check_pointer(pointer)
            except ValueError as error:
                raise ValidationError(str(error)) from error
        return pointers


class CallableField(Field[Callable[..., Any]]):
    """A function."""

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any
    ) -> Callable[..., Any]:
        if not callable(value):
            raise ValidationError("must be a function.")
        return value  # type: ignore[no-any-return]


class Rate(Field[NewKeys]):
    """So many in each so long: a pair of a whole number and a duration."""

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **kwargs: Any) -> NewKeys:
        if isinstance(value, NewKeys):
            value = (value.count, value.seconds)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
            raise ValidationError("must be a pair: how many keys, and in each how many seconds, such as (1000, 3600).")
        number, length = value
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValidationError("must begin with a whole number of keys, from 0 up.")
        if number > MAX_LIMIT:
            raise ValidationError(_TOO_MUCH)
        seconds = Seconds().deserialize(length) or 0.0
        if not 0 < seconds <= MAX_WINDOW_SECONDS:
            raise ValidationError("must end with a window of more than 0 seconds and not more than a year.")
        return NewKeys(number, seconds)


def _is_header_text(text: str) -> bool:
    return all(" " <= char <= "~" for char in text)


def _statuses(item: Any) -> Iterable[int]:
    if isinstance(item, str) and (match := _STATUS_CLASS.fullmatch(item)):
        return range(int(match[1]) * 100, int(match[1]) * 100 + 100)
    if isinstance(item, int) and not isinstance(item, bool) and 100 <= item <= 599:
        return (item,)
    raise ValidationError('must contain statuses from 100 to 599, or classes such as "5xx".')

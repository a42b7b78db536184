"""Write what a step returned as tagged JSON, and read exactly the same value again. Never pickle, never the name of a class.

JSON has None, bool, int, float, str, list and dict with string names. Each other type is an object with one member, whose
name is a tag: `{"$decimal": "1.10"}`. A dict with a member that looks like a tag is written as `{"$dict": [[name, value], …]}`.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from flask_idempotency.engine.errors import CorruptRecord, NotStorable, ResultNotRebuilt, StepsChanged
from flask_idempotency.engine.journal import LARGEST_ITEM
from flask_idempotency.engine.step_rules import Returns

DEEPEST: Final = 100
"""Levels of nested lists, tuples and dicts. Python's own JSON stops at about a thousand, with a `RecursionError`."""
_DECIMAL_BITS: Final = 2048
"""A longer int is written in hexadecimal. `sys.set_int_max_str_digits` may forbid decimal ones above 640 digits."""
_WHOLE_NUMBER: Final = re.compile(r"0|-?[1-9][0-9]*")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_MISFITS: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    NameError,
    NotImplementedError,
)
"""What Python code raises for a value that does not fit, each time. Other exceptions may not come again."""
_NAMED_MISFITS: Final[Mapping[str, frozenset[str]]] = {
    "cattrs": frozenset({"BaseValidationError", "ForbiddenExtraKeysError", "StructureHandlerNotFoundError"}),
    "jsonschema": frozenset({"ValidationError"}),
    "marshmallow": frozenset({"ValidationError"}),
    "msgspec": frozenset({"DecodeError", "ValidationError"}),
}
"""What other libraries raise for one, by the package and the class."""

Item: TypeAlias = str | int | UUID
"""What tells several steps of one name apart."""


def encode(value: Any) -> bytes:
    """Return this value as tagged JSON. Raises `NotStorable`, and names what it cannot write.

    Subclasses are refused too: they would come back as something else.
    """
    return _ENCODER.encode(tagged(value)).encode()


def decode(data: bytes) -> Any:
    """Return the value that `encode` wrote. Raises `CorruptRecord` for anything else."""
    try:
        return _DECODER.decode(data.decode())
    except Exception as error:
        # Whatever the readers of tags raise for damaged bytes: AttributeError, IndexError, OSError of a time zone, and more.
        raise CorruptRecord(
            f"the result of a step cannot be read ({type(error).__name__}): it is damaged, or another release wrote it"
        ) from error


def encode_item(item: Item | None) -> bytes:
    """Return the item of a step as tagged JSON, empty for none. Raises `TypeError` for another type, and if it is too long."""
    if item is None:
        return b""
    if type(item) not in (str, int, UUID):
        raise TypeError(f"the item of a step is a str, an int or a UUID, not {type(item).__name__}.")
    encoded = encode(item)
    if len(encoded) > LARGEST_ITEM:
        raise TypeError(f"the item of a step takes {len(encoded)} bytes; {LARGEST_ITEM} are allowed. Pass an id.")
    return encoded


def encode_alike(item: Item) -> bytes:
    """Return the encoded item of another type that prints as this one does, as "1" does for 1. Empty: there is none."""
    other: Item | None = None
    # A number may have more digits than `sys.set_int_max_str_digits` allows: then it does not print at all.
    with suppress(ValueError):
        if type(item) is not str:
            other = str(item)
        elif _WHOLE_NUMBER.fullmatch(item):
            other = int(item)
        elif _UUID.fullmatch(item):
            other = UUID(item)
    return b"" if other is None else encode(other)


def decode_item(data: bytes) -> Item | None:
    """Return the item that `encode_item` wrote. Raises `CorruptRecord` for anything else."""
    if len(data) > LARGEST_ITEM:
        raise CorruptRecord("the item of a step is longer than any")  # text of a longer number is refused by Python
    item = decode(data) if data else None
    if type(item) not in (str, int, UUID, type(None)):
        raise CorruptRecord("the item of a step is no str, int or UUID")
    return item


def to_plain(value: Any, returns: Returns | None) -> Any:
    """Turn what a step returned into a value that `encode` takes, as its `returns=` says. Raises `NotStorable`."""
    if returns is None:
        return value
    if isinstance(returns, tuple):
        try:
            return returns[0](value)
        except Exception as error:
            raise NotStorable(f"the first function of `returns` raised {type(error).__name__}") from error
    if type(value) is not returns:
        raise NotStorable(f"it is of the type {type(value).__name__}, and `returns` says {returns.__name__}")
    return {name: getattr(value, name) for name in _members(returns)}


def from_plain(plain: Any, returns: Returns | None) -> Any:
    """Rebuild what a step returned from its plain value.

    Raises `StepsChanged` if it does not fit `returns` any more, and `ResultNotRebuilt` if that may work in a moment.
    """
    if returns is None:
        return plain
    if isinstance(returns, tuple):
        return _rebuilt("the second function of `returns`", lambda: returns[1](plain))
    members = _members(returns)
    if not isinstance(plain, dict) or not plain.keys() <= members.keys():
        raise StepsChanged(
            f"an earlier attempt kept a result that {returns.__name__} cannot hold: a field was removed or renamed"
        )
    if missing := [name for name, needed in members.items() if needed and name not in plain]:
        raise StepsChanged(
            f"an earlier attempt kept a result without {', '.join(missing)}, which {returns.__name__} needs: give it a default"
        )
    return _rebuilt(returns.__name__, lambda: returns(**plain))


def _rebuilt(name: str, rebuild: Callable[[], Any]) -> Any:
    try:
        return rebuild()
    except Exception as error:
        kind = type(error)
        if isinstance(error, _MISFITS) and not isinstance(error, OSError):
            raise StepsChanged(f"{name} raised {kind.__name__} for a result that an earlier attempt kept") from error
        if any(each.__name__ in _NAMED_MISFITS.get(each.__module__.partition(".")[0], ()) for each in kind.__mro__):
            raise StepsChanged(f"{name} raised {kind.__name__} for a result that an earlier attempt kept") from error
        # It may have asked a database or a server that does not answer.
        raise ResultNotRebuilt(f"{name} raised {kind.__name__} for a result that is kept") from error


def _members(cls: Any) -> Mapping[str, bool]:
    """Return the names that this dataclass or NamedTuple is made with, and whether each is needed."""
    if is_dataclass(cls):
        return {
            each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(cls) if each.init
        }
    return {name: name not in cls._field_defaults for name in cls._fields}


def tagged(value: Any, depth: int = 0) -> Any:
    """Return this value as what `json` writes by itself, with tags. Raises `NotStorable`."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text_tagged(value)
    if kind is int:
        return value if value.bit_length() <= _DECIMAL_BITS else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth >= DEEPEST:
        raise NotStorable(f"it is nested more than {DEEPEST} levels deep, or contains itself")
    if kind is dict:
        plain = all(type(name) is str and name[:1] != "$" and _text_tagged(name) is name for name in value)
        if not plain:
            return {"$dict": [[tagged(name, depth + 1), tagged(each, depth + 1)] for name, each in value.items()]}
        return {name: tagged(each, depth + 1) for name, each in value.items()}
    if kind is list:
        return [tagged(each, depth + 1) for each in value]
    if kind is tuple:
        return {"$tuple": [tagged(each, depth + 1) for each in value]}
    tag = _TAGS.get(kind)
    if tag is None:
        raise NotStorable(_refusal(value, kind, whole=depth == 0))
    name, write = tag
    return {name: write(value)}


def _refusal(value: Any, kind: type, *, whole: bool) -> str:
    remedy = "Return an id or plain values, or set `returns=` of the step"
    if is_dataclass(value) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        remedy = f"Set returns={kind.__name__} of the step"
        if not whole:
            remedy = "It is inside another value, so set `returns=` of the step to a pair of functions"
    return f"it contains a value of the type {kind.__module__}.{kind.__qualname__}. {remedy}"


def _text_tagged(value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        # A pair of surrogates in JSON would come back as one character.
        return {"$text": b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _zone(zone: tzinfo | None) -> list[Any]:
    """Return what names this time zone: nothing, a name of the IANA database, or an offset and its name."""
    if zone is None:
        return []
    if type(zone) is ZoneInfo and zone.key is not None:
        return [zone.key]
    if type(zone) is timezone:
        offset = zone.utcoffset(None)
        named = zone.tzname(None) != timezone(offset).tzname(None)
        return [*_timedelta_parts(offset), *([tagged(zone.tzname(None), 0)] if named else [])]
    raise NotStorable(
        f"it contains a time in a time zone of the type {type(zone).__module__}.{type(zone).__qualname__}. Use ZoneInfo, "
        "datetime.timezone, or UTC"
    )


def _read_zone(parts: list[Any]) -> tzinfo | None:
    if not parts:
        return None
    if isinstance(parts[0], str):
        return ZoneInfo(parts[0])
    offset = timedelta(*map(_whole, parts[:3]))
    if len(parts) > 3:
        return timezone(offset, parts[3])
    return UTC if not offset else timezone(offset)


def _timedelta_parts(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("a whole number was expected")
    return value


_TAGS: Final[Mapping[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("$bytes", lambda value: b64encode(value).decode()),
    Decimal: ("$decimal", str),
    date: ("$date", date.isoformat),
    time: ("$time", lambda value: [value.replace(tzinfo=None).isoformat(), value.fold, *_zone(value.tzinfo)]),
    datetime: ("$datetime", lambda value: [value.replace(tzinfo=None).isoformat(), value.fold, *_zone(value.tzinfo)]),
    timedelta: ("$timedelta", _timedelta_parts),
    UUID: ("$uuid", lambda value: value.hex),
}

_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$int": lambda text: int(text, 16),
    "$float": _FLOATS.__getitem__,
    "$text": lambda text: b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "$tuple": tuple,
    "$dict": lambda pairs: {name: each for name, each in pairs},  # noqa: C416 - `dict` takes strings of two letters for pairs
    "$bytes": lambda text: b64decode(text, validate=True),
    "$decimal": Decimal,
    "$date": date.fromisoformat,
    "$time": lambda parts: time.fromisoformat(parts[0]).replace(fold=parts[1], tzinfo=_read_zone(parts[2:])),
    "$datetime": lambda parts: datetime.fromisoformat(parts[0]).replace(fold=parts[1], tzinfo=_read_zone(parts[2:])),
    "$timedelta": lambda parts: timedelta(*map(_whole, parts)),
    "$uuid": lambda text: UUID(hex=text),
}


def _untagged(members: dict[str, Any]) -> Any:
    """Return the value of a tag, or this object as it is. `json` calls it for inner objects first."""
    if len(members) == 1:
        (name,) = members
        if name[:1] == "$":
            return _READERS[name](members[name])
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# `json.dumps` and `json.loads` would make these for each value.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(object_hook=_untagged, parse_constant=_refuse_constant)

"""What a step returned comes back as exactly the same value, or is refused."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import IntEnum
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flask_idempotency.engine.errors import CorruptRecord, NotStorable, StepsChanged
from flask_idempotency.engine.journal import LARGEST_ITEM
from flask_idempotency.steps.values import _READERS, decode, decode_item, encode, encode_item, from_plain, to_plain

ZONES = st.none() | st.sampled_from(
    (UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(microseconds=1)), timezone(timedelta(0), "GMT"))
)
NAMED = st.sampled_from((ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")))
SURROGATES = st.characters(categories=["Cs"])
TEXT = st.text(st.characters(), max_size=20) | st.text(SURROGATES, max_size=3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.binary(max_size=20)
    | st.decimals()
    | st.dates()
    | st.times(timezones=ZONES)
    | st.datetimes(timezones=ZONES | NAMED)
    | st.timedeltas()
    | st.uuids()
)
NAMES = st.sampled_from(("$int", "$dict", "$", "name")) | TEXT | st.integers() | st.booleans() | st.none() | st.uuids()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)


def shown(value: Any) -> Any:
    """What tells two values apart that are equal: types, order, zones, folds, the sign of zero, and NaN from itself."""
    match value:
        case dict():
            return dict, [(shown(name), shown(each)) for name, each in value.items()]
        case list() | tuple():
            return type(value), [shown(each) for each in value]
        case datetime() | time():
            return type(value), repr(value), value.fold
        case int():
            return type(value), hex(value)
        case _:
            return type(value), repr(value)


@settings(deadline=None)
@given(VALUES)
@example({1: "a", "1": "b"})
@example({"$int": "ff"})
@example({"$dict": [["a", 1]]})
@example(["ab"])
@example({"\ud83d\ude00": "\ud83d\ude00"})
@example([-0.0, math.nan, math.inf, -math.inf])
@example([10**5000, -(10**5000)])
@example([Decimal("sNaN"), Decimal("-0.00"), Decimal("1E+999999")])
@example(datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1))
@example(())
@example({})
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert shown(value) == shown(decode(encode(value)))


@settings(deadline=None)
@given(VALUES)
def test_what_is_kept_is_json_without_the_name_of_a_class(value: Any) -> None:
    json.loads(encode(value), parse_constant=pytest.fail)


def test_a_value_is_written_as_ever() -> None:
    """Journals outlive releases."""
    value = [
        None,
        (1, 2.5),
        b"\xff",
        {1: Decimal("1.10")},
        date(2026, 1, 2),
        time(3, 4, tzinfo=UTC),
        datetime(2026, 1, 2, 3, 4, tzinfo=ZoneInfo("Europe/Berlin")),
        timedelta(days=-1, microseconds=5),
        UUID(int=1),
        math.nan,
    ]

    assert (
        '[null,{"$tuple":[1,2.5]},{"$bytes":"/w=="},{"$dict":[[1,{"$decimal":"1.10"}]]},{"$date":"2026-01-02"},'
        '{"$time":["03:04:00",0,0,0,0]},{"$datetime":["2026-01-02T03:04:00",0,"Europe/Berlin"]},{"$timedelta":[-1,0,5]},'
        '{"$uuid":"00000000000000000000000000000001"},{"$float":"nan"}]'
    ) == encode(value).decode()


class Colour(IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Charge:
    id: str
    amount: int = 0
    seen: list[str] = field(default_factory=list)


@dataclass
class Smaller:
    id: str


@dataclass
class Larger:
    id: str
    amount: int
    seen: list[str]
    currency: str


class Elsewhere(tzinfo):
    """A time zone that no other process knows."""

    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(hours=1)

    def dst(self, when: datetime | None) -> None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "elsewhere"


def test_other_types_are_refused() -> None:
    for value in (
        object(),
        {1, 2},
        Colour.RED,
        OrderedDict(a=1),
        Point(1),
        Charge("ch_1"),
        datetime(2026, 1, 1, tzinfo=Elsewhere()),
        1j,
        {(Charge,): 1},
    ):
        with pytest.raises(NotStorable, match="contains"):
            encode([value])


def test_a_refused_dataclass_names_its_remedy() -> None:
    with pytest.raises(NotStorable, match="Set returns=Charge of the step"):
        encode(Charge("ch_1"))
    with pytest.raises(NotStorable, match="inside another value, so set `returns=` of the step to a pair of functions"):
        encode({"paid": Charge("ch_1")})


def test_a_value_within_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(NotStorable, match="contains itself"):
        encode(endless)


@settings(deadline=None)
@given(st.binary())
@example(b"")
@example(b"NaN")
@example(b'{"$unknown":1}')
@example(b'{"$int":1}')
@example(b'{"$decimal":"x"}')
@example(b'{"$datetime":["2026-01-01T00:00:00",0,"Nowhere/Atall"]}')
@example(b'{"$timedelta":[1.5]}')
@example(b'{"$dict":[[[],1]]}')
@example(b'{"$uuid":1}')
@example(b'{"$time":[]}')
@example(b'{"$datetime":["2026-01-01T00:00:00",0,"America"]}')
@example(b"[" * 100_000)
def test_other_bytes_are_corrupt(data: bytes) -> None:
    try:
        known = json.loads(data, parse_constant=pytest.fail)
    except (ValueError, RecursionError, pytest.fail.Exception):
        known = {"$": None}
    if "$" in repr(known):
        with pytest.raises(CorruptRecord):
            decode(data)
    else:
        assert shown(known) == shown(decode(data))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(_READERS)), value=anything)
def test_a_tag_with_anything_is_read_or_corrupt(name: str, value: Any) -> None:
    """Another outcome would be 500 for ever, and no page of the console."""
    for read in (decode, decode_item):
        with suppress(CorruptRecord):
            read(json.dumps({name: value}).encode())


def test_an_item_that_is_longer_than_any_is_corrupt() -> None:
    """Python refuses to print so long a number."""
    with pytest.raises(CorruptRecord):
        decode_item(b'{"$int":"0x' + b"f" * LARGEST_ITEM + b'"}')


@pytest.mark.parametrize("item", ("line-1", "", 7, UUID(int=7), None))
def test_an_item_comes_back(item: Any) -> None:
    assert item == decode_item(encode_item(item))
    assert (item is None) == (encode_item(item) == b"")


@pytest.mark.parametrize("item", (True, 1.0, b"x", ("a", 1)))
def test_other_items_are_refused(item: Any) -> None:
    with pytest.raises(TypeError, match="a str, an int or a UUID"):
        encode_item(item)


def test_the_longest_item_fits_an_entry() -> None:
    longest = "x" * (LARGEST_ITEM - 2)

    assert longest == decode_item(encode_item(longest))
    with pytest.raises(TypeError, match="1024 are allowed"):
        encode_item(longest + "x")


def kept(value: Any, returns: Any) -> Any:
    """What a later attempt reads."""
    return decode(encode(to_plain(value, returns)))


@pytest.mark.parametrize(("value", "returns"), ((Charge("ch_1", 5, ["a"]), Charge), (Point(1, 2), Point)))
def test_returns_rebuilds_a_dataclass_or_a_named_tuple(value: Any, returns: Any) -> None:
    rebuilt = from_plain(kept(value, returns), returns)

    assert (type(value), value) == (type(rebuilt), rebuilt)


def test_a_pair_of_functions_rebuilds_anything() -> None:
    pair = (lambda colours: sorted(colours), lambda plain: {Colour(each) for each in plain})
    numbers = (lambda colours: [int(each) for each in sorted(colours)], pair[1])

    assert {Colour.RED} == from_plain(kept({Colour.RED}, numbers), numbers)


@pytest.mark.parametrize("returns", (Smaller, Larger), ids=("lost-a-field", "got-a-field"))
def test_a_result_that_does_not_fit_has_changed(returns: Any) -> None:
    """Never a `TypeError` in the view."""
    with pytest.raises(StepsChanged):
        from_plain(kept(Charge("ch_1", 5), Charge), returns)


def test_a_result_fits_a_class_that_got_a_default() -> None:
    assert Charge("ch_1") == from_plain(kept(Smaller("ch_1"), Smaller), Charge)


def test_a_pair_that_fails_has_changed_or_cannot_be_kept() -> None:
    def fail(value: Any) -> Any:
        raise KeyError(value)

    with pytest.raises(StepsChanged, match="KeyError"):
        from_plain({}, (dict, fail))
    with pytest.raises(NotStorable, match="KeyError"):
        to_plain({}, (fail, dict))


def test_another_type_than_returns_names_cannot_be_kept() -> None:
    with pytest.raises(NotStorable, match="of the type Smaller, and `returns` says Charge"):
        to_plain(Smaller("ch_1"), Charge)

"""A step compares its arguments by value, and names one that it cannot compare."""

from __future__ import annotations

from copy import copy
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal, DecimalTuple
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from dateutil.tz import tzoffset  # type: ignore[import-untyped]

from flask_idempotency.engine.keys import encode
from flask_idempotency.steps import arguments
from flask_idempotency.steps.arguments import LARGEST_ARGUMENTS, bind, comparable, former

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
LAST = datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))


def charge(card: str, amount: int = 5, *, currency: str = "EUR") -> None:
    """A function with a default and a keyword."""


def of(*args: Any, compare: tuple[str, ...] | None = None, **kwargs: Any) -> bytes:
    return comparable("charge", bind(charge, args, kwargs), compare=compare)


def test_the_way_of_passing_does_not_count() -> None:
    assert of("card", 5) == of("card") == of(amount=5, card="card") == of("card", currency="EUR")


def test_equal_values_are_equal() -> None:
    for ours, theirs in (
        (10, 10.0),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}),
        ({"$a": 1, "b": 2}, {"b": 2, "$a": 1}),
        ({"\ud800": 1, "b": 2}, {"b": 2, "\ud800": 1}),
        (Decimal("1.10"), Decimal("1.1")),
        (Decimal("0.00"), Decimal(0)),
        (Decimal("10.00"), 10),
        (Decimal("10.50"), 10.5),
        (Decimal("-1E+3"), -1000.0),
        (10**700, Decimal(10**700)),
        (NOON, NOON.astimezone(timezone(timedelta(hours=2)))),
        (NOON, NOON.astimezone(ZoneInfo("America/New_York"))),
        (NOON, NOON.astimezone(tzoffset(None, 3600))),
        ({"a": [{"b": 1.0}]}, {"a": [{"b": 1}]}),
        (LAST, (LAST - timedelta(minutes=30)).replace(tzinfo=timezone(timedelta(hours=-1, minutes=-30)))),
        (time(12, tzinfo=UTC), time(14, tzinfo=timezone(timedelta(hours=2)))),
        (time(0, 30, tzinfo=timezone(timedelta(hours=1))), time(0, tzinfo=timezone(timedelta(minutes=30)))),
        (float("-inf"), Decimal("-Infinity")),
        (float("nan"), Decimal("NaN")),
        ({1: "a", 2: "b"}, {Decimal("2.0"): "b", 1.0: "a"}),
        ({10: 1, "a": 2, (1, 2.0): 3}, {(1.0, 2): 3, "a": 2, Decimal("1E+1"): 1}),
        ({NOON: [{1: 1}]}, {NOON.astimezone(ZoneInfo("America/New_York")): ({1.0: 1.0},)}),
    ):
        assert of(ours) == of(theirs), (ours, theirs)


def test_other_values_differ() -> None:
    for ours, theirs in (
        (1, 2),
        (1, "1"),
        (1, True),
        (None, 0),
        ("", None),
        ([[1], 2], [[1, 2]]),
        ("a", b"a"),
        (1.5, 1),
        (Decimal("0.1"), 0.1),
        (Decimal("1E+9999999"), Decimal("1E+9999998")),
        (Decimal("0." + "1" * 900), Decimal("0." + "1" * 899)),
        (NOON, NOON.replace(tzinfo=None)),
        (NOON, NOON + timedelta(microseconds=1)),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), datetime.max.replace(tzinfo=UTC)),
        ({1: 2}, [[1, 2]]),
        ({1: 2}, ((1, 2),)),
        ({1: 2}, {"1": 2}),
        ({1: 2}, {True: 2}),
        ({1: "a"}, {2: "a"}),
        (time(12, tzinfo=UTC), time(12)),
        (time(12, tzinfo=UTC), time(12, tzinfo=timezone(timedelta(hours=2)))),
        (time(23, tzinfo=UTC), time(0, tzinfo=timezone(timedelta(hours=1)))),
        (time(12, tzinfo=UTC), ["time", timedelta(hours=12)]),
        (float("nan"), Decimal("sNaN")),
        (NOON.replace(2026, 10, 25, 2, fold=0, tzinfo=BERLIN), NOON.replace(2026, 10, 25, 2, fold=1, tzinfo=BERLIN)),
    ):
        assert of(ours) != of(theirs), (ours, theirs)


@pytest.mark.parametrize(
    ("value", "first", "second"),
    (
        (Decimal("10.00"), '{"$decimal":"1E+1"}', "10"),
        ([Decimal("0.00"), 2.0, Decimal("1.50")], '[0,2,{"$decimal":"1.5"}]', "[0,2,1.5]"),
        (
            NOON.astimezone(BERLIN),
            '{"$datetime":["2026-07-01T14:00:00",0,"Europe/Berlin"]}',
            '{"$datetime":["2026-07-01T12:00:00",0,0,0,0]}',
        ),
        (time(12, tzinfo=UTC), '{"$time":["12:00:00",0,0,0,0]}', '{"$time":["12:00:00",0,0,0,0]}'),
        ({2: (Decimal(3),), 1: 1}, '{"$dict":[[1,1],[2,[{"$decimal":"3"}]]]}', '{"$dict":[[1,1],[2,[3]]]}'),
        (Decimal("Infinity"), '{"$decimal":"Infinity"}', '{"$decimal":"Infinity"}'),
    ),
    ids=("number", "list", "instant", "time", "names", "infinity"),
)
def test_what_earlier_releases_recorded_is_known(value: Any, first: str, second: str) -> None:
    """The texts are what the releases before and after commit d154294e wrote."""
    given = bind(charge, (value,), {})
    recorded = [encode(b"card", text.encode()) for text in (second, first)]

    assert recorded == list(former(given, compare=("card",)))


def test_what_earlier_releases_could_not_compare_is_left_out() -> None:
    given = bind(charge, (NOON.astimezone(tzoffset(None, 3600)),), {})

    assert 1 == len(list(former(given, compare=("card",))))


def test_values_do_not_move_from_one_argument_to_another() -> None:
    assert of("a", "b") != of("b", "a")


def test_compare_names_what_counts() -> None:
    assert of("a", 5, compare=("amount",)) == of("b", 5, compare=("amount",))
    assert of("a", 5, compare=("amount",)) != of("a", 6, compare=("amount",))
    assert of("a", 5, compare=("card", "amount")) == of("a", 5, compare=("amount", "card"))
    assert b"" == of("a", compare=())


def test_a_function_without_arguments_compares_nothing() -> None:
    assert b"" == comparable("quote", bind(lambda: 1, (), {}), compare=None)


def test_what_cannot_be_compared_is_named_with_its_remedy() -> None:
    with pytest.raises(TypeError, match=r"step 'charge': its argument 'card' cannot be compared.*Pass an id.*compare="):
        of(object())


class Digits(tuple[int, ...]):
    """The digits of a number. They count how many of them are copied."""

    copied = 0

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        if isinstance(which, slice):
            Digits.copied += len(found)
            return Digits(found)
        return found


class Long(Decimal):
    """A number whose digits are counted."""

    def as_tuple(self) -> DecimalTuple:
        sign, digits, exponent = super().as_tuple()
        return DecimalTuple(sign, Digits(digits), exponent)


def test_a_long_number_costs_as_much_as_it_has_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "Decimal", Long)
    monkeypatch.setattr(Digits, "copied", 0)
    for text in ("1" + "0" * 5000, "1." + "0" * 5000, "12" * 2500 + "." + "0" * 2500):
        arguments._normal(Long(text))
        arguments._normal(Long(text), leaf=arguments._formerly_by_type)

    assert Digits.copied <= 30_000


@pytest.mark.parametrize(
    "value",
    (Decimal("1" * 131_072), Decimal("1" + "0" * 131_072), 10**131_072, "1" * 131_072, {10**131_072: 1, "a": 2}),
    ids=("decimal", "zeros", "int", "text", "name"),
)
def test_a_long_value_is_compared(value: Any) -> None:
    assert of(value) == of(copy(value)) != of(1)


def laughs(times: int = 60) -> list[Any]:
    """A list of lists, each twice what the one in it has."""
    return [] if not times else [laughs(times - 1)] * 2


@pytest.mark.parametrize(
    "value",
    (
        "x" * LARGEST_ARGUMENTS,
        b"x" * LARGEST_ARGUMENTS,
        Decimal("1" * LARGEST_ARGUMENTS),
        1 << (4 * LARGEST_ARGUMENTS),
        [0] * LARGEST_ARGUMENTS,
        [Decimal("1E+4000")] * (LARGEST_ARGUMENTS // 4000 + 1),
        [1e300] * (LARGEST_ARGUMENTS // 300),
        {"a": {"x" * LARGEST_ARGUMENTS: 1}},
        laughs(),
    ),
    ids=("text", "bytes", "decimal", "int", "list", "ten", "float", "name", "shared"),
)
def test_what_takes_too_much_is_refused_before_it_is_read(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_normal", None)
    with pytest.raises(TypeError, match=r"its argument 'card' cannot be compared.*1048576 bytes.*Pass an id"):
        of(value, compare=("card",))


def test_all_arguments_share_the_bound() -> None:
    half = "x" * (LARGEST_ARGUMENTS // 2)
    assert of(half)
    with pytest.raises(TypeError, match="1048576 bytes"):
        of(half, currency=half)
    assert of(half, currency=half, compare=("card",))


def test_what_is_not_compared_may_be_anything() -> None:
    assert of(object(), 5, compare=("amount",))


def test_compare_that_names_no_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match=r"compare names 'total', and the function has the parameters card, amount"):
        of("a", compare=("total",))


def test_compare_of_a_closure_is_refused() -> None:
    """It would compare nothing, against what its declaration says."""
    with pytest.raises(TypeError, match=r"compare names 'amount', and the function has no parameters"):
        comparable("charge", bind(lambda: 1, (), {}), compare=("amount",))


def test_arguments_that_do_not_fit_raise_as_a_call_does() -> None:
    with pytest.raises(TypeError, match="missing a required argument"):
        of()


def test_a_method_compares_without_its_object() -> None:
    class Shop:
        def charge(self, card: str) -> None:
            """A method."""

    assert bind(Shop().charge, ("a",), {}) == bind(Shop().charge, (), {"card": "a"}) == {"card": "a"}


def test_a_function_without_a_signature_has_positions() -> None:
    class Odd:
        __signature__ = "none"

        def __call__(self, *args: Any) -> None:
            """Called with anything."""

    assert {"0": 1, "1": 2} == bind(Odd(), (1, 2), {})


def test_a_partial_has_the_arguments_that_are_left() -> None:
    assert {"amount": 7, "currency": "EUR"} == bind(partial(charge, "card"), (7,), {})

"""Value classes: they behave as frozen dataclasses do, at a fraction of what those cost to import and to make."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import asdict, astuple, field, fields, replace
from math import nan
from threading import Barrier, Thread
from typing import Any, ClassVar

import pytest

from flask_idempotency.engine.values import valueclass


@valueclass(frozen=True, slots=True)
class Payment:
    KINDS: ClassVar[tuple[str, ...]] = ("card",)

    name: str
    cents: int = 0
    secret: str = field(default="", repr=False)
    note: str = field(default="", compare=False)


@valueclass(frozen=True, slots=True)
class Refund(Payment):
    reason: str = ""


@valueclass(frozen=True, slots=True, eq=True)
class Compiled:
    value: Any
    note: str = field(default="", compare=False)


@valueclass(frozen=True, slots=True)
class Nothing:
    pass


@valueclass(frozen=True, slots=True)
class One:
    value: Any


@valueclass(frozen=True, slots=True)
class Two:
    value: Any
    other: int


@valueclass(frozen=True, slots=True)
class Silent:
    key: str

    def __repr__(self) -> str:
        return "Silent(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Silent)

    def __hash__(self) -> int:
        return 7


@valueclass(frozen=True, slots=True)
class Purse:
    owner: str
    coins: list[int] = field(default_factory=list)
    cents: int = 0


@valueclass(frozen=True, slots=True)
class Strict:
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError("negative")


@valueclass(frozen=True, slots=True, kw_only=True)
class Named:
    owner: str = ""
    cents: int


@valueclass(frozen=True, slots=True, repr=False)
class Hidden:
    key: str


def test_two_with_equal_fields_are_equal() -> None:
    assert Payment("a", 1) == Payment("a", 1)
    assert Payment("a", 1) != Payment("a", 2)
    assert Payment("a", 1, "s") != Payment("a", 1, "t")
    assert Nothing() == Nothing()
    assert hash(Payment("a", 1)) == hash(Payment("a", 1))
    assert {One(1), One(1), One(2)} == {One(1), One(2)}


def test_a_field_that_is_not_compared_makes_no_difference() -> None:
    assert Payment("a", note="x") == Payment("a", note="y")
    assert hash(Payment("a", note="x")) == hash(Payment("a", note="y"))


def test_compiled_methods_do_the_same() -> None:
    assert Compiled(1, "x") == Compiled(1, "y") != Compiled(2)
    assert hash(Compiled(1, "x")) == hash(Compiled(1, "y"))
    assert repr(Compiled(1)) == "Compiled(value=1, note='')"


def test_another_class_is_never_equal() -> None:
    assert Payment("a") != Refund("a")
    assert One(("a",)).__eq__(("a",)) is NotImplemented
    assert One(1).__eq__(1) is NotImplemented
    assert Payment("a").__eq__(("a", 0, "")) is NotImplemented


def test_one_field_is_compared_as_several_are() -> None:
    """By identity, then by equality, on every Python. A dataclass does that before Python 3.13 only."""
    assert One(nan) == One(nan) != One(float("nan"))
    assert Two(nan, 1) == Two(nan, 1) != Two(float("nan"), 1)


def test_its_repr_shows_what_may_be_shown() -> None:
    assert repr(Payment("a", 1, "hunter2")) == "Payment(name='a', cents=1, note='')"
    assert repr(Refund("a", reason="r")) == "Refund(name='a', cents=0, note='', reason='r')"
    assert repr(Nothing()) == "Nothing()"
    assert "secret" not in repr(Hidden("secret"))


def test_methods_in_the_class_stay() -> None:
    assert repr(Silent("secret")) == "Silent(…)"
    assert Silent("a") == Silent("b")
    assert hash(Silent("a")) == 7


def test_it_is_a_dataclass() -> None:
    payment = Payment("a", 1)

    assert [each.name for each in fields(Payment)] == ["name", "cents", "secret", "note"]
    assert asdict(payment) == {"name": "a", "cents": 1, "secret": "", "note": ""}
    assert astuple(replace(payment, cents=2)) == ("a", 2, "", "")
    match payment:
        case Payment(name, cents):
            assert (name, cents) == ("a", 1)


def test_it_is_made_as_a_dataclass_is() -> None:
    assert [*inspect.signature(Purse).parameters] == ["owner", "coins", "cents"]
    assert Purse("a").coins is not Purse("a").coins
    assert Purse("a", [1], cents=2) == Purse(owner="a", coins=[1], cents=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'owner'"):
        Purse()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'coin'"):
        Purse("a", coin=1)  # type: ignore[call-arg]


def test_it_may_look_at_its_fields_when_it_is_made() -> None:
    assert Strict(1).value == 1
    with pytest.raises(ValueError, match="negative"):
        Strict(-1)


def test_fields_may_be_given_by_name_only() -> None:
    assert Named(cents=2).owner == ""
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Named("a", cents=2)  # type: ignore[call-arg]


def test_threads_that_make_the_first_ones_make_equal_ones() -> None:
    for _ in range(20):
        fresh: Any = valueclass(frozen=True, slots=True)(type("Fresh", (), {"__annotations__": {"value": "int"}}))
        barrier, made = Barrier(4), list[Any]()

        def make(fresh: Any = fresh, barrier: Barrier = barrier, made: list[Any] = made) -> None:
            barrier.wait(60)
            made.append(fresh(7))

        threads = [Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [each.value for each in made] == [7] * 4


def test_it_has_slots_and_can_be_copied() -> None:
    payment = Refund("a", 1, reason="r")

    assert not hasattr(payment, "__dict__")
    assert copy.copy(payment) == copy.deepcopy(payment) == pickle.loads(pickle.dumps(payment)) == payment  # noqa: S301


@pytest.mark.parametrize("options", ({"frozen": False, "slots": True}, {"frozen": True, "slots": False}))
def test_mypy_and_python_must_mean_the_same_class(options: dict[str, bool]) -> None:
    make: Any = valueclass

    with pytest.raises(TypeError, match="frozen and has slots"):
        make(**options)

"""What goes wrong around steps over HTTP: misuse is told before an effect, and a result that is odd costs none."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from flask_idempotency import Step, current_claim
from flask_idempotency.engine.errors import NotStorable
from tests.web.test_steps import Shop


@dataclass
class Charge:
    """What a provider returns."""

    id: str


def broken_charge() -> Charge:
    """A result whose own attributes cannot be read."""
    charge = Charge("ch_1")
    del charge.id
    return charge


def elsewhere() -> datetime:
    """A time in a zone that has a name, and that no other host knows by it."""
    header = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    zone = ZoneInfo.from_file(BytesIO(header + bytes(6) + b"UTC\0"), key="Home/Sweet_Home")
    return datetime(2026, 1, 1, 12, tzinfo=zone)


ODD = {
    "attribute": (broken_charge, Charge),
    "time zone": (elsewhere, None),
    "long int": (lambda: 10**640, None),
    "function": (lambda: 1, (lambda value: {}[value], lambda plain: plain)),
    "way back": (lambda: 1, (lambda value: value, lambda plain: {}[plain])),
}


@pytest.fixture
def short_ints() -> Iterator[None]:
    """The strictest limit of Python for decimal ints, which a deployment may set."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("short_ints")
@pytest.mark.parametrize("name", ODD)
def test_a_result_that_cannot_be_written_or_read_back_does_not_fail_the_request(name: str) -> None:
    """The card is charged: whatever is odd about the result must not leave that in doubt."""
    made, returns = ODD[name]
    shop = Shop(testing=False)

    def charge() -> Any:
        shop.run("charge")
        return made()

    def checkout() -> Any:
        current_claim.step("charge", charge)
        current_claim.step("ship", shop.run, "ship")
        return {}, 201

    shop.view(checkout, steps=(Step("charge", returns=returns), "ship"))

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert {"charge": 1, "ship": 1} == shop.ran


def test_in_tests_an_odd_result_raises_and_counts_as_done() -> None:
    shop = Shop()

    def checkout() -> Any:
        current_claim.step("charge", broken_charge)
        return {}, 201

    shop.view(checkout, steps=(Step("charge", returns=Charge),))
    with pytest.raises(NotStorable, match="AttributeError") as raised:
        shop.post()

    assert isinstance(raised.value.__cause__, AttributeError)


def test_an_interrupt_while_a_result_is_written_leaves_the_step_in_doubt() -> None:
    shop = Shop()

    def interrupt(value: Any) -> Any:
        raise KeyboardInterrupt

    def checkout() -> Any:
        try:
            current_claim.step("charge", shop.run, "charge")
        except KeyboardInterrupt:
            current_claim.step("ship", shop.run, "ship")  # no step of before is open
            return {}, 503
        return {}, 201

    shop.view(checkout, steps=(Step("charge", returns=(interrupt, interrupt)), "ship"))

    assert [503, 409] == [shop.post().status_code, shop.post().status_code]
    assert {"charge": 1, "ship": 1} == shop.ran


@pytest.mark.parametrize(
    "step",
    (Step("mail"), Step("mail", effects="pure"), Step("mail", effects="deduplicated", intent=False)),
    ids=("plain", "pure", "without intent"),
)
def test_an_item_that_is_too_long_is_refused_before_the_step_runs(step: Step) -> None:
    shop = Shop()
    shop.view(lambda: (current_claim.step(("mail", "x" * 2000), shop.run, "mail"), 201), steps=(step,))
    with pytest.raises(TypeError, match="1024 are allowed"):
        shop.post()

    assert not shop.ran


def test_a_point_of_no_return_beside_steps_is_refused() -> None:
    """The next step that finishes would take its mark back, and a retry would pass it twice."""
    shop = Shop()

    def checkout() -> Any:
        current_claim.point_of_no_return()
        return shop.run("effect", {}), 201

    shop.view(checkout, steps=("charge",))
    with pytest.raises(RuntimeError, match="takes steps"):
        shop.post()

    assert not shop.ran

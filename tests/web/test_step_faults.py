"""What goes wrong around steps over HTTP: misuse raises before an effect, and an odd result loses none."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import sync_to_async
from flask import Flask, Response, after_this_request

from flask_idempotency import Step, current_claim, current_step, durable_step, idempotent
from flask_idempotency.engine.ending import work_here
from flask_idempotency.engine.errors import ConfigurationError, NotStorable, StoreUnavailable
from tests.web.test_steps import Declined, Shop, release


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


ODD: dict[str, tuple[Any, Any]] = {
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


def unavailable(*args: Any, **kwargs: Any) -> None:
    raise StoreUnavailable("the test cut it off")


def test_the_first_of_many_errors_of_gathered_steps_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gather` raises the first one, and the others come after it."""
    shop = Shop(testing=False)
    monkeypatch.setattr(shop.store.journals, "write", unavailable)

    async def run(name: str) -> None:
        shop.run(name)

    async def checkout() -> Any:
        await asyncio.gather(*(current_claim.step(name, run, name) for name in "abc"))
        return {}, 201

    shop.view(checkout, steps=tuple("abc"))
    answer = shop.post()

    assert (503, "request-paused") == (answer.status_code, answer.get_json()["code"])
    assert not shop.ran


def test_a_request_that_takes_too_long_is_paused_and_says_so() -> None:
    """Its claim is not lost: `outcome-unknown` would send its client to a person."""
    shop = Shop(testing=False)
    slow = iter((1e6, 0.0))

    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge")
        claim = work_here().claim  # type: ignore[union-attr]
        claim._requested_at -= next(slow)  # type: ignore[union-attr]
        current_claim.step("ship", shop.run, "ship")
        return {}, 201

    shop.view(checkout, steps=("charge", "ship"))
    late, retried = shop.post(), shop.post()

    assert (503, "request-paused") == (late.status_code, late.get_json()["code"])
    assert "paused" == late.headers["Idempotency-Status"]
    assert late.headers["Retry-After"]
    assert 201 == retried.status_code
    assert {"charge": 1, "ship": 1} == shop.ran


def test_an_outage_beside_a_step_in_doubt_promises_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(testing=False)

    def charge() -> None:
        shop.run("charge")
        monkeypatch.setattr(shop.store.journals, "write", unavailable)
        raise TimeoutError

    def checkout() -> Any:
        with suppress(TimeoutError):
            current_claim.step("charge", charge)
        current_claim.step("ship", shop.run, "ship")
        return {}, 201

    shop.view(checkout, steps=("charge", "ship"))
    answer, retried = shop.post(), shop.post()

    assert (409, "outcome-unknown") == (answer.status_code, answer.get_json()["code"])
    assert 409 == retried.status_code
    assert {"charge": 1} == shop.ran


def test_a_mistake_in_the_application_is_no_answer_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with writes of its own before a transactional step, say: its developer must see that."""
    shop = Shop()
    monkeypatch.setattr(shop.store.journals, "write", misconfigured)
    shop.view(lambda: (current_claim.step("save", shop.run, "save"), 201), steps=("save",))

    with pytest.raises(ConfigurationError, match="write them in it"):
        shop.post()
    assert not shop.ran


def misconfigured(*args: Any, **kwargs: Any) -> None:
    raise ConfigurationError("these rows do not belong to the step: write them in it")


def hooked_shop(where: str, hook: Callable[[], Any], **policy: Any) -> Shop:
    """An endpoint with steps, and a function that runs before its view."""
    app = Flask("shop")
    match where:
        case "before init_app":
            app.before_request(hook)
        case "before init_app, async":

            @app.before_request
            async def hooked() -> None:
                hook()

        case "url_value_preprocessor":
            app.url_value_preprocessor(lambda endpoint, values: hook())
    shop = Shop(app)
    if where == "after init_app":
        app.before_request(hook)
    if where == "first of all":
        app.before_request_funcs.setdefault(None, []).insert(0, hook)
    shop.view(lambda: ({"paid": True}, 201), steps=("charge",), **policy)
    return shop


@pytest.mark.parametrize(
    "where",
    ("before init_app", "before init_app, async", "first of all", "url_value_preprocessor", "after init_app"),
)
def test_a_step_before_the_claim_is_refused(where: str) -> None:
    """A hook also runs on replays and refusals, and there is no claim yet that could remember the step."""
    ran: list[str] = []

    def hook() -> None:
        current_claim.step("charge", ran.append, "charge")

    shop = hooked_shop(where, hook)
    with pytest.raises(RuntimeError, match="before the key"):
        shop.post()

    assert not ran


def test_a_step_in_a_hook_of_a_closed_endpoint_is_refused() -> None:
    """It answers 500 to every request, and the hook would charge each time."""
    ran: list[str] = []

    def hook() -> None:
        with suppress(RuntimeError):
            current_claim.step("charge", ran.append, "charge")

    shop = hooked_shop("before init_app", hook, on_abandoned="takeover")

    assert "misconfigured" == shop.post().get_json()["code"]
    assert not ran


def test_a_step_in_a_hook_of_a_request_that_needs_no_key_just_runs() -> None:
    ran: list[str] = []
    shop = hooked_shop("before init_app", lambda: current_claim.step("charge", ran.append, "charge"), required=False)

    assert 201 == shop.app.test_client().post("/checkout", json={}).status_code
    assert ["charge"] == ran


@pytest.mark.parametrize("replayed", (False, True))
def test_a_step_in_a_hook_after_the_view_is_refused(replayed: bool) -> None:
    shop = Shop()
    shop.view(lambda: ({}, 201), steps=("charge",))
    if replayed:
        shop.post()
    hooked = release_with_hook(shop)
    with pytest.raises(RuntimeError, match="on replays too"):
        hooked.post()

    assert not shop.ran


def release_with_hook(shop: Shop) -> Shop:
    later = release(shop, lambda: ({}, 201), steps=("charge",))

    @later.app.after_request
    def charge(response: Any) -> Any:
        current_claim.step("charge", shop.run, "charge")
        return response

    return later


def test_a_step_in_after_this_request_is_one_of_the_view() -> None:
    shop = Shop()

    def checkout() -> Any:
        @after_this_request
        def charge(response: Any) -> Any:
            current_claim.step("charge", shop.run, "charge")
            return response

        return {}, 201

    shop.view(checkout, steps=("charge",))

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert {"charge": 1} == shop.ran


def nothing_then_finished() -> None:
    with current_claim.manual_step("charge") as step:
        step.nothing_done()
        step.finish("ch_1")


def nothing_twice() -> None:
    with current_claim.manual_step("charge") as step:
        step.nothing_done()
        step.nothing_done()


def outside_its_block() -> None:
    current_claim.manual_step("charge").finish("ch_1")


def behind_its_block() -> None:
    with current_claim.manual_step("charge") as step:
        pass
    step.finish("ch_1")


@pytest.mark.parametrize("misuse", (nothing_then_finished, nothing_twice, outside_its_block, behind_its_block))
def test_a_call_of_a_manual_step_that_records_nothing_raises(misuse: Callable[[], None]) -> None:
    """Its code believes that the effect is recorded, and the retry would make it again."""
    shop = Shop()

    def checkout() -> Any:
        misuse()
        return {}, 201

    shop.view(checkout, steps=("charge",))
    with pytest.raises(RuntimeError, match="records nothing here"):
        shop.post()


def test_a_generator_cannot_be_carried() -> None:
    """Its body would run without the claim, and its steps with it."""
    shop = Shop()

    def charges() -> Iterator[Any]:
        yield current_claim.step("charge", shop.run, "charge")

    shop.view(lambda: (list(current_claim.carry(charges)()), 201), steps=("charge",))
    with pytest.raises(TypeError, match="generator"):
        shop.post()

    assert not shop.ran


def taking(shop: Shop, order: list[list[str]], *, gathered: bool) -> Callable[[], Any]:
    """An async view that takes its steps by sync functions: in each attempt these, and the first attempt fails."""

    def run(name: str) -> None:
        current_claim.step(name, shop.run, name)

    async def checkout() -> Any:
        names = order.pop(0)
        if gathered:
            await asyncio.gather(*(sync_to_async(run)(name) for name in names))
        else:
            for name in names:
                await sync_to_async(run)(name)
        return {}, 503 if order else 201

    return checkout


def test_sync_functions_that_are_gathered_have_no_order() -> None:
    """They run in the view's own thread, one after the other; and which one is first, chance says."""
    shop = Shop()
    shop.view(taking(shop, [["a", "b"], ["c", "b", "a"]], gathered=True), steps=tuple("abc"))

    assert [503, 201] == [shop.post().status_code, shop.post().status_code]
    assert {"a": 1, "b": 1, "c": 1} == shop.ran


def test_sync_functions_of_an_async_view_have_its_order() -> None:
    shop = Shop()
    shop.view(taking(shop, [["card"], ["balance", "card"]], gathered=False), steps=("card", "balance"))

    assert [503, 409] == [shop.post().status_code, shop.post().status_code]
    assert {"card": 1} == shop.ran


def test_a_step_that_is_passed_to_step_is_refused_before_it_begins() -> None:
    """It would nest, which shows in the function: a plain step would be in doubt."""
    shop = Shop()
    charge = durable_step("charge")(lambda: shop.run("charge"))
    shop.view(lambda: (current_claim.step("charge", charge), 201), steps=(charge,))
    with pytest.raises(TypeError, match="a step itself"):
        shop.post()
    release(shop, lambda: (charge() or {}, 201), steps=(charge,)).post()

    assert {"charge": 1} == shop.ran


@pytest.mark.parametrize("keyed", (True, False))
def test_a_step_may_send_a_request_that_takes_steps(keyed: bool) -> None:
    """It has another claim, or none: its steps are not inside of that one."""
    shop = Shop()

    @shop.app.post("/ship")
    @idempotent(steps=("pack", "ship"))
    def ship() -> Any:
        current_claim.step("pack", shop.run, "pack")
        return {"parcel": current_claim.step("ship", shop.run, "ship", 7)}, 201

    def order() -> Any:
        headers = {"Idempotency-Key": current_step.downstream_key} if keyed else {}
        return shop.app.test_client().post("/ship", headers=headers).get_json()["parcel"]

    shop.view(lambda: ({"parcel": current_claim.step("order", order)}, 201), steps=("order",))

    assert {"parcel": 7} == shop.post().get_json() == shop.post().get_json()
    assert {"pack": 1, "ship": 1} == shop.ran


@pytest.mark.parametrize("doubtful", (True, False))
def test_a_streamed_failure_says_that_it_is_paused(doubtful: bool) -> None:
    shop = Shop()

    def charge() -> None:
        shop.run("charge")
        if doubtful:
            raise TimeoutError

    def checkout() -> Any:
        with suppress(TimeoutError):
            current_claim.step("charge", charge)
        return Response(iter(("l", "ater")), 503)

    shop.view(checkout, steps=("charge",))
    failed = shop.post()

    assert (503, "later") == (failed.status_code, failed.text)
    assert (None if doubtful else "paused") == failed.headers.get("Idempotency-Status")
    assert (409 if doubtful else 503) == shop.post().status_code


@pytest.mark.parametrize(
    "policy", ({"keep_statuses": [503]}, {"decide": lambda response, error: "keep"}), ids=("status", "decide")
)
def test_an_outage_pauses_whatever_the_policy_says_of_errors(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    """The response is ours and not the view's: kept, it would be the end of a request that stopped half-way."""
    shop = Shop()

    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge")
        with monkeypatch.context() as patched:
            if current_claim.attempt == 1:
                patched.setattr(shop.store.journals, "write", unavailable)
            current_claim.step("save", shop.run, "save")
        return {}, 201

    shop.view(checkout, steps=("charge", "save"), **policy)

    assert [503, 201] == [shop.post().status_code, shop.post().status_code]
    assert {"charge": 1, "save": 1} == shop.ran


def test_a_journal_that_cannot_be_read_lets_no_request_run_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim was granted: past it, the charge would be made again."""
    shop = Shop()
    shop.view(checkout_of(shop, iter((503, 201))), steps=("charge",), on_store_down="allow")
    paused = shop.post()
    with monkeypatch.context() as patched:
        patched.setattr(shop.store.journals, "recall", unavailable)
        away = shop.post()

    assert (503, "paused") == (paused.status_code, paused.headers["Idempotency-Status"])
    assert (503, "store-unavailable") == (away.status_code, away.get_json()["code"])
    assert {"charge": 1} == shop.ran


def checkout_of(shop: Shop, statuses: Iterator[int]) -> Callable[[], Any]:
    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge")
        return {}, next(statuses)

    return checkout


def test_nothing_that_error_trackers_see_of_a_claim_names_an_item_or_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """They send the values of local variables to other services."""
    shop = Shop()
    seen: list[str] = []

    def look(*args: Any, **kwargs: Any) -> None:
        claim = work_here().claim  # type: ignore[union-attr]
        records = claim.steps._records  # type: ignore[union-attr]
        seen.append(repr([claim, claim.steps, records, [list(each.unsent.values()) for each in records], kwargs]))  # type: ignore[union-attr]
        raise StoreUnavailable("the test cut it off")

    def checkout() -> Any:
        current_claim.step(("quote", "line-77"), lambda: "secret-result")
        monkeypatch.setattr(shop.store.journals, "write", look)
        return current_claim.step(("charge", "line-78"), shop.run, "charge"), 201

    shop.view(checkout, steps=(Step("quote", effects="pure"), "charge"))

    assert 503 == shop.post().status_code
    assert seen
    assert not any(name in seen[0] for name in ("line-7", "secret-result"))


@pytest.mark.parametrize("effects", ("transactional", "deduplicated", "pure"))
def test_a_step_that_is_listed_as_another_kind_is_refused(effects: Any) -> None:
    """Its name alone lists a plain step: the rows of a transactional one would not be committed."""
    shop = Shop()
    save = durable_step("save", effects=effects)(lambda: shop.run("save"))
    shop.view(lambda: (save() or {}, 201), steps=("save",))
    with pytest.raises(RuntimeError, match="List the decorated function itself"):
        shop.post()

    assert not shop.ran


def test_a_step_that_is_listed_by_its_former_name_too_is_refused() -> None:
    """Its name alone says nothing of the former one, and the step of an earlier release would run again."""
    shop = Shop()
    save = durable_step("save", was="store")(lambda: shop.run("save"))
    shop.view(lambda: (save() or {}, 201), steps=("save",))
    with pytest.raises(RuntimeError, match="was='store'"):
        shop.post()

    assert not shop.ran


def test_a_name_alone_leaves_the_rest_to_the_decorator() -> None:
    """Exceptions that are harmless there, what is compared, and what rebuilds the result."""
    shop = Shop()
    answers: Iterator[Charge | Declined] = iter((Declined(), Charge("ch_1")))

    @durable_step("charge", harmless=(Declined,), returns=Charge, compare=())
    def charge(attempt: int) -> Charge:
        shop.run("charge")
        answer = next(answers)
        if isinstance(answer, Declined):
            raise answer
        return answer

    def checkout() -> Any:
        try:
            paid = charge(current_claim.attempt)
        except Declined:
            return {}, 503
        return {"paid": paid.id}, 201 if shop.ran["view"] else 503

    shop.view(checkout, steps=("charge",))
    declined, failed = shop.post(), shop.post()
    shop.run("view")
    done = shop.post()

    assert [503, 503, 201] == [each.status_code for each in (declined, failed, done)]
    assert {"paid": "ch_1"} == done.get_json()
    assert 2 == shop.ran["charge"]

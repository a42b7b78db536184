"""Durable steps over HTTP: a retry goes on after the finished steps, or no retry goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import permutations, product
from threading import Barrier, Thread
from typing import Any
from uuid import UUID

import pytest
from flask import Flask, stream_with_context
from marshmallow import ValidationError as MarshmallowError
from requests.exceptions import JSONDecodeError as RequestsJSONDecodeError
from sqlalchemy.exc import OperationalError
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, current_claim, current_step, durable_step
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.errors import NotStorable, StoreUnavailable
from flask_idempotency.stores.memory import MemoryStore


class Declined(Exception):
    """A card that the bank refuses: nothing happened."""


class Killed(BaseException):
    """The worker dies here."""


class Shop:
    """An application, its store, and how often each function ran."""

    def __init__(self, app: Flask | None = None, **config: Any) -> None:
        self.app = Flask("shop") if app is None else app
        self.app.testing = config.pop("testing", True)
        self.store = MemoryStore()
        self.ran: Counter[str] = Counter()
        self.extension = Idempotency(self.app, store=self.store, secret="s-9f2c47d1e8b35a60", **config)

    def post(self, key: str = "k", path: str = "/checkout", body: Any = None) -> TestResponse:
        return self.app.test_client().post(path, json=body or {"cart": 1}, headers={"Idempotency-Key": key})

    def view(self, function: Callable[[], Any], **policy: Any) -> None:
        """Serve this function at /checkout, in the place of an earlier release's."""
        from flask_idempotency import idempotent

        view = idempotent(**{"required": True, **policy})(function)
        self.app.add_url_rule("/checkout", "checkout", view, methods=["POST"])

    def run(self, name: str, result: Any = None) -> Any:
        self.ran[name] += 1
        return result


def release(shop: Shop, function: Callable[[], Any], **policy: Any) -> Shop:
    """Deploy another release on the same store."""
    later = Shop.__new__(Shop)
    later.app, later.store, later.ran = Flask("shop"), shop.store, shop.ran
    later.app.testing = shop.app.testing
    later.extension = Idempotency(later.app, store=shop.store, secret="s-9f2c47d1e8b35a60")
    later.view(function, **policy)
    return later


def test_an_error_before_the_view_leaves_the_key_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a module that an upgrade has taken away under a running worker. Nothing has happened."""
    shop = Shop(testing=False)
    shop.view(lambda: (current_claim.step("charge", shop.run, "charge", {}), 201), steps=("charge",))
    with monkeypatch.context() as patched:
        patched.setattr(Claim, "begin_steps", lambda claim, rules: import_module("flask_idempotency.gone"))
        assert 500 == shop.post().status_code

    assert (201, 1) == (shop.post().status_code, shop.ran["charge"])


def test_each_attempt_dies_after_one_step() -> None:
    """Case 9."""
    shop = Shop()
    alive = {"steps": 0}

    def checkout() -> Any:
        for number, name in enumerate(("a", "b", "c")):
            current_claim.step(name, shop.run, name)
            if number == alive["steps"]:
                alive["steps"] += 1
                raise Killed
        return {"attempt": current_claim.attempt}, 201

    shop.view(checkout, steps=("a", "b", "c"))
    for _ in range(3):
        with pytest.raises(Killed):
            shop.post()
    last = shop.post()

    assert (201, 4) == (last.status_code, last.get_json()["attempt"])
    assert {"a": 1, "b": 1, "c": 1} == shop.ran


def paused(shop: Shop, **policy: Any) -> None:
    """Charge, and pause."""

    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge", {"id": "ch_1"})
        return {}, 503

    shop.view(checkout, steps=("charge",), **policy)
    assert "paused" == shop.post().headers["Idempotency-Status"]


def test_was_keeps_a_renamed_step() -> None:
    """Case 33."""
    shop = Shop()
    paused(shop)

    def checkout() -> Any:
        return current_claim.step("pay", shop.run, "charge", {"id": "ch_1"}), 201

    assert {"id": "ch_1"} == release(shop, checkout, steps=(Step("pay", was="charge"),)).post().json
    assert {"charge": 1} == shop.ran


def test_a_recorded_effect_that_was_not_asked_for_keeps_no_response() -> None:
    shop = Shop()
    paused(shop)
    stopped = release(shop, lambda: ({}, 201), steps=("charge",)).post()

    assert (409, "outcome-unknown") == (stopped.status_code, stopped.get_json()["code"])


ORDER = UUID("0f8fad5b-d9cb-469f-a165-70867728950e")
OTHER_ITEMS = ((None, 7), (7, None), (7, "7"), ("7", 7), (ORDER, str(ORDER)), (str(ORDER), ORDER))
"""The item of one call, and that of another which is no second step of this name: without one, or printed the same."""


@pytest.mark.parametrize(("first", "then"), OTHER_ITEMS)
@pytest.mark.parametrize("effects", ("plain", "deduplicated", "pure"))
def test_a_step_that_has_got_or_lost_its_item_is_noticed_before_it_runs(effects: Any, first: Any, then: Any) -> None:
    shop = Shop()

    def checkout(item: Any, status: int) -> Any:
        current_claim.step("ship", shop.run, "ship")
        current_claim.step("charge" if item is None else ("charge", item), shop.run, "charge")
        return {}, status

    steps = (Step("charge", effects=effects), "ship")
    shop.view(lambda: checkout(first, 503), steps=steps)
    assert "paused" == shop.post().headers["Idempotency-Status"]
    stopped = release(shop, lambda: checkout(then, 201), steps=steps).post()

    assert (409, "outcome-unknown") == (stopped.status_code, stopped.get_json()["code"])
    assert {"charge": 1, "ship": 1} == shop.ran


@pytest.mark.parametrize(("first", "then"), OTHER_ITEMS)
def test_one_attempt_takes_a_step_with_items_or_without_and_no_two_that_print_alike(first: Any, then: Any) -> None:
    shop = Shop()
    refusals: list[BaseException] = []

    def checkout() -> Any:
        for item in (first, then):
            try:
                current_claim.step("mail" if item is None else ("mail", item), shop.run, "mail")
            except RuntimeError as error:
                refusals.append(error)
        return {}, 201

    shop.view(checkout, steps=(Step("mail", effects="deduplicated", intent=False),))
    assert 201 == shop.post().status_code

    assert {"mail": 1} == shop.ran
    assert ["item" in str(error) for error in refusals] == [True]


def test_items_that_print_differently_are_several_steps() -> None:
    shop = Shop()
    items = (7, "07", "+7", " 7", "٧", "7.0", -7, ORDER, str(ORDER).upper(), ORDER.hex, "", 2**2049, "9" * 1000)

    def checkout() -> Any:
        for item in items:
            current_claim.step(("mail", item), shop.run, "mail")
        return {}, 201

    shop.view(checkout, steps=("mail",))
    assert 201 == shop.post().status_code
    assert {"mail": len(items)} == shop.ran


def test_other_arguments_hold_the_request() -> None:
    shop = Shop()
    paused(shop)

    def checkout() -> Any:
        return current_claim.step("charge", shop.run, "charge", {"id": "ch_2"}), 201

    assert 409 == release(shop, checkout, steps=("charge",)).post().status_code
    assert {"charge": 1} == shop.ran


def gather(first: str, order: Sequence[str]) -> None:
    """Complete one step, pause, and gather all three in this order."""
    shop = Shop()

    async def act(name: str) -> str:
        return str(shop.run(name, name))

    def checkout() -> Any:
        async def together() -> list[Any]:
            return await asyncio.gather(*(current_claim.step(name, act, name) for name in order))

        if not shop.ran:
            asyncio.run(current_claim.step(first, act, "a"))
            return {}, 503
        return sorted(asyncio.run(together())), 201

    steps = tuple(Step(name, compare=()) for name in "abc")
    shop.view(checkout, steps=steps)

    assert 503 == shop.post().status_code
    assert 201 == shop.post().status_code
    assert 3 == shop.ran.total()


def test_gathered_steps_have_no_order() -> None:
    """Case 39 (dbos-transact-py #688)."""
    for first, order in product("abc", permutations("abc")):
        gather(first, order)


def test_in_tests_a_large_result_raises() -> None:
    """Case 45."""
    shop = Shop()
    shop.view(lambda: (current_claim.step("charge", lambda: "x" * 65 * 1024), 201), steps=("charge",))

    with pytest.raises(NotStorable, match=r"cannot be kept: it takes 66562 bytes\. One result has at most 65536"):
        shop.post()


@dataclass
class Charge:
    id: str
    amount: int = 0


class Away(Exception):
    """A library's own error of a lost connection."""


PASSING = (
    ConnectionResetError(),
    OperationalError("SELECT 1", {}, Exception("server closed the connection")),
    RequestsJSONDecodeError("no JSON", "<html>", 0),
    StoreUnavailable("frozen"),
    Away(),
    RuntimeError("the pool is empty"),
)


@pytest.mark.parametrize(
    ("error", "fails", "is_manual"),
    (
        *((error, (1,), False) for error in PASSING),
        *product((TimeoutError(),), ((1,), (2,), (1, 2, 3)), (False, True)),
    ),
    ids=str,
)
def test_a_result_that_cannot_be_rebuilt_for_a_moment_pauses(
    error: Exception, fails: tuple[int, ...], is_manual: bool
) -> None:
    shop = Shop()

    def rebuild(plain: str) -> Charge:
        shop.ran["rebuilt"] += 1
        if shop.ran["rebuilt"] in fails:
            raise error
        return Charge(plain)

    def checkout() -> Any:
        if is_manual:
            with current_claim.manual_step("charge") as step:
                charge = step.result if step.done else step.finish(shop.run("charge", Charge("ch_1")))
        else:
            charge = current_claim.step("charge", shop.run, "charge", Charge("ch_1"))
        return {"id": charge.id}, 503 if shop.ran["rebuilt"] == 1 else 201

    shop.view(checkout, steps=(Step("charge", returns=(lambda charge: charge.id, rebuild), compare=()),))
    answers = [shop.post() for _ in range(max(fails) + 1)]

    for number, answer in enumerate(answers, 1):
        if number in fails:
            assert (503, "request-paused") == (answer.status_code, answer.get_json()["code"])
            assert answer.headers["Retry-After"]
    assert (201, {"id": "ch_1"}) == (answers[-1].status_code, answers[-1].get_json())
    assert 1 == shop.ran["charge"]


@pytest.mark.parametrize(
    "error",
    (KeyError("id"), ValueError("no Charge"), MarshmallowError("no Charge")),
    ids=lambda error: type(error).__name__,
)
def test_a_result_that_a_pair_refuses_holds_the_request(error: Exception) -> None:
    shop = Shop()

    def rebuild(plain: str) -> Charge:
        shop.ran["rebuilt"] += 1
        if shop.ran["rebuilt"] > 1:
            raise error
        return Charge(plain)

    pair = (lambda charge: charge.id, rebuild)
    shop.view(
        lambda: ({"id": current_claim.step("charge", Charge, "ch_1").id}, 503), steps=(Step("charge", returns=pair),)
    )

    assert [503, 409] == [shop.post().status_code, shop.post().status_code]


def test_an_outage_before_a_step_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view lets our error through, in testing mode too."""
    shop = Shop()
    away = {"now": True}
    write = shop.store.journals.write

    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge")
        if away["now"]:
            monkeypatch.setattr(shop.store.journals, "write", unavailable)
        current_claim.step("ship", shop.run, "ship")
        return {}, 201

    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise StoreUnavailable("frozen")

    shop.view(checkout, steps=("charge", "ship"))
    answer = shop.post()
    away["now"] = False
    monkeypatch.setattr(shop.store.journals, "write", write)

    assert (503, "request-paused") == (answer.status_code, answer.get_json()["code"])
    assert answer.headers["Retry-After"]
    assert {"charge": 1} == shop.ran


def test_steps_of_a_decorated_function() -> None:
    """Case 53 is in tests/codec: here each item is a step, with its own downstream key."""
    shop = Shop()
    seen: list[tuple[str, Any, int, str]] = []

    @durable_step("mail", effects="deduplicated", item="line_id")
    def mail(line_id: int) -> int:
        seen.append((current_step.name, current_step.item, current_step.attempt, current_step.downstream_key))
        return line_id

    shop.view(lambda: ([mail(1), mail(2)], 201), steps=(mail,))

    assert [1, 2] == shop.post().json
    assert [("mail", 1, 1), ("mail", 2, 1)] == [each[:3] for each in seen]
    assert 2 == len({each[3] for each in seen})


def test_without_a_claim_a_step_just_runs() -> None:
    keys = []

    @durable_step("charge")
    def charge() -> str:
        keys.append(current_step.downstream_key)
        return "done"

    assert "done" == charge() == charge()
    assert 2 == len(set(keys))
    assert not current_step
    with pytest.raises(RuntimeError, match="does not run in the function of a step"):
        current_step.name  # noqa: B018 - it raises


def test_without_a_claim_an_awaitable_that_a_function_returns_runs_in_its_step() -> None:
    """`inspect` takes a partial of a method, or an object with an async `__call__`, for no coroutine function."""

    class Charge:
        async def __call__(self) -> tuple[str, int]:
            return current_step.name, len(current_step.downstream_key)

    async def work() -> Any:
        return await current_claim.step("charge", Charge())

    assert ("charge", 52) == asyncio.run(work())
    assert not current_step


@pytest.mark.parametrize("declared", (("other",), ()), ids=("another", "none"))
def test_an_undeclared_step_is_refused_before_it_runs(declared: tuple[str, ...]) -> None:
    shop = Shop()
    shop.view(lambda: (current_claim.step("charge", shop.run, "charge"), 201), steps=declared)

    with pytest.raises(RuntimeError, match="charge"):
        shop.post()
    assert not shop.ran


def test_generators_and_nested_steps_are_refused() -> None:
    shop = Shop()

    def inner() -> Any:
        return current_claim.step("b", shop.run, "b")

    shop.view(lambda: (current_claim.step("a", inner), 201), steps=(Step("a", effects="deduplicated"), "b"))
    with pytest.raises(RuntimeError, match="do not nest"):
        shop.post()
    with pytest.raises(TypeError, match="generator"):
        durable_step("c")(lambda: (yield))
    for kind in (staticmethod, classmethod):
        with pytest.raises(TypeError, match=f"below @{kind.__name__}"):
            durable_step("c")(kind(inner))  # type: ignore[arg-type]
    assert not shop.ran


def test_a_plain_step_that_returns_a_generator_has_run_and_is_in_doubt() -> None:
    """What the function did before it returned cannot be known."""
    shop = Shop()

    def charge() -> Any:
        shop.run("charge")
        return (each for each in "ab")

    shop.view(lambda: (list(current_claim.step("charge", charge)), 201), steps=("charge",))
    with pytest.raises(TypeError, match="returned a generator"):
        shop.post()

    assert 409 == shop.post().status_code
    assert {"charge": 1} == shop.ran


def test_threads_take_steps_under_the_claim() -> None:
    shop = Shop()

    def checkout() -> Any:
        with ThreadPoolExecutor(2) as pool:
            act = current_claim.carry(lambda name: current_claim.step(name, shop.run, name, name))
            return sorted(pool.map(act, ("a", "b"))), 201

    shop.view(checkout, steps=("a", "b"))

    assert ["a", "b"] == shop.post().json
    assert () == shop.store.journals.walk(limit=10).answers  # a completed request has no journal


def test_a_manual_step_passes_what_is_done() -> None:
    shop = Shop()
    statuses = iter((503, 201))

    def checkout() -> Any:
        with current_claim.manual_step("charge") as step:
            if not step.done:
                shop.run("charge")
                step.finish({"id": "ch_1"})
        return step.result, next(statuses)

    shop.view(checkout, steps=("charge",))

    assert ["ch_1", "ch_1"] == [shop.post().get_json()["id"], shop.post().get_json()["id"]]
    assert {"charge": 1} == shop.ran


def test_a_manual_step_that_is_left_is_in_doubt() -> None:
    shop = Shop()

    def checkout() -> Any:
        with current_claim.manual_step("charge"):
            pass
        return {}, 503

    shop.view(checkout, steps=("charge",))

    assert [503, 409] == [shop.post().status_code, shop.post().status_code]


@pytest.mark.parametrize("wrapped", (stream_with_context, iter), ids=("request context", "no context"))
def test_a_step_in_a_stream_is_refused(wrapped: Callable[[Any], Any]) -> None:
    """Without a request there is no claim to record it, and with the next attempt it would run once more."""
    shop = Shop()
    errors: list[str] = []

    def checkout() -> Any:
        def body() -> Any:
            try:
                current_claim.step("charge", shop.run, "charge")
            except RuntimeError as error:
                errors.append(str(error))
            yield "x"

        return wrapped(body())

    shop.view(checkout, steps=("charge",))
    shop.post()

    assert "stream" in errors[0]
    assert not shop.ran


def test_waiting_duplicates_resume_a_pause() -> None:
    """Case 19."""
    shop = Shop(max_waiters=64)
    everybody = Barrier(16)
    entered = iter((503,))

    def checkout() -> Any:
        current_claim.step("charge", shop.run, "charge")
        return {}, next(entered, 201)

    shop.view(checkout, steps=("charge",), in_flight="wait", wait=30.0)
    answers: list[TestResponse] = []

    def ask() -> None:
        everybody.wait(60)
        answer = shop.post()
        while answer.status_code == 409:  # every slot for waiting was taken
            answer = shop.post()
        answers.append(answer)

    threads = [Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [201] * 15 + [503] == sorted(answer.status_code for answer in answers)
    assert {"charge": 1} == shop.ran


def test_the_status_of_a_paused_key_is_paused() -> None:
    shop = Shop(status_url="/status")
    paused(shop)
    status = shop.app.test_client().get("/status?method=POST&path=/checkout", headers={"Idempotency-Key": "k"})

    assert "paused" == status.get_json()["state"]

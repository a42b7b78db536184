"""The acceptance cases of durable steps on one store of each kind. `tests/e2e/test_steps.py` has those that kill a worker."""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from threading import Event, Thread
from typing import Any, Final
from uuid import uuid4

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, current_claim, durable_step, idempotent
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.journal import NEVER_RESUMED, Journal
from flask_idempotency.engine.keys import StorageKey, encode
from flask_idempotency.engine.model import State, StoredPayload
from flask_idempotency.engine.recovery import Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.steps import arguments
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from flask_idempotency.testing.doubles import Verb
from flask_idempotency.web.janitor import janitor_of
from tests.backends import BACKENDS
from tests.e2e.ledger import PATIENCE_SECONDS
from tests.lab.programs import REDIS_KINDS
from tests.long import unless_long
from tests.maintenance.neglected import store_at
from tests.maintenance.stores import empty
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE

__all__ = ["maria_database", "sql_databases", "sql_stores"]

STORES: Final = (*CORE, *(f"{kind}-url" for kind in REDIS_KINDS[1:]))
LEASE: Final = 30.0
SECRET: Final = "only-tests-9f2c47d1e8b35a60c1d47be2"
WHY: Final = ("--reason", "asked the bank", "--actor", "ops", "--yes")


class Declined(Exception):
    """Nothing happened."""


class Named:
    """A store that remembers the key of each claim."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.keys: list[StorageKey] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def claim(self, request: Any, **options: Any) -> Any:
        self.keys.append(request.key)
        return self._store.claim(request, **options)


class Shop:
    """Releases of an application on one store, one request, and how often each function ran."""

    def __init__(self, store: Any, clock: FrozenClock, **config: Any) -> None:
        self.store, self.clock, self.config = Named(store), clock, config
        self.key = uuid4().hex
        self.ran: Counter[str] = Counter()

    def release(self, view: Callable[[], Any], *, steps: Sequence[Any], **policy: Any) -> None:
        """Deploy this view."""
        self.app = Flask("shop")
        self.idempotency = Idempotency(
            self.app, principal=lambda: "alice", store=self.store, secret=SECRET, lease=LEASE, **self.config
        )
        served = idempotent(required=True, steps=tuple(steps), **policy)(lambda: view())
        self.app.add_url_rule("/checkout", "checkout", served, methods=["POST"])

    def post(self, key: str = "") -> TestResponse:
        headers = {"Idempotency-Key": key or self.key}
        return self.app.test_client().post("/checkout", json={"cart": 1}, headers=headers)

    def told(self, key: str = "") -> tuple[int, str | None]:
        """Status, and the problem or the status of the request."""
        answer = self.post(key)
        problem = answer.mimetype == "application/problem+json"
        return answer.status_code, answer.get_json()["code"] if problem else answer.headers.get("Idempotency-Status")

    def run(self, name: str, result: Any = None) -> Any:
        self.ran[name] += 1
        return result

    def end_lease(self) -> None:
        self.clock.advance(LEASE + 1)

    def journal(self) -> Journal:
        found: Journal = self.store.journals.read(self.store.keys[-1])
        return found

    def cli(self, verb: str, *options: str) -> tuple[int, str]:
        told = self.app.test_cli_runner().invoke(
            args=["idempotency", verb, "--principal", "alice", "--key", self.key, *options]
        )
        return told.exit_code, told.output

    def reap(self) -> None:
        janitor_of(self.app, host_clock=self.clock).run("reap", Batcher())


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Any]:
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)(clock)


@pytest.fixture
def shop(store: Any, clock: FrozenClock) -> Shop:
    return Shop(store, clock)


@pytest.fixture(params=("memory", CORE[-1], *REDIS_KINDS, "sqlite", "postgres"))
def looked_after(request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Shop]:
    """A shop whose store has nothing of other tests in it: a janitor looks at everything."""
    with ExitStack() as ends:
        if request.param in ("memory", CORE[-1]):
            yield Shop(BACKENDS[request.param](request, ends)(clock), clock)
        else:
            store = store_at(empty(request.param, request), clock)
            ends.callback(store.close)
            yield Shop(store, clock)


CHARGE: Final = (Step("charge", compare=()),)


def pauses(shop: Shop, **policy: Any) -> None:
    """Charge, and pause."""

    def view() -> Any:
        current_claim.step("charge", shop.run, "charge", {"id": "ch_1"})
        return {}, 503

    shop.release(view, steps=CHARGE, **policy)
    assert (503, "paused") == shop.told()


def charges(shop: Shop, **policy: Any) -> None:
    """Deploy a view that charges and ends."""
    shop.release(
        lambda: (current_claim.step("charge", shop.run, "charge", {"id": "ch_1"}), 201), steps=CHARGE, **policy
    )


def test_1_an_answer_ends_the_journal(shop: Shop) -> None:
    shop.release(lambda: ([current_claim.step(name, shop.run, name, name) for name in "abc"], 201), steps="abc")
    first, again = shop.post(), shop.post()

    assert (201, ["a", "b", "c"]) == (first.status_code, first.json)
    assert ("true", first.data) == (again.headers["Idempotency-Replayed"], again.data)
    assert () == shop.journal().entries
    assert {"a": 1, "b": 1, "c": 1} == shop.ran


def ships(shop: Shop, error: Exception | None) -> None:
    """Deploy a view that charges and ships. Shipping fails once with this error."""
    left = [error] if error is not None else []

    def ship() -> Any:
        shop.run("tried")
        if left:
            raise left.pop()
        return shop.run("shipped")

    def view() -> Any:
        current_claim.step("charge", shop.run, "charge")
        try:
            current_claim.step("ship", ship)
        except (Declined, TimeoutError):
            return {}, 503
        return {}, 201

    shop.release(view, steps=("charge", Step("ship", harmless=(Declined,))))


def test_13_a_harmless_failure_pauses(shop: Shop) -> None:
    ships(shop, Declined())

    assert [(503, "paused"), (201, None)] == [shop.told(), shop.told()]
    assert {"charge": 1, "tried": 2, "shipped": 1} == shop.ran


def test_15_a_failure_of_unknown_outcome_keeps_all_others_out(shop: Shop) -> None:
    ships(shop, TimeoutError())

    assert [(503, None), (409, "outcome-unknown"), (409, "outcome-unknown")] == [shop.told() for _ in range(3)]
    assert {"charge": 1, "tried": 1} == shop.ran
    assert "step-in-doubt" == shop.store.read(shop.store.keys[-1]).reason


def test_17_without_an_effect_the_key_is_free(shop: Shop) -> None:
    def decline() -> None:
        raise Declined

    def view() -> Any:
        current_claim.step("quote", shop.run, "quote")
        with pytest.raises(Declined):
            current_claim.step("charge", decline)
        return {"attempt": current_claim.attempt}, 503

    shop.release(view, steps=(Step("quote", effects="pure"), Step("charge", harmless=(Declined,))))

    for number in (1, 2):
        answer = shop.post()
        assert (503, {"attempt": 1}) == (answer.status_code, answer.json)
        assert "Idempotency-Status" not in answer.headers
        assert number == shop.ran["quote"]
        assert () == shop.journal().entries
        assert shop.store.read(shop.store.keys[-1]) is None


def test_21_a_request_that_no_retry_resumes_is_quarantined(looked_after: Shop) -> None:
    shop, asked = looked_after, list[str | None]()

    def what_became_of_it(unknown: UnknownOutcome) -> Resolution:
        asked.append(unknown.record.reason)
        return StillUnknown()

    pauses(shop, resume_within=7200.0)
    charges(shop, resume_within=7200.0)
    shop.idempotency.resolver("checkout")(what_became_of_it)
    forgotten, shop.key = shop.key, uuid4().hex
    pauses(shop, resume_within=7200.0)
    charges(shop, resume_within=7200.0)
    shop.idempotency.resolver("checkout")(what_became_of_it)

    shop.clock.advance(3600.0)
    shop.reap()
    assert (201, None) == shop.told()
    assert [] == asked

    shop.clock.advance(3661.0)
    shop.reap()
    assert [NEVER_RESUMED] == asked
    assert (409, "outcome-unknown") == shop.told(forgotten)
    assert {"charge": 2} == shop.ran


LOST: Final[Sequence[tuple[Verb, int]]] = (
    ("claim", 1),
    *(("write", number) for number in range(1, 7)),
    ("release", 1),
    ("recall", 1),
    ("complete", 1),
)


def lose_once(store: Any, clock: FrozenClock, verb: Verb, nth: int, *, reply: bool) -> None:
    faulty = FaultyStore(store)
    shop, statuses = Shop(faulty, clock), iter((503,))

    def view() -> Any:
        results = [current_claim.step(name, shop.run, name, name) for name in ("reserve", "charge")]
        if status := next(statuses, None):
            return {}, status
        return [*results, current_claim.step("ship", shop.run, "ship", "ship")], 201

    shop.release(view, steps=(Step("reserve", effects="deduplicated"), "charge", Step("ship", effects="deduplicated")))
    (faulty.lose_reply if reply else faulty.lose_request)(verb, nth=nth)
    for _ in range(5):
        answer = shop.post()
        if answer.status_code == 201:
            break
        shop.end_lease()

    assert (201, ["reserve", "charge", "ship"]) == (answer.status_code, answer.json)
    assert {"reserve": 1, "charge": 1, "ship": 1} == shop.ran
    assert nth <= faulty.verbs().count(verb)


def test_23_what_is_lost_once_runs_nothing_twice(store: Any, clock: FrozenClock) -> None:
    for (verb, nth), reply in product(LOST, (True, False)):
        lose_once(store, clock, verb, nth, reply=reply)


def test_33_and_43_a_renamed_step_is_noticed_before_the_view_and_resumes_when_it_is_mended(shop: Shop) -> None:
    pauses(shop)
    shop.release(lambda: (shop.run("view"), 201), steps=("pay",))
    assert (409, "outcome-unknown") == shop.told()
    assert "steps-changed" == shop.store.read(shop.store.keys[-1]).reason

    charges(shop)
    assert (409, "outcome-unknown") == shop.told()
    code, output = shop.cli("resolve", "--resume", *WHY)

    assert 0 == code, output
    assert {"id": "ch_1"} == shop.post().json
    assert {"charge": 1} == shop.ran


@pytest.mark.parametrize("dropped", (("quote",), ()))
def test_35_a_step_that_the_code_has_dropped(shop: Shop, dropped: tuple[str, ...]) -> None:
    def view() -> Any:
        current_claim.step("quote", shop.run, "quote", 5)
        current_claim.step("charge", shop.run, "charge", {"id": "ch_1"})
        return {}, 503

    shop.release(view, steps=(Step("quote", effects="pure"), *CHARGE))
    assert (503, "paused") == shop.told()
    charges(shop, dropped_steps=dropped)

    assert ((201, None) if dropped else (409, "outcome-unknown")) == shop.told()
    assert {"quote": 1, "charge": 1} == shop.ran


def test_an_endpoint_that_has_dropped_all_of_its_steps_pauses_too(shop: Shop) -> None:
    """Its own policy quarantines a worker that vanishes. That is no doubt of a step."""
    pauses(shop)
    answers = iter((503, 201))
    shop.release(lambda: ({}, next(answers)), steps=(), dropped_steps=("charge",))

    assert [(503, "paused"), (201, None), (201, None)] == [shop.told(), shop.told(), shop.told()]
    assert {"charge": 1} == shop.ran


def test_37_another_branch_stops_before_its_effect(shop: Shop) -> None:
    pauses(shop)
    shop.release(lambda: (current_claim.step("debit", shop.run, "debit"), 201), steps=(*CHARGE, "debit"))

    assert [(409, "outcome-unknown")] * 2 == [shop.told(), shop.told()]
    assert {"charge": 1} == shop.ran


def test_39_gathered_steps_have_no_order(shop: Shop) -> None:
    """See dbos-transact-py #688."""
    order, first = random.Random(688), [True]

    async def act(name: str) -> str:
        return str(shop.run(name, name))

    async def together(names: list[str]) -> Any:
        return await asyncio.gather(*(current_claim.step(name, act, name) for name in names))

    def view() -> Any:
        names = order.sample("abc", 1 if first[0] else 3)
        results = asyncio.run(together(names))
        return sorted(results), 503 if first[0] else 201

    shop.release(view, steps=[Step(name, compare=()) for name in "abc"])
    for number in range(unless_long(3, long=200)):
        key, first[0] = f"{shop.key}-{number}", True
        assert (503, "paused") == shop.told(key)
        first[0] = False
        assert ["a", "b", "c"] == shop.post(key).json
        assert {"a": number + 1, "b": number + 1, "c": number + 1} == shop.ran


def test_41_an_argument_that_cannot_be_compared_writes_nothing(shop: Shop) -> None:
    shop.release(
        lambda: (current_claim.step("charge", lambda card: shop.run("charge"), object()), 201), steps=("charge",)
    )
    shop.app.testing = True

    with pytest.raises(TypeError, match="argument 'card'"):
        shop.post()
    assert () == shop.journal().entries
    assert not shop.ran


def test_arguments_that_an_earlier_release_recorded_are_the_same(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It told Decimal("10.00") from 10. One step had begun, and its result must be readable too."""

    def mail(amount: Decimal) -> str:
        shop.ran["mail"] += 1
        if shop.ran["mail"] == 1:
            raise TimeoutError
        return "sent"

    def checkout() -> Any:
        try:
            current_claim.step("mail", mail, Decimal("10.00"))
            current_claim.step("ship", shop.run, "ship")
        except TimeoutError:
            return {}, 503
        return {}, 503 if current_claim.attempt == 2 else 201

    shop.release(checkout, steps=(Step("mail", effects="deduplicated"), Step("ship", compare=())))
    recorded = encode(b"amount", b'{"$decimal":"1E+1"}')
    with monkeypatch.context() as earlier:
        earlier.setattr(arguments, "comparable", lambda *_, **__: recorded)
        assert 503 == shop.post().status_code

    assert [503, 201] == [shop.post().status_code, shop.post().status_code]
    assert {"mail": 2, "ship": 1} == shop.ran


def test_45_a_large_result_never_fails_the_request(shop: Shop) -> None:
    big = "x" * 65 * 1024
    shop.release(lambda: (current_claim.step("charge", shop.run, "charge", big), 201), steps=CHARGE)
    assert 201 == shop.post().status_code

    statuses, shop.key = iter((503, 201)), uuid4().hex
    shop.release(lambda: (current_claim.step("charge", shop.run, "charge", big), next(statuses)), steps=CHARGE)

    assert [(503, "paused"), (409, "outcome-unknown"), (409, "outcome-unknown")] == [shop.told() for _ in range(3)]
    assert {"charge": 2} == shop.ran


@dataclass
class Charge:
    id: str
    amount: int = 0


@dataclass
class Smaller:
    id: str


def test_47_a_result_that_lost_a_field(shop: Shop) -> None:
    whole = durable_step("charge", returns=Charge)(lambda: shop.run("charge", Charge("ch_1", 5)))
    shop.release(lambda: ({"id": whole().id}, 503), steps=(whole,))
    assert (503, "paused") == shop.told()
    smaller = durable_step("charge", returns=Smaller)(lambda: shop.run("charge", Smaller("ch_2")))
    shop.release(lambda: ({"id": smaller().id}, 201), steps=(smaller,))

    assert [(409, "outcome-unknown")] * 2 == [shop.told(), shop.told()]
    assert "steps-changed" == shop.store.read(shop.store.keys[-1]).reason
    assert {"charge": 1} == shop.ran


def test_49_a_resolver_finds_the_charge_and_the_late_worker_has_lost(looked_after: Shop) -> None:
    shop, entered, go = looked_after, Event(), Event()
    asked: list[str] = []
    late: list[Any] = []

    def charge() -> Any:
        entered.set()
        assert go.wait(PATIENCE_SECONDS)
        return shop.run("charge", {"id": "of the late worker"})

    def view() -> Any:
        try:
            return current_claim.step("charge", charge), 201
        except LeaseLost as error:
            late.append(error)
            raise

    def what_became_of_it(unknown: UnknownOutcome) -> Resolution:
        step = unknown.step("charge")
        asked.append(step.downstream_key)
        return step.completed({"id": "found"})

    shop.release(view, steps=CHARGE)
    shop.idempotency.resolver("checkout")(what_became_of_it)
    answers: list[TestResponse] = []
    owner = Thread(target=lambda: answers.append(shop.post()))
    owner.start()
    assert entered.wait(PATIENCE_SECONDS)
    shop.end_lease()
    assert (409, "outcome-unknown") == shop.told()
    shop.reap()
    resumed = shop.journal()
    shop.reap()
    assert resumed == shop.journal()

    assert (201, {"id": "found"}) == ((answer := shop.post()).status_code, answer.json)
    go.set()
    owner.join(PATIENCE_SECONDS)

    assert 1 == len(asked)
    assert 1 == len(late)
    assert (201, {"id": "found"}) == (answers[0].status_code, answers[0].json)
    assert {"id": "found"} == shop.post().json
    assert {"charge": 1} == shop.ran


def test_51_only_force_runs_recorded_effects_again(shop: Shop) -> None:
    pauses(shop)
    charges(shop)
    code, output = shop.cli("release", *WHY)
    assert (1, True) == (code, "recorded: charge" in output), output
    assert State.PROCESSING is shop.store.read(shop.store.keys[-1]).state

    shop.clock.advance(7200.0)
    code, output = shop.cli("release", "--force", *WHY)
    assert 0 == code, output

    assert (201, None) == shop.told()
    assert {"charge": 2} == shop.ran


def flipped(payload: StoredPayload, *, bit: int) -> StoredPayload:
    changed = bytearray(payload.data)
    changed[bit // 8] ^= 1 << bit % 8
    return replace(payload, data=bytes(changed))


def not_its_own(store: Any, clock: FrozenClock, damage: str) -> None:
    ring = {"2026": b64encode(b"k" * 32).decode()}
    shop = Shop(store, clock, encryption="required", key_ring=ring, allow_plaintext_transport=True)
    status = [503]

    def view() -> Any:
        for name, item in (("a", 1), ("b", 1), ("b", 2)):
            current_claim.step((name, item), shop.run, f"{name}{item}", {"secret": "yes"})
        return {}, status[0]

    shop.release(view, steps=(Step("a", compare=()), Step("b", effects="deduplicated", compare=())))
    assert (503, "paused") == shop.told()
    key, (a1, b1, b2) = shop.store.keys[-1], shop.journal().entries
    target, put = b1, b1.payload
    if damage == "another result":
        put = a1.payload
    elif damage == "another item":
        put = b2.payload
    elif damage == "another request":
        first, shop.key = shop.key, uuid4().hex
        assert (503, "paused") == shop.told()
        put = shop.journal().entries[1].payload
        shop.key = first
    elif damage == "an older fence":
        assert 0 == shop.cli("release", "--force", *WHY)[0]
        assert (503, "paused") == shop.told()
        assert shop.store.keys[-1] == key
        target = shop.journal().entries[1]
        assert target.fence > b1.fence
    else:
        assert put is not None
        put = flipped(put, bit=8 * len(put.data) // 2)
    assert target.payload is not None
    assert put is not None
    assert target.payload.data != put.data
    assert shop.store.journals.replace(key, target.id, target.payload, put)
    status[0], before = 201, dict(shop.ran)

    assert [(409, "outcome-unknown")] * 2 == [shop.told(), shop.told()]
    assert before == shop.ran


def test_53_a_result_that_is_not_its_own_is_never_run_again(store: Any, clock: FrozenClock) -> None:
    not_its_own(store, clock, "another result")


@pytest.mark.parametrize("damage", ("another item", "another request", "an older fence", "a bit"))
def test_53_no_damage_of_a_result_runs_it_again(clock: FrozenClock, damage: str) -> None:
    not_its_own(MemoryStore(clock=clock), clock, damage)


def test_a_damaged_journal_hides_no_other_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of an operator, the doctor and the janitor meet it: that row alone is unreadable."""
    shop = Shop(MemoryStore(clock=(clock := FrozenClock())), clock)
    pauses(shop)
    read = shop.store.journals.read
    broken = shop.store.keys[-1]

    def damaged(key: StorageKey) -> Journal:
        if key == broken:
            raise CorruptRecord("damaged")
        found: Journal = read(key)
        return found

    monkeypatch.setattr(shop.store.journals, "read", damaged)
    shop.post("another")
    run = shop.app.test_cli_runner().invoke

    listed = [run(args=["idempotency", "list", "--no-tenant", "--json", *more]) for more in ((), ("--state", "paused"))]

    assert [0, 0] == [each.exit_code for each in listed], [each.output for each in listed]
    assert [2, 1] == [len(json.loads(each.stdout)["records"]) for each in listed]

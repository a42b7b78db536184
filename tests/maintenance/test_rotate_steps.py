"""The results of steps are sealed again and erased with the responses, and no request repeats a step because of that."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from threading import Event, Semaphore
from typing import Any

import pytest
from flask import Flask, request

from flask_idempotency import Idempotency, Step, current_claim, idempotent
from flask_idempotency.engine.journal import StepAnswer
from flask_idempotency.engine.model import ERASED
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.rotate import RotateReport, rotate, wipe
from flask_idempotency.operations.admin import keys_status
from flask_idempotency.testing import FrozenClock
from tests.maintenance.conftest import KEYS, empty_store
from tests.maintenance.stores import SHARED
from tests.maintenance.yard import still
from tests.stages import CORE

SECRET = "only-tests-9f2c47d1e8b35a60c1d47be2"
STEPS = (Step("reserve", effects="deduplicated"), Step("charge"), Step("ship", effects="deduplicated"))


class Shop:
    """An application in several releases on one store, and how often each step of each request ran."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.ran: Counter[tuple[str, str]] = Counter()
        self.away = True
        self.between: Callable[[], object] = lambda: None
        self.release("2025")

    def release(self, *kids: str) -> None:
        """Deploy with this ring, the newest key first."""
        self.app = Flask("shop")
        self.app.testing = True
        ring = {kid: b64encode(KEYS[kid]).decode() for kid in kids}
        Idempotency(
            self.app,
            store=self.store,
            secret=SECRET,
            encryption="on",
            key_ring=ring,
            allow_plaintext_transport=True,
        )

        @idempotent(required=True, steps=STEPS)
        def view() -> Any:
            return self.checkout()

        self.app.add_url_rule("/checkout", "checkout", view, methods=["POST"])
        state: Any = self.app.extensions["idempotency"]
        self.built, self.ring = state.built, state.settings.key_ring

    def checkout(self) -> Any:
        key = request.headers["Idempotency-Key"]
        reserved = current_claim.step("reserve", self.run, "reserve", key)
        if key.startswith("doubtful"):
            try:
                current_claim.step("charge", self.times_out, key)
            except TimeoutError:
                return "", 503
        self.between()
        if self.away:
            return "", 503
        current_claim.step("ship", self.run, "ship", key)
        return {"reserved": reserved}, 201

    def run(self, step: str, key: str) -> str:
        self.ran[step, key] += 1
        return f"{step} of {key}"

    def times_out(self, key: str) -> None:
        self.ran["charge", key] += 1
        raise TimeoutError

    def post(self, key: str) -> tuple[int, Any]:
        answer = self.app.test_client().post("/checkout", json={}, headers={"Idempotency-Key": key})
        return answer.status_code, answer.get_json(silent=True)

    def rotate(self) -> RotateReport:
        store = self.store
        return rotate(
            store.responses,
            store.data_keys,
            self.built.codec,
            self.ring,
            drain=Batcher(2),
            recovery=store.recovery,
            journals=store.journals,
            grace=0.0,
        )

    def uses(self) -> dict[str, tuple[int, int]]:
        """How many records and data keys each key of the ring seals."""
        store = self.store
        report = keys_status(self.ring, store.responses, store.data_keys, store.journals)
        return {key.kid: (key.records, key.data_keys) for key in report.keys}

    def results(self) -> list[StepAnswer]:
        return list(self.store.journals.walk(limit=100).answers)


@pytest.fixture(params=("memory", CORE[-1], *SHARED))
def shop(request: pytest.FixtureRequest, clock: FrozenClock) -> Iterator[Shop]:
    with ExitStack() as ends:
        yield Shop(empty_store(request.param, request, ends)(clock))


def test_the_results_of_paused_and_quarantined_requests_are_sealed_again(shop: Shop) -> None:
    """The old key can go then: the paused ones resume without it, and no retry goes on where a charge is in doubt."""
    paused = [f"paused-{number}" for number in range(5)]
    assert [503] * 6 == [shop.post(key)[0] for key in (*paused, "doubtful")]
    shop.release("2026", "2025")
    before = shop.uses()["2025"]
    report = shop.rotate()

    assert (7, 0, 0) == (report.resealed, report.unreadable, report.blocked)
    assert (7, 0) == (before[0], shop.uses()["2025"][0])
    assert 1 == shop.rotate().retired
    assert {"2026": (7, 1), "2025": (0, 0)} == shop.uses()

    shop.release("2026")
    shop.away = False
    assert [(201, {"reserved": f"reserve of {key}"}) for key in paused] == [shop.post(key) for key in paused]
    assert 409 == shop.post("doubtful")[0]
    assert {1} == set(shop.ran.values())


def test_a_request_that_runs_during_a_rotation_ends(shop: Shop) -> None:
    """Its worker has the old ring, and another one rotates between two of its steps."""
    shop.post("paused")
    old, janitor = shop.app, Shop(shop.store)
    janitor.release("2026", "2025")
    shop.between, shop.away = janitor.rotate, False

    assert [(201, {"reserved": f"reserve of {key}"}) for key in ("paused", "new")] == [
        shop.post(key) for key in ("paused", "new")
    ]
    assert old is shop.app
    assert {1} == set(shop.ran.values())

    janitor.rotate()
    janitor.rotate()
    assert (0, 0) == janitor.uses()["2025"]


@pytest.mark.parametrize("count", (8, pytest.param(100, marks=pytest.mark.soak)))
def test_requests_that_run_beside_a_rotation_end(shop: Shop, count: int) -> None:
    """All of them stand between two steps while it runs, and a quarantined one is there too."""
    assert 503 == shop.post("doubtful")[0]
    janitor, between, go = Shop(shop.store), Semaphore(0), Event()
    janitor.release("2026", "2025")

    def stands() -> None:
        between.release()
        assert go.wait(60)

    shop.between, shop.away = stands, False
    keys = [f"running-{number}" for number in range(count)]
    with ThreadPoolExecutor(count) as clients:
        answers = clients.map(shop.post, keys)
        for _ in keys:
            assert between.acquire(timeout=60)
        resealed = janitor.rotate().resealed
        go.set()
        ended = list(answers)

    # One result of each running request, and one of the quarantined one with the item of its charge.
    assert count + 2 == resealed
    assert [(201, {"reserved": f"reserve of {key}"}) for key in keys] == ended
    assert {1} == set(shop.ran.values())
    janitor.rotate()
    janitor.rotate()
    assert (0, 0) == janitor.uses()["2025"]
    assert 409 == janitor.post("doubtful")[0]


def test_a_result_that_cannot_be_opened_keeps_its_data_key(shop: Shop) -> None:
    shop.post("paused")
    (answer,) = shop.results()
    payload = answer.entry.payload
    assert payload is not None
    damaged = replace(payload, data=payload.data[::-1])
    assert shop.store.journals.replace(answer.key, answer.entry.id, payload, damaged)
    shop.release("2026", "2025")

    assert [(0, 1, 0)] * 3 == [
        (report.resealed, report.unreadable, report.retired) for report in (shop.rotate() for _ in range(3))
    ]
    assert (1, 1) == shop.uses()["2025"]


def wiped(store: Any, tid: bytes) -> tuple[int, int]:
    """Wipe this tenant. Return how many of its results were wiped, and how many were passed over."""
    report = wipe(store.responses, [tid], drain=still(), journals=store.journals)
    return report.wiped, report.passed_over


@pytest.mark.parametrize("then", ("nothing", "wipe", "rotate"))
def test_an_erased_result_is_never_computed_again(shop: Shop, then: str) -> None:
    shop.post("paused")
    (answer,) = shop.results()
    shop.store.data_keys.shred(answer.key.tid)
    if then == "wipe":
        assert [(1, 0), (0, 1)] == [wiped(shop.store, answer.key.tid) for _ in range(2)]
    elif then == "rotate":
        shop.release("2026", "2025")
        assert 1 == shop.rotate().wiped
        assert (0, 0) == shop.uses()["2025"]
    if then != "nothing":
        (left,) = shop.results()
        assert left.entry.payload is not None
        assert (b"", ERASED) == (left.entry.payload.data, left.entry.payload.sealed_by)
    shop.away = False

    assert [409, 409] == [shop.post("paused")[0] for _ in range(2)]
    assert {("reserve", "paused"): 1} == shop.ran


def test_wipe_leaves_the_results_of_later_requests(shop: Shop, clock: FrozenClock) -> None:
    shop.post("before")
    tid = shop.results()[0].key.tid
    shop.store.data_keys.shred(tid)
    clock.advance(1)
    shop.post("after")

    assert (1, 0) == wiped(shop.store, tid)
    shop.away = False
    assert (409, 201) == (shop.post("before")[0], shop.post("after")[0])

"""The part of the tour where nobody asks: what the janitor finds by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from example_app.report import Scenarios, Seen, counted, seen
from example_app.shop import Shop
from example_app.tour import executions, lost_connection

PATIENCE_SECONDS = 20.0

janitor_tour = Scenarios()


@janitor_tour.scenario("reaped, asked about, replayed", rows=1)
def reaped(shop: Shop) -> Seen:
    """A worker of the gateway is killed right after it has charged, and nobody retries. The janitor finds the key, and
    the gateway's resolver finds the charge."""
    body = {"account_id": "acc_1", "amount": 700, "currency": "EUR", "simulate": {"crash": "after_commit"}}
    with lost_connection():
        shop.send("POST", "/gateway/charges", "gw-lost", body)
    settled = comes_true(lambda: shop.records("gateway.create", "processing", "quarantined") == 0)
    answer = shop.send("POST", "/gateway/charges", "gw-lost", body)
    found = answer.status_code == 201 and answer.headers.get("X-Cache-Lookup") == "HIT"
    return seen([answer], ok=settled and found and executions(answer) == 1, answers=f"dropped, {counted([answer])}")


@janitor_tour.scenario("replayed, removed, runs anew", rows=0)
def expired(shop: Shop) -> Seen:
    """Answers live for a day; this one for two seconds. When its time is over its row goes, and the key is new."""

    def ask() -> httpx.Response:
        return shop.send("POST", "/simulate/brief", "brief-1", {})

    answers = [ask(), ask()]
    removed = comes_true(lambda: shop.records("simulate.brief", "completed") == 0)
    answers.append(ask())
    replayed = [answer.headers.get("Idempotency-Replayed") for answer in answers] == [None, "true", None]
    ok = removed and replayed and executions(answers[-1]) == 2
    return seen(answers, ok=ok, answers=f"{counted(answers[:2])}; then {counted(answers[2:])}")


def comes_true(holds: Callable[[], bool]) -> bool:
    """Whether it does while somebody would watch."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

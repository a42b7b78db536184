"""Customers who pay, retry, click twice and make mistakes: the traffic that the console shows.

Each round is the same for its number, so a run can count what must come of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from threading import Barrier
from typing import Any, Final, TypeVar

import httpx

from example_app.demo.client import PATIENCE_SECONDS, Shop

T = TypeVar("T")

BURST_ROUNDS: Final = 4
"""What the tour plays: enough that each kind of response is there at each endpoint."""

MINUTE_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 0.4
"""Between two rounds of the minute that follows the tour. A round takes a worker some tenths of a second."""

PEOPLE: Final = ("tok_alice", "tok_bob", "tok_carol")
DELAY: Final = {"simulate": {"delay": 0.2}}

NEW_ROWS: Final = 6
"""Each round makes so many payments, charges, invoices and orders."""


def play(shop: Shop, number: int) -> list[httpx.Response]:
    """Play one round: two payments, an invoice, two charges and a checkout, and what clients do with such requests.

    Two are sent again, one twice at the same moment, one with another amount, one without a key and one with an invalid key.
    """
    person = PEOPLE[number % len(PEOPLE)]

    def send(method: str, path: str, key: str | None, body: dict[str, Any], **more: str) -> httpx.Response:
        return shop.send(method, path, key, body, bearer=person, **more)

    name = f"customer-{number}"
    payment = {"account": "acc_7", "amount": 900 + 7 * number, "currency": "EUR"}
    invoice = {"customer": f"cus_{number}", "amount": 4200 + number, "currency": "EUR"}
    gateway = {"account_id": "acc_7", "amount": 300 + number, "currency": "EUR"}
    responses = [send("POST", "/payments", f"{name}-paid", payment)]
    responses += [send("POST", "/payments", f"{name}-paid", payment) for _ in range(1 + number % 2)]
    responses += [send("POST", "/payments", f"{name}-paid", payment | {"amount": 1})]
    # The service runs one of them, and refuses or replays the other.
    responses += at_once(2, lambda: send("POST", "/payments", f"{name}-clicked", payment | DELAY))
    responses += [send("POST", "/payments", key, payment) for key in (None, "not a key")]
    responses += [
        send("POST", "/api/invoices", f"{name}-invoice", invoice, header="X-Idempotency-Key") for _ in range(2)
    ]
    responses += [send("POST", "/gateway/charges", f"{name}-gateway", gateway | {"timestamp": at}) for at in range(2)]
    responses += [shop.charge(f"{name}-charge", {"amount": "500", "currency": "eur"}, bearer=person)]
    responses += [send("POST", "/checkouts", f"{name}-checkout", {"item": "tea", "card": "tok_visa"})]
    return responses


def at_once(number: int, ask: Callable[[], T]) -> list[T]:
    """Ask from so many threads at the same moment."""
    barrier = Barrier(number)

    def click(_: int) -> T:
        barrier.wait(PATIENCE_SECONDS)
        return ask()

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(click, range(number)))


@contextmanager
def customers(shop: Shop) -> Iterator[None]:
    """Play rounds in the background for a minute, or until the body ends."""
    ended = threading.Event()
    began = time.monotonic()

    def shop_on() -> None:
        for number in count(BURST_ROUNDS):
            if ended.wait(PAUSE_SECONDS) or time.monotonic() - began > MINUTE_SECONDS:
                return
            # You may kill a worker by the requests that the demo prints, and the customers of that moment with it.
            with suppress(httpx.TransportError):
                play(shop, number)

    thread = threading.Thread(target=shop_on, name="customers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE_SECONDS)

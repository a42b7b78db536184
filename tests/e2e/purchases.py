"""Clients that want something paid once, and ask until they are told that it is."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.e2e.books import Books
from tests.e2e.ledger import PATIENCE_SECONDS
from tests.e2e.wire import Answer, Order, ask

AMOUNT = 100
"""As the body of every `Order` says."""

PAUSE_SECONDS = 0.02
"""Between two attempts: shorter than any client's, so that retries meet what the first attempt has left half-done."""

CHECKERS = 4

_paces = threading.Event()


@dataclass
class Purchase:
    """One order, and all that its client was told of it."""

    order: Order = field(default_factory=lambda: Order("/pay"))
    answers: list[Answer] = field(default_factory=list)
    lost: int = 0
    """Attempts whose connection ended without an answer."""

    def attempt(self, port: int, *steps: str) -> Answer | None:
        """What came back; None when nothing did."""
        try:
            answer = ask(port, self.order.attempt(*steps))
        except (http.client.HTTPException, ConnectionError):
            self.lost += 1
            return None
        self.answers.append(answer)
        return answer

    def pay(self, port: int, *steps: str, patience: float = PATIENCE_SECONDS) -> Answer:
        """Attempt until it is paid. Only the first attempt has these steps; those after it are left in peace."""
        deadline = time.monotonic() + patience
        answer = self.attempt(port, *steps)
        while answer is None or answer.status != 201:
            # Whoever is told that nobody knows has to give up: transactional views never are.
            assert answer is None or answer.code != "outcome-unknown"
            assert time.monotonic() < deadline, f"not paid after {patience:.0f} s: {answer}"
            _paces.wait(PAUSE_SECONDS)
            answer = self.attempt(port)
        return answer

    @property
    def paid(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 201]

    @property
    def refusals(self) -> set[tuple[int, str | None]]:
        return {answer.told for answer in self.answers if answer.status != 201}


def assert_paid_once(books: Books, port: int, purchases: Sequence[Purchase]) -> None:
    """Each of them has one row and one answer, which tells of that row, whenever it was given; and nothing else is there."""
    payments = books.payments()
    with ThreadPoolExecutor(CHECKERS) as checkers:
        answers = list(checkers.map(lambda purchase: ask(port, purchase.order.attempt()), purchases))
    for purchase, stored in zip(purchases, answers, strict=True):
        assert (stored.status, stored.replayed) == (201, True)
        assert {answer.body for answer in purchase.paid} <= {stored.body}
        assert payments.get(purchase.order.case) == [stored.json["id"]]
    assert len(payments) == len(purchases)
    assert books.balance() == AMOUNT * len(purchases)
    assert books.records() == {"completed": len(purchases)}


class Crowd:
    """Clients that buy one thing after the other, in threads of their own, until they are told to stop."""

    def __init__(self, clients: int, buy: Callable[[], Purchase]) -> None:
        self._buy = buy
        self._stopped = threading.Event()
        self._bought = threading.Condition()
        self._purchases: list[Purchase] = []
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def buys(self, more: int) -> None:
        """Wait until so many more have been paid."""
        with self._bought:
            wanted = len(self._purchases) + more
            done = self._bought.wait_for(
                lambda: len(self._purchases) >= wanted or self._failure is not None, PATIENCE_SECONDS
            )
        assert done, f"fewer than {more} were paid in {PATIENCE_SECONDS:.0f} s"

    def wait(self, seconds: float) -> None:
        """Let so much time pass, unless a client fails."""
        self._stopped.wait(seconds)
        if self._failure is not None:
            raise self._failure

    def so_far(self) -> list[Purchase]:
        with self._bought:
            return list(self._purchases)

    def stop(self) -> list[Purchase]:
        """All that was bought, when the last client is done. What failed in a client's thread fails here."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_SECONDS)
        if self._failure is not None:
            raise self._failure
        assert not any(thread.is_alive() for thread in self._threads)
        return self.so_far()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                purchase = self._buy()
            except BaseException as failure:  # noqa: BLE001 - told to whoever waits for us
                self._failure = failure
                self._stopped.set()
            with self._bought:
                if self._failure is None:
                    self._purchases.append(purchase)
                self._bought.notify_all()

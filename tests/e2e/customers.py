"""Customers of several servers on one store that is having a bad time, and what may be said of all that they were told."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from flask_idempotency.testing import Oracle
from tests.e2e.ledger import Ledger
from tests.e2e.losses import PAUSE_SECONDS
from tests.e2e.purchases import Purchase
from tests.e2e.wire import Order

RECENT = 40
"""Purchases that others ask about again: they were answered in what is being lost, or are half-way."""

ALLOWED = {
    (409, "in-flight"),
    (409, "outcome-unknown"),
    (503, "store-unavailable"),
    (503, "memory-lost"),
}
"""What may be told besides an answer. Of `outcome-unknown` the owner may still be at work: so it is asked again."""


@dataclass
class Customers:
    """They buy one thing after the other, from any of the servers, and ask about what they and others have bought."""

    ports: Sequence[int]
    tenants: int
    patience: float
    """For how many seconds one asks again before it turns to something else. What is unpaid it comes back to."""
    new_key: Callable[[], str] = lambda: str(uuid4())
    recent: list[Purchase] = field(default_factory=list)

    def buy(self) -> Purchase:
        purchase = Purchase(self.order())
        self.recent.append(purchase)  # at once, so that others ask about it while it is being paid
        self.insist(purchase, "take:20", "effect", patience=self.patience)
        for other in random.sample(self.recent[-RECENT:], k=min(3, len(self.recent))):
            self.attempt(other)
        return purchase

    def order(self) -> Order:
        name = f"tenant{random.randrange(self.tenants)}"
        return Order("/plain", key=self.new_key(), headers=(("Authorization", f"Bearer {name}/alice"),))

    def attempt(self, purchase: Purchase, *steps: str) -> bool:
        """Whether it is paid. By its steps a second run would show."""
        answer = purchase.attempt(random.choice(self.ports), *(steps or ("effect",)))
        return answer is not None and answer.status == 201

    def insist(self, purchase: Purchase, *steps: str, patience: float) -> bool:
        """Whether it was paid in time."""
        deadline = time.monotonic() + patience
        while not self.attempt(purchase, *steps):
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        return True


def judge(purchases: Sequence[Purchase], ledger: Ledger) -> Oracle:
    """What the oracle has to say of all that was told, and of what was really done."""
    oracle = Oracle()
    for purchase in purchases:
        for answer in purchase.answers:
            oracle.answered(purchase.order.case, answer.status, answer.body, replayed=answer.replayed)
    oracle.counted({purchase.order.case: len(ledger.effects(purchase.order.case)) for purchase in purchases})
    return oracle


def refusals(purchases: Sequence[Purchase]) -> Counter[tuple[int, str | None]]:
    """What was told besides answers, and how often."""
    return Counter(answer.told for purchase in purchases for answer in purchase.answers if answer.status != 201)

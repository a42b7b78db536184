"""Run in a process of its own: an inbox works off messages on a database, and the process is killed at a point of it."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from flask_sqlalchemy.session import Session
from sqlalchemy import event, select

from flask_idempotency.consumers import Inbox, Processed
from flask_idempotency.testing.doubles import kill_process
from tests.stores.sql.shops import Payment, Shop, open_shop

ENDLESS: Any = {"max_attempts": 1_000}
POINTS = ("begun", "flushed", "committing", "committed")


def main(url: str, message_id: str, point: str) -> None:
    """Process the message until this point of its work."""
    shop = open_shop(url, existing=True)
    inbox = shop.idempotency.inbox("billing", effects="transactional", lease=2)

    def reach(name: str) -> None:
        if name == point:
            kill_process()

    def work() -> dict[str, Any]:
        reach("begun")
        payment = Payment(amount=100)
        shop.db.session.add(payment)
        shop.db.session.flush()
        reach("flushed")
        return {"payment": payment.id}

    event.listen(Session, "after_commit", lambda session: reach("committed"))
    with shop.app.app_context():
        event.listen(shop.db.engine, "commit", lambda connection: reach("committing"))
        inbox.process(message_id, work)


def forked(url: str, messages: int) -> None:
    """Use the database, fork four children, and have each process every message until it may be acknowledged."""
    shop = open_shop(url, existing=True)
    inbox = shop.idempotency.inbox("billing", effects="transactional", in_flight="wait", wait=300)
    with shop.app.app_context():
        inbox.process("of the parent", lambda: None)
        shop.db.session.execute(select(Payment)).all()
    children = []
    for _ in range(4):
        number = os.fork()
        if number == 0:
            child(shop, inbox, messages)
            os._exit(0)
        children.append(number)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children))


def child(shop: Shop, inbox: Inbox, messages: int) -> None:
    """Process every message until it may be acknowledged. What fails here ends the child with another code than 0."""
    with shop.app.app_context():
        for number in range(messages):
            while not isinstance(inbox.process(f"m-{number}", lambda: shop.pay()), Processed):
                pass


def crowd(url: str, messages: int) -> None:
    """Process every message, in an order of its own, until it may be acknowledged. Write a line before each."""
    shop = open_shop(url, existing=True)
    inbox = shop.idempotency.inbox("billing", effects="transactional", lease=2, in_flight="wait", wait=300, **ENDLESS)
    numbers = list(range(messages))
    random.shuffle(numbers)
    with shop.app.app_context():
        for number in numbers:
            print(number, flush=True)  # noqa: T201 - the test reads it
            while not isinstance(inbox.process(f"m-{number}", lambda: shop.pay()), Processed):
                pass


if __name__ == "__main__":
    if sys.argv[3] == "crowd":
        crowd(sys.argv[1], int(sys.argv[2]))
    elif sys.argv[3] == "forked":
        forked(sys.argv[1], int(sys.argv[2]))
    else:
        main(*sys.argv[1:])

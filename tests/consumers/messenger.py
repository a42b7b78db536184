"""Run in a process of its own: an inbox works off messages on a database, and the process is killed at a point of it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flask_sqlalchemy.session import Session
from sqlalchemy import event, select

from flask_idempotency import Step, current_claim
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


STEP_POINTS = ("charging", "charged", "mailing")
STEPS: Any = {"steps": ("charge", Step("mail", effects="deduplicated")), "lease": 1, **ENDLESS}


def inbox_with_steps(config: Mapping[str, Any]) -> Inbox:
    return Inbox.standalone({**config, "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60"}, "billing", **STEPS)


def booked(effects: Path, message_id: str, reach: Callable[[str], None]) -> Callable[[], Any]:
    """Return the work on this message: it charges and mails, each a line of the file."""

    def act(line: str) -> str:
        with effects.open("a") as file:
            file.write(f"{line} {message_id}\n")
        reach("charging" if line == "charge" else "mailing")
        return line

    def work() -> Any:
        done = [current_claim.step("charge", act, "charge")]
        reach("charged")
        return [*done, current_claim.step("mail", act, "mail")]

    return work


def killed_at(point: str) -> Callable[[str], None]:
    def reach(reached: str) -> None:
        if reached == point:
            kill_process()

    return reach


def stepped(config: str, effects: str) -> None:
    """Fork a child for each point, which is killed there in the middle of its message. Exit with 0 if all were killed."""
    inbox, children = inbox_with_steps(json.loads(config)), []
    for point in STEP_POINTS:
        number = os.fork()
        if number == 0:
            inbox.process(point, booked(Path(effects), point, killed_at(point)))
            os._exit(1)
        children.append(number)
    codes = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children]
    sys.exit(0 if set(codes) == {-signal.SIGKILL} else f"the children ended with {codes}")


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        stepped(*sys.argv[2:])
    elif sys.argv[3] == "crowd":
        crowd(sys.argv[1], int(sys.argv[2]))
    elif sys.argv[3] == "forked":
        forked(sys.argv[1], int(sys.argv[2]))
    else:
        main(*sys.argv[1:])

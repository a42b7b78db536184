"""Run in a process of its own: an inbox works off messages on a database, and the process is killed at a point of it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
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


def begin(work: Callable[[], object]) -> int:
    """Fork a child that does this work, and return its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def codes_of(children: Sequence[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def killed(url: str) -> None:
    """Fork a child for each point, which is killed there in the middle of its message. Exit with 0 if all were killed."""
    codes = codes_of([begin(partial(until, url, f"m-{point}", point)) for point in POINTS])
    sys.exit(0 if set(codes) == {-signal.SIGKILL} else f"the children ended with {codes}")


def until(url: str, message_id: str, point: str) -> None:
    """Process the message until this point of its work."""
    shop = open_shop(url, existing=True)
    inbox = shop.idempotency.inbox("billing", effects="transactional", lease=2)
    reach = killed_at(point)

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
    sys.exit(max(codes_of([begin(partial(child, shop, inbox, messages)) for _ in range(4)])))


def child(shop: Shop, inbox: Inbox, messages: int) -> None:
    """Process every message until it may be acknowledged. What fails here ends the child with another code than 0."""
    with shop.app.app_context():
        for number in range(messages):
            while not isinstance(inbox.process(f"m-{number}", lambda: shop.pay()), Processed):
                pass


def crowds(url: str, messages: int, kills: int) -> None:
    """Fork two children at a time, and kill each in the middle of some message. The last two are left to finish."""
    for number in range(kills + 1):
        children = [crowd(url, messages) for _ in range(2)]
        for pid, begun in children:
            with os.fdopen(begun) as lines:
                if number < kills:
                    count = random.randint(1, messages)
                    assert count == sum(1 for _ in islice(lines, count))
                    os.kill(pid, signal.SIGKILL)
                else:
                    lines.read()
        codes = codes_of([pid for pid, _ in children])
    sys.exit(max(map(abs, codes)))


def crowd(url: str, messages: int) -> tuple[int, int]:
    """Fork a child that processes every message, in an order of its own. Return its id, and where it writes a line for each."""
    reading, writing = os.pipe()

    def work() -> None:
        shop = open_shop(url, existing=True)
        inbox = shop.idempotency.inbox(
            "billing", effects="transactional", lease=2, in_flight="wait", wait=300, **ENDLESS
        )
        numbers = list(range(messages))
        random.seed(os.getpid())
        random.shuffle(numbers)
        with shop.app.app_context():
            for number in numbers:
                os.write(writing, f"{number}\n".encode())
                while not isinstance(inbox.process(f"m-{number}", lambda: shop.pay()), Processed):
                    pass

    child = begin(work)
    os.close(writing)
    return child, reading


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
    inbox = inbox_with_steps(json.loads(config))
    children = [
        begin(partial(inbox.process, point, booked(Path(effects), point, killed_at(point)))) for point in STEP_POINTS
    ]
    codes = codes_of(children)
    sys.exit(0 if set(codes) == {-signal.SIGKILL} else f"the children ended with {codes}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["steps", config, effects]:
            stepped(config, effects)
        case ["killed", url]:
            killed(url)
        case ["forked", url, count]:
            forked(url, int(count))
        case ["crowds", url, count, kills]:
            crowds(url, int(count), int(kills))

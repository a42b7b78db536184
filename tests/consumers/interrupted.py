"""A process that gets soft time limits at random instants while it claims, works and settles. Prints what they met.

python -m tests.consumers.interrupted <store> <signals>
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from functools import wraps
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded

from flask_idempotency.assembly import build_store
from flask_idempotency.consumers.celery import idempotent_task, serve
from tests.consumers.test_celery_tasks import make_celery, make_flask

CALLS = ("claim", "renew", "complete", "release", "quarantine", "mark_point_of_no_return")


class Watched:
    """A store that notes if one of its calls was ended by a signal."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls = 0
        self.ended: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in CALLS:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = method(*args, **kwargs)
            except SoftTimeLimitExceeded:
                self.ended.append(name)
                raise
            self.calls += 1
            return answer

        return call


def main(url: str, count: int) -> None:
    store: Any = Watched(build_store(url, memory={"after_loss": "run"}))
    celery_app = make_celery()
    serve(celery_app, make_flask(store))
    met = {"signals": 0, "raised": 0, "bodies": 0, "runs": 0, "unknown": 0}
    armed = [False]

    def soft_limit(number: int, frame: object) -> None:
        # Celery's own code around the task is not what this is about.
        if armed[0]:
            met["raised"] += 1
            raise SoftTimeLimitExceeded

    def arming(function: Any) -> Any:
        @wraps(function)
        def run(order: int) -> Any:
            try:
                armed[0] = True
                return function(order)
            finally:
                armed[0] = False

        return run

    def body(order: int) -> int:
        return sum(range(2000)) + order

    made: Any = celery_app.task(shared=False)(arming(idempotent_task(key="order", effects="deduplicated")(body)))
    signal.signal(signal.SIGUSR1, soft_limit)
    over = threading.Event()

    def send() -> None:
        chance = random.Random(11)
        while met["raised"] < count:
            over.wait(chance.random() * 0.003)
            os.kill(os.getpid(), signal.SIGUSR1)
            met["signals"] += 1
        over.set()

    sender = threading.Thread(target=send)
    sender.start()
    while not over.is_set():
        met["runs"] += 1
        result = made.apply((met["runs"],)).result
        if isinstance(result, SoftTimeLimitExceeded):
            met["bodies"] += 1
        elif isinstance(result, Exception):
            met["unknown"] += 1
    sender.join()
    sys.stdout.write(json.dumps({**met, "calls": store.calls, "ended": store.ended}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

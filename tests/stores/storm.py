"""Run in a process of its own: a store at work, while a timer's handler raises whenever a command is being packed."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token
from tests.forgiving import FORGIVING

EVERY_SECONDS = 0.00005
HITS = 100
MOST_SECONDS = 300.0


class Interrupted(Exception):
    """As `SoftTimeLimitExceeded` of Celery."""


def main(url: str) -> int:
    """Work until so many commands were interrupted while they were packed."""
    hits = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal hits
        # Elsewhere it may hit what looks after the first one. Packing is what is tested.
        if frame is not None and frame.f_code.co_name == "pack":
            hits += 1
            raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    store = RedisStore(url, rules=FORGIVING)
    signal.setitimer(signal.ITIMER_REAL, EVERY_SECONDS, EVERY_SECONDS)
    until = time.monotonic() + MOST_SECONDS
    try:
        while hits < HITS and time.monotonic() < until:
            key, token = a_key(), a_token()
            with suppress(Interrupted):  # after each a connection is made again, and greets
                assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant)
                store.complete(key, token, PAYLOAD, keep=KEEP)
                store.recovery.counts()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    store.close()
    return 0 if hits >= HITS else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

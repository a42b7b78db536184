"""One pub/sub subscription per process, which wakes waiting requests when another process settles their key."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.notifications import POLL_SECONDS, ThreadedNotifier
from flask_idempotency.stores.redis import layout


class RedisNotifier(ThreadedNotifier):
    """Listen with one subscription for all waiters of this process. It uses one connection of the client."""

    server = "Redis"

    def __init__(self, subscriber: Callable[[], Any], **seconds: float) -> None:
        super().__init__(**seconds)
        self._subscriber = subscriber

    def _name(self, key: StorageKey) -> bytes:
        return layout.name(layout.keys(key))

    def _listen(self) -> None:
        subscriber = self._subscriber()
        try:
            subscriber.subscribe(layout.SETTLED)
            last_message_at, pinged = time.monotonic(), False
            while not self._ends_idle(idle_seconds=self._idle_seconds):
                message = subscriber.get_message(timeout=POLL_SECONDS)
                if message is not None:
                    last_message_at, pinged = time.monotonic(), False
                    if message["type"] == "subscribe":
                        self._connected()
                    elif message["type"] == "message":
                        name = message["data"]
                        self._wake(name.encode() if isinstance(name, str) else name)
                    continue
                silent = time.monotonic() - last_message_at
                # After twice the time without a reply to the ping, the connection is lost.
                if silent > 2 * self._ping_after_seconds:
                    raise TimeoutError
                if silent > self._ping_after_seconds and not pinged:
                    subscriber.ping()
                    pinged = True
        finally:
            subscriber.close()

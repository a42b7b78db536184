"""A janitor in another process, which tells before and after each call of its store: it is killed at one of those."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from flask_idempotency.testing import FrozenClock
from tests.maintenance.neglected import DRAIN, janitor_of, store_at


class Told:
    """Passes everything on, and says so before and after."""

    def __init__(self, port: Any, line: Connection) -> None:
        self._port, self._line = port, line

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._line.send(name)
            answer = getattr(self._port, name)(*arguments, **options)
            self._line.send(f"{name} done")
            return answer

        return call


class Telling:
    def __init__(self, store: Any, line: Connection) -> None:
        self.recovery, self.expiry = Told(store.recovery, line), Told(store.expiry, line)


def look_after(url: str, now: float, line: Connection) -> None:
    """Run every task of a janitor on this store. `line` gets what it does, and `finished`."""
    clock = FrozenClock(now)
    store = store_at(url, clock)
    janitor = janitor_of(store, clock, [], locked=False, telling=Telling(store, line))
    for task in janitor.tasks:
        janitor.run(task, DRAIN)
    line.send("finished")

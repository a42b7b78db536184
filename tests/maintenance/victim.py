"""A janitor in a process of its own, that says when it asks its store for something: it is killed after one of those.

Started as `python -m tests.maintenance.victim URL NOW`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flask_idempotency.testing import FrozenClock
from tests.maintenance.neglected import DRAIN, janitor_of, store_at


class Told:
    """Passes everything on, and says so before and after."""

    def __init__(self, port: Any) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            _say(name)
            answer = getattr(self._port, name)(*arguments, **options)
            _say(f"{name} done")
            return answer

        return call


class Telling:
    def __init__(self, store: Any) -> None:
        self.recovery, self.expiry = Told(store.recovery), Told(store.expiry)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(url: str, now: str) -> None:
    clock = FrozenClock(float(now))
    store = store_at(url, clock)
    janitor = janitor_of(store, clock, [], locked=False, telling=Telling(store))
    for task in janitor.tasks:
        janitor.run(task, DRAIN)
    _say("finished")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What the tests of all brokers share: inboxes in memory, an owner at work, and a consumer in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from flask_idempotency.consumers import Inbox, Later, Verdict
from flask_idempotency.stores.memory import MemoryStore
from tests.apps import LONG

PATIENCE: Final = 60
"""Seconds. A test that waits so long has failed."""


def memory_inbox(**policy: Any) -> Inbox:
    """Make an inbox over a memory of its own."""
    return Inbox.standalone({"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": LONG}, "billing", **policy)


class Hasty:
    """An inbox that notes its verdicts, and waits a hundredth of the time."""

    def __init__(self, inbox: Inbox) -> None:
        self.operation = inbox.operation
        self.verdicts: list[Verdict] = []
        self.changed = threading.Condition()
        self._inbox = inbox

    def process(self, message_id: str, work: Callable[[], Any], **more: Any) -> Verdict:
        verdict = self._inbox.process(message_id, work, **more)
        if isinstance(verdict, Later):
            verdict = replace(verdict, after=verdict.after / 100)
        with self.changed:
            self.verdicts.append(verdict)
            self.changed.notify_all()
        return verdict

    def wait_for(self, count: int, kind: type = object) -> None:
        """Wait until there were so many verdicts of this kind."""

        def enough() -> bool:
            return sum(isinstance(each, kind) for each in self.verdicts) >= count

        with self.changed:
            assert self.changed.wait_for(enough, PATIENCE), self.verdicts


class Effects:
    """Notes each run of a handler."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, run: Any) -> None:
        with self._changed:
            self.runs.append(run)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Any]:
        """Wait for so many runs, and return all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.runs) >= count, PATIENCE), self.runs
            return list(self.runs)


@contextmanager
def at_work(inbox: Inbox, message_id: str, *, payload: bytes | None = None) -> Iterator[threading.Event]:
    """Let another worker have this message until the block ends, or until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(PATIENCE)
        return "of the owner"

    owner = threading.Thread(target=inbox.process, args=(message_id, work), kwargs={"payload": payload})
    owner.start()
    try:
        assert begun.wait(PATIENCE)
        yield go_on
    finally:
        go_on.set()
        owner.join(PATIENCE)


@contextmanager
def in_background(consume: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Run a consumer in a thread until the block ends. Raise what it raised. The event is set when the consumer ends."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            consume(stop)
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=run, name="consumer")
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if raised:
        raise raised[0]

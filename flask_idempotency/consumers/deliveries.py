"""What the adapters of brokers share: try one delivery of a message until it is done, or set it aside.

An adapter fetches messages and gives them to its `Deliveries`, which try each in a thread until it is done or set aside. The
adapter acknowledges what is done. It is left with a message that no worker may do, if the application has no `dead` function.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Final, Self, TypeAlias

from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.consumers.verdicts import Dead, Later, MissingMessageId, Processed
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, StoreUnavailable

HEADER: Final = "message-id"
"""The header or attribute with the id that the sender gave a message."""

RETRIES: Final = 5
LONGEST_PAUSE_SECONDS: Final = 30.0
BUSY_SECONDS: Final = 1.0

NO_ID: Final = "missing-message-id"
EXHAUSTED: Final = "retries-exhausted"

Handler: TypeAlias = Callable[[Any], Any]
"""Takes the client's message, and does the work."""
SetAside: TypeAlias = Callable[[Any, str], Any]
"""Takes the client's message and the reason, and puts the message where people find it."""

_log = logging.getLogger("flask_idempotency")


Step: TypeAlias = float | str | None
"""What one try makes of a message. None: acknowledge it. A number: keep it, and try it again after these seconds.
A text: the reason why no worker may do it, and the application has no `dead` function for it."""


@dataclass(eq=False, repr=False, slots=True)
class Delivery:
    """One message that a broker delivered, and how often its handler failed here."""

    message: Any
    message_id: str | None
    payload: bytes | None
    place: Any = None
    """What its broker names this delivery by: a tag, a receipt, or a partition and an offset."""
    failures: int = 0
    waits: int = 0
    """How often the `dead` function failed, or the store was not there in the middle of the work."""
    dead: str | None = None
    """The reason why no worker may do it. Then only the `dead` function is called again."""


@dataclass(eq=False, repr=False)
class Deliveries:
    """The messages that one consumer has. A thread tries each of them, and tries it again when its pause is over.

    Only the consumer's own thread calls these methods, apart from `attempt`. The handlers run in the Flask application of the
    thread that made this object, if there was one. An error that stops the consumer is raised at the end of the `with` block,
    which first waits for the handlers that run.
    """

    inbox: Inbox
    handler: Handler
    _: KW_ONLY
    dead: SetAside | None
    retries: int = RETRIES
    tenant: Callable[[Any], str | None] | None = None
    born: Callable[[Any], float | None] | None = None
    stop: Event | None = None
    threads: int = 1
    wake: Callable[[], object] | None = None
    """Called in the thread of a handler when that has ended."""
    error: BaseException | None = field(default=None, init=False)
    """What ends the consumer, such as a fault of the configuration."""
    running: int = field(default=0, init=False)
    """How many handlers run or wait for a thread, also those of messages that were dropped."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigurationError(f"retries={self.retries}: must be 0 or more.")
        self._context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Enters what each message has of its own, as each request has: sessions of the database belong to it."""
        if "flask" in sys.modules:  # a consumer without Flask does not load it
            from flask import current_app, has_app_context

            if has_app_context():
                app: Any = current_app
                self._context = app._get_current_object().app_context
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="idempotency-consumer")
        self._due: dict[Delivery, float | None] = {}
        """When each message is tried, by the monotonic clock. None: a thread has it, or it is not tried again."""
        self._ended: SimpleQueue[tuple[Delivery, Future[Step]]] = SimpleQueue()

    def attempt(self, delivery: Delivery) -> Step:
        """Try this delivery once. Raises `ConfigurationError`, and every error that ends the process."""
        with self._context():
            step = self._process(delivery) if delivery.dead is None else delivery.dead
            if not isinstance(step, str):
                return step
            if delivery.dead is None:
                _log.error("%s: a message is set aside (%s).", self.inbox.operation, step)
            if self.dead is None:
                return step
            delivery.dead = step
            try:
                self.dead(delivery.message, step)
            except Exception:  # noqa: BLE001 - a function of the application may raise anything
                delivery.waits += 1
                _log.exception("%s: `dead` failed, and is called again.", self.inbox.operation)
                return _pause(delivery.waits)
            return None

    def _process(self, delivery: Delivery) -> Step:
        message = delivery.message
        try:
            verdict = self.inbox.process(
                delivery.message_id or "",
                lambda: self.handler(message),
                payload=delivery.payload,
                tenant=None if self.tenant is None else self.tenant(message),
                born=None if self.born is None else self.born(message),
            )
        except ConfigurationError:
            # The fault of no message: all of them would be set aside.
            raise
        except MissingMessageId:
            return NO_ID
        except LeaseLost:
            return BUSY_SECONDS
        except StoreUnavailable:
            delivery.waits += 1
            return _pause(delivery.waits)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            delivery.failures += 1
            _log.warning(
                "%s: the handler failed (%s), %d of %d times",
                self.inbox.operation,
                type(error).__name__,
                delivery.failures,
                self.retries + 1,
                exc_info=error,
            )
            return _pause(delivery.failures) if delivery.failures <= self.retries else EXHAUSTED
        match verdict:
            case Processed():
                return None
            case Later(after):
                return after
            case Dead(reason):
                return reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None and self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[Delivery]:
        """Return those that are held: to give them back, when no handler runs and none is started any more."""
        return iter(self._due)

    @property
    def ending(self) -> bool:
        """Whether no handler is started any more."""
        return self.error is not None or (self.stop is not None and self.stop.is_set())

    def hold(self, delivery: Delivery, seconds: float = 0.0) -> None:
        """Keep this message, and try it after this time."""
        self._due[delivery] = time.monotonic() + seconds

    def drop(self, delivery: Delivery) -> None:
        """Forget this message: another consumer has it."""
        self._due.pop(delivery, None)

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Keep this message to give it back, and end the consumer with the first of these errors."""
        self._due[delivery] = None
        self.error = self.error or error

    def pause(self, longest: float) -> float:
        """Return the seconds until the next try, at most `longest`."""
        due = [] if self.ending else [each - time.monotonic() for each in self._due.values() if each is not None]
        return max(min([longest, *due]), 0.0)

    def settled(self, longest: float = 0.0) -> Iterator[tuple[Delivery, str | None]]:
        """Try what is due. Yield what is done, with None, or set aside, with the reason.

        Wait for the first of these at most for `longest` seconds.
        """
        now = time.monotonic()
        for delivery, due in list(self._due.items()):
            if due is not None and due <= now and not self.ending:
                self._due[delivery] = None
                self.running += 1
                self._pool.submit(self.attempt, delivery).add_done_callback(partial(self._put, delivery))
        seconds = self.pause(longest)
        with suppress(Empty):
            while True:
                delivery, future = self._ended.get(timeout=seconds)
                seconds = 0.0
                self.running -= 1
                if (error := future.exception()) is not None:
                    self.fail(delivery, error)
                elif delivery not in self._due:
                    pass  # its new owner gets the message again
                elif (step := future.result()) is None or isinstance(step, str):
                    del self._due[delivery]
                    yield delivery, step
                else:
                    self.hold(delivery, step)

    def _put(self, delivery: Delivery, future: Future[Step]) -> None:
        self._ended.put((delivery, future))
        if self.wake is not None:
            # If the connection is lost, the broker delivers the message again.
            with suppress(Exception):
                self.wake()


def text_of(value: object) -> str | None:
    """Return an id as text, or None if it is none. Bytes that are no UTF-8 give a text that no others give."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "surrogateescape") or None
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value) or None
    return None


def _pause(count: int) -> float:
    """Return 1, 2, 4 … seconds."""
    return min(2.0 ** (count - 1), LONGEST_PAUSE_SECONDS)

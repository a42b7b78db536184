"""Messages of an outbox: their values, what sends them, and the table that keeps them.

An application publishes a message in the transaction of its rows. A relay sends it at least once, always under the same
message id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Protocol, runtime_checkable

from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.model import SealedBy
from flask_idempotency.engine.values import valueclass

__all__ = ["Adapter", "Message", "Undeliverable"]

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"


class Undeliverable(IdempotencyError):
    """This message can never be sent. The relay marks it dead, and later messages of its topic and key wait.

    An adapter raises or returns it. Operators see the text, so name no key, person or body in it.
    """


@valueclass(frozen=True, slots=True)
class Message:
    """A message as its publisher wrote it. An adapter sends it."""

    message_id: str
    """The same in every attempt. The receiver tells repeats by it."""
    topic: str
    body: bytes = field(repr=False)
    key: str | None = field(default=None, repr=False)
    """Messages of one topic and key are sent in the order in which they were published."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """ASCII. `content-type` is always there."""
    tenant: str | None = field(default=None, repr=False)

    @property
    def content_type(self) -> str:
        """The type of the body: `application/json`, unless the publisher passed bytes."""
        return self.headers["content-type"]

    def json(self) -> Any:
        """Return the value that was published. Raises `Undeliverable` if the publisher passed bytes of another type."""
        if self.content_type != JSON:
            raise Undeliverable("the body is not JSON, and this adapter needs JSON")
        return json.loads(self.body)


class Adapter(Protocol):
    """Sends messages to one system. Any object with this method is an adapter.

    Optional: an attribute `batch`, the most messages of one call (100 if it is absent), and a method `check(message)` that
    raises `ValueError` for a message that this adapter cannot send, which fails in `publish`.
    """

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send these, each for another topic and key, and return one result for each: None if the receiver confirmed it.

        Return `Undeliverable` for a message that can never be sent. After any other exception the relay tries again.
        Return within 20 seconds: other relays may take the messages over after 30.
        """
        ...


@valueclass(frozen=True, slots=True)
class StoredMessage:
    """A row of the outbox that a relay holds."""

    seq: int
    message: Message
    """Its body is still sealed if `sealed_by` is set."""
    attempts: int
    """How many attempts failed."""
    tenant_id: bytes | None = None
    sealed_by: SealedBy | None = None
    damaged: bool = False
    """The headers are unreadable: another program has changed the row."""


@valueclass(frozen=True, slots=True)
class OutboxCounts:
    """How many messages wait. Times are seconds by the database's clock."""

    waiting: int
    """Not sent yet, and not dead. Delayed ones and those that wait for another attempt are among them."""
    dead: int
    oldest: float
    """How long the oldest of them has been due; 0 if none is."""


@valueclass(frozen=True, slots=True)
class OutboxRow:
    """What an operator may know of a message. Neither its body, nor its key, nor its headers."""

    seq: int
    message_id: str
    topic: str
    state: str
    """`dead`, `held` by a relay, `due`, or `delayed`."""
    attempts: int
    age: float
    """Seconds since it was published."""
    wait: float
    """Seconds until the next attempt; 0 if it is due."""
    error: str | None
    behind: int
    """How many later messages of its topic and key wait for it."""


class OutboxQueue(Protocol):
    """The table of messages, as a relay uses it. Durations are seconds, and times are the database's.

    Every method raises `StoreUnavailable` if the database does not respond, and `ConfigurationError` if it has no table.
    """

    def claim(self, holder: bytes, *, limit: int, hold: float) -> Sequence[StoredMessage]:
        """Hold the first messages that are due, in their order, and return them.

        Leave out a message if an earlier one of its topic and key waits, is dead, or is held by another relay.
        """
        ...

    def confirm(self, holder: bytes, seqs: Sequence[int]) -> int:
        """Delete these messages, or keep them as published. Return how many of them this relay still held."""
        ...

    def delay(self, holder: bytes, seq: int, *, pause: float, error: str) -> None:
        """Count a failed attempt. Make the message due again after this pause."""
        ...

    def bury(self, holder: bytes, seq: int, *, error: str) -> None:
        """Mark the message dead."""
        ...

    def release(self, holder: bytes) -> None:
        """Give up what is still held, so that it can be claimed at once."""
        ...


@runtime_checkable
class SealsBodies(Protocol):
    """Encrypts bodies of messages. A codec with encryption offers it."""

    def seal_body(
        self, tid: bytes, message: Message, *, within: DataKeys | None = None
    ) -> tuple[bytes, SealedBy | None]:
        """Return the sealed body and its key, or the plain body and None while encryption is off.

        `within` are the data keys as the transaction of the message sees them. A new key is then made in it.
        """
        ...

    def opener(self) -> Callable[[StoredMessage], bytes]:
        """Return a function that opens some bodies. It asks the store once for each data key: another process may erase one.

        It raises `Undeliverable` for a body that was erased or changed, and `KeyProviderUnavailable` or `StoreUnavailable` for
        one that may open later.
        """
        ...

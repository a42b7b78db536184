"""Messages of an outbox: their values, what sends them, and the table that keeps them.

An application publishes a message in the transaction of its rows. A relay sends it at least once, always under the same
message id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from string import ascii_letters, digits
from typing import Any, Final, Protocol, runtime_checkable

from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import KeyedDigest, encode, keyed_name, optional
from flask_idempotency.engine.model import SealedBy
from flask_idempotency.engine.values import valueclass

__all__ = ["Adapter", "Message", "Undeliverable"]

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"

MAX_BODY_BYTES: Final = 1_048_576
"""Kafka's default limit of a message. A relay holds a hundred bodies in memory."""

MAX_HEADERS: Final = 50
NAME_CHARACTERS: Final = 255
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
# ASCII, because HTTP has no other safe characters.
HEADER_VALUE: Final = re.compile(r"[\x20-\x7e]{0,1000}")
RESERVED: Final = frozenset(
    {"message-id", "webhook-id", "idempotency-key", "content-length", "transfer-encoding", "host"}
)
"""Headers that adapters set."""

TOPIC_CHARACTERS: Final = f"{ascii_letters}{digits}._:/-"
TOPIC: Final = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
MESSAGE_ID: Final = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")


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
        """Return the value that was published. Raises `Undeliverable` if the publisher passed bytes of another type.

        It also does for a body that is damaged, so that the other messages of a call can be sent.
        """
        if self.content_type != JSON:
            raise Undeliverable("the body is not JSON, and this adapter needs JSON")
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise Undeliverable("the body is damaged: it is not JSON") from None


def is_name(value: str) -> bool:
    """Return whether this may be a key or a tenant. Databases and brokers refuse some characters, or drop them."""
    return 1 <= len(value) <= NAME_CHARACTERS and value.isprintable()


def flaw_of(message: Message) -> str | None:
    """Return what of a message no publisher can have written. An adapter might fail for it, or send another message."""
    for name, value, pattern in (("id", message.message_id, MESSAGE_ID), ("topic", message.topic, TOPIC)):
        if not pattern.fullmatch(value):
            return f"its {name} is unreadable"
    for name, given in (("key", message.key), ("tenant", message.tenant)):
        if given is not None and not is_name(given):
            return f"its {name} is unreadable"
    names = {name.lower() for name in message.headers}
    read: Mapping[str, object] = message.headers
    whole = all(
        HEADER_NAME.fullmatch(name) and isinstance(value, str) and HEADER_VALUE.fullmatch(value)
        for name, value in read.items()
    )
    fits = len(names) == len(message.headers) <= MAX_HEADERS and "content-type" in message.headers
    if not whole or not fits or names & RESERVED:
        return "its headers are unreadable"
    return "its body is too long" if len(message.body) > MAX_BODY_BYTES else None


class Adapter(Protocol):
    """Sends messages to one system. Any object with this method is an adapter.

    A relay calls `send` in a thread of its own, in a new application context, and never twice at the same time. Optional: an
    attribute `batch`, the most messages of one call (100 if it is absent), and a method `check(message)` that raises
    `ValueError` for a message that this adapter cannot send, which fails in `publish`.

    If one slow receiver must not hold up the others, set `parallel`, the most calls at the same time, from several threads. A
    method `receiver_of(message)` returns a name of the receiver, such as its host. Each receiver then has a share of the
    calls, and each call has one message.
    """

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send these, each for another topic and key, and return one result for each: None if the receiver confirmed it.

        Return `Undeliverable` for a message that can never be sent. After any other exception the relay tries again.
        Return within 20 seconds: other relays may take the messages over after 30.
        """
        ...


LANE_BYTES: Final = 16


@valueclass(frozen=True, slots=True)
class OutboxNames:
    """Derives what tells the rows of an outbox apart, from the namespace and the oldest secret in use.

    All of it is keyed: keys, ids and bodies are guessable. A rotation of the secret changes it when the old secret goes.
    """

    namespace: str
    digest: KeyedDigest = field(repr=False)
    former: str | None = None
    """The namespace before, whose messages this application sends too."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Return the namespaces whose messages this application sends."""
        return (self.namespace,) if self.former is None else (self.namespace, self.former)

    def row_id(self, message: Message, *, former: bool = False) -> str:
        """Return what is unique in the table: the id belongs to the namespace and the tenant."""
        namespace = self.former if former and self.former is not None else self.namespace
        tenant, message_id = optional(message.tenant), message.message_id.encode()
        return keyed_name(self.digest(encode(b"id", namespace.encode("utf-8", "surrogatepass"), tenant, message_id)))

    def lane(self, topic: str, key: str | None) -> bytes | None:
        """Return what messages have in common that are sent in order. None: the message has no key."""
        if key is None:
            return None
        return self.digest(encode(b"lane", topic.encode(), optional(key)))[:LANE_BYTES]

    def content(self, message: Message) -> bytes:
        """Return what must be the same if a message is published again. Headers may differ: one may trace a request."""
        key = optional(message.key)
        return self.digest(encode(b"content", message.topic.encode(), key, message.body))[:LANE_BYTES]


@valueclass(frozen=True, slots=True)
class Topics:
    """Which topics a route takes: those that match its pattern, and none of the patterns that go before it."""

    pattern: str
    before: tuple[str, ...] = ()


_TOKEN: Final = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def tokens_of(pattern: str) -> list[str]:
    """Split a pattern of `fnmatch` for the database: `*`, a plain character, or all the characters that it takes here.

    Topics have few characters, so `?` and `[…]` become a list of them. It is empty if no topic has such a character.
    """
    tokens: list[str] = []
    for part in _TOKEN.findall(pattern):
        if part != "*" and (part == "?" or len(part) > 1 or part not in TOPIC_CHARACTERS):
            tokens.append("[" + "".join(each for each in TOPIC_CHARACTERS if fnmatchcase(each, part)) + "]")
        else:
            tokens.append(part)
    return tokens


@valueclass(frozen=True, slots=True)
class StoredMessage:
    """A row of the outbox that a relay holds."""

    seq: int
    message: Message
    """If `sealed_by` is set, its body is sealed. Its key, headers and tenant are in the body, unless `former` is set."""
    attempts: int
    """How many attempts failed."""
    lane: bytes | None = None
    """What the messages of one topic and key have in common."""
    tenant_id: bytes | None = None
    sealed_by: SealedBy | None = None
    former: bool = False
    """A release before namespaces wrote the row. It sealed the body alone."""
    damaged: str | None = None
    """What is unreadable: another program has changed the row."""


@valueclass(frozen=True, slots=True)
class FormerRow:
    """A row without a namespace: a release before namespaces wrote it, or the namespace before this one."""

    topic: str
    key: str | None
    tenant: str | None
    tenant_id: bytes | None
    sealed: bool


@valueclass(frozen=True, slots=True)
class OutboxCounts:
    """How many messages wait. Times are seconds by the database's clock."""

    waiting: int
    """Not sent yet, and not dead. Delayed ones and those that wait for another attempt are among them."""
    dead: int
    oldest: float
    """How long the oldest of them has been due; 0 if none is."""


@valueclass(frozen=True, slots=True)
class FailingTopic:
    """The messages of one topic whose last attempt failed, and that are tried again."""

    topic: str
    messages: int
    oldest: float
    """Seconds since the first of them was published."""
    error: str
    """What stopped one of them."""


@valueclass(frozen=True, slots=True)
class OutboxTopic:
    """The messages of one topic that are not sent."""

    topic: str
    dead: int
    failing: int
    """Their last attempt failed, and they are tried again."""
    waiting: int
    """No attempt has failed for them."""
    oldest: float
    """Seconds since the first of them was published."""
    error: str | None
    """What stopped one of them."""


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
    """The messages of one namespace, as a relay uses them. Durations are seconds, and times are the database's.

    Every method raises `StoreUnavailable` if the database does not respond, and `ConfigurationError` if it has no table.
    """

    def claim(self, holder: bytes, *, topics: Topics, limit: int, hold: float) -> Sequence[StoredMessage]:
        """Hold the first messages of these topics that are due, and return them: the fewest failures first, then by age.

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

    def release(self, holder: bytes, seqs: Sequence[int]) -> None:
        """Give up these messages, if they are still held, so that they can be claimed at once."""
        ...

    def put_off(self, holder: bytes, seqs: Sequence[int], *, pause: float) -> None:
        """Make these messages due again after this pause. It counts as no attempt."""
        ...


@runtime_checkable
class SealsBodies(Protocol):
    """Encrypts messages. A codec with encryption offers it."""

    def seal_body(
        self, tid: bytes, message: Message, *, namespace: str | None, within: DataKeys | None = None
    ) -> tuple[bytes, SealedBy | None]:
        """Return the sealed message and its key, or the plain body and None while encryption is off.

        The namespace, the tenant, the key and the headers are sealed with the body. `namespace=None` seals the body alone, as
        the release before namespaces did. `within` are the data keys as the transaction of the message sees them. A new key is
        then made in it.
        """
        ...

    def opener(self, namespaces: Collection[str]) -> Callable[[StoredMessage], Message]:
        """Return a function that opens some messages. It asks the store once for each data key: another process may erase one.

        It raises `Undeliverable` for a message that was erased or changed, or that belongs to none of these namespaces, and
        `KeyProviderUnavailable` or `StoreUnavailable` for one that may open later.
        """
        ...

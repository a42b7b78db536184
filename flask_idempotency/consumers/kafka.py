"""Consume Kafka topics, with a consumer of confluent-kafka or of kafka-python.

Each partition has one message at a time. Its handler runs in a thread while polling goes on with the partition paused, so a
long handler provokes no rebalance. The offset is committed when the record of the message is durable.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, Final, TypeAlias

from flask_idempotency.consumers.deliveries import HEADER, RETRIES, Deliveries, Delivery, Handler, SetAside, text_of
from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import BrokerId, encode

__all__ = ["consume"]

IDLE_SECONDS: Final = 0.5
BUSY_SECONDS: Final = 0.05
COMMIT_SECONDS: Final = 1.0
"""How long to wait before a commit is repeated that the group refused, as it does while it rebalances."""
LAST_COMMIT_SECONDS: Final = 10.0
"""How long a consumer that stops repeats its last commits."""
STOPPED_SECONDS: Final = 60.0
"""How often a stopped partition looks whether its message was settled: by a resolver, or by an operator."""

KNOWN_CONFLUENT: Final = (2, 16)
"""The last release of confluent-kafka whose objects we have read."""

Partition: TypeAlias = tuple[str, int]
Changed: TypeAlias = Callable[[list[Partition]], None]
"""Takes the partitions that this consumer got or lost."""

_log = logging.getLogger("flask_idempotency")


def consume(
    consumer: Any,
    topics: str | Iterable[str],
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    retries: int = RETRIES,
    threads: int = 1,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
    stop: Event | None = None,
) -> None:
    """Subscribe to these topics and consume them, until `stop` is set. You close the consumer.

    `consumer` is a `Consumer` of confluent-kafka or a `KafkaConsumer` of kafka-python with `enable.auto.commit` off. Never use
    it in the handler: it belongs to this thread. Call this function in an application context if the inbox is one of a Flask
    application. Each message then has a context of its own.

    The id of a message is its header `message-id`. Without one it is the topic, the partition and the offset, and its
    timestamp, key and value are compared: a topic that was made again is refused, not skipped.

    The offset after a message is committed when it is done. A commit that the group refuses, because it rebalances, is repeated
    each second until the partition is lost. A message that may not run now is kept and tried again, and
    its partition waits. If the handler raises, that is after 1, 2, 4 … seconds, `retries` times. A message that no worker may
    do goes to `dead(message, reason)`, and is committed when that returns. Without `dead` it stops its partition, and is tried
    again each minute: a resolver or an operator can settle it.

    `threads` is how many handlers run at the same time, for as many partitions.

    Raises `ConfigurationError` for a consumer that commits by itself, and the errors of the client.
    """
    if threads < 1:
        raise ConfigurationError("threads must be 1 or more.")
    client = _client(consumer)
    with Deliveries(
        inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born, stop=stop, threads=threads
    ) as held:
        _Consumer(client, held).run([topics] if isinstance(topics, str) else list(topics))


@dataclass(eq=False, slots=True)
class _Consumer:
    """One call of `consume`, in the thread that polls."""

    client: _Client
    held: Deliveries
    work: dict[Partition, Delivery] = field(default_factory=dict)
    """The message that each partition is at. The partition is paused until that is done."""
    assigned: set[Partition] = field(default_factory=set)
    """Partitions that were assigned in the last poll. They may still be paused from an earlier assignment."""
    uncommitted: dict[Partition, int] = field(default_factory=dict)
    """Offsets whose commit was refused, of partitions that this consumer still has."""
    commits_again: float = 0.0
    """When these commits are repeated, by the monotonic clock."""

    def run(self, topics: list[str]) -> None:
        self.client.subscribe(topics, self.assigned.update, self._lost)
        ends = None
        while True:
            if self.held.ending and not self.held.running:
                # Until then, handlers that run may end, and are committed: polling keeps their partitions.
                ends = ends or time.monotonic() + LAST_COMMIT_SECONDS
                if not self.uncommitted or time.monotonic() >= ends:
                    break
            # A poll does not end when a handler does, so wait for that here and poll without waiting.
            for delivery, aside in self.held.settled(BUSY_SECONDS if self.held.running else 0.0):
                self._settle(delivery, aside)
            for delivery in self.client.poll(0.0 if self.held.running else self.held.pause(IDLE_SECONDS)):
                self._start(delivery)
            if self.uncommitted and time.monotonic() >= self.commits_again:
                self.commits_again = time.monotonic() + COMMIT_SECONDS
                for partition, offset in list(self.uncommitted.items()):
                    self._commit(partition, offset)
            for partition in self.assigned - self.work.keys():
                self.client.resume(partition)
            self.assigned.clear()
        for delivery in self.work.values():
            # Their offsets are not committed. The next member of the group gets them again.
            self.client.seek(*delivery.place)
        self.client.leave()

    def _start(self, delivery: Delivery) -> None:
        partition, offset = delivery.place
        self.client.pause(partition)
        if partition in self.work:
            # The client had it ready when the partition was paused. It comes again after the one before it.
            self.client.seek(partition, offset)
        else:
            self.work[partition] = delivery
            self.held.hold(delivery)

    def _settle(self, delivery: Delivery, aside: str | None) -> None:
        partition, offset = delivery.place
        if aside is None:
            del self.work[partition]
            self._commit(partition, offset + 1)
            self.client.resume(partition)
        else:
            _log.error("%s [%d] stops at offset %d (%s): see `dead`.", *partition, offset, aside)
            self.held.hold(delivery, STOPPED_SECONDS)

    def _commit(self, partition: Partition, offset: int) -> None:
        if not (error := self.client.commit(partition, offset)):
            self.uncommitted.pop(partition, None)
            return
        if partition not in self.uncommitted:
            self.commits_again = time.monotonic() + COMMIT_SECONDS
            _log.warning(
                "%s [%d]: the commit of offset %d was refused (%s). It is repeated until the partition is lost: its new owner "
                "then gets the message again, and the inbox replays it.",
                *partition,
                offset,
                error,
            )
        self.uncommitted[partition] = offset

    def _lost(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            if partition in self.work:
                self.held.drop(self.work.pop(partition))
            self.uncommitted.pop(partition, None)
            self.assigned.discard(partition)
            self.client.lost(partition)


def _delivery(
    partition: Partition,
    offset: int,
    message: Any,
    headers: Sequence[tuple[str, bytes | None]],
    key: Any,
    value: Any,
    timestamp: int,
) -> Delivery:
    place = partition, offset
    message_id = next((text_of(each) for name, each in reversed(headers) if name == HEADER), None)
    if message_id is not None:
        return Delivery(message, message_id, value if isinstance(value, bytes) else None, place)
    parts = [part if isinstance(part, bytes) else b"" for part in (key, value)]
    payload = encode(b"%d" % timestamp, *parts)
    return Delivery(message, BrokerId(f"{partition[0]}/{partition[1]}/{offset}"), payload, place)


def _client(consumer: Any) -> _Client:
    """Return the client of this consumer. Raises `ConfigurationError` if it commits by itself."""
    if isinstance(getattr(consumer, "config", None), dict):
        if consumer.config.get("enable_auto_commit"):
            raise ConfigurationError(_COMMITS.format(option="enable_auto_commit=False"))
        if consumer.config.get("group_id") is None:
            raise ConfigurationError("This KafkaConsumer has no group_id, so it cannot commit. Give it one.")
        return _KafkaPython(consumer)
    commits = _commits_by_itself(consumer)
    if commits:
        raise ConfigurationError(_COMMITS.format(option='"enable.auto.commit": False'))
    if commits is None:
        _log.warning("cannot see if this consumer has enable.auto.commit off: if it is on, messages get lost")
    return _Confluent(consumer)


_COMMITS: Final = (
    "This consumer commits offsets by itself, also those of messages that are still being handled: a crash would lose them. "
    "Make it with {option}."
)


class _Confluent:
    """A consumer of confluent-kafka."""

    def __init__(self, consumer: Any) -> None:
        import confluent_kafka

        self._consumer = consumer
        self._place = confluent_kafka.TopicPartition
        self._error = confluent_kafka.KafkaException
        self._reported: set[int] = set()

    def subscribe(self, topics: list[str], assigned: Changed, lost: Changed) -> None:
        def call(tell: Changed, consumer: Any, places: Any) -> None:
            tell([(place.topic, place.partition) for place in places])

        gone = partial(call, lost)
        self._consumer.subscribe(topics, on_assign=partial(call, assigned), on_revoke=gone, on_lost=gone)

    def poll(self, seconds: float) -> list[Delivery]:
        message = self._consumer.poll(seconds)
        if message is None:
            return []
        error = message.error()
        if error is not None:
            if error.fatal():
                raise self._error(error)
            if error.code() not in self._reported:
                self._reported.add(error.code())
                _log.warning("Kafka: %s. Polling goes on", error.name())
            return []
        partition = message.topic(), message.partition()
        headers = message.headers() or []
        moment = message.timestamp()[1]
        return [_delivery(partition, message.offset(), message, headers, message.key(), message.value(), moment)]

    def pause(self, partition: Partition) -> None:
        self._consumer.pause([self._place(*partition)])

    def resume(self, partition: Partition) -> None:
        with _tolerating(partition, self._error):
            self._consumer.resume([self._place(*partition)])

    def seek(self, partition: Partition, offset: int) -> None:
        with _tolerating(partition, self._error):
            self._consumer.seek(self._place(*partition, offset))

    def commit(self, partition: Partition, offset: int) -> str:
        try:
            (committed,) = self._consumer.commit(offsets=[self._place(*partition, offset)], asynchronous=False)
        except self._error as error:
            return str(error.args[0].name())
        return "" if committed.error is None else str(committed.error.name())

    def lost(self, partition: Partition) -> None:
        # It stays paused for its next assignment. And one that is resumed right after an assignment may never be fetched again
        # (librdkafka#5591), so resume it before.
        self.resume(partition)

    def leave(self) -> None:
        pass


class _KafkaPython:
    """A consumer of kafka-python.

    It takes all that a fetch brought, and keeps it: kafka-python 3.0.12 never returns the records of a partition that was
    paused between two of them.
    """

    def __init__(self, consumer: Any) -> None:
        import kafka.errors  # type: ignore[import-untyped]

        self._consumer = consumer
        self._kafka = kafka
        self._place = kafka.TopicPartition
        # The latter two for a partition that is not assigned.
        self._refusals = kafka.errors.KafkaError, KeyError, ValueError
        self._ready: dict[Partition, deque[Delivery]] = {}
        """The messages that a poll has not returned yet."""
        self._paused: set[Partition] = set()

    def subscribe(self, topics: list[str], assigned: Changed, lost: Changed) -> None:
        class Listener(self._kafka.ConsumerRebalanceListener):  # type: ignore[misc,name-defined]
            def on_partitions_assigned(self, places: Any) -> None:
                assigned([tuple(place) for place in places])

            def on_partitions_revoked(self, places: Any) -> None:
                lost([tuple(place) for place in places])

            on_partitions_lost = on_partitions_revoked

        self._consumer.subscribe(topics=topics, listener=Listener())

    def poll(self, seconds: float) -> list[Delivery]:
        waiting = any(self._ready[partition] for partition in self._ready.keys() - self._paused)
        found = self._consumer.poll(timeout_ms=0 if waiting else int(seconds * 1000), max_records=2**31)
        for place, records in found.items():
            self._ready.setdefault(tuple(place), deque()).extend(
                _delivery(tuple(place), each.offset, each, each.headers, each.key, each.value, each.timestamp)
                for each in records
            )
        return [self._ready[each].popleft() for each in self._ready.keys() - self._paused if self._ready[each]]

    def pause(self, partition: Partition) -> None:
        self._paused.add(partition)
        self._consumer.pause(self._place(*partition))

    def resume(self, partition: Partition) -> None:
        self._paused.discard(partition)
        if not self._ready.get(partition):
            with _tolerating(partition, *self._refusals):
                self._consumer.resume(self._place(*partition))

    def seek(self, partition: Partition, offset: int) -> None:
        self._ready.pop(partition, None)
        with _tolerating(partition, *self._refusals):
            self._consumer.seek(self._place(*partition), offset)

    def lost(self, partition: Partition) -> None:
        self._ready.pop(partition, None)
        self._paused.discard(partition)

    def leave(self) -> None:
        for ready in list(self._ready.values()):
            if ready:
                self.seek(*ready[0].place)

    def commit(self, partition: Partition, offset: int) -> str:
        try:
            self._consumer.commit({self._place(*partition): self._kafka.OffsetAndMetadata(offset, "", -1)})
        except (self._kafka.errors.KafkaError, AssertionError, ValueError) as error:
            return type(error).__name__
        return ""


_Client: TypeAlias = _Confluent | _KafkaPython
"""All methods of a client run in the thread that polls. `commit` returns the name of the error that refused it, or nothing."""


@contextmanager
def _tolerating(partition: Partition, *errors: type[Exception]) -> Iterator[None]:
    """Log that this consumer may not do that with its partition. Its owner gets the message again, and the inbox replays."""
    try:
        yield
    except errors as error:
        name = error.args[0].name() if error.args and hasattr(error.args[0], "name") else type(error).__name__
        _log.warning("%s [%d]: %s. If this partition was lost, its new owner gets the message again", *partition, name)


def _commits_by_itself(consumer: Any) -> bool | None:
    """Return whether this confluent-kafka consumer commits offsets that we did not. None: it cannot be seen.

    The client has no way to ask. So this reads the configuration from librdkafka, by the pointer that follows the header of
    the object: `Handle` in confluent_kafka.h begins so in all releases from 0.9 to 2.16. Of a later one we know nothing, and
    a wrong pointer would end the process.
    """
    from confluent_kafka import __version__, cimpl

    major, minor = (int(part) for part in str(__version__).split(".")[:2])
    if not isinstance(consumer, cimpl.Consumer) or (major, minor) > KNOWN_CONFLUENT:
        return None
    try:
        library = ctypes.PyDLL(cimpl.__file__)
        configuration, get = library.rd_kafka_conf, library.rd_kafka_conf_get
    except (AttributeError, OSError):
        return None  # linked in another way
    configuration.restype, configuration.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    get.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)]
    pointer = ctypes.c_void_p.from_address(id(consumer) + object.__basicsize__).value
    if pointer is None:
        return None  # closed: the first poll says so
    values = []
    for name in (b"enable.auto.commit", b"enable.auto.offset.store"):
        text, size = ctypes.create_string_buffer(16), ctypes.c_size_t(16)
        if get(configuration(pointer), name, text, ctypes.byref(size)) != 0:
            return None
        values.append(text.value)
    return values == [b"true", b"true"]

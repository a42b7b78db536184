"""Consume a RabbitMQ queue: with pika by `consume`, or with kombu by `on_message`.

A message stays unacknowledged until its record is durable. A message that has to wait is kept here and tried again. It is
never given back in order to wait: a quorum queue counts that, and drops the message at its delivery limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any, Final, assert_never

from flask_idempotency.consumers.deliveries import (
    HEADER,
    RETRIES,
    Aside,
    Deliveries,
    Delivery,
    Done,
    Handler,
    SetAside,
    Step,
    Wait,
    in_thread,
    text_of,
)
from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.values import valueclass

__all__ = ["Message", "consume", "on_message"]

LOOK_SECONDS: Final = 0.2
"""How often `consume` looks whether it is to stop."""

_log = logging.getLogger("flask_idempotency")


@valueclass(frozen=True, slots=True)
class Message:
    """A message as pika delivers it."""

    body: bytes
    properties: Any
    """pika's `BasicProperties`."""
    method: Any
    """pika's `Basic.Deliver`: exchange, routing key, and whether the broker delivers it again."""

    @property
    def headers(self) -> dict[str, Any]:
        """The headers, or an empty dictionary."""
        return self.properties.headers or {}


def consume(
    channel: Any,
    queue: str,
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    retries: int = RETRIES,
    prefetch: int = 1,
    threads: int = 1,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
    stop: Event | None = None,
) -> None:
    """Consume this queue on a channel of a pika `BlockingConnection`, until `stop` is set.

    `handler(message)` gets a `Message` and runs in a thread, so that this thread can answer heartbeats: a handler may take
    longer than they do. Never use the channel or its connection in the handler: they belong to this thread. Call this
    function in an application context if the inbox is one of a Flask application. Each message then has a context of its own.

    A message is acknowledged when it is done. If it may not run now, this process keeps it and tries it again. If the handler
    raises, that is after 1, 2, 4 … seconds, `retries` times. A message that no worker may do, or that has no id, goes to
    `dead(message, reason)` and is acknowledged when that returns. Without `dead` it is rejected, so it goes to the dead-letter
    exchange of its queue. If the queue has none, it is gone.

    `prefetch` is how many messages the broker sends ahead. Above 1, others overtake a message that waits. `threads` is how
    many handlers run at the same time.

    Raises the errors of pika if the connection or the channel is lost, and `ConfigurationError`.
    """
    if prefetch < 1 or threads < 1:
        raise ConfigurationError("prefetch and threads must be 1 or more.")
    deliveries = Deliveries(inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born)
    channel.basic_qos(prefetch_count=prefetch)
    with ThreadPoolExecutor(threads, thread_name_prefix="idempotency-consumer") as pool:
        consumer = _Consumer(channel, deliveries, pool, stop or Event())
        consumer.run(queue)


class _Consumer:
    """One call of `consume`. Its methods run in the thread of the connection, except `_finished`."""

    def __init__(self, channel: Any, deliveries: Deliveries, pool: ThreadPoolExecutor, stop: Event) -> None:
        self._channel = channel
        self._connection = channel.connection
        self._deliveries = deliveries
        self._pool = pool
        self._stop = stop
        self._running: set[int] = set()
        """The delivery tags of the messages that a thread has."""
        self._waiting: set[int] = set()
        self._error: BaseException | None = None
        self._ended = False

    @property
    def _ending(self) -> bool:
        return self._ended or self._error is not None or self._stop.is_set()

    def run(self, queue: str) -> None:
        tag = self._channel.basic_consume(queue, self._received)
        try:
            self._look(tag)
            self._channel.start_consuming()
            # Cancelled: handlers that run may end, and are acknowledged.
            while self._running:
                self._connection.process_data_events(time_limit=LOOK_SECONDS)
        finally:
            self._ended = True
        for waiting in self._waiting:
            self._channel.basic_nack(waiting, requeue=True)
        if self._error is not None:
            raise self._error

    def _look(self, tag: str) -> None:
        if self._ending:
            self._channel.basic_cancel(tag)
        elif tag in self._channel.consumer_tags:
            self._connection.call_later(LOOK_SECONDS, partial(self._look, tag))
        else:
            _log.warning("the broker or another thread has cancelled a consumer, so it ends")

    def _received(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        message = Message(body, properties, method)
        message_id = text_of(properties.message_id) or text_of(message.headers.get(HEADER))
        self._start(method.delivery_tag, Delivery(message, message_id, body))

    def _start(self, tag: int, delivery: Delivery) -> None:
        if self._ending:
            self._waiting.add(tag)
            return
        self._waiting.discard(tag)
        self._running.add(tag)
        future = self._pool.submit(self._deliveries.attempt, delivery)
        future.add_done_callback(partial(self._finished, tag, delivery))

    def _finished(self, tag: int, delivery: Delivery, future: Future[Step]) -> None:
        # In the handler's thread. If the connection is lost, the broker delivers the message again.
        with suppress(Exception):
            self._connection.add_callback_threadsafe(partial(self._settle, tag, delivery, future))

    def _settle(self, tag: int, delivery: Delivery, future: Future[Step]) -> None:
        self._running.discard(tag)
        error = future.exception()
        if error is not None:
            self._error = self._error or error
            self._waiting.add(tag)
            return
        match future.result():
            case Done():
                self._channel.basic_ack(tag)
            case Wait(seconds):
                self._waiting.add(tag)
                self._connection.call_later(seconds, partial(self._start, tag, delivery))
            case Aside():
                self._channel.basic_reject(tag, requeue=False)
            case unexpected:
                assert_never(unexpected)


def on_message(
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    retries: int = RETRIES,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
) -> Callable[[Any], None]:
    """Return a function for `kombu.Consumer(…, on_message=…)`, or for `on_message` of a `ConsumerMixin`'s consumers.

    It returns when the message is acknowledged or rejected, and does what `consume` does in the meantime: `handler(message)`
    gets kombu's `Message` and runs in a thread, and this thread sends heartbeats. Give the consumer a `prefetch_count` of 1.
    Messages of a greater prefetch wait too.
    """
    made: list[Deliveries] = []

    def received(message: Any) -> None:
        if not made:
            # Now: this function may be made where there is no application yet.
            made.append(Deliveries(inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born))
        properties, headers, body = message.properties or {}, message.headers or {}, message.body
        message_id = text_of(properties.get("message_id")) or text_of(headers.get(HEADER))
        payload = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
        delivery = Delivery(message, message_id, payload)
        heart = _Heart(message)
        while True:
            match heart.beat_until(in_thread(partial(made[0].attempt, delivery))):
                case Done():
                    message.ack()
                    return
                case Aside():
                    message.reject(requeue=False)
                    return
                case Wait(seconds):
                    heart.pause(seconds)

    return received


class _Heart:
    """Sends the heartbeats of the connection that a kombu message came from. Most transports have none."""

    def __init__(self, message: Any) -> None:
        connection = getattr(message.channel, "connection", None)
        self._send = getattr(connection, "send_heartbeat", None)
        heartbeat = getattr(connection, "heartbeat", None) or 0
        self._interval = heartbeat / 3 if self._send is not None and heartbeat > 0 else None

    def beat_until(self, future: Future[Step]) -> Step:
        """Return what the thread returns. Raises what it raises, and the connection's error only after it has ended."""
        lost: Exception | None = None
        while not wait_for([future], timeout=self._interval).done:
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 - the errors of any transport
                lost = error
                self._interval = None
        step = future.result()
        if lost is not None:
            raise lost
        return step

    def pause(self, seconds: float) -> None:
        """Let this time pass."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(left if self._interval is None else min(left, self._interval))
            if self._interval is not None:
                self._beat()

    def _beat(self) -> None:
        if self._send is not None:
            self._send()

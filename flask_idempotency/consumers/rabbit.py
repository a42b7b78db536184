"""Consume a RabbitMQ queue: with pika by `consume`, or with kombu by `on_message`.

A message stays unacknowledged until its record is durable. A message that has to wait is kept here and tried again. It is
never given back in order to wait: a quorum queue counts that, and drops the message at its delivery limit.

RabbitMQ destroys what is rejected if the queue has no dead-letter exchange. So a message that no worker may do is rejected
only if the queue is seen to have one. Otherwise the consumer stops, and the message stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event
from typing import Any, Final

from flask_idempotency.consumers.deliveries import HEADER, RETRIES, Deliveries, Delivery, Handler, SetAside, text_of
from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.consumers.verdicts import MessageStopped
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.values import valueclass

__all__ = ["Message", "MessageStopped", "consume", "on_message"]

LOOK_SECONDS: Final = 0.2
"""How often `consume` looks whether it is to stop, or whether a message is to be tried again."""

IDLE_SECONDS: Final = 60.0
"""How long `on_message` waits for a handler if the connection needs no heartbeats. It then waits again."""

MOST_PROPERTIES: Final = 32
"""No queue has so many properties that a declaration is compared with."""

_DEAD_LETTERS: Final = "x-dead-letter-exchange"
_DIFFERS: Final = re.compile(
    r"inequivalent arg '([^']+)'.*: received .* but current is (?:(none)|'(true|false)'|the value '(.*)' of type '(\w+)')$",
    re.DOTALL,
)
"""How RabbitMQ refuses a declaration that differs from the queue: with the queue's own value."""

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
    dead_letters: bool | None = None,
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
    `dead(message, reason)` and is acknowledged when that returns. Without `dead` it is rejected if the queue has a dead-letter
    exchange, and goes there. If the queue has none, the consumer stops and the message stays in the queue. It looks for that
    exchange when it starts, and cannot see one that a policy sets: then pass `dead_letters=True`.

    `prefetch` is how many messages the broker sends ahead. Above 1, others overtake a message that waits. `threads` is how
    many handlers run at the same time.

    Raises `MessageStopped` if it stops for such a message, the errors of pika if the connection or the channel is lost, and
    `ConfigurationError`.
    """
    if prefetch < 1 or threads < 1:
        raise ConfigurationError("prefetch and threads must be 1 or more.")
    connection = channel.connection
    held = Deliveries(inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born, stop=stop, threads=threads)
    held.wake = lambda: connection.add_callback_threadsafe(settle)
    if dead is None and dead_letters is None:
        dead_letters = _sees_dead_letters(inbox, queue, nullcontext(connection))
    channel.basic_qos(prefetch_count=prefetch)

    # All of these run in the thread of the connection.
    def received(_: Any, method: Any, properties: Any, body: bytes) -> None:
        message = Message(body, properties, method)
        message_id = text_of(properties.message_id) or text_of(message.headers.get(HEADER))
        held.hold(Delivery(message, message_id, body, method.delivery_tag))
        settle()

    def settle() -> None:
        for delivery, aside in held.settled():
            if aside is None:
                channel.basic_ack(delivery.place)
            elif dead_letters:
                channel.basic_reject(delivery.place, requeue=False)
            else:
                held.fail(delivery, _stopped(inbox, queue, aside))

    def look() -> None:
        settle()
        if held.ending:
            channel.basic_cancel(tag)
        elif tag in channel.consumer_tags:
            connection.call_later(held.pause(LOOK_SECONDS), look)
        else:
            _log.warning("the broker or another thread has cancelled a consumer, so it ends")

    with held:
        tag = channel.basic_consume(queue, received)
        look()
        channel.start_consuming()
        # Cancelled: handlers that run may end, and are acknowledged.
        while held.running:
            connection.process_data_events(time_limit=LOOK_SECONDS)
        for delivery in held:
            channel.basic_nack(delivery.place, requeue=True)


def on_message(
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    retries: int = RETRIES,
    dead_letters: bool | None = None,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
) -> Callable[[Any], None]:
    """Return a function for `kombu.Consumer(…, on_message=…)`, or for `on_message` of a `ConsumerMixin`'s consumers.

    It returns when the message is acknowledged or rejected, and does what `consume` does in the meantime: `handler(message)`
    gets kombu's `Message` and runs in a thread, and this thread sends heartbeats. Give the consumer a `prefetch_count` of 1.
    Messages of a greater prefetch wait too.

    Without `dead`, the function looks at the first message of each queue whether that has a dead-letter exchange, over a
    connection of its own. If it sees none, it raises `MessageStopped` for a message that no worker may do, and leaves it
    unacknowledged: close the connection, and the broker has it again.
    """
    seen: dict[str, bool] = {}

    def received(message: Any) -> None:
        # Now: this function may be made where there is no application yet.
        held = Deliveries(inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born)
        queue = _queue_of(message)
        if queue not in seen:
            # Of each queue: one consumer may have several, and not all of them a dead-letter exchange.
            look = dead is None and dead_letters is None
            seen[queue] = _sees_dead_letters(inbox, queue, _connected(message)) if look else bool(dead_letters)
        properties, headers, body = message.properties or {}, message.headers or {}, message.body
        message_id = text_of(properties.get("message_id")) or text_of(headers.get(HEADER))
        payload = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
        delivery = Delivery(message, message_id, payload)
        interval, beat = _heartbeat(message)
        with held:
            held.hold(delivery)
            while not held.ending:
                for _, aside in held.settled(interval):
                    if aside is None:
                        message.ack()
                    elif seen[queue]:
                        message.reject(requeue=False)
                    else:
                        raise _stopped(inbox, queue, aside)
                    return
                beat()

    return received


def _stopped(inbox: Inbox, queue: str, reason: str) -> MessageStopped:
    return MessageStopped(
        f"{inbox.operation}: no worker may do a message ({reason}), so it stays in its queue and this consumer stops: "
        + _no_exchange(queue)
    )


def _no_exchange(queue: str) -> str:
    return (
        f"the queue {repr(queue) if queue else 'of this consumer'} has no dead-letter exchange that this consumer sees, and "
        "RabbitMQ would destroy what is rejected. Pass dead=…, or declare the queue with x-dead-letter-exchange. A policy "
        "cannot be seen: if one gives the queue its dead-letter exchange, pass dead_letters=True."
    )


def _sees_dead_letters(inbox: Inbox, queue: str, connected: AbstractContextManager[Any]) -> bool:
    """Return whether this queue is seen to have a dead-letter exchange. Log it if not. An empty name is not known."""
    seen = False
    try:
        with connected as connection:
            seen = queue != "" and _has_dead_letters(connection.channel, queue)
    except Exception as error:  # noqa: BLE001 - the errors of any client: no permission, or a broker of another kind
        _log.warning("cannot see whether %r has a dead-letter exchange (%s)", queue, type(error).__name__)
    if not seen:
        _log.warning("%s: %s", inbox.operation, _no_exchange(queue))
    return seen


@contextmanager
def _connected(message: Any) -> Iterator[Any]:
    """Connect again: the connection of this message is in the middle of a delivery."""
    client = message.channel.connection.client
    if client.transport.driver_type != "amqp":
        raise NotImplementedError
    with client.clone() as connection:
        yield connection


def _has_dead_letters(open_channel: Callable[[], Any], queue: str) -> bool:
    """Return whether this queue was declared with a dead-letter exchange that is there. False if that cannot be seen.

    AMQP has no way to ask. But a declaration that differs from the queue is refused with the queue's own value, and closes
    the channel. So this declares again what it has learned, until nothing differs. It makes no queue: the first declaration
    is passive, and it takes the configure permission.
    """
    declared: dict[str, bool] = {"durable": True, "auto_delete": False}
    arguments: dict[str, Any] = {}
    if _declared(open_channel, lambda channel: channel.queue_declare(queue, passive=True)):
        return False
    for _ in range(MOST_PROPERTIES):
        refused = _declared(open_channel, lambda channel: channel.queue_declare(queue, arguments=arguments, **declared))
        if not refused:
            break
        found = _DIFFERS.search(refused)
        if found is None:
            return False
        name, none, flag, value, kind = found.groups()
        if flag is not None:
            declared[name] = flag == "true"
        elif none is not None:
            del arguments[name]
        else:
            arguments[name] = value if kind == "longstr" else value == "true" if kind == "bool" else int(value)
    else:
        return False
    exchange, key = arguments.get(_DEAD_LETTERS), arguments.get("x-dead-letter-routing-key")
    if exchange is None:
        return False
    if exchange == "":
        # The default exchange gives a message to the queue that its key names: its own, if no other key is set.
        return key not in (None, queue) and not _declared(open_channel, lambda it: it.queue_declare(key, passive=True))
    return not _declared(open_channel, lambda channel: channel.exchange_declare(exchange, "direct", True))


def _declared(open_channel: Callable[[], Any], declare: Callable[[Any], object]) -> str:
    """Declare something on a channel of its own. Return how the broker refused it, or an empty string."""
    channel = open_channel()
    try:
        declare(channel)
    except Exception as error:
        refused = str(getattr(error, "reply_text", ""))
        if getattr(error, "reply_code", None) not in (404, 406):
            raise
        return refused or "refused"
    channel.close()
    return ""


def _queue_of(message: Any) -> str:
    """Return the name of the queue that a kombu message came from, which it does not carry. Empty if it cannot be seen."""
    tag = (message.delivery_info or {}).get("consumer_tag")
    consumer = getattr((getattr(message.channel, "callbacks", None) or {}).get(tag), "__self__", None)
    tags = getattr(consumer, "_active_tags", None) or {}
    return next((name for name, its in tags.items() if its == tag), "")


def _heartbeat(message: Any) -> tuple[float, Callable[[], object]]:
    """Return how often this message's connection needs a heartbeat, and what sends one. Most transports need none."""
    connection = getattr(message.channel, "connection", None)
    beat = getattr(connection, "send_heartbeat", None)
    seconds = getattr(connection, "heartbeat", None) or 0
    return (seconds / 3, beat) if beat is not None and seconds > 0 else (IDLE_SECONDS, lambda: None)

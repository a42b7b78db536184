"""Send messages to Celery, to an AMQP exchange, and to Kafka.

This module imports no broker's client. Each adapter opens its connection in the process that sends, so publishers open none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.outbox import JSON, Message, Undeliverable
from flask_idempotency.maintenance.relay import NotTried, SendFailed

CONFIRM_SECONDS: Final = 5.0
"""How long a broker may take to confirm one message."""

BEGIN_SECONDS: Final = 3.0
"""After this, no further message of a call is begun. A call may take 20 seconds, and one message may take 15 of them."""

KAFKA_SECONDS: Final = 15.0
"""How long Kafka may take to confirm a batch."""

_TOO_LARGE: Final = frozenset({"MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE", "MessageSizeTooLargeError"})


def _one_by_one(messages: Sequence[Message], send: Any) -> list[Exception | None]:
    """Send each message. After a failure the broker is probably away: do not wait for it again with every other message.

    Leave the rest to a later call if the broker is slow: the hold of the relay must not end in this one.
    """
    results: list[Exception | None] = []
    failed: Exception | None = None
    began = time.monotonic()
    for message in messages:
        if failed is not None:
            results.append(failed)
            continue
        if results and time.monotonic() - began >= BEGIN_SECONDS:
            results.append(NotTried())
            continue
        try:
            results.append(send(message))
        except Undeliverable as error:
            results.append(error)
        except Exception as error:  # noqa: BLE001 - each client has exceptions of its own
            failed = error
            results.append(error)
    return results


_OF_CELERY: Final = frozenset(
    {
        "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id",
        "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers",
        "stamps", "compression", "reply_to", "correlation_id", "callbacks", "errbacks", "chain", "chord", "delivery_info",
        "args", "kwargs", "is_eager", "utc", "properties", "called_directly",
    }
)  # fmt: skip


class Tasks:
    """Send each message as a Celery task. The topic is the name of the task, and the message id is its id.

    A JSON object becomes the keyword arguments, and a JSON array the positional ones. Decorate the task with
    `@idempotent_task`; it needs no `key`. `options` are those of `send_task`, such as `queue`. An AMQP broker needs
    `broker_transport_options = {"confirm_publish": True}`: without it, Celery does not notice that a broker is frozen.
    """

    batch = 20

    def __init__(self, celery_app: Any, **options: Any) -> None:
        if not callable(getattr(celery_app, "send_task", None)):
            raise TypeError(f"Tasks takes a Celery application, not {type(celery_app).__name__}.")
        if "task_id" in options:
            raise TypeError("Tasks sets the task_id: it is the id of the message.")
        self._app = celery_app
        self._options = options
        self._confirms = False

    def check(self, message: Message) -> None:
        """Raise `ValueError` for a body that is neither a JSON object nor a JSON array, and for a header of Celery's own."""
        for name in message.headers:
            # Celery merges them over its own: this one would run another task, or under another id.
            if name in _OF_CELERY:
                raise ValueError(f"headers: Celery sets {name} itself.")
        # The first byte decides: JSON was written without white space.
        if message.content_type != JSON or message.body[:1] not in (b"{", b"["):
            raise ValueError("body: a task takes a dict of its keyword arguments, or a list of its arguments.")

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send one after the other, and wait until the broker has each."""
        if not self._confirms:
            with self._app.connection_for_write() as connection:
                amqp = connection.transport.driver_type == "amqp"
            if amqp and not (self._app.conf.broker_transport_options or {}).get("confirm_publish"):
                raise ConfigurationError(
                    'Set broker_transport_options = {"confirm_publish": True} on the Celery application.'
                )
            self._confirms = True
        return _one_by_one(messages, self._sent)

    def _sent(self, message: Message) -> None:
        arguments = message.json()
        if not isinstance(arguments, dict | list):
            raise Undeliverable("a task takes a JSON object or a JSON array")
        positional, keywords = ([], arguments) if isinstance(arguments, dict) else (arguments, {})
        headers = {name: value for name, value in message.headers.items() if name != "content-type"}
        options = {"headers": headers, **self._options} if headers else self._options
        self._app.send_task(message.topic, positional, keywords, task_id=message.message_id, **options)


class Exchange:
    """Send each message to an AMQP exchange through a kombu `Connection`. The topic is the routing key.

    The broker confirms each message before it counts as sent, and refuses one that no queue takes. Messages are persistent
    and carry the `message_id`. With the default `exchange` the topic is the name of a queue.
    """

    batch = 20

    def __init__(self, connection: Any, exchange: str = "") -> None:
        if not callable(getattr(connection, "clone", None)):
            raise TypeError(f"Exchange takes a Connection of kombu, not {type(connection).__name__}.")
        if connection.transport.driver_type != "amqp":
            raise ConfigurationError(
                f"Exchange needs an AMQP broker, which confirms messages, and not {connection.transport.driver_type}. For "
                "Celery on another broker, route to Tasks(celery_app)."
            )
        self._given = connection
        self._exchange = exchange
        self._forget()
        after_fork(self._forget)

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send one after the other, and wait for the confirmation of each."""
        return _one_by_one(messages, self._sent)

    def _forget(self) -> None:
        self._connection: Any = None
        self._producer: Any = None
        self._returned: list[object] = []

    def _sent(self, message: Message) -> None:
        try:
            self._publish(message)
        except Exception:
            connection = self._connection
            self._forget()
            if connection is None:
                raise
            # The broker may have closed an idle connection. A message that arrives twice has one id.
            connection.release()
            self._publish(message)
        if self._returned:
            raise SendFailed("no queue takes this topic")

    def _publish(self, message: Message) -> None:
        if self._producer is None:
            options = {**(self._given.transport_options or {}), "confirm_publish": True}
            connection = self._given.clone(transport_options=options, connect_timeout=CONFIRM_SECONDS)
            connection.connect()
            self._producer = connection.Producer(on_return=lambda *returned: self._returned.append(returned))
            self._connection = connection
        self._returned.clear()
        self._producer.publish(
            message.body,
            routing_key=message.topic,
            exchange=self._exchange,
            headers={name: value for name, value in message.headers.items() if name != "content-type"},
            content_type=message.content_type,
            content_encoding="utf-8" if message.content_type == JSON else "binary",
            message_id=message.message_id,
            delivery_mode=2,
            mandatory=True,
            timeout=CONFIRM_SECONDS,
            confirm_timeout=CONFIRM_SECONDS,
            retry=False,
        )


class Kafka:
    """Send each message to the Kafka topic of its name, with its key, and the header `message-id`.

    `producer` is a configuration of confluent-kafka, such as `{"bootstrap.servers": "kafka:9092"}`, or a producer of
    confluent-kafka or kafka-python. A configuration is better: each process that sends makes a producer of its own, because
    none survives a fork. `enable.idempotence` must be on. A producer of confluent-kafka does not tell its configuration: turn
    it on yourself.
    """

    def __init__(self, producer: Any) -> None:
        self._config: dict[str, Any] | None = None
        if isinstance(producer, Mapping):
            idempotent = producer.get("enable.idempotence", True)
            self._config = {"message.timeout.ms": int(KAFKA_SECONDS * 1000), **producer, "enable.idempotence": True}
        elif callable(getattr(producer, "produce", None)) and callable(getattr(producer, "flush", None)):
            idempotent = True
        elif callable(getattr(producer, "send", None)) and isinstance(getattr(producer, "config", None), Mapping):
            idempotent = producer.config.get("enable_idempotence", False)
        else:
            raise TypeError(f"Kafka takes a configuration or a producer, not {type(producer).__name__}.")
        if str(idempotent).lower() != "true":
            raise ConfigurationError(
                "Kafka: enable.idempotence is off, so the broker may store a message twice or in another order. Turn it on."
            )
        self._producer: Any = None if self._config is not None else producer
        if self._config is not None:
            after_fork(self._forget)

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send all of them, and wait for the delivery report of each."""
        if self._producer is None:
            self._producer = import_module("confluent_kafka").Producer(self._config)
        if callable(getattr(self._producer, "produce", None)):
            return self._produced(messages)
        return self._sent(messages)

    def _forget(self) -> None:
        self._producer = None

    def _produced(self, messages: Sequence[Message]) -> list[Exception | None]:
        """Send with confluent-kafka."""
        results: list[Exception | None] = [SendFailed("Kafka did not confirm it in time") for _ in messages]
        fatal: list[bool] = []

        def report(number: int, error: Any, _: object) -> None:
            results[number] = None if error is None else _kafka_error(error.name())
            fatal.append(error is not None and error.fatal())

        for number, message in enumerate(messages):
            try:
                self._producer.produce(
                    message.topic, message.body, **_kafka_fields(message), on_delivery=partial(report, number)
                )
            except Exception as error:  # noqa: BLE001 - KafkaException, or BufferError for a full queue
                argument: Any = error.args[0] if error.args else None
                results[number] = error if isinstance(argument, str | None) else _kafka_error(argument.name())
        if self._producer.flush(KAFKA_SECONDS):
            # What this attempt did not send must not follow the next attempt of it.
            self._producer.purge(in_flight=False)
            self._producer.flush(0)
        if any(fatal) and self._config is not None:
            # An idempotent producer that has lost its place sends nothing more.
            self._producer = None
        # A report that comes later changes nothing that the caller has.
        return list(results)

    def _sent(self, messages: Sequence[Message]) -> list[Exception | None]:
        """Send with kafka-python."""
        results: list[Exception | None] = [None for _ in messages]
        futures: dict[int, Any] = {}
        began = time.monotonic()
        for number, message in enumerate(messages):
            if number and time.monotonic() - began >= BEGIN_SECONDS:
                # Without metadata, each one blocks for `max_block_ms`.
                results[number] = NotTried()
                continue
            try:
                futures[number] = self._producer.send(message.topic, value=message.body, **_kafka_fields(message))
            except Exception as error:  # noqa: BLE001 - one that is too large fails here
                results[number] = _kafka_error(type(error).__name__)
        for number, future in futures.items():
            try:
                # One limit for all of them: kafka-python takes 0 for none.
                future.get(timeout=max(0.001, began + KAFKA_SECONDS - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - KafkaError, and what the producer adds
                results[number] = _kafka_error(type(error).__name__)
        return results


def _kafka_fields(message: Message) -> dict[str, Any]:
    headers = {"message-id": message.message_id, **message.headers}
    return {
        "key": None if message.key is None else message.key.encode(),
        "headers": [(name, value.encode("ascii")) for name, value in headers.items()],
    }


def _kafka_error(name: str) -> Exception:
    if name in _TOO_LARGE:
        return Undeliverable(f"Kafka does not take a message of this size ({name})")
    return SendFailed(f"Kafka did not take it ({name})")

"""Receive messages of Amazon SQS or a service like it: in a process of yours by `receive`, in AWS Lambda by `batch`.

A message is deleted when its record is durable. While a handler runs or a message waits, `receive` prolongs its visibility, so
that it does not arrive again and its receive count stays low.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any, Final

from flask_idempotency.consumers.deliveries import HEADER, RETRIES, Deliveries, Delivery, Handler, SetAside, text_of
from flask_idempotency.consumers.inbox import Inbox
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import BrokerId

__all__ = ["batch", "receive"]

MOST_MESSAGES: Final = 10
"""SQS returns no more at a time."""

LOOK_SECONDS: Final = 0.2

_log = logging.getLogger("flask_idempotency")


def receive(
    client: Any,
    queue_url: str,
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    retries: int = RETRIES,
    messages: int = 1,
    visibility: int = 30,
    wait: int = 20,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
    stop: Event | None = None,
) -> None:
    """Receive and delete the messages of this queue, until `stop` is set.

    `client` is boto3's, or one with the same methods. `handler(message)` gets the dictionary that the client returns, and runs
    in a thread. Call this function in an application context if the inbox is one of a Flask application. Each message then
    has a context of its own.

    The id of a message is its attribute `message-id`. Without one it is the `MessageId`, which is a new one if the sender
    repeats the message.

    A message is deleted when it is done. If it may not run now, this process keeps it and tries it again. If the handler
    raises, that is after 1, 2, 4 … seconds, `retries` times. A message that no worker may do goes to `dead(message, reason)`,
    and is deleted when that returns. Without `dead` it stays in the queue until its redrive policy moves it.

    `messages` is how many are received at a time, at most 10; their handlers run one after the other. In a FIFO queue, keep
    it at 1. `visibility` is in seconds, and prolonged each third of it. `wait` is how long SQS waits for a message.

    Raises the errors of the client, and `ConfigurationError`.
    """
    if not 1 <= messages <= MOST_MESSAGES or visibility < 1:
        raise ConfigurationError(f"messages must be from 1 to {MOST_MESSAGES}, and visibility 1 second or more.")
    with Deliveries(inbox, handler, dead=dead, retries=retries, tenant=tenant, born=born, stop=stop) as held:
        while not held.ending:
            found = client.receive_message(
                QueueUrl=queue_url,
                MaxNumberOfMessages=messages,
                VisibilityTimeout=visibility,
                WaitTimeSeconds=wait,
                MessageAttributeNames=["All"],
                AttributeNames=["All"],
            )
            prolonged = {}
            for message in found.get("Messages", ()):
                attribute = (message.get("MessageAttributes") or {}).get(HEADER) or {}
                message_id = text_of(attribute.get("StringValue")) or text_of(attribute.get("BinaryValue"))
                message_id = message_id or BrokerId(message["MessageId"])
                delivery = Delivery(message, message_id, _bytes(message["Body"]), message["ReceiptHandle"])
                prolonged[delivery] = time.monotonic()
                held.hold(delivery)
            while prolonged and (held.running or not held.ending):
                for delivery, aside in held.settled(LOOK_SECONDS):
                    del prolonged[delivery]
                    if aside is None:
                        client.delete_message(QueueUrl=queue_url, ReceiptHandle=delivery.place)
                now = time.monotonic()
                for delivery, last in prolonged.items():
                    if now - last >= visibility / 3:
                        prolonged[delivery] = now
                        _show_after(visibility, client, queue_url, delivery)
            # After a fault, a supervisor starts this again: each receipt at once would count towards the dead-letter queue.
            for delivery in () if held.error else prolonged:
                _show_after(0, client, queue_url, delivery)


def _show_after(seconds: int, client: Any, queue_url: str, delivery: Delivery) -> None:
    """Let other receivers have this message after this time. If that fails, they get it earlier: the inbox bears that."""
    try:
        client.change_message_visibility(QueueUrl=queue_url, ReceiptHandle=delivery.place, VisibilityTimeout=seconds)
    except Exception as error:  # noqa: BLE001 - the errors of any client
        _log.warning("the visibility of a message could not be changed (%s)", type(error).__name__)


def batch(
    event: Mapping[str, Any],
    inbox: Inbox,
    handler: Handler,
    *,
    dead: SetAside | None = None,
    tenant: Callable[[Any], str | None] | None = None,
    born: Callable[[Any], float | None] | None = None,
) -> dict[str, list[dict[str, str]]]:
    """Process the records of an AWS Lambda event, one after the other. Return what Lambda is to keep in the queue.

    Return this value from your Lambda function, and switch `ReportBatchItemFailures` on in its event source: Lambda then
    deletes the others. Without that, Lambda deletes all of them, and messages get lost.

    `handler(record)` gets the record of the event. A record stays in the queue if its handler raises, if another worker has
    it, or if no worker may do it and there is no `dead(record, reason)`. In a FIFO queue, later records of the same group stay
    too. The id is as `receive` has it.

    Raises `ConfigurationError`.
    """
    deliveries = Deliveries(inbox, handler, dead=dead, retries=0, tenant=tenant, born=born)
    failures, stopped = [], set()
    for record in event["Records"]:
        group = (record.get("attributes") or {}).get("MessageGroupId")
        attribute = (record.get("messageAttributes") or {}).get(HEADER) or {}
        message_id = text_of(attribute.get("stringValue")) or BrokerId(record["messageId"])
        if group is None or group not in stopped:
            step = deliveries.attempt(Delivery(record, message_id, _bytes(record["body"])))
            if step is None:
                continue
        stopped.add(group)
        failures.append({"itemIdentifier": record["messageId"]})
    return {"batchItemFailures": failures}


def _bytes(body: str) -> bytes:
    return body.encode("utf-8", "surrogatepass")

"""Messages of an SQS in memory (moto), received by boto3 and by a Lambda function."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from moto import mock_aws

from flask_idempotency.consumers import Dead, Later, Processed, sqs
from flask_idempotency.consumers.deliveries import Delivery, text_of
from flask_idempotency.engine.errors import ConfigurationError
from tests.consumers.doubles import Effects, Hasty, at_work, in_background, memory_inbox

pytestmark = [
    # botocore counts by the naive clock of Python 3.11.
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

NUMBERS = itertools.count()


def test_no_sender_can_name_the_id_that_sqs_gives() -> None:
    """Lambda's event holds both: the attribute of one message is the id of the other."""
    runs: list[str] = []
    attributes: tuple[dict[str, Any], ...] = ({"message-id": {"stringValue": "7c1e", "dataType": "String"}}, {})
    records = [
        {"messageId": each, "body": each, "attributes": {}, "messageAttributes": about}
        for each, about in zip(("90ab", "7c1e"), attributes, strict=True)
    ]

    assert {"batchItemFailures": []} == sqs.batch(
        {"Records": records}, memory_inbox(), lambda record: runs.append(record["body"])
    )
    assert ["90ab", "7c1e"] == runs


def test_ids_of_other_bytes_are_other_ids() -> None:
    assert 4 == len({text_of(each) for each in (b"\xff", b"\\xff", b"\xfe", "\ufffd".encode())})


def test_no_traceback_with_the_values_of_variables_shows_a_message() -> None:
    """Tools that collect errors print the representation of each local variable."""
    assert "secret" not in repr(Delivery({"Body": "secret"}, "secret", b"secret", "secret"))


class Queue:
    """A queue of one test, whose messages come back after 30 seconds."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.name = f"consumers-{next(NUMBERS)}"
        self.url = client.create_queue(QueueName=self.name, Attributes={"VisibilityTimeout": "30"})["QueueUrl"]

    def send(self, body: str, message_id: str | None = None) -> str:
        """Send a message and return the id that SQS gives it."""
        attributes = {} if message_id is None else {"message-id": {"DataType": "String", "StringValue": message_id}}
        sent = self.client.send_message(QueueUrl=self.url, MessageBody=body, MessageAttributes=attributes)
        found: str = sent["MessageId"]
        return found

    def counts(self) -> tuple[int, int]:
        """Return how many messages are visible, and how many are with receivers."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])

    def event(self) -> dict[str, Any]:
        """Receive up to ten messages, as the event that AWS Lambda makes of them."""
        found = self.client.receive_message(
            QueueUrl=self.url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], AttributeNames=["All"]
        )
        return {
            "Records": [
                {
                    "messageId": each["MessageId"],
                    "receiptHandle": each["ReceiptHandle"],
                    "body": each["Body"],
                    "attributes": each["Attributes"],
                    "messageAttributes": {
                        name: {"stringValue": value["StringValue"], "dataType": value["DataType"]}
                        for name, value in each.get("MessageAttributes", {}).items()
                    },
                }
                for each in found.get("Messages", ())
            ]
        }

    def delete_all_but(self, event: dict[str, Any], failures: dict[str, Any]) -> None:
        """Do what Lambda does with the value that its function returns."""
        kept = {each["itemIdentifier"] for each in failures["batchItemFailures"]}
        for record in event["Records"]:
            if record["messageId"] not in kept:
                self.client.delete_message(QueueUrl=self.url, ReceiptHandle=record["receiptHandle"])


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        yield boto3.client("sqs", region_name="eu-central-1")


@pytest.fixture
def queue(client: Any, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr("flask_idempotency.consumers.deliveries._pause", lambda count: 2.0 ** (count - 1) / 100)
    return Queue(client)


def receiving(queue: Queue, inbox: Any, handler: Any, **options: Any) -> Any:
    return in_background(
        lambda stop: sqs.receive(queue.client, queue.url, inbox, handler, stop=stop, **{"wait": 0, **options})
    )


def test_a_batch_keeps_what_failed_and_what_is_in_flight(queue: Queue) -> None:
    inbox, effects = memory_inbox(), Effects()
    sent = {number: queue.send(f"{number}", f"m-{number}") for number in range(10)}
    event = queue.event()

    def book(record: Any) -> None:
        if record["body"] == "3":
            raise OSError("no such account")
        effects(record["body"])

    with at_work(inbox, "m-7", payload=b"7"):
        failures = sqs.batch(event, inbox, book)
    queue.delete_all_but(event, failures)

    assert [sent[3], sent[7]] == [each["itemIdentifier"] for each in failures["batchItemFailures"]]
    assert ["0", "1", "2", "4", "5", "6", "8", "9"] == effects.runs
    assert (0, 2) == queue.counts()
    assert {"batchItemFailures": []} == sqs.batch(event, inbox, effects)
    assert 9 == len(effects.runs)


def test_the_sender_names_a_message(queue: Queue) -> None:
    """Or else SQS does: then a body that is sent twice is two messages."""
    inbox, effects = memory_inbox(), Effects()
    for message_id in ("m-1", "m-1", None, None):
        queue.send("5", message_id)

    assert {"batchItemFailures": []} == sqs.batch(queue.event(), inbox, lambda record: effects(1))
    assert 3 == len(effects.runs)


@pytest.mark.parametrize("dead", (True, False))
def test_a_record_that_no_worker_may_do(queue: Queue, dead: bool) -> None:
    """It goes to the function of the application, or stays for the redrive policy of its queue."""
    inbox, told = memory_inbox(), Effects()
    inbox.process("m-1", lambda: None, payload=b"5")
    kept = queue.send("500", "m-1")

    failures = sqs.batch(
        queue.event(), inbox, lambda record: None, dead=(lambda record, reason: told(reason)) if dead else None
    )

    assert ([] if dead else [{"itemIdentifier": kept}]) == failures["batchItemFailures"]
    assert (["message-reused"] if dead else []) == told.runs


def test_a_group_of_a_fifo_queue_stops_at_its_first_failure() -> None:
    inbox, effects = memory_inbox(), Effects()
    groups = ["a", "b", "a", "b"]
    records = [
        {"messageId": f"{number}", "body": group, "attributes": {"MessageGroupId": group}}
        for number, group in enumerate(groups)
    ]

    def book(record: Any) -> None:
        effects(record["messageId"])
        if record["body"] == "a":
            raise OSError("no such account")

    failures = sqs.batch({"Records": records}, inbox, book)

    assert ["0", "2"] == [each["itemIdentifier"] for each in failures["batchItemFailures"]]
    assert ["0", "1", "3"] == effects.runs


def test_messages_are_deleted_when_they_are_done(queue: Queue) -> None:
    inbox, effects = Hasty(memory_inbox()), Effects()
    for message_id in ("m-1", "m-1", "m-2"):
        queue.send("5", message_id)

    with receiving(queue, inbox, lambda message: effects(message["Body"]), messages=10):
        inbox.wait_for(3, Processed)

    assert ["5", "5"] == effects.runs
    assert (0, 0) == queue.counts()


def test_visibility_is_prolonged_while_a_handler_runs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twenty times faster than the queue's clock, so that a host that stalls does not show the message.
    monkeypatch.setattr(sqs, "time", SimpleNamespace(monotonic=lambda: time.monotonic() * 20))
    inbox, prolonged, received = memory_inbox(), Effects(), Effects()
    queue.send("5", "m-1")
    client = queue.client

    def change(**options: Any) -> Any:
        client.change_message_visibility(**options)
        prolonged(options["VisibilityTimeout"])

    def got(**options: Any) -> Any:
        found = client.receive_message(**options)
        received(found.get("Messages", []))
        return found

    watched = SimpleNamespace(
        receive_message=got, change_message_visibility=change, delete_message=client.delete_message, url=queue.url
    )
    seen: list[tuple[int, int]] = []

    def book(message: Any) -> None:
        prolonged.wait_for(4)
        seen.append(queue.counts())

    with in_background(
        lambda stop: sqs.receive(watched, queue.url, inbox, book, visibility=20, wait=0, stop=stop)
    ) as stop:
        received.wait_for(2)
        stop.set()

    assert [(0, 1)] == seen
    assert {20} == set(prolonged.runs)
    assert (0, 0) == queue.counts()
    assert 1 == sum(map(len, received.runs))


def test_a_message_waits_here_while_its_owner_works(queue: Queue) -> None:
    real, effects = memory_inbox(), Effects()
    inbox = Hasty(real)
    queue.send("5", "m-1")

    with at_work(real, "m-1", payload=b"5") as go_on, receiving(queue, inbox, effects):
        inbox.wait_for(5, Later)
        assert (0, 1) == queue.counts()
        go_on.set()
        inbox.wait_for(1, Processed)

    assert ([], (0, 0)) == (effects.runs, queue.counts())


def test_a_receiver_that_stops_gives_back_what_waits(queue: Queue) -> None:
    real = memory_inbox()
    inbox = Hasty(real)
    queue.send("5", "m-1")

    with at_work(real, "m-1", payload=b"5"), receiving(queue, inbox, lambda message: None):
        inbox.wait_for(2, Later)

    assert (1, 0) == queue.counts()


@pytest.mark.parametrize("fails", (False, True), ids=("returns", "fails"))
def test_a_handler_that_fails_is_tried_again_here_and_then_given_up(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The function for dead messages is called until it returns, and then the message is deleted."""
    inbox, effects, told, deleted = memory_inbox(), Effects(), Effects(), Effects()
    delete = queue.client.delete_message
    queue.send("5", "m-1")

    def book(message: Any) -> None:
        effects(1)
        raise OSError("no such account")

    def dead(message: Any, reason: str) -> None:
        told(reason)
        if fails and len(told.runs) == 1:
            raise OSError("no disk")

    monkeypatch.setattr(queue.client, "delete_message", lambda **options: deleted(delete(**options)))
    with receiving(queue, inbox, book, retries=2, dead=dead):
        deleted.wait_for(1)

    assert ([1, 1, 1], ["retries-exhausted"] * (1 + fails)) == (effects.runs, told.runs)
    assert (0, 0) == queue.counts()


def test_without_that_function_a_dead_message_stays(queue: Queue) -> None:
    """Its receive count grows with each visibility timeout, until the redrive policy moves it."""
    real = memory_inbox()
    inbox = Hasty(real)
    real.process("m-1", lambda: None, payload=b"5")
    queue.send("500", "m-1")

    with receiving(queue, inbox, lambda message: None):
        inbox.wait_for(1, Dead)

    assert (0, 1) == queue.counts()


def test_a_fault_of_the_configuration_stops_the_receiver(queue: Queue) -> None:
    inbox, effects = memory_inbox(), Effects()
    queue.send("5", "m-1")

    def book(message: Any) -> None:
        effects(1)
        raise ConfigurationError("no bank is configured")

    with pytest.raises(ConfigurationError, match="no bank"), receiving(queue, inbox, book):
        effects.wait_for(1)

    # It keeps its visibility: a supervisor that starts this again would send it to the dead letters within seconds.
    assert (0, 1) == queue.counts()


@pytest.mark.parametrize("options", ({"messages": 0}, {"messages": 11}, {"visibility": 0}, {"retries": -1}))
def test_wrong_numbers_are_refused(options: dict[str, Any]) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(ConfigurationError):
        sqs.receive(None, "", memory_inbox(), lambda message: None, stop=stop, **options)

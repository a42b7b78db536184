"""Consumers that are killed and stopped at random instants: each message has one row, and none is lost."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from tests.consumers.workers import Host
from tests.lab.kafka import KafkaCluster
from tests.lab.rabbitmq import RabbitServer

PATIENCE: Final = 240
NUMBERS = itertools.count()

Send = Callable[[str], None]


class Broker:
    """How to send a message, and what a consumer needs to know."""

    def __init__(self, kind: str, options: dict[str, Any], send: Send) -> None:
        self.kind = kind
        self.options = options
        self.send = send


@pytest.fixture
def by_rabbit(rabbitmq: RabbitServer) -> Iterator[Broker]:
    import pika  # type: ignore[import-untyped]

    url, queue = rabbitmq.url.removesuffix("/") + "%2F", f"killed-{next(NUMBERS)}"
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1_000_000})
        channel.confirm_delivery()

        def send(text: str) -> None:
            about = pika.BasicProperties(message_id=text, delivery_mode=2)
            channel.basic_publish("", queue, text.encode(), about, mandatory=True)

        yield Broker("rabbit", {"url": url, "queue": queue}, send)


@pytest.fixture
def by_kafka() -> Iterator[Broker]:
    with KafkaCluster() as cluster:
        settings = {
            "bootstrap.servers": cluster.address,
            "group.id": "killed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            # A member that was killed has its partitions for so long.
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 500,
            "fetch.wait.max.ms": 50,
            "log_level": 0,
        }
        partitions = itertools.cycle(range(4))

        def send(text: str) -> None:
            cluster.produce("orders", text.encode(), message_id=text, partition=next(partitions))

        yield Broker("kafka", {"settings": settings, "topic": "orders"}, send)


@pytest.fixture
def by_sqs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    import boto3  # type: ignore[import-untyped]
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("sqs", endpoint_url=endpoint, region_name="eu-central-1")
    queue = client.create_queue(QueueName="killed")["QueueUrl"]

    def send(text: str) -> None:
        attributes = {"message-id": {"DataType": "String", "StringValue": text}}
        client.send_message(QueueUrl=queue, MessageBody=text, MessageAttributes=attributes)

    yield Broker("sqs", {"endpoint": endpoint, "queue": queue}, send)
    client.close()
    server.stop()


def killed(broker: Broker, folder: Path, *, rounds: int, seed: int = 1) -> dict[str, int]:
    """Kill one of two consumers in each round, a moment after it handles messages again. Return what was counted."""
    chance, passing = random.Random(seed), threading.Event()
    numbers = itertools.count()
    sent: list[str] = []
    with Host(broker.kind, folder, broker.options) as host:
        pids = [host.start(), host.start()]

        def publish(count: int) -> None:
            for _ in range(count):
                text = f"m-{next(numbers)}"
                sent.append(text)
                # Some arrive twice without any crash.
                for _ in range(chance.choice((1, 1, 2))):
                    broker.send(text)

        def wait_for(enough: Callable[[], bool]) -> None:
            until = time.monotonic() + PATIENCE
            while not enough():
                assert time.monotonic() < until, (
                    len(sent),
                    len(set(host.orders())),
                    (folder / "log").read_text()[-2000:],
                )
                passing.wait(0.02)

        for number in range(rounds):
            publish(4)
            before = len(host.runs())
            wait_for(lambda before=before: len(host.runs()) > before)  # type: ignore[misc]
            passing.wait(chance.random() * 0.05)
            if number % 5 == 4:
                # A consumer that is frozen past its lease, and goes on when another one may have its message.
                host.signal(pids[0], signal.SIGSTOP)
                publish(2)
                passing.wait(chance.random() * 3)
                host.signal(pids[0], signal.SIGCONT)
                pids.reverse()
            host.signal(pids.pop(0), signal.SIGKILL)
            pids.append(host.start())
        wait_for(lambda: len(set(host.orders())) == len(sent))
        orders, runs = host.orders(), host.runs()
    return {
        "sent": len(sent),
        "rows": len(orders),
        "distinct": len(set(orders) & set(sent)),
        "runs": len(runs),
        "rounds": rounds,
    }


BROKERS = ("by_rabbit", "by_kafka", "by_sqs")


@pytest.mark.slow
@pytest.mark.parametrize("broker", BROKERS)
def test_a_killed_consumer_loses_and_doubles_nothing(
    broker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    counted = killed(request.getfixturevalue(broker), tmp_path, rounds=3)

    assert counted["sent"] == counted["rows"] == counted["distinct"], counted


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("broker", BROKERS)
def test_five_hundred_kills_lose_and_double_nothing(
    broker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    counted = killed(request.getfixturevalue(broker), tmp_path, rounds=500)

    assert counted["sent"] == counted["rows"] == counted["distinct"], counted

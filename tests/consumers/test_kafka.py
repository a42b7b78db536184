"""Messages of librdkafka's mock cluster, consumed with confluent-kafka and with kafka-python."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import kafka as kafka_python  # type: ignore[import-untyped]
import pytest
from kafka.errors import CommitFailedError  # type: ignore[import-untyped]

from flask_idempotency.consumers import Dead, Later, Processed, kafka
from flask_idempotency.consumers.deliveries import Deliveries
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import BrokerId
from tests.consumers.doubles import PATIENCE, Effects, Hasty, at_work, in_background, memory_inbox
from tests.lab.kafka import KafkaCluster

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()
GROUP = "billing"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster() as cluster:
        yield cluster
    with warnings.catch_warnings():
        # kafka-python leaves sockets of closed consumers to the collector, which may run in a test of another module.
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def topic(cluster: KafkaCluster) -> str:
    return f"consumers-{next(NUMBERS)}"


def by_confluent(cluster: KafkaCluster, **options: Any) -> Any:
    settings = {
        "bootstrap.servers": cluster.address,
        "group.id": GROUP,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 100,
        "log_level": 0,
        **options,
    }
    return confluent_kafka.Consumer(settings)


def by_kafka_python(cluster: KafkaCluster, **options: Any) -> Any:
    settings = {
        "bootstrap_servers": cluster.address,
        "group_id": GROUP,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "fetch_max_wait_ms": 100,
        # The mock does not know the later versions of some requests.
        "api_version": (2, 0),
        **{name.replace(".", "_"): value for name, value in options.items()},
    }
    return kafka_python.KafkaConsumer(**settings)


Make = Callable[..., Any]


@pytest.fixture(params=(by_confluent, by_kafka_python))
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second of a pause take a hundredth."""
    monkeypatch.setattr("flask_idempotency.consumers.deliveries._pause", lambda count: 2.0 ** (count - 1) / 100)


def value_of(message: Any) -> bytes:
    found: bytes = message.value() if callable(message.value) else message.value
    return found


def consuming(make: Make, cluster: KafkaCluster, topic: str, inbox: Any, handler: Any, **options: Any) -> Any:
    settings = options.pop("settings", {})

    def consume(stop: threading.Event) -> None:
        with closing(make(cluster, **{"group.id": f"{GROUP}-{topic}", **settings})) as consumer:
            kafka.consume(consumer, [topic], inbox, handler, stop=stop, **options)

    return in_background(consume)


def test_messages_take_effect_once_and_are_committed(make: Make, cluster: KafkaCluster, topic: str) -> None:
    inbox, effects = Hasty(memory_inbox()), Effects()
    for value, message_id in ((b"0", "m-0"), (b"0", "m-0"), (b"1", None), (b"1", None), (b"2", "m-2")):
        cluster.produce(topic, value, message_id=message_id)
    cluster.produce(topic, b"other", message_id="m-9", partition=3)

    with consuming(make, cluster, topic, inbox, lambda message: effects(value_of(message))):
        inbox.wait_for(6)
        effects.wait_for(5)

    assert [b"0", b"1", b"1", b"2", b"other"] == sorted(effects.runs)
    assert [b"0", b"1", b"1", b"2"] == [each for each in effects.runs if each != b"other"]
    assert (5, 1) == tuple(cluster.committed(topic, f"{GROUP}-{topic}", partition) for partition in (0, 3))


def test_no_sender_can_name_a_position(make: Make, cluster: KafkaCluster, topic: str) -> None:
    """Or its message would take the place of the one that is there."""
    inbox, effects = Hasty(memory_inbox()), Effects()
    cluster.produce(topic, b"0", message_id=f"{topic}/0/1")
    cluster.produce(topic, b"1", message_id=None)
    cluster.produce(topic, b"2", message_id=f"\1{topic}/0/1")

    with consuming(make, cluster, topic, inbox, lambda message: effects(value_of(message)), dead=pytest.fail):
        assert [b"0", b"1", b"2"] == effects.wait_for(3)
        inbox.wait_for(3, Processed)


def test_a_message_waits_while_its_owner_works(make: Make, cluster: KafkaCluster, topic: str) -> None:
    """It is polled again, and the later ones of its partition wait too. Other partitions go on."""
    real, effects = memory_inbox(), Effects()
    inbox = Hasty(real)
    for message_id, partition in (("m-0", 0), ("m-1", 0), ("m-2", 1)):
        cluster.produce(topic, b"5", message_id=message_id, partition=partition)

    with (
        at_work(real, "m-0", payload=b"5") as go_on,
        consuming(make, cluster, topic, inbox, lambda message: effects(message)),
    ):
        inbox.wait_for(4, Later)
        effects.wait_for(1)
        assert 1 == len(effects.runs)
        assert 0 > cluster.committed(topic, f"{GROUP}-{topic}")
        go_on.set()
        inbox.wait_for(3, Processed)

    assert 2 == len(effects.runs)
    assert 2 == cluster.committed(topic, f"{GROUP}-{topic}")


def test_polling_goes_on_while_a_handler_runs(
    make: Make, cluster: KafkaCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a handler may take longer than the poll interval, and this consumer keeps its partitions."""
    inbox, polls = Hasty(memory_inbox()), Effects()
    cluster.produce(topic, b"5", message_id="m-0")
    client = kafka._Confluent if make is by_confluent else kafka._KafkaPython
    poll = client.poll

    def counted(self: Any, seconds: float) -> Any:
        polls(1)
        return poll(self, seconds)

    monkeypatch.setattr(client, "poll", counted)

    with consuming(make, cluster, topic, inbox, lambda message: len(polls.wait_for(len(polls.runs) + 10)) and None):
        inbox.wait_for(1)

    assert [Processed(None, replayed=False)] == inbox.verdicts
    assert 1 == cluster.committed(topic, f"{GROUP}-{topic}")


def test_dead_messages_go_to_the_function_of_the_application(make: Make, cluster: KafkaCluster, topic: str) -> None:
    """They are committed when it has returned, and the partition goes on."""
    inbox, effects, told = memory_inbox(), Effects(), Effects()
    inbox.process("m-0", lambda: None, payload=b"5")
    cluster.produce(topic, b"500", message_id="m-0")
    cluster.produce(topic, b"6", message_id="m-1")
    cluster.produce(topic, b"7", message_id="m-2")

    def dead(message: Any, reason: str) -> None:
        told((value_of(message), reason))
        if len(told.runs) == 1:
            raise OSError("no disk")

    def book(message: Any) -> None:
        effects(value_of(message))
        if value_of(message) == b"6":
            raise OSError("no such account")

    with consuming(make, cluster, topic, inbox, book, dead=dead, retries=2):
        effects.wait_for(4)

    assert [(b"500", "message-reused")] * 2 + [(b"6", "retries-exhausted")] == told.runs
    assert [b"6"] * 3 + [b"7"] == effects.runs
    assert 3 == cluster.committed(topic, f"{GROUP}-{topic}")


def test_without_that_function_a_dead_message_stops_its_partition(
    make: Make, cluster: KafkaCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "STOPPED_SECONDS", 0.05)
    real, effects = memory_inbox(on_error="quarantine"), Effects()
    inbox = Hasty(real)
    with pytest.raises(ZeroDivisionError):
        real.process("m-0", lambda: 1 / 0, payload=b"5")
    for message_id, partition in (("m-0", 0), ("m-1", 0), ("m-2", 1)):
        cluster.produce(topic, b"5", message_id=message_id, partition=partition)

    with consuming(make, cluster, topic, inbox, lambda message: effects(1)):
        effects.wait_for(1)
        inbox.wait_for(3, Dead)
        assert 1 == len(effects.runs)

    assert 0 > cluster.committed(topic, f"{GROUP}-{topic}")
    assert 1 == cluster.committed(topic, f"{GROUP}-{topic}", 1)


def test_a_topic_that_was_made_again_is_refused(cluster: KafkaCluster, topic: str) -> None:
    inbox, effects, told = memory_inbox(), Effects(), Effects()
    inbox.process(BrokerId(f"{topic}/0/0"), lambda: None, payload=b"what was there before")
    cluster.produce(topic, b"5")
    cluster.produce(topic, b"6")

    with consuming(
        by_confluent,
        cluster,
        topic,
        inbox,
        lambda message: effects(value_of(message)),
        dead=lambda message, reason: told(reason),
    ):
        effects.wait_for(1)

    assert (["message-reused"], [b"6"]) == (told.runs, effects.runs)


@pytest.mark.parametrize("options", ({}, {"enable.auto.commit": True}))
def test_a_consumer_that_commits_by_itself_is_refused(cluster: KafkaCluster, options: dict[str, Any]) -> None:
    """Also by the default of both clients: it would commit messages that are still being handled."""
    inbox, stop = memory_inbox(), threading.Event()
    stop.set()
    settings = {"bootstrap.servers": cluster.address, "group.id": "g", **options}
    with (
        closing(confluent_kafka.Consumer(settings)) as consumer,
        pytest.raises(ConfigurationError, match="commits offsets by itself"),
    ):
        kafka.consume(consumer, "t", inbox, lambda message: None, stop=stop)
    config = {**kafka_python.KafkaConsumer.DEFAULT_CONFIG, "group_id": "g"}
    with pytest.raises(ConfigurationError, match="commits offsets by itself"):
        kafka.consume(SimpleNamespace(config=config), "t", inbox, lambda message: None, stop=stop)


def test_other_consumers_are_taken(cluster: KafkaCluster) -> None:
    """One that stores no offsets commits none. One without a group could not."""
    stop = threading.Event()
    stop.set()
    stores_none = {"enable.auto.commit": True, "enable.auto.offset.store": False}
    with closing(by_confluent(cluster, **stores_none)) as consumer:
        kafka.consume(consumer, "t", memory_inbox(), lambda message: None, stop=stop)
    config = {**kafka_python.KafkaConsumer.DEFAULT_CONFIG, "enable_auto_commit": False}
    with pytest.raises(ConfigurationError, match="group_id"):
        kafka.consume(SimpleNamespace(config=config), "t", memory_inbox(), lambda message: None)


def test_a_client_that_we_have_not_read_is_taken_with_a_warning(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its objects may look otherwise, and a wrong pointer would end the process."""
    monkeypatch.setattr(kafka, "KNOWN_CONFLUENT", (2, 0))
    stop = threading.Event()
    stop.set()
    settings = {"bootstrap.servers": cluster.address, "group.id": "g", "enable.auto.commit": True}

    with closing(confluent_kafka.Consumer(settings)) as consumer:
        kafka.consume(consumer, "t", memory_inbox(), lambda message: None, stop=stop)

    assert "cannot see if this consumer has enable.auto.commit off" in caplog.text


@pytest.mark.parametrize("stopping", (False, True), ids=("running", "stopping"))
def test_a_commit_that_a_rebalance_refuses_is_repeated(
    make: Make, cluster: KafkaCluster, topic: str, monkeypatch: pytest.MonkeyPatch, *, stopping: bool
) -> None:
    """No later message commits it along."""
    monkeypatch.setattr(kafka, "COMMIT_SECONDS", 0)
    inbox, effects, left, committed = Hasty(memory_inbox()), Effects(), [None] * 3, threading.Event()
    stops: list[threading.Event] = []

    def rebalancing(cluster: KafkaCluster, **options: Any) -> Any:
        consumer = make(cluster, **options)
        if isinstance(consumer, kafka_python.KafkaConsumer):
            consumer.commit = partial(commit, consumer.commit, CommitFailedError())
            return consumer
        error = confluent_kafka.KafkaException(
            confluent_kafka.KafkaError(confluent_kafka.KafkaError.REBALANCE_IN_PROGRESS)
        )
        return Refusing(consumer, partial(commit, consumer.commit, error))

    def commit(real: Any, error: Exception, *args: Any, **more: Any) -> Any:
        if stopping:
            stops[0].set()
        if left:
            left.pop()
            raise error
        found = real(*args, **more)
        committed.set()
        return found

    cluster.produce(topic, b"0", message_id="m-0")
    with consuming(rebalancing, cluster, topic, inbox, lambda message: effects(value_of(message))) as stop:
        stops.append(stop)
        assert committed.wait(PATIENCE)

    assert 1 == cluster.committed(topic, f"{GROUP}-{topic}", partition=0)
    assert [b"0"] == effects.runs


class Refusing:
    """A consumer of confluent-kafka whose commits are ours. Its own class takes no other method."""

    def __init__(self, consumer: Any, commit: Any) -> None:
        self._consumer = consumer
        self.commit = commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


class Changing:
    """A client whose partition is lost while its commit is refused."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.polls = 0
        self.stop = threading.Event()

    def subscribe(self, topics: list[str], assigned: Any, lost: Any) -> None:
        self._lost = lost

    def poll(self, seconds: float) -> list[Any]:
        self.polls += 1
        if self.polls == 1:
            return [kafka._delivery(("t", 0), 4, None, [("message-id", b"m-0")], None, b"5", 0)]
        if len(self.commits) == 2:
            self._lost([("t", 0)])
            self.stop.set()
        return []

    def commit(self, partition: Any, offset: int) -> str:
        self.commits.append(offset)
        return "REBALANCE_IN_PROGRESS"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_refused_commit_is_not_repeated_for_a_partition_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have another owner, who is further."""
    monkeypatch.setattr(kafka, "COMMIT_SECONDS", 0)
    client = Changing()
    monkeypatch.setattr(kafka, "_client", lambda consumer: client)

    kafka.consume(None, "t", memory_inbox(), lambda message: None, stop=client.stop)

    assert [5, 5] == client.commits


def test_a_fault_in_a_commit_is_no_refusal() -> None:
    """It would be repeated for ever, and no log would show where it is."""

    def commit(offsets: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        kafka._KafkaPython(SimpleNamespace(commit=commit)).commit(("t", 0), 5)


def test_a_partition_that_is_lost_is_not_paused_when_it_comes_back() -> None:
    """librdkafka forgets to fetch one that is resumed while its fetching starts."""
    paused: set[tuple[str, int]] = set()
    consumer = SimpleNamespace(
        pause=lambda places: paused.update((each.topic, each.partition) for each in places),
        resume=lambda places: paused.difference_update((each.topic, each.partition) for each in places),
    )
    held = Deliveries(memory_inbox(), lambda message: None, dead=None)
    one = kafka._Consumer(kafka._Confluent(consumer), held)
    for partition in range(2):
        one._start(kafka._delivery(("t", partition), 4, None, [("message-id", b"m")], None, b"5", 0))
    assert {("t", 0), ("t", 1)} == paused

    one._lost([("t", 1)])

    assert {("t", 0)} == paused


class Away:
    """The inbox of a consumer whose store is away."""

    operation = "inbox:billing"

    def __init__(self) -> None:
        self.asked = Effects()

    def process(self, message_id: str, *_: Any, **__: Any) -> Later:
        self.asked(message_id)
        return Later(0.05, "store-unavailable")


def test_a_partition_that_was_lost_is_not_committed(cluster: KafkaCluster, topic: str) -> None:
    """A second member takes two of four partitions while all handlers run. Later its successor gets the replays."""
    real, effects, go_on, away = memory_inbox(), Effects(), threading.Event(), Away()
    first, successor = Hasty(real), Hasty(real)
    for partition in range(4):
        cluster.produce(topic, b"5", message_id=f"m-{partition}", partition=partition)

    def book(message: Any) -> None:
        effects(1)
        assert go_on.wait(PATIENCE)

    def committed() -> list[int]:
        return [partition for partition in range(4) if cluster.committed(topic, f"{GROUP}-{topic}", partition) == 1]

    # The mock waits that long for a member that left.
    quick = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    with consuming(by_confluent, cluster, topic, first, book, threads=4, settings=quick):
        effects.wait_for(4)
        with consuming(by_confluent, cluster, topic, away, book, settings=quick):
            away.asked.wait_for(2)
            go_on.set()
            # The four that ran, and the replays of the two partitions that it got back.
            first.wait_for(6, Processed)
            lost = {int(each.removeprefix("m-")) for each in away.asked.runs}
    kept = committed()
    with consuming(by_confluent, cluster, topic, successor, book, settings=quick):
        successor.wait_for(4 - len(kept), Processed)

    assert 4 == len(effects.runs)
    assert [0, 1, 2, 3] == committed()
    assert not lost & set(kept) or len(first.verdicts) > 6, (lost, kept)

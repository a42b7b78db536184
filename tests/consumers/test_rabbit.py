"""Messages of a real RabbitMQ, consumed with pika and with kombu."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import amqp
import kombu
import pika  # type: ignore[import-untyped]
import pika.exceptions  # type: ignore[import-untyped]
import pika.heartbeat  # type: ignore[import-untyped]
import pytest
from flask import Flask, current_app, g

from flask_idempotency import Idempotency
from flask_idempotency.consumers import Later, Processed, rabbit
from flask_idempotency.consumers.deliveries import LONGEST_PAUSE_SECONDS
from flask_idempotency.consumers.rabbit import MessageStopped
from flask_idempotency.engine.errors import ConfigurationError
from tests.consumers.doubles import PATIENCE, Effects, Hasty, at_work, in_background, memory_inbox
from tests.lab.rabbitmq import RabbitServer

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()


class Queue:
    """A quorum queue of one test that gives a message up after three deliveries, and its dead-letter queue."""

    def __init__(self, server: RabbitServer, name: str) -> None:
        self.url = server.url
        self.name, self.dead = name, f"{name}-dead"
        with self.channel() as channel:
            channel.queue_declare(self.dead, durable=True)
            arguments = {
                "x-queue-type": "quorum",
                "x-delivery-limit": 3,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": self.dead,
            }
            channel.queue_declare(name, durable=True, arguments=arguments)

    @contextmanager
    def channel(self, *, heartbeat: int = 60) -> Iterator[Any]:
        parameters = pika.URLParameters(self.url.removesuffix("/") + "%2F")
        parameters.heartbeat = heartbeat
        with closing(pika.BlockingConnection(parameters)) as connection, closing(connection.channel()) as channel:
            yield channel

    def declare(self, **options: Any) -> None:
        """Make the queue again, with these options."""
        with self.channel() as channel:
            channel.queue_delete(self.name)
            channel.queue_declare(self.name, **options)

    def publish(self, body: str, message_id: str | None = "m-1", **properties: Any) -> None:
        with self.channel() as channel:
            channel.confirm_delivery()
            about = pika.BasicProperties(message_id=message_id, **properties)
            channel.basic_publish("", self.name, body.encode(), about, mandatory=True)

    def left(self, name: str = "") -> list[bytes]:
        """Take all messages that lie in the queue."""
        found = []
        with self.channel() as channel:
            while (got := channel.basic_get(name or self.name, auto_ack=True))[0] is not None:
                found.append(got[2])
        return found

    def wait_for_dead(self) -> list[bytes]:
        """Wait for a message in the dead-letter queue, and take it."""
        arrived: list[bytes] = []
        with self.channel() as channel:
            for _, _, body in channel.consume(self.dead, auto_ack=True, inactivity_timeout=PATIENCE):
                arrived.append(body)
                break
            channel.cancel()
        return arrived


@pytest.fixture
def queue(rabbitmq: RabbitServer) -> Queue:
    return Queue(rabbitmq, f"consumers-{next(NUMBERS)}")


Consumer = Callable[..., Any]


def by_pika(queue: Queue, inbox: Any, handler: Any, **options: Any) -> Any:
    within = options.pop("within", nullcontext)

    def consume(stop: threading.Event) -> None:
        with within(), queue.channel(heartbeat=options.pop("heartbeat", 60)) as channel:
            rabbit.consume(channel, queue.name, inbox, handler, stop=stop, **options)

    return in_background(consume)


def by_kombu(queue: Queue, inbox: Any, handler: Any, **options: Any) -> Any:
    within, others = options.pop("within", nullcontext), options.pop("others", ())

    def consume(stop: threading.Event) -> None:
        with within(), kombu.Connection(queue.url, heartbeat=options.pop("heartbeat", 0)) as connection:
            bound = [kombu.Queue(each.name, no_declare=True) for each in (queue, *others)]
            received = rabbit.on_message(inbox, handler, **options)
            with connection.Consumer(bound, on_message=received, prefetch_count=1):
                while not stop.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.1)

    return in_background(consume)


@pytest.fixture(params=(by_pika, by_kombu))
def consume(request: pytest.FixtureRequest) -> Consumer:
    consumer: Consumer = request.param
    return consumer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second of a pause take a hundredth."""
    monkeypatch.setattr(
        "flask_idempotency.consumers.deliveries._pause",
        lambda count: min(2.0 ** (count - 1), LONGEST_PAUSE_SECONDS) / 100,
    )


def test_a_message_that_arrives_twice_takes_effect_once(queue: Queue, consume: Consumer) -> None:
    """Its id is the property, or else a header."""
    inbox, effects = Hasty(memory_inbox()), Effects()
    for identifier, headers in (
        ("m-1", None),
        ("m-1", None),
        (None, {"message-id": "m-2"}),
        ("m-2", None),
        ("m-3", None),
    ):
        queue.publish("5 euro", identifier, headers=headers)

    with consume(
        queue,
        inbox,
        lambda message: effects(message.body if isinstance(message.body, str) else bytes(message.body).decode()),
    ):
        effects.wait_for(3)
        with inbox.changed:
            assert inbox.changed.wait_for(lambda: len(inbox.verdicts) == 5, PATIENCE)

    assert ["5 euro"] * 3 == effects.runs
    assert [False, True, False, True, False] == [
        each.replayed for each in inbox.verdicts if isinstance(each, Processed)
    ]
    assert [] == queue.left()
    assert [] == queue.left(queue.dead)


def test_a_message_waits_here_while_its_owner_works(queue: Queue, consume: Consumer) -> None:
    """Ten waits, and a queue that gives up after three deliveries: it is neither dropped nor dead-lettered."""
    real, effects = memory_inbox(), Effects()
    inbox = Hasty(real)
    queue.publish("5 euro")

    with at_work(real, "m-1", payload=b"5 euro") as go_on, consume(queue, inbox, effects):
        inbox.wait_for(10, Later)
        assert [] == queue.left()
        go_on.set()
        with inbox.changed:
            assert inbox.changed.wait_for(lambda: isinstance(inbox.verdicts[-1], Processed), PATIENCE)

    assert [] == effects.runs
    assert [] == queue.left() + queue.left(queue.dead)


def test_a_message_that_no_worker_may_do_is_dead_lettered(queue: Queue, consume: Consumer) -> None:
    """The same id with another body, and an outcome that is not known."""
    inbox, effects = memory_inbox(on_error="quarantine"), Effects()
    inbox.process("m-1", lambda: None, payload=b"5 euro")
    with pytest.raises(ZeroDivisionError):
        inbox.process("m-2", lambda: 1 / 0, payload=b"6 euro")
    queue.publish("500 euro", "m-1")

    with consume(queue, inbox, effects):
        assert [b"500 euro"] == queue.wait_for_dead()
        queue.publish("6 euro", "m-2")
        assert [b"6 euro"] == queue.wait_for_dead()

    assert [] == effects.runs


def test_a_message_without_an_id_is_set_aside(queue: Queue, consume: Consumer) -> None:
    inbox, effects = memory_inbox(), Effects()
    queue.publish("5 euro", None)

    with consume(queue, inbox, effects):
        assert [b"5 euro"] == queue.wait_for_dead()

    assert [] == effects.runs


NO_DEAD_LETTERS: tuple[dict[str, Any], ...] = (
    {},
    {"durable": True, "arguments": {"x-queue-type": "quorum", "x-max-length": 100, "x-overflow": "reject-publish"}},
    {"durable": True, "arguments": {"x-dead-letter-exchange": "nowhere"}},
    {"durable": True, "arguments": {"x-dead-letter-exchange": ""}},
    {"durable": True, "arguments": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "nowhere"}},
)


@pytest.mark.parametrize(
    ("declared", "message_id"), ((NO_DEAD_LETTERS[0], None), *((declared, "m-1") for declared in NO_DEAD_LETTERS))
)
def test_a_message_that_the_broker_would_destroy_stops_the_consumer(
    queue: Queue, consume: Consumer, declared: dict[str, Any], message_id: str | None
) -> None:
    """Without an id, or with a handler that fails for good: the queue still has it."""
    queue.declare(**declared)
    queue.publish("5 euro", message_id)

    def fail(message: Any) -> None:
        raise OSError("no such account")

    with (
        pytest.raises(MessageStopped, match="no dead-letter exchange"),
        consume(queue, memory_inbox(), fail, retries=1) as stop,
    ):
        assert stop.wait(PATIENCE)
    assert [b"5 euro"] == queue.left()


@pytest.mark.parametrize("exchange", ("", "amq.fanout"))
def test_a_queue_with_a_dead_letter_exchange_is_seen(queue: Queue, consume: Consumer, exchange: str) -> None:
    arguments = {"x-message-ttl": 60000, "x-max-priority": 3, "x-dead-letter-exchange": exchange}
    queue.declare(auto_delete=True, arguments={**arguments, "x-dead-letter-routing-key": queue.dead})
    with queue.channel() as channel:
        channel.queue_bind(queue.dead, "amq.fanout")
    queue.publish("5 euro", None)

    with consume(queue, memory_inbox(), Effects()):
        assert [b"5 euro"] == queue.wait_for_dead()


def test_a_queue_that_is_not_there_is_not_made(queue: Queue) -> None:
    """The consumer ends with the error of the broker, as without our look."""
    with queue.channel() as channel:
        channel.queue_delete(queue.name)

    for _ in range(2):
        with pytest.raises(pika.exceptions.AMQPChannelError), by_pika(queue, memory_inbox(), Effects()) as stop:
            assert stop.wait(PATIENCE)


def test_each_queue_of_a_consumer_is_looked_at(queue: Queue, rabbitmq: RabbitServer) -> None:
    """kombu's consumers take several queues, and one may have a dead-letter exchange where another has none."""
    bare = Queue(rabbitmq, f"consumers-{next(NUMBERS)}")
    bare.declare()
    queue.publish("5 euro", None)

    # The end of the consumer's context raises it.
    stopped = pytest.raises(MessageStopped, match=bare.name)
    with stopped, by_kombu(queue, memory_inbox(), Effects(), others=[bare]) as stop:
        assert [b"5 euro"] == queue.wait_for_dead()
        bare.publish("6 euro", None)
        assert stop.wait(PATIENCE)
    assert [b"6 euro"] == bare.left()


def test_a_consumer_believes_that_a_policy_gives_the_queue_its_exchange(queue: Queue, consume: Consumer) -> None:
    """No client can see a policy. Here none is set, so the message is gone."""
    queue.declare()
    queue.publish("5 euro", None)
    effects = Effects()

    with consume(queue, memory_inbox(), lambda message: effects(1), dead_letters=True):
        queue.publish("6 euro", "m-2")
        effects.wait_for(1)

    assert [] == queue.left()


def test_dead_messages_go_to_the_function_of_the_application(queue: Queue, consume: Consumer) -> None:
    """It is called again until it returns: only then is the message acknowledged."""
    inbox, told = memory_inbox(), Effects()
    inbox.process("m-1", lambda: None, payload=b"5 euro")
    queue.publish("500 euro")

    def dead(message: Any, reason: str) -> None:
        told(reason)
        if len(told.runs) < 3:
            raise OSError("no disk")

    with consume(queue, inbox, lambda message: None, dead=dead):
        told.wait_for(3)

    assert ["message-reused"] * 3 == told.runs
    assert [] == queue.left() + queue.left(queue.dead)


def test_a_handler_that_fails_is_tried_again_here(queue: Queue, consume: Consumer) -> None:
    inbox, effects = memory_inbox(), Effects()
    queue.publish("5 euro")

    def book(message: Any) -> None:
        effects(1)
        if len(effects.runs) < 6:
            raise OSError("the bank is away")

    with consume(queue, inbox, book):
        effects.wait_for(6)

    assert [] == queue.left() + queue.left(queue.dead)


def test_a_handler_that_fails_for_ever_is_given_up(queue: Queue, consume: Consumer) -> None:
    """After `retries` more attempts. The next message is handled."""
    inbox, effects = memory_inbox(), Effects()
    queue.publish("5 euro")

    def book(message: Any) -> None:
        effects(1)
        if len(effects.runs) <= 3:
            raise OSError("no such account")

    with consume(queue, inbox, book, retries=2):
        assert [b"5 euro"] == queue.wait_for_dead()
        assert 3 == len(effects.runs)
        queue.publish("6 euro", "m-2")
        effects.wait_for(4)


def test_a_fault_of_the_configuration_stops_the_consumer(queue: Queue, consume: Consumer) -> None:
    inbox, effects = memory_inbox(), Effects()
    queue.publish("5 euro")

    def book(message: Any) -> None:
        effects(1)
        raise ConfigurationError("no bank is configured")

    with pytest.raises(ConfigurationError, match="no bank"), consume(queue, inbox, book):
        effects.wait_for(1)

    with consume(queue, inbox, effects):
        effects.wait_for(2)
    assert [] == queue.left() + queue.left(queue.dead)


def test_heartbeats_go_on_while_a_handler_runs(
    queue: Queue, consume: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread of the connection, nothing would be heard from this consumer, and the broker would end it."""
    inbox, effects, beats = memory_inbox(), Effects(), Effects()
    queue.publish("5 euro")

    def noted(owner: Any, name: str) -> None:
        beat = getattr(owner, name)

        def noting(self: Any) -> None:
            beats(1)
            beat(self)

        monkeypatch.setattr(owner, name, noting)

    noted(pika.heartbeat.HeartbeatChecker, "_send_heartbeat_frame")
    noted(amqp.Connection, "send_heartbeat")

    with consume(queue, inbox, lambda message: effects(len(beats.wait_for(len(beats.runs) + 1))), heartbeat=6):
        effects.wait_for(1)

    assert [] == queue.left()


def test_each_message_has_an_application_context_of_its_own(queue: Queue, consume: Consumer) -> None:
    """In the thread of the handler too: its database sessions end with the message."""
    app = Flask(__name__)
    app.config.update(TESTING=True, IDEMPOTENCY_SECRET="0123456789abcdef0123456789abcdef")
    idempotency, effects, ended = Idempotency(app), Effects(), Effects()
    app.teardown_appcontext(lambda error: ended(threading.current_thread().name))
    inbox = idempotency.inbox("billing")
    for number in range(2):
        queue.publish("5 euro", f"m-{number}")

    def book(message: Any) -> None:
        g.seen = [*g.get("seen", ()), current_app.name]
        effects(g.seen)

    with consume(queue, inbox, book, within=app.app_context):
        effects.wait_for(2)

    assert [[__name__]] * 2 == effects.runs
    # Those of the messages, then the one around the consumer.
    assert (2, 1) == (sum(name != "consumer" for name in ended.runs), ended.runs.count("consumer"))


def test_others_overtake_a_message_that_waits(queue: Queue) -> None:
    real, effects = memory_inbox(), Effects()
    inbox = Hasty(real)
    for number in range(3):
        queue.publish("5 euro", f"m-{number}")

    with (
        at_work(real, "m-0", payload=b"5 euro"),
        by_pika(queue, inbox, lambda message: effects(message.properties.message_id), prefetch=3),
    ):
        effects.wait_for(2)
        inbox.wait_for(2, Later)

    assert ["m-1", "m-2"] == effects.runs

"""Each adapter counts a message as sent when its broker or receiver has confirmed it, and tells never from not yet."""

from __future__ import annotations

import gzip
import logging
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import confluent_kafka
import httpx
import pytest
from celery import Celery
from flask import Flask, current_app, request
from kombu import Connection
from kombu import Exchange as Declared
from kombu import Queue as DeclaredQueue
from werkzeug.serving import make_server

from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency, idempotent
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.outbox import Message, Undeliverable
from flask_idempotency.maintenance.relay import NotTried, SendFailed, text_of
from flask_idempotency.outbox import Exchange, Kafka, Tasks, Webhook, brokers, webhook
from tests.lab.programs import REDIS_KINDS
from tests.lab.rabbitmq import RabbitServer
from tests.lab.tls import make_certificate
from tests.outbox.conftest import SECRET

PATIENCE = 60


def message(number: int = 1, topic: str = "orders", body: bytes | None = None, **rest: Any) -> Message:
    headers = {
        "content-type": "application/json" if body is None else "application/octet-stream",
        **rest.pop("headers", {}),
    }
    return Message(f"m-{number}", topic, b'{"id":%d}' % number if body is None else body, headers=headers, **rest)


# Celery.


@pytest.fixture
def redis_url(redis_servers: Any) -> str:
    server: RedisServer = redis_servers.get(REDIS_KINDS[0])
    return server.url


@pytest.fixture
def celery_app(redis_url: str) -> Iterator[Celery]:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    app.conf.task_default_queue = "outbox-tests"
    app.conf.broker_transport_options = {"socket_timeout": 5, "socket_connect_timeout": 5}
    yield app
    app.close()


def test_a_task_has_the_id_of_its_message(celery_app: Celery) -> None:
    sent = Tasks(celery_app).send(
        [
            message(1, "shop.mail", headers={"traceparent": "00-1"}),
            Message("m-2", "shop.list", b"[1,2]", headers={"content-type": "application/json"}),
        ]
    )

    assert [None, None] == list(sent)
    with celery_app.connection_for_read() as connection:
        queue = connection.SimpleQueue("outbox-tests")
        first, second = (queue.get(timeout=PATIENCE) for _ in range(2))
        for each in (first, second):
            each.ack()
        queue.close()
    assert ("shop.mail", "m-1", "00-1") == tuple(first.headers[name] for name in ("task", "id", "traceparent"))
    assert ([], {"id": 1}) == tuple(first.payload[:2])
    assert ("shop.list", "m-2", [1, 2]) == (second.headers["task"], second.headers["id"], second.payload[0])


def test_a_task_takes_a_dict_or_a_list(celery_app: Celery) -> None:
    tasks = Tasks(celery_app)
    for body in (b'"text"', b"7", b"null"):
        with pytest.raises(ValueError, match="takes a dict"):
            tasks.check(Message("m", "t", body, headers={"content-type": "application/json"}))
    with pytest.raises(ValueError, match="takes a dict"):
        tasks.check(message(body=b"{}"))
    (result,) = tasks.send([message(body=b"{}")])

    assert isinstance(result, Undeliverable)


def test_a_header_of_celery_is_refused() -> None:
    """Celery merges them over its own: the task would run under another id, or be another task."""
    tasks = Tasks(Celery("shop", set_as_current=False))
    for name in ("id", "task", "eta", "retries", "root_id"):
        with pytest.raises(ValueError, match=f"Celery sets {name} itself"):
            tasks.check(message(headers={name: "x"}))


def test_a_slow_broker_does_not_outlast_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty messages of four seconds each are more than the relay's hold. The rest waits for the next call."""
    now, sent = [0.0], []

    def send_task(*arguments: object, task_id: str, **options: object) -> None:
        now[0] += 2
        sent.append(task_id)

    celery_app = Celery("shop", broker="memory://", set_as_current=False)
    monkeypatch.setattr(celery_app, "send_task", send_task)
    monkeypatch.setattr(brokers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    results = Tasks(celery_app).send([message(number) for number in range(4)])

    assert [type(None), type(None), NotTried, NotTried] == [type(each) for each in results]
    assert ["m-0", "m-1"] == sent


def test_kafka_python_waits_once_for_a_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred waits of fifteen seconds each are more than the relay's hold."""
    now, waits = [0.0], []

    class Hangs:
        config: ClassVar = {"enable_idempotence": True}

        def send(self, *arguments: object, **options: object) -> Any:
            def get(timeout: float) -> None:
                waits.append(timeout)
                now[0] += timeout
                raise TimeoutError

            return SimpleNamespace(get=get)

    monkeypatch.setattr(brokers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    results = Kafka(Hangs()).send([message(number) for number in range(3)])

    assert [SendFailed] * 3 == [type(each) for each in results]
    assert sum(waits) < 16


def test_a_broker_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or a slow machine leaves the second message to a later call, for another reason.
    monkeypatch.setattr(brokers, "time", SimpleNamespace(monotonic=lambda: 0.0))
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    calls: list[str] = []
    tasks, send = Tasks(app), app.send_task

    def counted(name: str, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return send(name, *args, **options)

    app.send_task = counted  # type: ignore[method-assign]

    results = tasks.send([message(1), message(2)])

    assert [True, True] == [isinstance(each, Exception) and not isinstance(each, Undeliverable) for each in results]
    assert 1 == len(calls)


def test_an_amqp_broker_must_confirm() -> None:
    """Without it Celery takes a frozen broker for one that has the message."""
    app = Celery("shop", broker="amqp://guest@127.0.0.1:1//", set_as_current=False)

    with pytest.raises(ConfigurationError, match="confirm_publish"):
        Tasks(app).send([message()])


def test_tasks_need_an_application() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"celery_app": object()},
        {"celery_app": Celery(set_as_current=False), "task_id": "x"},
    )
    for arguments in wrong:
        with pytest.raises(TypeError, match="Tasks"):
            Tasks(**arguments)


# AMQP.


@pytest.mark.slow
def test_an_exchange_confirms_and_refuses_what_no_queue_takes(rabbitmq: RabbitServer) -> None:
    declared = Declared("shop", type="topic", durable=True)
    queue = DeclaredQueue("orders", exchange=declared, routing_key="orders.#", durable=True)
    with Connection(rabbitmq.url) as connection:
        queue(connection.default_channel).declare()
        adapter = Exchange(Connection(rabbitmq.url), "shop")

        first = adapter.send([message(1, "orders.new", headers={"traceparent": "00-1"}), message(2, "refunds.new")])
        # The broker closes idle connections: the next message opens another.
        adapter._connection.default_channel.close()
        adapter._connection.transport.close_connection(adapter._connection.connection)
        second = adapter.send([message(3, "orders.new", body=b"\0\xff")])
        adapter._connection.release()

        received: list[Any] = []
        simple: Any = connection.SimpleQueue(queue)  # type: ignore[arg-type]
        for _ in range(2):
            received.append(simple.get(timeout=PATIENCE))
            received[-1].ack()
        simple.close()
    assert (None, None) == (first[0], second[0])
    assert isinstance(first[1], SendFailed)
    assert "no queue takes this topic" == text_of(first[1])
    assert ["m-1", "m-3"] == [each.properties["message_id"] for each in received]
    assert [2, 2] == [each.properties["delivery_mode"] for each in received]
    assert ({"id": 1}, "00-1") == (received[0].payload, received[0].headers["traceparent"])
    assert b"\0\xff" == bytes(received[1].body)


def test_an_exchange_that_is_away_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr("kombu.utils.functional.sleep", lambda seconds: None)
    results = Exchange(Connection("amqp://guest@127.0.0.1:1//")).send([message(1), message(2)])

    assert [True, True] == [isinstance(each, OSError) for each in results]
    assert results[0] is results[1]


def test_an_exchange_needs_amqp() -> None:
    with pytest.raises(TypeError, match="Connection of kombu"):
        Exchange(object())
    with pytest.raises(ConfigurationError, match="needs an AMQP broker"):
        Exchange(Connection("redis://127.0.0.1:1"))


# Kafka: librdkafka's mock cluster.


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    owner = confluent_kafka.Producer({"bootstrap.servers": "localhost:1", "test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=PATIENCE).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    del owner


def consumed(address: str, topic: str, count: int) -> list[Any]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "test", "log_level": 0})
    try:
        partitions = consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions
        consumer.assign([confluent_kafka.TopicPartition(topic, each, 0) for each in partitions])
        found: list[Any] = []
        while len(found) < count:
            each = consumer.poll(PATIENCE)
            assert each is not None
            assert each.error() is None
            found.append(each)
        return found
    finally:
        consumer.close()


@pytest.mark.slow
def test_kafka_reports_each_delivery(kafka: str) -> None:
    adapter = Kafka({"bootstrap.servers": kafka, "log_level": 0, "message.max.bytes": 2000})

    results = adapter.send(
        [message(1, key="ключ"), message(2, body=b"x" * 5000), message(3, headers={"traceparent": "00-1"})]
    )

    assert (None, None) == (results[0], results[2])
    assert isinstance(results[1], Undeliverable)
    found = {dict(each.headers())["message-id"]: each for each in consumed(kafka, "orders", 2)}
    assert {b"m-1", b"m-3"} == set(found)
    assert ("ключ".encode(), b'{"id":1}') == (found[b"m-1"].key(), found[b"m-1"].value())
    assert b"00-1" == dict(found[b"m-3"].headers())["traceparent"]
    assert found[b"m-3"].key() is None


@pytest.mark.slow
def test_kafka_that_is_away_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotency.outbox.brokers.KAFKA_SECONDS", 0.5)
    adapter = Kafka({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})

    results = adapter.send([message(1), message(2)])

    assert [True, True] == [isinstance(each, SendFailed) for each in results]
    assert 0 == len(adapter._producer)


def test_a_report_of_kafka_that_comes_late_changes_no_result() -> None:
    class Late:
        """Has the methods of confluent-kafka's producer, and reports when nothing waits any more."""

        def __init__(self) -> None:
            self.reports: list[Any] = []

        def produce(self, *_: object, on_delivery: Any, **__: object) -> None:
            self.reports.append(on_delivery)

        def flush(self, seconds: float) -> int:
            return len(self.reports) if seconds else 0

        def purge(self, **_: object) -> None: ...

    producer = Late()

    results = Kafka(producer).send([message(1), message(2)])
    for report in producer.reports:
        report(None, None)

    assert [SendFailed] * 2 == [type(each) for each in results]


def test_kafka_needs_idempotence() -> None:
    class Elder:
        config: ClassVar[dict[str, Any]] = {}

        def send(self) -> None: ...

    for off in (False, "false", "False", 0):
        Elder.config["enable_idempotence"] = off
        for producer in ({"enable.idempotence": off}, Elder()):
            with pytest.raises(ConfigurationError, match=r"enable\.idempotence is off"):
                Kafka(producer)
    with pytest.raises(TypeError, match="a configuration or a producer"):
        Kafka(object())


class Future:
    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def get(self, timeout: float) -> None:
        if self._error is not None:
            raise self._error


class MessageSizeTooLargeError(Exception):
    pass


class KafkaPython:
    """A producer with the methods of kafka-python's, whose own needs a broker."""

    config: ClassVar[dict[str, Any]] = {"enable_idempotence": True}

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, topic: str, *, value: bytes, key: bytes | None, headers: list[tuple[str, bytes]]) -> Future:
        self.sent.append((topic, value, key, headers[0]))
        if len(value) > 100:
            raise MessageSizeTooLargeError(value)
        return Future(TimeoutError("away") if value == b"away" else None)


def test_kafka_takes_a_producer_of_kafka_python() -> None:
    producer = KafkaPython()

    results = Kafka(producer).send([message(1, key="a"), message(2, body=b"away"), message(3, body=b"x" * 101)])

    assert (None, SendFailed, Undeliverable) == (results[0], type(results[1]), type(results[2]))
    assert ("orders", b'{"id":1}', b"a", ("message-id", b"m-1")) == producer.sent[0]


# Webhooks.


CANARY = "of-another-receiver"


class Receiver(BaseHTTPRequestHandler):
    """Responds with the status that the path names, and keeps what it got."""

    got: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fields = {name.lower(): ",".join(self.headers.get_all(name, [])) for name in self.headers}
        self.got.append((self.path, fields, body))
        status = int(self.path.rpartition("/")[2])
        if status == 0:
            self.connection.close()
            return
        self.send_response(status)
        self.send_header("Location", "/200")
        if self.path.startswith("/paused"):
            self.send_header("Idempotency-Status", "paused")
        self.send_header("Set-Cookie", f"session={CANARY}; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving(server: Any) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[str]:
    Receiver.got.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Receiver)) as url:
        yield url


def test_a_webhook_carries_the_message_id_twice(receiver: str) -> None:
    hook = Webhook(
        lambda message: f"{receiver}/200", headers_of=lambda message: {"webhook-signature": message.message_id}
    )

    assert [None] == list(hook.send([message(1, headers={"traceparent": "00-1"})]))

    ((path, fields, body),) = Receiver.got
    assert ("/200", b'{"id":1}', "application/json") == (path, body, fields["content-type"])
    assert ("m-1", "m-1", "00-1", "m-1") == tuple(
        fields[name] for name in ("idempotency-key", "webhook-id", "traceparent", "webhook-signature")
    )


def test_the_status_of_a_webhook_decides(receiver: str) -> None:
    """Each is sent once: the relay repeats it, and no redirect is followed."""
    expected: dict[type[Any], tuple[int, ...]] = {
        type(None): (200, 201, 204),
        SendFailed: (301, 307, 408, 409, 425, 429, 500, 503, 0),
        Undeliverable: (400, 401, 404, 410, 413, 422),
    }
    hook = Webhook(lambda message: f"{receiver}/{status}")
    for kind, statuses in expected.items():
        for status in statuses:
            Receiver.got.clear()
            (result,) = hook.send([message()])

            assert (status, kind, 1) == (status, type(result), len(Receiver.got))
            assert result is None or "127.0.0.1" not in text_of(result)


def test_a_message_that_its_receiver_paused_is_sent_again(receiver: str) -> None:
    """Steps of it are done. Dead, the rest would never be; an operator who sends it anew would pay twice."""
    hook = Webhook(lambda message: f"{receiver}/paused/{status}")
    for status in (200, 401, 403, 422, 503):
        (result,) = hook.send([message()])

        assert (status, SendFailed) == (status, type(result))


def test_a_webhook_has_each_field_once_and_its_own_id(receiver: str) -> None:
    """A receiver may read the first of two, and the publisher's value would be taken for the signature."""
    hook = Webhook(
        lambda message: f"{receiver}/200",
        headers_of=lambda message: {"Webhook-Signature": "ours", "idempotency-key": "x", "Webhook-Id": "x"},
    )

    assert [None] == list(hook.send([message(1, headers={"webhook-signature": "theirs"})]))

    ((_, fields, _),) = Receiver.got
    assert ("m-1", "m-1", "ours") == tuple(
        fields[name] for name in ("idempotency-key", "webhook-id", "webhook-signature")
    )


def test_a_webhook_keeps_no_cookie_and_takes_nothing_from_the_environment(
    receiver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cookie of one receiver went to all that share its host, and many of them made each message fail with 431."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"default login alice password {CANARY}\n", encoding="utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    hook = Webhook(lambda message: f"{receiver}/200")

    assert [None] * 3 == [hook.send([message(number)])[0] for number in range(3)]

    assert [(None, None)] * 3 == [(each.get("cookie"), each.get("authorization")) for _, each, _ in Receiver.got]


def test_a_webhook_sends_through_a_proxy_that_you_name(receiver: str) -> None:
    hook = Webhook(lambda message: "http://customer.invalid/200", proxy=receiver)

    assert [None] == list(hook.send([message()]))
    assert ["http://customer.invalid/200"] == [path for path, _, _ in Receiver.got]


def test_the_log_names_no_url_of_a_webhook(receiver: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has tokens and passwords of customers. What the application sends with httpx itself is logged as before."""
    caplog.set_level(logging.DEBUG)
    url = receiver.replace("://", f"://user:{CANARY}@")
    for status in (200, 404, 0):
        hook = Webhook(lambda message, status=status: f"{url}/{CANARY}/{status}", allow=lambda host, address: True)  # type: ignore[misc]
        hook.send([message()])
        Webhook(lambda message, status=status: f"{url}/{CANARY}/{status}").send([message()])  # type: ignore[misc]

    assert CANARY not in caplog.text
    assert not [each.name for each in caplog.records if each.name.startswith(("httpx", "httpcore", "hpack"))]
    httpx.post(f"{receiver}/200", trust_env=False)
    assert {"httpx", "httpcore.connection", "httpcore.http11"} <= {each.name for each in caplog.records}


# Where a webhook may go.


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The addresses of names: one list for each look-up, the last one for all later ones."""
    found: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in found:
            return real(host, port, *args, **more)
        addresses = found[host].pop(0) if len(found[host]) > 1 else found[host][0]
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [each for address in addresses for each in real(address, port, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


def test_a_webhook_goes_to_the_address_that_was_checked(receiver: str, names: dict[str, list[list[str]]]) -> None:
    """The second look-up of the name is an attack: it leads elsewhere."""
    port = int(receiver.rpartition(":")[2])
    names["customer.example"] = [["127.0.0.2", "127.0.0.1"], ["127.0.0.3"]]
    asked: list[tuple[str, Any]] = []

    def allow(host: str, address: Any) -> bool:
        asked.append((host, address))
        return str(address) == "127.0.0.1"

    hook = Webhook(lambda message: f"http://Customer.example:{port}/200", allow=allow)

    assert [None] == list(hook.send([message()]))
    assert [("customer.example", IPv4Address("127.0.0.2")), ("customer.example", IPv4Address("127.0.0.1"))] == asked
    assert [f"customer.example:{port}"] == [fields["host"] for _, fields, _ in Receiver.got]
    (refused,) = hook.send([message()])
    assert (SendFailed, "no address of the receiver is allowed") == (type(refused), str(refused))
    assert 1 == len(Receiver.got)


@pytest.mark.parametrize(
    "host",
    ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "customer.example"),
)
def test_no_spelling_of_an_address_passes_the_check(
    receiver: str, names: dict[str, list[list[str]]], host: str
) -> None:
    names["customer.example"] = [["::ffff:127.0.0.1"]]
    url = receiver.replace("127.0.0.1", host)
    hook = Webhook(lambda message: f"{url}/200", allow=lambda host, address: address.is_global)

    (result,) = hook.send([message()])

    assert isinstance(result, Exception)
    assert [] == Receiver.got


def test_a_mapped_address_is_checked_as_what_it_leads_to(names: dict[str, list[list[str]]]) -> None:
    names["customer.example"] = [["::ffff:10.0.0.7"]]
    asked: list[Any] = []

    Webhook(lambda message: "http://customer.example", allow=lambda host, address: asked.append(address)).send(  # type: ignore[arg-type,return-value]
        [message()]
    )

    assert [IPv4Address("10.0.0.7")] == asked


def test_the_next_allowed_address_is_tried_if_one_cannot_be_reached(
    receiver: str, names: dict[str, list[list[str]]]
) -> None:
    names["customer.example"] = [["::1", "127.0.0.1"]]
    names["away.example"] = [["::1"]]
    port = int(receiver.rpartition(":")[2])
    hooks = [
        Webhook(lambda message, host=host: f"http://{host}:{port}/200", allow=lambda host, address: True)  # type: ignore[misc]
        for host in ("customer.example", "away.example")
    ]

    (sent,), (failed,) = (hook.send([message()]) for hook in hooks)

    assert (None, SendFailed) == (sent, type(failed))


def test_allow_buries_with_undeliverable_and_an_unknown_name_is_tried_again(names: dict[str, list[list[str]]]) -> None:
    def refuse(host: str, address: Any) -> bool:
        raise Undeliverable("this customer may not have webhooks")

    names["unknown.example"] = [[]]
    (dead,) = Webhook(lambda message: "http://127.0.0.1:1/hook", allow=refuse).send([message()])
    (later,) = Webhook(lambda message: "http://unknown.example/hook", allow=refuse).send([message()])

    assert (Undeliverable, SendFailed) == (type(dead), type(later))


def test_a_checked_webhook_asks_for_the_certificate_of_the_name(
    tmp_path: Path, names: dict[str, list[list[str]]]
) -> None:
    names["customer.example"] = names["other.example"] = [["127.0.0.1"]]
    certificate, key = make_certificate(tmp_path, host="customer.example")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    asked: list[str | None] = []
    context.sni_callback = lambda socket, name, context: asked.append(name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    trusting = ssl.create_default_context(cafile=str(certificate))

    def sent(host: str) -> Any:
        url = f"https://{host}:{server.server_port}/200"
        return Webhook(lambda message: url, allow=lambda host, address: True, verify=trusting).send([message()])[0]

    with serving(server):
        assert (None, SendFailed) == (sent("customer.example"), type(sent("other.example")))
    assert ["customer.example", "other.example"] == asked


def test_allow_runs_in_the_context_of_the_application(receiver: str) -> None:
    app = Flask("shop")
    hook = Webhook(lambda message: f"{receiver}/200", allow=lambda host, address: current_app.name == "shop")

    with app.app_context():
        assert [None] == list(hook.send([message()]))


def test_what_allow_could_not_check_is_refused_at_set_up() -> None:
    def url_of(message: Message) -> str:
        return "http://customer.example"

    cases: tuple[dict[str, Any], ...] = ({"proxy": "http://proxy:3128"}, {"uds": "/run/hooks"})
    for options in cases:
        with pytest.raises(TypeError, match="a proxy or a socket leads elsewhere"):
            Webhook(url_of, allow=lambda host, address: True, **options)
    for allow in (lambda host: True, "customer.example"):
        with pytest.raises(TypeError, match="allow is a function of a host and an address"):
            Webhook(url_of, allow=allow)  # type: ignore[arg-type]


def test_functions_of_a_wrong_arity_are_refused_at_set_up() -> None:
    with pytest.raises(TypeError, match="from a message to its URL"):
        Webhook(lambda: "http://customer.example")  # type: ignore[arg-type,misc]
    with pytest.raises(TypeError, match="headers_of"):
        Webhook(lambda message: "http://customer.example", headers_of=lambda one, two: {})  # type: ignore[arg-type,misc]


def test_a_receiver_has_connections_of_its_own_and_uses_them_again() -> None:
    """A silent receiver must not use up the connections of others, and its end must not close theirs."""
    hook = Webhook(lambda message: "http://a.example/x", verify=False)
    first, other = hook._opened("a"), hook._opened("a")
    hook._keep(first, "a")

    assert (True, False, True) == (
        first is not other, hook._opened("b") is first, hook._opened("a") is first
    )  # fmt: skip
    for _ in range(webhook.MAX_IDLE + 3):
        hook._keep(hook._opened("c"), "c")
        hook._keep(hook._opened(object()), object())
    assert webhook.MAX_IDLE == len(hook._idle)


@contextmanager
def raw_receiver(respond: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Serve one connection after the other, byte by byte."""
    end = threading.Event()

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(65_536)
                    respond(connection, end)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        end.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_receiver_that_drips_does_not_hold_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte starts httpx's timeout again. Measured: 36 s, and the hold of the relay is 30 s."""
    monkeypatch.setattr(webhook, "TIMEOUT_SECONDS", 0.4)
    dripped = []

    def drip(connection: socket.socket, end: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for number in range(PATIENCE * 5):
            end.wait(0.1)
            connection.sendall(b"X: y\r\n")
            dripped.append(number)
        connection.sendall(b"Content-Length: 0\r\n\r\n")

    with raw_receiver(drip) as url:
        (result,) = Webhook(lambda message: url).send([message()])
        whole = len(dripped) == PATIENCE * 5

    assert (False, "no whole response within 0.4 seconds") == (whole, text_of(result) if result else None)


def test_a_response_that_unpacks_to_more_than_memory_is_not_unpacked() -> None:
    """A customer's receiver could end the relay with a hundred kilobytes, again at each attempt."""
    packed = gzip.compress(b"\0" * 100_000_000)

    def bomb(connection: socket.socket, end: threading.Event) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        connection.sendall(head + packed)

    tracemalloc.start()
    try:
        with raw_receiver(bomb) as url:
            result = Webhook(lambda message: url).send([message()])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [None] == list(result)
    assert peak < 20_000_000


def test_a_receiver_that_is_away_gets_it_later() -> None:
    (result,) = Webhook(lambda message: "http://127.0.0.1:1/hook").send([message()])

    assert isinstance(result, SendFailed)


def test_a_webhook_without_a_url_gets_it_later() -> None:

    def no_url(message: Message) -> str:
        raise KeyError

    for url_of in (lambda message: "ftp://x", lambda message: "", no_url):
        try:
            (result,) = Webhook(url_of).send([message()])
        except KeyError:
            continue
        assert isinstance(result, SendFailed)
    with pytest.raises(TypeError, match="a function"):
        Webhook("https://customer.example")  # type: ignore[arg-type]


def test_a_receiver_that_this_package_guards_runs_it_once() -> None:
    app, runs = Flask("receiver"), []
    app.testing = True
    app.config |= {"IDEMPOTENCY_SECRET": SECRET, "IDEMPOTENCY_STORE": "memory://"}
    Idempotency(app)

    @app.post("/hooks")
    @idempotent(required=True, max_body=10)
    def hook() -> str:
        runs.append(request.headers["webhook-id"])
        return "x" * 100

    with serving(make_server("127.0.0.1", 0, app, threaded=True)) as url:
        adapter = Webhook(lambda message: f"{url}/hooks")
        results = [adapter.send([message()])[0] for _ in range(3)]
        other = adapter.send([message(body=b"{}")])[0]

    assert [None, None, None] == results
    assert ["m-1"] == runs
    assert isinstance(other, Undeliverable)

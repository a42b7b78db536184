"""Each consumer that a guide shows handles messages as it stands: one that arrives twice, and one that cannot be done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pika  # type: ignore[import-untyped]
import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from docs.generate import HERE
from flask_idempotency import ConfigurationError, Happened, StillUnknown
from flask_idempotency.consumers import Dead, MessageStopped, Processed
from tests.docs.test_pages import BLOCK, surroundings
from tests.lab.kafka import KafkaCluster
from tests.lab.rabbitmq import RabbitServer


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
    amount: Mapped[int]


@contextmanager
def example(page: str, block: int, folder: Path, **names: Any) -> Iterator[dict[str, Any]]:
    """Run this block, in an application whose records are in its own database."""
    found = {**surroundings(), "Payment": Payment, **names}
    app, db = found["app"], SQLAlchemy(model_class=Base)
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{folder / 'guide.sqlite3'}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
    }
    db.init_app(app)
    found["db"] = db
    code = BLOCK.findall((HERE / "guides" / f"{page}.md").read_text(encoding="utf-8"))[block]
    exec(compile(code, page, "exec", dont_inherit=True), found)  # noqa: S102 - our own page
    if "idempotency" not in app.extensions:
        found["idempotency"].init_app(app)
    with app.app_context():
        db.create_all()
    yield found
    with app.app_context():
        db.session.remove()
        db.engine.dispose()


def rows(names: dict[str, Any]) -> int:
    app: Flask = names["app"]
    with app.app_context(), names["db"].engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(Payment)).scalar_one())


def test_the_task_of_the_guide_writes_one_row_for_each_message(tmp_path: Path) -> None:
    with example("celery-tasks", 0, tmp_path) as names:
        charge = names["charge"]
        ended = [charge.apply(("o-7", 100), task_id=each).state for each in ("a", "a", "b")]
        failed = charge.apply(("o-7", None), task_id="c").state
        with names["app"].app_context(), pytest.raises(ConfigurationError):
            charge("o-7", 100)

        assert (["SUCCESS"] * 3, "FAILURE", 2) == (ended, failed, rows(names))


def test_the_inbox_of_the_guide_says_what_to_do_with_each_message(tmp_path: Path) -> None:
    did: list[Any] = []

    def book(body: bytes) -> None:
        did.append(body)
        if body == b"bad":
            raise ZeroDivisionError

    with example("messages", 0, tmp_path, book=book) as names:

        def deliver(message_id: str, body: bytes) -> None:
            about = {each: (lambda *_, each=each: did.append(each)) for each in ("acknowledge", "retry", "set_aside")}
            names["handle"](SimpleNamespace(id=message_id, body=body, **about))

        deliver("m-1", b"5 euro")
        deliver("m-1", b"5 euro")
        deliver("m-1", b"500 euro")
        with pytest.raises(ZeroDivisionError):
            deliver("m-2", b"bad")

    assert [b"5 euro", "acknowledge", "acknowledge", "set_aside", "acknowledge", b"bad"] == did


def test_the_work_of_the_guide_charges_once(tmp_path: Path) -> None:
    charged: list[Any] = []

    def charge(*about: Any) -> str:
        charged.append(about)
        return "ch_1"

    order = SimpleNamespace(id=7, card="tok_visa", total=5, email="alice@shop.example")
    shop = {
        "charge": lambda what, key: charged.append(what),
        "provider": SimpleNamespace(charge=charge),
        "send_mail": lambda *about: None,
    }
    with example("messages", 1, tmp_path, **shop) as names, names["app"].app_context():
        inbox = names["idempotency"].inbox("billing", effects="marked")
        assert [False, True] == [inbox.process("m", lambda: names["charge_order"](7)).replayed for _ in range(2)]
    with example("messages", 2, tmp_path, **shop) as names, names["app"].app_context():
        assert [False, True] == [
            names["orders"].process("m", lambda: names["fulfil"](order)).replayed for _ in range(2)
        ]

    assert [7, ("tok_visa", 5)] == charged


def test_the_inbox_without_an_application_works_on_its_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "s-9f2c47d1e8b35a60")
    owner = surroundings()
    owner["app"].config["IDEMPOTENCY_STORE"] = "sqlite:///billing.sqlite3"
    owner["idempotency"].init_app(owner["app"])
    assert 0 == owner["app"].test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code

    with example("messages", 3, tmp_path) as names:
        verdicts = [names["inbox"].process("m", lambda: 7, payload=body) for body in (b"a", b"a", b"b")]
        names["Session"].remove()
        names["Session"].get_bind().dispose()

    assert [Processed(7, replayed=False), Processed(7, replayed=True), Dead("message-reused")] == verdicts


def test_the_resolver_of_the_guide_asks_the_provider(tmp_path: Path) -> None:
    known = {"of m-1": {"id": "ch_1"}}
    with example("messages", 4, tmp_path, provider=SimpleNamespace(find_charge=known.get)) as names:
        found = [
            names["what_became_of_it"](SimpleNamespace(downstream_key=lambda name, of=of: of))
            for of in ("of m-1", "of m-2")
        ]

    assert [Happened({"id": "ch_1"}), StillUnknown()] == found


def test_the_function_for_lambda_keeps_what_cannot_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attribute = {"message-id": {"stringValue": "order-7", "dataType": "String"}}
    bodies = ("5 euro", "5 euro", "500 euro")
    records = [
        {"messageId": str(number), "body": body, "messageAttributes": attribute} for number, body in enumerate(bodies)
    ]
    with example("rabbitmq-kafka", 3, tmp_path) as names:
        kept = names["on_lambda"]({"Records": records}, None)

    assert {"batchItemFailures": [{"itemIdentifier": "2"}]} == kept
    assert "5 euro\n" == capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("client", ("pika", "kombu"))
def test_the_consumers_of_rabbitmq_stop_at_what_the_broker_would_destroy(
    client: str, tmp_path: Path, rabbitmq: RabbitServer
) -> None:
    url = rabbitmq.url.removesuffix("/") + "%2F"
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.queue_delete("orders")
        channel.queue_declare("orders")
        for message_id in ("m-1", "m-1", None):
            channel.basic_publish("", "orders", b"5 euro", pika.BasicProperties(message_id=message_id))
        if client == "pika":
            with example("rabbitmq-kafka", 0, tmp_path) as names:
                names["app"].config["BROKER_URL"] = url
                ended: Any = names["app"].test_cli_runner().invoke(args=["billing"]).exception
        else:
            with (
                example("rabbitmq-kafka", 1, tmp_path) as names,
                names["app"].app_context(),
                kombu.Connection(rabbitmq.url) as other,
                pytest.raises(MessageStopped) as caught,
            ):
                names["run"](other, kombu.Queue("orders", no_declare=True))
            ended = caught.value

        assert isinstance(ended, MessageStopped)
        left = list(itertools.takewhile(lambda got: got[0], iter(lambda: channel.basic_get("orders", True), None)))
    assert [None] == [properties.message_id for _, properties, _ in left]


@pytest.mark.slow
def test_the_consumer_of_kafka_sets_aside_what_cannot_be_done(tmp_path: Path) -> None:
    set_aside: list[Any] = []

    def put_aside(message: Any, reason: str) -> None:
        set_aside.append((message.value(), reason))
        raise KeyboardInterrupt  # as an operator ends the command

    with KafkaCluster() as cluster, example("rabbitmq-kafka", 2, tmp_path) as names:
        names["app"].config["KAFKA"] = cluster.address
        names["put_aside"] = put_aside
        for value in (b"5 euro", b"5 euro", b"500 euro"):
            cluster.produce("orders", value, message_id="m-1")
        ended = names["app"].test_cli_runner().invoke(args=["ledger"])

    assert [(b"500 euro", "message-reused")] == set_aside
    assert 1 == ended.output.count("5 euro")

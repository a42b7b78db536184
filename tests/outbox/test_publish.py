"""A message is written in the transaction of its rows, under the right id, or not at all."""

from __future__ import annotations

import datetime
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency import Idempotency
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.outbox import MAX_BODY_BYTES, Message
from tests.outbox.conftest import SECRET, OpenShop, Order, Sent, Shop, on_both, on_each, on_postgresql

BODY = "4111111111111111"


@on_each
def test_a_message_is_committed_with_the_rows(shop: Shop) -> None:
    with shop.app.app_context():
        shop.db.session.add(Order())
        shop.outbox.publish("orders", {"id": 7}, key="order-7")
        assert (0, []) == (shop.orders(), shop.rows())
        shop.db.session.commit()

    (row,) = shop.rows()
    assert (1, "orders", "order-7", b'{"id":7}', 0, 0) == (
        shop.orders(), row.topic, row.key, bytes(row.body), row.attempts, row.dead
    )  # fmt: skip
    assert {"sent": 1} == {"sent": shop.drain().sent}
    assert [b'{"id":7}'] == shop.sent.bodies
    assert [] == shop.rows()


def test_a_rollback_publishes_nothing(shop: Shop) -> None:
    with shop.app.app_context():
        shop.db.session.add(Order())
        shop.outbox.publish("orders", {"id": 7})
        shop.db.session.rollback()

    assert (0, []) == (shop.orders(), shop.rows())
    assert shop.relay.run_once() is None


@on_each
def test_a_savepoint_takes_its_messages_with_it(shop: Shop) -> None:
    with shop.app.app_context():
        first = shop.outbox.publish("orders", {"id": 1})
        with shop.db.session.begin_nested() as savepoint:
            shop.outbox.publish("orders", {"id": 2})
            savepoint.rollback()
        shop.db.session.commit()

    assert [first] == [row.sent_id for row in shop.rows()]


@on_both
def test_rows_are_flushed_before_the_message(shop: Shop) -> None:
    """The lock of the row puts the transactions of one key in order, so it must come first."""
    statements: list[str] = []
    with shop.app.app_context():
        event.listen(shop.db.engine, "before_cursor_execute", lambda *args: statements.append(args[2].split("(")[0]))
        shop.db.session.add(Order())
        shop.outbox.publish("orders", {"id": 1})
        shop.db.session.rollback()

    written = [statement.split()[2] for statement in statements if statement.startswith("INSERT")]
    assert ["orders", "idempotency_outbox"] == [name.removeprefix("public.") for name in written]


def test_ids_are_uuids_of_version_7(shop: Shop) -> None:
    first, second = shop.publish(), shop.publish()

    assert first != second
    assert ("7", "7") == (first[14], second[14])


@on_each
def test_an_id_of_your_own_is_written_once(shop: Shop) -> None:
    ids = {shop.publish(message_id="refund-7") for _ in range(2)}

    assert ({"refund-7"}, 1) == (ids, len(shop.rows()))


def view_of(shop: Shop, *, effects: str) -> list[str]:
    """A view that publishes twice to one topic and once to another. It fails after that, as long as `fail` is set."""
    ids: list[str] = []
    shop.app.config["FAIL"] = True

    @shop.app.post("/pay")
    def pay() -> str:
        ids.extend(shop.outbox.publish(topic, {"id": 1}) for topic in ("orders", "mail.receipt", "orders"))
        if effects != "transactional":
            shop.db.session.commit()
        if shop.app.config["FAIL"]:
            raise OSError("the worker is killed")
        return "paid"

    return ids


@pytest.mark.parametrize("effects", ("deduplicated", "transactional"))
@on_each
def test_a_second_attempt_publishes_under_the_same_ids(open_shop: OpenShop, effects: str) -> None:
    """`deduplicated`: the first attempt has committed its messages. `transactional`: it has left none."""
    shop = open_shop(IDEMPOTENCY_EFFECTS=effects, IDEMPOTENCY_ON_ERROR="release", PROPAGATE_EXCEPTIONS=False)
    ids = view_of(shop, effects=effects)
    client = shop.app.test_client()
    failed = client.post("/pay", headers={"Idempotency-Key": "k"}).status_code
    between = len(shop.rows())
    shop.app.config["FAIL"] = False
    assert (500, 200) == (failed, client.post("/pay", headers={"Idempotency-Key": "k"}).status_code)

    assert (6, 3, ids[:3]) == (len(ids), len(set(ids)), ids[3:])
    assert (0 if effects == "transactional" else 3, 3) == (between, len(shop.rows()))


def test_another_key_or_none_publishes_other_messages(open_shop: OpenShop) -> None:
    shop = open_shop(IDEMPOTENCY_EFFECTS="deduplicated", IDEMPOTENCY_REQUIRED=False)
    ids = view_of(shop, effects="deduplicated")
    shop.app.config["FAIL"] = False
    for headers in ({"Idempotency-Key": "a"}, {"Idempotency-Key": "b"}, {}, {}):
        shop.app.test_client().post("/pay", headers=headers)

    assert 12 == len(set(ids)) == len(shop.rows())
    assert {"7"} == {each[14] for each in ids[6:]}


def test_a_rollback_inside_a_view_does_not_give_a_number_twice(open_shop: OpenShop) -> None:
    """The number may belong to a message that the view has committed before: the second would be dropped."""
    shop = open_shop(IDEMPOTENCY_EFFECTS="deduplicated")

    @shop.app.post("/pay")
    def pay() -> str:
        shop.outbox.publish("orders", {"id": 1})
        shop.db.session.commit()
        shop.outbox.publish("orders", {"id": 2})
        shop.db.session.rollback()
        shop.outbox.publish("orders", {"id": 3})
        shop.db.session.commit()
        return "paid"

    shop.app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    assert [b'{"id":1}', b'{"id":3}'] == [bytes(row.body) for row in shop.rows()]


def test_the_tenant_of_the_claim_is_the_default(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.idempotency.tenant_loader(lambda: "acme")
    view_of(shop, effects="plain")
    shop.app.config["FAIL"] = False
    shop.app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    assert ["acme"] * 3 == [row.tenant for row in shop.rows()]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

UNSENDABLE: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "NaN": (float("nan"), {}, ValueError),
    "infinity": ([float("inf")], {}, ValueError),
    "datetime": ({"at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}, {}, TypeError),
    "set": ({1}, {}, TypeError),
    "cycle": (CYCLE, {}, ValueError),
    "surrogate": ("\ud800", {}, ValueError),
    "huge": (b"x" * (MAX_BODY_BYTES + 1), {}, ValueError),
    "huge JSON": ("x" * MAX_BODY_BYTES, {}, ValueError),
    "no topic": (1, {"topic": ""}, ValueError),
    "topic of another type": (1, {"topic": 7}, TypeError),
    "topic with a line": (1, {"topic": "a\nb"}, ValueError),
    "topic with NUL": (1, {"topic": "a\0"}, ValueError),
    "long topic": (1, {"topic": "a" * 201}, ValueError),
    "empty key": (1, {"key": ""}, ValueError),
    "key with NUL": (1, {"key": "a\0"}, ValueError),
    "key with a surrogate": (1, {"key": "\ud800"}, ValueError),
    "key of another type": (1, {"key": 7}, TypeError),
    "long key": (1, {"key": "a" * 256}, ValueError),
    "tenant with a line": (1, {"tenant": "a\nb"}, ValueError),
    "empty id": (1, {"message_id": ""}, ValueError),
    "id with a space": (1, {"message_id": "a b"}, ValueError),
    "long id": (1, {"message_id": "a" * 129}, ValueError),
    "id beyond ASCII": (1, {"message_id": "é"}, ValueError),
    "header name with a line": (1, {"headers": {"a\r\nb": "1"}}, ValueError),
    "header value with a line": (1, {"headers": {"a": "1\r\nb: 2"}}, ValueError),
    "header value with NUL": (1, {"headers": {"a": "\0"}}, ValueError),
    "header value beyond ASCII": (1, {"headers": {"a": "é"}}, ValueError),
    "header value of another type": (1, {"headers": {"a": 1}}, TypeError),
    "header name twice": (1, {"headers": {"a": "1", "A": "2"}}, ValueError),
    "reserved header": (1, {"headers": {"Message-Id": "1"}}, ValueError),
    "type of JSON": (1, {"headers": {"Content-Type": "text/plain"}}, ValueError),
    "many headers": (1, {"headers": {f"a{number}": "" for number in range(60)}}, ValueError),
    "negative delay": (1, {"delay": -1}, ValueError),
    "endless delay": (1, {"delay": float("inf")}, ValueError),
    "no delay": (1, {"delay": None}, TypeError),
    "true delay": (1, {"delay": True}, TypeError),
}


def test_what_cannot_be_sent_fails_in_publish(shop: Shop) -> None:
    for name, (body, options, error) in UNSENDABLE.items():
        arguments = {"topic": "orders", **options}
        with shop.app.app_context(), pytest.raises(error) as raised:
            shop.outbox.publish(arguments.pop("topic"), body, **arguments)

        assert (name, True, []) == (name, len(str(raised.value)) < 300, shop.rows())


@on_each
def test_bodies_and_headers_arrive_as_they_were(shop: Shop) -> None:
    blob = bytes(range(256)) * 4000
    shop.publish("a", {"naïve": ["☂", None, 1.5, True]}, headers={"traceparent": "00-1"}, tenant="Ω", key="ключ")
    shop.publish("b", blob, headers={"content-type": "image/png"})
    shop.publish("c", b"")

    shop.drain()

    first, second, third = shop.sent.messages
    assert ({"naïve": ["☂", None, 1.5, True]}, "Ω", "ключ") == (first.json(), first.tenant, first.key)
    assert {"content-type": "application/json", "traceparent": "00-1"} == first.headers
    assert (blob, "image/png") == (second.body, second.content_type)
    assert (b"", "application/octet-stream") == (third.body, third.content_type)


def test_a_topic_without_a_route_fails_in_publish(open_shop: OpenShop) -> None:
    shop = open_shop()
    shop.outbox._routes.clear()
    shop.outbox.route("mail.*", shop.sent)

    with shop.app.app_context(), pytest.raises(ConfigurationError, match="no route takes the topic 'mailx'"):
        shop.outbox.publish("mailx", 1)


def test_the_first_route_that_matches_takes_a_topic(open_shop: OpenShop) -> None:
    shop, other = open_shop(), Sent()
    shop.outbox._routes.clear()
    shop.outbox.route("mail.*", other)
    shop.outbox.route("*", shop.sent)
    shop.publish("mail.receipt")
    shop.publish("orders")

    shop.drain()

    assert (["mail.receipt"], ["orders"]) == tuple([m.topic for m in each.messages] for each in (other, shop.sent))


def test_an_adapter_may_refuse_a_message_in_publish(open_shop: OpenShop) -> None:
    class Picky(Sent):
        def check(self, message: Message) -> None:
            raise ValueError("not this one")

    shop = open_shop()
    shop.outbox._routes.clear()
    shop.outbox.route("*", Picky())

    with shop.app.app_context(), pytest.raises(ValueError, match="not this one"):
        shop.outbox.publish("a", 1)


def test_a_route_that_another_thread_adds_stops_no_message(shop: Shop) -> None:
    class Adding(dict[Any, Any]):
        """The routes that an application keeps. Another thread adds one while they are read."""

        def get(self, pattern: Any, route: Any = None) -> Any:
            shop.outbox._routes["late"] = route
            return super().get(pattern, route)

    shop.services.kept.values = Adding()
    with shop.app.app_context():
        shop.outbox.publish("orders", {})
        shop.db.session.commit()

    assert ["orders"] == [row.topic for row in shop.rows()]


def test_a_route_needs_an_adapter_and_a_pattern_has_one_route(shop: Shop) -> None:
    wrong: tuple[Any, ...] = (object(), Sent, None)
    for adapter in wrong:
        with pytest.raises(ConfigurationError, match="is no adapter"):
            shop.outbox.route("a", adapter)
    with pytest.raises(ConfigurationError, match="has a route already"):
        shop.outbox.route("*", Sent())


def test_publish_outside_its_application_says_so(shop: Shop, open_shop: OpenShop) -> None:
    with pytest.raises(RuntimeError, match=r"with app.app_context\(\)"):
        shop.outbox.publish("orders", 1)
    with open_shop().app.app_context(), pytest.raises(ConfigurationError, match="does not belong to the current"):
        shop.outbox.publish("orders", 1)


def test_the_outbox_is_one(shop: Shop) -> None:
    assert shop.outbox is shop.idempotency.outbox()
    with pytest.raises(ConfigurationError, match="keep is 0 already"):
        shop.idempotency.outbox(keep=5)
    with pytest.raises(ConfigurationError, match="seconds from 0 on"):
        shop.idempotency.outbox(keep=-1)


def test_an_outbox_before_init_app_serves_every_application(records_url: str) -> None:
    idempotency = Idempotency()
    outbox, sent, apps = idempotency.outbox(), Sent(), []
    outbox.route("*", sent)
    for name in ("a", "b"):
        app = Flask(name)
        apps.append(app)
        app.testing = True
        app.config |= {"SQLALCHEMY_DATABASE_URI": records_url, "IDEMPOTENCY_SECRET": SECRET}
        app.config |= {"IDEMPOTENCY_STORE": "memory://"}
        idempotency.init_app(app)
        db = SQLAlchemy(app)
        with app.app_context():
            outbox.publish(name, 1)
            db.session.commit()
            db.session.remove()
            db.engine.dispose()

    for app in apps:
        services = app.extensions["idempotency_outbox"]
        services.relay().run_once()
        services.table.close()
    assert ["a", "b"] == [message.topic for message in sent.messages]


def test_an_application_without_flask_sqlalchemy_says_so() -> None:
    app = Flask("bare")
    app.testing = True
    app.config |= {"IDEMPOTENCY_SECRET": SECRET, "IDEMPOTENCY_STORE": "memory://"}
    outbox = Idempotency(app).outbox()
    outbox.route("*", Sent())

    with app.app_context(), pytest.raises(ConfigurationError, match=r"has no Flask-SQLAlchemy"):
        outbox.publish("a", 1)


@on_each
def test_a_missing_table_is_named_with_its_remedy(shop: Shop) -> None:
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("DROP TABLE idempotency_outbox"))

    with pytest.raises(ConfigurationError, match=r"idempotency_outbox.*flask idempotency db upgrade"):
        shop.publish()
    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        shop.relay.run_once()


@on_each
def test_a_session_that_commits_each_statement_is_refused(open_shop: OpenShop) -> None:
    shop = open_shop(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "AUTOCOMMIT"}, IDEMPOTENCY_STORE="memory://")

    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        shop.publish()


@on_each
def test_no_body_is_logged_or_quoted(open_shop: OpenShop, caplog: pytest.LogCaptureFixture) -> None:
    """Not by an engine that echoes, and not by an error of a statement."""
    caplog.set_level(logging.DEBUG)
    shop = open_shop(SQLALCHEMY_ECHO="debug")
    shop.publish("orders", {"card": BODY}, key=BODY)
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text("ALTER TABLE idempotency_outbox RENAME COLUMN due_at TO late_at"))
    with pytest.raises((ConfigurationError, SQLAlchemyError)) as raised:
        shop.publish("orders", {"card": BODY}, key=BODY)

    assert BODY not in caplog.text
    assert BODY not in f"{raised.value!r}{raised.value.__cause__!r}{raised.value.__context__}"


def test_a_database_in_memory_takes_messages(open_shop: OpenShop) -> None:
    """Tests of applications have one. Only the relay needs a file."""
    shop = open_shop("sqlite://", store="memory://")
    with shop.app.app_context():
        shop.db.create_all()
        shop.outbox.publish("orders", 1)
        assert 1 == shop.db.session.scalar(text("SELECT count(*) FROM idempotency_outbox"))


@on_postgresql
def test_two_transactions_with_one_id_wait_for_each_other(shop: Shop) -> None:
    done = threading.Event()
    with shop.app.app_context():
        shop.outbox.publish("orders", 1, message_id="7")

        def second() -> None:
            shop.publish("orders", 2, message_id="7")
            done.set()

        thread = threading.Thread(target=second)
        thread.start()
        assert not done.is_set()
        shop.db.session.rollback()
    thread.join(60)

    assert [b"2"] == [bytes(row.body) for row in shop.rows()]


def test_the_work_of_a_message_publishes_under_the_same_ids_again(shop: Shop) -> None:
    """An inbox claims its message, so what its work publishes has ids of that claim, and not of the view around it."""
    inbox, ids, fails = shop.idempotency.inbox("billing", effects="deduplicated"), [], [True]

    def work() -> str:
        ids.append(shop.outbox.publish("receipts", {"id": 1}))
        shop.db.session.commit()
        if fails.pop():
            raise OSError("the worker is killed")
        return "done"

    with shop.app.app_context():
        with pytest.raises(OSError, match="killed"):
            inbox.process("m-1", work)
        fails.append(False)
        inbox.process("m-1", work)
        fails.append(False)
        inbox.process("m-2", work)

    assert (3, ids[0], 2) == (len(ids), ids[1], len(shop.rows()))
    assert ids[2] not in ids[:2]


def test_messages_are_in_the_default_bind(open_shop: OpenShop, tmp_path: Path) -> None:
    shop = open_shop(SQLALCHEMY_BINDS={"archive": f"sqlite:///{tmp_path / 'archive.sqlite'}"})

    shop.publish()

    with shop.app.app_context():
        assert [] == inspect(shop.db.engines["archive"]).get_table_names()
        shop.db.engines["archive"].dispose()
    assert 1 == len(shop.rows())

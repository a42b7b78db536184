"""Messages belong to a namespace and a tenant: no other tenant's id hides one, and no other application's relay takes one."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from sqlalchemy import text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.outbox import Undeliverable
from flask_idempotency.maintenance.relay import HOLD_SECONDS, RelayReport
from flask_idempotency.stores.sql.schema import metadata
from tests.outbox.conftest import OpenShop, Sent, Shop, on_both, on_each
from tests.outbox.test_sealing import ring


def run(shop: Shop, *arguments: str) -> Any:
    return shop.app.test_cli_runner().invoke(args=["idempotency", *arguments])


def only(shop: Shop, *patterns: str) -> None:
    """Leave the shop these routes alone."""
    shop.outbox._routes.clear()
    for pattern in patterns:
        shop.outbox.route(pattern, shop.sent)


# Ids.


@on_each
def test_an_id_belongs_to_a_tenant(shop: Shop) -> None:
    for tenant in ("acme", "globex", None):
        for _ in range(2):
            shop.publish("refunds", {"of": tenant}, message_id="refund-7", tenant=tenant)

    assert 3 == shop.drain().sent
    assert [("refund-7", tenant) for tenant in ("acme", "globex", None)] == [
        (message.message_id, message.tenant) for message in shop.sent.messages
    ]


@on_each
def test_a_space_at_the_end_makes_another_name(open_shop: OpenShop, database_url: str) -> None:
    """The collation of MariaDB and MySQL takes the two for one. Tenants are keyed hashes, and a namespace is refused."""
    first, second = (open_shop(IDEMPOTENCY_NAMESPACE=name) for name in ("shop", "shop "))
    if database_url.startswith("mysql"):
        for use in (second.publish, second.drain):
            with pytest.raises(ConfigurationError, match="IDEMPOTENCY_NAMESPACE ends in a space"):
                use()
        second = open_shop(IDEMPOTENCY_NAMESPACE="other")
    for tenant in ("acme", "acme "):
        first.publish("orders", tenant, message_id="7", tenant=tenant)
    second.publish("orders", "other", message_id="7", tenant="acme")

    assert (2, 1) == (first.table.counts().waiting, second.table.counts().waiting)
    assert (2, 1) == (first.drain().sent, second.drain().sent)
    assert ["acme", "acme "] == [message.tenant for message in first.sent.messages]


def test_an_id_belongs_to_a_namespace(open_shop: OpenShop) -> None:
    first, second = (open_shop(IDEMPOTENCY_NAMESPACE=name) for name in ("billing", "shop"))
    for each in (first, second):
        each.publish("refunds", message_id="refund-7")

    assert (1, 1) == (first.drain().sent, second.drain().sent)


@on_each
@pytest.mark.parametrize("encryption", ("off", "required"))
def test_an_id_with_another_topic_key_or_body_is_refused(open_shop: OpenShop, encryption: str) -> None:
    """The second message would be dropped in silence."""
    config: dict[str, Any] = {"IDEMPOTENCY_ENCRYPTION": encryption, "IDEMPOTENCY_KEY_RING": ring("new")}
    shop = open_shop(**(config if encryption != "off" else {}))
    given: dict[str, Any] = {"topic": "orders", "body": {"id": 1}, "key": "k", "message_id": "7", "tenant": "acme"}
    shop.publish(**given)
    shop.publish(**given, headers={"traceparent": "00-2"})

    for name, value in (("topic", "refunds"), ("key", "other"), ("key", None), ("body", {"id": 2}), ("body", b"")):
        with pytest.raises(ValueError, match=f"message_id: .*another {name}"):
            shop.publish(**{**given, name: value})
        with shop.app.app_context():
            shop.db.session.remove()

    assert 1 == len(shop.rows())
    assert 1 == shop.drain().sent


# Relays.


@on_each
def test_a_relay_takes_the_messages_of_its_namespace(open_shop: OpenShop) -> None:
    first, second = (open_shop(IDEMPOTENCY_NAMESPACE=name) for name in ("billing", "shop"))
    first.publish("orders", 1, key="k")
    second.publish("orders", 2, key="k")
    first.sent.fail = lambda message: Undeliverable("no")

    assert RelayReport(0, 0, 1) == first.drain()
    assert RelayReport(1) == second.drain()
    assert [b"2"] == second.sent.bodies


@on_each
def test_operators_and_the_janitor_see_their_namespace(open_shop: OpenShop) -> None:
    """A kept message of another application would be deleted early, and its id could be published again."""
    first, second = (open_shop(IDEMPOTENCY_NAMESPACE=name, keep=keep) for name, keep in (("billing", 9), ("shop", 1)))
    first.sent.fail = lambda message: Undeliverable("no") if message.body == b"1" else None
    for body in (1, 2):
        first.publish("orders", body)
    first.drain()
    (dead,) = first.table.rows(limit=9)

    assert ([], 0, 0) == (second.table.rows(limit=9), second.table.counts().dead, second.table.counts().waiting)
    assert (None, None) == (second.table.retry(dead.seq), second.table.discard(dead.seq))
    assert (0, 1) == tuple(each.table.sweep(horizon=first.clock.now + 10, limit=9) for each in (second, first))
    assert "orders" == first.table.discard(dead.seq)


@on_each
def test_a_topic_without_a_route_stays_due_and_costs_no_attempt(open_shop: OpenShop) -> None:
    """In a deploy, a relay of the release before does not know a new topic. It delayed its messages up to ten minutes."""
    shop = open_shop()
    for number in range(150):
        shop.publish("new.topic", number, key="k")
    shop.publish("orders", 1)
    only(shop, "orders")

    assert RelayReport(1) == shop.drain()
    assert [(0, None, None)] * 150 == [(row.attempts, row.error, row.holder) for row in shop.rows()]
    only(shop, "new.*")
    assert 150 == shop.drain().sent


@pytest.mark.parametrize("encryption", ("off", "on"))
def test_a_relay_finishes_the_messages_of_its_former_namespace(open_shop: OpenShop, encryption: str) -> None:
    config: dict[str, Any] = {"IDEMPOTENCY_ENCRYPTION": encryption, "IDEMPOTENCY_KEY_RING": ring("new")}
    config = config if encryption != "off" else {}
    for number in range(2):
        open_shop(IDEMPOTENCY_NAMESPACE="former", **config).publish("orders", number, key="k", message_id=f"m-{number}")
    shop = open_shop(IDEMPOTENCY_NAMESPACE="shop", IDEMPOTENCY_FORMER_IDENTITY={"namespace": "former"}, **config)
    shop.publish("orders", 2, key="k")
    shop.publish("orders", 1, key="k", message_id="m-1")

    assert 3 == shop.drain().sent
    assert [b"0", b"1", b"2"] == shop.sent.bodies


@on_each
def test_the_first_route_that_matches_takes_a_topic_also_in_a_claim(open_shop: OpenShop) -> None:
    """The database finds the messages of each route, by the same rules as `route_of`."""
    topics = ("mail.a", "mail.b", "mail.a.b", "Mail.a", "mail_a", "m-x/y:z", "mail", "x.*", "mailbox", "mail.7")
    patterns = ("mail.b", "mail.[!a-c7]", "mail.?", "mail.*", "m?[-_]*", "[M]*", "mail", "x.*", "*")
    shop = open_shop()
    shop.outbox._routes.clear()
    adapters = {pattern: Sent() for pattern in patterns}
    for pattern, adapter in adapters.items():
        shop.outbox.route(pattern, adapter)
    for topic in topics[:7] + topics[8:]:
        shop.publish(topic)

    shop.drain()

    assert [] == shop.rows()
    for pattern, adapter in adapters.items():
        for message in adapter.messages:
            route = shop.services.route_of(message.topic)
            assert (message.topic, pattern) == (message.topic, route.pattern if route else None)
    assert 9 == sum(len(adapter.messages) for adapter in adapters.values())


def test_the_list_names_a_topic_without_a_route(shop: Shop) -> None:
    shop.publish("orders", 1)
    only(shop, "mail.*")

    (row,) = json.loads(run(shop, "outbox", "list", "--json").output)["messages"]

    assert ("due", "no route takes this topic in this process") == (row["state"], row["error"])


# Rows of the release before, and its processes, which run on for the time of a deploy.

OLD_INSERT = """
INSERT INTO idempotency_outbox (message_id, topic, key, tenant, headers, body, created_at, due_at)
SELECT :message_id, :topic, :key, :tenant, '{"content-type":"application/json"}', :body, :now, :now
WHERE true ON CONFLICT (message_id) DO NOTHING RETURNING seq
"""

OLD_CLAIM = """
UPDATE idempotency_outbox SET holder = :holder, held_until = :until WHERE seq IN (
  SELECT o.seq FROM idempotency_outbox AS o
  WHERE published_at IS NULL AND dead = 0 AND due_at <= :now AND (held_until IS NULL OR held_until <= :now)
  AND (key IS NULL OR NOT EXISTS (SELECT 1 FROM idempotency_outbox AS e WHERE e.topic = o.topic AND e.key = o.key
       AND e.seq < o.seq AND e.published_at IS NULL AND e.key IS NOT NULL
       AND (e.dead = 1 OR e.due_at > :now OR e.held_until > :now)))
  ORDER BY seq LIMIT 100)
RETURNING seq, message_id, headers, body
"""


class Before:
    """A publisher and a relay of the release before, on the same table."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    @property
    def now(self) -> int:
        return round(self.shop.clock.now * 1e6)

    def publish(self, body: bytes, *, key: str | None = None, tenant: str | None = None, message_id: str = "") -> None:
        self.execute(
            OLD_INSERT, message_id=message_id or str(uuid.uuid4()), topic="orders", key=key, tenant=tenant, body=body,
            now=self.now,
        )  # fmt: skip

    def claim(self) -> list[bytes]:
        late = self.now + round(HOLD_SECONDS * 1e6)
        rows = self.execute(OLD_CLAIM, holder=b"old", now=self.now, until=late)
        return sorted(bytes(row.body) for row in rows)

    def execute(self, statement: str, **values: Any) -> Any:
        with self.shop.app.app_context(), self.shop.db.engine.begin() as connection:
            result = connection.execute(text(statement), values)
            return result.all() if result.returns_rows else None


@on_both
def test_messages_of_the_release_before_are_sent_first(shop: Shop) -> None:
    before = Before(shop)
    before.publish(b"1", key="k", tenant="acme", message_id="m-1")
    before.publish(b"2")
    shop.publish("orders", 3, key="k")
    shop.publish("orders", 1, key="k", message_id="m-1", tenant="acme")

    assert 3 == shop.drain().sent
    assert [b"1", b"3"] == [message.body for message in shop.sent.messages if message.key]
    assert ("m-1", "acme") == next((m.message_id, m.tenant) for m in shop.sent.messages if m.body == b"1")


@on_both
def test_a_relay_of_the_release_before_takes_no_new_message(open_shop: OpenShop) -> None:
    """It does not know the id, the namespace or the seal of one. It goes on with those of its own publishers, in order."""
    shop = open_shop()
    before = Before(shop)
    shop.publish("orders", 1, key="k")
    before.publish(b"2", key="k")
    before.publish(b"3", key="l")
    shop.publish("orders", 4, key="l")

    assert [b"3"] == before.claim()
    assert 2 == shop.drain().sent
    assert [b"1", b"2"] == shop.sent.bodies
    before.execute("DELETE FROM idempotency_outbox WHERE holder = :holder", holder=b"old")
    assert 1 == shop.drain().sent
    assert [b"1", b"2", b"4"] == shop.sent.bodies


def test_a_failed_message_of_the_release_before_waits_for_either_relay(shop: Shop) -> None:
    before = Before(shop)
    before.publish(b"1")
    shop.sent.fail = lambda message: ConnectionError()

    assert 1 == shop.drain().delayed
    assert [] == before.claim()
    shop.clock.advance(1)
    assert [b"1"] == before.claim()


@on_both
def test_the_upgrade_keeps_messages_that_wait(open_shop: OpenShop) -> None:
    """From the table of the release before, which lacks what this release adds."""
    shop = open_shop(store="memory://")
    before = Before(shop)
    before.publish(b"1", key="k", tenant="acme")
    new = ("namespace", "sent_id", "lane", "digest", "ready_at")
    for index in ("idempotency_outbox_turn", "idempotency_outbox_lane", "idempotency_outbox_former"):
        before.execute(f"DROP INDEX {index}")
    for column in new:
        before.execute(f"ALTER TABLE idempotency_outbox DROP COLUMN {column}")

    assert ["0002", "0005"] == [line[:4] for line in shop.table.upgrade()]
    shop.publish("orders", 2, key="k")
    assert 2 == shop.drain().sent
    assert [b"1", b"2"] == shop.sent.bodies
    assert set(new) < set(metadata.tables["idempotency_outbox"].columns.keys())

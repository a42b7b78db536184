"""With encryption, a body is sealed under its tenant's data key, opens in its own row only, and is erased with the tenant."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.outbox import Message
from flask_idempotency.maintenance.relay import RelayReport
from flask_idempotency.web.janitor import drain_of, janitor_of
from tests.outbox.conftest import OpenShop, Order, Shop, on_both, on_each, on_postgresql

CARD = "4111111111111111"


def ring(*kids: str) -> str:
    return ",".join(f"{kid}:{base64.b64encode(kid.encode().ljust(32, b'.')).decode()}" for kid in kids)


def sealed(open_shop: OpenShop, **config: Any) -> Shop:
    return open_shop(**{"IDEMPOTENCY_ENCRYPTION": "on", "IDEMPOTENCY_KEY_RING": ring("new"), **config})


@on_each
def test_a_body_is_sealed_at_rest_and_sent_plain(open_shop: OpenShop) -> None:
    shop = sealed(open_shop)
    shop.publish("orders", {"card": CARD}, tenant="acme", key="k")
    shop.publish("orders", {"card": CARD})

    first, second = shop.rows()
    assert CARD.encode() not in bytes(first.body) + bytes(second.body)
    assert ("new", 16) == (first.wrapping_key_id, len(first.tenant_id))
    assert bytes(first.tenant_id) != bytes(second.tenant_id)
    assert 2 == shop.drain().sent
    assert [{"card": CARD}] * 2 == [message.json() for message in shop.sent.messages]


def test_a_body_opens_in_its_own_row_only(open_shop: OpenShop) -> None:
    shop = sealed(open_shop)
    changes = (
        "topic = 'mail'",
        'headers = \'{"content-type":"text/plain"}\'',
        "sent_id = 'other'",
    )
    for change in changes:
        shop.publish("orders", {"card": CARD}, tenant="acme", key="k")
        shop.execute(f"UPDATE idempotency_outbox SET {change}")  # noqa: S608 - our own words

        assert (change, RelayReport(0, 0, 1)) == (change, shop.drain())
        (row,) = shop.rows()
        assert (change, "the body was not sealed for this message, or has been changed") == (change, row.error)
        shop.table.discard(row.seq)


@on_both
@pytest.mark.parametrize("encryption", ("on", "required"))
def test_the_names_in_a_message_are_sealed_with_its_body(open_shop: OpenShop, encryption: str) -> None:
    """Nor does a name that another program plants beside the seal reach the receiver."""
    shop = sealed(open_shop, IDEMPOTENCY_ENCRYPTION=encryption)
    for number in range(2):
        shop.publish("orders", number, tenant=f"tenant-{CARD}", key=f"key-{CARD}", headers={"x-name": f"of-{CARD}"})

    shown = json.dumps([[str(value) for value in row] for row in shop.rows()])
    assert (False, 1) == (CARD in shown, len({bytes(row.lane) for row in shop.rows()}))
    shop.execute("UPDATE idempotency_outbox SET key = 'planted', tenant = 'planted'")
    assert 2 == shop.drain().sent
    assert [2, 1, 1] == [shop.sent.calls.count(1), *shop.sent.calls]
    for message in shop.sent.messages:
        assert (f"tenant-{CARD}", f"key-{CARD}", f"of-{CARD}") == (
            message.tenant,
            message.key,
            message.headers["x-name"],
        )


def test_a_message_that_is_moved_to_another_namespace_is_dead(open_shop: OpenShop) -> None:
    """Another application would send it to its own broker."""
    first, second = (sealed(open_shop, IDEMPOTENCY_NAMESPACE=name) for name in ("billing", "shop"))
    first.publish("orders", 1)
    first.execute("UPDATE idempotency_outbox SET namespace = 'shop'")

    assert RelayReport(0, 0, 1) == second.drain()
    assert "the message belongs to another namespace" in second.rows()[0].error


def test_a_sealed_body_of_the_release_before_is_opened_and_sealed_again(open_shop: OpenShop) -> None:
    old, both = (sealed(open_shop, IDEMPOTENCY_KEY_RING=ring(*kids)) for kids in (("old",), ("new", "old")))
    message = Message("m-1", "orders", b"1", key="k", headers={"content-type": "text/plain"}, tenant="acme")
    tenant_id = old.services.tenant_id("acme")
    sealer = old.services.sealer
    assert sealer is not None
    body, by = sealer.seal_body(tenant_id, message, namespace=None)
    assert by is not None
    old.execute(
        "INSERT INTO idempotency_outbox (message_id, topic, key, tenant, tenant_id, headers, body, wrapping_key_id,"
        " data_key_number, created_at, due_at)"
        " VALUES ('m-1', 'orders', 'k', 'acme', :tid, '{\"content-type\":\"text/plain\"}', :body, :kid, :number, 0, 0)",
        tid=tenant_id, body=body, kid=by.kid, number=by.number,
    )  # fmt: skip

    assert (0, 1) == (sealed(open_shop, IDEMPOTENCY_NAMESPACE="other").drain().dead, both.services.reseal("new"))
    assert 1 == sealed(open_shop).drain().sent + both.drain().sent + len(old.sent.messages)
    assert [] == old.rows()


def test_a_damaged_body_is_dead(open_shop: OpenShop) -> None:
    shop = sealed(open_shop)
    for body in (b"", b"\x21", b"x" * 60):
        shop.publish("orders", {"card": CARD})
        shop.execute("UPDATE idempotency_outbox SET body = :body", body=body)

        assert (body, RelayReport(0, 0, 1)) == (body, shop.drain())
        (row,) = shop.rows()
        assert (body, "the body is damaged, or another release sealed it") == (body, row.error)
        shop.table.discard(row.seq)


def test_the_messages_of_an_erased_tenant_are_dead_and_say_why(open_shop: OpenShop) -> None:
    shop = sealed(open_shop)
    shop.publish("orders", 1, tenant="acme")
    shop.publish("orders", 2, tenant="other")
    built = shop.app.extensions["idempotency"].built
    tenant_id = shop.services.tenant_id("acme")
    built.data_keys.shred(tenant_id)
    built.codec.data_keys.forget(tenant_id)

    assert RelayReport(1, 0, 1) == shop.drain()
    assert ["the body cannot be opened: its data key was erased with the tenant, or is lost"] == [
        row.error for row in shop.rows()
    ]


def test_a_relay_without_the_ring_leaves_the_message_for_another(open_shop: OpenShop) -> None:
    sealed(open_shop).publish("orders", 1)
    shop = open_shop()

    assert RelayReport(0, 1, 0) == shop.drain()
    assert ["the body is encrypted, and this process has no IDEMPOTENCY_KEY_RING"] == [row.error for row in shop.rows()]


def test_a_ring_without_the_key_leaves_the_message_for_later(open_shop: OpenShop) -> None:
    sealed(open_shop).publish("orders", 1)
    shop = sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("other"))

    report = shop.drain()

    assert (0, 1) == (report.sent, report.delayed + report.dead)
    assert 1 == len(shop.rows())


def test_a_plain_body_is_sent_unless_encryption_is_required(open_shop: OpenShop) -> None:
    open_shop().publish("orders", 1)
    required = sealed(open_shop, IDEMPOTENCY_ENCRYPTION="required")

    assert RelayReport(0, 0, 1) == required.drain()
    required.table.retry(required.rows()[0].seq)
    assert RelayReport(1, 0, 0) == sealed(open_shop).drain()


@on_each
def test_rotate_seals_waiting_messages_again(open_shop: OpenShop) -> None:
    """The rest of `rotate` deletes data keys that no record needs, and the message would be lost with its key."""
    sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("old")).publish("orders", {"card": CARD}, tenant="acme", delay=60)
    both = sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("new", "old"))

    assert (1, 0) == (both.services.reseal("new"), both.services.reseal("new"))
    (row,) = both.rows()
    assert "new" == row.wrapping_key_id

    only = sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("new"))
    both.clock.advance(60)
    assert 1 == only.drain().sent
    assert [{"card": CARD}] == [message.json() for message in only.sent.messages]


def test_the_task_rotate_seals_messages_too(open_shop: OpenShop) -> None:
    sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("old")).publish("orders", 1, delay=60)
    both = sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("new", "old"))

    janitor_of(both.app).run("rotate", drain_of("rotate", both.app.extensions["idempotency"].settings))

    assert ["new"] == [row.wrapping_key_id for row in both.rows()]


def test_encryption_without_an_engine_is_refused(open_shop: OpenShop) -> None:
    """A disabled guard has no data keys, and a body must not be written in clear."""
    shop = sealed(open_shop, IDEMPOTENCY_ENABLED=False, IDEMPOTENCY_STORE="memory://")

    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_ENCRYPTION is on"):
        shop.publish("orders", 1)


def shred_elsewhere(shop: Shop, tenant: str) -> None:
    """Erase a tenant as another process does: the keys that this one has in memory stay there."""
    shop.app.extensions["idempotency"].built.data_keys.shred(shop.services.tenant_id(tenant))


@on_each
def test_a_relay_sends_nothing_of_a_tenant_that_another_process_erased(open_shop: OpenShop) -> None:
    """The relay has opened a body of it, so the key is in its memory."""
    shop = sealed(open_shop)
    shop.publish("orders", 1, tenant="acme")
    assert 1 == shop.drain().sent
    shop.publish("orders", 2, tenant="acme", delay=60)
    shred_elsewhere(shop, "acme")
    shop.clock.advance(60)

    assert RelayReport(0, 0, 1) == shop.drain()
    assert [b"1"] == shop.sent.bodies


def test_rotate_does_not_bring_an_erased_message_back(open_shop: OpenShop) -> None:
    """It would seal the body under a key that was made after the tenant was erased."""
    sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("old")).publish("orders", {"card": CARD}, tenant="acme", delay=60)
    both = sealed(open_shop, IDEMPOTENCY_KEY_RING=ring("new", "old"))
    both.clock.advance(60)
    both.sent.fail = lambda message: ConnectionError()
    assert 1 == both.drain().delayed
    shred_elsewhere(both, "acme")

    assert 0 == both.services.reseal("new")
    assert ["old"] == [row.wrapping_key_id for row in both.rows()]


@on_each
def test_a_message_that_is_published_after_the_erasure_is_sent(open_shop: OpenShop) -> None:
    """A web worker still has the erased key in memory. A body under it could never be opened."""
    shop = sealed(open_shop)
    shop.publish("orders", 1, tenant="acme")
    shop.drain()
    shred_elsewhere(shop, "acme")
    shop.publish("orders", 2, tenant="acme")

    assert RelayReport(1) == shop.drain()
    assert [b"1", b"2"] == shop.sent.bodies


def test_a_relay_asks_for_a_key_once_for_each_call_of_an_adapter(
    open_shop: OpenShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = sealed(open_shop)
    for number in range(10):
        shop.publish("orders", number, tenant="ab"[number % 2])
    keys = shop.app.extensions["idempotency"].built.data_keys
    asked: list[bytes] = []
    read = keys.read_keys

    def counted(tid: bytes) -> Any:
        asked.append(tid)
        return read(tid)

    monkeypatch.setattr(keys, "read_keys", counted)

    assert (10, [10]) == (shop.drain().sent, shop.sent.calls)
    assert (2, 2) == (len(asked), len(set(asked)))


def test_a_sealed_row_without_its_tenant_is_never_sent(open_shop: OpenShop) -> None:
    """The receiver would get the encrypted bytes as the message."""
    shop = sealed(open_shop)
    shop.publish("orders", 1)
    shop.execute("UPDATE idempotency_outbox SET tenant_id = NULL")

    assert RelayReport(0, 0, 1) == shop.drain()


def test_sqlite_makes_a_data_key_in_the_transaction_that_has_written(open_shop: OpenShop) -> None:
    """Another connection would wait for the lock that this one holds, and fail."""
    shop = sealed(open_shop, IDEMPOTENCY_ENCRYPTION="required")
    with shop.app.app_context():
        for tenant in ("acme", "acme", "other"):
            shop.db.session.add(Order())
            shop.db.session.flush()
            shop.outbox.publish("orders", {"card": CARD}, tenant=tenant)
        shop.db.session.commit()
    shop.publish("orders", {"card": CARD}, tenant="acme")

    assert 2 == len({bytes(row.tenant_id) for row in shop.rows()})
    assert 2 == len({(bytes(row.tenant_id), row.data_key_number) for row in shop.rows()})
    assert 4 == shop.drain().sent


def test_a_data_key_goes_with_the_transaction_that_made_it(open_shop: OpenShop) -> None:
    """No later message may be sealed under a key that was rolled back."""
    shop = sealed(open_shop)
    with shop.app.app_context():
        for _ in range(2):
            shop.db.session.add(Order())
            shop.db.session.flush()
            shop.outbox.publish("orders", 1, tenant="acme")
            shop.db.session.rollback()
        with shop.db.session.begin_nested() as savepoint:
            shop.outbox.publish("orders", 2, tenant="acme")
            savepoint.rollback()
        shop.outbox.publish("orders", 3, tenant="acme")
        shop.db.session.commit()

    assert RelayReport(1) == shop.drain()
    assert [b"3"] == shop.sent.bodies


@on_postgresql
def test_a_request_under_way_publishes_while_the_store_is_away(
    open_shop: OpenShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim has brought the key into memory. A request without a claim fails."""
    shop = sealed(open_shop)
    built = shop.app.extensions["idempotency"].built
    built.codec.prepare(StorageKey(b"r" * 32, shop.services.tenant_id("acme")))

    def away(tid: bytes) -> Any:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(built.data_keys, "read_keys", away)
        shop.publish("orders", 1, tenant="acme")
        with pytest.raises(StoreUnavailable):
            shop.publish("orders", 2, tenant="other")

    assert 1 == shop.drain().sent

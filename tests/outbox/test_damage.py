"""A damaged row ends as dead, alone, and an operator sees it. No relay, command or task stops for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from flask_idempotency.engine.outbox import Message, Undeliverable
from tests.outbox.conftest import OpenShop, Shop, on_each
from tests.outbox.test_sealing import ring

CANARY = "4111111111111111"
ROWS = 9
DEEP = "[" * 100_000 + "]" * 100_000
HEADERS = (
    "", "{", "{}", "[]", "null", "7", DEEP, f"[{DEEP}]", '[{"content-type": 7}]', '[{"content-type": "a"}, {}]',
    '[{"content-type": "a\\r\\nb"}]', '[{"content-type": "é"}]', '[{"content-type": "a", "x y": "1"}]', "[[[{}]]]",
    '[{"content-type": "a", "message-id": "x"}]', json.dumps([{"content-type": "a", **{f"h{n}": "" for n in range(60)}}]),
    '[{"content-type": ' + "9" * 5000 + "}]",
)  # fmt: skip
TEXTS = ("", "x", "c" * 1600, DEEP, "\x01", "é\u2028", "a b", "-1", "1e999")
NUMBERS = (-(2**63), -1, 0, 2**31 - 1, 2**63 - 1)
BYTES = (b"", b"\0", b"\x21", b"\xff" * 60, CANARY.encode() * 100_000)
IN_CLEAR = ("topic", "key", "tenant", "headers", "body", "sent_id", "lane", "tenant_id", "wrapping_key_id")
SQLITE_COLUMNS = (
    *IN_CLEAR, "message_id", "data_key_number", "created_at", "due_at", "attempts", "holder", "held_until", "dead", "error",
    "ready_at", "digest", "namespace",
)  # fmt: skip
POSTGRESQL: dict[str, tuple[Any, ...]] = {
    "topic": TEXTS, "key": TEXTS, "tenant": TEXTS, "headers": (*HEADERS, *TEXTS), "sent_id": TEXTS, "error": TEXTS,
    "wrapping_key_id": TEXTS, "namespace": TEXTS,
    "body": BYTES, "lane": BYTES[:3], "tenant_id": BYTES[:4], "digest": BYTES[:3], "holder": BYTES[:3],
    "data_key_number": (-(2**31), -1, 0, 2**31 - 1), "attempts": (-(2**31), -1, 2**31 - 1), "dead": (-32768, 2, 32767),
    "created_at": NUMBERS, "due_at": NUMBERS, "held_until": NUMBERS, "ready_at": NUMBERS,
}  # fmt: skip


def still_works(shop: Shop, what: object) -> None:
    """Publish another message, and see it sent. Then ask as operators and the janitor do."""
    shop.sent.messages.clear()
    shop.publish("good", {"id": 2})
    shop.drain()
    assert (what, True) == (what, any(message.topic == "good" for message in shop.sent.messages))
    shop.table.counts()
    rows = shop.table.rows(limit=ROWS)
    assert (what, True) == (what, all(isinstance(each, str) for row in rows for each in (row.topic, row.message_id)))
    shop.services.reseal("new")
    for command in (("outbox", "list"), ("outbox", "list", "--json"), ("outbox", "retry", "--topic", "orders")):
        result = shop.app.test_cli_runner().invoke(args=["idempotency", *command])
        assert (what, None) == (what, result.exception if result.exit_code not in (0, 1) else None)
        assert (what, False) == (what, CANARY in result.output)
        assert (what, True) == (what, "Traceback" not in result.output)
    # `retry` let it live again.
    shop.drain()


@on_each
@pytest.mark.parametrize("encryption", ("off", "required"))
def test_damaged_headers_stop_no_other_message(open_shop: OpenShop, encryption: str) -> None:
    """Deeply nested ones ended each relay with RecursionError."""
    shop = open_shop(**settings(encryption))
    for headers in HEADERS:
        shop.publish("orders", {"card": CANARY}, key="k")
        shop.execute("UPDATE idempotency_outbox SET headers = :headers WHERE topic = 'orders'", headers=headers)

        still_works(shop, headers[:60])
        if encryption == "off" or headers != "[]":
            (row,) = shop.rows()
            assert (headers[:60], 1, True) == (
                headers[:60],
                row.dead,
                ("damaged" in row.error or "sealed" in row.error),
            )
        shop.execute("DELETE FROM idempotency_outbox")


def test_a_text_body_on_sqlite_is_dead(shop: Shop) -> None:
    """SQLite keeps a text in any column. Its driver raised for the whole claim."""
    shop.publish("orders", 1)
    shop.execute("UPDATE idempotency_outbox SET body = 'text'")

    still_works(shop, "text body")
    (row,) = shop.rows()
    assert (1, "the row is damaged: its body is unreadable") == (row.dead, row.error)


def settings(encryption: str) -> dict[str, Any]:
    if encryption == "off":
        return {}
    return {"IDEMPOTENCY_ENCRYPTION": encryption, "IDEMPOTENCY_KEY_RING": ring("new")}


def refuse_others(message: Message) -> Exception | None:
    """Let damaged rows stay whose messages could be sent, so that operators read them."""
    return None if message.topic == "good" else Undeliverable("refused")


Values = Sequence[tuple[str, dict[str, Any]]]


def in_parts(values: Values) -> list[Values]:
    """Return as many values at a time as a list of the outbox shows messages."""
    return [values[at : at + ROWS - 1] for at in range(0, len(values), ROWS - 1)]


def damage(shop: Shop, column: str, values: Values, *, former: bool = False) -> None:
    """Give a message for each value, and set the column of its row to it. `former`: the rows are of the release before."""
    for number, _ in enumerate(values):
        shop.publish("orders", {"card": CANARY}, key=f"k{number}", tenant="acme")
    if former:
        shop.execute(
            "UPDATE idempotency_outbox SET namespace = NULL, lane = NULL, digest = NULL, ready_at = NULL, message_id = sent_id,"
            " due_at = created_at, headers = '{\"content-type\":\"application/json\"}' WHERE topic = 'orders'",
        )
        shop.execute("UPDATE idempotency_outbox SET sent_id = NULL")
    numbers = [row.seq for row in shop.rows()]
    for seq, (expression, value) in zip(numbers, values, strict=True):
        shop.execute(f"UPDATE idempotency_outbox SET {column} = {expression} WHERE seq = :seq", seq=seq, **value)  # noqa: S608 - our own words


@pytest.mark.slow
@pytest.mark.parametrize("encryption", ("off", "required", "former"))
def test_no_value_in_a_row_of_sqlite_stops_the_outbox(open_shop: OpenShop, encryption: str) -> None:
    """Any type in any column, and text that is no UTF-8."""
    shop = open_shop(**settings("off" if encryption == "former" else encryption))
    shop.sent.fail = refuse_others
    chance = random.Random(28)
    values: list[tuple[str, dict[str, Any]]] = [
        ("CAST(:value AS TEXT)", {"value": bytes((0xFF, 0xFE, *chance.randbytes(9)))}),
        ("CAST(:value AS TEXT)", {"value": b"ok\0hidden"}),
        *((":value", {"value": value}) for value in (*TEXTS[:4], *NUMBERS, *BYTES[:4], 1.5, float("inf"), b"[" * 5000)),
    ]
    for column in SQLITE_COLUMNS:
        for some in in_parts(values):
            damage(shop, column, some, former=encryption == "former")

            still_works(shop, (column, str(some)[:600]))
            shop.execute("DELETE FROM idempotency_outbox")


@pytest.mark.parametrize("database_url", ("postgresql",), indirect=True)
@pytest.mark.parametrize("encryption", ("off", "required"))
def test_no_value_in_a_row_of_postgresql_stops_the_outbox(open_shop: OpenShop, encryption: str) -> None:
    shop = open_shop(**settings(encryption))
    shop.sent.fail = refuse_others
    for column, values in POSTGRESQL.items():
        for some in in_parts([(":value", {"value": value}) for value in values]):
            damage(shop, column, some)

            still_works(shop, (column, str(some)[:600]))
            shop.execute("DELETE FROM idempotency_outbox")


def test_a_body_that_is_no_json_is_dead_in_an_adapter_that_needs_it() -> None:
    """The other messages of the call would be tried again with it, for ever."""
    for body in (b"", b"{", b"\xff", DEEP.encode(), b"9" * 5000):
        with pytest.raises(Undeliverable):
            Message("m", "t", body, headers={"content-type": "application/json"}).json()

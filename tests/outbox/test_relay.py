"""A relay sends each message at least once, in the order of its key, and keeps what it could not send."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from sqlalchemy import text

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import MessageDead, MessagesRelayed
from flask_idempotency.engine.outbox import Message, Topics, Undeliverable
from flask_idempotency.maintenance import relay as relays
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.relay import HOLD_SECONDS, PASS_SECONDS, Relay, RelayReport, Stop, pause_after, run
from flask_idempotency.outbox.outbox import OutboxServices
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL
from flask_idempotency.stores.sql.outbox_statements import claim, relay_lock
from tests.outbox.conftest import OpenShop, Sent, Shop, on_each, on_postgresql

EVERY = Topics("*")
SECRET_WORDS = "card 4111111111111111"

MANY = """
INSERT INTO idempotency_outbox (message_id, topic, key, headers, body, created_at, due_at, namespace, lane, ready_at)
SELECT 'm' || n, 'orders', (n % 50)::text, '[{"content-type":"application/json"}]', '1', 0, 0, 'shop', (n % 50)::text::bytea, 0
FROM generate_series(1, :rows) AS n
"""


def numbers(messages: Sequence[Message]) -> list[int]:
    return [int(message.body) for message in messages]


def away(message: Message) -> Exception | None:
    return ConnectionError(SECRET_WORDS)


@on_each
def test_messages_of_one_key_go_in_order_one_after_the_other(shop: Shop) -> None:
    """An adapter may send what it gets at the same time. So it never gets two of one key."""
    for number in range(6):
        shop.publish("orders", number, key="a" if number % 2 else "b")

    assert 6 == shop.drain().sent
    assert [2, 2, 2] == shop.sent.calls
    assert [0, 1, 2, 3, 4, 5] == numbers(shop.sent.messages)


def test_messages_without_a_key_go_together(shop: Shop) -> None:
    for number in range(5):
        shop.publish("orders", number)

    shop.drain()

    assert [5] == shop.sent.calls


def test_the_same_key_of_another_topic_is_another_order(shop: Shop) -> None:
    shop.sent.fail = lambda message: ConnectionError() if message.topic == "a" else None
    shop.publish("a", 1, key="k")
    shop.publish("b", 2, key="k")

    assert (1, 1) == (shop.drain().sent, len(shop.rows()))


def test_an_adapter_gets_no_more_than_it_wants(open_shop: OpenShop) -> None:
    class Small(Sent):
        batch = 2

    shop, small = open_shop(), Small()
    shop.outbox._routes.clear()
    shop.outbox.route("*", small)
    for number in range(5):
        shop.publish("orders", number)

    shop.drain()

    assert [2, 2, 1] == small.calls


@on_each
def test_a_failed_message_waits_and_so_does_the_rest_of_its_key(shop: Shop) -> None:
    shop.sent.fail = lambda message: ConnectionError() if message.body == b"1" else None
    for number, key in ((1, "a"), (2, "a"), (3, "b"), (4, None)):
        shop.publish("orders", number, key=key)

    assert RelayReport(2, 1, 0) == shop.drain()
    assert [3, 4] == numbers(shop.sent.messages)
    shop.sent.fail = lambda message: None
    assert shop.relay.run_once() is None
    shop.clock.advance(1)
    assert RelayReport(2, 0, 0) == shop.drain()
    assert [3, 4, 1, 2] == numbers(shop.sent.messages)


@on_each
def test_failed_messages_come_after_new_ones(shop: Shop) -> None:
    shop.sent.fail = lambda message: ConnectionError() if message.body == b"1" else None
    shop.publish("orders", 1)
    shop.drain()
    shop.clock.advance(1)
    shop.publish("orders", 2)
    shop.sent.fail = lambda message: None

    shop.drain()

    assert [2, 1] == numbers(shop.sent.messages)


@on_each
def test_a_message_does_not_overtake_one_of_its_key_that_failed(shop: Shop) -> None:
    """Both are due, and the first one comes after new messages."""
    shop.sent.fail = lambda message: ConnectionError() if message.body == b"1" else None
    for number in (1, 2):
        shop.publish("orders", number, key="a")
    shop.drain()
    shop.clock.advance(1)
    shop.publish("orders", 3)
    shop.sent.fail = lambda message: None

    claimed = [shop.table.claim(bytes([number]) * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS) for number in range(3)]

    assert [[b"3"], [b"1"], []] == [[each.message.body for each in found] for found in claimed]


def test_pauses_double_up_to_ten_minutes(shop: Shop) -> None:
    shop.sent.fail = away
    shop.publish("orders", 1)
    waits = []
    for _ in range(12):
        assert 1 == shop.drain().delayed
        (row,) = shop.rows()
        waits.append(row.ready_at / 1e6 - shop.clock.now)
        shop.clock.advance(waits[-1] - 0.001)
        assert shop.relay.run_once() is None
        shop.clock.advance(0.002)

    assert [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600] == [round(wait, 3) for wait in waits]
    assert 600 == pause_after(10**6)


def test_a_missing_module_is_named(shop: Shop) -> None:
    """Only the relay's host lacks it, so no other program can find out which one it is."""
    shop.sent.fail = lambda message: ModuleNotFoundError(SECRET_WORDS, name="packaging")
    shop.publish("orders", 1)
    shop.drain()

    assert ["the Python module packaging is not installed where the relay runs"] == [row.error for row in shop.rows()]


def test_a_foreign_error_leaves_only_its_class(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Clients quote bodies and addresses in their errors."""
    shop.sent.fail = away
    shop.publish("orders", 1)
    shop.drain()

    assert ["ConnectionError"] == [row.error for row in shop.rows()]
    assert SECRET_WORDS not in caplog.text
    assert "(ConnectionError), attempt 1" in caplog.text


@on_each
def test_a_message_that_can_never_be_sent_is_dead_and_holds_back_its_key_only(shop: Shop) -> None:
    shop.sent.fail = lambda message: Undeliverable("too large") if message.body == b"1" else None
    for number, key in ((1, "a"), (2, "a"), (3, "b"), (4, None)):
        shop.publish("orders", number, key=key)

    assert RelayReport(2, 0, 1) == shop.drain()
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        # The later one may have failed more often, before an operator retried the first.
        connection.execute(text("UPDATE idempotency_outbox SET attempts = 9 WHERE dead = 0"))
    shop.clock.advance(10_000)
    assert shop.relay.run_once() is None
    assert [(1, "too large"), (0, None)] == [(row.dead, row.error) for row in shop.rows()]
    assert [MessageDead("", "orders", 1, "too large")] == [
        MessageDead("", each.operation, 1, each.cause) for each in shop.events if isinstance(each, MessageDead)
    ]
    assert [MessagesRelayed("", "relay", 2, 0, 1)] == [e for e in shop.events if isinstance(e, MessagesRelayed)]


@on_each
def test_a_retry_sends_a_dead_message_and_then_its_key(shop: Shop) -> None:
    shop.sent.fail = lambda message: Undeliverable("too large") if message.body == b"1" else None
    for number in (1, 2):
        shop.publish("orders", number, key="a")
    shop.drain()
    shop.sent.fail = lambda message: None

    assert "orders" == shop.table.retry(shop.rows()[0].seq)
    shop.drain()

    assert [1, 2] == numbers(shop.sent.messages)


@on_each
def test_a_discard_lets_the_rest_of_the_key_go(shop: Shop) -> None:
    shop.sent.fail = lambda message: Undeliverable("too large") if message.body == b"1" else None
    for number in (1, 2):
        shop.publish("orders", number, key="a")
    shop.drain()
    healthy = shop.rows()[1].seq

    assert shop.table.discard(healthy) is None
    assert shop.table.discard(healthy + 10) is None
    assert "orders" == shop.table.discard(shop.rows()[0].seq)
    shop.drain()

    assert [2] == numbers(shop.sent.messages)


def test_operators_leave_a_message_alone_that_a_relay_sends(shop: Shop) -> None:
    shop.publish("orders", 1)
    (held,) = shop.table.claim(b"h" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS)
    shop.table.delay(b"h" * 16, held.seq, pause=0, error="x")
    (held,) = shop.table.claim(b"h" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS)

    assert (None, None) == (shop.table.retry(held.seq), shop.table.discard(held.seq))


@on_each
def test_a_delay_holds_back_its_key(shop: Shop) -> None:
    shop.publish("orders", 1, key="a", delay=60)
    shop.publish("orders", 2, key="a")
    shop.publish("orders", 3)

    shop.drain()
    assert [3] == numbers(shop.sent.messages)
    shop.clock.advance(60)
    shop.drain()
    assert [3, 1, 2] == numbers(shop.sent.messages)


@on_each
def test_a_held_message_holds_back_its_key(shop: Shop) -> None:
    shop.publish("orders", 1, key="a")
    assert 1 == len(shop.table.claim(b"h" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS))
    shop.publish("orders", 2, key="a")
    shop.publish("orders", 3, key="b")

    assert [3] == [
        int(each.message.body) for each in shop.table.claim(b"i" * 16, topics=EVERY, limit=9, hold=HOLD_SECONDS)
    ]


@on_each
def test_what_a_dead_relay_held_is_due_again(shop: Shop) -> None:
    message_id = shop.publish("orders", 1)
    shop.table.claim(b"h" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS)

    shop.clock.advance(HOLD_SECONDS - 0.001)
    assert shop.relay.run_once() is None
    shop.clock.advance(0.001)
    shop.drain()

    assert [message_id] == shop.sent.ids


@on_each
def test_a_claim_whose_reply_was_lost_finds_its_messages_again(shop: Shop) -> None:
    for number in range(3):
        shop.publish("orders", number, key="a")

    first = shop.table.claim(b"h" * 16, topics=EVERY, limit=2, hold=HOLD_SECONDS)
    again = shop.table.claim(b"h" * 16, topics=EVERY, limit=2, hold=HOLD_SECONDS)

    assert [each.seq for each in first] == [each.seq for each in again]


@on_each
def test_a_relay_that_lost_its_hold_deletes_nothing(shop: Shop) -> None:
    """Its successor has not sent the message yet."""
    shop.publish("orders", 1)
    (held,) = shop.table.claim(b"h" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS)
    shop.clock.advance(HOLD_SECONDS)
    shop.table.claim(b"i" * 16, topics=EVERY, limit=1, hold=HOLD_SECONDS)

    shop.table.confirm(b"h" * 16, [held.seq])
    shop.table.bury(b"h" * 16, held.seq, error="x")
    shop.table.delay(b"h" * 16, held.seq, pause=5, error="x")
    shop.table.release(b"h" * 16, [held.seq])
    shop.table.put_off(b"h" * 16, [held.seq], pause=5)

    (row,) = shop.rows()
    assert (b"i" * 16, 0, 0) == (bytes(row.holder), row.dead, row.attempts)


def test_an_adapter_with_a_wrong_answer_has_sent_nothing(shop: Shop) -> None:
    """The message may have arrived. It goes again, under its id."""
    answers: list[object] = []

    class Wrong(Sent):
        def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
            return answers[-1]  # type: ignore[return-value]

    shop.outbox._routes.clear()
    shop.outbox.route("*", Wrong())
    shop.publish("orders", 1)

    for answer in ([], [None, None], ["yes"], None, [7]):
        answers.append(answer)
        assert (answer, 1) == (answer, shop.drain().delayed)
        assert ["TypeError"] == [row.error for row in shop.rows()]
        shop.clock.advance(600)


def test_a_slow_receiver_gives_the_rest_back(open_shop: OpenShop) -> None:
    """Other relays send them, and no hold ends while a message is under way."""

    class Slow(Sent):
        batch = 1

    shop, now, slow = open_shop(), [0.0], Slow()
    shop.outbox._routes.clear()
    shop.outbox.route("*", slow)
    for number in range(4):
        shop.publish("orders", number)

    def pass_time(message: Message) -> Exception | None:
        now[0] += PASS_SECONDS / 2
        return None

    slow.fail = pass_time
    relay = shop.relay
    relay.monotonic = lambda: now[0]

    assert RelayReport(2) == relay.run_once()
    assert [None, None] == [row.holder for row in shop.rows()]


def test_a_stopped_relay_gives_the_rest_back(shop: Shop) -> None:
    for number in range(4):
        shop.publish("orders", number, key="a")

    assert RelayReport(1) == shop.relay.run_once(stopped=lambda: bool(shop.sent.messages))
    assert [None] * 3 == [row.holder for row in shop.rows()]


def test_an_interrupted_relay_gives_its_messages_back(shop: Shop) -> None:
    def interrupt(message: Message) -> Exception | None:
        raise KeyboardInterrupt

    shop.sent.fail = interrupt
    shop.publish("orders", 1)

    with pytest.raises(KeyboardInterrupt):
        shop.relay.run_once()
    assert [None] == [row.holder for row in shop.rows()]


def test_a_relay_that_lost_its_hold_sends_no_more(shop: Shop) -> None:
    """Its host was suspended, and its own clock with it. Another relay has sent the rest in that time."""
    for number in range(3):
        shop.publish("orders", number, key="a")
    other = Sent()

    def suspended(message: Message) -> Exception | None:
        shop.clock.advance(HOLD_SECONDS)
        shop.outbox._routes.clear()
        shop.outbox.route("*", other)
        while shop.relay.run_once() is not None:
            pass
        return None

    shop.sent.fail = suspended
    relay = shop.relay
    relay.monotonic = lambda: 0.0

    relay.run_once()

    assert [0] == numbers(shop.sent.messages)
    assert [0, 1, 2] == numbers(other.messages)


@on_each
def test_what_an_adapter_did_not_try_counts_as_no_attempt(shop: Shop) -> None:
    """The rest of its key waits for it, and both are given back."""
    shop.sent.fail = lambda message: relays.NotTried() if message.body == b"1" else None
    for number, key in ((0, None), (1, "a"), (2, "a")):
        shop.publish("orders", number, key=key)

    assert RelayReport(1, 0, 0) == shop.relay.run_once()
    assert [(0, None, None)] * 2 == [(row.attempts, row.holder, row.error) for row in shop.rows()]
    shop.sent.fail = lambda message: None
    shop.drain()
    assert [0, 1, 2] == numbers(shop.sent.messages)


@on_each
def test_kept_messages_are_deleted_by_expire(open_shop: OpenShop) -> None:
    shop = open_shop(keep=3600)
    for number in (1, 2):
        shop.publish("orders", number, message_id=f"m{number}")
    shop.drain()

    shop.publish("orders", 1, message_id="m1")
    assert shop.relay.run_once() is None
    assert [True, True] == [row.published_at is not None for row in shop.rows()]
    assert 0 == shop.table.sweep(horizon=shop.clock.now + 3599, limit=10)
    assert [1, 1, 0] == [shop.table.sweep(horizon=shop.clock.now + 3600, limit=1) for _ in range(3)]
    assert [] == shop.rows()


@on_each
def test_counts_and_rows_say_what_waits(shop: Shop) -> None:
    assert (0, 0, 0.0) == (shop.table.counts().waiting, shop.table.counts().dead, shop.table.counts().oldest)
    shop.sent.fail = lambda message: Undeliverable("no") if message.body == b"1" else ConnectionError()
    for number, key in ((1, "a"), (2, "a"), (3, None)):
        shop.publish("orders", number, key=key)
    shop.drain()
    shop.publish("later", 4, delay=100)
    shop.clock.advance(21)

    counts, rows = shop.table.counts(), shop.table.rows(limit=10)

    assert (3, 1, 21.0) == (counts.waiting, counts.dead, round(counts.oldest, 3))
    assert [("dead", 1, 1), ("due", 1, 0), ("due", 0, 0), ("delayed", 0, 0)] == [
        (row.state, row.attempts, row.behind) for row in rows
    ]
    assert ["no", "ConnectionError", None, None] == [row.error for row in rows]
    assert 1 == len(shop.table.rows(limit=10, only_dead=True))


def test_the_task_of_the_janitor_sends_until_nothing_is_due(shop: Shop) -> None:
    for number in range(250):
        with shop.app.app_context():
            shop.outbox.publish("orders", number)
            shop.db.session.commit()

    report = relays.relay(shop.relay, drain=Batcher(batch=100))

    assert RelayReport(250) == report


def test_a_damaged_row_is_dead_and_stops_no_other(shop: Shop) -> None:
    for headers in ("", "{", "[]", "{}", '{"content-type": 7}', "null"):
        shop.publish("orders", 1)
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            connection.execute(text("UPDATE idempotency_outbox SET headers = :headers"), {"headers": headers})
        shop.publish("orders", 2)

        assert (headers, RelayReport(1, 0, 1)) == (headers, shop.drain())
        (row,) = shop.rows()
        assert (headers, "the row is damaged: its headers are unreadable") == (headers, row.error)
        assert "orders" == shop.table.discard(row.seq)


@on_each
def test_the_clock_of_the_database_decides(open_shop: OpenShop) -> None:
    """In production `now` is null in every statement."""
    shop = open_shop()
    shop.table._clock = lambda: None
    shop.publish("orders", 1, delay=3600)
    shop.publish("orders", 2)

    assert 1 == shop.drain().sent
    assert 1 == shop.table.counts().waiting
    (row,) = shop.rows()
    assert 3_600_000_000 == row.ready_at - row.created_at


def relay_of(shop: Shop, sent: Sent) -> Relay:
    services: OutboxServices = shop.services
    shop.outbox._routes.clear()
    shop.outbox.route("*", sent)
    return services.relay()


class Together(Sent):
    """An adapter of several relays. It keeps the order in which messages arrived."""

    lock = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        with self.lock:
            return super().send(messages)


def send_with_two_relays(shop: Shop, *, rows: int, keys: int, writers: int = 2) -> list[Message]:
    """Publish from several threads, whose transactions of one key exclude each other, while two relays send."""
    together, stop, failures = Together(), Stop(), []
    both = iter([relay_of(shop, together), shop.relay])
    shop.table._clock = lambda: None
    locks = [threading.Lock() for _ in range(keys)]
    written = dict.fromkeys(range(keys), 0)

    def write(first: int) -> None:
        try:
            for number in range(first, rows, writers):
                key = number % keys
                with locks[key], shop.app.app_context():
                    shop.outbox.publish("orders", written[key], key=str(key))
                    shop.db.session.commit()
                    written[key] += 1
        except BaseException as error:
            failures.append(error)
            raise

    def send() -> None:
        run(next(both), stop=stop, poll=0.05)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    senders = [threading.Thread(target=send) for _ in range(2)]
    for thread in (*threads, *senders):
        thread.start()
    for thread in threads:
        thread.join()
    give_up = threading.Event()
    for _ in range(3000):
        if failures or not shop.table.counts().waiting:
            break
        give_up.wait(0.02)
    stop.set()
    for thread in senders:
        thread.join()
    assert [] == failures
    return together.messages


@pytest.mark.slow
@on_each
def test_two_relays_lose_nothing_and_keep_the_order(shop: Shop) -> None:
    """900 messages of 8 keys. Without the lock around the claim this fails: B 35 of the contract."""
    messages = send_with_two_relays(shop, rows=900, keys=8)

    by_key: dict[str, list[int]] = {}
    for message in messages:
        by_key.setdefault(message.key or "", []).append(int(message.body))
    assert {str(key): list(range(900 // 8 + (key < 900 % 8))) for key in range(8)} == by_key
    assert 900 == len({message.message_id for message in messages})


@on_postgresql
def test_a_claim_waits_for_the_claim_of_another_relay(shop: Shop) -> None:
    """What the other relay commits must be seen: a message of the same key may be in its hands."""
    shop.publish("orders", 1, key="a")
    shop.publish("orders", 2, key="a")
    with shop.app.app_context(), shop.db.engine.begin() as other:
        other.execute(text(f"SELECT pg_advisory_xact_lock({0x6F7574626F780001})"))
        found: list[object] = []
        thread = threading.Thread(
            target=lambda: found.extend(shop.table.claim(b"i" * 16, topics=EVERY, limit=9, hold=HOLD_SECONDS)),
            daemon=True,
        )
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        other.execute(
            text("UPDATE idempotency_outbox SET holder = 'x', held_until = :late WHERE body = '1'"),
            {"late": round((shop.clock.now + 30) * 1e6)},
        )
    thread.join(60)

    assert [] == found


@on_postgresql
def test_a_frozen_relay_does_not_freeze_the_others(shop: Shop) -> None:
    """After two seconds they say that the database cannot decide, and try again."""
    with shop.app.app_context(), shop.db.engine.begin() as frozen:
        frozen.execute(text(f"SELECT pg_advisory_xact_lock({0x6F7574626F780001})"))
        with pytest.raises(StoreUnavailable, match="LockNotAvailable"):
            shop.relay.run_once()


def test_a_relay_waits_for_its_database(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, tries, waits = Stop(), [], []
    monkeypatch.setattr(Stop, "wait", lambda stop, seconds: waits.append(seconds))

    class Away:
        def run_once(self, **options: object) -> None:
            tries.append(1)
            if len(tries) == 2:
                stop.set()
            raise StoreUnavailable("away")

        def finish(self) -> RelayReport:
            return RelayReport()

    report = run(Away(), stop=stop, poll=0.01)  # type: ignore[arg-type]

    assert (RelayReport(), 2) == (report, len(tries))
    assert [1.0, 2.0] == waits
    assert "it tries again in 2 s" in caplog.text


@on_postgresql
def test_a_claim_walks_the_index_without_statistics(shop: Shop) -> None:
    """After a burst the planner knows nothing of the table. It sorted all of it, and 50,000 messages were never sent."""
    parameters = {"now": None, "holder": b"h" * 16, "limit": 100, "hold": 30_000_000, "my_namespace": "shop"}
    parameters |= {"takes": "^.*$", "before": "(?!)"}
    dialect = DIALECTS[POSTGRESQL]
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(text(MANY), {"rows": 20_000})
        connection.execute(relay_lock(dialect))
        claiming = claim(dialect).compile(dialect=connection.dialect)
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {claiming}", parameters).scalars())

    assert "Index Scan using idempotency_outbox_turn" in plan
    assert "Index Scan using idempotency_outbox_lane" in plan
    assert "Sort" not in plan
    assert "Seq Scan" not in plan

"""One receiver that hangs holds up no other: not in its route, not in another route, and not in another tenant.

Calls take time by a clock of the test, and no thread runs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from flask_idempotency.engine.outbox import Message
from flask_idempotency.maintenance.relay import PASS_SECONDS, SHARE, Call, Relay, SendFailed, Threads, run
from tests.outbox.conftest import OpenShop, Sent, Shop

POLL = 0.5
SILENT = 10.0
"""After this an attempt of `Webhook` ends."""


@dataclass
class Hosts(Sent):
    """An adapter that tells receivers apart, as `Webhook` does."""

    batch: int = 1
    parallel: int = 256

    def receiver_of(self, message: Message) -> object:
        return message.tenant


@dataclass
class Simulated(Threads):
    """Runs calls by the test's clock: the next one that ends moves it."""

    shop: Shop
    takes: Callable[[Message], float]
    began: dict[str, float] = field(default_factory=dict)
    """When the first call with this message id began."""
    most: Counter[object] = field(default_factory=Counter)
    """The most calls at the same time, of each receiver and of all (None)."""
    order: list[Message] = field(default_factory=list)
    _ends: list[tuple[float, int, Call]] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)

    def start(self, call: Call) -> None:
        now = self.shop.clock.now
        for message in call.messages:
            self.began.setdefault(message.message_id, now)
            self.order.append(message)
        heapq.heappush(self._ends, (now + self.takes(call.messages[0]), next(self._numbers), call))
        under_way = Counter(each.messages[0].tenant for _, _, each in self._ends)
        for receiver, number in (*under_way.items(), (None, len(self._ends))):
            self.most[receiver] = max(self.most[receiver], number)

    def finished(self, seconds: float) -> Call | None:
        clock = self.shop.clock
        if not self._ends or self._ends[0][0] > clock.now + seconds:
            clock.advance(max(seconds, 0))
            return None
        ends, _, call = heapq.heappop(self._ends)
        clock.now = max(clock.now, ends)
        call.run()
        return call


@dataclass
class Until:
    """Ends a run when a condition holds, or after some seconds."""

    shop: Shop
    done: Callable[[], bool]
    ends: float
    publish: Callable[[], object] = lambda: None

    @property
    def is_set(self) -> bool:
        self.publish()
        return self.done() or self.shop.clock.now >= self.ends

    def wait(self, seconds: float) -> None:
        self.shop.clock.advance(seconds)


def relay_of(shop: Shop, takes: Callable[[Message], float]) -> tuple[Relay, Simulated]:
    relay, calls = shop.relay, Simulated(shop, takes)
    relay.monotonic, relay.calls = lambda: shop.clock.now, calls
    return relay, calls


def publish(shop: Shop, messages: Sequence[tuple[str, str]], **options: Any) -> list[str]:
    """Publish messages of these topics to these receivers, in one transaction."""
    with shop.app.app_context():
        ids = [shop.outbox.publish(topic, 1, tenant=receiver, **options) for topic, receiver in messages]
        shop.db.session.commit()
    return ids


def silent(message: Message) -> bool:
    return (message.tenant or "").startswith("silent")


def takes(message: Message) -> float:
    return SILENT if silent(message) else 0.02


def waits_of(shop: Shop, *, silent_hosts: int, messages: int, good: int) -> tuple[list[float], Simulated]:
    """Send good messages to 40 hosts, half of them behind those to silent hosts, half while their later attempts are due."""
    shop.outbox._routes.clear()
    hosts = Hosts(fail=lambda message: SendFailed("no response") if silent(message) else None)
    shop.outbox.route("*", hosts)
    relay, calls = relay_of(shop, takes)
    start = shop.clock.now
    if silent_hosts:
        publish(shop, [("hooks", f"silent-{number % silent_hosts}") for number in range(silent_hosts * messages)])
    published: dict[str, float] = {}
    times = [0.0, *(20.0 + 0.37 * number for number in range(50))]
    sizes = [good // 2, *[good // 100] * 50]

    def more() -> None:
        while times and shop.clock.now - start >= times[0]:
            at, number = start + times.pop(0), sizes.pop(0)
            ids = publish(shop, [("hooks", f"good-{each % 40}") for each in range(number)])
            published.update(dict.fromkeys(ids, at))

    run(
        relay,
        stop=Until(shop, lambda: not times and published.keys() <= calls.began.keys(), start + 600, more),  # type: ignore[arg-type]
        poll=POLL,
    )
    return sorted(calls.began[each] - at for each, at in published.items()), calls


def test_silent_hosts_do_not_delay_other_messages(open_shop: OpenShop) -> None:
    """100 hosts that never respond, with 5 messages each. Before, 4 such messages delayed another customer's by 221 s."""
    idle, _ = waits_of(open_shop(IDEMPOTENCY_NAMESPACE="idle"), silent_hosts=0, messages=0, good=400)
    busy, calls = waits_of(open_shop(IDEMPOTENCY_NAMESPACE="busy"), silent_hosts=100, messages=5, good=400)

    assert (400, 400) == (len(idle), len(busy))
    assert busy[395] <= 2 * max(idle[395], POLL)
    # Every silent host is tried in its turn, one call at a time.
    assert 1 == max(number for receiver, number in calls.most.items() if str(receiver).startswith("silent"))


def test_a_host_has_a_share_of_the_calls(open_shop: OpenShop) -> None:
    """A host that has been quick gets a sixteenth at the same time, and one message each until it has responded."""
    shop = open_shop()
    shop.outbox._routes.clear()
    shop.outbox.route("*", Hosts())
    relay, calls = relay_of(shop, takes)
    publish(shop, [("hooks", "good")] * 300)

    run(relay, stop=Until(shop, lambda: not shop.rows(), shop.clock.now + 60), poll=POLL)  # type: ignore[arg-type]

    assert (256 // SHARE, []) == (calls.most["good"], shop.rows())


def test_many_messages_for_a_silent_host_reach_it_one_by_one(open_shop: OpenShop) -> None:
    """70 messages for one silent endpoint stopped the outbox for ever."""
    shop = open_shop()
    shop.outbox._routes.clear()
    shop.outbox.route("*", Hosts(fail=lambda message: SendFailed("no response") if silent(message) else None))
    relay, calls = relay_of(shop, takes)
    publish(shop, [("hooks", "silent")] * 170)
    (good,) = publish(shop, [("hooks", "good")])
    published = shop.clock.now

    run(relay, stop=Until(shop, lambda: good in calls.began, published + 60), poll=POLL)  # type: ignore[arg-type]

    assert (published, 1) == (calls.began[good], calls.most["silent"])
    # The one that was under way has failed, and no other has had an attempt.
    assert [*[0] * 169, 1] == sorted(row.attempts for row in shop.rows() if row.ready_at > published * 1e6)


def test_a_route_that_hangs_holds_up_no_other(open_shop: OpenShop) -> None:
    """Its adapter gets one call at a time, and the other route has its own."""
    shop, first, second = open_shop(), Sent(), Sent()
    shop.outbox._routes.clear()
    shop.outbox.route("slow", first)
    shop.outbox.route("quick.*", second)
    relay, calls = relay_of(shop, lambda message: 15.0 if message.topic == "slow" else 0.01)
    publish(shop, [("slow", "a")] * 250)
    published = shop.clock.now
    ids = publish(shop, [("quick.a", "a")] * 250)

    run(relay, stop=Until(shop, lambda: set(ids) <= calls.began.keys(), published + 60), poll=POLL)  # type: ignore[arg-type]

    assert published + 1 > max(calls.began[each] for each in ids)
    assert [100] == first.calls


def test_routes_of_one_adapter_take_turns(open_shop: OpenShop) -> None:
    """An adapter is never called twice at the same time, and the first route does not starve the second."""
    shop, adapter = open_shop(), Sent()
    shop.outbox._routes.clear()
    for pattern in ("a", "b"):
        shop.outbox.route(pattern, adapter)
    relay, calls = relay_of(shop, lambda message: 2.0)
    publish(shop, [("a", "x")] * 300)
    (other,) = publish(shop, [("b", "x")])
    published = shop.clock.now

    run(relay, stop=Until(shop, lambda: other in calls.began, published + 60), poll=POLL)  # type: ignore[arg-type]

    assert (True, 1) == (calls.began[other] <= published + 2 + POLL, calls.most[None])


def test_the_order_of_a_key_holds_while_its_receiver_is_slow(open_shop: OpenShop) -> None:
    """Some attempts fail, and calls run at the same time."""
    shop = open_shop()
    shop.outbox._routes.clear()
    failed: set[str] = set()

    def fail_once(message: Message) -> Exception | None:
        if int(message.body) % 3 == 0 and message.message_id not in failed:
            failed.add(message.message_id)
            return SendFailed("no response")
        return None

    hosts = Hosts(fail=fail_once)
    shop.outbox.route("*", hosts)
    relay, _ = relay_of(shop, lambda message: (0.02, 0.3, 1.5)[int(message.body) % 3])
    with shop.app.app_context():
        for number in range(120):
            shop.outbox.publish("hooks", number, key=str(number % 5), tenant=f"host-{number % 2}")
        shop.db.session.commit()

    run(relay, stop=Until(shop, lambda: not shop.rows(), shop.clock.now + 3600), poll=POLL)  # type: ignore[arg-type]

    by_key: dict[str | None, list[int]] = {}
    for message in hosts.messages:
        by_key.setdefault(message.key, []).append(int(message.body))
    assert {str(key): list(range(key, 120, 5)) for key in range(5)} == by_key


def test_a_call_begins_early_in_its_hold(open_shop: OpenShop) -> None:
    """An attempt may take 20 seconds, and other relays take the message after 30."""
    shop = open_shop()
    shop.outbox._routes.clear()
    shop.outbox.route("*", Hosts(parallel=1))
    held: dict[int, float] = {}
    claim = shop.table.claim

    def noted(*arguments: Any, **options: Any) -> Any:
        found = claim(*arguments, **options)
        held.update(dict.fromkeys((each.seq for each in found), shop.clock.now))
        return found

    shop.table.claim = noted  # type: ignore[method-assign]
    relay, calls = relay_of(shop, lambda message: 0.09)
    publish(shop, [("hooks", "good")] * 120)
    start = calls.start
    late: list[float] = []

    def timed(call: Call) -> None:
        late.append(shop.clock.now - held[call.chosen[0].seq])
        start(call)

    calls.start = timed  # type: ignore[method-assign]
    relay.run_once()

    assert (True, True) == (max(late) < PASS_SECONDS, len(late) > 80)
    assert {None} == {row.holder for row in shop.rows()}

"""Send the messages of an outbox: claim some, send them with no transaction open, and delete those that were confirmed.

No receiver holds up another. Each route claims its own messages, and its adapter runs in threads. An adapter that tells
receivers apart, as `Webhook` does, runs many calls at the same time, and each receiver has a small share of them. What a slow
receiver cannot take now is put off, so that it does not fill the next claim.

Several relays may run at the same time, in processes of their own and as a task of the janitor. One may be killed at any
point: what it held is due again after `HOLD_SECONDS`, under the same message ids.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Final

from flask_idempotency.engine.errors import ConfigurationError, KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.events import Event, MessageDead, MessagesRelayed
from flask_idempotency.engine.outbox import Adapter, Message, OutboxQueue, StoredMessage, Topics, Undeliverable
from flask_idempotency.maintenance.janitor import Batcher, BatchResult, RunReport

HOLD_SECONDS: Final = 30.0
"""How long a relay holds the messages that it sends."""

PASS_SECONDS: Final = 8.0
"""A relay gives back what it has not begun to send after this. An adapter may take 20 seconds, so the hold lasts as long."""

CALL_SECONDS: Final = 20.0
"""How long an adapter may take. A relay that ends waits so long for the calls that are under way."""

WAIT_SECONDS: Final = 0.25
"""A task of the janitor looks for new messages after this, while calls are under way."""

AGAIN_SECONDS: Final = 30.0
"""How long a run of `once` puts off a message that it has tried: about as long as cron takes to run the next."""

SLOW_SECONDS: Final = 1.0
"""A receiver that takes as long as this gets one call at a time."""

QUICK_SECONDS: Final = 0.1
"""Messages wait in the relay for a receiver that is as quick as this. For others they are put off in the table."""

SHARE: Final = 16
"""A receiver has one of so many parts of the calls of its adapter: with 256 calls at the same time, 16 of them."""

LONGEST_PUT_OFF_SECONDS: Final = 60.0

BATCH: Final = 100
"""The most messages that one claim holds. All their bodies are in memory at the same time."""

FIRST_PAUSE_SECONDS: Final = 1.0
LAST_PAUSE_SECONDS: Final = 600.0
"""The pauses after failed attempts double from the first to the last."""

AWAY_SECONDS: Final = (1.0, 30.0)
"""The first and the longest pause of a relay process while the database does not respond."""

MAX_RECEIVERS: Final = 10_000
LONGEST_ERROR: Final = 200
NO_ROUTE: Final = "no route takes this topic in this process"

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class RelayReport(RunReport):
    """The result of a relay's run."""

    sent: int = 0
    delayed: int = 0
    """An attempt failed, and a later one follows."""
    dead: int = 0
    """Messages that can never be sent, and that an operator must retry or discard."""

    def __add__(self, other: RelayReport) -> RelayReport:
        sent, delayed, dead = self.sent + other.sent, self.delayed + other.delayed, self.dead + other.dead
        return replace(self, sent=sent, delayed=delayed, dead=dead)


@dataclass(frozen=True, slots=True)
class Route:
    """Where the messages of some topics go."""

    pattern: str
    adapter: Adapter
    batch: int = BATCH
    """The most messages of one call. It is 1 if the adapter tells receivers apart."""
    parallel: int = 1
    """The most calls at the same time."""
    receiver_of: Callable[[Message], object] | None = None
    place: object = None
    """The line that registered it."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of an adapter, which runs in a thread."""

    batch: Pass
    chosen: Sequence[StoredMessage]
    messages: Sequence[Message]
    receiver: Receiver | None
    began: float
    context: Callable[[], AbstractContextManager[Any]]
    results: Sequence[Exception | None] = ()
    interrupted: BaseException | None = None

    def run(self) -> None:
        """Send. An adapter may fail in any way: then every message is sent again."""
        number = len(self.messages)
        try:
            with self.context():
                self.results = list(self.batch.route.adapter.send(list(self.messages)))
            if len(self.results) != number or not all(e is None or isinstance(e, Exception) for e in self.results):
                raise TypeError("an adapter returns None or an exception for each message")
        except Exception as error:  # noqa: BLE001 - an application's adapter may raise anything
            self.results = [error] * number
        except BaseException as error:  # noqa: BLE001 - the relay's own thread raises it
            self.interrupted, self.results = error, [NotTried()] * number


class Threads:
    """Runs each call in a thread of its own. A thread that hangs does not keep the process from its end.

    Tests run calls by a clock of their own.
    """

    def __init__(self) -> None:
        self._done: SimpleQueue[Call] = SimpleQueue()

    def start(self, call: Call) -> None:
        """Begin this call."""

        def work() -> None:
            call.run()
            self._done.put(call)

        threading.Thread(target=work, name="flask_idempotency.relay", daemon=True).start()

    def finished(self, seconds: float) -> Call | None:
        """Return a call that has ended, or None if none ends within these seconds."""
        with suppress(Empty):
            return self._done.get(seconds > 0, seconds)
        return None


@dataclass(eq=False, slots=True)
class Receiver:
    """What one host, or another receiver of an adapter, has shown so far."""

    calls: list[float] = field(default_factory=list)
    """When each call that is under way began, the oldest first."""
    limit: int = 1
    """How many calls it may have now. It doubles with each quick response."""
    took: float | None = None
    """How long its last call took. None: none has ended."""
    slow: int = 0
    """How many calls in a row were slow."""

    def is_trusted(self, now: float) -> bool:
        """Return whether its last call was not slow, and none under way is."""
        return (self.took is not None and self.took < SLOW_SECONDS) and not self.is_stuck(now)

    def is_stuck(self, now: float) -> bool:
        return bool(self.calls) and now - self.calls[0] >= SLOW_SECONDS

    def pause(self, now: float) -> float:
        """Return for how long to put off what it cannot take now. 0: it is quick, and the message can wait in the relay."""
        if self.took is not None and self.took < QUICK_SECONDS and not self.is_stuck(now):
            return 0.0
        known = QUICK_SECONDS if self.took is None else self.took
        under_way = now - self.calls[0] if self.calls else 0.0
        return float(min(max(known, 2 * under_way) * 2 ** min(self.slow, 6), LONGEST_PUT_OFF_SECONDS))

    def ended(self, began: float, now: float, most: int) -> None:
        self.calls.remove(began)
        self.took = now - began
        if self.took < SLOW_SECONDS:
            self.limit, self.slow = min(2 * self.limit, most), 0
        else:
            self.limit, self.slow = 1, self.slow + 1


@dataclass(eq=False, slots=True)
class Pass:
    """Messages of one route that one claim holds."""

    holder: bytes
    route: Route
    left: deque[StoredMessage]
    began: float
    barred: set[bytes | int] = field(default_factory=set)
    """The lanes whose first message was not sent. The rest is given back."""
    receivers: dict[int, Receiver] = field(default_factory=dict)


@dataclass(eq=False)
class Relay:
    """Sends what is due."""

    queue: OutboxQueue
    _: KW_ONLY
    routes: Callable[[], Sequence[tuple[Route, Topics]]]
    """Return each route with its topics."""
    adopt: Callable[[], None]
    """Give this namespace the messages of the release before, whose rows have none."""
    opener: Callable[[], Callable[[StoredMessage], Message]]
    """Return what decrypts the bodies of one call."""
    observers: Callable[[Event], None]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Each call runs in one, that of the application."""
    monotonic: Callable[[], float] = time.monotonic
    calls: Threads = field(default_factory=Threads)
    _failed: dict[int, tuple[bool, str, str]] | None = field(default=None, init=False)
    """In a run of `once`: the messages that were not sent, whether they are dead, the pattern of their route, the error."""
    _sent: Counter[str] = field(default_factory=Counter, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _passes: list[Pass] = field(default_factory=list, init=False)
    _under_way: list[Call] = field(default_factory=list, init=False)
    _receivers: dict[tuple[int, object], Receiver] = field(default_factory=dict, init=False)
    _began: dict[str, float] = field(default_factory=dict, init=False)
    """When the last call of each route began."""
    _resumes: list[float] = field(default_factory=list, init=False)
    """When messages come due again that were put off for a moment."""

    def run_once(
        self, limit: int = BATCH, *, stopped: Callable[[], bool] = lambda: False, wait: float | None = None
    ) -> RelayReport | None:
        """Claim up to `limit` messages of each route, and send them. Return None if no message is due and no call is under way.

        With `wait` it returns after that many seconds, and sooner if more messages may be due. Calls may be under way then:
        call it again, and `finish` at the end. Messages of one topic and key go one after the other, and those behind one that
        failed are given up unsent. Raises `StoreUnavailable` if the database does not respond; confirmed messages that it did
        not delete are sent again.
        """
        with self._lock:
            try:
                return self._run_once(limit, stopped, wait)
            finally:
                # Give back what has not begun: after a signal, an error, or at the end. The next claim finds it again.
                passes, self._passes = self._passes, []
                for one in passes:
                    with suppress(StoreUnavailable):
                        self.queue.release(one.holder, [each.seq for each in one.left])

    def _run_once(self, limit: int, stopped: Callable[[], bool], wait: float | None) -> RelayReport | None:
        counts: Counter[str] = Counter()
        longest = CALL_SECONDS if wait is None else wait
        began = self.monotonic()
        while (call := self.calls.finished(0)) is not None:
            self._settle(call, counts)
        self.adopt()
        full = [
            route
            for route, topics in self.routes()
            if not stopped() and self._wants(route) and self._claim(route, topics, min(limit, BATCH))
        ]
        if not self._passes and not self._under_way:
            if counts or not (resuming := self._resuming(began)):
                return self._report(counts) if counts else None
            self.calls.finished(min(min(resuming) - began, longest))
        while True:
            # Routes may share an adapter: the one that has waited longer goes first.
            for each in sorted(self._passes, key=lambda one: self._began.get(one.route.pattern, 0.0)):
                self._start(each, counts, stopped=stopped())
            if wait is not None and any(map(self._wants, full)):
                break
            now = self.monotonic()
            ends = min([began + longest, *([] if wait is None else self._resuming(now))])
            if not self._under_way or (now >= ends and not stopped()):
                break
            call = self.calls.finished(ends - now)
            if call is None:
                break
            while call is not None:
                self._settle(call, counts)
                call = self.calls.finished(0)
        return self._report(counts)

    def once(self, *, stopped: Callable[[], bool], wait: float) -> RelayReport:
        """Try each message that is due once, and wait for the calls. Log a line for each route and outcome, not each message.

        A message that fails comes due again within seconds: a run would try it until its receiver is repaired.
        """
        self._failed, total = {}, RelayReport()
        self._sent.clear()
        while not stopped():
            report = self.run_once(stopped=stopped, wait=wait)
            if report is None:
                break
            total += report
        total += self.finish()
        for pattern, number in self._sent.items():
            _log.info("%d messages of %s were sent", number, pattern)
        for (dead, *facts), number in Counter(self._failed.values()).items():
            if dead:
                _log.error("%d messages of %s can never be sent (%s): see `flask idempotency outbox`", number, *facts)
            else:
                _log.warning("%d messages of %s were not sent (%s)", number, *facts)
        self._failed = None
        return total

    def finish(self) -> RelayReport:
        """Wait for the calls that are under way, for `CALL_SECONDS` at most."""
        counts: Counter[str] = Counter()
        ends = self.monotonic() + CALL_SECONDS
        with self._lock:
            while self._under_way and (left := ends - self.monotonic()) > 0:
                if (call := self.calls.finished(left)) is not None:
                    self._settle(call, counts)
            self._under_way.clear()
        return self._report(counts)

    def _resuming(self, now: float) -> list[float]:
        self._resumes = [each for each in self._resumes if each > now]
        return self._resumes

    def _report(self, counts: Counter[str]) -> RelayReport:
        if counts:
            self.observers(MessagesRelayed("", "relay", counts["sent"], counts["delayed"], counts["dead"]))
        return RelayReport(counts["sent"], counts["delayed"], counts["dead"])

    def _wants(self, route: Route) -> bool:
        """Return whether a call of this route could begin, and none of its messages waits in this relay."""
        waits = any(each.route is route for each in self._passes)
        return not waits and self._has_room(route, None, self.monotonic())

    def _has_room(self, route: Route, receiver: Receiver | None, now: float) -> bool:
        """Return whether a call may begin.

        Calls that hang are left out of the count after a second, up to as many again. Receivers that are not known as quick
        share three quarters of the calls, and slow ones a quarter.
        """
        calls = [each for each in self._under_way if each.batch.route.adapter is route.adapter]
        if route.receiver_of is None:
            return len(calls) < route.parallel
        young = [each for each in calls if now - each.began < SLOW_SECONDS]
        if len(young) >= route.parallel or len(calls) >= 2 * route.parallel:
            return False
        if receiver is None:
            return True
        if len(receiver.calls) >= receiver.limit or receiver.is_stuck(now):
            return False
        if receiver.is_trusted(now):
            return True
        if receiver.slow:
            slow = sum(1 for each in calls if each.receiver is not None and each.receiver.slow)
            if slow >= max(1, route.parallel // 4):
                return False
        doubtful = sum(1 for each in young if each.receiver is not None and not each.receiver.is_trusted(now))
        return doubtful < max(1, route.parallel * 3 // 4)

    def _claim(self, route: Route, topics: Topics, limit: int) -> bool:
        """Hold what is due, and return whether more may be."""
        holder = secrets.token_bytes(16)
        claimed = self.queue.claim(holder, topics=topics, limit=limit, hold=HOLD_SECONDS)
        if claimed:
            self._passes.append(Pass(holder, route, deque(claimed), self.monotonic()))
        return len(claimed) == limit

    def _start(self, one: Pass, counts: Counter[str], *, stopped: bool = False) -> None:
        """Begin the calls of this pass that may begin now. Give back and put off what need not wait here."""
        now = self.monotonic()
        if stopped or now - one.began >= PASS_SECONDS:
            # Other relays send them, and no hold ends while a message is under way.
            self._passes.remove(one)
            self.queue.release(one.holder, [each.seq for each in one.left])
            return
        route = one.route
        under_way = {lane_of(each): call.began for call in self._under_way if call.batch is one for each in call.chosen}
        lanes = set(under_way)
        size = 1 if route.receiver_of is not None else route.batch
        # Before each call of an adapter: a tenant may be erased at any time.
        opened = self.opener()
        waiting: list[StoredMessage] = []
        back: list[int] = []
        later: dict[float, list[int]] = {}
        batch: list[tuple[StoredMessage, Message]] = []
        for _ in range(len(one.left)):
            each = one.left.popleft()
            lane = lane_of(each)
            if now - under_way.get(lane, now) >= SLOW_SECONDS:
                one.barred.add(lane)
            if lane in one.barred:
                back.append(each.seq)
                continue
            if lane in lanes:
                waiting.append(each)
                continue
            lanes.add(lane)
            if self._failed and each.seq in self._failed:
                # Its regular pause is over. Another pause keeps it from being claimed again and again in this run.
                later.setdefault(AGAIN_SECONDS, []).append(each.seq)
                one.barred.add(lane)
                continue
            receiver = one.receivers.get(each.seq)
            if not batch and not self._has_room(route, None, now):
                waiting.append(each)
                continue
            if receiver is None or self._has_room(route, receiver, now):
                try:
                    message = opened(each)
                except Exception as error:  # noqa: BLE001 - one message that cannot be opened must not stop the others
                    self._end(one, [each], [error], counts)
                    continue
                receiver = one.receivers[each.seq] = self._receiver_of(route, message)
            if route.receiver_of is None or self._has_room(route, receiver, now):
                batch.append((each, message))
                if len(batch) >= size:
                    self._begin(one, batch, receiver, now)
                    batch = []
            elif pause := receiver.pause(now):
                later.setdefault(pause, []).append(each.seq)
                one.barred.add(lane)
            else:
                waiting.append(each)
        if batch:
            self._begin(one, batch, None, now)
        one.left.extend(waiting)
        if not waiting:
            self._passes.remove(one)
        if back:
            self.queue.release(one.holder, back)
        for pause, seqs in later.items():
            self.queue.put_off(one.holder, seqs, pause=pause)
            if pause <= SLOW_SECONDS:
                self._resumes.append(now + pause)

    def _receiver_of(self, route: Route, message: Message) -> Receiver:
        name: object = None
        if route.receiver_of is not None:
            with suppress(Exception):
                # `send` fails for the same reason, and tells it.
                name = route.receiver_of(message)
        if len(self._receivers) >= MAX_RECEIVERS:
            idle = [key for key, each in self._receivers.items() if not each.calls]
            for key in idle[: MAX_RECEIVERS // 2]:
                del self._receivers[key]
        return self._receivers.setdefault((id(route.adapter), name), Receiver())

    def _begin(
        self, one: Pass, batch: Sequence[tuple[StoredMessage, Message]], receiver: Receiver | None, now: float
    ) -> None:
        chosen, messages = [stored for stored, _ in batch], [message for _, message in batch]
        receiver = None if one.route.receiver_of is None else receiver
        call = Call(one, chosen, messages, receiver, now, self.context)
        if receiver is not None:
            receiver.calls.append(now)
        self._began[one.route.pattern] = now
        self._under_way.append(call)
        self.calls.start(call)

    def _settle(self, call: Call, counts: Counter[str]) -> None:
        """Write down the results of a call that has ended."""
        if call not in self._under_way:
            # It took so long that this relay has given it up, and its hold has ended.
            return
        self._under_way.remove(call)
        if call.receiver is not None:
            call.receiver.ended(call.began, self.monotonic(), max(1, call.batch.route.parallel // SHARE))
        self._end(call.batch, call.chosen, call.results, counts)
        if call.interrupted is not None:
            raise call.interrupted

    def _end(
        self,
        one: Pass,
        chosen: Sequence[StoredMessage],
        results: Sequence[Exception | None],
        counts: Counter[str],
    ) -> None:
        """Write the results down. Later messages of a topic and key whose message was not sent must wait."""
        failed = [(each, result) for each, result in zip(chosen, results, strict=True) if result is not None]
        one.barred.update(lane_of(each) for each, _ in failed)
        confirmed = [each.seq for each, result in zip(chosen, results, strict=True) if result is None]
        if confirmed:
            counts["sent"] += len(confirmed)
            self._sent[one.route.pattern] += len(confirmed)
            if self.queue.confirm(one.holder, confirmed) != len(confirmed):
                # This host was suspended, and its clock with it: other relays send the rest.
                one.began = self.monotonic() - PASS_SECONDS
        untried = [each.seq for each, result in failed if isinstance(result, NotTried)]
        for each, result in failed:
            if isinstance(result, NotTried):
                continue
            error, counted = text_of(result), self._failed is not None
            if isinstance(result, Undeliverable):
                self.queue.bury(one.holder, each.seq, error=error)
                counts["dead"] += 1
                self.observers(MessageDead("", each.message.topic, each.seq, error, counted))
            else:
                self.queue.delay(one.holder, each.seq, pause=pause_after(each.attempts), error=error)
                counts["delayed"] += 1
                if self._failed is None:
                    facts = each.seq, each.message.topic, error, each.attempts + 1
                    _log.warning("message %d of %s was not sent (%s), attempt %d", *facts)
            if self._failed is not None:
                self._failed[each.seq] = isinstance(result, Undeliverable), one.route.pattern, error
        if untried:
            self.queue.release(one.holder, untried)


def lane_of(message: StoredMessage) -> bytes | int:
    """Return what messages share that go one after the other. One without a key shares it with no other."""
    return message.seq if message.lane is None else message.lane


def pause_after(attempts: int) -> float:
    """Return the seconds until the next attempt, after this many that failed before."""
    return float(min(FIRST_PAUSE_SECONDS * 2 ** min(attempts, 10), LAST_PAUSE_SECONDS))


def text_of(error: Exception) -> str:
    """Return what operators see of an error. Of a foreign exception only its class: its text may quote a body."""
    named = isinstance(error, Undeliverable | ConfigurationError | KeyProviderUnavailable | SendFailed)
    text = str(error) if named else ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        text = f"the Python module {error.name} is not installed where the relay runs"
    return printable(text or type(error).__name__)[:LONGEST_ERROR]


class SendFailed(Exception):
    """An attempt failed, and a later one may succeed. Its text has no address, key or body."""


class NotTried(Exception):
    """An adapter had no time for this message. It counts as no attempt, and another call sends it."""


def relay(relay: Relay, *, drain: Batcher) -> RelayReport:
    """Send what is due until nothing is, or the budget ends: as a task of the janitor.

    Raises `StoreUnavailable` if the database does not respond.
    """
    total = RelayReport()

    def step(limit: int) -> BatchResult:
        nonlocal total
        report = relay.run_once(limit, wait=WAIT_SECONDS)
        if report is None:
            return BatchResult(0, more=False)
        total += report
        return BatchResult(report.sent + report.delayed + report.dead, more=True)

    ended = drain.run(step)
    return replace(total + relay.finish(), shrunk=ended.shrunk, finished=ended.finished)


class Stop:
    """Ends a relay process between two attempts. A signal handler may call `set`."""

    def __init__(self) -> None:
        # Its `put` takes no lock that the interrupted code may hold.
        self._ends: SimpleQueue[None] = SimpleQueue()
        self.is_set: bool = False

    def set(self) -> None:
        """End the run after the attempt that is under way."""
        self.is_set = True
        self._ends.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for this long, or until the end of the run."""
        with suppress(Empty):
            # Others may wait too.
            self._ends.put(self._ends.get(timeout=seconds))


def run(
    relay: Relay,
    *,
    stop: Stop,
    poll: float,
    on_pass: Callable[[RelayReport], object] = lambda report: None,
) -> RelayReport:
    """Send what is due until `stop` is set, and look again every `poll` seconds. Wait longer while the database is away."""
    total, away = RelayReport(), AWAY_SECONDS[0]
    while not stop.is_set:
        try:
            report = relay.run_once(stopped=lambda: stop.is_set, wait=poll)
        except StoreUnavailable as error:
            _log.warning("the relay cannot reach its database (%s); it tries again in %g s", error, away)
            stop.wait(away)
            away = min(2 * away, AWAY_SECONDS[1])
            continue
        away = AWAY_SECONDS[0]
        on_pass(report or RelayReport())
        if report is None:
            stop.wait(poll)
        else:
            total = total + report
    with suppress(StoreUnavailable):
        total = total + relay.finish()
    return total


__all__ = ["Relay", "RelayReport", "Route", "SendFailed", "Stop", "relay", "run"]

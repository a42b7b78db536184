"""Send the messages of an outbox: claim some, send them with no transaction open, and delete those that were confirmed.

Several relays may run at the same time, in processes of their own and as a task of the janitor. One may be killed at any
point: what it held is due again after `HOLD_SECONDS`, under the same message ids.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from flask_idempotency.engine.capabilities import Expiry
from flask_idempotency.engine.errors import ConfigurationError, KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.events import Event, MessageDead, MessagesRelayed
from flask_idempotency.engine.outbox import Adapter, Message, OutboxQueue, StoredMessage, Topics, Undeliverable
from flask_idempotency.maintenance.janitor import Batcher, BatchResult, ExpireReport

HOLD_SECONDS: Final = 30.0
"""How long a relay holds the messages that it sends."""

PASS_SECONDS: Final = 8.0
"""A relay gives back what it has not begun to send after this. An adapter may take 20 seconds, so the hold lasts as long."""

BATCH: Final = 100
"""The most messages that one claim holds. All their bodies are in memory at the same time."""

FIRST_PAUSE_SECONDS: Final = 1.0
LAST_PAUSE_SECONDS: Final = 600.0
"""The pauses after failed attempts double from the first to the last."""

AWAY_SECONDS: Final = (1.0, 30.0)
"""The first and the longest pause of a relay process while the database does not respond."""

LONGEST_ERROR: Final = 200
NO_ROUTE: Final = "no route takes this topic in this process"

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class RelayReport:
    """The result of a relay's run."""

    sent: int = 0
    delayed: int = 0
    """An attempt failed, and a later one follows."""
    dead: int = 0
    """Messages that can never be sent, and that an operator must retry or discard."""
    shrunk: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """Where the messages of some topics go."""

    pattern: str
    adapter: Adapter
    batch: int = BATCH
    """The most messages of one call."""


class Relay:
    """Sends what is due.

    `routes` returns each route with its topics, and `opener` what decrypts the bodies of one call. `adopt` gives this
    namespace the messages of the release before, whose rows have none.
    """

    def __init__(
        self,
        queue: OutboxQueue,
        *,
        routes: Callable[[], Sequence[tuple[Route, Topics]]],
        adopt: Callable[[], None],
        opener: Callable[[], Callable[[StoredMessage], Message]],
        observers: Callable[[Event], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._routes = routes
        self._adopt = adopt
        self._opener = opener
        self._observers = observers
        self._monotonic = monotonic

    def run_once(self, limit: int = BATCH, *, stopped: Callable[[], bool] = lambda: False) -> RelayReport | None:
        """Claim up to `limit` messages and send them. Return None if no message is due.

        Messages of one topic and key go one after the other, and those behind one that failed are given up unsent. Raises
        `StoreUnavailable` if the database does not respond; confirmed messages that it did not delete are sent again.
        """
        self._adopt()
        counts: Counter[str] = Counter()
        found = False
        for route, topics in self._routes():
            if stopped():
                break
            found = self._pass(route, topics, min(limit, BATCH), counts, stopped) or found
        if not found:
            return None
        self._observers(MessagesRelayed("", "relay", counts["sent"], counts["delayed"], counts["dead"]))
        return RelayReport(counts["sent"], counts["delayed"], counts["dead"])

    def _pass(
        self, route: Route, topics: Topics, limit: int, counts: Counter[str], stopped: Callable[[], bool]
    ) -> bool:
        """Claim messages of this route and send them. Return whether any was due."""
        holder = secrets.token_bytes(16)
        began, before = self._monotonic(), counts.total()
        claimed = self._queue.claim(holder, topics=topics, limit=limit, hold=HOLD_SECONDS)
        if not claimed:
            return False
        left, unsettled = list(claimed), True
        try:
            while left and not stopped() and self._monotonic() - began < PASS_SECONDS:
                chosen = self._next(route, left)
                results = self._send(route, chosen)
                failed = self._settle(holder, chosen, results, counts)
                if failed is None:
                    # This host was suspended, and its clock with it: other relays send the rest.
                    break
                done = {each.seq for each in chosen}
                left = [each for each in left if each.seq not in done and each.lane not in failed]
            unsettled = counts.total() - before < len(claimed)
        finally:
            if unsettled:
                # Messages behind one that failed, and all that are left after a signal, an error, or a slow receiver.
                with suppress(StoreUnavailable):
                    self._queue.release(holder)
        return True

    def _next(self, route: Route, left: Sequence[StoredMessage]) -> list[StoredMessage]:
        """Return the messages of the next call: for each topic and key, only one."""
        chosen: list[StoredMessage] = []
        lanes = set()
        for each in left:
            first = each.lane is None or each.lane not in lanes
            lanes.add(each.lane)
            if first:
                chosen.append(each)
                if len(chosen) >= route.batch:
                    break
        return chosen

    def _send(self, route: Route, chosen: Sequence[StoredMessage]) -> list[Exception | None]:
        """Return one result for each message. An adapter may fail in any way: then every message is sent again."""
        results: dict[int, Exception | None] = {}
        ready: list[tuple[int, Message]] = []
        # Before each call of an adapter: a tenant may be erased at any time.
        opened = self._opener()
        for each in chosen:
            try:
                ready.append((each.seq, opened(each)))
            except Exception as error:  # noqa: BLE001 - one message that cannot be opened must not stop the others
                results[each.seq] = error
        if ready:
            found: Sequence[Exception | None]
            try:
                found = list(route.adapter.send([message for _, message in ready]))
                if len(found) != len(ready) or not all(each is None or isinstance(each, Exception) for each in found):
                    raise TypeError("an adapter returns None or an exception for each message")
            except Exception as error:  # noqa: BLE001 - an application's adapter may raise anything
                found = [error] * len(ready)
            results |= {seq: result for (seq, _), result in zip(ready, found, strict=True)}
        return [results[each.seq] for each in chosen]

    def _settle(
        self,
        holder: bytes,
        chosen: Sequence[StoredMessage],
        results: Sequence[Exception | None],
        counts: Counter[str],
    ) -> set[bytes | None] | None:
        """Write the results down. Return the topics and keys whose later messages must wait. None: the hold has ended."""
        holds = True
        confirmed = [each.seq for each, result in zip(chosen, results, strict=True) if result is None]
        if confirmed:
            holds = self._queue.confirm(holder, confirmed) == len(confirmed)
            counts["sent"] += len(confirmed)
        failed: set[bytes | None] = set()
        for each, result in zip(chosen, results, strict=True):
            if result is None:
                continue
            if each.lane is not None:
                failed.add(each.lane)
            if isinstance(result, NotTried):
                continue
            error = text_of(result)
            if isinstance(result, Undeliverable):
                self._queue.bury(holder, each.seq, error=error)
                counts["dead"] += 1
                self._observers(MessageDead("", each.message.topic, each.seq, error))
            else:
                self._queue.delay(holder, each.seq, pause=pause_after(each.attempts), error=error)
                counts["delayed"] += 1
                attempt = each.attempts + 1
                _log.warning(
                    "message %d of %s was not sent (%s), attempt %d", each.seq, each.message.topic, error, attempt
                )
        return failed if holds else None


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
    counts: Counter[str] = Counter()

    def step(limit: int) -> BatchResult:
        report = relay.run_once(limit)
        if report is None:
            return BatchResult(0, more=False)
        counts.update(sent=report.sent, delayed=report.delayed, dead=report.dead)
        return BatchResult(report.sent + report.delayed + report.dead, more=True)

    report = drain.run(step)
    return RelayReport(counts["sent"], counts["delayed"], counts["dead"], report.shrunk, report.finished)


class Stop:
    """Ends a relay process between two attempts. A signal handler may call `set`: it takes no lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.is_set = False

    def set(self) -> None:
        """End the run after the attempt that is under way."""
        self.is_set = True
        os.write(self._write, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for this long, or until the end of the run."""
        select.select([self._read], [], [], seconds)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)


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
            report = relay.run_once(stopped=lambda: stop.is_set)
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
            total = replace(
                total,
                sent=total.sent + report.sent,
                delayed=total.delayed + report.delayed,
                dead=total.dead + report.dead,
            )
    return total


class ExpiresBoth:
    """Implements `Expiry`: records first, then messages that were kept after they were sent."""

    def __init__(self, records: Expiry | None, messages: Expiry) -> None:
        self._every = [each for each in (records, messages) if each is not None]

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Remove up to `limit` of each that expired by this horizon, and return how many."""
        return sum(each.sweep(horizon=horizon, limit=limit) for each in self._every)


__all__ = ["ExpireReport", "ExpiresBoth", "Relay", "RelayReport", "Route", "SendFailed", "Stop", "relay", "run"]

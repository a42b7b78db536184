"""`relay`, which sends the messages of an outbox, and the commands about messages that it cannot send (`outbox`)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Final

import click

from flask_idempotency.cli import Commands, cli
from flask_idempotency.cli.context import NOT_IN_ORDER, Output, confirm, word_options
from flask_idempotency.cli.output import Cell, Style, Styled, table
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.outbox import OutboxRow
from flask_idempotency.maintenance.relay import WAIT_SECONDS, RelayReport, Stop, run
from flask_idempotency.operations.outbox import CHANGES, change, retry_failed, unsent
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.operations.times import format_duration
from flask_idempotency.web.operator import outbox_of, state

REPORT_SECONDS: Final = 5.0
"""How often a relay reports to the task log, so that `doctor` sees that one runs."""

MOST_ROWS: Final = 10_000
"""The most messages that one command reads."""

_LEFT: Final = {
    "held": "that a relay is sending",
    "due": "due already",
    "delayed": "not due yet and never failed",
}
"""What `retry --topic` leaves, by the state of the message."""


@cli.command("relay")
@click.option("--once", is_flag=True, help="Try each message that is due now once, and end: for cron.")
@click.option(
    "--poll",
    type=click.FloatRange(0.05, 60),
    metavar="SECONDS",
    default=0.5,
    show_default=True,
    help="How often to look for messages while none is due.",
)
def relay_command(once: bool, poll: float) -> Output:
    """Send the messages of the outbox until SIGTERM.

    Changes the outbox: it deletes the messages that were confirmed. Run it as a process of its own, next to your web workers;
    you may run several. SIGTERM ends it after the attempt that is under way, which takes 20 seconds at most. Exits with 1 if
    the table is missing, and with 2 if the database does not respond at the start.

    \b
    Example:
      $ flask idempotency relay
    """
    stop = Stop()
    with ExitStack() as ends:
        for number in (signal.SIGTERM, signal.SIGINT):
            ends.callback(signal.signal, number, signal.signal(number, lambda *_: stop.set()))
        services = outbox_of()
        if faults := services.table.faults():
            raise Refused(" ".join(faults))
        relay = services.relay()
        if once:
            total = relay.once(stopped=lambda: stop.is_set, wait=WAIT_SECONDS)
            _reporter()(total)
        else:
            total = run(relay, stop=stop, poll=poll, on_pass=_reporter())
    return Output(_counted(total), [f"Sent: {total.sent}. Delayed: {total.delayed}. Dead: {total.dead}."])


def _reporter() -> Callable[[RelayReport], None]:
    """Return a function that tells the task log, now and then, what the relay did since."""
    built = state().built
    task_log = None if built is None else built.tasks
    since, last = RelayReport(), -REPORT_SECONDS

    def report(done: RelayReport) -> None:
        nonlocal since, last
        since += done
        if task_log is None or time.monotonic() - last < REPORT_SECONDS:
            return
        last = time.monotonic()
        # The outbox may be in another database, and its messages must not wait for this one.
        with suppress(StoreUnavailable):
            task_log.report("relay", json.dumps({**_counted(since), "finished": True}, separators=(",", ":")))
            since = RelayReport()

    return report


def _counted(report: RelayReport) -> dict[str, int]:
    return {"sent": report.sent, "delayed": report.delayed, "dead": report.dead}


outbox: Final = Commands("outbox", help="Show, retry and discard messages that are not sent.")
cli.add_command(outbox)


@outbox.command("list")
@click.option("--dead", is_flag=True, help="Only messages that can never be sent.")
@click.option(
    "--limit", type=click.IntRange(1, MOST_ROWS), default=50, show_default=True, help="Show at most this many."
)
def list_command(dead: bool, limit: int) -> Output:
    """List the messages that are not sent, dead and failed ones first.

    Read-only. Shows no body, key or header. Exits with 1 if a message is dead.

    \b
    Example:
      $ flask idempotency outbox list --dead
    """
    services = outbox_of()
    rows = unsent(services.table, services.fault_of, limit=limit, dead=dead)
    counts, topics = services.table.counts(), services.table.topics()
    lines = [*table(map(_line, rows)), f"Waiting: {counts.waiting}. Dead: {counts.dead}."]
    shown = {**asdict(counts), "topics": list(map(asdict, topics)), "messages": list(map(asdict, rows))}
    return Output(shown, lines, NOT_IN_ORDER if counts.dead else 0)


def _line(row: OutboxRow) -> dict[str, Cell]:
    return {
        "seq": str(row.seq),
        "topic": row.topic,
        "state": Styled("dead", Style.BAD) if row.state == "dead" else row.state,
        "failed": str(row.attempts),
        "age": format_duration(row.age),
        "behind": str(row.behind),
        "error": row.error or "",
    }


@outbox.command("retry")
@click.argument("seq", type=click.IntRange(1), required=False)
@click.option(
    "--topic",
    metavar="TOPIC",
    help="Retry every message of this topic whose last attempt failed, at most 10,000 in one run.",
)
@word_options(required=False)
def retry_command(seq: int | None, topic: str | None, word: AuditNote) -> Output:
    """Send a message again now, or every failed one of a topic.

    Changes the outbox: dead messages live again, and those that wait for their next attempt are due. Refuses while a relay
    sends the message. The receiver may get it a second time, under the same id.

    With `--topic`, it leaves and counts those that a relay is sending, that are due already, or that have not failed.

    \b
    Example:
      $ flask idempotency outbox retry 4711 --reason "the receiver is repaired"
    """
    if (seq is None) == (topic is None):
        raise click.UsageError("Give the number of one message, or --topic.")
    if seq is not None:
        return _changed("retry", seq, word)
    services = outbox_of()
    done = retry_failed(services.table, services.observers, topic, word, limit=MOST_ROWS)
    left = {name: done.left.get(name, 0) for name in _LEFT}
    parts = [f"Messages of {topic} retried: {len(done.retried)}."]
    if done.left:
        parts.append(f"Left: {', '.join(f'{left[name]} {text}' for name, text in _LEFT.items() if left[name])}.")
    if done.more:
        parts.append("There may be more: run this again.")
    shown = {"topic": topic, "retried": list(done.retried), "left": left}
    return Output(shown, [" ".join(parts)])


@outbox.command("discard")
@click.argument("seq", type=click.IntRange(1))
@word_options(required=True)
def discard_command(seq: int, yes: bool, word: AuditNote) -> Output:
    """Delete a message that cannot be sent.

    Changes the outbox: the message is lost, and later ones of its topic and key are sent. Refuses for a message that no
    attempt has failed for, and while a relay sends it. You confirm first.

    \b
    Example:
      $ flask idempotency outbox discard 4711 --reason "refunded by hand"
    """
    outbox_of()  # without one, ask nothing
    confirm("Delete it?", "The message will be lost.", yes=yes)
    return _changed("discard", seq, word)


def _changed(verb: str, seq: int, word: AuditNote) -> Output:
    services, (past, _) = outbox_of(), CHANGES[verb]
    topic = change(services.table, services.observers, verb, seq, word)
    return Output({"seq": seq, "topic": topic, "verb": past}, [f"Message {seq} of {topic}: {past}."])

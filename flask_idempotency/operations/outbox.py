"""Show what an outbox holds, and retry or discard its messages: for the commands `outbox` and the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from flask_idempotency.engine.events import Event, MessageSettled
from flask_idempotency.engine.outbox import OutboxRow
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.records import AuditNote, Refused

if TYPE_CHECKING:
    from flask_idempotency.stores.sql.outbox import OutboxTable  # needs a package that is optional


def has_failed(row: OutboxRow) -> bool:
    """Return whether the last attempt of this message failed, and no relay sends it now."""
    return row.state == "dead" or (row.state == "delayed" and row.error is not None)


def unsent(
    table: OutboxTable, fault_of: Callable[[str], str | None], *, limit: int, dead: bool = False
) -> list[OutboxRow]:
    """Return the first `limit` messages: dead ones first, then those whose last attempt failed. `dead`: only those.

    `fault_of` returns why no relay of this process takes a topic, or None. Raises `StoreUnavailable` if the database does
    not answer.
    """
    rows = table.rows(limit=limit, only_dead=dead)
    return [row if row.error is not None else replace(row, error=fault_of(row.topic)) for row in rows]


CHANGES: Final = {
    "retry": ("retried", "A relay is sending this message or has sent it, or there is no message of this number."),
    "discard": (
        "discarded",
        "Only a message whose last attempt failed can be discarded, and a relay must not be sending it. See `flask "
        "idempotency outbox list`.",
    ),
}
"""What can be done with a message: how it is published, and why it may be refused."""


def change(table: OutboxTable, publish: Callable[[Event], object], verb: str, seq: int, note: AuditNote) -> str:
    """Do this with a message, publish it, and return its topic. Raises `Refused` if the message stays as it is.

    Raises `StoreUnavailable` if the database does not answer.
    """
    past, refusal = CHANGES[verb]
    topic = table.retry(seq) if verb == "retry" else table.discard(seq)
    if topic is None:
        raise Refused(refusal)
    publish(MessageSettled("", topic, seq, past, **asdict(note)))
    return topic


@valueclass(frozen=True, slots=True)
class RetryReport:
    """Which messages are due now. `left` counts the others by their state: `held`, `due` or `delayed`."""

    retried: tuple[int, ...]
    left: Mapping[str, int]
    more: bool
    """There may be more of them."""


def retry_failed(
    table: OutboxTable, publish: Callable[[Event], object], topic: str | None, note: AuditNote, *, limit: int
) -> RetryReport:
    """Let the failed messages of this topic be sent now; None is every topic. Looks at `limit` messages at most.

    Publishes each. Raises `StoreUnavailable` if the database does not answer.
    """
    left, done, rows = Counter[str](), list[int](), table.rows(limit=limit, topic=topic)
    for row in rows:
        if not has_failed(row):
            left[row.state] += 1
        # Another operator may have settled it since.
        elif table.retry(row.seq) is None:
            left["held"] += 1
        else:
            publish(MessageSettled("", row.topic, row.seq, CHANGES["retry"][0], **asdict(note)))
            done.append(row.seq)
    return RetryReport(tuple(done), dict(left), len(rows) == limit)

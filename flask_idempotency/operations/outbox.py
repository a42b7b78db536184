"""Sum up the messages of an outbox by topic, and retry the failed ones: for the commands `outbox` and the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flask_idempotency.engine.outbox import OutboxCounts, OutboxRow
from flask_idempotency.engine.values import valueclass

if TYPE_CHECKING:
    from flask_idempotency.stores.sql.outbox import OutboxTable  # needs a package that is optional

MOST_READ: Final = 1000
"""Messages that a summary reads: the dead ones first, then those whose last attempt failed."""


@valueclass(frozen=True, slots=True)
class TopicView:
    """The messages of one topic that are not sent. Ages are seconds by the database's clock."""

    topic: str
    dead: int
    failing: int
    """Their last attempt failed, and they are tried again."""
    waiting: int
    """No attempt has failed for them."""
    oldest: float
    error: str
    """What stopped most of them. Empty: nothing did."""


@valueclass(frozen=True, slots=True)
class OutboxView:
    """What an outbox holds: no body, key or header."""

    counts: OutboxCounts
    topics: tuple[TopicView, ...]
    """Those with dead and failing messages first."""
    rows: tuple[OutboxRow, ...]
    whole: bool
    """False: there are more messages than the topics count."""


def has_failed(row: OutboxRow) -> bool:
    """Return whether the last attempt of this message failed, and no relay sends it now."""
    return row.state == "dead" or (row.state == "delayed" and row.error is not None)


def outbox_view(
    table: OutboxTable, fault_of: Callable[[str], str | None], *, limit: int, dead: bool = False
) -> OutboxView:
    """Return what this outbox holds, with its first `limit` messages. `dead`: only those that can never be sent.

    `fault_of` returns why no relay of this process takes a topic, or None. Raises `StoreUnavailable` if the database does
    not answer.
    """
    most = max(limit, MOST_READ)
    found = [
        row if row.error is not None else replace(row, error=fault_of(row.topic))
        for row in table.rows(limit=most, only_dead=dead)
    ]
    of = dict[str, list[OutboxRow]]()
    for row in found:
        of.setdefault(row.topic, []).append(row)
    topics = tuple(
        sorted((_topic(name, rows) for name, rows in of.items()), key=lambda each: (-each.dead, -each.failing))
    )
    return OutboxView(table.counts(), topics, tuple(found[:limit]), len(found) < most)


def _topic(name: str, rows: Sequence[OutboxRow]) -> TopicView:
    dead, failing = sum(row.state == "dead" for row in rows), sum(has_failed(row) for row in rows)
    errors = Counter(row.error for row in rows if row.error)
    oldest = max(row.age for row in rows)
    return TopicView(
        name, dead, failing - dead, len(rows) - failing, oldest, errors.most_common(1)[0][0] if errors else ""
    )


@valueclass(frozen=True, slots=True)
class RetryReport:
    """Which messages are due now. `left` counts the others by their state: `held`, `due` or `delayed`."""

    retried: tuple[int, ...]
    left: Mapping[str, int]
    more: bool
    """There may be more of them."""


def retry_failed(
    table: OutboxTable, topic: str | None, retried: Callable[[OutboxRow], None], *, limit: int
) -> RetryReport:
    """Let the failed messages of this topic be sent now; None is every topic. Looks at `limit` messages at most.

    Calls `retried` after each. Raises `StoreUnavailable` if the database does not answer.
    """
    left, done, rows = Counter[str](), list[int](), table.rows(limit=limit, topic=topic)
    for row in rows:
        if not has_failed(row):
            left[row.state] += 1
        # Another operator may have settled it since.
        elif table.retry(row.seq) is None:
            left["held"] += 1
        else:
            retried(row)
            done.append(row.seq)
    return RetryReport(tuple(done), dict(left), len(rows) == limit)

"""The pages about messages: those that an outbox has not sent, and those that inboxes and tasks got."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from flask import current_app, request

from flask_idempotency.console import charts
from flask_idempotency.console.access import Stopped
from flask_idempotency.console.actions import Invalid, Page, counted, form, posted, reason_of
from flask_idempotency.console.pages import SPANS, span_of
from flask_idempotency.console.visit import Visit
from flask_idempotency.engine.events import MessageSettled
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.outbox import TOPIC, OutboxRow
from flask_idempotency.operations.activity import Figures, summary
from flask_idempotency.operations.outbox import outbox_view, retry_failed
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.web import operator, policy_table

ROWS: Final = 50
"""Messages that the page lists."""
MOST_RETRIED: Final = 500
"""Messages that one form looks at: each that is retried is a call of the database."""


def outbox(visit: Visit) -> str:
    """Show what an outbox has not sent, by topic."""
    visit.admit_to_all()
    if current_app.extensions.get("idempotency_outbox") is None:
        return visit.render("outbox.html", view=None, change=False)
    services = operator.outbox_of()
    view = outbox_view(services.table, services.fault_of, limit=ROWS)
    return visit.render("outbox.html", view=view, change=visit.may("outbox"))


def retry(visit: Visit) -> Page:
    """Let one message, the failed ones of a topic, or all failed ones be sent now."""
    visit.admit_to_all()
    visit.admit_to("outbox")
    fields = posted(visit)
    seq, topic = _named(fields)
    services = operator.outbox_of()

    def do(fields: Mapping[str, str]) -> Page:
        note = counted(visit, reason_of(fields))

        def published(row: OutboxRow) -> None:
            _publish(row.topic, row.seq, "retried", note)

        if seq is not None:
            topic_of = services.table.retry(seq)
            if topic_of is None:
                raise Refused(operator.NO_MESSAGE)
            _publish(topic_of, seq, "retried", note)
            return visit.render("outbox_done.html", said=f"Message {seq} is due now.", more=False)
        done = retry_failed(services.table, topic or None, published, limit=MOST_RETRIED)
        said = f"Messages that are due now: {len(done.retried):,}."
        return visit.render("outbox_done.html", said=said, more=done.more)

    return form(visit, "outbox_change.html", fields, do, verb="retry", seq=seq, topic=topic)


def discard(visit: Visit) -> Page:
    """Delete one message whose last attempt failed."""
    visit.admit_to_all()
    visit.admit_to("outbox")
    fields = posted(visit)
    seq, _ = _named(fields)
    if seq is None:
        raise Stopped(400, "That is no message", "Choose one on the page of the outbox. Nothing was changed.")

    def do(fields: Mapping[str, str]) -> Page:
        reason = reason_of(fields)
        if fields.get("typed") != str(seq):
            raise Invalid("Type the number of the message, exactly. Nothing was changed.")
        note = counted(visit, reason)
        topic = operator.outbox_of().table.discard(seq)
        if topic is None:
            raise Refused(operator.MESSAGE_NOT_FAILED)
        _publish(topic, seq, "discarded", note)
        return visit.render("outbox_done.html", said=f"Message {seq} is deleted.", more=False)

    return form(visit, "outbox_change.html", fields, do, verb="discard", seq=seq, topic="")


def _named(fields: Mapping[str, str] | None) -> tuple[int | None, str]:
    """Return the number or the topic that the address or the form names."""
    named = request.args if fields is None else fields
    seq, topic = named.get("seq", ""), named.get("topic", "")
    if not re.fullmatch(r"(?:[1-9][0-9]{0,17})?", seq, re.ASCII) or (topic and not TOPIC.fullmatch(topic)):
        raise Stopped(400, "That is no message", "Choose one on the page of the outbox. Nothing was changed.")
    return (int(seq) if seq else None), topic


def _publish(topic: str, seq: int, verb: str, note: AuditNote) -> None:
    operator.outbox_of().observers(MessageSettled("", topic, seq, verb, note.actor, note.reason))


def messages(visit: Visit) -> str:
    """Show what inboxes and tasks did with their messages, beside their policies."""
    visit.admit_to_all()
    span, log = span_of("24h"), operator.built().activity
    owner = owner_mark(operator.settings().namespace)
    found = {} if log is None else summary(log, owner, seconds=SPANS[span]).endpoints
    none = Figures({})
    return visit.render(
        "messages.html",
        rows=[
            (each, policy_table.consumer_values(each), found.get(each.name, none)) for each in policy_table.consumers()
        ],
        abandoned=policy_table.abandoned,
        resolvers=operator.state().loaders.resolvers,
        outcome_words=charts.WORDS,
        counted=log is not None,
        span=span,
        spans=SPANS,
    )

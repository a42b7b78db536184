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
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.outbox import TOPIC
from flask_idempotency.operations.activity import Figures, summary
from flask_idempotency.operations.outbox import CHANGES, change, outbox_view, retry_failed
from flask_idempotency.web import operator, policy_table

ROWS: Final = 50
"""Messages that the page lists."""
SEQ: Final = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
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


def outbox_change(visit: Visit, verb: str) -> Page:
    """Send a message now, the failed ones of a topic or all failed ones; or discard one message."""
    visit.admit_to_all()
    visit.admit_to("outbox")
    fields = posted(visit)
    named = request.args if fields is None else fields
    seq, topic = named.get("seq", ""), named.get("topic", "")
    if verb not in CHANGES or not (SEQ.fullmatch(seq) if verb == "discard" or seq else TOPIC.fullmatch(topic or "-")):
        raise Stopped(400, "That is no message", "Choose one on the page of the outbox. Nothing was changed.")
    services = operator.outbox_of()

    def do(fields: Mapping[str, str]) -> Page:
        reason = reason_of(fields)
        if verb == "discard" and fields.get("typed") != seq:
            raise Invalid("Type the number of the message, exactly. Nothing was changed.")
        table, publish, note = services.table, services.observers, counted(visit, reason)
        if not seq:
            done = retry_failed(table, publish, topic or None, note, limit=MOST_RETRIED)
            return visit.render("outbox_done.html", said=f"Messages retried: {len(done.retried):,}.", more=done.more)
        change(table, publish, verb, int(seq), note)
        return visit.render("outbox_done.html", said=f"Message {seq}: {CHANGES[verb][0]}.", more=False)

    return form(visit, "outbox_change.html", fields, do, verb=verb, seq=seq, topic=topic)


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

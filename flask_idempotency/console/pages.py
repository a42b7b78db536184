"""The pages that only read: overview, records, one record, tenants, endpoints, messages, outbox and health."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final
from urllib.parse import urlencode

from flask import Response, current_app, request

from flask_idempotency.activity import FLUSH_SECONDS
from flask_idempotency.assembly import identities
from flask_idempotency.console import charts
from flask_idempotency.console.access import Action, Stopped, may
from flask_idempotency.console.visit import FRESH_SECONDS, HANDLE, ConsoleResponse, Visit
from flask_idempotency.console.wording import now_of, readable
from flask_idempotency.engine.activity import CALLERS
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.journal import EMPTY
from flask_idempotency.engine.keys import LONGEST_NAME, owner_mark
from flask_idempotency.engine.operations import MESSAGE
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.quota import LIMITS, Quota
from flask_idempotency.engine.tasks import TaskLog, late_tasks
from flask_idempotency.operations import browse
from flask_idempotency.operations.activity import Figures, summary
from flask_idempotency.operations.admin import TenantUsage, quota_show
from flask_idempotency.operations.examination import keep_health, kept_health
from flask_idempotency.operations.outbox import unsent
from flask_idempotency.operations.records import SHORT, Condition, RecordView, Refused, paused_among, short_ids
from flask_idempotency.operations.report import report
from flask_idempotency.operations.times import epoch_of, seconds_of
from flask_idempotency.web import operator, policy_table
from flask_idempotency.web.doctor import run_checks
from flask_idempotency.web.janitor import is_known

SPANS: Final = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0, "30d": 30 * 86400.0}
"""The time spans of the charts, in seconds."""

MOST_URGENT: Final = 5
"""Quarantined records that the overview names."""
MOST_PAUSED: Final = 200
"""Expired leases whose journals the overview reads."""
MOST_TENANTS: Final = 50
"""Tenants on one page."""
MOST_MESSAGES: Final = 50
"""Messages that the page of the outbox lists."""
MOST_CHOICES: Final = 200
"""Tenants that a list offers."""
LONGEST_CHOICE: Final = 80
"""Characters of a tenant that a list offers."""
ORDERS: Final = ("", "urgent", "newest")
"""The orders of a list. Empty: the newest first of completed records, and otherwise those that need a person most."""
FIELDS: Final = ("state", "endpoint", "tenant", "older", "from", "to", "order", "id")
"""The fields of the filter of a list, without the box `no_tenant`."""
PSEUDONYM: Final = re.compile(r"[a-z2-7]{24}")

BULK: Final[Mapping[Action, frozenset[Condition]]] = {
    "settle": frozenset({Condition.QUARANTINED}),
    "release": browse.UNFINISHED,
}
"""What can be done to a whole list, and to records in which states."""


def unknown(visit: Visit, rest: str = "") -> Response:
    """Answer every other address under the console's, and a form for a page that takes none."""
    visit.admit()
    if request.method != "GET":
        raise Stopped(405, "This page takes no form", "Nothing was changed.", headers={"Allow": "GET, HEAD"})
    raise Stopped(404, "There is no such page", "Start at the overview, or at Records.")


# Overview.


def overview(visit: Visit) -> str:
    visit.admit_to_all()
    parts, span, owner = operator.built(), span_of("1h"), owner_mark(operator.settings().namespace)
    began = time.perf_counter()
    now = parts.tasks.now() if parts.tasks is not None else None
    took = time.perf_counter() - began
    counts, completed, paused, urgent, states = None, None, 0, list[RecordView](), None
    if parts.recovery is not None:
        counts, completed = parts.recovery.counts(), parts.recovery.about_completed()
        paused = paused_among(parts.recovery, parts.journals, most=MOST_PAUSED) if counts.lapsed else 0
        numbers = (counts.quarantined, max(counts.lapsed - paused, 0), paused or None, counts.in_flight, completed)
        # Without the states that the store cannot count.
        each_state = zip(Condition, numbers, strict=True)
        states = charts.shares([(each.value, n, each.tone) for each, n in each_state if n is not None])
        if counts.quarantined:
            urgent = _seen(visit, browse.oldest_quarantined(parts.recovery, limit=MOST_URGENT))
    kept = None if parts.task_log is None else kept_health(parts.task_log, owner)
    log = parts.activity
    shown = None if log is None else summary(log, owner, seconds=SPANS[span])
    return visit.render(
        "overview.html",
        counts=counts,
        completed=completed,
        paused=paused,
        states=states,
        urgent=urgent,
        ids=short_ids(view.handle for view in urgent),
        janitor=None if parts.tasks is None else _janitor(parts.tasks),
        health=kept,
        look=kept is None or kept.ago > FRESH_SECONDS,
        outcome_words=charts.WORDS,
        flush_seconds=FLUSH_SECONDS,
        took=took,
        now=now,
        span=span,
        spans=SPANS,
        activity=shown,
        outcomes=None if shown is None else charts.stacked(shown),
        latency=None if shown is None else charts.latency(shown),
    )


def span_of(default: str) -> str:
    span = request.args.get("span", default)
    if span not in SPANS:
        raise Stopped(400, "There is no such time span", f"Choose one of {', '.join(SPANS)}.")
    return span


def _seen(visit: Visit, found: Sequence[SeenRecord]) -> list[RecordView]:
    """Return what to show of these records. An operator who may list records may not see each of them."""
    return [view for each in found if visit.sees(each, view := operator.show_of(each)) is not None]


def _janitor(tasks: TaskLog) -> dict[str, Any]:
    """Return when each task last ran, also those that should and never did, and which are late."""
    last, due, interval = tasks.reports(), operator.state().due_tasks, operator.settings().heartbeat_interval
    late = [] if interval is None else late_tasks(last, due, heartbeat_interval=interval)
    never: dict[str, float | None] = {each.task: None for each in late}
    return {"late": late, "tasks": sorted({**never, **{name: each.ago for name, each in last.items()}}.items())}


# Records.


def filtered(visit: Visit) -> tuple[browse.Browsing, dict[str, str]]:
    """Return what the filter in the address chooses, and its fields that are not empty. Stops a faulty one."""
    args = {name: _argument(name) for name in FIELDS}
    given = args["id"].lower()
    if given and not SHORT.fullmatch(given):
        raise Stopped(
            400, "That is no id of a record", "An id has letters and digits, 4 at least. It is no client's key."
        )
    conditions = frozenset(each for each in Condition if each.value == args["state"])
    if args["state"] and not conditions:
        known = ", ".join(each.value for each in Condition)
        raise Stopped(400, "There is no such state", f"Choose one of: {known}.")
    if args["order"] not in ORDERS:
        raise Stopped(400, "There is no such order", f"Choose one of: {', '.join(filter(None, ORDERS))}.")
    no_tenant = request.args.get("no_tenant") == "1"
    # The list shows a pseudonym in place of a hashed name, so the filter takes one too.
    stored = visit.everything and operator.settings().hash_identities and PSEUDONYM.fullmatch(args["tenant"])
    wanted = browse.Browsing(
        conditions=conditions or browse.UNFINISHED,
        tids=_whose(visit, "" if stored else args["tenant"], no_tenant=no_tenant),
        endpoint=args["endpoint"] or None,
        older_than=_seconds(args["older"]),
        beginning=given,
        since=_time(args["from"]),
        until=_time(args["to"]),
        stored_tenant=args["tenant"] if stored else None,
        newest=args["order"] == "newest" or (not args["order"] and args["state"] == Condition.COMPLETED.value),
    )
    return wanted, {name: value for name, value in args.items() if value} | ({"no_tenant": "1"} if no_tenant else {})


def look(visit: Visit, wanted: browse.Browsing, place: browse.Place) -> tuple[browse.BrowsePage, list[RecordView]]:
    """Return a page of this list, and what the operator may see of it."""
    page = browse.browse(
        operator.recovery(),
        wanted,
        place,
        journals=operator.built().journals,
        identities=identities(operator.settings()),
    )
    return page, _seen(visit, page.found)


def records(visit: Visit) -> str | Response:
    visit.admit()
    if HANDLE.fullmatch(given := request.args.get("id", "").strip().lower()):
        return see_other(visit.url("record", handle=given))
    wanted, kept = filtered(visit)
    cursor, every = request.args.get("cursor", ""), identities(operator.settings())
    try:
        place = browse.place_of(cursor, wanted, [who.console for who in every]) if cursor else browse.Place()
    except Refused as refused:
        raise Stopped(400, "There is no such page of the list", str(refused)) from None
    page, views = look(visit, wanted, place)
    # An operator of some tenants chooses from these, and others from those of the records on this page.
    names = visit.tenants
    if names is None:
        met = {view.tenant for view in views if view.tenant and len(view.tenant) <= LONGEST_CHOICE}
        names = [each for each in met if each == readable(each).strip()]
    more = None
    if page.next is not None:
        more = _address(visit, {**kept, "cursor": browse.cursor_of(page.next, wanted, operator.identity().console)})
    return visit.render(
        "records.html",
        views=views,
        ids=short_ids(view.handle for view in views),
        args=dict.fromkeys(FIELDS, "") | kept,
        no_tenant="no_tenant" in kept,
        newest=wanted.newest,
        conditions=[each.value for each in Condition],
        endpoints=sorted({*endpoints_of(), *filter(None, [wanted.endpoint])}),
        tenants=sorted(names)[:MOST_CHOICES],
        tenant_url=lambda name: _address(visit, {**kept, "tenant": name}),
        bulk=[
            (verb, visit.url("bulk", verb=verb) + f"?{urlencode(kept)}")
            for verb, states in BULK.items()
            for first in [view for view in views if view.condition in states][:1]
            if not cursor and may(visit.mounted.authorize, verb, first)
        ],
        page=page,
        more=more,
        first=bool(cursor),
        first_page=_address(visit, kept),
    )


def _address(visit: Visit, fields: dict[str, str]) -> str:
    """Return the address of the list with this filter. `url_for` takes a field `endpoint` for its own argument."""
    return visit.url("records") + ("?" + urlencode(fields) if fields else "")


def _argument(name: str) -> str:
    """Return a field of the filter. Stops one that no record can match."""
    value = request.args.get(name, "").strip()
    if len(value) > LONGEST_NAME or not value.isprintable():
        raise Stopped(400, "That is no filter", f"{name} must be one line of at most {LONGEST_NAME} characters.")
    return value


def _seconds(typed: str) -> float:
    seconds = seconds_of(typed.lower()) if typed else 0.0
    if seconds is None:
        raise Stopped(400, "That is no age", "Write a number of seconds, or one with a unit: 90s, 15m, 2h, 3d.")
    return seconds


def _whose(visit: Visit, tenant: str, *, no_tenant: bool) -> Sequence[bytes | None]:
    """Return the ids of the tenants to list. A tenant that is not the operator's has none, like one without records."""
    allowed = visit.tenants
    if allowed is None:
        return (None,) if not tenant and not no_tenant else tuple(operator.tids(tenant or None))
    if no_tenant or (tenant and tenant not in allowed):
        return ()
    return tuple(chain.from_iterable(operator.tids(each) for each in ([tenant] if tenant else sorted(allowed))))


def _time(typed: str) -> float | None:
    seconds = epoch_of(typed) if typed else None
    if typed and seconds is None:
        raise Stopped(400, "That is no time", "Write a date or a time in UTC: 2026-01-15, or 2026-01-15T09:30.")
    return seconds


def see_other(address: str) -> Response:
    response = ConsoleResponse(status=303)
    response.headers["Location"] = address
    return response


def endpoints_of() -> list[str]:
    """Return what records may be of, for a filter."""
    found = {name for name, method in operator.policies().pairs() if not operator.policies().look(name, method).exempt}
    return sorted(found | {each.name for each in policy_table.consumers()})


# One record.


def record(visit: Visit, handle: str) -> str:
    """Show one record; or what became of one that is gone, if the audit trail knows."""
    key, found, view = visit.find(handle)
    audit = operator.built().audit
    entries = [] if audit is None else list(audit.entries(key))
    if found is None or view is None:
        if not entries:
            raise visit.not_found()
        episodes = browse.timeline(None, Policy(), journal=EMPTY, steps=(), audit=entries)
        return visit.render("gone.html", handle=handle, episodes=episodes, now=None)
    about = found.record.info
    policy = operator.policy_for(about)
    journal, steps = operator.recorded_of(found)
    return visit.render(
        "record.html",
        view=view,
        now=now_of(view),
        episodes=browse.timeline(found.record, policy, journal=journal, steps=steps, audit=entries),
        audit=audit is not None,
        known=is_known(current_app, operator.state().loaders.operations, about),
        abandoned=policy_table.abandoned(policy),
        failed=policy_table.failed(policy),
        policy=_policy_lines(about.operation, about.method),
        said=browse.resolver_of(audit, found, policy),
        settle=view.condition is Condition.QUARANTINED and may(visit.mounted.authorize, "settle", view),
        release=may(visit.mounted.authorize, "release", view),
        foreign=not found.record.token.startswith(operator.owners()),
    )


def _policy_lines(endpoint: str, method: str) -> list[tuple[str, str, str]]:
    """Return each value of the policy in force, in words, and where it was written."""
    if method == MESSAGE:
        each = operator.state().loaders.operations.get(endpoint)
        values = {} if each is None else policy_table.consumer_values(each)
        written: list[tuple[str, Any, str]] = [(name, value, "") for name, value in values.items()]
    else:
        known = (endpoint, method) in operator.policies().pairs()
        written = policy_table.written(operator.policies().explain(endpoint, method)) if known else []
    return [(name, policy_table.spelled(name, value), origin) for name, value, origin in written]


# Tenants.


def tenants(visit: Visit) -> str:
    visit.admit_to_all()
    name, after = _argument("tenant"), request.args.get("after", "")
    if not re.fullmatch(r"(?:[0-9a-f]{32})?", after):
        raise Stopped(400, "There is no such page of the list", "Begin at Tenants.")
    ledger, configured, parts = operator.ledger_of(), operator.settings().quota, 1
    if name:
        shown, more = [quota_show(ledger, operator.tids_by_secret(name), name=name)], None
    else:
        names = visit.mounted.tenants.names(ledger.tenants)
        every = list(names)
        begin = bisect_right(every, bytes.fromhex(after))
        page = every[begin : begin + MOST_TENANTS]
        if operator.built().recovery is not None:
            names.update((tid, browse.stored_name(operator.recovery(), tid)) for tid in page if not names[tid])
        shown = [quota_show(ledger, [[tid]], name=names[tid] or tid.hex()) for tid in page]
        more = visit.url("tenants", after=page[-1].hex()) if begin + MOST_TENANTS < len(every) else None
        parts = operator.settings().tenant_shards
        configured = None if configured is None else configured.divided(parts)
    return visit.render(
        "tenants.html",
        tenant=name,
        alias=operator.pseudonym(name) if name and operator.settings().hash_identities else "",
        tenant_url=lambda named: _address(visit, {"tenant": named}),
        rows=[(each, _bars(each, configured)) for each in shown],
        parts=parts,
        counting=operator.counting(),
        not_counting=operator.NOT_COUNTING,
        more=more,
        purge=visit.may("purge"),
    )


def _bars(shown: TenantUsage, configured: Quota | None) -> list[dict[str, Any]]:
    """Return for each limit what the tenant has of it. An operator's limit goes before that of the application."""
    bars = []
    for name, words in LIMITS.items():
        field = name.replace("-", "_")
        by_hand, used = getattr(shown.limits, field), getattr(shown.usage, field)
        limit = by_hand if by_hand is not None or configured is None else getattr(configured, field)
        most = getattr(limit, "count", limit)
        bar = {"words": words, "used": used, "most": most, "share": used / most if most else None}
        bars.append({**bar, "window": getattr(limit, "seconds", None), "by_hand": by_hand is not None})
    return bars


# Endpoints.


def endpoints(visit: Visit) -> str:
    visit.admit_to_all()
    span, log = span_of("7d"), operator.built().activity
    found = None if log is None else report(log, owner_mark(operator.settings().namespace), seconds=SPANS[span])
    counted = {} if found is None else found.endpoints
    made = {} if found is None else policy_table.suggested(found)[1]
    own = f"{request.blueprint}."  # the console's own views are exempt
    rows = [row for row in policy_table.policy_rows(operator.policies()) if not row.endpoint.startswith(own)]
    return visit.render(
        "endpoints.html",
        rows=rows,
        counted=counted,
        abandoned=policy_table.abandoned,
        scope_of=policy_table.scope_of,
        callers={
            name: [(caller, *each.keyed_of(caller)) for caller in CALLERS if each.keyed_of(caller)[1]]
            for name, each in counted.items()
            if each.callers
        },
        suggested={name: some for name, some in made.items() if some},
        span=span,
        spans=SPANS,
        report=found,
    )


# Messages: those that an outbox has not sent, and those that inboxes and tasks got.


def outbox(visit: Visit) -> str:
    """Show what an outbox has not sent, by topic."""
    visit.admit_to_all()
    if current_app.extensions.get("idempotency_outbox") is None:
        return visit.render("outbox.html", counts=None)
    services = operator.outbox_of()
    rows = unsent(services.table, services.fault_of, limit=MOST_MESSAGES)
    counts, topics = services.table.counts(), services.table.topics()
    return visit.render("outbox.html", counts=counts, topics=topics, rows=rows, change=visit.may("outbox"))


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


# Health.


def health(visit: Visit) -> str:
    visit.admit_to_all()
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    report = run_checks(app)
    if (log := operator.built().task_log) is not None:
        # Without a store, or its tables, the page says so itself.
        with suppress(IdempotencyError):
            keep_health(log, owner_mark(operator.settings().namespace), report)
    return visit.render("health.html", report=report)

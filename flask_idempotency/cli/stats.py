"""The commands `stats` and `report`: how many records there are, and what requests did over a time span."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final

import click
from flask import current_app

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import Output, duration, prints_json, wide_option
from flask_idempotency.cli.output import Cell, Line, Style, Styled, ago, clean, say, table
from flask_idempotency.engine import activity as names
from flask_idempotency.engine.activity import percentile
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.operations import activity
from flask_idempotency.operations.examination import kept_health
from flask_idempotency.operations.identity import look
from flask_idempotency.operations.records import Condition, paused_among
from flask_idempotency.operations.report import EndpointReport, as_object, report
from flask_idempotency.operations.times import format_duration, format_edge, moment
from flask_idempotency.web.monitors import shape_in
from flask_idempotency.web.operator import built, needed, policies, recovery, settings, state
from flask_idempotency.web.policy_table import suggested

WATCHED_SPAN: Final = 3600.0
"""What `--watch` shows without `--since`."""

WATCH_SECONDS: Final = 5.0
"""Seconds between two pages. Processes add their counts every ten."""

LINES_AROUND: Final = 5
"""Lines of a page that are no endpoints: the first, the head, the total, how many are left out, and the cursor's."""


def span(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read a time span of activity, and return its seconds."""
    if value is None:
        return None
    seconds = duration(context, parameter, value)
    if not activity.SHORTEST_SPAN <= seconds <= activity.LONGEST_SPAN:
        days = f"{activity.LONGEST_SPAN // 86400}d"
        raise click.BadParameter(
            f"must be from 1m to {days}: the store keeps activity by minute for 24h, and by hour for {days}."
        )
    return seconds


@cli.command("stats")
@click.option("--quick", is_flag=True, help="Leave out the completed records: counting them may take long.")
@click.option(
    "--since",
    callback=span,
    metavar="DURATION",
    help="Show what requests did in this time, by endpoint: 30m, 1h, 24h, 7d.",
)
@click.option(
    "--watch", is_flag=True, help="Show that again every few seconds, until Ctrl-C. Of the last hour by default."
)
@wide_option
def stats_command(quick: bool, since: float | None, watch: bool, wide: bool) -> Output | None:
    """Count the records in each state, and show the last janitor runs.

    With --since or --watch, show the activity of all processes instead: requests by endpoint and outcome, and the percentiles
    of their times. A percentile is an upper bound. The processes add their counts every 10 seconds. With --watch and --json,
    the command prints one object a line. Changes nothing.

    \b
    Example:
      $ flask idempotency stats --since 1h
    """
    if since is not None or watch:
        if quick:
            raise click.UsageError(
                "--quick leaves out completed records, and --since and --watch show none. Remove it."
            )
        return _activity(WATCHED_SPAN if since is None else since, watch=watch, wide=wide)
    if wide:
        raise click.UsageError("--wide goes with --since or --watch.")
    found, parts = recovery(), built()
    if not quick and sys.stderr.isatty():
        say("Counting the completed records; --quick leaves them out.", err=True)
    standing, log, responses = found.counts(), parts.task_log, None if quick else parts.responses
    # None: not requested, or the store cannot tell. Those of completed records include expired ones.
    counted = {
        "completed": None if responses is None else sum(responses.count().values()),
        "data_keys": None if parts.data_keys is None else sum(parts.data_keys.count().values()),
        "tenants": None if parts.ledger is None else len(parts.ledger.tenants()),
    }
    ran = None if parts.tasks is None else parts.tasks.reports()
    changes, paused = None, paused_among(found, parts.journals)
    if log is not None:
        app = current_app._get_current_object()  # type: ignore[attr-defined]
        changes = look(log, shape_in(app, settings(), state().loaders, policies()), note=False).changes
    health = None if log is None else kept_health(log, owner_mark(settings().namespace))
    shown = {
        "standing": asdict(standing),
        **counted,
        "tasks": None if ran is None else {task: {"ago": run.ago, "did": run.facts()} for task, run in ran.items()},
        "identity": None if changes is None else list(map(asdict, changes)),
        "paused": paused,
        "health": None if health is None else asdict(health),
    }
    lines: list[Line] = [
        *_unfinished(standing, paused),
        _count("completed", counted["completed"], "not counted" if quick else "not known"),
        _count("data keys", counted["data_keys"]),
        _count("tenants with a ledger", counted["tenants"]),
        *(clean(f"identity: {each.text} {each.remedy}") for each in changes or ()),
        *_last_runs(ran),
    ]
    if health is not None:
        unknown = "" if health.complete else ", and a check could not be made"
        lines.append(f"health: the console looked {ago(health.ago)}, and found {len(health.faults)} faults{unknown}")
        lines += [Styled(f"  {check}: {text}", Style.BAD) for check, text in health.faults]
    return Output(shown, lines)


def _unfinished(counts: UnfinishedCounts, paused: int) -> Iterator[Line]:
    expired = max(counts.lapsed - paused, 0)
    yield _count("in flight", counts.in_flight)
    for name, number, seconds, style in (
        (Condition.LEASE_EXPIRED.value, expired, counts.lapsed_for if expired else None, Style.WARNING),
        (Condition.PAUSED.value, paused, None if expired else counts.lapsed_for, Style.WARNING),
        ("quarantined", counts.quarantined, counts.quarantined_for, Style.BAD),
    ):
        if name == Condition.PAUSED.value and not number:
            continue
        oldest = "" if seconds is None else f", the oldest for {format_duration(seconds)}"
        yield Styled(_count(name, number) + oldest, style if number else None)


def _last_runs(ran: Mapping[str, TaskReport] | None) -> list[str]:
    if ran is None:
        return ["This store keeps no task log, so it cannot tell whether a janitor runs."]
    if not ran:
        return ["No janitor task has ever reported: start a janitor, or run its tasks by cron."]
    lines = []
    for task, run in sorted(ran.items()):
        did = run.facts()
        # Escaped, because a report comes from a store. Its counts that are 0 tell nothing.
        counts = [
            f"{clean(str(name)).replace('_', ' ')} {clean(str(count))}"
            for name, count in did.items()
            if count and name not in ("finished", "seconds")
        ]
        said = ", ".join([*counts, *(["not finished"] if did.get("finished") is False else [])])
        lines.append(f"{clean(task)}: {ago(run.ago)}" + (f": {said}" if said else ""))
    return lines


def _count(name: str, count: int | None, otherwise: str = "not known") -> str:
    return f"{name}: {otherwise if count is None else count}"


# `--since` and `--watch`.

_RARE: Final = (*("requests", "conflicts", "mismatches", "p95", "replay p50", "replay p95", "replay p99"),)
"""The columns that only a wide table has."""

_MORE_COUNTERS: Final = tuple(
    counter
    for counter in (*names.OUTCOMES, *names.ENDINGS, names.NOT_KEPT)
    if counter not in (names.NEW, names.REPLAYED, names.CONFLICT, names.MISMATCH, names.QUARANTINED)
)
"""The counters that only a wide table shows. The others have a column in any case."""


def _activity(seconds: float, *, watch: bool, wide: bool) -> Output | None:
    """Return the activity of these last seconds; or print it again and again, until Ctrl-C."""
    log = needed(built().activity, "The store of this application keeps no activity.")
    owner = owner_mark(settings().namespace)
    found, old = activity.summary(log, owner, seconds=seconds), ""
    if not watch:
        return Output(activity.as_objects(found), _page(found, wide=wide))
    machine = prints_json()
    terminal = not machine and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    try:
        while True:
            if terminal:
                click.clear()
            if machine:
                say(json.dumps({**activity.as_objects(found), **({"error": old} if old else {})}))
            else:
                lines = shutil.get_terminal_size().lines if terminal else None
                say(*_page(found, wide=wide, lines=lines, old=old), *([] if terminal else [""]))
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)
            try:
                found, old = activity.summary(log, owner, seconds=seconds), ""
            except StoreUnavailable as error:
                old = f"The store does not answer: {error} The numbers are those of {moment(found.now)}."
    except KeyboardInterrupt:
        # This is how a person ends a page that never ends by itself.
        say("")
    return None


def _page(found: activity.Summary, *, wide: bool, lines: int | None = None, old: str = "") -> list[Line]:
    """Return the page. `lines`: those of the terminal, which endpoints beyond would scroll away."""
    notes: list[Line] = [Styled(old, Style.WARNING)] if old else []
    if not found.endpoints:
        return [f"No request with a key was counted in the last {format_duration(found.seconds)}.{why_none()}", *notes]
    if observed := found.total.observed:
        notes.append(f"{observed:,} more with a key were only observed: see `flask idempotency report`.")
    shown = list(found.endpoints.items())
    most = len(shown) if lines is None else max(lines - LINES_AROUND - len(notes), 1)
    rows = [_row(clean(endpoint), figures) for endpoint, figures in shown[:most]]
    if len(shown) > 1:
        rows.append(_row("all", found.total))
    left = [f"{len(shown) - most:,} more endpoints: make the terminal higher."] if len(shown) > most else []
    head = f"Activity of the last {format_duration(found.seconds)}, until {moment(found.now)}:"
    return [head, *table(rows, without=() if wide else (*_RARE, *_MORE_COUNTERS)), *left, *notes]


def why_none() -> str:
    """Return why no activity may have been counted."""
    return " IDEMPOTENCY_ACTIVITY is False here." if settings().activity is False else ""


def _row(name: str, figures: activity.Figures) -> dict[str, Cell]:
    groups, new, replayed = figures.groups, figures.new_times, figures.replayed_times
    quarantined = figures.of(names.QUARANTINED)
    return {
        "endpoint": name,
        "requests": f"{figures.requests:,}",
        "new": f"{groups['new']:,}",
        "replayed": f"{groups['replayed']:,}",
        "refused": f"{figures.of(*activity.REFUSED):,}",
        "conflicts": f"{groups['conflicts']:,}",
        "mismatches": f"{groups['mismatches']:,}",
        "quarantined": Styled(f"{quarantined:,}", Style.BAD) if quarantined else "0",
        **{edge: format_edge(getattr(new, edge), over="> ") for edge in ("p50", "p95", "p99")},
        **{f"replay {edge}": format_edge(getattr(replayed, edge), over="> ") for edge in ("p50", "p95", "p99")},
        **{counter: f"{figures.of(counter):,}" for counter in _MORE_COUNTERS},
    }


# `flask idempotency report`: what enforcing would have done at each endpoint, and the policy that this suggests.

_RARE_OF_REPORT: Final = (
    *("apart p50", "apart p99", "quarantined", "released", "not kept", "bad requests", "missing keys", "not observed"),
)
"""The columns that only a wide table has."""


@cli.command("report")
@click.option(
    "--since",
    callback=span,
    default="7d",
    metavar="DURATION",
    help="The time to look back, 7 days if you leave it out: 1h, 24h, 30d.",
)
@wide_option
def report_command(since: float, wide: bool) -> Output:
    """Report what enforcing would do at each endpoint.

    And suggest its policy, with reasons. In mode observe and warn no request is refused or replayed. Requests of endpoints
    in mode enforce are counted in the same columns: there it has happened. Changes nothing.

    \b
    Example:
      $ flask idempotency report --since 7d
    """
    why = "The store of this application keeps no activity, so there is nothing to report."
    found = report(needed(built().activity, why), owner_mark(settings().namespace), seconds=since)
    known, made = suggested(found)
    shown, length = as_object(found, made), format_duration(found.seconds)
    if not found.endpoints:
        return Output(shown, [f"No request was counted in the last {length}.{why_none()}"])
    rows = (_report_row(name, known.get(name), each) for name, each in found.endpoints.items())
    lines = [
        f"The last {length}, until {moment(found.now)}. In mode observe and warn, no request was refused or replayed:",
        *table(rows, without=() if wide else _RARE_OF_REPORT),
    ]
    callers = [
        {"endpoint": clean(name), "caller": caller, "requests": f"{seen:,}", "with key": f"{keyed:,}"}
        for name, each in found.endpoints.items()
        for caller in names.CALLERS
        for keyed, seen in [each.keyed_of(caller)]
        if seen
    ]
    if callers:
        lines += ["", "The observed requests, by the credential of the caller:", *table(callers)]
    for name, suggestions in made.items():
        lines += ["", Styled(f"{clean(name)}:", Style.HEAD)] if suggestions else []
        for suggestion in suggestions:
            said = "=".join(filter(None, (suggestion.keyword, suggestion.value))) or "note"
            lines.append((Styled(f"{said:<19} ", Style.WARNING), suggestion.reason))
    return Output(shown, lines)


def _report_row(name: str, policy: Policy | None, found: EndpointReport) -> dict[str, str]:
    # An enforced request without a key is counted only where a key is required: then there is no share.
    known = found.callers or (policy is not None and policy.required)
    share = f" ({100 * found.keyed // found.seen} %)" if found.seen and known else ""
    apart = [percentile(found.apart, fraction) for fraction in (0.5, 0.99)]
    median, most = map(format_edge, apart)
    counts = {
        "mismatches": names.MISMATCH,
        "unknown": names.UNKNOWN,
        "quarantined": names.QUARANTINED,
        "released": names.RELEASED,
        "not kept": names.NOT_KEPT,
        "bad requests": names.BAD_REQUEST,
        "missing keys": names.MISSING_KEY,
        "not observed": names.FAILED,
    }
    return {
        "endpoint": clean(name),
        "mode": "-" if policy is None else policy.mode,
        "requests": f"{found.seen:,}",
        "with key": f"{found.keyed:,}{share}",
        "replays": f"{found.of(names.REPLAYED):,}",
        "at once": f"{found.concurrent:,}",
        "apart p50": median,
        "apart p99": most,
        **{column: f"{found.of(counter):,}" for column, counter in counts.items()},
    }

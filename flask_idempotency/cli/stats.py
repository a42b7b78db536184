"""The command `stats`: how many records there are, and with `--since` what requests did over a time span."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from typing import Any, Final

import click
from flask import current_app

from flask_idempotency.assembly import Services
from flask_idempotency.cli import cli
from flask_idempotency.cli.context import as_json_option, duration, exit_on_error, wide_option
from flask_idempotency.cli.output import Cell, Column, Part, Style, Styled, Table, ago, clean, say
from flask_idempotency.engine.activity import EDGES, ENDINGS, NEW, NOT_KEPT, OUTCOMES
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.activity import (
    GROUPS,
    LONGEST_SPAN,
    REFUSED,
    SHORTEST_SPAN,
    Figures,
    Summary,
    as_objects,
    summary,
)
from flask_idempotency.operations.admin import Stats, stats
from flask_idempotency.operations.identity import IdentityChange, look
from flask_idempotency.operations.records import Refused
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.web.monitors import shape_in
from flask_idempotency.web.operator import built, policies, recovery, settings, state

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
    if not SHORTEST_SPAN <= seconds <= LONGEST_SPAN:
        raise click.BadParameter(
            f"must be from 1m to {LONGEST_SPAN // 86400}d: the store keeps activity by minute for 24h, and by hour for "
            f"{LONGEST_SPAN // 86400}d."
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
@as_json_option
def stats_command(quick: bool, since: float | None, watch: bool, wide: bool, as_json: bool) -> None:
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
        _show_activity(WATCHED_SPAN if since is None else since, watch=watch, wide=wide, as_json=as_json)
        return
    if wide:
        raise click.UsageError("--wide goes with --since or --watch.")
    with exit_on_error(as_json=as_json):
        found, parts = recovery(), built()
        if not quick and sys.stderr.isatty():
            say("Counting the completed records; --quick leaves them out.", err=True)
        shown = stats(
            found,
            responses=None if quick else parts.responses,
            data_keys=parts.data_keys,
            ledger=parts.ledger,
            tasks=parts.tasks,
            identity=_identity(parts),
        )
    if as_json:
        say(json.dumps(asdict(shown)))
    else:
        say(*_stats_text(shown, quick=quick))


def _stats_text(shown: Stats, *, quick: bool) -> list[Part]:
    lines: list[Part] = [
        *_unfinished(shown.standing),
        _count("completed", shown.completed, "not counted" if quick else "not known"),
    ]
    lines += [_count("data keys", shown.data_keys), _count("tenants with a ledger", shown.tenants)]
    lines += [clean(f"identity: {each.text} {each.remedy}") for each in shown.identity or ()]
    if shown.tasks is None:
        return [*lines, "This store keeps no task log, so it cannot tell whether a janitor runs."]
    if not shown.tasks:
        return [*lines, "No janitor task has ever reported: start a janitor, or run its tasks by cron."]
    return [
        *lines,
        *(f"{clean(task)}: {ago(run.ago)}{_did(run.did)}" for task, run in sorted(shown.tasks.items())),
    ]


def _identity(parts: Services) -> tuple[IdentityChange, ...] | None:
    if parts.shared_task_log is None:
        return None
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    return look(parts.shared_task_log, shape_in(app, settings(), state().loaders, policies()), note=False).changes


def _unfinished(counts: UnfinishedCounts) -> list[Part]:
    expired = _count("lease expired", counts.lapsed) + _since(counts.lapsed_for)
    quarantined = _count("quarantined", counts.quarantined) + _since(counts.quarantined_for)
    return [
        _count("in flight", counts.in_flight),
        Styled(expired, Style.WARNING if counts.lapsed else None),
        Styled(quarantined, Style.BAD if counts.quarantined else None),
    ]


def _count(name: str, count: int | None, otherwise: str = "not known") -> str:
    return f"{name}: {otherwise if count is None else count}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {format_duration(seconds)}"


def _did(did: Mapping[str, Any]) -> str:
    """Return the counts of a report that are not 0, escaped: a report comes from a store."""
    counts = [
        f"{clean(str(name)).replace('_', ' ')} {clean(str(count))}"
        for name, count in did.items()
        if count and name not in ("finished", "seconds")
    ]
    unfinished = ["not finished"] if did.get("finished") is False else []
    said = ", ".join([*counts, *unfinished])
    return f": {said}" if said else ""


# `--since` and `--watch`.

_ACTIVITY_COLUMNS: Final = (
    Column("endpoint", least=14),
    Column("requests", least=None, rare=True),
    Column("new", least=None),
    Column("replayed", least=None),
    Column("refused", least=None),
    Column("conflicts", least=None, rare=True),
    Column("mismatches", least=None, rare=True),
    Column("quarantined", least=None),
    Column("p50", least=None),
    Column("p95", least=None, rare=True),
    Column("p99", least=None),
    Column("replay p50", least=None, rare=True),
    Column("replay p95", least=None, rare=True),
    Column("replay p99", least=None, rare=True),
)

_MORE_COUNTERS: Final = tuple(
    counter
    for counter in (*OUTCOMES, *ENDINGS, NOT_KEPT)
    if counter not in (NEW, *(counter for counters in GROUPS.values() if len(counters) == 1 for counter in counters))
)
"""The counters that only a wide table shows. The others have a column in any case."""


def _show_activity(seconds: float, *, watch: bool, wide: bool, as_json: bool) -> None:
    """Print the activity of these last seconds, once or until Ctrl-C."""
    page = _page_of_json if as_json else _page_of_text
    try:
        with exit_on_error(as_json=as_json):
            log = built().activity
            if log is None:
                raise Refused("The store of this application keeps no activity.")
            owner = owner_mark(settings().namespace)
            found = summary(log, owner, seconds=seconds)
        if not watch:
            say(*page(found, wide=wide, lines=None))
            return
        terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        old = ""
        while True:
            if terminal and not as_json:
                click.clear()
            say(*page(found, wide=wide, lines=shutil.get_terminal_size().lines if terminal else None, old=old))
            if not terminal and not as_json:
                say("")
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)
            try:
                found, old = summary(log, owner, seconds=seconds), ""
            except StoreUnavailable as error:
                old = f"The store does not answer: {error} The numbers are those of {moment(found.now)}."
    except KeyboardInterrupt:
        if not watch:
            raise
        # This is how a person ends a page that never ends by itself.
        say("")


def _page_of_json(found: Summary, *, wide: bool, lines: int | None, old: str = "") -> list[Part]:
    return [json.dumps({**as_objects(found), **({"error": old} if old else {})})]


def _page_of_text(found: Summary, *, wide: bool, lines: int | None, old: str = "") -> list[Part]:
    """Return the page. `lines`: those of the terminal, which endpoints beyond would scroll away."""
    head = f"Activity of the last {format_duration(found.seconds)}, until {moment(found.now)}:"
    notes: list[Part] = [Styled(old, Style.WARNING)] if old else []
    if not found.endpoints:
        off = " IDEMPOTENCY_ACTIVITY is False here." if settings().activity is False else ""
        return [f"No request with a key was counted in the last {format_duration(found.seconds)}.{off}", *notes]
    if observed := found.total.observed:
        notes.append(f"{observed:,} more with a key were only observed: see `flask idempotency report`.")
    shown = list(found.endpoints.items())
    most = len(shown) if lines is None else max(lines - LINES_AROUND - len(notes), 1)
    rows = [_activity_row(clean(endpoint), figures, wide=wide) for endpoint, figures in shown[:most]]
    if len(shown) > 1:
        rows.append(_activity_row("all", found.total, wide=wide))
    columns = (*_ACTIVITY_COLUMNS, *(Column(counter, least=None) for counter in _MORE_COUNTERS if wide))
    left = [f"{len(shown) - most:,} more endpoints: make the terminal higher."] if len(shown) > most else []
    return [head, Table(columns, tuple(rows), wide), *left, *notes]


def _activity_row(name: str, figures: Figures, *, wide: bool) -> tuple[Cell, ...]:
    groups, new, replayed = figures.groups, figures.new_times, figures.replayed_times
    quarantined = f"{groups['quarantined']:,}"
    return (
        name,
        f"{figures.requests:,}",
        f"{groups['new']:,}",
        f"{groups['replayed']:,}",
        f"{figures.of(*REFUSED):,}",
        f"{groups['conflicts']:,}",
        f"{groups['mismatches']:,}",
        Styled(quarantined, Style.BAD) if groups["quarantined"] else quarantined,
        *(_time(value) for value in (new.p50, new.p95, new.p99, replayed.p50, replayed.p95, replayed.p99)),
        *(f"{figures.of(counter):,}" for counter in _MORE_COUNTERS if wide),
    )


def _time(seconds: float | None) -> str:
    """Return an upper edge as a person reads it: `7.5 ms`, `1.5 s`."""
    if seconds is None:
        return "-"
    if seconds == inf:
        return f"> {EDGES[-1]:g} s"
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"

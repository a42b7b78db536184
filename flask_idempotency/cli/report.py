"""The command `report`: what enforcing would have done at each endpoint, and the policy that this suggests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

import click

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import as_json_option, exit_on_error, wide_option
from flask_idempotency.cli.output import Column, Item, Part, Style, Styled, Table, clean, say
from flask_idempotency.cli.stats import span
from flask_idempotency.engine import activity as names
from flask_idempotency.engine.activity import percentile
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.records import Refused
from flask_idempotency.operations.report import (
    EndpointReport,
    Report,
    Suggestion,
    as_object,
    report,
    time,
)
from flask_idempotency.operations.times import format_duration, moment
from flask_idempotency.web.operator import built, settings
from flask_idempotency.web.policy_table import suggested

_COLUMNS: Final = (
    Column("endpoint", least=14),
    Column("mode", least=None),
    Column("requests", least=None),
    Column("with key", least=None),
    Column("replays", least=None),
    Column("at once", least=None),
    Column("apart p50", least=None, rare=True),
    Column("apart p99", least=None, rare=True),
    Column("mismatches", least=None),
    Column("unknown", least=None),
    Column("quarantined", least=None, rare=True),
    Column("released", least=None, rare=True),
    Column("not kept", least=None, rare=True),
    Column("bad requests", least=None, rare=True),
    Column("missing keys", least=None, rare=True),
    Column("not observed", least=None, rare=True),
)

_CALLER_COLUMNS: Final = (
    Column("endpoint", least=14),
    Column("caller", least=None),
    Column("requests", least=None),
    Column("with key", least=None),
)


@cli.command("report")
@click.option(
    "--since",
    callback=span,
    default="7d",
    metavar="DURATION",
    help="The time to look back, 7 days if you leave it out: 1h, 24h, 30d.",
)
@wide_option
@as_json_option
def report_command(since: float, wide: bool, as_json: bool) -> None:
    """Report what enforcing would do at each endpoint.

    And suggest its policy, with reasons. In mode observe and warn no request is refused or replayed. Requests of endpoints
    in mode enforce are counted in the same columns: there it has happened. A time is an upper bound. The processes add their
    counts every 10 seconds. Changes nothing.

    \b
    Example:
      $ flask idempotency report --since 7d
    """
    with exit_on_error(as_json=as_json):
        parts = built()
        if parts.activity is None:
            raise Refused("The store of this application keeps no activity, so there is nothing to report.")
        found = report(parts.activity, owner_mark(settings().namespace), seconds=since)
        known, made = suggested(found)
    say(*([json.dumps(as_object(found, made))] if as_json else _page(found, known, made, wide=wide)))


def _page(
    found: Report, known: Mapping[str, Policy], made: Mapping[str, Sequence[Suggestion]], *, wide: bool
) -> list[Part]:
    if not found.endpoints:
        off = " IDEMPOTENCY_ACTIVITY is False here." if settings().activity is False else ""
        return [f"No request was counted in the last {format_duration(found.seconds)}.{off}"]
    rows = [_row(clean(name), known.get(name), each) for name, each in found.endpoints.items()]
    callers = [
        (clean(name), caller, f"{seen:,}", f"{keyed:,}")
        for name, each in found.endpoints.items()
        for caller in names.CALLERS
        for keyed, seen in [each.keyed_of(caller)]
        if seen
    ]
    head = (
        f"The last {format_duration(found.seconds)}, until {moment(found.now)}. In mode observe and warn, no request was "
        "refused or replayed:"
    )
    page: list[Part] = [head, Table(_COLUMNS, tuple(rows), wide)]
    if callers:
        page += [
            "",
            "The observed requests, by the credential of the caller:",
            Table(_CALLER_COLUMNS, tuple(callers), wide),
        ]
    return [*page, *_suggestions(made)]


def _row(name: str, policy: Policy | None, found: EndpointReport) -> tuple[str, ...]:
    # An enforced request without a key is counted only where a key is required: then there is no share.
    known = found.callers or (policy is not None and policy.required)
    apart = [percentile(found.apart, fraction) for fraction in (0.5, 0.99)]
    share = f" ({100 * found.keyed // found.seen} %)" if found.seen and known else ""
    columns = (names.MISMATCH, names.UNKNOWN, names.QUARANTINED, names.RELEASED, names.NOT_KEPT)
    return (
        name,
        "-" if policy is None else policy.mode,
        f"{found.seen:,}",
        f"{found.keyed:,}{share}",
        f"{found.of(names.REPLAYED):,}",
        f"{found.concurrent:,}",
        *("-" if value is None else time(value) for value in apart),
        *(f"{found.of(column):,}" for column in columns),
        f"{found.of(names.BAD_REQUEST):,}",
        f"{found.of(names.MISSING_KEY):,}",
        f"{found.of(names.FAILED):,}",
    )


def _suggestions(suggested: Mapping[str, Sequence[Suggestion]]) -> list[Part]:
    parts: list[Part] = []
    for name, made in suggested.items():
        if not made:
            continue
        parts += ["", Styled(f"{clean(name)}:", Style.HEAD)]
        for each in made:
            word = (
                f"{each.keyword}={each.value}" if each.keyword and each.value else each.keyword or each.value or "note"
            )
            parts.append(Item(Styled(word, Style.WARNING), (each.reason,), width=19))
    return parts

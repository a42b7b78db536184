"""The command `report`: what enforcing would have done at each endpoint, and the policy that this suggests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import click

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import Output, wide_option
from flask_idempotency.cli.output import Line, Style, Styled, clean, table
from flask_idempotency.cli.stats import span, why_none
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
)
from flask_idempotency.operations.times import format_duration, format_edge, moment
from flask_idempotency.web.operator import built, settings
from flask_idempotency.web.policy_table import suggested

_RARE: Final = (
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
    parts = built()
    if parts.activity is None:
        raise Refused("The store of this application keeps no activity, so there is nothing to report.")
    found = report(parts.activity, owner_mark(settings().namespace), seconds=since)
    known, made = suggested(found)
    return Output(as_object(found, made), _page(found, known, made, wide=wide))


def _page(
    found: Report, known: Mapping[str, Policy], made: Mapping[str, Sequence[Suggestion]], *, wide: bool
) -> Iterator[Line]:
    if not found.endpoints:
        yield f"No request was counted in the last {format_duration(found.seconds)}.{why_none()}"
        return
    yield (
        f"The last {format_duration(found.seconds)}, until {moment(found.now)}. In mode observe and warn, no request was "
        "refused or replayed:"
    )
    rows = (_row(name, known.get(name), each) for name, each in found.endpoints.items())
    yield from table(rows, without=() if wide else _RARE)
    callers = [
        {"endpoint": clean(name), "caller": caller, "requests": f"{seen:,}", "with key": f"{keyed:,}"}
        for name, each in found.endpoints.items()
        for caller in names.CALLERS
        for keyed, seen in [each.keyed_of(caller)]
        if seen
    ]
    if callers:
        yield from ("", "The observed requests, by the credential of the caller:", *table(callers))
    for name, suggestions in made.items():
        if suggestions:
            yield from ("", Styled(f"{clean(name)}:", Style.HEAD))
        for each in suggestions:
            said = "=".join(filter(None, (each.keyword, each.value))) or "note"
            yield Styled(f"{said:<19} ", Style.WARNING), each.reason


def _row(name: str, policy: Policy | None, found: EndpointReport) -> dict[str, str]:
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

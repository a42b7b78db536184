"""`flask idempotency doctor`: is all well, and what to do if not."""

from __future__ import annotations

import json
import textwrap

import click
from flask import current_app
from flask.cli import with_appcontext

from flask_idempotency.engine.capabilities import Finding
from flask_idempotency.operations.doctor import Examination
from flask_idempotency.web.checkup import examination_of
from flask_idempotency.web.cli.group import NOT_IN_ORDER, UNKNOWN, as_json_option, built, giving_up, say

_WIDTH = 100


@click.command("doctor")
@as_json_option
@click.option(
    "--worker-timeout", type=click.FloatRange(min=0), metavar="S", help="When a worker is killed at work. 0: never."
)
@click.option(
    "--proxy-timeout", type=click.FloatRange(min=0), metavar="S", help="When a proxy gives up on a request. 0: never."
)
@with_appcontext
def doctor_command(as_json: bool, worker_timeout: float | None, proxy_timeout: float | None) -> None:
    """Look at the store, the janitor, the clocks, the keys, the policies and the timeouts, and say what to do.

    Exits with 2 when the store did not answer or a check failed, so that nobody can tell; else with 1 when there is a
    fault. Advice is none, and neither is what cannot be looked at from here. Changes nothing.
    """
    with giving_up(as_json=as_json):
        built()
        examination = examination_of(
            current_app._get_current_object(),  # type: ignore[attr-defined]
            worker_timeout=worker_timeout,
            proxy_timeout=proxy_timeout,
        )
    say(json.dumps(_findings_object(examination)) if as_json else _findings_text(examination))
    if not examination.complete:
        raise SystemExit(UNKNOWN)
    if not examination.in_order:
        raise SystemExit(NOT_IN_ORDER)


def _findings_object(examination: Examination) -> dict[str, object]:
    return {
        "in_order": examination.in_order,
        "complete": examination.complete,
        "findings": [
            {"check": each.check, "verdict": each.verdict.value, "text": each.text, "remedy": each.remedy}
            for each in examination.findings
        ],
    }


def _findings_text(examination: Examination) -> str:
    name = max(len(each.check) for each in examination.findings)
    return "\n".join(_line(each, name) for each in examination.findings)


def _line(finding: Finding, name: int) -> str:
    head = f"{finding.verdict.value:<7}  {finding.check:<{name}}  "
    indent = " " * len(head)
    lines = textwrap.wrap(finding.text, _WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    if finding.remedy:
        remedy = textwrap.wrap(finding.remedy, _WIDTH - len(head) - 2, break_long_words=False, break_on_hyphens=False)
        lines += [("→ " if number == 0 else "  ") + line for number, line in enumerate(remedy)]
    return "\n".join((head if number == 0 else indent) + line for number, line in enumerate(lines))

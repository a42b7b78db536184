"""Janitor tasks by hand or by cron, and `doctor` and `seal`: the commands that keep a store in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import inf
from typing import Any, Final, TypeAlias

import click
from flask import current_app

from flask_idempotency.cli import cli
from flask_idempotency.cli.context import NOT_IN_ORDER, UNKNOWN, Output, confirm, prints_json, word_options
from flask_idempotency.cli.output import Line, Style, Styled
from flask_idempotency.cli.progress import Counts, show_progress
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.events import ResponsesSealed
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.maintenance.finish import FinishReport
from flask_idempotency.maintenance.janitor import Batcher, ExpireReport, ReconcileReport, Task
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.maintenance.rotate import GRACE_SECONDS, RotateReport, SealReport, seal_plain
from flask_idempotency.operations.browse import never_happened
from flask_idempotency.operations.records import AuditNote, Refused
from flask_idempotency.web.doctor import run_checks
from flask_idempotency.web.janitor import drain_of, janitor_of, with_budget
from flask_idempotency.web.operator import built, policies, publish, settings

_BUSY: Final = "Another process runs this task, or was killed during it less than its budget ago. Nothing was done."
_UNFINISHED: Final = "Its budget ended before it was finished: run it again."

_LONGEST_BUDGET_SECONDS: Final = 7000
"""With `LOCK_SECONDS` less than `LONGEST_LOCK_SECONDS`: stores grant no longer lock."""


Told: TypeAlias = tuple[Counts, bool, list[str]]
"""What a report tells: its counts, whether all was in order, and sentences."""


def _run(
    task: Task,
    budget: float,
    what: str,
    told: Callable[[Any], Told],
    *,
    refusal: str,
    total: Callable[[], int | None] = lambda: None,
) -> Output:
    """Run a task, and return what its report tells.

    `what` names what it handles, in the plural, and `total` counts it beforehand, if anything but the task can. Raises
    `Refused` with the refusal if this application has no such work.
    """
    janitor = janitor_of(current_app._get_current_object())  # type: ignore[attr-defined]
    if task not in janitor.tasks:
        raise Refused(refusal)
    with show_progress(what, total=total, as_json=prints_json()) as progress:
        report = janitor.run(task, with_budget(drain_of(task, settings()), budget=budget, on_progress=progress))
        if report is None:
            return Output({"busy": True}, [_BUSY])
        progress.counts, in_order, lines = told(report)
    done = {"done": report.done} if isinstance(report, RotateReport) else {}
    lines += [] if report.finished else [_UNFINISHED]
    return Output({"busy": False, **asdict(report), **done}, lines, 0 if in_order else NOT_IN_ORDER)


def _some(count: float, sentence: str) -> list[str]:
    """Return this sentence about a count, unless it is 0."""
    return [sentence.format(count)] if count else []


def _keys(count: int) -> str:
    return f"{count} key{'' if count == 1 else 's'}"


def _not_under(newest: str, counted: Mapping[str, int]) -> int:
    """Return how many of these responses the newest key of the ring does not seal."""
    return sum(count for kid, count in counted.items() if kid != newest)


def _budget_option(seconds: float) -> Callable[[Callable[..., Output]], Callable[..., Output]]:
    return click.option(
        "--budget",
        type=click.FloatRange(1, _LONGEST_BUDGET_SECONDS),
        metavar="SECONDS",
        default=seconds,
        show_default=True,
        help=f"End after this, finished or not: {_LONGEST_BUDGET_SECONDS:,} at most, because no lock lasts over two hours.",
    )


@cli.command("reap")
@_budget_option(300.0)
def reap_command(budget: float) -> Output:
    """Quarantine claims with an expired lease, and call resolvers.

    Changes records: claims become quarantined, and resolvers complete or release quarantined keys. Safe to run again. If
    another process runs this task, the command does nothing and exits with 0. Exits with 1 if a resolver failed.

    \b
    Example:
      $ flask idempotency reap --budget 60
    """

    def told(report: ReapReport) -> Told:
        done = report.quarantined + report.completed + report.released
        lines = [
            f"Quarantined, because their leases expired: {report.quarantined}.",
            *_some(report.never_resumed, "Quarantined, because no retry resumed them: {}."),
            *_some(report.waiting, "Their next retries take over: {}."),
            *_some(
                report.asked,
                f"Resolvers were called for {_keys(report.asked)}: {report.completed} completed, {report.released} released, "
                f"{report.resumed} resumed, {report.unknown} still unknown, {report.failed} failed.",
            ),
            *_some(
                report.never_happened,
                f"For {_keys(report.never_happened)}, {never_happened(report.believed_in)}: until then its worker may still "
                "run.",
            ),
            *_some(report.failed, "The log says which resolver failed, and how."),
        ]
        skipped = report.waiting + report.overtaken + report.unknown
        return Counts(done, skipped, report.failed), not report.failed, lines

    recovery = built().recovery
    return _run(
        "reap",
        budget,
        "claims",
        told,
        refusal="The store of this application cannot be searched for claims: it has no `recovery`.",
        total=lambda: None if recovery is None else recovery.counts().lapsed,
    )


@cli.command("finish")
@_budget_option(300.0)
def finish_command(budget: float) -> Output:
    """Finish requests that stopped between two steps, as their callers.

    Changes records: it runs the views of endpoints with `finish="janitor"` again, and stores their responses. The next retry
    gets the response. Safe to run again. If another process runs this task, the command does nothing and exits with 0. Exits
    with 1 if a try failed.

    \b
    Example:
      $ flask idempotency finish --budget 60
    """

    def told(report: FinishReport) -> Told:
        failed = report.failed + report.gave_up
        lines = [
            f"Finished, because no client had retried them: {report.completed}.",
            *_some(report.waiting, "Not due yet, or without a kept request: {}."),
            *_some(report.overtaken, "Their clients, or another janitor, were faster: {}."),
            *_some(report.quarantined, "Quarantined, because the outcome is unknown: {}."),
            *_some(report.failed, "Tried in vain, and tried again later: {}."),
            *_some(report.gave_up, "Tried in vain for the last time: {}."),
            *_some(report.unreadable, "Cannot be read, so only their clients finish them: {}."),
            *_some(failed, "The log says why."),
        ]
        skipped = report.waiting + report.overtaken
        return Counts(report.completed + report.quarantined, skipped, failed + report.unreadable), not failed, lines

    recovery = built().recovery
    refusal = 'No endpoint of this application has finish="janitor", so there is nothing to finish.'
    output = _run("finish", budget, "requests", told, refusal=refusal)
    running = 0 if recovery is None else recovery.counts().in_flight
    waiting = _some(running, "Not looked at, because the leases of their workers still run: {}, of all endpoints.")
    every = [(name, policies().resolve(name, method)) for name, method in policies().pairs()]
    closed = sorted({name for name, each in every if each.faults and each.policy.finish == "janitor"})
    lines = [f"Not finished, because a fault of its policy closes the endpoint: {name}." for name in closed]
    return replace(output, lines=[*output.lines, *waiting, *lines])


@cli.command("expire")
@_budget_option(300.0)
def expire_command(budget: float) -> Output:
    """Remove expired responses and what belongs to them.

    Changes the store: it deletes completed records that have expired, and never a running or quarantined one. Safe to run
    again. If another process runs this task, the command does nothing and exits with 0.

    \b
    Example:
      $ flask idempotency expire
    """

    def told(report: ExpireReport) -> Told:
        removed = f"Expired records removed, or reduced to a remembered key: {report.removed}."
        return Counts(report.removed), True, [removed]

    built()
    refusal = "The store of this application removes expired records by itself: it has no `expiry`."
    return _run("expire", budget, "expired records", told, refusal=refusal)


@cli.command("rotate")
@_budget_option(3600.0)
def rotate_command(budget: float) -> Output:
    """Seal the responses of old ring keys again, under the newest.

    Changes stored responses, not their content or expiry. Plain responses stay plain: see `seal`. Requests go on during the
    run. Run it again five minutes later to delete the old data keys. Then `keys status` shows which key of the ring you may
    remove. Safe to run again. If another process runs this task, the command does nothing and exits with 0. Exits with 1 if
    some responses cannot be opened.

    \b
    Example:
      $ flask idempotency rotate
    """

    def told(report: RotateReport) -> Told:
        lines = [
            f"Sealed again: {report.resealed}. Wiped, because they were erased: {report.wiped}.",
            f"Data keys disabled: {report.closed}. Data keys deleted: {report.retired}.",
            *_some(
                report.plain,
                "Not encrypted, and left as they are: {}. `flask idempotency seal` encrypts the responses that you stored "
                "before you switched encryption on.",
            ),
            *_some(
                report.unreadable,
                "Cannot be opened: {}. `flask idempotency keys status` says whether a key is missing in the ring.",
            ),
            *_some(report.blocked, "Left alone, because their tenants' data keys cannot be used for now: {}."),
            *_some(
                not report.done, f"Run it again after {GRACE_SECONDS / 60:g} minutes, to delete the old data keys too."
            ),
        ]
        failed = report.unreadable + report.blocked
        return Counts(report.resealed + report.wiped, report.passed_over + report.plain, failed), not failed, lines

    parts, chosen = built(), settings()
    responses, ring = parts.responses, chosen.key_ring
    if chosen.encryption == "off":
        refusal = "Encryption is off, so there is nothing to seal again: set IDEMPOTENCY_ENCRYPTION to on."
    elif responses is None or parts.data_keys is None:
        refusal = "This store cannot list its responses, so they cannot be sealed again."
    else:
        refusal = "There is no key ring: set IDEMPOTENCY_KEY_RING."
    return _run(
        "rotate",
        budget,
        "responses",
        told,
        refusal=refusal,
        total=lambda: None if responses is None or ring is None else _not_under(ring.newest, responses.count()),
    )


@cli.command("reconcile")
@_budget_option(3600.0)
def reconcile_command(budget: float) -> Output:
    """Recount the records of every tenant, and correct their ledgers.

    Changes the counts that quotas use, and no record. Safe to run again. If another process runs this task, the command does
    nothing and exits with 0. Exits with 1 if a ledger was wrong: that only happens after records were deleted by hand.

    \b
    Example:
      $ flask idempotency reconcile
    """

    def told(report: ReconcileReport) -> Told:
        lines = [
            f"Tenants: {report.tenants}. Ledgers corrected: {report.drifted}.",
            *_some(
                report.drifted,
                f"Wrong by {report.records} records, {report.bytes} bytes and {report.unsettled} unfinished claims.",
            ),
            *_some(report.busy, "Changed during the count, and left for the next run: {}."),
        ]
        return Counts(report.tenants, report.busy), not report.drifted, lines

    ledger = built().ledger
    why = "Quotas are off in this application" if ledger else "The store of this application does not count"
    return _run(
        "reconcile",
        budget,
        "tenants",
        told,
        refusal=f"{why}, so there is nothing to reconcile.",
        total=lambda: None if ledger is None else len(ledger.tenants()),
    )


# `flask idempotency doctor`

VERDICT_WIDTH: Final = 9

_COLOURS: Final = {
    Verdict.FAULT: Style.BAD,
    Verdict.UNKNOWN: Style.WARNING,
    Verdict.ADVICE: Style.WARNING,
    Verdict.FINE: Style.GOOD,
}


@cli.command("doctor")
@click.option("--verbose", is_flag=True, help="Show each check that is fine on a line of its own.")
@click.option(
    "--worker-timeout", type=click.FloatRange(min=0), metavar="S", help="When a worker is killed at work. 0: never."
)
@click.option(
    "--proxy-timeout", type=click.FloatRange(min=0), metavar="S", help="When a proxy gives up on a request. 0: never."
)
def doctor_command(verbose: bool, worker_timeout: float | None, proxy_timeout: float | None) -> Output:
    """Check the store, the janitor, the keys and the settings.

    Each finding that is not fine comes with its remedy. Read-only. Exits with 2 if the store did not answer or a check
    failed, so that the result is unknown; else with 1 if there is a fault. Advice and unknown are no faults.

    \b
    Example:
      $ flask idempotency doctor --worker-timeout 120 --proxy-timeout 60
    """
    built()
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    examination = run_checks(app, worker_timeout=worker_timeout, proxy_timeout=proxy_timeout)
    found = {
        "in_order": examination.in_order,
        "complete": examination.complete,
        "findings": [{**asdict(each), "verdict": each.verdict.value} for each in examination.findings],
    }
    findings, lines = examination.findings, list[Line]()
    for each in findings:
        if verbose or each.verdict is not Verdict.FINE:
            lines.append((_verdict(each.verdict), f"{each.check}: {each.text}"))
            lines += [(" " * VERDICT_WIDTH, f"→ {each.remedy}")] if each.remedy else []
    fine = [each.check for each in findings if each.verdict is Verdict.FINE]
    if fine and not verbose:
        lines.append((_verdict(Verdict.FINE), ", ".join(dict.fromkeys(fine))))
    counts = Counter(each.verdict for each in findings)
    named = [
        (counts[Verdict.FAULT], "fault", "faults"),
        (counts[Verdict.UNKNOWN], "check unknown", "checks unknown"),
        (counts[Verdict.ADVICE], "piece of advice", "pieces of advice"),
    ]
    said = [f"{count} {one if count == 1 else many}" for count, one, many in named if count]
    lines += ["", ", ".join([*said, f"{len(fine)} {'check' if len(fine) == 1 else 'checks'} fine"])]
    code = UNKNOWN if not examination.complete else 0 if examination.in_order else NOT_IN_ORDER
    return Output(found, lines, code)


def _verdict(verdict: Verdict) -> Styled:
    return Styled(f"{verdict.value:<{VERDICT_WIDTH}}", _COLOURS[verdict])


# `flask idempotency seal`: encrypt the responses that were stored before encryption was switched on.

_OFF: Final = "IDEMPOTENCY_ENCRYPTION is off, so nothing can be sealed. Set it to on first."
_REQUIRED: Final = (
    "IDEMPOTENCY_ENCRYPTION is required, so plain responses are never opened or sealed: anyone who can write to the store may "
    "have planted them. If you stored them before you switched encryption on, set it to on, run this command, and set it to "
    "required again."
)
_WARNING: Final = (
    "Responses in this store that are not encrypted: {plain}. A sealed response counts as genuine from then on, and retries "
    "get it. Seal them only if your application stored them before you switched encryption on, and no other party could write "
    "to the store since. Else let them expire."
)
_NOTHING: Final = "Every stored response is encrypted. There is nothing to seal."


@cli.command("seal")
@word_options(required=True)
def seal_command(yes: bool, word: AuditNote) -> Output:
    """Encrypt the responses that were stored before encryption.

    Changes stored responses, not their content or expiry. Runs only while IDEMPOTENCY_ENCRYPTION is on. Anyone who can write
    to the store may have planted a plain response, and this command makes it genuine. So `rotate` and the janitor never do
    it, and this command refuses while encryption is required. You confirm first. Safe to interrupt and to run again. Exits
    with 1 if some responses could not be sealed.

    \b
    Example:
      $ flask idempotency seal --reason "encryption is on since Monday"
    """
    chosen, parts = settings(), built()
    if chosen.encryption != "on":
        raise Refused(_OFF if chosen.encryption == "off" else _REQUIRED)
    if parts.responses is None or chosen.key_ring is None:
        raise Refused("This store cannot list its responses, so they cannot be sealed.")
    counted = parts.responses.count()
    plain = counted.get("", 0)
    if not plain:
        return Output(asdict(SealReport()), [_NOTHING])
    confirm("Seal them?", _WARNING.format(plain=plain), yes=yes)
    total = _not_under(chosen.key_ring.newest, counted)
    sealed, finished = 0, False

    def count(so_far: int) -> None:
        nonlocal sealed
        sealed = so_far

    try:
        with show_progress(
            "responses", total=lambda: total, as_json=prints_json(), so_far=lambda: f"Sealed: {sealed:,}."
        ) as progress:
            drain = Batcher(batch=500, budget=inf, on_progress=progress)
            owner = owner_mark(chosen.namespace)
            report = seal_plain(
                parts.responses, parts.codec, chosen.key_ring, drain=drain, owner=owner, on_progress=count
            )
            progress.counts = Counts(report.sealed, report.passed_over, report.unreadable + report.blocked)
        finished = True
    finally:  # the audit event also if the run is interrupted
        publish(ResponsesSealed("", "", **asdict(word), sealed=sealed, finished=finished))
    lines = [
        f"Sealed: {report.sealed}.",
        *_some(report.passed_over, "Left alone, because they were erased or changed during the run: {}."),
        *_some(report.unreadable, "Damaged, and left as they are: {}. A retry quarantines the key."),
        *_some(report.blocked, "Left as they are, because their tenants' data keys cannot be used for now: {}."),
    ]
    return Output(asdict(report), lines, 0 if report.done else NOT_IN_ORDER)

"""Janitor tasks by hand or by cron, and `doctor` and `seal`: the commands that keep a store in order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import click
from flask import current_app

from flask_idempotency.assembly import Services
from flask_idempotency.cli import cli
from flask_idempotency.cli.context import NOT_IN_ORDER, UNKNOWN, as_json_option, exit_on_error, word_of, word_options
from flask_idempotency.cli.output import Item, Part, Style, Styled, say
from flask_idempotency.cli.progress import Counts, show_progress
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.events import ResponsesSealed
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.maintenance.janitor import Batcher, ExpireReport, ReconcileReport, Report, Task
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.maintenance.rotate import GRACE_SECONDS, RotateReport, SealReport, seal_plain
from flask_idempotency.operations.doctor import DoctorReport
from flask_idempotency.operations.records import AuditNote, Refused, never_happened
from flask_idempotency.settings import Settings
from flask_idempotency.web.doctor import run_checks
from flask_idempotency.web.janitor import drain_of, janitor_of, with_budget
from flask_idempotency.web.operator import built, publish, settings

_BUSY: Final = "Another process runs this task, or was killed during it less than its budget ago. Nothing was done."
_UNFINISHED: Final = "Its budget ended before it was finished: run it again."

_LONGEST_BUDGET_SECONDS: Final = 7000
"""With `LOCK_SECONDS` less than `LONGEST_LOCK_SECONDS`: stores grant no longer lock."""


@dataclass(frozen=True, slots=True)
class _TaskCommand:
    """One task as a command."""

    task: Task
    what: str
    """What it handles, in the plural."""
    total: Callable[[Services, Settings], int | None]
    """Return how much there is to handle, for the progress line. None: only the task itself can find out."""
    counts: Callable[[Any], Counts]
    budget: float
    said: Callable[[Any], list[str]]
    in_order: Callable[[Any], bool]
    refusal: Callable[[Services, Settings], str]
    """Return why this application has no such work."""


def _run(command: _TaskCommand, budget: float, *, as_json: bool) -> None:
    with exit_on_error(as_json=as_json):
        parts, chosen = built(), settings()
        janitor = janitor_of(current_app._get_current_object())  # type: ignore[attr-defined]
        if command.task not in janitor.tasks:
            raise Refused(command.refusal(parts, chosen))
        with show_progress(command.what, total=partial(command.total, parts, chosen), as_json=as_json) as progress:
            drain = with_budget(drain_of(command.task, chosen), budget=budget, on_progress=progress)
            report = janitor.run(command.task, drain)
            progress.counts = None if report is None else command.counts(report)
    say(json.dumps(_task_object(report)) if as_json else _task_text(command, report))
    if report is not None and not command.in_order(report):
        raise SystemExit(NOT_IN_ORDER)


def _task_object(report: Report | None) -> dict[str, object]:
    if report is None:
        return {"busy": True}
    done = {"done": report.done} if isinstance(report, RotateReport) else {}
    return {"busy": False, **asdict(report), **done}


def _task_text(command: _TaskCommand, report: Report | None) -> str:
    if report is None:
        return _BUSY
    return "\n".join([*command.said(report), *([] if report.finished else [_UNFINISHED])])


def _reaped(report: ReapReport) -> list[str]:
    said = [f"Quarantined, because their leases expired: {report.quarantined}."]
    if report.never_resumed:
        said.append(f"Quarantined, because no retry resumed them: {report.never_resumed}.")
    if report.waiting:
        said.append(f"Their next retries take over: {report.waiting}.")
    if report.asked:
        said.append(
            f"Resolvers were called for {report.asked} key{'' if report.asked == 1 else 's'}: "
            f"{report.completed} completed, {report.released} released, "
            f"{report.resumed} resumed, {report.unknown} still unknown, {report.failed} failed."
        )
    if report.never_happened:
        keys = f"For {report.never_happened} key{'' if report.never_happened == 1 else 's'}"
        said.append(f"{keys}, {never_happened(report.believed_in)}: until then its worker may still run.")
    if report.failed:
        said.append("The log says which resolver failed, and how.")
    return said


def _expired(report: ExpireReport) -> list[str]:
    return [f"Removed, because they expired: {report.removed}."]


def _rotated(report: RotateReport) -> list[str]:
    said = [
        f"Sealed again: {report.resealed}. Wiped, because they were erased: {report.wiped}.",
        f"Data keys disabled: {report.closed}. Data keys deleted: {report.retired}.",
    ]
    if report.plain:
        said.append(
            f"Not encrypted, and left as they are: {report.plain}. `flask idempotency seal` encrypts the responses that you "
            "stored before you switched encryption on."
        )
    if report.unreadable:
        said.append(
            f"Cannot be opened: {report.unreadable}. `flask idempotency keys status` says whether a key is missing in the ring."
        )
    if report.blocked:
        said.append(f"Left alone, because their tenants' data keys cannot be used for now: {report.blocked}.")
    if not report.done:
        said.append(f"Run it again after {GRACE_SECONDS / 60:g} minutes, to delete the old data keys too.")
    return said


def _reconciled(report: ReconcileReport) -> list[str]:
    said = [f"Tenants: {report.tenants}. Ledgers corrected: {report.drifted}."]
    if report.drifted:
        said.append(
            f"Wrong by {report.records} records, {report.bytes} bytes and {report.unsettled} unfinished claims."
        )
    if report.busy:
        said.append(f"Changed during the count, and left for the next run: {report.busy}.")
    return said


def _claims(parts: Services, chosen: Settings) -> int | None:
    return None if parts.recovery is None else parts.recovery.counts().lapsed


def _old_responses(parts: Services, chosen: Settings) -> int | None:
    """Return how many responses the newest key of the ring does not seal: these the run looks at."""
    if parts.responses is None or chosen.key_ring is None:
        return None
    newest = chosen.key_ring.newest
    return sum(count for kid, count in parts.responses.count().items() if kid != newest)


def _tenants(parts: Services, chosen: Settings) -> int | None:
    return None if parts.ledger is None else len(parts.ledger.tenants())


def _no_rotation(parts: Services, chosen: Settings) -> str:
    if chosen.encryption == "off":
        return "Encryption is off, so there is nothing to seal again: set IDEMPOTENCY_ENCRYPTION to on."
    if parts.responses is None or parts.data_keys is None:
        return "This store cannot list its responses, so they cannot be sealed again."
    return "There is no key ring: set IDEMPOTENCY_KEY_RING."


def _no_reconciling(parts: Services, chosen: Settings) -> str:
    if parts.ledger is None:
        return "The store of this application does not count, so there is nothing to reconcile."
    return "Quotas are off in this application, so there is nothing to reconcile."


_COMMANDS: Final = {
    "reap": _TaskCommand(
        "reap",
        "claims",
        _claims,
        lambda report: Counts(
            report.quarantined + report.completed + report.released,
            report.waiting + report.overtaken + report.unknown,
            report.failed,
        ),
        300.0,
        _reaped,
        lambda report: not report.failed,
        lambda parts, chosen: "The store of this application cannot be searched for claims: it has no `recovery`.",
    ),
    "expire": _TaskCommand(
        "expire",
        "expired records",
        lambda parts, chosen: None,
        lambda report: Counts(report.removed),
        300.0,
        _expired,
        lambda report: True,
        lambda parts, chosen: "The store of this application removes expired records by itself: it has no `expiry`.",
    ),
    "rotate": _TaskCommand(
        "rotate",
        "responses",
        _old_responses,
        lambda report: Counts(
            report.resealed + report.wiped, report.passed_over + report.plain, report.unreadable + report.blocked
        ),
        3600.0,
        _rotated,
        lambda report: not report.unreadable and not report.blocked,
        _no_rotation,
    ),
    "reconcile": _TaskCommand(
        "reconcile",
        "tenants",
        _tenants,
        lambda report: Counts(report.tenants, report.busy),
        3600.0,
        _reconciled,
        lambda report: not report.drifted,
        _no_reconciling,
    ),
}


def _budget_option(task: Task) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--budget",
        type=click.FloatRange(1, _LONGEST_BUDGET_SECONDS),
        metavar="SECONDS",
        default=_COMMANDS[task].budget,
        show_default=True,
        help=f"End after this, finished or not: {_LONGEST_BUDGET_SECONDS:,} at most, because no lock lasts over two hours.",
    )


@cli.command("reap")
@_budget_option("reap")
@as_json_option
def reap_command(budget: float, as_json: bool) -> None:
    """Quarantine claims with an expired lease, and call resolvers.

    Changes records: claims become quarantined, and resolvers complete or release quarantined keys. Safe to run again. If
    another process runs this task, the command does nothing and exits with 0. Exits with 1 if a resolver failed.

    \b
    Example:
      $ flask idempotency reap --budget 60
    """
    _run(_COMMANDS["reap"], budget, as_json=as_json)


@cli.command("expire")
@_budget_option("expire")
@as_json_option
def expire_command(budget: float, as_json: bool) -> None:
    """Remove expired responses and what belongs to them.

    Changes the store: it deletes completed records that have expired, and never a running or quarantined one. Safe to run
    again. If another process runs this task, the command does nothing and exits with 0.

    \b
    Example:
      $ flask idempotency expire
    """
    _run(_COMMANDS["expire"], budget, as_json=as_json)


@cli.command("rotate")
@_budget_option("rotate")
@as_json_option
def rotate_command(budget: float, as_json: bool) -> None:
    """Seal the responses of old ring keys again, under the newest.

    Changes stored responses, not their content or expiry. Plain responses stay plain: see `seal`. Requests go on during the
    run. Run it again five minutes later to delete the old data keys. Then `keys status` shows which key of the ring you may
    remove. Safe to run again. If another process runs this task, the command does nothing and exits with 0. Exits with 1 if
    some responses cannot be opened.

    \b
    Example:
      $ flask idempotency rotate
    """
    _run(_COMMANDS["rotate"], budget, as_json=as_json)


@cli.command("reconcile")
@_budget_option("reconcile")
@as_json_option
def reconcile_command(budget: float, as_json: bool) -> None:
    """Recount the records of every tenant, and correct their ledgers.

    Changes the counts that quotas use, and no record. Safe to run again. If another process runs this task, the command does
    nothing and exits with 0. Exits with 1 if a ledger was wrong: that only happens after records were deleted by hand.

    \b
    Example:
      $ flask idempotency reconcile
    """
    _run(_COMMANDS["reconcile"], budget, as_json=as_json)


# `flask idempotency doctor`

_COLOURS: Final = {
    Verdict.FAULT: Style.BAD,
    Verdict.UNKNOWN: Style.WARNING,
    Verdict.ADVICE: Style.WARNING,
    Verdict.FINE: Style.GOOD,
}


@cli.command("doctor")
@click.option("--verbose", is_flag=True, help="Show each check that is fine on a line of its own.")
@as_json_option
@click.option(
    "--worker-timeout", type=click.FloatRange(min=0), metavar="S", help="When a worker is killed at work. 0: never."
)
@click.option(
    "--proxy-timeout", type=click.FloatRange(min=0), metavar="S", help="When a proxy gives up on a request. 0: never."
)
def doctor_command(verbose: bool, as_json: bool, worker_timeout: float | None, proxy_timeout: float | None) -> None:
    """Check the store, the janitor, the keys and the settings.

    Each finding that is not fine comes with its remedy. Read-only. Exits with 2 if the store did not answer or a check
    failed, so that the result is unknown; else with 1 if there is a fault. Advice and unknown are no faults.

    \b
    Example:
      $ flask idempotency doctor --worker-timeout 120 --proxy-timeout 60
    """
    with exit_on_error(as_json=as_json):
        built()
        examination = run_checks(
            current_app._get_current_object(),  # type: ignore[attr-defined]
            worker_timeout=worker_timeout,
            proxy_timeout=proxy_timeout,
        )
    if as_json:
        say(json.dumps(_findings_object(examination)))
    else:
        say(*_findings_text(examination, verbose=verbose))
    if not examination.complete:
        raise SystemExit(UNKNOWN)
    if not examination.in_order:
        raise SystemExit(NOT_IN_ORDER)


def _findings_object(examination: DoctorReport) -> dict[str, object]:
    return {
        "in_order": examination.in_order,
        "complete": examination.complete,
        "findings": [
            {"check": each.check, "verdict": each.verdict.value, "text": each.text, "remedy": each.remedy}
            for each in examination.findings
        ],
    }


def _findings_text(examination: DoctorReport, *, verbose: bool) -> Iterator[Part]:
    """Yield the findings, the worst first, and one line that counts them."""
    fine = [each for each in examination.findings if each.verdict is Verdict.FINE]
    for each in examination.findings:
        if verbose or each.verdict is not Verdict.FINE:
            yield _item(each.verdict, f"{each.check}: {each.text}", each.remedy)
    if fine and not verbose:
        yield _item(Verdict.FINE, ", ".join(dict.fromkeys(each.check for each in fine)))
    yield ""
    yield _summary(Counter(each.verdict for each in examination.findings), len(fine))


def _item(verdict: Verdict, text: str, remedy: str = "") -> Item:
    return Item(Styled(verdict.value, _COLOURS[verdict]), (text, *([f"→ {remedy}"] if remedy else [])))


def _summary(counts: Counter[Verdict], fine: int) -> str:
    named = [
        (counts[Verdict.FAULT], "fault", "faults"),
        (counts[Verdict.UNKNOWN], "check unknown", "checks unknown"),
        (counts[Verdict.ADVICE], "piece of advice", "pieces of advice"),
    ]
    said = [f"{count} {one if count == 1 else many}" for count, one, many in named if count]
    return ", ".join([*said, f"{fine} {'check' if fine == 1 else 'checks'} fine"])


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
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@word_options(required=True)
@as_json_option
def seal_command(yes: bool, actor: str, reason: str, as_json: bool) -> None:
    """Encrypt the responses that were stored before encryption.

    Changes stored responses, not their content or expiry. Runs only while IDEMPOTENCY_ENCRYPTION is on. Anyone who can write
    to the store may have planted a plain response, and this command makes it genuine. So `rotate` and the janitor never do
    it, and this command refuses while encryption is required. You confirm first. Safe to interrupt and to run again. Exits
    with 1 if some responses could not be sealed.

    \b
    Example:
      $ flask idempotency seal --reason "encryption is on since Monday"
    """
    with exit_on_error(as_json=as_json):
        chosen, parts = settings(), built()
        if chosen.encryption == "off":
            raise Refused(_OFF)
        if chosen.encryption == "required":
            raise Refused(_REQUIRED)
        if parts.responses is None or chosen.key_ring is None:
            raise Refused("This store cannot list its responses, so they cannot be sealed.")
        counted = parts.responses.count()
        plain = counted.get("", 0)
        if plain and not yes:
            say(_WARNING.format(plain=plain), err=True)
            click.confirm("Seal them?", abort=True, err=True)
        total = sum(count for kid, count in counted.items() if kid != chosen.key_ring.newest)
        report = _sealed(word_of(actor, reason), total=total, as_json=as_json) if plain else SealReport()
    if as_json:
        say(json.dumps(asdict(report)))
    else:
        say("\n".join(_sealing_text(report)) if plain else _NOTHING)
    if not report.done:
        raise SystemExit(NOT_IN_ORDER)


def _sealed(word: AuditNote, *, total: int, as_json: bool) -> SealReport:
    """Seal them, and publish the audit event also if the run is interrupted."""
    parts, chosen, sealed, finished = built(), settings(), 0, False
    if parts.responses is None or chosen.key_ring is None:
        raise AssertionError("checked before")

    def count(so_far: int) -> None:
        nonlocal sealed
        sealed = so_far

    owner = owner_mark(chosen.namespace)
    try:
        with show_progress(
            "responses", total=lambda: total, as_json=as_json, so_far=lambda: f"Sealed: {sealed:,}."
        ) as progress:
            drain = Batcher(batch=500, budget=float("inf"), on_progress=progress)
            report = seal_plain(
                parts.responses, parts.codec, chosen.key_ring, drain=drain, owner=owner, on_progress=count
            )
            progress.counts = Counts(report.sealed, report.passed_over, report.unreadable + report.blocked)
        finished = True
    finally:
        publish(ResponsesSealed("", "", actor=word.actor, reason=word.reason, sealed=sealed, finished=finished))
    return report


def _sealing_text(report: SealReport) -> list[str]:
    said = [f"Sealed: {report.sealed}."]
    if report.passed_over:
        said.append(f"Left alone, because they were erased or changed during the run: {report.passed_over}.")
    if report.unreadable:
        said.append(f"Damaged, and left as they are: {report.unreadable}. A retry quarantines the key.")
    if report.blocked:
        said.append(f"Left as they are, because their tenants' data keys cannot be used for now: {report.blocked}.")
    return said

"""Register the checks of `flask idempotency doctor`, and run those that apply to an application.

The checks themselves are in `operations/doctor.py` and `web/doctor.py`. A check changes no record. A finding that is not fine
names a command or a setting that mends it. No finding names a key, tenant, password or URL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, TypeAlias

from flask_idempotency.engine.capabilities import (
    DataKeys,
    DataLossDetector,
    Finding,
    Health,
    Recovery,
    Responses,
    TaskLog,
    Verdict,
)
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.tasks import LONGEST_REPORT

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional


class Endpoint(NamedTuple):
    """A guarded endpoint and its policy."""

    name: str
    policy: Policy


@dataclass(frozen=True, kw_only=True)
class Target:
    """The application that the checks look at: its store's parts, None if the store lacks one, and its settings.

    A subclass adds as properties what takes time to find: `endpoints`, every guarded `Endpoint`, once for each policy of its
    methods; `intervals`, the seconds between two runs of each task that has work here, without the heartbeat; and `ran`, the
    seconds that a request of each endpoint is known to have run at least.
    """

    health: Health | None
    task_log: TaskLog | None
    recovery: Recovery | None
    responses: Responses | None
    data_keys: DataKeys | None
    data_loss: DataLossDetector | None
    key_ring: KeyProvider | None
    encryption: str
    process_local: bool
    """The store is in the memory of one process."""
    heartbeat_interval: float | None
    """Seconds. None: no janitor is expected, as for a `process_local` store."""
    worker_timeout: float | None
    """Seconds after which a server kills a worker, infinite for never. None: unknown."""
    proxy_timeout: float | None
    """Seconds after which a proxy gives up on a request, infinite for never. None: unknown."""
    lenient: bool
    """Debug mode or tests."""
    journals: Journals | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One check, ready to run. `look` returns its findings, also if all is fine; an exception means unknown."""

    name: str
    look: Callable[..., Iterable[Finding]]
    asks_store: bool = False
    expected: bool = False


Found: TypeAlias = "Finding | tuple[Verdict, str, str]"
"""A finding, or the verdict, text and remedy of one under the name of the check."""

_registered: list[Check] = []
CheckT = ParamSpec("CheckT")


def check(
    name: str, *, fine: str = "", asks_store: bool = False, expected: bool = False
) -> Callable[[Callable[CheckT, Iterable[Found]]], Callable[CheckT, list[Finding]]]:
    """Register a function as a check. `doctor` passes the attributes of `Target` that its parameters name.

    `fine`: the text of the finding if the function finds nothing. `asks_store`: leave the check out while the store is away.
    A parameter without a default must not be None: otherwise `doctor` leaves the check out, or reports it as unknown if the
    part is `expected` of every store.
    """

    def register(look: Callable[CheckT, Iterable[Found]]) -> Callable[CheckT, list[Finding]]:
        @wraps(look)
        def looked(*args: CheckT.args, **options: CheckT.kwargs) -> list[Finding]:
            found = [each if isinstance(each, Finding) else Finding(name, *each) for each in look(*args, **options)]
            return found if found or not fine else [Finding(name, Verdict.FINE, fine)]

        _registered.append(Check(name, looked, asks_store, expected))
        return looked

    return register


def checks_of(target: Target) -> list[Check]:
    """Return every registered check that applies to this target, in the order of registration."""
    checks = []
    for each in _registered:
        required = {name: one.default is Parameter.empty for name, one in signature(each.look).parameters.items()}
        missing = [name for name, needed in required.items() if needed and vars(target).get(name, ...) is None]
        if not missing:
            names = [name for name, needed in required.items() if needed or name in vars(target)]
            checks.append(replace(each, look=partial(_call, each.look, target, names)))
        elif each.expected:
            checks.append(replace(each, look=partial(list, (cannot(each.name, missing[0]),))))
    return checks


def _call(look: Callable[..., Iterable[Finding]], target: Target, names: Sequence[str]) -> Iterable[Finding]:
    return look(**{name: getattr(target, name) for name in names})


def cannot(name: str, port: str) -> Finding:
    """Return the finding of a check that needs a part which this store lacks."""
    remedy = (
        "Add that to your store. Those of this package (IDEMPOTENCY_STORE) have it, and know none of the keys of yours."
    )
    return Finding(name, Verdict.UNKNOWN, f"This store cannot tell: it has no `{port}`.", remedy)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings of all checks, the worst first."""

    findings: tuple[Finding, ...]
    complete: bool
    """False: the store did not answer or a check failed, so the result is not known."""

    @property
    def in_order(self) -> bool:
        """Return True if there is no fault. Advice and unknown are no faults."""
        return all(finding.verdict is not Verdict.FAULT for finding in self.findings)


REACHABLE: Final = "store"
"""The first check. If the store does not answer, `examine` skips the checks that ask it."""

_WORST_FIRST: Final = tuple(reversed(Verdict))
_REPORT_IT: Final = "Report it: a check of `flask idempotency doctor` must not."
_AGAIN: Final = "Run `flask idempotency doctor` again when the store answers."
_DO_IT: Final = "Do what this says, and run `flask idempotency doctor` again."


def examine(checks: Sequence[Check], *, reach: Callable[[], object]) -> DoctorReport:
    """Run every check. `reach` asks the store for something small, and raises `StoreUnavailable` if it is away."""
    store = _reached(reach)
    away = store.verdict is not Verdict.FINE
    findings, complete = [store], not away
    met: dict[str, str] = {}
    for check in checks:
        if away and check.asks_store:
            findings.append(Finding(check.name, Verdict.UNKNOWN, "Not looked at: the store does not answer.", _AGAIN))
            continue
        try:
            findings += check.look()
        except ConfigurationError as error:
            # Each fault names its remedy, such as missing tables. Later checks that meet the same one say only that.
            for fault in error.faults:
                if (first := met.setdefault(fault, check.name)) == check.name:
                    findings.append(Finding(check.name, Verdict.FAULT, fault, _DO_IT))
                else:
                    text = f"This could not be checked: it meets the fault of `{first}`."
                    findings.append(Finding(check.name, Verdict.UNKNOWN, text, _DO_IT))
        except StoreUnavailable:
            text = "This check could not be made: the store did not answer."
            findings.append(Finding(check.name, Verdict.UNKNOWN, text, _AGAIN))
            complete = False
        except Exception as error:  # noqa: BLE001 - the other checks still help
            # Its class alone: the text of a foreign exception may quote a secret.
            text = f"This check could not be made: it failed ({cause_of(error)})."
            module = error.name if isinstance(error, ModuleNotFoundError) else None
            remedy = f"Install the Python module {module} where this runs." if module else _REPORT_IT
            findings.append(Finding(check.name, Verdict.UNKNOWN, text, remedy))
            complete = False
    findings.sort(key=lambda finding: _WORST_FIRST.index(finding.verdict))
    return DoctorReport(tuple(findings), complete)


def _reached(reach: Callable[[], object]) -> Finding:
    try:
        reach()
        return Finding(REACHABLE, Verdict.FINE, "The store answers.")
    except StoreUnavailable as error:  # its text is ours, and names no server
        text = f"The store does not answer: {str(error).rstrip('.')}."
    except ConfigurationError as error:
        # It names its remedy, such as a setting of the server.
        text = " ".join(f"{fault.rstrip('.')}." for fault in error.faults)
        return Finding(REACHABLE, Verdict.FAULT, text, _DO_IT)
    except Exception as error:  # noqa: BLE001 - a store of the application's may raise anything
        text = f"The store cannot be asked ({cause_of(error)})."
    remedy = (
        "Check IDEMPOTENCY_STORE, and that its server runs and lets this host in: keyed requests get 503 until then."
    )
    return Finding(REACHABLE, Verdict.FAULT, text, remedy)


# What the last look found, kept in the store: the console shows the same whichever process answers, and `stats` prints it.

HEALTH: Final = "health:"
"""Begins the name of its report. The mark of the application follows, without the `@` that tasks have before it."""
MOST_FAULTS: Final = 10
LONGEST_FAULT: Final = 300
"""Characters of a fault. `MOST_FAULTS` of these fit into a report."""


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """What the last look at Health found. `faults` are the names of checks, and texts."""

    ago: float
    in_order: bool
    complete: bool
    faults: tuple[tuple[str, str], ...]


def keep_health(log: TaskLog, owner: bytes, report: DoctorReport) -> None:
    """Keep the faults of this report in the store, for the application with this mark."""
    faults = [(each.check, each.text[:LONGEST_FAULT]) for each in report.findings if each.verdict is Verdict.FAULT][
        :MOST_FAULTS
    ]
    while len(kept := json.dumps([report.in_order, report.complete, faults])) > LONGEST_REPORT and faults:
        faults.pop()
    log.report(HEALTH + owner.hex(), kept)


def kept_health(log: TaskLog, owner: bytes) -> KeptHealth | None:
    """Return what the last look found. None: there was none, or another release wrote what this one cannot read."""
    entry = log.reports().get(HEALTH + owner.hex())
    try:
        in_order, complete, faults = json.loads("null" if entry is None else entry.report[:LONGEST_REPORT])
        read = tuple((printable(str(check)), printable(str(text))) for check, text in faults)
    except (ValueError, TypeError, RecursionError):
        return None
    return None if entry is None else KeptHealth(entry.ago, in_order is True, complete is True, read)


NAMED: Final = 5
"""A sentence names at most this many."""


def some(names: Iterable[str]) -> str:
    """Return the first few of these names, each once, and how many more there are."""
    every = sorted(set(names))
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} more" if more > 0 else "")

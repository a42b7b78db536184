"""Whether all is well: every check is made, whatever becomes of the others, and each says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable

REACHABLE: Final = "store"
"""The check that comes first: where the store does not answer, nothing else is asked of it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. `look` says what it found, also when all is fine; an exception says that it cannot tell."""

    name: str
    look: Callable[[], Iterable[Finding]]
    asks_store: bool = False


@dataclass(frozen=True, slots=True)
class Examination:
    """What all checks have found, the worst first."""

    findings: tuple[Finding, ...]
    complete: bool
    """False: the store did not answer, or a check failed, so that nobody can tell whether all is well."""

    @property
    def in_order(self) -> bool:
        """Whether no fault was found. Advice is none, and neither is what cannot be looked at from here."""
        return all(finding.verdict is not Verdict.FAULT for finding in self.findings)


_WORST_FIRST: Final = (Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE)


def examine(checks: Sequence[Check], *, reach: Callable[[], object]) -> Examination:
    """Make every check. `reach` asks the store for something small, and raises `StoreUnavailable` when it is away."""
    store = _reached(reach)
    away = store.verdict is not Verdict.FINE
    findings, complete = [store], not away
    for check in checks:
        if away and check.asks_store:
            findings.append(Finding(check.name, Verdict.UNKNOWN, "Not looked at: the store does not answer.", _AGAIN))
            continue
        try:
            findings += check.look()
        except ConfigurationError as error:
            # Ours, and says what to do: tables that are missing, for one.
            findings += [Finding(check.name, Verdict.FAULT, fault, _AS_SAID) for fault in error.faults]
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are worth having
            findings.append(_failed(check.name, error))
            complete = False
    findings.sort(key=lambda finding: _WORST_FIRST.index(finding.verdict))
    return Examination(tuple(findings), complete)


_AS_SAID = "Do what this says, and run `flask idempotency doctor` again."
_AGAIN = "Run `flask idempotency doctor` again when the store answers."


def _reached(reach: Callable[[], object]) -> Finding:
    try:
        reach()
    except StoreUnavailable as error:
        # Its text is ours, and names no server.
        why = str(error).rstrip(".")
        return Finding(REACHABLE, Verdict.FAULT, f"The store does not answer: {why}.", _REACH)
    except Exception as error:  # noqa: BLE001 - a store of somebody's own may raise anything
        return Finding(REACHABLE, Verdict.FAULT, f"The store cannot be asked ({type(error).__name__}).", _REACH)
    return Finding(REACHABLE, Verdict.FINE, "The store answers.")


_REACH = "Check IDEMPOTENCY_STORE, and that its server runs and lets this host in: keyed requests get 503 meanwhile."


def _failed(name: str, error: Exception) -> Finding:
    # Not its text: an exception of somebody else's may quote what nobody should read.
    why = "the store did not answer" if isinstance(error, StoreUnavailable) else f"it failed ({type(error).__name__})"
    remedy = (
        _AGAIN if isinstance(error, StoreUnavailable) else "Report it: a check of `flask idempotency doctor` must not."
    )
    return Finding(name, Verdict.UNKNOWN, f"This check could not be made: {why}.", remedy)

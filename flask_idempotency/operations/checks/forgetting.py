"""Whether a store that can lose its memory has, and whether it would be noticed and survived if it did."""

from __future__ import annotations

from collections.abc import Iterable

from flask_idempotency.engine.capabilities import DataLossStatus, Finding, Memory, Rules, Verdict
from flask_idempotency.operations.checks.naming import some
from flask_idempotency.operations.checks.timeouts import Endpoint
from flask_idempotency.operations.memory import memory_status

_GRANT = (
    "Let its user ask, with ACL SETUSER … +info, and then acknowledge the change with `flask idempotency redis ack`; where a "
    "service does not tell its scripts, set IDEMPOTENCY_STORE to a database."
)


def canary(memory: Memory) -> list[Finding]:
    """Whether new keys run, and whether a restart would be noticed."""
    status = memory_status(memory)
    if not status.new_keys_run:
        found = Finding("canary", Verdict.FAULT, f"New keys get 503: {_lowered(status.text)}", status.remedy)
    elif status.remedy:
        found = Finding("canary", Verdict.ADVICE, status.text, status.remedy)
    else:
        found = Finding("canary", Verdict.FINE, status.text)
    return [found, *_blind(status.standing)]


def _blind(standing: DataLossStatus) -> list[Finding]:
    if standing.notices_restarts:
        return []
    text = (
        "Scripts are not told which process runs them, so restarts and fail-overs are not noticed, and what they forget runs "
        "again."
    )
    return [Finding("canary", Verdict.UNKNOWN, text, _GRANT)]


def after_loss(memory: Memory, endpoints: Iterable[Endpoint], *, lenient: bool) -> list[Finding]:
    """Whether the right store would be told from another, and whether owners had the time to put their claims back."""
    rules = memory.rules
    if rules.after_loss == "run":
        if lenient:
            return [Finding("after-loss", Verdict.FINE, "What is forgotten runs again, as it may in debug mode.")]
        text = "What this store forgets, by a restart or when it is emptied, runs again: IDEMPOTENCY_AFTER_LOSS is run."
        remedy = "Set IDEMPOTENCY_AFTER_LOSS to refuse, or leave it away, before this application moves money."
        return [Finding("after-loss", Verdict.ADVICE, text, remedy)]
    findings = [*_unnamed(memory, rules), *_hasty(rules, endpoints)]
    return findings or [Finding("after-loss", Verdict.FINE, "Another store, and an emptied one, would be refused.")]


def _unnamed(memory: Memory, rules: Rules) -> list[Finding]:
    if rules.store_id is not None:
        return []
    store_id = memory.standing().store_id
    text = "Any store would do: that of another environment knows none of the keys, and would run all of them again."
    remedy = (
        f"Set IDEMPOTENCY_STORE_ID to {store_id}."
        if store_id is not None
        else "Set IDEMPOTENCY_STORE_ID to what `flask idempotency redis status` says when it is ready."
    )
    return [Finding("after-loss", Verdict.ADVICE, text, remedy)]


def _hasty(rules: Rules, endpoints: Iterable[Endpoint]) -> list[Finding]:
    late = [each for each in endpoints if each.policy.lease > rules.hold]
    if not late:
        return []
    lease = max(each.policy.lease for each in late)
    text = (
        f"After a loss new keys may run again within {rules.hold:g} s, and owners that survived have until the end of their "
        f"leases to put their claims back, up to {lease:g} s. So it is for {some(each.name for each in late)}."
    )
    # Where a person says when, they can be told to wait for longer.
    verdict = Verdict.FAULT if rules.after_loss == "hold" else Verdict.ADVICE
    return [Finding("after-loss", verdict, text, f"Set IDEMPOTENCY_LOSS_HOLD to {lease:g} or more.")]


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]

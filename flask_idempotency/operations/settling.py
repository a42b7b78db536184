"""A person settles a key in its owner's place: what speaks against it, and doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.model import Record, Result, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Settler, last_seen, may_live_for, releasable_in
from flask_idempotency.operations.finding import Case
from flask_idempotency.operations.refusal import Refused
from flask_idempotency.operations.spelling import moment, span

_NOBODY_KNOWS: Final = (
    "Its owner may still be at work: this application has no such endpoint, or has it under another name, so nobody knows "
    "for how long it may run."
)


@dataclass(frozen=True, slots=True)
class Word:
    """Whose word it is, and why they give it: for the audit event. Neither may name a key, a person or a body."""

    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """How many of a case's records were settled. `left` were changed by somebody else meanwhile, and stay."""

    settled: int
    left: int


def doubts(case: Case, policy: Policy, *, known: bool = True) -> list[str]:
    """Why this key should not run again, one sentence each. Empty: it was not done, as far as we know, and nobody is at it.

    `known`: the application has the endpoint that the key was used for, so the policy's `max_runtime` is what its views have.
    """
    said = []
    seconds = wait(case, policy)
    if any(found.record.state is State.COMPLETED for found in case.found):
        said.append("Its work was done, and retries get the answer. Released, the next retry does it once more.")
    elif any(found.record.payload is not None for found in case.found):
        said.append(
            "Its work was done: the record holds an answer that nobody could open. Released, the next retry does it once "
            "more. See `resolve --reopen` and `resolve --happened`."
        )
    if not known and any(may_live_for(found.record, max_runtime=inf) == inf for found in case.found):
        return [*said, _NOBODY_KNOWS]
    # An owner that counts as gone does not speak against it, though it may be frozen: a second run does no harm there.
    lives = [living for found in case.found if seconds > 0 and (living := alive(found.record, policy)) is not None]
    return [*said, *lives[:1]]


def wait(case: Case, policy: Policy) -> float:
    """Seconds until its owners count as gone for a release without force, by the store's clock when it was read."""
    return max(releasable_in(found.record, policy) for found in case.found)


def way_out(case: Case, policy: Policy, *, known: bool = True) -> str:
    """What whoever was refused a release may do: wait, and for how long, or overrule it."""
    done = any(found.record.payload is not None or found.record.state is State.COMPLETED for found in case.found)
    seconds = 0 if done or not known else ceil(wait(case, policy))
    if seconds <= 0:
        return "To release it all the same: --force."
    return f"Repeat this in {seconds} s, or release it now all the same: --force."


def alive(record: Record, policy: Policy) -> str | None:
    """When the owner was last seen, and until when it may be at work. None: it is not, or has said that it cannot tell."""
    lives = may_live_for(record, max_runtime=policy.max_runtime)
    if lives <= 0:
        return None
    until = moment(record.deadline - record.remaining + lives)
    return (
        f"Its owner may still be at work: it was last seen {span(last_seen(record, lease=policy.lease))} ago, and may go on "
        f"for {span(lives)}, until {until}."
    )


def release(settler: Settler, case: Case, word: Word, *, forced: bool) -> Done:
    """The key may run again. `forced`: there were doubts, and somebody has overruled them."""
    return _each(case.found, lambda found: settler.free(found, actor=word.actor, reason=word.reason, forced=forced))


def complete(settler: Settler, case: Case, result: Result, word: Word, *, keep: float) -> Done:
    """It was done: retries get this result. Raises `Refused` unless it is quarantined."""
    check_quarantined(case)
    return _each(
        case.found, lambda found: settler.complete(found, result, keep=keep, actor=word.actor, reason=word.reason)
    )


def reopen(settler: Settler, case: Case, word: Word, *, keep: float) -> Done:
    """It was done, and its answer can be opened again. Raises `Refused` when it cannot, or there is none."""
    check_quarantined(case)

    def anew(found: Found) -> bool:
        try:
            return settler.reopen(found, keep=keep, actor=word.actor, reason=word.reason)
        except CorruptRecord as error:
            if found is not case.first:
                return False
            raise Refused(f"It cannot be reopened: {error}. Nothing was changed.") from error

    return _each(case.found, anew)


def check_quarantined(case: Case) -> None:
    """Raises `Refused` for a key that nobody has to resolve."""
    match case.first.record.state:
        case State.QUARANTINED:
            return
        case State.COMPLETED:
            raise Refused("There is nothing to resolve: its work was done, and retries get the answer.")
        case State.PROCESSING:
            raise Refused(
                "Only a quarantined key can be resolved, and this one is in progress. When its lease is over, `flask "
                "idempotency reap` quarantines it; `release` frees it."
            )


def _each(found: Sequence[Found], settle: Callable[[Found], bool]) -> Done:
    """The first decides, as it does for an owner: whoever has that has all. If it is somebody else's, nothing is touched."""
    if not settle(found[0]):
        return Done(0, left=len(found))
    rest = [settle(each) for each in found[1:]]
    return Done(1 + sum(rest), left=rest.count(False))

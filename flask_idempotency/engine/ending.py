"""Hold the work that runs under a claim, and end the claim as the work ended.

HTTP requests and messages both use this. The context variable `running` tells `current_claim` which message this code works on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, assert_never

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.errors import IdempotencyError, LeaseLost, NotCommitted, StoreUnavailable
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OnExpiry, StoredResponse
from flask_idempotency.engine.policy import Decision, Policy

if TYPE_CHECKING:
    from flask_idempotency.engine.store import Transactions

ELSEWHERE: Final = frozenset({307, 308})
"""The client repeats the request elsewhere: such a response does not say that the view completed it."""

NOT_REACHED: Final = "not-reached"
"""Why a try of the janitor has failed: the view responded, and has not asked for a recorded step."""

_log = logging.getLogger("flask_idempotency")


class Running:
    """Work that runs, or may run, under a claim. Defaults are attributes of the class: work pays only for what it sets."""

    policy: Policy
    operation: str
    claim: Claim | None = None
    watch: Claim | None = None
    """The watch on work that runs without a claim, because it is only observed."""
    oldest: Identity | None = None
    """The identity under the oldest secret in use, which downstream keys come from."""
    client_key: str = ""
    """The client's key, or the id of the message."""
    tenant: str | None = None
    principal: str | None = None
    keeps_rows: bool = False
    """Whether the work wants its rows committed even if its response is an error."""
    shield: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)
    """Makes the context in which the work may call the store. Celery holds signals off in it."""
    published: dict[str, int] | None = None
    """How many messages this work has published to each topic of the outbox."""
    unstated: bool = False
    """Whether the key is quarantined by default: neither the application nor the work decided that."""
    thread: int = 0
    """The thread that runs the work, by `threading.get_ident`. Set for work with steps."""
    transactions: Transactions | None = None
    """Commits each transactional step of work that runs without a claim."""
    finishing: object | None = None
    """The janitor's try to finish this request in its client's place. None: the client sent it."""
    strict: bool = False
    """Whether a step result that cannot be kept raises: in debug mode and in tests, where a developer reads it."""

    @property
    def step_hindrance(self) -> str:
        """Where this code runs, if no step may begin there, and the remedy. Empty: one may."""
        return ""

    @property
    def transactional(self) -> bool:
        """Whether the rows that the work writes are committed with its claim."""
        return self.claim is not None and self.claim.transactional

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether a step of this work raised this error of ours."""
        steps = None if self.claim is None else self.claim.steps
        return steps is not None and any(error is refusal for refusal in steps.refusals)

    @property
    def past_point(self) -> bool:
        """Whether the work passed its point of no return."""
        return self.claim is not None and self.claim.past_point


def _nothing(*_: object) -> None:
    """What each of these finds as long as no package sets it."""


request_context: Callable[[], object] = _nothing
"""Return the request context that is current. `web` sets this: without it, no request has a claim."""

request_work: Callable[[], Running | None] = _nothing
"""Return the request that is being handled. `web` sets this too."""

step_in: Callable[[Running], str | None] = _nothing
"""Return the name of the step of this work whose function runs here. `steps` sets this: without it, there are none."""

running: ContextVar[tuple[Running, object] | None] = ContextVar("flask_idempotency_running", default=None)
"""The message that this code works on, and the request context that was current when its work began."""


IN_STREAM: Final = "in the generator of a stream. Finish every step before the view returns its response."
"""A `step_hindrance`."""

in_stream: Final[ContextVar[bool]] = ContextVar("flask_idempotency_in_stream", default=False)
"""Whether this code makes the body of a response whose request had a claim. It may run without that request's context."""


def running_here() -> Running | None:
    """Return the message that this code works on. None: there is none, or this code serves a request that the work sent."""
    found = running.get()
    if found is None:
        return None
    # Without a request this is the message's own code, also in an application context that the work has entered.
    here = request_context()
    return found[0] if here is None or here is found[1] else None


def work_here() -> Running | None:
    """Return what this code works on: a message, or else the request that is being handled."""
    return running_here() or request_work()


def commits_rows_here() -> bool:
    """Return whether the rows that this code writes are committed with the work, or with the step, that it is part of."""
    work = work_here()
    if work is None or work.policy.effects == "transactional":
        return work is not None
    return work.policy.commits_step(step_in(work))


def decide(
    work: Running, *, response: Any, status: int, error: BaseException | None, overruled: bool = False
) -> Decision:
    """Decide what happens to the claim, by the policy and by how the work ended.

    If the application's `decide` fails, quarantine the key, or release it if a rollback undoes all. If the work wants its
    rows kept, keep the response with them: they must not be written twice. Note whether only the default quarantined it.
    """
    policy, claim = work.policy, work.claim
    beyond = claim is not None and claim.past_point
    try:
        stated = policy.stated(response=response, status=status, error=error, overruled=overruled)
    except Exception:  # noqa: BLE001 - an application's own function may raise anything
        decision = Decision.RELEASE if work.transactional and not beyond else Decision.QUARANTINE
        _log.exception("`decide` failed for %s: its key is %sd", work.operation, decision.value)
        stated = decision
    else:
        decision = policy.settled_as(stated, past_point=beyond)
    if decision is Decision.RELEASE and work.transactional and work.keeps_rows and error is None:
        return Decision.KEEP
    work.unstated = decision is Decision.QUARANTINE is not stated
    return decision


def with_rows(work: Running, *, status: int, error: BaseException | None) -> bool:
    """Return whether to commit the rows of transactional work. `status` is the worse of the view's and its hooks'."""
    return (status < 400 and status not in ELSEWHERE) or (work.keeps_rows and error is None)


def vanished(work: Running) -> Decision:
    """Decide for a worker that is being killed: treat it as one that vanished."""
    return Decision.RELEASE if work.policy.on_expiry is OnExpiry.TAKEOVER else Decision.QUARANTINE


def stopped_short(work: Running, decision: Decision) -> bool:
    """Return whether a try of the janitor, which this is, would answer for a view that did not come to a recorded step.

    The try lacks what is not kept of the client's request, such as its session. That says nothing about the steps.
    """
    steps = None if work.claim is None else work.claim.steps
    return steps is not None and decision is Decision.KEEP and not steps.poisoned and bool(steps.unasked)


def settle(work: Running, decision: Decision, stored: StoredResponse, *, reason: str, rows: bool = False) -> Decision:
    """End the claim, and return how: past its point of no return, a release is a quarantine.

    Raises `LeaseLost`; if the work is transactional, also `NotCommitted` and `StoreUnavailable`; and no other error.
    """
    claim = work.claim
    if claim is None:
        return decision
    if work.finishing is not None and stopped_short(work, decision):
        decision, reason = Decision.RELEASE, NOT_REACHED
    if decision is Decision.RELEASE and claim.past_point:
        decision = Decision.QUARANTINE
    if (steps := claim.steps) is not None:
        # A poisoned request is never completed nor resumed; and a response that is kept answers for every recorded effect.
        held = steps.hold() if decision is Decision.KEEP else steps.poisoned
        if held:
            decision, reason = Decision.QUARANTINE, held
    try:
        match decision:
            case Decision.KEEP:
                claim.complete(stored, with_rows=rows)
            case Decision.RELEASE:
                claim.release(reason)
            case Decision.QUARANTINE:
                claim.quarantine(reason)
            case unexpected:
                assert_never(unexpected)
    except (LeaseLost, NotCommitted, StoreUnavailable):
        raise
    except Exception as error:
        if claim.transactional:
            why = error if isinstance(error, IdempotencyError) else type(error).__name__
            raise StoreUnavailable(f"the work could not be settled: {why}") from error
        # The record stays claimed, and its lease expires as its policy says.
        _log.exception("%s could not be settled", work.operation)
    return decision

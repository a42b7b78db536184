"""What becomes of a visit's claim, by its policy and by how its work ended."""

from __future__ import annotations

import logging
from typing import Final

from werkzeug.wrappers import Response

from flask_idempotency.engine.policy import Decision
from flask_idempotency.engine.record import OnLapse
from flask_idempotency.web.visit import Visit

ELSEWHERE: Final = frozenset({307, 308})
"""The same request goes elsewhere: such an answer promises nothing of what was done here."""

_log = logging.getLogger("flask_idempotency")


def decide(visit: Visit, *, response: Response | None, status: int, error: BaseException | None) -> Decision:
    """What the policy says. Where the application's own `decide` fails, nobody knows, and the key is quarantined.

    Unless nothing will be left of the work: then it is released. And an answer whose rows the view wants kept is kept with
    them, for they must not be written twice.
    """
    beyond = past_point(visit)
    try:
        decision = visit.policy.decision(response=response, status=status, error=error, past_point=beyond)
    except Exception:  # noqa: BLE001 - an application's own function may raise anything
        decision = Decision.RELEASE if transactional(visit) and not beyond else Decision.QUARANTINE
        _log.exception("`decide` failed for %s: its key is %sd", visit.operation, decision.value)
    if decision is Decision.RELEASE and transactional(visit) and visit.keeps_rows and error is None:
        return Decision.KEEP
    return decision


def with_rows(visit: Visit, *, status: int, error: BaseException | None) -> bool:
    """Whether the rows of a transactional view are to be committed. `status` is the worse of the view's and its hooks'."""
    return (status < 400 and status not in ELSEWHERE) or (visit.keeps_rows and error is None)


def vanished(visit: Visit) -> Decision:
    """A worker that is being killed knows as little of the outcome as one that is gone."""
    return Decision.RELEASE if visit.policy.on_lapse is OnLapse.TAKEOVER else Decision.QUARANTINE


def past_point(visit: Visit) -> bool:
    """Whether the visit's work may have done what must not be done twice."""
    return visit.claim is not None and visit.claim.past_point


def transactional(visit: Visit) -> bool:
    """Whether the rows that its view writes are committed with its claim."""
    return visit.claim is not None and visit.claim.transactional

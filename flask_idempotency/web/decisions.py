"""What becomes of a visit's claim, by its policy and by how its work ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock
from typing import Final

from werkzeug.wrappers import Response

from flask_idempotency.engine.model import OnLapse
from flask_idempotency.engine.policy import Decision
from flask_idempotency.web.visit import Visit

ELSEWHERE: Final = frozenset({307, 308})
"""The same request goes elsewhere: such an answer promises nothing of what was done here."""

_log = logging.getLogger("flask_idempotency")


def decide(
    visit: Visit, *, response: Response | None, status: int, error: BaseException | None, overruled: bool = False
) -> Decision:
    """What the policy says. Where the application's own `decide` fails, nobody knows, and the key is quarantined.

    Unless nothing will be left of the work: then it is released. And an answer whose rows the view wants kept is kept with
    them, for they must not be written twice. Notes in the visit whether a quarantine is nobody's word but the default.
    """
    policy, beyond = visit.policy, past_point(visit)
    try:
        stated = policy.stated(response=response, status=status, error=error, overruled=overruled)
    except Exception:  # noqa: BLE001 - an application's own function may raise anything
        decision = Decision.RELEASE if transactional(visit) and not beyond else Decision.QUARANTINE
        _log.exception("`decide` failed for %s: its key is %sd", visit.operation, decision.value)
        stated = decision
    else:
        decision = policy.settled_as(stated, past_point=beyond)
    if decision is Decision.RELEASE and transactional(visit) and visit.keeps_rows and error is None:
        return Decision.KEEP
    visit.unstated = decision is Decision.QUARANTINE is not stated
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


class QuarantineLog:
    """Tells the operator of one application why failed requests quarantine their keys, and what would let retries run."""

    INTERVAL_SECONDS: Final = 3600
    """A view that fails does so on every request. One line an hour for each endpoint is seen, and drowns nothing."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def quarantined(self, visit: Visit, reason: str) -> None:
        """Log this quarantine, or count it if the endpoint had its line within the hour."""
        operation, now = visit.operation, self._monotonic()
        with self._lock:
            if now < self._next.get(operation, now):
                self._suppressed[operation] = self._suppressed.get(operation, 0) + 1
                return
            self._next[operation] = now + self.INTERVAL_SECONDS
            more = self._suppressed.pop(operation, 0)
        _log.warning(
            "%s failed (%s) %s. The key is quarantined: retries get 409 outcome-unknown until a resolver or an operator "
            "settles it. %s%s",
            operation,
            reason,
            "past its point of no return" if past_point(visit) else "and does not say how far it came",
            _remedy(visit),
            f" {more} more keys of this endpoint since the last such line." if more else "",
        )


def _remedy(visit: Visit) -> str:
    if not past_point(visit):
        return (
            'A retry runs by itself under effects="transactional" (rows committed with the record), "deduplicated" (a unique '
            'marker row or a downstream key) and "marked" (before its point of no return). on_error="release" runs it again '
            f'under effects="{visit.policy.effects}" too, and may do the work twice.'
        )
    if transactional(visit):
        return "The view committed by itself. Leave the commit to the library, and the retry runs."
    return (
        'A retry runs by itself under effects="deduplicated", without current_claim.point_of_no_return(), if the effect '
        "carries current_claim.downstream_key(…) or a unique marker row."
    )

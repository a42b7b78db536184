"""Judge a request that ended otherwise than with a whole response: what becomes of its key, and what is stored for its retries.

Each function takes a request that has a claim, and ends nothing: `engine.ending.settle` does that, as it was judged. The guard
judges whole responses itself.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Final, NamedTuple

from flask_idempotency.engine.ending import decide, vanished
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.outages import LogLimit
from flask_idempotency.engine.policy import Decision
from flask_idempotency.web.request_state import Phase, RequestState
from flask_idempotency.web.responses import StreamEnd

_log = logging.getLogger("flask_idempotency")

QUARANTINES_SECONDS: Final = 3600
"""A failing view fails on every request: one line per endpoint and hour is enough."""

NO_RESPONSE: Final = StoredResponse(status=500, kept=False)
"""What is stored of a request without a response of its view."""


class Judgement(NamedTuple):
    """How the claim of a request is to end."""

    decision: Decision
    stored: StoredResponse
    reason: str
    rows: bool = False
    """Whether the rows of a transactional view are committed."""
    error: BaseException | None = None
    """The error that the view failed with."""
    held: str = ""
    """Why its recorded steps hold the key back from a completion. Empty: they do not."""


UNCAPTURED: Final = Judgement(Decision.RELEASE, NO_RESPONSE, "uncaptured")
"""The application left out its after_request functions, and with them ours: its response is not known."""


def judge_stream(state: RequestState, end: StreamEnd) -> Judgement | None:
    """Note how a stream ended, and judge its request. None: it has been judged, or `judge_response` is to come."""
    if state.phase not in (Phase.CLAIMED, Phase.STREAMING) or state.capture is None:
        return None
    state.end = end
    tee = state.tee() if state.tee is not None else None
    state.result = stored = replace(state.capture, tee=tee).result or state.capture.tombstone
    error = sys.exc_info()[1] if end is StreamEnd.ERROR else None
    if error is not None:
        state.error = error
    if state.phase is not Phase.STREAMING:
        return None
    if error is None:
        return Judgement(state.decision or Decision.QUARANTINE, stored, f"status-{stored.status}")
    if isinstance(error, Exception):
        return Judgement(decide(state, response=None, status=stored.status, error=error), stored, "stream-failed")
    return Judgement(vanished(state), stored, "worker-interrupted")


def judge_unanswered(state: RequestState, error: BaseException | None) -> Judgement:
    """Judge a request without a response of its view: an error propagated, or a later hook failed.

    Without an error, nothing shows whether the view ran: Flask calls no function between our last hook and the view. An
    application may have left out its after_request functions, hidden an interrupt from its teardown functions, or driven a
    context by hand. So the key is left as a worker that vanished would leave it.
    """
    if error is None and state.escaped:
        error = state.error  # hidden from teardown functions, but not from us
    if error is None:
        return Judgement(vanished(state), NO_RESPONSE, "unanswered")
    if isinstance(error, Exception):
        return Judgement(decide(state, response=None, status=500, error=error), NO_RESPONSE, "error")
    return Judgement(vanished(state), NO_RESPONSE, "worker-interrupted")


def log_quarantine(state: RequestState, reason: str, limit: LogLimit) -> None:
    """Log why this request quarantines its key, and what lets retries run; or count it, if the endpoint had its line."""
    more = limit.take(state.operation)
    if more is None:
        return
    if not state.past_point:
        remedy = (
            'A retry runs by itself under effects="transactional" (rows committed with the record), "deduplicated" (a unique '
            'marker row or a downstream key) and "marked" (before its point of no return). on_error="release" runs it again '
            f'under effects="{state.policy.effects}" too, and may do the work twice.'
        )
    elif state.transactional:
        remedy = "The view committed by itself. Leave the commit to the library, and the retry runs."
    else:
        remedy = (
            'A retry runs by itself under effects="deduplicated", without current_claim.point_of_no_return(), if the effect '
            "carries current_claim.downstream_key(…) or a unique marker row."
        )
    _log.warning(
        "%s failed (%s) %s. The key is quarantined: retries get 409 outcome-unknown until a resolver or an operator "
        "settles it. %s%s",
        state.operation,
        reason,
        "past its point of no return" if state.past_point else "and does not say how far it came",
        remedy,
        f" {more} more keys of this endpoint since the last such line." if more else "",
    )

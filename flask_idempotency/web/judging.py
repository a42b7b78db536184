"""Judge how a request ended: what becomes of its key, and what is stored for its retries.

Each function takes a request that has a claim, and ends nothing: `engine.ending.settle` does that, as it was judged.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Final, NamedTuple

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wrappers import Response

from flask_idempotency.engine.ending import NOT_REACHED, decide, stopped_short, vanished, with_rows
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.outages import LogLimit
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision
from flask_idempotency.web.request_state import Phase, RequestState
from flask_idempotency.web.responses import LostFields, StreamEnd

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


def judge_response(state: RequestState, response: Response, lost_fields: LostFields) -> Judgement | None:
    """Judge a request whose hooks have all run. None: its stream goes on, and is judged when it ends."""
    captured, claim = state.capture, state.claim
    if claim is None or captured is None:
        return UNCAPTURED if state.transactional else None
    # A hook that turns a 200 into a 500 means it: what it commits, for one, is not committed.
    status = max(captured.head.status, response.status_code)
    # An error that was only reported, and got a response below 500 or a 503, was dealt with: that status was chosen.
    chosen = status < 500 or status in RELEASED_BY_DEFAULT
    failed = state.error if state.escaped or not chosen or state.end is StreamEnd.ERROR else None
    # A status that a hook put over a final response does not say what the view has done.
    overruled = status != captured.head.status not in RELEASED_BY_DEFAULT
    decision = decide(state, response=response, status=status, error=failed, overruled=overruled)
    too_large = failed is None and captured.head.status == status == RequestEntityTooLarge.code
    if too_large and state.body is not None and state.body.unread:
        # The body was not read, so a retry cannot be recognised as one: it shall get 413 again, not `key-reused`.
        decision = Decision.RELEASE
    if state.escaped_refusal is not None:
        decision = Decision.RELEASE  # the response is ours, and keeps nothing
    steps, held = claim.steps, ""
    if steps is not None:
        if state.finishing is not None and stopped_short(state, decision):
            decision, state.finishing.reason = Decision.RELEASE, NOT_REACHED
        held = steps.hold() if decision is Decision.KEEP else steps.poisoned
    if captured.lost and decision is Decision.KEEP and not held:
        lost_fields.note(state.operation, captured, state.policy)
    state.decision = decision
    if state.tee is not None and state.end is None:
        tee = state.tee()
        if tee is not None and not claim.transactional and not held:
            state.phase = Phase.STREAMING
            return None
        if tee is not None:
            # The rows are committed before the first byte leaves. The body is not known then.
            tee.mute()
        state.end = StreamEnd.CLOSED
    stored = captured.result if state.tee is None else state.result
    # A hook has the last word on how it ended: what it made an error of must not be replayed as a success.
    if stored is None or status >= (400 if claim.transactional else 500) > stored.status:
        stored = replace(captured.tombstone, status=status)
    rows = claim.transactional and with_rows(state, status=status, error=failed)
    return Judgement(decision, stored, f"status-{status}", rows, failed, held)


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
    _log.warning(
        "%s failed (%s) %s. The key is quarantined: retries get 409 outcome-unknown until a resolver or an operator "
        "settles it. %s%s",
        state.operation,
        reason,
        "past its point of no return" if state.past_point else "and does not say how far it came",
        _remedy(state),
        f" {more} more keys of this endpoint since the last such line." if more else "",
    )


def _remedy(state: RequestState) -> str:
    if not state.past_point:
        return (
            'A retry runs by itself under effects="transactional" (rows committed with the record), "deduplicated" (a unique '
            'marker row or a downstream key) and "marked" (before its point of no return). on_error="release" runs it again '
            f'under effects="{state.policy.effects}" too, and may do the work twice.'
        )
    if state.transactional:
        return "The view committed by itself. Leave the commit to the library, and the retry runs."
    return (
        'A retry runs by itself under effects="deduplicated", without current_claim.point_of_no_return(), if the effect '
        "carries current_claim.downstream_key(…) or a unique marker row."
    )

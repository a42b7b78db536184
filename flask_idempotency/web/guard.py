"""The one place that has keys claimed before views run, and turns ended work into settled claims."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import assert_never

from flask import Flask, Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    InheritedConnection,
    LeaseLost,
    NotCommitted,
    StoreUnavailable,
)
from flask_idempotency.engine.model import Result
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision, Policy
from flask_idempotency.web.answers import Answers
from flask_idempotency.web.asking import Asking
from flask_idempotency.web.decisions import QuarantineLog, decide, transactional, vanished, with_rows
from flask_idempotency.web.desk import Desk
from flask_idempotency.web.problems import Problem, failure
from flask_idempotency.web.responses import capture
from flask_idempotency.web.rows import Rows
from flask_idempotency.web.streams import End, Orphans
from flask_idempotency.web.visit import Phase, Visit

UNPROTECTED = ("Idempotency-Status", "unprotected")

_log = logging.getLogger("flask_idempotency")


class Guard:
    """Asks for claims and settles them, for one application. What belongs to one request is in its visit."""

    def __init__(self, app: Flask, desk: Desk) -> None:
        self._desk = desk
        self._answers = Answers(app, desk.loaders, docs_url=desk.settings.docs_url)
        self.rows = Rows(desk, self._answers)
        self._asking = Asking(app, desk, self._answers)
        self._quarantines = QuarantineLog()
        self.orphans: Orphans = deque()

    def enter(self, visit: Visit, request: Request) -> Response | None:
        """The answer to give in the view's place, or None: the view is to run."""
        self.hear_orphans()
        if not self._desk.settings.enabled:
            visit.phase = Phase.UNKEYED
        answer = self._asking.ask(visit, request) if self._desk.settings.enabled else None
        if answer is None:
            if visit.phase is not Phase.UNKEYED:
                return None
            try:
                self.rows.begin(visit)
            except InheritedConnection as error:
                answer = self._answers.problem(failure(error), visit.policy)
            else:
                return None
        visit.phase, visit.answer = Phase.ANSWERED, answer
        return answer.response

    def problem(self, problem: Problem, policy: Policy) -> Response:
        """The response that says why a request is not even looked at."""
        return self._answers.problem(problem, policy).response

    def again(self, visit: Visit) -> Response | None:
        """The answer that was given in the view's place, made anew: what became of the first is not known. None: there
        was none, and the view may run."""
        if visit.answer is None:
            return None
        visit.phase = Phase.ANSWERED
        return visit.answer.afresh()

    def captured(self, visit: Visit, response: Response) -> None:
        """The answer as the view and its `after_this_request` functions leave it, before any other hook has touched it."""
        visit.status = response.status_code
        if visit.phase is Phase.ANSWERED and visit.answer is not None:
            visit.answer.put_over(response)
        elif visit.phase is Phase.UNPROTECTED:
            response.headers[UNPROTECTED[0]] = UNPROTECTED[1]
        elif visit.phase is Phase.CLAIMED:
            self._capture(visit, response)

    def finished(self, visit: Visit, response: Response) -> None:
        """All hooks have run and the session is saved: settle, or put another answer over one that is not ours to give."""
        if visit.capture is None:
            if transactional(visit):
                self._uncaptured(visit, response)
            return
        # A hook that turns a 200 into a 500 means it: what it commits, for one, is not committed.
        status = max(visit.capture.head.status, response.status_code)
        # An error that was only reported, and answered with less than a 500 or with a 503, was dealt with: that was chosen.
        chosen = status < 500 or status in RELEASED_BY_DEFAULT
        failed = visit.error if visit.escaped or not chosen or visit.end is End.ERROR else None
        # A status that a hook put over an answer which was final says nothing of what the view has done.
        overruled = status != visit.capture.head.status not in RELEASED_BY_DEFAULT
        visit.decision = decide(visit, response=response, status=status, error=failed, overruled=overruled)
        too_large = failed is None and visit.capture.head.status == status == RequestEntityTooLarge.code
        if too_large and visit.body is not None and visit.body.unread:
            # Nobody has read it, so a retry cannot be recognised as one: it shall hear 413 again, not `key-reused`.
            visit.decision = Decision.RELEASE
        if visit.tee is not None and visit.end is None:
            tee = visit.tee()
            if tee is not None and not transactional(visit):
                visit.phase = Phase.STREAMING
                return
            if tee is not None:
                # Its rows are committed before its first byte leaves. What it will say is not known then, so not kept.
                tee.mute()
            visit.end = End.CLOSED
        result = visit.capture.result if visit.tee is None else visit.result
        # A hook has the last word on how it ended: what it made an error of must not be replayed as a success.
        if result is None or status >= (400 if transactional(visit) else 500) > result.status:
            result = replace(visit.capture.tombstone, status=status)
        if visit.decision is Decision.RELEASE and visit.claim is not None and visit.claim.transactional:
            visit.has_written = visit.claim.has_written()
        try:
            rows = with_rows(visit, status=status, error=failed)
            self._settle(visit, visit.decision, result, reason=f"status-{status}", rows=rows)
        except LeaseLost:
            self._answer_instead(visit, response)
        except (NotCommitted, StoreUnavailable) as error:
            self.rows.not_committed(visit, response, error)
        else:
            if transactional(visit) and visit.decision is not Decision.KEEP:
                self.rows.rolled_back(visit, response, failed)

    def interrupted(self, visit: Visit, error: BaseException | None) -> None:
        """The request ended without an answer of the view's: it was propagated, torn down, or a later hook failed.

        Without an error either, nothing tells whether the view was entered: Flask says nothing between our last hook and
        the view. An application may have left out its after_request functions, hidden an interrupt from its teardown
        functions, or driven a context by hand; so the key is left as a worker that vanished would leave it.
        """
        if error is None and visit.escaped:
            error = visit.error  # hidden from teardown functions, but not from us
        if error is None:
            decision, reason = vanished(visit), "unanswered"
        elif isinstance(error, Exception):
            decision, reason = decide(visit, response=None, status=500, error=error), "error"
        else:
            decision, reason = vanished(visit), "worker-interrupted"
        self._settle_quietly(visit, decision, Result(status=500, kept=False), reason=reason)

    def _capture(self, visit: Visit, response: Response) -> None:
        earlier = visit.tee() if visit.tee is not None else None
        if earlier is not None and response.response is not earlier:
            # A later hook failed, and this is the error's answer: how the first one's stream ends is of no interest now.
            earlier.mute()
            earlier.close()
        visit.end = visit.result = None
        taken = capture(response, visit.policy, on_end=partial(self._stream_ended, visit), orphans=self.orphans)
        visit.tee = None if taken.tee is None else weakref.ref(taken.tee)
        visit.capture = taken.without_tee()

    def _stream_ended(self, visit: Visit, end: End) -> None:
        """Told by the tee, possibly before the request is finished: then `finished` goes on from here.

        Raises `LeaseLost` where the end of a whole answer would follow, and the claim is no longer ours.
        """
        if visit.phase not in (Phase.CLAIMED, Phase.STREAMING) or visit.capture is None:
            return
        visit.end = end
        tee = visit.tee() if visit.tee is not None else None
        visit.result = replace(visit.capture, tee=tee).result or visit.capture.tombstone
        if end is End.ERROR:
            visit.error = sys.exc_info()[1]
        if visit.phase is Phase.STREAMING:
            self._settle_stream(visit, visit.result, end)

    def _settle_stream(self, visit: Visit, result: Result, end: End) -> None:
        error = visit.error if end is End.ERROR else None
        if error is None:
            decision, reason = visit.decision or Decision.QUARANTINE, f"status-{result.status}"
        elif isinstance(error, Exception):
            decision, reason = decide(visit, response=None, status=result.status, error=error), "stream-failed"
        else:
            decision, reason = vanished(visit), "worker-interrupted"
        # Only what was produced to the end can be broken off: elsewhere the transfer is broken already.
        settle = self._settle if end is End.EXHAUSTED else self._settle_quietly
        settle(visit, decision, result, reason=reason)

    def hear_orphans(self, *, most: int = 100) -> None:
        """Settle streams that were dropped without being closed. Their destructors could not: see `Tee.__del__`."""
        for _ in range(min(most, len(self.orphans))):
            try:
                ended = self.orphans.popleft()
            except IndexError:  # another thread was faster
                return
            ended()

    def _settle_quietly(self, visit: Visit, decision: Decision, result: Result, *, reason: str) -> None:
        """Settle where there is no answer left to change."""
        try:
            self._settle(visit, decision, result, reason=reason)
        except LeaseLost:
            pass  # told as an event when it was found
        except (NotCommitted, StoreUnavailable) as error:
            _log.warning("%s was not committed (%s)", visit.operation, type(error).__name__)

    def _settle(self, visit: Visit, decision: Decision, result: Result, *, reason: str, rows: bool = False) -> None:
        """Settle once, whatever is called again. Raises `LeaseLost`; if the work is transactional, also `NotCommitted` and
        `StoreUnavailable`; and nothing else."""
        visit.phase = Phase.DONE
        if visit.claim is None:
            return
        if decision is Decision.RELEASE and visit.claim.past_point:
            decision = Decision.QUARANTINE
        try:
            match decision:
                case Decision.KEEP:
                    visit.claim.complete(result, with_rows=rows)
                case Decision.RELEASE:
                    visit.claim.release(reason)
                case Decision.QUARANTINE:
                    visit.claim.hold(reason)
                    if visit.unstated:
                        self._quarantines.quarantined(visit, reason)
                case unexpected:
                    assert_never(unexpected)
        except (LeaseLost, NotCommitted, StoreUnavailable):
            raise
        except Exception as error:
            if visit.claim.transactional:
                why = error if isinstance(error, IdempotencyError) else type(error).__name__
                raise StoreUnavailable(f"the work could not be settled: {why}") from error
            # The record stays claimed, and lapses as its policy says.
            _log.exception("%s could not be settled", visit.operation)

    def _uncaptured(self, visit: Visit, response: Response) -> None:
        """The application has left out its after_request functions, and with them ours: what it answers is not known."""
        _log.error("%s was answered without after_request functions, so it was not committed", visit.operation)
        visit.decision = Decision.RELEASE
        self._settle_quietly(visit, Decision.RELEASE, Result(status=500, kept=False), reason="uncaptured")
        self.rows.rolled_back(visit, response, None)

    def _answer_instead(self, visit: Visit, response: Response) -> None:
        """This claim was lost: what its view answered may contradict what the key's callers are told from now on."""
        if visit.claim is None:
            return
        try:
            answer = self._asking.answer(visit, self._desk.engine.successor(visit.claim))
        except (StoreUnavailable, CorruptRecord) as error:
            answer = self._answers.problem(failure(error), visit.policy)
        answer.put_over(response, lost=visit.capture)

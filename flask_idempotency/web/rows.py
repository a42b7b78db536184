"""The rows of transactional views: whose commit it is without a claim, and what to answer when they are not there."""

from __future__ import annotations

import logging

from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import InheritedConnection, NotCommitted, StoreUnavailable
from flask_idempotency.engine.model import Unknown
from flask_idempotency.engine.policy import Decision
from flask_idempotency.web.answers import Answers
from flask_idempotency.web.decisions import ELSEWHERE, past_point, with_rows
from flask_idempotency.web.desk import Desk
from flask_idempotency.web.problems import CONFLICT_RETRY_SECONDS, Problem, failure, refusal
from flask_idempotency.web.visit import Phase, Visit

_log = logging.getLogger("flask_idempotency")


class Rows:
    """For one application. An answer that says they are there is replaced when they are not."""

    def __init__(self, desk: Desk, answers: Answers) -> None:
        self._desk = desk
        self._answers = answers

    def begin(self, visit: Visit) -> None:
        """A transactional view is about to run without a claim: without a key, say."""
        transactions = self._desk.engine.transactions
        if transactions is not None and visit.policy.effects == "transactional":
            visit.unclaimed = transactions.join((), b"", operation=visit.operation, told=_nothing)

    def unclaimed(self, visit: Visit, response: Response) -> None:
        """It has run. Its rows are still ours to commit."""
        visit.phase = Phase.DONE
        if visit.unclaimed is None:
            try:
                self.begin(visit)
            except InheritedConnection as error:
                self.not_committed(visit, response, error)
                return
        transaction = visit.unclaimed
        if transaction is None:
            return
        try:
            if with_rows(visit, status=max(visit.status, response.status_code), error=visit.error):
                transaction.commit()
            else:
                transaction.roll_back()
        except NotCommitted as error:
            self.not_committed(visit, response, error)
        except StoreUnavailable as error:
            self.not_committed(visit, response, error, problem=Problem("commit-unknown"))
        finally:
            transaction.leave()

    def left_over(self, visit: Visit) -> None:
        """Say so when something was written after the rows were committed: by a stream, say. It will not be."""
        transactions = self._desk.engine.transactions
        if transactions is not None and transactions.unsaved():
            _log.error(
                "%s has written with the session after its rows were committed with its answer: that is lost. What a "
                "stream or a late callback writes must be written before, or committed by itself",
                visit.operation,
            )

    def not_committed(
        self,
        visit: Visit,
        response: Response,
        error: NotCommitted | StoreUnavailable,
        *,
        problem: Problem | None = None,
    ) -> None:
        """The work is done and not kept, or nobody can tell: its answer would be a false promise."""
        # Not the original's text: it quotes what was to be written, the answer among it.
        _log.error("%s was answered, but is not known to be committed: %s", visit.operation, error)
        if problem is None:
            unknown = isinstance(error, NotCommitted) and past_point(visit)
            problem = refusal(Unknown(reason="not-committed")) if unknown else failure(error)
        self._put_over(visit, response, problem)

    def rolled_back(self, visit: Visit, response: Response, error: BaseException | None) -> None:
        """Nothing is left of the work. An answer that says otherwise must not leave; an error may, and may say more."""
        if visit.decision is Decision.RELEASE and visit.claim is not None and visit.claim.asks_again(error):
            conflict = Problem("transaction-conflict", retry_after=CONFLICT_RETRY_SECONDS)
            self._put_over(visit, response, conflict)
        elif response.status_code < 400 and response.status_code not in ELSEWHERE:
            unknown = visit.decision is Decision.QUARANTINE or past_point(visit)
            if not unknown and not visit.has_written:
                return  # a form that is shown again, say: it promises no rows
            if not unknown:
                _log.error(
                    "%s answered %d and its policy released the key, so the rows of the view were rolled back and "
                    "the client got 500 not-committed. Give such a response a status of 400 or above, or write nothing.",
                    visit.operation,
                    response.status_code,
                )
            problem = refusal(Unknown(reason="not-kept")) if unknown else Problem("not-committed")
            self._put_over(visit, response, problem)

    def _put_over(self, visit: Visit, response: Response, problem: Problem) -> None:
        self._answers.problem(problem, visit.policy).put_over(response, lost=visit.capture)


def _nothing() -> None:
    """What work without a claim commits by itself is its own affair."""

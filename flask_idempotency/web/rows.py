"""The rows of transactional views: flush them, commit those without a claim, and replace a response whose rows are gone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flask import Flask
from werkzeug.wrappers import Response

from flask_idempotency.engine.ending import ELSEWHERE, with_rows
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import NotCommitted, StoreUnavailable
from flask_idempotency.engine.model import Unknown
from flask_idempotency.engine.policy import Decision
from flask_idempotency.settings import Settings
from flask_idempotency.web.problems import CONFLICT_RETRY_SECONDS, Problem, failure, refusal
from flask_idempotency.web.replies import Replies
from flask_idempotency.web.request_state import Phase, RequestState

_log = logging.getLogger("flask_idempotency")


@dataclass(eq=False, repr=False)
class Rows:
    """What the guard does about the rows of one application's views. Plain requests do not come here."""

    app: Flask
    settings: Settings
    engine: Engine
    replies: Replies

    def flush(self, state: RequestState, response: Response) -> Response:
        """Send the rows of a transactional view to the database. What that raises counts as raised by the view.

        So the application's error handlers answer for a row that the database refuses, as they do where the view commits.
        Return their response, or the view's.
        """
        transactions = self.engine.transactions
        if (
            transactions is None
            or state.phase not in (Phase.CLAIMED, Phase.UNKEYED, Phase.UNPROTECTED)
            or not with_rows(state, status=response.status_code, error=state.error)
        ):
            return response
        try:
            transactions.flush(to_several=self._lets_pass(state))
        except Exception as error:  # noqa: BLE001 - it is raised again unless a handler of the application takes it
            response.close()
            return self.app.make_response(self.app.handle_user_exception(error))
        return response

    def _lets_pass(self, state: RequestState) -> bool:
        """Return whether a fault of this view's work is not refused: its requests are not enforced."""
        return not self.settings.enabled or state.policy.mode != "enforce"

    def join(self, state: RequestState) -> None:
        """Watch the session of a view that runs without a claim, if the store commits rows: `commit_unclaimed` ends this."""
        if self.engine.transactions is not None:
            # Work without a claim may commit by itself.
            state.unclaimed = self.engine.transactions.join(
                (), b"", operation=state.operation, on_early_commit=lambda: None
            )

    def commit_unclaimed(self, state: RequestState, response: Response) -> bool:
        """Commit the rows of a transactional view that ran without a claim. Return False if that failed."""
        state.phase = Phase.DONE
        try:
            if state.unclaimed is None:
                self.join(state)
            if state.unclaimed is None:
                return True
            if with_rows(state, status=max(state.status, response.status_code), error=state.error):
                state.unclaimed.commit(to_several=self._lets_pass(state))
            else:
                state.unclaimed.roll_back()
        except (NotCommitted, StoreUnavailable) as error:
            sent = state.unclaimed is not None and not isinstance(error, NotCommitted)
            self.replace_uncommitted(state, response, error, problem=Problem("commit-unknown") if sent else None)
            return False
        finally:
            if state.unclaimed is not None:
                state.unclaimed.leave()
        return True

    def log_unsaved(self, state: RequestState) -> None:
        """Log it if the view wrote something after its rows were committed, such as in a stream: that is lost."""
        transactions = self.engine.transactions
        if transactions is not None and transactions.unsaved():
            _log.error(
                "%s has written with the session after its rows were committed with its answer: that is lost. What a "
                "stream or a late callback writes must be written before, or committed by itself",
                state.operation,
            )

    def replace_uncommitted(
        self,
        state: RequestState,
        response: Response,
        error: NotCommitted | StoreUnavailable,
        *,
        problem: Problem | None = None,
    ) -> None:
        """Replace the response of work that was not committed, or may not have been: it would be a false promise."""
        # Not the original's text: it quotes what was to be written, the response among it.
        outcome = "its rows were rolled back" if isinstance(error, NotCommitted) else "is not known to be committed"
        _log.error("%s was answered, but %s: %s", state.operation, outcome, error)
        if problem is None:
            unknown = isinstance(error, NotCommitted) and state.past_point
            problem = refusal(Unknown(reason="not-committed")) if unknown else failure(error)
        self.replies.replace(state, response, problem)

    def replace_rolled_back(
        self, state: RequestState, response: Response, error: BaseException | None, *, has_written: bool
    ) -> None:
        """Replace a success whose rows were rolled back. The response to an error may be sent, and may say more."""
        if state.decision is Decision.RELEASE and state.claim is not None and state.claim.is_retryable(error):
            conflict = Problem("transaction-conflict", retry_after=CONFLICT_RETRY_SECONDS)
            self.replies.replace(state, response, conflict)
        elif response.status_code < 400 and response.status_code not in ELSEWHERE:
            unknown = state.decision is Decision.QUARANTINE or state.past_point
            if not unknown and not has_written:
                return  # a form that is shown again, say: it promises no rows
            if not unknown:
                _log.error(
                    "%s answered %d and its policy released the key, so the rows of the view were rolled back and "
                    "the client got 500 not-committed. Give such a response a status of 400 or above, or write nothing.",
                    state.operation,
                    response.status_code,
                )
            problem = refusal(Unknown(reason="not-kept")) if unknown else Problem("not-committed")
            self.replies.replace(state, response, problem)

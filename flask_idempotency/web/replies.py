"""Build the responses that are sent in a view's place: problems, in the dialect of a policy, and replays."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from flask import Flask, Request
from werkzeug.wrappers import Response

from flask_idempotency.assembly import is_process_local
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.model import ClaimRequest, State, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings import Settings
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.problems import PAGES_PATH, POLICY_PATH, Problem, render
from flask_idempotency.web.request_state import RequestState, context
from flask_idempotency.web.responses import overlay, replay

_log = logging.getLogger("flask_idempotency")


@dataclass(eq=False, repr=False)
class Replies:
    """Builds responses as one application's settings and its problem renderer want them."""

    app: Flask
    settings: Settings
    callbacks: Callbacks
    status_views: Mapping[str, str] = field(default_factory=dict)
    """The endpoints of status views, by blueprint. Set before the first request: see `find_status_views`."""

    def build(self, reply: Problem | StoredResponse, policy: Policy) -> Response:
        """Build a problem or a replay. Raises `CorruptRecord` for a stored response that must not be sent."""
        if isinstance(reply, Problem):
            return self._render(reply, policy)
        return replay(reply, policy=policy, response_class=self.app.response_class, render=self._render)

    def _render(self, problem: Problem, policy: Policy) -> Response:
        """Render a problem as the application's own renderer puts it, or else the profile of this policy."""
        profile, docs_url, response_class = PROFILES[policy.profile], self.settings.docs_url, self.app.response_class
        settings = self.settings
        if settings.publish:
            problem = replace(problem, policy_url=quote(context.get().request.root_path) + POLICY_PATH)
        own: Any = self.callbacks.problem_renderer
        if own is not None:
            try:
                shown = replace(problem, status=problem.status_in(profile))
                made = own(shown, profile=profile, docs_url=docs_url, response_class=response_class)
                if made is not None:
                    response = self.app.make_response(made)
                    for name, value in problem.http_headers:
                        response.headers.setdefault(name, value)
                    if problem.status_url or problem.policy_url:
                        response.headers.add("Link", problem.links)
                    return response
            except Exception:  # noqa: BLE001 - a refusal in the wrong dialect is better than a request that is run
                _log.exception("the problem renderer failed on %s", problem.code)
        request: Request = context.get().request
        pages = quote(request.root_path) + PAGES_PATH if settings.serves_problem_pages else ""
        made = render(problem, profile=profile, docs_url=docs_url, response_class=response_class, pages_url=pages)
        if settings.problem_pages and "html" in request.environ.get("HTTP_ACCEPT", ""):
            from flask_idempotency.web.problem_pages import as_page, prefers_page  # for the refusals of browsers

            if prefers_page(request):
                # A form that carries its key has the same key when it is sent again.
                return as_page(made, problem, response_class, same_key=policy.form_field is not None)
        return made

    def with_status_url(self, state: RequestState, problem: Problem) -> Problem:
        """Say where the client can ask what becomes of its key, if this problem leaves that open."""
        if not self.status_views:
            return problem
        from flask_idempotency.web.key_status import OPEN_ENDED, status_url  # for applications with a status view

        if not state.client_key or problem.code not in OPEN_ENDED or state.policy.principal is not None:
            return problem
        url = status_url(self.status_views, self.app, self.callbacks, (state.tenant, state.principal))
        return replace(problem, status_url=url)

    def replace(self, state: RequestState, response: Response, problem: Problem) -> None:
        """Replace a response that must not be sent, in place, by this problem."""
        other = self.build(self.with_status_url(state, problem), state.policy)
        overlay(response, other, policy=state.policy, lost=state.capture)


def command_for(engine: Engine, settings: Settings, policy: Policy, requests: Sequence[ClaimRequest]) -> str:
    """Return the command that frees this key, for a developer. In debug mode only: it names the record."""
    if is_process_local(settings):
        return "In debug mode: the records are in this process's memory, so a restart frees the key."
    for request in reversed(requests):
        try:
            record = engine.read(request.key)
        except (StoreUnavailable, CorruptRecord):
            continue
        if record is not None and record.state is State.QUARANTINED:
            # The operators' tools: a worker loads them for this sentence only, which it writes in debug mode.
            from flask_idempotency.engine.vanished import releasable_in
            from flask_idempotency.operations.records import handle_of

            remaining = releasable_in(record, policy)
            handle = handle_of(request.key)
            if policy.effects == "steps":
                # A release would run its finished steps again, and so it refuses.
                return (
                    f"In debug mode: `flask idempotency show {handle}` shows its steps. Settle the one in doubt by "
                    f"`flask idempotency resolve {handle} --step NAME`; then a retry goes on after the finished ones."
                )
            early = f" For {math.ceil(remaining)} s from now it needs --force." if remaining > 0 else ""
            return (
                "In debug mode: if it was not carried out, free the key by "
                f"`flask idempotency release {handle} --reason debug`.{early}"
            )
    return ""

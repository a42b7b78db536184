"""Answers of our own: problems in the dialect that the client speaks, and replays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flask import Flask
from werkzeug.wrappers import Response

from flask_idempotency.engine.model import Result
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.profiles import PROFILES, Profile
from flask_idempotency.web.loaders import Loaders
from flask_idempotency.web.problems import Problem, render
from flask_idempotency.web.responses import Capture, restore, revive

_log = logging.getLogger("flask_idempotency")


class Answer:
    """A response of ours, which survives whatever others make of it before it reaches the capture point."""

    def __init__(self, build: Callable[[], Response], policy: Policy) -> None:
        self._build = build
        self._policy = policy
        self.afresh()

    def afresh(self) -> Response:
        """The answer once more: others may have changed the last response, or have sent it."""
        self.response = self._build()
        self._as_built = _looks(self.response)
        return self.response

    def put_over(self, response: Response, *, lost: Capture | None = None) -> None:
        """Make this response say what this answer says, unless it still is this very answer."""
        if response is not self.response or _looks(response) != self._as_built:
            restore(response, self._build(), policy=self._policy, lost=lost)


class Answers:
    """Makes answers for one application."""

    def __init__(self, app: Flask, loaders: Loaders, *, docs_url: str) -> None:
        self._app = app
        self._loaders = loaders
        self._docs_url = docs_url

    def problem(self, problem: Problem, policy: Policy) -> Answer:
        """Why the request is not run, as the application's own renderer puts it, or the profile."""
        profile = PROFILES[policy.profile]
        return Answer(lambda: self._render(problem, profile=profile), policy)

    def replay(self, result: Result, policy: Policy) -> Answer:
        """The stored answer. Raises `CorruptRecord` when it must not be sent."""
        return Answer(
            lambda: revive(
                result,
                policy=policy,
                response_class=self._app.response_class,
                docs_url=self._docs_url,
                renderer=self._render,
            ),
            policy,
        )

    def _render(self, problem: Problem, *, profile: Profile, **_: Any) -> Response:
        wanted: Any = {"profile": profile, "docs_url": self._docs_url, "response_class": self._app.response_class}
        if self._loaders.problem_renderer is not None:
            try:
                made = self._loaders.problem_renderer(replace(problem, status=problem.status_in(profile)), **wanted)
                if made is not None:
                    response = self._app.make_response(made)
                    for name, value in problem.http_headers:
                        response.headers.setdefault(name, value)
                    return response
            except Exception:  # noqa: BLE001 - a refusal in the wrong dialect is better than a request that is run
                _log.exception("the problem renderer failed on %s", problem.code)
        return render(problem, **wanted)


def _looks(response: Response) -> tuple[str, list[tuple[str, str]], Any]:
    return response.status, list(response.headers), response.response

"""An application whose answers are captured and revived as the innermost hook does it, with no store in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request
from werkzeug.test import create_environ, run_wsgi_app
from werkzeug.wrappers import Response as WerkzeugResponse

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.responses import CapturedResponse, capture, replay


@dataclass(frozen=True)
class Sent:
    """What a server is handed."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.headers if field == name]

    @property
    def fields(self) -> list[tuple[str, str]]:
        """In any order, and without the length: a stream has none, its replay has."""
        return sorted(pair for pair in self.headers if pair[0] != "Content-Length")


class Remembering:
    """An application with one view, whose answer can be had again by asking for it with `replay()`."""

    def __init__(
        self, view: Callable[[], Any], *, policy: Policy | None = None, response_class: type[Response] = Response
    ) -> None:
        self.policy = policy or Policy()
        self.captured: CapturedResponse | None = None
        self.app = app = Flask(__name__)
        app.response_class = response_class
        app.post("/")(view)

        @app.before_request
        def again() -> WerkzeugResponse | None:
            if "Replay" not in request.headers:
                return None
            return replay(self.result, policy=self.policy, response_class=app.response_class)

        @app.after_request
        def snap(response: Response) -> Response:
            if "Replay" not in request.headers:
                self.captured = capture(response, self.policy, on_end=lambda end: None, abandoned=deque())
            return response

    @property
    def result(self) -> StoredResponse:
        assert self.captured is not None
        assert self.captured.result is not None
        codec = EnvelopeCodec()
        return codec.unwrap(codec.wrap(self.captured.result))

    def post(self, *, read: bool = True) -> Sent:
        return self._sent({}, read=read)

    def replay(self) -> Sent:
        return self._sent({"Replay": "please"}, read=True)

    def _sent(self, headers: dict[str, str], *, read: bool) -> Sent:
        environ = create_environ(method="POST", headers=headers)
        body, status, fields = run_wsgi_app(self.app, environ, buffered=read)
        return Sent(status, list(fields), b"".join(body) if read else b"")

"""What gunicorn serves in `test_requests.py`: the bytes of each body, or why there are none."""

from __future__ import annotations

from flask import Flask, request

from flask_idempotency.web.request_body import TruncatedBody, chunks, read_body


def create_app() -> Flask:
    app = Flask(__name__)

    @app.before_request
    def read() -> tuple[str, int] | None:
        try:
            read_body(request._get_current_object())  # type: ignore[attr-defined]
        except TruncatedBody:
            return "truncated", 400
        return None

    @app.post("/")
    def view() -> bytes:
        stream = read_body(request._get_current_object()).stream  # type: ignore[attr-defined]
        assert stream is not None
        assert b"".join(chunks(stream)) == request.get_data(cache=False)
        return b"".join(chunks(stream))

    return app

"""Errors as problem documents (RFC 9457), in the same form as the library's own."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from flask import Flask, Response, jsonify
from marshmallow import ValidationError
from werkzeug.exceptions import HTTPException


def install(app: Flask) -> None:
    app.register_error_handler(HTTPException, of_http)
    app.register_error_handler(ValidationError, of_validation)


def problem(status: int, code: str, detail: str | None, **members: Any) -> Response:
    # about:blank (RFC 9457, 4.2.1): these say no more than their status does.
    answer = jsonify(type="about:blank", title=title(status), status=status, code=code, detail=detail, **members)
    answer.status_code = status
    answer.mimetype = "application/problem+json"
    return answer


def of_http(error: HTTPException) -> Response:
    status = error.code or 500
    answer = problem(status, title(status).lower().replace(" ", "-"), error.description)
    # What the exception itself has to say in headers: Allow with a 405, for one.
    for name, value in error.get_headers():
        if name != "Content-Type":
            answer.headers.add(name, value)
    if status == HTTPStatus.UNAUTHORIZED:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def of_validation(error: ValidationError) -> Response:
    # 400 and not 422, which this service's clients know as "this key was used for something else".
    return problem(400, "invalid-input", "See `errors`: nothing was done.", errors=messages_of(error))


def messages_of(error: ValidationError) -> dict[str, Any]:
    """By field; what concerns the whole body is under `_schema`."""
    messages: dict[str, Any] = error.normalized_messages()  # type: ignore[no-untyped-call]
    return messages


def title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"

"""Serve the browser module.

The module is `flask_idempotency/browser/idempotency.js`, as it is written but for its comments and its indentation: there is no
build step.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

from flask import Flask, Response, current_app, request

from flask_idempotency.web.principals import Credentials

ENDPOINT: Final = "idempotency_browser_module"
"""The endpoint of the route that IDEMPOTENCY_BROWSER_MODULE registers."""

DAY_SECONDS: Final = 86400

COMMENT_OR_INDENT: Final = re.compile(rb"^ *(?://.*\n|\n)?", re.MULTILINE)


@lru_cache(maxsize=1)
def module_source() -> bytes:
    """Return the browser module without its lines of comment and its indentation, encoded in UTF-8."""
    return COMMENT_OR_INDENT.sub(b"", files("flask_idempotency").joinpath("browser", "idempotency.js").read_bytes())


def serve_module(app: Flask, url: str) -> None:
    """Serve the browser module at this path, on every host and subdomain that the application serves."""
    from flask_idempotency.web.key_status import route_everywhere  # for the applications that have such a route

    def module(**_: Any) -> Response:
        return public_response(module_source(), "text/javascript", max_age=DAY_SECONDS)

    route_everywhere(app, url, ENDPOINT, module)


def public_response(content: bytes, media_type: str, *, max_age: int) -> Response:
    """Return a response that other origins may read and clients may cache; or 304 if the client has it.

    Shared caches may keep it too, unless the request has credentials, of any kind that a principal may come from: then a
    hook of the application may have checked them.
    """
    response = Response(content, mimetype=media_type)
    # Strong: equal content is equal bytes.
    response.set_etag(sha256(content).hexdigest()[:32])
    known = Credentials(current_app.extensions["idempotency"].settings.credential_headers)
    if known.of(request) is not None:
        response.cache_control.private = True
    else:
        response.cache_control.public = True
    response.cache_control.max_age = max_age
    response.access_control_allow_origin = "*"
    response.make_conditional(request)
    return response

"""flask.Request → the keys it carries, and the fingerprints of what it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from flask import Request

from flask_idempotency.engine.fingerprint import (
    MAX_CANONICAL_BYTES,
    fingerprint,
    json_digest,
    raw_digest,
    unread_digest,
)
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web.bodies import FORM_TYPES, Body, chunks, read_body
from flask_idempotency.web.forms import CSRF_FIELD, Form, parse_form, parsed_form


def header_keys(request: Request, policy: Policy) -> list[str]:
    """The value of each header that may carry the key, as it came. Reads no body.

    Present and empty is a value, not an absence. Two lines of one header arrive as one value, joined by a comma.
    """
    return [value for name in policy.header if (value := request.headers.get(name)) is not None]


def client_keys(request: Request, policy: Policy) -> list[str]:
    """`header_keys`, and the values of the form field that may carry the key: only then is a body read and parsed."""
    keys = header_keys(request, policy)
    if policy.form_field is not None and request.mimetype in FORM_TYPES:
        form = _form(request, read_body(request, most=policy.max_request_body))
        keys += form.values(policy.form_field) if form is not None else []
    return keys


def fingerprints(
    request: Request,
    policy: Policy,
    identities: Iterable[Identity],
    *,
    by_host: bool = False,
    csrf_field: str = CSRF_FIELD,
) -> tuple[bytes, ...]:
    """The request's fingerprint under each identity, in their order. Reads the body, once; raises as `read_body` does.

    The path is the one the server decoded, mount point included, as bytes: two that are not UTF-8 stay two. The query
    is compared as it was sent. `by_host`: the application chooses its view by the host too, so that counts as well.
    """
    digest = partial(
        fingerprint,
        method=request.method,
        path=_path(request, by_host=by_host),
        query=request.query_string,
        media_type=_media_type(request),
        headers=[
            (name, value) for name in policy.fingerprint_headers if (value := request.headers.get(name)) is not None
        ],
        body=_body_digest(request, policy, read_body(request, most=policy.max_request_body), csrf_field=csrf_field),
    )
    return tuple(map(digest, identities))


def _path(request: Request, *, by_host: bool) -> bytes:
    path = (request.environ.get("SCRIPT_NAME") or "") + (request.environ.get("PATH_INFO") or "")
    if not by_host:
        return path.encode("latin-1")
    # Both come from the client: without the length, a part of one could pass for a part of the other.
    host = request.host.lower().encode()
    return b"%d:%b%b" % (len(host), host, path.encode("latin-1"))


def _media_type(request: Request) -> str:
    """Type and parameters, in one spelling. Without the boundary: it alone differs from one attempt to the next."""
    parameters = {name: value for name, value in request.mimetype_params.items() if name != "boundary"}
    if not parameters:
        return request.mimetype
    if "charset" in parameters:
        parameters["charset"] = parameters["charset"].lower()
    return request.mimetype + "".join(f";{name}={value!r}" for name, value in sorted(parameters.items()))


def _body_digest(request: Request, policy: Policy, body: Body, *, csrf_field: str) -> bytes:
    form_digest = partial(Form.digest, csrf_field=csrf_field, key_field=policy.form_field)
    if body.stream is None:
        form = _form(request, body)
        return unread_digest() if form is None else form_digest(form)
    if policy.fingerprint == "canonical" and _may_be_canonical(request, body):
        if request.is_json:
            return json_digest(b"".join(chunks(body.stream)), ignore=policy.ignore_fields)
        if request.mimetype in FORM_TYPES and (form := _form(request, body)) is not None and form.exact:
            return form_digest(form)
    return raw_digest(chunks(body.stream))


def _may_be_canonical(request: Request, body: Body) -> bool:
    # Only multipart is parsed piece by piece; anything else would be in memory at once.
    return (body.length or 0) <= MAX_CANONICAL_BYTES or request.mimetype == "multipart/form-data"


def _form(request: Request, body: Body) -> Form | None:
    """The form in this body, or None where it holds none that the view could see."""
    if body.stream is not None:
        return parse_form(request, body.stream)
    form = parsed_form(request) if body.parsed else None
    # A broken form that a hook has parsed looks empty, and its bytes are gone.
    return form if form is not None and (form.fields or form.files or not body.length) else None

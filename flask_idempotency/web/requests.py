"""Read a request: the keys that it carries, its body and its fingerprints, and the names of the records that it claims."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flask import Flask, Request
from werkzeug.http import parse_list_header

from flask_idempotency.codec import canonical
from flask_idempotency.engine.errors import InvalidKey
from flask_idempotency.engine.fingerprint import (
    MAX_CANONICAL_BYTES,
    fingerprint,
    path_fingerprint,
    raw_digest,
    unread_digest,
)
from flask_idempotency.engine.keys import LONGEST_NAME, Identity, Scope, key_timestamp, one_key
from flask_idempotency.engine.model import ClaimRequest
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks, former_names, load_tenant, with_former
from flask_idempotency.web.principals import AnonymousCaller, Credentials, bounded
from flask_idempotency.web.request_body import (
    BODY,
    CHUNK_BYTES,
    FORM_TYPES,
    MEMORY_BYTES,
    Body,
    BodyTooLarge,
    chunks,
    position_of,
)
from flask_idempotency.web.request_state import RequestState


def read_body(request: Request, *, most: int | None = None) -> Body:
    """Read the whole body, once per `Request` however often you call this. A nested dispatch reads its own.

    Afterwards the view finds it in `request.stream` and `wsgi.input` as if it were unread. A body whose announced length is
    over the application's limit is not read: the view may raise the limit, or respond 413.

    If it raises, the body is as it was before, and its stream fails again where it failed.

    Raises `BodyTooLarge` for more than `most` bytes, without reading if the length was announced. Raises `TruncatedBody`,
    `BodyConsumed`, `BodyNotKept`, and Werkzeug's `RequestEntityTooLarge` for a chunked body over the limit.
    """
    body: Body | None = request.__dict__.get(BODY)
    if body is not None:
        return body
    if most is not None and (request.content_length or 0) > most:
        raise BodyTooLarge
    read_before = "form" in request.__dict__ or getattr(request, "_cached_data", None) is not None
    body = None if read_before or BODY in request.environ else _read_announced(request)
    if body is None:
        from flask_idempotency.web.body_copies import copy_body  # for a body that is not plain

        body = copy_body(request, most)
    if most is not None and (body.length or 0) > most:
        raise BodyTooLarge
    request.__dict__[BODY] = request.environ[BODY] = body
    return body


def _read_announced(request: Request) -> Body | None:
    """Do what `copy_body` does for the usual request: a short body of announced length that no hook has touched.

    None for any other, which is then as it was before, and fails again where it failed.
    """
    environ = request.environ
    announced, source = environ.get("CONTENT_LENGTH", ""), environ["wsgi.input"]
    if not (announced.isdecimal() and announced.isascii() and len(announced) <= 5):
        return None
    length = int(announced)
    if not 0 < length <= MEMORY_BYTES or "stream" in request.__dict__ or "HTTP_TRANSFER_ENCODING" in environ:
        return None
    limit = request.max_content_length
    if position_of(source) != 0 or (limit is not None and length > limit):
        return None
    data = more = b""
    met: Exception | None = None
    try:
        data = source.read(length)
        while len(data) < length and (piece := source.read(length - len(data))):
            data += piece
        # Werkzeug reads a terminated stream to its end, whatever Content-Length says. A middleware that unzips has more.
        if "wsgi.input_terminated" in environ:
            more = source.read(CHUNK_BYTES)
    except Exception as error:  # noqa: BLE001 - the stream raises it again
        met = error
    if met is not None or more or len(data) < length:
        from flask_idempotency.web.body_copies import Resumed  # for what is no plain body after all

        environ["wsgi.input"] = Resumed(io.BytesIO(data + more), source, error=met)
        return None
    environ["wsgi.input"] = spool = io.BytesIO(data)
    return Body(length, spool, data=data)


def client_keys(request: Request, policy: Policy) -> list[str]:
    """Return the values of the form field that carries the key, unchanged, or else of each header that may.

    A form field that is present is what the page decided; a browser may add a header by itself to each POST (Firefox,
    `network.http.idempotencyKey.enabled`). An empty value is a value too. Two lines of one header arrive as one value,
    joined by a comma. Reads and parses the body only if the policy names a form field and this is a form.
    """
    if policy.form_field is not None and request.mimetype in FORM_TYPES:
        from flask_idempotency.web.forms import form_in  # for the requests that are forms

        form = form_in(request, read_body(request, most=policy.max_request_body))
        values = form.values(policy.form_field) if form is not None else []
        if values:
            return values
    keys = []
    for name in policy.header:
        value = request.environ.get("HTTP_" + name.upper().replace("-", "_"))
        if value is not None:
            keys.append(value)
    return keys


def found_key(request: Request, find: Callable[[Request], object], body: Body) -> list[str]:
    """Return the key that a policy's own function finds, as a quoted header value, or an empty list.

    The view then finds the body unread, whatever the function read. Raises `InvalidKey` for a key that is neither text nor
    a whole number, and what the function raises.
    """
    opened, position = "stream" in request.__dict__, body.stream.tell() if body.stream is not None else 0
    try:
        key = find(request)
    finally:
        if body.stream is not None:
            body.stream.seek(position)
            if not opened:
                # Werkzeug makes another when the view reads it.
                request.__dict__.pop("stream", None)
    if key is None or key == "":
        return []
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise InvalidKey(f"the id must be text or a whole number, not {type(key).__name__}")
    return ['"' + re.sub(r'(["\\])', r"\\\1", str(key)) + '"']


def preferred_wait(request: Request) -> int | None:
    """Return the seconds of `Prefer: wait=…` (RFC 7240), or None. A malformed preference is none, as the RFC says.

    The first of several counts. A number of more than nine digits counts as 999,999,999.
    """
    for preference in parse_list_header(request.headers.get("Prefer", "")):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":
            digits = value.strip().strip('"')
            if not (digits.isascii() and digits.isdigit()):
                return None
            digits = digits.lstrip("0") or "0"
            return int(digits) if len(digits) <= 9 else 999_999_999
    return None


def fingerprints(
    request: Request,
    policy: Policy,
    identities: Sequence[Identity],
    *,
    body: Body,
    app: Flask,
) -> tuple[list[bytes], list[bytes]]:
    """Return the request's fingerprint under each identity, in their order; then those of earlier releases, if they differ.

    The path is the one that the server decoded, mount point included, as bytes: two that are not UTF-8 stay different. The
    query counts as it was sent. The host counts too if the application selects its views by it.

    Parameters of the media type count, but not those of JSON: a `charset` "really has no effect" there (RFC 8259, section
    11), and one client library sends it where another does not. Earlier releases counted them.
    """
    path = ((request.environ.get("SCRIPT_NAME") or "") + (request.environ.get("PATH_INFO") or "")).encode("latin-1")
    # Read for each request: an application may set them after the extension was set up.
    if app.url_map.host_matching or app.subdomain_matching:
        # Both come from the client: without the length, a part of one could pass for a part of the other.
        host = request.host.lower().encode()
        path = b"%d:%b%b" % (len(host), host, path)
    if policy.fingerprint == "none":
        # The path counts all the same: without it, a second view of one provider would silently replay the first one.
        return [path_fingerprint(identity, path) for identity in identities], []
    media_types = [request.mimetype]
    if request.mimetype_params:
        # In one form, and without the boundary, which differs in each attempt.
        spelled = request.mimetype
        for name, value in sorted(request.mimetype_params.items()):
            if name != "boundary":
                spelled += f";{name}={(value.lower() if name == 'charset' else value)!r}"
        media_types = [request.mimetype, spelled] if request.is_json else [spelled]
    headers = []
    for name in policy.fingerprint_headers:
        sent = request.headers.get(name)
        if sent is not None:
            headers.append((name, sent))
    digest = _body_digest(request, policy, body, app)
    prints = []
    for media_type in media_types:
        for identity in identities:
            prints.append(
                fingerprint(
                    identity,
                    method=request.method,
                    path=path,
                    query=request.query_string,
                    media_type=media_type,
                    headers=headers,
                    body=digest,
                )
            )
    number = len(prints) // len(media_types)
    return prints[:number], prints[number:]


def _body_digest(request: Request, policy: Policy, body: Body, app: Flask) -> bytes:
    # Only multipart is parsed piece by piece; any other body would be in memory as a whole.
    small = (body.length or 0) <= MAX_CANONICAL_BYTES or request.mimetype == "multipart/form-data"
    if body.stream is not None and policy.fingerprint == "canonical" and small and request.is_json:
        data = b"".join(chunks(body.stream)) if body.data is None else body.data
        return canonical.fastest_json_digest()(data, ignore=policy.ignore_fields)
    if body.stream is None or (policy.fingerprint == "canonical" and small and request.mimetype in FORM_TYPES):
        from flask_idempotency.web.forms import form_in  # for the requests that are forms

        form = form_in(request, body)
        if form is not None and (form.exact or body.stream is None):
            csrf_field = app.config.get("WTF_CSRF_FIELD_NAME") or "csrf_token"  # Flask-WTF's setting and its default
            return form.digest(csrf_field=csrf_field, key_field=policy.form_field, ignore=policy.ignore_fields)
        if body.stream is None:
            return unread_digest()
    return raw_digest(chunks(body.stream) if body.data is None else (body.data,))


@dataclass(eq=False, repr=False)
class RequestReader:
    """Reads the requests of one application.

    `identities` has one entry per secret in use, the newest first.
    """

    app: Flask
    identities: Sequence[Identity]
    settings: Settings
    callbacks: Callbacks

    def __post_init__(self) -> None:
        settings = self.settings
        self.credentials: Credentials = Credentials(
            settings.credential_headers, allow_anonymous=settings.allow_anonymous
        )

    def read(
        self, state: RequestState, request: Request, *, trace: Callable[[], str] | None = None
    ) -> list[ClaimRequest]:
        """Return the request under every secret in use, newest first; then under its former names, unless it
        is only observed. Empty: it has no key.

        Sets the key, the caller and the body in its state. `trace` returns what the record keeps of the span.

        Raises `InvalidKey`, `UnknownCaller`, `AnonymousCaller`, `TruncatedBody`, `BodyTooLarge` and `BodyNotKept`, and
        `ConfigurationError` for a loader that returns nonsense.
        """
        policy, settings, callbacks = state.policy, self.settings, self.callbacks
        if policy.key is not None:
            state.body = read_body(request, most=policy.max_request_body)
            values = found_key(request, self.app.ensure_sync(policy.key), state.body)
        else:
            values = client_keys(request, policy)
            if policy.form_field is not None and request.mimetype in FORM_TYPES:
                state.body = read_body(request, most=policy.max_request_body)  # read already, for the key
        if not values:
            return []
        state.client_key = one_key(values, max_length=policy.max_key_length, key_format=policy.key_format)
        if callbacks.tenant is not None:
            state.tenant = load_tenant(callbacks, self.app)
        state.principal = policy.principal
        if policy.principal is None:
            state.principal = self.credentials.principal(callbacks.principal, request, self.app, in_view=state.deferred)
        if state.principal is None and settings.allow_anonymous is False:
            raise AnonymousCaller
        state.body = read_body(request, most=policy.max_request_body)
        if len(state.operation) > LONGEST_NAME:
            bounded(state.operation, "endpoint of this view has")
        operation = state.operation if policy.scope == "operation" else None
        scope = Scope(settings.namespace, state.tenant, state.principal, operation, policy.principal is not None)
        prints, former_prints = fingerprints(
            request,
            policy,
            self.identities,
            body=state.body,
            app=self.app,
        )
        requests = policy.claim_requests(
            scope,
            state.client_key,
            self.identities,
            prints,
            former_prints=former_prints,
            method=request.method,
            operation=state.operation,
            hashed=settings.hash_identities,
            timestamp=key_timestamp(state.client_key),
            trace="" if trace is None else trace(),
        )
        former = settings.former_identity
        if former is None or policy.mode != "enforce":
            return requests
        if policy.principal is not None:
            former = replace(former, principal=None)  # the policy names this caller, and no loader did
        before = former_names(former, state.tenant, state.principal, request, self.app, in_view=state.deferred)
        return with_former(former, before, scope, state.client_key, requests, self.identities)

"""Read the keys that a request carries, compute its fingerprints, and name the records that it claims.

Forms are parsed as Werkzeug parses them, without a change to the request. Files are hashed as they pass, never kept.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final, cast
from urllib.parse import unquote_to_bytes

from flask import Flask, Request
from werkzeug.datastructures import FileStorage, Headers
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser, MultiPartParser
from werkzeug.http import parse_list_header, parse_options_header

from flask_idempotency.codec import canonical
from flask_idempotency.engine.errors import InvalidKey
from flask_idempotency.engine.fingerprint import (
    MAX_CANONICAL_BYTES,
    FilePart,
    content_digest,
    fingerprint,
    form_digest,
    multipart_digest,
    path_fingerprint,
    raw_digest,
    unread_digest,
)
from flask_idempotency.engine.keys import LONGEST_NAME, Identity, Scope, key_timestamp, one_key
from flask_idempotency.engine.model import ClaimRequest
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks, former_names, load_tenant, with_former
from flask_idempotency.web.principals import AnonymousCaller, Credentials, bounded
from flask_idempotency.web.request_body import FORM_TYPES, Body, BodyConsumed, chunks, read_body
from flask_idempotency.web.request_state import RequestState

CSRF_FIELD: Final = "csrf_token"
"""Flask-WTF's name for it, unless WTF_CSRF_FIELD_NAME says otherwise."""

_CHARSETS = frozenset({"", "ascii", "us-ascii", "utf-8", "iso-8859-1"})
"""The charsets that Werkzeug decodes a part with. It treats every other as UTF-8."""

# A string without a closing quote extends to the end, so that each part of a header is scanned once.
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)', re.DOTALL)
_PARAMETER = re.compile(r";\s*([^\s=;]+)\s*=")
_EXTENDED = re.compile(r"\*\s*=(?!\s*utf-8')", re.IGNORECASE)


@valueclass(frozen=True, slots=True)
class Form:
    """The parts of a form, in order. `files` is None for a form that cannot carry any."""

    fields: Sequence[tuple[str, str]]
    files: Sequence[FilePart] | None
    exact: bool = True
    """False if a form of other bytes could look the same: then compare the bytes."""

    def digest(
        self, *, csrf_field: str = CSRF_FIELD, key_field: str | None = None, ignore: Sequence[str] = ()
    ) -> bytes:
        """Digest the form without the CSRF token and the key's field, which a page renders differently each time.

        `ignore` are JSON Pointers, as in JSON documents: `/sent_at` leaves out all values of the field `sent_at`. A form has
        no deeper members, so a longer pointer names none.

        Flask-WTF also finds the token under `<prefix>-<csrf_field>`. Those are left out only if the name contains "csrf": if
        it is `token`, a `card-token` matters. A file under one of these names counts, because it is no token. The key
        itself selects the record, so its field is not needed.
        """
        prefix = r"[\w.-]+-" if "csrf" in csrf_field.lower() else "(?!)"
        prefixed = re.compile(prefix + re.escape(csrf_field))
        left_out = {csrf_field, key_field}
        for pointer in ignore:
            if "/" not in pointer[1:]:
                left_out.add(pointer[1:].replace("~1", "/").replace("~0", "~"))
        fields = [(name, value) for name, value in self.fields if name not in left_out and not prefixed.fullmatch(name)]
        return form_digest(fields) if self.files is None else multipart_digest(fields, self.files)

    def values(self, name: str) -> list[str]:
        """Return all values of this field."""
        return [value for field, value in self.fields if field == name]


def parse_form(request: Request, stream: IO[bytes]) -> Form | None:
    """Parse the form in this stream, and restore its position. None if it is broken or over the application's limits.

    No other limits apply: this must find a key in every form that the view can read, or the view runs unprotected.
    """
    position = stream.tell()
    stream.seek(0)
    try:
        if not _may_have_files(request):
            data = stream.read()
            _, fields, _ = FormDataParser(silent=False).parse(io.BytesIO(data), request.mimetype, None)
            return _named(list(fields.items(multi=True)), None, exact=_is_utf8(data))
        parser = _Parts(
            stream_factory=lambda *_, **__: cast(IO[bytes], _Hashing()),
            max_form_memory_size=request.max_form_memory_size,
            max_form_parts=request.max_form_parts,
        )
        boundary = request.mimetype_params.get("boundary", "").encode("ascii")
        if not boundary:
            return None
        fields, files = parser.parse(stream, boundary, request.content_length)
    except (ValueError, RequestEntityTooLarge):
        return None
    finally:
        stream.seek(position)
    parts = [_part(name, file, cast(_Hashing, file.stream).digest()) for name, file in files.items(multi=True)]
    return _named(list(fields.items(multi=True)), parts, exact=not parser.doubtful)


def parsed_form(request: Request) -> Form | None:
    """Return the form that an earlier hook parsed, equal to the result of `parse_form`. None if it is broken.

    Restores the position of its files. Raises `BodyConsumed` if one can no longer be read. The bytes of the form are gone,
    also for the view, so forms that look the same here do so in the view. Only a file still shows the view its header.
    """
    if any(_is_doubtful(file.headers) for file in request.files.values()):
        return None
    try:
        parts = [
            _part(name, file, content_digest(chunks(file.stream))) for name, file in request.files.items(multi=True)
        ]
    except (AttributeError, OSError, ValueError) as error:
        raise BodyConsumed from error
    return _named(list(request.form.items(multi=True)), parts if _may_have_files(request) else None)


def _named(fields: list[tuple[str, str]], files: list[FilePart] | None, *, exact: bool = True) -> Form | None:
    # Werkzeug passes on a part without a name, under None.
    names: Iterable[str | None] = (*(name for name, _ in fields), *(part.name for part in files or ()))
    return None if None in names else Form(fields, files, exact)


class _Parts(MultiPartParser):
    """Notices parts that another reader of the same bytes may understand differently."""

    doubtful = False

    def get_part_charset(self, headers: Headers) -> str:
        self.doubtful = self.doubtful or _is_doubtful(headers)
        return super().get_part_charset(headers)

    def start_file_streaming(self, event: Any, total_content_length: int | None) -> IO[bytes]:
        self.doubtful = self.doubtful or _is_doubtful(event.headers)
        return super().start_file_streaming(event, total_content_length)

    def parse(self, stream: IO[bytes], boundary: bytes, content_length: int | None) -> Any:
        fields, files = super().parse(stream, boundary, content_length)
        texts = [text for pair in fields.items(multi=True) for text in pair]
        texts += [text for name, file in files.items(multi=True) for text in (name, file.filename or "")]
        # Werkzeug replaces bytes that it cannot decode by this, so different bytes look the same.
        self.doubtful = self.doubtful or any("\ufffd" in (text or "") for text in texts)
        return fields, files


def _is_doubtful(headers: Headers) -> bool:
    """Whether the header of a part has more than one meaning: an unknown charset or encoding, or a name given twice."""
    if any(len(headers.getlist(name)) > 1 for name in ("Content-Disposition", "Content-Type")):
        return True
    disposition = _QUOTED.sub('""', headers.get("Content-Disposition", ""))
    names = [name.lower().rstrip("*") for name in _PARAMETER.findall(disposition)]
    charset = parse_options_header(headers.get("Content-Type"))[1].get("charset", "").lower()
    encoding = headers.get("Content-Transfer-Encoding", "binary").lower()
    return (
        len(names) != len(set(names))
        or _EXTENDED.search(disposition) is not None
        or charset not in _CHARSETS
        or encoding not in ("7bit", "8bit", "binary")
    )


def _is_utf8(data: bytes) -> bool:
    try:
        unquote_to_bytes(data).decode()
    except UnicodeDecodeError:
        return False
    return True


class _Hashing:
    """Replaces the file that a part is written to, and hashes the part."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return len(data)

    def seek(self, position: int) -> int:
        return position

    def digest(self) -> bytes:
        return self._digest.digest()


def _part(name: str, file: FileStorage, content: bytes) -> FilePart:
    return FilePart(name, file.filename or "", file.content_type or "", content)


def _may_have_files(request: Request) -> bool:
    return request.mimetype == "multipart/form-data"


def client_keys(request: Request, policy: Policy) -> list[str]:
    """Return the values of the form field that carries the key, unchanged, or else of each header that may.

    A form field that is present is what the page decided; a browser may add a header by itself to each POST (Firefox,
    `network.http.idempotencyKey.enabled`). An empty value is a value too. Two lines of one header arrive as one value,
    joined by a comma. Reads and parses the body only if the policy names a form field and this is a form.
    """
    if policy.form_field is not None and request.mimetype in FORM_TYPES:
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
    by_host: bool = False,
    csrf_field: str = CSRF_FIELD,
) -> tuple[list[bytes], list[bytes]]:
    """Return the request's fingerprint under each identity, in their order; then those of earlier releases, if they differ.

    The path is the one that the server decoded, mount point included, as bytes: two that are not UTF-8 stay different. The
    query counts as it was sent. `by_host`: the application also selects its view by the host, so the host counts too.

    Parameters of the media type count, but not those of JSON: a `charset` "really has no effect" there (RFC 8259, section
    11), and one client library sends it where another does not. Earlier releases counted them.
    """
    path = ((request.environ.get("SCRIPT_NAME") or "") + (request.environ.get("PATH_INFO") or "")).encode("latin-1")
    if by_host:
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
    digest = _body_digest(request, policy, body, csrf_field)
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


def _body_digest(request: Request, policy: Policy, body: Body, csrf_field: str) -> bytes:
    if body.stream is None:
        form = form_in(request, body)
        return unread_digest() if form is None else _form_digest(form, policy, csrf_field)
    pieces = chunks(body.stream) if body.data is None else (body.data,)
    # Only multipart is parsed piece by piece; any other body would be in memory as a whole.
    small = (body.length or 0) <= MAX_CANONICAL_BYTES
    if policy.fingerprint == "canonical" and (small or request.mimetype == "multipart/form-data"):
        if request.is_json:
            return canonical.fastest_json_digest()(b"".join(pieces), ignore=policy.ignore_fields)
        if request.mimetype in FORM_TYPES and (form := form_in(request, body)) is not None and form.exact:
            return _form_digest(form, policy, csrf_field)
    return raw_digest(pieces)


def _form_digest(form: Form, policy: Policy, csrf_field: str) -> bytes:
    return form.digest(csrf_field=csrf_field, key_field=policy.form_field, ignore=policy.ignore_fields)


def form_in(request: Request, body: Body) -> Form | None:
    """Return the form in this body, or None if it has none that the view can read."""
    if body.stream is not None:
        return parse_form(request, body.stream)
    form = parsed_form(request) if body.parsed else None
    # A broken form that a hook has parsed looks empty, and its bytes are gone.
    return form if form is not None and (form.fields or form.files or not body.length) else None


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
            # Read for each request: an application may set them after the extension was set up.
            by_host=self.app.url_map.host_matching or self.app.subdomain_matching,
            csrf_field=self.app.config.get("WTF_CSRF_FIELD_NAME") or CSRF_FIELD,
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

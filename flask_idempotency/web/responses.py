"""Keep what a view responds, and send a stored response again."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from werkzeug.datastructures import Headers
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.urls import iri_to_uri
from werkzeug.wrappers import Response
from werkzeug.wsgi import ClosingIterator

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES, allowed_fields
from flask_idempotency.web.problems import Problem, Renderer, render


class StreamEnd(Enum):
    """How a stream ended. Only `EXHAUSTED` means that the whole answer was produced."""

    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    ERROR = "error"


OnEnd: TypeAlias = Callable[[StreamEnd], None]

AbandonedStreams: TypeAlias = "deque[Callable[[], None]]"
"""Ends of streams that a destructor could not report. A request that may do I/O takes them off the left and calls them."""


class Tee(Iterator[bytes]):
    """Hands a body on chunk by chunk, and keeps a copy up to a limit.

    `on_end` is told once how it ended: before the end marker leaves, or the last byte of a body of announced length, so
    that what it stores is stored by the time that the client knows the answer to be complete. The one thing it may
    raise is `LeaseLost`, and only of `EXHAUSTED`: the client must not believe this answer, so it gets no end.
    """

    def __init__(
        self,
        source: Iterable[str] | Iterable[bytes],
        *,
        limit: int,
        announced: int | None = None,
        on_end: OnEnd,
        abandoned: AbandonedStreams,
    ) -> None:
        # Until iter() has worked there is nothing that __del__ should report.
        self.end: StreamEnd | None = StreamEnd.ERROR
        self._chunks: Iterator[str | bytes] = iter(source)
        self._source = source
        self._limit = limit
        self._announced = announced
        self._on_end = on_end
        self._abandoned = abandoned
        self._copy: list[bytes] = []
        self._byte_size = 0
        self._ahead: bytes | None = None
        self._muted = False
        self._lost = False
        self.end = None

    @property
    def over_limit(self) -> bool:
        """Whether more than the limit has passed by; the copy is gone then."""
        return self._byte_size > self._limit

    def copied(self) -> bytes:
        """What has passed by so far; nothing once it is over the limit."""
        return b"".join(self._copy)

    def mute(self) -> None:
        """Another answer has taken this one's place: nobody is told of its end."""
        self._muted = True

    def __iter__(self) -> Tee:
        return self

    def __next__(self) -> bytes:
        data, self._ahead = self._ahead, None
        if data is None:
            data = self._pull()
            if self._byte_size == self._announced:
                self._look_ahead()
        return data

    def close(self) -> None:
        """Close the source first, so that the view's generator has done its last before the end is told."""
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        finally:
            self._ended(StreamEnd.CLOSED)

    def __del__(self) -> None:
        # A collector may run this while this thread holds any lock, the store's own too: what waits here never wakes.
        if self.end is None and not self._muted:
            self._abandoned.append(partial(self._on_end, StreamEnd.CLOSED))

    def _pull(self) -> bytes:
        if self._lost:
            raise LeaseLost("the claim on this answer was lost while it was being sent")
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self._ended(StreamEnd.EXHAUSTED)
            raise
        except BaseException:
            self._ended(StreamEnd.ERROR)
            raise
        data = chunk.encode() if isinstance(chunk, str) else chunk
        self._keep(data)
        return data

    def _look_ahead(self) -> None:
        # No end marker follows a body of announced length: these bytes are the end, so they wait until it is told.
        with suppress(StopIteration):
            self._ahead = self._pull()

    def _keep(self, data: bytes) -> None:
        self._byte_size += len(data)
        if self.over_limit:
            self._copy.clear()
        else:
            self._copy.append(data)

    def _ended(self, end: StreamEnd) -> None:
        if self.end is None:
            self.end = end
            if not self._muted:
                self._tell(end)

    def _tell(self, end: StreamEnd) -> None:
        try:
            self._on_end(end)
        except LeaseLost:
            self._lost = True
            raise


Pairs = tuple[tuple[str, str], ...]

OF_THE_BODY = frozenset(
    {
        "content-type",
        "content-language",
        "content-disposition",
        "content-encoding",
        "content-location",
        "content-range",
        "content-length",
        "content-md5",
        "content-digest",
        "repr-digest",
        "digest",
        "etag",
        "last-modified",
        "accept-ranges",
    }
)
"""Fields that describe one particular body: false beside any other."""

OF_THE_RESOURCE = frozenset({"accept-ranges", "etag", "last-modified"})
"""Those of them that a successful answer to a state-changing request gives to the resource, and not to its own content.

RFC 9110 section 8.8: "In a successful response to a state-changing request, validator fields describe the new
representation that has replaced the prior selected representation as a result of processing the request." A client sends
the ETag of a lost 201 in If-Match, so a tombstone keeps it. Section 14.3: Accept-Ranges is about the target resource.
What section 8.3 to 8.7 and 14.4 say is about the content (Content-*, and the digests of RFC 9530), and goes with it.
"""

_BODILESS = frozenset({204, 304})
"""Final statuses whose responses have no body."""

# What would end a header early, or what HTTP cannot carry (it is Latin-1 on the wire).
_UNSAFE = re.compile(r"[\r\n\0]|[^\0-\xff]")


@dataclass(frozen=True, slots=True)
class CapturedResponse:
    """A snapshot of an answer, taken before other hooks touch it."""

    head: StoredResponse
    """The answer without its body."""
    body: bytes | None = field(repr=False)
    """None: not kept, or still to come through `tee`."""
    tee: Tee | None
    """It calls whoever listens. Who is kept alive by that and keeps this, keeps a weak reference to it instead."""
    headers: Pairs = field(repr=False)
    """All fields that the answer had, also those that are never kept."""
    announced: int | None
    """Its Content-Length, if it had one."""

    @property
    def result(self) -> StoredResponse | None:
        """What to store: the answer, or its tombstone. None for a stream that was not, or not yet, exhausted."""
        if self.tee is None:
            if self.body is None:
                return self.tombstone
            return StoredResponse(self.head.status, self.head.reason, self.head.metadata, self.body)
        if self.tee.end is not StreamEnd.EXHAUSTED:
            return None
        body = self.tee.copied()
        if self.tee.over_limit or self.announced not in (None, len(body)):
            return self.tombstone
        return StoredResponse(self.head.status, self.head.reason, self.head.metadata, body)

    @property
    def tombstone(self) -> StoredResponse:
        """What to store when the work was done and the body cannot be kept."""
        return self.head.without_body()

    def discard(self) -> None:
        """Another answer takes this one's place: nobody is told how a stream of it ends, and its source is closed."""
        if self.tee is not None:
            self.tee.mute()
            self.tee.close()


def capture(response: Response, policy: Policy, *, on_end: OnEnd, abandoned: AbandonedStreams) -> CapturedResponse:
    """Take the snapshot, and leave the response as it was, except for a stream: that passes through a tee from now on.

    What cannot be stored becomes a tombstone and raises nothing. `on_end` and `abandoned` are the tee's, see there.
    """
    headers, announced = tuple(response.headers), response.content_length
    status, storable = response.status_code, True
    reason = "" if response.status == _standard_line(status) else response.status.partition(" ")[2]
    if _UNSAFE.search(reason):
        reason, storable = "", False
    if not 200 <= status <= 599:
        # RFC 9110, section 15: clients treat it as a 500. An interim status would keep a retry waiting for more.
        status, reason, storable = 500, "", False
    pairs = []
    for name, value in kept_headers(headers, policy):
        if _UNSAFE.search(value):
            reason, storable = "", False
        else:
            pairs.append((name, value))
    body, tee = None, None
    if storable and status in _BODILESS:
        body = b""
    # Not touched when it is too long, so that a server's sendfile() still works.
    elif storable and (announced or 0) <= policy.max_body:
        buffered = isinstance(response.response, ClosingIterator) and announced is not None
        if buffered and not response.direct_passthrough:
            # What abort() made comes as an iterator although all of it is there. Left so, its claim would stay open until
            # the body is read, and some clients only look at the status.
            response.make_sequence()
        if response.is_sequence:
            body = b"".join(response.iter_encoded())
            body = body if len(body) <= policy.max_body else None
        else:
            tee = Tee(response.response, limit=policy.max_body, announced=announced, on_end=on_end, abandoned=abandoned)
            response.response = tee
    return CapturedResponse(StoredResponse(status, reason, tuple(pairs)), body, tee, headers, announced)


def replay(
    stored: StoredResponse,
    *,
    policy: Policy,
    response_class: type[Response],
    docs_url: str = DOCS_URL,
    renderer: Renderer = render,
) -> Response:
    """Build the stored response, byte for byte, marked as a replay. Of a tombstone: its status, and a problem as the body.

    Leaves out fields that this policy does not keep, by the same allow-list as when a response is stored. Somebody else may
    have written to the store: a proxy acts on some fields (`X-Accel-Redirect`), and a body where none may be is read as
    the next response on the same connection. Raises `CorruptRecord` rather than send what could split the response, or what
    no server may send.
    """
    status = stored.status
    for name, value in (*stored.metadata, ("", stored.reason)):
        if _UNSAFE.search(name) or _UNSAFE.search(value):
            raise CorruptRecord("a stored header or reason phrase holds a character that none may hold")
    if not 200 <= status <= 599:
        raise CorruptRecord(f"the stored status {status} is no final status: those are 200 to 599")
    if stored.body and status in _BODILESS:
        raise CorruptRecord(f"the stored response has a body, and its status {status} allows none")
    pairs = kept_headers(stored.metadata, policy)
    line = f"{status} {stored.reason}" if stored.reason else _standard_line(status)
    if stored.kept or status in _BODILESS:
        response = response_class(b"", status=line)
        response.response = [stored.body]
    else:
        problem = Problem("response-not-kept", status=status)
        response = renderer(problem, profile=PROFILES[policy.profile], docs_url=docs_url, response_class=response_class)
        response.status = line
        lost = OF_THE_BODY - OF_THE_RESOURCE if 200 <= status < 300 else OF_THE_BODY
        # A renderer may set fields of its own. Of these two, one response may have several.
        lost = lost | {"cache-control"} | ({name.lower() for name, _ in response.headers} - {"link", "vary"})
        pairs = (*(pair for pair in pairs if pair[0].lower() not in lost), *response.headers)
    # The constructor invents a Content-Type and a Content-Length. Replacing all fields leaves those of the first response.
    response.headers = Headers(pairs)
    for name, value in policy.replayed_header:
        response.headers[name] = value
    if "Cache-Control" not in response.headers:
        response.headers["Cache-Control"] = "no-store"
    return response


def overlay(response: Response, answer: Response, *, policy: Policy, lost: CapturedResponse | None = None) -> None:
    """Put another answer over this response, in place, and keep what hooks have added to it.

    For a replay at the capture point, and for a claim found to be lost after all hooks have run. Of the answer that
    `lost` captured nothing is delivered, its own cookies included. Other fields stay, except for those that described
    the old body. `answer` is used up.
    """
    if lost is not None:
        lost.discard()
    close = getattr(response.response, "close", None)
    if close is not None:
        close()
    own = set(lost.headers) if lost is not None else set()
    gone = OF_THE_BODY | allowed_fields(policy.keep_headers) | {name.lower() for name, _ in answer.headers}
    stays = [pair for pair in response.headers if pair not in own and pair[0].lower() not in gone]
    # A session or CORS hook may have said by what the answer varies; it still does.
    varies = [value for value in response.headers.getlist("Vary") if ("Vary", value) not in own]
    response.status = answer.status
    response.direct_passthrough = False
    response.response = answer.response
    response.headers = Headers([*answer.headers, *stays])
    if varies:
        response.vary.update(token for value in varies for token in _tokens(value))


Looks: TypeAlias = tuple[str, list[tuple[str, str]], Any]


def looks(response: Response) -> Looks:
    """Return what others may change of a response."""
    return response.status, list(response.headers), response.response


def kept_headers(headers: Iterable[tuple[str, str]], policy: Policy) -> Pairs:
    """Return the fields that belong to the response, in order, duplicates included."""
    pairs, allowed = tuple(headers), allowed_fields(policy.keep_headers)
    for name, value in pairs:
        if name.lower() == "connection":
            allowed = allowed - {token.lower() for token in _tokens(value)}
    kept = []
    for name, value in pairs:
        field_name = name.lower()
        if field_name in allowed:
            if field_name in ("location", "content-location") and not value.isascii():
                # Werkzeug lets a view name a place in any script, and writes it in ASCII only when the response starts.
                with suppress(UnicodeError):
                    value = iri_to_uri(value)
            kept.append((name, value))
    return tuple(kept)


def _tokens(value: str) -> list[str]:
    return [token.strip() for token in value.split(",") if token.strip()]


def _standard_line(status: int) -> str:
    return f"{status} {HTTP_STATUS_CODES.get(status, 'unknown').upper()}"

"""Response ⇄ Result: what is kept of an answer, and how a kept answer is given again."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from flask import Flask
from werkzeug.datastructures import Headers
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.urls import iri_to_uri
from werkzeug.wrappers import Response
from werkzeug.wsgi import ClosingIterator

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, NotStorable
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES, Profile, allowed_fields
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.problems import Problem, Renderer, render

# A copy of a streamed answer, taken while it passes by.


class StreamEnd(Enum):
    """How a stream ended. Only `EXHAUSTED` means that the whole answer was produced."""

    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    ERROR = "error"


OnEnd: TypeAlias = Callable[[StreamEnd], None]

Orphans: TypeAlias = "deque[Callable[[], None]]"
"""Ends that a destructor could not tell. Whoever may do I/O takes them off the left and calls them."""


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
        orphans: Orphans,
    ) -> None:
        # Until iter() has worked there is nothing that __del__ should report.
        self.end: StreamEnd | None = StreamEnd.ERROR
        self._chunks: Iterator[str | bytes] = iter(source)
        self._source = source
        self._limit = limit
        self._announced = announced
        self._on_end = on_end
        self._orphans = orphans
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
            self._orphans.append(partial(self._on_end, StreamEnd.CLOSED))

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
            return self.tombstone if self.body is None else self.head.with_body(self.body)
        if self.tee.end is not StreamEnd.EXHAUSTED:
            return None
        body = self.tee.copied()
        if self.tee.over_limit or self.announced not in (None, len(body)):
            return self.tombstone
        return self.head.with_body(body)

    def without_tee(self) -> CapturedResponse:
        """The same, for whoever must not keep the tee alive."""
        return CapturedResponse(self.head, self.body, None, self.headers, self.announced)

    @property
    def tombstone(self) -> StoredResponse:
        """What to store when the work was done and the body cannot be kept."""
        return self.head.without_body()

    def discard(self) -> None:
        """Another answer takes this one's place: nobody is told how a stream of it ends, and its source is closed."""
        if self.tee is not None:
            self.tee.mute()
            self.tee.close()


def kept_headers(headers: Iterable[tuple[str, str]], policy: Policy) -> Pairs:
    """The fields that belong to the answer, in order, duplicates included.

    Raises `NotStorable` if one of them holds CR, LF, NUL or a character that HTTP cannot carry.
    """
    kept = _allowed(headers, policy)
    for name, value in kept:
        if _UNSAFE.search(value):
            raise NotStorable(f"the answer's {name} holds a character that no header may hold")
    return kept


def capture(response: Response, policy: Policy, *, on_end: OnEnd, orphans: Orphans) -> CapturedResponse:
    """Take the snapshot, leaving the response as it was, but for a stream: that passes through a tee from now on.

    What cannot be stored becomes a tombstone and raises nothing. `on_end` and `orphans` are the tee's, see there.
    """
    headers, announced = tuple(response.headers), _announced(response)
    head, storable = _head(response, policy)
    body, tee = None, None
    if storable and _bodiless(head.status):
        body = b""
    # Not touched when it is too long, so that a server's sendfile() still works.
    elif storable and (announced or 0) <= policy.max_body:
        _buffer_wsgi_answer(response, announced)
        if response.is_sequence:
            body = _joined(response, policy)
        else:
            tee = Tee(response.response, limit=policy.max_body, announced=announced, on_end=on_end, orphans=orphans)
            response.response = tee
    return CapturedResponse(head, body, tee, headers, announced)


def revive(
    result: StoredResponse,
    *,
    policy: Policy,
    response_class: type[Response],
    docs_url: str = DOCS_URL,
    renderer: Renderer = render,
) -> Response:
    """The stored answer, byte for byte, marked as a replay. Of a tombstone: its status, and a problem as the body.

    Fields that this policy does not keep are left out, whoever put them into the store. Raises `CorruptRecord` rather than
    send what could split the response, or what no server may send.
    """
    pairs = _loaded(result, policy)
    if result.kept or _bodiless(result.status):
        response = response_class(b"", status=_status_line(result))
        response.response = [result.body]
    else:
        problem = Problem("response-not-kept", status=result.status)
        response = renderer(problem, profile=PROFILES[policy.profile], docs_url=docs_url, response_class=response_class)
        response.status = _status_line(result)
        lost = OF_THE_BODY - OF_THE_RESOURCE if 200 <= result.status < 300 else OF_THE_BODY
        # A renderer may set fields of its own. Of these two, one response may have several.
        lost = lost | {"cache-control"} | ({name.lower() for name, _ in response.headers} - {"link", "vary"})
        pairs = (*(pair for pair in pairs if pair[0].lower() not in lost), *response.headers)
    # The constructor invents a Content-Type and a Content-Length; replacing all fields leaves the first answer's own.
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


def _allowed(headers: Iterable[tuple[str, str]], policy: Policy) -> Pairs:
    pairs = tuple(headers)
    connection = {token.lower() for name, value in pairs if name.lower() == "connection" for token in _tokens(value)}
    allowed = allowed_fields(policy.keep_headers) - connection
    return tuple((name, _as_sent(name, value)) for name, value in pairs if name.lower() in allowed)


def _as_sent(name: str, value: str) -> str:
    # Werkzeug lets a view name a place in any script, and writes it in ASCII only when the response starts.
    if value.isascii() or name.lower() not in ("location", "content-location"):
        return value
    try:
        return iri_to_uri(value)
    except UnicodeError:
        return value


def _tokens(value: str) -> list[str]:
    return [token.strip() for token in value.split(",") if token.strip()]


def _final(status: int) -> bool:
    return 200 <= status <= 599


def _bodiless(status: int) -> bool:
    return status in (204, 304) or 100 <= status < 200


def _head(response: Response, policy: Policy) -> tuple[StoredResponse, bool]:
    """Everything but the body, and whether it is all there: what no header may hold has been left out."""
    status, reason = response.status_code, _reason(response)
    storable = not _UNSAFE.search(reason)
    if not _final(status):
        # RFC 9110, section 15: clients treat it as a 500. An interim status would keep a retry waiting for more.
        status, storable = 500, False
    try:
        pairs = kept_headers(response.headers, policy)
    except NotStorable:
        pairs = tuple(pair for pair in _allowed(response.headers, policy) if not _UNSAFE.search(pair[1]))
        storable = False
    return StoredResponse(status, reason if storable else "", pairs), storable


def _joined(response: Response, policy: Policy) -> bytes | None:
    body = b"".join(response.iter_encoded())
    return body if len(body) <= policy.max_body else None


def _announced(response: Response) -> int | None:
    return response.content_length


def _buffer_wsgi_answer(response: Response, announced: int | None) -> None:
    """What abort() made comes as an iterator even though all of it is there.

    Left so, its claim would stay open until somebody reads the body, and some clients only look at the status.
    """
    if isinstance(response.response, ClosingIterator) and announced is not None and not response.direct_passthrough:
        response.make_sequence()


def _standard_line(status: int) -> str:
    return f"{status} {HTTP_STATUS_CODES.get(status, 'unknown').upper()}"


def _reason(response: Response) -> str:
    return "" if response.status == _standard_line(response.status_code) else response.status.partition(" ")[2]


def _status_line(result: StoredResponse) -> str:
    return f"{result.status} {result.reason}" if result.reason else _standard_line(result.status)


def _loaded(result: StoredResponse, policy: Policy) -> Pairs:
    """Return the stored fields that the policy keeps, by the same allow-list as when a response is stored.

    Somebody else may have written to the store. A proxy acts on some fields (`X-Accel-Redirect`), and a body where none
    may be is read as the next response on the same connection.
    """
    if any(_UNSAFE.search(text) for pair in (*result.metadata, ("", result.reason)) for text in pair):
        raise CorruptRecord("a stored header or reason phrase holds a character that none may hold")
    if not _final(result.status):
        raise CorruptRecord(f"the stored status {result.status} is no final status: those are 200 to 599")
    if result.body and _bodiless(result.status):
        raise CorruptRecord(f"the stored response has a body, and its status {result.status} allows none")
    return _allowed(result.metadata, policy)


# Answers of our own: problems in the dialect that the client speaks, and replays.

_log = logging.getLogger("flask_idempotency")


class Answer:
    """A response of ours, which survives whatever others make of it before it reaches the capture point."""

    def __init__(self, build: Callable[[], Response], policy: Policy) -> None:
        self._build = build
        self._policy = policy
        self.rebuild()

    def rebuild(self) -> Response:
        """The answer once more: others may have changed the last response, or have sent it."""
        self.response = self._build()
        self._as_built = _looks(self.response)
        return self.response

    def replace_response(self, response: Response, *, lost: CapturedResponse | None = None) -> None:
        """Make this response say what this answer says, unless it still is this very answer."""
        if response is not self.response or _looks(response) != self._as_built:
            overlay(response, self._build(), policy=self._policy, lost=lost)


class Answers:
    """Makes answers for one application."""

    def __init__(self, app: Flask, loaders: Callbacks, *, docs_url: str) -> None:
        self._app = app
        self._loaders = loaders
        self._docs_url = docs_url

    def problem(self, problem: Problem, policy: Policy) -> Answer:
        """Why the request is not run, as the application's own renderer puts it, or the profile."""
        profile = PROFILES[policy.profile]
        return Answer(lambda: self._render(problem, profile=profile), policy)

    def replay(self, result: StoredResponse, policy: Policy) -> Answer:
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

"""Capture the response of a view, and replay a stored one."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from enum import Enum
from functools import lru_cache, partial
from operator import itemgetter
from threading import Lock
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from werkzeug.datastructures import Headers
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.urls import iri_to_uri
from werkzeug.wrappers import Response
from werkzeug.wsgi import ClosingIterator

from flask_idempotency.engine.activity import LONGEST_COUNTER, UNKEPT
from flask_idempotency.engine.ending import in_stream
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.settings.profiles import is_kept, lost_names
from flask_idempotency.web.problems import Problem, build


class StreamEnd(Enum):
    """How a stream ended. Only `EXHAUSTED` means that the response is complete."""

    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    ERROR = "error"


OnEnd: TypeAlias = Callable[[StreamEnd], None]

AbandonedStreams: TypeAlias = "deque[Callable[[], None]]"
"""Callbacks for streams that ended in a destructor. A later request, which may do I/O, takes them off the left."""

T = TypeVar("T")


class Tee(Iterator[bytes]):
    """Passes a body on chunk by chunk, and keeps a copy up to a limit.

    It calls `on_end` once, before it sends the end marker, or the last byte of a body of announced length. So the response
    is stored before the client knows it to be complete. `on_end` may raise `LeaseLost` for `EXHAUSTED`, and nothing else.
    Then the client gets no end, and does not take the response for complete.
    """

    changes: ClassVar[bool] = True
    """Whether the response may become another object: a list of its body, say."""

    def __init__(
        self,
        source: Iterable[str] | Iterable[bytes],
        *,
        limit: int,
        announced: int | None = None,
        on_end: OnEnd,
        abandoned: AbandonedStreams,
    ) -> None:
        # If iter() fails, __del__ must not report an end.
        self.end: StreamEnd | None = StreamEnd.ERROR
        self._chunks: Iterator[str | bytes] = iter(source)
        self._source = source
        self._limit = limit
        self._announced = announced
        self._on_end = on_end
        self._abandoned = abandoned
        self._copy: list[bytes] = []
        self.byte_size: int = 0
        """How many bytes have been sent so far."""
        self._ahead: bytes | None = None
        self._muted = False
        self._lost = False
        self.end = None

    @property
    def over_limit(self) -> bool:
        """Whether the body is longer than the limit. Then there is no copy."""
        return self.byte_size > self._limit

    def copied(self) -> bytes:
        """Return the bytes sent so far; none once they are over the limit."""
        return b"".join(self._copy)

    def mute(self) -> None:
        """Do not report the end: another response has replaced this one."""
        self._muted = True

    def __iter__(self) -> Tee:
        return self

    def __next__(self) -> bytes:
        data, self._ahead = self._ahead, None
        if data is None:
            data = self._pull()
            if self.byte_size == self._announced:
                # No end marker follows a body of announced length: these bytes are its end, so report it before they leave.
                with suppress(StopIteration):
                    self._ahead = self._pull()
        return data

    def close(self) -> None:
        """Close the source, and then report the end: the view's generator may still act when it closes."""
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                self._within(close)
        finally:
            self._ended(StreamEnd.CLOSED)

    def __del__(self) -> None:
        # The garbage collector may run this while this thread holds a lock, even the store's: waiting would deadlock.
        if self.end is None and not self._muted:
            self._abandoned.append(partial(self._on_end, StreamEnd.CLOSED))

    def _pull(self) -> bytes:
        if self._lost:
            raise LeaseLost("the claim was lost while its response was being sent")
        chunk = self._taken()
        data = chunk.encode() if isinstance(chunk, str) else chunk
        self.byte_size += len(data)
        if self.over_limit:
            self._copy.clear()
        else:
            self._copy.append(data)
        return data

    def _taken(self) -> str | bytes:
        """Take the next chunk from the source. Report the end where it ends or fails."""
        try:
            chunk: str | bytes = self._within(partial(next, self._chunks))
        except StopIteration:
            self._ended(StreamEnd.EXHAUSTED)
            raise
        except BaseException:
            self._ended(StreamEnd.ERROR)
            raise
        return chunk

    def _within(self, call: Callable[[], T]) -> T:
        """Call this code of a stream, which no longer has its request's context, unless it took it along."""
        token = in_stream.set(True)
        try:
            return call()
        finally:
            in_stream.reset(token)

    def _ended(self, end: StreamEnd) -> None:
        if self.end is None:
            self.end = end
            if self._muted:
                return
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
        "x-inertia",
    }
)
"""Fields that describe one body, and would be wrong for any other."""

OF_THE_RESOURCE = frozenset({"accept-ranges", "etag", "last-modified"})
"""Those of them that describe the resource, in a successful response to a state-changing request.

RFC 9110 section 8.8: "In a successful response to a state-changing request, validator fields describe the new
representation that has replaced the prior selected representation as a result of processing the request." A client sends
the ETag of a lost 201 in If-Match, so a tombstone keeps it. Section 14.3: Accept-Ranges is about the target resource.
Fields of sections 8.3 to 8.7 and 14.4 (Content-*), and the digests of RFC 9530, describe the content and go with it.
"""

_BODILESS = frozenset({204, 304})
"""Final statuses whose responses have no body."""

_SENDS_A_FILE = frozenset({"x-accel-redirect", "x-sendfile", "x-lighttpd-send-file"})
"""Fields that make a proxy send a file in the body's place."""

# Characters that end a header early, or that HTTP cannot carry (it uses Latin-1).
_UNSAFE = re.compile(r"[\r\n\0]|[^\0-\xff]")
_name, _value = itemgetter(0), itemgetter(1)


@valueclass(frozen=True, slots=True)
class CapturedResponse:
    """A snapshot of a response, before other hooks change it."""

    head: StoredResponse
    """The response without its body."""
    body: bytes | None = field(repr=False)
    """None: it is not kept, or still to come through `tee`."""
    tee: Tee | None
    """It refers to its `on_end`. An object that `on_end` refers to must hold only a weak reference to it."""
    headers: Pairs = field(repr=False)
    """All fields of the response, also those that are never kept."""
    announced: int | None
    """Its Content-Length, if it had one."""
    sets_cookie: bool
    lost: frozenset[str] = frozenset()
    """Lower-case names of fields that a replay lacks, without a rule that says why."""

    @property
    def result(self) -> StoredResponse | None:
        """What to store: the response, or its tombstone. None for a stream that is not exhausted."""
        body = self.body
        if self.tee is not None:
            if self.tee.end is not StreamEnd.EXHAUSTED:
                return None
            is_whole = not self.tee.over_limit and self.announced in (None, self.tee.byte_size)
            body = self.tee.copied() if is_whole else None
        if body is None:
            return self.tombstone
        return StoredResponse(self.head.status, self.head.reason, self.head.metadata, body)

    @property
    def tombstone(self) -> StoredResponse:
        """What to store if the request completed and the body cannot be kept."""
        return self.head.without_body()

    def discard(self) -> None:
        """Drop the response, because another one replaces it: close its stream, and do not report the end."""
        if self.tee is not None:
            self.tee.mute()
            self.tee.close()


def capture(
    response: Response, policy: Policy, *, on_end: OnEnd, abandoned: AbandonedStreams, tee: type[Tee] = Tee
) -> CapturedResponse:
    """Take a snapshot of a response, and leave it unchanged, except that a stream now passes through a `Tee`.

    A response that cannot be stored becomes a tombstone, without an error. See `Tee` for `on_end` and `abandoned`.
    """
    headers = tuple(response.headers)
    fields = _fields_of(tuple(map(_name, headers)), policy.keep_headers)
    # As `response.content_length` reads it. Werkzeug searches all fields for that.
    announced = None if fields.length is None else _number(headers[fields.length][1])
    status, storable = response.status_code, True
    line, reason = response.status, ""
    if line != _standard_line(status):
        reason = line.partition(" ")[2]
        if _UNSAFE.search(reason):
            reason, storable = "", False
    if not 200 <= status <= 599:
        # RFC 9110, section 15: clients treat it as a 500. An interim status would keep a retry waiting for more.
        status, reason, storable = 500, "", False
    pairs = kept_headers(headers, policy)
    text = "".join(map(_value, pairs))
    # Nearly all values pass the first two checks, which are quick.
    if not (text.isascii() and text.isprintable()):
        sound = tuple(pair for pair in pairs if not _UNSAFE.search(pair[1]))
        if len(sound) < len(pairs):
            pairs, reason, storable = sound, "", False
    body, copying = None, None
    if storable and status in _BODILESS:
        body = b""
    elif fields.sends_a_file:
        pass  # the body comes from the proxy, so a replay of ours would be empty
    # A body that is too long is left alone, so that a server's sendfile() still works.
    elif storable and (announced or 0) <= policy.max_body:
        # abort() makes an iterator of a body that is complete. As a stream, it would keep the claim open until a client reads
        # the body, and some clients only read the status.
        buffered = isinstance(response.response, ClosingIterator) and announced is not None
        buffered = buffered and not response.direct_passthrough
        if buffered and tee.changes:
            response.make_sequence()
        if buffered and not tee.changes:
            body = b""  # of an observed response, whose body is stored nowhere
        elif response.is_sequence:
            pieces: Any = response.response
            body = pieces[0] if len(pieces) == 1 and type(pieces[0]) is bytes else b"".join(response.iter_encoded())
            body = body if len(body) <= policy.max_body else None
        else:
            copying = tee(
                response.response, limit=policy.max_body, announced=announced, on_end=on_end, abandoned=abandoned
            )
            response.response = copying
    head = StoredResponse(status, reason, pairs)
    return CapturedResponse(head, body, copying, headers, announced, fields.sets_cookie, fields.lost)


def replay(
    stored: StoredResponse,
    *,
    policy: Policy,
    response_class: type[Response],
    render: Callable[[Problem, Policy], Response],
) -> Response:
    """Build the stored response, byte for byte, marked as a replay. A tombstone gets its status and a problem as the body.

    Leaves out fields that this policy does not keep, by the same allow-list as `capture`, because an attacker may have
    written to the store. A proxy acts on some fields (`X-Accel-Redirect`), and a client reads a body where none may be as
    the next response on the connection. Raises `CorruptRecord` for a response that no server may send, or that would split.
    """
    status = stored.status
    text = "".join(map("".join, stored.metadata)) + stored.reason
    if not (text.isascii() and text.isprintable()) and _UNSAFE.search(text):
        raise CorruptRecord("a stored header or reason phrase holds a character that none may hold")
    if not 200 <= status <= 599:
        raise CorruptRecord(f"the stored status {status} is no final status: those are 200 to 599")
    if stored.body and status in _BODILESS:
        raise CorruptRecord(f"the stored response has a body, and its status {status} allows none")
    pairs = kept_headers(stored.metadata, policy)
    line = f"{status} {stored.reason}" if stored.reason else _standard_line(status)
    if stored.kept or status in _BODILESS:
        return build(response_class, stored.body, line, _marked(pairs, policy))
    response = render(Problem("response-not-kept", status=status), policy)
    response.status = line
    lost = OF_THE_BODY - OF_THE_RESOURCE if 200 <= status < 300 else OF_THE_BODY
    # A renderer may add fields. One response may have several Link and Vary fields.
    lost = lost | {"cache-control"} | ({name.lower() for name, _ in response.headers} - {"link", "vary"})
    pairs = (*(pair for pair in pairs if pair[0].lower() not in lost), *response.headers)
    response.headers = Headers(_marked(pairs, policy))
    return response


def _marked(pairs: Pairs, policy: Policy) -> list[tuple[str, str]]:
    """Return these fields with those that mark a replay, and with a Cache-Control."""
    replaced, added = _marks(tuple(map(_name, pairs)), policy.replayed_header)
    fields = [pair for pair in pairs if pair[0].lower() not in replaced] if replaced else list(pairs)
    fields += added
    return fields


@lru_cache(maxsize=1024)
def _marks(names: tuple[str, ...], marks: Pairs) -> tuple[set[str], Pairs]:
    """Return which of these fields the marks replace, in lower case, and what is added."""
    lower, marking = {name.lower() for name in names}, {name.lower() for name, _ in marks}
    return lower & marking, marks if "cache-control" in lower else (*marks, ("Cache-Control", "no-store"))


def overlay(response: Response, other: Response, *, policy: Policy, lost: CapturedResponse | None = None) -> None:
    """Replace the content of this response by another one in place, and keep the fields that hooks added.

    Used for a replay at the capture point, and for a claim that proves lost after all hooks have run. Nothing that `lost`
    captured is sent, its cookies included. Other fields stay, except those that described the old body. Do not use `other`
    afterwards.
    """
    if lost is not None:
        lost.discard()
    close = getattr(response.response, "close", None)
    if close is not None:
        close()
    own = set(lost.headers) if lost is not None else set()
    gone = OF_THE_BODY | {name.lower() for name, _ in other.headers}
    stays = [
        (name, value)
        for name, value in response.headers
        if (name, value) not in own and name.lower() not in gone and not is_kept(name.lower(), policy.keep_headers)
    ]
    # A session or CORS hook may have set Vary, which still applies.
    varies = [value for value in response.headers.getlist("Vary") if ("Vary", value) not in own]
    response.status = other.status
    response.direct_passthrough = False
    response.response = other.response
    response.headers = Headers([*other.headers, *stays])
    if varies:
        response.vary.update(token for value in varies for token in _tokens(value))


Looks: TypeAlias = tuple[str, list[tuple[str, str]], Any]


def looks(response: Response) -> Looks:
    """Return the parts of a response that a hook may change."""
    return response.status, list(response.headers), response.response


def kept_headers(headers: Sequence[tuple[str, str]], policy: Policy) -> Pairs:
    """Return the fields that belong to the response, in order, duplicates included."""
    fields = _fields_of(tuple(map(_name, headers)), policy.keep_headers)
    kept = list(map(headers.__getitem__, fields.kept))
    for at in fields.locations:
        name, value = kept[at]
        if not value.isascii():
            # Werkzeug accepts non-ASCII locations, and encodes them only when the response starts.
            with suppress(UnicodeError):
                kept[at] = name, iri_to_uri(value)
    if fields.connections:
        ended = {token.lower() for at in fields.connections for token in _tokens(headers[at][1])}
        kept = [pair for pair in kept if pair[0].lower() not in ended]
    return tuple(kept)


@valueclass(frozen=True, slots=True)
class _Fields:
    """What the names of a response's fields decide. Positions are in the order of these names."""

    kept: tuple[int, ...]
    locations: tuple[int, ...]
    """Positions among the kept ones."""
    connections: tuple[int, ...]
    length: int | None
    """The position of the first Content-Length."""
    sends_a_file: bool
    sets_cookie: bool
    lost: frozenset[str]
    """See `CapturedResponse.lost`."""


@lru_cache(maxsize=256)  # an application sends few sets of fields
def _fields_of(names: tuple[str, ...], keep_headers: frozenset[str]) -> _Fields:
    lower = [name.lower() for name in names]
    kept = tuple(at for at, name in enumerate(lower) if is_kept(name, keep_headers))
    return _Fields(
        kept,
        tuple(number for number, at in enumerate(kept) if lower[at] in ("location", "content-location")),
        tuple(at for at, name in enumerate(lower) if name == "connection" and at not in kept),
        lower.index("content-length") if "content-length" in lower else None,
        not _SENDS_A_FILE.isdisjoint(lower),
        "set-cookie" in lower,
        lost_names(frozenset(lower), keep_headers),
    )


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _tokens(value: str) -> list[str]:
    return [token.strip() for token in value.split(",") if token.strip()]


@lru_cache(maxsize=1024)
def _standard_line(status: int) -> str:
    return f"{status} {HTTP_STATUS_CODES.get(status, 'unknown').upper()}"


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_log = logging.getLogger("flask_idempotency")


class LostFields:
    """Logs, once for each endpoint, which fields its view sets that a replay lacks. `doctor` names them too.

    No value is logged. A view may make up names, so only the first `MOST` of an endpoint are named.
    """

    MOST: Final = 20

    def __init__(self, count: Callable[[str, str], None] | None = None) -> None:
        """`count` adds 1 to a counter of an endpoint, by which the `doctor` of another process learns of it."""
        self._count = count
        self.named: dict[str, dict[str, str]] = {}
        """What was named, by endpoint: as the view wrote it, by its lower-case name."""
        self._unlock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        self._lock = Lock()

    def note(self, operation: str, captured: CapturedResponse, policy: Policy) -> None:
        """Name what this response has and its replay will lack."""
        known = self.named.setdefault(operation, {})
        if captured.lost <= known.keys() or len(known) >= self.MOST:
            return
        # What marks a replay replaces a field of that name, and what Connection names is meant for the next hop.
        ours = {name.lower() for name, _ in policy.replayed_header}
        ours |= {
            token.lower()
            for name, value in captured.headers
            if name.lower() == "connection"
            for token in _tokens(value)
        }
        written = {name.lower(): name for name, _ in captured.headers if _TOKEN.fullmatch(name)}
        with self._lock:
            fresh = [written[name] for name in sorted(captured.lost - known.keys() - ours) if name in written]
            fresh = fresh[: self.MOST - len(known)]
            known.update((name.lower(), name) for name in fresh)
        if not fresh:
            return
        _log.warning(
            "%s sets %s, which a replay leaves out: a retry gets another response. Keep what a client acts on: %s in "
            "@idempotent(…), or IDEMPOTENCY_KEEP_HEADERS. Set what belongs to one exchange in an after_request hook.",
            operation,
            ", ".join(fresh),
            keeping(fresh, policy),
        )
        if self._count is not None:
            for name in fresh:
                if len(UNKEPT) + len(name) <= LONGEST_COUNTER:
                    self._count(operation, UNKEPT + name)


def keeping(names: Iterable[str], policy: Policy) -> str:
    """Return the keyword that keeps these fields besides those that the policy keeps now."""
    return f"keep_headers={json.dumps([*sorted(policy.keep_headers), *names])}"

"""An adapter for requests. Mount it for the addresses of your service:

session.mount("https://shop.example/", IdempotentAdapter())
"""

from __future__ import annotations

import http.client
import io
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from flask_idempotency.client.delivery import (
    MAX_BODY_BYTES,
    METHODS,
    Delivery,
    Late,
    Rules,
    may_be_answered,
    raised_in,
    seconds_left,
)
from flask_idempotency.client.errors import ClientError
from flask_idempotency.client.retries import Retries

__all__ = ["IdempotentAdapter"]

_PIECE_BYTES: Final = 65536
_WITHOUT_BODY: Final = frozenset({204, 304})
# The request itself is at fault, and requests raises these before it opens a connection. InvalidHeader is not among them:
# a response with two lengths raises it too.
_PERMANENT: Final = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidProxyURL,
)


class _Raw(io.RawIOBase):
    """The bytes of a connection. No read outlasts the deadline of its delivery."""

    ended = False
    """Whether the last read found the end of the connection."""

    def __init__(self, raw: io.RawIOBase, sock: Any) -> None:
        self._raw = raw
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = seconds_left(TimeoutError)
        if left is not None:
            # urllib3 sets it again before each response.
            given = self._sock.gettimeout()
            self._sock.settimeout(left if given is None else min(left, given))
        size: int | None = self._raw.readinto(buffer)
        self.ended = size == 0
        seconds_left(TimeoutError)
        return size

    def fileno(self) -> int:
        return self._raw.fileno()

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """Knows whether its head came whole. `http.client` takes the end of the connection for the end of the head."""

    whole_head = True

    def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        file: Any = self.fp
        self._raw: _Raw | None = None
        if type(file) is io.BufferedReader:
            self._raw = _Raw(file.detach(), sock)
            self.fp = io.BufferedReader(self._raw)

    def begin(self) -> None:
        super().begin()
        # A line that is here to its end is read from the buffer, and does not ask the connection for more.
        self.whole_head = self._raw is None or not self._raw.ended
        # A response that is kept keeps no socket.
        self._raw = None


_WATCHING: Final[Mapping[Any, Any]] = {
    plain: type(plain.__name__, (plain,), {"response_class": _Response}) for plain in (HTTPConnection, HTTPSConnection)
}
"""The classes of connections that notice a torn head. Those of a SOCKS proxy keep to the rule about lengths alone."""


class IdempotentAdapter(HTTPAdapter):
    """Sends each keyed request until it has its response, under one key, and says how it ended if there is none.

    Raises the subclasses of `flask_idempotency.client.ClientError`, and `LedgerError`. A reply with neither
    `Content-Length` nor chunks counts as lost: Python's HTTP client takes one that was cut in its headers for a whole one.
    """

    def __init__(
        self,
        *,
        retries: Retries | None = None,
        header: str = "Idempotency-Key",
        methods: Iterable[str] = METHODS,
        automatic: bool = True,
        max_body: int = MAX_BODY_BYTES,
        **http: Any,
    ) -> None:
        """Take the arguments of `IdempotentTransport`. `http` are those of `requests.adapters.HTTPAdapter`.

        Raises `TypeError` for `max_retries`: urllib3 would send a generator's body empty the second time.
        """
        if "max_retries" in http:
            raise TypeError("IdempotentAdapter retries by itself. Leave max_retries out, and pass retries=Retries(…).")
        self._rules = Rules(retries, header=header, methods=methods, automatic=automatic, max_body=max_body)
        super().__init__(**http)

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        """Return the pool of these connections. They notice a torn head."""
        pool = super().get_connection_with_tls_context(*arguments, **options)
        # A recorder, such as vcrpy, puts its class into urllib3's pools while it is active.
        found = type(pool).ConnectionCls
        pool.ConnectionCls = _WATCHING.get(found, found)
        return pool

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("An IdempotentAdapter cannot be pickled: its budget belongs to one process. Mount it afresh.")

    def send(self, request: requests.PreparedRequest, *how: Any, **named: Any) -> requests.Response:
        """Send the request, again if it must be, and return a response that is here to its last byte."""
        return self._sent(request, *how, **named)

    def _sent(
        self, request: requests.PreparedRequest, *how: Any, aside: bool = False, **named: Any
    ) -> requests.Response:
        own_key = request.headers.get(self._rules.header)
        delivery = self._rules.delivery(request.method or "", None if own_key is None else _text(own_key), aside=aside)
        if delivery is None:
            return super().send(request, *how, **named)
        hooks = _hooks(request)
        try:
            response = self._deliver(request, delivery, *how, **named)
        except ClientError as error:
            if not hooks or not may_be_answered(error):
                raise
            response = error.response
            response.__class__ = _Challenge
            vars(response)["ending"] = error.with_traceback(None)
            self._rules.challenged(error, response)
        if hooks:
            vars(response)["connection"] = _Answering(self, request, delivery.key)
        return response

    def _deliver(
        self,
        request: requests.PreparedRequest,
        delivery: Delivery,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        body = _held(request, self._rules.max_body)
        media_type = request.headers.get("Content-Type") or ""
        delivery.start(request.method or "", _text(media_type), body)
        request.headers[self._rules.header] = delivery.key
        with delivery:
            while True:
                try:
                    response = super().send(request, True, _cut(timeout, delivery.remaining), verify, cert, proxies)
                    decoded = _read_whole(response)
                except (requests.RequestException, urllib3.exceptions.HTTPError, Late, OSError, ValueError) as error:
                    again = not isinstance(error, _PERMANENT) and not _is_unsendable(error)
                    wait = delivery.failed(error, sent=_may_have_been_sent(error), again=again)
                else:
                    received = delivery.received(response, decoded, url=request.url or "")
                    if received is None:
                        return response
                    wait = received
                self._rules.retries.timing.sleep(wait)


class _Answering:
    """The adapter as a response has it, for its response hooks: they answer a challenge by `response.connection.send`.

    A request for the same thing keeps the key, also if the hook builds another. Any other, such as one for a token, is not the
    intent's.
    """

    def __init__(self, adapter: IdempotentAdapter, request: requests.PreparedRequest, key: str) -> None:
        self._adapter = adapter
        self._place = _place(request)
        self._key = key

    def send(self, request: requests.PreparedRequest, *how: Any, **named: Any) -> requests.Response:
        aside = _place(request) != self._place
        if not aside:
            request.headers.setdefault(self._adapter._rules.header, self._key)
        return self._adapter._sent(request, *how, aside=aside, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def _place(request: requests.PreparedRequest) -> tuple[object, ...]:
    """Return what a request is for. A hook may sign the body or the query."""
    return request.method, *urlsplit(request.url or "")[:3]


class _Challenge(requests.Response):
    """A response that a response hook may answer, as Digest and NTLM do. If no hook does, it ends the call."""

    ending: ClientError | None = None

    @property
    def ok(self) -> bool:
        return False

    def raise_for_status(self) -> None:
        if self.ending is not None:
            # A hook may call it before ours. Its own exception would be one of requests.
            raise self.ending
        super().raise_for_status()


def _hooks(request: requests.PreparedRequest) -> bool:
    """Put our hook behind those that may answer a response. Return False if there are none."""
    hooks: Any = request.hooks or {}
    found = hooks.get("response") or []
    if callable(found):
        found = hooks["response"] = [found]
    if not isinstance(found, list):
        return False
    others = [hook for hook in found if hook is not _end_after_the_hooks]
    if others:
        # The session goes through this list while a hook of it sends the request again.
        found[:] = [*others, _end_after_the_hooks]
    return bool(others)


def _end_after_the_hooks(response: requests.Response, *_: Any, **__: Any) -> None:
    ending = getattr(response, "ending", None)
    if isinstance(ending, ClientError):
        response.__class__ = requests.Response
        raise ending


class _Held(bytes):
    """What a file had. The authentication flow of requests rewinds a file before it sends it again."""

    def seek(self, position: int) -> None:
        pass


def _held(request: requests.PreparedRequest, max_body: int) -> bytes | None:
    """Return the body if it can be sent again, and make the request hold it. Return None for an unknown length."""
    body = request.body
    if body is None:
        return b""
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, (bytes, bytearray)):
        return bytes(body) if len(body) <= max_body else None
    length = _text(request.headers.get("Content-Length") or "")
    read = getattr(body, "read", None)
    if read is None or not length.isdecimal() or int(length) > max_body:
        return None
    content: bytes | str = read()
    request.body = _Held(content.encode() if isinstance(content, str) else content)
    # A redirect would rewind the file.
    request._body_position = None
    return request.body


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _cut(timeout: Any, remaining: float) -> Any:
    """Return this timeout, cut to what is left of the call."""
    least = max(remaining, 0.001)
    if isinstance(timeout, urllib3.Timeout):
        connect, read = timeout.connect_timeout, timeout.read_timeout
    else:
        connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    # urllib3 has a sentinel for "not given", which is no number.
    return tuple(min(value, least) if isinstance(value, (int, float)) else least for value in (connect, read))


def _read_whole(response: requests.Response) -> bytes:
    """Read the body inside the attempt, and put it back as it came. Return it decoded, for our own reading."""
    raw: Any = response.raw
    if not isinstance(raw, urllib3.BaseHTTPResponse):
        # A recorder, such as vcrpy, has read it whole, and has decoded it.
        recorded: bytes = raw.read()
        response.raw = _rebuilt(raw, recorded)
        response.raw.headers.discard("Content-Encoding")
        return recorded
    # A field that was cut in its value counts as missing.
    framed = (
        raw.headers.get("Content-Length", "").strip().isdecimal()
        or raw.headers.get("Transfer-Encoding", "").strip().lower() == "chunked"
    )
    pieces = []
    try:
        if not framed and response.status_code not in _WITHOUT_BODY:
            raise urllib3.exceptions.ProtocolError(
                "The reply has neither Content-Length nor chunks. It may have been cut in its headers."
            )
        if not getattr(getattr(raw, "_original_response", None), "whole_head", True):
            raise urllib3.exceptions.ProtocolError("The reply was cut in its headers.")
        while piece := raw.read1(_PIECE_BYTES, decode_content=False):
            pieces.append(piece)
            # A read timeout counts from piece to piece, so a slow body could outlast the deadline.
            seconds_left(Late)
    except BaseException:
        # The rest of this reply must not be taken for the next one.
        raw.close()
        raise
    raw.release_conn()
    content = b"".join(pieces)
    response.raw = _rebuilt(raw, content)
    if not raw.headers.get("Content-Encoding"):
        return content
    # Content that cannot be decoded counts as lost: the caller could not read it either.
    return _rebuilt(raw, content).read(decode_content=True)


def _rebuilt(raw: Any, content: bytes) -> urllib3.HTTPResponse:
    headers = urllib3.HTTPHeaderDict(raw.headers.items())
    # The chunks are gone.
    headers.discard("Transfer-Encoding")
    return urllib3.HTTPResponse(
        body=io.BytesIO(content),
        headers=headers,
        status=raw.status,
        version=raw.version or 11,
        reason=raw.reason,
        preload_content=False,
        decode_content=False,
        enforce_content_length=False,
        # requests reads cookies from it.
        original_response=getattr(raw, "_original_response", None),
        request_method=None,
    )


def _may_have_been_sent(error: Exception) -> bool:
    """Return whether a byte of the request may have left this machine."""
    if isinstance(error, (requests.exceptions.ConnectTimeout, *_PERMANENT)) or _is_unsendable(error):
        return False
    cause = error.args[0] if error.args else None
    reason = cause.reason if isinstance(cause, urllib3.exceptions.MaxRetryError) else cause
    if isinstance(reason, urllib3.exceptions.ProxyError):
        # urllib3 raises it for a lost reply too.
        reason = reason.original_error
        if type(reason) is OSError and str(reason).startswith("Tunnel connection failed"):
            return False
    if isinstance(reason, urllib3.exceptions.SSLError):
        # Other errors of TLS may come in the middle of a reply.
        return not (reason.args and isinstance(reason.args[0], ssl.SSLCertVerificationError))
    # NameResolutionError is a NewConnectionError.
    return not isinstance(reason, (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError))


def _is_unsendable(error: Exception) -> bool:
    """Return whether a line or header field of the request cannot be written. `http.client` sends none before it has all."""
    return isinstance(error, ValueError) and raised_in(error, "putrequest", "putheader")

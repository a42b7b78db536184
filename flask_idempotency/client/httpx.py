"""Transports for httpx, for programs with and without asyncio or trio.

Give one to the client: `httpx.Client(transport=IdempotentTransport())`. httpx then ignores its own `verify`, `limits`, `http2`
and proxy settings without a word; give those to the transport.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

import anyio
import httpcore
import httpx

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
from flask_idempotency.client.intents import in_thread
from flask_idempotency.client.retries import Retries

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport"]

R = TypeVar("R")
T = TypeVar("T", httpx.BaseTransport, httpx.AsyncBaseTransport)

# Raised before the first byte of a request is written. A ProxyError is a refused tunnel.
_NOT_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
# The same request fails again.
_PERMANENT: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
# The attempt brought no whole response.
_LOST: Final = (httpx.TransportError, httpx.DecodingError, httpx.StreamError, Late)


class _Transport(Generic[T]):
    """The settings of a transport, and the transport inside it."""

    _made: type[T]

    def __init__(
        self,
        transport: T | None = None,
        *,
        retries: Retries | None = None,
        header: str = "Idempotency-Key",
        methods: Iterable[str] = METHODS,
        automatic: bool = True,
        max_body: int = MAX_BODY_BYTES,
        **http: Any,
    ) -> None:
        """Send through `transport`, or through one of httpx that is made with the arguments `http`.

        `automatic` draws a new key for a request that has none. `max_body` is in bytes: longer bodies are sent once.
        A retrying transport inside this one would multiply the attempts, and draw no conclusions: do not nest them.
        """
        if transport is not None and http:
            raise TypeError(f"Give either a transport, or arguments for one: {', '.join(http)}.")
        self._inner: T = self._made(**http) if transport is None else transport
        self._rules = Rules(retries, header=header, methods=methods, automatic=automatic, max_body=max_body)
        # A transport of another kind keeps its own timeouts.
        pool = getattr(self._inner, "_pool", None)
        if type(getattr(pool, "_network_backend", None)) is httpcore.SyncBackend:
            vars(pool)["_network_backend"] = _Backend()


class IdempotentTransport(_Transport[httpx.BaseTransport], httpx.BaseTransport):
    """Sends each keyed request until it has its response, under one key, and says how it ended if there is none.

    Without a transport it makes an `httpx.HTTPTransport`. Raises the subclasses of `flask_idempotency.client.ClientError`, and
    `LedgerError`.
    """

    _made = httpx.HTTPTransport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, again if it must be, and return a response that is here to its last byte."""
        delivery = _delivery_of(request, self._rules)
        if delivery is None:
            return self._inner.handle_request(request)
        try:
            return self._deliver(request, delivery)
        except ClientError as error:
            return _for_the_flow(error, self._rules)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def _deliver(self, request: httpx.Request, delivery: Delivery) -> httpx.Response:
        body = request.read() if _repeatable(request, self._rules.max_body) else None
        delivery.start(request.method, request.headers.get("Content-Type", ""), body)
        _write_key(request, self._rules.header, delivery.key)
        with delivery, _cutting(request, delivery) as cut:
            while True:
                cut()
                try:
                    ended = _ended(delivery, request, self._attempt(request))
                except _LOST as error:
                    ended = _failed(delivery, error)
                if isinstance(ended, httpx.Response):
                    return ended
                self._rules.retries.timing.sleep(ended)

    def _attempt(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        response = self._inner.handle_request(request)
        pieces = []
        try:
            for piece in cast("httpx.SyncByteStream", response.stream):
                pieces.append(piece)
                # A read timeout counts from piece to piece, so a slow body could outlast the deadline.
                seconds_left(Late)
        finally:
            response.close()
        return _whole(response, b"".join(pieces))


class _Stream:
    """A connection on which no read outlasts the deadline of its delivery."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = seconds_left(httpcore.ReadTimeout)
        if left is not None:
            timeout = left if timeout is None else min(left, timeout)
        data = self._stream.read(max_bytes, timeout)
        seconds_left(httpcore.ReadTimeout)
        return data

    def start_tls(self, *arguments: Any, **options: Any) -> Any:
        return _Stream(self._stream.start_tls(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Backend(httpcore.SyncBackend):
    def connect_tcp(self, *arguments: Any, **options: Any) -> Any:
        return _Stream(super().connect_tcp(*arguments, **options))

    def connect_unix_socket(self, *arguments: Any, **options: Any) -> Any:
        return _Stream(super().connect_unix_socket(*arguments, **options))


class AsyncIdempotentTransport(_Transport[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`, on asyncio and on trio. Without a transport it makes an `httpx.AsyncHTTPTransport`."""

    _made = httpx.AsyncHTTPTransport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, again if it must be, and return a response that is here to its last byte."""
        delivery = _delivery_of(request, self._rules)
        if delivery is None:
            return await self._inner.handle_async_request(request)
        try:
            return await self._deliver(request, delivery)
        except ClientError as error:
            return _for_the_flow(error, self._rules)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    async def _deliver(self, request: httpx.Request, delivery: Delivery) -> httpx.Response:
        body = await request.aread() if _repeatable(request, self._rules.max_body) else None
        media_type = request.headers.get("Content-Type", "")
        await in_thread(lambda: delivery.start(request.method, media_type, body), on_disk=delivery.on_disk)
        _write_key(request, self._rules.header, delivery.key)
        with _cutting(request, delivery) as cut:
            # A cancelled call is noted too.
            async with delivery:
                while True:
                    cut()
                    try:
                        ended = _ended(delivery, request, await self._attempt(request, delivery))
                    except _LOST as error:
                        ended = _failed(delivery, error)
                    if isinstance(ended, httpx.Response):
                        return ended
                    await self._rules.retries.timing.async_sleep(ended)

    async def _attempt(self, request: httpx.Request, delivery: Delivery) -> tuple[httpx.Response, bytes]:
        with anyio.move_on_after(delivery.remaining):
            response = await self._inner.handle_async_request(request)
            pieces = []
            try:
                async for piece in cast("httpx.AsyncByteStream", response.stream):
                    pieces.append(piece)
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
            return _whole(response, b"".join(pieces))
        raise Late("The deadline passed before the response was here.")


def _repeatable(request: httpx.Request, max_body: int) -> bool:
    """Return whether the body can be held and sent again. A body of unknown length is not read before it is sent."""
    if isinstance(request.stream, httpx.ByteStream):
        return len(request.read()) <= max_body
    length = request.headers.get("Content-Length", "")
    return length.isdecimal() and int(length) <= max_body and isinstance(request.stream, (Iterable, AsyncIterable))


@contextmanager
def _cutting(request: httpx.Request, delivery: Delivery) -> Iterator[Callable[[], None]]:
    """Yield what cuts the timeouts of the request to what is left of the delivery. Restore them at the end."""
    timeouts: dict[str, float | None] = dict(request.extensions.get("timeout", {}))

    def cut() -> None:
        # 0 would mean "do not block" to a socket.
        least = max(delivery.remaining, 0.001)
        request.extensions["timeout"] = {
            name: min(least, math.inf if (given := timeouts.get(name)) is None else given)
            for name in ("connect", "read", "write", "pool")
        }

    try:
        yield cut
    finally:
        request.extensions["timeout"] = timeouts


def _whole(response: httpx.Response, raw: bytes) -> tuple[httpx.Response, bytes]:
    """Return a response that has its bytes as they came, and the decoded bytes for our own reading."""
    headers, extensions = response.headers, response.extensions
    whole = httpx.Response(response.status_code, headers=headers, stream=httpx.ByteStream(raw), extensions=extensions)
    if not headers.get("Content-Encoding"):
        return whole, raw
    # Content that cannot be decoded counts as lost: the caller could not read it either.
    return whole, httpx.Response(response.status_code, headers=headers, content=raw).content


def _failed(delivery: Delivery, error: Exception) -> float:
    # A header that the protocol forbids. The same class tells of a body that ends too early.
    unsendable = isinstance(error, httpx.LocalProtocolError) and raised_in(error, "_send_request_headers")
    sent = not isinstance(error, _NOT_SENT) and not unsendable
    return delivery.failed(error, sent=sent, again=not isinstance(error, _PERMANENT))


def _ended(delivery: Delivery, request: httpx.Request, got: tuple[httpx.Response, bytes]) -> float | httpx.Response:
    """Return the seconds to wait before the next attempt, or the response that the caller gets."""
    response, decoded = got
    try:
        wait = delivery.received(response, decoded, url=str(request.url))
    except ClientError:
        # httpx reads a response that it returns. This one goes with an exception.
        response.request = request
        response.read()
        raise
    return response if wait is None else wait


# These flows send once, whatever the response is.
_SINGLE: Final = (httpx.Auth, httpx.BasicAuth, httpx.NetRCAuth)


def _ending(method: Callable[..., R]) -> Callable[..., R]:
    """Let this method of a challenge end the call, once the flow has ended."""

    def called(self: _Challenge, *arguments: Any, **options: Any) -> R:
        if _waiting_flow() is None:
            self.raise_for_status()
        return method(self, *arguments, **options)

    return called


class _Challenge(httpx.Response):
    """A response that the client's authentication flow may answer. If it does not, reading the response ends the call."""

    def __init__(self, error: ClientError) -> None:
        shown: httpx.Response = error.response
        super().__init__(shown.status_code, headers=shown.headers, stream=shown.stream, extensions=shown.extensions)
        self._error = error
        self._told = False

    read = _ending(httpx.Response.read)
    aread = _ending(httpx.Response.aread)
    iter_bytes = _ending(httpx.Response.iter_bytes)
    iter_raw = _ending(httpx.Response.iter_raw)
    aiter_bytes = _ending(httpx.Response.aiter_bytes)
    aiter_raw = _ending(httpx.Response.aiter_raw)

    def raise_for_status(self) -> NoReturn:
        # An event hook calls it before the flow goes on. Its own exception would be one of httpx.
        self._told = True
        raise self._error

    def close(self) -> None:
        super().close()
        self._end_unread()

    async def aclose(self) -> None:
        await super().aclose()
        self._end_unread()

    def _end_unread(self) -> None:
        """End the call if a streamed response was closed, and nothing in it was read. Another exception goes first."""
        if not self._told and sys.exc_info()[1] is None and _waiting_flow() is None:
            self.raise_for_status()


def _for_the_flow(error: ClientError, rules: Rules) -> httpx.Response:
    """Return the response of this error if an authentication flow may answer it, and raise the error otherwise."""
    flow = _waiting_flow()
    if flow is None or type(flow.f_locals.get("auth")) in _SINGLE or not may_be_answered(error):
        raise error
    challenge = _Challenge(error.with_traceback(None))
    rules.challenged(error, challenge)
    return challenge


_KEY: Final = "flask_idempotency_key"
"""The extension of the request that a client was called with that holds its key: a flow may send copies that lack the field."""


def _delivery_of(request: httpx.Request, rules: Rules) -> Delivery | None:
    called, aside = _called()
    kept = None if called is None or aside else called.extensions.get(_KEY)
    return rules.delivery(request.method, request.headers.get(rules.header) or kept, aside=aside)


def _write_key(request: httpx.Request, header: str, key: str) -> None:
    request.headers[header] = key
    called, aside = _called()
    if called is not None and not aside:
        called.extensions[_KEY] = key


def _called() -> tuple[httpx.Request | None, bool]:
    """Return the request that the client was called with, while an authentication flow waits, and whether the flow asks for
    something beside it, such as a token.

    A flow may sign the body or the query, so only the method and the place count.
    """
    flow = _waiting_flow()
    if flow is None or flow.f_back is None:
        return None, False
    asked, called = flow.f_locals.get("request"), flow.f_back.f_locals.get("request")
    if not isinstance(asked, httpx.Request) or not isinstance(called, httpx.Request):
        return None, False
    return called, asked is not called and _place(asked) != _place(called)


def _place(request: httpx.Request) -> tuple[object, ...]:
    url = request.url
    return request.method, url.scheme, url.host, url.port, url.path


def _waiting_flow() -> FrameType | None:
    """Return the frame of httpx's client that runs an authentication flow and waits for this code, or None.

    httpx tells a transport nothing of the flow. If it renames these functions, doubt ends in an exception before the flow.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "httpx._client":
            if frame.f_code.co_name == "_send_handling_auth":
                return frame
            if frame.f_code.co_name == "send":
                # The flow of this call has ended. A flow further out waits for something else.
                return None
    return None

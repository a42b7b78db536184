"""Send messages by HTTP, each as one POST under its message id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, cast

import httpx

from flask_idempotency.client.errors import CarriedOut, ClientError
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.retries import Retries
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.outbox import Message, Undeliverable
from flask_idempotency.maintenance.relay import SendFailed

TIMEOUT_SECONDS = 10.0
"""How long one attempt may take, from the look-up of the name to the end of the response."""

MAX_RESPONSE_BYTES: Final = 65_536
"""How much of a response is read. Only its status matters, and the problem of a receiver that this package guards."""

AGAIN: Final = frozenset({408, 409, 425, 429})
"""Refusals that may pass. Every other 4xx says that the receiver never takes this message."""


class Webhook:
    """POST each message to the URL that `url_of(message)` returns.

    The message id is in `Idempotency-Key` and in `webhook-id`. A receiver that this package guards runs it once.
    `headers_of(message)` returns further header fields, such as a signature. `http` are the arguments of an
    `httpx.HTTPTransport`, for example `verify`. Redirects are not followed. An attempt ends after 10 seconds, also if the
    receiver sends a byte now and then.

    2xx is done; so is a receiver that has carried it out before and has erased its response. 408, 409, 425, 429, 3xx, 5xx and
    silence are tried again. Every other 4xx is `Undeliverable`.
    """

    batch = 1
    """A slow receiver must not hold back the results of others."""

    def __init__(
        self,
        url_of: Callable[[Message], str],
        *,
        headers_of: Callable[[Message], Mapping[str, str]] | None = None,
        **http: Any,
    ) -> None:
        if not callable(url_of):
            raise TypeError("Webhook takes a function from a message to its URL.")
        self._url_of = url_of
        self._headers_of = headers_of
        self._http = http
        self._client: httpx.Client | None = None
        after_fork(self._forget)

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send one after the other."""
        return [self._sent(message) for message in messages]

    def _forget(self) -> None:
        # Both processes would read the responses of one connection.
        self._client = None

    def _sent(self, message: Message) -> Exception | None:
        try:
            fields = httpx.Headers(message.headers)
            if self._headers_of is not None:
                fields.update(self._headers_of(message))
            # Last, so that no function of the application changes the id.
            fields.update({"webhook-id": message.message_id, "Idempotency-Key": message.message_id})
            response = self._post(self._url_of(message), message.body, fields)
        except CarriedOut:
            return None
        except ClientError as error:
            # Its text has no URL, and its `response` tells more.
            return _judged(None if error.response is None else error.response.status_code)
        except SendFailed as error:
            return error
        except httpx.HTTPError as error:
            return SendFailed(f"no response ({type(error).__name__})")
        return _judged(response.status_code)

    def _post(self, url: str, body: bytes, fields: Mapping[str, str]) -> httpx.Response:
        """Send in a thread. httpx starts its timeout again with each byte, so a receiver could hold the relay for hours."""
        client, responded = self._opened(), Future[httpx.Response]()

        def post() -> None:
            try:
                responded.set_result(client.post(url, content=body, headers=fields))
            except BaseException as error:  # noqa: BLE001 - the relay's thread raises it
                responded.set_exception(error)

        threading.Thread(target=post, name="flask_idempotency.webhook", daemon=True).start()
        try:
            return responded.result(TIMEOUT_SECONDS)
        except TimeoutError:
            self._client = None
            # The thread ends at its next byte, or at its own timeout.
            with suppress(Exception):
                client.close()
            raise SendFailed(f"no whole response within {TIMEOUT_SECONDS:g} seconds") from None

    def _opened(self) -> httpx.Client:
        if self._client is None:
            # The relay repeats, so this sends once: a body of unknown length is never sent again.
            retries = Retries(attempts=1, deadline=TIMEOUT_SECONDS)
            transport = IdempotentTransport(_Bounded(httpx.HTTPTransport(**self._http)), retries=retries, max_body=-1)
            self._client = httpx.Client(
                transport=transport,
                timeout=TIMEOUT_SECONDS,
                follow_redirects=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._client


class _Bounded(httpx.BaseTransport):
    """Reads the first bytes of each response. A receiver may send without end, or a little that unpacks to gigabytes."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        data = bytearray()
        try:
            for piece in cast("httpx.SyncByteStream", response.stream):
                data += piece
                if len(data) >= MAX_RESPONSE_BYTES:
                    break
        finally:
            response.close()
        # Bytes that may be cut are not decoded, and have another length.
        fields = [(name, value) for name, value in response.headers.multi_items() if name not in _OF_WHOLE]
        stream = httpx.ByteStream(bytes(data[:MAX_RESPONSE_BYTES]))
        return httpx.Response(response.status_code, headers=fields, stream=stream, extensions=response.extensions)

    def close(self) -> None:
        self._inner.close()


_OF_WHOLE: Final = frozenset({"content-encoding", "content-length", "transfer-encoding"})


def _judged(status: int | None) -> Exception | None:
    if status is None:
        return SendFailed("no response")
    if 200 <= status < 300:
        return None
    if 400 <= status < 500 and status not in AGAIN:
        return Undeliverable(f"the receiver refused it with status {status}")
    return SendFailed(f"the receiver responded with status {status}")

"""Send messages by HTTP, each as one POST under its message id."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeAlias

import httpx

from flask_idempotency.client.responses import Verdict, read
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.outbox import Message, Undeliverable
from flask_idempotency.engine.values import fits
from flask_idempotency.maintenance.relay import SendFailed

TIMEOUT_SECONDS = 10.0
"""How long one attempt may take, from the look-up of the name to the end of the response."""

MAX_RESPONSE_BYTES: Final = 65_536
"""How much of a response is read. Only its status matters, and the problem of a receiver that this package guards."""

MAX_IDLE: Final = 64
"""How many connections stay open for later messages."""

AGAIN: Final = frozenset({408, 409, 425, 429})
"""Refusals that may pass. Every other 4xx says that the receiver never takes this message."""

Address: TypeAlias = IPv4Address | IPv6Address
Reply: TypeAlias = tuple[int, httpx.Headers, bytes]
"""The status of a response, its fields, and the first bytes of its body as they came."""

_LOGGERS: Final = (
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
    "httpcore.http2",
    "httpcore.proxy",
    "httpcore.socks",
    "hpack.hpack",
    "hpack.table",
)
"""They log the URL of each request, and at level DEBUG its headers: tokens of customers, and signatures."""

_here: Final = threading.local()
"""`sends` is set in the threads that send webhooks."""


for _name in _LOGGERS:
    # Requests of the application are logged as before.
    logging.getLogger(_name).addFilter(lambda record: not getattr(_here, "sends", False))


class Webhook:
    """POST each message to the URL that `url_of(message)` returns.

    The message id is in `Idempotency-Key` and in `webhook-id`. A receiver that this package guards runs it once.
    `headers_of(message)` returns further header fields, such as a signature. A relay calls both functions in several threads,
    and `url_of` twice for each attempt. `http` are the arguments of an `httpx.HTTPTransport`, for example `verify`, or `proxy`:
    the environment's proxies are not used. Redirects are not followed, cookies are not kept, and `.netrc` is not read. An
    attempt ends after 10 seconds, also if the receiver sends a byte now and then.

    `allow(host, address)` decides where a message may go. It is called with each address that the name of the host has now, an
    `IPv4Address` or `IPv6Address`, before each attempt. The connection goes to an address that it took, and no other look-up
    comes in between. If it takes none, the message is tried again, or is dead if it raised `Undeliverable`. Without it, a URL
    may lead to each host that the relay can reach: your own network too. Raises `TypeError` together with `proxy`, which looks
    the name up itself, and `uds`.

    2xx is done; so is a receiver that has carried it out before and has erased its response. 408, 409, 425, 429, 3xx, 5xx,
    silence and a paused response (`Idempotency-Status: paused`) are tried again. Every other 4xx is `Undeliverable`.
    """

    batch = 1
    """A slow receiver must not hold back the results of others."""

    parallel = 256
    """A receiver that is silent keeps one call for 10 seconds, and a host of which nothing is known has one call."""

    def __init__(
        self,
        url_of: Callable[[Message], str],
        *,
        headers_of: Callable[[Message], Mapping[str, str]] | None = None,
        allow: Callable[[str, Address], bool] | None = None,
        **http: Any,
    ) -> None:
        given: Sequence[Any] = (url_of, headers_of, allow)
        if not callable(given[0]) or not fits(url_of, None):
            raise TypeError("Webhook takes a function from a message to its URL.")
        if headers_of is not None and not (callable(given[1]) and fits(headers_of, None)):
            raise TypeError("Webhook: headers_of is a function from a message to its further header fields.")
        if allow is not None and not (callable(given[2]) and fits(allow, "", None)):
            raise TypeError(
                "Webhook: allow is a function of a host and an address, which returns whether to send there."
            )
        if allow is not None and any(http.get(name) is not None for name in ("proxy", "uds")):
            raise TypeError(
                "Webhook: allow checks the address that a message is sent to, and a proxy or a socket leads elsewhere. Use one "
                "of them, and let the proxy decide."
            )
        self._url_of = url_of
        self._allow = allow
        self._headers_of = headers_of
        self._http = http
        self._verify: Any = None
        self._forget()
        after_fork(self._forget)

    def send(self, messages: Sequence[Message]) -> Sequence[Exception | None]:
        """Send one after the other."""
        return [self._sent(message) for message in messages]

    def receiver_of(self, message: Message) -> object:
        """Return the host and the port of the URL."""
        url = httpx.URL(self._url_of(message))
        return url.host.lower(), url.port

    def _forget(self) -> None:
        # Both processes would read the responses of one connection.
        self._idle: dict[httpx.Client, object] = {}
        """Clients that send nothing now, each with the receiver that it has connections to. The oldest first."""
        self._lock = threading.Lock()

    def _sent(self, message: Message) -> Exception | None:
        try:
            fields = httpx.Headers(message.headers)
            if self._headers_of is not None:
                fields.update(self._headers_of(message))
            # Last, so that no function of the application changes the id.
            fields.update({"webhook-id": message.message_id, "Idempotency-Key": message.message_id})
            status, headers, content = self._post(self._url_of(message), message.body, fields)
        except (SendFailed, Undeliverable) as error:
            return error
        except httpx.HTTPError as error:
            return SendFailed(f"no response ({type(error).__name__})")
        if headers.get("Idempotency-Status") == "paused":
            # Steps of it are done, whatever the status says of the next one. Only this id goes on behind them.
            return SendFailed(f"the receiver paused it with status {status}")
        verdict = read(status, headers, content).verdict
        if verdict in (Verdict.NOT_KEPT, Verdict.ERASED, Verdict.EXPIRED) or 200 <= status < 300:
            return None
        if 400 <= status < 500 and status not in AGAIN:
            return Undeliverable(f"the receiver refused it with status {status}")
        return SendFailed(f"the receiver responded with status {status}")

    def _post(self, url: str, body: bytes, fields: Mapping[str, str]) -> Reply:
        """Send in a thread. httpx starts its timeout again with each byte, so a receiver could hold the relay for hours."""
        receiver = httpx.URL(url).copy_with(path="/", query=None, fragment=None)
        client, responded = self._opened(receiver), Future[Reply]()

        def post() -> None:
            _here.sends = True
            try:
                responded.set_result(self._sent_by(client, httpx.URL(url), body, fields))
            except BaseException as error:  # noqa: BLE001 - the relay's thread raises it
                responded.set_exception(error)

        # `allow` may need the application's context, as `url_of` has it.
        threading.Thread(target=copy_context().run, args=(post,), name="flask_idempotency.webhook", daemon=True).start()
        try:
            reply = responded.result(TIMEOUT_SECONDS)
        except TimeoutError:
            # The thread ends at its next byte, or at its own timeout.
            with suppress(Exception):
                client.close()
            raise SendFailed(f"no whole response within {TIMEOUT_SECONDS:g} seconds") from None
        except BaseException:
            client.close()
            raise
        self._keep(client, receiver)
        return reply

    def _sent_by(self, client: httpx.Client, url: httpx.URL, body: bytes, fields: Mapping[str, str]) -> Reply:
        if self._allow is None:
            return _posted(client, url, content=body, headers=fields)
        host, reply = url.raw_host.decode("ascii").lower(), None
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SendFailed("the name of the receiver has no address") from error
        addresses = [ip_address(text) for text in dict.fromkeys(str(place[0]) for *_, place in found)]
        # An IPv4 address in the form of IPv6 leads to that one.
        plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
        allowed = [address for address in plain if self._allow(host, address)]
        # The name stays in the Host field, and in the certificate that is asked for.
        fields = httpx.Headers(fields)
        fields.setdefault("Host", url.netloc.decode("ascii"))
        timeout = httpx.Timeout(TIMEOUT_SECONDS, connect=TIMEOUT_SECONDS / max(len(allowed), 1))
        for number, address in enumerate(allowed, 1):
            there = url.copy_with(host=str(address))
            named = {"sni_hostname": host}
            with suppress(*((httpx.ConnectError, httpx.ConnectTimeout) if number < len(allowed) else ())):
                reply = _posted(client, there, content=body, headers=fields, extensions=named, timeout=timeout)
                break
        if reply is None:
            raise SendFailed("no address of the receiver is allowed")
        return reply

    def _opened(self, receiver: object) -> httpx.Client:
        """Return a client for one attempt. No other attempt uses it at the same time, and no other receiver ever."""
        with self._lock:
            for client in reversed(self._idle):
                if self._idle[client] == receiver:
                    del self._idle[client]
                    return client
            if self._verify is None:
                # Reading the certificates takes longer than a request.
                given = {name: value for name, value in self._http.items() if name in ("verify", "cert", "trust_env")}
                self._verify = httpx.create_ssl_context(**given)
        options = {name: value for name, value in self._http.items() if name not in ("verify", "cert")}
        return httpx.Client(
            transport=httpx.HTTPTransport(verify=self._verify, **options),
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,
            trust_env=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={"Accept-Encoding": "identity"},
        )

    def _keep(self, client: httpx.Client, receiver: object) -> None:
        """Keep the connection of a client for the next message of its receiver."""
        with self._lock:
            self._idle[client] = receiver
            old = next(iter(self._idle)) if len(self._idle) > MAX_IDLE else None
            if old is not None:
                del self._idle[old]
        if old is not None:
            old.close()


def _posted(client: httpx.Client, url: httpx.URL, **options: Any) -> Reply:
    """Send, and read the first bytes of the response: some receiver may send without end, or gigabytes in a small package."""
    with client.stream("POST", url, **options) as response:
        data = bytearray()
        for piece in response.iter_raw():
            data += piece
            if len(data) >= MAX_RESPONSE_BYTES:
                break
        return response.status_code, response.headers, bytes(data[:MAX_RESPONSE_BYTES])

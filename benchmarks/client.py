"""What the Python client adds to a call of httpx and of requests: with a new key, in an intent, and with a ledger on disk.

One server thread answers over kept connections. Processor time is that of the calling thread, so the server does not count.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import httpx
import requests

from benchmarks.harness import timed
from benchmarks.report import Row, Section
from flask_idempotency.client import Intents, Ledger
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter

BARE: Final = "bare"
KEY: Final = "a new key"
INTENT: Final = "an intent"
LEDGER: Final = "an intent in a ledger file"
REPLY: Final = b'HTTP/1.1 201 CREATED\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"id": 1}'
BODY: Final = b'{"amount": 100}'
HEADERS: Final = {"Content-Type": "application/json"}

Call: TypeAlias = Callable[[], object]


def section(*, rounds: int, requests_each: int) -> Section:
    """Time each case, interleaved by round."""
    with ExitStack() as stack:
        url = stack.enter_context(_server())
        folder = stack.enter_context(TemporaryDirectory())
        cases = {
            (library, case): call
            for library, post, plain in (
                ("httpx", *_httpx(stack)),
                ("requests", *_requests(stack)),
            )
            for case, call in _calls(url, post, plain, Path(folder) / f"{library}.sqlite3").items()
        }
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in cases}
        for call in cases.values():
            call()
        for _ in range(rounds):
            for name, call in cases.items():
                taken[name].append(timed(call, requests_each))
    note = "Microseconds of one POST: `CPU` is the calling thread's, `wall` includes the server and the disk."
    return Section("Client", note, [_row(name, taken) for name in taken])


def _calls(url: str, post: Callable[[str], object], plain: Callable[[str], object], ledger: Path) -> dict[str, Call]:
    numbers = count()

    def within(intents: Intents) -> Call:
        def call() -> object:
            with intents(f"pay invoice {next(numbers)}"):
                return post(url)

        return call

    return {
        BARE: lambda: plain(url),
        KEY: lambda: post(url),
        INTENT: within(Intents()),
        LEDGER: within(Intents(Ledger(ledger))),
    }


def _httpx(stack: ExitStack) -> tuple[Callable[[str], object], Callable[[str], object]]:
    ours = stack.enter_context(httpx.Client(transport=IdempotentTransport()))
    bare = stack.enter_context(httpx.Client(transport=httpx.HTTPTransport()))
    return (
        lambda url: ours.post(url, content=BODY, headers=HEADERS),
        lambda url: bare.post(url, content=BODY, headers=HEADERS),
    )


def _requests(stack: ExitStack) -> tuple[Callable[[str], object], Callable[[str], object]]:
    ours, bare = stack.enter_context(requests.Session()), stack.enter_context(requests.Session())
    ours.mount("http://", IdempotentAdapter())
    return (
        lambda url: ours.post(url, data=BODY, headers=HEADERS),
        lambda url: bare.post(url, data=BODY, headers=HEADERS),
    )


def _row(name: tuple[str, str], taken: dict[tuple[str, str], list[tuple[float, float]]]) -> Row:
    library, case = name
    used, passed = (median(each[part] for each in taken[name]) * 1e6 for part in range(2))
    ratio = median(ours[0] / bare[0] for ours, bare in zip(taken[name], taken[library, BARE], strict=True))
    return Row(f"{library}: {case}", {"CPU": used, "× bare": ratio, "wall": passed})


@contextmanager
def _server() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/payments"
    finally:
        listener.close()


def _serve(listener: socket.socket) -> None:
    # The listener is closed at the end, and then every connection by its client.
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        data = b""
        while more := connection.recv(65536):
            data += more
            # requests sends head and body in two pieces.
            if data.endswith(BODY):
                connection.sendall(REPLY)
                data = b""

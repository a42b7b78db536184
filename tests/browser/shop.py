"""The shop that the browser tests use: an application on a real server, behind a proxy that cuts replies."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, jsonify, make_response, redirect, render_template_string, request
from flask_wtf import CSRFProtect  # type: ignore[import-untyped]
from werkzeug.serving import WSGIRequestHandler, make_server

from flask_idempotency import Idempotency, exempt, key_status

WAIT_SECONDS = 60.0

SCRIPT = """
<!doctype html><title>Shop</title>{{ idempotency_script() }}
<script type="module">
  import * as module from "{{ request.script_root }}/idempotency.js";
  Math.random = () => 0;
  Object.assign(window, module, { ready: true });
  window.kind = (promise) => promise.then((response) => response.status, (error) => error.kind ?? String(error));
</script>
<script>addEventListener("pageshow", (event) => { window.persisted = event.persisted; });</script>
"""

FORM = (
    SCRIPT
    + """
<form method="post" action="/orders" id="order" data-idempotent{% if fetch %}="fetch"{% endif %}>
  <input type="hidden" name="csrf_token" value="{{ csrf_token() }}">
  {{ idempotency_field(endpoint="order") }}
  <input name="item" value="tea">
  <input name="action" value="x"><input name="id" value="x"><input name="method" value="x">
  <button>Order</button> <button id="other" formaction="/orders?button=other">Order elsewhere</button>
</form>
"""
)


@dataclass
class Shop:
    """An application that counts what it does."""

    app: Flask
    payments: list[str] = field(default_factory=list)
    """The key of each payment that ran."""
    orders: list[str] = field(default_factory=list)
    """The item of each order that ran."""
    buttons: list[str | None] = field(default_factory=list)
    """The button of each order that ran, as its `formaction` names it."""
    keys: list[str | None] = field(default_factory=list)
    """The key of each POST that arrived."""
    begun: threading.Event = field(default_factory=threading.Event)
    second: threading.Event = field(default_factory=threading.Event)
    """Set as a second POST arrives."""
    go: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.payments.clear()
        self.orders.clear()
        self.buttons.clear()
        self.keys.clear()
        self.begun.clear()
        self.second.clear()
        self.go.set()


def new_shop() -> Shop:
    app = Flask("shop")
    app.config.update(SECRET_KEY="kept-in-tests-only", WTF_CSRF_SSL_STRICT=False)
    app.testing = True
    csrf = CSRFProtect(app)
    Idempotency(
        app,
        principal=lambda: "alice",
        secret="s-9f2c47d1e8b35a60c1d47be2a5583f09",
        browser_module="/idempotency.js",
        form_field="idempotency_key",
        in_flight="wait",
        status_url="/status",
        void=True,
    )
    csrf.exempt(key_status)
    shop = Shop(app)
    shop.go.set()

    @app.before_request
    def note() -> None:
        if request.method == "POST":
            shop.keys.append(request.headers.get("Idempotency-Key") or request.form.get("idempotency_key"))
            if len(shop.keys) > 1:
                shop.second.set()

    @app.get("/")
    def page() -> str:
        return render_template_string(SCRIPT)

    @app.get("/form")
    def form() -> Response:
        response = make_response(render_template_string(FORM, fetch="fetch" in request.args))
        if "cached" in request.args:
            response.headers["Cache-Control"] = "max-age=600"
        return response

    @app.post("/payments")
    @csrf.exempt  # type: ignore[untyped-decorator]
    def pay() -> Any:
        shop.payments.append(request.headers["Idempotency-Key"])
        shop.begun.set()
        assert shop.go.wait(WAIT_SECONDS)
        return jsonify(row=len(shop.payments)), int(request.args.get("status", 201))

    @app.post("/paused")
    @csrf.exempt  # type: ignore[untyped-decorator]
    @exempt
    def paused() -> Any:
        """Respond as a view with durable steps that failed behind a finished one."""
        shop.payments.append(request.headers["Idempotency-Key"])
        code = request.args.get("code")
        body = {"code": code, "type": f"https://example.com/problems#{code}"}
        return body, int(request.args["status"]), {"Idempotency-Status": "paused"}

    @app.post("/away")
    @csrf.exempt  # type: ignore[untyped-decorator]
    @exempt
    def away() -> Any:
        """Redirect, as a service does for a visitor whose session has ended."""
        return redirect("/", 302)

    @app.post("/orders")
    def order() -> Any:
        shop.orders.append(request.form["item"])
        shop.buttons.append(request.args.get("button"))
        shop.begun.set()
        assert shop.go.wait(WAIT_SECONDS)
        return redirect(f"/orders/{len(shop.orders)}", 303)

    @app.get("/begun")
    def begun() -> str:
        """Respond as soon as an order or a payment runs."""
        assert shop.begun.wait(WAIT_SECONDS)
        return ""

    @app.get("/orders/<int:number>")
    def ordered(number: int) -> str:
        return f"<!doctype html><p id=done>Order {number}</p><a href=/form>Another</a>"

    return shop


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing."""


class CuttingProxy:
    """Passes bytes on to a server, over TLS if it has a context. It cuts the replies to POSTs that you tell it to."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._upstream = ("127.0.0.1", port)
        self._context = context
        self._cut: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self.away = False
        """Whether it hangs up on each request before it passes a byte on, as if no service were there."""
        self.port: int = self._listener.getsockname()[1]
        self.origin = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self.last_reply_bytes = 0

    def cut_next(self, after: int) -> None:
        """Cut the reply to the next POST after so many bytes."""
        self._cut = after

    def __enter__(self) -> CuttingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        # A close alone does not wake a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with ExitStack() as stack, contextlib.suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stack.enter_context(plain)
            client = plain if self._context is None else self._context.wrap_socket(plain, server_side=True)
            stack.enter_context(client)
            # The server speaks HTTP/1.1 and Chromium does not pipeline, so requests and replies take turns.
            server = stack.enter_context(socket.create_connection(self._upstream))
            while (head := self._message(client)) and not self.away:
                server.sendall(head)
                reply = self._message(server, body=not head.startswith(b"HEAD"))
                cut = None
                if head.startswith(b"POST"):
                    cut, self._cut = self._cut, None
                    self.last_reply_bytes = len(reply)
                client.sendall(reply if cut is None else reply[:cut])
                if cut is not None or not reply:
                    return

    @staticmethod
    def _message(source: socket.socket, *, body: bool = True) -> bytes:
        """Read one request or reply, by its `Content-Length`. The reply to a HEAD has no body."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = source.recv(65536)
            if not more:
                return b""
            data += more
        head, _, begun = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        missing = int(fields.get(b"content-length", b"0")) - len(begun)
        while body and missing > 0 and (more := source.recv(65536)):
            data += more
            missing -= len(more)
        return data


@contextlib.contextmanager
def serving(app: Flask) -> Iterator[int]:
    """Serve the application with threads, and yield its port."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(WAIT_SECONDS)
        server.server_close()

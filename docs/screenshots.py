"""Run commands and draw what a terminal shows as docs/_static/cli/*.svg: `python -m docs.generate` does.

A small application has a SQLite store with a clock that stands still, so that each run draws the same pictures. Each is 80
columns wide, and loads nothing from another site.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import shlex
import sqlite3
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

from flask import Flask, request
from flask.cli import ScriptInfo
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from flask_idempotency import Idempotency
from flask_idempotency.assembly import identities
from flask_idempotency.cli import cli, progress
from flask_idempotency.engine.keys import Scope, new_token, owner_mark
from flask_idempotency.engine.model import ClaimRequest, OnExpiry, RequestInfo
from flask_idempotency.operations import doctor
from flask_idempotency.settings import Settings
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock

DRAWN: Final = Path(__file__).parent / "_static" / "cli"
COLUMNS: Final = 80

NOW: Final = 1_736_933_400.0
"""2025-01-15 09:30 UTC. It must be past, because a janitor goes by the earlier of the store's clock and the host's."""

LINKS: Final = re.compile(r"\s*(?:@font-face \{\{.*?\}\}|<!--.*?-->)(?=\n)", re.DOTALL)
"""rich's template links a font on another site. A reader's browser has a monospaced one."""

COMMANDS: Final = {
    "doctor": "doctor --worker-timeout 30 --proxy-timeout 60",
    "stats": "stats",
    "activity": "stats --since 1h",
    "list": "list",
    "show": "show --key order-1042 --tenant acme --principal alice",
    "policy": "policy",
    "purge": 'purge --tenant globex --reason "contract ended" --yes',
}
"""The command line of each picture. `purge` is the last, because it changes the store."""

COUNTED: Final = {
    "pay": {
        "new": 1289,
        "completed": 1286,
        "quarantined": 3,
        "replayed": 61,
        "conflict": 4,
        "mismatch": 2,
        "t:new:9": 1270,
        "t:new:15": 19,
        "t:replayed:2": 61,
    },
    "refund": {"new": 17, "completed": 17, "missing-key": 1, "t:new:7": 17},
}
"""What the processes of the shop counted in the last hour."""

ALONE: Final = "progress"
"""The picture of a command that still runs."""


class Terminal(io.StringIO):
    """A terminal that remembers the lines on its screen."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """The lines with their colours, after all that a program erased or wrote over."""
        lines, row = [""], 0
        for piece in re.split(r"(\r|\n|\x1b\[[\d;?]*[A-Za-z])", self.getvalue()):
            if piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif piece == "\r" or piece == "\x1b[2K":
                lines[row] = ""
            elif piece == "\x1b[1A":
                row -= 1
            elif not piece.startswith("\x1b[") or piece.endswith("m"):
                lines[row] += piece
        return lines


def draw() -> dict[str, str]:
    """Return each picture by its name."""
    pictures = {}
    with TemporaryDirectory() as folder, terminal_settings():
        clock = FrozenClock(NOW)
        store = SqlStore(Database(f"sqlite:///{folder}/records.db"), clock=clock)
        store.schema.upgrade()
        with closing(sqlite3.connect(f"{folder}/records.db")) as database, database:
            # A new store counts its fences from the clock of the database.
            database.execute("UPDATE idempotency_meta SET value = 1000 WHERE name = 'fence'")
        app = shop(store, clock)
        for name, line in COMMANDS.items():
            pictures[name] = picture(name, line, typed(app, clock, line))
        pictures[ALONE] = picture(ALONE, "rotate", running())
        store.close()
    return pictures


def write() -> None:
    """Write the pictures whose text has changed."""
    DRAWN.mkdir(exist_ok=True)
    for name, svg in draw().items():
        (DRAWN / f"{name}.svg").write_text(svg, encoding="utf-8")


@contextmanager
def terminal_settings() -> Iterator[None]:
    """Hide this host's terminal, user and settings."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    here = {**kept, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "50", "LANG": "C.UTF-8"}
    before = logging.root.manager.disable
    logging.disable()
    try:
        with patch.dict(os.environ, here, clear=True), patch("getpass.getuser", lambda: "operator"):
            yield
    finally:
        logging.disable(before)


def shop(store: SqlStore, clock: FrozenClock) -> Flask:
    """Return an application whose clients paid and were refunded, and one of whose views failed."""
    app = Flask("shop")
    Idempotency(
        app,
        principal=lambda: request.headers["X-User"],
        tenant=lambda: request.headers["X-Tenant"],
        store=store,
        secret=b64encode(bytes(range(32))).decode(),
        encryption="on",
        key_ring={"2025-01": b64encode(bytes(range(32))).decode()},
        quota_records=100_000,
        allow_plaintext_transport=True,
        activity=False,  # its times differ from run to run
    )

    @app.post("/payments")
    def pay() -> tuple[str, int]:
        clock.advance(0.184)
        return ("no response of the bank", 504) if request.get_data() == b"lost" else ("paid", 201)

    @app.post("/refunds")
    def refund() -> tuple[str, int]:
        clock.advance(0.071)
        return "refunded", 201

    client = app.test_client()

    def post(path: str, key: str, tenant: str, user: str, body: str = "") -> None:
        client.post(path, headers={"Idempotency-Key": key, "X-Tenant": tenant, "X-User": user}, data=body)

    for number in range(24):
        post("/payments", f"order-{1000 + number}", "acme", "alice" if number % 3 else "bob")
        post("/payments", f"order-{2000 + number}", "globex", "carol")
        clock.advance(31)
    post("/refunds", "refund-17", "acme", "bob")
    post("/payments", "order-1042", "acme", "alice", "lost")
    clock.advance(48 * 60)
    post("/payments", "order-1051", "acme", "bob", "lost")
    claim(app, store, "order-1057")
    clock.advance(12)
    with app.app_context():
        for task in ("reap", "expire", "reconcile"):
            typed(app, clock, task)
    clock.advance(47)
    store.activity.add(owner_mark("shop"), COUNTED, token=bytes(16))
    return app


def claim(app: Flask, store: SqlStore, key: str) -> None:
    """Leave a claim whose worker still runs."""
    chosen: Settings = app.extensions["idempotency"].settings
    named = identities(chosen)[0].storage_key(Scope("shop", "acme", "alice", None), key)
    info = RequestInfo("acme", "alice", "POST", "pay")
    asked = ClaimRequest(named, bytes(FINGERPRINT_BYTES), on_expiry=OnExpiry.QUARANTINE, info=info)
    store.claim(asked, token=new_token(named.mark), lease=90)


def typed(app: Flask, clock: FrozenClock, line: str) -> list[str]:
    """Run a command line as a person at a terminal would, and return what is on the screen."""
    screen = Terminal()
    clock_skew = inspect.unwrap(doctor.clock_skew)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(screen))
        stack.enter_context(redirect_stderr(screen))
        stack.enter_context(patch.object(clock_skew, "__kwdefaults__", {"host_clock": clock}))
        stack.enter_context(patch.object(progress, "Progress", partial(progress.Progress, monotonic=Ticking())))
        try:
            script = ScriptInfo(create_app=lambda: app)
            cli.main(shlex.split(line), prog_name="flask idempotency", obj=script, standalone_mode=False)
        except SystemExit:
            pass
    return screen.lines


class Ticking:
    """A clock of a host that has moved once, however often a program looks."""

    def __init__(self) -> None:
        self.times = chain((0.0,), repeat(0.2))

    def __call__(self) -> float:
        return next(self.times)


def running() -> list[str]:
    """Return the line of a command that has done some of its work."""
    clock, screen = FrozenClock(0.0), Terminal()
    with redirect_stderr(screen):
        shown = progress.Progress("responses", total=48_210, seen=True, monotonic=clock)
        clock.advance(21)
        shown(31_500)
    return screen.lines


def picture(name: str, line: str, lines: list[str]) -> str:
    """Return a command line and what the terminal shows after it, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text(f"$ flask idempotency {line}", "bold"))
    for text in "\n".join(lines).rstrip("\n").split("\n"):
        console.print(Text.from_ansi(text))
    svg = console.export_svg(title="", code_format=LINKS.sub("", CONSOLE_SVG_FORMAT), unique_id=f"cli-{name}")
    return re.sub(r"[ \t]+$", "", svg.replace("Fira Code, monospace", "ui-monospace, monospace"), flags=re.MULTILINE)


if __name__ == "__main__":
    write()

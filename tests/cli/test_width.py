"""Every command that only reads fits a terminal of 80 columns, and a pipe gets whole lines."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Blueprint, Flask, request

from flask_idempotency import idempotent
from flask_idempotency.cli import output
from flask_idempotency.cli.output import Screen
from flask_idempotency.operations.records import handle_of
from tests.apps import World, key_of, lapsed, new_world, run, shop, vanished
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

ROOT = Path(__file__).parents[2]
LONG = "payments." + "create_a_payment_with_a_rather_long_name" * 2
NAME = "[red]" + "n" * 240
"""Markup, and almost as long as a name may be."""

Shown = Callable[..., str]


@pytest.fixture(params=(True, False), ids=("colour", "plain"))
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return what a terminal of 80 columns shows of a command, without its colours."""
    screen = Screen(80, colour=request.param)

    def show(world: World, *arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(output, "screen_of", lambda **_: screen)
        result = run(world, *arguments)
        assert code == result.exit_code, result.output
        assert screen.colour or "\x1b" not in result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    return show


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


@pytest.fixture
def world() -> World:
    """Long names in every column, and a record in each state."""
    world = new_world(
        Flask("tests.web.app"), init=False, quota_records=1_000_000_000, quota_new_keys=(1_000_000, 86400)
    )
    world.clock.now = 1_000_000_000.0
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    blueprint = Blueprint("a_blueprint_with_a_long_name", __name__)
    blueprint.route("/long", methods=["DELETE", "PATCH", "POST", "PUT"], endpoint=LONG.replace(".", "_"))(
        idempotent(effects="marked", required=True)(lambda: ("paid", 201))
    )
    world.app.register_blueprint(blueprint)
    world.idempotency.init_app(world.app)
    world.view(endpoint="pay")(lambda: ("paid", 201))
    lapsed(world, "held", after=40.0)
    vanished(world, "expired", endpoint=LONG)
    world.clock.advance(31)
    vanished(world, "running", endpoint=LONG)
    for tenant in ("acme", NAME):
        assert 201 == world.post("/long", key=tenant[:9], headers={"X-Tenant": tenant, "X-User": NAME}).status_code
    return world


COMMANDS = (
    ("list",),
    ("list", "--state", "completed"),
    ("list", "--limit", "1"),
    ("show", "--key", "held", "--tenant", "acme", "--principal", "alice"),
    ("show", "--key", NAME[:9], "--tenant", NAME, "--principal", NAME),
    ("policy",),
    ("policy", "pay"),
    ("policy", "a_blueprint_with_a_long_name." + LONG.replace(".", "_")),
    ("stats",),
    ("quota", "show", "--tenant", "acme"),
    ("quota", "show", "--tenant", NAME),
    ("quota", "show", "--all"),
)


def test_a_command_fits_80_columns(world: World, shown: Shown) -> None:
    for command in COMMANDS:
        text = shown(world, *command)
        assert fits(text), (command, text)
        assert len(text.splitlines()) >= 2, command


def test_an_error_fits_80_columns(world: World, shown: Shown) -> None:
    for command in (("show", "nonsense"), ("show", "--key", "k", "--tenant", "x", "--anonymous")):
        assert fits(shown(world, *command, code=1)), command


def test_the_status_of_the_keys_fits_80_columns(shown: Shown) -> None:
    ring = {"2026-spring-first-of-the-quarter": b64encode(b"o" * 32).decode(), "new": b64encode(b"n" * 32).decode()}
    world = new_world(Flask("tests.web.app"), encryption="on", key_ring=ring)
    world.view()(lambda: "paid")
    world.post()

    assert fits(shown(world, "keys", "status"))


def test_the_status_of_a_redis_fits_80_columns(redis_servers: RedisServers, shown: Shown) -> None:
    store: Any = redis_servers.get(REDIS_KINDS[0]).url
    world = new_world(Flask("tests.web.app"), store=store, after_loss="refuse")
    assert fits(before := shown(world, "redis", "status", code=1))
    assert "flask idempotency redis init" in " ".join(before.split())
    run(world, "redis", "init")

    assert fits(shown(world, "redis", "status"))


def test_the_status_of_keys_limits_and_a_redis_is_coloured(
    world: World, redis_servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of records is: the head of a table, what is fine, and what is not."""
    monkeypatch.setattr(output, "screen_of", lambda **_: Screen(80, colour=True))
    sealed = new_world(
        Flask("tests.web.app"), encryption="on", key_ring={"new": (key := b64encode(b"n" * 32).decode())}
    )
    sealed.view()(lambda: "paid")
    sealed.post()
    turned = new_world(Flask("tests.web.app"), encryption="on", key_ring={"newer": key}, store=sealed.store)
    store: Any = redis_servers.get(REDIS_KINDS[0]).url
    on_redis = new_world(Flask("tests.web.app"), store=store, after_loss="refuse")

    assert "\x1b[1mhas\x1b[0m" in run(world, "quota", "show", "--tenant", "acme").output
    assert "\x1b[32mnewest\x1b[0m" in run(sealed, "keys", "status").output
    assert "\x1b[1;31mNOT IN THE RING" in run(turned, "keys", "status").output
    assert "new keys:  \x1b[1;31mget 503 `memory-lost`\x1b[0m" in run(on_redis, "redis", "status").output
    run(on_redis, "redis", "init")
    assert "new keys:  \x1b[32mrun\x1b[0m" in run(on_redis, "redis", "status").output


def test_what_is_shortened_is_marked(world: World, shown: Shown) -> None:
    """And the id, the state and the times are whole."""
    rows = [re.split(r"  +", line) for line in shown(world, "list").splitlines()[1:]]

    assert ["quarantined", "lease expired", "in flight"] == [row[1] for row in rows]
    assert handle_of(key_of(world, "held"))[:8] == rows[0][0]
    assert rows[1][2].startswith("POST payments.")
    assert rows[1][2].endswith("…")
    assert ["ended 41 s ago", "ended 1 s ago", "30 s left"] == [row[5] for row in rows]


def test_the_whole_handle_can_be_copied(world: World, shown: Shown) -> None:
    assert f"\n  {handle_of(key_of(world, 'held'))}\n" in "\n" + shown(world, *COMMANDS[3])


@pytest.mark.parametrize("command", (("list",), ("policy",)), ids=" ".join)
def test_a_wide_table_shortens_nothing(world: World, shown: Shown, command: tuple[str, ...]) -> None:
    assert (True, False) == ("…" in shown(world, *command), "…" in (wide := shown(world, *command, "--wide")))
    assert LONG in wide or LONG.replace(".", "_") in wide


def test_a_wider_terminal_gets_more_columns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def head(width: int | None) -> str:
        monkeypatch.setattr(output, "screen_of", lambda **_: Screen(width, colour=False))
        return " ".join(run(shop(), "policy").output.splitlines()[0].split())

    assert "endpoint methods required effects on abandoned" == head(None)
    assert "endpoint methods required effects on abandoned keep lease profile resolver" == head(120)
    assert "endpoint methods required effects on abandoned" == head(52)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:30])
def test_a_pipe_gets_whole_plain_lines(world: World, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    told: Result = run(world, *command)

    assert (True, False, False) == (0 == told.exit_code, "\x1b" in told.output, "…" in told.output)
    if command == ("list", "--state", "completed"):
        assert NAME in told.output


def test_a_real_terminal(tmp_path: Path) -> None:
    """Its own width counts, and its table is in colour."""
    (tmp_path / "shop.py").write_text(
        "from flask import Flask\n"
        "from flask_idempotency import Idempotency\n"
        "app = Flask('shop')\n"
        "app.config.update(TESTING=True)\n"
        "Idempotency(app, secret='0123456789abcdef')\n"
        f"app.post('/', endpoint={LONG!r})(lambda: 'paid')\n"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "FLASK_VERSION")
    }
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flask", "--app", "shop", "idempotency", "policy"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)

    assert done.returncode == 0, done.stderr
    assert "\x1b[1mendpoint\x1b[0m" in text
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert (True, True) == (max(map(len, lines)) <= 80, lines[1].startswith("payments.create_a_payment"))

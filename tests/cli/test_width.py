"""A terminal and a pipe get the same whole lines, and a terminal in colour."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from flask import Blueprint, Flask, request

from flask_idempotency import idempotent
from flask_idempotency.cli import output
from flask_idempotency.operations.records import handle_of
from tests.apps import World, key_of, lapsed, new_world, run, shop, vanished
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

ROOT = Path(__file__).parents[2]
LONG = "payments." + "create_a_payment_with_a_rather_long_name" * 2
NAME = "[red]" + "n" * 240
"""Markup, and almost as long as a name may be."""


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


def test_a_terminal_gets_what_a_pipe_gets_in_colour(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in COMMANDS:
        plain = run(world, *command)
        with monkeypatch.context() as patch:
            patch.setattr(output, "in_colour", lambda **_: True)
            coloured = run(world, *command)
        assert (0, 0) == (plain.exit_code, coloured.exit_code), plain.output
        assert plain.output == re.sub(r"\x1b\[[0-9;]*m", "", coloured.output), command
        assert len(plain.output.splitlines()) >= 2, command


def test_the_status_of_keys_limits_and_a_redis_is_coloured(
    world: World, redis_servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of records is: the head of a table, what is fine, and what is not."""
    monkeypatch.setattr(output, "in_colour", lambda **_: True)
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


def test_a_list_has_the_state_and_the_times_of_each_record(world: World) -> None:
    rows = [re.split(r"  +", line) for line in run(world, "list").output.splitlines()[1:]]

    assert ["quarantined", "lease expired", "in flight"] == [row[1] for row in rows]
    assert handle_of(key_of(world, "held"))[:8] == rows[0][0]
    assert f"POST {LONG}" == rows[1][2]
    assert ["ended 41 s ago", "ended 1 s ago", "30 s left"] == [row[5] for row in rows]


def test_a_wide_table_has_more_columns() -> None:
    def head(*options: str) -> str:
        return " ".join(run(shop(), "policy", *options).output.splitlines()[0].split())

    assert "endpoint methods required effects on abandoned" == head()
    assert "endpoint methods required effects on abandoned keep lease profile resolver" == head("--wide")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:30])
def test_a_pipe_gets_whole_plain_lines(world: World, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    told: Result = run(world, *command)

    assert (True, False, False) == (0 == told.exit_code, "\x1b" in told.output, "…" in told.output)
    if command == ("list", "--state", "completed"):
        assert NAME in told.output


@pytest.mark.slow
def test_a_real_terminal(tmp_path: Path) -> None:
    """Its table is in colour, and its cells are whole."""
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
    assert lines[1].startswith(f"{LONG}  POST")

"""Names, reasons and messages that would control a terminal, forge log lines, or reverse the text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from flask_idempotency.assembly import identities
from flask_idempotency.cli.output import say
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord
from flask_idempotency.engine.escape import printable, printable_lines, printable_values
from flask_idempotency.engine.events import Released, Resolved
from flask_idempotency.engine.keys import LONGEST_NAME, Scope
from flask_idempotency.engine.model import RequestInfo
from flask_idempotency.logs import LOGGER, log_of
from flask_idempotency.metrics import Meter
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.stores.redis import layout
from flask_idempotency.testing.contract.support import a_request, a_token, granted
from flask_idempotency.web.problems import Problem, render
from tests.apps import WHY, World, new_world, run, store_named
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect

ORDERS = "\x1b[2J\x1b]0;owned\x07\r\n\x7f\x85\x9b31m\u202eevil\u2066\u2028\u2029\x00"
"""Clears the screen, sets the title, begins a line, and reverses the text."""
SURROGATE = "\ud800"
ALLOWED = frozenset("\n")


def is_clean(text: str) -> bool:
    return all(char.isprintable() or char in ALLOWED for char in text)


@pytest.fixture(params=("memory", "sqlite", REDIS_KINDS[0]))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """An application whose store holds records with these tenants and principals, in each state."""
    store = store_named(request, tmp_path)
    settings: Any = {} if store is None else {"store": store}
    world = new_world(quota_records=100, tenant=lambda: ORDERS, **settings)

    @world.view()
    def pay() -> str:
        return "paid"

    world.app.add_url_rule("/orders", endpoint=ORDERS, view_func=pay, methods=["POST"])
    assert 0 == run(world, "db", "upgrade").exit_code
    planted(world)
    return world


def planted(world: World) -> None:
    state = world.app.extensions["idempotency"]
    who, store = identities(state.settings)[0], state.built.engine._deps.store
    about = RequestInfo(tenant=ORDERS, principal=ORDERS, method="PO\x1bST"[:6], operation=ORDERS)
    for number, hold in enumerate((False, True)):
        key = who.storage_key(Scope(state.settings.namespace, tenant=ORDERS, principal=ORDERS), str(number))
        token = who.mark(state.settings.namespace) + a_token()
        asked = a_request(key, about=about)
        granted(store.claim(replace(asked), token=token[:16], lease=30.0))
        if hold:
            store.quarantine(key, token[:16], ORDERS)


COMMANDS = (
    ("list", "--state", "processing"),
    ("list", "--state", "quarantined"),
    ("stats",),
    ("doctor",),
    ("policy",),
    ("policy", ORDERS),
    ("db", "check"),
    ("reap",),
    ("quota", "show", "--tenant", ORDERS),
    ("quota", "show", "--all"),
    ("purge", "--tenant", ORDERS, "--yes", *WHY),
)


def test_no_command_controls_a_terminal(world: World) -> None:
    for command, as_json in product(COMMANDS, (False, True)):
        result = run(world, *command, *(["--json"] if as_json else []))

        assert result.exception is None or isinstance(result.exception, SystemExit), (command, as_json)
        assert is_clean(result.output), (command, as_json)
        assert not as_json or result.stdout.isascii(), command


@pytest.mark.parametrize("of", ("processing", "quarantined"))
def test_no_record_controls_a_terminal(world: World, of: str) -> None:
    """Shown, confirmed, and resolved. JSON output has the names unchanged."""
    (line,) = json.loads(run(world, "list", "--state", of, "--json").stdout)["records"]
    assert (ORDERS, ORDERS, ORDERS) == (line["tenant"], line["principal"], line["endpoint"])
    for command in (
        ("show", line["handle"]),
        ("release", line["handle"], *WHY),
        ("release", line["handle"], "--force", *WHY),
        ("resolve", line["handle"], "--reopen", "--yes", *WHY),
        ("release", line["handle"], "--force", "--yes", *WHY),
    ):
        result = run(world, *command)
        assert is_clean(result.output), command
        assert result.output
    assert 1 == len(world.told(Resolved))


def test_the_name_of_a_redis_controls_no_terminal(redis_servers: RedisServers) -> None:
    """Its id, its layout and its task reports, in each command that prints them and in each error."""
    server = redis_servers.get(REDIS_KINDS[0])
    store: Any = server.url
    world = new_world(Flask("tests.web.app"), store=store, after_loss="refuse", store_id="ours")
    run(world, "redis", "init")
    with connect(server.url) as client:
        pipeline = client.pipeline(transaction=False)
        for partition in range(layout.PARTITIONS):
            pipeline.hset(layout.facts_in(partition), mapping={"store_id": ORDERS, "layout": ORDERS})
        pipeline.execute()
        client.hset(layout.TASKS, f"re{ORDERS}ap", json.dumps({"counts": ORDERS}))
    for command in (
        ("redis", "status"),
        ("redis", "init"),
        ("redis", "ack", "--yes", "--force", *WHY),
        ("doctor",),
        ("stats",),
    ):
        result = run(world, *command)
        assert is_clean(result.output), command
        assert "[2J" not in result.output or "\\x1b[2J" in result.output


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What a plain formatter writes."""
    written: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(logging.Formatter("%(levelname)s %(message)s").format(record))

    handler, logger = Handler(), logging.getLogger("flask_idempotency")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_no_event_forges_a_line_of_a_log(lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Neither the line nor a field of it, for a formatter that writes fields by name."""
    with caplog.at_level(logging.DEBUG, logger=LOGGER):
        log_of("shop\x1b")(Released("abcd1234", ORDERS + SURROGATE, reason=ORDERS))

    (line,) = lines
    (record,) = caplog.records
    assert line.isprintable()
    assert all(getattr(record, name).isprintable() for name in ("operation", "reason", "app"))


def test_no_message_forges_a_line_of_a_log(lines: list[str]) -> None:
    """Whether it quotes a name, an exception or a traceback."""
    log = logging.getLogger("flask_idempotency")
    log.error("%s was refused (%s): %d, %s", ORDERS, ValueError(ORDERS), 3, {"kept": 1})
    try:
        raise ValueError(ORDERS + SURROGATE)
    except ValueError:
        log.exception("it failed")
    log.warning("a fault, %s of it", "all")
    log.warning(ORDERS.replace("\n", ""))

    said, failed, plain, bare = lines
    assert said.isprintable()
    assert ": 3, {'kept': 1}" in said
    assert is_clean(failed)
    assert failed.endswith(printable_lines(ORDERS + SURROGATE).replace("\n", "\n  "))
    assert failed.startswith("ERROR it failed\n  Traceback")
    assert all(line.startswith("  ") for line in failed.split("\n")[1:])
    assert ("WARNING a fault, all of it", True) == (plain, bare.isprintable())


def test_no_error_text_controls_a_terminal() -> None:
    """A traceback ends with the text of the error. Several faults stay several lines."""
    assert is_clean(str(ConfigurationError(f"the store {ORDERS} is another one", "and more")))
    assert 3 <= str(ConfigurationError("one", "two")).count("\n") + 1
    assert is_clean(str(CorruptRecord(ORDERS)))


def test_no_problem_has_control_characters(world: World) -> None:
    with world.app.test_request_context():
        answer = render(
            Problem("invalid-key", ORDERS + SURROGATE),
            profile=PROFILES["ietf"],
            docs_url="https://example.com/",
            response_class=world.app.response_class,
        )

    assert is_clean(json.loads(answer.data)["detail"])


def test_no_label_breaks_the_metrics_page() -> None:
    """A lone surrogate cannot be encoded, and the whole page would fail."""
    registry = CollectorRegistry()
    meter = Meter(Flask("tests.web.app"), name="shop\ud800\x1b", registry=registry)
    meter.event(Released("abcd1234", ORDERS + SURROGATE, reason="status-503"))

    assert is_clean(generate_latest(registry).decode())


def test_no_output_is_raw(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if a command does not escape what it quotes."""
    say(f"a line\nand {ORDERS}")

    assert f"a line\nand {printable_lines(ORDERS)}\n" == capsys.readouterr().out


def test_no_command_writes_past_it() -> None:
    folder = files("flask_idempotency.cli")
    raw = [
        path.name for path in folder.iterdir() if path.name.endswith(".py") and "click.echo" in path.read_text("utf-8")
    ]

    assert ["output.py"] == raw


def test_no_name_forges_a_row_of_a_table(world: World) -> None:
    for command in (("list", "--state", "processing"), ("quota", "show", "--tenant", ORDERS)):
        rows = run(world, *command).stdout.splitlines()
        assert (2 if command[0] == "list" else 6) == len(rows)


def test_escapes_differ_from_text() -> None:
    assert ("a b", "ä😀", "\\x1b[2J", "\\n", "\\u202e", "\\ud800") == tuple(
        map(printable, ("a b", "ä😀", "\x1b[2J", "\n", "\u202e", "\ud800"))
    )
    assert "a\nb\\r\nc" == printable_lines("a\nb\r\nc")
    assert {"a\\n": ["\\x00", 1], "b": ("\\x7f", None)} == printable_values({"a\n": ["\0", 1], "b": ("\x7f", None)})


@pytest.mark.parametrize("of", ("tenant", "principal"))
def test_a_name_that_is_too_long_is_refused_and_never_cut(of: str) -> None:
    """Names are stored beside the response, and no quota counts them. Two of them must not become one."""
    world = new_world(Flask("tests.web.app"), init=False)
    loader = getattr(world.idempotency, f"{of}_loader")
    loader(lambda: request.headers["X-Name"])
    world.idempotency.init_app(world.app)
    world.app.config["PROPAGATE_EXCEPTIONS"] = True

    @world.view()
    def pay() -> str:
        world.runs.append(1)
        return "paid"

    assert 200 == world.post(headers={"X-Name": "x" * LONGEST_NAME}).status_code
    with pytest.raises(ConfigurationError, match=rf"{of}_loader returned a name of 256 characters, and at most 255"):
        world.post(headers={"X-Name": "x" * (LONGEST_NAME + 1)})
    assert 1 == len(world.runs)


def test_an_endpoint_that_is_too_long_is_refused() -> None:
    world = new_world(Flask("tests.web.app"))
    world.app.config["PROPAGATE_EXCEPTIONS"] = True
    world.app.add_url_rule("/long", endpoint="x" * (LONGEST_NAME + 1), view_func=lambda: "paid", methods=["POST"])

    with pytest.raises(ConfigurationError, match="endpoint of this view has a name of 256 characters"):
        world.post("/long")

"""`flask idempotency keys …`: keys that are made, and what stands under each."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from click.testing import CliRunner, Result
from flask import Flask
from flask.cli import FlaskGroup

from flask_idempotency import Idempotency
from flask_idempotency.cli import cli
from flask_idempotency.codec.key_sources import load_ring
from flask_idempotency.operations.admin import KeysReport, KeyStatus, keys_status
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.apps import World, new_world

OLD, NEW = (b64encode(letter * 32).decode() for letter in (b"o", b"n"))


def shop(ring: Mapping[str, str] | None, *, store: Any = None, encryption: str = "on", **settings: Any) -> World:
    world = new_world(Flask("tests.web.app"), store=store, encryption=encryption, key_ring=ring, **settings)
    world.view()(lambda: "paid")
    return world


def run(world: World, *arguments: str) -> Result:
    return world.app.test_cli_runner().invoke(args=["idempotency", *arguments])


def disabled() -> World:
    """Switched off, and with a store that nobody else needs."""
    world = new_world(Flask("tests.web.app"), init=False)
    Idempotency(world.app, enabled=False, secret="s-9f2c47d1e8b35a60")
    return world


def test_generate_prints_one_line_of_a_ring_and_no_two_alike() -> None:
    """Its id is today's date and a random suffix. It needs no application: the first key is made before there is a ring."""
    lines = [CliRunner().invoke(cli, ["keys", "generate"]).output for _ in range(2)]

    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d-[0-9a-f]{6}:[A-Za-z0-9+/]{43}=\n", line) for line in lines)
    # Two rings of one day must not have one id and other bytes.
    assert lines[0].partition(":")[0] != lines[1].partition(":")[0]
    assert lines[0] != lines[1]
    assert 32 == len(b64decode(lines[0].partition(":")[2]))
    assert lines[0].partition(":")[0] == load_ring(lines[0]).newest


def test_generate_is_there_where_the_application_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of the very ring that this key is for: as a plug-in of `flask`, it does not wait for the application."""
    monkeypatch.delenv("FLASK_VERSION", raising=False)  # of our tests' runner; Flask would take it for an option
    plug_in = EntryPoint("idempotency", "flask_idempotency.cli:cli", "flask.commands")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [plug_in])

    def create_app() -> Flask:
        return shop(None, encryption="required").app

    told = CliRunner().invoke(FlaskGroup(create_app=create_app), ["idempotency", "keys", "generate", "--kid", "first"])

    assert (0, True) == (told.exit_code, told.output.startswith("first:")), told.output


def test_generate_takes_an_id_and_refuses_what_is_none() -> None:
    named = CliRunner().invoke(cli, ["keys", "generate", "--kid", "spring"])
    wrong = CliRunner().invoke(cli, ["keys", "generate", "--kid", "a:b"])

    assert (0, True) == (named.exit_code, named.output.startswith("spring:"))
    assert (2, "", True) == (wrong.exit_code, wrong.stdout, wrong.stderr.startswith("Error: The id of a key is"))


def test_status_says_what_stands_under_each_key_and_which_may_go() -> None:
    """After a rotation of the ring the old key stays until nothing is sealed under it."""
    before = shop({"old": OLD})
    before.post(key="a")
    world = shop({"new": NEW, "old": OLD, "spare": b64encode(b"s" * 32).decode()}, store=before.store)
    world.post(key="b")

    told = run(world, "keys", "status")

    assert 0 == told.exit_code
    assert [
        "key    records  data keys",
        "new    1        1          newest",
        "old    1        1          in use",
        "spare  0        0          may go: nothing is sealed under it",
        "Records that are not encrypted: 0.",
    ] == told.output.splitlines()


def test_a_key_that_the_ring_has_not_is_a_fault() -> None:
    """Nobody can open what it has sealed: exit code 1, for whoever watches."""
    before = shop({"old": OLD})
    before.post()

    told = run(shop({"new": NEW}, store=before.store), "keys", "status", "--json")

    assert (1, {"in_order": False, "plain_records": 0}) == (
        told.exit_code,
        {name: value for name, value in json.loads(told.stdout).items() if name != "keys"},
    )
    assert [("new", True, True, False), ("old", False, False, False)] == [
        (key["kid"], key["known"], key["newest"], key["may_go"]) for key in json.loads(told.stdout)["keys"]
    ]
    assert "NOT IN THE RING" in run(shop({"new": NEW}, store=before.store), "keys", "status").output


def test_a_ring_with_the_same_id_and_another_key_is_a_fault() -> None:
    """Two keys of one day were given one id. Every request gets 503, and no check that compares ids sees why."""
    before = shop({"2026-11-28": OLD})
    assert 200 == before.post(key="a").status_code
    world = shop({"2026-11-28": NEW}, store=before.store)

    told, machine = run(world, "keys", "status"), run(world, "keys", "status", "--json")

    assert (1, 1) == (told.exit_code, machine.exit_code)
    assert "DOES NOT OPEN its data keys" in told.output
    assert [(1, True)] == [(key["unopened"], key["known"]) for key in json.loads(machine.stdout)["keys"]]
    doctor = run(world, "doctor", "--json")
    (found,) = [each for each in json.loads(doctor.stdout)["findings"] if each["check"] == "keys"]
    assert ("fault", True) == (found["verdict"], "1 of 1 under 2026-11-28" in found["text"])
    assert 0 == run(shop({"2026-11-28": OLD}, store=before.store), "keys", "status").exit_code


def test_a_ring_that_opens_nothing_harms_no_record(caplog: pytest.LogCaptureFixture) -> None:
    before = shop({"2026-11-28": OLD})
    first = before.post(key="a")
    for ring in ({"2026-11-28": NEW}, {"other": NEW}, None):
        world = shop(ring, store=before.store, encryption="on" if ring else "off")
        caplog.clear()

        retry = world.post(key="a")

        assert (503, "store-unavailable") == (retry.status_code, retry.get_json()["code"])
        named = "IDEMPOTENCY_KEY_RING" if ring is None else "the key '2026-11-28'"
        assert named in caplog.text
        assert not [key for key in (OLD, NEW) if key in caplog.text]
    again = before.post(key="a")
    assert (first.status_code, first.data, "true") == (
        again.status_code,
        again.data,
        again.headers["Idempotency-Replayed"],
    )


def test_plain_records_are_counted_too() -> None:
    """`required` may be set when there are none."""
    before = shop(None, encryption="off")
    before.post()

    assert "Records that are not encrypted: 1." in run(shop({"new": NEW}, store=before.store), "keys", "status").output


@pytest.mark.parametrize(
    ("world", "remedy"),
    (
        pytest.param(lambda: shop(None, encryption="off"), "set IDEMPOTENCY_KEY_RING", id="no ring"),
        pytest.param(
            lambda: shop({"a": OLD}, store=FaultyStore(MemoryStore()), encryption="off"),
            "keeps no data keys",
            id="store",
        ),
        pytest.param(disabled, "IDEMPOTENCY_ENABLED is False", id="disabled"),
    ),
)
def test_where_nothing_is_encrypted_it_says_so(world: Any, remedy: str) -> None:
    told = run(world(), "keys", "status")

    assert (1, "", True) == (told.exit_code, told.stdout, remedy in told.stderr)


def test_no_command_says_a_key() -> None:
    world = shop({"new": NEW, "old": OLD})
    world.post()

    said = run(world, "keys", "status").output + run(world, "keys", "status", "--json").output

    assert not any(key in said for key in (NEW, OLD))


@pytest.mark.parametrize(
    ("records", "data_keys", "goes"),
    ((0, 0, True), (1, 0, False), (0, 1, False)),
    ids=("nothing", "a record", "a data key"),
)
def test_an_old_key_may_go_when_nothing_at_all_is_left_under_it(records: int, data_keys: int, goes: bool) -> None:
    """A data key without a record may seal one any moment."""
    assert goes is KeyStatus("old", records, data_keys, newest=False, known=True).may_go
    assert not KeyStatus("new", 0, 0, newest=True, known=True).may_go
    assert not KeyStatus("lost", 0, 0, newest=False, known=False).may_go


def test_the_verb_needs_no_flask() -> None:
    store = MemoryStore()

    assert KeysReport((KeyStatus("a", 0, 0, newest=True, known=True),), 0) == keys_status(
        load_ring({"a": OLD}), store.responses, store.data_keys
    )

"""`flask idempotency …`: what is typed, what is printed, and with which code it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import Result
from flask import Flask, current_app

import flask_idempotency.cli
from docs.commands import subcommands
from flask_idempotency.cli import cli, migrating
from flask_idempotency.engine.errors import StoreUnavailable

FAULT, ADVICE, STEP = "A thing is missing. Run something.", "Another way is better.", "0001: a thing"


@dataclass
class FakeSchema:
    """A schema that is told how it stands."""

    pending: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    down: bool = False

    def upgrade(self) -> list[str]:
        assert "shop" == current_app.name
        done, self.pending = self.pending, []
        return done

    def faults(self) -> list[str]:
        if self.down:
            raise StoreUnavailable("The database 'shop' on 10.0.0.1: no answer")
        return [*self.broken, *([FAULT] if self.pending else [])]

    def advice(self) -> list[str]:
        return self.better


def run(state: Any, *arguments: str) -> Result:
    app = Flask("shop")
    app.cli.add_command(cli)
    if state is not None:
        app.extensions["idempotency"] = state
    return app.test_cli_runner().invoke(args=["idempotency", *arguments])


def told(schema: FakeSchema | None, *arguments: str) -> tuple[int, str]:
    result = run(SimpleNamespace(schema=schema), *arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("schema", "code", "said"),
    (
        pytest.param(FakeSchema(), 0, "The schema is in order.\n", id="in order"),
        pytest.param(FakeSchema(pending=[STEP]), 1, f"{FAULT}\n", id="a fault"),
        pytest.param(FakeSchema(broken=["1.", "2."]), 1, "1.\n2.\n", id="two faults"),
        pytest.param(FakeSchema(better=[ADVICE]), 0, f"The schema is in order.\nAdvice: {ADVICE}\n", id="advice"),
    ),
)
def test_check_says_how_the_schema_stands(schema: FakeSchema, code: int, said: str) -> None:
    """Advice alone fails no deployment."""
    assert (code, said) == told(schema, "db", "check")


def test_check_changes_nothing() -> None:
    """It may run in any probe."""
    schema = FakeSchema(pending=[STEP])

    told(schema, "db", "check")

    assert [STEP] == schema.pending


def test_upgrade_says_what_it_did() -> None:
    """And the second time that there was nothing left to do."""
    schema = FakeSchema(pending=[STEP])

    first, second = told(schema, "db", "upgrade"), told(schema, "db", "upgrade")

    assert ((0, f"{STEP}\n"), (0, "The schema is up to date.\n")) == (first, second)


def test_upgrade_fails_over_what_it_could_not_mend() -> None:
    """A deployment that went on from here would refuse every keyed request."""
    assert (1, f"{STEP}\n{FAULT}\n") == told(FakeSchema(pending=[STEP], broken=[FAULT]), "db", "upgrade")


@pytest.mark.parametrize("verb", ("upgrade", "check"))
def test_a_store_without_a_schema_is_in_order(verb: str) -> None:
    """One deployment script serves applications on Redis as well."""
    code, said = told(None, "db", verb)

    assert (0, True) == (code, said.startswith("The store of this application has no schema"))


@pytest.mark.parametrize("verb", ("upgrade", "check"))
def test_a_database_that_is_down_is_neither_in_order_nor_not(verb: str) -> None:
    """Exit code 2: whoever watches can tell the two apart. Nothing is printed where answers are expected."""
    result = run(SimpleNamespace(schema=FakeSchema(down=True)), "db", verb)

    assert (2, "", "Error: The database 'shop' on 10.0.0.1: no answer\n") == (
        result.exit_code,
        result.stdout,
        result.stderr,
    )


def test_an_application_that_was_not_set_up_is_told_so() -> None:
    """In a sentence, not in a traceback."""
    result = run(None, "db", "check")

    assert (2, "Error: Idempotency is not set up on this application: call init_app first.\n") == (
        result.exit_code,
        result.stderr,
    )


@pytest.mark.parametrize(
    ("schema", "verb", "code", "object"),
    (
        pytest.param(
            FakeSchema(pending=[STEP], better=[ADVICE]),
            "upgrade",
            0,
            {"schema": True, "in_order": True, "done": [STEP], "faults": [], "advice": [ADVICE]},
            id="upgrade",
        ),
        pytest.param(
            FakeSchema(broken=[FAULT]),
            "check",
            1,
            {"schema": True, "in_order": False, "done": [], "faults": [FAULT], "advice": []},
            id="check",
        ),
        pytest.param(
            None,
            "check",
            0,
            {"schema": False, "in_order": True, "done": [], "faults": [], "advice": []},
            id="no schema",
        ),
        pytest.param(
            FakeSchema(down=True), "check", 2, {"error": "The database 'shop' on 10.0.0.1: no answer"}, id="down"
        ),
    ),
)
def test_machines_get_one_object(schema: FakeSchema | None, verb: str, code: int, object: dict[str, Any]) -> None:
    """With the same exit codes."""
    result = run(SimpleNamespace(schema=schema), "db", verb, "--json")

    assert (code, object, "") == (result.exit_code, json.loads(result.stdout), result.stderr)


@pytest.mark.slow
def test_importing_the_package_loads_no_command() -> None:
    """A web process never needs them."""
    names = "[name for name in sys.modules if name.startswith('flask_idempotency.cli')]"
    loaded = f"import sys, flask_idempotency.extension; print({names})"
    done = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True)

    assert done.stdout == "['flask_idempotency.cli']\n"


def test_every_command_of_a_module_is_reachable() -> None:
    defined = {
        value
        for module in iter_modules(flask_idempotency.cli.__path__)
        for value in vars(import_module(f"flask_idempotency.cli.{module.name}")).values()
        if isinstance(value, click.Command) and value is not cli
    }
    reachable = set(subcommands(cli).values())
    for group in [command for command in reachable if isinstance(command, click.Group)]:
        reachable |= set(subcommands(group).values())

    assert defined == reachable


@pytest.mark.parametrize(
    ("arguments", "silent"),
    (
        (("db", "revision", "-m", "tables"), True),
        (("--app", "shop", "db", "upgrade"), True),
        (("idempotency", "db", "upgrade"), True),
        (("--app", "db", "report"), False),
        (("report",), False),
    ),
)
def test_a_migration_is_recognised_before_click_names_the_command(
    arguments: tuple[str, ...], silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flask` loads the application to find its commands, and would log that the tables are missing."""
    monkeypatch.setattr(sys, "argv", ["flask", *arguments])
    assert not migrating()
    with click.Context(click.Group("flask"), info_name="flask"):
        assert silent == migrating()

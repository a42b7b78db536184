"""`--help` of every command: what it does, what it changes, and one example that works; and the exit codes."""

from __future__ import annotations

import io
import re
import shlex

import click
import pytest
from click.testing import CliRunner
from flask import Flask

from docs.commands import commands, examples, page, subcommands
from flask_idempotency.cli import EXIT_CODES, INTERRUPTED, ORDER, cli
from flask_idempotency.engine.capabilities import Recovery
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.operations.records import handle_of
from tests import apps
from tests.cli.test_keys import run, shop

COMMANDS = list(commands(cli))
GROUPS: list[click.Group] = [cli, *(each for each in subcommands(cli).values() if isinstance(each, click.Group))]
CHANGES = re.compile(r"\b(Changes|Destroys|[Rr]ead-only|stores the key nowhere)\b")


def test_the_example_of_a_command_can_be_typed() -> None:
    """One, with options that are there and values that they take."""
    for name, command in COMMANDS:
        (example,) = examples(command)
        program, group, *words = shlex.split(example)
        assert ("flask", "idempotency") == (program, group), name
        assert name.split() == words[: len(name.split())]
        command.make_context(name, words[len(name.split()) :])


def test_help_begins_with_a_sentence_and_says_what_the_command_changes() -> None:
    for name, command in COMMANDS:
        shown = CliRunner().invoke(cli, [*name.split(), "--help"], terminal_width=80).output
        text = " ".join((command.help or "").split())
        first, _, rest = text.partition(". ")
        assert re.fullmatch(r"[A-Z][a-z]+ [^.]+", first), (name, first)
        assert CHANGES.search(rest), (name, text)
        assert "  Example:\n    $ flask idempotency " in shown, name
        assert max(map(len, shown.splitlines())) <= 80, name


def test_the_help_of_a_group_has_a_line_for_each_command() -> None:
    """Whole at 80 columns: none is cut short."""
    for group in GROUPS:
        shown = CliRunner().invoke(group, ["--help"], terminal_width=80).output
        assert "..." not in shown.partition("Commands:")[2], group.name
        assert max(map(len, shown.splitlines())) <= 80, group.name
        for name in subcommands(group):
            assert re.search(rf"^  {name} +[A-Z].*\.$", shown, re.MULTILINE), (group.name, name)


def test_the_help_lists_the_commands_in_an_order_that_holds_each() -> None:
    assert list(ORDER) == list(subcommands(cli))


def test_the_exit_codes_stand_in_the_help_and_in_the_reference() -> None:
    shown = " ".join(CliRunner().invoke(cli, ["--help"], terminal_width=80).output.split())

    assert [0, 1, 2, 130] == [code for code, _ in EXIT_CODES]
    for code, meaning in EXIT_CODES:
        assert f"{code} {meaning}" in shown
        assert f"| {code} | {meaning} |" in page("")


def test_a_command_that_is_refused_or_not_confirmed_exits_with_1() -> None:
    world = shop(None, encryption="off")
    purge = ("purge", "--no-tenant", "--reason", "why")

    refused = run(world, "reconcile")
    declined = world.app.test_cli_runner().invoke(args=["idempotency", *purge], input="n\n")

    assert [1, 1] == [refused.exit_code, declined.exit_code]


def test_a_store_that_does_not_answer_and_a_wrong_option_exit_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    world = apps.shop()

    def away(self: Recovery) -> None:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(type(world.store.recovery), "counts", away)

    assert [2, 2] == [run(world, "stats", *options).exit_code for options in ((), ("--no-such-option",))]


@pytest.mark.parametrize("arguments", (("stats",), ("keys", "status"), ("doctor",)), ids=" ".join)
def test_ctrl_c_exits_with_130(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with 1, as click would: a script must not take it for a refusal."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for module in ("maintenance", "stats", "stores"):
        monkeypatch.setattr(f"flask_idempotency.cli.{module}.built", interrupt)

    ended = run(shop(None, encryption="off"), *arguments)

    assert (INTERRUPTED, "Interrupted.") == (ended.exit_code, ended.stderr.strip())


class Pressed(io.BytesIO):
    """Standard input of an operator who presses Ctrl-C."""

    def read1(self, size: int | None = -1) -> bytes:
        raise KeyboardInterrupt


@pytest.mark.parametrize("command", ("purge", "resolve"))
def test_ctrl_c_at_a_question_exits_with_130_and_the_end_of_the_input_does_not(command: str) -> None:
    """A refusal exits with 1, and click gives the same code to Ctrl-C at its own questions."""
    world = apps.shop()
    key, _ = apps.lapsed(world)
    line = ("--tenant", "acme") if command == "purge" else (handle_of(key), "--happened", "--status", "201")
    line = (command, *line, "--reason", "a test")
    stopped = world.app.test_cli_runner().invoke(args=["idempotency", *line], input=Pressed())

    assert (1, 130) == (apps.run(world, *line).exit_code, stopped.exit_code)
    assert stopped.stderr.endswith("\nInterrupted.\n")
    assert "quarantined" == apps.said(apps.run(world, "list", "--json"))["records"][0]["state"]


def test_a_record_is_named_by_its_id_everywhere() -> None:
    """`list` calls it so, and one thing has one name."""
    world = apps.shop()
    key, _ = apps.lapsed(world)

    assert all("[ID]" in apps.run(world, name, "--help").output for name in ("show", "release", "resolve"))
    assert not any("HANDLE" in apps.run(world, name, "--help").output for name in ("show", "release", "resolve"))
    assert ["id:", handle_of(key)] == apps.run(world, "show", handle_of(key)).output.split()[:2]


def test_an_application_without_the_extension_shows_the_help() -> None:
    app = Flask("shop")
    app.cli.add_command(cli)

    assert 0 == app.test_cli_runner().invoke(args=["idempotency", "--help"]).exit_code

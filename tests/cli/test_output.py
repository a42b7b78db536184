"""What a command prints on a terminal and into a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace

import pytest

from flask_idempotency.cli.output import NAME_CHARACTERS, Style, Styled, ago, facts, in_colour, say, short_name, table

RED, YELLOW, BOLD, END = "\x1b[1;31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"
HOSTILE = "[red]x[/red] \x1b[2J\u202e :smile: [link=http://e]"

Terminal = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make both streams terminals of this width."""

    def make(width: int | None = 80, *, encoding: str = "utf-8") -> None:
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            monkeypatch.setattr(
                sys,
                name,
                SimpleNamespace(isatty=lambda: True, encoding=encoding, write=stream.write, flush=stream.flush),
            )

    return make


COLOURED = table(
    (
        {"id": "a", "state": Styled("quarantined", Style.BAD)},
        {"id": "b", "state": Styled("lease expired", Style.WARNING)},
    )
)
PLAIN = "id  state\na   quarantined\nb   lease expired\n"


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(*COLOURED)

    assert (PLAIN, False) == (capsys.readouterr().out, in_colour())


def test_a_terminal_gets_colour_and_the_same_text(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal()
    say(*COLOURED)

    shown = capsys.readouterr().out
    assert f"{BOLD}id{END}  {BOLD}state{END}\na   {RED}quarantined{END}\nb   {YELLOW}lease expired{END}\n" == shown
    assert PLAIN == re.sub(r"\x1b\[[0-9;]*m", "", shown)


@pytest.mark.parametrize(
    ("environment", "is_terminal", "colour"),
    (
        pytest.param({}, True, True, id="terminal"),
        pytest.param({}, False, False, id="pipe"),
        pytest.param({"NO_COLOR": "1"}, True, False, id="no colour"),
        pytest.param({"NO_COLOR": "0"}, True, False, id="any value"),
        pytest.param({"NO_COLOR": ""}, True, True, id="an empty value"),
        pytest.param({"FORCE_COLOR": "1"}, False, True, id="forced"),
        pytest.param({"FORCE_COLOR": ""}, False, False, id="forced by nothing"),
        pytest.param({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False, id="both"),
        pytest.param({"TERM": "dumb"}, True, False, id="dumb"),
        pytest.param({"TERM": "dumb", "FORCE_COLOR": "1"}, True, False, id="dumb and forced"),
    ),
)
def test_the_environment_decides_on_colour(
    environment: dict[str, str],
    is_terminal: bool,
    colour: bool,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_terminal:
        terminal()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    say(*COLOURED)

    assert (colour, colour) == (in_colour(), "\x1b" in capsys.readouterr().out)


def test_store_text_is_printed_as_it_is(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal interprets no control sequence in it."""
    terminal()
    say(HOSTILE, *table([{HOSTILE: HOSTILE}]), *facts([(HOSTILE, HOSTILE)]), Styled(HOSTILE, Style.BAD), (HOSTILE, ""))

    shown = re.sub(r"\x1b\[(0|1|1;31)m", "", capsys.readouterr().out)
    escaped = r"[red]x[/red] \x1b[2J\u202e :smile: [link=http://e]"
    assert [escaped, escaped, escaped, f"{escaped}:{escaped}", escaped, escaped] == shown.splitlines()


LONG = "payments.create_a_payment_with_a_long_name_that_nobody_types_twice_in_a_day"
ROWS = ({"id": "a", "endpoint": LONG, "reason": "lease-expired"}, {"id": "b" * 8, "endpoint": "pay", "reason": ""})


@pytest.mark.parametrize("on_terminal", (True, False), ids=("terminal", "pipe"))
def test_every_reader_gets_whole_cells(
    on_terminal: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    if on_terminal:
        terminal(40)
    say(*table(ROWS), "word " * 30)

    head, first, second, sentence = capsys.readouterr().out.splitlines()
    assert ["id", "endpoint", "reason"] == head.split()
    assert (f"a         {LONG}  lease-expired", "bbbbbbbb  pay") == (first, second)
    assert "word " * 30 == sentence


def test_a_column_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    say(*table(ROWS, without=("endpoint", "other")))

    assert "id        reason\na         lease-expired\nbbbbbbbb\n" == capsys.readouterr().out


def test_a_table_without_rows_has_no_head() -> None:
    assert [] == table([])


def test_no_cell_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A name with a line break would forge a row."""
    say(*table([{"tenant": "a\nb  quarantined"}]), *facts([("tenant", "a\nb")]), ("tenant ", "a\nb"))

    assert [
        "tenant",
        r"a\nb  quarantined",
        r"tenant:       a\nb",
        r"tenant a\nb",
    ] == capsys.readouterr().out.splitlines()


def test_a_long_name_is_cut_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wrap there, and what follows its spaces would begin a row."""
    forged = "evil" + 60 * " " + "bank  completed"
    assert forged == short_name(forged)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = short_name(forged)

    assert (NAME_CHARACTERS, "…") == (len(shown), shown[-1])
    assert 12 * "x" == short_name(12 * "x")


@pytest.mark.parametrize("encoding", ("cp1252", "utf-8"))
@pytest.mark.parametrize("forced", ("", "1"), ids=("plain", "colour"))
def test_a_stream_that_cannot_write_a_character_gets_another(
    encoding: str, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe on Windows has a code page of 256 characters, and a command must not fail after it changed a record."""
    pipe = TextIOWrapper(BytesIO(), encoding=encoding, newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("FORCE_COLOR", forced)

    say(("fault    ", "→ see the log"), "naïve 店 …")

    pipe.seek(0)
    shown = "→ see the log\nnaïve 店 …\n" if encoding == "utf-8" else "> see the log\nnaïve \\u5e97 ...\n"
    assert f"fault    {shown}" == pipe.read()


def test_json_stays_one_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(40)
    say('{"text": "' + "word " * 30 + '"}')

    assert 1 == capsys.readouterr().out.count("\n")


@pytest.mark.parametrize(
    ("seconds", "units", "text"),
    (
        (192.0, 1, "3 min ago"),
        (192.0, 2, "3 min 12 s ago"),
        (0.4, 1, "0 s ago"),
        (90061.0, 1, "1 d ago"),
        (None, 1, "-"),
    ),
)
def test_times_are_relative(seconds: float | None, units: int, text: str) -> None:
    assert text == ago(seconds, units=units)

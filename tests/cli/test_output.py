"""What a command prints on a terminal and into a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace

import pytest

from flask_idempotency.cli.output import Column, Facts, Item, Style, Styled, Table, ago, say, screen_of

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


COLOURED = Table(
    (Column("id"), Column("state")),
    (("a", Styled("quarantined", Style.BAD)), ("b", Styled("lease expired", Style.WARNING))),
)
PLAIN = "id  state\na   quarantined\nb   lease expired\n"


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    say(COLOURED)

    screen = screen_of()
    assert (PLAIN, None, False) == (capsys.readouterr().out, screen.width, screen.colour)


def test_a_terminal_gets_colour_and_the_same_text(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal()
    say(COLOURED)

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
    say(COLOURED)

    assert (colour, colour) == (screen_of().colour, "\x1b" in capsys.readouterr().out)


def test_forced_colour_shortens_nothing_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI systems set FORCE_COLOR for every command, also for those that scripts read."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")

    assert screen_of().width is None


def test_store_text_is_printed_as_it_is(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal interprets no control sequence in it."""
    terminal(200)
    say(HOSTILE, Table((Column(HOSTILE),), ((HOSTILE,),)), Facts(((HOSTILE, HOSTILE),)), Styled(HOSTILE, Style.BAD))

    shown = re.sub(r"\x1b\[(0|1|1;31)m", "", capsys.readouterr().out)
    escaped = r"[red]x[/red] \x1b[2J\u202e :smile: [link=http://e]"
    assert [escaped, escaped, escaped, f"{escaped}: {escaped}", escaped] == shown.splitlines()


LONG = "payments.create_a_payment_with_a_long_name_that_nobody_types_twice_in_a_day"
WIDE = Table(
    (Column("id", least=None), Column("endpoint"), Column("tenant"), Column("reason", rare=True)),
    (("a" * 8, LONG, "acme", "lease-expired"), ("b" * 8, "pay", "t" * 90, "corrupt")),
)


def test_a_table_fits_the_terminal(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest cells are shortened, and a column that has to stay whole is whole."""
    terminal(80)
    say(WIDE)

    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert 80 == max(map(len, lines))
    assert ["id", "endpoint", "tenant"] == lines[0].split()
    assert ["aaaaaaaa", "payments.create_a_payment_with_a_…", "acme"] == lines[1].split()
    assert ("bbbbbbbb", True) == (lines[2].split()[0], lines[2].endswith("ttt…"))


def test_a_pipe_gets_whole_cells_whatever_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    say(WIDE)

    shown = capsys.readouterr().out
    assert (True, True, False) == (LONG in shown, "t" * 90 in shown, "reason" in shown)


def test_a_wide_table_has_every_column_whole(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(80)
    say(Table(WIDE.columns, WIDE.rows, wide=True))

    shown = capsys.readouterr().out
    assert (True, True, True) == (LONG in shown, "t" * 90 in shown, "lease-expired" in shown)


def test_a_terminal_that_cannot_write_an_ellipsis_gets_dots(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(40, encoding="ascii")
    say(WIDE)

    assert (True, False) == ("..." in (shown := capsys.readouterr().out), "…" in shown)


@pytest.mark.parametrize("encoding", ("cp1252", "utf-8"))
@pytest.mark.parametrize("forced", ("", "1"), ids=("plain", "colour"))
def test_a_stream_that_cannot_write_a_character_gets_another(
    encoding: str, forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe on Windows has a code page of 256 characters, and a command must not fail after it changed a record."""
    pipe = TextIOWrapper(BytesIO(), encoding=encoding, newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("FORCE_COLOR", forced)

    say(Item(Styled("fault", None), ("→ see the log",)), "naïve 店 …")

    pipe.seek(0)
    shown = "→ see the log\nnaïve 店 …\n" if encoding == "utf-8" else "> see the log\nnaïve \\u5e97 ...\n"
    assert f"fault    {shown}" == pipe.read()


def test_each_stream_has_the_width_of_its_own_terminal() -> None:
    """`rotate > report.txt` shows its progress on the terminal of the standard error."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 33))
    width = "import sys; from flask_idempotency.cli.output import screen_of; print(screen_of(err=True).width)"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run([sys.executable, "-c", width], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    os.close(ours)

    assert b"33\n" == done.stdout


@pytest.mark.parametrize("columns", ("0", "-1", "many", ""))
def test_a_wrong_number_of_columns_counts_as_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(None)
    monkeypatch.setenv("COLUMNS", columns)
    say("a sentence")

    assert (80, "a sentence\n") == (screen_of().width, capsys.readouterr().out)


@pytest.mark.parametrize("columns", (1, 2, 5, 13, 20, 100_000))
def test_any_width_gets_the_whole_text(terminal: Terminal, columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(columns)
    say("one sentence", WIDE, Facts((("handle", "h" * 77),)), Item(Styled("fault", Style.BAD), ("a", "→ b")))

    shown = re.sub(r"\x1b\[[0-9;]*m|\s", "", capsys.readouterr().out)
    assert all(part in shown for part in ("onesentence", "a" * 8, "h" * 77, "fault", "→b"))


def test_characters_that_take_two_columns_are_counted_so(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(30)
    say(Table((Column("tenant"), Column("n")), (("店" * 40, "1"), ("e\u0301", "2"))))

    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert "店" * 13 + "…  1" == lines[1]
    assert lines[2].endswith("2")


def test_a_sentence_is_wrapped_on_a_terminal_and_stays_whole_in_a_pipe(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "  " + "word " * 30
    say(text)
    assert f"{text}\n" == capsys.readouterr().out
    terminal(40)
    say(text, err=True)

    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) <= 40 and line.startswith("  word") for line in lines)
    assert text.split() == " ".join(lines).split()


def test_json_stays_one_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(40)
    say('{"text": "' + "word " * 30 + '"}')

    assert 1 == capsys.readouterr().out.count("\n")


def test_facts_keep_their_values_beside_their_names(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a word that is too long, such as a handle, gets a line of its own, so that it can be copied."""
    terminal(80)
    say(Facts((("handle", "h" * 77), ("state", "quarantined"), ("why", "word " * 30))))

    lines = capsys.readouterr().out.splitlines()
    assert ["handle:", "  " + "h" * 77, "state:        quarantined"] == lines[:3]
    assert lines[3].startswith("why:          word word")
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 14 + "word") for line in lines[4:])


def test_a_word_longer_than_the_terminal_is_broken(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(40)
    say("a " + "x" * 100, Facts((("name", "店" * 50),)))

    out = capsys.readouterr().out
    assert ("x" * 100, "店" * 50) == (re.sub(r"[^x]", "", out), re.sub(r"[^店]", "", out))
    assert all(len(line) <= 40 for line in out.splitlines())


def test_a_value_of_spaces_takes_a_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(40)
    say(Facts((("tenant", " " * 100),)))

    assert capsys.readouterr().out.startswith("tenant:       \n")


def test_a_terminal_of_unknown_width_counts_as_80_columns(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(None)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))

    assert 80 == screen_of().width


def test_no_newline_leaves_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("Looking ", newline=False)
    say(".", newline=False)
    say()

    assert "Looking .\n" == capsys.readouterr().out


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

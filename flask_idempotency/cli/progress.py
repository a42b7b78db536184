"""Show how far a long command is: on a terminal a bar or a count, and at the end one line of counts.

A pipe, a log of cron and `--json` get none of it. The tasks know no terminal: they call a function after every batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flask_idempotency.cli import INTERRUPTED
from flask_idempotency.cli.output import has_rich, say, screen_of
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.operations.times import format_duration

SHOWN_EVERY_SECONDS: Final = 0.1
"""A reader sees no more, and a slow line must not slow down the task."""

GUESS_AFTER_SECONDS: Final = 2.0
"""The rate of the first batches is no measure of the time that is left."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The result of a command in three numbers."""

    done: int
    skipped: int = 0
    """Left as they are, because another process had them, or because the command does not handle their kind."""
    failed: int = 0


class Progress:
    """How far one command is. Call it with the number handled so far."""

    def __init__(self, what: str, *, total: int | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.what = what
        self.touched = 0
        self.counts: Counts | None = None
        """Set it at the end."""
        self.total = total or None
        self._monotonic = monotonic
        self._began = monotonic()
        self.view: View = _Silent()

    def __call__(self, touched: int) -> None:
        self.touched = touched
        if self.total is not None and touched > self.total:
            self.total = None  # more has come since the count
        self.view.update()

    @property
    def seconds(self) -> float:
        return self._monotonic() - self._began

    def __str__(self) -> str:
        """Return how far the command is: with the time left if the total is known, else with the time since it began."""
        seconds = self.seconds
        rate = self.touched / seconds if seconds else 0.0
        speed = f", {rate:,.0f}/s" if rate >= 1 else ""
        if self.total is None:
            return f"{self.touched:,}{speed}, {format_duration(seconds)}"
        left = (self.total - self.touched) / rate if rate and seconds >= GUESS_AFTER_SECONDS else None
        return f"{self.touched:,} of {self.total:,}{speed}" + (
            "" if left is None else f", {format_duration(left)} left"
        )

    def ending(self, counts: Counts) -> str:
        return (
            f"{self.what.capitalize()}: {counts.done:,} done, {counts.skipped:,} skipped, {counts.failed:,} failed "
            f"in {self.seconds:.1f} s."
        )


@contextmanager
def show_progress(
    what: str,
    *,
    as_json: bool,
    total: Callable[[], int | None] = lambda: None,
    so_far: Callable[[], str] | None = None,
) -> Iterator[Progress]:
    """Show the progress of the block to a person at a terminal.

    `what` names what the command handles, in the plural. `total` counts it, and is called only if a person sees the result.
    Ctrl-C ends the command with one sentence, `so_far` or the number handled, and with the exit code 130.
    """
    seen = not as_json and screen_of(err=True).width is not None
    progress = Progress(what, total=_known(total) if seen else None)
    progress.view = view_of(progress) if seen else _Silent()
    try:
        try:
            yield progress
        finally:
            progress.view.clear()
    except KeyboardInterrupt:
        done = f"{progress.touched:,} {what} handled." if so_far is None else so_far()
        why = f"Interrupted after {progress.seconds:.1f} s. {done} What was done stays done: run the command again to continue."
        say(json.dumps({"error": why}) if as_json else why, err=not as_json)
        raise SystemExit(INTERRUPTED) from None
    if seen and progress.counts is not None:
        say(progress.ending(progress.counts), err=True)


def _known(total: Callable[[], int | None]) -> int | None:
    try:
        return total()
    except StoreUnavailable:  # the task itself reports it, or succeeds
        return None


class View(Protocol):
    """What a person sees of a running command."""

    def update(self) -> None: ...

    def clear(self) -> None: ...


class _Silent:
    """No person sees it, or the terminal cannot rewrite a line."""

    def update(self) -> None:
        return

    def clear(self) -> None:
        return


class _Line:
    """One line of text that is written again and again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown: float | None = None
        self._length = 0

    def update(self) -> None:
        now = self._progress.seconds
        if self._shown is None or now - self._shown >= SHOWN_EVERY_SECONDS:
            self._shown = now
            self._write(f"{self._progress.what.capitalize()}: {self._progress}")

    def clear(self) -> None:
        if self._length:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        text = text[: (screen_of(err=True).width or 80) - 1]
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()
        self._length = len(text)


def view_of(progress: Progress) -> View:
    """Return what a person at this terminal sees."""
    if os.environ.get("TERM") in ("dumb", "unknown"):
        return _Silent()
    return _bar(progress) if has_rich() else _Line(progress)


def _bar(progress: Progress) -> View:
    """Return a bar of rich, which also moves while a batch takes long."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.progress import Task as Bar
    from rich.text import Text

    class Words(ProgressColumn):
        def render(self, task: Bar) -> Text:
            return Text(str(progress))

    columns: list[Any] = [TextColumn(progress.what.capitalize()), Words()]
    if progress.total is not None:
        columns.insert(1, BarColumn(bar_width=24))
    screen = screen_of(err=True)
    # rich has its own rules for the width and for what is a terminal: without ours it would print nothing, or an empty line.
    console = Console(
        file=sys.stderr, width=screen.width, force_terminal=True, no_color=not screen.colour, highlight=False
    )
    if not console.is_interactive:
        return _Silent()
    # Else rich would send to this terminal what a resolver prints into a pipe.
    bars = Bars(*columns, console=console, transient=True, redirect_stdout=screen_of().width is not None)
    bar = bars.add_task("", total=progress.total, completed=progress.touched)
    bars.start()

    class Shown:
        def update(self) -> None:
            bars.update(bar, completed=progress.touched, total=progress.total)

        def clear(self) -> None:
            bars.stop()

    return Shown()

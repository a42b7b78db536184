"""Show how far a long command is: on a terminal a count, and at the end one line of counts.

A pipe, a log of cron and `--json` get none of it. The tasks know no terminal: they call a function after every batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from flask_idempotency.cli import INTERRUPTED
from flask_idempotency.cli.output import say
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

    def __init__(
        self, what: str, *, total: int | None, seen: bool = False, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.what = what
        self.touched: int = 0
        self.counts: Counts | None = None
        """Set it at the end."""
        self.total = total or None
        self._seen = seen
        self._monotonic = monotonic
        self._began = monotonic()
        self._next_shown_at = 0.0
        self._length = 0

    def __call__(self, touched: int) -> None:
        self.touched = touched
        if self.total is not None and touched > self.total:
            self.total = None  # more has come since the count
        now = self.seconds
        if self._seen and now >= self._next_shown_at:
            self._next_shown_at = now + SHOWN_EVERY_SECONDS
            self._write(f"{self.what.capitalize()}: {self}")

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._length:
            self._write("", end="\r")

    def _write(self, text: str, end: str = "") -> None:
        """Write this text over the last one."""
        sys.stderr.write("\r" + text.ljust(self._length) + end)
        sys.stderr.flush()
        self._length = len(text)

    @property
    def seconds(self) -> float:
        return self._monotonic() - self._began

    def __str__(self) -> str:
        """Return how far the command is: with the time left if the total is known, else with the time since it began."""
        seconds = self.seconds
        rate = self.touched / seconds if seconds else 0.0
        parts = [f"{self.touched:,}" if self.total is None else f"{self.touched:,} of {self.total:,}"]
        if rate >= 1:
            parts.append(f"{rate:,.0f}/s")
        if self.total is None:
            parts.append(format_duration(seconds))
        elif rate and seconds >= GUESS_AFTER_SECONDS:
            parts.append(f"{format_duration((self.total - self.touched) / rate)} left")
        return ", ".join(parts)


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
    seen = not as_json and sys.stderr.isatty()
    known = None
    if seen:
        with suppress(StoreUnavailable):  # the task itself reports it, or succeeds
            known = total()
    progress = Progress(what, total=known, seen=seen and os.environ.get("TERM") not in ("dumb", "unknown"))
    try:
        try:
            yield progress
        finally:
            progress.clear()
    except KeyboardInterrupt:
        done = f"{progress.touched:,} {what} handled." if so_far is None else so_far()
        why = f"Interrupted after {progress.seconds:.1f} s. {done} What was done stays done: run the command again to continue."
        say(json.dumps({"error": why}) if as_json else why, err=not as_json)
        raise SystemExit(INTERRUPTED) from None
    if seen and (counts := progress.counts) is not None:
        numbers = f"{counts.done:,} done, {counts.skipped:,} skipped, {counts.failed:,} failed"
        say(f"{what.capitalize()}: {numbers} in {progress.seconds:.1f} s.", err=True)

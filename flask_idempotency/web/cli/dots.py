"""Something to look at while it takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flask_idempotency.web.cli.group import say


@contextmanager
def dots(what: str) -> Iterator[Callable[[int], object]]:
    """A dot on a terminal for every page, so that a person sees it going on."""
    if not sys.stderr.isatty():
        yield lambda touched: None
        return
    say(f"Looking at {what} ", newline=False, err=True)
    try:
        yield lambda touched: say(".", newline=False, err=True)
    finally:
        say(err=True)

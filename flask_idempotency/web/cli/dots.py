"""Something to look at while it takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def dots(what: str) -> Iterator[Callable[[int], object]]:
    """A dot on a terminal for every page, so that a person sees it going on."""
    if not sys.stderr.isatty():
        yield lambda touched: None
        return
    click.echo(f"Looking at {what} ", nl=False, err=True)
    try:
        yield lambda touched: click.echo(".", nl=False, err=True)
    finally:
        click.echo(err=True)

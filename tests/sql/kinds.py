"""Which databases, and which ways to take a key, a test is run on."""

from __future__ import annotations

import pytest

on_postgresql = pytest.mark.parametrize("database_url", ("postgresql",), indirect=True)
on_sqlite = pytest.mark.parametrize("database_url", ("sqlite",), indirect=True)
by_every_strategy = pytest.mark.parametrize(
    ("database_url", "strategy"),
    (("sqlite", "insert"), ("postgresql", "insert"), ("postgresql", "row_lock"), ("postgresql", "advisory")),
    indirect=("database_url",),
)
by_every_lock = pytest.mark.parametrize(
    ("database_url", "strategy"),
    (("postgresql", "insert"), ("postgresql", "row_lock"), ("postgresql", "advisory")),
    indirect=("database_url",),
)

"""Every store that the contract is run on. A new store is one more entry in `BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from flask_idempotency.engine.clock import Clock
from flask_idempotency.engine.ports import Store
from flask_idempotency.stores.memory import MemoryStore

MakeStore: TypeAlias = Callable[[Clock], Store]
Backend: TypeAlias = Callable[[pytest.FixtureRequest, ExitStack], MakeStore]


def memory(request: pytest.FixtureRequest, ends: ExitStack) -> MakeStore:
    return MemoryStore


BACKENDS: dict[str, Backend] = {"memory": memory}


@pytest.fixture(params=list(BACKENDS))
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes a store of one kind. Asking for this runs the test on every kind."""
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)

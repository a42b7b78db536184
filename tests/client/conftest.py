from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from flask_idempotency.client import Retries
from tests.client.scripted import KINDS, Caller, Clock, ScriptedServer, caller, scripted

MakeCaller: TypeAlias = Callable[..., Caller]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


EACH = pytest.mark.parametrize("make_caller", KINDS, indirect=True)
"""For a test of what the transports do by themselves. The others show what `delivery.py` decides for all of them."""


@pytest.fixture
def make_caller(request: pytest.FixtureRequest, clock: Clock) -> MakeCaller:
    """Make a caller with a transport. Keywords are those of `Retries`; `transport` has those of the transport."""

    def make(*, transport: dict[str, Any] | None = None, **retries: Any) -> Caller:
        kind = getattr(request, "param", KINDS[0])
        return caller(kind, Retries(**retries, timing=clock.timing()), **(transport or {}))

    return make


@pytest.fixture
def call(make_caller: MakeCaller) -> Caller:
    return make_caller()

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


@pytest.fixture(params=KINDS)
def make_caller(request: pytest.FixtureRequest, clock: Clock) -> MakeCaller:
    """Each HTTP library. Keywords are those of `Retries`; `transport` has those of the transport."""

    def make(*, transport: dict[str, Any] | None = None, **retries: Any) -> Caller:
        return caller(request.param, Retries(**retries, timing=clock.timing()), **(transport or {}))

    return make


@pytest.fixture
def call(make_caller: MakeCaller) -> Caller:
    return make_caller()

"""Nobody is given another caller's answer, and nobody learns that there is one."""

from __future__ import annotations

import pytest
from flask import request

from flask_idempotency.engine.model import State
from tests.web.apps import World, is_replay, new_world

CALLERS = (
    {"X-User": "alice"},
    {"X-User": "bob"},
    {"X-User": "alice", "X-Tenant": "acme"},
    {"X-User": "alice", "X-Tenant": "globex"},
    {"X-User": ""},
    {"X-User": "", "X-Tenant": "acme"},
)
"""The same name in two tenants, none in either, and nobody at all."""


def shop() -> World:
    world = new_world(init=False)
    world.idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    world.idempotency.init_app(world.app)

    @world.view()
    def pay() -> tuple[str, int]:
        world.runs.append(request.headers)
        return f"paid by {request.headers.get('X-Tenant')}/{request.headers['X-User']}", 201

    return world


def test_one_key_is_as_many_keys_as_there_are_callers() -> None:
    """Each runs once, and is replayed its own answer only."""
    world = shop()

    first, again = ([world.post(headers=caller) for caller in CALLERS] for _ in range(2))

    assert ([False] * 6, [True] * 6) == tuple([is_replay(answer) for answer in each] for each in (first, again))
    assert [answer.data for answer in first] == [answer.data for answer in again]
    assert 6 == len({answer.data for answer in first}) == len(world.runs)


@pytest.mark.parametrize("other", CALLERS[1:], ids=str)
def test_another_callers_key_looks_unused(other: dict[str, str]) -> None:
    """Neither a mismatch nor a conflict tells that somebody else has used it."""
    world = shop()
    world.post(headers=CALLERS[0], json={"amount": 5})

    assert 201 == world.post(headers=other, json={"amount": 7}).status_code
    assert State.COMPLETED is world.state()

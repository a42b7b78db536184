"""Every store does what the reference says, whatever is asked of it, in whatever order and weather."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from flask_idempotency.testing.doubles import FrozenClock
from tests.backends import BACKENDS, MakeStore
from tests.lab.programs import REDIS_KINDS
from tests.model.machine import KeptStore
from tests.model.others import ReferenceMachine
from tests.sql_backends import STRATEGIES, maria_database, sql_databases, sql_stores

__all__ = ["maria_database", "sql_databases", "sql_stores"]

ASKED = os.environ.get("MODEL_EXAMPLES")
EXAMPLES = int(ASKED or "20")
"""Lives of each store. If you ask for a number, a thousand for half an hour, Hypothesis shows the shortest life that fails."""

STEPS = 40
PHASES = tuple(Phase) if ASKED else (Phase.generate,)

KINDS = (
    "memory",
    "fakeredis",
    *(f"{kind}-url" for kind in REDIS_KINDS),
    "sqlite",
    *(f"postgres-{strategy}" for strategy in STRATEGIES),
    "mariadb-insert",
    "tiered-fakeredis",
    f"tiered-{REDIS_KINDS[0]}-telling",
)
"""One of each that decides in a way of its own."""


@pytest.fixture(params=KINDS)
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    with ExitStack() as ends:
        yield BACKENDS[request.param](request, ends)


@pytest.mark.slow
@pytest.mark.timeout(120 + 4 * EXAMPLES)
def test_a_store_and_the_reference_agree(make_store: MakeStore, request: pytest.FixtureRequest) -> None:
    """On every answer and every record: what is completed never changes, and time ends nothing else."""
    tiered = "tiered" in request.node.name

    class ThisStore(ReferenceMachine):
        goes_back = not tiered

        def make(self, clock: FrozenClock) -> KeptStore:
            return cast(KeptStore, make_store(clock))

    run_state_machine_as_test(
        ThisStore,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=PHASES,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )

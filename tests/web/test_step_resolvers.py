"""A resolver settles one step of a request, in an application that stores its result as plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pytest

from flask_idempotency import Resume
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import ResolverAsked
from flask_idempotency.engine.journal import LARGEST_RESULT, Entry, JournalWrite, StepState
from flask_idempotency.engine.model import OnExpiry, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.engine.store import StepContext
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.steps import values
from flask_idempotency.web.janitor import janitor_of
from flask_idempotency.web.recorded_steps import as_stored, result_of_step
from tests.apps import LEASE, World, key_of, record, shop, vanished

DRAIN = Batcher(sleep=lambda seconds: None, monotonic=lambda: 0.0)
LATER = 100_000.0


def in_doubt(says: Any) -> World:
    """A shop whose worker died in its charge, an hour ago."""
    world = shop()
    world.idempotency.resolver("pay")(says)
    key, token = vanished(world, on_expiry=OnExpiry.TAKEOVER)
    services: Any = world.app.extensions["idempotency"].built
    claimed = record(world)
    assert claimed is not None
    entry = Entry(b"charge......", "charge", "plain", StepState.BEGUN, in_line=True)
    context = StepContext(key, entry.id, claimed.fence, claimed.fingerprint, "plain", b"", "begun")
    entry = replace(entry, payload=services.codec.steps.seal(values.encode_item(7), None, context))
    writing = JournalWrite(1, [entry], steps=1, in_doubt=True)
    services.journals.write(key, token, fence=claimed.fence, writing=writing, lease=LEASE)
    world.clock.advance(LATER)
    return world


def reap(world: World) -> Any:
    return janitor_of(world.app, host_clock=lambda: world.clock.now).run("reap", DRAIN)


def test_a_result_comes_back_with_its_types() -> None:
    world = in_doubt(lambda unknown: unknown.step("charge", 7).completed({"paid": Decimal("1.10")}))

    assert 1 == reap(world).resumed

    services: Any = world.app.extensions["idempotency"].built
    (entry,) = services.journals.read(key_of(world)).entries
    claimed = record(world)
    assert claimed is not None
    context = StepContext(
        key_of(world), entry.id, entry.fence, claimed.fingerprint, "plain", entry.digest, entry.state.value
    )
    item, result = services.codec.steps.open(entry.payload, context)
    assert (7, {"paid": Decimal("1.10")}) == (values.decode_item(item), values.decode(result))
    assert (State.PROCESSING, OnExpiry.TAKEOVER) == (claimed.state, claimed.on_expiry)


def test_the_downstream_key_of_a_step_differs_by_its_item() -> None:
    seen: list[SeenStep] = []
    keys: list[str] = []

    def look(unknown: Any) -> Any:
        seen.extend(unknown.steps)
        keys.extend([unknown.steps[0].downstream_key, unknown.downstream_key("charge")])
        return unknown.step("charge", 7).completed()

    reap(in_doubt(look))

    assert [7] == [step.item for step in seen]
    assert [52, 52, 2] == [*map(len, keys), len(set(keys))]


@pytest.mark.parametrize("result", (object(), "x" * LARGEST_RESULT), ids=("type", "size"))
def test_a_result_that_no_step_can_return_is_an_error_that_changes_nothing(result: Any) -> None:
    world = in_doubt(lambda unknown: unknown.step("charge", 7).completed(result))

    assert 1 == reap(world).failed

    assert [ResolverAsked] == [type(event) for event in world.events if isinstance(event, ResolverAsked)]
    found = record(world)
    assert found is not None
    assert State.QUARANTINED is found.state


def test_a_result_above_the_limit_is_refused_before_the_store_is_asked() -> None:
    with pytest.raises(ConfigurationError, match="65538 bytes; 65536 are allowed"):
        result_of_step("charge", "x" * LARGEST_RESULT, None)


def test_resume_takes_settled_steps_only() -> None:
    with pytest.raises(TypeError, match=r"unknown\.resume"):
        as_stored(Resume(("charge",)), Policy())  # type: ignore[arg-type]


@dataclass
class Charge:
    id: int


def test_a_result_has_the_type_that_the_step_declares() -> None:
    rules = Policy(effects="steps", steps=(Step("charge", returns=Charge),))
    settled: list[Any] = []

    def look(unknown: Any) -> Any:
        step = unknown.step("charge", 7)
        settled.append(as_stored(step.completed(Charge(7)), rules))
        with pytest.raises(ConfigurationError, match="charge"):
            as_stored(step.completed({"id": 7}), rules)
        return step.never_happened()

    reap(in_doubt(look))

    assert [{"id": 7}] == [values.decode(each.result) for each in settled]

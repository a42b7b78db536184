"""The steps of a request hold in every state that they can reach; and without any one of these rules they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.model.explore import Explored, explore
from tests.model.steps import Step, Steps, World

CHARGE, SHIP, PAY = Step("charge", "plain", 0), Step("ship", "plain", 1), Step("pay", "plain", 0)
ROW = Step("row", "transactional", 2)
MAIL = Step("mail", "deduplicated", 3)

PLAIN = Steps(((CHARGE, SHIP),))
ONE = Steps(((CHARGE,),))
FAILS = replace(ONE, fails=True)
MAILED = Steps(((MAIL, CHARGE),))
SAVED = Steps(((ROW, CHARGE),))
BRANCH = Steps(((CHARGE,), (PAY,)))
RENAMED = replace(BRANCH, one_endpoint=False, any_order=True)

HOLDS = {
    "plain": ONE,
    "plain, views fail": FAILS,
    "plain, a resolver": replace(ONE, resolver=True),
    "transactional": Steps(((ROW,),)),
    "another branch": BRANCH,
    "renamed": RENAMED,
}
LARGE = {
    "plain, plain": PLAIN,
    "plain, plain, views fail": replace(PLAIN, fails=True),
    "plain, plain, a resolver": replace(PLAIN, resolver=True),
    "transactional, plain": SAVED,
    "deduplicated, plain": MAILED,
}
NEEDED: dict[str, tuple[Steps, str]] = {
    "no intent": (ONE, "I4"),
    "a begun step lets others in": (ONE, "I4"),
    "write without token": (MAILED, "I4"),
    "the fence is not compared": (PLAIN, "I1"),
    "release deletes": (FAILS, "I3"),
    "a doubt is paused": (FAILS, "I4"),
    "a take-over drops the journal": (PLAIN, "I4"),
    "the journal is read before the claim": (ONE, "I1"),
    "commit without token": (SAVED, "I1"),
    "a lost commit is made again": (SAVED, "I1"),
    "names are not compared": (RENAMED, "I1"),
    "another way is noticed at the end": (BRANCH, "I1"),
    "the resolver does not compare": (replace(ONE, resolver=True), "I4"),
}
"""Each rule, where it is needed, and which promise fails without it."""


def completed_by(world: World, who: int) -> bool:
    return world.record is not None and (world.record.state, world.record.token) == ("C", who)


REACHED: dict[str, tuple[Steps, Callable[[World], bool]]] = {
    "what one died of, the next completes": (
        replace(PLAIN, losses=0),
        lambda world: completed_by(world, 1) and world.attempts[0].at == "dead" and world.answer == (0, 1),
    ),
    "what one paused, the next completes": (
        replace(PLAIN, losses=0, fails=True, deaths=False),
        lambda world: completed_by(world, 1) and world.attempts[0].at == "end" and world.answer == (0, 1),
    ),
    "a quarantine ends when its owner finishes": (
        replace(PLAIN, losses=0, deaths=False),
        lambda world: completed_by(world, 0) and world.attempts[1].at == "end" and world.fence == 1,
    ),
    "a resolver settles a step, and the next completes": (
        replace(ONE, losses=0, resolver=True),
        lambda world: completed_by(world, 1) and world.attempts[0].at == "dead" and world.answer == (0,),
    ),
    "a renamed step is noticed before anything is done": (
        replace(RENAMED, losses=0),
        lambda world: (
            world.record is not None
            and (world.record.state, world.record.token) == ("Q", 1)
            and world.attempts[1].at == "end"
        ),
    ),
}
"""What must be possible: a model in which nothing ever happened would keep every promise."""


def explored(steps: Steps) -> Explored[World]:
    return explore(steps.start, steps.moves, steps.wrong, ends=lambda _: True)


@pytest.mark.parametrize("row", sorted(HOLDS))
def test_every_state_is_as_promised(row: str) -> None:
    """At most one effect, everybody told the same of it, and nobody let in while it is in doubt."""
    found = explored(HOLDS[row])

    assert ("", ()) == (found.violation, found.trace)


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(LARGE))
def test_nor_where_more_can_happen_at_once(row: str) -> None:
    found = explored(LARGE[row])

    assert ("", ()) == (found.violation, found.trace)


@pytest.mark.parametrize("rule", sorted(NEEDED))
def test_no_rule_can_be_left_out(rule: str) -> None:
    """Without it, this promise fails first."""
    steps, promise = NEEDED[rule]

    assert promise == explored(replace(steps, broken=frozenset({rule}))).violation


@pytest.mark.parametrize("goal", sorted(REACHED))
def test_what_must_be_possible_is_reached(goal: str) -> None:
    steps, reached = REACHED[goal]
    found = explore(steps.start, steps.moves, lambda world: "reached" if reached(world) else "", ends=lambda _: True)

    assert "reached" == found.violation

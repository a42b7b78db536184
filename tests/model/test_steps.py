"""The steps of a request hold in every state that they can reach; and without any one of these rules they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.model.explore import Explored, explore
from tests.model.steps import Step, Steps, World

# A model of its own: no change of the package can break it.
pytestmark = pytest.mark.slow

CHARGE, SHIP, PAY = Step("charge", "plain", 0), Step("ship", "plain", 1), Step("pay", "plain", 0)
ROW = Step("row", "transactional", 2)
MAIL = Step("mail", "deduplicated", 3)
QUOTE = Step("quote", "pure", 4)

ONE = Steps(((CHARGE,),))
FAILS = replace(ONE, fails=True)
PLAIN = Steps(((CHARGE, SHIP),))
THREADS = replace(PLAIN, threads=True)
MAILED = Steps(((MAIL, CHARGE),))
SAVED = Steps(((ROW, CHARGE),))
QUOTED = Steps(((QUOTE, CHARGE),))
QUOTED_MAIL = Steps(((QUOTE, MAIL),), intent=False)
BRANCH = Steps(((CHARGE,), (PAY,)))
RENAMED = replace(BRANCH, one_endpoint=False, any_order=True)
SHORTER = replace(PLAIN, codes=((CHARGE, SHIP), (CHARGE,)), losses=0)

LEFT = replace(PLAIN, janitors=1)
TWO_JANITORS = replace(ONE, attempts=3, janitors=2)

HOLDS = {
    "a janitor finishes": LEFT,
    "a janitor finishes, views fail and calls are given up": replace(FAILS, janitors=1, gives_up=True),
    "a janitor finishes, transactional": replace(SAVED, janitors=1),
    "two janitors": replace(TWO_JANITORS, codes=((MAIL, CHARGE),), losses=0),
    "a janitor and a client": replace(PLAIN, attempts=3, janitors=1, losses=0),
    "plain, views fail and calls are given up": replace(FAILS, gives_up=True),
    "plain, a resolver": replace(ONE, resolver=True),
    "plain, plain": PLAIN,
    "transactional": replace(FAILS, codes=((ROW,),), gives_up=True),
    "pure, plain": QUOTED,
    "pure, deduplicated without intent": QUOTED_MAIL,
    "threads, views fail": replace(THREADS, fails=True, losses=0),
    "asked for again": replace(ONE, again=1),
    "another branch": BRANCH,
    "renamed": RENAMED,
    "a branch that leaves a step out": SHORTER,
}
"""What every push looks at first, in seconds."""
WIDE = {
    "two janitors, views fail": replace(PLAIN, attempts=3, janitors=2, fails=True, losses=0),
    "a janitor and a client, views fail, a resolver": replace(
        ONE, attempts=3, janitors=1, fails=True, resolver=True, losses=0
    ),
    "plain, plain, views fail, three attempts": replace(PLAIN, fails=True, losses=0, attempts=3),
    "threads": THREADS,
}
"""What the slow stage looks at as well."""
LARGE = {
    "a janitor and a client, a loss": replace(ONE, attempts=3, janitors=1),
    "a janitor and a client, plain, plain, views fail, a resolver": replace(
        PLAIN, attempts=3, janitors=1, fails=True, resolver=True, losses=0
    ),
    "two janitors, calls are given up": replace(TWO_JANITORS, gives_up=True),
    "a janitor, transactional, views fail and calls are given up": replace(
        SAVED, janitors=1, fails=True, gives_up=True
    ),
    "plain, plain, views fail and calls are given up": replace(PLAIN, fails=True, gives_up=True),
    "plain, plain, a resolver": replace(PLAIN, resolver=True),
    "plain, plain, two losses": replace(PLAIN, losses=2),
    "plain, three attempts": replace(ONE, attempts=3),
    "plain, plain, three attempts": replace(PLAIN, attempts=3),
    "plain, transactional, three attempts, views fail": replace(
        PLAIN, codes=((CHARGE, ROW),), fails=True, losses=0, attempts=3
    ),
    "another branch, three attempts": replace(BRANCH, losses=0, attempts=3),
    "plain, plain, three attempts, a resolver": replace(PLAIN, resolver=True, losses=0, attempts=3),
    "transactional, plain, views fail and calls are given up": replace(SAVED, fails=True, gives_up=True),
    "deduplicated, plain, views fail and calls are given up": replace(MAILED, fails=True, gives_up=True),
    "deduplicated without intent, plain, views fail": replace(MAILED, intent=False, fails=True),
    "pure, plain, views fail and calls are given up": replace(QUOTED, fails=True, gives_up=True),
    "pure, deduplicated without intent, views fail": replace(QUOTED_MAIL, fails=True, gives_up=True),
    "threads, views fail, a loss": replace(THREADS, fails=True),
    "threads, asked for again": replace(THREADS, again=1),
    "threads, calls are given up": replace(THREADS, gives_up=True),
}
"""What a release looks at as well: these take minutes."""
NEEDED: dict[str, tuple[Steps, str]] = {
    "no intent": (ONE, "I4"),
    "a begun step lets others in": (ONE, "I4"),
    "write without token": (MAILED, "I4"),
    "the fence is not compared": (PLAIN, "I1"),
    "writes have no number": (replace(THREADS, again=1), "I4"),
    "a finish speaks for itself": (THREADS, "I4"),
    "a write that was given up is forgotten": (replace(PLAIN, gives_up=True), "I4"),
    "release deletes": (FAILS, "I3"),
    "a doubt is paused": (FAILS, "I4"),
    "a take-over drops the journal": (PLAIN, "I4"),
    "the journal is read before the claim": (ONE, "I1"),
    "commit without token": (SAVED, "I1"),
    "a lost commit is made again": (SAVED, "I1"),
    "a pure value is not recorded": (QUOTED, "I2"),
    "an effect overtakes a pure value": (QUOTED_MAIL, "I2"),
    "a pure value is released": (replace(QUOTED_MAIL, fails=True), "I2"),
    "names are not compared": (RENAMED, "I1"),
    "another way is noticed at the end": (BRANCH, "I1"),
    "an unasked step is not missed": (SHORTER, "I5"),
    "the resolver does not compare": (replace(ONE, resolver=True), "I4"),
    "the request has a write of its own": (LEFT, "I7"),
    "a try is not noted": (replace(MAILED, attempts=3, janitors=2, losses=0), "I8"),
    "tries are counted by a look": (replace(MAILED, attempts=3, janitors=2, losses=0), "I8"),
    "a free key is begun": (replace(MAILED, janitors=1, fails=True, losses=0), "I9"),
    "the caller is not compared": (LEFT, "I10"),
}
"""Each rule, where it is needed, and which promise fails without it."""


def completed_by(world: World, who: int) -> bool:
    return world.record is not None and (world.record.state, world.record.token) == ("C", who)


def resumed(world: World, after: str, answer: tuple[int, ...]) -> bool:
    """Whether the second attempt completed what the first left behind."""
    return completed_by(world, 1) and world.attempts[0].at == after and world.answer == answer


REACHED: dict[str, tuple[Steps, Callable[[World], bool]]] = {
    "what one died of, the janitor completes": (
        replace(LEFT, losses=0),
        lambda world: resumed(world, "dead", (0, 1)),
    ),
    "what one paused, the janitor completes": (
        replace(LEFT, losses=0, fails=True, deaths=False),
        lambda world: resumed(world, "end", (0, 1)),
    ),
    "what a janitor died of, the client completes": (
        replace(PLAIN, attempts=3, janitors=1, losses=0),
        lambda world: completed_by(world, 1) and world.attempts[2].at == "dead" and world.tries == 0 < world.views,
    ),
    "what one died of, the next completes": (
        replace(PLAIN, losses=0),
        lambda world: resumed(world, "dead", (0, 1)),
    ),
    "what one paused, the next completes": (
        replace(PLAIN, losses=0, fails=True, deaths=False),
        lambda world: resumed(world, "end", (0, 1)),
    ),
    "a quarantine ends when its owner finishes": (
        replace(PLAIN, losses=0, deaths=False),
        lambda world: completed_by(world, 0) and world.attempts[1].at == "end" and world.fence == 1,
    ),
    "a step in doubt keeps the next out": (
        replace(PLAIN, losses=0),
        lambda world: (
            world.record is not None
            and (world.record.state, world.record.token, world.attempts[0].at) == ("Q", 0, "dead")
            and world.attempts[1].at == "end"
        ),
    ),
    "a resolver settles a step, and the next completes": (
        replace(ONE, losses=0, resolver=True),
        lambda world: resumed(world, "dead", (0,)),
    ),
    "one charges, and the next writes the row": (
        replace(PLAIN, codes=((CHARGE, ROW),), losses=0),
        lambda world: resumed(world, "dead", (0, 1)),
    ),
    "the next goes by the pure value of the first": (
        replace(QUOTED, losses=0),
        lambda world: resumed(world, "dead", (0, 0)),
    ),
    "a thread finishes when its view has ended": (
        replace(THREADS, losses=0, fails=True, deaths=False),
        lambda world: resumed(world, "end", (0, 1)) and world.fence == 2,
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
    return explore(steps.start, steps.moves, steps.wrong, ends=None)


LONG = (pytest.mark.soak, pytest.mark.timeout(1800))
ROWS = (
    *sorted(HOLDS),
    *WIDE,
    *(pytest.param(row, marks=LONG) for row in sorted(LARGE)),
)


@pytest.mark.parametrize("row", ROWS)
def test_every_state_is_as_promised(row: str) -> None:
    """An effect happens at most once, each attempt gets the same result of it, and a doubt keeps the others out."""
    found = explored((HOLDS | WIDE | LARGE)[row])

    assert ("", ()) == (found.violation, found.trace)


@pytest.mark.parametrize("rule", sorted(NEEDED))
def test_no_rule_can_be_left_out(rule: str) -> None:
    steps, promise = NEEDED[rule]

    assert promise == explored(replace(steps, broken=frozenset({rule}))).violation


@pytest.mark.parametrize("goal", sorted(REACHED))
def test_what_must_be_possible_is_reached(goal: str) -> None:
    steps, reached = REACHED[goal]
    found = explore(steps.start, steps.moves, lambda world: "reached" if reached(world) else "", ends=None)

    assert "reached" == found.violation


def test_the_next_write_carries_a_finish_that_was_given_up() -> None:
    """The view goes on without a reply. If its next write arrives, it is as if the lost one had."""
    steps = replace(PLAIN, gives_up=True, deaths=False, attempts=1)
    left: list[World] = []

    def untold(world: World) -> str:
        attempt = world.attempts[0]
        if ("done", "todo") != attempt.steps or not attempt.unsent or any(entry.finished for entry in world.journal):
            return ""
        left.append(world)
        return "untold"

    explore(steps.start, steps.moves, untold, ends=None)
    found = explore(left[0], steps.moves, lambda world: "completed" if completed_by(world, 0) else "", ends=None)

    assert "completed" == found.violation


def test_what_cannot_be_promised() -> None:
    """A completion compares the token and not the fence. Older code whose claim is sent twice may answer without a step
    that newer code has taken. The same code cannot: it asks for the same steps."""
    assert "I5" == explored(replace(SHORTER, losses=1)).violation

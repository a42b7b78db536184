"""The protocol holds in every state that it can reach; and without any one of its rules it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.explore import Explored, explore
from tests.model.protocol import Protocol
from tests.model.rules import Effects
from tests.model.world import World

# A model of its own: no change of the package can break it.
pytestmark = pytest.mark.slow

PLAIN, MARKED = Protocol("plain"), Protocol("marked")
DEDUPLICATED, TRANSACTIONAL = Protocol("deduplicated"), Protocol("transactional")

NEEDED: dict[str, Protocol] = {
    "own claim": PLAIN,
    "claim takes quarantined": PLAIN,
    "fence restarts": DEDUPLICATED,
    "one token for all": DEDUPLICATED,
    "mark without token": MARKED,
    "mark is not stored": MARKED,
    "complete without token": DEDUPLICATED,
    "complete overwrites": DEDUPLICATED,
    "stale answer": DEDUPLICATED,
    "release without token": MARKED,
    "expiry takes all": PLAIN,
    "janitor takes all": PLAIN,
    "janitor trusts its reading": PLAIN,
    "janitor ignores the rule": DEDUPLICATED,
    "resolver keeps the token": PLAIN,
    "resolver does not compare": PLAIN,
    "resolver is hasty": PLAIN,
}
"""Each rule, and what it is needed for: without it something that must never happen does."""


def explored(protocol: Protocol) -> Explored[World]:
    return explore(protocol.start, protocol.moves, protocol.wrong, ends=protocol.ends)


@pytest.mark.parametrize("effects", ("plain", "marked", "deduplicated", "transactional"))
def test_every_state_is_as_promised(effects: Effects) -> None:
    """At most one effect, one answer, fences that rise, and a way to the end from everywhere."""
    found = explored(Protocol(effects))

    assert ("", ()) == (found.violation, found.trace)
    assert found.states > 1000


@pytest.mark.parametrize("rule", sorted(NEEDED))
def test_no_rule_can_be_left_out(rule: str) -> None:
    assert explored(replace(NEEDED[rule], broken=frozenset({rule}))).violation


@pytest.mark.parametrize(
    ("protocol", "violation"),
    (
        (Protocol("plain", takeover=True), "the effect happened twice"),
        (Protocol("plain", forced=True), "the effect happened twice"),
    ),
    ids=("plain effects that are taken over", "a person who frees what may be alive"),
)
def test_what_cannot_be_promised(protocol: Protocol, violation: str) -> None:
    """The limits that the documentation names are where it says they are."""
    assert violation == explored(protocol).violation

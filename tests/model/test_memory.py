"""A store may forget everything, or be as it once was: nothing runs twice for that, as long as every rule is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.protocol import Protocol
from tests.model.test_protocol import explored

# A model of its own: no change of the package can break it.
pytestmark = pytest.mark.slow

PLAIN = Protocol("plain", faithful=True)
MARKED = Protocol("marked", faithful=True)
DEDUPLICATED = Protocol("deduplicated", faithful=True)

WIPED, SET_BACK, MISTAKEN = (
    replace(PLAIN, accidents=("wiped",)),
    replace(PLAIN, accidents=("set back",)),
    replace(PLAIN, accidents=("mistaken",)),
)
TWICE = replace(PLAIN, workers=2, accidents=("set back", "set back"))
MARKED_SET_BACK = replace(MARKED, workers=2, accidents=("set back",))
DEDUPLICATED_SET_BACK = replace(DEDUPLICATED, workers=2, accidents=("set back",))
KEPT = replace(PLAIN, workers=2, lossless=True, accidents=("restarted",))
OLDER = replace(KEPT, accidents=("older files",))
MARKED_KEPT = replace(KEPT, effects="marked")
LATE = replace(PLAIN, workers=2, packets=True)
FREED = replace(PLAIN, workers=1, forced=True)

ROWS = {
    "plain, wiped": WIPED,
    "plain, set back": SET_BACK,
    "plain, mistaken": MISTAKEN,
    "plain, set back twice": TWICE,
    "plain, wiped and set back": replace(TWICE, accidents=("wiped", "set back")),
    "plain, set back and wiped": replace(TWICE, accidents=("set back", "wiped")),
    "plain, set back twice, keys with their time": replace(TWICE, timed="well"),
    "plain, restarted": KEPT,
    "plain, restarted twice": replace(KEPT, accidents=("restarted", "restarted")),
    "plain, restarted and wiped": replace(KEPT, accidents=("restarted", "wiped")),
    "plain, restarted with late packets": replace(KEPT, packets=True),
    "plain, set back and restarted": replace(KEPT, accidents=("set back", "restarted")),
    "plain, older files": OLDER,
    "plain, older files and restarted": replace(KEPT, accidents=("older files", "restarted")),
    "plain, restarted and older files": replace(KEPT, accidents=("restarted", "older files")),
    "marked, restarted": MARKED_KEPT,
    "marked, restarted twice": replace(MARKED_KEPT, accidents=("restarted", "restarted")),
    "marked, older files": replace(MARKED_KEPT, accidents=("older files",)),
    "deduplicated, restarted": replace(KEPT, effects="deduplicated"),
    "deduplicated, older files": replace(OLDER, effects="deduplicated"),
    "plain, late packets": replace(LATE, workers=3),
    "plain, late packets, wiped": replace(LATE, accidents=("wiped",)),
    "plain, late packets, set back": replace(LATE, accidents=("set back",)),
    "plain, freed by force, wiped": replace(FREED, accidents=("wiped",)),
    "plain, freed by force, set back": replace(FREED, accidents=("set back",)),
    "marked, wiped": replace(MARKED, workers=2, accidents=("wiped",)),
    "marked, set back": MARKED_SET_BACK,
    "deduplicated, wiped": replace(DEDUPLICATED, workers=2, accidents=("wiped",)),
    "deduplicated, set back": DEDUPLICATED_SET_BACK,
}

LARGE = {
    "marked, wiped": replace(MARKED, accidents=("wiped",)),
    "marked, set back": replace(MARKED_SET_BACK, workers=3),
    "marked, set back twice": replace(MARKED_SET_BACK, accidents=("set back", "set back")),
    "marked, set back twice, keys with their time": replace(
        MARKED_SET_BACK, accidents=("set back", "set back"), timed="well"
    ),
    "marked, late packets, set back": replace(MARKED_SET_BACK, packets=True),
    "deduplicated, wiped": replace(DEDUPLICATED, accidents=("wiped",)),
    "deduplicated, set back": replace(DEDUPLICATED_SET_BACK, workers=3),
    "deduplicated, set back twice": replace(DEDUPLICATED_SET_BACK, accidents=("set back", "set back")),
}
LONG = (pytest.mark.soak, pytest.mark.timeout(600))
"""Before a release: a million states and more."""

NEEDED: dict[str, Protocol] = {
    "no canary": WIPED,
    "the canary is not made anew": WIPED,
    "no server is compared": SET_BACK,
    "only the process is compared": TWICE,
    "another store is taken for ours": MISTAKEN,
    "fence from the floor alone": SET_BACK,
    "once young, always young": replace(TWICE, timed="well"),
    "taken over from before a loss": DEDUPLICATED_SET_BACK,
    "taken over when acknowledged": MARKED_SET_BACK,
    "mark after a loss": MARKED_SET_BACK,
    "release after a loss": replace(MARKED_SET_BACK, workers=3, attended=False),
    "complete after a loss": DEDUPLICATED_SET_BACK,
    "the age of the files is not compared": OLDER,
    "a promotion passes for a restart": replace(KEPT, accidents=("set back",)),
    "what is ended is forgotten": LATE,
    "only what is abandoned is remembered": LATE,
}
"""Each rule, and what it is needed for: without it something that must never happen does."""

NEEDED_TOGETHER: dict[tuple[str, str], Protocol] = {
    ("what may be taken over is put back", "complete after a loss"): replace(DEDUPLICATED, accidents=("wiped",)),
    ("everything absent is put back", "what is ended is forgotten"): replace(FREED, accidents=("wiped",)),
}
"""Two rules of which either would do. Both are kept: one is the store's, and one is the owner's."""


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(each, id=name) for name, each in ROWS.items()),
        *(pytest.param(each, id=f"{name}, longer", marks=LONG) for name, each in LARGE.items()),
    ],
)
def test_nothing_runs_twice_when_a_store_forgets(row: Protocol) -> None:
    """At most one effect, one answer, fences that rise, nothing that was ended comes back, and a way to the end."""
    found = explored(row)

    assert ("", ()) == (found.violation, found.trace)


@pytest.mark.parametrize("rule", sorted(NEEDED))
def test_no_rule_can_be_left_out(rule: str) -> None:
    assert explored(replace(NEEDED[rule], broken=frozenset({rule}))).violation


@pytest.mark.parametrize("rules", sorted(NEEDED_TOGETHER), ids=" and ".join)
def test_not_both_of_these_can_be_left_out(rules: tuple[str, str]) -> None:
    assert explored(replace(NEEDED_TOGETHER[rules], broken=frozenset(rules))).violation


@pytest.mark.parametrize("row", ("plain, restarted", "marked, restarted", "deduplicated, restarted"))
def test_after_a_restart_that_loses_nothing_nobody_has_to_look(row: str) -> None:
    """There is no state from which only an operator leads to the end; without the proof there is."""
    alone = replace(ROWS[row], unattended=True)

    assert "" == explored(alone).violation
    assert "no way leads to the end" == explored(replace(alone, lossless=False)).violation


@pytest.mark.parametrize(
    ("protocol", "violation"),
    (
        (replace(SET_BACK, unknown="hold"), "the effect happened twice"),
        (replace(SET_BACK, unknown="run"), "the effect happened twice"),
        (replace(SET_BACK, hasty=True), "the effect happened twice"),
        (replace(SET_BACK, careless=True), "the effect happened twice"),
        (replace(SET_BACK, timed="fast"), "the effect happened twice"),
        (replace(OLDER, quick=True), "the effect happened twice"),
        (replace(WIPED, faithful=False), "two different answers were given"),
    ),
    ids=(
        "after the hold, what was completed in the lost seconds",
        "unknown keys that run after a loss",
        "a loss that is acknowledged before every owner has its record again",
        "a loss that is acknowledged while what was done is still retried",
        "a client whose clock is fast by more than the skew",
        "files that are put back as fast as a restart takes, where nobody is left who was granted what they lack",
        "a resolver that answers otherwise than the owner would have",
    ),
)
def test_what_cannot_be_promised(protocol: Protocol, violation: str) -> None:
    """The limits that the documentation names are where it says they are."""
    assert violation == explored(protocol).violation

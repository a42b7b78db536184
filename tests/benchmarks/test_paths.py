"""Every path is timed, beside its budgets, and its round trips are counted."""

from __future__ import annotations

import pytest

from benchmarks.harness import EXPECTED, Case, call
from benchmarks.paths import our_cases
from flask_idempotency.stores.memory import MemoryStore
from tests.benchmarks.conftest import PATHS, budgets_of, cases_of, measured


def test_every_path_is_timed_in_every_application(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A table without a row hides a budget."""
    by_hand = [path for path in PATHS if path != "mismatch"]  # without a fingerprint there is none

    assert cases_of(measured(capsys, "requests", "--redis-url", url)) == [
        "bare Flask: GET",
        "bare Flask: POST, no key",
        *(f"by hand: {path}" for path in by_hand),
        *(f"ours: {path}" for path in PATHS),
        *(f"ours, memory: {path}" for path in PATHS),
    ]


def test_every_budget_of_the_specification_is_held_against_its_path(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of SPEC section 14 stand beside what was measured."""
    assert budgets_of(measured(capsys, "requests", "memory", "--redis-url", url)) == {
        "ours: GET": ["< 10 µs added"],
        "ours: POST, no key": ["< 10 µs added"],
        "ours: first": ["≤ 1.25 × by hand"],
        "ours: replay": ["≤ 1.25 × by hand", "p99 < 2 ms"],
        "ours: conflict": ["p99 < 5 ms"],
        "ours: mismatch": ["p99 < 5 ms"],
        "ours, memory: GET": ["< 10 µs added"],
        "ours, memory: POST, no key": ["< 10 µs added"],
        "a stored answer before compression": ["≤ 64 B on top"],
        "a charge": ["≤ 1.1 KB"],
        "a list of payments": ["≤ 1.1 KB"],
    }


def test_round_trips_are_counted_path_by_path(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The count is exact on any machine, and SPEC section 7 names it."""
    document = measured(capsys, "trips", "--redis-url", url)

    trips = {row["case"].partition(": ")[2]: row["trips"] for row in document["sections"][0]["rows"]}
    assert trips == {"GET": 0, "POST, no key": 0, "first": 2, "replay": 1, "conflict": 1, "mismatch": 1}


def test_a_profile_names_functions_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A profile names the functions to make faster."""
    document = measured(capsys, "--profile", "replay", "--on-memory")

    assert any(case.startswith("flask_idempotency/web/") for case in cases_of(document))


def test_an_answer_of_another_path_is_not_measured() -> None:
    """A fast wrong response would be the best row of the table."""
    with our_cases("ours", MemoryStore()) as cases:
        replay = next(case for case in cases if case.path == "replay")
        first = next(case for case in cases if case.path == "first")
        mixed_up = Case(first.app, "first", first.flask, replay.make)
        answer = call(mixed_up.flask, mixed_up.make())

        with pytest.raises(RuntimeError, match="first"):
            mixed_up.check(answer)


def test_every_path_knows_its_status() -> None:
    """The check of responses covers every path."""
    assert list(EXPECTED) == PATHS

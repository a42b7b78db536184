"""A profile names the functions to make faster, and the part of a request that each belongs to."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from benchmarks.profiling import PARTS
from tests.benchmarks.conftest import cases_of, measured


def test_a_profile_names_parts_and_functions_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    document = measured(capsys, "--profile", "replay", "--on-memory", "--seconds", "0.2")
    parts, _, _ = document["sections"]

    assert any(case.startswith("flask_idempotency/web/") for case in cases_of(document))
    assert {"Flask and Werkzeug", "whole"} <= {row["case"] for row in parts["rows"]}


def test_every_place_of_a_part_exists() -> None:
    """A file that moved would count for another part."""
    root, packages = Path(__file__).parents[2], Path(sysconfig.get_path("purelib"))
    places = [place for _, found in PARTS for place in found]

    assert [
        place for place in places if not (packages if place[0] == "/" else root).joinpath(place.strip("/")).exists()
    ] == []

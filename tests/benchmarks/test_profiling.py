"""A profile names the functions to make faster, and the part of a request that each belongs to."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from flask import app
from redis import client

from benchmarks.by_hand import by_hand
from benchmarks.profiling import PARTS, part_of
from flask_idempotency.codec import envelope
from flask_idempotency.engine import engine, fingerprint, keys, lease
from flask_idempotency.stores.redis import store
from flask_idempotency.web import hooks
from tests.benchmarks.conftest import cases_of, measured


def test_a_profile_names_parts_and_functions_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    document = measured(capsys, "--profile", "replay", "--on-memory", "--seconds", "0.2")
    parts, _, _ = document["sections"]

    assert any(case.startswith("flask_idempotency/web/") for case in cases_of(document))
    assert {"Flask and Werkzeug", "whole"} <= {row["case"] for row in parts["rows"]}


def test_a_source_file_belongs_to_a_part() -> None:
    modules = (app, client, store, keys, fingerprint, envelope, lease, engine, hooks)
    found = [part_of(str(module.__file__)) for module in modules]

    assert found == [
        "Flask and Werkzeug",
        "redis-py",
        "store",
        "identity",
        "fingerprint",
        "codec",
        "lease",
        "engine",
        "our hooks",
    ]
    assert part_of(by_hand.__code__.co_filename) == "hooks by hand"


def test_the_standard_library_works_for_its_callers() -> None:
    """A sample there counts for the part that called it."""
    assert part_of(str(json.__file__)) is None
    assert part_of("<frozen importlib._bootstrap>") is None


def test_every_place_of_a_part_exists() -> None:
    """A file that moved would count for another part."""
    root, packages = Path(__file__).parents[2], Path(sysconfig.get_path("purelib"))
    places = [place for _, found in PARTS for place in found]

    assert [
        place for place in places if not (packages if place[0] == "/" else root).joinpath(place.strip("/")).exists()
    ] == []

"""`bench --gate` fails when a path got slower against by hand, and only then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import redis
from flask import Flask

from benchmarks import apps, gate, paths
from benchmarks.__main__ import main
from benchmarks.harness import OURS

NAMES = [f"Redis: {path}" for path in ("GET", "POST, no key", "first", "replay", "conflict", "mismatch")]
NAMES += [f"{kind}, transactional: {path}" for kind in ("SQLite", "PostgreSQL") for path in ("first", "replay")]


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the committed one, and no PostgreSQL, which takes seconds to start."""
    file = tmp_path / "committed.json"
    monkeypatch.setattr(gate, "COMMITTED", file)
    monkeypatch.setattr("benchmarks.sql_apps.installation", lambda: None)
    return file


def write(file: Path, ratio: float, names: Collection[str] = NAMES) -> None:
    file.write_text(json.dumps({"machine": {"python": "3.11.7"}, "ratios": dict.fromkeys(names, ratio)}))


def run(url: str, *arguments: str) -> int:
    return main([*arguments, "--rounds", "1", "--requests", "2", "--redis-url", url])


def test_the_committed_file_has_every_ratio() -> None:
    """CI has all servers, so there each one is compared."""
    assert list(gate.committed()) == NAMES


def test_a_slower_path_fails(url: str, committed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was measured again first. The message has both ratios and says what to do."""
    write(committed, 0.05)

    assert run(url, "--gate") == 1

    message = capsys.readouterr().err
    assert "FAILED: Redis: first takes" in message
    assert "0.05 is committed, and 0.06 is the most. Measured 3 times" in message
    assert "run.py bench --commit" in message
    assert "Not measured on this machine: PostgreSQL, transactional: first" in message


def test_a_slowed_application_fails(
    url: str, committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate measures, it does not only compare files. Ratios within the tolerance pass."""
    write(committed, 10.0)
    assert run(url, "--gate") == 0
    assert "FAILED" not in capsys.readouterr().err

    def slow(client: redis.Redis, url: str, held: apps.Gate) -> Flask:
        app = apps.ours(url, gate=held)
        app.before_request(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000) and None)
        return app

    monkeypatch.setitem(paths.APPLICATIONS, OURS, slow)
    assert run(url, "--gate") == 1


def test_a_ratio_without_a_commit_fails(url: str, committed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new path would otherwise go unwatched."""
    write(committed, 1000.0, NAMES[1:])

    assert run(url, "--gate") == 1
    assert "Redis: GET has no committed ratio" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measured", "failures", "rounds"), [([1.3, 1.0], 0, [7, 14]), ([1.3, 1.3, 1.2], 1, [7, 14, 14])]
)
def test_a_ratio_fails_only_if_it_repeats(
    committed: Path, monkeypatch: pytest.MonkeyPatch, measured: list[float], failures: int, rounds: list[int]
) -> None:
    """One bad moment of the machine does not stop a build."""
    write(committed, 1.0, ["a", "b"])
    left, asked = list(measured), []

    def ratios(*_: Any, only: Collection[str] | None = None, **options: int) -> dict[str, float]:
        asked.append(options["rounds"])
        found = {"a": left.pop(0), "b": 1.0}
        return {name: ratio for name, ratio in found.items() if only is None or name in only}

    monkeypatch.setattr(gate, "ratios", ratios)
    _, failed = gate.check(None, "", None, rounds=7)  # type: ignore[arg-type]

    assert (len(failed), asked) == (failures, rounds)

"""The server of a run, and what its JSON document holds."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import harness, profiling, server_cost, serving, sql, storage
from benchmarks.__main__ import main
from benchmarks.apps import no_flushes
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers

# In CI, `run.py setup` has installed it, so there these tests run or fail.
needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("aws_lambda_powertools") is None and not os.environ.get("CI"),
    reason="the peer is not installed: python3 run.py setup",
)

PATHS = ["GET", "POST, no key", "first", "replay", "conflict", "mismatch"]


@pytest.fixture(scope="package", autouse=True)
def _uninterrupted() -> Iterator[None]:
    """Let no application add its activity to the store while a test counts what a request sends.

    Each path is taken a few times: tests look at what is measured, and not at the figures.
    """
    few: dict[Any, dict[str, float]] = {
        harness: {"WARM_UP_REQUESTS": 2},
        profiling: {"PROFILE_WARM_UP_REQUESTS": 5},
        server_cost: {"COUNTED_REQUESTS": 5, "RECORDS": 10},
        serving: {"WARM_UP_SECONDS": 0.05},
        sql: {"COUNTED_REQUESTS": 5},
        storage: {"CLAIMS_A_ROUND": 25, "ROUND_SECONDS": 0.2},
    }
    with no_flushes(), pytest.MonkeyPatch.context() as changes:
        for module, numbers in few.items():
            for name, number in numbers.items():
                changes.setattr(module, name, number)
        yield


@pytest.fixture
def url(redis_servers: RedisServers) -> str:
    return redis_servers.get(REDIS_KINDS[0]).url


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--rounds", "1", "--requests", "2", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def cases_of(document: dict[str, Any]) -> list[str]:
    return [row["case"] for section in document["sections"] for row in section["rows"]]


def budgets_of(document: dict[str, Any]) -> dict[str, list[str]]:
    rows = [row for section in document["sections"] for row in section["rows"] if row["verdicts"]]
    return {row["case"]: [verdict["budget"] for verdict in row["verdicts"]] for row in rows}

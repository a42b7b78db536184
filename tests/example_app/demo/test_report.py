"""The table of the tour, and the report of a broken promise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from example_app.demo.client import Shop
from example_app.demo.report import Finding, Parts, Scenarios, Seen, failures, run, seen, table


def test_table() -> None:
    """A broken promise is plain to see."""
    findings = [
        Finding("retry", "201 replayed", "1", "+0", "the same 201", ok=True),
        Finding("changed payload", "201", "2", "+1", "422 key-reused", ok=False),
    ]

    assert [
        "scenario         responses     executions  rows  expected        ok",
        "---------------  ------------  ----------  ----  --------------  ------",
        "retry            201 replayed  1           +0    the same 201    ok",
        "changed payload  201           2           +1    422 key-reused  FAILED",
    ] == table(findings).splitlines()


class OneRow:
    """A shop whose rows never change."""

    def rows(self) -> int:
        return 1


def test_a_failure_names_scenario_expectation_responses_and_logs(tmp_path: Path) -> None:
    scenarios = Scenarios()
    shop: Any = OneRow()

    @scenarios.scenario("201, runs once", rows=1)
    def broken(_: Shop) -> Seen:
        request = httpx.Request("POST", "http://service/payments")
        response = httpx.Response(500, request=request, headers={"X-Executions": "2"}, text="Oh no.")
        return seen([response], status_is_201=False, has_a_location=True)

    @scenarios.scenario("422", rows=0)
    def raising(_: Shop) -> Seen:
        raise RuntimeError("no connection")

    found = [scenario.run(shop) for scenario in scenarios]
    (tmp_path / "worker.log").write_text("".join(f"line {number}\n" for number in range(100)))

    shown = failures(found, [tmp_path / "worker.log", tmp_path / "beat.log"]).splitlines()

    assert shown[1:9] == [
        "FAILED: broken",
        "  expected: 201, runs once",
        "  came: 500",
        "  not so: status is 201",
        "  not so: 1 more rows (there are 0)",
        "  POST /payments -> 500 [Content-Type: text/plain; charset=utf-8; X-Executions: 2] 'Oh no.'",
        "",
        "FAILED: raising",
    ]
    assert "  came: RuntimeError: no connection" in shown
    assert ["  line 60", "  line 99"] == [line for line in shown if line in ("  line 59", "  line 60", "  line 99")]
    assert shown[-2:] == ["The last lines of beat.log:", "  (there is no such file)"]


def test_what_waits_begins_after_the_first_scenario_and_its_rows_count(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of the first part are those of its own scenario. An exception there is its finding."""
    scenarios, played = Scenarios(needs_all=True), list[str]()
    shop: Any = SimpleNamespace(rows=lambda: len(played), wait_for_all=lambda: None)

    @scenarios.scenario("", rows=1)
    def first(_: Shop) -> Seen:
        played.append("first")
        return Seen("", "", {})

    @scenarios.scenario("", rows=1)
    def second(_: Shop) -> Seen:
        played.append("second")
        return Seen("", "", {})

    @scenarios.scenario("", rows=2)
    def waits(_: Shop) -> Parts:
        played.append("waits")
        yield
        played.append("ends")
        return Seen("", "", {})

    @scenarios.scenario("", rows=0)
    def raises(shop: Shop) -> Parts:
        if shop.rows():
            raise RuntimeError("no connection")
        yield
        return Seen("", "", {})

    findings = run(list(scenarios), shop)

    assert ["first", "waits", "second", "ends"] == played
    assert [True, True, True, False, True] == [finding.ok for finding in findings]
    assert "RuntimeError: no connection" == findings[3].responses
    assert "[ 3/4] waits:" in capsys.readouterr().out

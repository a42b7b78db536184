"""The benchmark of the Python client calls each library bare and with each thing that the client adds."""

from __future__ import annotations

from benchmarks import client


def test_each_case_is_timed_against_the_bare_library() -> None:
    rows = client.section(rounds=1, requests_each=2).rows

    assert [row.case for row in rows] == [
        f"{library}: {case}"
        for library in ("httpx", "requests")
        for case in (client.BARE, client.KEY, client.INTENT, client.LEDGER)
    ]
    assert all(float(row.cells["CPU"]) > 0 for row in rows)
    assert [float(row.cells["× bare"]) for row in rows if row.case.endswith(client.BARE)] == [1, 1]

"""Every check is made, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.operations.doctor import REACHABLE, Check, examine

FAULT, UNKNOWN, ADVICE, FINE = Verdict.FAULT, Verdict.UNKNOWN, Verdict.ADVICE, Verdict.FINE


def says(name: str, verdict: Verdict, *, asks_store: bool = False) -> Check:
    return Check(name, lambda: [Finding(name, verdict, "text")], asks_store=asks_store)


def fails(name: str, error: Exception) -> Check:
    def look() -> Iterable[Finding]:
        raise error

    return Check(name, look)


def there() -> None:
    """A store that answers."""


def away() -> None:
    raise StoreUnavailable("it is away")


def verdicts(findings: Iterable[Finding]) -> list[tuple[str, Verdict]]:
    return [(finding.check, finding.verdict) for finding in findings]


def test_the_worst_comes_first() -> None:
    """And what is equally bad in the order of the checks."""
    checks = [says("a", FINE), says("b", ADVICE), says("c", FAULT), says("d", UNKNOWN), says("e", FAULT)]

    found = examine(checks, reach=there)

    expected = [("c", FAULT), ("e", FAULT), ("d", UNKNOWN), ("b", ADVICE), (REACHABLE, FINE), ("a", FINE)]
    assert expected == verdicts(found.findings)


@pytest.mark.parametrize(("verdict", "in_order"), ((FINE, True), (ADVICE, True), (UNKNOWN, True), (FAULT, False)))
def test_only_a_fault_is_not_in_order(verdict: Verdict, in_order: bool) -> None:
    """Advice is none, and what cannot be looked at from here would be out of order on every managed server for ever."""
    found = examine([says("a", verdict)], reach=there)

    assert (in_order, True) == (found.in_order, found.complete)


def test_a_check_that_fails_is_unknown_and_hides_no_other() -> None:
    """By the class of its exception alone: its text may quote what nobody should read."""
    found = examine([fails("a", ZeroDivisionError("secret")), says("b", FAULT)], reach=there)

    assert [("b", FAULT), ("a", UNKNOWN), (REACHABLE, FINE)] == verdicts(found.findings)
    assert ("(ZeroDivisionError)" in found.findings[1].text, "secret" in str(found)) == (True, False)
    assert found.findings[1].remedy
    assert not found.complete


def test_what_is_set_up_wrong_is_a_fault_in_its_own_words() -> None:
    """They are ours, and name the remedy: tables that are missing, for one."""
    found = examine([fails("a", ConfigurationError("One. Do this.", "Two. Do that."))], reach=there)

    assert [("a", FAULT, "One. Do this."), ("a", FAULT, "Two. Do that.")] == [
        (each.check, each.verdict, each.text) for each in found.findings[:2]
    ]
    assert (True, False) == (found.complete, found.in_order)


def test_a_store_that_stops_answering_is_no_failure_of_the_check() -> None:
    found = examine([fails("a", StoreUnavailable("gone"))], reach=there)

    assert (False, True) == (found.complete, "the store did not answer" in found.findings[0].text)


def test_where_the_store_is_away_it_is_not_asked_again() -> None:
    """Each question would wait for its timeout. What needs no store is looked at all the same."""
    asked: list[str] = []

    def ask() -> Iterable[Finding]:
        asked.append("asked")
        return []

    found = examine([Check("a", ask, asks_store=True), says("b", ADVICE)], reach=away)

    assert [(REACHABLE, FAULT), ("a", UNKNOWN), ("b", ADVICE)] == verdicts(found.findings)
    assert ([], False) == (asked, found.complete)
    assert all(finding.remedy for finding in found.findings[:2])


def test_a_store_that_cannot_even_be_asked_is_away() -> None:
    """One of somebody's own may raise anything; its text is not ours to say."""

    def broken() -> None:
        raise OSError("postgresql://user:password@host")

    found = examine([], reach=broken)

    assert [(REACHABLE, FAULT)] == verdicts(found.findings)
    assert ("OSError" in found.findings[0].text, "password" in found.findings[0].text) == (True, False)

"""Whether the cache of answers answers, beside what the system says of itself."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.memory.admin import MemoryHealth
from flask_idempotency.stores.tiered import Missed, TieredStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from tests.stores.cached import completed


class Cache:
    """Says this to whoever looks."""

    def __init__(self, said: Record | Missed | Exception) -> None:
        self.said = said

    def get(self, key: StorageKey) -> Record | Missed:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def put(self, key: StorageKey, record: Record, *, missed_at: int) -> None:
        raise AssertionError("looking changes nothing")

    def forget(self, key: StorageKey) -> None:
        raise AssertionError("looking changes nothing")

    def invalidate(self, key: StorageKey, fence: int) -> bool:
        raise AssertionError("looking changes nothing")

    def erase(self, tid: bytes) -> bool:
        raise AssertionError("looking changes nothing")


@pytest.mark.parametrize(
    ("said", "verdict"),
    (
        pytest.param(Missed(at=5), Verdict.FINE, id="answers"),
        pytest.param(completed(FrozenClock()), Verdict.FINE, id="has something"),
        pytest.param(Missed(), Verdict.ADVICE, id="says nothing"),
        pytest.param(OSError("redis://:password@host"), Verdict.ADVICE, id="fails"),
    ),
)
def test_a_cache_that_is_away_is_advice(said: Record | Missed | Exception, verdict: Verdict) -> None:
    """No promise hangs on it, and the database does its work meanwhile."""
    [found] = TieredStore(FaultyStore(MemoryStore()), Cache(said)).health.findings()

    assert ("replays", verdict, verdict is not Verdict.FINE) == (found.check, found.verdict, bool(found.remedy))
    assert "password" not in found.text


def test_what_the_system_says_of_itself_comes_first() -> None:
    findings = TieredStore(MemoryStore(), Cache(Missed(at=5))).health.findings()

    assert [*MemoryHealth().findings()] == list(findings[:-1])
    assert "replays" == findings[-1].check

"""Which chores were done, and why there is nothing to clear out."""

from __future__ import annotations

from collections.abc import Mapping

from flask_idempotency.engine.capabilities import LONGEST_LOCK_SECONDS, Entry
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.server import Server, corrupt, whole_number


class RedisChores:
    """Implements `chores.ChoreBook`. A Redis that is full still writes it: what is done must be known then too."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def now(self) -> float:
        return self._server.now()

    def note(self, chore: str, report: str) -> None:
        self._server.run(scripts.NOTE, (layout.NOTES,), chore.encode(), report.encode())

    def last(self) -> Mapping[str, Entry]:
        now, told = self._server.run(scripts.NOTES, (layout.NOTES,))
        notes = dict(zip(told[::2], told[1::2], strict=True))
        return {_name(chore): _entry(note, now) for chore, note in notes.items()}

    def take(self, chore: str, token: bytes, *, lease: float) -> bool:
        longest = microseconds(LONGEST_LOCK_SECONDS)
        answer = self._server.run(scripts.TAKE, (layout.lock(chore),), token, microseconds(lease), longest)
        return bool(answer == b"TAKEN")

    def give_back(self, chore: str, token: bytes) -> None:
        self._server.run(scripts.GIVE_BACK, (layout.lock(chore),), token)


class RedisExpiry:
    """Implements `chores.Expiry`: there is never anything to remove."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        """0. Redis drops an answer by its time to live, a minute after its end, and a released key at once.

        Indexes hold only what is not completed. The buckets of a tenant's ledger that have ended are dropped by its next
        new key, and those of a tenant that has none any more by `reconcile`; until then nobody counts them.
        """
        return 0


def _entry(note: bytes, now: int) -> Entry:
    at, _, report = note.partition(b" ")
    try:
        return Entry(max(now - whole_number(at), 0) / 1_000_000, report.decode())
    except UnicodeDecodeError as error:
        raise corrupt() from error


def _name(chore: bytes) -> str:
    try:
        return chore.decode()
    except UnicodeDecodeError as error:
        raise corrupt() from error

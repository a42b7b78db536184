"""Give each claim what lets Redis notice a data loss, and remember each grant. `admin/data_loss.py` judges."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, TypeAlias

from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.model import ClaimRequest, Grant
from flask_idempotency.stores.redis import layout

AfterLoss: TypeAlias = Literal["refuse", "hold", "run"]


@dataclass(frozen=True, slots=True)
class RedisDataLossPolicy:
    """What happens to keys that a Redis does not know, after a data loss."""

    store_id: str | None = None
    """None: accept any store."""
    after_loss: AfterLoss = "refuse"
    grace: float = 60.0
    """Seconds in which surviving workers put their claims back before unknown keys may run again."""
    clock_skew: float | None = 5.0
    """Seconds by which clients' clocks may be wrong. A key made this much later than a data loss is a new key. None: do
    not trust the time in a key."""
    shards: int = 1

    @property
    def layout(self) -> str:
        """The numbers that decide where a record is. With others, the store would find no record."""
        return f"{layout.PARTITIONS}/{self.shards}"


class LastGrant:
    """The last fence that Redis granted to this process, for each partition, and the era of its last data loss."""

    def __init__(self) -> None:
        self._unlock()
        self._last: dict[int, tuple[int, int]] = {}
        after_fork(self._unlock)

    def _unlock(self) -> None:
        """Make the lock, also in a forked child: the thread that held it may exist only in the parent."""
        self._lock = Lock()

    def note(self, partition: int, *, era: int, fence: int) -> None:
        with self._lock:
            if (era, fence) > self._last.get(partition, (0, 0)):
                self._last[partition] = era, fence

    def is_missing(self, partition: int, *, era: int, fence: int) -> bool:
        """Return whether a partition with this era and fence lacks a grant. A later data loss explains a missing one."""
        with self._lock:
            granted = self._last.get(partition)
        return granted is not None and (era < granted[0] or (era == granted[0] and fence < granted[1]))


_granted: Final[dict[str, LastGrant]] = {}
"""By server. All stores of this process share them, also those of a second application."""


class DataLossWatch:
    """What a store knows of its Redis between two looks."""

    def __init__(self, client: Any, rules: RedisDataLossPolicy) -> None:
        self.rules = rules
        after = str(round(rules.grace * 1000)) if rules.after_loss == "hold" else rules.after_loss
        expected = rules.store_id or "", rules.layout, after, str(round((rules.clock_skew or 0) * 1000))
        self._expected = tuple(text.encode() for text in expected)
        self._of_unknown_age = *self._expected, b""
        self.last_grant: LastGrant = _granted.setdefault(address_of(client), LastGrant())
        self.next_look: float = float("inf")
        """When to look next whether Redis still flushes each write, by `time.monotonic`."""
        self.had_id: bool = False
        """Whether this Redis had the id of the store."""

    def arguments(self, key_timestamp: float | None) -> tuple[bytes, ...]:
        """Return the arguments by which a script judges an unknown key."""
        if key_timestamp is None or self.rules.clock_skew is None:
            return self._of_unknown_age
        return *self._expected, b"%d" % int(key_timestamp * 1000)

    def granted(self, request: ClaimRequest, grant: Grant) -> None:
        """Remember this grant: if Redis lacks it after a restart, the restart lost data."""
        self.last_grant.note(layout.number(request.key.tid), era=grant.era, fence=grant.fence)
        self.had_id = True


def address_of(client: Any) -> str:
    """Return the address of this client's server, without its password."""
    pool = getattr(client, "connection_pool", None)
    options = getattr(pool, "connection_kwargs", {})
    names = getattr(pool, "service_name", None), *(options.get(name) for name in ("host", "port", "path", "db"))
    return "/".join(map(str, names)) if any(names) else f"{type(client).__name__} {id(client)}"

"""Whether a Redis lost anything when it was restarted.

A restart loses nothing if every write was on the disk before Redis answered it, and if the files that Redis loaded are the
ones that the process before it wrote. No single fact proves this, so four are asked for:

1. A client saw that the process before wrote and flushed its append-only file before each answer, and had no replica. Each
   process that claims looks at this twice a minute, and so do `check`, `redis status`, `doctor` and the janitor's `reap`.
   Partition 0 keeps the last look.
2. The new process does the same since it started: one that was started without the file, and then told to write it, has
   loaded a snapshot.
3. The new process started soon after the last look. Files that are put back are older than that.
4. No fence is missing that this process was granted.

With one fact less, the restart is a loss that an operator acknowledges. docs/redis-memory.md names what remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.redis.server import Server

LOOK_SECONDS: Final = 30.0
"""Between two looks of one process. What an operator sets on the running server is seen after this time."""

DOWN_SECONDS: Final = 300.0
"""From the last look to the start of the new process: a reboot of the machine takes less, and a backup is older."""

_CLOCK_SECONDS: Final = 2.0
"""Redis tells how long it is up in whole seconds."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a Redis tells of its process."""

    process: str = ""
    """The process that loses nothing it has answered. Empty: it may lose something, or does not tell."""
    tells: bool = True
    since_start: bool = False
    """Whether it is so since this process started."""
    uptime: float = 0.0
    """In seconds."""
    later: bool = False
    """Whether a later look may prove more: its settings lose nothing, and something else stands in the way."""

    @property
    def stamp(self) -> bytes:
        """What look.lua is given."""
        return self.process.encode() if self.tells else b"?"


def restart_proof(server: Server) -> Proof:
    """Ask a single Redis how it writes to its disk. Raises `StoreUnavailable` if it cannot be asked.

    A node of a Cluster is not asked: its partitions may be moved to another one.
    """
    nodes = server.primaries()
    if len(nodes) != 1 or nodes[0][1] is not None:
        return Proof()
    client = server.client
    try:
        before = server.directly(client.info, "server")
        config = server.directly(client.config_get, "*append*")
        told = server.directly(client.info)
    except server.errors.unavailable as error:
        if server.errors.will_not_tell(error):
            return Proof(tells=False)
        raise StoreUnavailable(f"Redis cannot decide ({type(error).__name__})") from error
    process = str(told.get("run_id") or "")
    # One process answered all three: an id never comes back.
    if not process or before.get("run_id") != process or not (_flushes(config, told) and _is_alone(told)):
        return Proof(later=_is_set_up(config))
    return Proof(
        process, since_start=told.get("aof_last_rewrite_time_sec") == -1, uptime=float(told["uptime_in_seconds"])
    )


def _flushes(config: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Whether each write is on the disk before it is answered. A rewrite hides whether the file was off before it."""
    told_now = told.get("aof_enabled"), told.get("aof_rewrite_in_progress"), told.get("aof_rewrite_scheduled")
    writes = told.get("aof_last_write_status") == "ok" and told.get("loading") == 0
    return _is_set_up(config) and told_now == (1, 0, 0) and writes


def _is_set_up(config: Mapping[str, Any]) -> bool:
    rule = config.get("appendonly"), config.get("appendfsync"), config.get("no-appendfsync-on-rewrite")
    return rule == ("yes", "always", "no")


def _is_alone(told: Mapping[str, Any]) -> bool:
    """Whether it has no replica, had none in the last hour, and was none itself: a copy could start in its place."""
    copies = told.get("connected_slaves"), told.get("repl_backlog_active")
    return told.get("role") == "master" and copies == (0, 0) and not str(told.get("master_replid2")).strip("0")


class Granted:
    """The last fence that this process was granted in each partition, and how often memory had been lost before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[int, tuple[int, int]] = {}

    def note(self, partition: int, *, era: int, fence: int) -> None:
        with self._lock:
            if (era, fence) > self._last.get(partition, (0, 0)):
                self._last[partition] = era, fence

    def is_missing(self, partition: int, *, era: int, fence: int) -> bool:
        """Whether a partition that stands so has forgotten a grant. A loss that was noted after it explains that."""
        with self._lock:
            granted = self._last.get(partition)
        return granted is not None and (era < granted[0] or (era == granted[0] and fence < granted[1]))


_granted: dict[str, Granted] = {}
_lock = Lock()


def granted_in(server: str) -> Granted:
    """What this process was granted there, by all of its stores: an application that is made again has not forgotten."""
    with _lock:
        return _granted.setdefault(server, Granted())


def place(client: Any) -> str:
    """Where this client's server is, without its password."""
    pool = getattr(client, "connection_pool", None)
    told = getattr(pool, "connection_kwargs", {})
    names = getattr(pool, "service_name", None), *(told.get(name) for name in ("host", "port", "path", "db"))
    return "/".join(map(str, names)) if any(names) else f"{type(client).__name__} {id(client)}"


def started_soon_after(look: float, *, now: float, uptime: float) -> bool:
    """Whether the process that is up for so long started soon after this look. Not before: then a clock was set."""
    return -_CLOCK_SECONDS <= now - uptime - look <= DOWN_SECONDS

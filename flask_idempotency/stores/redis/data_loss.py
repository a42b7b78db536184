"""Whether a Redis still knows what it has promised.

In every partition stands who it is, how it is laid out, and which process keeps it. A partition that lacks this was
emptied; another process means a restart, a fail-over or an older copy, and with each of them what was written last may be
gone. Measured in research/correctness.md, section 3.

A restart loses nothing if every write was on the disk before Redis answered it, and if the files that Redis loaded are the
ones that the process before it wrote. No single fact proves this, so four are needed:

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

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from time import monotonic
from typing import Any, Final, Literal, TypeAlias

from flask_idempotency.engine.capabilities import RISK, DataLoss, DataLossStatus
from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import ClaimRequest, Grant
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import about_bytes
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor, corrupt, whole_number
from flask_idempotency.stores.redis.scripts import Script

LOOK_SECONDS: Final = 30.0
"""Between two looks of one process. What an operator sets on the running server is seen after this time."""

DOWN_SECONDS: Final = 300.0
"""From the last look to the start of the new process: a reboot of the machine takes less, and a backup is older."""

_CLOCK_SECONDS: Final = 2.0
"""Redis tells how long it is up in whole seconds."""


@dataclass(frozen=True, slots=True)
class RestartProof:
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
        """Argument 2 of `store_look.lua`."""
        return self.process.encode() if self.tells else b"?"


def restart_proof(server: ScriptExecutor) -> RestartProof:
    """Ask a single Redis how it writes to its disk. Raises `StoreUnavailable` if it cannot be asked.

    A node of a Cluster is not asked: its partitions may be moved to another one.
    """
    nodes = server.primaries()
    if len(nodes) != 1 or nodes[0][1] is not None:
        return RestartProof()
    client = server.client
    try:
        before = server.directly(client.info, "server")
        config = server.directly(client.config_get, "*append*")
        told = server.directly(client.info)
    except server.errors.unavailable as error:
        if server.errors.will_not_tell(error):
            return RestartProof(tells=False)
        raise StoreUnavailable(f"Redis cannot decide ({type(error).__name__})") from error
    process = str(told.get("run_id") or "")
    # One process answered all three: an id never comes back.
    if not process or before.get("run_id") != process or not (_flushes(config, told) and _is_alone(told)):
        return RestartProof(later=_is_set_up(config))
    return RestartProof(
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


class LastGrant:
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


_granted: dict[str, LastGrant] = {}
_lock = Lock()


def granted_in(server: str) -> LastGrant:
    """What this process was granted there, by all of its stores: an application that is made again has not forgotten."""
    with _lock:
        return _granted.setdefault(server, LastGrant())


def place(client: Any) -> str:
    """Where this client's server is, without its password."""
    pool = getattr(client, "connection_pool", None)
    told = getattr(pool, "connection_kwargs", {})
    names = getattr(pool, "service_name", None), *(told.get(name) for name in ("host", "port", "path", "db"))
    return "/".join(map(str, names)) if any(names) else f"{type(client).__name__} {id(client)}"


def started_soon_after(look: float, *, now: float, uptime: float) -> bool:
    """Whether the process that is up for so long started soon after this look. Not before: then a clock was set."""
    return -_CLOCK_SECONDS <= now - uptime - look <= DOWN_SECONDS


AfterLoss: TypeAlias = Literal["refuse", "hold", "run"]

FINE: Final = "fine"
UNNAMED: Final = "unnamed"
ACKNOWLEDGED: Final = "acknowledged"

_log = logging.getLogger("flask_idempotency")

_TEXTS: Final = {
    DataLoss.MISSING: "this Redis was emptied, or never made ready. If it is new, run `flask idempotency redis init`. If it "
    f"held keys, {RISK}",
    DataLoss.FOREIGN: "this Redis is another store than IDEMPOTENCY_STORE_ID names, or is laid out for another one",
    DataLoss.CHANGED: f"this Redis was restarted, failed over or restored, and may have forgotten this key; {RISK}",
}


@dataclass(frozen=True, slots=True)
class RedisDataLossPolicy:
    """What becomes of keys that a Redis does not know, after it has lost its memory."""

    store_id: str | None = None
    """None: any store will do."""
    after_loss: AfterLoss = "refuse"
    grace: float = 60.0
    """For how many seconds owners that survived may put their claims back before anybody lets unknown keys run again."""
    clock_skew: float | None = 5.0
    """How far clients' clocks may be off, in seconds: a key made later than a loss by more than this is not older. None:
    no key is believed."""
    shards: int = 1

    @property
    def layout(self) -> str:
        """How keys are laid out: another one would look for every record where it is not."""
        return f"{layout.PARTITIONS}/{self.shards}"


@dataclass(frozen=True, slots=True)
class _Part:
    """How one partition stands. Times in seconds."""

    now: float
    process: bytes
    store_id: str
    layout: str
    lost: float | None
    open: float | None
    noticed: bool
    fence: int
    doubted: str
    """The process that kept it before a restart that nobody has judged. Else empty."""


class RedisDataLoss:
    """Implements `memory.Memory`, and says for the store what a claim has to bring."""

    def __init__(self, server: ScriptExecutor, rules: RedisDataLossPolicy) -> None:
        self._server = server
        self.rules = rules
        after = str(round(rules.grace * 1000)) if rules.after_loss == "hold" else rules.after_loss
        told = rules.store_id or "", rules.layout, after, str(round((rules.clock_skew or 0) * 1000))
        self._expected = tuple(text.encode() for text in told)
        self._granted = granted_in(place(server.client))
        self._next_look = float("inf")

    def arguments(self, request: ClaimRequest) -> tuple[bytes | int, ...]:
        """What the claim of a key that is unknown is judged by."""
        born = None if self.rules.clock_skew is None else request.key_timestamp
        return *self._expected, b"" if born is None else int(born * 1000)

    def granted(self, request: ClaimRequest, grant: Grant) -> None:
        """Remember what this process was granted: a Redis that lacks it after a restart has lost something."""
        self._granted.note(layout.number(request.key.tid), era=grant.era, fence=grant.fence)

    def look(self) -> None:
        """Note whether this Redis still loses nothing, if the last look was some time ago. Never fails."""
        now = monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        with suppress(IdempotencyError):
            self._note(restart_proof(self._server))

    def look_soon(self) -> None:
        """Have the next claim look: Redis could not be asked so far."""
        if self.rules.after_loss != "run":
            self._next_look = 0.0

    def judge(self) -> None:
        """Accept a restart that lost nothing, or note a loss. Never fails: what was not judged stays in doubt."""
        with suppress(IdempotencyError):
            self._parts()

    def lost(self, loss: bytes, *, noticed: bool) -> StoreDataLoss:
        """Why a key was refused that is not known. The first to notice has all the other partitions looked at."""
        if noticed:
            # Each would count from its own first claim else, which may come days later. One that does not answer will.
            with suppress(IdempotencyError):
                self._parts()
        kind = DataLoss(loss.decode())
        return StoreDataLoss(_TEXTS[kind], loss=kind.value, noticed=noticed)

    def warn(self) -> None:
        """Log what keeps new keys from running, if anything does, in one line. Never fails: nobody is to be kept from
        starting by this."""
        if self.rules.after_loss == "run":
            return
        try:
            standing = self.status()
        except IdempotencyError as error:
            _log.warning("Redis does not tell what it remembers (%s)", type(error).__name__)
            self.look_soon()
            return
        if standing.gravest is not None and not standing.runs_unknown(self.rules.after_loss):
            _log.error("Requests with a new key get 503: %s.", _TEXTS[standing.gravest])

    def restore_claim(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        keys = layout.keys(request.key)
        answer = self._server.run(
            scripts.RESTORE_CLAIM,
            (*keys, layout.cancelled(keys, grant.token), layout.freed(request.key)),
            layout.name(keys),
            grant.token,
            grant.fence,
            grant.attempt,
            request.fingerprint,
            request.key.tid + about_bytes(request.info),
            microseconds(lease),
            round(age * 1_000_000),
            grant.era,
        )
        if answer not in (b"DONE", b"OTHER", b"REMEMBERED"):
            raise corrupt()
        return bool(answer == b"DONE")

    def status(self) -> DataLossStatus:
        return self._standing(self._parts())

    def _standing(self, parts: Sequence[_Part]) -> DataLossStatus:
        kinds = Counter(self._kind(part) for part in parts)
        ids = {part.store_id for part in parts if part.store_id}
        lost = [part.lost for part in parts if part.lost is not None and self._kind(part) != FINE]
        now, since = max(part.now for part in parts), max(lost, default=None)
        suffering = any(kinds[loss.value] for loss in DataLoss)
        return DataLossStatus(
            store_id=ids.pop() if len(ids) == 1 else None,
            parts=dict(kinds),
            since=since,
            now=now,
            may_be_acknowledged_at=(now if since is None else since + self.rules.grace) if suffering else None,
            notices_restarts=all(part.process for part in parts),
            noticed=any(part.noticed for part in parts),
            losses_so_far=tuple(part.lost for part in parts),
        )

    def initialise(self) -> str:
        parts = self._parts()
        ids = {part.store_id for part in parts}
        if len(ids) > 1:
            raise ConfigurationError(
                "A part of this Redis was made ready and another was not: it has lost its memory, unless somebody is making it "
                "ready at this moment. flask idempotency redis status says more."
            )
        found = ids.pop()
        chosen = found or self.rules.store_id or secrets.token_hex(8)
        if found:
            self._refuse_others(parts)
        else:
            chosen = self._named(scripts.STORE_INIT, chosen)
            told = set(self._everywhere(scripts.STORE_INIT, *self._all(chosen, self.rules.layout)))
            if told != {b"DONE"}:
                raise ConfigurationError(
                    "Somebody else has made this Redis ready at the same moment: look at its status."
                )
            # A restart that loses nothing may come before the next look.
            self.judge()
        return chosen

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        parts = self._parts()
        standing = self._standing(parts)
        self._refuse_others(parts)
        if seen is not None and seen.losses_so_far != standing.losses_so_far:
            raise ConfigurationError("This Redis has lost its memory once more since you looked: look at its status.")
        due = standing.may_be_acknowledged_at
        if due is not None and standing.now < due and not forced:
            raise ConfigurationError(
                f"Owners that survived have {due - standing.now:.0f} more seconds to put their claims back: wait for them, or "
                "--force and run twice what they are at."
            )
        if len({part.store_id for part in parts if part.store_id}) > 1:
            raise ConfigurationError(
                "Parts of this Redis are of different stores: nobody can tell which of them it is."
            )
        chosen = standing.store_id or self.rules.store_id or secrets.token_hex(8)
        lost = ["" if part.lost is None else str(round(part.lost * 1000)) for part in parts]
        if standing.store_id is None:
            chosen = self._named(scripts.STORE_ACKNOWLEDGE, chosen, lost)
        told = set(self._everywhere(scripts.STORE_ACKNOWLEDGE, *self._all(chosen, self.rules.layout), lost))
        if told != {b"DONE"}:
            raise ConfigurationError(
                "Parts of this Redis changed hands meanwhile, or are of another store: look at its status."
            )
        return standing

    def _all(self, *arguments: str) -> list[list[str]]:
        return [[text] * layout.PARTITIONS for text in arguments]

    def _refuse_others(self, parts: Sequence[_Part]) -> None:
        if any(self._kind(part) == DataLoss.FOREIGN.value for part in parts):
            told = sorted({printable(part.layout) for part in parts if part.layout} - {self.rules.layout})
            raise ConfigurationError(
                "This Redis was made ready for other settings: "
                + (
                    f"its layout is {', '.join(told)} and not {self.rules.layout}. "
                    if told
                    else "its id is another one. "
                )
                + "Point IDEMPOTENCY_STORE to the right Redis, or set IDEMPOTENCY_STORE_ID and IDEMPOTENCY_TENANT_SHARDS "
                "to what it was made for."
            )

    def _kind(self, part: _Part) -> str:
        if not part.store_id:
            return DataLoss.MISSING.value
        if part.layout != self.rules.layout or self.rules.store_id not in (None, part.store_id):
            return DataLoss.FOREIGN.value
        if part.lost is None:
            return FINE
        if part.open is not None and part.open >= part.lost:
            return ACKNOWLEDGED
        return DataLoss.CHANGED.value

    def _parts(self) -> list[_Part]:
        proof = restart_proof(self._server)
        parts = self._noticed(proof)
        if any(part.doubted for part in parts):
            parts = self._noticed(proof, *self._verdict(parts, proof))
            if any(part.doubted for part in parts):
                raise StoreUnavailable("Redis restarted while it was asked what it remembers")
        self._note(proof)
        if self.rules.after_loss == "run" and self.rules.store_id is None:
            return parts
        # Some process ran what it did not know, and named what it found empty as it had to.
        return [replace(part, store_id="") if part.store_id == UNNAMED else part for part in parts]

    def _noticed(self, proof: RestartProof, verdict: str = "", before: str = "") -> list[_Part]:
        return [
            _part(told) for told in self._everywhere(scripts.STORE_STATUS, *self._all(proof.process, verdict, before))
        ]

    def _verdict(self, parts: Sequence[_Part], proof: RestartProof) -> tuple[str, str]:
        """Whether a restart lost nothing, and which process was there before it. See lossless.py."""
        now, look = self._server.run(scripts.STORE_LOOK, (layout.memory_in(0),), b"?")
        milliseconds, _, told = look.partition(b" ")
        before = told.decode("utf-8", "replace")
        whole = (
            proof.since_start
            and before not in ("", proof.process)
            and started_soon_after(whole_number(milliseconds) / 1000, now=now / 1_000_000, uptime=proof.uptime)
            and all(part.doubted in ("", before) for part in parts)
            # Redis writes one file, in one order: what is lost of one part may be lost of all.
            and all(self._kind(part) in (FINE, ACKNOWLEDGED) for part in parts)
            and not any(
                self._granted.is_missing(at, era=round((part.lost or 0) * 1000), fence=part.fence)
                for at, part in enumerate(parts)
            )
        )
        return ("whole" if whole else "lost"), before

    def _note(self, proof: RestartProof) -> None:
        self._server.run(scripts.STORE_LOOK, (layout.memory_in(0),), proof.stamp)
        # Redis begins a rewrite of its file by itself: a look that falls into it is not the last one.
        again = proof.process or proof.later
        self._next_look = monotonic() + LOOK_SECONDS if again else float("inf")

    def _everywhere(self, script: Script, *arguments: Sequence[str]) -> list[Any]:
        """What this script returns of every partition: each is given its own of these arguments, in their order."""
        # In one round trip to each node: where one does not answer, the others have been asked.
        return self._server.run_all(
            script,
            [
                Call((layout.memory_in(each),), [values[each].encode() for values in arguments])
                for each in range(layout.PARTITIONS)
            ],
        )

    def _named(self, script: Script, store_id: str, *arguments: Sequence[str]) -> str:
        """Give one part this name, before all others have theirs. Of two who do this at once the second takes the first
        one's name."""
        rest = [values[0].encode() for values in arguments]
        self._server.run(script, (layout.memory_in(0),), store_id.encode(), self.rules.layout.encode(), *rest)
        name = _part(self._server.run(scripts.STORE_STATUS, (layout.memory_in(0),))).store_id
        return name if name not in ("", UNNAMED) else store_id


def _part(answer: Sequence[Any]) -> _Part:
    now, process, store_id, laid_out, lost, opened, noticed, fence, doubted = answer
    return _Part(
        int(now) / 1_000_000,
        process,
        store_id.decode("utf-8", "replace"),
        laid_out.decode("utf-8", "replace"),
        whole_number(lost) / 1000 if lost else None,
        whole_number(opened) / 1000 if opened else None,
        bool(noticed),
        whole_number(fence) if fence.isdigit() else 0,
        doubted.decode("utf-8", "replace"),
    )

"""Detect that a Redis has lost records, and decide what happens to keys that it does not know.

Each partition holds the store's id, its layout and the Redis process. Without them, the partition was emptied. Another
process means a restart, a fail-over or an older copy, and each may lose the last writes.
`docs/how-it-works/data-loss.md` says what each deployment of Redis may lose.

A restart loses no record if Redis flushed each write before its reply, and loaded the files of the process before it.
No single fact proves this, so four are needed:

1. A client saw that the earlier process flushed its append-only file before each reply, and had no replica. Each process
   that claims looks twice a minute, and so do `check`, `redis status`, `doctor` and the janitor's `reap`. Partition 0
   keeps the last look.
2. The new process has done the same since its start. If the file was switched on later, Redis has loaded a snapshot.
3. The new process started soon after the last look. Files from a backup are older than that.
4. Redis has every fence that it granted to this process.

If one fact is missing, the restart counts as a data loss, which an operator acknowledges.
docs/how-it-works/data-loss.md names what this cannot detect.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from flask_idempotency.engine.errors import (
    ConfigurationError,
    IdempotencyError,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import RISK, ClaimRequest, DataLoss, DataLossStatus, Grant, Record
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.data_loss import DataLossWatch, RedisDataLossPolicy
from flask_idempotency.stores.redis.encoding import about_bytes
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor, corrupt, whole_number
from flask_idempotency.stores.redis.scripts import Script

LOOK_SECONDS: Final = 30.0
"""The time between two looks of one process. So it takes this long to see a change by CONFIG SET."""

DOWN_SECONDS: Final = 300.0
"""The longest time from the last look to a start: a reboot takes less, and a backup is older."""

_CLOCK_SECONDS: Final = 2.0
"""Redis reports its uptime in whole seconds."""


@valueclass(frozen=True, slots=True)
class RestartProof:
    """What INFO and CONFIG GET show of the Redis process."""

    process: str = ""
    """The id of a process that flushes each write before its reply. Empty: it may lose writes, or the ACL hides this."""
    visible: bool = True
    """False if the ACL hides INFO or CONFIG GET."""
    since_start: bool = False
    """Whether the process has flushed each write since its start."""
    uptime: float = 0.0
    """In seconds."""
    later: bool = False
    """Whether a later look may prove more: the settings are right, but a rewrite or a replica is in the way."""


def restart_proof(server: ScriptExecutor) -> RestartProof:
    """Find out whether a single Redis flushes each write. Raises `StoreUnavailable` if it does not answer.

    The result is empty for a Cluster, because a partition may move to another node.
    """
    nodes = server.primaries()
    if len(nodes) != 1 or nodes[0][1] is not None:
        return RestartProof()
    client = server.client
    try:
        before = server.directly(client.info, "server")
        config = server.directly(client.config_get, "*append*")
        info = server.directly(client.info)
    except server.errors.unavailable as error:
        if server.errors.is_refusal(error):
            return RestartProof(visible=False)
        raise StoreUnavailable(f"Redis cannot decide ({cause_of(error)})") from error
    rule = config.get("appendonly"), config.get("appendfsync"), config.get("no-appendfsync-on-rewrite")
    is_set_up = rule == ("yes", "always", "no")
    # A rewrite hides whether the file was off before it.
    file = info.get("aof_enabled"), info.get("aof_rewrite_in_progress"), info.get("aof_rewrite_scheduled")
    writes = info.get("aof_last_write_status"), info.get("loading")
    # It has no replica, had none in the last hour, and was none: a copy could start in its place.
    copies = info.get("role"), info.get("connected_slaves"), info.get("repl_backlog_active")
    is_alone = copies == ("master", 0, 0) and not str(info.get("master_replid2")).strip("0")
    process = str(info.get("run_id") or "")
    # One process sent all three replies, because Redis never uses an id again.
    is_one = process and before.get("run_id") == process
    if not (is_one and is_set_up and is_alone and (file, writes) == ((1, 0, 0), ("ok", 0))):
        return RestartProof(later=is_set_up)
    return RestartProof(
        process, since_start=info.get("aof_last_rewrite_time_sec") == -1, uptime=float(info["uptime_in_seconds"])
    )


FINE: Final = "fine"
UNNAMED: Final = "unnamed"
ACKNOWLEDGED: Final = "acknowledged"

_log = logging.getLogger("flask_idempotency")

_TEXTS: Final = {
    DataLoss.MISSING: f"this Redis is empty. If it held keys before, {RISK}. Only if it is new, run `flask idempotency "
    "redis init`",
    DataLoss.FOREIGN: "this Redis has another id than IDEMPOTENCY_STORE_ID, or another layout",
    DataLoss.CHANGED: f"this Redis was restarted, failed over or restored, and may have lost this key; {RISK}",
}

_EMPTIED: Final = f"This Redis held keys before, and a process noticed that it was emptied: {RISK}."


@valueclass(frozen=True, slots=True)
class _Part:
    """The facts of one partition. Times in seconds."""

    now: float
    process: bytes
    store_id: str
    layout: str
    lost: float | None
    acknowledged: float | None
    noticed: bool
    fence: int
    doubted: str
    """The process before a restart that no client has judged yet. Otherwise empty."""
    emptied: bool
    """Whether a process that had seen the store's id found the partition without it."""


class RedisDataLoss:
    """Implement `capabilities.DataLossDetector`."""

    def __init__(self, server: ScriptExecutor, watch: DataLossWatch, refuse_eviction: Callable[[], object]) -> None:
        """`refuse_eviction` raises `StoreUnavailable` while Redis may evict records, as before a claim."""
        self._server = server
        self._watch = watch
        self._refuse_eviction = refuse_eviction
        self.rules: RedisDataLossPolicy = watch.rules
        self._next_mark = 0.0

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, record: Record | None = None) -> bool:
        self._refuse_eviction()
        keys, arguments = (layout.facts_in(layout.number(key.tid)),), self._watch.arguments(key_timestamp)
        kind, fence_at_loss = self._server.run(scripts.STORE_CHECK, keys, *arguments)
        if kind == b"doubt":
            self.judge()
            kind, fence_at_loss = self._server.run(scripts.STORE_CHECK, keys, *arguments)
        # As in claim.lua: a claim from after the loss is taken over, also before an operator acknowledges the loss.
        since_loss = record is not None and (
            self.rules.after_loss == "run" or record.fence > whole_number(fence_at_loss)
        )
        if kind and not (kind == b"changed" and record is not None):
            loss = DataLoss.CHANGED if kind == b"doubt" else DataLoss(kind.decode())
            raise StoreDataLoss(_TEXTS[loss], loss=loss.value)
        return record is None or since_loss

    def look(self) -> None:
        """Record whether Redis still flushes each write. Never raises."""
        self._watch.next_look = monotonic() + LOOK_SECONDS
        with suppress(IdempotencyError):
            self._note(restart_proof(self._server))

    def look_soon(self) -> None:
        """Let the next claim look, because Redis has not answered so far."""
        self._watch.next_look = 0.0

    def judge(self) -> None:
        """Accept a restart that lost no data, or record a data loss. Never raises: a failed attempt changes no verdict."""
        with suppress(IdempotencyError):
            self._parts()

    def lost(self, loss: bytes, *, noticed: bool) -> StoreDataLoss:
        """Return why the store refused an unknown key. The first client that detects a loss checks all partitions.

        A client that has seen the store's id also marks an empty Redis as emptied: `redis init` cannot tell it from a new one.
        """
        kind = DataLoss(loss.decode())
        if noticed or (kind is DataLoss.MISSING and self._watch.had_id and monotonic() >= self._next_mark):
            # Otherwise the grace of each partition would begin at its first claim, which may come days later.
            with suppress(IdempotencyError):
                self._parts()
        return StoreDataLoss(_TEXTS[kind], loss=kind.value, noticed=noticed)

    def warn(self) -> None:
        """Log one line if a data loss keeps new keys from running. Never raises, so that the application starts."""
        try:
            status = self.status()
        except IdempotencyError as error:
            _log.warning("Cannot check Redis for data loss (%s)", cause_of(error))
            self.look_soon()
            return
        if status.gravest is not None and not status.runs_unknown(self.rules.after_loss):
            _log.error("Requests with a new key get 503: %s.", _TEXTS[status.gravest])

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
        return self._status(self._parts())

    def _status(self, parts: Sequence[_Part]) -> DataLossStatus:
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
            emptied=any(part.emptied and not part.store_id for part in parts),
        )

    def initialise(self) -> str:
        parts = self._parts()
        ids = {part.store_id for part in parts}
        if len(ids) > 1:
            raise ConfigurationError(
                "Some partitions of this Redis are initialised and others are not: it has lost data, unless another "
                "`redis init` runs now. Run flask idempotency redis status."
            )
        found = ids.pop()
        chosen = found or self.rules.store_id or secrets.token_hex(8)
        if found:
            self._refuse_others(parts)
        else:
            if any(part.emptied for part in parts):
                raise ConfigurationError(_EMPTIED)
            chosen = self._named(scripts.STORE_INIT, chosen)
            results = set(self._everywhere(scripts.STORE_INIT, chosen, self.rules.layout))
            if b"EMPTIED" in results:
                raise ConfigurationError(_EMPTIED)
            if results != {b"DONE"}:
                raise ConfigurationError(
                    "Another client initialised this Redis at the same time. Run flask idempotency redis status."
                )
            # Look now: Redis may restart, without a loss, before the next look.
            self.judge()
        return chosen

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        parts = self._parts()
        status = self._status(parts)
        self._refuse_others(parts)
        if seen is not None and seen.losses_so_far != status.losses_so_far:
            raise ConfigurationError(
                "This Redis has lost data again since you looked. Run flask idempotency redis status."
            )
        due = status.may_be_acknowledged_at
        if due is not None and status.now < due and not forced:
            raise ConfigurationError(
                f"Surviving workers have {due - status.now:.0f} more seconds to put their claims back. Wait, or use --force: "
                "then their requests may run twice."
            )
        if len({part.store_id for part in parts if part.store_id}) > 1:
            raise ConfigurationError("Partitions of this Redis have the ids of different stores.")
        chosen = status.store_id or self.rules.store_id or secrets.token_hex(8)
        lost = ["" if part.lost is None else str(round(part.lost * 1000)) for part in parts]
        if status.store_id is None:
            chosen = self._named(scripts.STORE_ACKNOWLEDGE, chosen, lost)
        results = set(self._everywhere(scripts.STORE_ACKNOWLEDGE, chosen, self.rules.layout, lost))
        if results != {b"DONE"}:
            raise ConfigurationError(
                "Partitions of this Redis changed during the acknowledgement, or belong to another store. Run flask "
                "idempotency redis status."
            )
        return status

    def _refuse_others(self, parts: Sequence[_Part]) -> None:
        if any(self._kind(part) == DataLoss.FOREIGN.value for part in parts):
            others = sorted({printable(part.layout) for part in parts if part.layout} - {self.rules.layout})
            difference = (
                f"its layout is {', '.join(others)} and not {self.rules.layout}" if others else "its id differs"
            )
            raise ConfigurationError(
                f"This Redis was initialised with other settings: {difference}. Point IDEMPOTENCY_STORE to the right Redis, "
                "or set IDEMPOTENCY_STORE_ID and IDEMPOTENCY_TENANT_SHARDS to its values."
            )

    def _kind(self, part: _Part) -> str:
        if not part.store_id:
            return DataLoss.MISSING.value
        if part.layout != self.rules.layout or self.rules.store_id not in (None, part.store_id):
            return DataLoss.FOREIGN.value
        if part.lost is None:
            return FINE
        if part.acknowledged is not None and part.acknowledged >= part.lost:
            return ACKNOWLEDGED
        return DataLoss.CHANGED.value

    def _parts(self) -> list[_Part]:
        proof = restart_proof(self._server)
        parts = self._noticed(proof)
        if any(part.doubted for part in parts):
            parts = self._noticed(proof, *self._verdict(parts, proof))
            if any(part.doubted for part in parts):
                raise StoreUnavailable("Redis restarted during the check for data loss")
        self._note(proof)
        if self.rules.after_loss == "run" and self.rules.store_id is None:
            return parts
        # A process with `after_loss="run"` wrote the placeholder id, because it found the partition empty.
        parts = [replace(part, store_id="") if part.store_id == UNNAMED else part for part in parts]
        if any(self._kind(part) not in (DataLoss.MISSING.value, DataLoss.FOREIGN.value) for part in parts):
            self._watch.had_id = True
        if any(part.emptied for part in parts):
            self._next_mark = monotonic() + LOOK_SECONDS
        return parts

    def _noticed(self, proof: RestartProof, verdict: str = "", before: str = "") -> list[_Part]:
        known = "1" if self._watch.had_id and self.rules.after_loss != "run" else ""
        return [_part(reply) for reply in self._everywhere(scripts.STORE_STATUS, proof.process, verdict, before, known)]

    def _verdict(self, parts: Sequence[_Part], proof: RestartProof) -> tuple[str, str]:
        """Return whether the restart lost no data, by the four facts above, and the process before it."""
        now, look = self._server.run(scripts.STORE_LOOK, (layout.facts_in(0),), b"?")
        milliseconds, _, process = look.partition(b" ")
        before = process.decode("utf-8", "replace")
        whole = (
            proof.since_start
            and before not in ("", proof.process)
            # A start before the look means that a clock was set.
            and -_CLOCK_SECONDS <= now / 1_000_000 - proof.uptime - whole_number(milliseconds) / 1000 <= DOWN_SECONDS
            and all(part.doubted in ("", before) for part in parts)
            # Redis writes one file in one order: if one partition lost data, all may have.
            and all(self._kind(part) in (FINE, ACKNOWLEDGED) for part in parts)
            and not any(
                self._watch.last_grant.is_missing(at, era=round((part.lost or 0) * 1000), fence=part.fence)
                for at, part in enumerate(parts)
            )
        )
        return ("whole" if whole else "lost"), before

    def _note(self, proof: RestartProof) -> None:
        self._server.run(scripts.STORE_LOOK, (layout.facts_in(0),), proof.process.encode() if proof.visible else b"?")
        # Redis starts rewrites of its file itself. Look again later if this look fell into one.
        again = proof.process or proof.later
        self._watch.next_look = monotonic() + LOOK_SECONDS if again else float("inf")

    def _everywhere(self, script: Script, *arguments: str | list[str]) -> list[Any]:
        """Run this script on each partition, and return the results in their order. A list has a value for each partition."""
        # One round trip to each node: if one does not answer, the others have still run the script.
        texts = [[each] * layout.PARTITIONS if isinstance(each, str) else each for each in arguments]
        return self._server.run_all(
            script,
            [
                Call((layout.facts_in(each),), [values[each].encode() for values in texts])
                for each in range(layout.PARTITIONS)
            ],
        )

    def _named(self, script: Script, store_id: str, *arguments: Sequence[str]) -> str:
        """Write the id to partition 0 first, and return the id there: of two clients, the second gets the first one's."""
        rest = [values[0].encode() for values in arguments]
        result = self._server.run(script, (layout.facts_in(0),), store_id.encode(), self.rules.layout.encode(), *rest)
        if result == b"EMPTIED":
            raise ConfigurationError(_EMPTIED)
        name = _part(self._server.run(scripts.STORE_STATUS, (layout.facts_in(0),))).store_id
        return name if name not in ("", UNNAMED) else store_id


def _part(answer: Sequence[Any]) -> _Part:
    now, process, store_id, laid_out, lost, acknowledged, noticed, fence, doubted, emptied = answer
    return _Part(
        int(now) / 1_000_000,
        process,
        store_id.decode("utf-8", "replace"),
        laid_out.decode("utf-8", "replace"),
        whole_number(lost) / 1000 if lost else None,
        whole_number(acknowledged) / 1000 if acknowledged else None,
        bool(noticed),
        whole_number(fence) if fence.isdigit() else 0,
        doubted.decode("utf-8", "replace"),
        bool(emptied),
    )

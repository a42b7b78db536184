"""Check for `doctor` whether this Redis is set up to keep records."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores.redis.eviction import REMEDY, evicts
from flask_idempotency.stores.redis.executor import RedisCapability

Said: TypeAlias = tuple[Verdict, *tuple[str, ...]]
"""What a check has found: all of a `Finding` but its name."""

NEARLY_FULL: Final = 0.8
FULL: Final = 0.95
"""Shares of the memory limit. Above them, a burst of claims or a fork for a snapshot may exceed the limit."""

LAG_SECONDS: Final = 10
"""A replica reports once a second."""

SAMPLED: Final = 1000
"""Keys: less than a millisecond of the server's time."""

_OURS: Final = re.compile(rb"^idm\d|^_kombu|^unacked|celery|^idempotency")
"""Records, and what Celery keeps where the store is the broker of the janitor. Neither empties a database."""

_WRITES: Final = {
    "rdb_last_bgsave_status": "its last snapshot",
    "aof_last_bgrewrite_status": "the last rewriting of its append-only file",
    "aof_last_write_status": "the last write to its append-only file",
}
_ORDER: Final = list(Verdict)
_GRANT: Final = (
    "Allow its user to read it, with ACL SETUSER … +info +config|get +scan, or check it by hand: see "
    "docs/guides/redis.md."
)


@valueclass(frozen=True, slots=True)
class _Look:
    """INFO and CONFIG GET of one server. Empty if its ACL refuses them."""

    info: Mapping[str, Any]
    config: Mapping[str, str]
    others: int | None
    """Of `SAMPLED` keys or fewer: how many belong to another program. None: its ACL refuses to say."""


class RedisHealth(RedisCapability):
    """Implement `capabilities.Health`. In a Cluster, check every primary and return the worst finding of each check."""

    def findings(self) -> Sequence[Finding]:
        looks = [self._look(node) for _, node in self._server.primaries()]
        checks: dict[str, Callable[[_Look], Said]] = {
            "eviction": _eviction,
            "persistence": _persistence,
            "persistence-errors": _errors,
            "memory": _memory,
            "replication": partial(_replication, awaited=self._server.replicas),
            "shared": _shared,
        }
        worst = list[Finding]()
        for name, check in checks.items():
            found = max((Finding(name, *check(look)) for look in looks), key=lambda each: _ORDER.index(each.verdict))
            if len(looks) > 1 and found.verdict is not Verdict.FINE:
                found = replace(found, text=f"On at least one of {len(looks)} primaries: {found.text}")
            worst.append(found)
        return worst

    def _look(self, node: Any) -> _Look:
        info = self._read(node, self._server.client.info)
        try:
            _, keys = self._server.scan(0, b"*", SAMPLED, node=node)
            others = sum(1 for key in keys if not _OURS.search(key))
        except (StoreUnavailable, ConfigurationError) as error:
            if not isinstance(cause := error.__cause__, Exception) or not self._server.errors.is_refusal(cause):
                raise
            others = None
        return _Look(info, self._read(node, self._server.client.config_get, "appendfsync"), others)

    def _read(self, node: Any, command: Callable[..., Any], *arguments: str) -> Mapping[str, Any]:
        errors = self._server.errors
        try:
            reply: Mapping[str, Any] = self._server.directly(command, *arguments, node=node)
        except errors.unavailable as error:
            if errors.is_refusal(error):
                return {}
            raise StoreUnavailable(f"cannot read INFO from Redis ({cause_of(error)})") from error
        return reply


def _eviction(look: _Look) -> Said:
    policy = look.info.get("maxmemory_policy")
    if policy is None:
        return _unknown("whether it may evict records")
    if policy != "noeviction":
        return Verdict.FAULT, evicts(policy), REMEDY
    return Verdict.FINE, "It never evicts a record."


def _persistence(look: _Look) -> Said:
    if "aof_enabled" not in look.info:
        return _unknown("whether it writes records to its disk")
    if not look.info["aof_enabled"]:
        return (
            Verdict.FAULT,
            "Its append-only file is off: a restart loses all records since its last snapshot, or all records. Those requests "
            "may run again.",
            "Set appendonly to yes, first with CONFIG SET, then in its configuration file.",
        )
    match look.config.get("appendfsync"):
        case None:
            return _unknown("how often its append-only file is written to its disk")
        case "always":
            return Verdict.FINE, "It writes every record to its disk before it answers."
        case "everysec":
            return (
                Verdict.ADVICE,
                "A crash of its machine may lose the records of the last two seconds. Those requests may run again.",
                "Set appendfsync to always, if such a loss costs more than slower writes.",
            )
        case _:
            return (
                Verdict.FAULT,
                "Its operating system decides when to write its append-only file to its disk: a crash may lose the records "
                "of half a minute. Those requests may run again.",
                "Set appendfsync to always, or to everysec.",
            )


def _errors(look: _Look) -> Said:
    statuses = {name: look.info[name] for name in _WRITES if name in look.info}
    failed = [_WRITES[name] for name, status in statuses.items() if status != "ok"]
    if failed:
        return (
            Verdict.FAULT,
            f"It could not write to its disk: {' and '.join(failed)} failed.",
            "Read its log. Check that its disk has space, and that Redis may write there.",
        )
    if not statuses:
        return _unknown("whether its last writes to its disk succeeded")
    return Verdict.FINE, "Its last writes to its disk succeeded."


def _memory(look: _Look) -> Said:
    used = look.info.get("used_memory")
    most = look.info.get("maxmemory") or look.info.get("total_system_memory")
    if used is None or not most:
        return _unknown("how much memory it has left")
    share = used / most
    text = f"It uses {min(share, 1):.0%} of the memory that it may use."
    if share < NEARLY_FULL:
        return Verdict.FINE, text
    remedy = (
        "Raise maxmemory, or add memory; or lower IDEMPOTENCY_KEEP and set IDEMPOTENCY_REMEMBER to what it was: responses go, "
        "and their keys stay refused. If it is full, requests with new keys get 503."
    )
    return Verdict.ADVICE if share < FULL else Verdict.FAULT, text, remedy


def _replication(look: _Look, *, awaited: int) -> Said:
    match look.info.get("role"):
        case None:
            return _unknown("whether it has replicas, and how far behind they are")
        case "slave":
            return (
                Verdict.FAULT,
                "It is a replica: it grants no claims, and its records may be out of date.",
                "Set IDEMPOTENCY_STORE to the primary, or to a client that follows it.",
            )
    slaves = (look.info.get(f"slave{number}") for number in range(int(look.info.get("connected_slaves", 0))))
    replicas = [each for each in slaves if isinstance(each, Mapping)]
    if len(replicas) < awaited:
        return (
            Verdict.FAULT,
            f"New keys get 503: claims wait for {awaited} replicas, and it has {len(replicas)}.",
            "Restart the missing replicas. With a smaller IDEMPOTENCY_REPLICAS, a fail-over may lose records.",
        )
    behind = [each for each in replicas if each.get("state") != "online" or int(each.get("lag", 0)) > LAG_SECONDS]
    if behind:
        return (
            Verdict.ADVICE,
            f"{len(behind)} of its {len(replicas)} replicas are behind: a fail-over to one loses the records that it lacks. "
            "Those requests may run again.",
            "Check the logs of these replicas, and the network to them.",
        )
    if len(replicas) > awaited:
        text = (
            f"Claims wait for {awaited} of its {len(replicas)} replicas: a fail-over to another one may lose records. Those "
            "requests may run again."
        )
        remedy = f"Set IDEMPOTENCY_REPLICAS to {len(replicas)}, if such a loss costs more than slower requests."
        # INFO has this field only if both min-replicas-to-write and min-replicas-max-lag are set.
        if "min_slaves_good_slaves" not in look.info:
            text += " It also accepts writes while no replica receives them."
            remedy += " At least set min-replicas-to-write to 1 or more, and min-replicas-max-lag to a few seconds."
        return Verdict.ADVICE, text, remedy
    return Verdict.FINE, "Its replicas keep up." if replicas else "It has no replicas."


def _shared(look: _Look) -> Said:
    if look.others is None:
        return _unknown("whether it holds keys of other programs")
    if not look.others:
        return Verdict.FINE, "It holds no key of another program, as far as a sample shows."
    return (
        Verdict.ADVICE,
        f"Its database holds keys of other programs, {look.others} in a sample. If one of them empties it, as `cache.clear()` "
        "of Flask-Caching may, every new key gets 503 until you acknowledge the loss.",
        "Give the other program a Redis of its own, or at least another database (another number at the end of its URL). Do "
        "not move these records: another database knows no key, and retries would run again.",
    )


def _unknown(what: str) -> Said:
    return Verdict.UNKNOWN, f"This Redis does not show {what}.", _GRANT

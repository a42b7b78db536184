"""Whether this Redis may evict records. The store grants no claim on one that may."""

from __future__ import annotations

import logging
from typing import Any, Final

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.stores.redis.connection import NoCluster, primaries
from flask_idempotency.stores.redis.executor import ScriptExecutor

REMEDY: Final = "Set maxmemory-policy to noeviction. Give a cache that needs another policy a Redis of its own."

_log = logging.getLogger("flask_idempotency")


class Eviction:
    """Check maxmemory-policy until Redis has once returned noeviction or refused to show it. Check all primaries.

    It does not detect a later change of the policy, nor another policy after a fail-over: that would take a round trip
    per claim.
    """

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._errors = server.errors
        self._reported = False
        self._is_cluster_node = False
        self.possible: bool = True
        """True until a check has found that Redis does not evict."""

    def refuse_to_start(self) -> None:
        """Raise `ConfigurationError` if Redis evicts, or if the URL names a Cluster for a single server or the reverse.

        If Redis does not answer, log a warning instead.
        """
        try:
            policy = self._evicting_policy()
        except NoCluster:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE: redis+cluster:// names a Redis that is not part of a Cluster. Write redis://host:6379/0."
            ) from None
        except self._errors.unavailable as error:
            _log.warning("Redis does not answer (%s): requests with a key get 503 until it does", cause_of(error))
            return
        if self._is_cluster_node:
            # It would serve its own slots, and refuse all other keys for ever.
            raise ConfigurationError(
                "IDEMPOTENCY_STORE: this Redis is part of a Cluster. Write redis+cluster://host:6379, or pass a "
                "redis.RedisCluster."
            )
        if policy is not None:
            raise ConfigurationError(f"IDEMPOTENCY_STORE: {evicts(policy)} {REMEDY}")

    def refuse_claims(self) -> None:
        """Raise `StoreUnavailable` while Redis evicts or does not answer. Log an evicting Redis once."""
        if not self.possible:
            return
        try:
            policy = self._evicting_policy()
        except self._errors.unavailable as error:
            raise StoreUnavailable(f"cannot read maxmemory-policy from Redis ({cause_of(error)})") from error
        if policy is None:
            return
        if not self._reported:
            self._reported = True
            _log.error("Requests with a key get 503: %s %s", evicts(policy), REMEDY)
        raise StoreUnavailable(f"this Redis evicts: it has maxmemory-policy {policy}")

    def _evicting_policy(self) -> str | None:
        client, policies = self._server.client, list[Any]()
        for _, node in primaries(client):
            try:
                info = self._server.directly(client.info, node=node)
            except self._errors.refused as error:
                if not self._errors.is_refusal(error):
                    raise
                policies.append(None)
            else:
                self._is_cluster_node = node is None and info.get("cluster_enabled") == 1
                policies.append(info.get("maxmemory_policy"))
        if None in policies:
            _log.warning("Redis does not show its maxmemory-policy: make sure that it is noeviction")
        evicting = [str(policy) for policy in policies if policy not in (None, "noeviction")]
        self.possible = bool(evicting)
        return evicting[0] if evicting else None


def evicts(policy: str) -> str:
    """Return the sentence that explains the fault of this policy."""
    return f"Redis has maxmemory-policy {policy}: it may evict the record of a payment, which then runs again."

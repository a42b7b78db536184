"""Whether this Redis may forget records to make room. Nobody may claim on one that does."""

from __future__ import annotations

import logging
from typing import Any, Final

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.redis.server import Server
from flask_idempotency.stores.redis.topology import NoCluster, primaries

REMEDY: Final = "Set maxmemory-policy to noeviction, or use a Redis of its own for this."

_log = logging.getLogger("flask_idempotency")


class Eviction:
    """Asks the server for its maxmemory-policy until it has told once that it evicts nothing, or that it will not tell;
    of a Cluster all primaries, at once.

    A policy that is changed afterwards goes unnoticed, and so does that of another server after a fail-over: to notice
    would take a round trip per claim.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._errors = server.errors
        self._reported = False
        self._stray = False
        self.possible = True
        """Until the server has said otherwise."""

    def refuse_to_start(self) -> None:
        """Raises `ConfigurationError` when it evicts, or is a Cluster where a server was named, or the other way round.

        A server that cannot be reached is only logged.
        """
        try:
            policy = self._evicting_policy()
        except NoCluster:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE: redis+cluster:// names a Redis that is not part of a Cluster. Write redis://host:6379/0."
            ) from None
        except self._errors.unavailable as error:
            _log.warning("Redis does not answer (%s): requests with a key get 503 until it does", type(error).__name__)
            return
        if self._stray:
            # It would answer for its own slots, and refuse all others for ever.
            raise ConfigurationError(
                "IDEMPOTENCY_STORE: this Redis is part of a Cluster. Write redis+cluster://host:6379, or pass a "
                "redis.RedisCluster."
            )
        if policy is not None:
            raise ConfigurationError(f"IDEMPOTENCY_STORE: {evicts(policy)} {REMEDY}")

    def refuse_claims(self) -> None:
        """Raises `StoreUnavailable` for as long as it evicts or cannot be asked, and logs the former once."""
        try:
            policy = self._evicting_policy()
        except self._errors.unavailable as error:
            raise StoreUnavailable(f"Redis cannot be asked whether it evicts ({type(error).__name__})") from error
        if policy is None:
            return
        if not self._reported:
            self._reported = True
            _log.error("Requests with a key get 503: %s %s", evicts(policy), REMEDY)
        raise StoreUnavailable(f"this Redis evicts: it has maxmemory-policy {policy}")

    def _evicting_policy(self) -> str | None:
        policies = [self._policy(node) for _, node in primaries(self._server.client)]
        if None in policies:
            _log.warning("Redis does not tell its maxmemory-policy: make sure that it is noeviction")
        evicting = [policy for policy in policies if policy not in (None, "noeviction")]
        self.possible = bool(evicting)
        return evicting[0] if evicting else None

    def _policy(self, node: Any) -> str | None:
        try:
            told = self._server.directly(self._server.client.info, node=node)
        except self._errors.refused as error:
            if not self._errors.will_not_tell(error):
                raise
            return None
        self._stray = node is None and told.get("cluster_enabled") == 1
        policy = told.get("maxmemory_policy")
        return None if policy is None else str(policy)


def evicts(policy: str) -> str:
    """What is wrong with this policy."""
    return f"Redis has maxmemory-policy {policy}: it may forget that a payment was made, which then runs again."

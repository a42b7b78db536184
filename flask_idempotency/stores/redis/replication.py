"""What replicas must have before a promise counts: WAIT, in the same round trip.

This is no consensus. It tells how many replicas have a write, not which of them will be promoted: asked for fewer than
there are, a fail-over may choose another. What it answers for is a write of its own connection, and a script that is
repeated may write nothing: so something is always written behind it, and that is what is waited for.
"""

from __future__ import annotations

from typing import Any, Final

from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.lines import Command, words
from flask_idempotency.stores.redis.scripts import Script

WAIT_SECONDS: Final = 0.5
"""A replica nearby takes a millisecond. Where the client gives up on a reply before this, the wait is shorter than that."""

_SHARE: Final = 0.6
"""Of the time in which a reply must have come: the rest is for its way."""

PROMISES: Final = frozenset(
    {
        scripts.CLAIM,
        scripts.COUNTED_CLAIM,
        scripts.MARK,
        scripts.COMPLETE,
        scripts.RELEASE,
        scripts.HOLD,
        scripts.SETTLE,
        scripts.FREE,
    }
)
"""Whose effect somebody acts on, who does not ask again. A renewal that is lost only ends a lease early."""


class Replication:
    """How many replicas must have what is promised; 0: nobody asks."""

    def __init__(self, replicas: int, *, reply_seconds: float | None = None) -> None:
        if replicas < 0:
            raise ValueError("the number of replicas must not be negative")
        self.replicas = replicas
        longest = WAIT_SECONDS if reply_seconds is None else min(WAIT_SECONDS, _SHARE * reply_seconds)
        self._ms = max(round(longest * 1000), 1)

    def concerns(self, script: Script) -> bool:
        return self.replicas > 0 and script in PROMISES

    def row(self, key: bytes, *, known: bool) -> tuple[Command, Command]:
        """What follows a script that touched this key, on the same connection. `known`: the server knows our scripts."""
        script = scripts.FOLLOW
        run = ("EVALSHA", script.sha) if known else ("EVAL", script.text)
        return (*run, "2", *layout.followed(key), ""), words(("WAIT", self.replicas, self._ms))

    def lacking(self, answer: Any, followed: Any, acknowledged: Any) -> bool:
        """Whether too few have what was promised. Whoever was refused, or told what is known, was promised nothing."""
        promised = answer == b"DONE" or (isinstance(answer, list) and answer[:1] == [b"CLAIMED"])
        if not promised:
            return False
        return followed != b"DONE" or not isinstance(acknowledged, int) or acknowledged < self.replicas


def reply_seconds_of(client: Any) -> float | None:
    """How long this client waits for a reply, as far as it tells. None: for ever, or it does not."""
    for holder in (getattr(client, "any_pool", None), getattr(client, "connection_pool", None)):
        if holder is not None:
            return _number(holder.connection_kwargs.get("socket_timeout"))
    options: dict[str, Any] = getattr(client, "get_connection_kwargs", dict)()
    return _number(options.get("socket_timeout"))


def _number(seconds: Any) -> float | None:
    return float(seconds) if isinstance(seconds, int | float) else None

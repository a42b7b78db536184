"""Run scripts, and wait until enough replicas have their effect: WAIT, in the same round trip.

This is no consensus. WAIT counts replicas that have a write. If it counts fewer than there are, a fail-over may promote
another one. WAIT covers only writes of the same connection, and a repeated script may write nothing. So the store always
writes one key after the script, and waits for that write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.connection import Argument, Command, Tries, words
from flask_idempotency.stores.redis.executor import ScriptExecutor
from flask_idempotency.stores.redis.scripts import Script

if TYPE_CHECKING:
    from flask_idempotency.engine.store import Clock

WAIT_SECONDS: Final = 0.5
"""A replica nearby takes a millisecond. If the client has a shorter `socket_timeout`, the wait is shorter than that."""

_PROMISES: Final = (b"DONE", b"PAUSED", b"HELD")

_SHARE: Final = 0.6
"""Share of the client's timeout that WAIT may take. The rest is for the network."""


class ReplicatedExecutor(ScriptExecutor):
    """Report a durable script only after this many replicas have its effect. Else raise `StoreUnavailable`."""

    def __init__(self, client: Any, *, owned: bool, clock: Clock | None = None, replicas: int) -> None:
        if replicas < 0:
            raise ValueError("the number of replicas must not be negative")
        super().__init__(client, owned=owned, clock=clock)
        self.replicas = replicas
        seconds = reply_seconds_of(client)
        longest = WAIT_SECONDS if seconds is None else min(WAIT_SECONDS, _SHARE * seconds)
        self._wait = words(("WAIT", replicas, max(round(longest * 1000), 1)))

    def run(self, script: Script, keys: Sequence[bytes], *arguments: Argument, tries: Tries | None = None) -> Any:
        if not script.durable:
            return super().run(script, keys, *arguments, tries=tries)
        rest = words((len(keys), *keys, self._now(), *arguments))
        commands = [("EVALSHA", script.sha, *rest), touch(keys[0], known=True), self._wait]
        with self._converted_errors():
            replies = self._connection.pipeline_one_node(commands, tries=tries)
            if any(isinstance(reply, self.errors.no_script) for reply in replies):
                commands = [("EVAL", script.text, *rest), touch(keys[0], known=False), self._wait]
                replies = self._connection.pipeline_one_node(commands, tries=tries)
        result, touched, acknowledged = replies
        if isinstance(result, Exception):
            raise self._store_error(result) from result
        if is_promise(result) and not (
            touched == b"DONE" and isinstance(acknowledged, int) and acknowledged >= self.replicas
        ):
            # The primary may have the effect all the same. An owner repeats the call; a claimant cancels its claim.
            raise StoreUnavailable(f"too few replicas confirmed the write (IDEMPOTENCY_REPLICAS = {self.replicas})")
        return result


def touch(key: bytes, *, known: bool) -> Command:
    """Return the command to send after a script on this key. Pass `known` if the server has loaded our scripts."""
    run = ("EVALSHA", scripts.TOUCH.sha) if known else ("EVAL", scripts.TOUCH.text)
    return *run, "2", *layout.followed(key), ""


def is_promise(result: Any) -> bool:
    """Return whether a script promises something new. Refusals and replays do not."""
    return result in _PROMISES or (
        isinstance(result, list) and (result[:1] == [b"CLAIMED"] or isinstance(result[0], int))
    )


def reply_seconds_of(client: Any) -> float | None:
    """Return how many seconds this client waits for a reply. None if it waits for ever, or does not show it."""
    pool = getattr(client, "any_pool", None) or getattr(client, "connection_pool", None)
    options = getattr(client, "get_connection_kwargs", dict)() if pool is None else pool.connection_kwargs
    seconds = options.get("socket_timeout")
    return float(seconds) if isinstance(seconds, int | float) else None

"""What the victim's views did, and when they may go on: kept outside the store under test."""

from __future__ import annotations

from typing import cast

import redis

PATIENCE_SECONDS = 60.0
"""How long one side waits for the other before the test counts as failed."""


class Ledger:
    """A second Redis that the test and its victims share. Everything in it belongs to a case: one order's key.

    Lists, because they remember: a go-ahead given to a worker that is paused, or not there yet, is taken later.
    """

    def __init__(self, url: str) -> None:
        # Blocking commands outlast any socket timeout, and a repeated one would take another's go-ahead.
        self._redis = redis.Redis.from_url(url, socket_timeout=None, decode_responses=True)

    def note(self, what: str, case: str, value: object) -> None:
        """Written by the victim: `what` happened."""
        self._redis.rpush(f"{what}:{case}", str(value))

    def act(self, case: str, name: str) -> None:
        """Written by the victim: it did to the outside world what must not be done twice, under this downstream key.

        From this instant, and not before, the other side knows of it by that name.
        """
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.rpush(f"effect:{case}", name)
            if name:
                pipeline.rpush(f"done:{name}", case)
            pipeline.execute()

    def note_under(self, name: str, what: str, case: str) -> None:
        """Note that `what` happened under this downstream key, by which the other side knows it from this instant."""
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.rpush(f"{what}:{case}", name)
            pipeline.rpush(f"known:{name}", what)
            pipeline.execute()

    def noted(self, what: str, case: str) -> list[str]:
        """Everything that was noted, in order."""
        return cast("list[str]", self._redis.lrange(f"{what}:{case}", 0, -1))

    def pause(self, case: str, value: object) -> None:
        """Called by the victim: says that it got here, and waits for the go-ahead."""
        self.note("paused", case, value)
        if self._redis.blpop([f"go:{case}"], timeout=PATIENCE_SECONDS) is None:
            raise TimeoutError("the test never gave the go-ahead")

    def paused(self, case: str) -> int:
        """Wait until a victim pauses. Its process id."""
        return int(self.awaited("paused", case))

    def awaited(self, what: str, case: str) -> str:
        """Wait for the next note of this kind, and take it off."""
        found = cast("tuple[str, str] | None", self._redis.blpop([f"{what}:{case}"], timeout=PATIENCE_SECONDS))
        if found is None:
            raise AssertionError(f"nothing {what} within {PATIENCE_SECONDS:.0f} s")
        return found[1]

    def let_go(self, case: str, times: int = 1) -> None:
        """Give the go-ahead to the next `times` pauses, present or to come."""
        self._redis.rpush(f"go:{case}", *["go"] * times)

    def forget(self, case: str) -> None:
        """Start this case anew."""
        self._redis.delete(*(f"{what}:{case}" for what in ("run", "effect", "paused", "go", "closed", "told")))

    def close(self) -> None:
        self._redis.close()

    def runs(self, case: str) -> int:
        """How often a view was entered."""
        return len(self.noted("run", case))

    def effects(self, case: str) -> list[str]:
        """The downstream key that each effect carried, in order."""
        return self.noted("effect", case)

"""All keys of one kind, wherever in a Cluster they are."""

from __future__ import annotations

from collections.abc import Iterator

from flask_idempotency.stores.redis.server import Server

BATCH = 500
"""Keys that a server looks at for one answer: less than a millisecond of its time."""


class Scan:
    """Goes through the keys of a server, or of each primary of a Cluster in turn, as SCAN does.

    A key that is there from beginning to end is met at least once, as long as the same servers are there. Where a
    primary has been replaced meanwhile, or slots have moved, some may be passed over.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def page(self, pattern: bytes, *, after: bytes, count: int) -> tuple[list[bytes], bytes | None]:
        """About `count` keys are looked at. What comes with them is where the next page begins; None after the last."""
        name, _, cursor = after.rpartition(b" ")
        nodes = self._server.primaries()
        names = [each for each, _ in nodes]
        at = names.index(name) if name in names else 0
        begin = int(cursor) if cursor and names[at] == name else 0
        following, keys = self._server.scan(begin, pattern, count, node=nodes[at][1])
        if following == 0:
            at += 1
        return keys, None if at == len(nodes) else b"%b %d" % (names[at], following)

    def all(self, pattern: bytes) -> Iterator[list[bytes]]:
        """All of them, in batches, some of which may be empty."""
        after: bytes | None = b""
        while after is not None:
            keys, after = self.page(pattern, after=after, count=BATCH)
            yield keys

"""Streams whose claim was taken over while they ran: they must not reach their client whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from flask import Response

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.responses import StreamEnd, Tee
from tests.web.apps import World, is_replay, new_world
from tests.web.test_hook_streams import begin


def lost(end: StreamEnd) -> None:
    raise LeaseLost


def tee(*chunks: bytes, announced: int | None = None) -> Tee:
    return Tee(iter(chunks), limit=9, announced=announced, on_end=lost, abandoned=deque())


def test_a_lost_stream_has_no_end() -> None:
    """However often it is asked, StopIteration would be taken for the end of a whole answer."""
    stream = tee(b"a", b"b")

    assert [b"a", b"b"] == [next(stream), next(stream)]
    for _ in range(3):
        with pytest.raises(LeaseLost):
            next(stream)


def test_a_lost_stream_of_announced_length_keeps_its_last_chunk() -> None:
    """With it, the client would have all that was announced."""
    stream = tee(b"a", b"b", announced=2)

    assert b"a" == next(stream)
    for _ in range(3):
        with pytest.raises(LeaseLost):
            next(stream)


def superseded(length: int | None) -> World:
    """A's stream of two chunks, begun; then B takes over with "from B"."""
    world = new_world(effects="deduplicated")

    @world.view()
    def pay() -> Response:
        if current_claim.attempt == 2:
            return Response("from B")

        def produce() -> Iterator[str]:
            yield "from "
            world.clock.advance(31)
            world.runs.append(world.post())
            yield "A"

        response = Response(produce())
        if length is not None:
            response.content_length = length
        return response

    return world


@pytest.mark.parametrize(("length", "sent"), ((None, [b"from ", b"A"]), (6, [b"from "])))
def test_a_superseded_owner_breaks_its_stream_off(length: int | None, sent: list[bytes]) -> None:
    """B's answer is stored, so A's is not delivered whole; A's client retries, and is given B's."""
    world = superseded(length)
    answer, received = begin(world), list[bytes]()
    with pytest.raises(LeaseLost):
        received.extend(answer)
    answer.close()
    again = world.post()

    assert sent == received
    assert "from B" == world.runs[0].text
    assert is_replay(again)
    assert "from B" == again.text


def test_a_superseded_stream_that_is_closed_early_is_settled_quietly() -> None:
    """Its client is gone already."""
    world = superseded(None)
    answer = begin(world)
    next(iter(answer))
    world.clock.advance(31)
    world.post()
    answer.close()

    assert "from B" == world.post().text

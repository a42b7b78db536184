"""A folder as a broker, looked at by two at the same moment."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu import Connection
from kombu.transport import filesystem

from janitor.broker import Channel, broker_of
from tests.janitor.apps import a_flask

QUEUE = "idempotency"


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Any]:
    app = a_flask(broker_url=f"filesystem://{tmp_path}")
    broker = broker_of(app.extensions["idempotency"].settings)
    with Connection(broker.url, transport_options=broker.options) as connection, connection.channel() as channel:
        assert isinstance(channel, Channel)
        yield channel


def test_a_message_is_there_when_it_is_whole(channel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list[list[str]]()
    replace = os.replace

    def looked_at(source: Path, target: Path) -> None:
        before.append([name for name in os.listdir(tmp_path / "messages") if name.endswith(".msg")])
        replace(source, target)

    monkeypatch.setattr(os, "replace", looked_at)
    channel._put(QUEUE, {"task": "reap"})

    assert [[]] == before
    assert {"task": "reap"} == channel._get(QUEUE)
    with pytest.raises(Empty):
        channel._get(QUEUE)


def test_what_is_not_whole_is_passed_over(channel: Any, tmp_path: Path) -> None:
    (tmp_path / "messages" / f"0_a.{QUEUE}.msg").touch()
    channel._put(QUEUE, {"task": "reap"})

    assert {"task": "reap"} == channel._get(QUEUE)


def test_a_queue_that_somebody_is_about_to_write_is_none_yet(channel: Any, tmp_path: Path) -> None:
    """Worker and beat start at the same moment."""
    (tmp_path / "control" / "idempotency.exchange").touch()

    assert [] == channel.get_table("idempotency")


def test_worker_and_beat_do_not_bind_at_the_same_moment(
    channel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for a lock: otherwise it reads the file before the first has written it, and ends."""
    held: list[bool] = []
    bind = filesystem.Channel._queue_bind

    def binding(self: Any, *arguments: Any) -> None:
        with next((tmp_path / "control").glob(".bind-lock")).open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(True)
        bind(self, *arguments)

    monkeypatch.setattr(filesystem.Channel, "_queue_bind", binding)
    channel._queue_bind("idempotency", "key", "", QUEUE)

    assert [True] == held
    assert [("key", "", QUEUE)] == channel.get_table("idempotency")


def test_an_exchange_that_a_killed_process_left_empty_is_written_again(channel: Any, tmp_path: Path) -> None:
    (tmp_path / "control" / "idempotency.exchange").touch()

    channel._queue_bind("idempotency", "key", "", QUEUE)

    assert [("key", "", QUEUE)] == channel.get_table("idempotency")

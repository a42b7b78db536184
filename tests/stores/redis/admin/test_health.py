"""What `health` reports about a server, and the eviction policy before the first claim."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import Finding, Health, Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import Grant, State
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.forgiving import FORGIVING, redis_store
from tests.lab.cluster import Clusters
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, StartRedis
from tests.tooling.processes import eventually

GOOD = "--appendonly", "yes", "--appendfsync", "always", "--maxmemory", "1gb"
CHECKS = ["eviction", "persistence", "persistence-errors", "memory", "replication", "shared"]


@contextmanager
def a_store(server: Any, *, replicas: int = 0) -> Iterator[RedisStore]:
    store = RedisStore(server, rules=FORGIVING, replicas=replicas)
    try:
        yield store
    finally:
        store.close()


def findings_of(server: Any, *, replicas: int = 0) -> dict[str, Finding]:
    with a_store(server, replicas=replicas) as store:
        health: Health = store.health
        return {finding.check: finding for finding in health.findings()}


def verdicts(server: Any) -> dict[str, Verdict]:
    return {check: finding.verdict for check, finding in findings_of(server).items()}


def worse(told: dict[str, Finding]) -> dict[str, Verdict]:
    """All that is not fine, and says what to do."""
    assert all(finding.remedy and finding.text for finding in told.values() if finding.verdict is not Verdict.FINE)
    return {check: finding.verdict for check, finding in told.items() if finding.verdict is not Verdict.FINE}


def test_a_recommended_server_is_fine(start_redis: StartRedis, redis_kind: str) -> None:
    told = findings_of(start_redis(redis_kind, *GOOD).url)

    assert (CHECKS, {}) == (list(told), worse(told))
    assert {finding.remedy for finding in told.values()} == {""}


def test_a_database_that_other_programs_use_is_advised_against(start_redis: StartRedis, redis_kind: str) -> None:
    """`cache.clear()` empties it. The keys of Celery where this Redis is the janitor's broker are no such thing."""
    server = start_redis(redis_kind, *GOOD)
    with redis.Redis.from_url(server.url) as client, a_store(server.url) as store:
        key = a_key()
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        for ours in ("_kombu.binding.idempotency", "idempotency", "unacked_index", "celery-task-meta-1"):
            client.set(ours, "x")
        assert {} == worse(findings_of(server.url))

        for number in range(5):
            client.set(f"flask_cache_alice-{number}", "secret")
        found = findings_of(server.url)["shared"]
        assert (Verdict.ADVICE, True) == (found.verdict, "5 in a sample" in found.text)
        assert not [each for each in ("alice", "secret", "flask_cache") if each in found.text + found.remedy]
        # Following it keeps the records where they are: the other program alone moves.
        assert "Do not move these records" in found.remedy


SETTINGS = (
    ("eviction", "maxmemory-policy", "allkeys-lru", Verdict.FAULT),
    ("eviction", "maxmemory-policy", "volatile-ttl", Verdict.FAULT),
    ("persistence", "appendfsync", "everysec", Verdict.ADVICE),
    ("persistence", "appendfsync", "no", Verdict.FAULT),
    ("memory", "maxmemory", "1", Verdict.FAULT),
    ("persistence", "appendonly", "no", Verdict.FAULT),
)


def test_a_setting_that_breaks_a_promise_is_found(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, *GOOD)
    with redis.Redis.from_url(server.url) as client:
        for check, setting, value, verdict in SETTINGS:
            before = client.config_get(setting)[setting]
            client.config_set(setting, value)
            assert {check: verdict} == worse(findings_of(server.url)), (setting, value)
            client.config_set(setting, before)


def test_a_server_that_is_nearly_full_is_found(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, *GOOD)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.87))

    assert {"memory": Verdict.ADVICE} == worse(findings_of(server.url))


def test_a_server_without_a_limit_may_use_all_there_is(start_redis: StartRedis, redis_kind: str) -> None:
    told = findings_of(start_redis(redis_kind, *GOOD[:4]).url)

    assert Verdict.FINE is told["memory"].verdict


@pytest.mark.parametrize("command", ("BGSAVE", "BGREWRITEAOF"))
def test_a_disk_that_cannot_be_written_to_is_found(start_redis: StartRedis, redis_kind: str, command: str) -> None:
    """A snapshot or an append-only file that failed, which the server's log alone would tell."""
    server = start_redis(redis_kind, "--maxmemory", "1gb")
    shutil.rmtree(server.folder)
    with redis.Redis.from_url(server.url) as client:
        with suppress(redis.exceptions.ResponseError):  # some say so at once
            client.execute_command(command)
        status = "rdb_last_bgsave_status" if command == "BGSAVE" else "aof_last_bgrewrite_status"
        assert eventually(lambda: bool(client.info("persistence")[status] != "ok"))

    assert {"persistence": Verdict.FAULT, "persistence-errors": Verdict.FAULT} == worse(findings_of(server.url))


@pytest.fixture
def pair(start_redis: StartRedis, redis_kind: str) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary, and a replica that is in step with it."""
    primary, replica = (start_redis(redis_kind, *GOOD, "--repl-diskless-sync-delay", "0") for _ in range(2))
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(primary.port))
    with redis.Redis.from_url(primary.url) as client:
        assert eventually(lambda: bool(client.info("replication").get("slave0", {}).get("state") == "online"))
    yield primary, replica
    for server in (replica, primary):
        server.kill()  # asked to end, they wait for each other


def test_claims_without_a_replica_are_found(pair: tuple[RedisServer, RedisServer]) -> None:
    primary, _ = pair
    assert {"replication": Verdict.ADVICE} == worse(told := findings_of(primary.url))
    with redis.Redis.from_url(primary.url) as client:
        client.config_set("min-replicas-to-write", 1)
    assert {"replication": Verdict.ADVICE} == worse(nearer := findings_of(primary.url))

    assert [True, False] == ["min-replicas-to-write" in each["replication"].remedy for each in (told, nearer)]
    assert {} == worse(findings_of(primary.url, replicas=1))


def test_claims_that_wait_for_a_missing_replica_are_found(pair: tuple[RedisServer, RedisServer]) -> None:
    assert {"replication": Verdict.FAULT} == worse(findings_of(pair[0].url, replicas=2))


def test_a_replica_is_no_store(pair: tuple[RedisServer, RedisServer]) -> None:
    assert {"replication": Verdict.FAULT} == worse(findings_of(pair[1].url))


def test_a_replica_that_is_behind_is_found(
    pair: tuple[RedisServer, RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = pair
    monkeypatch.setattr("flask_idempotency.stores.redis.admin.health.LAG_SECONDS", 2)
    with redis.Redis.from_url(primary.url) as client:
        client.config_set("min-replicas-to-write", 1)
        replica.pause()
        assert eventually(lambda: bool(int(client.info("replication")["slave0"]["lag"]) > 2))
    told = findings_of(primary.url, replicas=1)
    replica.resume()

    assert {"replication": Verdict.ADVICE} == worse(told)
    assert "1 of its 1 replicas" in told["replication"].text


def test_a_server_that_refuses_the_commands_is_unknown(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, *GOOD)
    for refused, unknown in (
        (("-info", "-config"), CHECKS[:-1]),
        (("-info",), CHECKS[:-1]),
        (("-config",), ["persistence"]),
        (("-scan",), ["shared"]),
    ):
        with redis.Redis.from_url(server.url) as client:
            client.acl_setuser(
                "app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", *refused], reset=True
            )
        told = findings_of(server.url.replace("://", "://app:pw@"))

        assert dict.fromkeys(unknown, Verdict.UNKNOWN) == worse(told), refused
        assert all("ACL SETUSER" in told[check].remedy for check in unknown), refused


def test_the_rights_in_the_remedy_are_enough(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, *GOOD)
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "+info", "+config|get", "+scan")

    assert {} == worse(findings_of(server.url.replace("://", "://app:pw@")))


def test_a_health_check_writes_no_data(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind)
    with redis.Redis.from_url(server.url) as client:
        before = client.config_get("*")
        findings_of(server.url)

        assert (before, 0) == (client.config_get("*"), client.dbsize())


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_every_primary_of_a_cluster_is_checked(clusters: Clusters, kind: str) -> None:
    client: Any = redis.RedisCluster.from_url(clusters.get(kind).url)

    assert {"persistence": Verdict.FAULT} == worse(findings_of(client))
    client.close()


def test_the_worst_primary_is_reported(redis_servers: RedisServers, start_redis: StartRedis) -> None:
    good, bad = (
        start_redis(REDIS_KINDS[0], *GOOD),
        start_redis(REDIS_KINDS[0], *GOOD, "--maxmemory-policy", "allkeys-lru"),
    )

    class Both(redis.Redis):
        def get_primaries(self) -> list[Any]:
            return [SimpleNamespace(name=server.url, server=server) for server in (good, bad)]

        def info(self, section: Any = None, *args: Any, target_nodes: Any = None, **options: Any) -> Any:
            with redis.Redis.from_url(target_nodes.server.url) as client:
                return client.info(section)

        def config_get(self, pattern: Any = "*", *args: Any, target_nodes: Any = None, **options: Any) -> Any:
            with redis.Redis.from_url(target_nodes.server.url) as client:
                return client.config_get(pattern)

        def execute_command(self, *args: Any, target_nodes: Any = None, **options: Any) -> Any:
            with redis.Redis.from_url((good if target_nodes is None else target_nodes.server).url) as client:
                return client.execute_command(*args, **options)

    told = findings_of(Both())

    assert {"eviction": Verdict.FAULT} == worse(told)
    assert told["eviction"].text.startswith("On at least one of 2 primaries: ")
    assert str(bad.port) not in "".join(finding.text + finding.remedy for finding in told.values())


def claim_one(store: RedisStore) -> object:
    return store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


def test_a_server_that_evicts_grants_no_claim(
    start_redis: StartRedis, redis_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The application started without it. That it evicts is said once, and not at every request."""
    server = start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru")
    store = redis_store(server.url)
    server.kill()
    store.check()
    caplog.clear()
    server.restart()

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            claim_one(store)

    assert levels(caplog) == [logging.ERROR]
    assert "Set maxmemory-policy to noeviction" in caplog.text
    with redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 0
    store.close()


def test_a_server_that_stops_evicting_grants_again(start_redis: StartRedis, redis_kind: str) -> None:
    server = start_redis(redis_kind, "--maxmemory-policy", "volatile-ttl")
    store = redis_store(server.url)
    with pytest.raises(StoreUnavailable):
        claim_one(store)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")

    assert isinstance(claim_one(store), Grant)
    store.close()


def test_a_server_that_evicts_accepts_writes_of_owners(start_redis: StartRedis, redis_kind: str) -> None:
    """A worker that was granted before must be able to settle, through whichever store."""
    server = start_redis(redis_kind)
    store, key, token = redis_store(server.url), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    fresh = redis_store(server.url)

    fresh.renew(key, token, lease=2 * LEASE)
    fresh.complete(key, token, PAYLOAD, keep=KEEP)

    assert found(fresh, key).state is State.COMPLETED
    for each in (store, fresh):
        each.close()


@pytest.mark.parametrize("checked", (True, False))
def test_the_eviction_policy_is_read_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """At the start or before the first claim; then every claim is one round trip."""
    asked = list[str]()
    info: Any = redis.Redis.info

    def counted(self: redis.Redis, *sections: str, **options: object) -> object:
        asked.append("INFO")
        return info(self, *sections, **options)

    monkeypatch.setattr(redis.Redis, "info", counted)
    store = redis_store(redis_server.url)
    if checked:
        store.check()
    for _ in range(3):
        claim_one(store)
    store.close()

    assert ["INFO"] == asked


def test_a_hidden_eviction_policy_is_warned_about_once(
    redis_server: RedisServer, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    store = redis_store(f"redis://app:pw@127.0.0.1:{redis_server.port}/0")
    outcomes = [claim_one(store) for _ in range(2)]
    redis_client.acl_deluser("app")
    store.close()

    assert all(isinstance(outcome, Grant) for outcome in outcomes)
    assert levels(caplog) == [logging.WARNING]


@pytest.mark.parametrize(
    "error",
    (
        redis.exceptions.ClusterDownError("The cluster is down"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.exceptions.ResponseError("BUSY Redis is busy running a script."),
        redis.exceptions.TimeoutError("Timeout reading from socket"),
    ),
    ids=lambda error: type(error).__name__,
)
def test_an_eviction_check_that_fails_is_repeated(redis_server: RedisServer, error: Exception) -> None:
    """What it says because it is busy or down is no refusal to tell."""
    answers = [error]

    class Shaky(redis.Redis):
        def execute_command(self, *command: object, **options: object) -> object:
            if command[0] == "INFO" and answers:
                raise answers.pop()
            return super().execute_command(*command, **options)  # type: ignore[no-untyped-call]

    with Shaky.from_url(redis_server.url) as client:
        store = redis_store(client)
        with pytest.raises(StoreUnavailable) as raised:
            claim_one(store)

        assert raised.value.__cause__ is error
        assert isinstance(claim_one(store), Grant)

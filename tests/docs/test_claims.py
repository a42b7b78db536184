"""What pages say in numbers, defaults and lists is what the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import redis
from flask import Flask

from docs.generate import HERE
from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency
from flask_idempotency.codec.encryption import CACHE_KEYS, CACHE_SECONDS, FINISHING_SECONDS
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Policy
from flask_idempotency.engine.store import Store
from flask_idempotency.engine.vanished import SILENT_LEASES
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS
from flask_idempotency.settings import load_settings
from flask_idempotency.settings.profiles import KEPT_FIELDS, PROFILES
from flask_idempotency.stores.redis.layout import PARTITIONS
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.web.principals import ASSERTED, CERTIFICATES, NO_CERTIFICATE, TOKENS
from flask_idempotency.web.problem_types import PROBLEMS

SECURITY = (HERE.parent / "SECURITY.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    (found,) = HERE.glob(f"**/{name}.md")
    return found.read_text(encoding="utf-8")


def test_no_limit_holds_until_one_is_set() -> None:
    """The security page says of floods and of long bodies that their limits are yours to set."""
    settings = load_settings({"IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60"}, {}, app_name="shop", lenient=False)

    assert 2 == SECURITY.count("by default there is no limit")
    assert (None, None) == (settings.quota, Policy().max_request_body)


def test_each_threat_names_the_test_that_tries_it() -> None:
    rows = [line for line in SECURITY.partition("## What is not")[0].splitlines() if line.startswith("| ")][1:]

    assert len(rows) > 15
    assert [] == [row for row in rows if not re.search(r"\.py`", row.split("|")[-2])]


def test_statuses_that_release_a_key() -> None:
    (rule,) = re.findall(r"^4\. (.*)", page("promises"), re.MULTILINE)

    assert RELEASED_BY_DEFAULT == {int(status) for status in re.findall(r"\b\d{3}\b", rule)}


def test_times_of_the_policy() -> None:
    text = page("records") + page("external-effects")
    plain = Policy()

    assert (30, 900, 3) == (plain.lease, plain.max_runtime, SILENT_LEASES)
    assert "until `max_runtime` after its lease (15 minutes)" in text
    assert "for three leases (90 seconds)" in text
    assert (30, 3600) == (FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS)
    assert "after 30 seconds (half a lease, if that is longer), and in pauses that double up to an hour" in text


def test_memory_of_data_keys() -> None:
    text = page("encryption")

    assert f"remembers a data key for {CACHE_SECONDS:g} seconds" in text
    assert f"up to {FINISHING_SECONDS:g} seconds" in text
    assert f"At most {CACHE_KEYS:,} keys" in text


def test_sizes() -> None:
    assert f"at most {LONGEST_NAME} characters" in page("identity")
    assert f"more than {LONGEST_NAME} characters" in page("redis")
    assert f"{PARTITIONS:,} partitions" in page("redis")
    assert "It has the eight methods of [`Store`]" in page("custom-store")
    assert 8 == len([name for name in vars(Store) if not name.startswith("_")])


def test_tables() -> None:
    named = re.findall(r"^\| `idempotency_.*?\|", page("encryption"), re.MULTILINE)

    assert "Thirteen tables:" in page("sql")
    assert set(re.findall(r"`(\w+)`", "".join(named))) == set(metadata.tables)
    assert 13 == len(metadata.tables)


def test_header_fields_that_a_replay_carries() -> None:
    (line,) = re.findall(r"^A replay carries these fields.*", page("endpoints"), re.MULTILINE)

    named = set(re.findall(r"`([A-Z][\w-]+)`", line))
    assert KEPT_FIELDS == {name.lower() for name in named}


def test_what_counts_as_credentials() -> None:
    text = page("identity").partition("## What counts as credentials")[2].partition("\n## ")[0]

    assert set() == {
        name for name in (*TOKENS, *ASSERTED, *CERTIFICATES, *NO_CERTIFICATE) if f"`{name}`" not in text
    } - {
        "Cookie"  # "any cookie"
    }


def test_profiles() -> None:
    """The tables of the guide: header, replay headers, statuses, for how long a response is kept; key length and lease."""
    lines = [line.split("|") for line in page("stripe-clients").splitlines()]
    rows = {cells[1].strip("` "): cells[2:-1] for cells in lines if len(cells) == 8}
    others = {cells[1].strip("` "): cells[2:-1] for cells in lines if len(cells) == 6}
    for name, profile in PROFILES.items():
        _, length, lease = others[name]
        number, unit = lease.split()
        assert int(length) == profile.values["max_key_length"]
        assert int(number) * {"s": 1, "min": 60}[unit] == profile.values["lease"]
        header, replayed, mismatch, in_flight, kept = rows[name]
        assert tuple(re.findall(r"`([^`]+)`", header)) == profile.values["header"]
        assert re.findall(r"`([^`]+)`", replayed) == [
            f"{field}: {value}" for field, value in profile.values["replayed_header"]
        ]
        assert int(mismatch.split()[0]) == profile.statuses.get("key-reused", PROBLEMS["key-reused"].status)
        assert int(in_flight.split()[0]) == profile.statuses.get("in-flight", PROBLEMS["in-flight"].status)
        number, unit = kept.split()
        assert int(number) * {"h": 3600, "d": 86400}[unit] == profile.values["keep"]


@pytest.fixture
def user(redis_client: redis.Redis) -> Iterator[str]:
    """The user of the page about Redis."""
    (rule,) = re.findall(r"^ACL SETUSER shop (.*)$", page("redis"), re.MULTILINE)
    redis_client.execute_command("ACL", "SETUSER", "shop", "reset", *rule.split())  # type: ignore[no-untyped-call]
    yield "shop:password"
    redis_client.acl_deluser("shop")


def test_the_user_of_the_redis_page_has_enough_rights(user: str, redis_server: RedisServer) -> None:
    app = Flask("shop")
    app.config["IDEMPOTENCY_STORE"] = url = redis_server.url.replace("redis://", f"redis://{user}@")
    app.config["IDEMPOTENCY_SECRET"] = "s-9f2c47d1e8b35a60"
    app.config["IDEMPOTENCY_AFTER_LOSS"] = "refuse"
    app.add_url_rule("/payments", "pay", lambda: ("paid", 201), methods=["POST"])
    Idempotency(app)
    run = app.test_cli_runner().invoke

    codes = [run(args=["idempotency", *words.split()]).exit_code for words in ("redis init", "redis status", "reap")]
    client = app.test_client()
    responses = [client.post("/payments", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    checks = run(args=["idempotency", "doctor", "--json"]).output

    assert codes == [0, 0, 0]
    assert [(201, None), (201, "true")] == [
        (each.status_code, each.headers.get("Idempotency-Replayed")) for each in responses
    ]
    assert re.search(r'"(eviction|persistence|memory|replication)"', checks)
    assert "does not show" not in checks
    with redis.Redis.from_url(url) as shop, pytest.raises(redis.exceptions.NoPermissionError):
        shop.flushall()

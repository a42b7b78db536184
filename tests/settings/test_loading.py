"""Configuration is read once, checked whole, and every fault is named together with its remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from flask import Flask

import flask_idempotency
from flask_idempotency import Idempotency
from flask_idempotency.assembly import build, identities
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import POLICY_FIELDS, Policy
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.settings import Settings, derived_secret, load_override, load_settings, schema, summary
from flask_idempotency.settings.consumers import CONSUMER
from flask_idempotency.settings.options import DEPLOYMENT, POLICY
from flask_idempotency.settings.reading import PLAIN, Option, Refused
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from tests.settings.test_security import faults as lenient_faults
from tests.settings.test_security import load as load_lenient

BASE = {"IDEMPOTENCY_STORE": "redis://127.0.0.1", "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60"}


def load(config: dict[str, Any] | None = None, *, lenient: bool = False, **arguments: Any) -> Settings:
    return load_settings({**BASE, **(config or {})}, arguments, app_name="shop", lenient=lenient)


def faults(config: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(config, **arguments)
    return str(caught.value)


def test_every_policy_keyword_can_be_configured() -> None:
    """The schema and the policy name the same things, so that none can be written and not read."""
    assert POLICY_FIELDS == set(POLICY)


def test_nothing_configured_is_the_documented_default() -> None:
    settings = load()

    assert (Policy(), "shop", None, 2) == (
        settings.policy,
        settings.namespace,
        settings.allow_anonymous,
        settings.max_waiters,
    )


def test_all_faults_are_reported_in_one_error() -> None:
    text = faults({"IDEMPOTENCY_LEASE": -1, "IDEMPOTENCY_EFFECTS": "magic", "IDEMPOTENCY_LAESE": 3}, in_flight="queue")

    for part in (
        "4 faults",
        "IDEMPOTENCY_LEASE: must be at least",
        "IDEMPOTENCY_EFFECTS: must be one of",
        "in_flight",
    ):
        assert part in text


def test_an_unknown_setting_is_refused_with_a_suggestion() -> None:
    """A typing error must not pass for a protection."""
    assert "IDEMPOTENCY_REQUIRD: there is no such setting. Did you mean IDEMPOTENCY_REQUIRED?" in faults(
        {"IDEMPOTENCY_REQUIRD": True}
    )


def test_a_combination_that_cannot_hold_is_refused_at_start() -> None:
    text = faults(
        {"IDEMPOTENCY_EFFECTS": "transactional", "IDEMPOTENCY_LEASE": 60, "IDEMPOTENCY_WAIT": -1}, max_runtime=30
    )

    for part in ("3 faults", "needs a SQL store", "max_runtime (30 s) must not be shorter", "IDEMPOTENCY_WAIT"):
        assert part in text


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1"}, "IDEMPOTENCY_REDIS_URL: only SQL stores have this option"),
        ({"IDEMPOTENCY_CLAIM_STRATEGY": "advisory"}, "IDEMPOTENCY_CLAIM_STRATEGY: only SQL stores have this option"),
        ({"IDEMPOTENCY_STORE": "redis://h", "IDEMPOTENCY_EFFECTS": "transactional"}, "needs a SQL store"),
        (
            {"IDEMPOTENCY_EFFECTS": "transactional", "IDEMPOTENCY_ON_STORE_DOWN": "allow"},
            'on_store_down="allow" exclude each other',
        ),
        ({"IDEMPOTENCY_STORE": "sqlite:///x", "IDEMPOTENCY_CLAIM_STRATEGY": "lock"}, "insert, row_lock, advisory"),
    ],
)
def test_what_only_a_sql_store_can_do_is_refused_of_others(config: dict[str, object], sentence: str) -> None:
    """A setting that would be ignored passes for a promise."""
    assert sentence in faults(config)


def test_an_empty_namespace_is_refused() -> None:
    """All applications with an empty namespace would share keys."""
    assert "IDEMPOTENCY_NAMESPACE: must have 1 to 255 characters" in faults({"IDEMPOTENCY_NAMESPACE": ""})


def test_a_derived_secret_can_be_named_when_it_is_replaced() -> None:
    """A new secret is a rotation like any other: no key becomes new."""
    before = load_settings({"IDEMPOTENCY_STORE": "redis://h", "SECRET_KEY": "k"}, {}, app_name="shop", lenient=True)

    after = load({"IDEMPOTENCY_SECRET": ["own-9f2c47d1e8b35a60", derived_secret("k")]})

    assert before.secrets[0] == after.secrets[-1]


def test_an_unknown_keyword_is_refused_where_it_was_written() -> None:
    with pytest.raises(
        ConfigurationError, match=r"@idempotent on pay: keeep: .* Did you mean @idempotent on pay: keep\?"
    ):
        load_override({"keeep": 5}, where="@idempotent on pay")


def test_arguments_override_configuration() -> None:
    assert 5.0 == load({"IDEMPOTENCY_LEASE": 60}, lease=5).policy.lease


@pytest.mark.parametrize(("value", "seconds"), [(90, 90.0), (1.5, 1.5), (timedelta(minutes=2), 120.0)])
def test_durations_are_seconds_or_timedeltas(value: Any, seconds: float) -> None:
    assert seconds == load_override({"lease": value}, where="here")["lease"]


def test_p05_values_that_cannot_hold_are_refused() -> None:
    for keyword, value in [
        ("lease", 0),
        ("lease", "30"),
        ("lease", True),
        ("lease", float("nan")),
        ("lease", float("inf")),
        ("lease", 1e-9),
        ("ignore_fields", 5),
        ("ignore_fields", [5]),
        ("keep", timedelta(days=91)),
        ("keep", -1),
        ("wait", -1),
        ("max_key_length", 0),
        ("max_key_length", 2.5),
        ("key_format", "(["),
        ("methods", "POST"),
        ("methods", ["GET", "POST"]),
        ("header", "Idempotency Key"),
        ("header", "Idempotency-Key\r\nX: y"),
        ("header", 7),
        ("header", []),
        ("keep_headers", ["Set-Cookie"]),
        ("keep_headers", ["Proxy-Authorization"]),
        ("keep_headers", ["X-Total", "authentication-INFO"]),
        ("keep_headers", "X Total"),
        ("keep_headers", 7),
        ("replayed_header", {"X-Replay": "a\r\nb"}),
        ("keep_statuses", [99]),
        ("keep_statuses", ["6xx"]),
        ("keep_statuses", [True]),
        ("decide", "keep"),
        ("ignore_fields", ["sent_at"]),
        ("effects", "exactly-once"),
        ("profile", "strip"),
        ("scope", "tenant"),
        ("max_body", -1),
        ("required", "perhaps"),
    ]:
        with pytest.raises(ConfigurationError, match=f"here: {keyword}: "):
            load_override({keyword: value}, where="here")


def test_statuses_may_be_numbers_and_classes() -> None:
    assert {404, *range(500, 600)} == load_override({"keep_statuses": [404, "5xx"]}, where="here")["keep_statuses"]


def test_configuration_and_arguments_are_one_layer() -> None:
    """A profile in the call does not undo a value in the configuration: both speak for the whole application."""
    assert 5.0 == load({"IDEMPOTENCY_LEASE": 5}, profile="stripe").policy.lease


LISTS: dict[str, Any] = {"keep_statuses": ["5xx"], "release_statuses": [500]}


def test_one_layer_that_keeps_and_releases_a_status_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigurationError, match="here: keep_statuses and release_statuses both name 500"):
        load_override(LISTS, where="here")


def test_raw_bytes_have_no_fields_to_ignore() -> None:
    """Silently comparing them all the same would refuse retries that the application meant to let through."""
    with pytest.raises(ConfigurationError, match='fingerprint="raw" and ignore_fields exclude each other'):
        load({"IDEMPOTENCY_FINGERPRINT": "raw"}, ignore_fields=["/sent_at"])


def test_a_uuid_must_fit_into_the_longest_key() -> None:
    with pytest.raises(ConfigurationError, match="Set max_key_length to 36 or more"):
        load({"IDEMPOTENCY_KEY_FORMAT": "uuid"}, max_key_length=35)

    assert 36 == load({"IDEMPOTENCY_KEY_FORMAT": "uuid"}, max_key_length=36).policy.max_key_length


def test_a_secret_of_its_own_needs_no_warning() -> None:
    settings = load({"IDEMPOTENCY_SECRET": ["new-9f2c47d1e8b35a60", b"old-9f2c47d1e8b35a60"], "SECRET_KEY": "k"})

    assert ((b"new-9f2c47d1e8b35a60", b"old-9f2c47d1e8b35a60"), ()) == (settings.secrets, settings.warnings)


def test_a_derived_secret_warns_outside_debug_and_testing() -> None:
    """Rotating SECRET_KEY would run payments again; that must not come as a surprise."""
    config = {"IDEMPOTENCY_STORE": "redis://127.0.0.1", "SECRET_KEY": "k-9f2c47d1e8b35a60"}

    strict = load_settings(config, {}, app_name="shop", lenient=False)
    lenient = load_settings(config, {}, app_name="shop", lenient=True)

    assert "rotating SECRET_KEY" in strict.warnings[0]
    assert not lenient.warnings
    assert strict.secrets == lenient.secrets
    assert (b"k-9f2c47d1e8b35a60",) != strict.secrets


def test_an_unusable_secret_is_refused() -> None:
    """An empty secret would make every storage key guessable."""
    for secret in ["", [], [""], 5, ["new", None]]:
        assert "IDEMPOTENCY_SECRET: must be a non-empty string" in faults({"IDEMPOTENCY_SECRET": secret}), secret


def test_no_secret_at_all_is_refused_where_records_outlive_the_process() -> None:
    """Another secret at the next start would make every key new."""
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_SECRET"):
        load_settings({"IDEMPOTENCY_STORE": "redis://127.0.0.1"}, {}, app_name="shop", lenient=True)


def test_the_memory_store_warns_outside_debug_and_testing_and_needs_no_secret() -> None:
    """Its records end with the process, and so may the secret that names them."""
    first, second = (load_settings({}, {}, app_name="shop", lenient=False) for _ in range(2))

    assert "memory://" in first.warnings[0]
    assert first.secrets != second.secrets
    assert not load_settings({}, {}, app_name="shop", lenient=True).warnings


def test_every_setting_says_what_it_is() -> None:
    """The reference is generated from these texts."""
    for name, option in DEPLOYMENT.items():
        assert option.doc, name


def loaded(*, lenient: bool = False, **config: Any) -> Settings:
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()}
    return load_settings(
        {"IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60", "IDEMPOTENCY_STORE": "redis://localhost"} | named,
        {},
        app_name="shop",
        lenient=lenient,
    )


@pytest.mark.parametrize(("lenient", "after_loss"), ((False, "refuse"), (True, "run")))
def test_unknown_keys_run_after_data_loss_only_in_debug_and_testing(lenient: bool, after_loss: str) -> None:
    assert after_loss == loaded(lenient=lenient).after_loss
    assert "hold" == loaded(lenient=lenient, after_loss="hold").after_loss


@pytest.mark.parametrize("setting", ({"store_id": "a"}, {"data_loss_grace": 9}, {"client_clock_skew": None}))
@pytest.mark.parametrize("store", ("memory://", "sqlite:///shop.db"))
def test_what_only_a_redis_may_forget_is_refused_elsewhere(store: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="only Redis stores have this option"):
        loaded(store=store, **setting)


def test_a_store_that_was_made_has_its_rules_already() -> None:
    store = RedisStore(fakeredis.FakeRedis(), rules=RedisDataLossPolicy(after_loss="run"))

    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_STORE_ID: the store is an object"):
        build(replace(loaded(store_id="prod"), store=store), observers=Observers())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    (
        ({"after_loss": "forget"}, "IDEMPOTENCY_AFTER_LOSS: must be one of: refuse, hold, run"),
        ({"data_loss_grace": 0}, "IDEMPOTENCY_DATA_LOSS_GRACE: must be more than 0"),
        ({"client_clock_skew": -1}, "IDEMPOTENCY_CLIENT_CLOCK_SKEW: must not be negative"),
        ({"store_id": ""}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "prod\n"}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "unnamed"}, "IDEMPOTENCY_STORE_ID: must not be `unnamed`"),
        ({"store_id": "x" * 65}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
    ),
)
def test_what_cannot_hold_is_refused_at_the_start(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        loaded(**setting)


def test_quotas_are_whole_numbers_and_a_rate() -> None:
    """Nothing set is None, so that nothing is counted."""
    cases: tuple[Any, ...] = (
        ({}, None),
        ({"quota_records": None}, None),
        ({"quota_records": 5}, Quota(records=5)),
        ({"quota_bytes": 0, "quota_in_flight": 2}, Quota(bytes=0, in_flight=2)),
        ({"quota_new_keys": (10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
        ({"quota_new_keys": [10, 0.5]}, Quota(new_keys=NewKeys(10, 0.5))),
        ({"quota_new_keys": NewKeys(10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
    )
    for settings, quota in cases:
        assert quota == load_lenient(secret="s-9f2c47d1e8b35a60", **settings).quota, (settings, quota)


def test_what_is_no_whole_number_is_refused() -> None:
    values: tuple[Any, ...] = (-1, 1.5, "5", True)
    for value, name in product(values, ("quota_records", "quota_bytes", "quota_in_flight")):
        (told,) = lenient_faults(secret="s-9f2c47d1e8b35a60", **{name: value})

        assert told.startswith(f"IDEMPOTENCY_{name.upper()}: "), (value, name)


def test_what_no_store_can_count_to_is_refused() -> None:
    """Else a database says so at the first claim, and all of them are 500. The remedy is no limit at all."""
    limits: tuple[tuple[str, Any], ...] = (
        ("quota_records", 10**19),
        ("quota_bytes", 2**53 + 1),
        ("quota_in_flight", 2**63),
        ("quota_new_keys", (10**19, 3600)),
    )
    for name, value in limits:
        (told,) = lenient_faults(secret="s-9f2c47d1e8b35a60", **{name: value})

        assert told.startswith(f"IDEMPOTENCY_{name.upper()}: "), (name, value)
        assert "2**53" in told, (name, value)
        assert "for no limit, leave it out" in told, (name, value)


def test_what_every_store_can_count_to_is_not() -> None:
    most = 2**53

    quota = load_lenient(
        secret="s-9f2c47d1e8b35a60",
        quota_records=most,
        quota_bytes=most,
        quota_in_flight=most,
        quota_new_keys=(most, 1),
    ).quota

    assert Quota(most, most, most, NewKeys(most, 1.0)) == quota


def test_what_is_no_rate_is_refused() -> None:
    for value in (
        5,
        "10 60",
        (10,),
        (10, 0),
        (10, -1),
        (10, float("inf")),
        (1.5, 60),
        (True, 60),
        (-1, 60),
        (1, "60"),
        (1, 1e9),
    ):
        (told,) = lenient_faults(secret="s-9f2c47d1e8b35a60", quota_new_keys=value)

        assert told.startswith("IDEMPOTENCY_QUOTA_NEW_KEYS: "), value


@pytest.mark.parametrize(("settings", "shards"), (({}, 1), ({"tenant_shards": 1}, 1), ({"tenant_shards": 256}, 256)))
def test_a_tenant_has_one_part_by_default(settings: dict[str, Any], shards: int) -> None:
    loaded = load_lenient(secret="s-9f2c47d1e8b35a60", **settings)

    assert shards == loaded.tenant_shards
    assert [shards] == [len(identity.tenant_ids("shop", "acme")) for identity in identities(loaded)]
    assert (shards > 1) == ("with each tenant in 256 parts" in summary(loaded, quota_loader=False))


def test_what_is_no_number_of_parts_is_refused() -> None:
    for value in (0, -1, 257, 1.5, "4", True):
        (told,) = lenient_faults(secret="s-9f2c47d1e8b35a60", tenant_shards=value)

        assert told.startswith("IDEMPOTENCY_TENANT_SHARDS: "), value


@pytest.mark.parametrize(
    "store", ("memory://", "sqlite:///{}/records.db", MemoryStore()), ids=("memory", "sql", "object")
)
def test_a_store_without_partitions_has_none_to_outgrow(store: Any, tmp_path: Path) -> None:
    """There nothing would notice when the number is changed, and every key would run again."""
    store = store.format(tmp_path) if isinstance(store, str) else store

    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_TENANT_SHARDS: .*has no partitions"):
        Idempotency(Flask("shop"), store=store, secret="s-9f2c47d1e8b35a60", tenant_shards=2)
    Idempotency(Flask("shop"), store=store, secret="s-9f2c47d1e8b35a60", tenant_shards=1)


def test_a_redis_may_have_several() -> None:
    """One that was made elsewhere must have been made for as many: it is what refuses another number later."""
    client = fakeredis.FakeRedis()
    two = RedisStore(client, rules=RedisDataLossPolicy(shards=2, after_loss="run"))

    Idempotency(Flask("shop"), store=client, secret="s-9f2c47d1e8b35a60", tenant_shards=2, after_loss="run")
    Idempotency(Flask("shop"), store=two, secret="s-9f2c47d1e8b35a60", tenant_shards=2)
    for shards in (1, 3):
        with pytest.raises(ConfigurationError, match=rf"is {shards}, and the store was made for 2"):
            Idempotency(Flask("shop"), store=two, secret="s-9f2c47d1e8b35a60", tenant_shards=shards)


def test_a_quota_that_cannot_be_divided_is_refused_at_start() -> None:
    """Each by a sentence that begins with its setting, and says what to do."""
    told = lenient_faults(
        secret="s-9f2c47d1e8b35a60",
        tenant_shards=16,
        quota_records=15,
        quota_new_keys=(3, 60),
        quota_in_flight=0,
    )

    assert ["IDEMPOTENCY_QUOTA_RECORDS: 15", "IDEMPOTENCY_QUOTA_NEW_KEYS: 3"] == [
        each.split(" cannot")[0] for each in told
    ]
    assert all("Raise it to 16 or more" in each for each in told)


def test_a_quota_that_can_be_is_not() -> None:
    """The settings say what a tenant may have, and not what a part of it may."""
    quota = load_lenient(
        secret="s-9f2c47d1e8b35a60",
        tenant_shards=16,
        quota_records=16,
        quota_new_keys=(17, 60),
        quota_in_flight=0,
    ).quota

    assert Quota(records=16, in_flight=0, new_keys=NewKeys(17, 60.0)) == quota


def test_fields_have_no_type_parameter_in_marshmallow_3() -> None:
    """`fields.Field[...]` fails at the import there; `schema.fields.Field` does not. The CI runs the rest on both."""
    package = Path(flask_idempotency.__file__).parent

    assert [] == [str(file) for file in package.rglob("*.py") if "(fields.Field[" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("mode", ("observe", "warn", "enforce"))
def test_the_summary_says_if_endpoints_are_not_protected(mode: str) -> None:
    said = summary(load(mode=mode), quota_loader=False)

    assert (f"mode {mode}: endpoints that do not say otherwise are not protected" in said) is (mode != "enforce")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_MODE: must be one of: observe, warn, enforce."):
        load({"IDEMPOTENCY_MODE": "watch"})


def test_a_mode_beside_a_switched_off_extension_warns() -> None:
    """Nothing would be counted, and the report would stay empty."""
    assert any("so no request is observed" in each for each in load(enabled=False, mode="observe").warnings)
    assert not any("observed" in each for each in load(enabled=False).warnings)
    assert not any("observed" in each for each in load(mode="observe").warnings)


WORDS = (
    "true no reject wait plain on insert ietf 5xx [ /status //host unnamed X-Key /sent_at zlib janitor operation allow raw "
    "takeover release later hold observe chosen"
)
NUMBERS = (None, True, False, 0, 1, 5, -1, 300, 10**19, 1.0, 0.05, 4096.5, math.nan, math.inf)
OBJECTS = (
    b"",
    b"reject",
    "",
    "prod\n",
    "x" * 300,
    ["X-Key", "Y-Key"],
    (),
    {"namespace": "old"},
    {500},
    (10, 60),
    ["POST"],
)
FUNCTIONS = (timedelta(days=1), timedelta(-1), NewKeys(5, 60), object(), print, lambda value, error: None)
VALUES: tuple[Any, ...] = (*WORDS.split(), *NUMBERS, *OBJECTS, *FUNCTIONS)


@pytest.mark.parametrize("options", (DEPLOYMENT, CONSUMER), ids=("settings", "consumers"))
def test_what_is_loaded_without_marshmallow_is_what_marshmallow_would_load(options: Mapping[str, Option]) -> None:
    """And what is refused, in the same words. The functions of the other options read a value alone."""
    plain = {name: option for name, option in options.items() if option.kind in PLAIN}
    taken = set()
    for name, value in product(plain, VALUES):
        try:
            alone: tuple[dict[str, Any], dict[str, list[str]]] = {name: plain[name].load(value)}, {}
            taken.add(name)
        except Refused as refused:
            if not refused.args:
                continue
            alone = {}, {name: list(refused.args)}
        assert alone == schema.load(plain, {name: value})

    assert plain.keys() == taken


def test_every_function_takes_one_of_the_values() -> None:
    taken = set()
    for name, value in product(DEPLOYMENT, VALUES):
        with suppress(Refused):
            DEPLOYMENT[name].load(value)
            taken.add(name)

    assert DEPLOYMENT.keys() == taken


@pytest.mark.parametrize(
    ("name", "values"),
    (
        ("methods", ["GET"]),
        ("header", ["no token"]),
        ("keep_statuses", [999]),
        ("ignore_fields", ["sent_at"]),
        ("keep_headers", ["Set-Cookie"]),
    ),
)
def test_an_iterator_that_is_refused_is_read_once(name: str, values: list[object]) -> None:
    """At a second look it is empty: without a method in scope, no request of the application would be protected."""
    assert f"IDEMPOTENCY_{name.upper()}: " in faults({f"IDEMPOTENCY_{name.upper()}": iter(values)})


def test_a_value_to_convert_is_converted() -> None:
    """Environment variables are text."""
    assert (True, 5) == ((settings := load(required="yes", max_waiters=5)).policy.required, settings.max_waiters)

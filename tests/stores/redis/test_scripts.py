"""No server checks a script before it runs. These tests check that its names, its header and its callers fit together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from flask_idempotency.engine.activity import HOUR, MINUTE
from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.journal import Entry, JournalWrite, StepState
from flask_idempotency.engine.model import TRANSITIONS, VOIDED, OnExpiry, State
from flask_idempotency.engine.observations import Ending
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.executor import Call, ScriptExecutor
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.redis.replication import touch
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    stand,
)
from tests.stores.unsettled import seen

FOLDER = Path(scripts.__file__).with_name("lua")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.lua"))
LIBS = sorted(f"lib/{path.stem}" for path in FOLDER.glob("lib/*.lua"))

# redis.call's commands: all of them in Redis 6.2 and in every later Redis and Valkey.
COMMANDS = {
    *("GET", "GETRANGE", "STRLEN", "SET", "DEL", "UNLINK", "EXISTS", "PERSIST", "PTTL", "TIME", "INFO"),
    *("HGET", "HSET", "HSETNX", "HMGET", "HDEL", "HKEYS", "HEXISTS", "HGETALL"),
    *("ZADD", "ZREM", "ZCARD", "ZSCORE", "ZCOUNT", "ZRANGEBYSCORE"),
    *("RPUSH", "LRANGE", "PEXPIRE", "ZREMRANGEBYSCORE", "ZREMRANGEBYRANK"),
    "PUBLISH",
}
# Not struct, bit, cjson, cmsgpack, os, io: missing or different on one server or another. A library has no KEYS and no ARGV.
LIB_GLOBALS = {"redis", "string", "math", "tonumber", "type", "ipairs", "pairs", "unpack"}
KEYWORD = re.compile(
    r"\b(and|break|do|elseif|else|end|false|for|function|if|in|local|nil|not|or|repeat|return|then|true|until|while)\b"
)
RECORD_KEYS = "1 record, 2 in_flight, 3 quarantine, 4 partition, 5 tenant_unfinished, 6 tenant_quota, 7 tenant_keys"

VERBS = {
    "claim": {"claim"},
    "void": {"void"},
    "quarantine_expired": {"claim", "quarantine_expired"},
    "renew": {"renew"},
    "mark_point_of_no_return": {"mark_point_of_no_return"},
    "quarantine": {"quarantine"},
    "complete": {"complete"},
    "release": {"release"},
    "pause": {"release"},
    "doubt": {"release"},
    "write_steps": {"write_steps"},
    "resume": {"resume_steps"},
    "give_up": {"give_up_steps"},
    "resolve": {"resolve"},
    "force_release": {"force_release"},
    "mark_corrupt": {"mark_corrupt"},
    # Redis drops the record by its TTL.
    "expire": set[str](),
}
"""Which scripts make a transition."""


@cache
def code(text: str) -> str:
    return re.sub(r"'[^'\n]*'", "''", re.sub(r"--[^\n]*", "", text))


def header(name: str) -> dict[str, str]:
    """The header's entries, each with its continuation lines."""
    lines = scripts.read(name).splitlines()
    text = "\n".join(
        line[3:] for line in lines[: next(at for at, line in enumerate(lines) if not line.startswith("--"))]
    )
    return {
        entry: re.sub(r"\s+", " ", value).strip()
        for entry, value in re.findall(r"^([A-Z]\w+):((?:.*)(?:\n  .*)*)", text, flags=re.MULTILINE)
    }


def declared(text: str) -> list[str]:
    names = re.findall(r"\blocal function (\w+)", text)
    for listed in re.findall(
        r"\blocal (?!function)([\w, ]+?)\s*(?:=|\n)|\bfor ([\w, ]+) (?:=|in)|\bfunction \w*\(([\w, ]*)\)", text
    ):
        names += [name.strip() for name in ",".join(listed).split(",")]
    return [name for name in names if name]


def offered(name: str) -> set[str]:
    """What stands at the top level of a library."""
    text = code(scripts.read(name))
    lists = re.findall(r"^local (?!function)([\w, ]+?)\s*=", text, flags=re.MULTILINE)
    return {
        *re.findall(r"^local function (\w+)", text, flags=re.MULTILINE),
        *(re.split(r",\s*", ",".join(lists)) if lists else ()),
    }


def includes(name: str) -> list[str]:
    return re.findall(r"^ *-- @include (\S+)$", scripts.read(name), flags=re.MULTILINE)


def reached(name: str) -> list[str]:
    """The libraries that a file includes, or those that these include."""
    return list(dict.fromkeys(each for lib in includes(name) for each in (lib, *reached(lib))))


def undefined(text: str, known: set[str]) -> set[str]:
    text = code(text)
    used = set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*(?!\w*\s*=[^=])", re.sub(r"(?<=[{,\n])\s*\w+ = ", " ", text)))
    return {name for name in used - known - set(declared(text)) if not KEYWORD.fullmatch(name)}


def undeclared(text: str) -> set[str]:
    text = code(text)
    tables = re.sub(r"\{[^{}]*\}", "", text, flags=re.DOTALL)
    return set(re.findall(r"^\s*([A-Za-z_]\w*)\s*=[^=]", tables, flags=re.MULTILINE)) - set(declared(text))


@for_each("name", SCRIPTS)
def test_a_script_and_its_includes_define_every_name(name: str) -> None:
    """A misspelt global is nil on some servers and an error on others. luacheck knows scopes as well: see lint_lua.py."""
    assert undefined(scripts.expand(name), LIB_GLOBALS | {"KEYS", "ARGV"}) == set()


@for_each("name", LIBS)
def test_a_library_and_its_includes_define_every_name(name: str) -> None:
    """Else it would read a local of the script that includes it, or KEYS, or ARGV."""
    assert undefined(scripts.expand(name), LIB_GLOBALS) == set()


@for_each("name", SCRIPTS + LIBS)
def test_no_file_assigns_a_global(name: str) -> None:
    """`x = 1` without `local` poisons every later script on some servers."""
    assert undeclared(scripts.expand(name)) == set()


def test_the_checks_of_names_find_what_they_look_for() -> None:
    text = "local known = 1\nknown = ARGV[1] + unknwon\nglobal = known\n"

    assert ({"ARGV", "unknwon", "global"}, {"global"}) == (
        undefined(text + "return global\n", LIB_GLOBALS),
        undeclared(text),
    )


@for_each("name", LIBS)
def test_a_library_holds_functions_and_constants(name: str) -> None:
    """State would be shared by the files that include it."""
    text = re.sub(r"^local function .*?^end$", "", code(scripts.read(name)), flags=re.MULTILINE | re.DOTALL)

    assert [line for line in text.splitlines() if line and not re.match(r"local [A-Z_]+(, [A-Z_]+)* = ", line)] == []


@for_each("name", SCRIPTS)
def test_no_file_redefines_a_name_of_an_include(name: str) -> None:
    """An include that came before would then mean another thing to those that come after."""
    names = declared(code(scripts.expand(name)))

    assert {each for lib in reached(name) for each in offered(lib) if names.count(each) != 1} == set()


@for_each("name", SCRIPTS + LIBS)
def test_a_file_uses_what_it_includes(name: str) -> None:
    text = code(scripts.read(name))

    for lib in includes(name):
        # A library may stand for those that it includes.
        names = {each for each_lib in (lib, *reached(lib)) for each in offered(each_lib)}
        assert any(re.search(rf"\b{each}\b", text) for each in names), lib
    for names_of_layout in re.findall(r"^ *-- @layout (.+)$", scripts.read(name), flags=re.MULTILINE):
        assert all(re.search(rf"\b{each}\b", code(scripts.expand(name))) for each in names_of_layout.split())


@for_each("lib", LIBS)
def test_a_script_uses_each_function_of_a_library(lib: str) -> None:
    texts = [code(scripts.read(name)) for name in SCRIPTS + LIBS]

    assert [each for each in offered(lib) if sum(len(re.findall(rf"\b{each}\b", text)) for text in texts) < 2] == []


@for_each("name", SCRIPTS + LIBS)
def test_only_commands_that_every_server_knows(name: str) -> None:
    assert set(re.findall(r"redis\.p?call\(\s*'(\w+)'", scripts.read(name))) <= COMMANDS


@for_each("name", SCRIPTS + LIBS)
def test_no_file_spells_a_key(name: str) -> None:
    """`layout.py` spells keys, and a caller declares them: a Cluster must know them beforehand."""
    assert "idm1" not in scripts.read(name)


def test_python_names_each_script_and_scripts_include_each_library() -> None:
    loaded = [getattr(scripts, name.upper()) for name in SCRIPTS]
    sources = (path.read_text("utf-8") for path in FOLDER.parent.rglob("*.py"))
    named = {name for source in sources for name in re.findall(r"\bscripts\.([A-Z_]+)\b", source)}

    assert sorted(script.name for script in loaded) == SCRIPTS
    assert sorted(name.lower() for name in named) == SCRIPTS
    assert len({script.sha for script in loaded}) == len(loaded)
    assert {lib for name in SCRIPTS for lib in reached(name)} == set(LIBS)


@for_each("name", SCRIPTS)
def test_a_header_says_what_a_caller_must_know(name: str) -> None:
    assert list(header(name)) == ["KEYS", "ARGV", "Returns", "Durable", "Transitions"]
    assert header(name)["Durable"] in ("yes", "no")
    assert re.fullmatch(r"none|\w+ -> \w+(, \w+ -> \w+)*", header(name)["Transitions"])
    if header(name)["KEYS"].startswith("1 record"):
        assert header(name)["KEYS"].startswith(RECORD_KEYS)


def test_a_name_without_a_file_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'CLAIM_TWICE'"):
        scripts.CLAIM_TWICE  # noqa: B018


def test_a_script_that_is_first_run_after_an_upgrade_is_that_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    before = scripts.load("release")
    monkeypatch.setattr(scripts, "_FOLDER", FOLDER / "gone")
    monkeypatch.delitem(vars(scripts), "RELEASE", raising=False)

    assert before == scripts.RELEASE


def test_a_script_without_a_header_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "read", lambda name: "return 1\n")

    with pytest.raises(ValueError, match="Durable"):
        scripts.load("claim")


def test_an_include_is_resolved_once_and_in_place() -> None:
    text = scripts.expand("claim")

    assert text.count("local function parse_record(") == 1
    assert text.index("'REPLAYED', bytes") < text.index("local function data_loss_of(")


def test_headers_list_the_transitions_of_the_state_table() -> None:
    def state(state: State | None) -> str:
        return "absent" if state is None else state.value

    made: dict[str, set[str]] = {name: set() for name in SCRIPTS}
    for (before, verb), (after, _) in TRANSITIONS.items():
        for name in VERBS[verb]:
            made[name].add(f"{state(before)} -> {state(after)}")

    assert made == {name: set(header(name)["Transitions"].replace("none", "").split(", ")) - {""} for name in SCRIPTS}


def numbers(entry: str) -> tuple[int, int | None]:
    """How many keys or arguments a header lists: at least, and at most, None for any number."""
    optional = re.search(r"\[(.*)\]", entry)
    required = entry if optional is None else entry.replace(optional[0], "")
    highest = [max(map(int, re.findall(r"(?:^|[ \[])(\d+) (?=[a-z'])", text)), default=0) for text in (required, entry)]
    return highest[0], None if "..." in entry else max(highest)


@for_each("name", SCRIPTS)
def test_a_script_reads_no_more_keys_and_arguments_than_its_header_lists(name: str) -> None:
    text = code(scripts.expand(name))
    if "(KEYS, " in text:
        # Functions of libraries call them so.
        text = re.sub(r"\bkeys\[", "KEYS[", text)
    for entry in ("KEYS", "ARGV"):
        most = numbers(header(name)[entry])[1]
        assert most is None or all(int(number) <= most for number in re.findall(rf"\b{entry}\[(\d+)\]", text))


@pytest.fixture(name="sent")
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[int, int]]]:
    """How many keys and arguments Python sends to each script."""
    sent: dict[str, set[tuple[int, int]]] = {}
    run, run_all = ScriptExecutor.run, ScriptExecutor.run_all

    def note(script: scripts.Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> None:
        # The time comes before them.
        sent.setdefault(script.name, set()).add((len(keys), 1 + len(arguments)))

    def noted_run(
        self: ScriptExecutor, script: scripts.Script, keys: Sequence[bytes], *arguments: Any, **how: Any
    ) -> Any:
        note(script, keys, arguments)
        return run(self, script, keys, *arguments, **how)

    def noted_all(self: ScriptExecutor, script: scripts.Script, calls: Sequence[Call]) -> Any:
        for call in calls:
            note(script, call.keys, call.arguments)
        return run_all(self, script, calls)

    monkeypatch.setattr(ScriptExecutor, "run", noted_run)
    monkeypatch.setattr(ScriptExecutor, "run_all", noted_all)
    return sent


def every_operation(store: RedisStore, cache: RedisReplayCache, clock: FrozenClock) -> None:
    key, token = a_key(), a_token()
    store.data_loss.initialise()
    store.data_loss.acknowledge()
    request = a_request(key)
    grant = granted(store.claim(request, token=token, lease=LEASE, quota=Quota(records=5)))
    store.data_loss.restore_claim(request, grant, lease=LEASE, age=0.0)
    store.data_loss.would_run(key)
    store.void(a_request(a_key(), fingerprint=VOIDED), token=a_token(), keep=KEEP, quota=Quota(records=5))
    store.renew(key, token, lease=LEASE)
    store.ledger.reconcile(key.tid)
    store.mark_point_of_no_return(key, token)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    store.responses.replace(key, PAYLOAD, OTHER_PAYLOAD)
    store.responses.count()
    store.ledger.usage(key.tid)
    store.ledger.reconcile(key.tid)
    record = found(store, key)
    missed = cache.get(key)
    cache.put(key, record, missed_at=getattr(missed, "at", 0))
    cache.forget(key)
    cache.put(key, record, missed_at=getattr(missed, "at", 0))
    cache.invalidate(key, fence=grant.fence)
    cache.erase(key.tid)
    store.mark_corrupt(key, OTHER_PAYLOAD)
    for standing in ("in flight", "completed"):
        other = a_key()
        stand(store, clock, other, standing)
        store.recovery.force_release(seen(store, other))
    held = a_key()
    store.quarantine(held, stand(store, clock, held, "in flight"), "unclear")
    store.recovery.scan(State.QUARANTINED, limit=10)
    store.recovery.next_for_resolver(horizon=1e10, least=1, most=2, limit=10)
    stand(store, clock, a_key(), "in flight")
    store.recovery.counts()
    store.recovery.resolve(seen(store, held), token=a_token(), payload=PAYLOAD, keep=KEEP)
    remembered, token_of_it = a_key(), a_token()
    granted(store.claim(a_request(remembered), token=token_of_it, lease=LEASE))
    store.quarantine(remembered, token_of_it, "unclear")
    lives = {"keep": KEEP, "remember": 2 * KEEP}
    store.recovery.resolve(seen(store, remembered), token=a_token(), payload=PAYLOAD, **lives)
    done = a_key()
    store.complete(done, stand(store, clock, done, "in flight"), PAYLOAD, **lives)
    store.expiry.sweep(horizon=1e10, limit=10)
    released = a_key()
    store.release(released, stand(store, clock, released, "in flight"))
    silent = a_key()
    stand(store, clock, silent, "lapsed, quarantine")
    store.recovery.quarantine_expired(seen(store, silent), horizon=1e10)
    shelf = store.data_keys.read_keys(key.tid)
    store.data_keys.add(key.tid, DataKey(1, "kek", b"wrapped", None), store=shelf.store, after=shelf.last)
    store.data_keys.disable(key.tid, 1)
    store.data_keys.delete(key.tid, 1)
    store.data_keys.shred(key.tid)
    store.task_log.report("reap", "done")
    store.task_log.reports()
    store.task_log.now()
    store.task_log.lock("reap", token, lease=LEASE)
    store.task_log.unlock("reap", token)
    every_journal_operation(store, clock)
    every_operation_beside_records(store)
    taken = a_key()
    granted(store.claim(a_request(taken, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE))
    keys = layout.keys(taken)
    store._server.run(scripts.MARK_CORRUPT, keys, layout.name(keys), b"unreadable")


def every_journal_operation(store: RedisStore, clock: FrozenClock) -> None:
    journals, key, token = store.journals, a_key(), a_token()
    grant = granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    done = Entry(b"i" * 12, "charge", "plain", StepState.FINISHED, True, payload=PAYLOAD)
    journals.write(key, token, fence=grant.fence, writing=JournalWrite(1, (done,), (b"o" * 12,), steps=1), lease=LEASE)
    journals.recall(key, token, fence=grant.fence)
    journals.count()
    journals.replace(key, done.id, PAYLOAD, OTHER_PAYLOAD)
    store.release(key, token)
    journals.give_up(seen(store, key), horizon=1e10)
    journals.resume(seen(store, key), journals.read(key), token=a_token(), writing=JournalWrite(0, steps=1))
    token = a_token()
    granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE))
    swept = journals.sweep(limit=500)
    while swept.after is not None:
        swept = journals.sweep(after=swept.after, limit=500)
    journals.complete(key, token, PAYLOAD, keep=KEEP)


def every_operation_beside_records(store: RedisStore) -> None:
    key, token = a_key(), a_token()
    store.activity.add(b"abc", {"pay": {"new": 1}, "refund": {"new": 1}}, token=token)
    store.activity.read(b"abc", length=MINUTE, seconds=HOUR)
    store.observations.observe(key, token=token, fingerprint=b"f" * 17, lease=LEASE, keep=KEEP, hold_lapsed=False)
    store.observations.renew(key, token, lease=2 * LEASE)
    store.observations.end(key, token, Ending.KEPT, keep=KEEP)
    store.audit.append(key, AuditEntry("completed", "quarantined", "ann", "why"), token=token)
    store.audit.entries(key)
    store.audit.count("ann", seconds=60)
    store.audit.forget(key.tid)
    store.recovery.about_completed()


@pytest.mark.usefixtures("few_partitions")
def test_python_sends_as_many_keys_and_arguments_as_a_header_lists(sent: dict[str, set[tuple[int, int]]]) -> None:
    clock = FrozenClock()
    server = fakeredis.FakeServer()
    with (
        closing(RedisStore(fakeredis.FakeRedis(server=server), clock=clock)) as store,
        closing(RedisReplayCache(fakeredis.FakeRedis(server=server), clock=clock)) as cache,
    ):
        every_operation(store, cache, clock)
    touched = touch(layout.keys(a_key())[0], known=True)
    sent["touch"] = {(int(touched[2]), len(touched) - 3 - int(touched[2]))}

    assert set(SCRIPTS) - set(sent) == set()
    for name, counts in sent.items():
        for which, entry in enumerate(("KEYS", "ARGV")):
            least, most = numbers(header(name)[entry])
            told = {count[which] for count in counts}
            # An entry of square brackets is sent whole or not at all.
            assert least <= min(told), (name, entry)
            assert most is None or max(told) <= most, (name, entry)
            assert "[" in header(name)[entry] or most is None or told == {least}, (name, entry)

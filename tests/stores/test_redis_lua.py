"""What no server checks before a script runs: that the Lua keeps to itself and to what every server knows."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from flask_idempotency.stores.redis import scripts

FOLDER = files("flask_idempotency.stores.redis").joinpath("lua")
SCRIPTS = sorted(path.name for path in FOLDER.iterdir())

# redis.call's commands: all of them in Redis 6.2 and in every later Redis and Valkey.
COMMANDS = {
    *("GET", "GETRANGE", "SET", "DEL", "EXISTS", "PERSIST", "TIME"),
    *("HGET", "HSET", "HSETNX", "HMGET", "HDEL", "HKEYS", "HEXISTS", "HGETALL"),
    *("ZADD", "ZREM", "ZCARD", "ZSCORE", "ZCOUNT", "ZRANGEBYSCORE"),
}
# Not struct, bit, cjson, cmsgpack, os, io: missing or different on one server or another.
GLOBALS = {"redis", "KEYS", "ARGV", "string", "math", "tonumber", "type", "ipairs", "pairs", "unpack"}
KEYWORD = re.compile(
    r"\b(and|break|do|elseif|else|end|false|for|function|if|in|local|nil|not|or|repeat|return|then|true|until|while)\b"
)


def code(name: str) -> str:
    text = FOLDER.joinpath(name).read_text("utf-8")
    return re.sub(r"'[^'\n]*'", "''", re.sub(r"--[^\n]*", "", text))


def declared(text: str) -> set[str]:
    names = set(re.findall(r"\blocal function (\w+)", text))
    for listed in re.findall(
        r"\blocal (?!function)([\w, ]+?)\s*=|\bfor ([\w, ]+) (?:=|in)|\bfunction \w*\(([\w, ]*)\)", text
    ):
        names |= {name.strip() for name in ",".join(listed).split(",")}
    return names - {""}


def declared_at_the_head() -> set[str]:
    return declared(scripts.fields()).union(*(declared(code(f"{prelude}.lua")) for prelude in scripts.PRELUDES))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_name_is_declared(name: str) -> None:
    """
    A global that is assigned poisons every later script on some servers; one that is misspelt is nil on others.
    """
    text = code(name)
    prelude = declared_at_the_head()
    used = set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*(?!\w*\s*=[^=])", re.sub(r"(?<=[{,\n])\s*\w+ = ", " ", text)))

    undeclared = used - GLOBALS - prelude - declared(text)
    assert {name for name in undeclared if not KEYWORD.fullmatch(name)} == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_assigned_that_was_not_declared(name: str) -> None:
    """
    `x = 1` without `local` makes a global, wherever it stands.
    """
    text = code(name)
    names = declared(text) | declared_at_the_head()
    tables = re.sub(r"\{[^{}]*\}", "", text, flags=re.DOTALL)
    assigned = set(re.findall(r"^\s*([A-Za-z_]\w*)\s*=[^=]", tables, flags=re.MULTILINE))

    assert assigned - names == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_commands_that_every_server_knows(name: str) -> None:
    """
    Redis 6.2 to 8 and Valkey.
    """
    text = FOLDER.joinpath(name).read_text("utf-8")

    assert set(re.findall(r"redis\.p?call\(\s*'(\w+)'", text)) <= COMMANDS


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_names_a_key(name: str) -> None:
    """
    Keys are declared to Redis and spelt in `layout.py`: a Cluster must know them beforehand.
    """
    assert "idm1" not in FOLDER.joinpath(name).read_text("utf-8")


def test_every_transition_has_its_script() -> None:
    """
    And every script its transition.
    """
    transitions = {name.removesuffix(".lua") for name in SCRIPTS} - {*scripts.PRELUDES}

    assert transitions == {name.lower() for name, value in vars(scripts).items() if isinstance(value, scripts.Script)}

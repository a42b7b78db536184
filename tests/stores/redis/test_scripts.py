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
    *("GET", "GETRANGE", "STRLEN", "SET", "DEL", "UNLINK", "EXISTS", "PERSIST", "PTTL", "TIME", "INFO"),
    *("HGET", "HSET", "HSETNX", "HMGET", "HDEL", "HKEYS", "HEXISTS", "HGETALL"),
    *("ZADD", "ZREM", "ZCARD", "ZSCORE", "ZCOUNT", "ZRANGEBYSCORE"),
    "PUBLISH",
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


ALL = {name: value for name, value in vars(scripts).items() if isinstance(value, scripts.Script)}
LINES_OF_SCRIPTS = sorted({script.parts[: at + 1] for script in ALL.values() for at in range(len(script.parts))})


@pytest.mark.parametrize("parts", LINES_OF_SCRIPTS, ids="-".join)
def test_every_name_is_declared(parts: tuple[str, ...]) -> None:
    """
    In the same file, or in one that runs before: a global that is misspelt is nil on some servers, an error on others.
    """
    text = code(f"{parts[-1]}.lua")
    before = declared(scripts.fields()).union(*(declared(code(f"{part}.lua")) for part in parts))
    used = set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*(?!\w*\s*=[^=])", re.sub(r"(?<=[{,\n])\s*\w+ = ", " ", text)))

    assert {name for name in used - GLOBALS - before if not KEYWORD.fullmatch(name)} == set()


@pytest.mark.parametrize("parts", LINES_OF_SCRIPTS, ids="-".join)
def test_nothing_is_assigned_that_was_not_declared(parts: tuple[str, ...]) -> None:
    """
    `x = 1` without `local` makes a global, wherever it stands, and poisons every later script on some servers.
    """
    text = code(f"{parts[-1]}.lua")
    names = set[str]().union(*(declared(code(f"{part}.lua")) for part in parts))
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


def test_every_file_is_part_of_a_script() -> None:
    """
    And no script is another's twin.
    """
    assert {name.removesuffix(".lua") for name in SCRIPTS} == {part for script in ALL.values() for part in script.parts}
    assert len({script.sha for script in ALL.values()}) == len(ALL)

"""The Lua scripts that Redis runs: for each operation, one file in `lua/` and one constant here.

Two comments in a script stand for text that the loader puts in their place:

    -- @include lib/record      functions and constants of lua/lib/record.lua, unless an include before has them
    -- @layout FENCE STORE_ID   constants: names of hash fields, and the channel, as layout.py spells them

A library takes arguments and returns values: it reads no local of the script that includes it. An include may stand
anywhere. Redis runs what stands above it without paying for its functions, which is what keeps a replay fast.

The lines from `-- fast path` to `-- end of fast path` decide the usual cases without a function or a table. They may only
repeat the rules below them: `tests/stores/redis/test_fast_path.py` runs the script with and without them.

The header of a script lists its KEYS, its ARGV, what it returns, whether replicas must have its effect (`Durable`), and
which transitions of a record it makes. The tests hold the code to it.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores.redis import layout

_FOLDER: Final = files(__package__).joinpath("lua")
_DIRECTIVE: Final = re.compile(r"^ *-- @(include|layout) (.+)\n", re.MULTILINE)
_FAST_PATH: Final = re.compile(r"^-- fast path: .*?^-- end of fast path\n", re.MULTILINE | re.DOTALL)
_DURABLE: Final = re.compile(r"^-- Durable: (yes|no)$", re.MULTILINE)


@valueclass(frozen=True, slots=True)
class Script:
    """A script as Redis gets it: by `sha` if Redis has run it before, else as `text`."""

    name: str
    text: str
    sha: str
    durable: bool
    """Whether replicas must have its effect before the store reports it: the caller acts on it and does not call again."""


def load(name: str, *, fast: bool = True) -> Script:
    """Return the script of `lua/<name>.lua`, with its includes in place. With `fast=False`, it has no fast path."""
    text = expand(name, fast=fast)
    durable = _DURABLE.search(text)
    if durable is None:
        raise ValueError(f"lua/{name}.lua must say 'Durable: yes' or 'Durable: no' in its header")
    # Redis names scripts by this digest; it protects no secret.
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, sha, durable[1] == "yes")


def expand(name: str, *, frame: str = "{}", fast: bool = True) -> str:
    """Return `lua/<name>.lua` with the text that its directives stand for, each in this frame."""
    constants = {**layout.FIELDS, "CHANNEL": layout.SETTLED.decode()}
    present = set[str]()

    def expanded(text: str) -> str:
        first, *rest = _split(text)
        parts = [first]
        for kind, wanted, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            names = [each for each in wanted.split() if each not in present]
            present.update(names)
            if kind == "include":
                inside = "".join(expanded(read(each)) for each in names)
            elif names:
                inside = f"local {', '.join(names)} = {', '.join(repr(constants[each]) for each in names)}\n"
            else:
                inside = ""
            parts += frame.format(inside), after
        return "".join(parts)

    text = read(name)
    return expanded(text if fast else _FAST_PATH.sub("", text))


# A library stands in a dozen scripts. So each file is read and split once.
@cache
def read(name: str) -> str:
    """Return `lua/<name>.lua` as it stands in the file."""
    return _FOLDER.joinpath(f"{name}.lua").read_text("utf-8")


@cache
def _split(text: str) -> list[str]:
    """Split it at its directives: text, kind, names, text, and so on."""
    return _DIRECTIVE.split(text)


# All at once, so that a worker runs the scripts of one release, whatever an upgrade does to the files later.
_NAMES: Final = [
    f"{folder}{file.name.removesuffix('.lua')}"
    for folder in ("", "lib/")
    for file in _FOLDER.joinpath(folder).iterdir()
    if re.fullmatch(r"\w+\.lua", file.name)
]
for _name in _NAMES:
    read(_name)


def __getattr__(name: str) -> Script:
    """Return the script of the file with this name, as in `scripts.READ_STEPS` for `lua/read_steps.lua`.

    Python calls this once for each script: a worker runs a tenth of them.
    """
    if name.lower() not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made: Script = globals().setdefault(name, load(name.lower()))
    return made

"""The Lua scripts as Redis is asked to run them: one per transition, and those that look after what they leave behind."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from flask_idempotency.stores.redis import layout


@dataclass(frozen=True, slots=True)
class Script:
    """Redis knows a script that it has run before by `sha`; `text` is for when it does not."""

    text: str
    sha: str


PRELUDES = ("record", "ledger", "quota", "data_keys")
"""What stands at the head of scripts. Every script begins with the first; the others make a script slower to begin."""


def fields() -> str:
    """The fields of hashes as Lua is told of them. On one line, so that the lines of what follows are only one off."""
    names, values = layout.FIELDS.keys(), layout.FIELDS.values()
    return f"local {', '.join(names)} = {', '.join(map(repr, values))}\n"


def _load(name: str, *preludes: str) -> Script:
    folder = files(__package__).joinpath("lua")
    parts = (folder.joinpath(f"{part}.lua").read_text("utf-8") for part in ("record", *preludes, name))
    text = fields() + "".join(parts)
    # Redis names scripts by this digest; nothing is kept secret by it.
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


CLAIM = _load("claim", "ledger", "quota")
RENEW = _load("renew")
MARK = _load("mark")
COMPLETE = _load("complete", "ledger", "data_keys")
RELEASE = _load("release")
HOLD = _load("hold")
READ = _load("read")
CONDEMN = _load("condemn", "ledger")
DISTRUST = _load("distrust", "ledger")

USAGE = _load("usage")
TALLY = _load("tally")
BALANCE = _load("balance", "ledger")
MEND = _load("mend")

SHELF = _load("shelf")
ADD = _load("add")
CLOSE = _load("close")
RETIRE = _load("retire")
DESTROY = _load("destroy")

SURVEY = _load("survey")
REPLACE = _load("replace", "data_keys")

PEEK = _load("peek")
FILL = _load("fill")
ERASE = _load("erase")
DROP = _load("drop")

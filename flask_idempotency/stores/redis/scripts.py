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
    parts: tuple[str, ...]
    """The files that it is made of, in the order in which they run."""


def fields() -> str:
    """What Lua is told of the layout: on one line, so that no line of a short script is far from its own."""
    told = {**layout.FIELDS, "BELL": layout.SETTLED.decode()}
    return f"local {', '.join(told)} = {', '.join(map(repr, told.values()))}\n"


def _load(*parts: str) -> Script:
    folder = files(__package__).joinpath("lua")
    parts = ("record", *parts)
    text = fields() + "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in parts)
    # Redis names scripts by this digest; nothing is kept secret by it.
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), parts)


_NEW = "length", "writing", "bell", "quarantine", "process", "canary", "grant"
CLAIM = _load("claim", *_NEW, "first_use")
COUNTED_CLAIM = _load("claim", *_NEW, "ledger", "quota", "counted_use")
RENEW = _load("writing", "bell", "process", "owner", "renew")
MARK = _load("writing", "bell", "length", "process", "owner", "answered", "mark")
_COMPLETING = "completing", "length", "answer", "ledger", "counted_completion"
COMPLETE = _load("writing", "bell", "process", "owner", "data_keys", "complete", *_COMPLETING)
RELEASE = _load("writing", "bell", "length", "process", "owner", "answered", "release")
HOLD = _load("writing", "bell", "length", "process", "owner", "answered", "quarantine", "hold")
READ = _load("read")
CONDEMN = _load("writing", "length", "answer", "ledger", "condemning", "condemn")
DISTRUST = _load("writing", "length", "answer", "ledger", "condemning", "distrust")

LAPSE = _load("writing", "bell", "quarantine", "seen", "lapse")
SETTLE = _load("writing", "bell", "process", "owner", "data_keys", "seen", "settle", *_COMPLETING)
FREE = _load("writing", "bell", "process", "owner", "length", "answer", "ledger", "seen", "free")
MEET = _load("length", "glance", "beginning", "indexed", "meet")
DUE = _load("writing", "glance", "indexed", "due")
STANDING = _load("standing")
LONGEST = _load("longest")

RESTORE = _load("writing", "process", "restore")
NOTICE = _load("process", "notice")
LOOK = _load("process", "look")
INITIALISE = _load("process", "initialise")
ACKNOWLEDGE = _load("process", "acknowledge")

USAGE = _load("usage")
TALLY = _load("length", "answer", "glance", "tally")
BALANCE = _load("writing", "ledger", "balance")
MEND = _load("writing", "glance", "mend")

SHELF = _load("shelf")
ADD = _load("add")
CLOSE = _load("writing", "close")
RETIRE = _load("retire")
DESTROY = _load("writing", "destroy")

SURVEY = _load("length", "glance", "beginning", "survey")
REPLACE = _load("writing", "length", "answer", "data_keys", "replace")

PEEK = _load("peek")
FILL = _load("writing", "fill")
ERASE = _load("writing", "erase")
DROP = _load("drop")
FORGET = _load("forget")
WITHDRAW = _load("withdraw")

CLOCK = _load("clock")
FOLLOW = _load("follow")
NOTE = _load("writing", "note")
NOTES = _load("notes")
TAKE = _load("writing", "take")
GIVE_BACK = _load("give_back")

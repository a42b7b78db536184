"""The Lua scripts, one per transition and two for the cache, as Redis is asked to run them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """Redis knows a script that it has run before by `sha`; `text` is for when it does not."""

    text: str
    sha: str


def _load(name: str) -> Script:
    folder = files(__package__).joinpath("lua")
    text = "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in ("record", name))
    # Redis names scripts by this digest; nothing is kept secret by it.
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


CLAIM = _load("claim")
RENEW = _load("renew")
MARK = _load("mark")
COMPLETE = _load("complete")
RELEASE = _load("release")
HOLD = _load("hold")
READ = _load("read")
PEEK = _load("peek")
FILL = _load("fill")

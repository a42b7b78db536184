"""The Lua scripts that Redis runs: one file in `lua/` for each operation.

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


# A worker expands every script when it starts, and a library stands in a dozen of them. So each file is read and split once.
@cache
def read(name: str) -> str:
    """Return `lua/<name>.lua` as it stands in the file."""
    return _FOLDER.joinpath(f"{name}.lua").read_text("utf-8")


@cache
def _split(text: str) -> list[str]:
    """Split it at its directives: text, kind, names, text, and so on."""
    return _DIRECTIVE.split(text)


CLAIM: Final = load("claim")
RENEW: Final = load("renew")
MARK_POINT_OF_NO_RETURN: Final = load("mark_point_of_no_return")
COMPLETE: Final = load("complete")
RELEASE: Final = load("release")
QUARANTINE: Final = load("quarantine")
MARK_CORRUPT: Final = load("mark_corrupt")
READ: Final = load("read")
RESTORE_CLAIM: Final = load("restore_claim")

WRITE_STEPS: Final = load("write_steps")
READ_STEPS: Final = load("read_steps")
RESUME_STEPS: Final = load("resume_steps")
GIVE_UP_STEPS: Final = load("give_up_steps")
SCAN_STEPS: Final = load("scan_steps")
REPLACE_STEP: Final = load("replace_step")
SWEEP_JOURNALS: Final = load("sweep_journals")

QUARANTINE_EXPIRED: Final = load("quarantine_expired")
RESOLVE: Final = load("resolve")
FORCE_RELEASE: Final = load("force_release")
LIST_BY_STATE: Final = load("list_by_state")
NEXT_FOR_RESOLVER: Final = load("next_for_resolver")
COUNT_UNFINISHED: Final = load("count_unfinished")
OLDEST_QUARANTINED: Final = load("oldest_quarantined")
COUNT_COMPLETED: Final = load("count_completed")
SCAN_COMPLETED: Final = load("scan_completed")
REPLACE_RESPONSE: Final = load("replace_response")

QUOTA_USAGE: Final = load("quota_usage")
QUOTA_RECOUNT: Final = load("quota_recount")
QUOTA_REPAIR: Final = load("quota_repair")
QUOTA_REPAIR_UNFINISHED: Final = load("quota_repair_unfinished")
QUOTA_RECOUNT_JOURNALS: Final = load("quota_recount_journals")
QUOTA_REPAIR_JOURNALS: Final = load("quota_repair_journals")

DATA_KEYS_READ: Final = load("data_keys_read")
DATA_KEYS_ADD: Final = load("data_keys_add")
DATA_KEYS_DISABLE: Final = load("data_keys_disable")
DATA_KEYS_DELETE: Final = load("data_keys_delete")
DATA_KEYS_SHRED: Final = load("data_keys_shred")

STORE_STATUS: Final = load("store_status")
STORE_CHECK: Final = load("store_check")
STORE_LOOK: Final = load("store_look")
STORE_INIT: Final = load("store_init")
STORE_ACKNOWLEDGE: Final = load("store_acknowledge")

CACHE_GET: Final = load("cache_get")
CACHE_PUT: Final = load("cache_put")
CACHE_DELETE: Final = load("cache_delete")
CACHE_INVALIDATE: Final = load("cache_invalidate")
CACHE_DELETE_TENANT: Final = load("cache_delete_tenant")
CACHE_EXPIRE_TENANT: Final = load("cache_expire_tenant")

ACTIVITY_ADD: Final = load("activity_add")
ACTIVITY_READ: Final = load("activity_read")

OBSERVE: Final = load("observe")
OBSERVATION_RENEW: Final = load("observation_renew")
OBSERVATION_END: Final = load("observation_end")

AUDIT_APPEND: Final = load("audit_append")
AUDIT_READ: Final = load("audit_read")
AUDIT_NOTE_ACTOR: Final = load("audit_note_actor")
AUDIT_COUNT: Final = load("audit_count")
AUDIT_FORGET: Final = load("audit_forget")

TASK_REPORT: Final = load("task_report")
TASK_REPORTS: Final = load("task_reports")
TASK_LOCK: Final = load("task_lock")
TASK_UNLOCK: Final = load("task_unlock")

SERVER_TIME: Final = load("server_time")
TOUCH: Final = load("touch")

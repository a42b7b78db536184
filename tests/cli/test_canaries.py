"""No command says a client's key or a body, to anybody; and none tells a log or an event who somebody is."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from itertools import product
from typing import Any

import click
import pytest

from docs.commands import subcommands
from flask_idempotency.cli import cli
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.model import ClaimRequest, OnExpiry, RequestInfo
from flask_idempotency.operations.records import handle_of
from tests.apps import NAME, WHY, World, paid, run, shop

KEY, TENANT, PRINCIPAL, BODY = "canary-key", "canary-tenant", "canary-principal", "canary-body"
WHOSE = ("--tenant", TENANT)
NAMED = ("--key", KEY, *WHOSE, "--principal", PRINCIPAL)
RING = {"a": b64encode(b"a" * 32).decode()}

COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "db check": ((),),
    "db upgrade": ((),),
    "doctor": ((),),
    "expire": ((),),
    "keys generate": ((),),
    "keys status": ((),),
    "list": (("--state", "completed"), ("--state", "quarantined", *WHOSE), ("--state", "processing")),
    # This shop has no outbox. tests/outbox/test_commands.py tries them on one.
    "outbox discard": (("1", *WHY, "--yes"),),
    "outbox list": ((), ("--dead",)),
    "outbox retry": (("1", *WHY),),
    "policy": ((), ("pay",)),
    "purge": ((*WHOSE, *WHY, "--yes"), (*WHOSE, *WHY, "--shred", "--yes")),
    "quota set": ((*WHOSE, "--records", "1000", *WHY),),
    "quota show": ((*WHOSE,), ("--all",)),
    "reap": ((),),
    # No endpoint of this shop says `finish="janitor"`. tests/web/test_finishing_applications.py runs it.
    "finish": ((),),
    "reconcile": ((),),
    "redis ack": ((*WHY, "--yes"), (*WHY, "--force", "--yes")),
    "redis init": ((*WHY,),),
    "redis status": ((),),
    "relay": (("--once",),),
    "release": ((*NAMED, *WHY, "--yes", "--force"), (*NAMED, *WHY, "--yes"), (*NAMED, *WHY)),
    "report": ((),),
    "resolve": (
        (*NAMED, *WHY, "--yes", "--happened", "--status", "201", "--body-file", "-"),
        (*NAMED, *WHY, "--yes", "--happened", "--status", "201", "--header", f"Location: /{BODY}"),
        (*NAMED, *WHY, "--yes", "--never-happened"),
        (*NAMED, *WHY, "--yes", "--reopen"),
        (*NAMED, *WHY, "--happened", "--status", "201", "--header", f"X-Unkept: {BODY}"),
        (*NAMED, *WHY, "--happened", "--status", "201", "--header", f"wrong {BODY}"),
    ),
    "rotate": ((),),
    "seal": ((),),
    "show": (NAMED, (KEY,), ("--key", f"{KEY} with a space", *NAMED[2:]), ("--key", KEY, *NAMED[2:4], "--anonymous")),
    "stats": ((),),
    "void": (
        (*NAMED, "--endpoint", "pay", *WHY, "--yes"),
        ("--key", f"{KEY}-new", *NAMED[2:], "--endpoint", "pay", *WHY, "--yes"),
        ("--key", f"{KEY}-other", *NAMED[2:], "--endpoint", "pay", *WHY),
    ),
}
"""How each command is tried, with everything in it that must not be said."""

SAYS_WHO = ("list", "show", "release", "resolve")
"""These show a record as it is stored, its tenant and principal too. `quota show` names the tenant that was typed."""


def commands(group: click.Group = cli, *above: str) -> Iterator[str]:
    for name, command in subcommands(group).items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield " ".join((*above, name))


def test_every_command_is_tried() -> None:
    assert sorted(COMMANDS) == sorted(commands())


def troubled(**settings: Any) -> World:
    """A shop with a key of this client's in each kind of trouble: done, unknown, and in progress."""
    world = shop(on_error="quarantine", encryption="on", key_ring=RING, quota_records=100, **settings)
    who = {"Tenant": TENANT, "User": PRINCIPAL}
    pay = world.app.view_functions["pay"]
    world.app.view_functions["pay"] = lambda: (BODY, pay())[0]
    paid(world, f"{KEY}-done", **who)
    world.app.view_functions["pay"] = pay
    paid(world, KEY, Fail="yes", **who)
    hashed = settings.get("hash_identities", False)
    tenant, principal = (Identity(b"s").pseudonym(name) if hashed else name for name in (TENANT, PRINCIPAL))
    about = RequestInfo(tenant, principal, "POST", "pay")
    world.store.claim(
        ClaimRequest(canary(f"{KEY}-busy"), bytes(32), OnExpiry.QUARANTINE, about), token=bytes(16), lease=30
    )
    return world


def canary(key: str = KEY) -> StorageKey:
    return Identity(b"s").storage_key(Scope(NAME, TENANT, PRINCIPAL), key)


def typed(arguments: tuple[str, ...]) -> str:
    """What standard input holds. An answer to a question is not echoed by us but by the terminal."""
    return BODY if "--body-file" in arguments else "n\n"


CHANGES = ("purge", "release", "resolve")
"""Each way of these is tried on a shop of its own, because it changes the records that it prints."""


@pytest.mark.parametrize("name", COMMANDS)
def test_nobody_is_told_what_is_nobodys_business(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not what it prints, nor what it logs at any level, nor its events, nor its traceback if it had one."""
    caplog.set_level(logging.DEBUG)
    handles = [handle_of(canary(key)) for key in (KEY, f"{KEY}-done", f"{KEY}-busy")]
    world = troubled()
    for arguments, options in product(COMMANDS[name], ((),) if name == "keys generate" else ((), ("--json",))):
        world = troubled() if name in CHANGES else world
        world.events.clear()
        caplog.clear()
        result = run(world, *name.split(), *arguments, *options, typed=typed(arguments))

        logged = "".join(str({**vars(record), "said": record.getMessage()}) for record in caplog.records)
        printed = result.stdout + result.stderr
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert not any(canary in printed for canary in (KEY, BODY)), (arguments, printed)
        said = logged + str(world.events)
        assert not any(c in said for c in (KEY, BODY, TENANT, PRINCIPAL, *handles)), (arguments, said)
        if name not in SAYS_WHO:
            asked = TENANT if name == "quota show" and arguments == WHOSE else ""
            assert not any(who in printed for who in {TENANT, PRINCIPAL} - {asked}), (arguments, printed)


def test_hashed_names_are_shown_as_they_are_stored() -> None:
    """Who may look at a terminal need not know who the customers are."""
    for name in SAYS_WHO:
        world = troubled(hash_identities=True)
        for arguments in COMMANDS[name]:
            told = run(world, name, *arguments, typed=typed(arguments))
            assert not any(who in told.stdout + told.stderr for who in (TENANT, PRINCIPAL)), (name, arguments)


def test_the_canaries_would_be_seen() -> None:
    """The commands that were tried did meet the records: a list shows them, and what it settles is settled."""
    world = troubled()
    shown = json.loads(run(world, "list", "--state", "quarantined", "--json").stdout)["records"]

    assert [(TENANT, PRINCIPAL)] == [(each["tenant"], each["principal"]) for each in shown]
    assert 0 == run(world, "resolve", *COMMANDS["resolve"][0], typed=BODY).exit_code


def test_a_store_that_is_away_ends_no_command_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 2 where the command has asked the store, as `flask idempotency --help` says."""
    world = troubled()

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no answer")

    store = world.store
    for port in (store.recovery, store.expiry, store.responses, store.data_keys, store.ledger):
        for name, member in vars(type(port)).items():
            if callable(member) and not name.startswith("_"):
                monkeypatch.setattr(type(port), name, away)
    ends = {name: run(world, *name.split(), *tried[0], typed=typed(tried[0])) for name, tried in COMMANDS.items()}

    assert [] == [name for name, ended in ends.items() if not isinstance(ended.exception, SystemExit | None)]
    asking = (
        "list",
        "stats",
        "keys status",
        "quota set",
        "quota show",
        "purge",
        "reap",
        "expire",
        "rotate",
        "reconcile",
    )
    assert [] == [name for name in asking if 2 != ends[name].exit_code or "no answer" not in ends[name].stderr]

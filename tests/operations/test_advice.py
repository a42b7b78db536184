"""No advice of report, console or doctor loosens what it is about: one table of it, and the promises after following it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from flask import Flask, abort, request

from flask_idempotency import Idempotency, Step, current_claim
from flask_idempotency.settings import derived_secret
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.operations.advice import OPERATOR, POLICY, TABLE
from tests.operations.advising import PACKAGE, SPEAKERS, Speaker

SAID: Final = [sentence for name in SPEAKERS for sentence in dict.fromkeys(Speaker(name).sentences())]


def test_the_table_has_every_sentence_and_no_other() -> None:
    assert {*SAID} == {each.sentence for each in TABLE}
    assert not [each for each, times in Counter(each.sentence for each in TABLE).items() if times > 1]


def test_no_other_module_advises() -> None:
    """One that builds a finding with a remedy belongs into `SPEAKERS`."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        built = [
            node for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("Finding", "Suggestion")
        ]
        advising = [node for node in built if len(node.args) > 3 or ast.unparse(node.func) == "Suggestion"]
        assert not advising or name in SPEAKERS, name


LOOSENS: Final = re.compile(
    r"required=False|@exempt|IDEMPOTENCY_ENABLED|mode=.observe|on_store_down|scope=|effects=\"plain\"|FLUSH|keep_statuses"
    r"|leave finish|INTERVAL to None|AFTER_LOSS to run|REPLICAS to 0|ENCRYPTION to off|--force|--shred"
)


def test_no_sentence_names_what_takes_protection_away() -> None:
    for each in TABLE:
        assert not LOOSENS.search(each.sentence), each.sentence
        # What only a person may decide says under which condition.
        if each.why == OPERATOR:
            conditional = re.search(
                r"\bif\b|find out|then|Only|is for|for those|acknowledge", each.sentence, re.IGNORECASE
            )
            assert conditional, each.sentence


# Following a sentence that changes what decides about a request.

OLD, NEW = "an-old-secret-9f2c47d1e8b35a60", "another-secret-1d7be45c90a2f386"
KEEP = 1000.0
WAITED = 100.0
"""Seconds between the requests and their retries."""


@dataclass
class Shop:
    """A shop on a store that outlives it. `charges` has the key of each charge, counted outside."""

    store: MemoryStore
    charges: list[str]
    settings: Mapping[str, Any]
    name: str = "shop"
    first: bool = False
    """The deployment in which a request stops between its step and its response."""
    app: Flask = field(init=False)

    def __post_init__(self) -> None:
        self.app = Flask(self.name)
        self.app.config.update(TESTING=True, PROPAGATE_EXCEPTIONS=False, SECRET_KEY=OLD)
        settings = {"secret": OLD, "keep": KEEP, **self.settings}
        steps = "steps" in settings
        idempotency = Idempotency(store=self.store, principal=lambda: "alice", **settings)
        idempotency.init_app(self.app)

        def charge() -> None:
            self.charges.append(request.headers["Idempotency-Key"])
            if request.headers["Idempotency-Key"] == "fails":
                raise RuntimeError("the reply was lost")

        @self.app.post("/pay")
        def pay() -> tuple[str, int, dict[str, str]]:
            if settings.get("effects") == "marked":
                current_claim.point_of_no_return()
            if steps:
                current_claim.step("charge", charge)
                if request.headers["Idempotency-Key"] == "stops" and self.first:
                    abort(503)
            else:
                charge()
            return "a long receipt", 201, {"X-Receipt": "7"}

    def post(self, key: str) -> tuple[int, str]:
        told = self.app.test_client().post("/pay", headers={"Idempotency-Key": key}, json={"amount": 7})
        return told.status_code, told.headers.get("Idempotency-Replayed", "")


def broken(
    before: Mapping[str, Any], after: Mapping[str, Any], *, names: tuple[str, str] = ("shop", "shop")
) -> list[str]:
    """Return which promises do not hold if a shop with requests of each kind is deployed again with other settings.

    By README's table: under plain and marked effects, each charge happens at most once, whatever its worker did.
    """
    clock = FrozenClock()
    store, charges = MemoryStore(clock=clock), list[str]()
    old = Shop(store, charges, before, names[0], first=True)
    keys = ("works", "fails", "stops") if "steps" in before else ("works", "fails")
    assert [201, 500, 503][: len(keys)] == [old.post(key)[0] for key in keys]
    clock.advance(WAITED)
    new = Shop(store, charges, after, names[1])
    told = {key: [new.post(key) for _ in range(2)] for key in keys}
    found = [f"{key} was charged {charges.count(key)} times" for key in told if charges.count(key) != 1]
    found += ["the first response is lost"] if told["works"][0][0] not in (201, 410) else []
    return found + (["the unknown outcome is forgotten"] if told["fails"][0][0] != 409 else [])


STEPS: Final = (Step("charge", effects="plain"),)
FORMER: Final = {"former_identity": {"namespace": "old"}}

FOLLOWED: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "Give workers longer than max_runtime": ({}, {"max_runtime": 20.0}),
    "Set IDEMPOTENCY_LEASE to 30": ({"lease": 3.0}, {"lease": 30.0}),
    "Lower IDEMPOTENCY_WAIT": ({"in_flight": "wait", "wait": 10.0}, {"in_flight": "wait", "wait": 1.0}),
    "{}: {}": ({"in_flight": "wait"}, {"in_flight": "reject"}),
    "{}: within `wait`": ({"in_flight": "reject"}, {"in_flight": "wait"}),
    "Undo the change, or": ({"namespace": "old"}, {"namespace": "new", **FORMER}),
    "; set IDEMPOTENCY_NAMESPACE": ({}, {"namespace": "shop"}),
    "Remove it: no key": ({"namespace": "new", **FORMER}, {"namespace": "new"}),
    "Remove it after": ({"namespace": "new", **FORMER}, {"namespace": "new"}),
    "{}A plain step is in doubt": (
        {"effects": "steps", "steps": STEPS},
        {"effects": "steps", "steps": (Step("charge", effects="deduplicated"),)},
    ),
    "{} What the view does": ({}, {"effects": "deduplicated"}),
    '{}; "marked"': ({}, {"effects": "marked"}),
    "Register @idempotency.resolver": ({"effects": "marked"}, {"effects": "deduplicated"}),
    "had the key of another": ({}, {"ignore_fields": ("/sent_at",)}),
    "could not be kept": ({"max_body": 20}, {"max_body": 200}),
    "set a cookie": ({}, {}),
    "Raise maxmemory": ({}, {"keep": WAITED / 2, "remember": KEEP}),
    "Set max_allowed_packet": ({}, {"max_body": 5}),
    "Set IDEMPOTENCY_SECRET to [a new": ({}, {"secret": (NEW, OLD)}),
    "Drop the last one from": ({"secret": (NEW, OLD)}, {"secret": NEW}),
    "Set IDEMPOTENCY_SECRET to [a value": ({"secret": derived_secret(OLD)}, {"secret": (NEW, derived_secret(OLD))}),
    "Keep what a client acts on": ({}, {"keep_headers": ("X-Receipt",)}),
}
"""The beginning of each sentence that changes a policy, with the settings before and after it was followed."""


@pytest.mark.parametrize("beginning", FOLLOWED)
def test_following_it_keeps_every_promise(beginning: str) -> None:
    """What was charged is not charged again, its response is not lost, and what is unknown stays refused."""
    before, after = FOLLOWED[beginning]

    assert [] == broken(before, after, names=("shop", "shop" if "NAMESPACE of" not in beginning else "other"))


def test_every_sentence_that_changes_a_policy_is_followed() -> None:
    policies = [each.sentence for each in TABLE if each.why == POLICY]
    followed = {sentence: [each for each in FOLLOWED if sentence.startswith(each)] for sentence in policies}

    assert not [sentence for sentence, found in followed.items() if len(found) != 1]
    assert len(FOLLOWED) == len(policies)


LOOSER: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "another scope": ({}, {"scope": "operation"}),
    "switched off": ({}, {"enabled": False}),
    "only observed": ({}, {"mode": "observe"}),
    "another namespace": ({"namespace": "old"}, {"namespace": "new"}),
    "another secret": ({}, {"secret": NEW}),
}


@pytest.mark.parametrize("name", LOOSER)
def test_what_loosens_is_found_by_the_same_oracle(name: str) -> None:
    """The advice of an earlier release among it: another scope renames each key."""
    assert broken(*LOOSER[name])

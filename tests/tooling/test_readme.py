"""The README runs as it is written: its files and its commands, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from flask import Flask, request

from flask_idempotency import Idempotency
from flask_idempotency.engine.policy import Decision, Policy
from tests.decisions import decision_of
from tests.tooling.reader import Reader, blocks, named_file
from tests.tooling.wheels import EmptyEnvironment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BLOCKS = blocks(README)
INSTALLED = [line[2:] for _, text in BLOCKS for line in text.splitlines() if line.startswith("$ pip install ")]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Reader:
    """In an environment that has only the wheel and the packages that the README says to install."""
    wanted = [word for line in INSTALLED for word in shlex.split(line)[2:]]
    environment = EmptyEnvironment(tmp_path_factory.mktemp("reader"), wheel, *wanted)
    reader = Reader(environment.folder, environment.programs)
    for language, text in BLOCKS:
        reader.paste(language, text)
        if language == "python":
            name = named_file(text)
            assert name, f"which file is this: {text[:40]}"
            reader.enter(f"python -c 'import {name.removesuffix('.py')}'")
    return reader


def run(reader: Reader, module: str, scenario: str) -> list[str]:
    (reader.folder / "scenario.py").write_text(f"from {module} import *\nimport {module}\n{scenario}")
    return reader.enter("python scenario.py").split()


def test_it_begins_with_an_installation() -> None:
    assert INSTALLED[0] == "pip install flask-idempotency"
    assert BLOCKS[0] == ("console", "$ pip install flask-idempotency\n")


def test_the_shop_pays_once_and_stores_no_login(reader: Reader) -> None:
    """Through its own migrations, for a caller who signs in."""
    printed = run(
        reader,
        "shop",
        """
client = app.test_client()
key = {"Idempotency-Key": "k"}
print(client.post("/payments", json={"amount": 5}, headers=key).status_code)
for _ in range(2):
    login = client.post("/login", data={"user": "alice"}, headers=key)
    print(login.status_code, login.headers.get("Idempotency-Replayed"), "Set-Cookie" in login.headers)
answers = [client.post("/payments", json={"amount": 5}, headers=key) for _ in range(2)]
print(*[answer.status_code for answer in answers], answers[1].headers["Idempotency-Replayed"])
print(client.post("/payments", json={"amount": 6}, headers=key).json["code"])
with app.app_context():
    print(db.session.query(Payment).count())
""",
    )

    # Two payments are of buy.py: the fixture imports it, and then the page runs it.
    assert printed == ["401", *["204", "None", "True"] * 2, "201", "201", "true", "key-reused", "3"]


def test_the_shop_has_nothing_left_to_migrate(reader: Reader) -> None:
    """Its migrations contain the tables of the records, and drop none of them."""
    reader.enter("flask --app shop db check")
    reader.enter("flask --app shop idempotency db check")


@pytest.mark.parametrize(("release", "corrected"), ((set(), 422), ({422}, 201)), ids=("kept", "released"))
def test_a_corrected_order_needs_a_new_key_or_a_released_status(release: set[int], corrected: int) -> None:
    assert "a corrected body needs a new key, or `release_statuses={422}`" in README
    app = Flask("orders")
    app.config["IDEMPOTENCY_SECRET"] = "s-9f2c47d1e8b35a60"
    app.testing = True
    Idempotency(app, release_statuses=release)

    @app.post("/orders")
    def order() -> tuple[dict[str, str], int]:
        return {"status": "ordered"}, 201 if "item" in request.get_json() else 422

    client = app.test_client()
    answers = [client.post("/orders", json=body, headers={"Idempotency-Key": "k"}) for body in ({}, {"item": 1})]

    assert [422, corrected] == [answer.status_code for answer in answers]
    assert (answers[1].json or {}).get("code") == (None if release else "key-reused")


# Rows of the table: statuses, and what becomes of the key.
DEFAULTS = [
    line.split("|")[1:3]
    for line in re.split(r"^\| status \| key \|$", README, flags=re.MULTILINE)[1].split("\n\n")[0].splitlines()[2:]
]


def statuses(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\b[1-5]\d\d\b", text)}


@pytest.mark.parametrize("effects", ("plain", "marked", "deduplicated"))
def test_the_table_of_statuses_is_what_happens(effects: str) -> None:
    """Every status: kept, released, or by `effects`."""
    kept, released, others, past_point = DEFAULTS
    policy = Policy(effects=effects)  # type: ignore[arg-type]
    by_effects = Decision.QUARANTINE if effects == "plain" else Decision.RELEASE

    for status in [*range(200, 600)]:
        if status in statuses(released[0]):
            expected = Decision.RELEASE
        elif status < 500:
            expected = Decision.KEEP
        else:
            expected = by_effects
        assert decision_of(policy, status=status, error=None, past_point=False) is expected, status
    for status in (500, 502, 504, *statuses(released[0])):
        past = decision_of(Policy(effects="marked"), status=status, error=None, past_point=True)
        assert past is Decision.QUARANTINE
    assert "**kept**" in kept[1]
    assert "**released**" in released[1]
    assert "**quarantined**" in past_point[1]
    assert decision_of(policy, status=500, error=ValueError(), past_point=False) is by_effects
    assert not statuses(others[0])

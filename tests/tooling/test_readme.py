"""The README runs as it is written: its files and its commands, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.policy import Decision, Policy
from tests.tooling.wheels import EmptyEnvironment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE_REDIS = "redis://127.0.0.1:6379/0"

BLOCKS = FENCE.findall(README)
INSTALLED = [line[2:] for _, text in BLOCKS for line in text.splitlines() if line.startswith("$ pip install ")]


@dataclass
class Reader:
    """A person who pastes every block into the file that it names, and every command into one shell."""

    folder: Path
    programs: Path
    redis_url: str
    environment: dict[str, str] = field(default_factory=dict)

    def paste(self, language: str, text: str) -> None:
        if language == "python":
            name = re.match(r"# (\w+)\.py\n", text)
            assert name, f"which file is this: {text[:40]}"
            (self.folder / f"{name[1]}.py").write_text(text)
            self.enter(f"python -c 'import {name[1]}'")
        else:
            for command, expected in commands(text):
                if not command.startswith("pip install "):
                    output = self.enter(command.replace(EXAMPLE_REDIS, self.redis_url))
                    assert not expected or output == expected

    def enter(self, command: str) -> str:
        """Run a command, with what earlier ones have exported. Return what it prints."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        kept = self.folder.parent / "exported"
        done = subprocess.run(
            ["bash", "-ec", f"{command}\nenv -0 > {shlex.quote(str(kept))}"],
            cwd=self.folder,
            env={**self.environment, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.environment = dict(item.split("=", 1) for item in kept.read_text().split("\0") if item)
        return done.stdout


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output that stands below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, wheel: Path, redis_url: str) -> Reader:
    """In an environment that has only the wheel and the packages that the README says to install."""
    wanted = [word for line in INSTALLED for word in shlex.split(line)[2:]]
    environment = EmptyEnvironment(tmp_path_factory.mktemp("reader"), wheel, *wanted)
    reader = Reader(environment.folder, environment.programs, redis_url)
    for language, text in BLOCKS:
        reader.paste(language, text)
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

    assert printed == ["401", *["204", "None", "True"] * 2, "201", "201", "true", "key-reused", "1"]


def test_the_shop_has_nothing_left_to_migrate(reader: Reader) -> None:
    """Its migrations contain the tables of the records, and drop none of them."""
    reader.enter("flask --app shop db check")
    reader.enter("flask --app shop idempotency db check")


def test_a_corrected_order_may_use_its_key_again(reader: Reader) -> None:
    printed = run(
        reader,
        "orders",
        """
client = app.test_client()
for body in ({}, {"item": 1}, {"item": 1}, {}):
    answer = client.post("/orders", json=body, headers={"Idempotency-Key": "k"})
    print(answer.status_code, answer.headers.get("Idempotency-Replayed"))
""",
    )

    assert printed == ["422", "None", "201", "None", "201", "true", "422", "None"]


def test_a_charge_runs_once_and_its_resolver_knows_it(reader: Reader) -> None:
    """The worker dies. The resolver finds the charge, does not know of it, or has it cancelled, and answers the retry."""
    printed = run(
        reader,
        "gateway",
        """
client = app.test_client()
key = {"Idempotency-Key": "paid"}
print(*[client.post("/charges", json={"amount": 5}, headers=key).status_code for _ in range(2)], len(provider.charges))

class Lost(Provider):
    def charge(self, amount, key):
        super().charge(amount, key)
        raise ConnectionError("the reply was lost")

gateway.provider = Lost()
key = {"Idempotency-Key": "lost"}
app.config["PROPAGATE_EXCEPTIONS"] = False
print(*[client.post("/charges", json={"amount": 5}, headers=key).status_code for _ in range(2)])
done = app.test_cli_runner().invoke(args=["idempotency", "reap"])
answer = client.post("/charges", json={"amount": 5}, headers=key)
print(answer.status_code, answer.headers.get("Idempotency-Replayed"), len(provider.charges))

class Silent(Provider):
    refuses = False

    def charge(self, amount, key):
        raise ConnectionError("nobody knows whether it arrived")

    def cancel(self, key):
        return self.refuses

gateway.provider = Silent()
for refuses in (False, True):
    Silent.refuses = refuses
    key = {"Idempotency-Key": f"silent-{refuses}"}
    print(client.post("/charges", json={"amount": 5}, headers=key).status_code)
    done = app.test_cli_runner().invoke(args=["idempotency", "reap"])
    answer = client.post("/charges", json={"amount": 5}, headers=key)
    print(answer.status_code, answer.headers.get("Idempotency-Replayed"))
""",
    )

    assert printed[:8] == ["201", "201", "1", "500", "409", "201", "true", "2"]
    assert printed[8:] == ["500", "409", "None", "500", "402", "true"]


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
        assert policy.decision(response=None, status=status, error=None, past_point=False) is expected, status
    for status in (500, 502, 504, *statuses(released[0])):
        past = Policy(effects="marked").decision(response=None, status=status, error=None, past_point=True)
        assert past is Decision.QUARANTINE
    assert "**kept**" in kept[1]
    assert "**released**" in released[1]
    assert "**quarantined**" in past_point[1]
    assert policy.decision(response=None, status=500, error=ValueError(), past_point=False) is by_effects
    assert not statuses(others[0])

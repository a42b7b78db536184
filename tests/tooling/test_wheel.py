"""What a user of the package receives."""

from __future__ import annotations

import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.tooling.wheels import PACKAGES, EmptyEnvironment, sources

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_every_file_of_the_packages_is_shipped(wheel: Path, tmp_path: Path) -> None:
    """And no other. Without py.typed a type checker ignores our annotations, and a top-level `janitor` is pyjanitor's."""
    tree = sources(tmp_path)
    expected = {
        f"{target}/{file.relative_to(tree / folder).as_posix()}"
        for folder, target in PACKAGES.items()
        for file in (tree / folder).rglob("*")
        if file.is_file() and file.suffix != ".md"  # which are for who reads the sources
    }

    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert shipped == expected
    assert "flask_idempotency/py.typed" in shipped


def test_the_base_asks_for_little(wheel: Path) -> None:
    """Stores and codecs are chosen by extras; the base is what every user needs."""
    needed = metadata(wheel).get_all("Requires-Dist", [])
    base = {requirement.partition("<")[0].partition(">")[0] for requirement in needed if "extra ==" not in requirement}

    assert base == {"flask", "marshmallow"}


def test_its_page_on_pypi_leads_to_the_project(wheel: Path) -> None:
    facts = metadata(wheel)
    links = dict(link.split(", ", 1) for link in facts.get_all("Project-URL", []))

    assert {"Documentation", "Source", "Issues", "Changelog", "Security"} == links.keys()
    assert [link for link in links.values() if not link.startswith("https://")] == []
    assert {f"{links['Documentation']}/{part}/" for part in ("changelog", "security")} < {*links.values()}
    assert "the flask_idempotency contributors" == facts["Author"]
    assert "idempotency-key" in facts["Keywords"].split(",")
    assert "Programming Language :: Python :: 3.14" in facts.get_all("Classifier", [])


def test_what_the_documentation_installs_for_postgresql_can_connect(wheel: Path) -> None:
    """Plain psycopg has no libpq, and fails at its import where the system has none either."""
    needed = metadata(wheel).get_all("Requires-Dist", [])
    drivers = [
        requirement for requirement in needed if requirement.startswith("psycopg") and "postgresql" in requirement
    ]

    assert ["psycopg[binary]"] == [driver.partition("<")[0].partition(">")[0] for driver in drivers]


def test_all_is_the_sum_of_the_extras(wheel: Path) -> None:
    """`flask-idempotency[all]` leaves no feature out."""
    wanted: dict[str, set[str]] = {}
    for requirement in metadata(wheel).get_all("Requires-Dist", []):
        name, _, extra = requirement.partition("; extra == ")
        if extra:
            wanted.setdefault(extra.strip("'\""), set()).add(name)

    everything = wanted.pop("all")

    assert everything == set().union(*wanted.values())


EXTRAS = {
    "redis": """
import redis
assert pay(IDEMPOTENCY_STORE="redis://127.0.0.1:1/0") == [503, 503]
""",
    "sql": """
from sqlalchemy import create_engine
from flask_idempotency.sql import upgrade
upgrade(create_engine("sqlite:///records.sqlite3"))
assert pay(IDEMPOTENCY_STORE="sqlite:///records.sqlite3") == [201, 201]
""",
    "postgresql": """
import psycopg
assert pay(IDEMPOTENCY_STORE="postgresql+psycopg://127.0.0.1:1/shop") == [503, 503]
""",
    "mysql": """
import pymysql
assert pay(IDEMPOTENCY_STORE="mysql+pymysql://127.0.0.1:1/shop") == [503, 503]
""",
    "crypto": """
import base64
assert pay(IDEMPOTENCY_ENCRYPTION="on", IDEMPOTENCY_KEY_RING="one:" + base64.b64encode(bytes(range(32))).decode()) == [201, 201]
""",
    "aws": """
from flask_idempotency.codec.key_sources import load_ring
ring = "aws-kms:arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
assert ["1234abcd12ab34cd56ef1234567890ab"] == [*load_ring(ring).kids()]
""",
    "gcp": """
from flask_idempotency.codec.key_sources import load_ring
ring = "gcp-kms:projects/p/locations/l/keyRings/r/cryptoKeys/k"
assert ["k"] == [*load_ring(ring).kids()]
""",
    "celery": """
import os
os.environ["FLASK_APP"] = "shop"
with open("shop.py", "w") as file:
    print("from flask import Flask", "from flask_idempotency import Idempotency", sep=";", file=file)
    print("app = Flask('shop')", "app.testing = True", sep=";", file=file)
    print("Idempotency(app, secret='0123456789abcdef', broker_url='filesystem:///tmp')", file=file)
from flask_idempotency.janitor.celery import app
assert any("reap" in name for name in app.tasks), list(app.tasks)
""",
    "rabbitmq": """
import pika, threading
from types import SimpleNamespace
from flask_idempotency.consumers import Inbox, rabbit
from flask_idempotency.stores.memory import MemoryStore
config = {"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60c1d47be2a5583f09"}
inbox = Inbox.standalone(config, "billing")
done = []
class Channel:
    connection = SimpleNamespace(call_later=lambda seconds, call: call(), add_callback_threadsafe=lambda call: call())
    consumer_tags = ["tag"]
    basic_qos = lambda self, prefetch_count: None
    basic_consume = lambda self, queue, received: setattr(self, "received", received) or "tag"
    basic_cancel = lambda self, tag: None
    basic_ack = lambda self, tag: stop.set()
    def start_consuming(self):
        self.received(self, pika.spec.Basic.Deliver(delivery_tag=1), pika.BasicProperties(message_id="m-1"), b"5")
        assert stop.wait(60)
stop = threading.Event()
Channel.connection.call_later = lambda seconds, call: None
rabbit.consume(Channel(), "billing", inbox, lambda message: done.append(message.body), dead_letters=True, stop=stop)
assert done == [b"5"]
""",
    "kafka": """
import threading
from confluent_kafka import Consumer
from flask_idempotency.consumers import Inbox, kafka
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.memory import MemoryStore
config = {"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60c1d47be2a5583f09"}
inbox = Inbox.standalone(config, "billing")
stop = threading.Event()
stop.set()
for commits in (False, True):
    consumer = Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "enable.auto.commit": commits, "log_level": 0})
    try:
        kafka.consume(consumer, "t", inbox, lambda message: None, stop=stop)
        assert not commits
    except ConfigurationError:
        assert commits
""",
    "cli": """
import os
os.environ["FORCE_COLOR"] = "1"
for name in ("NO_COLOR", "TERM"):
    os.environ.pop(name, None)
from flask_idempotency.cli.output import in_colour
assert in_colour()
""",
    "client": """
import httpx
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
keyed = httpx.MockTransport(lambda request: httpx.Response(201 if "Idempotency-Key" in request.headers else 400))
with httpx.Client(transport=IdempotentTransport(keyed)) as client:
    assert client.post("http://shop.example/payments").status_code == 201
IdempotentAdapter().close()
""",
    "openapi": """
from apispec import APISpec
from flask import Flask
from flask_idempotency import Idempotency
from flask_idempotency.openapi.apispec import IdempotencyPlugin
app = Flask("shop")
app.testing = True
Idempotency(app, secret="0123456789abcdef", publish=True, browser_module="/idempotency.js")
app.post("/payments", endpoint="pay")(lambda: ("paid", 201))
spec = APISpec("Payments", "1", "3.1.0", plugins=[IdempotencyPlugin(app)])
spec.path("/payments", operations={"post": {"responses": {"201": {"description": "Paid."}}}})
assert "x-idempotency" in spec.to_dict()["paths"]["/payments"]["post"]
assert app.test_client().get("/.well-known/idempotency/policy-1.schema.json").status_code == 200
assert app.test_client().get("/idempotency.js").status_code == 200
""",
    "metrics": """
import prometheus_client
assert pay(IDEMPOTENCY_METRICS=True) == [201, 201]
assert b"idempotency_replays_total{" in prometheus_client.generate_latest()
""",
    "otel": """
from opentelemetry import trace
assert pay(IDEMPOTENCY_OPENTELEMETRY=True) == [201, 201]
""",
    "zstd": """
from flask_idempotency.codec.compression import COMPRESSIONS
assert pay(IDEMPOTENCY_COMPRESSION="zstd") == [201, 201]
assert len(COMPRESSIONS["zstd"].compress(bytes(5000))) < 50
""",
    "speed": """
from flask_idempotency.codec.canonical import canonical_json
assert pay() == [201, 201]
assert canonical_json(b'{"b": 1, "a": 2}') == b'{"a":2,"b":1}'
""",
}

PAY = """
from flask import Flask
from flask_idempotency import Idempotency

def pay(**config):
    app = Flask("shop")
    app.config.update(config, TESTING=True, IDEMPOTENCY_SECRET="0123456789abcdef0123456789abcdef")
    Idempotency(app)
    app.post("/payments", endpoint="pay")(lambda: ("paid", 201))
    client = app.test_client()
    headers = {"Idempotency-Key": "k"}
    return [client.post("/payments", headers=headers).status_code for _ in range(2)]
"""


def test_every_extra_is_tried(wheel: Path) -> None:
    """Each does something: an extra whose packages nothing imports is not offered."""
    assert {*EXTRAS, "all"} == set(metadata(wheel).get_all("Provides-Extra", []))


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_enough_for_its_part(wheel: Path, tmp_path: Path, extra: str) -> None:
    """In an environment that has the package with this extra only."""
    environment = EmptyEnvironment(tmp_path, wheel, f"flask-idempotency[{extra}]")

    done = environment.run("python", "-c", PAY + EXTRAS[extra])

    assert done.returncode == 0, done.stderr


def test_an_environment_has_no_other_package(wheel: Path, tmp_path: Path) -> None:
    """Otherwise the tests above would pass without their extra."""
    environment = EmptyEnvironment(tmp_path, wheel)

    imports = [
        environment.run("python", "-c", f"import {name}") for name in ("flask", "flask_idempotency", "redis", "pytest")
    ]

    assert [done.returncode for done in imports] == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("base", ([], ["flask==3.0.0", "marshmallow==3.20.0"]), ids=("newest", "oldest"))
def test_the_quickstart_runs_in_an_empty_environment(wheel: Path, tmp_path: Path, base: list[str]) -> None:
    """With the wheel and the packages of its base, as pip resolves them today: an optional import in a base module fails."""
    environment = EmptyEnvironment(tmp_path, wheel, *base, newest=True)

    done = environment.run("python", "-c", QUICKSTART, str(ROOT / "README.md"))

    assert done.returncode == 0, done.stderr
    package = str(environment.packages / "flask_idempotency")
    assert [*[package] * 2, "201", "None", "201", "true"] == done.stdout.split()


@pytest.mark.slow
def test_the_lowest_versions_of_every_extra_send_through_each_client(wheel: Path, tmp_path: Path) -> None:
    """Which pip must find together, too."""
    needed = [Requirement(each) for each in metadata(wheel).get_all("Requires-Dist", ())]
    lowest = {
        f"{each.name}{'[binary]' if each.extras else ''}=={bound.version}"
        for each in needed
        for bound in each.specifier
        if bound.operator == ">="
    }
    environment = EmptyEnvironment(tmp_path, wheel, *sorted(lowest), newest=True)

    done = environment.run("python", "-c", LOWEST)

    assert done.returncode == 0, done.stderr
    assert ["201 None", "201 true"] * 3 == done.stdout.splitlines()


LOWEST = """
import asyncio, pkgutil, threading
from importlib import import_module

import flask_idempotency, httpx, requests
from flask import Flask
from flask_idempotency import Idempotency
from flask_idempotency.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter
from werkzeug.serving import make_server

for module in pkgutil.walk_packages(flask_idempotency.__path__, "flask_idempotency."):
    # The janitor looks for an application.
    if not {"testing", "janitor", "__main__"} & {*module.name.split(".")}:
        import_module(module.name)

app = Flask("shop")
app.testing = True
app.post("/payments")(lambda: ({"id": 1}, 201))
Idempotency(app, store="memory://")
server = make_server("127.0.0.1", 0, app, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.port}/payments"


def show(answer):
    print(answer.status_code, answer.headers.get("Idempotency-Replayed"))


for _ in range(2):
    with httpx.Client(transport=IdempotentTransport()) as client:
        show(client.post(url, json={"amount": 5}, headers={"Idempotency-Key": "httpx"}))
with requests.Session() as session:
    session.mount("http://", IdempotentAdapter())
    for _ in range(2):
        show(session.post(url, json={"amount": 5}, headers={"Idempotency-Key": "requests"}))


async def send():
    async with httpx.AsyncClient(transport=AsyncIdempotentTransport()) as client:
        for _ in range(2):
            show(await client.post(url, json={"amount": 5}, headers={"Idempotency-Key": "asyncio"}))


asyncio.run(send())
server.shutdown()
"""

QUICKSTART = """
import re, sys
from pathlib import Path
import flask_idempotency
import flask_idempotency.janitor
print(Path(flask_idempotency.__file__).parent, Path(flask_idempotency.janitor.__file__).parents[1])

names = {"__name__": "quickstart"}
readme = Path(sys.argv[1]).read_text("utf-8")
exec(re.search("^```python\\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1], names)
client = names["app"].test_client()
for _ in range(2):
    answer = client.post("/payments", headers={"Idempotency-Key": "k"})
    print(answer.status_code, answer.headers.get("Idempotency-Replayed"))
"""

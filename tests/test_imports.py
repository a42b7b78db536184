"""What an import of the package loads, and when: the rest would slow the start of every worker."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Barrier, Thread
from typing import TYPE_CHECKING, Any

import pytest

import flask_idempotency
from tests.sql_backends import make_tables

if TYPE_CHECKING:
    from example_app.demo.servers import RedisServer

LOADED = """
import sys
import flask
{before}
before = set(sys.modules)
{ours}
print(*sorted(set(sys.modules) - before))
"""
OURS = "flask_idempotency"
EXTENSION = "from flask_idempotency import Idempotency"
REDIS_STORE = f"{EXTENSION}\nfrom flask_idempotency.assembly import build_store\nbuild_store('redis://127.0.0.1:1')"

APPLICATION = """
from flask import Flask
from flask_idempotency import Idempotency

app = Flask("shop")
app.testing = True
Idempotency(app, store={store!r}, secret="s-9f2c47d1e8b35a60", in_flight="wait")

@app.post("/payments")
def pay():
    return {{"paid": True}}, 201

def post(key):
    environ = {{
        "REQUEST_METHOD": "POST", "PATH_INFO": "/payments", "SERVER_NAME": "shop", "SERVER_PORT": "80",
        "wsgi.url_scheme": "http", "wsgi.input": BytesIO(b'{{"cents": 5}}'), "wsgi.errors": sys.stderr,
        "CONTENT_LENGTH": "12", "CONTENT_TYPE": "application/json",
    }}
    if key:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    answered = []
    body = app.wsgi_app(environ, lambda status, headers, exc_info=None: answered.append((status, dict(headers))))
    b"".join(body)
    body.close()
    return answered[0]
"""
# The first request without a key, so that what Flask itself loads at a first request does not count.
FIRST_REQUESTS = """
import sys
from io import BytesIO
{application}
assert post(None)[0].startswith("201")
before = set(sys.modules)
first, again = post("a"), post("a")
assert first[0].startswith("201"), first
assert again[1].get("Idempotency-Replayed") == "true", again
print(*sorted(set(sys.modules) - before))
"""


EXHAUSTED = """
import sys
from io import BytesIO
{application}
assert post(None)[0].startswith("201")

class Exhausted:
    def find_spec(self, name, path=None, target=None):
        raise OSError(24, "Too many open files", name)

sys.meta_path.insert(0, Exhausted())
print(post("a")[0])
"""


def printed(code: str) -> list[str]:
    """The words that this code prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@cache
def loaded(ours: str, *, before: str = "") -> list[str]:
    """The modules that this loads on top of Flask, in a process of its own."""
    return printed(LOADED.format(before=before, ours=ours))


def test_the_bare_import_loads_only_itself() -> None:
    """Not even Flask: another program may need one name, such as an exception."""
    code = "import sys; before = set(sys.modules); import flask_idempotency; print(*set(sys.modules) - before)"
    modules = set(printed(code))

    assert {module for module in modules if module.partition(".")[0] not in sys.stdlib_module_names} == {OURS}


def test_a_name_of_the_engine_loads_only_the_engine() -> None:
    names = "LeaseLost, Decision, Quota, Happened"
    code = f"import sys; before = set(sys.modules); from flask_idempotency import {names}; print(*set(sys.modules) - before)"
    packages = {".".join(module.split(".")[:2]) for module in printed(code)}

    assert {each for each in packages if each.partition(".")[0] not in sys.stdlib_module_names} == {
        OURS,
        f"{OURS}.engine",
    }


@pytest.mark.parametrize(
    ("ours", "before"), ((EXTENSION, ""), (REDIS_STORE, "import redis")), ids=("package", "Redis store")
)
def test_an_import_loads_no_other_package(ours: str, before: str) -> None:
    """Each optional package is loaded by what needs it, when a setting asks for it."""
    others = {module.partition(".")[0] for module in loaded(ours, before=before)}

    assert others - set(sys.stdlib_module_names) == {OURS}


def test_an_import_loads_no_optional_part() -> None:
    """Not the group of commands itself, which an application registers, but all that it prints and asks."""
    modules = loaded(REDIS_STORE, before="import redis")
    optional = ("cli.output", "codec.encryption", "janitor", "metrics", "sql", "stores.sql", "testing")
    of_operators = (
        "maintenance",
        "operations.admin",
        "operations.doctor",
        "operations.examination",
        "operations.records",
        "web.doctor",
        "web.janitor",
    )
    of_others = ("stores.memory", "stores.tiered", "stores.redis.replay_cache", "client")
    when_used = (
        "stores.redis.activity",
        "stores.redis.admin.data_keys",
        "stores.redis.admin.health",
        "stores.redis.admin.janitor",
        "stores.redis.cluster",
        "stores.redis.journals",
        "stores.redis.notifications",
        "stores.redis.passed_client",
        "stores.redis.replication",
        "stores.redis.scan",
        "stores.redis.quota",
    )

    assert f"{OURS}.stores.redis.store" in modules
    assert [part for part in (*optional, *of_operators, *of_others, *when_used) if f"{OURS}.{part}" in modules] == []


IN_MEMORY = APPLICATION.format(store="memory://")
ON_REDIS = APPLICATION.format(store="redis://127.0.0.1:1")
RARE = (
    "consumers",
    "engine.operations",
    "engine.passwords",
    "engine.quota",
    "engine.steps",
    "operations.times",
    "settings.cors",
    "settings.encryption",
    "settings.schema",
    "settings.transport",
    "stores.notifications",
    "stores.redis.multi_host",
    "stores.redis.notifications",
    "stores.redis.urls",
    "web.application_database",
    "web.browser",
    "web.current_claim",
    "web.key_status",
    "web.observing",
    "web.problem_pages",
    "web.problem_types",
    "web.unreached",
)
PROTOCOLS = ("engine.capabilities", "engine.store")


def test_an_application_loads_no_other_package() -> None:
    """Settings that need no conversion need no marshmallow, and only a Redis store needs redis-py."""
    others = {module.partition(".")[0] for module in loaded(IN_MEMORY)} - set(sys.stdlib_module_names)

    assert others <= {OURS, "orjson"}


def test_a_setting_that_needs_a_conversion_loads_marshmallow() -> None:
    converted = IN_MEMORY.replace('in_flight="wait"', 'required="yes"')

    assert {"marshmallow", f"{OURS}.settings.schema"} <= set(loaded(converted))


def test_an_application_on_redis_loads_no_rare_part() -> None:
    modules = loaded(f"import time; time.sleep = lambda _: None\n{ON_REDIS}")

    assert f"{OURS}.stores.redis.store" in modules
    assert [part for part in (*RARE, *PROTOCOLS) if f"{OURS}.{part}" in modules] == []
    assert "marshmallow" not in modules


def of_first_requests(url: str) -> list[str]:
    """The modules that the first keyed requests of a worker load."""
    return printed(FIRST_REQUESTS.format(application=APPLICATION.format(store=url)))


@pytest.mark.slow
def test_the_first_keyed_requests_import_nothing(redis_server: RedisServer) -> None:
    """A worker loads its store before it takes requests: the first client would wait, and so would every thread behind it."""
    assert of_first_requests(redis_server.url) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", ("memory", "sqlite"))
def test_the_first_keyed_requests_import_nothing_without_a_server(store: str, tmp_path: Path) -> None:
    url = "memory://"
    if store == "sqlite":
        url = f"sqlite:///{tmp_path / 'records.db'}"
        make_tables(url)

    assert of_first_requests(url) == []


LATER_REQUESTS = """
import sys
from io import BytesIO
{application}
assert post(None)[0].startswith("201")

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("flask_idempotency."):
            raise ModuleNotFoundError(name)

app.testing = False
sys.meta_path.insert(0, Gone())
send, data = app.test_client().post, {{"cents": "5"}}
key = {{"Idempotency-Key": "a"}}
print(
    send("/payments", json=data, headers=key).status_code,
    send("/payments", json={{}}, headers=key).status_code,
    send("/payments", data=data, headers={{"Idempotency-Key": "form"}}).status_code,
    send("/payments", data=bytes(2**20), headers={{"Idempotency-Key": "long"}}).status_code,
)
"""


def test_later_requests_do_not_read_files_that_a_deployment_may_have_replaced() -> None:
    """The first request loads what a refusal, a form and a long body need, which an application without requests does not."""
    assert printed(LATER_REQUESTS.format(application=IN_MEMORY)) == ["201", "422", "201", "201"]


def test_the_first_request_loads_what_a_waiter_and_a_restart_of_redis_need() -> None:
    first = "from io import BytesIO\nassert post(None)[0].startswith('201')"
    modules = loaded(f"import time; time.sleep = lambda _: None\n{ON_REDIS}\n{first}")

    assert {f"{OURS}.stores.redis.{part}" for part in ("notifications", "admin.data_loss")} <= set(modules)


@pytest.mark.parametrize("name", RARE)
def test_what_is_rare_is_a_module_of_the_package(name: str) -> None:
    assert importlib.util.find_spec(f"{OURS}.{name}") is not None


@pytest.mark.parametrize(
    ("application", "status"),
    (
        (ON_REDIS, "503"),
        (ON_REDIS.replace('in_flight="wait"', 'on_store_down="allow"'), "201"),
        (IN_MEMORY.replace('"CONTENT_LENGTH": "12"', '"wsgi.input_terminated": True'), "201"),
        (IN_MEMORY.replace("application/json", "application/x-www-form-urlencoded"), "201"),
    ),
    ids=("refused", "allowed", "chunked", "form"),
)
def test_a_worker_that_can_open_no_more_files_handles_keys(application: str, status: str) -> None:
    """Its store then fails for the same reason, and that refusal may be its first."""
    code = EXHAUSTED.format(application=application)

    assert printed(f"import time; time.sleep = lambda _: None\n{code}")[0] == status


@pytest.mark.parametrize(
    "name", ("StepsChanged", "StepInDoubt", "NotStorable", "NotCommitted", "LeaseLost", "StoreUnavailable")
)
def test_every_error_that_a_step_lets_end_its_view_is_public(name: str) -> None:
    assert issubclass(getattr(flask_idempotency, name), flask_idempotency.IdempotencyError)


def test_every_public_name_is_what_its_module_has() -> None:
    """The block for type checkers and `_NAMES` say the same, and both list what `__all__` does."""
    tree = ast.parse(Path(flask_idempotency.__file__).read_text("utf-8"))
    (block,) = (each for each in tree.body if isinstance(each, ast.If) and not isinstance(each.test, ast.UnaryOp))
    imported = {
        str(each.module).removeprefix(f"{OURS}."): tuple(name.name for name in each.names)
        for each in block.body
        if isinstance(each, ast.ImportFrom)
    }

    assert imported == flask_idempotency._NAMES
    assert sorted(name for names in imported.values() for name in names) == flask_idempotency.__all__
    for module, names in imported.items():
        for name in names:
            assert getattr(flask_idempotency, name) is getattr(importlib.import_module(f"{OURS}.{module}"), name)


@pytest.mark.slow
def test_all_names_are_listed_before_their_modules_are_loaded_and_a_star_imports_them() -> None:
    listed = "import sys, flask_idempotency as f; print(set(f.__all__) <= set(dir(f)), 'flask' in sys.modules)"
    starred = "from flask_idempotency import *\nprint(Idempotency.__name__, LeaseLost.__name__)"

    assert printed(f"{listed}\n{starred}") == ["True", "False", "Idempotency", "LeaseLost"]


@pytest.mark.slow
def test_a_module_is_found_beside_the_names() -> None:
    """`from flask_idempotency import signals` looks for a name first."""
    code = "import flask_idempotency.engine.errors\nfrom flask_idempotency import signals\nprint(signals.__name__)"

    assert printed(code) == ["flask_idempotency.signals"]


def test_another_name_is_an_attribute_error() -> None:
    package: Any = flask_idempotency

    with pytest.raises(AttributeError, match="module 'flask_idempotency' has no attribute 'Idempotence'"):
        package.Idempotence  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Idempotence'"):
        exec("from flask_idempotency import Idempotence")  # noqa: S102


def test_a_public_class_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(flask_idempotency.LeaseLost)) is flask_idempotency.LeaseLost  # noqa: S301


def test_threads_that_need_a_name_first_get_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flask_idempotency.Idempotency
    monkeypatch.delitem(vars(flask_idempotency), "Idempotency")
    barrier, found = Barrier(8), list[object]()

    def look() -> None:
        barrier.wait(60)
        found.append(flask_idempotency.Idempotency)

    threads = [Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert found == [expected] * 8

"""Tools that clients use read the example's OpenAPI document: a generated client, and schemathesis.

They have an environment of their own. It is made once for each set of pins, in .compat, and takes 135 MB.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from apispec import APISpec
from flask import Flask

from example_app import openapi
from example_app.demo.client import LossyWire
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.openapi import describe
from tests.docs.test_pages import BLOCK, ROOT
from tests.example_app.conftest import Customer, MakeApp, Server

pytestmark = pytest.mark.slow

PINS = ROOT / "requirements" / "openapi-tools.txt"
HOOKS = next(
    block
    for block in BLOCK.findall((ROOT / "docs" / "guides" / "openapi.md").read_text(encoding="utf-8"))
    if "import schemathesis" in block
)
# For a document that does not say where the key goes.
ALL_KEYS = """
    case.headers.update({"Idempotency-Key": str(uuid4()), "X-Idempotency-Key": str(uuid4())})
"""


@pytest.fixture(scope="session")
def tools() -> Path:
    """Return the folder of the tools' programs. Many processes may ask for it at the same time."""
    made_for = f"{sys.implementation.cache_tag}\0{ROOT}\0{PINS.read_text(encoding='utf-8')}"
    folder = ROOT / ".compat" / f"openapi-tools-{sha256(made_for.encode()).hexdigest()[:12]}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.EnvBuilder(symlinks=True).create(folder)
            # run.py puts pip into .venv only if the interpreter behind it has none.
            pip = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.executable).resolve())
            options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
            command = [
                pip,
                "-m",
                "pip",
                "--python",
                str(folder / "bin" / "python"),
                "install",
                *options,
                "-r",
                str(PINS),
            ]
            subprocess.run(command, check=True, env=clean())
            (folder / "complete").touch()
    return folder / "bin"


def clean(**more: str) -> dict[str, str]:
    """Return the environment without what would let our packages in."""
    return {name: each for name, each in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | more


@pytest.fixture
def app(make_app: MakeApp) -> Flask:
    """Without faults on request, and with a page for each error, as in production."""
    return make_app(DEMO_SIMULATE=False, PROPAGATE_EXCEPTIONS=False)


def documents(app: Flask) -> dict[str, Any]:
    """Return the document as it is generated without our plugin, and as we describe it."""
    spec = app.extensions[openapi.SPEC]
    plain = APISpec.to_dict(spec)
    return {
        "plain": plain,
        "described": spec.to_dict(),
        "optional": describe(plain, app, header="optional"),
    }


# A generated client


def generated(tools: Path, folder: Path, document: Any) -> str:
    """Generate a package into this folder, without a warning. Return its name."""
    name = f"generated_{folder.name}"
    file = folder / "openapi.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    done = subprocess.run(
        [
            str(tools / "openapi-python-client"),
            *("generate", "--path", str(file), "--meta", "none", "--output-path", str(folder / name)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=clean(PATH=f"{tools}{os.pathsep}{os.environ['PATH']}"),  # it formats with ruff
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    return name


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_generated_client_pays_once_over_a_lost_reply(
    tools: Path, importable: Path, app: Flask, server: Server, wire: LossyWire, customer: Customer
) -> None:
    """Its function asks for the key, and the caller passes the same one again."""
    name = generated(tools, importable, documents(app)["described"])
    package = importlib.import_module(name)
    create_payment = importlib.import_module(f"{name}.api.default.create_payment")
    models = importlib.import_module(f"{name}.models")
    body = models.NewPayment(account="acc_1", amount=1050, currency="EUR")

    with package.AuthenticatedClient(base_url=wire.url, token="tok_alice") as client:
        wire.lose_next_reply()
        with pytest.raises(httpx.TransportError):
            create_payment.sync_detailed(client=client, body=body, idempotency_key="key-1")
        paid = create_payment.sync_detailed(client=client, body=body, idempotency_key="key-1")
        other = models.NewPayment(account="acc_2", amount=1, currency="EUR")
        refused = create_payment.sync(client=client, body=other, idempotency_key="key-1")
        invalid = create_payment.sync(
            client=client, body=models.NewPayment(account="", amount=1, currency="EUR"), idempotency_key="key-2"
        )

    assert (201, "true") == (paid.status_code, paid.headers["Idempotency-Replayed"])
    assert [paid.parsed.to_dict()] == customer.payments()
    # It reads our problem as ours, and the service's own by the service's schema.
    assert ("IdempotencyProblem", "key-reused") == (type(refused).__name__, refused.code)
    assert "invalid-input" == invalid.code


def test_a_generated_client_with_our_transport_pays_once_over_a_lost_reply(
    tools: Path, importable: Path, app: Flask, server: Server, wire: LossyWire, customer: Customer
) -> None:
    """The function asks for no key. The transport sends one, and sends it again after the lost reply."""
    name = generated(tools, importable, documents(app)["optional"])
    package = importlib.import_module(name)
    create_payment = importlib.import_module(f"{name}.api.default.create_payment")
    models = importlib.import_module(f"{name}.models")
    options = {"transport": IdempotentTransport()}

    with package.AuthenticatedClient(base_url=wire.url, token="tok_alice", httpx_args=options) as client:
        wire.lose_next_reply()
        paid = create_payment.sync(client=client, body=models.NewPayment(account="acc_1", amount=1050, currency="EUR"))

    assert [paid.to_dict()] == customer.payments()
    assert 1 == wire.lost
    first, second = server.keys[:2]
    assert first == second is not None


# schemathesis


def failures(tools: Path, folder: Path, document: Any, url: str, *, hooks: str, only: str = "") -> set[tuple[str, str]]:
    """Return what schemathesis finds on this document, by operation. `only`: of the operation with this name."""
    (folder / "hooks.py").write_text(hooks, encoding="utf-8")
    (folder / "openapi.json").write_text(json.dumps(document), encoding="utf-8")
    report = folder / "report.json"
    options = ["--phases", "examples,coverage", "--generation-deterministic", "--continue-on-failure", "--no-color"]
    options += ["--include-name", only] if only else []
    done = subprocess.run(
        [
            str(tools / "schemathesis"),
            *("run", "openapi.json", "--url", url, "--report", "json", "--report-json-path", str(report), *options),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=clean(SCHEMATHESIS_HOOKS="hooks", NO_PROXY="127.0.0.1"),
    )
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert [] == found["errors"], done.stdout
    assert found["test_cases"]["generated"] > (20 if only else 200)
    return {(operation, each["title"]) for each in found["failures"] for operation in each["operations"]}


def test_schemathesis_finds_what_it_finds_without_us(tools: Path, tmp_path: Path, app: Flask, server: Server) -> None:
    """With the hook of the guide. Without it, each operation refuses drawn keys that were used for another body."""
    documented = documents(app)
    everywhere = HOOKS.replace(
        "def before_call(context, case, kwargs):\n", f"def before_call(context, case, kwargs):{ALL_KEYS}"
    )
    unhooked = HOOKS.replace("@schemathesis.hook\n", "")

    plain = failures(tools, tmp_path, documented["plain"], server.url, hooks=everywhere)
    described = failures(tools, tmp_path, documented["described"], server.url, hooks=HOOKS)
    reused = failures(tools, tmp_path, documented["described"], server.url, hooks=unhooked, only="POST /payments")

    assert {("POST /v1/charges", "Schema-violating request accepted")} == plain  # capture=0 is a boolean to a form
    assert plain == described
    assert ("POST /payments", "Schema-valid request rejected") in reused

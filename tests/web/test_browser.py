"""The browser module is small, is served and cached, and knows the codes that the Python client knows."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, render_template_string
from werkzeug.wrappers import Response

from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.client.responses import BY_CODE, REPLAY_MARKS, STRIPE, UNDONE, Verdict
from flask_idempotency.settings.profiles import PROFILES, Profile
from flask_idempotency.web.browser import module_source
from flask_idempotency.web.problem_pages import as_page
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, render
from tests.lab.programs import NODE

ROOT = Path(__file__).parents[2]
PAGE = "{{ idempotency_script() }}"


def new_app(**settings: Any) -> Flask:
    app = Flask("shop")
    app.testing = True
    Idempotency(app, **{"secret": "0123456789abcdef", "browser_module": "/idempotency.js", **settings})
    app.get("/")(lambda: render_template_string(PAGE))
    return app


def test_the_module_fits_4096_bytes() -> None:
    assert len(gzip.compress(module_source(), compresslevel=9)) <= 4096


def test_the_module_imports_nothing_and_exports_its_api() -> None:
    source = module_source().decode()

    assert not re.search(r"\bimport\b", source)
    assert {"send", "cancel", "enhance", "pending", "forget", "newKey", "IdempotencyError"} == set(
        re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", source, re.MULTILINE)
    )


def test_the_module_has_the_syntax_of_a_module(tmp_path: Path) -> None:
    copy = tmp_path / "idempotency.mjs"
    copy.write_bytes(module_source())
    checked = subprocess.run([NODE, "--check", str(copy)], capture_output=True, text=True, timeout=60)

    assert (0, "") == (checked.returncode, checked.stderr)


def test_the_module_knows_the_codes_of_the_python_client() -> None:
    """It leaves out those that mean the same without their code: 429, and what is retried with a status of 5xx."""
    table = module_source().decode().partition("const VERDICTS = {")[2].partition("};")[0]
    written = {name: set(codes.split()) for name, codes in re.findall(r'"?([\w-]+)"?: "([^"]*)"', table)}
    names = {
        Verdict.REFUSED: "refused",
        Verdict.RETRY_UNDONE: "undone",
        Verdict.IN_FLIGHT: "in-flight",
        Verdict.KEY_REUSED: "key-reused",
        Verdict.OUTCOME_UNKNOWN: "outcome-unknown",
        Verdict.NOT_KEPT: "done",
        Verdict.ERASED: "done",
        Verdict.EXPIRED: "done",
        Verdict.VOIDED: "voided",
    }
    expected: dict[str, set[str]] = {}
    for code, verdict in BY_CODE.items():
        if verdict not in (Verdict.RETRY, Verdict.RETURN) and code != "quota-exceeded":
            expected.setdefault(names[verdict], set()).add(code)
    expected["in-flight"] |= {code for code, ours in STRIPE.items() if ours == "in-flight"} | {"request_in_progress"}
    expected["key-reused"] |= {"idempotency_payload_mismatch"}

    assert expected == written


def test_the_module_knows_the_statuses_and_marks_of_the_python_client() -> None:
    source = module_source().decode()
    (undone,) = re.findall(r"status < 500 && !/(.+?)/\.test", source)
    (mark,) = re.findall(r"/(\S+?-replay\S*?)/\.test\(name\)", source)

    assert UNDONE == {status for status in range(100, 600) if re.search(undone, str(status))}
    assert all(re.search(mark, name.lower()) for name in REPLAY_MARKS)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_module_knows_a_problem_as_a_page(profile: Profile, tmp_path: Path) -> None:
    """A program that asks for HTML would take a request that may have run for one that is over, and run it again."""
    sent = []
    for code, row in PROBLEMS.items():
        problem = Problem(code, status=None if row.status else 201)
        document = render(problem, profile=profile, docs_url="https://docs.example/", response_class=Response)
        page = as_page(document, problem, Response, same_key=False)
        sent += [[each.status_code, list(each.headers), each.get_data(as_text=True)] for each in (document, page)]
    script = (
        f"import {{ verdictOf }} from './module.mjs'; const sent = {json.dumps(sent)};"
        "console.log(JSON.stringify(sent.map(([status, headers, text]) =>"
        " verdictOf({ status, headers: new Headers(headers) }, text))))"
    )
    (tmp_path / "module.mjs").write_bytes(module_source() + b"\nexport { verdictOf };\n")
    (tmp_path / "ask.mjs").write_text(script)

    ran = subprocess.run([NODE, "ask.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)

    verdicts = json.loads(ran.stdout)
    assert {"outcome-unknown", "in-flight", "key-reused", "done"} < set(verdicts[::2])
    assert verdicts[::2] == verdicts[1::2]


def test_the_module_is_served_and_cached_for_a_day() -> None:
    client = new_app().test_client()
    response = client.get("/idempotency.js")
    etag = response.headers["ETag"]
    again = client.get("/idempotency.js", headers={"If-None-Match": etag})

    assert (200, "text/javascript") == (response.status_code, response.mimetype)
    assert module_source() == response.data
    assert response.cache_control.public
    assert 86400 == response.cache_control.max_age
    assert not etag.startswith("W/")
    assert (304, b"") == (again.status_code, again.data)


def test_the_module_is_not_served_by_default() -> None:
    app = new_app(browser_module=None)

    assert 404 == app.test_client().get("/idempotency.js").status_code
    assert "idempotency_browser_module" not in app.view_functions


def test_the_tag_loads_the_module() -> None:
    app = new_app()
    page = app.test_client().get("/")
    mounted = app.test_client().get("/", base_url="http://localhost/shop")

    assert '<script type="module" src="/idempotency.js"></script>' == page.text
    assert '<script type="module" src="/shop/idempotency.js"></script>' == mounted.text


def test_the_tag_carries_the_nonce_of_a_content_security_policy() -> None:
    app = new_app()
    with app.test_request_context():
        tag = render_template_string('{{ idempotency_script(nonce="a\\"b") }}')

    assert '<script type="module" src="/idempotency.js" nonce="a&#34;b"></script>' == tag


def test_the_tag_of_a_module_that_is_not_served_is_refused() -> None:
    with new_app(browser_module=None).test_request_context(), pytest.raises(ConfigurationError, match="BROWSER_MODULE"):
        render_template_string(PAGE)


def test_pages_render_while_the_extension_is_switched_off() -> None:
    client = new_app(enabled=False).test_client()

    assert '<script type="module" src="/idempotency.js"></script>' == client.get("/").text
    assert 200 == client.get("/idempotency.js").status_code


@pytest.mark.parametrize("path", ("idempotency.js", "//cdn.example/idempotency.js"))
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="browser_module"):
        new_app(browser_module=path)


def test_the_module_is_served_on_every_host() -> None:
    app = Flask("shop", host_matching=True, static_host="static.test")
    app.testing = True
    Idempotency(app, secret="0123456789abcdef", browser_module="/idempotency.js")

    assert 200 == app.test_client().get("/idempotency.js", base_url="http://any.test").status_code


def test_a_wheel_holds_the_module() -> None:
    """A folder without Python is not a package, so setup.py names it."""
    assert '"browser/*.js"' in (ROOT / "setup.py").read_text(encoding="utf-8")

"""What a person sees of a refusal, and where the link of a problem leads."""

from __future__ import annotations

import re
from html import unescape
from io import BytesIO
from typing import Any

import pytest
from flask import Flask, Response
from werkzeug.test import create_environ, run_wsgi_app

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.settings.options import DOCS_URL
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problem_pages import as_page
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import PAGES_PATH, Problem, render
from tests.apps import World, new_world

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
LINK = re.compile(r'<([^>]*)>; rel="describedby"')


def shop(**settings: Any) -> World:
    world = new_world(**settings)

    @world.view()
    @idempotent(required=True, form_field="idempotency_key")
    def pay() -> str:
        return "paid"

    return world


def ask(world: World, accept: str | None, **options: Any) -> Any:
    """Send a form, unless the options have another body."""
    headers = {} if accept is None else {"Accept": accept}
    if not {"json", "content_type"} & set(options):
        options.setdefault("data", {"amount": "5"})
    return world.post("/", None, headers=headers, **options)


@pytest.mark.parametrize("profile", ("ietf", "stripe", "x-idempotency", "playbook"))
def test_a_browser_gets_a_page_with_the_same_status_and_header_fields(profile: str) -> None:
    world = shop(profile=profile)

    document, page = ask(world, None), ask(world, BROWSER, data={"amount": "5"})

    assert page.status_code == document.status_code == 400
    assert page.mimetype == "text/html"
    fields = [
        [(name, value) for name, value in each.headers if not name.startswith("Content-")] for each in (document, page)
    ]
    assert fields[0] == fields[1]
    assert "<h1>Idempotency key missing</h1>" in page.text
    assert "<code>missing-key</code>, status 400" in page.text
    assert world.runs == []


@pytest.mark.parametrize(
    ("accept", "html"),
    (
        (BROWSER, True),
        ("text/html", True),
        ("application/xhtml+xml", True),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/html", False),
        ("application/problem+json, text/html;q=0.9", False),
        ("text/html;q=0", False),
        ("text/plain", False),
        ("html", False),
        (None, False),
    ),
)
def test_others_get_the_document(accept: str | None, html: bool) -> None:
    assert (ask(shop(), accept).mimetype == "text/html") is html


@pytest.mark.parametrize(
    "sent", ({"json": {"amount": 5}}, {"data": b"<amount/>", "content_type": "text/xml"}, {"content_type": "text/html"})
)
def test_what_is_no_form_gets_the_document(sent: dict[str, Any]) -> None:
    of_java = "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"

    assert ask(shop(), of_java, **sent).mimetype == "application/problem+json"
    assert ask(shop(), of_java).mimetype == "text/html"


def test_a_file_is_sent_by_a_form() -> None:
    upload = {"invoice": (BytesIO(b"%PDF"), "invoice.pdf")}

    assert ask(shop(), BROWSER, data=upload).mimetype == "text/html"


def test_it_may_be_switched_off() -> None:
    world = shop(problem_pages=False)

    answer = ask(world, BROWSER)

    assert answer.mimetype == "application/problem+json"
    assert "readthedocs" in answer.headers["Link"]
    assert world.client().get(PAGES_PATH + "in-flight").status_code == 404


def test_a_renderer_of_the_application_comes_first() -> None:
    world = new_world(init=False)
    world.idempotency.problem_renderer(lambda problem, **_: ("ours", problem.status))
    world.idempotency.init_app(world.app)
    world.view()(idempotent(required=True)(lambda: "paid"))

    assert ask(world, BROWSER).text == "ours"


def test_a_page_has_no_script_and_escapes_each_text() -> None:
    problem = Problem("in-flight", "<script>alert(1)</script>\n& `<b>`", retry_after=2)
    document = render(problem, profile=PROFILES["ietf"], docs_url=DOCS_URL, response_class=Response)

    page = as_page(document, problem, Response, same_key=True).get_data(as_text=True)

    assert re.findall("<(script|b|style|link|img|iframe|form)", page) == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n&amp; <code>&lt;b&gt;</code>" in page


def test_a_page_has_nothing_of_the_request() -> None:
    world = shop()
    headers = {"Accept": BROWSER, "User-Agent": "<i>agent"}

    answers = [world.post("/?query=<i>", "k", headers=headers, data={"a": each}) for each in ("<i>1", "<i>2")]

    assert [answer.status_code for answer in answers] == [200, 422]
    assert "<i>" not in answers[1].text
    assert "&lt;i" not in answers[1].text


@pytest.mark.parametrize("field", (None, "idempotency_key"))
def test_a_person_may_send_the_form_again_if_it_has_the_key(field: str | None) -> None:
    """A browser that makes the key in a header makes another one for each request, so the second would run."""
    world = new_world()
    seen = []
    key = None if field else "k"
    form = {"idempotency_key": "k"} if field else {"amount": "5"}

    @world.view()
    @idempotent(form_field=field)
    def pay() -> str:
        seen.append(world.post("/", key, headers={"Accept": BROWSER}, data=form))
        return "paid"

    world.post("/", key, data=form)

    (conflict,) = seen
    assert conflict.status_code == 409
    again = f"You may send the same form again after {conflict.headers['Retry-After']} seconds: reload this page."
    assert (again in conflict.text) is (field is not None)
    assert ("not carried out twice" in conflict.text) is (field is not None)


@pytest.mark.parametrize("code", PROBLEMS)
def test_each_link_leads_to_a_page(code: str) -> None:
    world = shop()

    answer = world.client().get(PAGES_PATH + code)

    assert (answer.status_code, answer.mimetype) == (200, "text/html")
    assert PROBLEMS[code].title in unescape(answer.text)
    assert "`" not in answer.text


def test_the_link_of_a_problem_leads_to_its_page_where_the_application_is_mounted() -> None:
    world = shop()
    found = LINK.search(ask(world, None, base_url="http://shop.example/api").headers["Link"])

    assert found is not None
    assert found[1] == f"/api{PAGES_PATH}missing-key"
    assert world.client().get(PAGES_PATH + "missing-key").status_code == 200
    assert world.client().get(PAGES_PATH + "other").status_code == 404


@pytest.mark.parametrize("publish", (False, True))
def test_a_mount_path_of_any_characters_is_in_a_link_that_a_server_can_send(publish: bool) -> None:
    world = shop(publish=publish)
    mounted = "/支付>; rel=next"

    documents = [("POST", "/"), *([("GET", "/.well-known/idempotency")] if publish else [])]
    for method, path in documents:
        environ = create_environ(path, method=method) | {"SCRIPT_NAME": mounted.encode().decode("latin-1")}
        _, _, fields = run_wsgi_app(world.app, environ, buffered=True)

        link = fields["Link"]
        assert link.encode("latin-1").startswith(b"</%E6%94%AF%E4%BB%98%3E%3B%20rel%3Dnext/.well-known/idempotency/")
        assert link.count(">") == (2 if publish and method == "POST" else 1)


def test_a_named_site_is_linked_and_nothing_is_served() -> None:
    world = shop(docs_url="https://pay.example/errors#")

    assert "https://pay.example/errors#missing-key" in ask(world, None).headers["Link"]
    assert world.client().get(PAGES_PATH + "missing-key").status_code == 404


def test_an_application_of_several_hosts_serves_its_pages_on_each() -> None:
    app = Flask("shop", host_matching=True, static_folder=None)
    app.testing = True
    Idempotency(app, secret="s-9f2c47d1e8b35a60", principal=lambda: "alice")

    for host in ("a.example", "b.example"):
        answer = app.test_client().get(PAGES_PATH + "in-flight", base_url=f"http://{host}")
        assert answer.status_code == 200

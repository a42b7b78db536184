"""Where a console can be mounted, what it refuses, and who may see which page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask import Blueprint, Flask, abort, redirect, request
from flask_login import LoginManager, UserMixin, current_user, login_user  # type: ignore[import-untyped]
from flask_wtf import CSRFProtect  # type: ignore[import-untyped]
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.test import Client
from werkzeug.wrappers import Response

from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.console import Console, Operator
from flask_idempotency.console.visit import POLICY
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.events import Resolved, TenantErased
from tests.console.rig import ANN, KEY, LIMITED, SECRET, VIEWER, hidden, rig


def test_a_console_without_authorize_is_not_made() -> None:
    wrong: tuple[Any, ...] = (None, "ann", 7)
    for authorize in wrong:
        with pytest.raises(ConfigurationError, match=r"pass authorize, a function of \(action, record\)"):
            Console(Idempotency(), authorize=authorize)


@pytest.mark.parametrize(
    ("option", "values"), (("url_prefix", ("", "/", "idempotency")), ("changes_per_hour", (0, True, 1.5)))
)
def test_a_faulty_argument_is_named(option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigurationError, match=option):
            Console(Idempotency(), authorize=lambda action, record: ANN, **{option: value})


def test_the_first_argument_is_the_extension() -> None:
    """Not the application, as in `Console(app)`."""
    with pytest.raises(ConfigurationError, match="must be your Idempotency, not Flask"):
        Console(Flask("shop"), authorize=lambda action, record: ANN)


def test_tenants_are_a_collection_of_names() -> None:
    """A text alone would be taken for its letters."""
    wrong: tuple[Any, ...] = ("acme", [1], {"acme", None})
    for tenants in wrong:
        with pytest.raises(ConfigurationError, match="tenants must be a collection of names"):
            Operator("ann", tenants)


def test_an_operator_has_a_name() -> None:
    """One of their own: changes by `resolver` show as those of the application's code."""
    wrong: tuple[Any, ...] = ("", "a" * 201, None, 7, "resolver")
    for name in wrong:
        with pytest.raises(ConfigurationError, match="name must be a text"):
            Operator(name)


def test_an_answer_of_authorize_that_names_no_operator_opens_nothing() -> None:
    answers: list[Any] = [True, 1, object(), ["ann"], "", "resolver", "o" * 201]
    made = rig(ask=lambda action, record: answers[0])
    while answers:
        page = made.browser().get("/")
        assert 500 == page.status_code, answers[0]
        assert "Needs a person" not in page.text
        del answers[0]


def test_an_async_authorize_is_awaited() -> None:
    async def ask(action: str, record: Any) -> str | None:
        return ANN if action == "view" else None

    made = rig(ask=ask)
    handle = made.quarantined()

    assert 200 == made.browser().get(f"/records/{handle}").status_code
    assert 403 == made.browser().get(f"/records/{handle}/settle").status_code


# Every page and every action, for every kind of operator.

ALL, READ, THEIRS, NONE = "all", "read", "theirs", "none"
KINDS = {ANN: ALL, VIEWER: READ, LIMITED: THEIRS, f"{VIEWER}@acme": "theirs to read", "eve@globex": NONE, "": NONE}

ALLOWED = {
    ("GET", "/"): (ALL, READ),
    ("GET", "/records"): (ALL, READ, THEIRS, "theirs to read", "of others"),
    ("GET", "/records/{handle}"): (ALL, READ, THEIRS, "theirs to read"),
    ("GET", "/records/{handle}/settle"): (ALL, THEIRS),
    ("POST", "/records/{handle}/settle"): (ALL, THEIRS),
    ("GET", "/records/{handle}/release"): (ALL, THEIRS),
    ("POST", "/records/{handle}/release"): (ALL, THEIRS),
    ("GET", "/records/find"): (ALL, READ, THEIRS, "theirs to read", "of others"),
    ("GET", "/records/all/settle"): (ALL, THEIRS),
    ("POST", "/records/all/settle"): (ALL, THEIRS),
    ("GET", "/records/all/release"): (ALL, THEIRS),
    ("GET", "/messages"): (ALL, READ),
    ("GET", "/outbox"): (ALL, READ),
    ("GET", "/tenants"): (ALL, READ),
    ("GET", "/tenants/purge"): (ALL,),
    ("POST", "/tenants/purge"): (ALL,),
    ("GET", "/endpoints"): (ALL, READ),
    ("GET", "/health"): (ALL, READ),
}


@pytest.mark.parametrize("operator", KINDS)
def test_each_page_is_for_those_operators(operator: str) -> None:
    made = rig()
    handle = made.quarantined(tenant="acme")
    for (method, page), kinds in ALLOWED.items():
        if method == "GET":
            answer = made.browser(operator).get(page.format(handle=handle))
            allowed = KINDS[operator] in kinds or (operator == "eve@globex" and page in ("/records", "/records/find"))
            assert allowed == (answer.status_code == 200), (page, answer.status_code, answer.text)
            assert answer.status_code in (200, 403, 404) or "nothing to change" in answer.text, page


@pytest.mark.parametrize("operator", KINDS)
@pytest.mark.parametrize("page", [page for method, page in ALLOWED if method == "POST"])
def test_a_change_is_for_those_operators(page: str, operator: str) -> None:
    made = rig()
    path = page.format(handle=made.quarantined(tenant="acme"))
    allowed = KINDS[operator] in ALLOWED["POST", page]
    # An operator who may not sends the form of one who may, from the same browser.
    browser = made.browser()
    fields = browser.form(path)
    browser.operator = operator
    fields = browser.form(path) if allowed else fields
    said = {"confirm": "yes", "force": "yes", "reason": "x", "verdict": "never", "tenant": "acme"}
    said |= {"typed": "1", "verdict": "happened", "status": "201"} if "/all/" in page else {"typed": "acme"}

    answer = browser.post(path, {**fields, **said})

    assert allowed == (answer.status_code == 200), (answer.status_code, answer.text)
    assert answer.status_code in (200, 403, 404)
    assert allowed == bool(made.told(Resolved) or made.told(TenantErased))


def test_authorize_is_asked_with_the_record() -> None:
    made = rig()
    handle = made.quarantined()
    made.asked.clear()

    made.browser().get(f"/records/{handle}/settle")

    assert [("view", None), ("view", handle), ("settle", handle)] == made.asked


def test_what_authorize_aborts_with_passes_through() -> None:
    """Such as the page for signing in. It is neither cached nor framed."""
    made = rig()
    made.app.register_error_handler(401, lambda error: redirect("/login"))

    answer = made.browser("stranger").get("/records/" + "b" * 76 + "a")

    assert (302, "/login") == (answer.status_code, answer.headers["Location"])
    assert ("no-store", "DENY") == (answer.headers["Cache-Control"], answer.headers["X-Frame-Options"])


def test_an_action_that_needs_another_sign_in_is_offered() -> None:
    def ask(action: str, record: Any) -> str:
        if action == "settle":
            abort(401)
        if action == "release":
            abort(403)
        return ANN

    made = rig(ask=ask)
    page = made.browser().get(f"/records/{made.quarantined()}")

    assert "Settle…" in page.text
    assert "Release…" not in page.text


# Applications.


def test_a_factory_may_make_the_console_first() -> None:
    idempotency = Idempotency()
    console = Console(idempotency, authorize=lambda action, record: ANN, url_prefix="/ops/keys/")

    def create_app(name: str) -> Flask:
        app = Flask(name)
        app.config.update(TESTING=True, IDEMPOTENCY_STORE="memory://", IDEMPOTENCY_SECRET=SECRET)
        app.register_blueprint(console)
        idempotency.init_app(app)
        return app

    first, second = create_app("first"), create_app("second")

    for app in (first, second):
        page = app.test_client().get("/ops/keys/")
        assert 200 == page.status_code
        assert app.name in page.text
    mounted = [app.extensions["idempotency_console"][console] for app in (first, second)]
    assert mounted[0].attempts is not mounted[1].attempts


def test_without_init_app_the_page_names_the_remedy() -> None:
    app = Flask("shop")
    app.testing = True
    app.register_blueprint(Console(Idempotency(), authorize=lambda action, record: ANN))

    page = app.test_client().get("/idempotency/")

    assert 503 == page.status_code
    assert "call idempotency.init_app(app)" in page.text


def test_a_console_of_a_guard_that_is_switched_off_explains_it() -> None:
    made = rig("memory://", enabled=False)

    page = made.browser().get("/")

    assert 503 == page.status_code
    assert "IDEMPOTENCY_ENABLED is False" in page.text


def test_a_console_shows_a_store_whose_guard_is_switched_off(tmp_path: Any) -> None:
    """In an application whose own database has the records, the store is there all the same."""
    from flask_sqlalchemy import SQLAlchemy

    app = Flask("tests.console.app", instance_path=str(tmp_path))
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'shop.db'}"
    SQLAlchemy(app)
    made = rig("flask-sqlalchemy://", app=app, enabled=False)
    with app.app_context():
        app.extensions["idempotency"].schema.upgrade()

    page = made.browser().get("/")

    assert 200 == page.status_code
    assert "IDEMPOTENCY_ENABLED is False" in page.text


@pytest.mark.parametrize("testing", (False, True))
def test_health_says_what_is_wrong_with_a_store_that_is_not_set_up(
    testing: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = rig(f"sqlite:///{tmp_path / 'shop.db'}", testing=testing, console={"allow_http": True})
    browser = made.browser()

    health, other, stranger = browser.get("/health"), browser.get("/"), made.browser("").get("/")

    assert (200, 403) == (health.status_code, stranger.status_code)
    assert "flask idempotency db upgrade" in health.text
    if not testing:
        assert 503 == other.status_code
        assert "See Health" in other.text
        assert "db upgrade" not in other.text
        assert "db upgrade" in caplog.text


def test_a_damaged_row_is_named_and_closes_no_other_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store says which rows, and what to do about them."""

    def fail(*given: Any, **named: Any) -> Any:
        raise CorruptRecord("a row of idempotency_activity cannot be read: delete it")

    made = rig()
    made.quarantined()
    monkeypatch.setattr(made.store.activity, "read", fail)

    for path, status in (("/", 500), ("/records", 200), ("/endpoints", 500)):
        page = made.browser().get(path)
        assert status == page.status_code, path
        assert ("a row of idempotency_activity cannot be read: delete it" in page.text) == (status == 500), path


def test_every_link_and_form_works_behind_a_mount_and_a_nested_blueprint() -> None:
    """With SCRIPT_NAME, and an address of the blueprint around it."""
    app = Flask("tests.console.app")
    app.config.update(TESTING=True, PROPAGATE_EXCEPTIONS=False)
    idempotency = Idempotency(app, store="memory://", secret=SECRET, on_error="quarantine")
    around = Blueprint("ops", "ops", url_prefix="/ops")
    around.register_blueprint(Console(idempotency, authorize=lambda action, record: ANN))
    app.register_blueprint(around)

    @app.post("/pay")
    def pay() -> str:
        raise RuntimeError("the view failed")

    client = Client(DispatcherMiddleware(Response("nothing", 404), {"/shop": app}), Response)
    assert 500 == client.post("/shop/pay", headers={KEY: "k"}).status_code
    todo, seen = ["/shop/ops/idempotency/"], set[str]()
    while todo:
        path = todo.pop()
        page = client.get(path)
        assert 200 == page.status_code, path
        seen.add(path)
        found = re.findall(r'(?:href|src|action)="([^"#]*)"', page.text)
        assert all(each.startswith("/shop/ops/idempotency/") for each in found), found
        todo += [each.replace("&amp;", "&") for each in found if each.replace("&amp;", "&") not in {*seen, *todo}]

    (handle,) = {each for path in seen for each in re.findall(r"/records/([a-z2-7]{77})", path)}
    form = client.get(f"/shop/ops/idempotency/records/{handle}/settle")
    assert "Path=/shop/ops/idempotency/;" in form.headers.get("Set-Cookie", "Path=/shop/ops/idempotency/;")
    said = {"verdict": "happened", "status": "201", "reason": "x", "confirm": "yes"}
    settled = client.post(f"/shop/ops/idempotency/records/{handle}/settle", data={**hidden(form), **said})

    assert 200 == settled.status_code


def test_an_application_that_requires_a_key_everywhere_needs_none_here() -> None:
    made = rig(required=True)
    handle = made.quarantined()

    assert 200 == made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201").status_code
    assert ["k"] == made.runs


def test_behind_a_proxy_that_ends_tls_it_works_with_proxyfix() -> None:
    made = rig(testing=False)
    made.app.wsgi_app = ProxyFix(made.app.wsgi_app, x_proto=1, x_host=1)  # type: ignore[method-assign]
    forwarded = {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "ops.example"}
    handle, browser = made.quarantined(), made.browser()
    page = browser.get(f"/records/{handle}/settle", **forwarded)
    cookie = page.headers["Set-Cookie"].partition(";")[0]
    said = {"verdict": "happened", "status": "201", "reason": "x", "confirm": "yes"}
    own = {**forwarded, "Origin": "https://ops.example", "Cookie": cookie}

    assert 200 == browser.post(f"/records/{handle}/settle", {**hidden(page), **said}, **own).status_code


def test_a_proxy_that_hides_its_host_is_named() -> None:
    made = rig(console={"allow_http": True}, testing=False)
    handle = made.quarantined()
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/settle")

    answer = browser.post(f"/records/{handle}/settle", fields, Origin="https://ops.example")

    assert 403 == answer.status_code
    assert "ProxyFix with x_host=1" in answer.text


# Neighbours.


def test_the_console_works_with_flask_wtf() -> None:
    """Its token is in our forms; without it, or without ours, a form is refused."""
    made = rig()
    handle = made.quarantined()
    app = Flask("tests.console.app")
    CSRFProtect(app)
    guarded = rig(app=app, store=made.store)
    app.extensions["csrf"].exempt(app.view_functions["pay"])
    browser = guarded.browser()
    path = f"/records/{handle}/settle"
    fields = {**browser.form(path), "verdict": "happened", "status": "201", "reason": "x", "confirm": "yes"}

    assert "csrf_token" in fields
    assert 400 == browser.post(path, {**fields, "csrf_token": ""}).status_code
    assert 403 == browser.post(path, {**fields, "console_token": ""}).status_code
    assert 200 == browser.post(path, fields).status_code


def test_flask_wtf_accepts_the_forms_over_https_too() -> None:
    """There it wants a Referer of the same host, which the Referrer-Policy of the console lets a browser send."""
    app = Flask("tests.console.app")
    CSRFProtect(app)
    made = rig(app=app)
    app.extensions["csrf"].exempt(app.view_functions["pay"])
    handle, client = made.quarantined(), app.test_client()
    url = f"https://localhost/idempotency/records/{handle}/settle"
    page = client.get(url, headers={"X-Operator": ANN})
    said = {"verdict": "happened", "status": "201", "reason": "x", "confirm": "yes"}

    answer = client.post(url, data={**hidden(page), **said}, headers={"X-Operator": ANN, "Referer": url})

    assert 200 == answer.status_code
    assert "same-origin" == page.headers["Referrer-Policy"]


def test_no_neighbour_changes_the_headers_of_a_page() -> None:
    from flask_compress import Compress
    from flask_cors import CORS
    from flask_talisman import Talisman  # type: ignore[import-untyped]

    app = Flask("tests.console.app")
    made = rig(app=app)
    Talisman(app, force_https=False, content_security_policy={"default-src": "*", "frame-ancestors": "*"})
    CORS(app, supports_credentials=True, origins="*")
    Compress(app)
    made.browser()

    for path in ("/", "/static/console.css", "/nothing"):
        answer = made.browser().get(path, Origin="https://evil.example", Accept_Encoding="gzip")
        assert POLICY == answer.headers["Content-Security-Policy"]
        assert "DENY" == answer.headers["X-Frame-Options"]
        assert not [name for name, _ in answer.headers if name.lower().startswith("access-control")]


def test_a_template_and_a_setting_of_the_application_change_no_page(tmp_path: Any) -> None:
    """It may use other delimiters, no autoescape, or a base.html of the same name."""
    (tmp_path / "base.html").write_text("<script>alert(1)</script>")
    app = Flask("tests.console.app", template_folder=str(tmp_path))
    app.jinja_options = {"variable_start_string": "[[", "variable_end_string": "]]", "autoescape": False}
    made = rig(app=app)

    page = made.browser().get("/").text

    assert "Needs a person" in page
    assert "alert" not in page
    assert "{{" not in page


def test_it_works_with_flask_login() -> None:
    class User(UserMixin):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            self.id = name

    def ask(action: str, record: Any) -> str | None:
        return current_user.get_id() if current_user.is_authenticated else None

    app = Flask("tests.console.app")
    manager = LoginManager(app)
    manager.user_loader(User)
    app.post("/login")(lambda: str(login_user(User(request.form["name"]))))
    made = rig(app=app, ask=ask, principal=lambda: None)
    browser = made.browser("")

    assert 403 == browser.get("/").status_code
    browser.client.post("/login", data={"name": "ann"})
    assert "ann" in browser.get("/").text

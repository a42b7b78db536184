"""What a view may ask of the claim it runs under."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask import Blueprint, Flask, render_template_string

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.extension import Idempotency
from flask_idempotency.web.current_claim import current_claim, idempotency_field
from flask_idempotency.web.policies import exempt, idempotent
from tests.apps import KEY, new_world

ATTRIBUTES = ("key", "tenant", "principal", "fence", "attempt")


def test_a_view_reads_its_claim() -> None:
    """The client's key without quotes, tenant, principal and attempt."""
    world = new_world()
    world.idempotency.tenant_loader(lambda: "acme")
    world.view()(lambda: [bool(current_claim), *(getattr(current_claim, name) for name in ATTRIBUTES)])
    told: Any = world.post(key='"the-key"').json

    assert [True, "the-key", "acme", "alice"] == told[:4]
    assert told[4] > 0
    assert 1 == told[5]


def test_attempt_and_fence_rise_when_a_claim_is_taken_over() -> None:
    """For the application's own WHERE fence <= :mine."""
    world = new_world(effects="deduplicated")
    seen: list[tuple[int, int]] = []

    @world.view()
    def pay() -> str:
        seen.append((current_claim.attempt, current_claim.fence))
        if len(seen) == 1:
            world.clock.advance(31)
            world.post()
        return "paid"

    world.post()

    assert [1, 2] == [attempt for attempt, _ in seen]
    assert seen[0][1] < seen[1][1]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_outside_a_claim_attributes_raise_and_the_claim_is_false(name: str) -> None:
    """In a plain call and in an un-keyed request alike; the text says what to do."""
    world = new_world()

    def ask() -> str:
        assert not current_claim
        with pytest.raises(RuntimeError, match=f"current_claim.{name}.*if current_claim"):
            getattr(current_claim, name)
        with pytest.raises(RuntimeError, match=r"downstream_key\(\)"):
            current_claim.downstream_key("charge")
        return "asked"

    world.view()(ask)

    assert "asked" == ask()
    assert "asked" == world.post(key=None).text


def test_a_request_of_an_application_without_the_extension_has_no_claim() -> None:
    """Disabled, or never set up: a view that asks works all the same."""
    app = Flask(__name__)

    @app.post("/")
    def pay() -> str:
        current_claim.point_of_no_return()
        return str(bool(current_claim))

    assert "False" == app.test_client().post("/", headers={KEY: "k"}).text


def test_the_point_of_no_return_is_durable_when_it_returns() -> None:
    """From then on a lapse quarantines."""
    world = new_world(effects="marked")
    marks: list[OnExpiry] = []

    @world.view()
    def pay() -> str:
        for _ in range(2):
            record = world.record()
            assert record is not None
            marks.append(record.on_expiry)
            current_claim.point_of_no_return()
        return "paid"

    world.post()
    assert [OnExpiry.TAKEOVER, OnExpiry.QUARANTINE] == marks


def test_the_point_of_no_return_without_a_claim_is_nothing_to_speak_of() -> None:
    """An un-keyed request has nothing to protect; outside a request there is a mistake."""
    world = new_world(effects="marked")

    @world.view()
    def pay() -> str:
        current_claim.point_of_no_return()
        return "paid"

    assert "paid" == world.post(key=None).text
    with pytest.raises(RuntimeError, match="point_of_no_return"):
        current_claim.point_of_no_return()


@pytest.mark.parametrize("policy", ({"effects": "marked"}, {"effects": "marked", "on_error": "keep"}))
def test_a_point_of_no_return_that_cannot_be_made_durable_ends_the_view(policy: dict[str, Any]) -> None:
    """The effect does not happen, so the key is not quarantined for it."""
    world = new_world(**policy)

    @world.view()
    def pay() -> str:
        world.store.lose_request("mark_point_of_no_return")
        current_claim.point_of_no_return()
        world.runs.append("effect")
        return "paid"

    assert 500 == world.post().status_code
    assert [] == world.runs
    assert "quarantine" not in world.store.verbs()


def test_a_downstream_key_is_the_same_for_every_attempt_and_another_for_every_name() -> None:
    """And another for every key and every caller."""
    world = new_world()
    seen: list[str] = []

    @world.view()
    def pay() -> tuple[str, int]:
        seen.extend(current_claim.downstream_key(name) for name in ("charge", "refund"))
        return "later", 503

    world.post()
    world.post()
    world.post(key="another")
    world.post(headers={"X-User": "bob"})

    assert seen[:2] == seen[2:4]
    assert 6 == len(set(seen))
    assert all(re.fullmatch(r"[a-z2-7]{52}", key) for key in seen)


def test_a_downstream_key_stays_the_same_while_secrets_rotate() -> None:
    """Derived with the oldest secret in use: the other side sees one key per intent."""
    keys = []
    for secret in ("old", ["new", "old"]):
        app = Flask("shop")
        app.config.update(SECRET_KEY="s", TESTING=True)
        Idempotency(app, principal=lambda: "alice", secret=secret)
        app.post("/")(lambda: current_claim.downstream_key("charge"))
        keys.append(app.test_client().post("/", headers={KEY: "k"}).text)

    assert keys[0] == keys[1]


def test_the_form_field_is_hidden_fresh_and_escaped() -> None:
    """`{{ idempotency_field() }}` in a template."""
    world = new_world(form_field="the_key")
    world.view("/script", endpoint="script")(idempotent(form_field='"><script>')(lambda: ""))
    world.view()(lambda: "")
    with world.app.test_request_context("/"):
        fields = [render_template_string("{{ idempotency_field() }}") for _ in range(2)]
        named = render_template_string("{{ idempotency_field('\"><script>') }}")

    pattern = r'<input type="hidden" name="the_key" value="[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}">'
    assert all(re.fullmatch(pattern, field) for field in fields)
    assert fields[0] != fields[1]
    assert "<script>" not in named


def field_of(app: Flask, call: str = "idempotency_field()", path: str = "/page") -> str:
    """The name of the field that this page renders."""
    with app.test_request_context(path):
        rendered = render_template_string("{{ " + call + " }}")
    found = re.search('name="([^"]*)"', rendered)
    assert found is not None
    return found[1]


def with_forms(**policy: Any) -> Flask:
    """Pages, and views that take forms: `/plain` without a field, `/wired` with one, `/shop/pay` by its blueprint."""
    world = new_world(**policy)
    app, shop = world.app, Blueprint("shop", __name__, url_prefix="/shop")
    app.route("/page", endpoint="page")(lambda: "")
    app.route("/plain", methods=["GET", "POST"], endpoint="plain")(lambda: "")
    app.route("/wired", methods=["GET", "POST"], endpoint="wired")(idempotent(form_field="wired_key")(lambda: ""))
    app.route("/exempt", methods=["POST"], endpoint="exempt")(exempt(lambda: ""))
    app.route("/put", methods=["PUT"], endpoint="put")(idempotent(form_field="put_key")(lambda: ""))
    shop.route("/page", endpoint="page")(lambda: "")
    shop.route("/pay", methods=["POST"], endpoint="pay")(lambda: "")
    world.idempotency.configure(shop, form_field="shop_key")
    app.register_blueprint(shop)
    return app


@pytest.mark.parametrize(
    ("call", "path", "expected"),
    (
        ("idempotency_field()", "/page", "app_key"),
        ("idempotency_field()", "/wired", "wired_key"),
        ("idempotency_field()", "/plain", "app_key"),
        ("idempotency_field('shop_key')", "/page", "shop_key"),
        ("idempotency_field(endpoint='wired')", "/page", "wired_key"),
        ("idempotency_field(endpoint='shop.pay')", "/page", "shop_key"),
        ("idempotency_field(endpoint='.pay')", "/shop/page", "shop_key"),
        ("idempotency_field(endpoint='.plain')", "/page", "app_key"),
        ("idempotency_field('shop_key', endpoint='shop.pay')", "/page", "shop_key"),
    ),
)
def test_the_form_field_has_the_name_that_its_target_reads(call: str, path: str, expected: str) -> None:
    """The endpoint that is named, the one of the page itself, or the application's."""
    assert expected == field_of(with_forms(form_field="app_key"), call, path)


@pytest.mark.parametrize(
    ("call", "told"),
    (
        ("idempotency_field()", "several fields (shop_key, wired_key)"),
        ("idempotency_field('other_key')", "no policy reads the key from the form field 'other_key'"),
        ("idempotency_field('put_key')", "no policy reads the key from the form field 'put_key'"),
        ("idempotency_field(endpoint='plain')", "a POST to 'plain' does not read its key from a form field"),
        ("idempotency_field(endpoint='exempt')", "a POST to 'exempt' does not read"),
        ("idempotency_field(endpoint='put')", "a POST to 'put' does not read"),
        ("idempotency_field(endpoint='page')", "a POST to 'page' does not read"),
        ("idempotency_field(endpoint='nowhere')", "a POST to 'nowhere' does not read"),
        ("idempotency_field('shop_key', endpoint='wired')", "from the field 'shop_key', but from 'wired_key'"),
    ),
)
def test_a_form_field_that_nothing_reads_fails_while_the_page_is_rendered(call: str, told: str) -> None:
    """Else the form is sent without protection, and nothing tells."""
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        field_of(with_forms(), call)


def test_a_form_field_without_any_policy_that_reads_it_fails() -> None:
    """The remedy is in the text."""
    world = new_world()
    world.view("/page")(lambda: "")

    with pytest.raises(ConfigurationError, match=re.escape('IDEMPOTENCY_FORM_FIELD = "idempotency_key"')):
        field_of(world.app)


def test_a_page_with_a_form_field_that_nothing_reads_is_an_error_and_not_a_page() -> None:
    world = new_world()
    world.view("/pay", endpoint="pay")(lambda: "")
    world.app.get("/page")(lambda: render_template_string("{{ idempotency_field() }}"))

    assert 500 == world.client().get("/page").status_code


def test_the_only_form_field_of_a_blueprint_is_found() -> None:
    world = new_world()
    shop = Blueprint("shop", __name__)
    shop.post("/pay")(lambda: "")
    world.idempotency.configure(shop, form_field="shop_key")
    world.app.register_blueprint(shop)

    assert "shop_key" == field_of(world.app)


def posting(guard: str = "all") -> Flask:
    """One view reads its key from a field. Its neighbours take forms too, or show pages only."""
    world = new_world(guard=guard)
    app = world.app
    app.route("/wired", methods=["GET", "POST"], endpoint="wired")(idempotent(form_field="wired_key")(lambda: ""))
    app.route("/reset", methods=["GET", "POST"], endpoint="reset")(lambda: "")
    app.route("/off", methods=["GET", "POST"], endpoint="off")(idempotent(form_field=None)(lambda: ""))
    app.route("/new", methods=["GET"], endpoint="items")(lambda: "")
    app.route("/items", methods=["POST"], endpoint="items")(app.view_functions["items"])
    app.get("/split", endpoint="shown")(lambda: "")
    app.post("/split", endpoint="taken")(lambda: "")
    app.route("/login", methods=["GET", "POST"], endpoint="login")(exempt(lambda: ""))
    app.route("/put", methods=["GET", "PUT"], endpoint="put")(lambda: "")
    return app


@pytest.mark.parametrize("guard", ("all", "chosen"))
@pytest.mark.parametrize(
    ("path", "target"), (("/reset", "reset"), ("/off", "off"), ("/new", "items"), ("/split", "taken"))
)
def test_a_page_whose_own_post_reads_no_field_does_not_borrow_the_name_of_another(
    path: str, target: str, guard: str
) -> None:
    """
    Forms usually go to the URL of their page. There the borrowed field would be ignored, and a second click runs again.
    """
    with pytest.raises(ConfigurationError, match=f"{target!r}.*reads no form field.*endpoint=") as raised:
        field_of(posting(guard), path=path)

    assert 'form_field="idempotency_key"' in str(raised.value)


def test_a_page_whose_own_post_reads_no_field_may_name_its_target() -> None:
    """The form of this page goes elsewhere."""
    assert "wired_key" == field_of(posting(), "idempotency_field(endpoint='wired')", "/reset")
    assert "wired_key" == field_of(posting(), "idempotency_field('wired_key')", "/reset")


def test_a_page_without_a_post_takes_the_only_field_of_the_application() -> None:
    """A GET page, one that takes PUT (no form sends it), and one whose view the author has left alone."""
    app = posting()

    assert ["wired_key"] * 3 == [field_of(app, path=path) for path in ("/put", "/login", "/nowhere")]


def test_the_post_of_the_same_url_names_the_field() -> None:
    """Two functions share one URL: one shows the form, the other takes it."""
    app = posting()
    app.get("/pair", endpoint="pair")(lambda: "")
    app.post("/pair", endpoint="paired")(idempotent(form_field="pair_key")(lambda: ""))

    assert "pair_key" == field_of(app, path="/pair")


def test_a_form_field_renders_where_the_guard_is_switched_off() -> None:
    """`IDEMPOTENCY_ENABLED = False` leaves the application as it is, its pages too."""
    world = new_world(config={"IDEMPOTENCY_ENABLED": False})

    assert ["idempotency_key", "k"] == [field_of(world.app), field_of(world.app, "idempotency_field('k')")]


def test_a_form_field_outside_a_request_needs_no_page() -> None:
    """A mail is rendered in an application context."""
    world = new_world(form_field="the_key")
    world.view()(lambda: "")
    with world.app.app_context():
        assert 'name="the_key"' in idempotency_field()


def test_a_form_field_of_an_application_without_the_extension_says_so() -> None:
    with Flask("bare").app_context(), pytest.raises(ConfigurationError, match="init_app"):
        idempotency_field()

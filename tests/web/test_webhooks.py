"""@webhook: each event of a provider takes effect once, whatever else it changes between its attempts."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any

import fakeredis
import pytest
from flask import Blueprint, Flask, Request, Response, abort, request
from werkzeug.test import TestResponse

from flask_idempotency import Decision, Happened, claim_here, exempt, webhook
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.openapi import describe
from tests.apps import World, is_replay, new_world, run, said
from tests.stores.sql.shops import open_shop

DAY = 86400


def event(identifier: Any = "evt_1", **members: Any) -> dict[str, Any]:
    return {"json": {"id": identifier, "type": "charge.succeeded", **members}}


def sent(world: World, path: str = "/stripe", **options: Any) -> TestResponse:
    """Send a webhook as a provider does, which signs it and knows no keys."""
    return world.post(path, key=None, headers={"Authorization": "Signature x", **options.pop("headers", {})}, **options)


def hooked(key: Any = "/id", *, policy: Any = None, **options: Any) -> World:
    """Build an application that receives the webhooks of one provider."""
    world = new_world(principal=None, **(policy or {}))

    @world.view("/stripe")
    @webhook("stripe", key=key, **options)
    def receive() -> tuple[dict[str, Any], int]:
        world.runs.append(request.get_data(as_text=True))
        if "X-Fail" in request.headers:
            abort(Response(status=int(request.headers["X-Fail"])))
        return {"runs": len(world.runs)}, 200

    return world


def test_an_event_runs_once_whatever_changes_between_its_attempts() -> None:
    """Providers count attempts, sign again and add members. The second attempt gets the first response."""
    world = hooked()

    first = sent(world, **event(pending_webhooks=2))
    second = sent(
        world, **event(pending_webhooks=1), headers={"User-Agent": "other", "Prefer": "x"}, query_string={"try": "2"}
    )

    assert (200, 200, 1) == (first.status_code, second.status_code, len(world.runs))
    assert is_replay(second)
    assert first.json == second.json


@pytest.mark.parametrize("place", ("fakeredis", "sqlite"))
def test_an_event_runs_once_in_each_store(place: str, tmp_path: Path) -> None:
    """Its fingerprint has the length that stores keep, although it covers the path alone."""
    store: Any = fakeredis.FakeRedis() if place == "fakeredis" else f"sqlite:///{tmp_path / 'records.sqlite3'}"
    world = hooked(policy={"store": store, "after_loss": "run"} if place == "fakeredis" else {"store": store})
    if place == "sqlite":
        assert 0 == world.app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"]).exit_code

    statuses = [sent(world, **event()).status_code for _ in range(2)]

    assert ([200, 200], 1) == (statuses, len(world.runs))


def test_other_events_run() -> None:
    world = hooked()

    answers = [sent(world, **event(identifier)).json for identifier in ("evt_1", "evt_2", "EVT_1", 1)]

    assert [{"runs": number} for number in (1, 2, 3, 4)] == answers


def test_the_id_is_found() -> None:
    """In a JSON body of any media type, a form, a header or by a function."""
    cases: tuple[Any, ...] = (
        ("/id", [{"data": b'{"id": "a"}', "content_type": "text/plain; charset=UTF-8"}, {"json": {"id": "a", "x": 1}}]),
        ("/id", [{"json": {"id": 7}}, {"json": {"id": 7, "x": 1}}]),
        ("/data/0/a~1b", [{"json": {"data": [{"a/b": "a"}]}}, {"json": {"data": [{"a/b": "a"}, 2]}}]),
        ("/id", [{"json": {"id": 'a, "quoted\\" one'.replace(" ", "")}}] * 2),
        ("/MessageSid", [{"data": {"MessageSid": "SM1", "n": "1"}}, {"data": {"n": "2", "MessageSid": "SM1"}}]),
        ("Webhook-Id", [{"headers": {"Webhook-Id": "msg_1"}}, {"headers": {"webhook-id": "msg_1"}, "json": {"a": 1}}]),
        (lambda got: got.get_json()["a"] + got.args["b"], [{"json": {"a": "1"}, "query_string": {"b": "2"}}] * 2),
    )
    for key, attempts in cases:
        world = hooked(key)

        answers = [sent(world, **attempt) for attempt in attempts]

        assert [(200, False), (200, True)] == [(answer.status_code, is_replay(answer)) for answer in answers], (
            key,
            attempts,
        )


def test_a_missing_id_is_400() -> None:
    """It is never guessed, and the view does not run."""
    for key, attempt in (
        ("/id", {"json": {"type": "ping"}}),
        ("/id", {"json": {"id": None}}),
        ("/id", {"json": {"id": ""}}),
        ("/id", {"json": ["id"]}),
        ("/id", {"json": "id"}),
        ("/id", {}),
        ("/id", {"data": b"<id>evt_1</id>", "content_type": "application/xml"}),
        ("/id", {"data": b"\xff\xfe", "content_type": "application/json"}),
        ("/id", {"data": b"[" * 100_000, "content_type": "application/json"}),
        ("/id", {"data": {"other": "evt_1"}}),
        ("/0/id", {"json": []}),
        ("/00/id", {"json": [{"id": "a"}]}),
        ("/99999999999/id", {"json": [{"id": "a"}]}),
        ("/id/a", {"json": {"id": "a"}}),
        ("Webhook-Id", {"json": {"id": "evt_1"}}),
        (lambda _: None, {"json": {"id": "evt_1"}}),
    ):
        world = hooked(key)

        answer = sent(world, **attempt)

        assert (400, "missing-key", []) == (answer.status_code, answer.get_json()["code"], world.runs), (key, attempt)
        assert [] == world.store.verbs(), (key, attempt)


def test_an_id_that_is_none_is_400() -> None:
    """Also one that the command line could not name."""
    cases: tuple[Any, ...] = (
        *({"json": {"id": value}} for value in (True, 1.5, ["a"], {"a": 1}, "two words", "ä", "a" * 256)),
        {"data": {"id": ["a", "b"]}},
    )
    for attempt in cases:
        world = hooked()

        answer = sent(world, **attempt)

        assert (400, "invalid-key", []) == (answer.status_code, answer.get_json()["code"], world.runs), attempt


def test_a_body_over_the_limit_is_413() -> None:
    """With its announced length; the view could not read it either."""
    world = hooked(policy={"max_request_body": 20})
    refused = [sent(world, **event("e" * 40))]
    world.app.config["MAX_CONTENT_LENGTH"] = 10
    refused.append(sent(world, **event()))

    assert [413, 413, []] == [*(each.status_code for each in refused), world.runs]


def test_the_view_finds_the_body_unread() -> None:
    """Signatures are computed over its bytes, which a view may read in any way."""
    world = new_world(principal=None)
    seen: list[bytes] = []
    paths: list[str] = []

    def stream() -> str:
        seen.append(request.stream.read())
        return "ok"

    def data() -> str:
        seen.append(request.get_data())
        return "ok"

    def document() -> str:
        seen.append(json.dumps(request.get_json()).encode())
        return "ok"

    def by_function(got: Request) -> str:
        return str(got.get_json()["id"])

    def raw(got: Request) -> str:
        return str(json.loads(got.stream.read())["id"])

    keys: list[Any] = ["/id", by_function, raw]
    for number, key in enumerate(keys):
        for view in (stream, data, document):
            path = f"/{view.__name__}{number}"
            marked: Callable[[], str] = wraps(view)(partial(view))
            world.view(path, endpoint=path)(webhook(path, key=key)(marked))
            paths.append(path)

    assert {200} == {sent(world, path, **event()).status_code for path in paths}
    assert {json.dumps(event()["json"])} == {json.dumps(json.loads(each)) for each in seen}
    assert 9 == len(seen)


def test_two_providers_with_equal_ids_are_two_events() -> None:
    world = hooked()
    world.view("/adyen")(webhook("adyen", key="/id")(lambda: "ok"))

    answers = [sent(world, path, **event()) for path in ("/stripe", "/adyen")]

    assert [200, 200] == [each.status_code for each in answers]
    assert not any(map(is_replay, answers))


def test_a_client_with_the_same_key_has_another_record() -> None:
    """And the caller of a webhook is known by the policy: its credentials need no loader."""
    world = new_world(principal=lambda: None, allow_anonymous=False)
    world.view("/stripe")(webhook("stripe", key="Idempotency-Key")(lambda: "ok"))

    @world.view("/pay")
    def pay() -> str:
        return "paid"

    assert 200 == sent(world, headers={"Idempotency-Key": "k"}).status_code
    record = world.record()
    assert record is not None
    assert "webhook:stripe" == record.info.principal
    assert 401 == world.post("/pay").status_code or 403 == world.post("/pay").status_code


@pytest.mark.parametrize("hashed", (False, True))
def test_no_caller_can_have_the_name_of_a_provider(hashed: bool) -> None:
    """Or a client could block an event, or get its response. Commands find both records."""
    who: list[str | None] = []
    world = new_world(principal=lambda: who[0], hash_identities=hashed)

    @world.view("/stripe")
    @webhook("stripe", key="/id", scope="key")
    def receive() -> str:
        world.runs.append(1)
        return "of the provider"

    @world.view("/pay")
    def pay() -> str:
        return "of the client"

    provider = sent(world, **event())
    for name in ("webhook:stripe", "\2webhook:stripe", "\0webhook:stripe", "stripe"):
        who[:] = [name]
        client = world.post("/pay", key="evt_1")
        assert ("of the client", False) == (client.get_data(as_text=True), is_replay(client)), name
    again = sent(world, **event())

    assert ([1], "of the provider", True) == (world.runs, again.get_data(as_text=True), is_replay(again))
    assert provider.data == again.data
    for endpoint in ("receive", "pay"):
        shown = run(world, "show", "--key", "evt_1", "--principal", "webhook:stripe", "--endpoint", endpoint, "--json")
        assert (0, endpoint) == (shown.exit_code, said(shown)["endpoint"]), shown.output


def test_a_second_view_of_one_provider_does_not_replay_the_first() -> None:
    """It is refused, and the provider shows that: a silent replay would lose the event for this view."""
    world = hooked()
    world.view("/other")(webhook("stripe", key="/id")(lambda: "ok"))

    answers = [sent(world, path, **event()) for path in ("/stripe", "/other")]

    assert [200, 422] == [each.status_code for each in answers]


def test_in_flight_is_409() -> None:
    """The provider tries again. No attempt waits, whatever the application chose for its clients."""
    world = hooked(policy={"in_flight": "wait", "wait": 9})
    nested: list[TestResponse] = []

    @world.view("/slow")
    @webhook("slow", key="/id")
    def slow() -> str:
        nested.append(sent(world, "/slow", **event()))
        return "ok"

    assert 200 == sent(world, "/slow", **event()).status_code
    assert [(409, "in-flight")] == [(each.status_code, each.get_json()["code"]) for each in nested]


@pytest.mark.parametrize(
    ("effects", "codes"),
    (
        ("plain", [500, 409]),
        ("marked", [500, 500]),
        ("deduplicated", [500, 500]),
    ),
)
def test_a_failure_is_what_effects_make_of_it(effects: str, codes: list[int]) -> None:
    """Unknown is 409, until a resolver or an operator settles it."""
    world = hooked(effects=effects)

    answers = [sent(world, **event(), headers={"X-Fail": "500"}) for _ in codes]

    assert codes == [each.status_code for each in answers]


@pytest.mark.parametrize("written", ("in the decorator", "for the application"))
def test_the_rows_of_an_event_are_committed_with_its_record(written: str, tmp_path: Path) -> None:
    """Each failed attempt is rolled back and the next one runs: also a redirect, which is a failure to a provider."""
    policy = {"effects": "transactional"} if written == "in the decorator" else {}
    effects = "plain" if policy else "transactional"
    url = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
    shop = open_shop(url, PROPAGATE_EXCEPTIONS=False, IDEMPOTENCY_EFFECTS=effects)

    @shop.view("/stripe")
    @webhook("stripe", key="/id", **policy)
    def receive() -> Any:
        if request.headers.get("X-Do") != "nothing":
            shop.pay()
        if "X-Fail" in request.headers:
            abort(Response(status=int(request.headers["X-Fail"])))
        if "X-Raise" in request.headers:
            raise ValueError
        return "", 204

    def send(**headers: str) -> int:
        return shop.client().post("/stripe", **event(), headers={"Signature": "x", **headers}).status_code

    failed = [send(**{"X-Fail": status}) for status in ("400", "404", "429", "500", "503")]
    moved = [send(**{"X-Fail": "302", "X-Do": do}) for do in ("nothing", "write")]
    crashed = send(**{"X-Raise": "1"})
    assert 0 == shop.payments()
    done = [send() for _ in range(2)]
    shop.close()

    assert [400, 404, 429, 500, 503] == failed
    assert [302, 500, 500] == [*moved, crashed]  # 500: its rows were rolled back, and a 302 would say otherwise
    assert ([204, 204], 1, 9) == (done, shop.payments(), len(shop.runs) + 1)


def test_no_effects_or_profile_contradict_what_a_webhook_decides() -> None:
    """A released success does: its rows are rolled back, and the provider never sends it again."""
    for effects, profile in product(
        ("plain", "marked", "deduplicated", "transactional"), ("ietf", "stripe", "x-idempotency", "playbook")
    ):
        world = hooked(policy={"profile": profile}, effects=effects)
        world.view("/2")(webhook("2", key="/id", effects=effects, release_statuses=[204])(lambda: "ok"))
        policies = [
            world.app.extensions["idempotency"].policies.look(name, "POST").policy for name in ("receive", "<lambda>")
        ]

        contradictions = [len(policy.faults(joint=True)) for policy in policies]
        assert [0, int(effects == "transactional")] == contradictions, (effects, profile)


def test_an_unknown_outcome_is_settled_by_the_resolver() -> None:
    world = hooked()
    world.idempotency.resolver("receive")(lambda unknown: Happened(("known", 200)))
    sent(world, **event(), headers={"X-Fail": "500"})
    assert 409 == sent(world, **event()).status_code

    world.clock.advance(3600)
    world.app.test_cli_runner().invoke(args=["idempotency", "reap"])
    answer = sent(world, **event())

    assert (200, "known") == (answer.status_code, answer.get_data(as_text=True))


def test_a_refusal_is_not_kept() -> None:
    """Or a forged request would block the real event, and a provider would repeat in vain until it gives up."""
    for status, profile in product(
        (302, 303, 400, 401, 404, 409, 422, 429), ("ietf", "stripe", "x-idempotency", "playbook")
    ):
        world = hooked(policy={"profile": profile})

        refused = sent(world, **event(), headers={"X-Fail": str(status)})
        after = sent(world, **event())

        assert (status, 200, 2) == (refused.status_code, after.status_code, len(world.runs)), (status, profile)
        assert not is_replay(after), (status, profile)


@pytest.mark.parametrize(
    "chosen",
    (
        {"key_format": "uuid"},
        {"max_key_length": 3},
        {"keep_statuses": [400, 500]},
        {"on_error": "keep"},
        {"decide": lambda response, error: Decision.KEEP},
        {"header": "X-Key"},
        {"form_field": "key"},
        {"fingerprint": "raw"},
        {"ignore_fields": ["/a"]},
        {"keep": 5},
        {"methods": ["PUT"]},
    ),
)
def test_what_the_application_chose_for_its_clients_does_not_break_a_webhook(chosen: dict[str, Any]) -> None:
    """Two attempts a day apart: one run. A failed attempt is not replayed."""
    world = hooked(policy=chosen, effects="deduplicated")

    assert [500, 400] == [sent(world, **event(), headers={"X-Fail": code}).status_code for code in ("500", "400")]
    first = sent(world, **event())
    world.clock.advance(DAY)
    second = sent(world, **event(again=True))

    assert [200, 200] == [first.status_code, second.status_code], second.get_json()
    assert (False, True) == (is_replay(first), is_replay(second))


def test_events_are_remembered_for_thirty_days() -> None:
    world = hooked()
    sent(world, **event())

    world.clock.advance(30 * DAY - 1)
    assert is_replay(sent(world, **event()))
    world.clock.advance(2)
    assert not is_replay(sent(world, **event()))


def test_a_webhook_does_not_run_while_the_store_is_down() -> None:
    """A provider can wait: 503, whatever the application lets its clients do."""
    world = hooked(policy={"on_store_down": "allow"})
    world.store.down = True

    assert (503, []) == (sent(world, **event()).status_code, world.runs)


def signed(view: Callable[..., Any]) -> Callable[..., Any]:
    """Check a signature in the way of the providers' own examples: 400."""

    @wraps(view)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs) if request.headers.get("Signature") == "good" else Response("forged", 400)

    return checked


def test_a_decorator_above_claim_here_sees_every_attempt() -> None:
    """A forged request makes no claim, and gets no stored response."""
    world = new_world(principal=None)

    @world.view("/stripe")
    @signed
    @claim_here
    @webhook("stripe", key="/id")
    def receive() -> str:
        world.runs.append(1)
        return "secret"

    forged = [sent(world, **event())]
    assert [] == world.store.verbs()
    real = sent(world, **event(), headers={"Signature": "good"})
    forged.append(sent(world, **event()))

    assert [(400, "forged"), (400, "forged")] == [(each.status_code, each.get_data(as_text=True)) for each in forged]
    assert (200, "secret", [1]) == (real.status_code, real.get_data(as_text=True), world.runs)


def test_a_before_request_function_of_the_blueprint_comes_first() -> None:
    world = new_world(principal=None)
    hooks = Blueprint("hooks", __name__)

    @hooks.before_request
    def check() -> None:
        if request.headers.get("Signature") != "good":
            abort(400)

    hooks.post("/stripe")(webhook("stripe", key="/id")(lambda: "ok"))
    world.app.register_blueprint(hooks)

    assert 400 == sent(world, **event()).status_code
    assert [] == world.store.verbs()
    assert 200 == sent(world, **event(), headers={"Signature": "good"}).status_code


def test_a_function_may_refuse_the_request() -> None:
    """With a response of its own, before any claim."""
    world = hooked(lambda got: abort(418))

    assert (418, []) == (sent(world, **event()).status_code, world.store.verbs())


def test_former_names_of_callers_do_not_concern_it() -> None:
    """Its caller was never named by a loader. The former namespace counts."""

    def never() -> str:
        raise AssertionError("no caller to load")

    world = hooked(policy={"namespace": "old"})
    sent(world, **event())
    after = new_world(
        principal=never,
        store=world.store,
        namespace="new",
        former_identity={"namespace": "old", "principal": never},
    )
    after.view("/stripe")(webhook("stripe", key="/id")(lambda: "ok"))

    assert is_replay(sent(after, **event()))


def test_it_marks_as_the_other_decorators_do() -> None:
    """The same function comes back; @exempt beside it is a contradiction."""

    def view() -> str:
        return "ok"

    assert view is webhook("stripe", key="/id")(view)
    assert "ok" == view()
    with pytest.raises(ConfigurationError, match="both @idempotent and @exempt"):
        exempt(view)


def test_it_is_guarded_where_only_chosen_endpoints_are() -> None:
    world = hooked(policy={"guard": "chosen"})

    assert [False, True] == [is_replay(sent(world, **event())) for _ in range(2)]


def test_an_application_without_the_extension_closes_it() -> None:
    app = Flask(__name__)
    app.post("/stripe")(webhook("stripe", key="/id")(lambda: "ok"))

    assert 500 == app.test_client().post("/stripe", **event()).status_code


async def id_later(request: Any) -> str:
    return "evt_1"


def test_a_key_may_be_any_function_of_the_request() -> None:
    class Ids:
        def of(self, request: Any, field: str = "id") -> Any:
            return request.get_json()[field]

        __call__ = of

    for key in (
        Ids(),
        Ids().of,
        partial(Ids().of, field="id"),
        lambda *args: "evt_1",
        str,
        operator.attrgetter("mimetype"),
    ):
        webhook("stripe", key=key)


def test_wrong_arguments_are_refused() -> None:
    cases: tuple[Any, ...] = (
        ({"name": ""}, "the name of the provider"),
        ({"name": "x" * 300}, "the name of the provider"),
        ({"key": ""}, "key must be a JSON Pointer"),
        ({"key": "/a~2"}, '"~" in the JSON Pointer'),
        ({"key": "id of it"}, "header"),
        ({"key": "/id", "header": "X-Id"}, "header is no keyword here"),
        ({"key": "/id", "required": False}, "required is no keyword here"),
        ({"key": lambda: "evt_1"}, "key is called with the request alone"),
        ({"key": lambda request, name: name}, "key is called with the request alone"),
        ({"key": lambda *, request: request}, "key is called with the request alone"),
        ({"key": id_later}, "key is called with the request alone"),
        ({"decide": lambda response: "keep"}, "decide: must be a function of two arguments"),
        ({"key": "/id", "kep": 5}, "Did you mean @webhook\\('stripe'\\): keep"),
    )
    for arguments, why in cases:
        with pytest.raises(ConfigurationError, match=why):
            webhook(arguments.pop("name", "stripe"), **{"key": "/id", **arguments})


def test_a_policy_keyword_is_taken() -> None:
    """An own list of statuses replaces the rule for refusals."""
    world = hooked(keep=7, keep_statuses=[404])

    assert [404, 404] == [sent(world, **event(), headers={"X-Fail": "404"}).status_code for _ in range(2)]
    assert 1 == len(world.runs)
    world.clock.advance(8)
    assert 200 == sent(world, **event()).status_code


def test_documents_for_clients_leave_it_out() -> None:
    """The provider reads none, and no client sends its ids."""
    world = hooked(policy={"publish": True})
    world.view("/pay")(lambda: "paid")
    paths = {path: {"post": {"responses": {"200": {"description": ""}}}} for path in ("/stripe", "/pay")}
    document: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "", "version": ""}, "paths": paths}

    described = describe(document, world.app)
    published = world.app.test_client().get("/.well-known/idempotency").get_json()

    assert {"/pay"} == {path for path, item in described["paths"].items() if "x-idempotency" in item["post"]}
    assert "/stripe" not in {each["path"] for each in published["operations"]}


def test_the_command_line_knows_it() -> None:
    """Its policy with where each value comes from, and its records by the provider's id."""
    world = hooked()
    sent(world, **event())

    policy = said(run(world, "policy", "receive", "--json"))
    shown = run(world, "show", "--key", "evt_1", "--principal", "webhook:stripe", "--json")

    (found,) = policy["endpoints"]
    values = {name: value["value"] for name, value in found["policy"].items()}
    assert ("webhook:stripe", "none") == (values["principal"], values["fingerprint"])
    assert "IdInBody('/id')" in values["key"]
    assert found["policy"]["keep"]["from"].startswith("@webhook on ")
    assert 0 == shown.exit_code, shown.output


def test_its_problems_carry_no_status_link() -> None:
    """The status view would look for the key of a client."""
    world = hooked(policy={"status_url": "/status"})
    world.view("/pay")(lambda: abort(500))
    sent(world, **event(), headers={"X-Fail": "500"})
    world.post("/pay")

    unknown = sent(world, **event()), world.post("/pay", headers={"Authorization": ""})

    assert [409, 409] == [each.status_code for each in unknown]
    assert [False, True] == ['rel="status"' in str(each.headers) for each in unknown]

"""Every outcome has one answer, and every failure of our own is an answer too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flask import Flask, Response, after_this_request, request

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.events import ClaimGranted, ReplayForbidden, ReplayServed, StoreFailed
from flask_idempotency.engine.keys import Identity, Scope
from flask_idempotency.engine.model import State
from flask_idempotency.extension import Idempotency
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.policies import claim_here, idempotent
from flask_idempotency.web.problem_types import PROBLEMS
from tests.apps import KEY, World, is_replay, new_world


def paying(world: World) -> World:
    @world.view()
    def pay() -> tuple[dict[str, int], int]:
        world.runs.append(1)
        return {"n": len(world.runs)}, 201

    return world


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json["code"]


def test_the_first_request_runs_and_a_retry_is_given_its_answer() -> None:
    """Two store calls for the first, one for the replay; each is told."""
    world = paying(new_world())
    first, again = world.post(), world.post()

    assert (201, {"n": 1}, False) == (first.status_code, first.json, is_replay(first))
    assert (201, {"n": 1}, True) == (again.status_code, again.json, is_replay(again))
    assert ["claim", "complete", "claim"] == world.store.verbs()
    assert "no-store" == again.headers["Cache-Control"]
    assert (1, 1) == (len(world.told(ClaimGranted)), len(world.told(ReplayServed)))


@pytest.mark.parametrize("deferred", (True, False))
def test_a_missing_key_is_refused_only_where_it_is_required(deferred: bool) -> None:
    """Otherwise the request passes through, unprotected and unmarked."""
    world = new_world()

    def pay() -> str:
        world.runs.append(1)
        return "paid"

    view = claim_here(pay) if deferred else pay
    world.view("/required", endpoint="required")(idempotent(required=True)(view))
    world.view("/optional", endpoint="optional")(lambda: "paid")

    assert (400, "missing-key") == code(world.post("/required", key=None))
    assert 200 == world.post("/optional", key=None).status_code
    assert [] == world.runs
    assert [] == world.store.calls


@pytest.mark.parametrize("key", ("", "two, keys", '"open', "x" * 256, "ä", "a b"))
def test_a_malformed_key_is_refused_even_where_none_is_required(key: str) -> None:
    """Never a silent pass."""
    world = paying(new_world())
    response = world.client().post("/", environ_overrides={"HTTP_IDEMPOTENCY_KEY": key})

    assert (400, "invalid-key") == code(response)
    assert [] == world.runs


def test_two_headers_that_name_different_keys_are_refused() -> None:
    """An alias that disagrees with the header is a client that does not know what it is doing."""
    world = paying(new_world(header=["Idempotency-Key", "X-Key"]))

    assert (400, "invalid-key") == code(world.post(headers={"X-Key": "another"}))
    assert 201 == world.post(headers={"X-Key": '"k"'}).status_code
    assert is_replay(world.client().post("/", headers={"X-Key": "k"}))


def test_a_duplicate_of_a_running_request_is_409_with_what_is_left_of_the_lease() -> None:
    """It changes nothing: a third caller is refused too."""
    world = new_world(lease=30)
    with world.running("/"):
        refused = [world.post() for _ in range(2)]

    assert [(409, "in-flight")] * 2 == [code(response) for response in refused]
    assert all(int(response.headers["Retry-After"]) >= 1 for response in refused)
    assert "done" == world.post().text


def test_the_same_key_for_another_payload_is_422_and_tells_when_it_was_first_seen() -> None:
    """Nothing the client sent appears in the problem."""
    world = paying(new_world())
    world.post(json={"amount": 1})
    response = world.post(json={"amount": 999})

    assert (422, "key-reused") == code(response)
    assert "first seen at 2023-11-14T23:00:00Z" in response.json["detail"]  # type: ignore[index]
    assert "999" not in response.text
    assert [1] == world.runs


@pytest.mark.parametrize(("effects", "answer"), (("plain", (409, "outcome-unknown")), ("deduplicated", (201, None))))
def test_a_vanished_worker_leaves_a_quarantine_or_is_taken_over(effects: str, answer: tuple[int, str | None]) -> None:
    """By what the endpoint declares of its effects."""
    world = paying(new_world(effects=effects))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnvelopeCodec, "seal", lambda self, result: 1 / 0)
        world.post()  # the answer could not be sealed: as good as vanished
    world.clock.advance(31)
    response = world.post()

    assert answer == (response.status_code, response.json.get("code"))  # type: ignore[union-attr]
    assert "Retry-After" not in response.headers


def test_a_silent_store_refuses_keyed_requests_only() -> None:
    """503 with Retry-After; un-keyed requests go on."""
    world = paying(new_world())
    world.store.down = True
    response = world.post()

    assert (503, "store-unavailable") == code(response)
    assert "Retry-After" in response.headers
    assert [False] == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]
    assert 201 == world.post(key=None).status_code


def test_a_silent_store_may_be_allowed_to_let_requests_run_visibly(caplog: pytest.LogCaptureFixture) -> None:
    """on_store_down="allow": header, warning and event say so, and there is no claim."""
    world = new_world(on_store_down="allow")
    world.view()(lambda: str(bool(current_claim)))
    world.store.down = True
    with caplog.at_level(logging.WARNING):
        response = world.post()

    assert (200, "False", "unprotected") == (
        response.status_code,
        response.text,
        response.headers["Idempotency-Status"],
    )
    assert "unprotected" in caplog.text
    assert [True] == [event.unprotected for event in world.told(StoreFailed)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("verdict", (False, None))
def test_the_replay_guard_may_refuse_a_replay_and_the_record_is_kept(verdict: Any) -> None:
    """Permission revoked: 403, told, and given again once the guard agrees. What is not True is a refusal."""
    world = paying(new_world())
    verdicts: list[bool] = [True, verdict]

    @world.idempotency.replay_guard
    def allowed(record: Any) -> bool:
        assert (record.state, record.info.principal) == (State.COMPLETED, "alice")
        return verdicts.pop()

    world.post()
    assert (403, "replay-forbidden") == code(world.post())
    assert (1, 0) == (len(world.told(ReplayForbidden)), len(world.told(ReplayServed)))
    assert is_replay(world.post())


def test_a_replay_guard_that_fails_gives_no_answer_away() -> None:
    """500, and the stored answer stays where it is."""
    world = paying(new_world())
    world.idempotency.replay_guard(lambda record: bool(1 / 0))
    world.post()

    assert 500 == world.post().status_code
    assert [1] == world.runs


def test_principals_and_tenants_have_key_spaces_of_their_own() -> None:
    """The same key of two tenants, or of two principals, is two keys."""
    world = paying(new_world())
    world.idempotency.tenant_loader(lambda: request.headers["X-Tenant"])
    who = [(tenant, user) for tenant in ("acme", "globex") for user in ("alice", "bob")]
    answers = [
        [world.post(headers={"X-Tenant": tenant, "X-User": user}).json for _ in range(2)] for tenant, user in who
    ]

    assert [[{"n": n}] * 2 for n in (1, 2, 3, 4)] == answers
    record = world.record()
    assert record is not None
    assert ("globex", "bob", "POST", "pay") == (
        record.info.tenant,
        record.info.principal,
        record.info.method,
        record.info.operation,
    )


def test_scope_operation_gives_each_endpoint_its_own_key_space() -> None:
    """By default the same key elsewhere is a mismatch."""
    for scope, status in (("key", 422), ("operation", 201)):
        world = paying(new_world(scope=scope))
        world.view("/other", endpoint="other")(lambda: ("other", 201))
        world.post()
        assert status == world.post("/other").status_code


def test_a_problem_is_rendered_in_the_dialect_of_the_policy_or_by_the_application() -> None:
    """Profiles, and one's own renderer over all of them."""
    world = paying(new_world(profile="stripe"))
    world.post(json=1)
    assert {"type": "idempotency_error"}.items() <= world.post(json=2).json["error"].items()  # type: ignore[index]

    @world.idempotency.problem_renderer
    def render(problem: Any, **_: Any) -> Any:
        return {"ours": problem.code}, 418

    response = world.post(json=2)
    assert (418, {"ours": "key-reused"}) == (response.status_code, response.json)


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def with_pages(**policy: Any) -> World:
    """Its problems are pages for those who accept pages."""
    world = paying(new_world(**policy))

    @world.idempotency.problem_renderer
    def page(problem: Any, **_: Any) -> Any:
        if request.accept_mimetypes.best_match(["application/json", "text/html"]) != "text/html":
            return None
        return f"<h1>{problem.title}</h1><p>{problem.text}</p>", problem.status

    return world


def test_a_problem_renderer_knows_the_status_title_and_text_of_a_problem() -> None:
    """A page for people needs them, and each profile has statuses of its own."""
    world, stripe = with_pages(), with_pages(profile="stripe")
    for each, status in ((world, 422), (stripe, 400)):
        each.post(data={"amount": 5})
        page = each.post(data={"amount": 6}, headers=BROWSER)

        assert (status, "text/html") == (page.status_code, page.mimetype)
        assert f"<h1>{PROBLEMS['key-reused'].title}</h1>" in page.text
        assert "It was first seen at" in page.text
        assert PROBLEMS["key-reused"].detail in page.text


def test_a_problem_renderer_that_returns_none_leaves_the_problem_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """So a script that posts a form gets JSON, and a browser a page."""
    world = with_pages()
    world.post(data={"amount": 5})

    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert (422, "key-reused") == code(world.post(data={"amount": 6}, headers=headers))
    assert "failed" not in caplog.text


def test_a_page_of_a_problem_carries_what_http_says_of_it() -> None:
    """Unless the renderer has said otherwise: it keeps no cache from asking again."""
    world = with_pages()
    world.store.down = True
    page = world.post(headers=BROWSER)

    assert (503, "text/html", "no-store") == (page.status_code, page.mimetype, page.headers["Cache-Control"])
    assert int(page.headers["Retry-After"]) > 0

    other = paying(new_world(required=True))
    other.idempotency.problem_renderer(lambda problem, **_: ("page", 400, {"Cache-Control": "private"}))
    assert "private" == other.post(key=None).headers["Cache-Control"]


def test_a_problem_renderer_that_fails_does_not_turn_a_refusal_into_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is told in our own words instead."""
    world = paying(new_world(required=True))
    world.idempotency.problem_renderer(lambda problem, **_: 1 / 0)

    assert (400, "missing-key") == code(world.post(key=None))
    assert "problem renderer failed" in caplog.text


def test_a_principal_loader_that_fails_leaves_no_claim() -> None:
    """Whatever an application's own function raises is an error before the view, and leaves no record."""
    world = paying(new_world(principal=lambda: str(1 / 0)))

    assert 500 == world.post().status_code
    assert [] == world.store.calls
    assert [] == world.runs


def test_a_rotated_secret_still_finds_what_was_stored_under_the_old_one() -> None:
    """Keys are looked up under every secret in use."""
    old = paying(new_world())
    old.post()
    app = Flask(old.app.import_name)
    app.config.update(SECRET_KEY="s", TESTING=True)
    Idempotency(app, principal=lambda: "alice", store=old.store, secret=["new", "s"])
    app.post("/")(lambda: "ran again")

    assert is_replay(app.test_client().post("/", headers={KEY: "k"}))


def test_the_storage_key_is_derived_from_the_scope() -> None:
    """Namespace, tenant, principal and key; nothing the client sent is in it."""
    world = paying(new_world(namespace="shop"))
    world.post()
    expected = Identity(b"s").storage_key(Scope("shop", None, "alice"), "k")

    assert expected == world.store.calls[0].key


def test_a_response_of_ours_that_a_before_hooks_function_changed_is_put_right() -> None:
    """after_this_request of a before hook runs over the refusal as well, and may not turn it into something else."""
    world = paying(new_world(required=True))

    @world.app.before_request
    def always() -> None:
        @after_this_request
        def succeed(response: Response) -> Response:
            response.status_code = 200
            response.set_data(b"all is well")
            response.headers["X-Hook"] = "ran"
            return response

    refused = world.post(key=None)
    assert (400, "missing-key") == code(refused)
    assert "ran" == refused.headers["X-Hook"]


def test_a_hook_that_fails_over_a_replay_is_a_500_and_not_the_replay() -> None:
    """What other hooks did not get to add, a security header say, must not be missing from a 200."""
    world = paying(new_world())

    @world.app.after_request
    def fail_over_replays(response: Response) -> Response:
        if is_replay(response):
            raise ValueError
        response.headers["X-Frame-Options"] = "DENY"
        return response

    world.post()
    response = world.post()

    assert (500, "DENY") == (response.status_code, response.headers.get("X-Frame-Options"))
    assert [1] == world.runs

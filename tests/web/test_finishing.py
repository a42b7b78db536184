"""The janitor finishes a request that stopped between two steps, as its caller, and never as another."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
from flask import Response, abort, g, redirect, request, request_started, session
from flask_wtf.csrf import CSRFProtect, generate_csrf  # type: ignore[import-untyped]

from flask_idempotency import Step, current_claim
from flask_idempotency.engine import events
from flask_idempotency.engine.journal import KEPT_REQUEST
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.web.janitor import janitor_of
from flask_idempotency.web.request_state import FINISHING
from tests.web.finishing import Shop, counts, paused


def test_a_request_is_kept_with_its_first_recorded_step_and_removed_with_the_response() -> None:
    shop = paused()
    (kept,) = shop.store._shared.journals.values()

    assert [KEPT_REQUEST] == [entry.name for entry in kept.entries.values() if not entry.is_step]
    shop.finish()
    assert {} == shop.store._shared.journals


# As whom.


def test_a_request_that_comes_out_as_another_caller_ends_before_the_view() -> None:
    """A bug in act_for must not pay as another."""
    shop = paused()

    def as_bob(principal: Any, tenant: Any) -> None:
        g.acting = "bob"

    shop.extension.act_for(as_bob)
    assert {"failed": 1} == counts(shop.finish())
    assert ["other-caller"] == [each.reason for each in shop.told(events.FinishTried)]
    assert 1 == len(shop.seen)
    assert {"reserve": 1, "charge": 1} == shop.ran
    assert 201 == shop.post().status_code


def test_a_request_that_comes_out_for_another_tenant_ends_before_the_view() -> None:
    shop = paused()

    def elsewhere(principal: Any, tenant: Any) -> None:
        g.acting, g.acting_tenant = principal, "other"

    shop.extension.act_for(elsewhere)
    assert ({"failed": 1}, 1) == (counts(shop.finish()), len(shop.seen))


def test_an_anonymous_request_does_not_come_out_as_a_user() -> None:
    shop = Shop()
    shop.app.before_request_funcs[None].remove(shop.authenticate)
    shop.app.before_request(lambda: setattr(g, "user", g.get("acting")))
    shop.app.test_client().post("/checkout/1?q=x", json={"cart": 1}, headers={"Idempotency-Key": "k"})
    shop.failing = False

    def as_alice(principal: Any, tenant: Any) -> None:
        assert (None, None) == (principal, tenant)
        g.acting = "alice"

    shop.extension.act_for(as_alice)
    assert {"failed": 1} == counts(shop.finish())
    shop.clock.advance(30)
    shop.extension.act_for(lambda principal, tenant: None)
    assert {"completed": 1} == counts(shop.finish())


def test_a_caller_who_was_disabled_is_refused_and_the_try_counts() -> None:
    shop = paused()
    shop.users.clear()

    assert {"failed": 1} == counts(shop.finish())
    assert ["status-401"] == [each.reason for each in shop.told(events.FinishTried)]
    assert 1 == len(shop.seen)
    assert {"waiting": 1} == counts(shop.finish())
    assert State.PROCESSING is next(iter(shop.store._shared.records.values())).state


def test_an_error_in_act_for_is_a_failed_try() -> None:
    shop = paused()

    def broken(principal: Any, tenant: Any) -> None:
        raise LookupError("no such user")

    shop.extension.act_for(broken)
    assert {"failed": 1} == counts(shop.finish())
    assert ["status-500"] == [each.reason for each in shop.told(events.FinishTried)]
    assert 1 == len(shop.seen)


def test_act_for_adds_header_fields_to_this_request_alone() -> None:
    shop = paused()
    shop.extension.act_for(lambda principal, tenant: {"X-Token": principal})

    assert {"completed": 1} == counts(shop.finish())
    assert (True, 1, "é", "alice") == shop.seen[-1]


def test_act_for_may_return_a_cookie() -> None:
    shop = paused()
    shop.extension.act_for(lambda principal, tenant: {"Cookie": f"user={principal}"})
    shop.app.before_request_funcs[None].insert(0, lambda: setattr(g, "acting", request.cookies.get("user")))

    assert {"completed": 1} == counts(shop.finish())


@pytest.mark.parametrize("given", ("X-Token", {"X-Token": 7}, [("X-Token",)], 7))
def test_what_is_no_header_field_is_a_failed_try(given: Any) -> None:
    shop = paused()
    shop.extension.act_for(lambda principal, tenant: given)

    assert ({"failed": 1}, 1) == (counts(shop.finish()), len(shop.seen))


@pytest.mark.parametrize("by_name", (False, True))
def test_only_the_named_hooks_are_left_out_and_only_for_the_janitor(by_name: bool) -> None:
    shop = Shop()
    ran: list[str] = []

    def check_csrf() -> None:
        ran.append("csrf")
        if "X-Csrf" not in request.headers:
            abort(400)

    async def audit() -> None:
        ran.append("audit")

    shop.app.before_request(check_csrf)
    shop.app.before_request(audit)
    shop.post(**{"X-Csrf": "1"})
    shop.failing = False
    ran.clear()
    shop.extension.act_for(instead_of=["check_csrf" if by_name else check_csrf])(shop.act_for)

    assert {"completed": 1} == counts(shop.finish())
    assert ["audit"] == ran
    assert 400 == shop.post("other").status_code
    assert ["audit", "csrf"] == ran


@pytest.mark.parametrize("instead_of", ((), ("csrf_protect",)))
def test_csrf_protection_of_flask_wtf_needs_to_be_named(instead_of: tuple[str, ...]) -> None:
    shop = Shop()
    shop.app.config["WTF_CSRF_CHECK_DEFAULT"] = True
    CSRFProtect(shop.app)
    with shop.app.test_client() as client:
        shop.app.add_url_rule("/token", "token", generate_csrf)
        headers = {"X-Token": "alice"}
        headers["X-CSRFToken"] = client.get("/token", headers=headers).text
        sent = client.post("/checkout/1", json={"cart": 1}, headers={**headers, "Idempotency-Key": "k"})
    assert "paused" == sent.headers["Idempotency-Status"]
    shop.failing = False
    shop.extension.act_for(instead_of=instead_of)(shop.act_for)

    assert ({"completed": 1} if instead_of else {"failed": 1}) == counts(shop.finish())


def test_nothing_is_shared_between_two_tries() -> None:
    """`g` of one would sign its caller in for the next."""
    shop = Shop()
    shop.post("one", "alice")
    shop.post("two", "bob")
    shop.failing = False
    left: list[dict[str, Any]] = []

    def act_for(principal: Any, tenant: Any) -> None:
        left.append({name: g.get(name) for name in g})
        session["user"] = principal
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    with shop.app.app_context():
        g.user = "an operator"
        assert {"completed": 2} == counts(shop.finish())
    assert [{}, {}] == left


def test_current_claim_says_who_finishes_in_hooks_too() -> None:
    shop = Shop()
    said: list[bool] = []
    shop.app.before_request(lambda: said.append(current_claim.finishing))
    shop.post()
    shop.failing = False
    shop.finish()

    assert [False, True] == said
    assert not current_claim.finishing


def test_a_nested_dispatch_is_no_request_of_the_janitor() -> None:
    shop = Shop()
    said: list[Any] = []

    def checkout() -> Any:
        if current_claim.finishing:
            environ = {**request.environ, "HTTP_X_TOKEN": "alice"}
            said.append(shop.app.test_client().open(environ_overrides=environ).get_json()["code"])
        return Shop.checkout(shop)

    shop.checkout = checkout  # type: ignore[method-assign]
    shop.post()
    shop.failing = False
    assert {"completed": 1} == counts(shop.finish())
    assert ["missing-key"] == said


def test_a_dispatch_of_a_receiver_is_no_request_of_the_janitor() -> None:
    """`request_started` comes before our hook, so the environ still has the try."""
    shop = paused()
    said: list[Any] = []

    def receiver(sender: Any, **others: Any) -> None:
        if FINISHING in request.environ and not said:
            said.append(None)
            environ = {name: value for name, value in request.environ.items() if name != "werkzeug.request"}
            said[0] = shop.app.test_client().open(environ_overrides={**environ, "HTTP_X_TOKEN": "alice"}).get_json()
            assert FINISHING in request.environ

    with request_started.connected_to(receiver, shop.app):
        assert {"completed": 1} == counts(shop.finish())
    assert "missing-key" == said[0]["code"]
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran


def test_a_hook_is_wrapped_once_however_many_janitors_there_are() -> None:
    shop = Shop()
    ran: list[str] = []

    def check_csrf() -> None:
        ran.append("csrf")

    shop.app.before_request(check_csrf)
    shop.extension.act_for(instead_of=["check_csrf"])(shop.act_for)
    for key in ("a", "b", "c"):
        shop.failing = True
        shop.post(key)
        shop.failing = False
        assert {"completed": 1} == counts(shop.finish())
    assert 3 == len(ran)
    hooks: list[Any] = [each for each in shop.app.before_request_funcs[None] if each.__name__ == "check_csrf"]
    assert [check_csrf] == [hook.__wrapped__ for hook in hooks]


# What the view's response means.


def test_a_response_of_the_view_is_stored_and_not_sent() -> None:
    shop = paused()

    def checkout() -> Any:
        Shop.checkout(shop)
        session["cart"] = 1
        return redirect("/orders/1")

    shop.checkout = checkout  # type: ignore[method-assign]
    assert {"completed": 1} == counts(shop.finish())
    replayed = shop.post()
    assert (302, "/orders/1", None) == (
        replayed.status_code,
        replayed.headers["Location"],
        replayed.headers.get("Set-Cookie"),
    )


def test_a_refusal_of_the_view_ends_the_request() -> None:
    shop = paused()

    def checkout() -> Any:
        Shop.checkout(shop)
        return {"why": "too late"}, 422

    shop.checkout = checkout  # type: ignore[method-assign]
    assert {"completed": 1} == counts(shop.finish())
    assert 422 == shop.post().status_code


@pytest.mark.parametrize("streamed", (False, True))
@pytest.mark.parametrize("status", (200, 302, 400, 404))
def test_a_refusal_before_the_recorded_steps_is_a_failed_try(status: int, streamed: bool) -> None:
    """The janitor's request lacks what was not kept: that must not lock its client out."""
    shop = Shop()

    def checkout() -> Any:
        if "X-Region" not in request.headers:
            return Response(iter(["no"]) if streamed else "no", status)
        return Shop.checkout(shop)

    shop.checkout = checkout  # type: ignore[method-assign]
    shop.post(**{"X-Region": "north"})
    shop.failing = False

    assert {"failed": 1} == counts(shop.finish())
    assert [("failed", "not-reached")] == [(each.outcome, each.reason) for each in shop.told(events.FinishTried)]
    assert {"waiting": 1} == counts(shop.finish())
    assert 201 == shop.post(**{"X-Region": "north"}).status_code
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran


def test_a_refusal_between_recorded_steps_is_a_failed_try() -> None:
    shop = paused()

    def checkout() -> Any:
        current_claim.step("reserve", shop.run, "reserve")
        return {}, 422

    shop.checkout = checkout  # type: ignore[method-assign]
    assert {"failed": 1} == counts(shop.finish())
    del shop.checkout
    assert 201 == shop.post().status_code


def test_a_stream_is_read_to_its_end() -> None:
    shop = paused()

    def checkout() -> Any:
        Shop.checkout(shop)
        return Response(iter(["a", "b"]), 201)

    shop.checkout = checkout  # type: ignore[method-assign]
    assert {"completed": 1} == counts(shop.finish())
    assert (201, "ab") == (shop.post().status_code, shop.post().text)


def test_a_plain_step_in_doubt_is_never_entered() -> None:
    shop = Shop()

    def checkout() -> Any:
        current_claim.step("reserve", shop.run, "reserve")

        def charge() -> None:
            shop.ran["charge"] += 1
            raise ConnectionError

        current_claim.step("charge", charge)

    shop.checkout = checkout  # type: ignore[method-assign]
    assert 500 == shop.post().status_code
    del shop.checkout
    shop.failing = False
    shop.clock.advance(3600)

    assert {} == counts(shop.finish())
    assert {"reserve": 1, "charge": 1} == shop.ran


def test_a_try_that_leaves_a_step_in_doubt_is_held() -> None:
    shop = Shop()

    def stopped() -> Any:
        current_claim.step("reserve", shop.run, "reserve")
        return {}, 503

    shop.checkout = stopped  # type: ignore[method-assign]
    shop.post()

    def charge() -> None:
        raise ConnectionError

    def checkout() -> Any:
        current_claim.step("reserve", shop.run, "reserve")
        current_claim.step("charge", charge)

    shop.checkout = checkout  # type: ignore[method-assign]
    assert {"quarantined": 1} == counts(shop.finish())
    assert [("quarantined", "step-in-doubt")] == [(each.outcome, each.reason) for each in shop.told(events.FinishTried)]


@pytest.mark.parametrize("ending", (201, 503, "doubt"))
def test_what_a_client_did_while_the_try_ran_is_not_the_janitors(ending: Any) -> None:
    shop = Shop()

    def doubt() -> None:
        raise ConnectionError

    def checkout() -> Any:
        current_claim.step("reserve", shop.run, "reserve")
        if not current_claim.finishing:
            if shop.failing or ending == 503:
                return {}, 503
            current_claim.step("charge", doubt if ending == "doubt" else dict)
            return {}, ending
        shop.clock.advance(3600)
        client = Thread(target=shop.post)
        client.start()
        client.join(60)
        current_claim.step("charge", shop.run, "charge")
        return {}, 201

    shop.checkout = checkout  # type: ignore[method-assign]
    shop.post()
    shop.failing = False

    assert {"overtaken": 1} == counts(shop.finish())
    assert ["overtaken"] == [each.outcome for each in shop.told(events.FinishTried)]
    assert "charge" not in shop.ran
    (key,) = shop.store._shared.records
    assert [] == [entry.verb for entry in shop.store.audit.entries(key) if entry.verb == "finished"]


# When.


def test_tries_are_five_with_growing_pauses_and_then_the_janitor_gives_up() -> None:
    shop = paused()
    shop.users.clear()
    at, began = [], shop.clock.now
    while not shop.told(events.FinishGaveUp):
        if shop.finish().waiting == 0:
            at.append(shop.clock.now - began)
        shop.clock.advance(10)
    shop.clock.advance(7200)

    assert [0, 30, 150, 750, 4350] == at
    assert {"waiting": 1} == counts(shop.finish())
    shown = shop.app.test_cli_runner().invoke(
        args=["idempotency", "show", "--key", "k", "--principal", "alice", "--tenant", "acme"]
    )
    assert "finish-gave-up" in shown.output
    assert "gave-up by janitor, while processing: finish-gave-up: status-401" in shown.output
    shop.users.add("alice")
    assert 201 == shop.post().status_code


def test_no_try_begins_after_resume_within_and_the_request_ends_as_ever() -> None:
    shop = paused(policy={"resume_within": 140})
    shop.users.clear()
    for _ in range(40):
        shop.finish()
        shop.clock.advance(10)

    assert 2 == len(shop.told(events.FinishTried))
    janitor_of(shop.app, host_clock=shop.clock).run("reap", Batcher())
    assert ["never-resumed"] == [each.reason for each in shop.told(events.Quarantined)]


def test_a_request_whose_lease_is_not_over_is_left_alone() -> None:
    shop = Shop()
    seen: list[Any] = []

    def checkout() -> Any:
        answer = Shop.checkout(shop)
        seen.append(counts(shop.finish()))
        return answer

    shop.checkout = checkout  # type: ignore[method-assign]
    shop.post()
    assert [{}] == seen


def test_a_try_that_kills_its_process_counts() -> None:
    """It would kill each janitor for ever."""

    class Killed(BaseException):
        pass

    shop = paused()

    def die(principal: Any, tenant: Any) -> None:
        raise Killed

    shop.extension.act_for(die)
    with pytest.raises(Killed):
        shop.finish()
    shop.clock.advance(29)
    assert {"waiting": 1} == counts(shop.finish())


def test_a_record_without_a_recorded_step_has_no_kept_request() -> None:
    shop = Shop()
    shop.checkout = lambda: ({}, 503)  # type: ignore[method-assign]
    assert "Idempotency-Status" not in shop.post().headers
    assert {} == shop.store._shared.journals

    def harmless() -> Any:
        def declined() -> None:
            raise ValueError

        try:
            current_claim.step("decline", declined)
        except ValueError:
            return {}, 503

    other = Shop(policy={"steps": (Step("decline", harmless=(ValueError,)),)})
    other.checkout = harmless  # type: ignore[method-assign]
    other.post()
    other.clock.advance(31)
    assert {} == counts(other.finish())


# Races.


@pytest.mark.parametrize("ending", ("completed", "released"))
def test_a_client_who_is_faster_than_the_janitor_wins(ending: str) -> None:
    """Between the janitor's look at the journal and its claim."""
    shop = paused()
    read, store = shop.store.journals.read, shop.store

    def and_then(key: Any) -> Any:
        journal = read(key)
        if ending == "completed":
            assert 201 == shop.post().status_code
        else:
            (found,) = store.recovery.expired_leases(horizon=shop.clock.now, limit=1).found
            assert store.recovery.force_release(found)
        return journal

    store.journals.read = and_then  # type: ignore[method-assign]
    assert {"overtaken": 1} == counts(shop.finish())
    store.journals.read = read  # type: ignore[method-assign]
    assert [] == shop.told(events.FinishTried)
    ran = {"mail": 1} if ending == "completed" else {}
    assert {"reserve": 1, "charge": 1, **ran} == shop.ran
    assert ("completed" == ending) is bool(store._shared.records)

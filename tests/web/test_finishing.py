"""The janitor finishes a request that stopped between two steps, as its caller, and never as another."""

from __future__ import annotations

from collections import Counter
from threading import Event, Thread
from typing import Any

import pytest
from flask import Flask, Response, abort, g, redirect, request, session
from flask_jwt_extended import JWTManager
from flask_wtf.csrf import CSRFProtect, generate_csrf  # type: ignore[import-untyped]
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, current_claim, idempotent
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine import events
from flask_idempotency.engine.journal import KEPT_REQUEST
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance.finish import FinishReport
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.web.janitor import janitor_of, work_of

SECRET = "only-tests-9f2c47d1e8b35a60c1d47be2"
STEPS = (Step("reserve", effects="deduplicated"), "charge", Step("mail", effects="deduplicated"))


class Shop:
    """A checkout of three steps in an application that signs callers in by a header, and its janitor."""

    def __init__(self, store: Any = None, clock: FrozenClock | None = None, **config: Any) -> None:
        self.clock = FrozenClock() if clock is None else clock
        self.store = MemoryStore(self.clock) if store is None else store
        self.app = Flask("shop")
        self.app.secret_key = "only-tests"
        self.ran: Counter[str] = Counter()
        self.users = {"alice", "bob"}
        self.seen: list[Any] = []
        self.failing = True
        """Whether the view stops after its charge."""
        policy = {"steps": STEPS, "finish": "janitor", **config.pop("policy", {})}
        self.extension = Idempotency(
            self.app,
            principal=lambda: g.get("user"),
            tenant=lambda: g.get("tenant"),
            store=self.store,
            secret=SECRET,
            **config,
        )
        self.app.before_request(self.authenticate)
        self.extension.act_for(self.act_for)
        view = idempotent(required=True, **policy)(lambda **kwargs: self.checkout())
        self.app.add_url_rule("/checkout/<cart>", "checkout", view, methods=["POST"])
        self.events: list[Any] = []
        self.app.extensions["idempotency"].observers.add(self.events.append)

    def authenticate(self) -> Any:
        user = request.headers.get("X-Token") or g.get("acting")
        if user not in self.users:
            abort(401)
        g.user, g.tenant = user, g.get("acting_tenant", "acme")

    def act_for(self, principal: Any, tenant: Any) -> Any:
        g.acting, g.acting_tenant = principal, tenant

    def run(self, name: str, result: Any = None) -> Any:
        self.ran[name] += 1
        return result

    def checkout(self) -> Any:
        self.seen.append((current_claim.finishing, request.get_json()["cart"], request.args.get("q"), g.user))
        current_claim.step("reserve", self.run, "reserve")
        paid = current_claim.step("charge", self.run, "charge", {"id": "ch_1"})
        if self.failing:
            return {}, 503
        current_claim.step("mail", self.run, "mail")
        return {"paid": paid["id"]}, 201

    def post(self, key: str = "k", user: str = "alice", **headers: str) -> TestResponse:
        return self.app.test_client().post(
            "/checkout/1?q=%C3%A9", json={"cart": 1}, headers={"Idempotency-Key": key, "X-Token": user, **headers}
        )

    def finish(self) -> FinishReport:
        report: Any = janitor_of(self.app, host_clock=self.clock).run("finish", Batcher())
        return report  # type: ignore[no-any-return]

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def counts(report: FinishReport) -> dict[str, int]:
    names = ("completed", "failed", "gave_up", "quarantined", "overtaken", "waiting", "unreadable")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def paused(**config: Any) -> Shop:
    """A shop with one checkout that stopped after its charge."""
    shop = Shop(**config)
    assert "paused" == shop.post().headers["Idempotency-Status"]
    shop.failing = False
    return shop


def test_the_janitor_finishes_a_paused_request_and_the_client_gets_a_replay() -> None:
    shop = paused()

    assert {"completed": 1} == counts(shop.finish())
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran
    assert [(False, 1, "é", "alice"), (True, 1, "é", "alice")] == shop.seen
    replayed = shop.post()
    assert (201, "true", {"paid": "ch_1"}) == (
        replayed.status_code,
        replayed.headers["Idempotency-Replayed"],
        replayed.json,
    )
    assert {} == counts(shop.finish())
    assert [(1, "completed", "status-201")] == [
        (each.number, each.outcome, each.reason) for each in shop.told(events.FinishTried)
    ]


def test_a_request_is_kept_with_its_first_recorded_step_and_removed_with_the_response() -> None:
    shop = paused()
    (kept,) = shop.store.journals.kept.values()

    assert [KEPT_REQUEST] == [entry.name for entry in kept.entries.values() if not entry.is_step]
    shop.finish()
    assert {} == shop.store.journals.kept


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
    assert {} == shop.store.journals.kept

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


def test_two_janitors_run_it_once() -> None:
    shop = paused()
    inside, go = Event(), Event()

    def act_for(principal: Any, tenant: Any) -> None:
        inside.set()
        assert go.wait(10)
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    reports: list[FinishReport] = []
    state: Any = shop.app.extensions["idempotency"]

    def work() -> FinishReport:
        every = work_of(shop.app, state.built, state.settings, state.loaders, state.policies, state.observers)
        report: Any = every["finish"](shop.clock.now, Batcher())
        return report  # type: ignore[no-any-return]

    first = Thread(target=lambda: reports.append(work()))
    first.start()
    assert inside.wait(10)
    assert {} == counts(work())
    assert 409 == shop.post().status_code
    go.set()
    first.join(10)

    assert [{"completed": 1}] == list(map(counts, reports))
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran


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


# What is stored.


def raw(shop: Shop) -> bytes:
    """All that the store has."""
    return repr((shop.store.journals.kept, shop.store._shared.records)).encode()


def payloads(shop: Shop) -> bytes:
    entries = [entry for kept in shop.store.journals.kept.values() for entry in kept.entries.values()]
    return b"".join(entry.payload.data for entry in entries if entry.payload is not None)


def test_neither_the_key_nor_a_credential_is_stored() -> None:
    shop = Shop(compression="off", policy={"finish_headers": ("X-Region",)})
    shop.post("the-clients-key", **{"X-Region": "north", "Authorization": "Bearer secret-1", "Cookie": "a=secret-2"})
    shop.failing = False

    stored = payloads(shop)
    assert b"north" in stored
    assert all(each not in stored for each in (b"the-clients-key", b"secret-1", b"secret-2", b"X_TOKEN"))
    seen: list[Any] = []

    def act_for(principal: Any, tenant: Any) -> None:
        seen.append({name: value for name, value in request.headers.items() if name.startswith(("X-", "Auth", "Cook"))})
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    assert {"completed": 1} == counts(shop.finish())
    assert [{"X-Region": "north"}] == seen


@pytest.mark.parametrize(("old", "new"), ((b'"alice"', b'"mallo"'), (b'{"cart": 1}', b'{"cart": 2}')))
def test_a_request_that_was_changed_in_the_store_is_never_run(old: bytes, new: bytes) -> None:
    """Who can write to the store cannot act as another caller."""
    shop = paused(compression="off")
    shop.users.add("mallo")
    codec = EnvelopeCodec(compression=None).steps
    ((key, kept),) = shop.store.journals.kept.items()
    (entry,) = (entry for entry in kept.entries.values() if entry.name == KEPT_REQUEST)
    assert entry.payload is not None
    context = entry.context(key, b"")
    item, data = codec.open(entry.payload, context)
    assert data is not None
    assert old in data
    assert shop.store.journals.replace(key, entry.id, entry.payload, codec.seal(item, data.replace(old, new), context))

    assert {"unreadable": 1} == counts(shop.finish())
    assert 1 == len(shop.seen)


def test_it_counts_in_the_bytes_of_its_tenant() -> None:
    shop = Shop(quota_bytes=100_000)
    shop.app.test_client().post(
        "/checkout/1", json={"cart": 1, "note": "x" * 5000}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )
    (key,) = shop.store._shared.records

    assert shop.store.journals.byte_size(key.tid) > 5000


# What is refused.


def closed(shop: Shop) -> str:
    answer = shop.post()
    assert (500, 0) == (answer.status_code, len(shop.seen))
    return str(answer.get_json()["detail"])


def test_without_act_for_the_endpoint_is_closed_with_the_lines_to_paste() -> None:
    shop = Shop()
    shop.app.testing = True
    shop.app.extensions["idempotency"].loaders.act_for = None

    assert "@idempotency.act_for" in closed(shop)


@pytest.mark.parametrize(
    ("policy", "named"),
    (
        ({"finish_headers": ("Authorization",)}, "Authorization"),
        ({"finish_headers": ("X-Key-Of-Mine",)}, "X-Key-Of-Mine"),
        ({"finish_headers": ("cookie",)}, "cookie"),
        ({"finish_headers": ("Idempotency-Key",)}, "Idempotency-Key"),
        ({"fingerprint_headers": ("X-API-Key",)}, "X-API-Key"),
        ({"max_request_body": 1024 * 1024 + 1}, "max_request_body"),
        ({"form_field": "key"}, "form_field"),
    ),
)
def test_what_cannot_be_kept_is_refused(policy: dict[str, Any], named: str) -> None:
    shop = Shop(policy=policy, credential_headers=("X-Key-Of-Mine",))
    shop.app.testing = True

    assert named in closed(shop)


def test_names_that_may_not_be_stored_are_refused() -> None:
    shop = Shop(hash_identities=True)
    shop.app.testing = True

    assert "IDEMPOTENCY_HASH_IDENTITIES" in closed(shop)


def test_only_steps_can_be_finished() -> None:
    shop = Shop(policy={"effects": "deduplicated", "steps": ()})
    shop.app.testing = True

    assert 'effects="steps"' in closed(shop)


@pytest.mark.parametrize("places", ("query_string", ["headers", "json"]))
def test_tokens_in_the_query_or_the_body_are_refused(places: Any) -> None:
    shop = Shop()
    shop.app.testing = True
    shop.app.config["JWT_TOKEN_LOCATION"] = places
    JWTManager(shop.app)

    assert "JWT_TOKEN_LOCATION" in closed(shop)


@pytest.mark.parametrize("named", ("gone", print))
def test_a_name_that_is_no_hook_is_refused(named: Any) -> None:
    shop = Shop()
    shop.app.testing = True
    shop.extension.act_for(instead_of=[named])(shop.act_for)

    assert "no before_request hook" in closed(shop)


def test_a_larger_body_than_can_be_kept_is_refused_before_anything_is_claimed() -> None:
    shop = Shop()
    answer = shop.app.test_client().post(
        "/checkout/1", json={"cart": "x" * 1024 * 1024}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )

    assert (413, {}) == (answer.status_code, shop.store._shared.records)


def test_the_largest_body_is_kept_and_comes_back() -> None:
    shop = Shop(compression="off")
    note = "x" * (1024 * 1024 - 30)
    shop.app.test_client().post(
        "/checkout/1", json={"cart": note}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )
    shop.failing = False

    assert {"completed": 1} == counts(shop.finish())
    assert note == shop.seen[-1][1]


# Other releases.


def test_an_endpoint_that_has_another_path_now_is_not_entered() -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock)
    later.app.view_functions["other"] = lambda cart: later.run("other") or ""
    for rule in later.app.url_map.iter_rules("checkout"):
        rule.endpoint = "other"
    later.app.add_url_rule("/baskets/<cart>", "checkout", methods=["POST"])
    later.failing = False

    assert {"failed": 1} == counts(later.finish())
    assert ["other-endpoint"] == [each.reason for each in later.told(events.FinishTried)]
    assert {} == later.ran


@pytest.mark.parametrize("policy", ({"finish": "client"}, {"mode": "observe"}))
def test_an_endpoint_that_the_janitor_does_not_finish_any_more_is_left_alone(policy: dict[str, Any]) -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock, policy=policy)
    later.app.add_url_rule("/x", "x", idempotent(steps=STEPS, finish="janitor")(lambda: ""), methods=["POST"])

    assert {} == counts(later.finish())


def test_steps_that_have_changed_hold_the_request_as_for_a_client() -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock, policy={"steps": ("mail",)})
    later.failing = False

    later.finish()
    assert [] == later.seen
    assert {State.QUARANTINED} == {record.state for record in shop.store._shared.records.values()}

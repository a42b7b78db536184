"""What the logs, the debug page and a repr say about a request, and the record ids that operators copy from a log."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, request

from flask_idempotency import durable_step, idempotent
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import State
from flask_idempotency.engine.outages import LogLimit
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.operations import records
from flask_idempotency.operations.records import Refused, by_short, handle_of
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import a_key, stand
from flask_idempotency.web.current_claim import current_claim
from flask_idempotency.web.finishing import Finisher
from flask_idempotency.web.judging import QUARANTINES_SECONDS, log_quarantine
from flask_idempotency.web.kept_requests import Try
from flask_idempotency.web.key_status import KeyStatusView
from flask_idempotency.web.policies import Policies, claim_here
from flask_idempotency.web.purge import Purge
from flask_idempotency.web.replies import Replies
from flask_idempotency.web.request_state import RequestState, current_state
from tests.apps import LEASE, NAME, WHY, World, new_world, paid, record, refusal, run, said, shop, store_named, world_on
from tests.lab.programs import REDIS_KINDS


def failing(**policy: Any) -> World:
    world = new_world(**policy)

    @world.view(endpoint="pay")
    def pay() -> str:
        world.runs.append(1)
        current_claim.point_of_no_return()
        raise ValueError("crash")

    return world


def visit(operation: str) -> RequestState:
    return RequestState(Policy(), operation, None, False)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "A retry runs" in r.getMessage()]


def test_the_operator_is_warned_once_per_endpoint_and_hour(caplog: pytest.LogCaptureFixture) -> None:
    """With the number of keys in between, and by the injected clock."""
    now = 0.0
    limit = LogLimit(QUARANTINES_SECONDS, monotonic=lambda: now)

    for operation in ("pay", "pay", "refund", "pay"):
        log_quarantine(visit(operation), "status-500", limit)
    now = 3599.9
    log_quarantine(visit("pay"), "error", limit)
    assert ["pay", "refund"] == [line.split()[0] for line in warnings(caplog)]
    now = 3600.0
    log_quarantine(visit("pay"), "error", limit)

    told = warnings(caplog)[2:]
    assert 1 == len(told)
    assert told[0].startswith("pay failed (error)")
    assert "3 more keys of this endpoint" in told[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_that_is_forked_while_a_line_is_logged_goes_on() -> None:
    """The thread that holds the lock does not exist in the child."""
    limit = LogLimit()
    with limit._lock:
        child = os.fork()
        if not child:
            signal.alarm(30)  # kills a child that waits
            try:
                os._exit(0 if limit.take("pay") == 0 else 1)
            finally:
                os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", (Finisher, KeyStatusView, Policies, Purge, Replies, Try))
def test_a_repr_shows_no_request_and_no_settings(kind: type) -> None:
    """Reporters of errors show local variables, and the environ of a request, by their repr."""
    assert "__repr__" not in vars(kind)


def test_the_warning_names_the_effects_that_would_let_the_retry_run(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world()

    @world.view(endpoint="pay")
    def pay() -> tuple[str, int]:
        return "no", 500

    world.post(key="one")
    world.post(key="two")

    (line,) = warnings(caplog)
    assert line.startswith("pay failed (status-500)")
    assert all(f'"{effects}"' in line for effects in ("transactional", "deduplicated", "marked"))
    assert 'on_error="release"' in line


def test_past_the_point_of_no_return_only_repeatable_effects_are_named(caplog: pytest.LogCaptureFixture) -> None:
    world = failing(effects="marked")
    world.post()

    (line,) = warnings(caplog)
    assert "past its point of no return" in line
    assert 'effects="deduplicated"' in line
    assert "transactional" not in line


@pytest.mark.parametrize(
    "policy",
    (
        {"on_error": "quarantine"},
        {"decide": lambda response, error: "quarantine"},
        {"on_error": "keep"},
        {"on_error": "release"},
        {"effects": "deduplicated"},
    ),
)
def test_a_choice_of_the_application_logs_no_warning(policy: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    world = new_world(**policy)
    world.view()(lambda: ("no", 500))
    world.post()

    assert [] == warnings(caplog)


def test_a_decision_that_is_left_to_the_rules_is_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    """`decide` may decline: then the default quarantines, and logs it."""
    world = new_world(decide=lambda response, error: None)
    world.view()(lambda: ("no", 500))
    world.post()

    assert ["quarantine"] == world.settled()
    assert 1 == len(warnings(caplog))
    assert Decision.KEEP is Policy(keep_statuses=frozenset({500})).stated(response=None, status=500, error=None)


@pytest.mark.parametrize("secrets", (["one"], ["new", "old"]))
def test_in_debug_mode_the_problem_names_the_command_that_frees_the_key(secrets: list[str]) -> None:
    """The command frees the key as printed; then the retry runs."""
    world = shop(secret=secrets, config={"DEBUG": True})
    assert 500 == paid(world, Fail="yes").status_code

    early = paid(world).json["detail"]
    world.clock.advance(LEASE)
    detail = paid(world).json["detail"]

    assert "it needs --force" in early
    assert "--force" not in detail
    command = shlex.split(detail.split("`")[1])
    assert ["flask", "idempotency", "release"] == command[:3]
    done = run(world, *command[2:], "--yes")
    assert 0 == done.exit_code, done.output
    assert 201 == paid(world).status_code


def test_in_debug_mode_the_problem_sends_a_request_with_steps_to_them() -> None:
    """A release would run its finished steps again. The commands work as printed, with the step that the first one names."""
    world = shop(config={"DEBUG": True})
    replies = iter((False, True))

    @durable_step("charge")
    def charge() -> str:
        if not next(replies):
            raise OSError("no reply")
        return "ch_1"

    world.view("/checkout")(idempotent(steps=(charge,))(lambda: charge()))
    assert 500 == world.post("/checkout").status_code
    detail = str((world.post("/checkout").json or {})["detail"])

    show, resolve = (shlex.split(command) for command in detail.split("`")[1::2])
    assert "release" not in detail
    assert "charge" in run(world, *show[2:]).output
    done = run(world, *resolve[2:-1], "charge", "--never-happened", "--force", "--reason", "debug", "--yes")
    assert 0 == done.exit_code, done.output
    assert (200, "ch_1") == ((again := world.post("/checkout")).status_code, again.text)


def test_outside_debug_mode_no_problem_names_a_record() -> None:
    world = shop()
    paid(world, Fail="yes")

    assert "flask idempotency" not in paid(world).json["detail"]
    assert (kept := record(world)) is not None
    assert State.QUARANTINED is kept.state


def test_in_debug_mode_a_record_in_this_process_is_freed_by_a_restart() -> None:
    """A command runs in another process, and would not find it."""
    from flask_idempotency import Idempotency

    app = Flask(NAME)
    app.config.update(DEBUG=True, PROPAGATE_EXCEPTIONS=False)
    Idempotency(app, store="memory://", secret="what only the shop knows")
    app.post("/")(lambda: ("no", 500))
    client = app.test_client()

    answers = [client.post("/", headers={"Idempotency-Key": "k"}) for _ in range(2)]

    assert 409 == answers[1].status_code
    assert "a restart frees the key" in answers[1].get_json()["detail"]


CANARY = "canary"


@pytest.mark.parametrize("shared", (True, False))
def test_a_response_that_requests_share_collects_nothing(shared: bool) -> None:
    """Some applications share one `ACCEPTED = Response(...)`: it must not grow, nor keep bodies."""
    world = new_world()
    one = Response("accepted", 202)
    spools: list[Any] = []

    @world.view()
    def accept() -> Response:
        spools.append(request.environ["wsgi.input"])
        return one if shared else Response("accepted", 202)

    for number in range(3):
        world.post(key=str(number), data=b"x" * 100_000)

    assert [True] * 3 == [spool.closed for spool in spools]
    assert [] == one._on_close


def test_a_mark_whose_wrapper_is_never_called_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The decorator calls the function below @claim_here, so the claim never happens."""
    world = new_world()

    def unwrapping(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def calling() -> Any:
            return view.__wrapped__()  # type: ignore[attr-defined]

        return calling

    @world.view()
    @unwrapping
    @claim_here
    def pay() -> str:
        return "paid"

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            world.post(key=f"{CANARY}{number}")

    assert 1 == sum("without entering @claim_here" in message for message in caplog.messages)
    assert CANARY not in caplog.text
    assert [] == world.store.calls


@pytest.mark.parametrize("status", (401, 302, 500))
def test_a_decorator_that_refuses_is_not_reported(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """A decorator above @claim_here may refuse."""
    world = new_world()

    def refusing(view: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(view)(lambda: ("no", status))

    world.view()(refusing(claim_here(lambda: "paid")))
    world.post()

    assert [] == caplog.messages


def test_a_hook_that_responds_before_the_view_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The view has not run, protected or not."""
    world = new_world()
    world.app.before_request(lambda: "served from a cache")
    world.view()(claim_here(lambda: "paid"))
    world.post()

    assert [] == caplog.messages


def test_no_repr_reveals_a_request() -> None:
    """Error trackers send the repr of every local variable to another company's machine."""
    world = new_world(principal=lambda: f"principal-{CANARY}", tenant=lambda: f"tenant-{CANARY}")
    world.idempotency.problem_renderer(lambda *args, **kwargs: None)
    seen: list[Any] = []

    @world.view()
    def pay() -> Response:
        state = current_state()
        assert state is not None
        seen.append(state)
        return Response(f"body-{CANARY}", headers={"Location": f"/{CANARY}"})

    @world.app.after_request
    def look(response: Response) -> Response:
        state = current_state()
        assert state is not None
        desk = world.app.extensions["idempotency"]
        seen.extend((state.capture, state.body, state.claim, state.reply, desk))
        return response

    for _ in range(2):
        world.post(key=f"key-{CANARY}", data=f"data-{CANARY}", headers={"X-User": CANARY})

    assert seen[1].head.metadata
    assert CANARY not in "".join(map(repr, seen))


SECRETS = ("new", "old")


@pytest.fixture(params=("memory", "sqlite", REDIS_KINDS[0]))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return store_named(request, tmp_path)


def logged(world: World) -> str:
    """Return the record id of the last event's log line."""
    return next(event.record for event in reversed(world.events) if event.record)


@pytest.mark.parametrize("secret", (("s",), SECRETS), ids=("one secret", "while secrets are rotated"))
def test_an_id_from_a_log_is_shown_and_released(store: Any, secret: Any) -> None:
    """For a quarantined key among others, even in capitals. After the release, the id finds no record."""
    world = world_on(store, secret=secret)
    assert 201 == paid(world, "done").status_code
    assert 500 == paid(world, Fail="yes").status_code
    label = logged(world)
    shown = said(run(world, "show", label.upper(), "--json"))

    assert (label, "quarantined", "pay") == (shown["record"], shown["state"], shown["endpoint"])
    assert 0 == run(world, "release", label, *WHY, "--yes", "--force").exit_code
    assert "No record has this id" in refusal(run(world, "show", label))
    assert 201 == paid(world).status_code


def test_an_id_from_a_log_is_resolved(store: Any) -> None:
    world = world_on(store)
    assert 500 == paid(world, Fail="yes").status_code
    done = run(world, "resolve", logged(world), "--happened", "--status", "201", "--yes", *WHY)

    assert (0, 201) == (done.exit_code, paid(world).status_code)
    assert 1 == len(world.runs)


def test_a_completed_record_is_shown_by_its_id(store: Any) -> None:
    world = world_on(store)
    assert 201 == paid(world).status_code
    label = logged(world)

    assert "completed" == said(run(world, "show", label, "--tenant", "acme", "--json"))["state"]
    assert "No record has this id" in refusal(run(world, "show", label, "--tenant", "globex"))


def test_the_beginning_of_a_handle_is_enough(store: Any) -> None:
    world = world_on(store)
    assert 500 == paid(world, Fail="yes").status_code
    (line,) = said(run(world, "list", "--state", "quarantined", "--json"))["records"]

    for length in (8, 40, 76, 77):
        assert line["handle"] == said(run(world, "show", line["handle"][:length], "--json"))["handle"]
    assert 2 == run(world, "show").exit_code
    assert line["handle"] == said(run(world, "show", line["handle"][:4], "--json"))["handle"]
    assert 1 == run(world, "show", line["handle"][:3]).exit_code


def test_an_id_of_several_records_is_refused_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is chosen by chance, even if one of them is completed."""
    clock = FrozenClock()
    store = MemoryStore(clock=clock)
    keys = a_key(), a_key()
    stand(store, clock, keys[0], "quarantined")
    stand(store, clock, keys[1], "completed")
    monkeypatch.setattr(Identity, "label", lambda self, key: "abcd1234")

    with pytest.raises(Refused, match="2 records have an id that begins so") as raised:
        by_short(store.recovery, [Identity(b"s")], "abcd1234", tids=[None])
    lines = str(raised.value).splitlines()[1:]
    assert [handle_of(key)[:8] for key in keys] == [line.split()[0] for line in lines]
    assert ["quarantined", "completed"] == [line.split()[1] for line in lines]


def test_a_search_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A found record may not be the only one."""
    clock = FrozenClock()
    store = MemoryStore(clock=clock)
    key = a_key()
    stand(store, clock, key, "quarantined")
    for _ in range(3):
        stand(store, clock, a_key(), "completed")
    label = Identity(b"s").label(key)
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 3)
    assert handle_of(key) == by_short(store.recovery, [Identity(b"s")], label, tids=[None])
    monkeypatch.setattr(records, "MOST_LOOKED_AT", 2)

    with pytest.raises(Refused, match="too many to look for"):
        by_short(store.recovery, [Identity(b"s")], label, tids=[None])


def test_typed_text_is_never_repeated() -> None:
    """It may be a client's key."""
    world = world_on(None)

    assert "order4711" not in run(world, "show", "order4711").output

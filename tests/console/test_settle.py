"""What an operator may say of a request, what follows, and what is written about it."""

from __future__ import annotations

import json
import re

import pytest
from flask import Flask

from flask_idempotency import current_claim, durable_step, idempotent
from flask_idempotency.consumers import Processed
from flask_idempotency.engine.audit import AuditTrail
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.errors import KeyProviderUnavailable
from flask_idempotency.engine.events import Resolved, TenantErased
from flask_idempotency.engine.model import State
from flask_idempotency.operations.records import key_of
from tests.console.rig import ANN, KEY, VIEWER, Rig, hidden, rig
from tests.console.test_pages import claim


def state(made: Rig, handle: str) -> State | None:
    record = made.store.read(key_of(handle))
    return None if record is None else record.state


def test_retries_get_the_response_that_the_operator_gave() -> None:
    made = rig()
    handle = made.quarantined()
    body = '{"id": 7}\nété\n'

    done = made.browser().change(
        f"/records/{handle}/settle", verdict="happened", status="201", body=body, content_type="application/json"
    )

    assert "Retries get 201" in done.text
    retry = made.pay()
    assert (201, body.encode(), "application/json") == (retry.status_code, retry.data, retry.content_type)
    assert ["k"] == made.runs


@pytest.mark.parametrize(
    ("body", "given", "media_type"),
    (
        ('{"id": 7}', "", "application/json"),
        (" [1]\n", "", "application/json"),
        ('"paid"', "", "application/json"),
        ("<p>paid</p>", "", "text/html; charset=utf-8"),
        ("[" * 20_000, "", "text/html; charset=utf-8"),
        ('{"id": 7}', "text/plain", "text/plain"),
        ('{"id": 7}', "application/vnd.shop+json", "application/vnd.shop+json"),
    ),
    ids=("object", "array", "string", "page", "deep", "text", "vendor"),
)
def test_a_body_that_is_json_is_json_and_the_preview_shows_its_type(body: str, given: str, media_type: str) -> None:
    """The field for the type was left empty, and retries got a page."""
    made = rig()
    handle = made.quarantined()
    form = {"verdict": "happened", "status": "201", "body": body, "content_type": given}

    preview = made.browser().preview(f"/records/{handle}/settle", **form).text
    made.browser().change(f"/records/{handle}/settle", **form)

    assert f"201, {media_type}, {len(body):,} bytes" in preview
    assert "<details open>" in preview
    assert media_type == made.pay().content_type


def test_lines_of_a_browser_are_lines_of_the_body() -> None:
    """It sends CR and LF, and makes one of each again when a form goes from page to page."""
    made = rig()
    handle = made.quarantined()

    made.browser().change(f"/records/{handle}/settle", verdict="happened", status="200", body="\r\na\r\n\r\nb")

    assert b"\na\n\nb" == made.pay().data


def test_without_a_body_retries_get_response_not_kept() -> None:
    made = rig()
    handle = made.quarantined()

    preview = made.browser().preview(f"/records/{handle}/settle", verdict="happened", status="201")
    made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201")

    assert "response-not-kept" in preview.text
    retry = made.pay()
    assert retry.json is not None
    assert "response-not-kept" in retry.json["type"]


def test_what_never_happened_runs_again() -> None:
    made = rig()
    handle = made.quarantined()
    made.clock.advance(1000)

    done = made.browser().change(f"/records/{handle}/settle", verdict="never")

    assert 200 == done.status_code
    assert state(made, handle) is None
    assert 201 == made.pay().status_code
    assert ["k", "k"] == made.runs


def test_the_preview_of_a_release_shows_no_body_of_a_response() -> None:
    """What was typed before is of no use: the next retry runs."""
    made = rig()
    browser, handle = made.browser(), made.quarantined()
    made.clock.advance(1000)
    form = {**browser.form(f"/records/{handle}/settle"), "reason": "r", "status": "201", "body": "x"}

    never = browser.post(f"/records/{handle}/settle", {**form, "verdict": "never"}).text
    happened = browser.post(f"/records/{handle}/settle", {**form, "verdict": "happened"}).text

    assert "The body, " not in never
    assert "The body, 1 character<" in happened


@pytest.mark.parametrize("action", ("settle", "release"))
def test_a_warning_is_overruled_by_a_box_and_nothing_less(action: str) -> None:
    """The worker's call may still arrive: the lease has not ended."""
    made = rig()
    handle = made.quarantined()
    browser, path = made.browser(), f"/records/{handle}/{action}"
    shown = browser.preview(path, **({"verdict": "never"} if action == "settle" else {}))
    assert "may still run" in shown.text
    assert "Repeat this in" in shown.text
    assert "--force" not in shown.text

    unticked = browser.post(path, {**hidden(shown), "confirm": "yes"})

    assert 200 == unticked.status_code
    assert 'name="force"' in unticked.text
    assert state(made, handle) is State.QUARANTINED
    assert not made.told(Resolved)

    assert 200 == browser.post(path, {**hidden(shown), "confirm": "yes", "force": "yes"}).status_code
    (event,) = made.told(Resolved)
    assert ("released", True, ANN) == (event.verb, event.forced, event.actor)


def test_a_release_of_a_running_request_takes_its_claim() -> None:
    made = rig()
    handle = claim(made)

    page = made.browser().preview(f"/records/{handle}/release")
    assert "may still run" in page.text
    made.browser().change(f"/records/{handle}/release")

    assert state(made, handle) is None
    assert 201 == made.pay().status_code


def test_a_release_of_a_completed_request_warns_of_a_second_run() -> None:
    made = rig()
    assert 201 == made.pay().status_code
    (handle,) = re.findall(r"/records/([a-z2-7]{77})", made.browser().get("/records?state=completed").text)

    assert "Its request completed" in made.browser().get(f"/records/{handle}/release").text
    assert 409 == made.browser().get(f"/records/{handle}/settle").status_code


def test_a_request_in_progress_cannot_be_settled() -> None:
    made = rig()

    page = made.browser().get(f"/records/{claim(made)}/settle")

    assert 409 == page.status_code
    assert "Only a quarantined key can be resolved" in page.text


def test_the_trail_has_who_and_why() -> None:
    made = rig()
    handle = made.quarantined()

    made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201", reason="ticket 4711")

    (event,) = made.told(Resolved)
    assert (ANN, "ticket 4711", "quarantined") == (event.actor, event.reason, event.was)
    trail: AuditTrail = made.store.audit
    (entry,) = trail.entries(key_of(handle))
    assert (ANN, "ticket 4711", "completed") == (entry.actor, entry.reason, entry.verb)
    assert "Operator ann completed it" in made.browser().get(f"/records/{handle}").text


def test_a_fault_shows_the_form_again_with_what_was_typed() -> None:
    made = rig()
    handle = made.quarantined()

    page = made.browser().preview(f"/records/{handle}/settle", verdict="happened", status="7", body="\n<typed>")

    assert 400 == page.status_code
    assert 'role="alert"' in page.text
    assert "\n\n&lt;typed&gt;</textarea>" in page.text
    assert re.search(r'value="happened" required checked', page.text)


def test_a_body_that_the_endpoint_does_not_keep_is_refused() -> None:
    made = rig(max_body=10)
    handle = made.quarantined()

    page = made.browser().preview(f"/records/{handle}/settle", verdict="happened", status="200", body="x" * 11)

    assert 400 == page.status_code
    assert "this endpoint keeps 10" in page.text


@pytest.mark.parametrize("status", ("204", "304"))
def test_a_body_that_no_retry_would_get_is_refused(status: str) -> None:
    made = rig()
    path = f"/records/{made.quarantined()}/settle"

    typed = made.browser().preview(path, verdict="happened", status=status, body="paid")
    without = made.browser().preview(path, verdict="happened", status=status)

    assert (400, 200) == (typed.status_code, without.status_code)
    assert f"A response with status {status} has no body" in typed.text


def test_a_key_provider_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers, and an operator who looks for its fault loses time."""
    made = rig()
    handle = made.quarantined()
    browser, path = made.browser(), f"/records/{handle}/settle"
    shown = browser.preview(path, verdict="happened", status="201", body="paid")

    def fail(*given: object, **named: object) -> None:
        raise KeyProviderUnavailable("kms.example")

    monkeypatch.setattr(SealedResponse, "write", fail)
    page = browser.post(path, {**hidden(shown), "confirm": "yes"})

    assert 503 == page.status_code
    assert "The key provider does not answer" in page.text
    assert "kms.example" not in page.text
    assert state(made, handle) is State.QUARANTINED


def test_a_response_for_a_purged_tenant_is_announced_as_erased() -> None:
    made = rig()
    handle = made.quarantined()
    browser = made.browser()
    browser.post(
        "/tenants/purge", {**browser.form("/tenants/purge"), "tenant": "acme", "typed": "acme", "reason": "left"}
    )

    done = browser.change(f"/records/{handle}/settle", verdict="happened", status="201", body="x")

    assert "response-erased" in done.text
    assert 410 == made.pay().status_code


def test_a_response_that_can_be_opened_again_is_reopened() -> None:
    """An earlier release quarantined it because a key of the ring was missing."""
    import base64

    ring = {"a": base64.b64encode(b"a" * 32).decode()}
    made = rig(encryption="on", key_ring=ring)
    assert 201 == made.pay().status_code
    (kept,) = made.store.responses.scan(limit=10).answers
    made.store.mark_corrupt(kept.key, kept.record.payload)
    (handle,) = made.handles()

    form = made.browser().get(f"/records/{handle}/settle").text
    assert 'value="reopen"' in form
    made.browser().change(f"/records/{handle}/settle", verdict="reopen")

    assert b"paid" == made.pay().data


def test_a_message_is_settled_with_its_value() -> None:
    made = rig()
    inbox = made.idempotency.inbox("billing", effects="marked")

    def fail() -> None:
        current_claim.point_of_no_return()
        raise RuntimeError("the bank is away")

    with made.app.app_context(), pytest.raises(RuntimeError):
        inbox.process("message-1", fail)
    (handle,) = made.handles()
    path = f"/records/{handle}/settle"

    assert "Value, as JSON" in made.browser().get(path).text
    assert 400 == made.browser().preview(path, verdict="happened", body="no JSON").status_code
    made.browser().change(path, verdict="happened", body='{"paid": true}')

    with made.app.app_context():
        again = inbox.process("message-1", fail)
    assert Processed({"paid": True}, replayed=True) == again


def test_a_request_between_steps_goes_on() -> None:
    """It is quarantined because the code lacked a step, and the fix is deployed."""
    made = rig()
    from flask_idempotency import durable_step

    fails = [True]

    @durable_step("charge", effects="deduplicated")
    def charge() -> str:
        return "ch_1"

    @durable_step("send")
    def send() -> str:
        if fails[0]:
            raise RuntimeError("the mail server is away")
        return "sent"

    @made.app.post("/order")
    @idempotent(steps=(charge, send))
    def order() -> dict[str, str]:
        made.runs.append("order")
        return {"charge": charge(), "mail": send()}

    assert 500 == made.pay("order", path="/order").status_code
    (handle,) = made.handles()
    page = made.browser().get(f"/records/{handle}").text

    assert re.search(r"<bdi>send</bdi></th>.*?in doubt", page, re.DOTALL)
    warned = made.browser().get(f"/records/{handle}/settle").text
    assert "Steps of its request are recorded: charge, send" in warned
    assert 'value="resume"' not in warned  # a step is in doubt: it must be settled first
    told = made.app.test_cli_runner().invoke(
        args=[
            "idempotency",
            "resolve",
            handle,
            "--never-happened",
            "--step",
            "send",
            "--reason",
            "x",
            "--yes",
            "--force",
        ]
    )
    assert 0 == told.exit_code, told.output
    fails[0] = False
    assert {"charge": "ch_1", "mail": "sent"} == made.pay("order", path="/order").json
    assert 409 == made.browser().get(f"/records/{handle}/settle").status_code


def in_two_steps(made: Rig) -> tuple[str, list[bool]]:
    """Make an order whose second step is in doubt, and whose third has not begun. Return its handle, and whether it fails."""
    fails = [True]

    @durable_step("charge", effects="deduplicated")
    def charge() -> str:
        return "ch_1"

    @durable_step("send")
    def send() -> str:
        if fails[0]:
            raise RuntimeError("the mail server is away")
        return "sent"

    @durable_step("ship")
    def ship() -> str:
        return "shipped"

    @made.app.post("/order")
    @idempotent(steps=(charge, send, ship))
    def order() -> dict[str, str]:
        made.runs.append("order")
        return {"charge": charge(), "mail": send(), "parcel": ship()}

    assert 500 == made.pay("order", path="/order").status_code
    (handle,) = made.handles()
    fails[0] = False
    return handle, fails


def test_one_step_is_settled_with_its_result() -> None:
    made = rig()
    handle, _ = in_two_steps(made)
    browser, path = made.browser(), f"/records/{handle}/steps/2"
    assert f'href="/idempotency{path}"' in browser.get(f"/records/{handle}").text

    shown = browser.preview(path, verdict="happened", result='"by hand"')
    assert "the step does not run again" in shown.text
    assert "<h1>Settle the step <bdi>send</bdi> of <code>" in shown.text
    assert [] == made.told(Resolved)
    done = browser.change(path, verdict="happened", result='"by hand"')

    assert "The next retry goes on after the finished steps." in done.text
    assert {"charge": "ch_1", "mail": "by hand", "parcel": "shipped"} == made.pay("order", path="/order").json
    (event,) = made.told(Resolved)
    assert (ANN, "asked the bank") == (event.actor, event.reason)


def test_one_step_that_never_happened_is_taken_again() -> None:
    made = rig()
    handle, _ = in_two_steps(made)
    path = f"/records/{handle}/steps/2"
    shown = made.browser().preview(path, verdict="never")
    assert "may still run" in shown.text
    assert 'name="force"' in shown.text

    made.browser().change(path, verdict="never")

    assert {"charge": "ch_1", "mail": "sent", "parcel": "shipped"} == made.pay("order", path="/order").json


@pytest.mark.parametrize(
    ("number", "said", "status"),
    (
        (2, {"verdict": "happened", "result": ""}, 400),
        (2, {"verdict": "happened", "result": "no json"}, 400),
        (2, {"verdict": "", "result": "1"}, 400),
        (2, {"verdict": "happened", "result": "1", "reason": ""}, 400),
        (2, {"verdict": "happened", "result": "1", "version": "0" * 32}, 409),
    ),
)
def test_a_faulty_form_settles_no_step(number: int, said: dict[str, str], status: int) -> None:
    made = rig()
    handle, _ = in_two_steps(made)

    page = made.browser().preview(f"/records/{handle}/steps/{number}", **said)

    assert status == page.status_code
    assert state(made, handle) is State.QUARANTINED
    assert [] == made.told(Resolved)


def test_a_form_about_one_step_settles_no_other() -> None:
    """Its version is that of the step: another number in the address changes nothing."""
    made = rig()
    handle, _ = in_two_steps(made)
    browser = made.browser()
    fields = {
        **browser.form(f"/records/{handle}/settle"),
        "verdict": "happened",
        "result": "1",
        "reason": "r",
        "confirm": "yes",
    }

    answers = [browser.post(f"/records/{handle}/steps/{number}", fields).status_code for number in (0, 1, 2, 3)]

    assert [404, 409, 409, 404] == answers
    assert 409 == browser.get(f"/records/{handle}/steps/1").status_code
    assert [] == made.told(Resolved)


@pytest.mark.parametrize("number", ("0", "1", "2", "9" * 20))
def test_a_step_that_is_not_there_has_no_form(number: str) -> None:
    made = rig()
    handle = made.quarantined()

    assert 404 == made.browser().get(f"/records/{handle}/steps/{number}").status_code


def test_a_viewer_settles_no_step() -> None:
    made = rig()
    handle, _ = in_two_steps(made)

    assert "/steps/2" not in made.browser(VIEWER).get(f"/records/{handle}").text
    assert 403 == made.browser(VIEWER).get(f"/records/{handle}/steps/2").status_code
    assert 404 == made.browser("eve@globex").get(f"/records/{handle}/steps/2").status_code


def test_the_form_for_the_whole_request_names_what_will_never_happen() -> None:
    made = rig()
    handle, _ = in_two_steps(made)

    settle = made.browser().get(f"/records/{handle}/settle").text
    happened = made.browser().preview(f"/records/{handle}/settle", verdict="happened", status="201").text
    told = made.app.test_cli_runner().invoke(
        args=["idempotency", "resolve", handle, "--happened", "--status", "201", "--reason", "x"], input="n"
    )

    for text in (settle, happened):
        assert "never happen" in text
        assert "send (in doubt)" in text
        assert "ship (not begun)" in text
    assert "never happen, unless they did already: send (in doubt), ship (not begun)." in told.output


def test_records_under_two_secrets_are_settled_together() -> None:
    from flask_idempotency.console import Console
    from flask_idempotency.extension import Idempotency
    from tests.console.rig import SECRET, Browser

    made = rig()
    app = Flask("tests.console.app")
    app.config.update(TESTING=True, PROPAGATE_EXCEPTIONS=False)
    newer = "n-0000000000000000000000000000000a"
    idempotency = Idempotency(
        store=made.store, secret=[newer, SECRET], on_error="quarantine", tenant=lambda: "acme", allow_anonymous=True
    )
    app.register_blueprint(Console(idempotency, authorize=lambda action, record: ANN))
    idempotency.init_app(app)

    @app.post("/pay")
    def pay() -> str:
        raise RuntimeError("the view failed")

    assert 500 == app.test_client().post("/pay", headers={KEY: "k"}).status_code
    browser = Browser(app.test_client(), ANN)
    handles = set(re.findall(r"/records/([a-z2-7]{77})", browser.get("/records").text))
    both = [each.key for each in made.store.recovery.scan(State.QUARANTINED, limit=10).found]
    assert (1, 2) == (len(handles), len(both))

    done = browser.change(f"/records/{handles.pop()}/settle", verdict="happened", status="201")

    assert 200 == done.status_code
    assert {State.COMPLETED} == {made.store.read(key).state for key in both}


# Purge.


def test_a_purge_erases_the_responses_of_one_tenant() -> None:
    made = rig()
    assert 201 == made.pay("a", tenant="acme").status_code
    assert 201 == made.pay("b", tenant="globex").status_code
    browser = made.browser()
    assert "Purge…" in browser.get("/tenants?tenant=acme").text
    assert "audit trail" not in browser.get("/tenants/purge?tenant=acme").text  # a purge deletes it

    done = browser.post(
        "/tenants/purge", {**browser.form("/tenants/purge"), "tenant": "acme", "typed": "acme", "reason": "left us"}
    )

    assert 200 == done.status_code
    assert "Responses wiped: 1" in done.text
    assert (410, 201) == (made.pay("a", tenant="acme").status_code, made.pay("b", tenant="globex").status_code)
    (event,) = made.told(TenantErased)
    assert (ANN, "left us", True) == (event.actor, event.reason, event.finished)


def test_a_purge_that_has_no_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig()
    for number in range(3):
        assert 201 == made.pay(f"key-{number}").status_code
    monkeypatch.setattr("flask_idempotency.console.actions.PURGE_SECONDS", -1.0)
    monkeypatch.setattr("flask_idempotency.web.purge.BATCH", 1)
    browser = made.browser()

    done = browser.post(
        "/tenants/purge", {**browser.form("/tenants/purge"), "tenant": "acme", "typed": "acme", "reason": "left us"}
    )

    assert "Purged in part" in done.text
    assert "Purge again to go on" in done.text
    assert 410 == made.pay("key-2").status_code


def test_the_names_of_a_purge_are_the_tenant_loaders() -> None:
    made = rig()

    page = made.browser().get("/tenants/purge?tenant=" + "t" * 256)

    assert 400 == page.status_code


def test_the_commands_and_the_console_say_the_same_of_a_release() -> None:
    made = rig()
    handle = made.quarantined()
    told = made.app.test_cli_runner().invoke(
        args=["idempotency", "release", handle, "--reason", "x", "--yes", "--json"]
    )
    warning = json.loads(told.stdout)["error"].partition(" It was last seen")[0].partition(": it was last seen")[0]

    assert 1 == told.exit_code
    assert warning in made.browser().get(f"/records/{handle}/release").text.replace("&#39;", "'")

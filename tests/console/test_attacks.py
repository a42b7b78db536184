"""What an attacker tries against the console: one test for each way, and each changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from flask import Flask, abort
from markupsafe import Markup

from flask_idempotency.console import Operator
from flask_idempotency.console.access import COOKIE, LARGEST_FORM
from flask_idempotency.engine.events import Resolved, TenantErased
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import State
from flask_idempotency.operations.records import key_of
from tests.console.rig import ANN, LIMITED, VIEWER, Browser, Rig, hidden, rig

HAPPENED = {"verdict": "happened", "status": "201", "reason": "asked the bank", "confirm": "yes"}


def state(made: Rig, handle: str) -> State | None:
    record = made.store.read(key_of(handle))
    return None if record is None else record.state


def is_unchanged(made: Rig, handle: str) -> bool:
    return state(made, handle) is State.QUARANTINED and not made.told(Resolved)


@pytest.fixture
def made() -> Rig:
    return rig()


@pytest.fixture
def handle(made: Rig) -> str:
    return made.quarantined()


# Forms from elsewhere.


@pytest.mark.parametrize("action", ("settle", "release"))
def test_a_form_without_the_token_is_refused(made: Rig, handle: str, action: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/{action}"), **HAPPENED}
    del fields["console_token"]
    wrong = ({}, *({"console_token": token} for token in ("", "0" * 64, "é", "a" * 10_000, "?")))

    answers = [browser.post(f"/records/{handle}/{action}", {**fields, **token}).status_code for token in wrong]

    assert [403] * len(wrong) == answers
    assert is_unchanged(made, handle)


def test_a_token_of_another_session_is_refused(made: Rig, handle: str) -> None:
    """The attacker is an operator too, and puts their own form into the victim's browser."""
    attacker, victim = made.browser(), made.browser()
    fields = attacker.form(f"/records/{handle}/settle")
    victim.form(f"/records/{handle}/settle")

    assert 403 == victim.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
    assert is_unchanged(made, handle)


def test_a_form_of_another_operator_is_refused(made: Rig, handle: str) -> None:
    """In the same browser, after another operator has signed in."""
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/settle")
    browser.operator = "mallory"

    assert 403 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
    assert is_unchanged(made, handle)


def test_a_form_without_the_cookie_is_refused(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/settle")
    browser.client.delete_cookie(COOKIE, path="/idempotency/")

    assert 403 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
    assert is_unchanged(made, handle)


def test_a_planted_cookie_gets_no_token(made: Rig, handle: str) -> None:
    """A cookie that we did not set is replaced, and no form is made for it."""
    for value in ("", "x", "a" * 43 + ";", "é" * 43, "a" * 3000):
        browser = made.browser()
        browser.client.set_cookie(COOKIE, value, path="/idempotency/")
        page = browser.get(f"/records/{handle}/settle")
        assert COOKIE in page.headers["Set-Cookie"], value
        assert value != page.headers["Set-Cookie"].split(";")[0].removeprefix(f"{COOKIE}=")


def test_a_planted_cookie_stops_no_operator(made: Rig, handle: str) -> None:
    """Another host of the domain plants one for a longer path: the browser sends it first, and our answer cannot remove it."""
    browser = made.browser()
    browser.client.set_cookie(COOKIE, "planted", path=f"/idempotency/records/{handle}/settle")
    fields = browser.form(f"/records/{handle}/settle")

    assert 200 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
    assert state(made, handle) is State.COMPLETED


def test_the_cookie_is_kept_from_scripts_and_other_sites(handle: str, made: Rig) -> None:
    client = made.app.test_client()
    page = client.get(f"https://localhost/idempotency/records/{handle}/settle", headers={"X-Operator": ANN})

    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/idempotency/"} <= set(
        page.headers["Set-Cookie"].split("; ")
    )


ORIGINS = (
    "https://evil.example", "null", "http://localhost:81", "http://localhost.evil.example", "http://[", "",
)  # fmt: skip


@pytest.mark.parametrize("action", ("settle", "release"))
def test_a_cross_origin_post_is_refused(made: Rig, handle: str, action: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/{action}"), **HAPPENED}
    elsewhere = [{"Origin": origin} for origin in ORIGINS]
    elsewhere += [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "none")]

    accepted = [
        headers
        for headers in elsewhere
        if 403 != browser.post(f"/records/{handle}/{action}", fields, **headers).status_code
    ]

    assert accepted == []
    assert is_unchanged(made, handle)


def test_a_form_of_http_is_refused_by_a_console_on_https() -> None:
    made = rig(testing=False)
    client = made.app.test_client()
    handle = made.quarantined()
    page = client.get(f"https://localhost/idempotency/records/{handle}/release", headers={"X-Operator": ANN})

    answer = client.post(
        f"https://localhost/idempotency/records/{handle}/release",
        data={**hidden(page), **HAPPENED, "force": "yes"},
        headers={"X-Operator": ANN, "Origin": "http://localhost"},
    )

    assert 403 == answer.status_code
    assert is_unchanged(made, handle)


def test_the_forms_of_the_console_pass(made: Rig, handle: str) -> None:
    """What a browser sends with them: the origin, and that it is the same."""
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/settle")
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}

    assert 200 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}, **own).status_code
    assert state(made, handle) is State.COMPLETED


# Forms again, and too late.


def test_a_replayed_form_changes_nothing(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/settle")
    assert 200 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code

    again = browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED, "status": "418"})

    assert (409, 1) == (again.status_code, len(made.told(Resolved)))
    assert 201 == made.store.read(key_of(handle)).payload.status


def test_a_replayed_release_does_not_release_the_next_use(made: Rig, handle: str) -> None:
    """The same key is used again, and quarantined again: the form is of the record before."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/release"), "reason": "gone", "confirm": "yes", "force": "yes"}
    assert 200 == browser.post(f"/records/{handle}/release", fields).status_code
    assert 500 == made.pay(fail=True).status_code

    again = browser.post(f"/records/{handle}/release", fields)

    assert 409 == again.status_code
    assert state(made, handle) is State.QUARANTINED


def test_of_two_operators_the_second_is_shown_what_happened(made: Rig, handle: str) -> None:
    ann, eve = made.browser("ann"), made.browser("eve")
    mine, hers = ann.form(f"/records/{handle}/settle"), eve.form(f"/records/{handle}/settle")
    assert 200 == ann.post(f"/records/{handle}/settle", {**mine, **HAPPENED}).status_code
    made.note(handle, "ann")

    answer = eve.post(f"/records/{handle}/settle", {**hers, **HAPPENED})

    assert 409 == answer.status_code
    assert "has changed" in answer.text
    assert "ann" in answer.text
    assert "asked the bank" in answer.text
    assert ["ann"] == [event.actor for event in made.told(Resolved)]


def test_of_two_operators_at_once_one_settles(made: Rig, handle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second form is judged by the version before the first one's change arrives: the store decides."""
    ann, eve = made.browser("ann"), made.browser("eve")
    mine, hers = ann.form(f"/records/{handle}/settle"), eve.form(f"/records/{handle}/settle")
    (mounted,) = made.app.extensions["idempotency_console"].values()
    before: Callable[[str], float | None] = mounted.attempts.take

    def first(name: str) -> float | None:
        if name == "eve":
            assert 200 == ann.post(f"/records/{handle}/settle", {**mine, **HAPPENED}).status_code
        return before(name)

    monkeypatch.setattr(mounted.attempts, "take", first)

    answer = eve.post(f"/records/{handle}/settle", {**hers, **HAPPENED})

    assert 409 == answer.status_code
    assert ["ann"] == [event.actor for event in made.told(Resolved)]


def test_a_form_without_the_records_version_is_refused(made: Rig, handle: str) -> None:
    """And one with the version of another record."""
    other, browser = made.quarantined("other"), made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}
    versions = ("", "0" * 32, "é", browser.form(f"/records/{other}/settle")["version"])

    for version in versions:
        assert 409 == browser.post(f"/records/{handle}/settle", {**fields, "version": version}).status_code, version
    assert is_unchanged(made, handle)


def test_the_form_shows_neither_the_token_nor_the_fence(made: Rig, handle: str) -> None:
    record = made.store.read(key_of(handle))

    page = made.browser().get(f"/records/{handle}/settle").text

    assert record.token.hex() not in page
    assert record.fingerprint.hex() not in page


# Other tenants.


def test_another_tenants_operator_reads_and_settles_nothing_by_handle(made: Rig) -> None:
    handle = made.quarantined(tenant="globex")
    browser = made.browser(LIMITED)

    assert [404] * 5 == [status for status, *_ in answers_of(made, browser, handle)]
    assert is_unchanged(made, handle)


def test_another_tenants_operator_lists_nothing_by_filter(made: Rig) -> None:
    handle = made.quarantined(tenant="globex")
    assert 201 == made.pay("done", tenant="globex").status_code
    assert 201 == made.pay("none", tenant=None).status_code
    browser = made.browser(LIMITED)

    for query in (
        "", "tenant=globex", "no_tenant=1", "tenant=globex&no_tenant=1", "state=completed&tenant=globex", "tenant=",
        f"id={handle[:12]}",
    ):  # fmt: skip
        page = browser.get(f"/records?{query}")
        assert 200 == page.status_code, query
        assert not re.search(r"/records/[a-z2-7]{77}", page.text), query


def test_a_tenant_that_is_not_theirs_is_not_even_scanned(made: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer shows how many records the other has."""
    scanned = list[bytes | None]()
    scan = made.store.recovery.scan

    def remembered(state: State, *, tid: bytes | None = None, **options: Any) -> Any:
        scanned.append(tid)
        return scan(state, tid=tid, **options)

    monkeypatch.setattr(made.store.recovery, "scan", remembered)

    for query in ("?tenant=globex", "?no_tenant=1"):
        assert 200 == made.browser(LIMITED).get(f"/records{query}").status_code
    assert not scanned
    assert 200 == made.browser(LIMITED).get("/records").status_code
    assert scanned
    assert None not in scanned


@pytest.mark.parametrize("hashed", (False, True))
def test_an_operator_of_a_tenant_settles_its_records(hashed: bool) -> None:
    made = rig(hash_identities=hashed)
    handle = made.quarantined(tenant="acme")
    browser = made.browser(LIMITED)

    assert handle in browser.get("/records").text
    assert 200 == browser.change(f"/records/{handle}/settle", verdict="happened", status="201").status_code
    assert [LIMITED] == [event.actor for event in made.told(Resolved)]


def test_a_permission_of_one_tenant_to_settle_is_none_for_another(handle: str) -> None:
    """`authorize` shows all records, and lets settle those of one tenant."""
    made = rig(ask=lambda action, record: "ann" if action == "view" else Operator("ann", {"acme"}))
    theirs = made.quarantined(tenant="globex")
    browser = made.browser()

    assert 200 == browser.get(f"/records/{theirs}").status_code
    assert 403 == browser.get(f"/records/{theirs}/settle").status_code


def test_tenants_limit_an_operator_whom_authorize_names_only_later(made: Rig) -> None:
    """It names the tenants for the pages about everything, and for a record only who acts."""
    made = rig(ask=lambda action, record: Operator("bob", {"acme"}) if record is None else "bob")
    mine = made.quarantined("mine", tenant="acme")
    theirs = made.quarantined("theirs", tenant="globex")
    browser = made.browser()

    assert 404 == browser.get(f"/records/{theirs}").status_code
    assert 404 == browser.get(f"/records/{theirs}/settle").status_code
    done = browser.change(f"/records/{mine}/settle", verdict="happened", status="201")
    assert 200 == done.status_code
    assert "Health" not in done.text


@pytest.mark.parametrize("hashed", (False, True))
def test_many_tenants_of_an_operator_are_named_once_a_page(hashed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each record: an operator of a thousand tenants would wait for seconds."""
    tenants = [f"tenant-{number}" for number in range(30)]
    made = rig(ask=lambda action, record: Operator("bob", tenants), hash_identities=hashed)
    for number, tenant in enumerate(tenants):
        assert 500 == made.pay(str(number), tenant=tenant, fail=True).status_code
    asked = list[str | None]()
    derive = Identity.tenant_ids

    def remembered(self: Identity, namespace: str, tenant: str | None) -> tuple[bytes, ...]:
        asked.append(tenant)
        return derive(self, namespace, tenant)

    monkeypatch.setattr(Identity, "tenant_ids", remembered)

    page = made.browser().get("/records")

    assert 30 == len(set(re.findall(r"/records/[a-z2-7]{77}", page.text)))
    assert len(asked) <= 2 * len(tenants)


def test_a_cursor_of_another_operator_is_refused(made: Rig) -> None:
    """A cursor goes with its filter, and the tenants are part of it."""
    for number in range(120):
        made.pay(f"key-{number}", tenant="globex", fail=True)
    more = re.search(r'href="([^"]*cursor=[^"]*)"', made.browser().get("/records").text)
    assert more is not None
    path = more[1].replace("&amp;", "&").removeprefix("/idempotency")

    assert 200 == made.browser().get(path).status_code
    assert 400 == made.browser(LIMITED).get(path).status_code


def test_a_forged_cursor_gives_400(made: Rig, handle: str) -> None:
    for cursor in ("x", "AAAA", "%00", "%C3%A9", "A" * 3000, "A" * 22, "/../", "-" * 40, "A" * 32):
        answer = made.browser().get(f"/records?cursor={cursor}")
        assert 400 == answer.status_code, cursor
        assert handle not in answer.text


# Names, reasons and other texts.

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "{{ 7331*7 }}{% raw %}",
    "javascript:alert(1)",
    "</textarea><script>",
    "\u202egnp.exe",
    "\u2066isolated",
    "a\x00b\x1b[2Jc",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_is_shown_as_text(text: str) -> None:
    """As the tenant, the principal, an operator, a reason and a filter, on every page."""
    shown = text.replace("\x00", "").replace("\x1b", "")
    made = rig(principal=lambda: shown, tenant=lambda: shown)
    assert 500 == made.pay(fail=True).status_code
    browser = made.browser()
    (handle,) = made.handles()
    made.note(handle, f"ops {text}", reason=f"because {text}", verb=text)
    pages = [
        browser.get("/"),
        browser.get("/records"),
        browser.get(f"/records/{handle}"),
        browser.get(f"/records/{handle}/settle"),
        browser.preview(f"/records/{handle}/settle", verdict="happened", status="201", body=text, reason=shown[:200]),
        browser.preview(f"/records/{handle}/release", reason=shown[:200]),
        browser.get("/records"),
        browser.client.get("/idempotency/records", query_string={"tenant": shown}, headers={"X-Operator": ANN}),
        browser.client.get("/idempotency/tenants", query_string={"tenant": shown}, headers={"X-Operator": ANN}),
        browser.client.get("/idempotency/tenants/purge", query_string={"tenant": shown}, headers={"X-Operator": ANN}),
    ]

    for page in pages:
        assert page.status_code in (200, 400), page.text
        assert "<script>" not in page.text
        assert "<img" not in page.text
        assert "51317" not in page.text
        # The fields of a form hold what the operator typed.
        visible = re.sub(r'value="[^"]*"|<textarea.*?</textarea>', "", page.text, flags=re.DOTALL)
        assert not set("\u202e\u2066\x00\x1b") & set(visible)


def test_markup_as_the_operators_name_is_escaped() -> None:
    """`current_user.name` may be markup that its application made, and the name of a user is what the user typed."""
    made = rig(ask=lambda action, record: Operator(Markup("<script>alert(1)</script>")))
    handle = made.quarantined()

    done = made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201")

    assert "<script>alert" not in done.text
    assert "<script>alert" not in made.browser().get(f"/records/{handle}").text


def test_a_long_name_is_cut(made: Rig) -> None:
    browser = made.browser()
    handle = made.quarantined(tenant="t" * 255)
    made.note(handle, "o" * 10_000, reason="r" * 10_000)

    for path in ("/", "/records", f"/records/{handle}"):
        page = browser.get(path).text
        assert "t" * 255 not in re.sub(r'(?:title|value)="[^"]*"', "", page)
        assert "r" * 1001 not in page


def test_a_reason_of_several_lines_or_none_is_refused(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}

    for reason in ("a\r\nSet-Cookie: x=1", "a\nb", "a\x00b", "a\u2028b", "\u202eb", "r" * 256, "", "   "):
        answer = browser.post(f"/records/{handle}/settle", {**fields, "reason": reason})
        assert 400 == answer.status_code, reason
        assert "Give a reason" in answer.text
        assert "Set-Cookie" not in answer.headers
    assert is_unchanged(made, handle)


@pytest.mark.parametrize("name", ("a\r\nSet-Cookie: x=1", "a\nb\x00", "\u202eb"))
def test_a_name_with_line_breaks_reaches_no_header_and_one_line_of_the_trail(name: str) -> None:
    made = rig(ask=lambda action, record: name)
    handle = made.quarantined()
    answer = made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201")

    assert 200 == answer.status_code
    assert not [field for field, value in answer.headers if "x=1" in value]
    (event,) = made.told(Resolved)
    assert event.actor.isprintable()


def test_a_media_type_with_line_breaks_is_refused(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "body": "x"}

    for kind in ("text/html\r\nX: y", "text/html\nX: y", "é", "t" * 101):
        assert 400 == browser.post(f"/records/{handle}/settle", {**fields, "content_type": kind}).status_code, kind
    assert is_unchanged(made, handle)


# Paths.


TRICKY = (
    "/records/..%2f..%2fetc%2fpasswd", "/records/%2e%2e/health", "/records/%00", "/records/" + "a" * 77,
    "/records/" + "A" * 77, "/records/" + "a" * 5000, "/records/%F0%9F%98%80", "/records/é", "/records/{handle}%00",
    "/records/{upper}", "/records/{handle}/settle/x", "/static/..%2f..%2faccess.py", "/static/../access.py",
    "/static/console.css%00.js", "/static/%2e%2e%2faccess.py", "/static/templates/base.html", "/nothing/here",
    "//evil.example/",
)  # fmt: skip


@pytest.mark.parametrize("method", ("GET", "POST"))
def test_a_tricky_path_finds_nothing(made: Rig, handle: str, method: str) -> None:
    client, data = made.app.test_client(), HAPPENED if method == "POST" else None
    for tricky in TRICKY:
        path = "/idempotency" + tricky.format(handle=handle, upper=handle.upper())
        answer = client.open(path, method=method, headers={"X-Operator": ANN}, data=data)
        assert answer.status_code in (301, 308, 403, 404, 405), (tricky, answer.status)
        assert "evil.example" not in answer.headers.get("Location", "").split("/idempotency")[0], tricky
        assert "def ask" not in answer.text, tricky
    assert is_unchanged(made, handle)


def test_no_parameter_leads_to_another_site(made: Rig) -> None:
    """The only redirect of the console is from a whole id to its record."""
    elsewhere = ("//evil.example", "https://evil.example", "\\\\evil.example", "javascript:alert(1)")
    names = ("id", "next", "url", "cursor", "span", "tenant", "state")
    client = made.app.test_client()
    for path, name, given in product(("/", "/records", "/tenants", "/endpoints"), names, elsewhere[:2]):
        query = {name: given}
        answer = client.get(f"/idempotency{path}", query_string=query, headers={"X-Operator": ANN, "Host": "localhost"})
        assert "Location" not in answer.headers, (path, query)
    for given in elsewhere:
        answer = client.get("/idempotency/records", query_string={"id": given}, headers={"X-Operator": ANN})
        assert "Location" not in answer.headers, given


def test_a_whole_id_leads_to_its_record(made: Rig, handle: str) -> None:
    answer = made.browser().get(f"/records?id={handle.upper()}")

    assert (303, f"/idempotency/records/{handle}") == (answer.status_code, answer.headers["Location"])


# Frames, caches, methods.


EVERY_PAGE = (
    "/", "/records", "/records?state=completed", "/records?cursor=x", "/records/{handle}", "/records/{handle}/settle",
    "/records/{handle}/release", "/records/nothing", "/tenants", "/tenants/purge", "/endpoints", "/health",
    "/static/console.css", "/static/console.js", "/static/nothing", "/nothing",
)  # fmt: skip


FIXED = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@pytest.mark.parametrize("operator", (ANN, LIMITED, VIEWER, ""))
def test_every_answer_forbids_frames_scripts_and_caches(made: Rig, handle: str, operator: str) -> None:
    forbidden = {"default-src": "'none'", "frame-ancestors": "'none'", "base-uri": "'none'", "form-action": "'self'"}
    for path in EVERY_PAGE:
        headers = made.browser(operator).get(path.format(handle=handle)).headers
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert forbidden.items() <= policy.items(), path
        assert not [name for name, value in policy.items() if value not in ("'none'", "'self'")], path
        assert FIXED.items() <= dict(headers).items(), path
        expected = "no-cache" if path in ("/static/console.css", "/static/console.js") else "no-store"
        assert expected == headers["Cache-Control"], path


def test_only_a_file_with_its_hash_is_cached(made: Rig) -> None:
    page = made.browser().get("/").text
    (path,) = re.findall(r'href="/idempotency(/static/console.css\?v=[0-9a-f]+)"', page)

    assert "immutable" in made.browser().get(path).headers["Cache-Control"]
    assert "no-cache" == made.browser().get("/static/console.css?v=0").headers["Cache-Control"]


@pytest.mark.parametrize("action", ("settle", "release"))
def test_no_other_method_changes_anything(made: Rig, handle: str, action: str) -> None:
    """Also with every field of a confirmed form, in the address and in the body."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/{action}"), **HAPPENED, "force": "yes"}
    sent: dict[str, Any] = {"query_string": fields, "data": fields, "headers": {"X-Operator": ANN}}

    for method in ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
        browser.client.open(f"/idempotency/records/{handle}/{action}", method=method, **sent)
        assert is_unchanged(made, handle), method


def test_an_overriding_header_changes_no_method(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/release"), **HAPPENED, "force": "yes"}

    browser.client.get(
        f"/idempotency/records/{handle}/release",
        query_string={**fields, "_method": "POST"},
        headers={"X-Operator": ANN, "X-HTTP-Method-Override": "POST"},
    )

    assert is_unchanged(made, handle)


def test_a_page_that_only_reads_takes_no_form(made: Rig, handle: str) -> None:
    pages = ("/", "/records", f"/records/{handle}", "/tenants", "/endpoints", "/health", "/static/console.css")
    answers = {path: made.browser().post(path, HAPPENED).status_code for path in pages}

    assert {*answers.values()} <= {404, 405}, answers
    assert is_unchanged(made, handle)


# Too much, and of the wrong kind.


def test_an_operator_changes_so_many_records_an_hour() -> None:
    made = rig(console={"changes_per_hour": 3})
    handles = [made.quarantined(f"key-{number}") for number in range(5)]
    browser = made.browser()
    paths = [f"/records/{handle}/settle" for handle in handles]
    forms = [{**browser.form(path), **HAPPENED} for path in paths]

    answers = [browser.post(path, form).status_code for path, form in zip(paths, forms, strict=True)]

    assert [200, 200, 200, 429, 429] == answers
    late = browser.post(paths[4], forms[4])
    assert 3500 < int(late.headers["Retry-After"]) <= 3600
    assert 3 == len(made.told(Resolved))
    assert 200 == made.browser("eve").change(paths[4], verdict="happened", status="201").status_code


def test_what_other_processes_changed_counts_too(made: Rig, handle: str) -> None:
    """The trail is in the store."""
    for _ in range(30):
        made.events.append(object())  # type: ignore[arg-type]  # another token for each entry
        made.note(handle)
    made.events.clear()

    answer = made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201")

    assert 429 == answer.status_code
    assert is_unchanged(made, handle)


def test_a_preview_does_not_count() -> None:
    made = rig(console={"changes_per_hour": 1})
    handle, browser = made.quarantined(), made.browser()
    for _ in range(5):
        assert 200 == browser.preview(f"/records/{handle}/settle", verdict="happened", status="201").status_code

    assert 200 == browser.change(f"/records/{handle}/settle", verdict="happened", status="201").status_code


def test_a_flood_of_fields_is_refused(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}

    large = browser.post(f"/records/{handle}/settle", {**fields, "body": "x" * LARGEST_FORM})
    many = browser.post(f"/records/{handle}/settle", {**fields, **{f"f{n}": "x" for n in range(2000)}})

    assert (413, 400) == (large.status_code, many.status_code)
    assert is_unchanged(made, handle)


def test_a_field_that_comes_twice_is_refused(made: Rig, handle: str) -> None:
    """Else the page that is shown and the change that is made may differ."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "verdict": ["happened", "never"]}

    assert 400 == browser.post(f"/records/{handle}/settle", fields).status_code
    assert is_unchanged(made, handle)


def test_a_form_of_another_type_is_refused(made: Rig, handle: str) -> None:
    """`text/plain` is what another site may send without asking."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}
    body = "&".join(f"{name}={value}" for name, value in fields.items())

    for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x", "", "a" * 5000):
        path, headers = f"/idempotency/records/{handle}/settle", {"X-Operator": ANN}
        answer = browser.client.post(path, data=body, content_type=kind, headers=headers)
        assert 415 == answer.status_code, kind
    assert is_unchanged(made, handle)


WRONG_STATUSES = (
    "", "99", "199", "600", "2O1", "²01", "-201", "1e3", "20100000000000000000", "02001", "0201", "0200" + "0" * 5000,
)  # fmt: skip


def test_a_wrong_status_or_verdict_is_refused(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}
    wrong = [{"status": status} for status in WRONG_STATUSES]
    wrong += [{"verdict": verdict} for verdict in ("", "Happened", "resume", "reopen", "release", "__class__")]

    for said in wrong:
        assert 400 == browser.post(f"/records/{handle}/settle", {**fields, **said}).status_code, said
    assert is_unchanged(made, handle)
    assert 200 == browser.preview(f"/records/{handle}/settle", verdict="happened", status="201 ").status_code


# Finding out what exists.


def answers_of(made: Rig, browser: Browser, handle: str) -> list[tuple[int, str, dict[str, str]]]:
    answers = [browser.get(f"/records/{handle}{page}") for page in ("", "/settle", "/release")]
    answers += [browser.post(f"/records/{handle}{page}", HAPPENED) for page in ("/settle", "/release")]
    return [(each.status_code, each.text, dict(each.headers)) for each in answers]


@pytest.mark.parametrize("operator", (LIMITED, VIEWER + "@acme", ""))
def test_an_unknown_handle_and_one_of_others_are_answered_alike(made: Rig, operator: str) -> None:
    theirs, unknown = made.quarantined(tenant="globex"), "b" * 76 + "a"
    made.note(theirs)
    browser = made.browser(operator)
    made.asked.clear()

    there, absent = answers_of(made, browser, theirs), answers_of(made, browser, unknown)

    assert there == absent
    assert {404} == {status for status, *_ in there}


def test_a_handle_is_answered_alike_where_authorize_aborts() -> None:
    """`abort(403)` for a record that is not theirs must not show that the record exists."""

    def ask(action: str, record: Any) -> str:
        if record is not None and record.tenant != "acme":
            abort(403)
        return ANN

    made = rig(ask=ask)
    theirs, browser = made.quarantined(tenant="globex"), made.browser()

    assert theirs not in browser.get("/records").text
    assert answers_of(made, browser, theirs) == answers_of(made, browser, "b" * 76 + "a")


# Plain HTTP.


@pytest.mark.parametrize("method", ("GET", "POST", "HEAD"))
def test_plain_http_gets_one_page_that_names_the_remedy(method: str) -> None:
    made = rig(testing=False)
    handle = made.quarantined()
    client, data = made.app.test_client(), HAPPENED if method == "POST" else None
    for path in EVERY_PAGE:
        url = "/idempotency" + path.format(handle=handle)
        answer = client.open(url, method=method, headers={"X-Operator": ANN}, data=data)
        assert 403 == answer.status_code, path
        assert handle not in answer.text, path
        assert "Set-Cookie" not in answer.headers, path
        if method != "HEAD":
            assert "ProxyFix" in answer.text, path
            assert "allow_http=True" in answer.text, path
    assert is_unchanged(made, handle)


@pytest.mark.parametrize(
    ("debug", "testing", "allowed"), ((True, False, False), (False, True, False), (False, False, True))
)
def test_plain_http_is_served_where_you_allow_it(debug: bool, testing: bool, allowed: bool) -> None:
    app = Flask("tests.console.app")
    app.debug = debug
    made = rig(app=app, testing=testing, console={"allow_http": allowed})

    assert 200 == made.browser().get("/").status_code


def test_a_purge_from_elsewhere_erases_nothing(made: Rig) -> None:
    assert 201 == made.pay().status_code
    browser = made.browser()
    fields = {**browser.form("/tenants/purge"), "tenant": "acme", "typed": "acme", "reason": "x"}

    wrong = [
        made.browser().post("/tenants/purge", fields),
        browser.post("/tenants/purge", fields, Origin="https://evil.example"),
        browser.post("/tenants/purge", {**fields, "typed": "acm"}),
        browser.post("/tenants/purge", {**fields, "reason": ""}),
        made.browser(LIMITED).post("/tenants/purge", fields),
        made.browser(VIEWER).post("/tenants/purge", fields),
    ]

    assert [403, 403, 400, 400, 403, 403] == [each.status_code for each in wrong]
    assert not made.told(TenantErased)
    assert 201 == made.pay().status_code

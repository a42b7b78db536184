"""What an attacker tries against the console: one test for each way, and each changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from markupsafe import Markup

from flask_idempotency.console import Operator
from flask_idempotency.console.access import COOKIE, LARGEST_FORM
from flask_idempotency.engine.events import Resolved, TenantErased
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import State
from flask_idempotency.operations.records import handle_of, key_of
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
    fields = browser.form(f"/records/{handle}/{action}")
    del fields["console_token"]

    answer = browser.post(f"/records/{handle}/{action}", {**fields, **HAPPENED})

    assert 403 == answer.status_code
    assert is_unchanged(made, handle)


@pytest.mark.parametrize("token", ("", "0" * 64, "é", "a" * 10_000, "\ud800"))
def test_a_wrong_token_is_refused(made: Rig, handle: str, token: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), "console_token": token.encode("utf-8", "replace").decode()}

    assert 403 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
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


@pytest.mark.parametrize("value", ("", "x", "a" * 43 + ";", "é" * 43, "a" * 3000))
def test_a_planted_cookie_gets_no_token(made: Rig, handle: str, value: str) -> None:
    """A cookie that we did not set is replaced, and no form is made for it."""
    browser = made.browser()
    browser.client.set_cookie(COOKIE, value, path="/idempotency/")

    page = browser.get(f"/records/{handle}/settle")

    assert COOKIE in page.headers["Set-Cookie"]
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


@pytest.mark.parametrize(
    "headers",
    (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:81"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "http://["},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ),
    ids=str,
)
@pytest.mark.parametrize("action", ("settle", "release"))
def test_a_cross_origin_post_is_refused(made: Rig, handle: str, action: str, headers: dict[str, str]) -> None:
    browser = made.browser()
    fields = browser.form(f"/records/{handle}/{action}")

    assert 403 == browser.post(f"/records/{handle}/{action}", {**fields, **HAPPENED}, **headers).status_code
    assert is_unchanged(made, handle)


def test_a_form_of_http_is_refused_by_a_console_on_https(handle: str) -> None:
    made = rig(testing=False)
    made.app.config["TESTING"] = False
    client = made.app.test_client()
    handle = quarantined_over_https(made)
    page = client.get(f"https://localhost/idempotency/records/{handle}/release", headers={"X-Operator": ANN})

    answer = client.post(
        f"https://localhost/idempotency/records/{handle}/release",
        data={**hidden(page), **HAPPENED, "force": "yes"},
        headers={"X-Operator": ANN, "Origin": "http://localhost"},
    )

    assert 403 == answer.status_code
    assert is_unchanged(made, handle)


def quarantined_over_https(made: Rig) -> str:
    assert 500 == made.pay(fail=True).status_code
    page = made.app.test_client().get("https://localhost/idempotency/records", headers={"X-Operator": ANN})
    (handle,) = set(re.findall(r"/records/([a-z2-7]{77})", page.text))
    return str(handle)


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


@pytest.mark.parametrize("version", ("", "0" * 32, "é"))
def test_a_form_without_the_records_version_is_refused(made: Rig, handle: str, version: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "version": version}

    assert 409 == browser.post(f"/records/{handle}/settle", fields).status_code
    assert is_unchanged(made, handle)


def test_a_version_of_another_record_is_refused(made: Rig, handle: str) -> None:
    other, browser = made.quarantined("other"), made.browser()
    fields = browser.form(f"/records/{other}/settle")

    assert 409 == browser.post(f"/records/{handle}/settle", {**fields, **HAPPENED}).status_code
    assert is_unchanged(made, handle)


def test_the_form_shows_neither_the_token_nor_the_fence(made: Rig, handle: str) -> None:
    record = made.store.read(key_of(handle))

    page = made.browser().get(f"/records/{handle}/settle").text

    assert record.token.hex() not in page
    assert record.fingerprint.hex() not in page


# Other tenants.


@pytest.mark.parametrize("page", ("", "/settle", "/release"))
def test_another_tenants_operator_reads_and_settles_nothing_by_handle(made: Rig, page: str) -> None:
    handle = made.quarantined(tenant="globex")
    browser = made.browser(LIMITED)

    assert 404 == browser.get(f"/records/{handle}{page}").status_code
    assert 404 == browser.post(f"/records/{handle}{page or '/settle'}", HAPPENED).status_code
    assert is_unchanged(made, handle)


@pytest.mark.parametrize(
    "query",
    (
        "",
        "?tenant=globex",
        "?no_tenant=1",
        "?tenant=globex&no_tenant=1",
        "?state=completed&tenant=globex",
        "?tenant=",
        "?id={}",
    ),
)
def test_another_tenants_operator_lists_nothing_by_filter(made: Rig, query: str) -> None:
    handle = made.quarantined(tenant="globex")
    assert 201 == made.pay("done", tenant="globex").status_code
    assert 201 == made.pay("none", tenant=None).status_code

    page = made.browser(LIMITED).get(f"/records{query.format(handle[:12])}")

    assert 200 == page.status_code
    assert not re.search(r"/records/[a-z2-7]{77}", page.text)


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
    theirs = handle_of_globex(made)
    browser = made.browser()

    assert 404 == browser.get(f"/records/{theirs}").status_code
    assert 404 == browser.get(f"/records/{theirs}/settle").status_code
    done = browser.change(f"/records/{mine}/settle", verdict="happened", status="201")
    assert 200 == done.status_code
    assert "Health" not in done.text


def handle_of_globex(made: Rig) -> str:
    before = {found.key for found in made.store.recovery.scan(State.QUARANTINED, limit=10).found}
    assert 500 == made.pay("theirs", tenant="globex", fail=True).status_code
    (key,) = {found.key for found in made.store.recovery.scan(State.QUARANTINED, limit=10).found} - before
    return handle_of(key)


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


@pytest.mark.parametrize(
    "cursor", ("x", "AAAA", "%00", "%C3%A9", "A" * 3000, "A" * 22, "/../", "-" * 40, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
)
def test_a_forged_cursor_gives_400(made: Rig, handle: str, cursor: str) -> None:
    answer = made.browser().get(f"/records?cursor={cursor}")

    assert 400 == answer.status_code
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


@pytest.mark.parametrize(
    "reason", ("a\r\nSet-Cookie: x=1", "a\nb", "a\x00b", "a\u2028b", "\u202eb", "r" * 256, "", "   ")
)
def test_a_reason_of_several_lines_or_none_is_refused(made: Rig, handle: str, reason: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "reason": reason}

    answer = browser.post(f"/records/{handle}/settle", fields)

    assert 400 == answer.status_code
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


@pytest.mark.parametrize("media_type", ("text/html\r\nX: y", "text/html\nX: y", "é", "t" * 101))
def test_a_media_type_with_line_breaks_is_refused(made: Rig, handle: str, media_type: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "body": "x", "content_type": media_type}

    assert 400 == browser.post(f"/records/{handle}/settle", fields).status_code
    assert is_unchanged(made, handle)


# Paths.


@pytest.mark.parametrize(
    "path",
    (
        "/records/..%2f..%2fetc%2fpasswd",
        "/records/%2e%2e/health",
        "/records/%00",
        "/records/" + "a" * 77,
        "/records/" + "A" * 77,
        "/records/" + "a" * 5000,
        "/records/%F0%9F%98%80",
        "/records/é",
        "/records/{handle}%00",
        "/records/{upper}",
        "/records/{handle}/settle/x",
        "/static/..%2f..%2faccess.py",
        "/static/../access.py",
        "/static/console.css%00.js",
        "/static/%2e%2e%2faccess.py",
        "/static/templates/base.html",
        "/nothing/here",
        "//evil.example/",
    ),
)
@pytest.mark.parametrize("method", ("GET", "POST"))
def test_a_tricky_path_finds_nothing(made: Rig, handle: str, path: str, method: str) -> None:
    path = "/idempotency" + path.format(handle=handle, upper=handle.upper())

    answer = made.app.test_client().open(
        path, method=method, headers={"X-Operator": ANN}, data=HAPPENED if method == "POST" else None
    )

    assert answer.status_code in (301, 308, 403, 404, 405), answer.status
    assert "evil.example" not in answer.headers.get("Location", "").split("/idempotency")[0]
    assert "def ask" not in answer.text
    assert is_unchanged(made, handle)


@pytest.mark.parametrize("given", ("//evil.example", "https://evil.example", "\\\\evil.example", "javascript:alert(1)"))
def test_no_parameter_leads_to_another_site(made: Rig, given: str) -> None:
    """The only redirect of the console is from a whole id to its record."""
    for name in ("id", "next", "url", "cursor", "span", "tenant", "state"):
        for path in ("/", "/records", "/tenants", "/endpoints"):
            answer = made.app.test_client().get(
                f"/idempotency{path}", query_string={name: given}, headers={"X-Operator": ANN, "Host": "localhost"}
            )
            assert "Location" not in answer.headers


def test_a_whole_id_leads_to_its_record(made: Rig, handle: str) -> None:
    answer = made.browser().get(f"/records?id={handle.upper()}")

    assert (303, f"/idempotency/records/{handle}") == (answer.status_code, answer.headers["Location"])


# Frames, caches, methods.


EVERY_PAGE = (
    "/", "/records", "/records?state=completed", "/records?cursor=x", "/records/{handle}", "/records/{handle}/settle",
    "/records/{handle}/release", "/records/nothing", "/tenants", "/tenants/purge", "/endpoints", "/health",
    "/static/console.css", "/static/console.js", "/static/nothing", "/nothing",
)  # fmt: skip


@pytest.mark.parametrize("operator", (ANN, LIMITED, VIEWER, ""))
@pytest.mark.parametrize("path", EVERY_PAGE)
def test_every_answer_forbids_frames_scripts_and_caches(made: Rig, handle: str, path: str, operator: str) -> None:
    headers = made.browser(operator).get(path.format(handle=handle)).headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))

    assert {
        "default-src": "'none'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
    }.items() <= policy.items()
    assert not [name for name, value in policy.items() if value not in ("'none'", "'self'")]
    assert ("DENY", "nosniff", "same-origin") == (
        headers["X-Frame-Options"],
        headers["X-Content-Type-Options"],
        headers["Referrer-Policy"],
    )
    assert ("same-origin", "same-origin") == (
        headers["Cross-Origin-Opener-Policy"],
        headers["Cross-Origin-Resource-Policy"],
    )
    expected = "no-cache" if path in ("/static/console.css", "/static/console.js") else "no-store"
    assert expected == headers["Cache-Control"]


def test_only_a_file_with_its_hash_is_cached(made: Rig) -> None:
    page = made.browser().get("/").text
    (path,) = re.findall(r'href="/idempotency(/static/console.css\?v=[0-9a-f]+)"', page)

    assert "immutable" in made.browser().get(path).headers["Cache-Control"]
    assert "no-cache" == made.browser().get("/static/console.css?v=0").headers["Cache-Control"]


@pytest.mark.parametrize("method", ("GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"))
@pytest.mark.parametrize("action", ("settle", "release"))
def test_no_other_method_changes_anything(made: Rig, handle: str, action: str, method: str) -> None:
    """Also with every field of a confirmed form, in the address and in the body."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/{action}"), **HAPPENED, "force": "yes"}

    browser.client.open(
        f"/idempotency/records/{handle}/{action}",
        method=method,
        query_string=fields,
        data=fields,
        headers={"X-Operator": ANN},
    )

    assert is_unchanged(made, handle)


def test_an_overriding_header_changes_no_method(made: Rig, handle: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/release"), **HAPPENED, "force": "yes"}

    browser.client.get(
        f"/idempotency/records/{handle}/release",
        query_string={**fields, "_method": "POST"},
        headers={"X-Operator": ANN, "X-HTTP-Method-Override": "POST"},
    )

    assert is_unchanged(made, handle)


@pytest.mark.parametrize(
    "path", ("/", "/records", "/records/{handle}", "/tenants", "/endpoints", "/health", "/static/console.css")
)
def test_a_page_that_only_reads_takes_no_form(made: Rig, handle: str, path: str) -> None:
    answer = made.browser().post(path.format(handle=handle), HAPPENED)

    assert answer.status_code in (404, 405)
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


@pytest.mark.parametrize(
    "content_type", ("application/json", "text/plain", "multipart/form-data; boundary=x", "", "a" * 5000)
)
def test_a_form_of_another_type_is_refused(made: Rig, handle: str, content_type: str) -> None:
    """`text/plain` is what another site may send without asking."""
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED}
    body = "&".join(f"{name}={value}" for name, value in fields.items())

    answer = browser.client.post(
        f"/idempotency/records/{handle}/settle", data=body, content_type=content_type, headers={"X-Operator": ANN}
    )

    assert 415 == answer.status_code
    assert is_unchanged(made, handle)


@pytest.mark.parametrize(
    "status",
    (
        "",
        "99",
        "199",
        "600",
        "2O1",
        "201 ",
        "²01",
        "-201",
        "1e3",
        "20100000000000000000",
        "02001",
        "0201",
        "0200" + "0" * 5000,
    ),
)
def test_a_wrong_status_is_refused(made: Rig, handle: str, status: str) -> None:
    browser = made.browser()
    answer = browser.preview(f"/records/{handle}/settle", verdict="happened", status=status)

    assert (200 if status.strip() == "201" else 400) == answer.status_code
    assert is_unchanged(made, handle)


@pytest.mark.parametrize("verdict", ("", "Happened", "resume", "reopen", "release", "__class__"))
def test_a_verdict_that_is_not_offered_is_refused(made: Rig, handle: str, verdict: str) -> None:
    browser = made.browser()
    fields = {**browser.form(f"/records/{handle}/settle"), **HAPPENED, "verdict": verdict}

    assert 400 == browser.post(f"/records/{handle}/settle", fields).status_code
    assert is_unchanged(made, handle)


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
    from flask import abort

    def ask(action: str, record: Any) -> str:
        if record is not None and record.tenant != "acme":
            abort(403)
        return ANN

    made = rig(ask=ask)
    assert 500 == made.pay(tenant="globex", fail=True).status_code
    (found,) = made.store.recovery.scan(State.QUARANTINED, limit=10).found
    theirs, browser = handle_of(found.key), made.browser()

    assert theirs not in browser.get("/records").text
    assert answers_of(made, browser, theirs) == answers_of(made, browser, "b" * 76 + "a")


# Plain HTTP.


@pytest.mark.parametrize("path", (*EVERY_PAGE, "/records/{handle}/settle"))
@pytest.mark.parametrize("method", ("GET", "POST", "HEAD"))
def test_plain_http_gets_one_page_that_names_the_remedy(path: str, method: str) -> None:
    made = rig(testing=False)
    handle = quarantined_over_https(made)

    answer = made.app.test_client().open(
        "/idempotency" + path.format(handle=handle),
        method=method,
        headers={"X-Operator": ANN},
        data=HAPPENED if method == "POST" else None,
    )

    assert 403 == answer.status_code
    if method != "HEAD":
        assert "ProxyFix" in answer.text
        assert "allow_http=True" in answer.text
        assert handle not in answer.text
        assert "Set-Cookie" not in answer.headers
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

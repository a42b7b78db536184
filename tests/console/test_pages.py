"""What the pages show, on every kind of store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fakeredis
import pytest

from flask_idempotency import StillUnknown
from flask_idempotency.assembly import build_store
from flask_idempotency.engine.activity import ENDINGS, NEW_TIME, OUTCOMES
from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.operations.activity import GROUPS
from flask_idempotency.operations.examination import HEALTH
from flask_idempotency.operations.records import key_of
from flask_idempotency.web.janitor import janitor_of
from tests.console.rig import ANN, HANDLE, LIMITED, Rig, rig
from tests.lab.programs import REDIS_KINDS

STORES = ("memory", "sqlite", REDIS_KINDS[0])


@pytest.fixture(params=STORES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "memory":
        yield rig()
        return
    if request.param == "sqlite":
        store: Any = build_store(f"sqlite:///{tmp_path / 'records.db'}")
        store.schema.upgrade()
    else:
        url = request.getfixturevalue("redis_servers").get(request.param).url
        store = build_store(url, memory={"after_loss": "run"})
    yield rig(store)
    if request.param != "sqlite":
        store.close()


VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """Collects what a page is made of, and fails for elements that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.landmarks: list[str] = []
        self.unnamed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in ("header", "nav", "main", "footer"):
            self.landmarks.append(tag)
        if "id" in given:
            self.ids.append(given["id"] or "")
        self.references += [
            given[name] or "" for name in ("for", "aria-labelledby", "aria-describedby", "list") if name in given
        ]
        visible = tag in ("input", "select", "textarea") and given.get("type") != "hidden"
        if visible and "id" not in given:
            self.unnamed.append(tag)
        assert not [name for name in given if name.startswith("on") or name == "style"], f"{tag} {given}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop(), (tag, self.open)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def every_page(made: Rig, handle: str) -> list[tuple[str, str]]:
    browser = made.browser()
    paths = (
        "/", "/?span=7d", "/records", "/records?state=completed", f"/records/{handle}", f"/records/{handle}/settle",
        f"/records/{handle}/release", "/tenants", "/tenants?tenant=acme", "/tenants/purge", "/endpoints", "/messages",
        "/outbox", "/health",
    )  # fmt: skip
    pages = [(path, browser.get(path)) for path in paths]
    pages += [
        (f"{verdict} preview", browser.preview(f"/records/{handle}/settle", verdict=verdict, status="201", body="{}"))
        for verdict in ("happened", "never")
    ]
    pages.append(("release preview", browser.preview(f"/records/{handle}/release")))
    assert {200} == {page.status_code for _, page in pages}, [(path, page.status) for path, page in pages]
    return [(path, page.text) for path, page in pages]


def test_every_page_is_well_formed_and_has_its_landmarks(made: Rig) -> None:
    handle = made.quarantined()
    assert 201 == made.pay("done").status_code

    for path, text in every_page(made, handle):
        found = outline(text)
        assert ["header", "nav", "main"] == found.landmarks[:3], path
        assert 1 == found.headings.count(1), path
        assert all(later - earlier <= 1 for earlier, later in zip(found.headings, found.headings[1:], strict=False)), (
            path
        )
        assert len(found.ids) == len(set(found.ids)), path
        assert set(found.references) <= set(found.ids), path
        assert not found.unnamed, path


def test_no_page_shows_a_key_a_body_or_a_token(made: Rig) -> None:
    secret = "client-key-8d51c0"
    handle = made.quarantined(secret)
    record = made.store.read(key_of(handle))
    assert 201 == made.pay("another-8d51c0").status_code

    for path, text in every_page(made, handle):
        assert "8d51c0" not in text, path
        assert record.token.hex() not in text, path
        assert record.fingerprint.hex() not in text, path


def test_names_are_not_in_clear_where_they_are_hashed() -> None:
    made = rig(hash_identities=True, principal=lambda: "alice@example.com")
    handle = made.quarantined(tenant="acme-gmbh")

    for path in ("/", "/records", f"/records/{handle}", f"/records/{handle}/settle"):
        text = made.browser().get(path).text
        assert "alice" not in text
        assert "acme-gmbh" not in text


def test_the_overview_names_what_needs_a_person(made: Rig) -> None:
    handle = made.quarantined()

    page = made.browser().get("/").text

    assert "1 request with an unknown outcome" in page
    assert f"/idempotency/records/{handle}" in page


def test_a_record_shows_what_its_resolver_said() -> None:
    made = rig()
    answers = [StillUnknown()]
    made.idempotency.resolver("pay")(lambda unknown: answers.pop())
    handle = made.quarantined()
    janitor = janitor_of(made.app)

    pages = []
    for _ in range(2):
        made.clock.advance(60)
        janitor.run("reap", Batcher())
        pages.append(made.browser().get(f"/records/{handle}").text)

    assert "the resolver says that it is still unknown, and is called again" in pages[0]
    assert "A resolver says that it is still unknown" in pages[0]
    assert "the resolver failed (IndexError), and is called again" in pages[1]


def test_the_overview_names_each_task_that_does_not_run(tmp_path: Path) -> None:
    made = rig(f"sqlite:///{tmp_path}/s.db")
    state = made.app.extensions["idempotency"]
    state.built.schema.upgrade()
    state.built.tasks.report("relay", "{}")
    state.built.tasks.report("expire", "{}")

    page = made.browser().get("/").text

    assert "reap is due every 10 s, and never ran" in page
    assert "expire is due" not in page
    assert 1 == page.count("<dd>never ran</dd>")
    assert "No request waits for you" not in page


def test_the_overview_is_quiet_when_all_is_in_order() -> None:
    made = rig()
    made.app.extensions["idempotency"].built.tasks.report("heartbeat", "{}")

    page = made.browser().get("/").text

    assert "No request waits for you" in page
    assert "Task late" not in page


def test_the_title_and_the_icon_have_the_number_that_need_a_person() -> None:
    made = rig()
    calm = made.browser().get("/").text
    assert "<title>Overview ·" in calm
    assert re.search(r'rel="icon" href="[^"]*/icon\.svg\?', calm)
    for number in range(2):
        made.quarantined(f"key-{number}")

    for path in ("/", "/records", "/health"):
        page = made.browser().get(path).text
        icon = re.search(r'rel="icon" href="/idempotency([^"]*/icon-2\.svg\?v=[0-9a-f]+)"', page)
        assert "<title>(2) " in page
        assert icon is not None
        drawn = made.browser().get(icon[1])
        assert (200, "image/svg+xml") == (drawn.status_code, drawn.mimetype)
        assert "2" == list(ElementTree.fromstring(drawn.text))[-1].text  # noqa: S314 - our own icon
    assert "<title>Records ·" in made.browser(LIMITED).get("/records").text


def test_a_time_is_short_and_the_exact_one_is_for_readers_of_screens() -> None:
    made = rig()
    made.quarantined()
    made.clock.advance(41 * 60 + 3)

    page = made.browser().get("/records").text

    exact = "2001-09-09T01:46:40.000Z"
    shown = f'<time datetime="{exact}" title="{exact}"><span aria-hidden="true">01:46:40</span><span class="sr">{exact}</span>'
    assert f"{shown}</time>, 41 min ago" in page


def test_a_stuck_request_is_shown_as_stuck() -> None:
    made = rig()
    handle = made.quarantined()
    made.browser().change(f"/records/{handle}/settle", verdict="happened", status="201")
    claim(made)
    made.clock.advance(31)

    page = made.browser().get("/").text

    assert "1 request with an expired lease" in page
    assert "lease expired" in made.browser().get("/records").text


def claim(made: Rig, tenant: str = "acme") -> str:
    """Make a claim whose worker vanishes, and return its handle."""
    from flask_idempotency.assembly import identities
    from flask_idempotency.engine.keys import Scope, new_token
    from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, RequestInfo
    from flask_idempotency.operations.records import handle_of

    settings = made.app.extensions["idempotency"].settings
    key = identities(settings)[0].storage_key(Scope(settings.namespace, tenant, None), "vanished")
    asked = ClaimRequest(key, bytes(32), OnExpiry.QUARANTINE, RequestInfo(tenant, "", "POST", "pay"))
    assert isinstance(made.store.claim(asked, token=new_token(key.mark), lease=30.0), Grant)
    return handle_of(key)


def test_a_fault_of_health_is_on_the_overview_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig()
    fault = Finding("eviction", Verdict.FAULT, "This Redis evicts keys.", "Set maxmemory-policy to noeviction.")
    checks = made.app.extensions["idempotency"].checks
    checks.append(lambda: [fault])
    browser = made.browser()
    before = browser.get("/").text
    assert "evicts keys" not in before
    # The script of the page opens this link, so that the next refresh knows.
    assert 'href="/idempotency/health" data-look' in before

    health = browser.get("/health").text

    assert "Not in order" in health
    assert "noeviction" in health
    # The store keeps it, so another process that has made no look shows the same.
    other = rig(made.store).browser()
    for each in (browser, other):
        after = each.get("/").text
        assert "This Redis evicts keys." in after
        assert "data-look" not in after
    told = made.app.test_cli_runner().invoke(args=["idempotency", "stats"]).output
    assert "eviction: This Redis evicts keys." in told
    made.clock.advance(601)
    assert "data-look" in other.get("/").text


@pytest.mark.parametrize("written", ("", "[]", "7", "[true, true, [1]]", "x" * 5000, '[true,true,[["a","b"]]'))
def test_a_look_at_health_that_another_release_wrote_hides_no_page(written: str) -> None:
    made = rig()
    owner = owner_mark(made.app.extensions["idempotency"].settings.namespace)
    made.app.extensions["idempotency"].built.task_log.report(HEALTH + owner.hex(), written)

    assert "data-look" in made.browser().get("/").text


def test_the_overview_sums_up_what_was_counted(made: Rig) -> None:
    settings = made.app.extensions["idempotency"].settings
    counts = {"pay": {"new": 1200, "replayed": 34, "mismatch": 5, f"{NEW_TIME}7": 1200}}
    made.store.activity.add(owner_mark(settings.namespace), counts, token=bytes(16))

    page = made.browser().get("/").text

    assert "1,200 new, 34 replayed, 0 conflicts, 5 mismatches. Runs that ended in quarantine: 0." in page
    assert "half of 1,200 requests took less than 20 ms, and 99 in 100 less than 20 ms" in page
    assert re.search(r'<th scope="row"[^>]*><bdi>pay</bdi></th><td [^>]*>1,239</td>', page)
    assert 3 == page.count('role="img"')


def test_the_columns_of_an_endpoint_add_up_to_its_requests() -> None:
    made = rig()
    counts = {each: number for number, each in enumerate((*OUTCOMES, *ENDINGS), 2)}
    owner = owner_mark(made.app.extensions["idempotency"].settings.namespace)
    made.store.activity.add(owner, {"pay": counts, "refund": {"new": 5, "paused": 4}}, token=bytes(16))

    page = made.browser().get("/").text

    rows = re.findall(
        r'<tr[^>]*><th scope="row" data-label="Endpoint">(.*?)</th>(.*?)</tr>', page.partition('id="busiest"')[2]
    )
    numbers = {unescape(re.sub("<.*?>", "", name)): re.findall(r">(\d+)</td>", row) for name, row in rows}
    assert {"pay", "refund", "All 2"} <= set(numbers)
    for name in ("pay", "refund", "All 2"):
        requests, *parts = map(int, numbers[name])
        assert requests == sum(parts[: len(GROUPS)])
        assert 4 == len(parts[len(GROUPS) :])
    assert "loses what it counted in its last 10 s" in page


def test_the_oldest_need_a_person_first() -> None:
    made = rig()
    handles = []
    for number in range(8):
        handles.append(made.quarantined(f"key-{number}"))
        made.clock.advance(60)

    page = made.browser().get("/").text

    assert handles[:5] == list(dict.fromkeys(HANDLE.findall(page)))
    assert "and 3 more" in page


def test_an_unknown_time_span_is_refused() -> None:
    assert 400 == rig().browser().get("/?span=1y").status_code


def test_a_store_that_does_not_answer_gives_503(monkeypatch: pytest.MonkeyPatch) -> None:
    from flask_idempotency.engine.errors import StoreUnavailable

    made = rig()
    handle = made.quarantined()

    def away(*args: Any, **options: Any) -> Any:
        raise StoreUnavailable("redis://:secret@host is away")

    for name in ("read", "claim"):
        monkeypatch.setattr(made.store, name, away)
    for name in ("scan", "counts"):
        monkeypatch.setattr(made.store.recovery, name, away)

    for path in ("/", "/records", f"/records/{handle}", f"/records/{handle}/settle"):
        page = made.browser().get(path)
        assert 503 == page.status_code
        assert "secret" not in page.text


# The list.


def test_pages_of_a_list_show_each_record_once(made: Rig) -> None:
    expected = {made_handle for made_handle in (quarantine(made, number) for number in range(110)) if made_handle}
    browser, seen, path, pages = made.browser(), list[str](), "/records?state=quarantined", 0
    while path:
        text = browser.get(path).text
        seen += list(dict.fromkeys(HANDLE.findall(text)))
        more = re.search(r'href="/idempotency([^"]*cursor=[^"]*)" rel="next"', text)
        path, pages = more[1].replace("&amp;", "&") if more else "", pages + 1

    assert pages >= 2
    assert len(seen) == len(set(seen)) == 110
    assert expected <= set(seen) or not expected


def quarantine(made: Rig, number: int) -> str:
    assert 500 == made.pay(f"key-{number}", fail=True).status_code
    return ""


FILTERS = (
    ("", True),
    ("?state=quarantined", True),
    ("?state=completed", False),
    ("?state=in+flight", False),
    ("?state=lease+expired", False),
    ("?state=paused", False),
    ("?endpoint=pay", True),
    ("?endpoint=other", False),
    ("?tenant=acme", True),
    ("?tenant=globex", False),
    ("?no_tenant=1", False),
    ("?older=60s", False),
    ("?id={start}", True),
    ("?id={log}", True),
    ("?id=zzzz", False),
    ("?state=quarantined&endpoint=pay&tenant=acme&older=0&id={start}", True),
)


def test_a_filter_shows_what_it_names() -> None:
    made = rig()
    handle = made.quarantined()
    log = re.search(r"Id in logs</dt><dd><code>([0-9a-f]{8})", made.browser().get(f"/records/{handle}").text)
    assert log is not None

    for query, found in FILTERS:
        page = made.browser().get("/records" + query.format(start=handle[:6], log=log[1]))
        assert found == (handle in page.text), query


def test_a_faulty_filter_gives_400() -> None:
    browser = rig().browser()
    faulty = ("state=open", "older=soon", "older=-1", "id=a", "id=a.b.c.d", f"tenant={'t' * 256}", "endpoint=a%0Ab")
    assert [query for query in faulty if 400 != browser.get(f"/records?{query}").status_code] == []


def test_a_list_looks_at_so_many_records_and_offers_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that matches nothing must not read a million records."""
    made = rig()
    for number in range(30):
        assert 201 == made.pay(f"key-{number}").status_code
    monkeypatch.setattr("flask_idempotency.operations.browse.MOST_LOOKED_AT", 10)
    monkeypatch.setattr("flask_idempotency.operations.browse.ROWS", 5)
    limits = list[int]()
    scan = made.store.recovery.scan

    def counted(state: Any, *, limit: int, **options: Any) -> Any:
        limits.append(limit)
        return scan(state, limit=limit, **options)

    monkeypatch.setattr(made.store.recovery, "scan", counted)

    page = made.browser().get("/records?state=completed&endpoint=nothing").text

    assert sum(limits) <= 10
    assert "Continue" in page
    assert "None of the 10 records on this page matches" in page


# One record.


def test_a_record_shows_its_life(made: Rig) -> None:
    handle = made.quarantined()
    browser = made.browser()
    page = browser.get(f"/records/{handle}").text

    assert re.search(r"First used.*Quarantined", page, re.DOTALL)
    assert "status-500" in page
    assert "on_error" in page
    assert "fence" in page

    browser.change(f"/records/{handle}/settle", verdict="happened", status="201")
    after = browser.get(f"/records/{handle}").text
    assert re.search(r"First used.*Completed.*Expires", after, re.DOTALL)
    assert "status 201" in after


def test_the_trail_of_a_record_outlives_it(made: Rig) -> None:
    handle = made.quarantined()
    browser = made.browser()
    browser.change(f"/records/{handle}/release")
    trail = made.store.audit
    if not trail.entries(key_of(handle)):
        made.note(handle, verb="released")

    page = browser.get(f"/records/{handle}")

    assert 200 == page.status_code
    assert "There is no such record now" in page.text
    assert "Operator" in page.text
    assert "asked the bank" in page.text
    assert 404 == made.browser("eve@globex").get(f"/records/{handle}").status_code
    assert 200 == made.browser(LIMITED).get(f"/records/{handle}").status_code


def test_a_record_of_another_application_is_shown_and_not_settled() -> None:
    made = rig()
    handle = made.quarantined()
    other = rig(store=made.store, namespace="other-shop")

    page = other.browser().get(f"/records/{handle}").text

    assert "belongs to another application" in page
    assert 409 == other.browser().get(f"/records/{handle}/settle").status_code


# Tenants, endpoints, health.


def test_tenants_show_their_quota_as_bars(made: Rig) -> None:
    limited = rig(store=made.store, quota_records=2, quota_in_flight=5)
    for number in range(2):
        assert 201 == limited.pay(f"key-{number}").status_code

    named = limited.browser().get("/tenants?tenant=acme").text
    every = limited.browser().get("/tenants").text

    assert re.search(r'<meter min="0" max="2" value="2" .*?aria-label="live records: 2 of 2"', named)
    assert '<span class="state bad">full</span>' in named
    assert "2 of 2 (100 %)" in every


def test_a_part_of_a_tenant_shows_its_share_of_the_limits() -> None:
    """A part is full at its share, and then refuses. Beside the limit of the whole tenant it would look empty."""
    made = rig(fakeredis.FakeRedis(), tenant_shards=4, quota_records=8)
    for number in range(3):
        assert 201 == made.pay(f"key-{number}").status_code

    every, named = made.browser().get("/tenants").text, made.browser().get("/tenants?tenant=acme").text

    assert {"2"} == set(re.findall(r"live records: [\d,]+ of ([\d,]+)", every))
    assert "4 parts" in every
    assert ["3 of 8"] == re.findall(r"live records: ([\d,]+ of [\d,]+)", named)
    assert "4 parts" not in named


def test_the_store_is_searched_for_tenants_every_five_minutes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis looks through all of its keys for them, and an open page refreshes itself every ten seconds."""
    made = rig(quota_records=10)
    assert 201 == made.pay("first").status_code
    (mounted,) = made.app.extensions["idempotency_console"].values()
    clock = [1000.0]
    monkeypatch.setattr(mounted.tenants, "_monotonic", lambda: clock[0])
    assert "1 of 10" in made.browser().get("/tenants").text

    assert 201 == made.pay("second").status_code
    assert 201 == made.pay("third", tenant="globex").status_code
    known = made.browser().get("/tenants").text
    clock[0] += 301
    later = made.browser().get("/tenants").text

    assert ["2 of 10"] == re.findall(r"live records: (\d+ of \d+)", known)
    assert {"1 of 10", "2 of 10"} == set(re.findall(r"live records: (\d+ of \d+)", later))
    assert "up to 5 min old" in known


def test_a_limit_of_nothing_is_full() -> None:
    made = rig(quota_in_flight=5)
    made.app.test_cli_runner().invoke(args=["idempotency", "quota", "set", "--tenant", "acme", "--records", "0"])

    page = made.browser().get("/tenants?tenant=acme").text

    assert 'aria-label="live records: 0 of 0"' in page
    assert "set by an operator" in page


def test_without_quotas_no_tenant_is_said_to_use_nothing() -> None:
    """No key is counted then: a 0 beside live records would be wrong."""
    made = rig()
    assert 201 == made.pay().status_code

    page = made.browser().get("/tenants?tenant=acme").text

    assert "Quotas are off" in page
    assert "live records" not in page
    assert "Purge…" in page


def test_endpoints_are_those_of_the_policy_command() -> None:
    made = rig(required=True, keep=3600)
    made.idempotency.resolver("pay")(lambda unknown: StillUnknown())

    page = made.browser().get("/endpoints").text

    assert "idempotency_console" not in page  # its own views are none of the application's
    row = re.search(r'<th scope="row"[^>]*><bdi>pay</bdi></th>(.*?)</tr>', page, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
    assert ["POST", "enforce", "yes", "plain", "quarantined", "1 h", "30 s", "yes"] == cells[:8]


def test_endpoints_show_what_enforcing_would_have_done() -> None:
    """The counts and suggestions of `flask idempotency report`."""
    made = rig(mode="observe")
    settings = made.app.extensions["idempotency"].settings
    observed = {
        "would:new@cookie": 90,
        "would:replayed@cookie": 7,
        "would:missing-key@cookie": 3,
        "would:mismatch@cookie": 2,
    }
    made.store.activity.add(owner_mark(settings.namespace), {"pay": observed}, token=bytes(16))
    told = made.app.test_cli_runner().invoke(args=["idempotency", "report", "--json"])

    page = unescape(made.browser().get("/endpoints").text)

    row = re.search(r'<th scope="row"[^>]*><bdi>pay</bdi></th>(.*?)</tr>', page, re.DOTALL)
    assert row is not None
    assert ["102", "99", "7", "0", "2"] == re.findall(r'<td class="number"[^>]*>(.*?)</td>', row[1])
    assert ">observe</td>" in row[1]
    reasons = [each["reason"] for each in json.loads(told.stdout)["endpoints"]["pay"]["suggestions"]]
    assert reasons
    assert all(reason in page for reason in reasons)
    assert "cookie: 99 of 102 with a key" in page


def test_the_page_of_health_is_the_doctors(made: Rig) -> None:
    told = made.app.test_cli_runner().invoke(args=["idempotency", "doctor", "--json"])
    checks = set(re.findall(r'"check": "([\w-]+)"', told.stdout))

    page = made.browser().get("/health").text

    assert len(checks) > 5
    assert all(f'<th scope="row">{name}</th>' in page for name in checks)


def test_an_operator_of_a_tenant_is_offered_their_page_only() -> None:
    page = rig().browser(LIMITED).get("/records").text

    assert re.findall(r'<nav aria-label="Console">.*?</nav>', page, re.DOTALL)[0].count("<a ") == 1
    assert "Without a tenant" not in page
    assert ANN not in page


def test_an_operator_of_a_tenant_is_led_to_no_page_that_refuses_them() -> None:
    browser = rig().browser(LIMITED)

    for path in ("/", "/health", "/records/" + "a" * 77):
        page = browser.get(path).text
        assert ">Records</a>" in page, path
        assert ">Overview</a>" not in page, path

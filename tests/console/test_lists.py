"""The list of records: its filter and order, the search by a client's key, and changes of a whole list."""

from __future__ import annotations

import re

import pytest
from werkzeug.test import TestResponse

from flask_idempotency.engine.events import Resolved
from flask_idempotency.engine.model import State
from flask_idempotency.operations.records import key_of
from tests.console.rig import ANN, HANDLE, LIMITED, VIEWER, Rig, hidden, rig
from tests.console.test_pages import claim, made, outline
from tests.console.test_settle import in_two_steps

__all__ = ["made"]

KEY = "client-key-8d51c0"


def shown(page: TestResponse) -> list[str]:
    return list(dict.fromkeys(HANDLE.findall(page.text)))


def settled(made: Rig) -> list[tuple[str, str, str]]:
    return [(event.verb, event.actor, event.reason) for event in made.told(Resolved)]


# Its filter.


def test_the_list_has_the_status_and_the_time_of_completion(made: Rig) -> None:
    assert 201 == made.pay().status_code

    row = re.search(r"<tbody>(.*?)</tbody>", made.browser().get("/records?state=completed").text, re.DOTALL)

    assert row is not None
    assert '<td class="number" data-label="Status">201</td>' in row[1] or '<td class="number">201</td>' in row[1]
    assert 2 == row[1].count("<time ")


def test_completed_records_come_newest_first_and_others_as_they_need_a_person() -> None:
    made = rig()
    for number in range(5):
        assert 201 == made.pay(f"done-{number}").status_code
        made.clock.advance(60)
    handles = []
    for number in range(5):
        handles.append(made.quarantined(f"key-{number}"))
        made.clock.advance(60)
    browser = made.browser()

    ages = re.findall(r'"First used">.*?</time>, (\d+) min ago', browser.get("/records?state=completed").text)

    assert ["6", "7", "8", "9", "10"] == ages
    assert handles == shown(browser.get("/records?state=quarantined"))
    assert handles[::-1] == shown(browser.get("/records?state=quarantined&order=newest"))
    assert 400 == browser.get("/records?order=random").status_code


def test_the_newest_of_many_are_shown_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rig()
    monkeypatch.setattr("flask_idempotency.operations.browse.ROWS", 2)
    handles = []
    for number in range(10):
        handles.append(made.quarantined(f"key-{number}"))
        made.clock.advance(1)
    monkeypatch.setattr("flask_idempotency.operations.browse.MOST_LOOKED_AT", 20)

    page = made.browser().get("/records?state=quarantined&order=newest")

    assert handles[:5:-1] == shown(page)
    assert "6 older ones match and are not shown" in page.text


@pytest.mark.parametrize(
    ("query", "expected"),
    (
        ("from=2001-09-09T01:46:40", 3),
        ("from=2001-09-09T01:47:40", 2),
        ("to=2001-09-09T01:47:40", 1),
        ("from=2001-09-09T01:47:40%2B00:00&to=2001-09-09T01:48:40", 1),
        ("from=2001-09-10", 0),
    ),
)
def test_a_range_of_times_shows_what_was_first_used_in_it(query: str, expected: int) -> None:
    made = rig()  # its clock begins at 2001-09-09T01:46:40
    for number in range(3):
        made.quarantined(f"key-{number}")
        made.clock.advance(60)

    assert expected == len(shown(made.browser().get(f"/records?{query}")))


@pytest.mark.parametrize("query", ("from=yesterday", "to=2001-13-01", "from=0"))
def test_what_is_no_time_gives_400(query: str) -> None:
    assert 400 == rig().browser().get(f"/records?{query}").status_code


def test_the_command_lists_the_same() -> None:
    made = rig()
    handles = [made.quarantined("key-0")]
    made.clock.advance(60)
    handles.append(made.quarantined("key-1"))
    run = made.app.test_cli_runner().invoke

    newest = run(args=["idempotency", "list", "--newest"]).output
    since = run(args=["idempotency", "list", "--from", "2001-09-09T01:47:40"]).output
    until = run(args=["idempotency", "list", "--to", "2001-09-09T01:47:40"]).output

    assert newest.index(handles[1][:8]) < newest.index(handles[0][:8])
    assert (False, True) == (handles[0][:8] in since, handles[1][:8] in since)
    assert (True, False) == (handles[0][:8] in until, handles[1][:8] in until)
    assert 2 == run(args=["idempotency", "list", "--from", "noon"]).exit_code


def test_endpoints_and_tenants_are_choices() -> None:
    made = rig()
    made.quarantined("a", tenant="acme")
    made.quarantined("b", tenant="globex")

    everything = made.browser().get("/records").text
    limited = made.browser(LIMITED).get("/records").text

    assert re.search(r'<select id="endpoint".*?<option value="pay">', everything, re.DOTALL)
    assert '<option value="acme"></option><option value="globex"></option>' in everything
    assert re.search(r'<select id="tenant".*?<option value="acme">', limited, re.DOTALL)
    assert "globex" not in limited


def test_a_tenant_has_one_name_on_every_page_where_names_are_hashed(made: Rig) -> None:
    hashed = rig(made.store, hash_identities=True, quota_records=10)
    handle = hashed.quarantined(tenant="acme")
    hashed.quarantined("other", tenant="globex")
    browser = hashed.browser()
    facts = re.search(r"<dt>Tenant</dt><dd><bdi>([a-z2-7]{24})</bdi>", browser.get(f"/records/{handle}").text)
    assert facts is not None
    alias = facts[1]

    assert f"<bdi>{alias}</bdi>" in browser.get("/records").text
    assert f">{alias}</bdi></h2>" in browser.get("/tenants").text
    assert f"<code>{alias}</code>" in browser.get("/tenants?tenant=acme").text
    assert [handle] == shown(browser.get(f"/records?tenant={alias}"))
    assert [handle] == shown(browser.get("/records?tenant=acme"))
    assert [] == shown(hashed.browser("eve@globex").get(f"/records?tenant={alias}"))


# The search by a client's key.


def search(made: Rig, operator: str = ANN, **said: str) -> TestResponse:
    browser = made.browser(operator)
    return browser.post("/records/find", {**browser.form("/records/find"), "key": KEY, **said})


def test_a_key_leads_to_its_record_and_is_on_no_page(made: Rig) -> None:
    handle = made.quarantined(KEY)
    browser = made.browser()

    found = search(made, tenant="acme")
    missed = search(made, tenant="globex")

    assert (303, f"/idempotency/records/{handle}") == (found.status_code, found.headers["Location"])
    assert 400 == missed.status_code
    assert "There is no record of this key" in missed.text
    for page in (missed.text, browser.get("/records/find").text, str(found.headers)):
        assert "8d51c0" not in page
    outline(missed.text)


def test_a_key_is_searched_with_its_caller() -> None:
    made = rig(principal=lambda: "alice")
    handle = made.quarantined(KEY)

    assert 400 == search(made, tenant="acme").status_code
    assert 400 == search(made, tenant="acme", principal="bob").status_code
    assert search(made, tenant="acme", principal="alice", endpoint="pay").headers["Location"].endswith(handle)
    assert 400 == search(made, tenant="acme", principal="alice", endpoint="nothing").status_code


def test_a_key_of_another_tenant_is_not_found(made: Rig) -> None:
    made.quarantined(KEY, tenant="globex")

    answers = [search(made, LIMITED, tenant=tenant) for tenant in ("globex", "acme", "")]

    assert [400] * 3 == [answer.status_code for answer in answers]
    assert 1 == len({re.sub('value="[^"]*"', "", answer.text).replace(" selected", "") for answer in answers})


def test_a_key_of_a_record_that_is_not_shown_is_not_found() -> None:
    """An operator of the tenant may not see each of its records: where one is would say that the key was used."""
    made = rig(ask=lambda action, record: None if record is not None and record.endpoint == "pay" else LIMITED)
    made.quarantined(KEY)

    answers = [search(made, LIMITED, tenant="acme", key=key) for key in (KEY, "never-used")]

    assert [400] * 2 == [answer.status_code for answer in answers]
    assert 1 == len({re.sub('value="[^"]*"', "", answer.text) for answer in answers})


def test_a_key_is_searched_by_forms_of_the_console_alone(made: Rig) -> None:
    made.quarantined(KEY)
    browser = made.browser()
    browser.form("/records/find")

    assert 403 == browser.post("/records/find", {"key": KEY, "tenant": "acme"}).status_code
    assert 403 == search(made, tenant="acme", console_token="0" * 64).status_code


@pytest.mark.parametrize("key", ("", "a\nb", "k" * 5000))
def test_what_is_no_key_is_refused_and_not_quoted(key: str) -> None:
    page = search(rig(), key=key)

    assert 400 == page.status_code
    assert not key or key not in page.text


# Changes of a whole list.


def many(made: Rig, number: int = 3, *, tenant: str = "acme") -> list[str]:
    handles = [made.quarantined(f"key-{each}", tenant=tenant) for each in range(number)]
    made.clock.advance(1000)
    return handles


def test_a_list_is_settled_with_one_reason() -> None:
    made = rig()
    many(made)
    made.quarantined("theirs", tenant="globex")
    browser = made.browser()
    assert 'href="/idempotency/records/all/settle?tenant=acme"' in browser.get("/records?tenant=acme").text
    said = {"verdict": "happened", "status": "202", "reason": "the bank says so"}
    fields = {**browser.form("/records/all/settle?tenant=acme"), **said}

    wrong = browser.post("/records/all/settle", {**fields, "typed": "4"})
    assert (400, []) == (wrong.status_code, settled(made))
    outline(wrong.text)
    done = browser.post("/records/all/settle", {**fields, "typed": "3"})

    assert "Settled: 3." in done.text
    assert [("completed", ANN, "the bank says so")] * 3 == settled(made)
    assert [202] * 3 == [made.pay(f"key-{each}").status_code for each in range(3)]
    assert 1 == len(made.handles())


def test_a_list_is_released_with_one_reason() -> None:
    made = rig()
    many(made)
    browser = made.browser()
    fields = {**browser.form("/records/all/release?state=quarantined"), "reason": "never sent", "typed": "3"}

    assert "Released: 3." in browser.post("/records/all/release", fields).text

    assert [("released", ANN, "never sent")] * 3 == settled(made)
    assert set() == made.handles()


def test_a_record_with_a_warning_or_a_change_stays_as_it_is() -> None:
    made = rig()
    handles = many(made)
    running = claim(made)
    browser = made.browser()
    fields = {**browser.form("/records/all/release"), "reason": "never sent", "typed": "4"}
    browser.change(f"/records/{handles[0]}/settle", verdict="happened", status="201")
    made.events.clear()

    page = browser.post("/records/all/release", fields)

    assert "Released: 2." in page.text
    assert "Left as they are: 2." in page.text
    assert "may still run" in page.text
    assert "has changed since you opened the form" in page.text
    assert made.store.read(key_of(running)) is not None
    assert 2 == len(settled(made))


def test_a_request_with_a_step_in_doubt_is_not_settled_with_others() -> None:
    """Its other effects would never happen, and no page has named them."""
    made = rig()
    in_doubt, _ = in_two_steps(made)
    many(made, 1)
    browser = made.browser()
    fields = {
        **browser.form("/records/all/settle"),
        "verdict": "happened",
        "status": "201",
        "reason": "r",
        "typed": "2",
    }

    page = browser.post("/records/all/settle", fields)

    assert "Settled: 1." in page.text
    assert "Some effects would never happen: send (in doubt), ship (not begun)." in page.text
    assert {in_doubt} == made.handles()


def test_a_list_counts_each_change_of_the_operator() -> None:
    made = rig(console={"changes_per_hour": 2})
    many(made)
    browser = made.browser()
    fields = {**browser.form("/records/all/release"), "reason": "never sent", "typed": "3"}

    page = browser.post("/records/all/release", fields)

    assert "Released: 2." in page.text
    assert "Too many changes" in page.text
    assert 1 == len(made.handles())


@pytest.mark.parametrize(
    "said",
    (
        {"reason": ""},
        {"typed": ""},
        {"verdict": ""},
        {"verdict": "happened", "status": "7"},
        {"chosen": ""},
        {"chosen": "x"},
        {"console_token": "0" * 64},
    ),
)
def test_a_faulty_form_changes_no_list(said: dict[str, str]) -> None:
    made = rig()
    many(made)
    browser = made.browser()
    fields = {**browser.form("/records/all/settle"), "verdict": "never", "reason": "r", "typed": "3"}

    assert browser.post("/records/all/settle", {**fields, **said}).status_code in (400, 403, 409)
    assert [] == settled(made)


def test_a_version_that_the_console_did_not_make_changes_nothing() -> None:
    made = rig()
    handles = many(made)
    browser = made.browser()
    chosen = " ".join(f"{handle}:{'0' * 32}" for handle in handles)
    fields = {**browser.form("/records/all/release"), "chosen": chosen, "reason": "r", "typed": "3"}

    assert "Released: 0." in browser.post("/records/all/release", fields).text
    assert [] == settled(made)


def test_a_list_of_others_is_not_changed() -> None:
    """Neither by their form in another browser, nor by handles in an own one."""
    made = rig()
    theirs = many(made, tenant="globex")
    (mine,) = many(made, 1)
    fields = made.browser().form("/records/all/release?tenant=globex")

    limited = made.browser(LIMITED)
    own = limited.form("/records/all/release")
    assert [mine] == re.findall(r"([a-z2-7]{77}):", own["chosen"])
    planted = {**own, "chosen": fields["chosen"], "reason": "r", "typed": "3"}
    viewer = made.browser(VIEWER)

    assert limited.post("/records/all/release", planted).status_code == 404
    assert viewer.get("/records/all/release").status_code in (403, 409)
    assert "Release these" not in viewer.get("/records").text
    assert "Release these" in limited.get("/records").text
    assert viewer.post("/records/all/release", {**fields, "reason": "r", "typed": "3"}).status_code == 403
    assert {State.QUARANTINED} == {made.store.read(key_of(each)).state for each in theirs}
    assert [] == settled(made)
    assert hidden(viewer.get("/records")) == {}


def test_there_is_no_other_change_of_a_list() -> None:
    made = rig()
    many(made)

    assert 404 == made.browser().get("/records/all/purge").status_code
    assert 409 == made.browser().get("/records/all/settle?state=in+flight").status_code

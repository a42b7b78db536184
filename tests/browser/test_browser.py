"""The browser module in Debian's Chromium, against a real server behind a proxy that cuts replies.

The names of the traps are those of the specification of the client: B20 to B27.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from itsdangerous import TimestampSigner

from flask_idempotency.client.responses import REPLAY_MARKS
from tests.browser.conftest import INSECURE_HOST
from tests.browser.shop import WAIT_SECONDS, CuttingProxy, Shop

pytestmark = pytest.mark.slow

CUTS = 24
RACES = 10
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

BARE = """async () => {
  try {
    const response = await fetch("/payments", { method: "POST", body: "x", headers: { "Idempotency-Key": newKey() } });
    return response.ok && (await response.text()) === "";
  } catch { return false; }
}"""

SEND = """async (name) => {
  const response = await send(name, "/payments", { body: "x" });
  return [response.status, await response.text()];
}"""

NewPage = Callable[..., Any]


@pytest.mark.parametrize("scheme", ("http", "https"))
def test_a_torn_reply_never_counts(
    scheme: str, proxies: dict[str, CuttingProxy], shop: Shop, new_page: NewPage
) -> None:
    """B20. Over http, a bare fetch takes most cuts for an empty success."""
    proxy = proxies[scheme]
    page = new_page(proxy.origin)
    page.evaluate(SEND, "first")
    size = proxy.last_reply_bytes
    positions = [max(1, size * number // CUTS) for number in range(CUTS)]
    taken = 0
    for position in positions:
        proxy.cut_next(position)
        taken += page.evaluate(BARE)
    shop.reset()
    answers = []
    for number, position in enumerate(positions):
        proxy.cut_next(position)
        answers.append(page.evaluate(SEND, f"payment {number}"))

    assert [(201, {"row": number + 1}) for number in range(CUTS)] == [
        (status, json.loads(body)) for status, body in answers
    ]
    assert CUTS == len(set(shop.payments)) == len(shop.payments)
    assert (taken > CUTS // 2) is (scheme == "http")
    assert (taken == 0) is (scheme == "https")


def test_an_edit_is_refused_while_the_attempt_before_has_no_response(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    page = new_page(proxy.origin)
    proxy.cut_next(0)
    once = "(body) => kind(send('invoice 17', '/payments', { body }, { attempts: 1 }))"

    assert "outcome-unknown" == page.evaluate(once, "17 euros")
    (entry,) = page.evaluate("pending()")
    assert "unsettled" == page.evaluate(once, "18 euros")
    assert 1 == len(shop.keys)
    page.reload()
    page.wait_for_function("window.ready")
    assert "unsettled" == page.evaluate(once, "18 euros")
    assert (1, 1) == (len(shop.keys), len(shop.payments))

    page.evaluate("forget('invoice 17')")
    assert 201 == page.evaluate(once, "18 euros")
    assert ("invoice 17", shop.keys[0]) == (entry["name"], entry["key"])
    assert 2 == len(set(shop.keys)) == len(shop.payments)
    assert [] == page.evaluate("pending()")


def test_a_service_that_restarts_costs_no_attempt(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)
    page.evaluate("""() => {
      const real = window.fetch;
      Object.assign(window, { sent: [], fetch: (...given) => (sent.push(given[1].method), real(...given)) });
      Math.random = () => 0.01;
    }""")
    proxy.away = True
    try:
        page.evaluate("() => { window.outcome = kind(send('invoice 17', '/payments', { body: '17 euros' })); }")
        page.wait_for_function("sent.length > 12")
        assert [] == shop.keys
    finally:
        proxy.away = False

    assert 201 == page.evaluate("outcome")
    assert (1, 1) == (len(shop.keys), len(shop.payments))
    assert ["POST", "POST"] == page.evaluate("sent.filter((method) => method !== 'HEAD')")


def test_requests_that_may_have_arrived_are_bounded(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)
    lose = """async () => {
      const real = window.fetch;
      let lost = 0;
      window.fetch = async (url, init) => {
        const response = await real(url, init);
        if (init.method === "POST" && ++lost) throw new TypeError("lost");
        return response;
      };
      return [await kind(send("invoice 17", "/payments", { body: "17 euros" })), lost];
    }"""

    assert ["outcome-unknown", 5] == page.evaluate(lose)
    assert (5, 1) == (len(shop.keys), len(shop.payments))


@pytest.mark.parametrize("size", (8, 9_000_000))
def test_a_corrected_file_of_the_same_name_and_length_is_an_edit(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage, size: int
) -> None:
    """A page may make the same file again, so its content counts. A large file is not read: the time of its change counts."""
    page = new_page(proxy.origin)
    pay = """([size, first, lastModified]) => {
      const body = new FormData(), bytes = new Uint8Array(size).fill(255);
      bytes[size - 2] = first;
      body.append("title", "invoice");
      body.append("upload", new File([bytes], "invoice.csv", { lastModified }));
      return kind(send("invoice 17", "/payments", { body }, { attempts: 1 }));
    }"""
    proxy.cut_next(0)
    assert "outcome-unknown" == page.evaluate(pay, [size, 128, 1])
    large = size > 1_000
    assert "unsettled" == page.evaluate(pay, [size, 129, 2 if large else 1])
    assert 1 == len(shop.keys)
    assert 201 == page.evaluate(pay, [size, 128, 1 if large else 2])
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


def test_a_corrected_file_of_a_plain_form_has_another_key(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(f"{proxy.origin}/form")
    keys = page.evaluate("""() => {
      const form = document.querySelector("form"), input = document.createElement("input");
      Object.assign(input, { type: "file", name: "upload" });
      form.append(input);
      window.addEventListener("submit", (event) => event.preventDefault());
      const keyOf = async (...files) => {
        const chosen = new DataTransfer();
        for (const [text, lastModified] of files) chosen.items.add(new File([text], "a.csv", { lastModified }));
        input.files = chosen.files;
        // Chromium makes an empty file anew, which was changed just now.
        await new Promise((resolve) => setTimeout(resolve, 5));
        form.requestSubmit();
        return form.querySelector("[name=idempotency_key]").value;
      };
      return (async () =>
        [await keyOf(), await keyOf(["17", 1]), await keyOf(["18", 2]), await keyOf(["17", 1]), await keyOf()])();
    }""")

    assert (keys[0], keys[1]) == (keys[4], keys[3])
    assert 3 == len(set(keys))
    assert all(UUID7.fullmatch(key) for key in keys)


def test_a_reload_asks_again_with_the_same_key(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)
    shop.go.clear()
    page.evaluate("void send('invoice 17', '/payments', { body: '17 euros' })")
    assert shop.begun.wait(WAIT_SECONDS)
    page.reload()
    page.wait_for_function("window.ready")
    shop.go.set()

    assert [201, '{"row":1}\n'] == page.evaluate(SEND.replace('"x"', '"17 euros"'), "invoice 17")
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


def test_a_final_response_ends_a_name(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)
    for status in (201, 402, 201):
        assert status == page.evaluate(
            "(status) => kind(send('invoice', `/payments?status=${status}`, { body: '1' }))", status
        )

    assert 3 == len(set(shop.payments))
    assert all(UUID7.fullmatch(key) for key in shop.payments)


def test_a_paused_response_never_ends_a_name(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """Whatever its status and body: steps of it are done, and only the same key goes on behind them."""
    page = new_page(proxy.origin)
    responses = [str(status) for status in (200, 401, 403, 408, 409, 422, 425, 429, 501, 503)]
    # What the view passed on from another service of ours.
    responses += [
        "400&code=missing-key",
        "409&code=response-not-kept",
        "422&code=key-reused",
        "500&code=outcome-unknown",
    ]
    for response in responses:
        for _ in range(2):
            sent = "(name) => kind(send(name, `/paused?status=${name}`, { body: '1' }, { attempts: 2 }))"
            assert int(response[:3]) == page.evaluate(sent, response)

    assert [4] * len(responses) == [shop.payments.count(key) for key in dict.fromkeys(shop.payments)]
    assert set(responses) == {entry["name"] for entry in page.evaluate("pending()")}


def test_a_replayed_refusal_ends_a_name_whatever_its_status_and_body(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    """Some of our profiles keep such statuses, and the body may be what the view passed on from another service."""
    page = new_page(proxy.origin)
    statuses = [401, 402, 403, 407, 408, 409, 419, 421, 422, 425, 429]
    sent = page.evaluate(
        """async ([statuses, marks]) => {
          const own = window.fetch, sent = [];
          for (const [number, status] of statuses.entries()) {
            const keys = [], body = '{"code": "in-flight", "type": "https://docs.example/in-flight"}';
            const headers = { "Content-Type": "application/json", "Retry-After": "0", [marks[number % marks.length]]: "true" };
            window.fetch = async (url, init) => {
              if (init.method === "HEAD") return own(url, init);
              keys.push(init.headers.get("Idempotency-Key"));
              if (keys.length === 1) throw new TypeError("lost");
              return new Response(body, { status, headers });
            };
            const pay = () => kind(send(`invoice ${status}`, "/payments", { body: "17" }));
            const told = await pay(), left = pending().length;
            await pay();
            sent.push([told, left, keys.length, new Set(keys).size]);
          }
          window.fetch = own;
          return sent;
        }""",
        [statuses, list(REPLAY_MARKS)],
    )

    assert sent == [[status, 0, 3, 2] for status in statuses]


def test_the_key_is_stored_before_the_first_byte_and_before_a_second_call(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    """B25: both calls start in one task, as two clicks would. B26: a key drawn after the click."""
    page = new_page(proxy.origin)
    stored = page.evaluate("""() => {
      const own = window.fetch;
      const seen = [];
      window.fetch = (url, init) => {
        seen.push(JSON.parse(sessionStorage["idempotency:invoice"] ?? "{}").key === init.headers.get("Idempotency-Key"));
        return own(url, init);
      };
      const first = send("invoice", "/payments", { body: "1" });
      const second = send("invoice", "/payments", { body: "1" });
      return Promise.all([first, second]).then((both) => [seen, ...both.map((one) => one.status)]);
    }""")

    assert 201 == stored[1] == stored[2]
    assert stored[0][0] is True
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


def test_an_insecure_page_sends_once(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """B24: it has no randomUUID, no locks and no crypto.subtle."""
    page = new_page(f"http://{INSECURE_HOST}:{proxy.port}/")
    assert [False, False, False, False] == page.evaluate(
        "[isSecureContext, !!crypto.randomUUID, !!navigator.locks, !!crypto.subtle]"
    )
    proxy.cut_next(30)
    statuses = page.evaluate("""() => Promise.all(
      [1, 2].map(() => send("invoice", "/payments", { body: "1" }).then((response) => response.status)))""")

    assert [201, 201] == statuses
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))
    assert UUID7.fullmatch(shop.payments[0])


def test_a_page_without_storage_remembers_by_itself(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)
    page.evaluate("""() => {
      for (const name of ["sessionStorage", "localStorage"])
        Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
    }""")
    proxy.cut_next(0)
    once = "() => kind(send('invoice', '/payments', { body: '1' }, { attempts: 1 }))"

    assert "outcome-unknown" == page.evaluate(once)
    assert 1 == page.evaluate("pending().length")
    assert 201 == page.evaluate(once)
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


def test_tabs_share_a_name(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    first = new_page(proxy.origin)
    second = first.context.new_page()
    second.goto(proxy.origin)
    second.wait_for_function("window.ready")
    pay = "(body) => kind(send('invoice 17', '/payments', { body }, { shared: true }))"
    shop.go.clear()
    first.evaluate(f"void (window.paid = ({pay})('17'))")
    assert shop.begun.wait(WAIT_SECONDS)
    second.evaluate(f"void (window.paid = ({pay})('17'))")
    shop.go.set()

    assert [201, 201] == [page.evaluate("window.paid") for page in (first, second)]
    assert 201 == second.evaluate(pay, "17")
    assert "done" == second.evaluate(pay, "18")
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))
    second.evaluate("forget('invoice 17', { shared: true })")
    assert 201 == first.evaluate(pay, "18")
    assert 2 == len(set(shop.payments))


def test_two_tabs_that_begin_at_one_instant_share_a_key(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """Each tab has a process of its own, which sees the storage of the other a little later."""
    first = new_page(proxy.origin)
    second = first.context.new_page()
    second.goto(proxy.origin)
    second.wait_for_function("window.ready")
    at_once = """([name, start]) => {
      const pay = () => kind(send(name, "/payments", { body: "17" }, { shared: true }));
      const begin = (resolve) => (Date.now() < start ? setTimeout(begin, 0, resolve) : resolve(pay()));
      window.paid = new Promise(begin);
    }"""
    for number in range(RACES):
        start = time.time() * 1000 + 100
        for page in (first, second):
            page.evaluate(f"(given) => void ({at_once})(given)", [f"invoice {number}", start])
        assert [201, 201] == [page.evaluate("window.paid") for page in (first, second)]

    assert RACES == len(shop.payments) == len(set(shop.keys))


def test_tabs_share_a_name_before_they_see_the_storage_of_each_other(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    """Chromium tells a tab what another wrote to localStorage after it may have given it the lock."""
    first = new_page(proxy.origin)
    second = first.context.new_page()
    second.goto(proxy.origin)
    second.wait_for_function("window.ready")
    for page in (first, second):
        page.evaluate("() => { const own = {}; Object.defineProperty(window, 'localStorage', { get: () => own }); }")
    pay = "(body) => kind(send('invoice 17', '/payments', { body }, { shared: true }))"

    assert [201, 201] == [page.evaluate(pay, "17") for page in (first, second)]
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))
    second.evaluate("forget('invoice 17')")
    assert 201 == second.evaluate(pay, "18")
    assert 201 == first.evaluate(pay, "18")
    assert (2, 2) == (len(shop.payments), len(set(shop.keys)))


def test_options_may_stand_beside_those_of_fetch(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """They have other names, and in the wrong place they must not be ignored."""
    first = new_page(proxy.origin)
    pay = "(body) => kind(send('invoice 17', '/payments', { body, shared: true }))"
    second = first.context.new_page()
    second.goto(proxy.origin)
    second.wait_for_function("window.ready")

    assert [201, 201, "done"] == [first.evaluate(pay, "17"), second.evaluate(pay, "17"), second.evaluate(pay, "18")]
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


@pytest.mark.parametrize("shared", (False, True))
def test_a_person_forgets_a_name_wherever_it_is_kept(
    shared: bool, proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    page = new_page(proxy.origin)
    proxy.cut_next(0)
    options = json.dumps({"shared": shared, "attempts": 1})
    pay = f"(body) => kind(send('invoice 17', '/payments', {{ body }}, {options}))"

    assert ["outcome-unknown", "unsettled"] == [page.evaluate(pay, body) for body in ("17", "18")]
    page.evaluate("forget('invoice 17')")
    assert [] == page.evaluate("pending()")
    assert 201 == page.evaluate(pay, "18")


def test_a_name_is_needed(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(proxy.origin)

    assert "TypeError: no name" == page.evaluate("kind(send('', '/payments', { body: '1' }))")
    assert [] == shop.keys


def test_a_second_click_keeps_its_key_though_the_first_was_refused(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    """The refusal ends the name. The second click sends the key all the same, and its reply is lost."""
    page = new_page(proxy.origin)
    statuses = page.evaluate("""async () => {
      const own = window.fetch;
      let number = 0;
      window.fetch = async (url, init) => {
        if (++number === 1) return new Response("", { status: 401 });
        const response = await own(url, init);
        if (number === 2) throw new TypeError("lost");
        return response;
      };
      const pay = () => kind(send("invoice 17", "/payments", { body: "17" }, { attempts: 1 }));
      return [...(await Promise.all([pay(), pay()])), await pay()];
    }""")

    assert [401, "outcome-unknown", 201] == statuses
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


def test_a_redirect_that_is_not_followed_settles_nothing(
    proxies: dict[str, CuttingProxy], shop: Shop, new_page: NewPage
) -> None:
    """It may lead to a sign-in. Scripts see its status as 0. Over http it counts as a torn reply."""
    proxy = proxies["https"]
    page = new_page(proxy.origin)
    pay = """([url, redirect]) =>
      kind(send("invoice 17", url, { body: "17", redirect }, { attempts: 1 }))"""
    proxy.cut_next(0)

    assert "outcome-unknown" == page.evaluate(pay, ["/payments", "follow"])
    assert "outcome-unknown" == page.evaluate(pay, ["/away", "manual"])
    assert 1 == page.evaluate("pending().length")
    assert 201 == page.evaluate(pay, ["/payments", "follow"])
    assert (1, 1) == (len(shop.payments), len(set(shop.keys)))


# Plain forms.


def order(page: Any, item: str | None = None) -> None:
    """Fill the form, send it and wait for the page after the redirect."""
    if item is not None:
        page.fill("[name=item]", item)
    page.click("button")
    page.wait_for_selector("#done")


def back(page: Any) -> None:
    """B27: `go_back()` waits for a load event, which a page of the back/forward cache does not have."""
    page.evaluate("void setTimeout(() => history.back())")
    page.wait_for_function("location.pathname === '/form' && window.ready")


def test_a_double_click_orders_once(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(f"{proxy.origin}/form")
    shop.go.clear()
    # Playwright waits for the page that the first click opens, so the page clicks by itself.
    page.evaluate("""() => {
      const click = () => document.querySelector("button").click();
      setTimeout(click);
      fetch("/begun").then(click);
    }""")
    assert shop.second.wait(WAIT_SECONDS)
    shop.go.set()
    page.wait_for_selector("#done")

    assert ["tea"] == shop.orders
    assert (2, 1) == (len(shop.keys), len(set(shop.keys)))


@pytest.mark.parametrize("how", ("", "?fetch"), ids=("plain", "by fetch"))
def test_a_button_may_name_another_address(how: str, proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """B22: `submitter.formAction` is the address of the page where the attribute is missing."""
    page = new_page(f"{proxy.origin}/form{how}")
    order(page)
    page.goto(f"{proxy.origin}/form{how}")
    page.wait_for_function("window.ready")
    page.click("#other")
    page.wait_for_selector("#done")

    assert [None, "other"] == shop.buttons
    assert 2 == len(set(shop.keys))


@pytest.mark.parametrize("cached", (True, False), ids=("from the back/forward cache", "loaded again"))
def test_after_back_the_same_content_orders_once_and_an_edit_orders_again(
    cached: bool, proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    page = new_page(f"{proxy.origin}/form")
    if not cached:
        # Chromium does not keep a page with such a listener.
        page.evaluate("addEventListener('unload', () => {})")
    order(page)
    back(page)
    assert cached is page.evaluate("window.persisted")
    order(page)
    assert (["tea"], 1) == (shop.orders, len(set(shop.keys)))
    back(page)
    order(page, "coffee")
    assert (["tea", "coffee"], 2) == (shop.orders, len(set(shop.keys)))
    back(page)
    order(page, "tea")
    assert (["tea", "coffee"], 2) == (shop.orders, len(set(shop.keys)))


def test_a_reload_with_a_new_token_orders_once(
    proxy: CuttingProxy, shop: Shop, new_page: NewPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B21: CSRFProtect draws another token, and the service ignores it. The response is the redirect, and no 422."""
    # A token has the time in whole seconds.
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(TimestampSigner, "get_timestamp", lambda _: next(seconds))
    page = new_page(f"{proxy.origin}/form")
    token = "document.querySelector('[name=csrf_token]').value"
    first = page.evaluate(token)
    order(page)
    back(page)
    page.reload()
    page.wait_for_function("window.ready")
    second = page.evaluate(token)
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        order(page)

    assert first != second
    assert (303, "true") == (answered.value.status, answered.value.headers["idempotency-replayed"])
    assert (["tea"], 1) == (shop.orders, len(set(shop.keys)))


def test_a_form_that_is_opened_anew_orders_again(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(f"{proxy.origin}/form")
    order(page)
    page.click("a")
    page.wait_for_function("window.ready")
    order(page)

    assert ["tea", "tea"] == shop.orders
    assert 2 == len(set(shop.keys))


@pytest.mark.parametrize("how", ("", "&fetch"), ids=("plain", "by fetch"))
def test_a_form_from_a_cache_does_not_send_the_key_of_the_first(
    how: str, proxy: CuttingProxy, shop: Shop, new_page: NewPage
) -> None:
    """B26. The cached page has the key that the server rendered for the first order."""
    address = f"{proxy.origin}/form?cached{how}"
    # The session's cookie comes with this page. Without it the cache would keep another variant.
    page = new_page(f"{proxy.origin}/form")
    page.goto(address)
    page.wait_for_function("window.ready")
    rendered = "document.querySelector('[name=idempotency_key]').defaultValue"
    first = page.evaluate(rendered)
    order(page)
    page.goto(address)
    page.wait_for_function("window.ready")

    assert first == page.evaluate(rendered)
    order(page, "coffee")
    assert ["tea", "coffee"] == shop.orders
    assert 2 == len(set(shop.keys))


def test_without_javascript_the_rendered_key_orders_once(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(f"{proxy.origin}/form", java_script_enabled=False)
    rendered = page.locator("[name=idempotency_key]").get_attribute("value")
    page.dblclick("button")
    page.wait_for_selector("#done")

    assert ["tea"] == shop.orders
    assert {rendered} == set(shop.keys)


# Forms that fetch sends.


def test_a_form_is_sent_by_fetch_and_follows_the_redirect(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """B22: inputs are named action, id and method. B23: the response keeps `redirected` and `url`."""
    page = new_page(f"{proxy.origin}/form?fetch")
    proxy.cut_next(30)
    order(page)

    assert "/orders/1" == page.evaluate("location.pathname")
    assert (["tea"], 1) == (shop.orders, len(set(shop.keys)))
    assert 2 == len(shop.keys)
    back(page)
    order(page)
    assert (["tea"], 1) == (shop.orders, len(set(shop.keys)))
    back(page)
    order(page, "coffee")
    assert (["tea", "coffee"], 2) == (shop.orders, len(set(shop.keys)))


def test_a_form_tells_its_page_how_it_ended(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    page = new_page(f"{proxy.origin}/form?fetch")
    page.evaluate("""() => document.addEventListener("idempotency", (event) => {
      event.preventDefault();
      window.told = [event.target.tagName, event.detail.response.redirected, new URL(event.detail.response.url).pathname];
    })""")
    page.click("button")
    page.wait_for_function("window.told")

    assert ["FORM", True, "/orders/1"] == page.evaluate("window.told")
    assert "/form" == page.evaluate("location.pathname")


CANCEL = """(path) => cancel("invoice 17", "/status", { path })
  .then((state) => state ?? "nothing", (error) => error.kind ?? String(error))"""


def test_a_voided_request_never_runs(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """The person gives up after a lost request, and is sure that nothing happens; another click pays under another key."""
    page = new_page(proxy.origin)
    once = "() => kind(send('invoice 17', '/payments', { body: 'x' }, { attempts: 1 }))"
    assert "nothing" == page.evaluate(CANCEL, "/payments")
    page.route("**/payments", lambda route: route.abort())
    assert "outcome-unknown" == page.evaluate(once)
    page.unroute("**/payments")
    (entry,) = page.evaluate("pending()")

    assert "voided" == page.evaluate(CANCEL, "/payments")
    assert [] == page.evaluate("pending()")
    late = shop.app.test_client().post("/payments", data="x", headers={"Idempotency-Key": entry["key"]})
    assert (409, []) == (late.status_code, shop.payments)
    assert 201 == page.evaluate(once)
    assert [False] == [key == entry["key"] for key in shop.payments]


def test_what_has_run_is_not_voided(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """Its name stays, and the same request gets the response."""
    page = new_page(proxy.origin)
    proxy.cut_next(0)
    once = "() => kind(send('invoice 17', '/payments', { body: 'x' }, { attempts: 1 }))"
    assert "outcome-unknown" == page.evaluate(once)

    assert "unknown-operation" == page.evaluate(CANCEL, "/nowhere")
    assert "done" == page.evaluate(CANCEL, "/payments")
    assert (201, 1) == (page.evaluate(once), len(shop.payments))


def test_a_request_under_a_voided_key_is_over(proxy: CuttingProxy, shop: Shop, new_page: NewPage) -> None:
    """It was voided elsewhere. The next call has another key."""
    page = new_page(proxy.origin)
    page.route("**/payments", lambda route: route.abort())
    once = "() => kind(send('invoice 17', '/payments', { body: 'x' }, { attempts: 1 }))"
    assert "outcome-unknown" == page.evaluate(once)
    page.unroute("**/payments")
    (entry,) = page.evaluate("pending()")
    asked = {"method": "POST", "path": "/payments"}
    shop.app.test_client().delete("/status", query_string=asked, headers={"Idempotency-Key": entry["key"]})

    assert ["voided", 201] == [page.evaluate(once) for _ in range(2)]

"""The console in Debian's Chromium: every page by clicks, with keys alone, without scripts, small, large, light and dark.

One process runs these tests, because they share one browser. Each opens pages as an operator would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from flask_idempotency.engine.offered import capabilities_of
from tests.browser import pictures
from tests.browser.accessibility import cut, violations
from tests.browser.chromium import Browser
from tests.browser.console_pages import (
    PAGES,
    REASON,
    RECORD,
    confirm,
    fill_in,
    open_first,
    send,
    title,
    walk,
)
from tests.browser.console_site import CONSOLE, HOSTILE, Site, attack, fill, served, with_messages
from tests.browser.shop import serving

pytestmark = pytest.mark.slow

SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"width": 1200, "height": 900},
    "phone": {"width": 390, "height": 844, "scale": 3.0, "mobile": True},
    # WCAG 2.2, 1.4.10: a window of 1280 × 1024 at 400 %.
    "400 %": {"width": 320, "height": 256, "scale": 4.0},
}
IS_VISIBLE = """
const style = getComputedStyle(document.activeElement);
return (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== "none";
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An hour of a shop. Tests that take it change nothing."""
    with served(Site(tmp_path_factory.mktemp("shop"))) as site:
        fill(site)
        yield site


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A shop whose clients, tenants, operators and endpoints have hostile names."""
    with served(
        Site(tmp_path_factory.mktemp("attacked"), name=HOSTILE["script"], endpoints=tuple(HOSTILE.values()))
    ) as site:
        attack(site)
        yield site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A shop for one test, with a payment whose outcome is unknown."""
    with served(Site(tmp_path)) as site:
        site.post("/payments", "order-1", body="lost")
        yield site


@pytest.fixture
def dana(browser: Browser, shop: Site) -> Browser:
    """The browser of an operator of the shop."""
    shop.sign_in(browser)
    return browser


def test_every_page_is_for_everyone(dana: Browser, shop: Site) -> None:
    """Each page opens by clicks from the overview, complains of nothing in the browser's console, and loads nothing elsewhere.

    axe-core finds nothing on a desktop in light colours, and nothing on a phone in dark ones: the style sheet changes colours
    with the scheme alone, and the layout with the size alone. No text is cut there, nor at 400 %.
    """
    faults: dict[str, list[str]] = {}
    titles = {}
    for name in walk(dana, shop):
        titles[name] = title(dana)
        faults[name] = complaints(dana, shop)
        for size, scheme in (("400 %", ""), ("phone", "dark"), ("desktop", "light")):
            dana.resize(**SIZES[size])
            faults[name] += [f"{size}: {each}" for each in cut(dana)]
            if scheme:
                dana.scheme(scheme)
                faults[name] += [f"{size}, {scheme}: {each}" for each in violations(dana)]

    assert tuple(titles) == PAGES
    assert all(titles.values())
    assert {name: each for name, each in faults.items() if each} == {}, "\n".join(chain(*faults.values()))


def test_the_pages_of_messages_are_for_everyone(browser: Browser, shop: Site, tmp_path: Path) -> None:
    """As the others: in each size and scheme axe-core finds nothing, and no text is cut."""
    shop.sign_in(browser)
    faults: dict[str, list[str]] = {}
    with serving(with_messages(tmp_path)) as port:
        for page in ("messages", "outbox", "outbox/retry?topic=mail.receipts", "outbox/discard?seq=1"):
            browser.driver.get(f"http://127.0.0.1:{port}{CONSOLE}/{page}")
            faults[page] = browser.messages()
            for size, scheme in (("400 %", ""), ("phone", "dark"), ("desktop", "light")):
                browser.resize(**SIZES[size])
                faults[page] += [f"{size}: {each}" for each in cut(browser)]
                if scheme:
                    browser.scheme(scheme)
                    faults[page] += [f"{size}, {scheme}: {each}" for each in violations(browser)]

    assert {page: each for page, each in faults.items() if each} == {}, "\n".join(chain(*faults.values()))


def complaints(browser: Browser, site: Site) -> list[str]:
    """Return what the browser has to say about the page that is open, and which other hosts the page leads to."""
    # Of a form with a fault and of an unknown page Chromium notes the status.
    refused = "the server responded with a status of 4"
    found = [message for message in browser.messages() if f"{CONSOLE}/" not in message or refused not in message]
    loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    links = browser.run("return [...document.links].map((each) => each.href)")
    return found + [each for each in loaded + links if not each.startswith(f"{site.origin}/")]


def test_an_operator_settles_a_payment(browser: Browser, site: Site) -> None:
    """The consequence stands beside the button, the client's retry gets the response, and the trail names the operator."""
    site.sign_in(browser)
    record = open_first(browser, site, "quarantined")
    browser.follow("main a[href$='/settle']")
    fill_in(browser, "happened")
    send(browser)
    assert "201" in browser.text("main")
    assert REASON in browser.text("main")
    assert site.post("/payments", "order-1", body="lost").status_code == 409
    confirm(browser)

    retry = site.post("/payments", "order-1", body="lost")
    assert (retry.status_code, retry.headers["Idempotency-Replayed"]) == (201, "true")
    browser.driver.get(record)
    assert "dana" in browser.text("main")
    assert REASON in browser.text("main")
    assert browser.messages() == []


def test_two_operators_cannot_both_settle(browser: Browser, site: Site) -> None:
    """Each has the confirmation on the screen. The second one to press the button changes nothing, and reads why."""
    windows: list[str] = []
    for name, verdict in (("dana", "happened"), ("erin", "never")):
        if windows:
            browser.new_window()
        windows.append(browser.driver.current_window_handle)
        site.sign_in(browser, name)
        open_first(browser, site, "quarantined")
        browser.follow("main a[href$='/settle']")
        fill_in(browser, verdict)
        send(browser)
    for window in windows:
        browser.driver.switch_to.window(window)
        confirm(browser)

    assert "has changed" in title(browser)
    assert "dana" in browser.text("main")
    assert site.post("/payments", "order-1", body="lost").status_code == 201


def test_a_form_that_the_back_button_brings_back_does_nothing(browser: Browser, site: Site) -> None:
    site.sign_in(browser)
    open_first(browser, site, "quarantined")
    browser.follow("main a[href$='/settle']")
    fill_in(browser, "happened")
    send(browser)
    confirm(browser)
    settled = site.post("/payments", "order-1", body="lost").data

    shown = []
    for _ in range(2):  # the confirmation, then the form
        browser.leave_by(browser.driver.back)
        if browser.find_all("main form[method=post] button"):
            if browser.find_all("input[name=verdict][type=radio]"):
                fill_in(browser, "never")
            confirm(browser)
        shown.append(title(browser))
        browser.driver.back()

    assert site.post("/payments", "order-1", body="lost").data == settled
    trail = capabilities_of(site.store).audit
    assert trail is not None
    assert trail.count("dana", seconds=3600) == 1


def test_everything_works_without_javascript(browser: Browser, shop: Site, site: Site) -> None:
    browser.javascript(False)
    shop.sign_in(browser)
    assert tuple(walk(browser, shop)) == PAGES

    open_first(browser, site, "quarantined")
    browser.follow("main a[href$='/settle']")
    fill_in(browser, "never")
    send(browser)
    confirm(browser)
    assert site.post("/payments", "order-1").status_code == 201


def test_pages_of_a_long_list_are_links(browser: Browser, site: Site) -> None:
    browser.javascript(False)
    site.sign_in(browser)
    for number in range(120):
        site.claim(f"waits-{number}", lease=3600)
    site.open(browser, "/records")
    seen = set()
    pages = 0
    while True:
        pages += 1
        seen |= {str(each.get_attribute("href")) for each in browser.find_all(RECORD)}
        if not browser.find_all("main a[rel=next]"):
            break
        browser.follow("main a[rel=next]")

    assert len(seen) == 121
    assert 2 <= pages <= 6


def test_numbers_refresh_by_themselves_while_the_page_is_seen(browser: Browser, site: Site) -> None:
    """No page is loaded again for it. A page that cannot be seen asks for nothing, and asks at once when it can."""
    browser.new_window()
    site.sign_in(browser)
    site.open(browser)
    overview = f"{CONSOLE}/"
    states = "[data-live=states]"
    assert "Quarantined\n1\n" in browser.text(states)
    browser.run("window.same = true")

    site.post("/payments", "order-2", body="lost")
    asked = site.asked.count(overview)
    browser.pass_time(35)
    browser.until(lambda: "Quarantined\n2\n" in browser.text(states))
    assert 1 <= site.asked.count(overview) - asked <= 4

    browser.driver.minimize_window()
    assert browser.run("return document.hidden")
    site.post("/payments", "order-3", body="lost")
    asked = site.asked.count(overview)
    browser.pass_time(120)
    assert site.asked.count(overview) == asked
    browser.driver.set_window_rect(0, 0, 1200, 900)
    browser.until(lambda: "Quarantined\n3\n" in browser.text(states))

    assert browser.run("return window.same")
    assert browser.messages() == []


def test_a_refresh_that_fails_says_so_and_changes_nothing(browser: Browser, site: Site) -> None:
    browser.new_window()
    site.sign_in(browser)
    site.open(browser)
    # The script looks at Health first, and refreshes the page with what it found.
    browser.until(lambda: "Health was looked at" in browser.text("main"))
    before = browser.text("main")

    site.down = True
    browser.pass_time(35)

    browser.until(lambda: "could not be refreshed" in browser.text("[data-status]"))
    assert browser.text("main") == before


def test_keys_alone_settle_a_payment(browser: Browser, site: Site) -> None:
    """Tab reaches each link and field in the order of the page, shows where it is, and Enter and Space do the rest."""
    site.sign_in(browser)
    site.open(browser)
    press(browser, Keys.TAB)
    assert focused(browser) == "Skip to content"
    assert browser.run("return document.activeElement.getBoundingClientRect().top >= 0")
    press(browser, Keys.ENTER)
    browser.until(lambda: browser.run("return document.activeElement.id === 'main'"))
    site.open(browser)

    enter(browser, "a", "Records")
    enter(browser, RECORD)
    enter(browser, "main a[href$='/settle']")
    reach(browser, "input[name=verdict]")
    press(browser, Keys.SPACE)
    reach(browser, "input[name=status]")
    press(browser, "202")
    reach(browser, "[name=reason]")
    press(browser, REASON)
    for _ in range(2):
        enter(browser, "main form[method=post] button")

    assert site.post("/payments", "order-1", body="lost").status_code == 202
    assert browser.messages() == []


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def focused(browser: Browser) -> str:
    words: str = browser.run("return document.activeElement.textContent.trim()")
    return words


def reach(browser: Browser, selector: str, words: str | None = None) -> None:
    """Press Tab until an element that matches has the focus. Each on the way shows it."""
    for _ in range(60):
        press(browser, Keys.TAB)
        assert browser.run(IS_VISIBLE), browser.run("return document.activeElement.outerHTML")
        here = browser.run("return document.activeElement.matches(arguments[0])", selector)
        if here and words in (None, focused(browser)):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def enter(browser: Browser, selector: str, words: str | None = None) -> None:
    reach(browser, selector, words)
    browser.leave_by(lambda: press(browser, Keys.ENTER))


def test_hostile_names_are_text(browser: Browser, attacked: Site) -> None:
    """On each page that links lead to: no script of a name runs, no element comes from one, and the policy was not needed."""
    attacked.sign_in(browser, '"><script>alert(4)</script>')
    waiting, seen = [f"{attacked.origin}{CONSOLE}/"], set[str]()
    texts = []
    while waiting:
        address = waiting.pop()
        seen.add(address)
        browser.driver.get(address)
        faults = browser.run(INJECTED)
        assert faults == [], address
        assert browser.messages() == [], address
        assert cut(browser) == [], address
        texts.append(browser.run("return document.documentElement.textContent"))
        found = set(browser.run("return [...document.links].map((link) => link.href)"))
        # One form for a release shows what the others show.
        found = {
            each for each in found if not each.endswith("/release") or not any("/release" in page for page in seen)
        }
        waiting += sorted({each for each in found if each.startswith(attacked.origin)} - seen - set(waiting))

    text = "\n".join(texts)
    assert len(seen) > 5 * len(HOSTILE)
    assert "<script>window.hostile = 1; alert(1)</script>" in text
    assert "{{ 7 * 7 }}" in text
    assert "\x1b" not in text
    assert "w" * 4001 not in text


INJECTED = """
const faults = [];
const count = (selector, most) => {
  const found = document.querySelectorAll(selector).length;
  if (found > most) faults.push(`${found} × ${selector}`);
};
if (window.hostile) faults.push("a script of a name ran");
count("script", 1);
count("link[rel=stylesheet]", 1);
count("style, img, iframe, object, embed, base, form form, [onerror], [onload], [onclick], [style]", 0);
count("svg[onload], title title, body body", 0);
for (const link of document.links) if (!/^https?:$/.test(link.protocol)) faults.push(link.outerHTML);
// A name with a sign that turns the text around it must stand apart from that text.
const turning = /[\\u202a-\\u202e\\u2066-\\u2069\\u200e\\u200f\\u061c]/;
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && turning.test(node.data));
  if (own && !element.closest("bdi, option, title, textarea")) faults.push(element.outerHTML.slice(0, 200));
}
return faults;
"""


@pytest.mark.parametrize("page", pictures.PAGES)
def test_pictures_for_the_documentation(dana: Browser, shop: Site, page: str) -> None:
    """`WRITE_PICTURES=1` writes them, smaller. That takes some seconds for each."""
    dana.resize(pictures.WIDTH, 800)
    if page == "overview":
        shop.open(dana)
    else:
        open_first(dana, shop, "quarantined")
    if page == "settle":
        dana.follow("main a[href$='/settle']")
        fill_in(dana, "happened")
        dana.run("document.activeElement.blur(); scrollTo(0, 0)")
    for scheme in pictures.SCHEMES:
        dana.scheme(scheme)

        picture = pictures.take(dana)

        width, height, *_ = pictures.header(picture)
        assert (width, height in pictures.HEIGHTS) == (pictures.WIDTH, True)
        if os.environ.get(pictures.WRITE):
            pictures.DRAWN.mkdir(exist_ok=True)
            (pictures.DRAWN / f"{page}-{scheme}.png").write_bytes(pictures.smaller(picture))

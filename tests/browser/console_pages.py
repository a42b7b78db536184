"""The ways through the console that tests take, by clicks and keys, as an operator does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.browser.chromium import Browser
from tests.browser.console_site import CONSOLE, Site

RECORD: Final = f"main tbody a[href^='{CONSOLE}/records/']"
RESPONSE: Final = '{"status": "paid"}'
REASON: Final = "Ticket 4711: the bank has the payment."


def link(browser: Browser, words: str) -> WebElement:
    """Return the link with these words."""
    return browser.driver.find_element(By.LINK_TEXT, words)


def title(browser: Browser) -> str:
    return browser.text("h1")


def open_first(browser: Browser, site: Site, state: str) -> str:
    """Go by clicks from the overview to the first record in this state. Return its address."""
    site.open(browser)
    browser.leave_by(link(browser, "Records").click)
    choose(browser, "state", state)
    browser.follow("main form[method=get] button")
    browser.follow(RECORD)
    return browser.driver.current_url


def choose(browser: Browser, name: str, value: str) -> None:
    """Choose this value of a field, whether it is a list or buttons."""
    browser.find(f"select[name={name}] option[value='{value}'], input[name={name}][value='{value}']").click()


def fill_in(browser: Browser, verdict: str, *, status: str = "201") -> None:
    """Fill in the form that settles a record. `happened` gives retries `RESPONSE` with this status."""
    choose(browser, "verdict", verdict)
    given = {"status": status, "content_type": "application/json", "body": RESPONSE} if verdict == "happened" else {}
    for name, value in {**given, "reason": REASON}.items():
        field = browser.find(f"[name={name}]")
        field.clear()
        field.send_keys(value)


def send(browser: Browser) -> None:
    """Send the form of the page that changes something."""
    browser.follow("main form[method=post] button")


def confirm(browser: Browser) -> None:
    """Read what follows, tick that it was read if the page asks for it, and press the button."""
    for box in browser.find_all("input[name=force]"):
        box.click()
    send(browser)


def walk(browser: Browser, site: Site) -> Iterator[str]:
    """Go through every page by clicks from the overview, and yield the name of each when it is open."""
    site.open(browser)
    yield "overview"
    for words in ("Tenants", "Endpoints", "Health", "Records"):
        browser.leave_by(link(browser, words).click)
        yield words.lower()
    browser.follow("main a[href$='/records/find']")
    yield "find a key"
    browser.leave_by(link(browser, "Records").click)
    browser.follow("main a[href*='/records/all/settle']")
    yield "settle a list"
    record = open_first(browser, site, "quarantined")
    yield "record"
    browser.follow("main a[href*='/steps/']")
    yield "settle a step"
    browser.driver.get(record)
    browser.follow("main .actions a[href$='/settle']")
    yield "settle"
    fill_in(browser, "happened", status="99")
    send(browser)
    yield "settle, with a fault"
    fill_in(browser, "happened")
    send(browser)
    yield "settle, before it is done"
    browser.driver.get(record)
    browser.follow("main a[href$='/release']")
    yield "release"
    browser.find("[name=reason]").send_keys(REASON)
    send(browser)
    yield "release, before it is done"
    browser.leave_by(link(browser, "Tenants").click)
    browser.find("input[name=tenant]").send_keys("acme")
    browser.follow("main form[method=get] button")
    yield "one tenant"
    browser.follow("main a[href*='/tenants/purge']")
    yield "purge"
    site.open(browser, "/nowhere")
    yield "no such page"


PAGES: Final = (
    "overview",
    "tenants",
    "endpoints",
    "health",
    "records",
    "find a key",
    "settle a list",
    "record",
    "settle a step",
    "settle",
    "settle, with a fault",
    "settle, before it is done",
    "release",
    "release, before it is done",
    "one tenant",
    "purge",
    "no such page",
)

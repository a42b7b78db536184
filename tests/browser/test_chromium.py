"""The browser of the tests: it is this machine's, a test without one is no green test, and no test sees an earlier one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from flask import Flask, Response, request
from selenium.webdriver.common.selenium_manager import SeleniumManager

from tests.browser.chromium import Browser, chromedriver_program, chromium_program, open_browser
from tests.browser.shop import serving


@pytest.mark.parametrize("find", (chromium_program, chromedriver_program))
@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail.Exception), (None, pytest.skip.Exception)])
def test_a_missing_program_skips_here_and_fails_in_ci(
    find: Callable[[], str], ci: str | None, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    for name in ("CI", "REQUIRE_SERVICES"):
        monkeypatch.delenv(name, raising=False)
    if ci is not None:
        monkeypatch.setenv("REQUIRE_SERVICES", ci)

    with pytest.raises(outcome, match="apt-get install chromium"):
        find()


@pytest.mark.slow
def test_selenium_looks_for_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own helper would download a driver."""

    def manage(*_: object) -> dict[str, str]:
        raise AssertionError("Selenium Manager was asked")

    monkeypatch.setattr(SeleniumManager, "binary_paths", manage)
    environment = dict(os.environ)

    with open_browser(tmp_path / "profile") as browser:
        assert browser.driver.capabilities["chrome"]["userDataDir"] == str(tmp_path / "profile")

    assert environment == dict(os.environ)


@pytest.mark.slow
def test_a_reset_leaves_nothing_of_the_test_before(browser: Browser) -> None:
    app = Flask(__name__)

    @app.get("/")
    def page() -> Response:
        response = Response(f"{request.cookies.get('seen', 'new')}<script>document.title = 'ran'</script>")
        response.headers["Set-Cookie"] = "seen=again; HttpOnly"
        return response

    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/"
        browser.driver.get(url)
        browser.driver.get(url)
        assert browser.text() == "again"
        browser.javascript(False)
        browser.scheme("dark")
        browser.resize(320, 256, scale=4)
        browser.new_window()
        browser.driver.get("data:text/html," + quote("<script>throw Error('a fault')</script>"))
        browser.reset()

        assert browser.messages() == []
        assert len(browser.driver.window_handles) == 1
        browser.driver.get(url)
        assert browser.text() == "new"
        assert browser.driver.title == "ran"
        assert (
            browser.run("return [innerWidth === 320, matchMedia('(prefers-color-scheme: dark)').matches]")
            == [False] * 2
        )


@pytest.mark.slow
def test_what_a_page_does_is_as_the_test_wants(browser: Browser) -> None:
    page = "data:text/html," + quote("<title>did not run</title><script>document.title = 'ran'; lost()</script>")
    browser.javascript(False)
    browser.scheme("dark")
    browser.resize(320, 256, scale=4)

    browser.driver.get(page)

    assert browser.driver.title == "did not run"
    assert browser.messages() == []
    assert browser.run("return [innerWidth, devicePixelRatio, matchMedia('(prefers-color-scheme: dark)').matches]") == [
        320,
        4,
        True,
    ]
    browser.javascript(True)
    browser.driver.get(page)
    assert browser.driver.title == "ran"
    (message,) = browser.messages()
    assert "lost is not defined" in message

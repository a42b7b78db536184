"""Debian's Chromium and its driver: where they are, how they start, and what a test does with a page through Selenium.

Selenium finds and downloads a driver by itself unless it has a path, so it always gets one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.wait import WebDriverWait

from tests.lab.programs import missing

PLACES: Final = ("chromium", "chromium-browser", "google-chrome")
DRIVERS: Final = ("chromedriver", "/usr/lib/chromium/chromedriver")

WAIT_SECONDS: Final = 60.0
"""For a condition that must come true. A busy machine may take that long to draw a page."""

FLAGS: Final = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    # Each of these would otherwise look for hosts of Google.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-proxy-server",
)
# As root, Chromium has no sandbox.
SANDBOX: Final = ("--no-sandbox",) if os.geteuid() == 0 else ()

ENVIRONMENT: Final = {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
"""Selenium's own helper would otherwise download programs, and report its use. It does not run here; this holds if it does."""

Found = TypeVar("Found")


def chromium_program() -> str:
    """Return the path of Chromium. Without one, skip the test, or fail it in CI."""
    found = next(filter(None, map(shutil.which, PLACES)), None)
    return found or missing("Chromium", remedy="Install it: apt-get install chromium.")


def chromedriver_program() -> str:
    """Return the path of Chromium's driver. Without one, skip the test, or fail it in CI."""
    found = next(filter(None, map(shutil.which, DRIVERS)), None)
    return found or missing("ChromeDriver", remedy="Install it: apt-get install chromium-driver.")


class Browser:
    """One Chromium, with the few verbs that tests of pages need. `reset` makes it as good as new for the next test."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        driver.set_page_load_timeout(WAIT_SECONDS)
        driver.set_script_timeout(WAIT_SECONDS)
        self._first_window = driver.current_window_handle

    def reset(self) -> None:
        """Close further windows, forget cookies, storage and logs, and undo `resize`, `scheme` and `javascript`."""
        for handle in self.driver.window_handles:
            if handle != self._first_window:
                self.driver.switch_to.window(handle)
                self.driver.close()
        self.driver.switch_to.window(self._first_window)
        self.driver.set_window_rect(0, 0, 1200, 900)  # which shows it again, if it was minimized
        self.driver.get("about:blank")
        self.javascript(True)
        self.scheme("light")
        self.command("Emulation.clearDeviceMetricsOverride")
        self.command("Network.setExtraHTTPHeaders", headers={})
        self.command("Network.clearBrowserCookies")
        self.messages()

    def command(self, name: str, **arguments: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def new_window(self) -> str:
        """Open a window beside the others and go to it. Return the one that was in front."""
        before: str = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        return before

    def resize(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False) -> None:
        """Show pages in so many CSS pixels, each of `scale` × `scale` dots. `mobile` takes a page's viewport as phones do."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark` colours, and no animation: a test would see a page half-way."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.command("Emulation.setEmulatedMedia", features=features)

    def javascript(self, on: bool) -> None:
        """Run the scripts of the pages that are opened from now on, or none of them."""
        self.command("Emulation.setScriptExecutionDisabled", value=not on)

    def pass_time(self, seconds: int) -> None:
        """Let the timers of the page run as if so much time passed, and return when it has. Then the page's time stands still.

        Open a new window before, because this holds for the window until it is closed.
        """
        self.run("window.later = false; setTimeout(() => { window.later = true; }, arguments[0])", seconds * 1000 - 1)
        self.command("Emulation.setVirtualTimePolicy", policy="pauseIfNetworkFetchesPending", budget=seconds * 1000)
        self.until(lambda: self.run("return window.later"), f"{seconds} s of the page's time")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def messages(self) -> list[str]:
        """Return what the console of the browser got since the last call: scripts' words, failed loads, CSP reports."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def until(self, holds: Callable[[], Found], what: str = "") -> Found:
        """Wait until this returns something true, and return that. Fail after `WAIT_SECONDS`, and say what was awaited."""
        # Between two pages an element is gone, a script cannot run, or its result has no page to come from.
        passing = (WebDriverException,)
        return WebDriverWait(self.driver, WAIT_SECONDS, 0.05, passing).until(lambda _: holds(), what)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        return self.find(selector).text

    def leave_by(self, action: Callable[[], object]) -> None:
        """Do what leads to another page, and wait until that page is there."""
        old = self.find("html")
        action()
        # A form that a browser holds back, because a field is empty, leads nowhere.
        self.until(lambda: staleness_of(old)(self.driver), f"another page than {self.driver.current_url}")
        self.until(lambda: self.run("return document.readyState === 'complete'"), "the whole page")

    def follow(self, selector: str) -> None:
        """Click a link or button that leads to another page."""
        self.leave_by(self.find(selector).click)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with this empty folder as the profile of its user."""
    options = webdriver.ChromeOptions()
    options.binary_location = chromium_program()
    for flag in (*FLAGS, *SANDBOX, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with patch.dict(os.environ, ENVIRONMENT):
        driver = webdriver.Chrome(options=options, service=Service(chromedriver_program()))
    try:
        yield Browser(driver)
    finally:
        driver.quit()

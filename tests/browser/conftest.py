from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.chromium import SANDBOX, Browser, chromium_program, open_browser
from tests.browser.shop import CuttingProxy, Shop, new_shop, serving
from tests.lab.tls import make_certificate

INSECURE_HOST = "shop.test"
"""Chromium takes 127.0.0.1 for a secure place, also over http. This name leads there and is not."""


@pytest.fixture(scope="session")
def shop_served() -> Iterator[tuple[Shop, int]]:
    shop = new_shop()
    with serving(shop.app) as port:
        yield shop, port


@pytest.fixture
def shop(shop_served: tuple[Shop, int]) -> Shop:
    shop, _ = shop_served
    shop.reset()
    return shop


@pytest.fixture(scope="session")
def proxies(
    shop_served: tuple[Shop, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, CuttingProxy]]:
    """A proxy for http and one for https."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ExitStack() as stack:
        yield {
            "http": stack.enter_context(CuttingProxy(shop_served[1])),
            "https": stack.enter_context(CuttingProxy(shop_served[1], context)),
        }


@pytest.fixture
def proxy(proxies: dict[str, CuttingProxy]) -> CuttingProxy:
    return proxies["http"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium. One process serves all tests; each has contexts of its own."""
    program = chromium_program()
    from playwright.sync_api import sync_playwright  # needed here only

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=[
                f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1",
                *SANDBOX,
            ],
            # Playwright switches the back/forward cache off.
            ignore_default_args=["--disable-back-forward-cache"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Debian's Chromium under Selenium, one in each process of a run."""
    with open_browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(driven: Browser) -> Browser:
    """A browser that no other test has used, as far as a page can know."""
    driven.reset()
    return driven


@pytest.fixture
def new_page(chromium: Any, shop: Shop) -> Iterator[Callable[..., Any]]:
    """Open a page in a new context, which has storage of its own."""
    with ExitStack() as stack:

        def open_page(url: str, *, ready: str | None = "window.ready", **options: Any) -> Any:
            context = chromium.new_context(ignore_https_errors=True, **options)
            stack.callback(context.close)
            context.set_default_timeout(120_000)
            page = context.new_page()
            page.goto(url)
            if ready is not None and options.get("java_script_enabled", True):
                page.wait_for_function(ready)
            return page

        yield open_page

"""The example's shop page in Chromium, behind a proxy that cuts replies. Rows are counted in its database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

from example_app.app import create_app
from tests.browser.shop import CuttingProxy, serving

pytestmark = pytest.mark.slow

NewPage = Callable[..., Any]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], int]:
    """Count the payments."""

    def count() -> int:
        engine = create_engine(f"sqlite:///{tmp_path / 'shop.sqlite3'}", poolclass=NullPool)
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM payments")).scalar_one())

    return count


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    for name in ("DATABASE_URL", "IDEMPOTENCY_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    app = create_app(
        {
            "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite3'}",
            "SQLALCHEMY_ENGINE_OPTIONS": {"poolclass": NullPool},
            "DEMO_WITNESS": str(tmp_path / "witness.sqlite3"),
            "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60",
            "SECRET_KEY": "k-5d1f70c2a9e84b36",
        }
    )
    with serving(app) as port, CuttingProxy(port) as proxy:
        yield proxy


def pay(page: Any, form: str, item: str = "tea") -> str:
    """Send this form, and return the payment that the next page shows."""
    page.select_option(f"#{form} [name=item]", item)
    page.click(f"#{form} button")
    page.wait_for_selector("#payment")
    shown: str = page.text_content("#payment")
    return shown


def back(page: Any) -> None:
    page.evaluate("void setTimeout(() => history.back())")
    page.wait_for_selector("#plain")


@pytest.mark.parametrize("form", ("plain", "sent"))
def test_a_form_pays_once_over_back_and_reload_and_again_after_an_edit(
    form: str, example: CuttingProxy, rows: Callable[[], int], new_page: NewPage
) -> None:
    page = new_page(f"{example.origin}/shop", ready=None)
    first = pay(page, form)
    back(page)
    page.reload()
    assert first == pay(page, form)
    assert 1 == rows()
    back(page)
    assert first != pay(page, form, "cake")
    assert 2 == rows()
    page.click("a")
    assert first != pay(page, form)
    assert 3 == rows()
    page.goto(f"{example.origin}/shop")
    assert 3 == page.locator(".payment").count()


def test_a_lost_reply_is_asked_for_again(example: CuttingProxy, rows: Callable[[], int], new_page: NewPage) -> None:
    page = new_page(f"{example.origin}/shop", ready=None)
    example.cut_next(0)
    pay(page, "sent")

    assert 1 == rows()


def test_the_page_says_how_a_form_ended(example: CuttingProxy, rows: Callable[[], int], new_page: NewPage) -> None:
    """Its policy lets the two scripts run, and no other."""
    page = new_page(f"{example.origin}/shop", ready=None)
    blocked = []
    page.on("console", lambda message: blocked.append(message.text) if "Content Security" in message.text else None)
    page.evaluate("document.querySelector('#sent option').value = 'gold'")
    page.click("#sent button")
    # `wait_for_function` would need a policy that lets it evaluate text.
    page.wait_for_selector("#message:text-is('The shop refused the payment.')")

    assert ([], 0) == (blocked, rows())

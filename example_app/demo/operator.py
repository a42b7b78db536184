"""An operator of the demo: a program that reads the console's pages and sends its forms, as a browser would.

It holds cookies and runs no script: the console works without JavaScript.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Final, Self
from urllib.parse import urljoin

import httpx

from example_app.demo.client import PATIENCE_SECONDS, Shop

CONSOLE: Final = "/idempotency"
BUTTONS: Final = ("submit", "image", "button", "reset")
CHOICES: Final = ("radio", "checkbox")


@dataclass(slots=True)
class Form:
    """A form of a page, with what it sends as it stands."""

    action: str
    method: str
    fields: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """All that may be filled in."""


class Page(HTMLParser):
    """The links and forms of a page."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.url = str(response.url)
        self.text = response.text
        self.links: list[str] = []
        self.forms: list[Form] = []
        self.feed(response.text)

    def form(self, part: str) -> Form:
        """Return the form that is sent to an address with this part. Raises `LookupError` if the page has none."""
        for form in self.forms:
            if form.method == "post" and part in form.action:
                return form
        raise LookupError(f"{self.url} has no form for {part!r}")

    def link(self, part: str) -> str:
        """Return the first link to an address with this part. Raises `LookupError` if the page has none."""
        for link in self.links:
            if part in link:
                return link
        raise LookupError(f"{self.url} has no link to {part!r}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.append(urljoin(self.url, given["href"]))
        elif tag == "form":
            self.forms.append(Form(urljoin(self.url, given.get("action") or self.url), given.get("method") or "get"))
        elif tag in ("input", "textarea", "select", "button") and self.forms and given.get("name"):
            form, name, kind = self.forms[-1], str(given["name"]), given.get("type") or "text"
            form.names.add(name)
            # Only the button that is pressed is sent, and only the choice that is made.
            if tag != "button" and kind not in BUTTONS and (kind not in CHOICES or "checked" in given):
                form.fields[name] = given.get("value") or ""


class OperatorClient:
    """Opens pages of the console with a name and a password."""

    def __init__(self, shop: Shop, name: str, password: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(
            base_url=shop.url,
            auth=(name, password),
            timeout=PATIENCE_SECONDS,
            follow_redirects=True,
            limits=limits,
            trust_env=False,
        )

    def open(self, address: str) -> Page:
        return self._page(self._client.get(address))

    def send(self, form: Form, **filled: str) -> Page:
        """Fill in a form and send it. Raises `LookupError` for a field that it does not have."""
        if unknown := filled.keys() - form.names:
            raise LookupError(f"the form for {form.action} has no field {', '.join(sorted(unknown))}")
        return self._page(self._client.post(form.action, data=form.fields | filled))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _page(self, response: httpx.Response) -> Page:
        if response.status_code >= 400:
            raise RuntimeError(
                f"{response.request.method} {response.url.path}: {response.status_code} {response.text[:2000]}"
            )
        return Page(response)

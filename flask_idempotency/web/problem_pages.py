"""Show a problem as a page to people: in place of the document to a browser that submits a form, and where its link leads.

A page has no script, no style and no field of the request. All text comes from the table of problems, and from `detail`.
"""

from __future__ import annotations

import re
from typing import Final

from flask import Request
from markupsafe import Markup, escape
from werkzeug.exceptions import NotFound
from werkzeug.wrappers import Response

from flask_idempotency.web.browser import DAY_SECONDS, public_response
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, build
from flask_idempotency.web.request_body import FORM_TYPES

_HTML: Final = ("text/html", "application/xhtml+xml")
_JSON: Final = ("application/problem+json", "application/json")
_CODE: Final = re.compile("`([^`]*)`")

_PAGE: Final = Markup(
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    "<title>{title}</title>\n<h1>{title}</h1>\n{paragraphs}</html>\n"
)


def prefers_page(request: Request) -> bool:
    """Return whether this client sends a form, and likes a page better than a document.

    Java's `HttpURLConnection` asks for `text/html` first with every request that names no other type, and parses the document.
    """
    quality = request.accept_mimetypes.quality
    return request.mimetype in FORM_TYPES and max(map(quality, _HTML)) > max(map(quality, _JSON))


def as_page(response: Response, problem: Problem, response_class: type[Response], *, same_key: bool) -> Response:
    """Return this response with a page in place of the document: the same status and the same header fields.

    `same_key`: the form that was sent has the key. Under another one, the same form would run a second time.
    """
    row = PROBLEMS[problem.code]
    again = ""
    if row.retry and same_key:
        pause = f" after {response.headers['Retry-After']} seconds" if "Retry-After" in response.headers else ""
        # Not "go back": a form that no browser may store then comes with a new key.
        again = f"You may send the same form again{pause}: reload this page. It is not carried out twice."
    content = _page(row.title, problem.text, again, f"Code `{row.code}`, status {response.status_code}.")
    fields = [(name, value) for name, value in response.headers if name not in ("Content-Type", "Content-Length")]
    return build(response_class, content, response.status_code, [("Content-Type", "text/html; charset=utf-8"), *fields])


def page_of(code: str) -> Response:
    """Return the page on this problem. Raises `NotFound` if there is no such problem."""
    row = PROBLEMS.get(code)
    if row is None:
        raise NotFound
    content = _page(row.title, row.happened, f"What to do: {row.remedy}", f"Code `{code}`. Send it again? {row.again}.")
    return public_response(content, "text/html", max_age=DAY_SECONDS)


def _page(title: str, *texts: str) -> bytes:
    shown = [_CODE.sub(r"<code>\1</code>", str(escape(text))) for text in texts if text]
    paragraphs = "".join(f"<p>{text}</p>\n" for text in shown)
    return _PAGE.format(title=title, paragraphs=Markup(paragraphs)).encode()  # noqa: S704 - escaped above

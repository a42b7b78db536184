"""Process each webhook of a provider once: the decorator @webhook, and the id in a body.

A provider sends an event again until your view responds 2xx, and sometimes afterwards. It sends no Idempotency-Key, but an id
that stays the same in all attempts: in a header, such as `Webhook-Id` of Standard Webhooks, or in the body.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from flask import Request

from flask_idempotency.engine.errors import ConfigurationError, InvalidKey
from flask_idempotency.engine.fingerprint import check_pointer
from flask_idempotency.engine.keys import LONGEST_NAME
from flask_idempotency.engine.policy import Override, Policy
from flask_idempotency.engine.values import fits
from flask_idempotency.settings import load_override
from flask_idempotency.web.forms import form_in
from flask_idempotency.web.policies import annotate
from flask_idempotency.web.request_body import FORM_TYPES, BodyTooLarge, chunks
from flask_idempotency.web.requests import read_body

PRINCIPAL: Final = "webhook:"
"""The prefix of a provider's principal."""

KEEP_SECONDS: Final = 30 * 86400
"""Providers repeat an event for days, and let you send it again by hand for weeks: 30 days at Stripe."""

_KEY_OPTIONS: Final = ("methods", "profile", "key_format", "max_key_length", "form_field", "in_flight", "on_store_down")
_OTHER_OPTIONS: Final = ("on_error", "decide", "keep_statuses", "ignore_fields", "fingerprint_headers")

_DECIDED: Final[Override] = {name: getattr(Policy(), name) for name in _KEY_OPTIONS + _OTHER_OPTIONS} | {
    "required": True,
    "keep": KEEP_SECONDS,
    # To a provider every status but 2xx is a failure that it repeats, and a replayed refusal would lose its event. So would a
    # redirect, to the login page for example.
    "release_statuses": frozenset(range(300, 500)),
    "published": False,
}
"""The values that @webhook sets. What an application chose for the keys of its clients does not fit a provider."""

_OURS: Final = frozenset({"required", "header", "form_field", "fingerprint", "ignore_fields", "fingerprint_headers"})
"""Policy keywords that @webhook does not take: they say where the key is, and what is compared."""

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")

ViewT = TypeVar("ViewT", bound=Callable[..., Any])


def webhook(name: str, /, *, key: str | Callable[[Request], str | None], **policy: Any) -> Callable[[ViewT], ViewT]:
    """Process each webhook of this provider once. You get the same function back, as from `@idempotent`.

    `name` is the provider: two providers may send equal ids. `key` says where the id is:

    * a JSON Pointer into the body, such as `"/id"`. Of a form it names a field;
    * a header, such as `"Webhook-Id"`;
    * a function of the request. It returns the id, or None if there is none.

    A request without an id gets 400 `missing-key`. While another attempt runs, and if its outcome is unknown, the response is
    409, so the provider tries again. The body is not compared, because providers change it between attempts. Responses are
    kept for 30 days. A 3xx and a 4xx are not kept: the next attempt runs.

    Check the signature before the claim: in a `before_request` function, or in a decorator above `@claim_here`.

    The other keywords are policy keywords. Raises `ConfigurationError` for a wrong value.
    """
    where = f"@webhook({name!r})"
    faults = [
        f"{where}: {given} is no keyword here. @webhook decides it: see `key`." for given in policy if given in _OURS
    ]
    if not 0 < len(name) <= LONGEST_NAME - len(PRINCIPAL):
        faults.append(f'{where}: the name of the provider must be a text such as "stripe".')
    found: dict[str, Any] = {}
    if callable(key):
        found["key"] = key
        if not fits(key, None) or inspect.iscoroutinefunction(key):
            # Each event would get 500, until the provider gives up.
            faults.append(
                f"{where}: key is called with the request alone, and returns the id: `def id_of(request): …`."
            )
    elif key.startswith("/"):
        try:
            check_pointer(key)
            found["key"] = IdInBody(key)
        except ValueError as error:
            faults.append(f"{where}: key: {error}.")
    elif key:
        found |= load_override({"header": key}, where=f"{where}: key")
    else:
        faults.append(f"{where}: key must be a JSON Pointer, the name of a header or a function of the request.")
    if faults:
        raise ConfigurationError(*faults)
    override = {
        **_DECIDED,
        **load_override(policy, where=where),
        **found,
        "principal": PRINCIPAL + name,
        "fingerprint": "none",
    }
    override["release_statuses"] -= override["keep_statuses"] if "release_statuses" not in policy else frozenset()
    return lambda view: annotate(view, override)


class IdInBody:
    """Finds the id at this JSON Pointer (RFC 6901) in a body. Of a form, the pointer names a field."""

    def __init__(self, pointer: str) -> None:
        self._members = [each.replace("~1", "/").replace("~0", "~") for each in pointer[1:].split("/")]
        self.__qualname__ = f"IdInBody({pointer!r})"  # how `flask idempotency policy` shows it

    def __call__(self, request: Request) -> Any:
        """Return the id, or None if this body has none there: also if it is no JSON."""
        body = read_body(request)
        if request.mimetype in FORM_TYPES:
            form = form_in(request, body)
            values = set(form.values(self._members[0])) if form is not None and len(self._members) == 1 else set()
            if len(values) > 1:
                raise InvalidKey("two different ids were sent")
            return next(iter(values), None)
        if body.unread:
            raise BodyTooLarge
        if body.stream is None:
            return None
        try:
            # Not by the media type: Amazon SNS sends JSON as text/plain.
            found = json.loads(b"".join(chunks(body.stream)))
        except (ValueError, RecursionError):
            return None
        for member in self._members:
            match found:
                case dict():
                    found = found.get(member)
                case list() if _INDEX.fullmatch(member):
                    found = found[int(member)] if int(member) < len(found) else None
                case _:
                    return None
        return found

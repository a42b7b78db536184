"""Check that the janitor can act for the callers of an endpoint, and leave out the hooks that need a client."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from flask import Flask

from flask_idempotency.engine.policy import Policy
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import ActFor, Callbacks
from flask_idempotency.web.principals import Credentials, environ_name, extensions_of
from flask_idempotency.web.request_state import current_state

_REPLACES: Final = "_flask_idempotency_unless_finishing"


def leave_out(app: Flask, act_for: ActFor) -> None:
    """Wrap the hooks that `act_for` replaces: they do nothing in a request of the janitor. Call it once."""
    for lists in app.before_request_funcs.values():
        for place, hook in enumerate(lists):
            # An application may have several janitors, one after the other: a command makes one.
            if replaced_by(hook) is None and any(_is_hook(hook, named) for named in act_for.instead_of):
                # In its place: other threads iterate over this list.
                lists[place] = _unless_finishing(app, hook)


def _unless_finishing(app: Flask, hook: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(hook)
    def unless_finishing() -> Any:
        state = current_state()
        return None if state is not None and state.finishing is not None else app.ensure_sync(hook)()

    setattr(unless_finishing, _REPLACES, unless_finishing)
    return unless_finishing


def replaced_by(hook: Any) -> Any:
    """Return the application's hook that this one of ours replaces. None: this is one of the application."""
    # Its own name for itself: `wraps` copies our mark to what an application makes of it, and any decorator sets `__wrapped__`.
    ours = getattr(hook, _REPLACES, None) is hook
    return hook.__wrapped__ if ours else None


def _is_hook(hook: Any, named: object) -> bool:
    return hook == named or (isinstance(named, str) and getattr(hook, "__name__", "") == named)


# What must hold before the janitor can finish a request.

_LINES: Final = {
    "Flask-Login": "login_user(load_user(principal))",
    "Flask-JWT-Extended": (
        'return {"Authorization": "Bearer " + create_access_token(principal.removeprefix("jwt:"), '
        "expires_delta=timedelta(minutes=1))}"
    ),
    "": "g.user = load_user(principal)",
}
"""What `act_for` does where this extension names callers. One line: a log and `doctor` show a message so."""


_TOKEN_HEADERS: Final = (
    "JWT_HEADER_NAME",
    "JWT_ACCESS_CSRF_HEADER_NAME",
    "JWT_REFRESH_CSRF_HEADER_NAME",
    "WTF_CSRF_HEADERS",
)
"""The settings of Flask-JWT-Extended and Flask-WTF that name headers with tokens. They have defaults where these are set up."""


def finishing_faults(app: Flask, callbacks: Callbacks, settings: Settings, policy: Policy) -> list[str]:
    """Return one sentence for each reason why the janitor cannot finish requests of this policy, with its remedy."""
    faults = []
    credentials = Credentials(settings.credential_headers)
    # As a server names them: it takes _ for -. Clients send their key in the standard header too, where another one is read.
    named = [app.config.get(setting) or () for setting in _TOKEN_HEADERS]
    tokens = [each for names in named for each in ((names,) if isinstance(names, str) else names)]
    secret = set(map(environ_name, ("Idempotency-Key", *policy.header, *tokens)))
    for name in (*policy.finish_headers, *policy.fingerprint_headers):
        if credentials.knows(environ_name(name)) or environ_name(name) in secret:
            faults.append(
                f'finish="janitor" keeps the header {name}, and it carries a credential or the key: neither is stored. Leave '
                "it out of finish_headers and fingerprint_headers; act_for makes the credentials of the janitor's request."
            )
    if settings.hash_identities and settings.encryption == "off":
        faults.append(
            'finish="janitor" stores the names of the tenant and the principal for act_for, and IDEMPOTENCY_HASH_IDENTITIES '
            "keeps them out of the store. Switch IDEMPOTENCY_ENCRYPTION on, which seals them, or leave finish= out."
        )
    places = app.config.get("JWT_TOKEN_LOCATION", ()) if "Flask-JWT-Extended" in extensions_of(app) else ()
    if kept := {"query_string", "json"} & set((places,) if isinstance(places, str) else places):
        faults.append(
            f'finish="janitor" keeps the query and the body, and JWT_TOKEN_LOCATION lets clients send tokens there '
            f"({', '.join(sorted(kept))}). Let them send tokens in headers or cookies alone, or leave finish= out."
        )
    if callbacks.act_for is None:
        found = [name for name in extensions_of(app) if name in _LINES] or [""]
        lines = " or ".join(f"`def act_for(principal, tenant): {_LINES[name]}`" for name in found)
        faults.append(
            'finish="janitor" needs a function that lets the janitor act for the caller of a request. Write '
            f"`@idempotency.act_for` above one such as {lines}"
        )
    else:
        hooks = [hook for lists in app.before_request_funcs.values() for hook in lists]
        for named in callbacks.act_for.instead_of:
            met = sum(_is_hook(replaced_by(hook) or hook, named) for hook in hooks)
            if not met or (met > 1 and isinstance(named, str)):
                shown = named if isinstance(named, str) else getattr(named, "__qualname__", type(named).__name__)
                why = "no before_request hook" if not met else f"the name of {met} before_request hooks"
                faults.append(
                    f"act_for(instead_of=…): {shown} is {why} of this application. Name the function that you registered."
                )
    return faults

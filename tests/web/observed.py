"""One application in three guises: observed, enforced, and without the extension. Its view does what the request asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Final

from flask import Flask, Response, abort, make_response, request, session
from werkzeug.test import create_environ, run_wsgi_app

from flask_idempotency import Idempotency, current_claim
from flask_idempotency.engine import activity as names
from flask_idempotency.engine.events import ClaimGranted, Observation
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.web import observing
from tests.apps import record_events

NAME: Final = "tests.web.observed"
LARGE: Final = 1000
"""Bytes of a body that is over `max_body` here."""
WAIT_SECONDS: Final = 60.0
"""Only a failure takes this long."""

SLOW_SECONDS: Final = observing.SLOW_SECONDS
# A busy machine is not a slow store: after a slow call, requests are counted as failed for a while.
observing.SLOW_SECONDS = WAIT_SECONDS


@dataclass
class Answer:
    """The response as a server sends it, and the error that its body raised."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes
    error: str = ""

    def get(self, name: str) -> str | None:
        return dict(self.headers).get(name)


@dataclass
class Guise:
    """One guise of the application."""

    app: Flask
    runs: list[str] = field(default_factory=list)
    """What each run of the view was asked to do."""
    entered: Any = None
    leave: Event = field(default_factory=Event)
    events: list[Any] = field(default_factory=list)
    store: Any = None

    def send(self, path: str = "/pay", **about: Any) -> Answer:
        """Send a POST, and read the whole response as a server does."""
        return sent(self.app, path, **about)

    def counts(self) -> Counter[str]:
        """Return what was counted of all endpoints, without times. Observed counters get the names of enforced ones."""
        activity = self.app.extensions["idempotency"].activity
        assert activity.flush()
        page = self.store.activity.read(owner_mark(NAME), length=names.MINUTE, seconds=names.MINUTE)
        found: Counter[str] = Counter()
        for bucket in page.buckets:
            for counters in bucket.counts.values():
                for name, number in counters.items():
                    if ":" not in name or name.startswith(names.WOULD):
                        found[name.removeprefix(names.WOULD).partition("@")[0]] += number
        return found

    def outcomes(self) -> list[str]:
        """Return the outcomes of observed requests, in order."""
        return [event.outcome for event in self.events if type(event) is Observation]

    def seen(self) -> list[tuple[str, str]]:
        """Return the outcomes of observed requests with their callers, in order."""
        return [(event.outcome, event.caller) for event in self.events if type(event) is Observation]


def sent(
    app: Flask,
    path: str = "/pay",
    *,
    key: str | None = "k",
    do: str = "",
    data: bytes | str | Mapping[str, Any] = b"",
    headers: Iterable[tuple[str, str]] = (),
    method: str = "POST",
    environ: Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> Answer:
    fields = [*headers, *([("Idempotency-Key", key)] if key is not None else []), *([("X-Do", do)] if do else [])]
    about = create_environ(path, method=method, headers=fields, data=data, content_type=content_type)
    about.update(environ or {})
    body, status, found = run_wsgi_app(app, about)
    pieces, error = [], ""
    try:
        for piece in body:
            pieces.append(piece)
    except Exception as raised:  # noqa: BLE001 - compared below
        error = type(raised).__name__
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()
    # A session cookie is signed with the time in seconds.
    fields = [(name, value.partition(".")[0] if value.startswith("session=") else value) for name, value in found]
    return Answer(status, fields, b"".join(pieces), error)


def application(guise: Guise) -> None:
    """Give the application its view and hooks."""
    app = guise.app

    @app.post("/pay")
    @app.post("/other", endpoint="other")
    @app.put("/pay", endpoint="put")
    def pay() -> Any:
        do = request.headers.get("X-Do", "")
        guise.runs.append(do)
        return _done(guise, do)

    @app.after_request
    def hook(response: Response) -> Response:
        if request.headers.get("X-Do") == "hook-raises":
            raise RuntimeError("the hook failed")
        if request.headers.get("X-Do") == "hook-500":
            response.status_code = 500
        response.headers["X-Hook"] = "ran"
        return response


def _done(guise: Guise, do: str) -> Any:
    """Do what the request asks, and return the response."""
    body = request.get_data()
    match do:
        case "" | "hook-raises" | "hook-500":
            return {"bytes": len(body), "claimed": guise.store is not None and bool(current_claim)}, 201
        case "raise":
            raise RuntimeError("the view failed")
        case "abort":
            return abort(409)
        case "point" | "point-503":
            if guise.store is not None:
                current_claim.point_of_no_return()
            if do == "point":
                raise RuntimeError("the view failed past its point")
            return "unavailable", 503
        case "large":
            return "x" * LARGE
        case "cookie":
            made = make_response("signed in")
            made.set_cookie("token", "t")
            return made
        case "session":
            session["user"] = 1
            return "signed in"
        case "stream" | "stream-large" | "stream-raises":
            return Response(_pieces(do), content_type="text/plain")
        case "hold":
            guise.entered.release()
            assert guise.leave.wait(WAIT_SECONDS)
            return "held", 201
        case "file":
            made = Response(iter([b"abc", b"def"]), content_type="application/octet-stream", direct_passthrough=True)
            made.content_length = 6
            return made
        case _:
            return do, int(do)


def _pieces(do: str) -> Iterator[str]:
    yield "one"
    if do == "stream-raises":
        raise RuntimeError("the stream failed")
    yield "x" * (LARGE if do == "stream-large" else 3)


def plain(**config: Any) -> Guise:
    """Return the application without the extension."""
    app = Flask(NAME)
    app.config.update({"SECRET_KEY": "s", "TESTING": True, "PROPAGATE_EXCEPTIONS": False, **config})
    guise = Guise(app)
    application(guise)
    return guise


def guarded(store: Any, *, principal: Callable[[], str | None] | None = None, **settings: Any) -> Guise:
    """Return the application with the extension. Callers have names, and tenants are in a header."""
    guise = plain()
    guise.store = store

    def who() -> str | None:
        return request.headers.get("X-User", "alice") or None

    settings = {"max_body": LARGE - 1, "activity": True, "max_request_body": 2000, **settings}
    idempotency = Idempotency(
        principal=principal or who, store=store, secret="only-tests-9f2c47d1e8b35a60c1d47be2", **settings
    )
    idempotency.tenant_loader(lambda: request.headers.get("X-Tenant"))
    record_events(guise.app, guise.events)
    idempotency.init_app(guise.app)
    guise.app.extensions["idempotency"].activity._renewer.add = lambda *args, **options: None  # no flush by itself
    return guise


def granted(guise: Guise) -> int:
    return sum(type(event) is ClaimGranted for event in guise.events)


def in_threads(number: int, call: Callable[[], Any]) -> list[Thread]:
    threads = [Thread(target=call) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: Iterable[Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()

"""An application with a console and records in every state, served by threads of the test process.

Its store is a SQLite file whose clock stands still, so that pages and pictures are the same in each run.
"""

from __future__ import annotations

import inspect
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from flask import Blueprint, Flask, Response, abort, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, durable_step, idempotent
from flask_idempotency.assembly import identities
from flask_idempotency.console import Console, Operator
from flask_idempotency.engine.activity import EDGES, Counts, slot
from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.journal import Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import Scope, StorageKey, new_token, owner_mark, step_id
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, RequestInfo, StoredPayload
from flask_idempotency.engine.offered import capabilities_of
from flask_idempotency.engine.outbox import Message, Undeliverable
from flask_idempotency.operations import doctor
from flask_idempotency.operations.records import RecordView
from flask_idempotency.settings import Settings
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from tests.browser.chromium import Browser
from tests.browser.shop import serving

NOW: Final = 1_736_933_400.0
"""2025-01-15 09:30 UTC."""

CONSOLE: Final = "/idempotency"
OPERATORS: Final[Mapping[str, frozenset[str] | None]] = {"dana": None, "erin": None, "gus": frozenset({"acme"})}
"""The tenants that each sees. None: all of them."""

HOSTILE: Final[Mapping[str, str]] = {
    "script": "<script>window.hostile = 1; alert(1)</script>",
    "image": "\"'><img src=x onerror='window.hostile = 2; alert(2)'>",
    "svg": "</td></table></title></style><svg onload=alert(3)><a href='javascript:alert(3)'>pay</a>",
    "template": "{{ 7 * 7 }}{% raw %}${7*7}<%= 7 * 7 %>",
    "right to left": "\u202egnp.tnemyap\u2066\u200f\u061c",
    "control": "a\x00b\x1b[31mred\x07\r\nSet-Cookie: x=1\u2028next\ufeff",
    "emoji": "👩‍👩‍👧‍👦💳🏴󠁧󠁢󠁳󠁣󠁴󠁿 Zażółć 日本語",
    "stacked": "e" + "\u0301" * 60,
    "long": "w" * 10_000,
    "spaces": "   ",
}
"""Names that attack a page, a terminal, a template or a reader's eyes."""


class Site:
    """The application, its store and its clock. `post` is a client's request, `claim` a worker that has not answered."""

    def __init__(self, folder: Path, *, name: str = "shop", endpoints: tuple[str, ...] = ()) -> None:
        self.clock = FrozenClock(NOW)
        self.store = SqlStore(Database(f"sqlite:///{folder / 'records.db'}"), clock=self.clock)
        self.store.schema.upgrade()
        self.app = Flask("shop")
        self.app.name = name
        self.idempotency = Idempotency(
            self.app,
            tenant=lambda: request.environ["test.tenant"],
            principal=lambda: request.environ["test.principal"],
            store=self.store,
            secret=b64encode(bytes(range(32))).decode(),
            quota_records=60,
            # `count` writes it: what the clients of a test add would change the pictures.
            activity=False,
        )
        self._add_views(endpoints)
        self.app.register_blueprint(
            Console(self.idempotency, authorize=authorize, allow_http=True, changes_per_hour=1000)
        )
        self.origin = ""
        self.asked: list[str] = []
        """The paths of all requests that browsers sent."""
        self.down = False
        """Whether the application answers each request with 503."""
        self.app.before_request(self._note)

    def post(
        self, path: str, key: str | None, *, tenant: str = "acme", principal: str = "alice", body: str = ""
    ) -> TestResponse:
        environ = {"test.tenant": tenant, "test.principal": principal}
        headers = {} if key is None else {"Idempotency-Key": key}
        with self.app.test_client() as client:
            return client.post(path, headers=headers, data=body, environ_overrides=environ)

    def claim(
        self,
        key: str,
        *,
        tenant: str = "acme",
        principal: str = "alice",
        info: RequestInfo | None = None,
        lease: float = 90,
    ) -> tuple[StorageKey, bytes]:
        """Leave a claim whose worker still runs. Return its name and its token."""
        named = self.identity.storage_key(Scope(self.settings.namespace, tenant, principal, None), key)
        about = info or RequestInfo(tenant, principal, "POST", "payments.create")
        token = new_token(named.mark)
        asked = ClaimRequest(named, bytes(FINGERPRINT_BYTES), on_expiry=OnExpiry.QUARANTINE, info=about)
        assert isinstance(self.store.claim(asked, token=token, lease=lease), Grant)
        return named, token

    def janitor(self, *tasks: str) -> None:
        for task in tasks:
            done = self.app.test_cli_runner().invoke(args=["idempotency", task])
            assert done.exit_code == 0, done.output

    def count(self, counts: Counts) -> None:
        """Add these counts to the activity of this minute."""
        log = capabilities_of(self.store).activity
        assert log is not None
        log.add(owner_mark(self.settings.namespace), counts, token=os.urandom(16))

    def note(self, key: StorageKey, entry: AuditEntry) -> None:
        """Add a line to the audit trail of this record."""
        trail = capabilities_of(self.store).audit
        assert trail is not None
        trail.append(key, entry, token=os.urandom(16))

    def sign_in(self, browser: Browser, name: str = "dana") -> None:
        """Send this operator's name with each request of the window in front."""
        basic = b64encode(f"{name}:secret".encode()).decode()
        browser.command("Network.enable")
        browser.command("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {basic}"})

    def open(self, browser: Browser, page: str = "/") -> None:
        browser.driver.get(f"{self.origin}{CONSOLE}{page}")

    @property
    def settings(self) -> Settings:
        found: Settings = self.app.extensions["idempotency"].settings
        return found

    @property
    def identity(self) -> Any:
        return identities(self.settings)[0]

    def _note(self) -> Response | None:
        self.asked.append(request.path)
        return Response("down", 503) if self.down else None

    def _add_views(self, endpoints: tuple[str, ...]) -> None:
        app, clock = self.app, self.clock

        def pay() -> Response:
            clock.advance(0.184)
            body = request.get_data(as_text=True)
            return Response("no response of the bank", 504) if body == "lost" else Response("paid", 201)

        @durable_step("reserve", effects="deduplicated", item="line")
        def reserve(line: str) -> str:
            clock.advance(0.03)
            return "reserved"

        @durable_step("charge")
        def charge() -> str:
            clock.advance(0.4)
            if request.get_data() == b"lost":
                raise TimeoutError("the bank did not answer")
            return "charged"

        @idempotent(steps=(reserve, charge))
        def check_out() -> Response:
            reserve(request.args["line"])
            if request.get_data() == b"pause":
                return Response("try later", 503)
            charge()
            return Response("ordered", 201)

        for name, view in (("payments", pay), ("refunds", pay), ("checkouts", check_out)):
            blueprint = Blueprint(name, __name__)
            blueprint.add_url_rule(f"/{name}", "create", view, methods=["POST"])
            app.register_blueprint(blueprint)
        for number, endpoint in enumerate(endpoints):
            app.add_url_rule(f"/hostile/{number}", endpoint, pay, methods=["POST"])


class Refusing:
    """An adapter that sends nothing: one topic is refused for good, and the others get no response."""

    def send(self, messages: Sequence[Message]) -> list[Exception]:
        gone = Undeliverable("the receiver answered 410")
        return [gone if message.topic == "orders.created" else TimeoutError() for message in messages]


def with_messages(folder: Path) -> Flask:
    """Return an application with an inbox, and an outbox that has dead, failing and waiting messages."""
    app = Flask("shop")
    app.testing = True
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{folder / 'shop.db'}",
        "IDEMPOTENCY_SECRET": b64encode(bytes(range(32))).decode(),
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
    }
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, principal=lambda: "alice")
    idempotency.inbox("billing")
    outbox = idempotency.outbox()
    outbox.route("*", Refusing())
    app.register_blueprint(Console(idempotency, authorize=authorize, allow_http=True))
    upgraded = app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"])
    assert upgraded.exit_code == 0, upgraded.output
    with app.app_context():
        for number in range(6):
            topic = ("orders.created", "mail.receipts", "stock")[number % 3]
            outbox.publish(topic, {"number": number}, key="one" if topic == "orders.created" else None)
        db.session.commit()
    relay = app.extensions["idempotency_outbox"].relay()
    while relay.run_once() is not None:
        pass
    return app


def authorize(action: str, record: RecordView | None) -> Operator | None:
    """Let each operator do everything that they can see; `vera` may only look."""
    name = request.authorization.username if request.authorization is not None else None
    if name is None:
        abort(Response("Who are you?", 401, {"WWW-Authenticate": 'Basic realm="console"'}))
    if name == "vera" and action != "view":
        return None
    return Operator(name, tenants=OPERATORS.get(name))


@contextmanager
def served(site: Site) -> Iterator[Site]:
    """Serve the application. Its doctor takes the store's clock for that of this host."""
    clock_skew = inspect.unwrap(doctor.clock_skew)
    with ExitStack() as stack:
        stack.enter_context(patch.object(clock_skew, "__kwdefaults__", {"host_clock": site.clock}))
        site.origin = f"http://127.0.0.1:{stack.enter_context(serving(site.app))}"
        stack.callback(site.store.close)
        yield site


def fill(site: Site) -> None:
    """Leave an hour of activity, and records of three tenants in every state."""
    for minute in range(60):
        site.count(a_minute(minute))
        if minute % 6 == 0:
            site.post("/payments", f"order-{minute}", tenant="globex", principal="carol")
            site.post("/payments", f"order-{minute}", principal="bob")
            site.post("/refunds", f"refund-{minute}", tenant="initech", principal="dave")
        if minute == 20:
            site.post("/checkouts?line=tea", "cart-7", body="lost")
            site.post("/payments", "order-1042", body="lost")
        if minute == 44:
            site.post("/payments", "order-1051", tenant="globex", principal="carol", body="lost")
            lapsed, _ = site.claim("order-1055", principal="bob", lease=30)
            site.note(lapsed, AuditEntry("reopened", "quarantined", "erin", "Ticket 4711: the bank was down."))
        site.clock.advance(60)
    site.post("/checkouts?line=cake", "cart-8", principal="bob", body="pause")
    site.claim("order-1057")
    site.clock.advance(12)
    site.janitor("reap", "expire", "reconcile")
    site.clock.advance(47)


def a_minute(number: int) -> Counts:
    """Return what the endpoints did in a minute of the morning: more and more, with an outage of the bank in between."""
    outage = 38 <= number < 44
    new = 24 + number // 3 + 9 * (number % 4) - (10 if outage else 0)
    replayed = 3 + number % 5 + (14 if outage else 0)
    payments = {
        "new": new,
        "replayed": replayed,
        "conflict": 1 + number % 2 + (5 if outage else 0),
        "mismatch": int(number % 9 == 4),
        "missing-key": int(number % 7 == 2),
        "completed": new - (3 if outage else 0),
        "quarantined": 3 if outage else 0,
        **times("t:new", new, median=2.4 if outage else 0.11 + 0.02 * (number % 3)),
        **times("t:replayed", replayed, median=0.004),
    }
    refunded, carts = 4 + number % 3, 2 + number % 4
    refunds = {"new": refunded, "replayed": number % 2, "completed": refunded, **times("t:new", refunded, median=0.07)}
    checkouts = {"new": carts, "replayed": number % 3, "completed": carts, **times("t:new", carts, median=0.4)}
    parts = {"payments.create": payments, "refunds.create": refunds, "checkouts.create": checkouts}
    return {name: {counter: n for counter, n in each.items() if n} for name, each in parts.items()}


def times(histogram: str, requests: int, *, median: float) -> dict[str, int]:
    """Return the counters of so many durations: most are about the median, and one in ten takes three times as long."""
    slow, quick = requests // 10, requests // 3
    parts = {slot(median * 0.6): quick, slot(median): requests - quick - slow, slot(median * 3.1): slow}
    return {f"{histogram}:{number}": count for number, count in parts.items()}


def attack(site: Site) -> None:
    """Leave hostile names in everything that a store keeps as text, in records of every state."""
    others = ("in flight", "lapsed", "completed", "quarantined")
    for number, (kind, name) in enumerate(HOSTILE.items()):
        for state in ("quarantined with steps", others[number % len(others)]):
            about = RequestInfo(name, name, name[:40], name)
            lease = 30.0 if state == "lapsed" else 86_400.0
            key, token = site.claim(f"{kind} {state}", tenant=name, principal=name, info=about, lease=lease)
            site.note(key, AuditEntry(name[:40], name[:40], name[:200], name[:1000]))
            match state:
                case "quarantined with steps":
                    write_steps(site, key, token, name)
                    site.store.quarantine(key, token, name[:60])
                case "quarantined":
                    site.store.quarantine(key, token, name[:60])
                case "completed":
                    payload = StoredPayload(name.encode("utf-8", "replace"), status=200, success=True, byte_size=3)
                    site.store.complete(key, token, payload, keep=86_400)
        site.count({name[:200]: {"new": 40 + number, "replayed": 7, f"t:new:{slot(EDGES[number])}": 40 + number}})
    site.clock.advance(60)


def write_steps(site: Site, key: StorageKey, token: bytes, name: str) -> None:
    journals = capabilities_of(site.store).journals
    record = site.store.read(key)
    assert journals is not None
    assert record is not None
    entries = [
        Entry(step_id(key, f"{name}{number}"), name[:60], "plain", state, in_line=True)
        for number, state in enumerate(StepState)
    ]
    writing = JournalWrite(1, enter=entries, steps=2, in_doubt=True)
    journals.write(key, token, fence=record.fence, writing=writing, lease=86_400)

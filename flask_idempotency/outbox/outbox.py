"""Publish messages in the transaction of the application's rows.

One `Outbox` object serves every application of its `Idempotency`. It holds the routes; what belongs to one application is in
`app.extensions["idempotency_outbox"]`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from flask import current_app, has_app_context

from flask_idempotency.client import new_key
from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.ending import Running, work_here
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.outbox import (
    BINARY,
    HEADER_NAME,
    HEADER_VALUE,
    JSON,
    MAX_BODY_BYTES,
    MAX_HEADERS,
    MESSAGE_ID,
    NAME_CHARACTERS,
    RESERVED,
    TOPIC,
    Adapter,
    FormerRow,
    Message,
    OutboxNames,
    SealsBodies,
    StoredMessage,
    Topics,
    Undeliverable,
    is_name,
)
from flask_idempotency.engine.registrations import Kept, Registrations, is_same
from flask_idempotency.maintenance.relay import BATCH, NO_ROUTE, Relay, Route

if TYPE_CHECKING:
    from flask_idempotency.stores.sql.outbox import OutboxTable  # needs a package that is optional

SERVICES: Final = "idempotency_outbox"
"""The entry of `app.extensions` with the services of one application."""

LONGEST_DELAY_SECONDS: Final = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class OutboxServices:
    """What the outbox of one application works with."""

    outbox: Outbox
    table: OutboxTable
    session: Callable[[], Any]
    """Return the session that the application writes with, in the current application context."""
    engine: Callable[[], Any]
    """Return the engine of the default bind."""
    names: OutboxNames
    identities: Sequence[Identity]
    """One for each secret in use, the newest first."""
    sealer: SealsBodies | None
    data_keys: Callable[[Any], DataKeys | None] | None
    """Return the data keys as the transaction on a connection sees them, if another connection must wait to add one."""
    encrypts: bool
    """Whether IDEMPOTENCY_ENCRYPTION is on."""
    observers: Callable[[Event], None]
    context: Callable[[], AbstractContextManager[Any]]
    """Return a new application context."""
    kept: Kept
    """The routes that this application keeps, while a factory has made the next one."""

    def tenant_id(self, tenant: str | None) -> bytes:
        """Return the id of a tenant under the newest secret."""
        return self.identities[0].tenant_ids(self.names.namespace, tenant)[0]

    def relay(self) -> Relay:
        """Return the relay of this application."""
        return Relay(
            self.table,
            routes=self.routes,
            adopt=lambda: self.table.adopt(self._is_ours),
            opener=self.opener,
            observers=self.observers,
            context=self.context,
        )

    def routes(self) -> list[tuple[Route, Topics]]:
        """Return each route of this application, and the topics that it takes."""
        routes = self.outbox.routes_of(self.kept)
        exact = tuple(pattern for pattern in routes if TOPIC.fullmatch(pattern))
        found, before = [], exact
        for pattern, route in routes.items():
            found.append((route, Topics(pattern, () if pattern in exact else before)))
            before = (*before, pattern)
        return found

    def route_of(self, topic: str) -> Route | None:
        """Return the route of this application that takes this topic, or None."""
        routes = self.outbox.routes_of(self.kept)
        return routes.get(topic) or next((routes[pattern] for pattern in routes if fnmatchcase(topic, pattern)), None)

    def fault_of(self, topic: str) -> str | None:
        """Return why no relay of this process takes this topic. None: one does."""
        return NO_ROUTE if self.route_of(topic) is None else None

    def _is_ours(self, row: FormerRow) -> bool:
        """Return whether to send a message of the release before. Its row names no application."""
        if self.route_of(row.topic) is None:
            return False
        each = product(self.identities, self.names.namespaces)
        return not row.sealed or row.tenant_id in {identity.tenant_ids(name, row.tenant)[0] for identity, name in each}

    def opener(self) -> Callable[[StoredMessage], Message]:
        """Return a function that opens some messages. It raises `Undeliverable` for one that can never be opened."""
        opening = None if self.sealer is None else self.sealer.opener(self.names.namespaces)

        def opened(stored: StoredMessage) -> Message:
            if stored.damaged is not None:
                raise Undeliverable(f"the row is damaged: {stored.damaged}")
            if opening is None:
                if stored.sealed_by is not None:
                    raise ConfigurationError("the body is encrypted, and this process has no IDEMPOTENCY_KEY_RING")
                return stored.message
            return opening(stored)

        return opened

    def reseal(self, newest: str, *, limit: int = 200) -> int:
        """Encrypt the bodies of old ring keys again, under the newest, and return how many. Leave unreadable ones."""
        if self.sealer is None or not self.encrypts:
            return 0
        after, done = 0, 0
        while found := self.table.sealed_before(newest, after=after, limit=limit):
            for stored in found:
                after = stored.seq
                tenant_id = stored.tenant_id or b""
                try:
                    plain = self.opener()(stored)
                except Exception:  # noqa: BLE001, S112 - the relay says what is wrong with this message when it sends it
                    continue
                namespace = None if stored.former else self.names.namespace
                body, by = self.sealer.seal_body(tenant_id, plain, namespace=namespace)
                try:
                    # If the tenant was erased in between, the newest key was made after that, and would bring the body back.
                    self.opener()(stored)
                except Exception:  # noqa: BLE001, S112
                    continue
                done += by is not None and self.table.reseal(stored, body, by)
        return done


class Outbox:
    """Messages that are sent if, and only if, the transaction that published them commits.

    Get it from `idempotency.outbox()`. Give it routes when you set up the application, and publish in views, tasks and
    commands. `flask idempotency relay` sends the messages.
    """

    def __init__(self, *, keep: float) -> None:
        self.keep = keep
        """Seconds for which a confirmed message stays in the table. 0: it is deleted immediately."""
        self._routes: dict[str, Route] = {}
        self._registrations = Registrations()

    def set_up(self) -> Kept:
        """Return what the next application keeps of the routes that are there when its factory makes another one."""
        return self._registrations.set_up(self._routes.keys())

    def route(self, pattern: str, adapter: Adapter) -> None:
        """Send the messages of these topics through this adapter.

        `pattern` is a topic, or has `*` for any characters. The first route that matches takes the topic. Raises
        `ConfigurationError` for an adapter without `send`, and for a second route of one pattern. The same line of a factory,
        with an adapter of the same class, replaces the route for its next application.
        """
        caller = sys._getframe(1)
        place = caller.f_code, caller.f_lineno
        given: Any = pattern
        if not isinstance(given, str) or not given:
            raise ConfigurationError(f"outbox.route(): the pattern must be a topic such as 'mail.*', not {pattern!r}.")
        if isinstance(adapter, type) or not callable(getattr(adapter, "send", None)):
            raise ConfigurationError(
                f"outbox.route({pattern!r}): {getattr(adapter, '__name__', type(adapter).__name__)} is no adapter: it needs a "
                "method send(messages), as flask_idempotency.outbox.Tasks has."
            )
        former, first = self._routes.get(pattern), self._registrations.note(pattern)
        if former is not None and former.adapter is not adapter:
            if not first or former.place != place or not is_same(type(former.adapter), type(adapter)):
                raise ConfigurationError(
                    f"outbox.route({pattern!r}): this pattern has a route already. Remove one of the two."
                )
            self._registrations.replace(pattern, former)
        batch = max(1, min(int(getattr(adapter, "batch", BATCH)), BATCH))
        parallel = max(1, int(getattr(adapter, "parallel", 1)))
        receiver_of = getattr(adapter, "receiver_of", None)
        self._routes[pattern] = Route(pattern, adapter, batch, parallel, receiver_of, place)

    def routes_of(self, kept: Kept) -> dict[str, Route]:
        """Return the routes of one application by their patterns. `kept` is what it keeps."""
        # A copy: another thread may add a route, and a message is published all the same.
        return {pattern: kept.values.get(pattern, route) for pattern, route in list(self._routes.items())}

    def publish(
        self,
        topic: str,
        body: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float | timedelta = 0,
        message_id: str | None = None,
        tenant: str | None = None,
    ) -> str:
        """Write a message with `db.session`, and return its id. It is sent after your transaction commits, at least once.

        `body` is bytes, or any value that JSON has. Messages of one topic and `key` are sent in order: write the row that the
        message is about first, and then publish. `delay` is in seconds, or a `timedelta`.

        Under a claim the id comes from the claim, the topic, and the number of this call, so a second attempt publishes
        nothing twice. Elsewhere it is a new UUID. An id belongs to the namespace and the tenant. A message whose id is in the
        table already is not written again, and one with another topic, key or body is refused.

        Raises `ConfigurationError` if no route takes the topic or the table is missing, `ValueError` and `TypeError` for a
        message that cannot be sent, `ValueError` for an id that another message has, and `RuntimeError` outside an application
        context.
        """
        services = self._services()
        route = services.route_of(_checked("topic", topic, TOPIC))
        if route is None:
            raise ConfigurationError(
                f"outbox.publish(): no route takes the topic {topic!r}. Call outbox.route({topic!r}, …) when you set up the "
                "application."
            )
        data, content_type = _encoded(body)
        work = work_here()
        if tenant is None and work is not None and work.claim is not None:
            tenant = work.tenant
        message = Message(
            _message_id(topic, message_id, work),
            topic,
            data,
            key=_name("key", key),
            headers=_headers(headers, content_type),
            tenant=_name("tenant", tenant),
        )
        seconds = _seconds(delay)
        if (check := getattr(route.adapter, "check", None)) is not None:
            check(message)
        tenant_id, sealed, sealed_by = None, message.body, None
        connection = services.table.connection_of(services.session(), services.engine())
        if services.encrypts:
            if services.sealer is None:
                raise ConfigurationError(
                    "outbox.publish(): IDEMPOTENCY_ENCRYPTION is on, and the extension is switched off (IDEMPOTENCY_ENABLED), "
                    "so there is no key for the body."
                )
            tenant_id = services.tenant_id(tenant)
            within = None if services.data_keys is None else services.data_keys(connection)
            sealed, sealed_by = services.sealer.seal_body(
                tenant_id, message, namespace=services.names.namespace, within=within
            )
        services.table.publish(
            connection,
            message,
            delay=seconds,
            tenant_id=tenant_id,
            sealed=sealed,
            sealed_by=sealed_by,
        )
        return message.message_id

    def _services(self) -> OutboxServices:
        if not has_app_context():
            raise RuntimeError(
                "outbox.publish() writes with the session of an application, and there is none here. Call it in a view, in a "
                "command, or inside `with app.app_context():`."
            )
        services: OutboxServices | None = current_app.extensions.get(SERVICES)
        if services is None or services.outbox is not self:
            raise ConfigurationError(
                "outbox.publish(): this outbox does not belong to the current application. Call init_app(app) on the "
                "Idempotency object that made it."
            )
        return services


def _checked(name: str, value: object, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(text := _text(name, value)):
        raise ValueError(f"{name}: must match {pattern.pattern}.")
    return text


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be a string, not {type(value).__name__}.")
    return value


def _name(name: str, value: object) -> str | None:
    """Return a key or a tenant. Databases and brokers refuse some characters, or drop them."""
    if value is None:
        return None
    if not is_name(text := _text(name, value)):
        raise ValueError(f"{name}: must have 1 to {NAME_CHARACTERS} printable characters.")
    return text


def _message_id(topic: str, given: str | None, work: Running | None) -> str:
    if given is not None:
        return _checked("message_id", given, MESSAGE_ID)
    if work is None or work.claim is None or work.oldest is None:
        return new_key()
    # Count for each topic: an attempt may publish to two topics in another order. Never count down: after a rollback a number
    # may belong to a message that an earlier transaction of this work has committed.
    published = work.published = work.published or {}
    number = published[topic] = published.get(topic, 0) + 1
    return work.oldest.downstream_key(work.claim.oldest_key, f"flask_idempotency/outbox {topic} {number}")


def _encoded(body: object) -> tuple[bytes, str]:
    """Return the bytes of this body, and their type."""
    if isinstance(body, bytes | bytearray | memoryview):
        data, content_type = bytes(body), BINARY
    else:
        try:
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            data, content_type = text.encode("utf-8"), JSON
        except TypeError as error:
            raise TypeError(f"body: must be bytes, or a value that JSON has ({error}).") from None
        except (ValueError, RecursionError):
            # The text of these errors may quote the body.
            raise ValueError("body: JSON has no NaN, no infinity, no lone surrogate, and no cycle.") from None
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(
            f"body: has {len(data):,} bytes, and {MAX_BODY_BYTES:,} are allowed. Store it elsewhere, and publish its address."
        )
    return data, content_type


def _headers(headers: Mapping[str, str] | None, content_type: str) -> dict[str, str]:
    """Return the headers with a content type. Names differ by more than case."""
    written: dict[str, str] = {"content-type": content_type}
    for name, value in (headers or {}).items():
        lower = _checked("headers: a name", name, HEADER_NAME).lower()
        _checked(f"headers: the value of {name}", value, HEADER_VALUE)
        if lower in RESERVED:
            raise ValueError(f"headers: {name} is set by the adapter.")
        if lower == "content-type":
            if content_type == JSON:
                raise ValueError(
                    "headers: the content-type of a JSON body is application/json. Pass bytes to set another."
                )
            written["content-type"] = value
            continue
        if lower in {each.lower() for each in written}:
            raise ValueError(f"headers: {name} is given twice.")
        written[name] = value
    if len(written) > MAX_HEADERS:
        raise ValueError(f"headers: {MAX_HEADERS} are allowed.")
    return written


def _seconds(delay: float | timedelta) -> float:
    seconds: Any = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"delay: must be seconds or a timedelta, not {type(delay).__name__}.")
    if not isfinite(seconds) or not 0 <= seconds <= LONGEST_DELAY_SECONDS:
        raise ValueError(f"delay: must be from 0 to {LONGEST_DELAY_SECONDS:,.0f} seconds.")
    return float(seconds)

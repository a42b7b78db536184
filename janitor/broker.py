"""Where the janitor's own Celery application gets its tasks."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from uuid import uuid4

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import LONGEST_BUDGET_SECONDS

# A folder as a broker: kombu's, made safe for two who look at it at the same moment.

SCHEME: Final = "idempotency-folder"

_UNWRITTEN: Final = ".unwritten"
_BIND_LOCK: Final = ".bind-lock"


class Channel(filesystem.Channel):
    """kombu's opens a file, and then writes it. Whoever looked in between found it empty, and a worker ended of that."""

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        name = f"{round(monotonic() * 1000)}_{uuid4()}.{queue}.msg"
        unwritten = Path(self.data_folder_out, name + _UNWRITTEN)
        unwritten.write_text(dumps(payload), encoding="utf-8")
        os.replace(unwritten, Path(self.data_folder_out, name))

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        # One that was written by a kombu without us, and was not whole. Beat sends the next.
        while True:
            with suppress(ValueError):
                return super()._get(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        # Worker and beat start together and both bind. Without the lock, one of them would read the file before the other
        # has written it, and end.
        with Path(self.control_folder, _BIND_LOCK).open("w") as file:
            filesystem.lock(file, filesystem.LOCK_EX)  # type: ignore[attr-defined]  # not in its stubs
            try:
                super()._queue_bind(exchange, routing_key, pattern, queue)
            except ValueError:  # a process was killed before it wrote the file
                Path(self.control_folder, f"{exchange}.exchange").unlink()
                super()._queue_bind(exchange, routing_key, pattern, queue)
            finally:
                filesystem.unlock(file)

    def get_table(self, exchange: str) -> Any:
        try:
            return super().get_table(exchange)
        except ValueError:  # somebody is about to write it
            return []


class Transport(filesystem.Transport):
    """As kombu's, by the scheme `idempotency-folder://`."""

    Channel = Channel


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:{Transport.__name__}"


_REDIS: Final = frozenset({"redis", "rediss", "unix"})

VISIBILITY_SECONDS: Final = round(2 * LONGEST_BUDGET_SECONDS)
"""Redis gives a task to the next worker when nobody has confirmed it for this long, which is after every chore's end."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker as Celery wants it named. Shown without its URL, which may hold a password."""

    url: str = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)


def broker_of(settings: Settings) -> Broker:
    """What `IDEMPOTENCY_BROKER_URL` names, and else the Redis of the store. Raises `ConfigurationError` for neither."""
    if settings.broker_url is not None:
        return _named(settings.broker_url)
    if isinstance(settings.store, str) and urlsplit(settings.store).scheme in _REDIS:
        # What else its query says is for the store's client, and Celery's would not start with it.
        return Broker(_redis_url(settings.store, keep=("ssl_",)), {"visibility_timeout": VISIBILITY_SECONDS})
    raise ConfigurationError(
        "The janitor's Celery worker needs a broker, and the store is no redis://, rediss:// or unix:// URL that could be "
        f"one{_why(settings.store)}. Set IDEMPOTENCY_BROKER_URL to a Redis (redis://…), a RabbitMQ (amqp://…), or on a single "
        "machine to a folder (filesystem:///var/lib/…); or register the chores on a Celery application of your own; or do "
        "without Celery, and have cron run `flask idempotency reap` and `flask idempotency expire`."
    )


def _why(choice: object) -> str:
    """Why what a store can be in is no broker."""
    kind = choice.partition(":")[0].partition("+")[2].lower() if isinstance(choice, str) else ""
    return {
        "cluster": ": Celery can keep no queue in a Cluster",
        "sentinel": ": Celery takes Sentinels as sentinel://host:26379;sentinel://host:26379 only, with a master_name among "
        "the transport options of an application of your own",
    }.get(kind, "")


def _named(url: str) -> Broker:
    scheme = urlsplit(url).scheme
    if scheme in _REDIS:
        return Broker(_redis_url(url), {"visibility_timeout": VISIBILITY_SECONDS})
    if scheme == "filesystem":
        return _folder(url)
    if why := _why(url):
        raise ConfigurationError(f"IDEMPOTENCY_BROKER_URL: names no broker{why}. Name a Redis of its own (redis://…).")
    if scheme == "memory":
        raise ConfigurationError(
            "IDEMPOTENCY_BROKER_URL: memory:// reaches nobody, because beat is a process of its own. On a single machine "
            "name a folder: filesystem:///var/lib/…"
        )
    return Broker(url)


def _redis_url(url: str, *, keep: tuple[str, ...] = ("",)) -> str:
    """A URL as redis-py reads it, as kombu reads it. Of its query what begins with one of `keep`."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    database = query.pop("db", None)
    query = {name: value for name, value in query.items() if name.startswith(keep)}
    scheme, path = parts.scheme, parts.path
    if scheme == "unix":
        scheme = "redis+socket"
        if database is not None:
            query["virtual_host"] = database
    elif database is not None:
        path = f"/{database}"
    if scheme == "rediss":
        # kombu would ask for no certificate at all.
        query.setdefault("ssl_cert_reqs", "required")
    return f"{scheme}://{parts.netloc}{path}" + (f"?{urlencode(query)}" if query else "")


def _folder(url: str) -> Broker:
    path = unquote(urlsplit(url).path)
    if path in ("", "/"):
        raise ConfigurationError(
            "IDEMPOTENCY_BROKER_URL: filesystem:// needs a folder that worker and beat may write to, and nobody else: "
            "filesystem:///var/lib/…"
        )
    folders = {name: Path(path, name) for name in ("messages", "control", "processed")}
    for folder in folders.values():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whoever sends puts them where whoever works looks: there is one folder for both.
    names = {"data_folder_in": "messages", "data_folder_out": "messages"}
    names |= {"control_folder": "control", "processed_folder": "processed"}
    return Broker(f"{SCHEME}://", {option: str(folders[name]) for option, name in names.items()})

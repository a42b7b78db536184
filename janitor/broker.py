"""Choose the broker of the janitor's own Celery application, and make a folder a safe broker."""

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

# A folder as a broker: kombu's transport, made safe for several processes.

SCHEME: Final = "idempotency-folder"

_UNWRITTEN: Final = ".unwritten"
_BIND_LOCK: Final = ".bind-lock"


class Channel(filesystem.Channel):
    """Write whole files. kombu opens a file and then writes it; a worker that reads the empty file in between ends."""

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        name = f"{round(monotonic() * 1000)}_{uuid4()}.{queue}.msg"
        unwritten = Path(self.data_folder_out, name + _UNWRITTEN)
        unwritten.write_text(dumps(payload), encoding="utf-8")
        os.replace(unwritten, Path(self.data_folder_out, name))

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        # A kombu without this class wrote an incomplete message. Skip it; beat sends the next.
        while True:
            with suppress(ValueError):
                return super()._get(queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        # Worker and beat start together and both bind. Without the lock, one reads the file before the other has
        # written it, and ends.
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
        except ValueError:  # another process is writing it
            return []


class Transport(filesystem.Transport):
    """kombu's transport with this channel, for the scheme `idempotency-folder://`."""

    Channel = Channel


TRANSPORT_ALIASES[SCHEME] = f"{__name__}:{Transport.__name__}"


_REDIS: Final = frozenset({"redis", "rediss", "unix"})

VISIBILITY_SECONDS: Final = round(2 * LONGEST_BUDGET_SECONDS)
"""Redis gives a task to the next worker if none confirms it for this long: longer than any task runs."""


@dataclass(frozen=True, slots=True)
class Broker:
    """The URL and options of a broker for Celery. Its `repr` hides the URL, which may hold a password."""

    url: str = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)


def broker_of(settings: Settings) -> Broker:
    """Return the broker of IDEMPOTENCY_BROKER_URL, or else the Redis of the store. Raises `ConfigurationError` for neither."""
    if settings.broker_url is not None:
        return _named(settings.broker_url)
    if isinstance(settings.store, str) and urlsplit(settings.store).scheme in _REDIS:
        # The rest of its query is for the store's client; Celery's does not start with it.
        return Broker(_redis_url(settings.store, keep=("ssl_",)), {"visibility_timeout": VISIBILITY_SECONDS})
    raise ConfigurationError(
        "The janitor's Celery worker needs a broker, and IDEMPOTENCY_STORE is no redis://, rediss:// or unix:// URL that could "
        f"be one{_why(settings.store)}. Set IDEMPOTENCY_BROKER_URL to a Redis (redis://…), a RabbitMQ (amqp://…), or on a "
        "single machine to a folder (filesystem:///var/lib/…), in app.config: it is no environment variable. Or register the "
        "tasks on your own Celery application; or do without Celery, and let cron run `flask idempotency reap` and `flask "
        "idempotency expire`."
    )


def _why(choice: object) -> str:
    """Return why this kind of store URL cannot be a broker."""
    kind = choice.partition(":")[0].partition("+")[2].lower() if isinstance(choice, str) else ""
    return {
        "cluster": ": Celery can keep no queue in a Cluster",
        "sentinel": ": Celery takes Sentinels only as sentinel://host:26379;sentinel://host:26379, with a master_name in the "
        "transport options of your own application",
    }.get(kind, "")


def _named(url: str) -> Broker:
    scheme = urlsplit(url).scheme
    if scheme in _REDIS:
        return Broker(_redis_url(url), {"visibility_timeout": VISIBILITY_SECONDS})
    if scheme == "filesystem":
        return _folder(url)
    if why := _why(url):
        raise ConfigurationError(f"IDEMPOTENCY_BROKER_URL: names no broker{why}. Name another Redis (redis://…).")
    if scheme == "memory":
        raise ConfigurationError(
            "IDEMPOTENCY_BROKER_URL: memory:// reaches no worker, because beat is another process. On a single machine "
            "name a folder: filesystem:///var/lib/…"
        )
    return Broker(url)


def _redis_url(url: str, *, keep: tuple[str, ...] = ("",)) -> str:
    """Translate a URL of redis-py to one of kombu, with the query parameters that start with one of `keep`."""
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
        # kombu checks no certificate by default.
        query.setdefault("ssl_cert_reqs", "required")
    return f"{scheme}://{parts.netloc}{path}" + (f"?{urlencode(query)}" if query else "")


def _folder(url: str) -> Broker:
    path = unquote(urlsplit(url).path)
    if path in ("", "/"):
        raise ConfigurationError(
            "IDEMPOTENCY_BROKER_URL: filesystem:// needs a folder that only worker and beat may write to: "
            "filesystem:///var/lib/…"
        )
    folders = {name: Path(path, name) for name in ("messages", "control", "processed")}
    for folder in folders.values():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One folder for both: beat writes messages where workers read them.
    names = {"data_folder_in": "messages", "data_folder_out": "messages"}
    names |= {"control_folder": "control", "processed_folder": "processed"}
    return Broker(f"{SCHEME}://", {option: str(folders[name]) for option, name in names.items()})

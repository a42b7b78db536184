"""What the tests of the whole are given."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.testing import TcpProxy
from tests.e2e.books import Books
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Fleet, Plan, Server
from tests.forgiving import make_ready
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect


class Serve(Protocol):
    def __call__(self, choice: RedisServer | str | None = None, **plan: Any) -> Server: ...


class Figures(Protocol):
    def __call__(self, **figures: object) -> None: ...


@pytest.fixture(scope="session")
def ledger_server(redis_servers: RedisServers) -> Iterator[RedisServer]:
    with RedisServer(redis_servers.program(REDIS_KINDS[0])) as server:
        yield server


@pytest.fixture(scope="session")
def ledger(ledger_server: RedisServer) -> Ledger:
    return Ledger(ledger_server.url)


@pytest.fixture(scope="session")
def fleet(ledger_server: RedisServer) -> Iterator[Fleet]:
    fleet = Fleet(ledger_server.url)
    yield fleet
    fleet.stop()


@pytest.fixture
def store(redis_servers: RedisServers) -> RedisServer:
    """An empty store, for what does not depend on which Redis it is."""
    return redis_servers.get(REDIS_KINDS[0])


@pytest.fixture
def served() -> list[Server]:
    """The servers that this test has asked for."""
    return []


@pytest.fixture
def serve(fleet: Fleet, store: RedisServer, served: list[Server]) -> Serve:
    """A server of the victim: `serve(kind="sync", lease=1)`; see `Plan`. Without a store it uses the fixture's."""

    def start(choice: RedisServer | str | None = None, **plan: Any) -> Server:
        choice = choice or store
        url = choice if isinstance(choice, str) else choice.url
        make_ready(url)
        served.append(fleet.get(Plan(url, **plan)))
        return served[-1]

    return start


@pytest.fixture
def serve_once(ledger_server: RedisServer, store: RedisServer, served: list[Server]) -> Iterator[Serve]:
    """As `serve`, for a server that nobody else will use: it ends with the test."""
    with ExitStack() as started:

        def start(choice: RedisServer | str | None = None, **plan: Any) -> Server:
            choice = choice or store
            url = choice if isinstance(choice, str) else choice.url
            make_ready(url)
            served.append(started.enter_context(Server(Plan(url, **plan), ledger=ledger_server.url)))
            return served[-1]

        yield start


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Books]:
    """A shop's database. Asking for this runs the test on each kind."""
    if request.param == "sqlite":
        books = Books(f"sqlite:///{tmp_path / 'shop.sqlite'}")
    else:
        books = Books(request.getfixturevalue("postgres_url" if request.param == "postgresql" else "mariadb_url"))
    yield books
    books.close()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Says what a test by chance has met: shown when it fails, and by `pytest -rP`."""

    def tell(**figures: object) -> None:
        lines = [f"{name.replace('_', ' ')}: {figure}" for name, figure in figures.items()]
        request.node.add_report_section("call", "figures", "\n".join(lines))

    return tell


@pytest.fixture
def proxy(store: RedisServer) -> Iterator[TcpProxy]:
    """A line to the store that can be held."""
    with TcpProxy(store.port) as proxy:
        yield proxy


def keys(store: RedisServer) -> list[bytes]:
    """Everything that is in a store, but for what each part of one that was made ready remembers."""
    with connect(store.url) as client:
        return [key for key in client.scan_iter() if not key.endswith(b":m")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in getattr(item, "funcargs", {}).get("served", ()):
            report.sections.append((f"log of {server.plan}", server.log[-4000:]))
    return report

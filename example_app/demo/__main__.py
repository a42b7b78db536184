"""`python3 run.py demo`: start the service with all that belongs to it, and tour its promises.

That is two workers, a janitor, a relay and consumers of messages, a database, and two Valkeys: a cache and a broker.

python -m example_app.demo [--exit] [--port N] [--only SCENARIO,…]

The database is a SQLite file, or a new schema in the PostgreSQL that DATABASE_URL names.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from example_app.demo.client import Merchant, Shop
from example_app.demo.customers import customers
from example_app.demo.database import NoDatabase, tour_database
from example_app.demo.operator import CONSOLE
from example_app.demo.report import Finding, Scenario, failures, run, table
from example_app.demo.servers import (
    BEAT_LOG,
    CONSUMER_LOG,
    RELAY_LOG,
    SERVICE_LOG,
    WORKER_LOG,
    CannotStart,
    Programs,
    RedisServer,
    ServerFailed,
    start_consumers,
    start_janitor,
    start_service,
)
from example_app.demo.tour import janitor_tour, message_tour, operator_tour, stripe_tour, tour
from example_app.operators import OPERATORS
from example_app.providers import Providers

PORT = 8000
PROVIDERS_FILE = "providers.sqlite3"
LOGS = (SERVICE_LOG, WORKER_LOG, BEAT_LOG, RELAY_LOG, CONSUMER_LOG)
# Short, because the tour waits for the lease of a killed worker. A busy machine must still be able to renew it in time.
LEASE_SECONDS = 5
# Short, because the tour waits for the janitor.
JANITOR_SECONDS = 1

TRY_THIS = """
The service is at {url} until you press Ctrl-C. Send each of these requests twice:

  curl -i {url}/payments -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: "mine-1"' \\
       -H 'Content-Type: application/json' -d '{{"account": "acc_1", "amount": 1050, "currency": "EUR"}}'

  curl -i {url}/v1/charges -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: mine-2' -d amount=500 -d currency=eur

  curl -i {url}/payments -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: mine-3' \\
       -H 'Content-Type: application/json' \\
       -d '{{"account": "acc_1", "amount": 1, "currency": "EUR", "simulate": {{"crash": "after_commit"}}}}'

The third request kills its worker after the commit. Sent again, it gets the response of the payment that was made.
Then list the payments:

  curl {url}/payments -H 'Authorization: Bearer tok_alice'

Pay in a browser. Click twice, reload, or go back:

  {url}/shop

Watch it in the console, as the operator {operator} with the password {password}. One charge waits there for you.
For a minute, customers send more requests:

  {url}{console}/

Read what each endpoint promises:

  {url}/openapi                  the API as a page, from {url}/openapi.json
  {url}/.well-known/idempotency  the policies as a document
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="The example payments service, with a tour.")
    parser.add_argument("--exit", action="store_true", help="end after the tour; exit code 1 if a promise was broken")
    parser.add_argument(
        "--port", type=int, help=f"where the service listens (default: {PORT}, or a free port if it is taken)"
    )
    parser.add_argument("--only", metavar="SCENARIOS", help='play these alone, by their titles: "first request,retry"')
    options = parser.parse_args(arguments)
    scenarios, notes = chosen(options.only)
    if not scenarios:
        parser.error(f"--only {options.only}: no scenario has one of these titles")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, interrupt)
    code = 1
    try:
        with ExitStack() as running:
            folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="idempotency-demo-")))
            needs_all = not options.exit or any(scenario.needs_all for scenario in scenarios)
            with bound_socket(options.port) as listener:
                print(f"The service is at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
                shop = open_shop(running, listener, folder, needs_all=needs_all)
            findings = run(scenarios, shop)
            print("\n" + table(findings), *notes, sep="\n", flush=True)
            code = verdict(findings, [folder / name for name in LOGS])
            if not options.exit:
                name, account = next(iter(OPERATORS.items()))
                words = {"operator": name, "password": account.password, "console": CONSOLE}
                print(TRY_THIS.format(url=shop.url, **words), flush=True)
                with customers(shop):
                    signal.pause()
    except KeyboardInterrupt:
        # Ctrl-C is the normal end of serving. In the middle of the tour `code` is still 1.
        print("\ndemo: ended", file=sys.stderr)
    except (CannotStart, NoDatabase, ServerFailed) as problem:
        print(f"demo: {problem}", file=sys.stderr)
    return code


def chosen(only: str | None) -> tuple[list[Scenario], list[str]]:
    """Return the scenarios to play, and notes on those that this machine cannot play."""
    scenarios, notes = [*tour, *janitor_tour, *message_tour], []
    if find_spec("stripe") is not None:
        scenarios += stripe_tour
    else:
        notes.append("Stripe's client is not installed, so the tour did not try it: pip install stripe")
    scenarios += operator_tour
    titles = None if only is None else only.split(",")
    return [each for each in scenarios if titles is None or each.title in titles], notes


def verdict(findings: list[Finding], logs: list[Path]) -> int:
    broken = [finding.scenario for finding in findings if not finding.ok]
    if broken:
        print(failures(findings, logs), f"\nPromises broken: {', '.join(broken)}", sep="\n", flush=True)
        return 1
    print("\nThe service kept every promise.", flush=True)
    return 0


def open_shop(running: ExitStack, listener: socket.socket, folder: Path, *, needs_all: bool) -> Shop:
    """Start everything and return a client once the service answers. `running` ends all of it, programs first.

    You may close the socket afterwards: the service has a copy.
    """
    cache, broker = running.enter_context(RedisServer()), running.enter_context(RedisServer())
    merchant = Merchant()
    running.callback(merchant.stop)
    database = running.enter_context(tour_database(os.environ.get("DATABASE_URL"), folder=folder))
    settings = {
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_REDIS_URL": cache.url,
        "IDEMPOTENCY_SECRET": secrets.token_urlsafe(32),
        "IDEMPOTENCY_LEASE": LEASE_SECONDS,
        "IDEMPOTENCY_REAP_INTERVAL": JANITOR_SECONDS,
        "IDEMPOTENCY_EXPIRE_INTERVAL": JANITOR_SECONDS,
        "IDEMPOTENCY_HEARTBEAT_INTERVAL": JANITOR_SECONDS,
        # A folder is the broker: the janitor's worker and beat run on one machine.
        "IDEMPOTENCY_BROKER_URL": f"filesystem://{folder / 'broker'}",
        # It signs the cookie of the shop page.
        "SECRET_KEY": secrets.token_urlsafe(32),
        # The compliance mode: the service does not start if it lacks something for it.
        "IDEMPOTENCY_ENCRYPTION": "required",
        "IDEMPOTENCY_KEY_RING": f"demo:{base64.b64encode(secrets.token_bytes(32)).decode()}",
        # Reach your database as you like: this is only a tour.
        "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": bool(os.environ.get("DATABASE_URL")),
        "SQLALCHEMY_DATABASE_URI": database,
        "DEMO_WITNESS": str(folder / "witness.sqlite3"),
        "DEMO_PROVIDERS": str(folder / PROVIDERS_FILE),
        # Only this machine reaches the service.
        "CONSOLE_ALLOW_HTTP": True,
        "EVENTS_BROKER_URL": broker.url,
        "MERCHANT_URL": merchant.url,
    }
    # Flask reads FLASK_… variables as JSON.
    environment = {**os.environ, **{f"FLASK_{name}": json.dumps(value) for name, value in settings.items()}}
    simulating = {**environment, "DEMO_SIMULATE": "1"}
    programs = running.enter_context(Programs(folder))
    start_service(programs, listener, simulating)
    programs.wait()
    if needs_all:
        # Now, so that they do not delay the first response. The tour waits for them before it needs them.
        start_consumers(programs, simulating)
        start_janitor(programs, simulating, folder=folder)
    shop = Shop(
        listener.getsockname()[1],
        database=database,
        cache=cache,
        broker=broker,
        merchant=merchant,
        providers=Providers(folder / PROVIDERS_FILE),
        environment=environment,
        wait_for_all=programs.wait,
    )
    running.callback(shop.close)
    return shop


def bound_socket(wanted: int | None) -> socket.socket:
    """Return a socket at the wanted port, or raise `CannotStart` if it is taken. Without one, take 8000 or else a free port.

    The service gets the socket and not the number: no other process can take the port in between.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", PORT if wanted is None else wanted))
    except (OSError, OverflowError) as error:
        if wanted is not None:
            listener.close()
            raise CannotStart(f"port {wanted} cannot be used ({error}). Choose another one: --port 8001") from error
        listener.bind(("127.0.0.1", 0))
    return listener


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

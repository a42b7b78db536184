"""`python3 run.py demo`: the service with two workers, a janitor, a database and a Valkey of its own, and a tour of what
it promises.

python -m example_app.demo [--exit] [--port N]

The database is a SQLite file, or a schema of its own in the PostgreSQL that DATABASE_URL names.
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
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from example_app.databases import NoDatabase, tour_database
from example_app.janitor_tour import janitor_tour
from example_app.processes import CannotStart, janitor, service
from example_app.report import Finding, run, table
from example_app.servers import RedisServer, ServerFailed
from example_app.shop import Shop
from example_app.tour import tour

# Short, so that the tour need not wait half a minute for a dead worker's lease.
LEASE_SECONDS = 2
# Nor a minute for the janitor.
JANITOR_SECONDS = 1

TRY_THIS = """
The service is at {url}, until you press Ctrl-C. Try, twice each:

  curl -i {url}/payments -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: "mine-1"' \\
       -H 'Content-Type: application/json' -d '{{"account": "acc_1", "amount": 1050, "currency": "EUR"}}'

  curl -i {url}/v1/charges -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: mine-2' -d amount=500 -d currency=eur

  curl -i {url}/payments -H 'Authorization: Bearer tok_alice' -H 'Idempotency-Key: mine-3' \\
       -H 'Content-Type: application/json' \\
       -d '{{"account": "acc_1", "amount": 1, "currency": "EUR", "simulate": {{"crash": "after_commit"}}}}'

(the third one kills its worker, and finds its payment made when it comes again), and then see what there is:

  curl {url}/payments -H 'Authorization: Bearer tok_alice'
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="The example payments service, with a tour.")
    parser.add_argument("--exit", action="store_true", help="end after the tour; exit code 1 if a promise was broken")
    parser.add_argument("--port", type=int, default=8000, help="where the service listens (default: %(default)s)")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, interrupt)
    code = 1
    try:
        with ExitStack() as running:
            shop = open_shop(running, options.port)
            code = take_tour(shop)
            if not options.exit:
                print(TRY_THIS.format(url=shop.url), flush=True)
                signal.pause()
    except KeyboardInterrupt:
        print("\ndemo: ended", file=sys.stderr)
        # Ctrl-C is how serving is meant to end; in mid-tour nothing has been shown.
    except (CannotStart, NoDatabase, ServerFailed) as problem:
        print(f"demo: {problem}", file=sys.stderr)
    return code


def take_tour(shop: Shop) -> int:
    scenarios = [*tour, *janitor_tour]
    notes = []
    if find_spec("stripe") is not None:
        from example_app.stripe_tour import stripe_tour

        scenarios += stripe_tour
    else:
        notes.append("The stripe client is not installed, so it was not tried: pip install stripe")
    findings = run(scenarios, shop)
    print("\n" + table(findings), *notes, sep="\n", flush=True)
    return verdict(findings)


def verdict(findings: list[Finding]) -> int:
    broken = [finding.scenario for finding in findings if not finding.ok]
    print(f"\nPromises broken: {', '.join(broken)}" if broken else "\nEvery promise was kept.", flush=True)
    return 1 if broken else 0


def open_shop(running: ExitStack, port: int) -> Shop:
    """The service, ready to serve; `running` ends all of it, workers first."""
    refuse_taken(port)
    folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="idempotency-demo-")))
    cache = running.enter_context(RedisServer())
    database = running.enter_context(tour_database(os.environ.get("DATABASE_URL"), folder=folder))
    settings = {
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_REDIS_URL": cache.url,
        "IDEMPOTENCY_SECRET": secrets.token_urlsafe(32),
        "IDEMPOTENCY_LEASE": LEASE_SECONDS,
        "IDEMPOTENCY_REAP_EVERY": JANITOR_SECONDS,
        "IDEMPOTENCY_EXPIRE_EVERY": JANITOR_SECONDS,
        "IDEMPOTENCY_HEARTBEAT_EVERY": JANITOR_SECONDS,
        # No server: worker and beat leave each other notes in a folder.
        "IDEMPOTENCY_BROKER_URL": f"filesystem://{folder / 'broker'}",
        # The compliance mode: it would not start if anything were missing for it.
        "IDEMPOTENCY_ENCRYPTION": "required",
        "IDEMPOTENCY_KEY_RING": f"demo:{base64.b64encode(secrets.token_bytes(32)).decode()}",
        # A database of yours may be reached as you like; this is only a tour.
        "IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT": bool(os.environ.get("DATABASE_URL")),
        "SQLALCHEMY_DATABASE_URI": database,
        "DEMO_WITNESS": str(folder / "witness.sqlite3"),
    }
    # Flask reads FLASK_… variables as JSON.
    environment = {**os.environ, **{f"FLASK_{name}": json.dumps(value) for name, value in settings.items()}}
    running.enter_context(service(port, {**environment, "DEMO_SIMULATE": "1"}, log=folder / "log"))
    running.enter_context(janitor({**environment, "DEMO_SIMULATE": "1"}, folder=folder))
    shop = Shop(port, database=database, cache=cache, environment=environment)
    running.callback(shop.close)
    return shop


def refuse_taken(port: int) -> None:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise CannotStart(f"port {port} cannot be used ({error}). Choose another one: --port 8001") from error


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""What a worker of gunicorn does, and what its `/metrics` would say: run as a program, with PROMETHEUS_MULTIPROC_DIR set."""

from __future__ import annotations

import os
import sys

from flask import Flask
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from flask_idempotency import Idempotency
from flask_idempotency.metrics import gauges_of


def main() -> None:
    app = Flask("crowd")
    app.config["TESTING"] = True
    Idempotency(app, secret="s-9f2c47d1e8b35a60", metrics=True)
    app.post("/")(lambda: "paid")
    child = os.fork()
    app.test_client().post("/", headers={"Idempotency-Key": "k"})
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(gauges_of(app))
    sys.stdout.write(generate_latest(registry).decode())


if __name__ == "__main__":
    main()

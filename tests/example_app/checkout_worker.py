"""A process of its own: it sends one checkout to the application, and may be killed at any time."""

from __future__ import annotations

import json
import sys

from example_app.app import create_app
from tests.example_app.conftest import Customer


def tell(line: str) -> None:
    # At once: the test waits for it.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(config: str, key: str, body: str) -> None:
    customer = Customer(create_app(json.loads(config)))
    tell("ready")
    answer = customer.send("POST", "/checkouts", key, json.loads(body))
    tell(str(answer.status_code))


if __name__ == "__main__":
    main(*sys.argv[1:])

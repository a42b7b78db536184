"""A process of its own: it sends one checkout to the application, and may be killed at any time."""

from __future__ import annotations

import json
import sys

from example_app.app import create_app
from tests.example_app.conftest import Customer


def main(config: str, key: str, body: str) -> None:
    customer = Customer(create_app(json.loads(config)))
    print("ready", flush=True)
    answer = customer.send("POST", "/checkouts", key, json.loads(body))
    print(answer.status_code, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

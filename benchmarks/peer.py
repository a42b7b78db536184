"""The package that a Flask user could pick instead: the idempotency utility of `aws-lambda-powertools`, on Redis.

A decorator on the view hands the request to `idempotent_function` and keeps the status, the kept headers and the body. Its
key is the principal and the `Idempotency-Key`.

It has no mismatch. The utility can compare a payload, but its Redis layer drops the payload's hash from a completed record,
and then refuses every replay (3.37.0, `CachePersistenceLayer._update_record`; powertools-lambda-typescript #5705 is the same
fault). So the body is not compared.
Without a Lambda context the utility warns on every request and never frees the key of a dead worker, so it gets one.
"""

from __future__ import annotations

import warnings
from functools import wraps
from importlib.metadata import version
from typing import Any, cast

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CacheClientProtocol, CachePersistenceLayer
from aws_lambda_powertools.utilities.typing import LambdaContext
from flask import Flask, Response, request

from benchmarks.apps import KEEP_SECONDS, PRINCIPAL, UNRENEWED_SECONDS, Gate, View, bare
from benchmarks.by_hand import KEPT_HEADERS, invalid_key, running

VERSION = version("aws-lambda-powertools")


class Deadline:
    """What the utility reads of a Lambda context: how long the request may still take."""

    def get_remaining_time_in_millis(self) -> int:
        return UNRENEWED_SECONDS * 1000


def marked(response: Any, idempotent_data: object) -> Any:
    """Mark a stored response as replayed."""
    response["headers"].append(("Idempotency-Replayed", "true"))
    return response


def peer(client: redis.Redis, *, gate: Gate | None = None) -> Flask:
    """Return the service with each POST view decorated."""
    app = bare(gate=gate)
    config = IdempotencyConfig(
        event_key_jmespath="[principal, key]",
        raise_on_no_idempotency_key=True,
        expires_after_seconds=KEEP_SECONDS,
        lambda_context=cast("LambdaContext", Deadline()),
        response_hook=marked,
    )
    with warnings.catch_warnings():
        # The class is deprecated under one of its two names, and warns under both.
        warnings.simplefilter("ignore", DeprecationWarning)
        store = CachePersistenceLayer(client=cast("CacheClientProtocol", client))

    def guarded(name: str, view: View) -> View:
        def run(*, call: dict[str, Any]) -> dict[str, Any]:
            response = view()
            headers = [pair for pair in response.headers if pair[0].lower() in KEPT_HEADERS]
            return {"status": response.status_code, "headers": headers, "body": response.get_data(as_text=True)}

        once = idempotent_function(
            run, data_keyword_argument="call", config=config, persistence_store=store, key_prefix=name
        )

        @wraps(view)
        def decorated() -> Response:
            key = request.headers.get("Idempotency-Key")
            if key is None:
                return view()
            if not 1 <= len(key) <= 255:
                return invalid_key()
            try:
                kept = once(call={"principal": PRINCIPAL, "key": key})
            except IdempotencyAlreadyInProgressError:
                return running()
            return Response(kept["body"], kept["status"], kept["headers"])

        return decorated

    for name in ("pay", "held", "listed", "large"):
        app.view_functions[name] = guarded(name, cast("View", app.view_functions[name]))
    return app

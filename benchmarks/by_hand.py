"""What a good engineer writes by hand in two hooks on Redis: the application that the library's speed is compared with.

It has what the library's fast path has: keys scoped by HMAC, a fingerprint of the JSON's meaning, a token that the completion
compares, the status, the kept headers and the body. It has no renewal of leases, no quarantine, no check for lost data, no
limits and no streams: a worker that dies runs again when its lease ends. `sql_apps` has the same hooks on SQL.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

import redis
from flask import Flask, Response, g, request

from benchmarks.apps import KEEP_SECONDS, PRINCIPAL, SECRET, UNRENEWED_SECONDS, Gate, bare

KEPT_HEADERS = frozenset(
    {"content-type", "content-language", "content-disposition", "location", "etag", "link", "vary"}
)

CLAIM = """
local held = redis.call('HMGET', KEYS[1], 'fingerprint', 'state')
if not held[1] then
  redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'state', 'in-flight', 'token', ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return {'granted'}
end
if held[1] ~= ARGV[1] then return {'mismatch'} end
if held[2] ~= 'completed' then return {'in-flight'} end
return {'replay', unpack(redis.call('HMGET', KEYS[1], 'status', 'headers', 'body'))}
"""

COMPLETE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'completed', 'status', ARGV[2], 'headers', ARGV[3], 'body', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""

_SECRET = SECRET.encode()


def sent_key() -> str | None:
    """Return the request's key, or None if this request is not guarded."""
    return request.headers.get("Idempotency-Key") if request.method in ("POST", "PUT", "PATCH", "DELETE") else None


def scoped(key: str) -> str:
    return hmac.new(_SECRET, f"{len(PRINCIPAL)}:{PRINCIPAL}:{key}".encode(), hashlib.sha256).hexdigest()


def fingerprint() -> str:
    digest = hmac.new(_SECRET, digestmod=hashlib.sha256)
    for part in (request.method, request.path, request.query_string.decode("latin-1"), request.mimetype):
        digest.update(f"{len(part)}:{part}".encode())
    body = request.get_data()
    if request.is_json:
        body = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
    digest.update(body)
    return digest.hexdigest()


def kept_headers(response: Response) -> str:
    return json.dumps([pair for pair in response.headers if pair[0].lower() in KEPT_HEADERS])


def replayed(status: int, headers: str | bytes, body: bytes) -> Response:
    return Response(body, status, [*json.loads(headers), ("Idempotency-Replayed", "true")])


def problem(status: int, code: str, title: str) -> Response:
    document = {"type": f"https://errors.example/{code}", "title": title, "status": status, "code": code}
    return Response(json.dumps(document), status, content_type="application/problem+json")


def invalid_key() -> Response:
    return problem(400, "invalid-key", "The key must have 1 to 255 characters.")


def reused_key() -> Response:
    return problem(422, "key-reused", "This key was used for another request.")


def running() -> Response:
    return problem(409, "in-flight", "A request with this key is running.")


def by_hand(client: redis.Redis, *, gate: Gate | None = None) -> Flask:
    """Return the service with these two hooks."""
    app = bare(gate=gate)
    claim, complete = client.register_script(CLAIM), client.register_script(COMPLETE)

    @app.before_request
    def before() -> Response | None:
        key = sent_key()
        if key is None:
            return None
        if not 1 <= len(key) <= 255:
            return invalid_key()
        name, token = f"idempotency:{scoped(key)}", secrets.token_bytes(16)
        found: Any = claim(keys=[name], args=[fingerprint(), token, UNRENEWED_SECONDS * 1000])
        match found:
            case [b"granted"]:
                g.claim = name, token
                return None
            case [b"replay", status, headers, body]:
                return replayed(int(status), headers, body)
            case [b"mismatch"]:
                return reused_key()
            case _:
                return running()

    @app.after_request
    def after(response: Response) -> Response:
        claimed = g.pop("claim", None)
        if claimed is not None and response.status_code < 500:
            name, token = claimed
            values = [token, response.status_code, kept_headers(response), response.get_data(), KEEP_SECONDS * 1000]
            complete(keys=[name], args=values)
        return response

    return app

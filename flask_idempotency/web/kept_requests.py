"""Keep a request beside its journal, in a form that the janitor can dispatch again.

The bytes, which the store's codec seals as it seals results:

    one line of JSON    version 1; method, path, query, host, media type and header fields; the caller; the storage keys
    body                to the end

It holds neither the client's key nor a credential. A worker loads this for endpoints with `finish="janitor"` only.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flask import Request
from werkzeug.wsgi import get_host

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.journal import LARGEST_ENTRY
from flask_idempotency.engine.keys import Identity, StorageKey
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.web.principals import environ_name
from flask_idempotency.web.request_body import Body, chunks

VERSION: Final = 1

_PARTS: Final = ("REQUEST_METHOD", "SCRIPT_NAME", "PATH_INFO", "QUERY_STRING", "CONTENT_TYPE", "wsgi.url_scheme")
"""The parts of the environ that are kept in any case."""


@valueclass(frozen=True, slots=True)
class KeptRequest:
    """What the janitor needs to dispatch a request again."""

    parts: dict[str, str] = field(repr=False)
    """The environ of WSGI, without its streams and without the server."""
    host: str = field(repr=False)
    """The host and the port that the client named."""
    tenant: str | None = field(repr=False)
    principal: str | None = field(repr=False)
    keys: tuple[StorageKey, ...]
    """The names of its records, with the marks of the secrets that they come from. The newest secret is first."""
    body: bytes = field(repr=False)

    @classmethod
    def of(
        cls,
        request: Request,
        policy: Policy,
        body: Body,
        keys: Sequence[StorageKey],
        caller: tuple[str | None, str | None],
    ) -> KeptRequest | None:
        """Return what is kept of this request. None: an earlier hook parsed its form, and no bytes are left.

        `caller` is its tenant and principal.
        """
        data = body.data
        if data is None and body.stream is not None:
            data = b"".join(chunks(body.stream))
        if data is None and (body.parsed or body.length):
            return None
        environ = request.environ
        parts = {name: str(environ[name]) for name in _PARTS if environ.get(name)}
        for name in map(environ_name, (*policy.finish_headers, *policy.fingerprint_headers)):
            if name in environ:
                parts[name] = str(environ[name])
        return cls(parts, get_host(environ), *caller, tuple(keys), data or b"")

    def encode(self) -> bytes | None:
        """Return the bytes to seal. None: path, query and header fields take too much."""
        keys = [[key.rid.hex(), key.tid.hex(), key.mark.hex()] for key in self.keys]
        head = json.dumps([VERSION, self.parts, self.host, self.tenant, self.principal, keys], separators=(",", ":"))
        data = b"%b\n%b" % (head.encode(), self.body)
        return data if len(data) <= LARGEST_ENTRY else None

    @classmethod
    def decode(cls, data: bytes) -> KeptRequest:
        """Return the request in these bytes. Raises `CorruptRecord` unless `encode` made them."""
        head, _, body = data.partition(b"\n")
        try:
            version, parts, host, tenant, principal, keys = json.loads(head)
            if version != VERSION:
                raise CorruptRecord(f"version {version} of a kept request is unknown to this release")
            found = [(bytes.fromhex(rid), bytes.fromhex(tid), bytes.fromhex(mark)) for rid, tid, mark in keys]
        except (ValueError, TypeError) as error:
            raise CorruptRecord("a kept request cannot be read") from error
        named = tuple(StorageKey(rid, tid, mark=mark) for rid, tid, mark in found)
        return cls(parts, host, tenant, principal, named, body)

    def environ(self) -> dict[str, Any]:
        """Return a new environ of WSGI for this request, as the application's own server makes one."""
        name, _, port = self.host.partition(":") if not self.host.startswith("[") else (self.host, "", "")
        secure = self.parts.get("wsgi.url_scheme") == "https"
        return {
            "SCRIPT_NAME": "",
            "PATH_INFO": "",
            "QUERY_STRING": "",
            "SERVER_NAME": name,
            "SERVER_PORT": port or ("443" if secure else "80"),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "HTTP_HOST": self.host,
            "CONTENT_LENGTH": str(len(self.body)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(self.body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
            **self.parts,
        }


@dataclass(eq=False, repr=False)
class Try:
    """One try to finish a request. It is in the environ of the internal request until that has begun."""

    kept: KeptRequest
    act_for: Callable[[str | None, str | None], Any]
    claim: Claim
    oldest: Identity
    """The identity under the oldest secret of the claim, which downstream keys come from."""
    adopted: bool = False
    """Whether the guard has let the view run under the claim."""
    reason: str = ""
    """Why it did not, if this class knows."""
    environ: dict[str, Any] | None = None
    """The environ of the internal request, until that has begun. A copy of it is another request."""

    def begin(self, request: Request) -> None:
        """Act for the caller: call the application's function before all hooks of this request."""
        self.environ = None
        request.environ.update(_fields(self.act_for(self.kept.principal, self.kept.tenant)))
        # Flask has read them, for the session, and the request keeps what it read.
        request.__dict__.pop("cookies", None)

    def adopt(self, tenant: str | None, principal: str | None) -> bool:
        """Return whether the request came out as the caller that its record has, so that the view may run."""
        self.adopted = (tenant, principal) == (self.kept.tenant, self.kept.principal)
        self.reason = "" if self.adopted else "other-caller"
        return self.adopted


def _fields(given: Any) -> Iterable[tuple[str, str]]:
    """Return the header fields that `act_for` returned: a mapping, or pairs of names and values. None: there are none.

    Raises `TypeError` for anything else.
    """
    pairs = () if given is None else list(getattr(given, "items", lambda: given)())
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
            raise TypeError("act_for returns header fields, as a mapping or as pairs of texts, or None")
    return [(environ_name(name), value) for name, value in pairs]

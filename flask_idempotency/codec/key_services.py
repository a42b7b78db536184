"""Key rings whose key stays in a key service: AWS KMS, the transit engine of HashiCorp Vault, and Google Cloud KMS.

`IDEMPOTENCY_KEY_RING` names one by its URL. A service wraps the data key of each tenant once. What it unwraps, a process
remembers for an hour, and for four more hours if the service does not respond then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import quote, urlsplit

from flask_idempotency.codec.keyring import KID, not_in_ring
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, KeyProviderUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import encode

__all__ = ["AwsKms", "GoogleKms", "VaultTransit"]

FRESH_SECONDS: Final = 3600.0
"""For so long a process uses an unwrapped data key without asking again. A key that is revoked works so long at most."""
STALE_SECONDS: Final = 5 * 3600.0
"""For so long after it was unwrapped, a data key is used while the service does not respond."""
PAUSE_SECONDS: Final = 5.0
"""After a call that brought no response, the service is not asked again for so long where a remembered key serves."""
MOST_KEYS: Final = 4096
"""Unwrapped data keys that a process remembers: about a megabyte."""
TIMEOUT_SECONDS: Final = 3.0

_LARGEST_REPLY: Final = 256 * 1024


class _Away(Exception):
    """The service did not respond, or has too much to do. The text names the cause."""


class _Refused(Exception):
    """The service refused: a permission is missing, or the key is disabled. The text names the cause."""


class _NotWrappedHere(Exception):
    """The key of the service did not wrap this, or not in this context."""


Verb: TypeAlias = Literal["encrypt", "decrypt"]

_JSON_FIELDS: Final[Mapping[Verb, tuple[str, str]]] = {
    "encrypt": ("plaintext", "ciphertext"),
    "decrypt": ("ciphertext", "plaintext"),
}
"""What a call sends, and what the reply has, in JSON."""


class KeyService:
    """A `KeyProvider` with one key of a service. Subclasses send the calls.

    Raises `KeyProviderUnavailable` if the service does not respond and no remembered key serves, or if it refuses: a refusal
    counts immediately, and the key that it concerns is forgotten.
    """

    service: str
    """The name of the service, for people."""
    permission: str
    """What the identity of this host needs, for people."""

    def __init__(self, kid: str, *, client: Any = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kid = kid
        self._given = self._client = client
        self._monotonic = monotonic
        self._known: dict[bytes, tuple[float, bytes]] = {}
        """By a digest of the wrapped key and its place: since when, and the key. The oldest first."""
        self._asked_again_at = 0.0
        self._binds = False
        """Whether the service has refused a wrapped key in another context, as it must."""
        after_fork(self._renew)

    def _renew(self) -> None:
        # The connections of the parent are not the child's.
        self._client = self._given

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._kid})"

    @property
    def newest(self) -> str:
        return self._kid

    def kids(self) -> Sequence[str]:
        return (self._kid,)

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        if kid != self._kid:
            raise CorruptRecord(not_in_ring(kid))
        wrapped = self._ask(lambda: self._call("encrypt", key, context))
        if not self._binds:
            # An old Vault ignores what it does not know.
            try:
                self._ask(lambda: self._call("decrypt", wrapped, context + b"\0"))
            except _NotWrappedHere:
                self._binds = True
            else:
                raise KeyProviderUnavailable(
                    f"{self.service} opens a wrapped key in another context, so wrapped keys could be exchanged: use a key and "
                    "a version of the service that bind the context",
                    remedy="For Vault, use a key of type aes256-gcm96 and a release that knows `associated_data`.",
                )
        return wrapped

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        if kid != self._kid:
            raise CorruptRecord(not_in_ring(kid))
        name = hashlib.sha256(encode(wrapped, context)).digest()
        now = self._monotonic()
        since, known = self._known.get(name, (0.0, None))
        if known is not None and now - since < FRESH_SECONDS:
            return known
        usable = known if now - since < STALE_SECONDS else None
        if usable is not None:
            if now < self._asked_again_at:
                return usable
            # Other threads use the key that is known, and do not ask beside this one.
            self._asked_again_at = now + PAUSE_SECONDS
        try:
            key = self._call("decrypt", wrapped, context)
        except _Away as error:
            if usable is not None:
                return usable
            raise self._unavailable(error) from error
        except _Refused as error:
            self._known.pop(name, None)
            raise self._unavailable(error) from error
        except _NotWrappedHere as error:
            self._known.pop(name, None)
            raise CorruptRecord(
                f"{self.service} did not wrap this data key under {self._kid!r}: either the store was damaged, or "
                "IDEMPOTENCY_KEY_RING names another key here than where it was wrapped"
            ) from error
        self._asked_again_at = 0.0
        self._known.pop(name, None)
        self._known[name] = now, key
        while len(self._known) > MOST_KEYS:
            # Another thread may have removed it.
            self._known.pop(next(iter(self._known), b""), None)
        return key

    def _ask(self, call: Callable[[], bytes]) -> bytes:
        try:
            return call()
        except (_Away, _Refused) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: _Away | _Refused) -> KeyProviderUnavailable:
        if isinstance(error, _Away):
            return KeyProviderUnavailable(
                f"{self.service} did not respond ({error})",
                remedy=f"Make sure that this host reaches {self.service}, and that the key's region or address is right.",
            )
        return KeyProviderUnavailable(
            f"{self.service} refused ({error})", remedy=f"{self.permission} Make sure that the key is enabled."
        )

    def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
        """Let the service encrypt or decrypt this in this context. Raises `_Away`, `_Refused` and `_NotWrappedHere`."""
        raise NotImplementedError


class AwsKms(KeyService):
    """A symmetric key of AWS KMS: `aws-kms:arn:aws:kms:REGION:ACCOUNT:key/ID`. Needs the extra `aws`.

    The credentials are those of boto3. The context of a wrapped key is its encryption context.
    """

    service = "AWS KMS"
    permission = "Allow kms:Encrypt and kms:Decrypt on the key to the identity of this host."

    _ARN = re.compile(r"arn:[a-z-]+:kms:([a-z0-9-]+):\d{12}:key/(?:mrk-)?([0-9a-f-]{32,36})")
    _CORRUPT = frozenset({"InvalidCiphertextException", "IncorrectKeyException"})
    _BUSY = frozenset(
        {
            *("ThrottlingException", "LimitExceededException", "KMSInternalException", "DependencyTimeoutException"),
            *("KeyUnavailableException", "ServiceUnavailable", "RequestTimeout", "InternalFailure"),
        }
    )

    def __init__(self, arn: str, *, client: Any = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Take the ARN of a key. `client` is one of boto3; by default it is made for the key's region.

        Raises `ConfigurationError` for another text, also for an alias, and without boto3.
        """
        found = self._ARN.fullmatch(arn)
        if found is None:
            raise ConfigurationError(
                "aws-kms: needs the ARN of a key, such as aws-kms:arn:aws:kms:eu-central-1:111122223333:key/1234abcd-…. An "
                "alias may lead to another key later, so name the key itself."
            )
        super().__init__(found[2].replace("-", "")[:32], client=client, monotonic=monotonic)
        try:
            import boto3  # type: ignore[import-untyped]
            from botocore import config, exceptions  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise ConfigurationError(
                "aws-kms: needs boto3, which is not installed: pip install 'flask-idempotency[aws]'."
            ) from None
        self._arn = arn
        self._errors = exceptions
        timeouts = config.Config(
            connect_timeout=2, read_timeout=TIMEOUT_SECONDS, retries={"total_max_attempts": 2, "mode": "standard"}
        )
        self._make: Callable[[], Any] = lambda: boto3.client("kms", region_name=found[1], config=timeouts)

    def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
        sent, wanted = ("Plaintext", "CiphertextBlob") if verb == "encrypt" else ("CiphertextBlob", "Plaintext")
        within = {"flask-idempotency": _text(context)}
        try:
            if self._client is None:
                self._client = self._make()
            call = getattr(self._client, verb)
            reply: Mapping[str, Any] = call(KeyId=self._arn, EncryptionContext=within, **{sent: data})
            return bytes(reply[wanted])
        except self._errors.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code in self._CORRUPT:
                raise _NotWrappedHere(code) from None
            raise (_Away if code in self._BUSY or status >= 500 else _Refused)(code) from None
        except self._errors.BotoCoreError as error:
            raise _Away(type(error).__name__) from None


class VaultTransit(KeyService):
    """A key of the transit engine of HashiCorp Vault: `vault:https://HOST:8200/MOUNT/KEY`. Needs no package.

    The key is of type aes256-gcm96, and rotates in Vault. The token is that of `VAULT_TOKEN`, or the text of the file that
    `VAULT_TOKEN_FILE` names, which is read for each call because an agent renews it; a local agent that adds the token needs
    neither. `VAULT_NAMESPACE` and `VAULT_CACERT` count too.
    """

    service = "Vault"
    permission = "Give the token a policy with `update` on MOUNT/encrypt/KEY and MOUNT/decrypt/KEY."

    _CORRUPT = re.compile(r"message authentication failed|invalid ciphertext|unable to decrypt", re.IGNORECASE)

    def __init__(self, url: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Take the URL. Raises `ConfigurationError` for another text, and for http to another host than this one."""
        parts = urlsplit(url)
        mount, _, key = parts.path.strip("/").rpartition("/")
        if parts.scheme not in ("http", "https") or not parts.hostname or not mount or not KID.fullmatch(key):
            raise ConfigurationError(
                "vault: needs the address of a transit key, such as vault:https://vault.example:8200/transit/payments. The "
                "name of the key has 1 to 32 letters, digits, dots, hyphens or underscores."
            )
        local = parts.hostname == "localhost"
        with suppress(ValueError):  # it is a name
            local = ip_address(parts.hostname).is_loopback
        if parts.scheme == "http" and not local:
            raise ConfigurationError(
                "vault: needs https, because data keys travel there. http is for an agent on this host."
            )
        super().__init__(key, monotonic=monotonic)
        self._base = f"{parts.scheme}://{parts.netloc}/v1/{quote(mount)}"

    def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
        sent, wanted = _JSON_FIELDS[verb]
        try:
            text = _text(data) if verb == "encrypt" else data.decode("ascii")
        except UnicodeDecodeError:
            raise _NotWrappedHere("no ciphertext of Vault") from None
        headers = {"Content-Type": "application/json", "X-Vault-Request": "true"}
        if namespace := os.environ.get("VAULT_NAMESPACE"):
            headers["X-Vault-Namespace"] = namespace
        try:
            token = os.environ.get("VAULT_TOKEN", "")
            if not token and (file := os.environ.get("VAULT_TOKEN_FILE")):
                with open(file, encoding="ascii") as opened:
                    token = opened.read(4096).strip()
            if token:
                headers["X-Vault-Token"] = token
            body = json.dumps({sent: text, "associated_data": _text(context)}).encode()
            request = urllib.request.Request(  # noqa: S310 - `__init__` has checked the scheme
                f"{self._base}/{verb}/{self._kid}", body, headers, method="POST"
            )
            with _opener().open(request, timeout=TIMEOUT_SECONDS) as response:
                reply = json.loads(response.read(_LARGEST_REPLY))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_LARGEST_REPLY).decode("utf-8", "replace")
            if error.code == 400 and self._CORRUPT.search(said):
                raise _NotWrappedHere("HTTP 400") from None
            raise (_Refused if 400 <= error.code < 500 and error.code != 429 else _Away)(f"HTTP {error.code}") from None
        except (OSError, ValueError) as error:
            raise _Away(type(error).__name__) from None
        found = _text_in(reply, "data", wanted)
        return found.encode() if verb == "encrypt" else _bytes(found)


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens URLs with the certificates of VAULT_CACERT, and follows no redirect: it would carry the token."""
    import ssl  # only Vault needs it

    context = ssl.create_default_context(cafile=os.environ.get("VAULT_CACERT") or None)
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none. The redirect then is an `HTTPError`."""


class Session(Protocol):
    """Sends authorised requests to Google Cloud: `google.auth.transport.requests.AuthorizedSession`."""

    def post(self, url: str, *, json: Mapping[str, str], timeout: float) -> Any: ...


class GoogleKms(KeyService):
    """A symmetric key of Google Cloud KMS: `gcp-kms:projects/P/locations/L/keyRings/R/cryptoKeys/K`. Needs the extra `gcp`.

    The credentials are Google's application default credentials. The key rotates in the service.
    """

    service = "Google Cloud KMS"
    permission = "Give the identity of this host the role roles/cloudkms.cryptoKeyEncrypterDecrypter on the key."

    _NAME = re.compile(r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/([^/\s]+)")
    _ENDPOINT = "https://cloudkms.googleapis.com"

    def __init__(
        self,
        name: str,
        *,
        session: Session | None = None,
        endpoint: str = _ENDPOINT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the resource name of a key. Raises `ConfigurationError` for another text, and without google-auth."""
        found = self._NAME.fullmatch(name)
        if found is None or not KID.fullmatch(found[1]):
            raise ConfigurationError(
                "gcp-kms: needs the resource name of a key, such as "
                "gcp-kms:projects/shop/locations/europe-west3/keyRings/prod/cryptoKeys/payments, without a version. The name "
                "of the key has 1 to 32 letters, digits, hyphens or underscores."
            )
        super().__init__(found[1], client=session, monotonic=monotonic)
        self._url = f"{endpoint}/v1/{quote(name)}"
        if session is None:
            try:
                import google.auth.transport.requests  # noqa: F401 - looked for
            except ModuleNotFoundError:
                raise ConfigurationError(
                    "gcp-kms: needs google-auth, which is not installed: pip install 'flask-idempotency[gcp]'."
                ) from None

    def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
        sent, wanted = _JSON_FIELDS[verb]
        arguments = {sent: _text(data), "additionalAuthenticatedData": _text(context)}
        try:
            if self._client is None:
                import google.auth  # only with the extra `gcp`
                from google.auth.transport.requests import AuthorizedSession

                credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloudkms"])
                self._client = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
            response = self._client.post(f"{self._url}:{verb}", json=arguments, timeout=TIMEOUT_SECONDS)
            status, reply = response.status_code, response.json() if response.content else {}
        except Exception as error:  # noqa: BLE001 - google-auth and requests have no common class, and neither tells of a key
            raise _Away(type(error).__name__) from None
        if status == 200:
            return _bytes(_text_in(reply, wanted))
        said = reply.get("error", {}).get("status") if isinstance(reply, dict) else None
        if verb == "decrypt" and said == "INVALID_ARGUMENT":
            # A disabled version of the key is FAILED_PRECONDITION, with the same 400.
            raise _NotWrappedHere("HTTP 400")
        raise (_Refused if 400 <= status < 500 and status != 429 else _Away)(f"HTTP {status}")


def _text_in(reply: Any, *path: str) -> str:
    for name in path:
        reply = reply.get(name) if isinstance(reply, dict) else None
    if not isinstance(reply, str):
        raise _Away("a reply of another form")
    return reply


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise _Away("a reply of another form") from None


SERVICES: Final[Mapping[str, Callable[[str], KeyService]]] = {
    "aws-kms": AwsKms,
    "vault": VaultTransit,
    "gcp-kms": GoogleKms,
}
"""By the scheme of their URLs."""

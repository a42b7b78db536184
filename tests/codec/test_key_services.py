"""Keys that stay in a key service: what is asked of it and how often, and what an outage and a refusal mean.

AWS KMS is moto's. Vault and Google Cloud KMS are stand-ins that speak their documented interfaces over real sockets.
"""

from __future__ import annotations

import json
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import google.auth.credentials
import pytest
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.stub import Stubber  # type: ignore[import-untyped]
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.auth.transport.requests import AuthorizedSession
from moto import mock_aws

from flask_idempotency.codec.encryption import DataKeyring
from flask_idempotency.codec.key_services import (
    FRESH_SECONDS,
    PAUSE_SECONDS,
    STALE_SECONDS,
    AwsKms,
    GoogleKms,
    KeyService,
    VaultTransit,
    Verb,
    _Away,
    _NotWrappedHere,
    _Refused,
)
from flask_idempotency.codec.key_sources import load_ring
from flask_idempotency.codec.keyring import KeyProvider, KeyRing
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, KeyProviderUnavailable
from flask_idempotency.operations.doctor import newest_key
from flask_idempotency.stores.memory import MemoryStore
from tests.codec.sealing import NEW, OTHER_TENANT, TENANT, Monotonic
from tests.lab.tls import make_certificate

DATA_KEY = b"d" * 32
CONTEXT = b"whose key it is"
ARN = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


class Scripted(KeyService):
    """A service that fails as the test says, and notes what it is asked."""

    service = "The service"
    permission = "Allow it."

    def __init__(self, clock: Monotonic, kid: str = "remote") -> None:
        super().__init__(kid, monotonic=clock)
        self.failure: Exception | None = None
        self.asked: list[str] = []
        self._ring = KeyRing({kid: NEW})

    def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
        self.asked.append(verb)
        if self.failure is not None:
            raise self.failure
        if verb == "encrypt":
            return self._ring.wrap(self.newest, data, context=context)
        try:
            return self._ring.unwrap(self.newest, data, context=context)
        except CorruptRecord as error:
            raise _NotWrappedHere from error


@pytest.fixture
def clock() -> Monotonic:
    return Monotonic()


@pytest.fixture
def service(clock: Monotonic) -> Scripted:
    return Scripted(clock)


def unwrapped(service: KeyProvider, wrapped: bytes, context: bytes = CONTEXT) -> bytes:
    return service.unwrap(service.newest, wrapped, context=context)


def wrapped_by(service: KeyProvider) -> bytes:
    return service.wrap(service.newest, DATA_KEY, context=CONTEXT)


# How often a service is asked, and what an outage means.


def test_a_key_is_asked_for_once_an_hour(service: Scripted, clock: Monotonic) -> None:
    wrapped = wrapped_by(service)
    service.asked.clear()

    for _ in range(3):
        assert DATA_KEY == unwrapped(service, wrapped)
        clock.now += FRESH_SECONDS / 3 - 1
    assert ["decrypt"] == service.asked
    clock.now += 4
    assert DATA_KEY == unwrapped(service, wrapped)
    assert ["decrypt"] * 2 == service.asked


def test_the_first_use_of_a_new_key_is_checked_against_the_service(service: Scripted) -> None:
    """What was just wrapped is not remembered: a service that garbles keys must show before a response is sealed."""
    wrapped = wrapped_by(service)
    service.asked.clear()
    unwrapped(service, wrapped)

    assert ["decrypt"] == service.asked


def test_a_service_that_is_away_is_not_missed_for_four_hours(service: Scripted, clock: Monotonic) -> None:
    """A call that brings nothing costs one request its time, and the others none of it."""
    wrapped = wrapped_by(service)
    unwrapped(service, wrapped)
    service.failure = _Away("timeout")
    service.asked.clear()
    clock.now += FRESH_SECONDS

    assert [DATA_KEY] * 3 == [unwrapped(service, wrapped) for _ in range(3)]
    assert ["decrypt"] == service.asked
    clock.now += PAUSE_SECONDS
    assert DATA_KEY == unwrapped(service, wrapped)
    assert ["decrypt"] * 2 == service.asked
    clock.now += STALE_SECONDS - FRESH_SECONDS
    with pytest.raises(KeyProviderUnavailable, match="did not respond"):
        unwrapped(service, wrapped)


def test_a_refusal_counts_at_once(service: Scripted, clock: Monotonic) -> None:
    """An operator who takes the permission away means it. The key is forgotten, and comes back with the permission."""
    wrapped = wrapped_by(service)
    unwrapped(service, wrapped)
    service.failure = _Refused("AccessDenied")
    clock.now += FRESH_SECONDS

    with pytest.raises(KeyProviderUnavailable, match="refused") as refused:
        unwrapped(service, wrapped)
    assert refused.value.remedy.startswith("Allow it.")
    service.failure = _Away("timeout")
    with pytest.raises(KeyProviderUnavailable):
        unwrapped(service, wrapped)
    service.failure = None
    assert DATA_KEY == unwrapped(service, wrapped)


def test_a_key_that_is_wrapped_elsewhere_is_corrupt(service: Scripted) -> None:
    """It quarantines the record, and is never remembered."""
    wrapped = wrapped_by(service)

    for altered, context in ((wrapped[:-1] + b"x", CONTEXT), (wrapped, b"another place")):
        with pytest.raises(CorruptRecord, match="did not wrap"):
            unwrapped(service, altered, context)
    with pytest.raises(CorruptRecord, match="not in the ring"):
        service.unwrap("other", wrapped, context=CONTEXT)


def test_a_service_that_ignores_the_context_is_refused(clock: Monotonic) -> None:
    """Wrapped keys could be exchanged between tenants."""

    class Lax(Scripted):
        def _call(self, verb: Verb, data: bytes, context: bytes) -> bytes:
            return super()._call(verb, data, CONTEXT)

    with pytest.raises(KeyProviderUnavailable, match="another context"):
        wrapped_by(Lax(clock))


def test_an_outage_of_five_minutes_fails_no_replay_of_a_known_tenant(service: Scripted, clock: Monotonic) -> None:
    """Nor a new request of it. A tenant that this process has not met gets 503 until the service is back."""
    ring = DataKeyring(service, MemoryStore().data_keys, monotonic=clock)
    ring.prepare(TENANT)
    known = ring.for_sealing(TENANT)
    service.failure = _Away("timeout")
    clock.now += FRESH_SECONDS - 150
    failed = 0
    for _ in range(300):
        clock.now += 1
        ring.prepare(TENANT)
        failed += ring.for_sealing(TENANT).key != known.key
        with pytest.raises(KeyProviderUnavailable):
            ring.prepare(OTHER_TENANT)

    assert 0 == failed
    service.failure = None
    clock.now += PAUSE_SECONDS
    ring.prepare(OTHER_TENANT)


def test_the_doctor_says_what_the_service_said(service: Scripted) -> None:
    store = MemoryStore()
    for failure, words in ((_Away("timeout"), "reaches The service"), (_Refused("AccessDenied"), "Allow it.")):
        service.failure = failure
        (found,) = newest_key(service, store.responses, store.data_keys)
        assert (Verdict.FAULT, True) == (found.verdict, words in found.remedy), found


# AWS KMS.


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield boto3.client("kms", region_name="eu-central-1")


def arn_of(client: Any) -> str:
    return str(client.create_key()["KeyMetadata"]["Arn"])


def test_a_key_of_aws_wraps_and_binds(aws: Any) -> None:
    arn = arn_of(aws)
    ring = load_ring(f"aws-kms:{arn}")
    wrapped = wrapped_by(ring)

    assert arn.rpartition("/")[2].replace("-", "") == ring.newest
    assert [ring.newest] == list(ring.kids())
    assert DATA_KEY not in wrapped
    assert DATA_KEY == unwrapped(load_ring(f"aws-kms:{arn}"), wrapped)
    with pytest.raises(CorruptRecord):
        unwrapped(ring, wrapped, b"another place")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    (
        ("AccessDeniedException", 400, "refused"),
        ("DisabledException", 400, "refused"),
        ("NotFoundException", 400, "refused"),
        ("ThrottlingException", 400, "did not respond"),
        ("KMSInternalException", 500, "did not respond"),
    ),
)
def test_what_aws_says_decides(aws: Any, code: str, status: int, words: str) -> None:
    """A missing permission and a disabled key are refusals. Neither damages a record."""
    with Stubber(aws) as stubbed:
        stubbed.add_client_error("decrypt", service_error_code=code, http_status_code=status)
        with pytest.raises(KeyProviderUnavailable, match=f"AWS KMS {words}") as raised:
            unwrapped(AwsKms(ARN, client=aws), b"wrapped")
    assert ("kms:Decrypt" in raised.value.remedy) == (words == "refused")


def test_what_another_key_of_aws_wrapped_is_corrupt(aws: Any) -> None:
    for code in ("IncorrectKeyException", "InvalidCiphertextException"):
        with Stubber(aws) as stubbed:
            stubbed.add_client_error("decrypt", service_error_code=code, http_status_code=400)
            with pytest.raises(CorruptRecord):
                unwrapped(AwsKms(ARN, client=aws), b"wrapped")


def test_aws_that_is_not_reached_is_away(aws: Any) -> None:
    arn = arn_of(aws)
    once = Config(connect_timeout=1, retries={"total_max_attempts": 1})
    dead = boto3.client("kms", region_name="eu-central-1", endpoint_url="http://127.0.0.1:9", config=once)
    with pytest.raises(KeyProviderUnavailable, match="did not respond"):
        wrapped_by(AwsKms(arn, client=dead))


# Vault and Google Cloud KMS.


@dataclass
class StandIn:
    """An HTTP service with one key. `failure` is the status and the body of its next responses."""

    url: str = ""
    seen: list[tuple[str, dict[str, str], dict[str, str]]] = field(default_factory=list)
    failure: tuple[int, Any] | None = None
    cipher: AESGCM = field(default_factory=lambda: AESGCM(NEW))

    def vault(self, verb: str, sent: dict[str, str]) -> tuple[int, Any]:
        bound = b64decode(sent["associated_data"])
        if verb == "encrypt":
            sealed = self.cipher.encrypt(bytes(12), b64decode(sent["plaintext"]), bound)
            return 200, {"data": {"ciphertext": f"vault:v1:{b64encode(sealed).decode()}"}}
        try:
            sealed = b64decode(sent["ciphertext"].removeprefix("vault:v1:"), validate=True)
            opened = self.cipher.decrypt(bytes(12), sealed, bound)
        except (InvalidTag, ValueError):
            return 400, {"errors": ["cipher: message authentication failed"]}
        return 200, {"data": {"plaintext": b64encode(opened).decode()}}

    def google(self, verb: str, sent: dict[str, str]) -> tuple[int, Any]:
        bound = b64decode(sent["additionalAuthenticatedData"])
        if verb == "encrypt":
            sealed = self.cipher.encrypt(bytes(12), b64decode(sent["plaintext"]), bound)
            return 200, {"ciphertext": b64encode(sealed).decode()}
        try:
            opened = self.cipher.decrypt(bytes(12), b64decode(sent["ciphertext"]), bound)
        except InvalidTag:
            return 400, {"error": {"code": 400, "status": "INVALID_ARGUMENT", "message": "Decryption failed"}}
        return 200, {"plaintext": b64encode(opened).decode()}


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made, scheme = StandIn(), getattr(request, "param", "http")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.seen.append((self.path, dict(self.headers), sent))
            google_calls = ":" in self.path
            verb = self.path.rpartition(":")[2] if google_calls else self.path.split("/")[-2]
            answer = made.google if google_calls else made.vault
            status, body = made.failure or answer(verb, sent)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if scheme == "https":
        certificate, key = make_certificate(tmp_path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv("VAULT_CACERT", str(certificate))
    made.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def vault(stand_in: StandIn) -> KeyService:
    return VaultTransit(f"{stand_in.url}/team/transit/payments")


def google_kms(stand_in: StandIn) -> KeyService:
    credentials = google.auth.credentials.AnonymousCredentials()  # type: ignore[no-untyped-call]
    session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
    name = "projects/shop/locations/europe-west3/keyRings/prod/cryptoKeys/payments"
    return GoogleKms(name, session=session, endpoint=stand_in.url)


SERVICES = pytest.mark.parametrize(
    ("made", "stand_in"),
    ((vault, "http"), (vault, "https"), (google_kms, "http")),
    ids=("vault", "vault over TLS", "google"),
    indirect=["stand_in"],
)


@SERVICES
def test_a_key_of_a_service_wraps_and_binds(made: Callable[[StandIn], KeyService], stand_in: StandIn) -> None:
    ring = made(stand_in)
    wrapped = wrapped_by(ring)

    assert "payments" == ring.newest
    assert DATA_KEY == unwrapped(made(stand_in), wrapped)
    for altered, context in ((wrapped, b"another place"), (wrapped[:-2], CONTEXT)):
        with pytest.raises(CorruptRecord):
            unwrapped(made(stand_in), altered, context)


@SERVICES
def test_what_a_service_says_decides(made: Callable[[StandIn], KeyService], stand_in: StandIn) -> None:
    """A missing permission and a disabled key are refusals, a sealed or busy service is away, and neither damages a record."""
    wrapped = wrapped_by(made(stand_in))
    disabled = {"error": {"status": "FAILED_PRECONDITION"}, "errors": ["the key is disabled"]}
    for failure, words in (
        ((403, {"errors": ["permission denied"], "error": {"status": "PERMISSION_DENIED"}}), "refused"),
        ((404, {"errors": [], "error": {"status": "NOT_FOUND"}}), "refused"),
        ((400, disabled), "refused"),
        ((429, {}), "did not respond"),
        ((503, b""), "did not respond"),
        ((200, b"<html>"), "did not respond"),
        ((200, {"data": {}}), "did not respond"),
    ):
        stand_in.failure = failure
        with pytest.raises(KeyProviderUnavailable, match=words):
            unwrapped(made(stand_in), wrapped)


def test_vault_gets_its_token_and_namespace(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of a file is read for each call, because an agent renews it. No redirect is followed: it would carry it."""
    file = tmp_path / "token"
    monkeypatch.setenv("VAULT_NAMESPACE", "shop")
    monkeypatch.setenv("VAULT_TOKEN_FILE", str(file))
    ring = vault(stand_in)
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        wrapped_by(ring)
        _, headers, _ = stand_in.seen[-1]
        assert (token, "shop") == (headers["X-Vault-Token"], headers["X-Vault-Namespace"])
    assert "/v1/team/transit/encrypt/payments" in {path for path, _, _ in stand_in.seen}
    stand_in.failure = 307, b""
    with pytest.raises(KeyProviderUnavailable, match="HTTP 307"):
        wrapped_by(ring)
    file.unlink()
    with pytest.raises(KeyProviderUnavailable, match="FileNotFoundError"):
        wrapped_by(ring)


# How a ring is named.


@pytest.mark.parametrize(
    "source",
    (
        "aws-kms:alias/payments",
        "aws-kms:",
        "vault:transit/payments",
        "vault:http://vault.example:8200/transit/payments",
        "vault:https://vault.example/payments",
        "gcp-kms:projects/shop/keys/payments",
        "gcp-kms:projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1",
    ),
)
def test_a_url_that_names_no_key_is_refused(source: str) -> None:
    with pytest.raises(ConfigurationError, match="needs"):
        load_ring(source)


def test_a_key_with_the_name_of_a_service_stays_a_key() -> None:
    assert ["vault"] == list(load_ring(f"vault:{b64encode(NEW).decode()}").kids())


def test_several_sources_make_one_ring(stand_in: StandIn) -> None:
    """For a move: new data keys go to the first source, and those of the second still open."""
    before = load_ring({"2026-01": b64encode(NEW).decode()})
    ring = load_ring([vault(stand_in), {"2026-01": b64encode(NEW).decode()}])
    wrapped = wrapped_by(before)

    assert ("payments", ["payments", "2026-01"]) == (ring.newest, list(ring.kids()))
    assert DATA_KEY == ring.unwrap("2026-01", wrapped, context=CONTEXT)
    assert DATA_KEY == unwrapped(ring, wrapped_by(ring))
    with pytest.raises(CorruptRecord, match="not in the ring"):
        ring.unwrap("gone", wrapped, context=CONTEXT)
    for wrong in ([], [before, before]):
        with pytest.raises(ConfigurationError):
            load_ring(wrong)

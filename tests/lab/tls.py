"""TLS in front of a server that speaks none, so that `rediss://` is tested against a real handshake."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class TlsFront:
    """Accepts TLS on a port of its own and passes the plain bytes on to `upstream_port`, both on loopback.

    The certificate is its own authority and is valid for 127.0.0.1 only: clients
    that trust `ca_file` get in, all others fail at the handshake.
    """

    def __init__(self, upstream_port: int, *, folder: Path) -> None:
        self.ca_file, key_file = make_certificate(folder)
        self.port = 0
        self._upstream_port = upstream_port
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(self.ca_file, key_file)
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        if not self._listening.wait(timeout=60):
            raise RuntimeError("the TLS front did not start listening")

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.ca_file}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=60)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _serve(self) -> None:
        open_connections: set[asyncio.Task[None]] = set()

        async def pass_on(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            open_connections.add(task)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._pass_on(client, answer)
            open_connections.discard(task)

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._closing.wait()
        server.close()
        for task in list(open_connections):
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)

    async def _pass_on(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        upstream, request = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        try:
            done, pending = await asyncio.wait(
                [asyncio.ensure_future(_copy(client, request)), asyncio.ensure_future(_copy(upstream, answer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in pending:
                task.cancel()
            await asyncio.gather(*done, *pending, return_exceptions=True)
        finally:
            request.close()
            answer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()


def make_certificate(folder: Path, *, host: str | None = None) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, or for this host alone, and its key, as two PEM files in the folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "flask_idempotency tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # An hour either side: some containers' clocks are not to be trusted.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.IPv4Address("127.0.0.1")) if host is None else x509.DNSName(host)]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file

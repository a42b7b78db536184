"""Send one request from a script, once: `python -m flask_idempotency.client POST URL --data @file --intent NAME`.

The key of the intent is kept in a ledger, so you may run the same command again after any failure. The exit code says what you
may do next. Needs httpx.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from flask_idempotency.client import errors
from flask_idempotency.client.delivery import METHODS
from flask_idempotency.client.intents import Intent, Intents
from flask_idempotency.client.ledger import Ledger
from flask_idempotency.client.retries import Retries

OK: Final = 0
REFUSED: Final = 1
IN_DOUBT: Final = 4
NO_LEDGER: Final = 8
SAME_AGAIN: Final = 9
NOT_WRITTEN: Final = 10
EXIT_CODES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (errors.NotCarriedOut, 3),
    (errors.KeyExpired, 7),
    (errors.Unsettled, IN_DOUBT),
    (errors.CarriedOut, 5),
    (errors.KeyReused, 6),
    (errors.LedgerError, NO_LEDGER),
)
"""The first class that fits decides."""

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of a header field (RFC 9110)."""

_NO_PROXY: Final = "the proxy must be a URL such as http://proxy.example:3128; leave it empty for none"
_EPILOG = """\
exit codes:
  0  it was carried out; the body of the response is on standard output
  1  the service refused it finally and did nothing: change the request. Or --forget does not know the name
  2  the command line has a fault; nothing was sent
  3  nothing was done: you may change the request, or run the command again
  4  it may have been done: run the same command again, and do not change the name
  5  it was done before, and the response cannot be had: read the resource
  6  the name or key belongs to another request: find out which
  7  it was sent too long ago to ask again: look it up, then use --forget
  8  the ledger cannot be used; this run sent nothing
  9  nothing was done, as after a 401: send the same request again, with other header fields or another URL
  10  it was carried out, and the response could not be written: run the same command again to get it

examples:
  python -m flask_idempotency.client POST https://shop.example/payments --data @payment.json --intent "pay invoice 17"
  python -m flask_idempotency.client --unsettled
  python -m flask_idempotency.client --forget "pay invoice 17"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    sending = chosen.method is not None or chosen.url is not None
    if chosen.unsettled + (chosen.forget is not None) + sending != 1 or (sending and chosen.url is None):
        parser.error("give a method and a URL, or --unsettled, or --forget NAME")
    if sending:
        for wrong, fault in (
            (chosen.method.upper() not in METHODS, "METHOD is POST, PUT, PATCH or DELETE: the others need no key"),
            (
                not _names_host(chosen.url, "http", "https"),
                "the URL must begin with http:// or https:// and name a host",
            ),
            (chosen.intent is None, "give --intent NAME: what shall happen once, such as 'pay invoice 17'"),
        ):
            if wrong:
                parser.error(fault)
    try:
        try:
            ledger = _ledger(chosen)
            send = _prepared(ledger, chosen, parser) if sending else None
        except ValueError as error:
            parser.error(str(error))
        if send is not None:
            return send()
        return _show_unsettled(ledger) if chosen.unsettled else _forget(ledger, chosen.forget)
    except (errors.ClientError, errors.LedgerError) as error:
        _tell(f"{type(error).__name__}: {error}")
        if isinstance(error, errors.NotSent):
            _tell(f"The cause: {_cause(error, chosen.url, _proxy(chosen.proxy, chosen.url) or '')}")
        if isinstance(error, errors.ClientError) and error.status_url is not None:
            _tell(f"The service shows what became of it at {error.status_url}")
        return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flask_idempotency.client",
        description="Send one request once. Run the same command again after any failure: it keeps its idempotency key.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("method", nargs="?", metavar="METHOD", help="POST, PUT, PATCH or DELETE")
    parser.add_argument("url", nargs="?", metavar="URL")
    parser.add_argument("--intent", metavar="NAME", help="what shall happen once; the same name sends the same key")
    parser.add_argument(
        "--data", metavar="TEXT|@FILE", help="the body, or @ and a file that has it; @- reads it from a pipe"
    )
    parser.add_argument(
        "--header",
        metavar="NAME:VALUE|@FILE",
        action="append",
        default=[],
        help="a header field, or @ and a file that has one in each line; repeatable. Other users see arguments in `ps`: keep "
        "credentials in a file or the environment",
    )
    parser.add_argument(
        "--header-env",
        metavar="NAME=VARIABLE",
        action="append",
        default=[],
        help="a header field, and the environment variable that has its value, such as Authorization=SHOP_TOKEN; repeatable",
    )
    parser.add_argument(
        "--proxy",
        metavar="URL",
        help="the proxy to send through; default: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY; empty for none",
    )
    parser.add_argument("--key-header", default="Idempotency-Key", metavar="NAME", help="the field of the key")
    parser.add_argument("--deadline", type=float, default=45.0, metavar="SECONDS", help="when to stop trying (45)")
    parser.add_argument(
        "--keep", type=float, default=86400.0, metavar="SECONDS", help="how long the service keeps keys (86400)"
    )
    parser.add_argument("--ledger", metavar="FILE", help="default: intents.sqlite3 in the state folder of your user")
    parser.add_argument("--unsettled", action="store_true", help="list what may have been done and has no response")
    parser.add_argument("--forget", metavar="NAME", help="forget a name, after you looked up what became of it")
    return parser


def _ledger(chosen: argparse.Namespace) -> Ledger:
    try:
        if chosen.ledger is not None:
            return Ledger(chosen.ledger, keep=chosen.keep)
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        folder = Path(state) / "flask-idempotency"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Ledger(folder / "intents.sqlite3", keep=chosen.keep)
    except (OSError, RuntimeError) as error:
        # RuntimeError: the user has no home.
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.LedgerError(f"The folder of the ledger cannot be used ({reason}). Give --ledger FILE.") from error


def _prepared(ledger: Ledger, chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> Callable[[], int]:
    """Return what sends the request. All faults of the command line have been reported by then."""
    try:
        import httpx

        from flask_idempotency.client.httpx import IdempotentTransport
    except ModuleNotFoundError:
        parser.error("this command needs httpx: pip install 'flask-idempotency[client]'")
    body = _body(chosen.data, parser, sys.stdin.buffer)
    headers = _headers(_fields(chosen, parser), parser)
    if body and "content-type" not in {name.lower() for name, _ in headers}:
        headers.append(("Content-Type", "application/json" if body.lstrip()[:1] in (b"{", b"[") else "text/plain"))
    if not _TOKEN.fullmatch(chosen.key_header):
        parser.error("--key-header is no name of a header field")
    try:
        transport = IdempotentTransport(
            retries=Retries(deadline=chosen.deadline),
            header=chosen.key_header,
            methods={chosen.method},
            proxy=_proxy(chosen.proxy, chosen.url),
        )
    except ImportError:
        parser.error("a SOCKS proxy needs socksio: pip install 'httpx[socks]'")
    except httpx.InvalidURL:
        # Its text may have a password.
        parser.error(_NO_PROXY)
    intent = Intents(ledger)(chosen.intent)
    client = httpx.Client(transport=transport, timeout=chosen.deadline)
    try:
        request = client.build_request(chosen.method.upper(), chosen.url, content=body, headers=headers)
    except httpx.InvalidURL:
        # Its text may have a part of the URL.
        parser.error("the URL has a character or a port that no URL can have")

    def send() -> int:
        with client, intent:
            response = client.send(request)
        paused = response.headers.get("Idempotency-Status") == "paused"
        code, meaning = _outcome(ledger, intent, response.status_code, paused=paused)
        if response.status_code >= 300 or paused:
            _tell(f"The service answered {response.status_code}. {meaning}")
        return _write(response.content, code)

    return send


def _outcome(ledger: Ledger, intent: Intent, status: int, *, paused: bool) -> tuple[int, str]:
    """Return the exit code after a response, and what the user may do. The ledger decides, because the next run reads it."""
    state = None
    with suppress(errors.LedgerError):
        entry = ledger.find(intent.name or "")
        state = None if entry is None or (entry.state == "sent" and entry.doubt) else entry.state
    if paused:
        return IN_DOUBT, "A part of it was carried out. Run the same command again, unchanged."
    if status < 300 or state == "done":
        return OK, "It was carried out."
    if state == "refused":
        return REFUSED, "It was not carried out, and this is final. Change the request."
    if state is None:
        return IN_DOUBT, "This settles nothing: it may have been carried out. Run the same command again, unchanged."
    return SAME_AGAIN, "It was not carried out. Send the same body again, with other header fields or another URL."


def _write(content: bytes, code: int) -> int:
    """Write the body to standard output and return the exit code."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except (OSError, AttributeError) as error:
        # AttributeError: a standard output that the caller closed is None.
        reason = error.strerror if isinstance(error, OSError) else "it is closed"
        _tell(f"The response could not be written to standard output ({reason}).")
        with suppress(OSError, AttributeError):
            # Python writes what is left in the buffer at its end, and would end with a code of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == OK:
            _tell("It was carried out. Run the same command again to get the response.")
            return NOT_WRITTEN
    return code


def _proxy(written: str | None, url: str) -> str | None:
    """Return the URL of the proxy: the one that was given, or that of the environment, or None.

    Raises `ValueError` if that cannot be a proxy.
    """
    if written is None:
        parts = urlsplit(url)
        found = getproxies()
        chosen = found.get(parts.scheme) or found.get("all")
        if not chosen or proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
        written = chosen if "://" in chosen else f"http://{chosen}"
    if written and not _names_host(written, "http", "https", "socks5", "socks5h"):
        raise ValueError(_NO_PROXY)
    return written or None


def _names_host(url: str, *schemes: str) -> bool:
    """Return whether this URL has one of these schemes and a host that can be reached."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _tell(line: str) -> None:
    # A failure here must not become an exit code.
    with suppress(OSError, AttributeError):
        print(_printable(line, sys.stderr.encoding), file=sys.stderr, flush=True)


def _printable(text: str, encoding: str | None) -> str:
    """Return the text with what a terminal would obey, or what the stream cannot write, as escapes."""
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
    encoding = encoding or "ascii"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _cause(error: errors.NotSent, url: str, proxy: str = "") -> str:
    """Return class and text of what went wrong, and leave the text out if it has a secret."""
    cause = error.__cause__
    text = str(cause)
    words = [word for parts in (urlsplit(url), urlsplit(proxy)) for word in (parts.username, parts.password) if word]
    secret = any(word and word in text for word in (error.key, *words, *map(unquote, words)))
    return type(cause).__name__ if secret or not text else f"{type(cause).__name__}: {text}"


def _body(written: str | None, parser: argparse.ArgumentParser, stdin: IO[bytes]) -> bytes:
    if written is None:
        return b""
    if not written.startswith("@"):
        return written.encode()
    if written == "@-":
        return stdin.read()
    try:
        return Path(written[1:]).read_bytes()
    except OSError as error:
        parser.error(f"the file of --data cannot be read ({error.strerror})")


def _fields(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the header fields as `Name: value`, from the arguments, the files and the environment that they name."""
    fields: list[str] = []
    for field in chosen.header:
        if not field.startswith("@"):
            fields.append(field)
            continue
        try:
            lines = Path(field[1:]).read_text("utf-8").splitlines()
        except OSError as error:
            parser.error(f"the file of --header cannot be read ({error.strerror})")
        except UnicodeDecodeError:
            parser.error("the file of --header is no text")
        fields += [line for line in lines if line.strip()]
    for pair in chosen.header_env:
        name, equals, variable = pair.partition("=")
        if not equals:
            parser.error("write --header-env as NAME=VARIABLE")
        if variable not in os.environ:
            parser.error(f"the environment has no variable {variable!a}, which --header-env names")
        fields.append(f"{name}: {os.environ[variable]}")
    return fields


def _headers(written: Sequence[str], parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    headers = []
    for field in written:
        name, colon, value = field.partition(":")
        name, value = name.strip(), value.strip()
        if not colon:
            parser.error("write a header field as 'Name: value'")
        if not _TOKEN.fullmatch(name):
            parser.error(f"{name!a} is no name of a header field")
        if not (value.isascii() and value.replace("\t", " ").isprintable()):
            parser.error(f"the value of the header field {name} must have visible ASCII characters only")
        headers.append((name, value))
    return headers


def _show_unsettled(ledger: Ledger) -> int:
    for entry in ledger.unsettled():
        sent = datetime.fromtimestamp(entry.first_sent or entry.created, UTC)
        note = "  look it up, then use --forget" if ledger.expired(entry) else ""
        line = f"{sent:%Y-%m-%d %H:%M:%S}Z  {entry.attempts} attempts  {entry.name}{note}"
        print(_printable(line, getattr(sys.stdout, "encoding", None)))
    return OK


def _forget(ledger: Ledger, name: str) -> int:
    # Python reads bytes of an argument that are no UTF-8 as characters that no ledger has.
    if any("\ud800" <= each <= "\udfff" for each in name) or not ledger.forget(name):
        _tell("The ledger does not know this name.")
        return REFUSED
    return OK


if __name__ == "__main__":
    sys.exit(main())

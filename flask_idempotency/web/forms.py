"""Parse the form in a body as Werkzeug parses it, without a change to the request, and digest it.

Files are hashed as they pass, never kept.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast
from urllib.parse import unquote_to_bytes

from flask import Request
from werkzeug.datastructures import FileStorage, Headers
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser, MultiPartParser
from werkzeug.http import parse_options_header

from flask_idempotency.engine.fingerprint import FilePart, content_digest, form_digest, multipart_digest
from flask_idempotency.engine.values import valueclass
from flask_idempotency.web.request_body import Body, BodyConsumed, chunks


def form_in(request: Request, body: Body) -> Form | None:
    """Return the form in this body, or None if it has none that the view can read."""
    if body.stream is not None:
        return parse_form(request, body.stream)
    form = parsed_form(request) if body.parsed else None
    # A broken form that a hook has parsed looks empty, and its bytes are gone.
    return form if form is not None and (form.fields or form.files or not body.length) else None


_CHARSETS = frozenset({"", "ascii", "us-ascii", "utf-8", "iso-8859-1"})
"""The charsets that Werkzeug decodes a part with. It treats every other as UTF-8."""

# A string without a closing quote extends to the end, so that each part of a header is scanned once.
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?\Z)', re.DOTALL)
_PARAMETER = re.compile(r";\s*([^\s=;]+)\s*=")
_EXTENDED = re.compile(r"\*\s*=(?!\s*utf-8')", re.IGNORECASE)


@valueclass(frozen=True, slots=True)
class Form:
    """The parts of a form, in order. `files` is None for a form that cannot carry any."""

    fields: Sequence[tuple[str, str]]
    files: Sequence[FilePart] | None
    exact: bool = True
    """False if a form of other bytes could look the same: then compare the bytes."""

    def digest(self, *, csrf_field: str, key_field: str | None = None, ignore: Sequence[str] = ()) -> bytes:
        """Digest the form without the CSRF token and the key's field, which a page renders differently each time.

        `ignore` are JSON Pointers, as in JSON documents: `/sent_at` leaves out all values of the field `sent_at`. A form has
        no deeper members, so a longer pointer names none.

        Flask-WTF also finds the token under `<prefix>-<csrf_field>`. Those are left out only if the name contains "csrf": if
        it is `token`, a `card-token` matters. A file under one of these names counts, because it is no token. The key
        itself selects the record, so its field is not needed.
        """
        prefix = r"[\w.-]+-" if "csrf" in csrf_field.lower() else "(?!)"
        prefixed = re.compile(prefix + re.escape(csrf_field))
        left_out = {csrf_field, key_field}
        for pointer in ignore:
            if "/" not in pointer[1:]:
                left_out.add(pointer[1:].replace("~1", "/").replace("~0", "~"))
        fields = [(name, value) for name, value in self.fields if name not in left_out and not prefixed.fullmatch(name)]
        return form_digest(fields) if self.files is None else multipart_digest(fields, self.files)

    def values(self, name: str) -> list[str]:
        """Return all values of this field."""
        return [value for field, value in self.fields if field == name]


def parse_form(request: Request, stream: IO[bytes]) -> Form | None:
    """Parse the form in this stream, and restore its position. None if it is broken or over the application's limits.

    No other limits apply: this must find a key in every form that the view can read, or the view runs unprotected.
    """
    position = stream.tell()
    stream.seek(0)
    try:
        if request.mimetype != "multipart/form-data":
            data = stream.read()
            _, fields, _ = FormDataParser(silent=False).parse(io.BytesIO(data), request.mimetype, None)
            return _named(list(fields.items(multi=True)), None, exact=_is_utf8(data))
        parser = _Parts(
            stream_factory=lambda *_, **__: cast(IO[bytes], _Hashing()),
            max_form_memory_size=request.max_form_memory_size,
            max_form_parts=request.max_form_parts,
        )
        boundary = request.mimetype_params.get("boundary", "").encode("ascii")
        if not boundary:
            return None
        fields, files = parser.parse(stream, boundary, request.content_length)
    except (ValueError, RequestEntityTooLarge):
        return None
    finally:
        stream.seek(position)
    parts = [_part(name, file, cast(_Hashing, file.stream).digest()) for name, file in files.items(multi=True)]
    return _named(list(fields.items(multi=True)), parts, exact=not parser.doubtful)


def parsed_form(request: Request) -> Form | None:
    """Return the form that an earlier hook parsed, equal to the result of `parse_form`. None if it is broken.

    Restores the position of its files. Raises `BodyConsumed` if one can no longer be read. The bytes of the form are gone,
    also for the view, so forms that look the same here do so in the view. Only a file still shows the view its header.
    """
    if any(_is_doubtful(file.headers) for file in request.files.values()):
        return None
    try:
        parts = [
            _part(name, file, content_digest(chunks(file.stream))) for name, file in request.files.items(multi=True)
        ]
    except (AttributeError, OSError, ValueError) as error:
        raise BodyConsumed from error
    return _named(list(request.form.items(multi=True)), parts if request.mimetype == "multipart/form-data" else None)


def _named(fields: list[tuple[str, str]], files: list[FilePart] | None, *, exact: bool = True) -> Form | None:
    # Werkzeug passes on a part without a name, under None.
    names: Iterable[str | None] = (*(name for name, _ in fields), *(part.name for part in files or ()))
    return None if None in names else Form(fields, files, exact)


class _Parts(MultiPartParser):
    """Notices parts that another reader of the same bytes may understand differently."""

    doubtful = False

    def get_part_charset(self, headers: Headers) -> str:
        self.doubtful = self.doubtful or _is_doubtful(headers)
        return super().get_part_charset(headers)

    def start_file_streaming(self, event: Any, total_content_length: int | None) -> IO[bytes]:
        self.doubtful = self.doubtful or _is_doubtful(event.headers)
        return super().start_file_streaming(event, total_content_length)

    def parse(self, stream: IO[bytes], boundary: bytes, content_length: int | None) -> Any:
        fields, files = super().parse(stream, boundary, content_length)
        texts = [text for pair in fields.items(multi=True) for text in pair]
        texts += [text for name, file in files.items(multi=True) for text in (name, file.filename or "")]
        # Werkzeug replaces bytes that it cannot decode by this, so different bytes look the same.
        self.doubtful = self.doubtful or any("\ufffd" in (text or "") for text in texts)
        return fields, files


def _is_doubtful(headers: Headers) -> bool:
    """Whether the header of a part has more than one meaning: an unknown charset or encoding, or a name given twice."""
    if any(len(headers.getlist(name)) > 1 for name in ("Content-Disposition", "Content-Type")):
        return True
    disposition = _QUOTED.sub('""', headers.get("Content-Disposition", ""))
    names = [name.lower().rstrip("*") for name in _PARAMETER.findall(disposition)]
    charset = parse_options_header(headers.get("Content-Type"))[1].get("charset", "").lower()
    encoding = headers.get("Content-Transfer-Encoding", "binary").lower()
    return (
        len(names) != len(set(names))
        or _EXTENDED.search(disposition) is not None
        or charset not in _CHARSETS
        or encoding not in ("7bit", "8bit", "binary")
    )


def _is_utf8(data: bytes) -> bool:
    try:
        unquote_to_bytes(data).decode()
    except UnicodeDecodeError:
        return False
    return True


class _Hashing:
    """Replaces the file that a part is written to, and hashes the part."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return len(data)

    def seek(self, position: int) -> int:
        return position

    def digest(self) -> bytes:
        return self._digest.digest()


def _part(name: str, file: FileStorage, content: bytes) -> FilePart:
    return FilePart(name, file.filename or "", file.content_type or "", content)

"""A form as Werkzeug reads it, without the request noticing. Files are hashed as they pass, never kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from flask import Request
from werkzeug.datastructures import FileStorage
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser

from flask_idempotency.engine.fingerprint import FilePart, content_digest, form_digest, multipart_digest
from flask_idempotency.web.bodies import BodyConsumed, chunks


@dataclass(frozen=True, slots=True)
class Form:
    """The parts of a form, in order. `files` is None for a form that cannot carry any."""

    fields: Sequence[tuple[str, str]]
    files: Sequence[FilePart] | None

    def digest(self) -> bytes:
        return form_digest(self.fields) if self.files is None else multipart_digest(self.fields, self.files)

    def values(self, name: str) -> list[str]:
        """What was sent under this name, as often as it was."""
        return [value for field, value in self.fields if field == name]


def parse_form(request: Request, stream: IO[bytes]) -> Form | None:
    """The form in this stream, which is left where it stood; None when broken or over the application's limits.

    No limits but those: a key in a form that the view can read must be found here, or the view runs unprotected.
    """
    parser = FormDataParser(
        stream_factory=_hashing,
        max_form_memory_size=request.max_form_memory_size,
        max_form_parts=request.max_form_parts,
        silent=False,
    )
    position = stream.tell()
    stream.seek(0)
    try:
        _, fields, files = parser.parse(stream, request.mimetype, request.content_length, request.mimetype_params)
    except (ValueError, RequestEntityTooLarge):
        return None
    finally:
        stream.seek(position)
    parts = [_part(name, file, cast(_Hashing, file.stream).digest()) for name, file in files.items(multi=True)]
    return _named(list(fields.items(multi=True)), parts if _may_have_files(request) else None)


def parsed_form(request: Request) -> Form | None:
    """The form that an earlier hook has parsed, equal to what `parse_form` would have found; None when broken.

    Its files are left where they stood. Raises `BodyConsumed` when one can no longer be read.
    """
    try:
        parts = [
            _part(name, file, content_digest(chunks(file.stream))) for name, file in request.files.items(multi=True)
        ]
    except (AttributeError, OSError, ValueError) as error:
        raise BodyConsumed from error
    return _named(list(request.form.items(multi=True)), parts if _may_have_files(request) else None)


def _named(fields: list[tuple[str, str]], files: list[FilePart] | None) -> Form | None:
    # Werkzeug passes on a part whose header names nothing, under None.
    names: Iterable[str | None] = (*(name for name, _ in fields), *(part.name for part in files or ()))
    return None if None in names else Form(fields, files)


class _Hashing:
    """Passes for the file that a part is written to."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return len(data)

    def seek(self, position: int) -> int:
        return position

    def digest(self) -> bytes:
        return self._digest.digest()


def _hashing(*size_and_names: Any, **more: Any) -> IO[bytes]:
    return cast(IO[bytes], _Hashing())


def _part(name: str, file: FileStorage, content: bytes) -> FilePart:
    return FilePart(name, file.filename or "", file.content_type or "", content)


def _may_have_files(request: Request) -> bool:
    return request.mimetype == "multipart/form-data"

"""What came of the work, in no protocol's terms."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Result:
    """An answer that can be given again: a status, ordered name/value pairs (duplicates allowed) and bytes.

    `reason` is kept only where it differs from the standard phrase for the status.
    """

    status: int
    reason: str = ""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    kept: bool = True
    """False: a tombstone. The work was done and its body was not kept; it must never run again."""

    @property
    def byte_size(self) -> int:
        """Bytes a quota counts for this result, before any encoding."""
        return len(self.body) + sum(len(name) + len(value) + 4 for name, value in self.metadata)

    def with_body(self, body: bytes) -> Result:
        """This result with its body, once that is known."""
        return Result(self.status, self.reason, self.metadata, body)

    def without_body(self) -> Result:
        """The tombstone of this result: its status and metadata stay, its body is gone."""
        return Result(self.status, self.reason, self.metadata, kept=False)

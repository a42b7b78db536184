"""Stored bytes as they come back from a store that somebody else can write to: flipped, cut, doubled, lengths replaced."""

from __future__ import annotations

from typing import Any, SupportsIndex, overload

from hypothesis import strategies as st

LENGTHS = (b"\0", b"\x7f", b"\x80\0", b"\x80\x01", b"\xff" * 9, b"\xff" * 9 + b"\x01", b"\x80" * 400_000 + b"\x01")
"""Numbers as a record spells lengths: the least, the largest, twice the same, and one of 2.8 million bits."""


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes after one or two accidents, or attacks."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "drop", "double", "insert", "length", "replace", "number"))):
            case "flip" if at < len(data):
                data = data[:at] + bytes((data[at] ^ draw(st.integers(1, 255)),)) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[at + draw(st.integers(1, 20)) :]
            case "double":
                data = data[:at] + data[at : at + draw(st.integers(1, 40))] * 2 + data[at:]
            case "insert":
                data = data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:]
            case "length":
                data = data[:at] + draw(st.sampled_from(LENGTHS)) + data[at + 1 :]
            case "number":
                number = draw(st.integers(-(2**70), 2**70)) if draw(st.booleans()) else int("9" * 4000)
                data = data[:at] + (b"%d" % number) + data[at + draw(st.integers(0, 20)) :]
            case "replace":
                data = data[:at] + b"9" * draw(st.sampled_from((1, 21, 5000))) + data[at + 1 :]
    return data


class Watched(bytes):
    """Bytes that count how many of them are looked at one by one: the steps that no slice and no `struct` takes."""

    looks = 0

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def __getitem__(self, at: Any, /) -> Any:
        if not isinstance(at, slice):
            self.looks += 1
        return super().__getitem__(at)

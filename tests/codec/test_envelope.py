"""An answer comes back as it was sealed, or not at all."""

from __future__ import annotations

import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flask_idempotency.codec.compression import COMPRESSIONS, Zstd, _zstd
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, ResponseUnavailable
from flask_idempotency.engine.model import StoredResponse
from tests.damage import damaged

GOLDEN = Path(__file__).parent / "golden"
CODEC = EnvelopeCodec()
PLAIN = EnvelopeCodec(compression=None)
ZSTD = EnvelopeCodec(compression=COMPRESSIONS["zstd"])
zstd = _zstd()

# What each file in golden/ holds. Files are never rewritten: they are what users' stores are full of.
EXAMPLES = {
    "v1-plain": StoredResponse(201, metadata=(("Content-Type", "application/json"),), body=b'{"id":"pay_1"}\n'),
    "v1-reason": StoredResponse(
        299, "Made just now", (("X-A", "1"), ("X-A", "2"), ("Location", "/caf\xe9")), b"\0\r\n\r\n\xff"
    ),
    "v1-empty": StoredResponse(204),
    "v1-tombstone": StoredResponse(200, metadata=(("Content-Type", "text/csv"),), kept=False),
    "v1-zlib": StoredResponse(200, metadata=(("Content-Type", "text/plain"),), body=b"all work and no play " * 100),
    "v1-zstd": StoredResponse(200, metadata=(("Content-Type", "text/plain"),), body=b"all work and no play " * 100),
    "v1-zlib-tombstone": StoredResponse(200, metadata=(("Link", "<https://example.org/next>, " * 50),), kept=False),
}

LATIN = st.text(st.characters(max_codepoint=0xFF, exclude_characters="\r\n\0"), max_size=40)
NAMES = st.from_regex(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}", fullmatch=True)
RESULTS = st.builds(
    StoredResponse,
    status=st.integers(0, 999),
    reason=LATIN,
    metadata=st.lists(st.tuples(NAMES, LATIN), max_size=5).map(tuple),
    body=st.binary(max_size=200) | st.binary(min_size=1, max_size=3).map(lambda piece: piece * 1000),
)


def envelope(content: bytes, head: int = 0x10) -> bytes:
    """An envelope with a good checksum around whatever this is."""
    first = bytes((head,))
    return first + zlib.crc32(content, zlib.crc32(first)).to_bytes(4, "big") + content


def test_golden_envelopes_open_for_ever() -> None:
    files = {path.stem: bytes.fromhex(path.read_text()) for path in GOLDEN.glob("*.hex")}

    assert EXAMPLES == {name: CODEC.unwrap(data) for name, data in files.items()}
    assert EXAMPLES == {name: PLAIN.unwrap(data) for name, data in files.items()}


def test_plain_envelopes_are_written_as_ever() -> None:
    """In a roll-out the old release opens what the new one writes. Compressed bytes may vary with zlib's version."""
    for name in ("v1-plain", "v1-reason", "v1-empty", "v1-tombstone"):
        assert (GOLDEN / f"{name}.hex").read_text().split() == [CODEC.wrap(EXAMPLES[name]).hex()]


@given(RESULTS)
@example(StoredResponse(200, body=b""))
@example(StoredResponse(200, "", (("A", ""),), b"\r\n\r\n"))
@example(StoredResponse(200, " ", (("A", " : "), ("A", " : ")), b""))
@example(StoredResponse(200, "200", (("A", "\x85\x0b\x1c"),), b""))
def test_opening_gives_what_was_sealed(result: StoredResponse) -> None:
    assert result == CODEC.unwrap(CODEC.wrap(result))
    assert result == PLAIN.unwrap(PLAIN.wrap(result))
    assert result == CODEC.unwrap(ZSTD.wrap(result))
    assert result.without_body() == CODEC.unwrap(CODEC.wrap(result.without_body()))


@given(st.binary())
@example(b"")
@example(b"\x10")
@example(b"\x10\0\0\0\0")
def test_any_bytes_are_a_corrupt_record(data: bytes) -> None:
    """Nothing but CorruptRecord: another exception might pass for an absent record, and run a payment again."""
    with pytest.raises(CorruptRecord):
        CODEC.unwrap(data)


@given(RESULTS, st.data())
def test_damaged_envelopes_are_found(result: StoredResponse, data: st.DataObject) -> None:
    sealed = CODEC.wrap(result)
    changed = data.draw(damaged(sealed))
    assume(changed != sealed)

    with pytest.raises(CorruptRecord):
        CODEC.unwrap(changed)


@given(
    st.binary() | st.text(alphabet="201 \r\nA:é").map(lambda text: text.encode("latin-1")),
    st.sampled_from((0x10, 0x11)),
)
def test_good_checksum_around_anything_is_not_enough(content: bytes, head: int) -> None:
    data = envelope(content, head)
    try:
        result = PLAIN.unwrap(data)
    except CorruptRecord:
        return

    assert data == PLAIN.wrap(result)


MALFORMED = (
    b"",
    b"200",
    b"200\r\n",
    b"20\r\n\r\n",
    b"2000\r\n\r\n",
    b"200 \r\n\r\n",
    b"-20\r\n\r\n",
    b"\xb2\xb2\xb2\r\n\r\n",
    b"200 a\nb\r\n\r\n",
    b"200 a\0b\r\n\r\n",
    b"200\r\nA\r\n\r\n",
    b"200\r\nA:b\r\n\r\n",
    b"200\r\n: b\r\n\r\n",
    b"200\r\nA b: c\r\n\r\n",
    b"200\r\nA: b\nSet-Cookie: c\r\n\r\n",
    b"200\r\nA: b\rc\r\n\r\n",
    b"200\r\nA: b\0c\r\n\r\n",
)


def test_malformed_content_is_corrupt() -> None:
    """CR, LF and NUL are refused on the way out of the store too: a store may be written to by others."""
    for content in MALFORMED:
        with pytest.raises(CorruptRecord):
            CODEC.unwrap(envelope(content))


def test_unknown_versions_and_compressions_are_corrupt() -> None:
    for head in (0x00, 0x20, 0xF0, 0x1E, 0x16):
        with pytest.raises(CorruptRecord, match="is unknown"):
            CODEC.unwrap(envelope(b"200\r\n\r\n", head))


def test_tombstone_with_a_body_is_corrupt() -> None:
    with pytest.raises(CorruptRecord):
        CODEC.unwrap(envelope(b"200\r\n\r\nbody", 0x11))
    with pytest.raises(NotStorable):
        CODEC.wrap(StoredResponse(200, body=b"body", kept=False))


NOT_STORABLE = (
    StoredResponse(200, "a\rb"),
    StoredResponse(200, "a\nb"),
    StoredResponse(200, "a\0b"),
    StoredResponse(200, "€"),
    StoredResponse(200, metadata=(("A", "b\r\nSet-Cookie: c"),)),
    StoredResponse(200, metadata=(("A", "b\nc"),)),
    StoredResponse(200, metadata=(("A", "b\rc"),)),
    StoredResponse(200, metadata=(("A", "b\0c"),)),
    StoredResponse(200, metadata=(("A", "€"),)),
    StoredResponse(200, metadata=(("A", "\ud800"),)),
    StoredResponse(200, metadata=(("A\n", "b"),)),
    StoredResponse(200, metadata=(("A:", "b"),)),
    StoredResponse(200, metadata=(("", "b"),)),
    StoredResponse(200, metadata=(("é", "b"),)),
    StoredResponse(1000),
    StoredResponse(-1),
)


def test_unanswerable_results_are_not_storable() -> None:
    """What could not be replayed unchanged is refused while the first caller can still be served."""
    for result in NOT_STORABLE:
        with pytest.raises(NotStorable):
            CODEC.wrap(result)


def test_large_answers_are_compressed_and_small_ones_are_not() -> None:
    at_limit = StoredResponse(200, body=b"x" * (1024 - len(b"200\r\n\r\n")))
    above = StoredResponse(200, body=at_limit.body + b"x")

    assert len(PLAIN.wrap(at_limit)) == len(CODEC.wrap(at_limit))
    assert len(CODEC.wrap(above)) < 50
    assert len(PLAIN.wrap(above)) == 1024 + 1 + 5


def test_what_does_not_shrink_stays_as_it_is() -> None:
    """Compressing noise makes it larger, and costs time on every replay."""
    noise = StoredResponse(200, body=b"".join(zlib.crc32(i.to_bytes(4, "big")).to_bytes(4, "big") for i in range(999)))

    assert PLAIN.wrap(noise) == CODEC.wrap(noise)


def test_bombs_are_refused_without_being_unfolded() -> None:
    small, unfolded = EnvelopeCodec(max_bytes=1_000_000), b"200\r\n\r\n" + b"\0" * 5_000_000

    for content, head in ((zlib.compress(unfolded), 0x12), (zstd.compress(unfolded), 0x14)):
        with pytest.raises(CorruptRecord, match="more than"):
            small.unwrap(envelope(content, head))


def test_compressed_content_must_end_where_it_ends() -> None:
    content = zlib.compress(b"200\r\n\r\nbody")

    assert StoredResponse(200, body=b"body") == CODEC.unwrap(envelope(content, 0x12))
    for cut in (content[:-1], content + b"x", content[:4], b"", b"x" + content):
        with pytest.raises(CorruptRecord):
            CODEC.unwrap(envelope(cut, 0x12))


def test_each_zstd_response_is_a_frame_by_itself() -> None:
    """The compressor of a thread is used again, also after an error, and no two threads share one."""
    method = Zstd()
    wanted = [b"paid " * 500, b"", b"refused " * 500]
    with pytest.raises(TypeError):
        method.compress("no bytes")  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as other:
        elsewhere = [other.submit(method.compress, data).result() for data in wanted]
        there = other.submit(lambda: method._local.compressor).result()

    assert [zstd.compress(data, 1) for data in wanted] == [method.compress(data) for data in wanted] == elsewhere
    assert there is not method._local.compressor


def test_zstd_content_must_end_where_it_ends() -> None:
    content = zstd.compress(b"200\r\n\r\nbody")

    assert StoredResponse(200, body=b"body") == CODEC.unwrap(envelope(content, 0x14))
    for cut in (content[:-1], content + b"x", content + content, content[:4], b"", b"x" + content):
        with pytest.raises(CorruptRecord):
            CODEC.unwrap(envelope(cut, 0x14))


def test_a_zstd_frame_cannot_ask_for_much_memory() -> None:
    options = {zstd.CompressionParameter.window_log: 24, zstd.CompressionParameter.content_size_flag: 0}
    stream = zstd.ZstdCompressor(options=options)
    content = stream.compress(b"200\r\n\r\nbody") + stream.flush()

    assert content.startswith(b"\x28\xb5\x2f\xfd"), "it is a whole frame"
    with pytest.raises(CorruptRecord):
        CODEC.unwrap(envelope(content, 0x14))


def test_without_zstd_a_response_is_unavailable_and_not_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corrupt record is quarantined for good, but another host can still replay this one."""
    sealed = ZSTD.wrap(EXAMPLES["v1-zstd"])
    monkeypatch.setitem(sys.modules, "compression" if sys.version_info >= (3, 14) else "backports", None)
    _zstd.cache_clear()

    with pytest.raises(ResponseUnavailable, match="pip install"):
        CODEC.unwrap(sealed)
    monkeypatch.undo()
    assert EXAMPLES["v1-zstd"] == CODEC.unwrap(sealed)


def test_nothing_is_sealed_that_would_not_open() -> None:
    small = EnvelopeCodec(max_bytes=100)
    fits = StoredResponse(200, body=b"x" * (100 - len(b"200\r\n\r\n")))

    assert fits == small.unwrap(small.wrap(fits))
    with pytest.raises(NotStorable):
        small.wrap(StoredResponse(200, body=fits.body + b"x"))


@given(RESULTS)
def test_an_envelope_takes_no_more_than_the_answer_on_the_wire(result: StoredResponse) -> None:
    """With the 61 bytes of a record's own facts, a stored answer stays within 64 bytes of the answer."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in result.metadata).encode("latin-1")
    wire = len(f"HTTP/1.1 {result.status} {result.reason}\r\n") + len(lines) + 2 + len(result.body)

    assert len(PLAIN.wrap(result)) + 61 <= wire + 64
    assert len(CODEC.wrap(result)) <= len(PLAIN.wrap(result))


def test_compressions_keep_their_numbers() -> None:
    """A number given to another algorithm would make stored answers unreadable."""
    assert {"zlib": 1, "zstd": 2} == {name: method.number for name, method in COMPRESSIONS.items()}

import array
import base64
import ctypes
import mmap
import sys

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.manifests import checksum
from warmcast.manifests.checksum import (
    combine,
    crc32c,
    crc32c_at,
    from_base64,
    from_hex,
    to_base64,
    to_hex,
)
from warmcast.manifests.errors import InvalidData

modest = settings(deadline=None, max_examples=100)

# RFC 3720, appendix B.4, and the check value of the CRC catalogues.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.fixture(params=["in place", "copying"])
def way(request, monkeypatch):
    """Both ways of computing: with the C library's symbol, and without it."""
    if request.param == "copying":
        monkeypatch.setattr(checksum, "_extend", None)
        monkeypatch.setattr(checksum, "_COPY", 7)
    return request.param


def test_the_wheel_that_is_installed_allows_checksums_in_place():
    assert checksum.ZERO_COPY


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(way, data, expected):
    assert crc32c(data) == expected


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda d: memoryview(bytearray(d)),
        lambda d: memoryview(b"ab" + d + b"c")[2:-1],
        lambda d: array.array("B", d),
        lambda d: np.frombuffer(d, np.uint8),
        lambda d: np.frombuffer(d, np.uint8).reshape(2, -1),
        lambda d: np.frombuffer(d, ">u2"),
        lambda d: (ctypes.c_char * len(d)).from_buffer_copy(d),
    ],
)
def test_any_contiguous_buffer(way, kind):
    data = bytes(range(200)) * 3
    assert crc32c(kind(data)) == google_crc32c.value(data)


def test_a_mapped_file(way, tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(b"0" * 5000)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped, memoryview(mapped) as view, view[7:4999] as part:
        assert crc32c(mapped) == google_crc32c.value(b"0" * 5000)
        assert crc32c(part) == google_crc32c.value(b"0" * 4992)


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b"abc")[3:], np.empty((0, 3))])
def test_empty_buffers_change_nothing(way, empty):
    assert crc32c(empty) == 0
    assert crc32c(empty, 0x12345678) == 0x12345678


@pytest.mark.parametrize(
    "strided", [memoryview(b"abcdef")[::2], np.zeros((4, 4))[:, :2], np.zeros((3, 4)).T]
)
def test_a_buffer_that_is_not_contiguous_is_refused(way, strided):
    with pytest.raises(BufferError, match="contiguous"):
        crc32c(strided)


def test_what_is_no_buffer_is_refused(way):
    with pytest.raises(TypeError):
        crc32c("text")


def test_no_buffer_stays_exported_or_referenced(way):
    data = bytearray(b"x" * 100)
    before = sys.getrefcount(data)
    for _ in range(10):
        crc32c(data)
    assert sys.getrefcount(data) == before
    data.extend(b"y")  # raises BufferError while an export is alive


def test_memory_at_an_address(way):
    data = ctypes.create_string_buffer(b"..123456789..", 13)
    address = ctypes.addressof(data) + 2
    assert crc32c_at(address, 9) == 0xE3069283
    assert crc32c_at(address + 4, 5, crc32c_at(address, 4)) == 0xE3069283
    assert crc32c_at(address, 0, 5) == 5
    with pytest.raises(ValueError, match="-1"):
        crc32c_at(address, -1)


def test_a_symbol_with_another_meaning_is_not_used(monkeypatch):
    class Library:
        @staticmethod
        def crc32c_extend(value, pointer, length):
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    assert checksum._find_extend() is None


def test_a_library_without_the_symbol_is_survived(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert checksum._find_extend() is None


@modest
@given(st.lists(st.binary(max_size=300), max_size=6))
def test_going_on_piece_by_piece_is_the_whole(pieces):
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    assert value == crc32c(b"".join(pieces)) == google_crc32c.value(b"".join(pieces))


@modest
@given(st.binary(max_size=500), st.binary(max_size=500))
def test_combining_two_checksums_is_the_checksum_of_both(a, b):
    assert combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


@modest
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**50)),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**50)),
)
def test_combining_is_associative_at_any_length(first, second, third):
    tail = combine(second[0], third[0], third[1]), second[1] + third[1]
    assert combine(combine(first, *second), *third) == combine(first, *tail)


def test_combining_long_runs_of_zeros():
    # CRC32C of n zero bytes, doubled up from 32 of them: lengths that no test can hold in memory.
    value, length = 0x8A9136AA, 32
    while length < 1 << 20:
        value, length = combine(value, value, length), 2 * length
    assert value == crc32c(bytes(length))


@given(st.integers(0, 2**32 - 1))
def test_spellings_come_back(value):
    assert from_hex(to_hex(value)) == value
    assert from_base64(to_base64(value)) == value
    assert base64.b64decode(to_base64(value)) == value.to_bytes(4, "big")


def test_spellings_are_those_of_the_clouds():
    # `gsutil hash` and S3's x-amz-checksum-crc32c of the text "123456789".
    assert to_base64(crc32c(b"123456789")) == "4waSgw=="
    assert to_base64(crc32c(b"")) == "AAAAAA=="
    assert to_hex(0xAB) == "000000ab"


@pytest.mark.parametrize(
    "text", ["", "4waSgw", "4waSgw==-3", "AAAA", "AAAAAAAA", "é", "4waS\ngw==", "!!!!"]
)
def test_other_base64_is_refused(text):
    with pytest.raises(InvalidData, match="base64 of 4 bytes"):
        from_base64(text)


@pytest.mark.parametrize(
    "text", ["", "1", "0x123456", "ABCDEF01", " 1234567", "123456789", "-1234567"]
)
def test_other_hex_is_refused(text):
    with pytest.raises(InvalidData, match="8 lower-case hex digits"):
        from_hex(text)

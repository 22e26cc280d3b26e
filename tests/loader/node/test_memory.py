"""What bounds an agent's memory, whatever the model: its buffers, and what it keeps of one."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests.builders import CREATED_AT, file_entry, safetensors_file, tensor_entries
from warmcast.loader.node.buffers import Buffers
from warmcast.loader.node.cache import Spec
from warmcast.loader.node.contents import LARGEST, Checksums, parse_contents
from warmcast.manifests.errors import IntegrityError, InvalidManifest
from warmcast.manifests.manifest import Manifest, build_manifest

MOST = 1 << 20
CHUNK = 4096


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, MOST)), max_size=60))
def test_no_more_is_held_than_is_allowed(steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back, in whatever order; each piece is one user's alone."""
    buffers = Buffers()
    mine = []
    for take, length in steps:
        if take:
            piece = buffers.take(length, MOST)
            if piece is None:
                assert mine
                continue
            assert len(piece) >= length
            assert all(piece is not other for other in mine)
            mine.append(piece)
        elif mine:
            buffers.give_back(mine.pop(length % len(mine)))
        assert buffers.used == sum(map(len, mine))
        assert buffers.used <= buffers.held <= MOST
    for piece in mine:
        buffers.give_back(piece)
    assert buffers.used == 0


def test_memory_is_used_again() -> None:
    buffers = Buffers()
    piece = buffers.take(MOST // 2, MOST)
    assert piece is not None
    buffers.give_back(piece)
    assert buffers.take(MOST // 2 - 1, MOST) is piece


def test_one_chunk_is_always_had() -> None:
    buffers = Buffers()
    first = buffers.take(3 * MOST, MOST)
    assert first is not None
    assert buffers.take(1, MOST) is None
    buffers.give_back(first)
    assert buffers.take(MOST, MOST) is not None
    assert buffers.held == MOST


def manifest(config: dict[str, object], names: str = "weight") -> Manifest:
    data = [safetensors_file({f"{names}{n}": ("U8", (9000,), bytes(9000))}) for n in range(3)]
    paths = [f"{names}-{n}.safetensors" for n in range(3)]
    return build_manifest(
        model="m", revision="r", upstream="u", created_at=CREATED_AT, chunk_size=CHUNK,
        files=[file_entry(path, each, CHUNK) for path, each in zip(paths, data, strict=True)],
        tensors=[t for p, each in zip(paths, data, strict=True) for t in tensor_entries(p, each)],
        config=config,
    )  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        manifest({}),
        manifest({"a": [[1], {"files": [1], "layouts": []}], "files": [{"size": 3}]}),
        manifest({"layouts": '],"layouts":'}, names="größe"),
    ],
    ids=["plain", "with the same names inside", "with other letters"],
)
def test_the_contents_are_the_manifests(made: Manifest) -> None:
    found = parse_contents(made.data, made.digest, "here")
    assert len(found.files) == 3
    for spec, file in zip(found.files, made.files, strict=True):
        assert list(spec.crcs) == list(file.chunks)
        expected = Spec.of(made, file)
        assert (spec.sha256, spec.size, spec.chunk_size) == (
            expected.sha256,
            expected.size,
            expected.chunk_size,
        )
        assert found.blobs[file.sha256] == spec


def test_checksums_are_a_sequence() -> None:
    given = ["00000001", "0000000a", "ffffffff"]
    found = Checksums(given)
    assert (len(found), list(found), found[1], found[-1]) == (3, given, given[1], given[-1])
    assert found[1:] == given[1:]
    with pytest.raises(IndexError):
        found[3]


def test_other_bytes_are_refused() -> None:
    made = manifest({})
    for data in (made.data[:-1], made.data + b" ", b""):
        with pytest.raises(IntegrityError):
            parse_contents(data, made.digest, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk_size": LARGEST + 1}, "chunk_size"),
        ({"chunk_size": "4096"}, "chunk_size"),
        ({"files": {}}, "files"),
        ({"files": None}, "files"),
        ({"files": [{"size": 1, "sha256": "../../etc/passwd", "chunks": ["00000000"]}]}, "files.0"),
        ({"files": [{"size": CHUNK + 1, "sha256": "a" * 64, "chunks": ["0" * 8]}]}, "2 checksums"),
    ],
)
def test_what_no_agent_can_keep(change: dict[str, object], said: str) -> None:
    content = json.loads(manifest({}).data) | change
    data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(InvalidManifest, match=said):
        parse_contents(data, hashlib.sha256(data).hexdigest(), "here")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=60) | st.sampled_from([b"{", b'{"a":', b'{"files"', b"[" * 100_000]))
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        parse_contents(data, hashlib.sha256(data).hexdigest(), "here")

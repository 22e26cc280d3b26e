"""Archives of tensors made to harm: what they claim is held to the bytes that are there."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.flows.checkpoints import opened
from warmcast.flows.errors import SourceError


@dataclass
class Storage:
    """Pickles as torch pickles a storage."""

    numel: object = 4
    kind: object = torch.FloatStorage
    key: object = "0"


class Tensor:
    """Pickles as torch pickles a tensor, whatever it claims."""

    def __init__(self, storage=None, offset=0, size=(4,), stride=(1,)):
        self.arguments = (storage or Storage(), offset, size, stride, False, OrderedDict())

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, Storage):
            return "storage", value.kind, value.key, "cpu", value.numel
        return None


def archive(value: object, entries: dict[str, bytes] | None = None, root: str = "x") -> bytes:
    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(f"{root}/data.pkl", stream.getvalue())
        for name, data in (entries or {"x/data/0": b"\1" * 16}).items():
            file.writestr(name, data)
    return buffer.getvalue()


def read(tmp_path: Path, data: bytes):
    (tmp_path / "x.bin").write_bytes(data)
    return opened("pickle", [tmp_path / "x.bin"])


def test_what_is_right_is_read(tmp_path):
    state, _ = read(tmp_path, archive({"w": Tensor()}))
    assert bytes(state["w"].view(torch.uint8).tolist()) == b"\1" * 16


def cyclic() -> dict:
    state: dict = {"w": Tensor()}
    state["state"] = state
    return state


def deep() -> object:
    value: object = Tensor()
    for _ in range(200):
        value = [value]
    return {"w": Tensor(), "deep": value}


CLAIMS = {
    "beyond the storage": {"w": Tensor(offset=1)},
    "far beyond the storage": {"w": Tensor(offset=1 << 61)},
    "strides beyond the storage": {"w": Tensor(stride=(2,))},
    "absurd strides": {"w": Tensor(size=(2, 2), stride=(1 << 62, 1))},
    "negative offset": {"w": Tensor(offset=-1)},
    "negative size": {"w": Tensor(size=(-4,))},
    "negative stride": {"w": Tensor(offset=3, stride=(-1,))},
    "huge size": {"w": Tensor(size=(1 << 62,))},
    "sizes that overflow": {"w": Tensor(size=(1 << 40, 1 << 40), stride=(1 << 40, 1))},
    "size of floats": {"w": Tensor(size=(4.0,))},
    "fewer strides": {"w": Tensor(size=(2, 2))},
    "no storage": {"w": Tensor(Storage(key="9"))},
    "longer storage": {"w": Tensor(Storage(numel=5))},
    "shorter storage": {"w": Tensor(Storage(numel=3), size=(3,))},
    "huge storage": {"w": Tensor(Storage(numel=1 << 62))},
    "negative storage": {"w": Tensor(Storage(numel=-4))},
    "storage of text": {"w": Tensor(Storage(numel="4"))},
    "key of a path": {"w": Tensor(Storage(key="../../x"))},
    "storage of two lengths": {"w": Tensor(), "v": Tensor(Storage(numel=2), size=(2,))},
    "storage of two dtypes": {"w": Tensor(), "v": Tensor(Storage(kind=torch.IntStorage))},
    "storage of no kind": {"w": Tensor(Storage(kind=torch.Size))},
    "a tensor for a storage": {"w": Tensor(Tensor())},
    "a cycle": cyclic(),
    "tensors deep below": deep(),
    "a NUL in a name": {"a\0b": Tensor()},
    "no names": {7: Tensor()},
    "no dict": Tensor(),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_that_the_bytes_do_not_bear_out(tmp_path, claim):
    with pytest.raises(SourceError) as caught:
        read(tmp_path, archive(CLAIMS[claim]))
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


def directory(data: bytes) -> list[int]:
    """Where the central directory's entries begin."""
    found, place = [], data.find(b"PK\1\2")
    while place >= 0:
        found.append(place)
        place = data.find(b"PK\1\2", place + 4)
    return found


def patched(data: bytes, entry: int, field: int, value: int) -> bytes:
    """A 4-byte field of an entry of the central directory, changed."""
    place = directory(data)[entry] + field
    return data[:place] + struct.pack("<I", value) + data[place + 4 :]


PLAIN = archive({"w": Tensor()}, {"x/data/0": b"\1" * 16, "x/data/1": b"\2" * 16})
SIZES = {"x/data/0": b"\1" * 16}
ARCHIVES = {
    "entries over each other": (patched(PLAIN, 2, 42, 0), "over another|inside the archive"),
    "an entry in the directory": (
        patched(PLAIN, 1, 42, directory(PLAIN)[0]), "inside the archive",
    ),
    "an entry beyond the file": (patched(PLAIN, 1, 42, 1 << 30), "inside the archive"),
    "an entry of absurd length": (patched(PLAIN, 1, 24, 1 << 31), "inside the archive|CRC-32"),
    "two entries of a name": (
        PLAIN.replace(b"x/data/1", b"x/data/0"), "one data.pkl",
    ),
    "two roots": (archive({"w": Tensor()}, SIZES | {"y/data.pkl": b"N."}), "one data.pkl"),
    "another root": (archive({"w": Tensor()}, SIZES, root="y"), "one data.pkl"),
    "no pickle": (PLAIN.replace(b"data.pkl", b"data.pk1"), "one data.pkl"),
    "big-endian": (archive({"w": Tensor()}, SIZES | {"x/byteorder": b"big"}), "big-endian"),
    "nothing but an end": (b"PK\5\6" + b"\0" * 18, "torch.save"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_are_none(tmp_path, case):
    data, words = ARCHIVES[case]
    with pytest.raises(SourceError, match=rf"x\.bin.*(?:{words})"):
        read(tmp_path, data)


def test_every_prefix_ends_in_an_error(tmp_path):
    for length in range(0, len(PLAIN), 11):
        with pytest.raises(SourceError, match=r"x\.bin"):
            read(tmp_path, PLAIN[:length])


def test_the_older_format_cut_off_anywhere(tmp_path):
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(5)}, buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    assert set(read(tmp_path, data)[0]) == {"w"}
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(SourceError, match=r"x\.bin"):
            read(tmp_path, data[:length])

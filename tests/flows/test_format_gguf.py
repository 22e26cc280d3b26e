"""GGUF: read as ``gguf``, llama.cpp's own package, writes it; dequantised to its own values."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from tests.flows import checkpoints
from warmcast.flows.convert import process
from warmcast.flows.convert.gguf import open_gguf
from warmcast.flows.convert.gguf_blocks import DEQUANTISERS
from warmcast.flows.convert.gguf_header import TYPES
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.tensors import Files
from warmcast.flows.errors import InvalidCheckpoint, SourceError
from warmcast.flows.local import LocalFile
from warmcast.flows.run import deploy
from warmcast.manifests import Origin
from warmcast.manifests.header import parse_header
from warmcast.manifests.origin import blob_key

Q = gguf.GGMLQuantizationType


def opened(path: Path, *, dequantise: bool = False):
    """A file's tensors, and the bytes of each."""
    with Files([process.source_of(LocalFile.of(path.name, path))]) as files:
        checkpoint = open_gguf(files, [0], dequantise=dequantise)
        return checkpoint, {t.name: (t, b"".join(t.pieces())) for t in checkpoint.tensors}


def blocks_of(kind: Q, rows: int, columns: int) -> np.ndarray:
    """Random blocks whose scales are numbers."""
    generator = np.random.default_rng(int(kind))
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * columns // elements, nbytes), dtype=np.uint8)
    halves = {
        Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82],
        Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0],
    }  # fmt: skip
    for place in halves.get(kind, []):
        scale = generator.normal(size=len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind == Q.Q8_K:
        scale = generator.normal(size=len(blocks)).astype(np.float32)
        blocks[:, :4] = scale.view(np.uint8).reshape(-1, 4)
    return blocks.reshape(rows, -1)


def written(path: Path, tensors: dict[str, np.ndarray | tuple[np.ndarray, Q]], **pairs) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(1000)])
    writer.add_array("general.tags", ["a", "b"])
    writer.add_float32("llama.rope.scale", float("inf"))
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_uint64("general.large", (1 << 64) - 1)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    names = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4"}
    state = {
        f"blk.0.{name}.weight": generator.integers(-9, 9, (3, 5)).astype(dtype)
        for name, dtype in names.items()
    }
    return state | {"token_embd.weight": generator.normal(size=(2, 3, 4)).astype("f4")}


def test_deploy(source, file_url, work, restore):
    (source / "config.json").unlink()
    state = plain()
    raw = blocks_of(Q.Q4_K, 3, 512)
    brain = np.arange(16, dtype=np.uint16).reshape(2, 8).view(np.uint8)
    tensors = state | {"blk.0.q.weight": (raw, Q.Q4_K), "blk.0.b.weight": (brain, Q.BF16)}
    written(source / "model.gguf", tensors)
    result = deploy(source, file_url, "m@a", work=work)
    found = restore(result.manifest)
    for name, array in state.items():
        assert torch.equal(found[name], torch.from_numpy(array)), name
    assert found["blk.0.q.weight"].shape == (3, 2 * 144)
    assert bytes(found["blk.0.q.weight"].numpy().tobytes()) == raw.tobytes()
    assert found["blk.0.b.weight"].dtype == torch.bfloat16
    config = result.manifest.config
    assert config["general.architecture"] == "llama"
    assert (config["llama.rope.scale"], config["general.tags"]) == ("inf", ["a", "b"])
    assert "tokenizer.ggml.tokens" not in config
    with Origin.open(file_url) as origin:
        root = Path(origin.url.removeprefix("file://"))
    blob = root / blob_key(result.manifest.file["gguf_metadata.json"].sha256)
    assert json.loads(blob.read_text())["tokenizer.ggml.tokens"][999] == "token 999"
    weights = (root / blob_key(result.manifest.file["model.safetensors"].sha256)).read_bytes()
    notes = json.loads(parse_header(weights, len(weights), "x").metadata["warmcast.gguf"])
    assert notes == {"blk.0.q.weight": {"type": "Q4_K", "shape": [3, 512]}}
    # The second deploy converts nothing, and knows the config still.
    again = deploy(source, file_url, "m@a", work=work)
    assert (again.changed, again.manifest.config) == (False, config)
    # Dequantised on request, in the dtype that was asked for.
    options = ConvertOptions(dequantise=True, dtype="bfloat16", keep_dtype=("*.F64.*",))
    found = restore(deploy(source, file_url, "m@b", work=work, convert=options).manifest)
    values = torch.from_numpy(dequantize(raw, Q.Q4_K)).reshape(3, 512)
    assert torch.equal(found["blk.0.q.weight"], values.bfloat16())
    assert found["blk.0.F64.weight"].dtype == torch.float64


@pytest.mark.parametrize("kind", DEQUANTISERS)
def test_dequantised_to_the_bit(tmp_path, kind):
    raw = blocks_of(Q[kind], 5, 512)
    path = written(tmp_path / "x.gguf", {"w": (raw, Q[kind])})
    _, found = opened(path, dequantise=True)
    tensor, data = found["w"]
    assert (tensor.dtype, tensor.shape) == ("F32", (5, 512))
    if kind == "Q8_K":  # the package has no dequantisation of it
        parts = raw.reshape(-1, 292)
        values = parts[:, 4:260].view(np.int8).astype(np.float32)
        expected = parts[:, :4].copy().view(np.float32) * values
    else:
        expected = dequantize(raw, Q[kind])
    assert np.array_equal(np.frombuffer(data, np.float32), expected.reshape(-1))


def test_types_are_those_of_the_package():
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert sizes == TYPES


def test_type_that_cannot_be_dequantised(tmp_path):
    path = written(tmp_path / "x.gguf", {"w": (blocks_of(Q.IQ2_S, 2, 256), Q.IQ2_S)})
    assert opened(path)[1]["w"][0].shape == (2, 82)
    with pytest.raises(InvalidCheckpoint, match=r"'w': .*can be dequantised.*found IQ2_S"):
        opened(path, dequantise=True)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name="w", dims=(4,), kind=0, offset=0, count=None) -> bytes:
    count = len(dims) if count is None else count
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def file_of(
    tensors=(), pairs=(), *, data=b"\0" * 64, version=3, magic=b"GGUF", counts=None
) -> bytes:
    counts = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


HUGE = 1 << 62
CASES = {
    "empty": (b"", "whole header"),
    "other magic": (file_of(magic=b"GGML"), "begins with GGUF"),
    "old version": (file_of(version=1), "version 2 or 3, found 1"),
    "big-endian": (file_of(version=3 << 24), "found big-endian"),
    "tensors without end": (file_of(counts=(HUGE, 0)), "tensors that the file can hold"),
    "pairs without end": (file_of(counts=(0, HUGE)), "pairs that the file can hold"),
    "cut off": (file_of([info()])[:40], "tensors that the file can hold|whole header"),
    "long string": (
        file_of(pairs=[struct.pack("<Q", HUGE)], data=b"x" * 99), "bytes of a string",
    ),
    "long array": (
        file_of(pairs=[pair("a", 9, struct.pack("<IQ", 4, HUGE))], data=b"x" * 99), "elements",
    ),
    "arrays in arrays": (
        file_of(pairs=[pair("a", 9, struct.pack("<IQ", 9, 1) * 9)], data=b"x" * 99), "GGUF knows",
    ),
    "unknown value": (file_of(pairs=[pair("a", 99, b"")]), "found type 99"),
    "key twice": (file_of(pairs=[pair("a", 0, b"1")] * 2), "each once"),
    "alignment 0": (file_of([info()], [pair("general.alignment", 4, b"\0" * 4)]), "steps of 8"),
    "alignment text": (file_of([info()], [pair("general.alignment", 8, text("x"))]), "steps of 8"),
    "no dimensions": (file_of([info(dims=())]), "1 to 4 dimensions"),
    "many dimensions": (file_of([info(count=1 << 30)]), "1 to 4 dimensions"),
    "dimensions that overflow": (file_of([info(dims=(1 << 33, 1 << 33))]), "fit memory"),
    "one huge dimension": (file_of([info(dims=((1 << 64) - 1, 0))]), "fit memory"),
    "half a block": (file_of([info(dims=(33,), kind=2)]), "whole blocks of Q4_0"),
    "unknown type": (file_of([info(kind=77)]), "found type 77"),
    "removed type": (file_of([info(kind=4)]), "found type 4"),
    "beyond the file": (file_of([info(offset=1 << 20)]), "inside the file"),
    "longer than the file": (file_of([info(dims=(4000,))]), "inside the file"),
    "offset that overflows": (file_of([info(offset=(1 << 64) - 32)]), "inside the file"),
    "offset between": (file_of([info(offset=8)]), "multiple of 32"),
    "overlap": (file_of([info(), info("v")]), "'v' over another"),
    "name twice": (file_of([info(), info(offset=32)]), "each once"),
    "no name": (file_of([info("")]), "each once"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_hostile(tmp_path, case):
    data, words = CASES[case]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=rf"x\.gguf: .*(?:{words})") as caught:
        opened(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_every_prefix_ends_in_an_error(tmp_path):
    data = file_of([info(), info("v", offset=32)], [pair("a", 8, text("b"))])
    for length in range(len(data) - 48):
        (tmp_path / "x.gguf").write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"x\.gguf"):
            opened(tmp_path / "x.gguf")


def test_a_name_that_is_taken(tmp_path):
    path = written(tmp_path / "x.gguf", {"warmcast.storage.0": np.ones(3, "f4")})
    with pytest.raises(InvalidCheckpoint, match=r"x\.gguf: .*which is taken"):
        checkpoints.opened("gguf", [path])


def test_shards_and_choice(source, file_url, work, restore):
    state = plain()
    for number, part in enumerate((list(state)[:3], list(state)[3:]), 1):
        name = f"model-0000{number}-of-00002.gguf"
        written(source / name, {key: state[key] for key in part})
    found = restore(deploy(source, file_url, "m@a", work=work).manifest)
    assert set(found) == set(state)

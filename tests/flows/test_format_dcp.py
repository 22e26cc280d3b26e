"""Torch distributed checkpoints, as torch itself writes them from one process and from several."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from warmcast.flows.convert import dcp as module
from warmcast.flows.convert import process
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.dcp import open_dcp
from warmcast.flows.convert.tensors import Files
from warmcast.flows.errors import InvalidCheckpoint, MissingShard, SourceError, UnsafePickle
from warmcast.flows.local import LocalFile
from warmcast.flows.run import deploy

SAVE = """
import os, sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
full = lambda *shape: torch.arange(float(torch.Size(shape).numel())).reshape(shape)
state = {
    "rows": distribute_tensor(full(5, 4), mesh, [Shard(0)]),
    "columns": distribute_tensor(full(6, 7).bfloat16(), mesh, [Shard(1)]),
    "deep": distribute_tensor(full(3, 4, 6), mesh, [Shard(2)]),
    "same": distribute_tensor(full(3), mesh, [Replicate()]),
}
optimizer = {"state": {"rows": {"exp_avg": distribute_tensor(full(5, 4), mesh, [Shard(0)])}}}
dcp.save({"model": state, "optimizer": optimizer, "step": 3}, checkpoint_id=folder)
dist.destroy_process_group()
os._exit(0)  # all is written; torch's threads now and then abort what ends as usual
"""


def full(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory) -> Path:
    """A checkpoint of two ranks, sharded along several dimensions."""
    folder = tmp_path_factory.mktemp("dcp")
    arguments = [str(folder / "checkpoint"), str(folder / "store")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", SAVE, *arguments, str(rank)]) for rank in range(2)
    ]
    try:
        assert [rank.wait(90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder / "checkpoint"


def opened(folder: Path):
    """The names, dtypes, shapes and bytes of a checkpoint's tensors, in this process."""
    sources = [
        process.source_of(LocalFile.of(path.name, path)) for path in sorted(folder.iterdir())
    ]
    with Files(sources) as files, Checksums() as checksums:
        checkpoint = open_dcp(files, range(len(sources)), checksums)
        state = {t.name: (t.dtype, t.shape, b"".join(t.pieces())) for t in checkpoint.tensors}
        checksums.result()
    return state, checkpoint.left_out


def saved(state: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_shards_of_ranks(sharded, source, file_url, work, restore, same_bits):
    for path in sharded.iterdir():
        os.link(path, source / path.name)
    result = deploy(source, file_url, "m@a", work=work)
    state = {
        "rows": full(5, 4), "columns": full(6, 7).bfloat16(), "deep": full(3, 4, 6),
        "same": full(3),
    }  # fmt: skip
    same_bits(restore(result.manifest), state)
    told = "\n".join(result.left_out)
    assert "'optimizer' (1 tensors)" in told
    assert "'step' (no tensor)" in told
    assert [f.path for f in result.manifest.files] == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, 30, 70])
def test_a_block_of_rows_at_a_time(sharded, monkeypatch, nbytes):
    monkeypatch.setattr(module, "PIECE", nbytes)
    found, _ = opened(sharded)
    assert found["columns"][2] == full(6, 7).bfloat16().view(torch.uint8).numpy().tobytes()
    assert found["deep"][2] == full(3, 4, 6).numpy().tobytes()


def test_one_process(tmp_path, dtypes_state):
    skipped = (torch.float4_e2m1fn_x2,)  # torch's own metadata do not know their length
    state = {n: t for n, t in dtypes_state.items() if t.dtype not in skipped}
    state |= {"scalar": torch.tensor(3.5), "strided": full(4, 6).t(), "empty": torch.empty(0, 4)}
    found, _ = opened(saved(state, tmp_path / "x"))
    assert set(found) == set(state)
    assert found["strided"][1:] == ((6, 4), full(4, 6).t().contiguous().numpy().tobytes())
    assert found["scalar"] == ("F32", (), torch.tensor(3.5).numpy().tobytes())


def test_a_checkpoint_in_the_one_folder_below(sharded, source, file_url, work, restore):
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        (source / folder).mkdir()
        for path in sharded.iterdir():
            os.link(path, source / folder / path.name)
    result = deploy(source, file_url, "m@a", work=work)
    assert set(restore(result.manifest)) == {"rows", "columns", "deep", "same"}
    assert "optimizer_0/__0_0.distcp: another framework's weights" in result.left_out


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_a_global_that_is_no_metadata(tmp_path):
    saved({"w": torch.ones(2)}, tmp_path / "x")
    for thing in (Call(os.system, f"touch {tmp_path}/marker"), Call(eval, "1"), Path.home):
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(UnsafePickle, match=r"\.metadata: .*forbidden global"):
            opened(tmp_path / "x")
    assert not (tmp_path / "marker").exists()


def hostile(tmp_path: Path, change) -> Path:
    """A checkpoint of one 4x3 tensor whose metadata were changed."""
    folder = saved({"w": full(4, 3)}, tmp_path / "x")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def info(metadata):
    return next(iter(metadata.storage_data.values()))


def chunk(metadata):
    return metadata.state_dict_metadata["w"].chunks[0]


CASES = {
    "file above": (lambda m: setattr(info(m), "relative_path", "../x"), r"do not trust"),
    "file with NUL": (lambda m: setattr(info(m), "relative_path", "a\0b"), "control character"),
    "missing file": (lambda m: setattr(info(m), "relative_path", "__9_0.distcp"), "none such"),
    "offset beyond": (lambda m: setattr(info(m), "offset", 1 << 40), "cut off"),
    "negative offset": (lambda m: setattr(info(m), "offset", -1), "an offset and a length"),
    "absurd length": (lambda m: setattr(info(m), "length", 1 << 61), "cut off"),
    "transformed": (lambda m: setattr(info(m), "transform_descriptors", ["zstd"]), "transformed"),
    "huge shape": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([1 << 40, 1 << 40])),
        "fits memory",
    ),
    "larger shape": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([8, 3])),
        "chunks of 24 elements, found 12",
    ),
    "chunk outside": (lambda m: setattr(chunk(m), "offsets", torch.Size([1, 0])), "chunks inside"),
    "chunk of another shape": (
        lambda m: (
            setattr(chunk(m), "sizes", torch.Size([3, 4])),
            setattr(m.state_dict_metadata["w"], "size", torch.Size([3, 4])),
        ),
        r"a chunk of F32 \[3, 4\], found F32 \[4, 3\]",
    ),
    "chunks over each other": (
        lambda m: (
            m.state_dict_metadata["w"].chunks.append(chunk(m)),
            setattr(m.state_dict_metadata["w"], "size", torch.Size([8, 3])),
        ),
        "side by side",
    ),
    "no chunk saved": (lambda m: m.storage_data.clear(), "in storage_data"),
    "no tensors": (lambda m: m.state_dict_metadata.clear(), "tensors of a model"),
    "cyclic": (lambda m: setattr(m, "planner_data", {"w": m}), None),
    "not a dict": (lambda m: setattr(m, "state_dict_metadata", [1]), "state_dict_metadata"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_hostile_metadata(tmp_path, case):
    change, words = CASES[case]
    folder = hostile(tmp_path, change)
    if words is None:
        assert set(opened(folder)[0]) == {"w"}
        return
    with pytest.raises(SourceError, match=words) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"noise" * 9, b"\x80\x04N.", b"\x80\x04}."])
def test_metadata_that_are_none(tmp_path, data):
    saved({"w": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=r"\.metadata"):
        opened(tmp_path / "x")


def test_every_prefix_of_metadata_ends_in_an_error(tmp_path):
    folder = saved({"w": torch.ones(2)}, tmp_path / "x")
    data = (folder / ".metadata").read_bytes()
    for length in range(0, len(data), 7):
        (folder / ".metadata").write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"\.metadata"):
            opened(folder)


def test_damaged_shards(tmp_path):
    folder = saved({"w": torch.arange(1000.0)}, tmp_path / "x")
    (shard,) = folder.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 77] ^= 4
    shard.write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=r"\.distcp: data/0.*CRC-32"):
        opened(folder)
    shard.write_bytes(data[:2000])
    with pytest.raises(InvalidCheckpoint, match=r"\.distcp"):
        opened(folder)
    shard.unlink()
    with pytest.raises(MissingShard, match=r"\.distcp"):
        opened(folder)

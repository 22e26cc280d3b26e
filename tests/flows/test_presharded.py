"""Rank files: read by each rank as one run, held to the slices that they are copies of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from warmcast.flows.progress import Silent
from warmcast.flows.run import deploy
from warmcast.flows.steps import shards
from warmcast.flows.steps.lay_out import Model, lay_out
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.workfolder import WorkFolder
from warmcast.loader.containers import collect
from warmcast.loader.errors import WeightVerificationError
from warmcast.loader.plan import Targets, make_plan
from warmcast.loader.staging import Staging
from warmcast.loader.stream import stream
from warmcast.loader.verify import verify
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.errors import InvalidManifest, UsageError
from warmcast.manifests.manifest import parse_manifest
from warmcast.manifests.origin import Origin, blob_key

PLAN = {"layers.*.up.weight": "tp:0", "layers.*.down.weight": "tp:1", "pipe": "pp:0"}


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"norm": torch.randn(7), "pipe": torch.randn(4, 3).half(), "flags": torch.ones(3) > 0}
    for layer in range(3):
        found[f"layers.{layer}.up.weight"] = torch.randn(6, 5, dtype=torch.bfloat16)
        found[f"layers.{layer}.down.weight"] = torch.randn(2, 8, 3)
        found[f"layers.{layer}.norm"] = torch.randn(5)
    return found


def held(tensors, mesh, rank):
    """What a rank holds, by torch's own means."""
    place = dict(zip([n for n, _ in mesh.dimensions], mesh.coordinates[rank], strict=True))
    sizes = dict(mesh.dimensions)
    found = dict(tensors)
    for name, tensor in tensors.items():
        for part, dimension, axis in (("up", "tp", 0), ("down", "tp", 1), ("pipe", "pp", 0)):
            if part in name and dimension in sizes:
                found[name] = tensor.chunk(sizes[dimension], axis)[place[dimension]].contiguous()
    return found


def module_of(tensors):
    """A module whose state dict has these names, dots and all."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_buffer(last, torch.zeros_like(tensor))
    return root


def load(manifest, mesh, rank, url, deadline):
    with Origin.open(url) as origin:
        tensors = held(state(), mesh, rank)
        plan = make_plan(collect(module_of(tensors), ()), manifest, mesh=mesh, rank=rank)
        targets = Targets.allocate(plan, torch.device("cpu"))
        read = stream(origin, manifest, targets, Staging(1 << 24), deadline)
        verify(targets.pairs(), deadline)
        found = {truth.name: tensor.clone() for truth, tensor in targets.pairs()}
    return plan, read, found


@pytest.mark.parametrize("dimensions", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}])
def test_a_rank_reads_its_own_file(source, file_url, work, deadline, dimensions):
    save_file(state(), source / "model.safetensors")
    plan = {p: rule for p, rule in PLAN.items() if rule[:2] in dimensions}
    request = MeshRequest(dimensions, plan, presharded=True)
    result = deploy(source, file_url, "m@a", meshes=[request], work=work)
    manifest = result.manifest
    mesh = request.mesh({}, {})
    layout = manifest.layout(mesh)
    ranks = mesh.size
    files = {shard.file for shard in layout.shards}
    assert len(files) == (2 if "dp" in dimensions else ranks)
    assert set(result.moved) >= files
    for rank in range(ranks):
        made, read, found = load(manifest, mesh, rank, file_url, deadline)
        expected = held(state(), mesh, rank)
        assert read == made.nbytes == sum(t.nbytes for t in expected.values())
        assert {p.entry.file for p in made.placements} == {layout.shards[rank].file}
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        # And for others: a safetensors file of the rank's tensors.
        sha256 = manifest.file[layout.shards[rank].file].sha256
        plain = load_file(Path(file_url.removeprefix("file://")) / blob_key(sha256))
        assert {n: t.tolist() for n, t in plain.items()} == {
            n: t.tolist() for n, t in expected.items()
        }
    assert not list(work.iterdir())


def test_large_whole_tensors_are_not_copied(source, file_url, work, deadline, monkeypatch):
    monkeypatch.setattr(shards, "SMALL_NBYTES", 20)
    save_file(state(), source / "model.safetensors")
    request = MeshRequest({"tp": 2}, {"layers.*.up.weight": "tp:0"}, presharded=True)
    manifest = deploy(source, file_url, "m@a", meshes=[request], work=work).manifest
    mesh = request.mesh({}, {})
    copied = {copy.name for copy in manifest.layout(mesh).shards[0].tensors}
    assert copied == {"flags"} | {
        name for name in state() if name.endswith(("up.weight", ".norm")) and name != "norm"
    }


def test_nothing_is_done_twice(source, file_url, work):
    save_file(state(), source / "model.safetensors")
    request = MeshRequest({"tp": 2}, {"layers.*.up.weight": "tp:0"}, presharded=True)
    first = deploy(source, file_url, "m@a", meshes=[request], work=work)
    again = deploy(source, file_url, "m@a", meshes=[request], work=work)
    assert (again.changed, again.moved) == (False, ())
    # A rank file that went is made again, and is the same.
    path = first.manifest.layouts[0].shards[1].file
    blob = Path(file_url.removeprefix("file://")) / blob_key(first.manifest.file[path].sha256)
    blob.unlink()
    third = deploy(source, file_url, "m@a", meshes=[request], work=work)
    assert (third.changed, third.moved) == (False, (path,))
    assert blob.exists()


def test_a_layout_is_remembered(source, file_url, work, deadline):
    """Whoever asks for it again reads no tensor, and writes no file."""

    def never(*_):
        raise AssertionError("read")

    save_file(state(), source / "model.safetensors")
    request = MeshRequest({"tp": 2}, {"layers.*.up.weight": "tp:0"}, presharded=True)
    manifest = deploy(source, file_url, "m@a", meshes=[request], work=work).manifest
    model = Model({}, manifest.files, manifest.tensors, (), never)
    with Origin.open(file_url) as origin, WorkFolder(work) as folder:
        found = lay_out(origin, model, [request], folder, deadline, lambda _: None, Silent())
    assert found.layouts == manifest.layouts
    assert {file.path for file in found.files} == {s.file for s in found.layouts[0].shards}
    assert found.moved == ()


def test_nothing_to_hold(source, file_url, work):
    save_file({"w": torch.ones(1 << 19)}, source / "model.safetensors")
    with pytest.raises(UsageError, match="tensors that ranks split"):
        deploy(source, file_url, "m@a", meshes=[MeshRequest({"tp": 2}, presharded=True)], work=work)


@pytest.fixture
def record(source, file_url, work):
    save_file({"w": torch.ones(4, 2), "n": torch.ones(3)}, source / "model.safetensors")
    request = MeshRequest({"tp": 2}, {"w": "tp:0"}, presharded=True)
    manifest = deploy(source, file_url, "m@a", meshes=[request], work=work).manifest
    assert json.loads(manifest.data)["layouts"][0]["shards"][0]["tensors"][0]["name"] in ("n", "w")
    return json.loads(manifest.data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop(), "shards: expected one for each of 2 ranks, found 1"),
        (lambda s: s[0].update(file="nothing"), "shards.0.file: expected a path among"),
        (lambda s: s[0].update(file="config.json"), "shards.0.tensors: expected to fill the"),
        (lambda s: s[0]["tensors"].pop(), "shards.0.tensors: expected to fill the"),
        (lambda s: s[0].update(tensors=[]), "shards.0.tensors: expected what the file holds"),
        (lambda s: s[0]["tensors"][0].update(name="x"), "each a tensor that the rank holds, once"),
        (lambda s: s[0]["tensors"].append(s[0]["tensors"][0]), "each a tensor that the rank holds"),
        (lambda s: s[0]["tensors"][0].update(end=1 << 40), "bytes, as the rank holds of it"),
        (lambda s: s[0]["tensors"][0].update(begin=-1), "greater than or equal to 0"),
        (lambda s: [t.update(begin=t["begin"] + 4, end=t["end"] + 4) for t in s[0]["tensors"][1:]],
         "a gap"),
        (lambda s: [t.update(begin=t["begin"] - 4, end=t["end"] - 4) for t in s[0]["tensors"][1:]],
         "an overlap"),
        (lambda s: [t.update(begin=t["begin"] + 4, end=t["end"] + 4) for t in s[0]["tensors"]],
         "to fill the"),
        (lambda s: s.clear(), "another spelling"),
    ],
)  # fmt: skip
def test_shards_that_do_not_fit(record, change, words):
    change(record["layouts"][0]["shards"])
    with pytest.raises(InvalidManifest, match=words):
        parse_manifest(canonical_json(record))


def test_a_rank_file_with_other_bytes_is_not_loaded(source, file_url, work, deadline):
    """Of the right sizes, under checksums that agree with it: only the slices' truth tells."""
    save_file(state(), source / "model.safetensors")
    request = MeshRequest({"tp": 2}, {"layers.*.up.weight": "tp:0"}, presharded=True)
    manifest = deploy(source, file_url, "m@a", meshes=[request], work=work).manifest
    mesh = request.mesh({}, {})
    record = json.loads(manifest.data)
    first, second = record["layouts"][0]["shards"]
    first["file"] = second["file"]
    hostile = parse_manifest(canonical_json(record))
    tensors = held(state(), mesh, 0) | {n: t for n, t in state().items() if "down" in n}
    with Origin.open(file_url) as origin:
        plan = make_plan(collect(module_of(tensors), ()), hostile, mesh=mesh, rank=0)
        targets = Targets.allocate(plan, torch.device("cpu"))
        stream(origin, hostile, targets, Staging(1 << 24), deadline)
        with pytest.raises(WeightVerificationError):
            verify(targets.pairs(), deadline)

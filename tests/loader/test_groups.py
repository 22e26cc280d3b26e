"""Groups: several ranks that load together, and several workers that boot at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import nn

from tests.loader.conftest import TIME
from tests.loader.models import Block, Encoder, assert_same, bits, filled, snapshot
from warmcast.loader import Change
from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.stages import Outvoted
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import Mesh

ROOT = Path(__file__).parents[2]


def skeleton_of(loader, build):
    with loader.skeleton():
        return build()


def grouped(loader, ranks, deployed, build, *, size=2, options=lambda rank: {}):
    """A group that loads and serves, each rank in a thread: ``(report, model)`` by rank."""

    def work(rank, group):
        mine = loader(group=group)
        model = skeleton_of(mine, lambda: build(rank))
        report = mine.load(model, deployed.ref, **options(rank))
        mine.serve(model)
        return report, model

    return ranks(size, work)


# Groups


def test_every_rank_loads_the_whole_model(publish, loader, ranks):
    expected = filled(Encoder()).state_dict()
    deployed = publish(expected)
    for route in ("origin", "peer"):
        found = grouped(loader, ranks, deployed, lambda rank: Encoder())
        for rank, (report, model) in enumerate(found):
            assert (report.rank, report.route) == (rank, route)
            assert_same(model.state_dict(), expected)


class Pipeline(nn.Module):
    """Two parts that live on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Encoder()
        self.vae = Block(8)


def test_ranks_host_different_submodules(publish, loader, ranks):
    source = filled(Pipeline())
    deployed = publish(source.state_dict())
    parts = ("transformer", "vae")
    for route in ("origin", "peer"):
        found = grouped(
            loader,
            ranks,
            deployed,
            lambda rank: Pipeline(),
            options=lambda rank: {"modules": [parts[rank]]},
        )
        for part, other, (report, model) in zip(parts, reversed(parts), found, strict=True):
            assert report.route == route
            expected = getattr(source, part).state_dict()
            assert_same(getattr(model, part).state_dict(), expected)
            assert all(p.is_meta for p in getattr(model, other).parameters())


class Parallel(nn.Module):
    """A rank's part of a tensor-parallel layer of width 8: columns, then rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32 // size)
        self.down = nn.Linear(32 // size, 8, bias=False)


TP = {"up.weight": "tp:0", "up.bias": "tp:0", "down.weight": "tp:1"}


def test_tensor_parallel(publish, loader, ranks):
    whole = filled(Parallel(1)).state_dict()
    meshes = [Mesh.grid({"tp": 2}, TP), Mesh.grid({"dp": 2, "tp": 2}, TP)]
    deployed = publish(whole, meshes=meshes)
    for mesh in meshes:
        for route in ("origin", "peer"):
            found = grouped(
                loader,
                ranks,
                deployed,
                lambda rank: Parallel(2),
                size=mesh.size,
                options=lambda rank, mesh=mesh: {"mesh": mesh},
            )
            for rank, (report, model) in enumerate(found):
                half = rank % 2
                expected = dict(whole)
                for name, rule in TP.items():
                    axis = int(rule[-1])
                    expected[name] = whole[name].narrow(axis, 16 * half, 16)
                assert report.route == route
                assert_same(model.state_dict(), expected)
    with pytest.raises(SkeletonMismatch, match="deploy with this mesh"):
        found = grouped(
            loader,
            ranks,
            deployed,
            lambda rank: Parallel(2),
            options=lambda rank: {"mesh": Mesh.grid({"tp": 2}, TP | {"norm.bias": "tp:0"})},
        )
        raise found[0]


def test_under_torchrun(publish, valkey_url, file_url):
    """The whole way with real processes: a group from the origin, and one from its peers.

    Both are ranks of one torchrun: half of its processes boot when the others serve.
    """
    whole = filled(Parallel(1)).state_dict()
    mesh = Mesh.grid({"tp": 2}, TP)
    deployed = publish(whole, meshes=[mesh])
    options = {"model": "parallel", "ref": deployed.ref, "mesh": [{"tp": 2}, TP]}
    env = {
        "WARMCAST_ORIGIN": file_url,
        "WARMCAST_REGISTRY": valkey_url,
        "WARMCAST_DEADLINE": str(TIME),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.loader.torchrun_worker"]
    process = subprocess.Popen(
        [*command, json.dumps(options)],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        raise
    told = [json.loads(line) for line in output.splitlines()]
    assert sorted((v["rank"], v["route"]) for v in told) == [
        (0, "origin"), (0, "peer"), (1, "origin"), (1, "peer"),
    ]  # fmt: skip
    for value in told:
        expected = whole["down.weight"].narrow(1, 16 * value["rank"], 16)
        assert value["down.weight"] == bits(expected)[2].hex()


def test_a_rank_that_fails_fails_all_and_no_model_is_touched(publish, loader, ranks):
    """Even where the others had installed what they loaded."""

    def apply(model: nn.Module) -> None:
        if getattr(model, "broken", False):
            raise ZeroDivisionError("half way")
        model.half()

    deployed = publish(filled(Block(8)).state_dict())

    def work(rank, group):
        mine = loader(group=group)
        model = skeleton_of(mine, lambda: Block(8))
        model.broken = rank == 1
        unchanged = snapshot(model)
        try:
            mine.load(model, deployed.ref, change=Change("c", "1", apply))
        finally:
            unchanged()

    found = ranks(2, work)
    assert isinstance(found[0], Outvoted)
    assert "rank 1: ZeroDivisionError: half way" in str(found[0])
    assert isinstance(found[1], ZeroDivisionError)


def test_a_rank_with_another_model_fails_all(publish, loader, ranks):
    deployed = publish(filled(Block(8)).state_dict())
    found = grouped(loader, ranks, deployed, lambda rank: Block(8 + rank))
    assert isinstance(found[0], Outvoted)
    assert "rank 1: skeleton: 5 differences" in str(found[0])
    assert isinstance(found[1], SkeletonMismatch)


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ({"modules": ("vae",)}, {"modules": ("encoder",)}, "'encoder'"),
        ({}, {"device": "tpu"}, "'tpu'"),
        ({}, {"mesh": Mesh.grid({"tp": 4})}, "mesh"),
    ],
)
def test_a_rank_that_asks_for_what_is_not_there_fails_all(
    publish, loader, ranks, right, wrong, named
):
    """At once: the others do not wait for a vote that never comes."""
    deployed = publish(filled(Pipeline()).state_dict())
    found = grouped(
        loader,
        ranks,
        deployed,
        lambda rank: Pipeline(),
        options=lambda rank: wrong if rank else right,
    )
    assert isinstance(found[0], Outvoted)
    assert named in str(found[0])
    assert isinstance(found[1], UsageError)


def test_a_mesh_that_is_not_the_groups(publish, loader, ranks):
    deployed = publish(filled(Block(8)).state_dict())
    found = grouped(
        loader,
        ranks,
        deployed,
        lambda rank: Block(8),
        options=lambda rank: {"mesh": Mesh.grid({"tp": 4})},
    )
    assert all(isinstance(each, UsageError) for each in found)


# Workers that boot at once


def at_once(loader, deployed, count, **options):
    """Workers that all start to load at one moment and serve as soon as they can."""
    start = threading.Barrier(count)

    def work(_):
        mine = loader()
        model = skeleton_of(mine, Encoder)
        start.wait(TIME)
        report = mine.load(model, deployed.ref)
        mine.serve(model, **options)
        return report, model

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_cold_workers_read_the_origin_once(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    found = at_once(loader, deployed, 4)
    assert sorted(report.route for report, _ in found) == ["origin", "peer", "peer", "peer"]
    for _, model in found:
        assert_same(model.state_dict(), filled(Encoder()).state_dict())


def test_cold_groups_read_the_origin_once(publish, loader, ranks):
    """Three groups of two at once. Their ranks ask the same senders in any order; no group waits
    for another that waits for it.
    """
    deployed = publish(filled(Block(8)).state_dict())
    start = threading.Barrier(3)

    def work(_):
        start.wait(TIME)
        return grouped(loader, ranks, deployed, lambda rank: Block(8))

    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(work, range(3)))
    for group in groups:
        for _, model in group:
            assert_same(model.state_dict(), filled(Block(8)).state_dict())
        assert len({report.route for report, _ in group}) == 1
    assert sorted(group[0][0].route for group in groups) == ["origin", "peer", "peer"]


def test_a_sender_that_is_busy_is_asked_again(publish, loader):
    """One receiver at a time: the others are turned away, wait to be told, and come back."""
    deployed = publish(filled(Encoder()).state_dict())
    mine = loader()
    model = skeleton_of(mine, Encoder)
    mine.load(model, deployed.ref)
    sender = mine.serve(model, max_receivers=1)
    found = at_once(loader, deployed, 4, max_receivers=1)
    assert [report.route for report, _ in found] == ["peer"] * 4
    assert sender.served >= 1


def test_a_worker_that_loads_again_does_not_wait_for_itself(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    mine = loader()
    for _ in range(2):
        report = mine.load(skeleton_of(mine, Encoder), deployed.ref)
        assert report.route == "origin"
        assert [stage.name for stage in report.stages].count("next") == 1

"""Refs with a history, and the collector that takes away what none of them needs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.errors import DeployError
from warmcast.flows.run import deploy
from warmcast.flows.steps.collect import Collected, collect
from warmcast.flows.steps.compare import compare
from warmcast.flows.steps.history import promote, roll_back
from warmcast.flows.steps.verify import verify
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, NotFound
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref, blob_key, manifest_key
from warmcast.manifests.retention import Retention

REF = Ref.parse("model@prod")
LIMIT = Deadline.never()
COMMANDS = [
    EntryPoint(name, f"warmcast.flows.refs_cli:{name}", GROUP)
    for name in ("refs", "promote", "rollback", "diff", "gc")
]


def checkpoint(folder: Path, version: int) -> Path:
    """A checkpoint of two files, of which one is the same in every version."""
    folder.mkdir(exist_ok=True)
    same = torch.arange(1000, dtype=torch.float32)
    own = torch.full((1000,), float(version))
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": same}, folder / names["a"])
    save_file({"b": own}, folder / names["b"])
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin.open(str(tmp_path / "origin"))


def deployed(origin: Origin, tmp_path: Path, version: int, ref: Ref = REF) -> Manifest:
    return deploy(checkpoint(tmp_path / "checkpoint", version), origin.url, str(ref)).manifest


def several(origin: Origin, tmp_path: Path, count: int) -> list[Manifest]:
    """Versions from 1 on; collectors that come by see each of them needed, but for the last."""
    versions = []
    for version in range(1, count + 1):
        collected(origin, grace=1000.0, history=count)
        versions.append(deployed(origin, tmp_path, version))
    collected(origin, grace=1000.0, history=count)
    return versions


def collected(origin: Origin, grace: float = 0.0, history: int = 0) -> Collected:
    return collect(origin, grace, history, LIMIT, dry_run=False)


def own_blob(manifest: Manifest) -> str:
    return manifest.file["model-00002-of-00002.safetensors"].sha256


def there(origin: Origin, manifest: Manifest) -> bool:
    known = all(origin.blob_info(file.sha256, LIMIT) for file in manifest.files)
    return known and origin.store.head(manifest_key(manifest.digest), LIMIT) is not None


def test_promote_and_roll_back(origin: Origin, tmp_path: Path) -> None:
    first = deployed(origin, tmp_path, 1, Ref.parse("model@candidate"))
    moved = promote(origin, "model@candidate", REF, LIMIT)
    assert (moved.before, moved.manifest.digest) == (None, first.digest)
    second = deployed(origin, tmp_path, 2)
    assert origin.resolve(str(REF), LIMIT).digest == second.digest
    assert roll_back(origin, REF, None, LIMIT).manifest.digest == first.digest
    assert roll_back(origin, REF, None, LIMIT).manifest.digest == second.digest
    assert roll_back(origin, REF, first.digest[:8], LIMIT).manifest.digest == first.digest
    assert {r.manifest for r in origin.history(REF, LIMIT)} == {first.digest, second.digest}


def test_there_is_nothing_to_roll_back_to(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        roll_back(origin, REF, None, LIMIT)
    deployed(origin, tmp_path, 1)
    with pytest.raises(DeployError, match="an earlier manifest"):
        roll_back(origin, REF, None, LIMIT)
    for to in ("", "abc", "ffffffff"):
        with pytest.raises(DeployError, match="in the ref's history"):
            roll_back(origin, REF, to, LIMIT)


def test_what_no_ref_needs_goes_after_its_grace(origin: Origin, tmp_path: Path) -> None:
    versions = several(origin, tmp_path, 3)
    seen = collected(origin, grace=1000.0)
    assert (seen.deleted_blobs, seen.waiting_blobs, seen.waiting_manifests) == (0, 1, 1)
    assert there(origin, versions[0])
    again = collected(origin, grace=1000.0)
    assert (again.deleted_blobs, again.waiting_blobs) == (0, 1)
    gone = collected(origin)
    assert (gone.deleted_manifests, gone.deleted_blobs) == (1, 1)
    assert gone.deleted_nbytes == versions[0].file["model-00002-of-00002.safetensors"].size
    assert not there(origin, versions[0])
    # What the ref names now and named before stays, with the file that all of them share.
    for kept in versions[1:]:
        assert verify(origin, kept, LIMIT, lambda _: None) == []
    assert list(Retention(origin).marked(LIMIT)) == []


def test_history_is_kept(origin: Origin, tmp_path: Path) -> None:
    versions = several(origin, tmp_path, 4)
    for _ in range(2):
        collected(origin, history=3)
    assert [there(origin, version) for version in versions] == [False, True, True, True]
    assert roll_back(origin, REF, versions[1].digest[:12], LIMIT).manifest == versions[1]


def test_a_dry_run_changes_nothing(origin: Origin, tmp_path: Path) -> None:
    several(origin, tmp_path, 3)
    folder = tmp_path / "origin"
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    found = collect(origin, 0.0, 0, LIMIT, dry_run=True)
    assert (found.deleted_blobs, found.waiting_blobs) == (0, 1)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


def test_a_deploy_that_needs_it_again_spares_it(origin: Origin, tmp_path: Path) -> None:
    first, *_ = several(origin, tmp_path, 3)
    collected(origin, grace=1000.0)
    assert deployed(origin, tmp_path, 1).files == first.files
    collected(origin)
    collected(origin)
    assert verify(origin, origin.resolve(str(REF), LIMIT), LIMIT, lambda _: None) == []


def test_a_collector_that_died_is_waited_for_and_ended(origin: Origin, tmp_path: Path) -> None:
    first, *_ = several(origin, tmp_path, 3)
    collected(origin, grace=1000.0)
    retention = Retention(origin)
    mark = retention.mark("blobs", own_blob(first), LIMIT)
    assert mark is not None
    assert retention.swap(mark, "deleting", LIMIT) is not None
    origin.store.delete(manifest_key(first.digest), LIMIT)
    assert collected(origin).deleted_blobs == 1
    assert retention.mark("blobs", own_blob(first), LIMIT) is None


def test_a_swap_that_came_late(origin: Origin, tmp_path: Path) -> None:
    first, *_ = several(origin, tmp_path, 3)
    collected(origin, grace=1000.0)
    retention = Retention(origin)
    mark = retention.mark("blobs", own_blob(first), LIMIT)
    assert mark is not None
    assert retention.swap(mark, "spared", LIMIT) is not None
    assert retention.swap(mark, "deleting", LIMIT) is None


def test_a_damaged_manifest_that_is_kept_stops_it(origin: Origin, tmp_path: Path) -> None:
    last = several(origin, tmp_path, 3)[-1]
    path = tmp_path / "origin" / manifest_key(last.digest)
    path.write_bytes(path.read_bytes().replace(b"model", b"modem", 1))
    with pytest.raises(IntegrityError):
        collected(origin)
    assert origin.blob_info(own_blob(last), LIMIT) is not None


def test_a_damaged_manifest_that_nobody_needs_is_told(origin: Origin, tmp_path: Path) -> None:
    first, *_ = several(origin, tmp_path, 3)
    path = tmp_path / "origin" / manifest_key(first.digest)
    path.write_bytes(b"{}")
    assert collected(origin).problems
    assert collected(origin).deleted_manifests == 1


def test_deploys_beside_a_collector_without_grace(origin: Origin, tmp_path: Path) -> None:
    """A ref never names a manifest of which something is not there."""
    over = threading.Event()
    taken = []

    def collector() -> None:
        while not over.is_set():
            taken.append(collected(origin).deleted_blobs)

    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collector)
        try:
            for round_ in range(25):
                # Versions come again, so that what goes is what is needed next.
                manifest = deployed(origin, tmp_path, round_ % 4)
                assert verify(origin, manifest, LIMIT, lambda _: None) == []
                named = origin.ref(REF, LIMIT)
                assert named is not None
                assert there(origin, origin.manifest(named.record.manifest, LIMIT))
        finally:
            over.set()
        collecting.result()
    assert sum(taken) > 0, "nothing was ever collected: this test has tested nothing"


def test_what_two_manifests_share(origin: Origin, tmp_path: Path) -> None:
    a, b = deployed(origin, tmp_path, 1), deployed(origin, tmp_path, 2)
    found = compare(a, b)
    assert (found.same, found.changed, found.added, found.removed) == (("a",), ("b",), (), ())
    assert (found.same_nbytes, found.changed_nbytes) == (4000, 4000)
    assert found.moved_files == ("model-00002-of-00002.safetensors",)
    assert found.moved_nbytes == b.file["model-00002-of-00002.safetensors"].size
    assert found.shared_nbytes == b.nbytes - found.moved_nbytes
    nothing = compare(a, a)
    assert (nothing.changed, nothing.moved_nbytes) == ((), 0)


def test_the_commands(origin: Origin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*words, "--origin", origin.url], COMMANDS)
        said = capsys.readouterr()
        assert end.value.code == 0, said.err
        return said.out

    first, second = deployed(origin, tmp_path, 1), deployed(origin, tmp_path, 2)
    assert run("refs") == f"model@prod  {second.digest[:12]}  {_stamp(origin)}\n"
    assert f"* {second.digest[:12]}" in run("refs", "model@prod")
    assert first.digest[:12] in run("promote", first.digest, "model@old")
    assert first.digest[:12] in run("rollback", "model@prod")
    assert "1 changed (4.0 kB)" in run("diff", first.digest, second.digest)
    assert "would delete 0 blobs" in run("gc")
    assert "deleted 0 blobs" in run("gc", "--delete", "--grace", "0")


def _stamp(origin: Origin) -> str:
    state = origin.ref(REF, LIMIT)
    assert state is not None
    return state.record.updated_at


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("gc", "--grace", "-1"), 2, "--grace"),
        (("gc", "--history", "-1"), 2, "--history"),
        (("promote", "model@none", "model@prod"), 1, "a ref in"),
        (("promote", "model@none", "model"), 2, "model@name"),
        (("refs", "model@none"), 1, "a ref in"),
        (("rollback", "model@none"), 1, "a ref in"),
        (("diff", "model@none", "x"), 1, "a ref in"),
    ],
)
def test_refusals(origin, capsys, words, code, said) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words, "--origin", origin.url], COMMANDS)
    err = capsys.readouterr().err
    assert end.value.code == code
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_blobs_have_a_key() -> None:
    assert blob_key("ab" * 32) == f"blobs/sha256/ab/{'ab' * 32}"

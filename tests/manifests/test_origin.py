"""The origin over a folder: what it finds, whom it lets win, and what it refuses."""

import hashlib
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.manifests.builders import Deployment, deployment
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidManifest,
    NotFound,
    PreconditionFailed,
    UsageError,
)
from warmcast.manifests.manifest import build_manifest, parse_manifest
from warmcast.manifests.origin import Origin, Ref, blob_key, now

REF = Ref("minilm", "prod")
SMALL = deployment()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "origin"


@pytest.fixture
def origin(folder):
    with Origin.open(str(folder)) as opened:
        yield opened


def other_manifest(revision):
    record = SMALL.manifest.data.replace(b'"revision":"r1"', f'"revision":"{revision}"'.encode())
    return parse_manifest(record)


def publish(origin: Origin, deployed: Deployment, ref: Ref, deadline: Deadline) -> None:
    for entry in deployed.manifest.files:
        data = deployed.files[entry.path]
        origin.put_blob(entry.sha256, io.BytesIO(data), len(data), crc32c(data), deadline)
    origin.put_manifest(deployed.manifest, deadline)
    origin.move_ref(ref, deployed.manifest.digest, origin.ref(ref, deadline), deadline)


def manifest_file(folder: Path) -> Path:
    return folder / f"manifests/sha256/{SMALL.manifest.digest}.json"


def flip(path: Path, place: int) -> None:
    """Damage a file that nobody may write to, as a disk would."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_what_was_published_is_found(origin, deadline):
    publish(origin, SMALL, REF, deadline)
    assert origin.resolve("minilm@prod", deadline) == SMALL.manifest
    assert origin.resolve(SMALL.manifest.digest, deadline) == SMALL.manifest
    assert list(origin.refs(deadline)) == [REF]
    for entry in SMALL.manifest.files:
        buffer = bytearray(entry.size)
        origin.read_blob(entry.sha256, 0, memoryview(buffer), deadline)
        assert bytes(buffer) == SMALL.files[entry.path]
        assert origin.blob_info(entry.sha256, deadline).size == entry.size
    assert origin.blob_info("0" * 64, deadline) is None


def test_the_layout_in_the_store(origin, folder, deadline):
    publish(origin, SMALL, REF, deadline)
    sha256 = SMALL.manifest.file["model.safetensors"].sha256
    assert blob_key(sha256) == f"blobs/sha256/{sha256[:2]}/{sha256}"
    assert (folder / blob_key(sha256)).read_bytes() == SMALL.files["model.safetensors"]
    assert manifest_file(folder).read_bytes() == SMALL.manifest.data
    state = origin.ref(REF, deadline)
    assert (folder / "refs/minilm/prod.json").read_bytes() == canonical_json(
        {
            "manifest": SMALL.manifest.digest,
            "previous": None,
            "updated_at": state.record.updated_at,
        }
    )


def test_publishing_twice_moves_no_bytes(origin, deadline):
    publish(origin, SMALL, REF, deadline)
    for entry in SMALL.manifest.files:
        data = SMALL.files[entry.path]
        source = io.BytesIO(data)
        assert not origin.put_blob(entry.sha256, source, len(data), crc32c(data), deadline)
    origin.put_manifest(SMALL.manifest, deadline)


def test_a_blob_that_is_not_what_was_promised_is_not_kept(origin, deadline):
    sha256 = hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(IntegrityError):
        origin.put_blob(sha256, io.BytesIO(b"abd"), 3, crc32c(b"abc"), deadline)
    assert origin.blob_info(sha256, deadline) is None


# Refs


def test_a_ref_remembers_where_it_stood(origin, deadline):
    assert origin.ref(REF, deadline) is None
    origin.move_ref(REF, "a" * 64, None, deadline)
    first = origin.ref(REF, deadline)
    assert (first.record.manifest, first.record.previous) == ("a" * 64, None)
    origin.move_ref(REF, "b" * 64, first, deadline)
    second = origin.ref(REF, deadline)
    assert (second.record.manifest, second.record.previous) == ("b" * 64, "a" * 64)


def test_a_ref_moves_only_from_where_it_was_seen(origin, deadline):
    origin.move_ref(REF, "a" * 64, None, deadline)
    seen = origin.ref(REF, deadline)
    origin.move_ref(REF, "b" * 64, seen, deadline)
    for stale in (None, seen):
        with pytest.raises(PreconditionFailed, match=r"ref minilm@prod: .*another deploy moved it"):
            origin.move_ref(REF, "c" * 64, stale, deadline)
    assert origin.ref(REF, deadline).record.manifest == "b" * 64


def test_moving_back_to_the_same_manifest_is_seen(origin, deadline):
    # a, b, a: whoever saw the first a must not take the second for it. The records differ in
    # `previous`, so the etags do.
    origin.move_ref(REF, "a" * 64, None, deadline)
    first = origin.ref(REF, deadline)
    origin.move_ref(REF, "b" * 64, first, deadline)
    origin.move_ref(REF, "a" * 64, origin.ref(REF, deadline), deadline)
    with pytest.raises(PreconditionFailed):
        origin.move_ref(REF, "c" * 64, first, deadline)


@pytest.mark.parametrize("existing", [False, True])
def test_of_many_movers_one_wins(origin, deadline, existing):
    if existing:
        origin.move_ref(REF, "f" * 64, None, deadline)
    before = origin.ref(REF, deadline)
    start = threading.Barrier(8)

    def moved(digest):
        start.wait(30)
        try:
            origin.move_ref(REF, digest, before, deadline)
        except PreconditionFailed:
            return False
        return True

    digests = [f"{number:064x}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(moved, digests))
    assert results.count(True) == 1
    assert origin.ref(REF, deadline).record.manifest == digests[results.index(True)]


def test_refs_are_listed_in_order_and_strays_are_not(origin, folder, deadline):
    for text in ("b@prod", "a/x@prod", "a@prod", "a@canary"):
        origin.move_ref(Ref.parse(text), "a" * 64, None, deadline)
    for stray in ("refs/a/prod", "refs/loose.json", "refs/a/-x.json", "refs/a/prod.json.bak"):
        (folder / stray).write_text("{}")
    assert [str(ref) for ref in origin.refs(deadline)] == [
        "a@canary",
        "a@prod",
        "a/x@prod",
        "b@prod",
    ]


@pytest.mark.parametrize(
    "text", ["a@b", "a/b/c@d", "A-1.5_b+c@v1.0", "sentence-transformers/all-MiniLM-L6-v2@prod"]
)
def test_refs_that_are(text):
    ref = Ref.parse(text)
    assert str(ref) == text
    assert ref.key == f"refs/{ref.model}/{ref.name}.json"
    assert Ref(ref.model, ref.name) == ref


@pytest.mark.parametrize(
    "text",
    [
        *("", "@", "a", "a@", "@b", "a@b@c", "a@b/c", "/a@b", "a/@b", "a//b@c", "../a@b"),
        *("a/..@b", "a@..", "a@.b", ".a@b", "a b@c", "a@b\n", "é@b", "a@" + "b" * 400, "a\0@b"),
    ],
)
def test_refs_that_are_not(text):
    with pytest.raises(UsageError, match="model@name"):
        Ref.parse(text)


def test_a_ref_cannot_be_made_around_the_rules():
    with pytest.raises(UsageError):
        Ref("../../etc", "passwd")
    with pytest.raises(UsageError):
        replace(REF, name="../x")


# What is not there


def test_an_unknown_ref_names_the_nearest(origin, deadline):
    for text in ("minilm@prod", "minilm@canary", "llama@prod"):
        origin.move_ref(Ref.parse(text), "a" * 64, None, deadline)
    with pytest.raises(NotFound) as caught:
        origin.resolve("minilm@prd", deadline)
    message = str(caught.value)
    assert message.startswith(f"ref 'minilm@prd': expected a ref in {origin.url}, found none")
    assert "nearest are minilm@prod" in message
    with pytest.raises(NotFound, match="none of 3"):
        origin.resolve("zzz@qqqqqqqqqqqq", deadline)


def test_an_empty_origin_says_so(origin, deadline):
    with pytest.raises(NotFound, match="no refs at all; deploy it, or name another"):
        origin.resolve("minilm@prod", deadline)


def test_a_ref_to_a_manifest_that_is_gone(origin, folder, deadline):
    publish(origin, SMALL, REF, deadline)
    manifest_file(folder).unlink()
    with pytest.raises(NotFound, match=f"manifest {SMALL.manifest.digest}: .*deploy it again"):
        origin.resolve("minilm@prod", deadline)


@pytest.mark.parametrize("digest", ["", "x", "A" * 64, "0" * 63, "../" + "0" * 61])
def test_what_is_no_digest(origin, deadline, digest):
    for call in (
        lambda: origin.manifest(digest, deadline),
        lambda: origin.blob_info(digest, deadline),
        lambda: origin.put_blob(digest, io.BytesIO(), 0, 0, deadline),
        lambda: origin.move_ref(REF, digest, None, deadline),
    ):
        with pytest.raises(UsageError, match="64 lower-case hex digits"):
            call()


def test_no_url_at_all():
    with pytest.raises(UsageError, match="set WARMCAST_ORIGIN"):
        Origin.open("")


@pytest.mark.parametrize("url", ["ftp://host/x", "gopher:x", "http://[::1"])
def test_a_url_of_no_store(url):
    with pytest.raises(UsageError, match="origin"):
        Origin.open(url)


# What is damaged


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_damaged_manifest_is_not_believed(origin, folder, deadline, place):
    publish(origin, SMALL, REF, deadline)
    flip(manifest_file(folder), place)
    with pytest.raises(IntegrityError, match=f"expected {SMALL.manifest.digest}, found"):
        origin.resolve("minilm@prod", deadline)


def test_a_manifest_that_was_cut_off(origin, folder, deadline):
    publish(origin, SMALL, REF, deadline)
    manifest_file(folder).chmod(0o600)
    manifest_file(folder).write_bytes(b"")
    with pytest.raises(IntegrityError):
        origin.resolve("minilm@prod", deadline)


def test_publishing_over_a_damaged_manifest_is_refused(origin, folder, deadline):
    publish(origin, SMALL, REF, deadline)
    flip(manifest_file(folder), 7)
    with pytest.raises(IntegrityError, match="delete it and deploy again"):
        origin.put_manifest(SMALL.manifest, deadline)
    manifest_file(folder).unlink()
    origin.put_manifest(SMALL.manifest, deadline)
    assert origin.resolve("minilm@prod", deadline) == SMALL.manifest


def test_a_manifest_under_anothers_digest(origin, folder, deadline):
    publish(origin, SMALL, REF, deadline)
    other = other_manifest("r2")
    (folder / f"manifests/sha256/{other.digest}.json").write_bytes(SMALL.manifest.data)
    with pytest.raises(IntegrityError):
        origin.resolve(other.digest, deadline)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"manifest":"x","previous":null,"updated_at":"2026-01-31T23:59:59Z"}',
        b'{"manifest":"' + b"0" * 64 + b'","updated_at":"2026-01-31T23:59:59Z"}',
        b'{"manifest":"' + b"0" * 64 + b'","previous":null,"updated_at":"yesterday"}',
        b'{"manifest":"' + b"0" * 64 + b'","previous":7,"updated_at":"2026-01-31T23:59:59Z"}',
        b'{"manifest":null,"manifest":null}',
    ],
)
def test_a_damaged_ref_is_not_followed(origin, folder, deadline, data):
    (folder / "refs/minilm").mkdir(parents=True)
    (folder / "refs/minilm/prod.json").write_bytes(data)
    with pytest.raises(InvalidManifest, match="ref minilm@prod"):
        origin.resolve("minilm@prod", deadline)


# Records beside them


def test_a_record_is_written_once(origin, deadline):
    assert origin.record("truths", "k", deadline) is None
    assert origin.put_record("truths", "k", {"a": [1, "ä"]}, deadline)
    assert not origin.put_record("truths", "k", {"a": 2}, deadline)
    assert origin.record("truths", "k", deadline) == {"a": [1, "ä"]}
    assert origin.record("upstreams", "k", deadline) is None


def test_a_damaged_record_is_not_believed(origin, folder, deadline):
    origin.put_record("truths", "k", {}, deadline)
    path = folder / "truths/k.json"
    path.chmod(0o600)
    path.write_bytes(b"{")
    with pytest.raises(InvalidManifest, match="truths/k"):
        origin.record("truths", "k", deadline)


def test_the_time_is_one_that_records_take():
    build_manifest(
        model="m", revision="", upstream="", created_at=now(), files=[], tensors=[], config={}
    )


def test_no_time_left(origin, deadline):
    publish(origin, SMALL, REF, deadline)
    late = Deadline.after(0)
    for call in (
        lambda: origin.resolve("minilm@prod", late),
        lambda: list(origin.refs(late)),
        lambda: origin.move_ref(REF, "a" * 64, None, late),
    ):
        with pytest.raises(DeadlineExceeded):
            call()

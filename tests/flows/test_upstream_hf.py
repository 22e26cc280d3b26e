"""The Hub as an upstream: what it lists, who sees the token, and what goes wrong on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.flows.hub import Hub, Storage, no_login, sha256
from tests.manifests import s3_proxy as fault
from warmcast.flows.errors import (
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceRefused,
    SourceUnreachable,
)
from warmcast.flows.upstreams import open_upstream, pinned, read_small
from warmcast.flows.upstreams.hf import HfUpstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError
from warmcast.manifests.stores import http
from warmcast.manifests.stores.http import Http

REPO = "org/model"
WEIGHTS = os.urandom(1_500_000)
FILES = {
    "model.safetensors": WEIGHTS,
    "config.json": b"{}",
    ".gitattributes": b"* lfs",
    "sub/ö x.txt": b"text",
}
TOKEN = "hf_secret"  # noqa: S105


@pytest.fixture
def hub(monkeypatch, tmp_path):
    no_login(monkeypatch, tmp_path)
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    storage = Storage()
    opened = Hub(storage)
    monkeypatch.setenv("HF_ENDPOINT", opened.url)
    opened.commit(REPO, FILES)
    yield opened
    opened.close()
    storage.close()


@pytest.fixture
def opened(hub, deadline):
    """Opens upstreams, and closes them."""
    held = []

    def run(source=f"hf://{REPO}", **options):
        held.append(HfUpstream(source, deadline, **options))
        return held[-1]

    yield run
    for upstream in held:
        upstream.close()


def named(upstream, path, deadline):
    return next(file for file in upstream.files(deadline) if file.path == path)


def read(upstream, path, deadline, offset=0, length=None):
    file = named(upstream, path, deadline)
    reader = upstream.reader(file, deadline)
    data = bytearray(file.size - offset if length is None else length)
    try:
        reader.read_into(offset, memoryview(data), deadline)
    finally:
        reader.close()
    return bytes(data)


class Clock:
    """Time that passes by sleeping."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def chain(error):
    """An error and those it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class TestListing:
    def test_files_and_what_is_published_of_them(self, hub, opened, deadline):
        upstream = opened()
        found = {file.path: file for file in upstream.files(deadline)}
        assert list(found) == ["config.json", "model.safetensors", "sub/ö x.txt"]
        assert found["model.safetensors"].sha256 == sha256(WEIGHTS)
        assert found["model.safetensors"].size == len(WEIGHTS)
        assert found["config.json"].sha256 is None
        assert upstream.name == f"hf://{REPO}"

    def test_a_branch_becomes_its_commit_and_stays_it(self, hub, opened, deadline):
        first = hub.repos[REPO].names["main"]
        upstream = opened()
        second = hub.commit(REPO, {**FILES, "config.json": b'{"a": 1}'})
        assert upstream.revision == first != second
        assert read(upstream, "config.json", deadline) == b"{}"
        for revision in ("main", second):
            later = opened(f"hf://{REPO}@{revision}")
            assert later.revision == second
            assert read(later, "config.json", deadline) == b'{"a": 1}'

    def test_a_source_can_be_held_to_its_commit(self, hub, opened):
        first = hub.repos[REPO].names["main"]
        for source in (f"hf://{REPO}?xet=no", f"hf://{REPO}@main?xet=no"):
            assert pinned(source, first) == f"hf://{REPO}@{first}?xet=no"
        hub.commit(REPO, {"config.json": b"[]"})
        assert opened(pinned(f"hf://{REPO}", first)).revision == first
        assert pinned("/a/folder", first) == "/a/folder"
        assert pinned("s3://bucket/prefix", "") == "s3://bucket/prefix"

    def test_a_folder_for_the_whole(self, hub, opened, deadline):
        files = {"model.safetensors": b"top", "b/model.safetensors": WEIGHTS, "b/c/d.txt": b"d"}
        hub.commit(REPO, {**files, "bc.txt": b"", "b/.hidden": b""})
        upstream = opened(f"hf://{REPO}?folder=b/")
        assert [file.path for file in upstream.files(deadline)] == ["c/d.txt", "model.safetensors"]
        assert read(upstream, "model.safetensors", deadline) == WEIGHTS
        assert read(upstream, "c/d.txt", deadline) == b"d"
        assert upstream.name == f"hf://{REPO}/b"
        with pytest.raises(SourceNotFound, match="none of 5"):
            opened(f"hf://{REPO}?folder=x").files(deadline)
        with pytest.raises(UsageError, match="folder"):
            opened(f"hf://{REPO}?folder=../x")

    def test_a_scheme_is_written_as_one_likes(self, hub, deadline):
        open_upstream(f"HF://{REPO}", deadline).close()

    def test_offline(self, hub, opened, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
            opened()
        assert hub.requests == []

    def test_a_version_stays_over_commits_that_do_not_change_the_file(self, hub, opened, deadline):
        before = {file.path: file.version for file in opened().files(deadline)}
        hub.commit(REPO, {**FILES, "config.json": b'{"a": 1}'}, branch="refs/pr/1")
        after = {f.path: f.version for f in opened(f"hf://{REPO}@refs/pr/1").files(deadline)}
        assert {path for path in before if before[path] != after[path]} == {"config.json"}
        assert all(before.values())

    def test_long_listings_come_in_pages(self, hub, opened, deadline):
        hub.page = 7
        hub.commit(REPO, {f"{n:03}.txt": b"" for n in range(50)})
        assert len(opened().files(deadline)) == 50
        assert sum("/tree/" in request.path for request in hub.asked) == 8

    def test_a_page_of_another_server_is_not_asked_for(self, hub, opened, deadline):
        upstream = opened()
        hub.fail(
            b"GET", fault.answer("200 OK", 'Link: <http://127.0.0.1:1/x>; rel="next"', body="[]")
        )
        with pytest.raises(SourceError, match="a page of another"):
            upstream.files(deadline)

    @pytest.mark.parametrize(
        "path", ["../x", "/etc/passwd", "a/../../x", "a\0b", "a\nb", "", "a//b", "C:/x", "a\\b"]
    )
    def test_a_hostile_path_ends_it(self, hub, opened, deadline, path):
        hub.repos[REPO].extra = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40}]
        with pytest.raises(SourceError, match="plain path"):
            opened().files(deadline)

    @pytest.mark.parametrize(
        "entry",
        [
            {"type": "file", "path": "x", "oid": "0" * 40},
            {"type": "file", "path": "x", "oid": "0" * 40, "size": -1},
            {"type": "file", "path": "x", "oid": "0" * 40, "size": True},
            {"type": "file", "path": ["x"], "oid": "0" * 40, "size": 1},
            {"type": "file", "path": "x", "oid": "0", "size": 1, "lfs": {"oid": "../x"}},
            {"type": "file", "path": "x", "oid": "0", "size": 1, "lfs": [1]},
            {"type": "file", "path": "config.json", "oid": "0" * 40, "size": 1},
            ["x"],
            None,
        ],
    )
    def test_a_broken_entry_ends_it(self, hub, opened, deadline, entry):
        hub.repos[REPO].extra = [entry]
        with pytest.raises(SourceError, match=f"hf://{REPO}"):
            opened().files(deadline)

    @pytest.mark.parametrize(
        "body", ["", "{", "[]", '{"sha": "main"}', '{"sha": 1}', "[" * 500_000]
    )
    def test_an_answer_that_is_no_commit(self, hub, opened, body):
        hub.fail(b"GET", fault.answer("200 OK", body=body))
        with pytest.raises(SourceError, match=f"hf://{REPO}@main"):
            opened()

    def test_folders_are_no_files(self, hub, opened, deadline):
        hub.repos[REPO].extra = [{"type": "directory", "path": "sub", "size": 0, "oid": "0" * 40}]
        assert len(opened().files(deadline)) == 3


class TestReading:
    def test_ranges(self, hub, opened, deadline):
        upstream = opened()
        for path, data in FILES.items():
            if not path.startswith("."):
                assert read(upstream, path, deadline) == data
        assert read(upstream, "model.safetensors", deadline, 1000, 70_000) == WEIGHTS[1000:71_000]
        assert read(upstream, "model.safetensors", deadline, 1_500_000) == b""
        with pytest.raises(SourceError, match="1500000 in all"):
            read(upstream, "model.safetensors", deadline, 1_499_999, 2)

    def test_a_file_is_looked_for_once(self, hub, opened, deadline):
        upstream = opened()
        file = named(upstream, "model.safetensors", deadline)
        reader = upstream.reader(file, deadline)
        buffer = bytearray(1000)
        for offset in range(0, 50_000, 1000):
            reader.read_into(offset, memoryview(buffer), deadline)
        reader.close()
        assert sum("/resolve/" in request.path for request in hub.asked) == 1

    def test_a_small_file_takes_one_request(self, hub, opened, deadline):
        upstream = opened()
        file = named(upstream, "config.json", deadline)
        asked = len(hub.requests)
        hub.fail(b"GET", fault.cut(1, by_reset=False))
        assert read_small(upstream, file, 10, deadline) == b"{}"
        assert len(hub.requests) == asked + 2  # the one that broke, too
        assert read(upstream, "config.json", deadline, 1, 1) == b"}"

    def test_a_signature_that_expires_in_the_middle_is_asked_for_again(self, hub, opened, deadline):
        upstream = opened()
        reader = upstream.reader(named(upstream, "model.safetensors", deadline), deadline)
        data = bytearray(len(WEIGHTS))
        for offset in range(0, len(WEIGHTS), 500_000):
            reader.read_into(offset, memoryview(data)[offset : offset + 500_000], deadline)
            hub.storage.good += 1
        reader.close()
        assert data == WEIGHTS
        assert sum("/resolve/" in request.path for request in hub.asked) == 3

    def test_a_storage_that_refuses_each_signature_ends_it(self, hub, opened, deadline):
        upstream = opened()
        file = named(upstream, "model.safetensors", deadline)
        hub.storage.sign = lambda digest: f"{hub.storage.url}/{digest}?Signature=old"
        with pytest.raises(SourceRefused, match=r"model\.safetensors.*found 403"):
            upstream.reader(file, deadline).read_into(0, memoryview(bytearray(9)), deadline)

    def test_a_small_file_is_held_to_its_id_in_git(self, hub, opened, deadline):
        upstream = opened()
        file = named(upstream, "config.json", deadline)
        hub.repos[REPO].commits[upstream.revision] = {**FILES, "config.json": b"[]"}
        with pytest.raises(SourceError, match="git blob"):
            read_small(upstream, file, 10, deadline)

    @pytest.mark.parametrize("state", ["other bytes", "another size", "gone"])
    def test_a_commit_that_was_rewritten_is_noticed(self, hub, opened, deadline, state):
        upstream = opened()
        file = named(upstream, "model.safetensors", deadline)
        files = dict(FILES)
        if state == "gone":
            del files["model.safetensors"]
        else:
            files["model.safetensors"] = WEIGHTS[::-1] if state == "other bytes" else WEIGHTS[1:]
        hub.repos[REPO].commits[upstream.revision] = files
        with pytest.raises(SourceChanged, match=r"model\.safetensors"):
            upstream.reader(file, deadline).read_into(0, memoryview(bytearray(9)), deadline)

    def test_a_renamed_repository_is_followed(self, hub, opened, deadline):
        hub.repos["new/name"] = hub.repos.pop(REPO)
        hub.renamed[REPO] = "new/name"
        assert read(opened(), "model.safetensors", deadline) == WEIGHTS

    def test_redirects_that_do_not_end(self, hub, opened):
        hub.renamed[REPO] = REPO
        with pytest.raises(SourceError, match="redirects at most"):
            opened()


class TestTokens:
    @pytest.fixture(autouse=True)
    def private(self, hub):
        hub.repos[REPO].private = True
        hub.tokens = {TOKEN}

    def test_only_the_hub_sees_it(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert read(opened(), "model.safetensors", deadline) == WEIGHTS
        assert hub.storage.requests
        assert not any(TOKEN.encode() in request for request in hub.storage.requests)
        assert all("authorization" in request.headers for request in hub.asked)

    def test_one_of_another_variable(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", "other")
        monkeypatch.setenv("MINE", TOKEN)
        assert opened(f"hf://{REPO}?token_env=MINE").files(deadline)
        with pytest.raises(UsageError, match="a token in THEIRS"):
            opened(f"hf://{REPO}?token_env=THEIRS")

    def test_the_one_that_login_left(self, hub, opened, tmp_path, deadline):
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        assert opened().files(deadline)

    def test_none(self, opened):
        with pytest.raises(SourceNotFound, match=r"401 without a token.*set HF_TOKEN"):
            opened()

    def test_no_such_repository(self, opened, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with pytest.raises(SourceNotFound, match="404 with the token") as caught:
            opened("hf://org/other")
        assert TOKEN not in str(caught.value)

    def test_a_wrong_one(self, opened, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(SourceRefused, match="a token that is good, found 401") as caught:
            opened()
        assert "hf_wrong" not in "".join(map(str, chain(caught.value)))

    def test_one_that_expires_in_the_middle_is_one_error(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        upstream = opened()
        file = named(upstream, "model.safetensors", deadline)
        hub.tokens = {"another"}
        asked = len(hub.requests)
        with pytest.raises(SourceRefused, match=r"model\.safetensors.*found 401"):
            upstream.reader(file, deadline).read_into(0, memoryview(bytearray(9)), deadline)
        assert len(hub.requests) == asked + 1

    def test_one_that_was_renewed_is_taken(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        upstream = opened()
        hub.tokens = {"another"}
        monkeypatch.setenv("HF_TOKEN", "another")
        assert read(upstream, "model.safetensors", deadline) == WEIGHTS

    def test_every_reader_takes_the_renewed_one(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        upstream = opened()
        file = named(upstream, "model.safetensors", deadline)
        readers = [upstream.reader(file, deadline) for _ in range(6)]
        refused = threading.Barrier(6)

        def together(exchange):
            refused.wait(30)
            fault.answer("401 Unauthorized")(exchange)

        hub.fail(b"GET", *[together] * 6)
        hub.tokens = {"another"}
        monkeypatch.setenv("HF_TOKEN", "another")
        with ThreadPoolExecutor(6) as pool:
            for _ in pool.map(
                lambda r: r.read_into(0, memoryview(bytearray(9)), deadline), readers
            ):
                pass

    def test_a_gated_repository(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.repos[REPO].gated = True
        with pytest.raises(SourceRefused, match="accept its terms"):
            read(opened(), "config.json", deadline)


class TestFaults:
    def test_what_passes_is_tried_again(self, hub, opened, deadline):
        hub.fail(
            b"GET",
            fault.refused,
            fault.answer("503 Busy"),
            fault.answer("429 Slow", "Retry-After: 0"),
        )
        upstream = opened()
        hub.fail(b"GET", fault.cut(10, by_reset=True), fault.answer("500 Oops"))
        hub.storage.fail(
            b"GET", fault.passed, fault.cut(70_000, by_reset=True), fault.cut(100, by_reset=False)
        )
        assert read(upstream, "model.safetensors", deadline) == WEIGHTS

    def test_a_server_is_left_alone_for_as_long_as_it_says(self, hub, opened, monkeypatch):
        clock = Clock()
        monkeypatch.setattr(http, "time", clock)
        hub.fail(
            b"GET",
            fault.answer("429 Slow", "Retry-After: 7"),
            fault.answer("429 Slow", 'RateLimit: "api";r=0;t=55'),
        )
        opened()
        assert 62 <= clock.now < 63

    @pytest.mark.parametrize(
        "header", ["Retry-After: 3600", "Retry-After: Fri, 31 Dec 2100 23:59:59 GMT"]
    )
    def test_but_not_for_ever(self, hub, opened, header):
        hub.fail(b"GET", fault.answer("429 Slow", header))
        with pytest.raises(SourceUnreachable, match="429, and none for"):
            opened()

    def test_nor_beyond_the_deadline(self, hub):
        hub.fail(b"GET", fault.answer("429 Slow", "Retry-After: 60"))
        with pytest.raises(DeadlineExceeded, match="429"):
            HfUpstream(f"hf://{REPO}", Deadline.after(5))

    def test_a_server_that_stays_broken(self, hub, opened):
        hub.fail(b"GET", *[fault.answer("502 Bad Gateway")] * 5)
        with pytest.raises(SourceUnreachable, match="502, 5 times"):
            opened()
        assert len(hub.requests) == 5

    def test_one_that_is_not_there(self, hub, opened, monkeypatch):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(SourceUnreachable, match="refused, 5 times"):
            opened()

    def test_a_stall_is_not_waited_for(self, hub, opened, deadline):
        hub.storage.fail(b"GET", fault.passed, fault.stall(1000), fault.silence)
        upstream = opened(http=Http(None, idle=0.3))
        assert read(upstream, "model.safetensors", deadline.within(8)) == WEIGHTS

    def test_nor_is_one_at_the_deadline(self, hub, opened, deadline):
        upstream = opened()
        reader = upstream.reader(named(upstream, "model.safetensors", deadline), deadline)
        hub.storage.fail(b"GET", fault.passed, *[fault.stall(1000)] * 5)
        with pytest.raises(DeadlineExceeded, match=r"model\.safetensors"):
            reader.read_into(0, memoryview(bytearray(9000)), Deadline.after(0.3))

    def test_a_range_of_wrong_length(self, hub, opened, deadline):
        upstream = opened()
        hub.storage.fail(b"GET", fault.passed, fault.with_answer(b"/1500000", b"/1499999"))
        with pytest.raises(SourceChanged, match="expected 1500000 bytes, found 1499999"):
            read(upstream, "model.safetensors", deadline)

    @pytest.mark.parametrize(
        "target", ["ftp://127.0.0.1/x", "http://[", "http://:80/x", "file:///etc/passwd"]
    )
    def test_a_redirect_to_nowhere(self, hub, opened, target):
        hub.fail(b"GET", fault.answer("302 Found", f"Location: {target}"))
        with pytest.raises(SourceError, match="a redirect to a URL"):
            opened()


@pytest.mark.parametrize(
    "source",
    [
        "hf://", "hf://org/", "hf:///repo", "hf://org/repo@", "hf://a/b/c", "hf://../x",
        "hf://org/..", "hf://org/a b", "hf://org/repo?tokens=x", "hf://org/repo?xet=maybe",
        "hf://org/repo?xet_patience=0", "hf://org/repo?endpoint=file:///x",
        "hf://org/repo?endpoint=https://u:p@host", "hf://org/repo?xet=no&xet=no",
    ],
)  # fmt: skip
def test_what_is_no_repository(source, hub, deadline):
    with pytest.raises(UsageError) as caught:
        open_upstream(source, deadline)
    assert "u:p" not in str(caught.value)
    assert hub.requests == []


def test_closing_gives_all_back(hub, deadline):
    threads = set(threading.enumerate())
    upstream = open_upstream(f"hf://{REPO}", deadline)
    read_small(upstream, named(upstream, "config.json", deadline), 10, deadline)
    read(upstream, "model.safetensors", deadline)
    assert hub.connections
    assert hub.storage.connections
    upstream.close()
    while hub.connections or hub.storage.connections:
        deadline.check("waiting for the ends of connections")
    servers = {*hub._threads, *hub.storage._threads}
    assert set(threading.enumerate()) <= threads | servers


def test_the_hub_of_these_tests_is_one_to_huggingface_hub(hub, tmp_path):
    """What our side reads of it is what the Hub's own client reads."""
    code = """
import json, sys
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
api = HfApi()
info = api.model_info("org/model")
tree = api.list_repo_tree("org/model", recursive=True, revision=info.sha)
files = [[f.path, f.size, f.blob_id, f.lfs and f.lfs.sha256] for f in tree]
url = hf_hub_url("org/model", "model.safetensors")
found = get_hf_file_metadata(url)
data = open(hf_hub_download("org/model", "model.safetensors"), "rb").read()
print(json.dumps([info.sha, files, found.commit_hash, found.etag, found.size, len(data)]))
"""
    hub.page = 2
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    commit = hub.repos[REPO].names["main"]
    digest = sha256(WEIGHTS)
    with closing(HfUpstream(f"hf://{REPO}", Deadline.after(30))) as upstream:
        ours = upstream.files(Deadline.after(30))
    sha, files, *of_file = json.loads(done.stdout)
    assert sha == upstream.revision == commit
    assert sorted(f for f in files if not f[0].startswith(".")) == [
        [f.path, f.size, f.version, f.sha256] for f in ours
    ]
    assert of_file == [commit, digest, len(WEIGHTS), len(WEIGHTS)]

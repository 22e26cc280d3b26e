"""Patterns: what they match, and what is said of those that match nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmcast.flows.errors import MissingShard, NoWeights
from warmcast.flows.steps.resolve import resolve
from warmcast.flows.upstreams import UpstreamFile, open_upstream
from warmcast.flows.upstreams.patterns import matcher, select
from warmcast.manifests.errors import UsageError

NAMES = st.text("ab.*", min_size=1, max_size=4).filter(lambda name: name not in (".", "..", "**"))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.safetensors", ["x.safetensors", "a/b/x.safetensors"], ["x.bin", "safetensors"]),
        ("config.json", ["config.json", "a/config.json"], ["my-config.json"]),
        ("/config.json", ["config.json"], ["a/config.json"]),
        ("a/*.bin", ["a/x.bin"], ["b/a/x.bin", "a/b/x.bin"]),
        ("a/*", ["a/x", "a/b/x"], ["a", "b/a/x"]),
        ("a/**", ["a/x", "a/b/x"], ["a"]),
        ("**/a/*.bin", ["a/x.bin", "b/c/a/x.bin"], ["a/b/x.bin"]),
        ("a/**/x", ["a/x", "a/b/x", "a/b/c/x", "a/b/x/y"], ["x", "b/a/x"]),
        ("a/", ["a/x", "b/a/x"], ["a", "b/a"]),
        ("a", ["a", "a/x", "b/a/x"], ["ab"]),
        ("**", ["a", "a/b"], []),
        ("x-0000[12]-*", ["x-00001-of-00003.bin"], ["x-00003-of-00003.bin"]),
        ("*.JSON", ["a.JSON"], ["a.json"]),
        ("original", ["original/consolidated.00.pth"], ["original.pth"]),
    ],
)
def test_what_matches(pattern, matching, others):
    matches = matcher(pattern)
    assert [path for path in matching if not matches(path)] == []
    assert [path for path in others if matches(path)] == []


@pytest.mark.parametrize("pattern", ["", "/", "a//b", "../a", "a/./b", "!a"])
def test_what_is_no_pattern(pattern):
    with pytest.raises(UsageError, match="allow"):
        select((), [pattern], [])


@given(PATHS)
def test_a_path_without_wildcards_matches_itself_and_all_below(path):
    plain = path.replace("*", "x")
    assert matcher(f"/{plain}")(plain)
    assert matcher(plain)(f"{plain}/below")
    assert matcher(plain.rpartition("/")[2])(plain)


@given(st.lists(PATHS, max_size=6, unique=True), PATHS, PATHS)
def test_ignore_wins_and_order_stays(paths, allowed, ignored):
    files = [UpstreamFile(path, 0) for path in paths]
    taken, _ = select(files, [allowed], [ignored])
    assert list(taken) == [
        f for f in files if matcher(allowed)(f.path) and not matcher(ignored)(f.path)
    ]
    assert select(files, [], [])[0] == tuple(files)


def test_many_wildcards_take_no_time_to_speak_of():
    assert not matcher("/".join(["**"] * 60 + ["x"]))("/".join(["a"] * 60))


def test_a_pattern_that_matches_nothing_is_told():
    files = [UpstreamFile("a.json", 1), UpstreamFile("b/c.bin", 1)]
    taken, notes = select(files, ["*.json", "*.gguf"], ["onnx/"])
    assert [file.path for file in taken] == ["a.json"]
    assert notes == ("allow '*.gguf': matches no file", "ignore 'onnx/': matches no file")


class TestResolve:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("config.json", "model.safetensors", "onnx/model.onnx", "extra/notes.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return open_upstream(tmp_path)

    def test_what_is_not_taken_is_not_deployed(self, folder, deadline):
        plan = resolve(folder, deadline, allow=["*.safetensors", "*.json", "*.py"], ignore=[])
        assert [file.path for file in (*plan.weights, *plan.others)] == [
            "model.safetensors",
            "config.json",
        ]
        assert plan.left_out == ("allow '*.py': matches no file",)

    def test_no_weights_left(self, folder, deadline):
        with pytest.raises(NoWeights, match=r"allow '\*\.json'.*leaves 1 of 4 files"):
            resolve(folder, deadline, allow=["*.json"])

    def test_a_shard_that_is_not_taken(self, tmp_path, deadline):
        for number in (1, 2):
            (tmp_path / f"model-0000{number}-of-00002.safetensors").touch()
        with pytest.raises(MissingShard, match=r"ignore 'model-00002\*' leaves"):
            resolve(open_upstream(tmp_path), deadline, ignore=["model-00002*"])

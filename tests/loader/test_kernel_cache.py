"""Compiled kernels on disk: as they were, by this user, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warmcast.loader import kernel_cache
from warmcast.loader.kernel_cache import keep, kept

IMAGE = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARMCAST_KERNELS", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def only(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_what_is_kept_is_what_was_compiled_from_the_same(folder: Path) -> None:
    assert kept("source", "-O2") is None
    keep(IMAGE, "source", "-O2")
    assert kept("source", "-O2") == IMAGE
    for other in [("source",), ("source", "-O3"), ("source-O2",), ("sourc", "e-O2"), ()]:
        assert kept(*other) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_names_and_contents_are_these(folder: Path) -> None:
    keep(b"\x7fELF", "source", "-O2")
    name = "fa5f999f46d943b9f64bfb71d0cad6c891362b55f327c08123970af35d129d28.cubin"
    assert only(folder).name == name
    digest = "3bdbb4fe8397cd2b842430b39ccff01a8663c751945ef5e9a09e267fb8b1d359"
    assert only(folder).read_bytes() == bytes.fromhex(digest) + b"\x7fELF"


@pytest.mark.parametrize("at", [0, 31, 32, len(IMAGE) + 31])
def test_a_flipped_byte_is_noticed_and_mended(folder: Path, at: int) -> None:
    keep(IMAGE, "source")
    data = bytearray(only(folder).read_bytes())
    data[at] ^= 1
    only(folder).write_bytes(data)
    assert kept("source") is None
    keep(IMAGE, "source")
    assert kept("source") == IMAGE


@pytest.mark.parametrize("length", [0, 31, 32, 33, len(IMAGE)])
def test_a_file_that_was_cut_off_is_noticed(folder: Path, length: int) -> None:
    keep(IMAGE, "source")
    os.truncate(only(folder), length)
    assert kept("source") is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    keep(IMAGE, "source")
    folder.chmod(mode)
    assert kept("source") is None
    keep(IMAGE, "another")
    folder.chmod(0o700)
    assert kept("another") is None


@pytest.mark.parametrize(("owner", "trusted"), [(0, True), (7, True), (8, False)])
def test_only_this_users_or_roots_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: int, trusted: bool
) -> None:
    keep(IMAGE, "source")
    stat = Path.stat

    def owned(path: Path, **given: bool) -> os.stat_result:
        fields = list(stat(path, **given))
        fields[4] = owner
        return os.stat_result(fields)

    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(Path, "stat", owned)
    assert kept("source") == (IMAGE if trusted else None)


def test_nothing_is_kept_where_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WARMCAST_KERNELS", "")
    keep(IMAGE, "source")
    assert kept("source") is None
    assert not list(tmp_path.iterdir())


def test_the_users_cache_folder_is_where_it_is_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMCAST_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    keep(IMAGE, "source")
    assert only(tmp_path / "caches/warmcast/kernels").suffix == ".cubin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keep(IMAGE, "source")
    assert only(tmp_path / "home/.cache/warmcast/kernels").suffix == ".cubin"
    assert kept("source") == IMAGE


def test_a_folder_that_cannot_be_had_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    keep(IMAGE, "source")
    assert kept("source") is None


def test_many_at_once_leave_one_whole_file(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep(IMAGE, "source"), range(40)))
    assert kept("source") == IMAGE
    assert kernel_cache._name(("source",)) == only(folder).name

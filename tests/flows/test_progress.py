"""What people are told while a deploy runs."""

from __future__ import annotations

import re

import pytest

from warmcast.flows import progress
from warmcast.flows.progress import Halved, Lines


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    return []


def test_lines_tell_rates_and_the_time_left(lines):
    told = Lines(lines.append)
    with told.stage("read and upload", 10_000_000):
        told.advance(4_000_000)
        told.advance(6_000_000)
    assert lines[0] == "read and upload: 10.0 MB"
    pattern = r"read and upload: {} MB of 10\.0 MB, \d+\.?\d* [kMGT]?B/s, \d+ s left"
    assert re.fullmatch(pattern.format(r"4\.0"), lines[1])
    assert re.fullmatch(pattern.format(r"10\.0"), lines[2])
    assert re.fullmatch(r"read and upload: done in 0\.\d s, .*B/s", lines[3])


def test_a_stage_that_stands_has_no_time_left(lines):
    told = Lines(lines.append)
    with told.stage("fetch", 10):
        told.advance(0)
    assert lines[1] == "fetch: 0 B of 10 B, 0 B/s"


def test_bytes_that_are_told_twice_count_once():
    told: list[int] = []
    half = Halved(told.append)
    for nbytes in (1, 1, 1, 0, 1, 7, 7):
        half(nbytes)
    assert sum(told) == 9

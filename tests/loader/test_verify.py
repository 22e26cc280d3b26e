"""Verification where some checksums are known already."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warmcast.loader import verify as checks
from warmcast.loader.verify import WeightVerificationError, measure, verify
from warmcast.manifests.deadline import Deadline

TENSORS = [torch.arange(n, dtype=torch.int32) for n in (1000, 0, 7, 300)]
ROWS = [(f"layers.{i}.w", "I32", tensor) for i, tensor in enumerate(TENSORS)]
LIMIT = Deadline.never()
TRUTHS = measure(ROWS, LIMIT)
CRCS = [int(truth.crc32c, 16) for truth in TRUTHS]


@given(st.sets(st.sampled_from(range(len(ROWS)))))
def test_what_is_known_need_not_be_computed(known: set[int]) -> None:
    computed = []

    def spy(data, deadline):
        computed.extend(data)
        return crc32cs(data, deadline)

    crc32cs = checks.crc32cs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "crc32cs", spy)
        assert measure(ROWS, LIMIT, {number: CRCS[number] for number in known}) == TRUTHS
    assert len(computed) == len(ROWS) - len(known)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_known_checksum_has_to_be_right(number: int) -> None:
    pairs = list(zip(TRUTHS, TENSORS, strict=True))
    assert verify(pairs, LIMIT, {number: CRCS[number]}).tensors == len(pairs)
    with pytest.raises(WeightVerificationError, match=rf"1 of 4 .*layers\.{number}\.w has CRC32C"):
        verify(pairs, LIMIT, {number: CRCS[number] ^ 1})

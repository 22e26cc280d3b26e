"""Checks that begin before the last bytes are there: the GPU has nothing else to do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from warmcast.loader import cuda_checks

LARGE = 4 << 20
"""Bytes of a tensor that is worth it: for small ones the host would take longer than the GPU."""


class Ahead:
    """The CRC32Cs of those tensors of one GPU that are there first."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._numbers: list[int] = []
        self._finish: Callable[[], list[int]] | None = None

    def begin(self, numbers: Iterable[int], after: torch.cuda.Stream) -> None:
        """Check the tensors of these numbers, once.

        What was begun on the stream ``after`` fills them; nothing else will write to them.
        """
        device = self._tensors[0].device
        wanted = [number for number in numbers if self._tensors[number].nbytes >= LARGE]
        if not wanted or not cuda_checks.at_hand(device):
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(after)
        with torch.cuda.stream(stream):
            self._finish = cuda_checks.start_crc32cs([self._tensors[n] for n in wanted])
        self._numbers = wanted

    def end(self) -> dict[int, int]:
        """The CRC32C of each number that was checked, when the GPU is done with them."""
        if self._finish is None:
            return {}
        return dict(zip(self._numbers, self._finish(), strict=True))

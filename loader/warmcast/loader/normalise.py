"""The samples of many tensors normalised at once: bit-equal to :func:`sampling.normalised`.

What takes a step of Python an element there is one conversion a dtype here. The 8-bit formats are
look-ups there already, and stay so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from warmcast.loader.containers import host_view
from warmcast.manifests import sampling

_NAN = 0x7E00
_FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def normalised(dtypes: Sequence[str], samples: Sequence[bytes]) -> list[bytes]:
    """The normalised samples of each tensor, from its safetensors dtype and raw samples."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, dtype in enumerate(dtypes):
        places[dtype].append(place)
    result = list(samples)
    for dtype, mine in places.items():
        joined = b"".join([samples[place] for place in mine])
        together = (
            _floats(joined, dtype) if dtype in _FLOATS else sampling.normalised(dtype, joined)
        )
        begin = 0
        for place in mine:
            end = begin + len(samples[place]) * len(together) // max(1, len(joined))
            result[place] = together[begin:end]
            begin = end
    return result


def _floats(samples: bytes, dtype: str) -> bytes:
    if not samples:
        return samples
    values = torch.frombuffer(bytearray(samples), dtype=_FLOATS[dtype]).to(torch.float32)
    halves = values.to(torch.float16)
    bits = halves.view(torch.int16)
    bits[halves.isnan()] = _NAN
    return bytes(host_view(halves.view(torch.uint8)))

"""The model's ``config.json``, as a manifest can hold it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from warmcast.flows.upstreams import Upstream, UpstreamFile, read_small
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData

_CONFIG = "config.json"
_CONFIG_LIMIT = 1 << 24


def read_config(
    upstream: Upstream, files: Sequence[UpstreamFile], deadline: Deadline
) -> dict[str, Any]:
    """The parsed ``config.json``, ``{}`` if there is none."""
    file = next((file for file in files if file.path == _CONFIG), None)
    if file is None:
        return {}
    text = read_small(upstream, file, _CONFIG_LIMIT, deadline)
    try:
        # Configs are written by Python, whose JSON knows NaN and infinities; canonical JSON does
        # not, so they become strings.
        value = json.loads(text, parse_constant=str, parse_float=_finite)
    except (ValueError, RecursionError) as cause:
        raise InvalidData(_CONFIG, expected="JSON in UTF-8", found=str(cause)) from None
    if not isinstance(value, dict):
        raise InvalidData(_CONFIG, expected="a JSON object", found=type(value).__name__)
    return value


def _finite(text: str) -> float | str:
    """A JSON number; the text itself if it is beyond what a float can hold."""
    value = float(text)
    return value if math.isfinite(value) else text

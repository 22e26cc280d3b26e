"""The order in which a model comes to its tensors, as far as earlier loads have seen it.

A record in the origin, one a model: ``orders/<model key>.json``, ``{"tensors": [names]}``. It only
says what to read first; a wrong one makes a progressive load wait, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidManifest, WarmcastError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin

log = logging.getLogger("warmcast")

_ORDERS = "orders"


def known_order(
    origin: Origin, manifest: Manifest, names: Sequence[str], deadline: Deadline
) -> list[int]:
    """The numbers of ``names`` in the order in which a model came to them, as far as is known."""
    try:
        record = origin.record(_ORDERS, manifest.model_key, deadline)
        listed = record["tensors"] if isinstance(record, Mapping) else []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise InvalidManifest("order", expected="a list of tensors' names", found="another")
    except (WarmcastError, KeyError) as cause:
        log.info("the order of the manifest is taken: %s", cause)
        listed = []
    numbers = {name: number for number, name in enumerate(names)}
    first = list(dict.fromkeys(numbers[name] for name in listed if name in numbers))
    seen = set(first)
    return [*first, *(number for number in range(len(names)) if number not in seen)]


def keep_order(
    origin: Origin,
    manifest: Manifest,
    names: Sequence[str],
    taken: Sequence[int],
    seen: Sequence[int],
    deadline: Deadline,
) -> None:
    """Write down in which order the model came to its tensors, for the next load.

    ``taken`` is the order in which they were read. The first who sees another writes; a worker
    that may not write to the origin leaves it.
    """
    place = {number: position for position, number in enumerate(taken)}
    positions = [place[number] for number in seen]
    if positions == sorted(positions):
        return
    rest = [number for number in taken if number not in set(seen)]
    record = {"tensors": [names[number] for number in (*seen, *rest)]}
    try:
        origin.put_record(_ORDERS, manifest.model_key, record, deadline)
    except WarmcastError as cause:
        log.info("the order of the model's tensors is not written down: %s", cause)

"""To whom a node has given a chunk: those who are asked when it is busy."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

_CHUNKS = 4096
_NODES = 8


class PassedOn:
    """The last nodes that took each of the chunks that were given last. For one thread."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[str, int], deque[str]] = OrderedDict()

    def note(self, sha256: str, number: int, node: str) -> None:
        """A node, by its name, has a chunk; nothing is noted of who gives no name."""
        if not node or len(node) > 256:
            return
        key = (sha256, number)
        self._nodes.setdefault(key, deque(maxlen=_NODES)).append(node)
        self._nodes.move_to_end(key)
        if len(self._nodes) > _CHUNKS:
            self._nodes.popitem(last=False)

    def instead(self, sha256: str, number: int) -> dict[str, str]:
        """The headers of a refusal: one who has the chunk, if any is known."""
        nodes = self._nodes.get((sha256, number))
        tried = {"Warmcast-Try": random.choice(nodes)} if nodes else {}  # noqa: S311
        return {"Retry-After": "1", **tried}

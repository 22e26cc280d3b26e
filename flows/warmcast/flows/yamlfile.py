"""YAML files as data: safe types only, no key twice, and the line of every field.

Memory and time are bounded by the file's size, which is: an alias is one value in several places,
and a file of many aliases of aliases is refused, as is one that contains itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from warmcast.manifests.errors import UsageError

_MOST_NBYTES = 1 << 20
_MOST_VALUES = 100_000


@dataclass(frozen=True, slots=True)
class Yaml:
    """A file's value, and the nodes that it was made from."""

    value: Any
    node: yaml.Node | None

    def line(self, path: Sequence[str | int]) -> int | None:
        """The line, from 1, of the value at a path of keys and numbers, or of what is above it."""
        node, found = self.node, None
        for part in path:
            if isinstance(node, yaml.MappingNode):
                pairs = [(key, value) for key, value in node.value if key.value == str(part)]
                if not pairs:
                    break
                found, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                node = node.value[part]
                found = node.start_mark.line + 1
            else:
                break
        return found


def read_yaml(location: Path) -> Yaml:
    """Read a file. Raises :class:`UsageError`."""
    try:
        with location.open("rb") as file:
            data = file.read(_MOST_NBYTES + 1)
    except OSError as cause:
        raise UsageError(str(location), expected="a YAML file", found=cause.strerror) from None
    if len(data) > _MOST_NBYTES:
        raise UsageError(str(location), expected=f"{_MOST_NBYTES} bytes at most", found="more")
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(data)
        node = loader.get_single_node()
        _check(node, str(location))
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as cause:
        line = cause.problem_mark.line + 1 if cause.problem_mark else 1
        raise UsageError(
            f"{location}:{line}", expected="YAML", found=cause.problem or "none"
        ) from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError, ValueError) as cause:
        raise UsageError(str(location), expected="YAML", found=cause) from None
    finally:
        if loader is not None:
            loader.dispose()
    return Yaml(value, node)


def _check(root: yaml.Node | None, where: str) -> None:
    """Raise :class:`UsageError` for a key that stands twice, or too many values."""
    count = 0
    todo = [] if root is None else [root]
    while todo:
        node = todo.pop()
        count += 1
        if count > _MOST_VALUES:
            raise UsageError(where, expected=f"{_MOST_VALUES} values at most", found="more")
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise UsageError(
                        f"{where}:{line}: {key.value}",
                        expected="each key once",
                        found=f"it in line {seen[key.value]}, too",
                    )
                seen[str(key.value)] = line
                todo.append(value)

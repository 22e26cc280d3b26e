"""Patterns that choose files, as ``.gitignore`` does.

- Without a ``/``, a pattern is of names, at every depth: ``*.safetensors`` matches
  ``sub/x.safetensors``.
- With one, it is of paths from the top: ``original/*.pth``, ``/config.json``; ``**`` stands for
  any number of folders: ``**/onnx/*.json``.
- What matches a folder matches all that is below it; ``onnx/`` matches folders only.
- ``*``, ``?`` and ``[…]`` do not match a ``/``; upper and lower case differ.

Of the files that ``allow`` matches (all, if it is empty), those are taken that ``ignore`` does not
match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from warmcast.flows.upstreams import UpstreamFile
from warmcast.manifests.errors import UsageError

_ANY = "**"


def select(
    files: Sequence[UpstreamFile], allow: Sequence[str], ignore: Sequence[str]
) -> tuple[tuple[UpstreamFile, ...], tuple[str, ...]]:
    """The files that are taken, in their order, and a note on each pattern that matches none.

    Raises :class:`UsageError` for a pattern that can match nothing.
    """
    allowed = [(pattern, matcher(pattern, "allow")) for pattern in allow]
    ignored = [(pattern, matcher(pattern, "ignore")) for pattern in ignore]
    notes = [
        f"{option} {pattern!r}: matches no file"
        for option, patterns in (("allow", allowed), ("ignore", ignored))
        for pattern, matches in patterns
        if not any(matches(file.path) for file in files)
    ]
    taken = tuple(
        file
        for file in files
        if (not allowed or any(matches(file.path) for _, matches in allowed))
        and not any(matches(file.path) for _, matches in ignored)
    )
    return taken, tuple(notes)


def matcher(pattern: str, option: str = "pattern") -> Callable[[str], bool]:
    """Whether a path matches; raises :class:`UsageError`, naming ``option``."""
    folder = pattern.endswith("/")
    parts = pattern.strip("/").split("/")
    if pattern.startswith("!"):
        raise UsageError(
            f"{option} {pattern!r}", expected="no '!'", do="name what is to be left out by ignore"
        )
    if any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"{option} {pattern!r}", expected="names, and single '/' between them")
    if "/" not in pattern.rstrip("/"):
        parts.insert(0, _ANY)
    return lambda path: _matches(parts, path.split("/"), folder)


def _matches(pattern: Sequence[str], path: Sequence[str], folder: bool) -> bool:
    """Whether the path, or a folder above it, matches; with ``folder`` only one above it."""
    last = len(pattern)
    # Where in the pattern one may be: it is walked once, whatever it holds.
    states = _reached(pattern, {0})
    for depth, name in enumerate(path, 1):
        states = _reached(
            pattern,
            {
                state if pattern[state] == _ANY and state < last - 1 else state + 1
                for state in states
                if state < last and (pattern[state] == _ANY or fnmatchcase(name, pattern[state]))
            },
        )
        if last in states and not (folder and depth == len(path)):
            return True
    return False


def _reached(pattern: Sequence[str], states: set[int]) -> set[int]:
    """``states``, and those after a ``**`` that stands for no folder; at the end it is one name."""
    found = set(states)
    for state in range(len(pattern) - 1):
        if state in found and pattern[state] == _ANY:
            found.add(state + 1)
    return found

"""The load order of tensors: the order in which layers run.

A worker that streams weights can begin to use the first layers while the last still come, and a
file read in this order is read front to back. Embeddings come first; then the layers, by stack
(encoders before decoders) and number; then what stands behind the last layer: final norm, pooler,
head. Names are all there is to go by, so this is a good guess, and any order is valid.
"""

from __future__ import annotations

import re

_EMBEDDING = re.compile(
    r"embed|embd|(^|[._])(wte|wpe|shared|cls_token|pos_emb|rotary)|tok_emb|patch_emb|conv1$", re.I
)
_HEAD = re.compile(r"head|embed_out|classifier|score|proj_out|(^|\.)output($|\.)", re.I)
_POOLER = re.compile(r"pool", re.I)
_ENCODER = re.compile(r"encoder|vision|visual|audio", re.I)
_NUMBER = re.compile(r"(\d+)")

_DIGITS = 7
"""A number of so many digits counts no layers."""

Key = tuple[int, int, tuple[tuple[int, int, str], ...]]


def load_order(name: str) -> Key:
    """The sorting key of a tensor's name."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    before = ".".join(parts[:number]) if number is not None else name
    if _EMBEDDING.search(before) and not _HEAD.search(before):
        return (0, 0, _natural(name))
    if number is not None:
        return (1, 0 if _ENCODER.search(before) else 1, _natural(name))
    if _HEAD.search(name):
        return (2, 2, _natural(name))
    return (2, 1 if _POOLER.search(name) else 0, _natural(name))


def is_embedding(name: str) -> bool:
    """Whether a tensor is one of those that come before all layers."""
    return load_order(name)[0] == 0


def is_head(name: str) -> bool:
    """Whether a tensor is one of those that come last."""
    return load_order(name)[:2] == (2, 2)


def layer_of(name: str) -> tuple[str, int]:
    """The stack that a tensor's layer is in, and the layer's number: ``("model.layers", 7)``."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal() and len(part) < _DIGITS:
            return ".".join(parts[:place]), int(part)
    return ".".join(parts[:-1]), 0


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """``layers.10`` behind ``layers.9``."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _NUMBER.split(name)
    )

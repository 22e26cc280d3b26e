"""An output head that is the input embedding, saved a second time.

Ties are real sharing of a storage, and a pickle can tell of it only inside itself: a checkpoint in
several files, or one that was gathered from ranks, holds such a head twice. Equal bytes alone prove
nothing (a head may have been copied from the embedding and be meant to part from it). So the head
is tied if both hold: the config says ``tie_word_embeddings``, and every byte is equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from warmcast.flows.convert.tensors import Checkpoint, Tensor
from warmcast.flows.convert.ties import row_major
from warmcast.flows.steps.order import is_embedding, is_head
from warmcast.manifests.manifest import TiedEntry


def tie_embeddings(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with heads tied to the embeddings that they equal."""
    embeddings = [t for t in checkpoint.tensors if is_embedding(t.name) and len(t.shape) > 1]
    tied = {}
    for head in checkpoint.tensors:
        if is_head(head.name):
            base = next((e for e in embeddings if _equal(head, e)), None)
            if base is not None:
                tied[head.name] = base.name
    if not tied:
        return checkpoint
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    heads = (
        TiedEntry(name=n, of=base, shape=shapes[n], stride=row_major(shapes[n]), offset=0)
        for n, base in tied.items()
    )
    others = (
        tie.model_copy(update={"of": tied[tie.of]}) if tie.of in tied else tie
        for tie in checkpoint.tied
    )
    return replace(
        checkpoint,
        tensors=tuple(t for t in checkpoint.tensors if t.name not in tied),
        tied=(*others, *heads),
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.note) != (b.dtype, b.shape, b.note):
        return False
    if a.extents is not None and a.extents == b.extents:
        return True
    return same_bytes(a.pieces(), b.pieces())


def same_bytes(a: Iterator[memoryview], b: Iterator[memoryview]) -> bool:
    """Whether two streams of as many bytes are the same, however each is cut."""
    left = right = memoryview(b"")
    while True:
        left = left or next(a, left)
        right = right or next(b, right)
        count = min(len(left), len(right))
        if not count:
            return len(left) == len(right)
        if left[:count] != right[:count]:
            return False
        left, right = left[count:], right[count:]

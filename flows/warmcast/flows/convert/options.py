"""What a deploy may ask of the conversion; part of the conversion's key.

With nothing asked for, safetensors stay byte for byte, and other formats become safetensors of
the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from warmcast.manifests.errors import UsageError

Dtype = Literal["bfloat16", "float16", "float32"]
ShardBy = Literal["size", "layer"]

MAX_SHARD_NBYTES = 5_000_000_000
"""Bytes of tensors in a converted file, at most; the Hub's own default."""


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How the ranks' tensors of the names that match ``pattern`` (``fnmatch``) become one.

    ``concat`` is the dimension along which they are joined in order of the ranks, None where they
    are the same on all. With ``parts`` > 1 each rank's tensor is that many equal parts side by
    side (a fused gate and up projection), and the result is the parts, each joined over the ranks.
    """

    pattern: str
    concat: int | None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class MergeStage:
    """The files of one pipeline stage in order of their tensor-parallel ranks.

    ``layer_offset`` is added to the number of each of its layers.
    """

    shards: tuple[str, ...]
    layer_offset: int = 0


@dataclass(frozen=True, slots=True)
class MergeRules:
    """How tensor-parallel shards become one state dict; read by ``merge_rules.read_merge_rules``.

    ``layers`` are name prefixes before a layer's number, which ``layer_offset`` concerns. The
    first rule that matches a name counts.
    """

    stages: tuple[MergeStage, ...]
    rules: tuple[MergeRule, ...]
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What is asked for. Raises :class:`UsageError` for what is no such thing.

    ``dtype``: what tensors of 16-, 32- and 64-bit floats become, but for names that match one of
    ``keep_dtype`` (``fnmatch``). ``shard_by``: "layer" for a file a layer. ``max_shard_nbytes``:
    bytes of tensors in a file, at most. ``dequantise``: GGUF's block types to float. ``merge``:
    rules for tensor-parallel shards. ``base``: the folder, URL or ref that a LoRA adapter is
    merged into. ``rewrite`` tells whether safetensors are written anew.
    """

    dtype: Dtype | None = None
    keep_dtype: tuple[str, ...] = ()
    shard_by: ShardBy = "size"
    max_shard_nbytes: int = MAX_SHARD_NBYTES
    dequantise: bool = False
    merge: MergeRules | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        if self.max_shard_nbytes < 1:
            raise UsageError(
                "max shard size", expected="1 byte or more", found=self.max_shard_nbytes
            )
        if self.dtype not in (None, "bfloat16", "float16", "float32"):
            raise UsageError("dtype", expected="bfloat16, float16 or float32", found=self.dtype)
        if self.shard_by not in ("size", "layer"):
            raise UsageError("shard by", expected="size or layer", found=self.shard_by)
        if self.keep_dtype and self.dtype is None:
            raise UsageError("keep dtype", expected="a dtype for the others", found="none")
        if self.merge is not None and self.base is not None:
            raise UsageError("merge", expected="rules for shards or a base", found="both")

    @property
    def rewrite(self) -> bool:
        """Whether safetensors, too, are to be written anew."""
        return self.dtype is not None or self.shard_by == "layer" or self.base is not None

    def record(self) -> dict[str, Any]:
        """The options as a JSON value, for the conversion's key; ``base`` counts by its bytes."""
        merge = self.merge
        return {
            "dtype": self.dtype,
            "keep_dtype": list(self.keep_dtype),
            "shard_by": self.shard_by,
            "max_shard_nbytes": self.max_shard_nbytes,
            "dequantise": self.dequantise,
            "merge": merge
            and {
                "stages": [[list(s.shards), s.layer_offset] for s in merge.stages],
                "rules": [[r.pattern, r.concat, r.parts] for r in merge.rules],
                "layers": list(merge.layers),
            },
        }

"""A transformer that runs: decoder layers of Llama 8B's shapes, as many as are asked for.

Only what a progressive load is measured with: no embedding, no head, a prompt of random vectors.
Tensors stand in the order in which a forward comes to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from warmcast.infra.bench.wire.models import Shape

_HEAD = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths of a layer: of the residual stream, of the MLP, and of keys and of values."""

    hidden: int
    intermediate: int
    keys: int

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return min(_HEAD, self.keys)

    def shape(self, nbytes: int) -> Shape:
        """The model of at most ``nbytes`` bytes, and one layer at least."""
        hidden, intermediate, keys = self.hidden, self.intermediate, self.keys
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        one = Shape("decoder", layer, 1)
        return Shape("decoder", layer, max(1, nbytes // one.layer_nbytes))


def sizes(scale: int = 1) -> Sizes:
    """Llama 8B's widths, divided by ``scale`` for machines that only have to try it out."""
    return Sizes(4096 // scale, 14336 // scale, 1024 // scale)


class Decoder(nn.Module):
    """Takes and gives (batch, tokens, hidden), bfloat16; causal."""

    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """One pass over a prompt."""
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = _norm(sizes.hidden)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = _norm(sizes.hidden)
        self.mlp = _Mlp(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._head = sizes.head
        self.q_proj = _linear(sizes.hidden, sizes.hidden)
        self.k_proj = _linear(sizes.hidden, sizes.keys)
        self.v_proj = _linear(sizes.hidden, sizes.keys)
        self.o_proj = _linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = _linear(sizes.hidden, sizes.intermediate)
        self.up_proj = _linear(sizes.hidden, sizes.intermediate)
        self.down_proj = _linear(sizes.intermediate, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated)  # type: ignore[no-any-return]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)


def _norm(width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=1e-5, dtype=torch.bfloat16)

"""The load order: embeddings, layers by number, what stands behind them."""

from __future__ import annotations

import random

import pytest

from warmcast.flows.steps.order import load_order

ORDERS = [
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
    [
        "embeddings.word_embeddings.weight",
        "encoder.layer.0.output.dense.weight",
        "encoder.layer.11.output.dense.weight",
        "pooler.dense.weight",
        "classifier.weight",
    ],
    [
        "transformer.wte.weight",
        "transformer.h.0.ln_1.bias",
        "transformer.ln_f.bias",
        "score.weight",
    ],
    ["shared.weight", "encoder.block.1.x", "decoder.block.0.x", "lm_head.weight"],
    ["gpt_neox.embed_in.weight", "gpt_neox.layers.0.x", "embed_out.weight"],
    [
        "visual.patch_embed.proj.weight",
        "visual.blocks.0.x",
        "model.layers.0.x",
        "model.norm.weight",
    ],
]


@pytest.mark.parametrize("names", ORDERS)
def test_order(names):
    shuffled = random.Random(5).sample(names, len(names))
    assert sorted(shuffled, key=load_order) == names


def test_every_name_has_a_place():
    names = ["", "0", "a.0", "0.a", "a", "a.1b.2", "١", "²", "a.²", "1.²", "²1"]
    assert len(sorted(names, key=load_order)) == len(names)

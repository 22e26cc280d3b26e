"""What each rank holds, and its truth, against slices that torch makes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from warmcast.flows.run import deploy
from warmcast.flows.steps.layouts import layout_for
from warmcast.flows.steps.meshes import parse_mesh
from warmcast.flows.steps.transformers_plan import transformers_plan
from warmcast.manifests import Mesh
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import UsageError
from warmcast.manifests.manifest import TensorEntry, TiedEntry
from warmcast.manifests.sampling import sampled_hash_of


def entry(name, shape, dtype="F32", nbytes=None):
    end = 4 * math.prod(shape) if nbytes is None else nbytes
    return TensorEntry(
        name=name, dtype=dtype, shape=shape, file="x", begin=0, end=end,
        crc32c="0" * 8, sample="0" * 32,
    )  # fmt: skip


def never(_):
    raise AssertionError("read")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    shape = (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])
    tensor = torch.randn(shape)
    mesh = Mesh.grid({"dp": 2, "tp": count}, {"w*": f"tp:{axis}"})
    raw = memoryview(tensor.numpy().tobytes())
    layout = layout_for([entry("w", shape), entry("other", (2,))], (), mesh, lambda _: raw)
    for rank, (_, place) in enumerate(mesh.coordinates):
        piece, whole = layout.ranks[rank]
        expected = tensor.chunk(count, axis)[place] if shape[axis] else tensor
        bytes_ = expected.contiguous().numpy().tobytes()
        assert piece.shape_of(shape) == tuple(expected.shape)
        assert piece.crc32c == to_hex(crc32c(bytes_))
        assert piece.sample == sampled_hash_of("w", "F32", bytes_)
        assert (whole.name, whole.axis) == ("other", None)


def test_deployed_layout(source, file_url):
    weight = torch.randn(6, 4)
    save_file({"a.q.weight": weight, "norm": torch.ones(3)}, source / "model.safetensors")
    mesh = Mesh.grid({"tp": 2}, {"*.q.weight": "tp:1"})
    manifest = deploy(source, file_url, "m@a", meshes=[mesh]).manifest
    layout = manifest.layout(mesh)
    assert layout is not None
    right = next(s for s in layout.ranks[1] if s.name == "a.q.weight")
    assert right.crc32c == to_hex(crc32c(weight[:, 2:].contiguous().numpy().tobytes()))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"nothing.*": "tp:0"}, "none of that name"),
        ({"a": "tp:0"}, "that tp=2 divides, found 3"),
        ({"a": "tp:2"}, "expected an axis below 2"),
        ({"a": "pp:1"}, "expected dimension:axis"),
        ({"a": "tp"}, "expected dimension:axis"),
        ({"a": "tp:-1"}, "expected dimension:axis"),
        ({"a": "tp:1", "?": "tp:0"}, "expected one rule"),
        ({"narrow": "tp:0"}, "whole bytes"),
        ({"base": "tp:0"}, "a view of a part"),
        ({"b": "tp:1", "twin": "tp:0"}, "the rule of 'b'"),
    ],
)
def test_plans_that_do_not_fit(plan, words):
    tensors = [
        entry("a", (3, 4)), entry("b", (4, 4)), entry("base", (4,)),
        entry("narrow", (4,), "F4", 2),
    ]  # fmt: skip
    tied = [
        TiedEntry(name="part", of="base", shape=(2,), stride=(1,), offset=0),
        TiedEntry(name="twin", of="b", shape=(4, 4), stride=(4, 1), offset=0),
    ]
    with pytest.raises(UsageError, match=words):
        layout_for(tensors, tied, Mesh.grid({"tp": 2}, plan), never)


def test_a_tied_name_follows_its_base():
    tied = [TiedEntry(name="twin", of="b", shape=(4,), stride=(1,), offset=0)]
    mesh = Mesh.grid({"tp": 2}, {"b": "tp:0", "twin": "tp:0"})
    layout = layout_for([entry("b", (4,))], tied, mesh, lambda _: memoryview(bytes(16)))
    assert [s.length for rank in layout.ranks for s in rank] == [2, 2]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"dimensions": []},
        {"dimensions": {"tp": "2"}},
        {"dimensions": {"tp": True}},
        {"dimensions": {"tp": 0}},
        {"dimensions": {"tp": 2}, "plan": []},
        {"dimensions": {"tp": 2}, "more": 1},
        {"dimensions": {"tp": 2}, "plan": "another"},
        {"dimensions": {"tp": 2}, "presharded": 1},
        {"dimensions": {"tp": 1 << 40}},
    ],
)
def test_values_that_are_no_mesh(value):
    with pytest.raises(UsageError):
        parse_mesh(value, "mesh")


LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.other": "colwise",
    "embed_tokens": "embedding_rowwise",
    "layers.*.experts.down_proj": "rowwise",
    "layers.*.experts.up_proj": "colwise",
}
SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.10.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.bias": (4,),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.experts.down_proj": (2, 4, 8),
    "model.layers.0.experts.up_proj": (2, 8, 4),
    "lm_head.weight": (8, 4),
}


def test_plan_in_a_config():
    for config in (
        {"base_model_tp_plan": LLAMA},
        {"model_type": "seen_nowhere", "text_config": {"base_model_tp_plan": LLAMA}},
    ):
        assert transformers_plan(config, SHAPES) == {
            "model.layers.*.self_attn.q_proj.weight": "tp:0",
            "model.layers.*.self_attn.q_proj.bias": "tp:0",
            "model.layers.*.self_attn.o_proj.weight": "tp:1",
            "model.embed_tokens.weight": "tp:0",
            "model.layers.*.experts.down_proj": "tp:2",
            "model.layers.*.experts.up_proj": "tp:1",
        }


def test_plan_of_a_class_fits_its_model(source, file_url):
    """What transformers' own class says of a Llama, laid out over the tensors of one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    state = LlamaForCausalLM(config).state_dict()
    save_file({n: t.contiguous() for n, t in state.items()}, source / "model.safetensors")
    (source / "config.json").write_text(config.to_json_string())
    request = parse_mesh({"dimensions": {"tp": 2}, "plan": "transformers"}, "mesh")
    (layout,) = deploy(source, file_url, "m@a", meshes=[request]).manifest.layouts
    axes = {entry.name.split(".", 3)[-1]: entry.axis for entry in layout.ranks[1]}
    assert axes["self_attn.q_proj.weight"] == axes["mlp.up_proj.weight"] == 0
    assert axes["self_attn.o_proj.weight"] == axes["mlp.down_proj.weight"] == 1
    assert axes["input_layernorm.weight"] is None


@pytest.mark.parametrize(
    ("config", "shapes", "words"),
    [
        ({}, SHAPES, "none for None"),
        ({"model_type": "bert"}, SHAPES, "none for 'bert'"),
        ({"model_type": "seen_nowhere"}, SHAPES, "none for 'seen_nowhere'"),
        ({"base_model_tp_plan": [1]}, SHAPES, "expected styles by module"),
        ({"base_model_tp_plan": {"a": 1}}, SHAPES, "expected styles by module"),
        ({"base_model_tp_plan": {"gate_up": "packed_colwise"}}, SHAPES, "found 'packed_colwise'"),
        ({"base_model_tp_plan": {"x.*.y": "colwise"}}, SHAPES, "modules of the plan among"),
        ({"base_model_tp_plan": {"layers.*.q": "colwise"}},
         {"text.layers.0.q.weight": (2, 2), "vision.layers.0.q.weight": (2, 2)}, "one stack"),
        ({"base_model_tp_plan": {"layers.*.q": "colwise"}},
         {"layers.0.q.weight": (2, 2), "layers.1.q.weight": (2, 2, 2)}, "as many dimensions"),
        ({"base_model_tp_plan": {"layers.*.q": "colwise"}},
         {"layers.0.q.weight_scale": (2, 2)}, "found 'weight_scale'"),
    ],
)  # fmt: skip
def test_plans_of_configs_that_are_refused(config, shapes, words):
    with pytest.raises(UsageError, match=words):
        transformers_plan(config, shapes)


def test_a_plan_of_transformers_needs_its_dimension():
    with pytest.raises(UsageError, match="a dimension 'tp'"):
        parse_mesh({"dimensions": {"pp": 2}, "plan": "transformers"}, "mesh").mesh({}, {})

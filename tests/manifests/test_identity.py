"""The keys: pinned, and different wherever two states differ."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.manifests.errors import InvalidData, UsageError
from warmcast.manifests.identity import Identity, Mesh, environment_key, model_key, state_key

modest = settings(deadline=None, max_examples=60)

CONFIG = {"hidden_size": 384, "rope_theta": 1e4}
FILES = [
    ("config.json", 612, "00000001", "a" * 64),
    ("model.safetensors", 90_868_376, "deadbeef", "b" * 64),
]
CONTAINERS = [
    ("embed.weight", "bfloat16", (16, 8), (8, 1)),
    ("position_ids", "int64", (1, 512), (512, 1)),
    ("scalar", "float32", (), ()),
]
VERSIONS = {"torch": "2.9.0", "capability": "9.0"}
IDENTITY = Identity("1" * 64, "2" * 64, "3" * 64, 5)
MESH = Mesh.grid({"pp": 2, "tp": 2}, {"layers.*.up.weight": "tp:0"})


def test_pinned():
    # Changing one of these means that the workers of one fleet no longer meet.
    assert (
        model_key(CONFIG, FILES)
        == "85c83e0cd6f4a2684fa375190627d90588cedef13006f3c5c517de7cb90b9c0e"
    )
    assert Mesh().key == "016df5c07629a38bac4946cdae3367f85f5e5b92da803332266764ce8bd42777"
    assert MESH.key == "78043cd46f3a27a313e9141067bf2646dd80acee1ff0b13a8d2a3b50e39e417b"
    assert (
        state_key(CONTAINERS) == "c0aece94a18d943e928a8e56a8c552eaa4ccc379eac5e22123f55e48d0c19a52"
    )
    assert (
        environment_key("fp8", "1", VERSIONS)
        == "ee36a02da920ae08f7ce5eac6013620d9b8b9a0362f234fdd1848a838e7b84b4"
    )
    assert IDENTITY.digest == "738c0645710017d7828d3325b39297cef107b9a8ef14a612b5bbb832f8a90be0"
    assert (
        Identity("1" * 64, "2" * 64, "3" * 64, 5, "4" * 64).digest
        == "9a87df7d608e3921b177b4af928257305bbda96005684bad15b39d5cd58a30f2"
    )


def test_empty_things_of_different_kinds_have_different_keys():
    keys = {model_key({}, []), Mesh().key, state_key([]), environment_key("", "", {})}
    assert len(keys) == 4


@given(st.permutations(FILES))
def test_the_order_of_files_does_not_matter(files):
    assert model_key(CONFIG, files) == model_key(CONFIG, FILES)


@given(st.permutations(CONTAINERS))
def test_the_order_of_containers_does_not_matter(containers):
    assert state_key(containers) == state_key(CONTAINERS)


def test_the_order_of_a_plan_and_of_versions_does_not_matter():
    plan = {"a": "tp:0", "b": "tp:1"}
    reverse = dict(reversed(plan.items()))
    assert Mesh.grid({"tp": 2}, plan).key == Mesh.grid({"tp": 2}, reverse).key
    assert environment_key("x", "1", plan) == environment_key("x", "1", reverse)


@pytest.mark.parametrize(
    "files",
    [
        FILES[:1],
        [*FILES, ("other", 0, "00000000", "c" * 64)],
        [("Config.json", *FILES[0][1:]), FILES[1]],
        [("config.json", 613, *FILES[0][2:]), FILES[1]],
        [("config.json", 612, "00000002", "a" * 64), FILES[1]],
        [("config.json", 612, "00000001", "c" * 64), FILES[1]],
        [(FILES[1][0], *FILES[0][1:]), (FILES[0][0], *FILES[1][1:])],
    ],
)
def test_every_change_of_a_file_changes_the_model_key(files):
    assert model_key(CONFIG, files) != model_key(CONFIG, FILES)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**CONFIG, "hidden_size": 385},
        {**CONFIG, "hidden_size": "384"},
        {**CONFIG, "hidden_size": 384.0},
        {**CONFIG, "more": None},
        None,
    ],
)
def test_every_change_of_the_config_changes_the_model_key(config):
    assert model_key(config, FILES) != model_key(CONFIG, FILES)


@pytest.mark.parametrize("place", range(len(CONTAINERS)))
@pytest.mark.parametrize(
    "change",
    [
        lambda name, dtype, shape, stride: (name + "x", dtype, shape, stride),
        lambda name, dtype, shape, stride: (name, "float16", shape, stride),
        lambda name, dtype, shape, stride: (name, dtype, (*shape, 1), (*stride, 1)),
        lambda name, dtype, shape, stride: (name, dtype, shape[::-1] or (1,), stride),
        lambda name, dtype, shape, stride: (name, dtype, shape, stride[::-1] or (1,)),
    ],
)
def test_every_change_of_a_container_changes_the_state_key(place, change):
    containers = list(CONTAINERS)
    containers[place] = change(*containers[place])
    assert state_key(containers) != state_key(CONTAINERS)


def test_a_missing_or_repeated_container_changes_the_state_key():
    keys = {state_key(c) for c in (CONTAINERS, CONTAINERS[1:], [*CONTAINERS, CONTAINERS[0]], [])}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "other",
    [
        Mesh.grid({"pp": 2, "tp": 2}),
        Mesh.grid({"tp": 2, "pp": 2}, MESH.plan),
        Mesh.grid({"pp": 4, "tp": 1}, MESH.plan),
        Mesh.grid({"pp": 2, "ep": 2}, MESH.plan),
        Mesh.grid({"pp": 2, "tp": 2}, {"layers.*.up.weight": "tp:1"}),
        Mesh.grid({"pp": 2, "tp": 2}, {"layers.*.down.weight": "tp:0"}),
        Mesh(MESH.dimensions, MESH.coordinates[::-1], MESH.plan),
        Mesh(MESH.dimensions, MESH.coordinates[:3], MESH.plan),
        Mesh(),
    ],
)
def test_every_change_of_the_mesh_changes_its_key(other):
    assert other.key != MESH.key


@pytest.mark.parametrize(
    "other",
    [
        ("fp9", "1", VERSIONS),
        ("fp8", "2", VERSIONS),
        ("fp8", "1", {**VERSIONS, "torch": "2.9.1"}),
        ("fp8", "1", {"torch": "2.9.0"}),
        ("fp8", "1", {}),
    ],
)
def test_every_change_of_the_environment_changes_its_key(other):
    assert environment_key(*other) != environment_key("fp8", "1", VERSIONS)


def test_every_part_of_an_identity_counts():
    a, b, c, d = (letter * 64 for letter in "abcd")
    parts = [(a, b, c, 0), (d, b, c, 0), (a, d, c, 0), (a, b, d, 0), (a, b, c, 1), (a, b, c, 0, d)]
    parts += [(b, a, c, 0), (a, c, b, 0), (a, b, c, 0, a)]
    assert len({Identity(*p).digest for p in parts}) == len(parts)
    assert Identity(*parts[0]) == Identity(*parts[0])


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
shapes = st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple)
container_lists = st.lists(st.tuples(names, names, shapes, shapes), max_size=4)


@modest
@given(container_lists, container_lists)
def test_state_keys_are_equal_where_the_containers_are(a, b):
    assert (state_key(a) == state_key(b)) == (sorted(a) == sorted(b))
    shuffled = random.Random(0).sample(a, len(a))
    assert state_key(shuffled) == state_key(a)


# The mesh itself


def test_a_grid_counts_its_ranks_row_major():
    mesh = Mesh.grid({"pp": 2, "tp": 3})
    assert mesh.size == 6
    assert mesh.coordinates == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))


def test_a_mesh_of_one_rank():
    assert Mesh() == Mesh.grid({})
    assert Mesh().size == 1


def test_a_mesh_can_be_a_dictionary_key():
    assert {MESH: 1}[Mesh.grid({"pp": 2, "tp": 2}, dict(MESH.plan))] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((("tp", 2), ("tp", 2)), ((0, 0),)), "distinct names"),
        (((("tp", 0),), ((0,),)), "1 or longer"),
        (((("tp", 2),), ((0,), (2,))), "rank 1"),
        (((("tp", 2),), ((0,), (-1,))), "rank 1"),
        (((("tp", 2),), ((0, 0),)), "rank 0"),
        (((("tp", 2),), ((),)), "rank 0"),
        (((("tp", 2),), ((0,), (0,))), "two in one place"),
        (((("tp", 2),), ()), "at least one rank"),
    ],
)
def test_an_impossible_mesh_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Mesh(*arguments)


def test_a_grid_without_places_is_refused():
    with pytest.raises(UsageError, match="1 or longer"):
        Mesh.grid({"tp": 0})


def test_what_has_no_canonical_form_has_no_key():
    with pytest.raises(InvalidData):
        model_key({"a": float("nan")}, [])
    with pytest.raises(InvalidData):
        state_key([("\ud800", "float32", (), ())])

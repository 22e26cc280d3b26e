"""The manifest: pinned, held to each of its rules, and parsed as hostile input."""

import copy
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests.builders import CREATED_AT, MESH, deployment, file_entry
from warmcast.manifests.canonical import canonical_json, digest
from warmcast.manifests.errors import IntegrityError, InvalidManifest
from warmcast.manifests.identity import Mesh, model_key
from warmcast.manifests.manifest import build_manifest, parse_manifest
from warmcast.manifests.rules import unsafe_path

SMALL = deployment().manifest
RECORD = json.loads(SMALL.data)


def set_at(record, place, value):
    *parents, last = place
    for part in parents:
        record = record[part]
    if value is MISSING:
        del record[last]
    else:
        record[last] = value


MISSING = object()


def changed(*changes):
    """The record with values set at places (``("files", 0, "size"), 7``)."""
    record = copy.deepcopy(RECORD)
    for place, value in changes:
        set_at(record, place, value)
    return record


def rekeyed(record):
    """The record with keys that fit it, so that another rule is the one that is broken."""
    record["config_hash"] = digest(record["config"])
    record["model_key"] = model_key(
        record["config"],
        [(f["path"], f["size"], f["crc32c"], f["sha256"]) for f in record["files"]],
    )
    return record


def refused(record):
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(canonical_json(record), where="m")
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1200
    return message


def test_the_record_that_the_rest_breaks_is_valid():
    assert parse_manifest(canonical_json(rekeyed(changed()))) == SMALL


def test_pinned():
    # Changing this digest means that no deployed manifest parses any more.
    assert SMALL.digest == "36cffdf81b376a111bf4c3ab79195e7a85bd5de2ccea3cc97f74316e33fa9925"
    assert SMALL.data.startswith(b'{"chunk_size":4096,"config":{"hidden_size":8,"names":[')
    assert SMALL.digest == hashlib.sha256(SMALL.data).hexdigest()


def test_the_fields_of_the_wire_form():
    assert set(RECORD) == {
        *("schema", "model", "revision", "upstream", "created_at", "chunk_size", "files"),
        *("tensors", "tied", "config", "config_hash", "model_key", "layouts"),
    }
    assert set(RECORD["files"][0]) == {"path", "size", "sha256", "crc32c", "chunks"}
    assert set(RECORD["tensors"][0]) == {
        *("name", "dtype", "shape", "file", "begin", "end", "crc32c", "sample")
    }
    assert set(RECORD["tied"][0]) == {"name", "of", "shape", "stride", "offset"}
    assert set(RECORD["layouts"][0]) == {"mesh", "mesh_key", "ranks"}
    assert set(RECORD["layouts"][0]["mesh"]) == {"dimensions", "coordinates", "plan"}
    assert set(RECORD["layouts"][0]["ranks"][0][0]) == {
        *("name", "axis", "start", "length", "crc32c", "sample")
    }


def test_what_was_built_is_what_is_parsed():
    parsed = parse_manifest(SMALL.data, SMALL.digest)
    assert parsed == SMALL
    assert parsed.data == SMALL.data
    assert parsed.digest == SMALL.digest


def test_finding_things_in_it():
    assert SMALL.file["config.json"].size == len(deployment().files["config.json"])
    assert SMALL.tensor["embed.weight"].nbytes == 512
    assert SMALL.nbytes == sum(map(len, deployment().files.values()))
    assert SMALL.layout(MESH) == SMALL.layouts[0]
    assert SMALL.layout(Mesh()) is None
    split = SMALL.layouts[0].ranks[0][1]
    assert split.shape_of((64, 48)) == (32, 48)


def test_load_order_is_kept():
    names = [entry["name"] for entry in RECORD["tensors"]]
    record = changed((("tensors",), list(reversed(RECORD["tensors"]))))
    parsed = parse_manifest(canonical_json(record))
    assert [entry.name for entry in parsed.tensors] == list(reversed(names))


def test_the_same_content_made_at_another_time():
    later = parse_manifest(canonical_json(changed((("created_at",), "2027-01-01T00:00:00Z"))))
    other = parse_manifest(canonical_json(changed((("revision",), "r2"))))
    assert later != SMALL
    assert later.digest != SMALL.digest
    assert later.same_content(SMALL)
    assert not other.same_content(SMALL)


def test_it_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        SMALL.model = "other"


# Bytes that are not the manifest's


def test_a_wrong_digest():
    with pytest.raises(IntegrityError, match=f"m: digest: expected {'0' * 64}, found"):
        parse_manifest(SMALL.data, "0" * 64, "m")


@pytest.mark.parametrize("place", range(0, len(SMALL.data), 211))
def test_a_flipped_bit_is_another_digest(place):
    data = bytearray(SMALL.data)
    data[place] ^= 1
    with pytest.raises(IntegrityError):
        parse_manifest(bytes(data), SMALL.digest)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff", b"[" * 10**5, b'{"a":1,"a":1}']
)
def test_what_is_no_json_object(data):
    with pytest.raises(InvalidManifest):
        parse_manifest(data)


@pytest.mark.parametrize(
    "spell",
    [
        lambda r: json.dumps(r).encode(),
        lambda r: json.dumps(r, sort_keys=True, separators=(",", ":")).encode(),  # escapes
        lambda r: canonical_json(r) + b"\n",
        lambda r: canonical_json(r).replace(b"10000.0", b"1e4"),
        lambda r: canonical_json({k: v for k, v in r.items() if k != "layouts" or v}),
    ],
)
def test_another_spelling_would_have_two_digests(spell):
    record = changed((("layouts",), []))
    assert parse_manifest(canonical_json(record))
    with pytest.raises(InvalidManifest, match="canonical JSON with every field"):
        parse_manifest(spell(record))


@pytest.mark.parametrize("schema", [0, 2, "1", 1.0, True, None, [1], MISSING])
def test_an_unknown_schema(schema):
    message = refused(changed((("schema",), schema)))
    assert message.startswith("m: schema: expected 1, found ")
    assert ("upgrade warmcast" in message) == (schema == 2)


# Each field's type


def places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*path, index))


FREE_TEXT = ("model", "revision", "upstream", "name")
PLACES = [p for p in places(RECORD) if p and p[0] != "config"]


@pytest.mark.parametrize("place", PLACES, ids=lambda p: ".".join(map(str, p)))
def test_a_field_of_another_type_is_refused_by_name(place):
    for wrong in ([{}], {"a": 1}, -1, 1.5, "\0wrong", True, 1 << 63):
        if isinstance(wrong, str) and place[-1] in FREE_TEXT:
            continue
        if isinstance(wrong, str) and place[-2:-1] == ("plan",):
            continue
        message = refused(changed((place, wrong)))
        assert message.startswith("m: ")
        assert str(place[0]) in message


@pytest.mark.parametrize(
    "place",
    [p for p in PLACES if isinstance(p[-1], str) and p[-2:-1] != ("plan",)],
    ids=lambda p: ".".join(map(str, p)),
)
def test_a_missing_field_is_refused(place):
    with pytest.raises(InvalidManifest):
        parse_manifest(canonical_json(changed((place, MISSING))))


@pytest.mark.parametrize(
    "place",
    [
        (),
        ("files", 0),
        ("tensors", 1),
        ("tied", 0),
        ("layouts", 0),
        ("layouts", 0, "mesh"),
        ("layouts", 0, "ranks", 1, 0),
    ],
    ids=lambda p: ".".join(map(str, p)),
)
def test_an_unknown_field_is_refused(place):
    message = refused(changed(((*place, "more"), 1)))
    assert message == f"m: {'.'.join(map(str, (*place, 'more')))}: expected no such field, found 1"


# Each rule

FLIPPED = "0" * 8
HASH = "0" * 64
MODEL = next(i for i, f in enumerate(RECORD["files"]) if f["path"] == "model.safetensors")
SIZE = RECORD["files"][MODEL]["size"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        # files
        ([(("files", 0, "path"), "../x")], "files.0.path: expected a relative path"),
        ([(("files", 0, "path"), "empty/file")], "files.1.path: expected paths that differ"),
        ([(("files", 0, "path"), "empty")], "files: expected a path to be a file or a folder"),
        ([(("files", 0, "chunks"), [])], "files.0.chunks: expected 1 checksums"),
        ([(("files", MODEL, "chunks"), ["0" * 8] * 3)], f"files.{MODEL}.chunks: expected 2"),
        ([(("files", MODEL, "chunks", 1), FLIPPED)], f"files.{MODEL}.chunks: expected checksums"),
        ([(("files", 0, "crc32c"), FLIPPED)], "files.0.chunks: expected checksums that combine"),
        ([(("files", MODEL, "size"), SIZE - 1)], f"files.{MODEL}.chunks: expected checksums"),
        ([(("files", 0, "crc32c"), "ABCDEF01")], "files.0.crc32c"),
        ([(("files", 0, "sha256"), HASH + "0")], "files.0.sha256"),
        ([(("files", 0, "sha256"), HASH + "\n")], "files.0.sha256"),
        ([(("chunk_size",), 4095)], "chunk_size"),
        ([(("chunk_size",), 8192)], f"files.{MODEL}.chunks"),
        # tensors
        ([(("tensors", 1, "name"), "embed.weight")], "tensors.1.name: expected unique names"),
        ([(("tensors", 0, "name"), "")], "tensors.0.name"),
        ([(("tensors", 0, "dtype"), "F31")], "tensors.0.dtype: expected a safetensors dtype"),
        ([(("tensors", 0, "file"), "other")], "tensors.0.file: expected a path among the files"),
        ([(("tensors", 4, "end"), SIZE + 1)], "tensors.4.end: expected a range inside"),
        ([(("tensors", 0, "begin"), RECORD["tensors"][0]["end"] + 1)], "tensors.0.end"),
        ([(("tensors", 0, "shape"), [16, 9])], "tensors.0.shape: expected a shape of 512 bytes"),
        ([(("tensors", 0, "dtype"), "F16")], "tensors.0.shape: expected a shape of 512 bytes"),
        ([(("tensors", 4, "shape"), [3])], "tensors.4.shape: expected a shape of 3 bytes of F4"),
        ([(("tensors", 3, "shape"), [1 << 62, 1 << 62])], "tensors.3.shape: expected a shape"),
        ([(("tensors", 3, "shape"), [1 << 62] * 9)], "tensors.3.shape: expected a shape"),
        ([(("tensors", 1), MISSING)], "tensors: 'layers.0.scale' in 'model.safetensors'"),
        ([(("tensors", 4), MISSING)], "tensors of 'model.safetensors': expected to fill"),
        (
            [
                (("tensors", 0, "end"), RECORD["tensors"][0]["end"] + 32),
                (("tensors", 0, "shape"), [17, 8]),
            ],
            "tensors: 'layers.0.weight' in 'model.safetensors': expected to begin",
        ),
        ([(("tensors", 0, "sample"), "0" * 31)], "tensors.0.sample"),
        # tied
        ([(("tied", 0, "name"), "embed.weight")], "tied.0.name: expected unique names"),
        ([(("tied", 0, "of"), "head.weight")], "tied.0.of: expected a stored tensor's name"),
        ([(("tied", 0, "of"), "nothing")], "tied.0.of: expected a stored tensor's name"),
        ([(("tied", 0, "stride"), [1])], "tied.0.stride: expected 2 strides"),
        ([(("tied", 0, "offset"), 1)], "tied.0.offset: expected a view inside the 128"),
        ([(("tied", 0, "stride"), [9, 1])], "tied.0.offset: expected a view inside the 128"),
        ([(("tied", 0, "shape"), [17, 8])], "tied.0.offset: expected a view inside the 128"),
        (
            [(("tied", 0, "shape"), [0, 8]), (("tied", 0, "offset"), 129)],
            "tied.0.offset: expected a view inside the 128",
        ),
        ([(("tied", 0, "of"), "layers.0.empty")], "tied.0.offset: expected a view inside the 0"),
        (
            [(("tied", 0, "shape"), [1 << 40, 1 << 40]), (("tied", 0, "stride"), [0, 0])],
            "tied.0.shape: expected a shape that fits memory",
        ),
        # keys
        ([(("config", "hidden_size"), 9)], "config_hash"),
        ([(("config_hash",), HASH)], "config_hash"),
        ([(("model_key",), HASH)], "model_key"),
        ([(("files", 0, "sha256"), HASH)], "model_key"),
        ([(("created_at",), "2026-13-01T00:00:00Z")], "created_at: expected a UTC time like"),
        ([(("created_at",), "2026-01-31T23:59:59")], "created_at: expected a UTC time like"),
        ([(("created_at",), "2026-1-31T23:59:59Z")], "created_at: expected a UTC time like"),
        ([(("created_at",), "٢٠٢٦-01-31T23:59:59Z")], "created_at: expected a UTC time like"),
        # layouts
        ([(("layouts", 0, "mesh_key"), HASH)], "layouts.0.mesh_key"),
        ([(("layouts", 0, "mesh", "plan"), {})], "layouts.0.mesh_key"),
        ([(("layouts", 0, "mesh", "dimensions", 0, 1), 3)], "layouts.0.mesh_key"),
        ([(("layouts", 0, "mesh", "dimensions", 0, 1), 1)], "layouts.0: mesh: rank 1"),
        ([(("layouts", 0, "mesh", "coordinates"), [[0], [0]])], "layouts.0: mesh"),
        ([(("layouts", 0, "mesh", "coordinates"), [])], "layouts.0: mesh: expected at least"),
        ([(("layouts", 0, "ranks", 1), MISSING)], "layouts.0.ranks: expected 2 ranks"),
        ([(("layouts",), RECORD["layouts"] * 2)], "layouts.1.mesh_key: expected one layout"),
        (
            [(("layouts", 0, "ranks", 0, 0, "name"), "layers.0.weight")],
            "layouts.0.ranks.0: 'layers.0.weight'",
        ),
        (
            [(("layouts", 0, "ranks", 0, 0, "name"), "head.weight")],
            "layouts.0.ranks.0: 'head.weight': expected each a stored tensor's name",
        ),
        (
            [(("layouts", 0, "ranks", 0, 1, "axis"), 2)],
            "layouts.0.ranks.0: 'layers.0.weight': expected an axis of [64, 48], found 2",
        ),
        (
            [(("layouts", 0, "ranks", 0, 1, "start"), 33)],
            "layouts.0.ranks.0: 'layers.0.weight': expected a slice of 64 along axis 0",
        ),
        (
            [
                (("layouts", 0, "ranks", 0, 4, "axis"), 0),
                (("layouts", 0, "ranks", 0, 4, "length"), 1),
            ],
            "layouts.0.ranks.0: 'layers.0.packed': expected whole bytes an element to slice",
        ),
        (
            [(("layouts", 0, "ranks", 0, 0, "length"), 1)],
            "layouts.0.ranks.0: 'embed.weight': expected start and length 0",
        ),
        (
            [(("layouts", 0, "ranks", 0, 0, "crc32c"), FLIPPED)],
            "layouts.0.ranks.0: 'embed.weight': expected the whole tensor's truth",
        ),
        (
            [(("layouts", 0, "ranks", 0, 0, "sample"), "0" * 32)],
            "layouts.0.ranks.0: 'embed.weight': expected the whole tensor's truth",
        ),
        (
            [(("layouts", 0, "ranks", 0, 1, "length"), 64)],
            "layouts.0.ranks.0: 'layers.0.weight': expected the whole tensor's truth",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_is_refused_by_name(changes, field):
    assert f"m: {field}" in refused(changed(*changes))


@pytest.mark.parametrize(
    "changes",
    [
        [(("tied", 0, "shape"), [0, 8]), (("tied", 0, "offset"), 128)],
        [(("tied", 0, "shape"), [0]), (("tied", 0, "stride"), [1])],
        [(("tied", 0, "shape"), []), (("tied", 0, "stride"), []), (("tied", 0, "offset"), 127)],
        [(("tied", 0, "shape"), [4]), (("tied", 0, "stride"), [42]), (("tied", 0, "offset"), 1)],
        [(("tied", 0, "shape"), [1 << 40]), (("tied", 0, "stride"), [0])],
        [(("layouts", 0, "ranks", 0), [])],
        [(("layouts",), [])],
        [(("chunk_size",), 4096)],
        [(("revision",), ""), (("upstream",), "")],
    ],
)
def test_what_no_rule_forbids(changes):
    record = canonical_json(changed(*changes))
    assert parse_manifest(record).data == record


def test_rules_hold_where_the_keys_were_made_to_fit():
    record = rekeyed(changed((("files", 0, "path"), "/etc/passwd")))
    assert "files.0.path: expected a relative path" in refused(record)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/etc/passwd", "a//b", "a/", "./a", "a/./b", "..", "../a", "a/../../b", "a/.."),
        *("C:\\x", "C:x", "a\\b", "..\\a", "file:///x", "a\0b", "a\nb", "\x1b[2J", "a\x7f", "\t"),
        *("x" * 256, "a/" + "é" * 128 + "/b"),
    ],
)
def test_unsafe_paths(path):
    assert unsafe_path(path)


@pytest.mark.parametrize(
    "path", ["a", "a/b/c", ".hidden", "...", "a b", "ä/€", "a:b/c"[2:], "x/C:y", "x" * 255, "~/a"]
)
def test_safe_paths(path):
    assert unsafe_path(path) is None


def test_two_spellings_of_one_path():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    files = [file_entry(composed, b""), file_entry(decomposed, b"")]
    with pytest.raises(InvalidManifest, match="paths that differ"):
        built(files=files)
    files = [file_entry(composed, b""), file_entry(f"{decomposed}/x", b"")]
    with pytest.raises(InvalidManifest, match="a file or a folder"):
        built(files=files)


def test_case_differs_as_on_linux():
    assert len(built(files=[file_entry("README", b""), file_entry("readme", b"")]).files) == 2


# Building


def built(**changes):
    arguments = {
        "model": "m",
        "revision": "r",
        "upstream": "u",
        "created_at": CREATED_AT,
        "files": [],
        "tensors": [],
        "config": {},
        **changes,
    }
    return build_manifest(**arguments)


def test_files_may_come_in_any_order():
    files = [file_entry(p, p.encode(), 16 << 20) for p in ("b", "a", "c")]
    assert built(files=files) == built(files=files[::-1])
    assert built(files=files).model_key == built(files=files[::-1]).model_key


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"created_at": "today"}, "created_at"),
        ({"model": ""}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"revision": "\udfff"}, "revision"),
        ({"config": {"a": float("nan")}}, "value.a"),
        ({"config": {"a": "\ud800"}}, "value.a"),
        ({"config": {1: 2}}, "string keys"),
        ({"config": {"a": {1}}}, "value.a"),
        ({"chunk_size": 1}, "chunk_size"),
        ({"files": [file_entry("a/../b", b"")]}, "files.0.path"),
    ],
)
def test_what_would_not_parse_is_not_built(changes, field):
    with pytest.raises(InvalidManifest, match=field):
        built(**changes)


@pytest.mark.parametrize("levels", [99, 100, 101, 5000])
def test_a_config_is_either_built_and_parsed_or_refused(levels):
    config = {}
    for _ in range(levels):
        config = {"a": config}
    try:
        manifest = built(config=config)
    except InvalidManifest:
        assert levels > 98
        return
    assert parse_manifest(manifest.data) == manifest


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(text, json_values, max_size=4), text.filter(bool), text, text)
def test_any_config_and_text_comes_back(config, model, revision, upstream):
    manifest = built(config=config, model=model, revision=revision, upstream=upstream)
    parsed = parse_manifest(manifest.data, manifest.digest)
    assert parsed == manifest
    assert parsed.config == config
    assert parsed.digest == manifest.digest


def test_tuples_in_a_config_are_lists():
    manifest = built(config={"a": (1, 2)})
    assert manifest.config == {"a": [1, 2]}
    assert parse_manifest(manifest.data) == manifest


# Fuzzing


def parses_or_is_refused(data):
    try:
        manifest = parse_manifest(data, where="m")
    except InvalidManifest as refusal:
        assert str(refusal).isprintable()
        return
    assert manifest.data == data


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([p for p in places(RECORD) if p]), json_values)
def test_any_json_value_in_any_place(place, value):
    parses_or_is_refused(canonical_json(changed((place, value))))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SMALL.data) - 1), st.integers(0, 255)), min_size=1, max_size=3
    )
)
def test_changed_bytes(changes):
    data = bytearray(SMALL.data)
    for place, value in changes:
        data[place] = value
    parses_or_is_refused(bytes(data))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(SMALL.data)), st.integers(0, 40), st.binary(max_size=8))
def test_spliced_bytes(place, removed, inserted):
    parses_or_is_refused(SMALL.data[:place] + inserted + SMALL.data[place + removed :])

"""The sampled hash: pinned, held against torch's conversions, and by its properties."""

import hashlib
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.manifests import sampling
from warmcast.manifests.dtypes import BITS
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.sampling import (
    SAMPLES,
    element_nbytes,
    fold,
    layer_of,
    sample_indices,
    sampled_hash,
    sampled_hash_of,
)

modest = settings(deadline=None, max_examples=60)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


def counting(nbytes):
    """Bytes of every value and no short period: 0, 7, 14, … modulo 251."""
    return bytes(i * 7 % 251 for i in range(nbytes))


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def normalised_by_torch(tensor):
    half = tensor.to(torch.float32).to(torch.float16)
    half[half.isnan()] = torch.tensor([0x7E00], dtype=torch.int16).view(torch.float16)[0]
    return raw(half)


# Changing one of these means that no manifest's samples hold any more.
PINNED = {
    "BOOL": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "F4": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "F6_E2M3": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "F6_E3M2": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "U8": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "I8": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "F8_E5M2": (
        "89ba1a91aa76c2332106349d734e293c",
        "0ca671948e0a18153b1602c6cac4e8d1",
    ),
    "F8_E4M3": (
        "b304dad2244d8486e1c5c71b1d240538",
        "4c3da89dbbd0ea07a86af475ff474b5c",
    ),
    "F8_E8M0": (
        "7e127ec38c611fbb2d84ad3e88484b34",
        "99738d0ebff23a6aa338ecdd61b47077",
    ),
    "F8_E4M3FNUZ": (
        "2a793675b525b0230573aa0c60acd569",
        "83fe44870ead71092e0647365ffb6bc4",
    ),
    "F8_E5M2FNUZ": (
        "3349322bcad21ebb3fc00388b31abda1",
        "5a81ad11df32bd59163de1400bd8f570",
    ),
    "I16": (
        "5f3bfb2c28de9db181c14b2d12a9888d",
        "b06f93e9af89f21ada741e911c862cd9",
    ),
    "U16": (
        "5f3bfb2c28de9db181c14b2d12a9888d",
        "b06f93e9af89f21ada741e911c862cd9",
    ),
    "F16": (
        "32fd699ffd82c0b86f4e2d7a4d75b58f",
        "5aec8ed67d77cf94c41c4158c3110e91",
    ),
    "BF16": (
        "ebb1e5cafc3dbfb8cd05f94b5543ddce",
        "d1df3309c68d91e18ebaf213012681cf",
    ),
    "I32": (
        "5ac3469531bacd042b2840c868ee5b4b",
        "34a278cc73a3de8587da17b6e475a7b4",
    ),
    "U32": (
        "5ac3469531bacd042b2840c868ee5b4b",
        "34a278cc73a3de8587da17b6e475a7b4",
    ),
    "F32": (
        "ad3be2d48dbbb94b2b6162db888bf632",
        "22349079ee9fa1ff30585ff1c64f3ca6",
    ),
    "C64": (
        "2a2d266b3ab2a8309aac6a1cba1cf623",
        "2aecd38926e530fb0c7c1230263d8f8c",
    ),
    "F64": (
        "0541daaee27e4ebdc7e06fadf634b04d",
        "f0287e4100f02f09c09eb36bba964e7a",
    ),
    "I64": (
        "2a2d266b3ab2a8309aac6a1cba1cf623",
        "2aecd38926e530fb0c7c1230263d8f8c",
    ),
    "U64": (
        "2a2d266b3ab2a8309aac6a1cba1cf623",
        "2aecd38926e530fb0c7c1230263d8f8c",
    ),
}
PINNED_INDICES = [7, 18, 24, 40, 57, 69, 79, 89]
PINNED_LAST = [1080024740343, 1092652999358]
PINNED_FOLD = "29d722507688888b5f4bb6717d286746"


@pytest.mark.parametrize("dtype", BITS)
def test_pinned(dtype):
    few, many = counting(37 * element_nbytes(dtype)), counting(1234 * element_nbytes(dtype))
    assert (
        sampled_hash_of("layers.0.weight", dtype, few),
        sampled_hash_of("layers.0.weight", dtype, many),
    ) == PINNED[dtype]


def test_pinned_indices():
    assert list(sample_indices("layers.0.weight", 1234))[:8] == PINNED_INDICES
    assert list(sample_indices("layers.0.weight", 1 << 40))[-2:] == PINNED_LAST
    assert list(sample_indices("w", 3)) == [0, 1, 2]


def test_pinned_fold():
    hashes = [("b", "1" * 32), ("a", "0" * 32)]
    assert fold(hashes) == fold(reversed(hashes)) == PINNED_FOLD
    assert fold([]) == "e3b0c44298fc1c149afbf4c8996fb924"  # SHA-256 of nothing, cut


@modest
@given(names, st.integers(0, 1 << 62))
def test_indices_are_one_of_each_stratum(name, numel):
    indices = sample_indices(name, numel)
    if numel <= SAMPLES:
        assert list(indices) == list(range(numel))
        return
    assert len(indices) == SAMPLES
    for stratum, index in enumerate(indices):
        assert stratum * numel // SAMPLES <= index < (stratum + 1) * numel // SAMPLES


def test_indices_differ_with_the_name():
    assert sample_indices("a", 10**6) != sample_indices("b", 10**6)


@modest
@given(names, st.sampled_from(sorted(BITS)), st.integers(0, 400), st.randoms())
def test_only_a_change_of_a_sampled_unit_changes_the_hash(name, dtype, numel, random):
    width = element_nbytes(dtype)
    data = bytearray(random.randbytes(numel * width))
    before = sampled_hash_of(name, dtype, data)
    sampled = set(sample_indices(name, numel))
    unsampled = set(range(numel)) - sampled
    for index in unsampled:
        data[index * width : (index + 1) * width] = random.randbytes(width)
    assert sampled_hash_of(name, dtype, data) == before
    if sampled and dtype not in TORCH:
        data[random.choice(sorted(sampled)) * width] ^= 0xFF
        assert sampled_hash_of(name, dtype, data) != before


@pytest.mark.parametrize("dtype", TORCH)
def test_every_sampled_element_counts(dtype):
    zeros = torch.zeros(1000)
    before = sampled_hash_of("w", dtype, raw(zeros.to(TORCH[dtype])))
    seen = {before}
    for index in sample_indices("w", 1000):
        changed = zeros.clone()
        changed[index] = 0.5
        seen.add(sampled_hash_of("w", dtype, raw(changed.to(TORCH[dtype]))))
    assert len(seen) == SAMPLES + 1


def test_name_size_and_kind_count():
    hashes = [
        sampled_hash_of("a", "F32", bytes(400)),
        sampled_hash_of("b", "F32", bytes(400)),
        sampled_hash_of("a", "F32", bytes(404)),
        sampled_hash_of("a", "I32", bytes(400)),
        sampled_hash_of("a", "I16", bytes(400)),
    ]
    assert len(set(hashes)) == len(hashes)


@modest
@given(st.lists(st.floats(width=16), max_size=300))
def test_half_values_hash_alike_in_every_wider_dtype(values):
    half = torch.tensor(values, dtype=torch.float16)
    hashes = {
        sampled_hash_of("w", dtype, raw(half.to(TORCH[dtype]))) for dtype in ("F16", "F32", "F64")
    }
    assert len(hashes) == 1


def test_bfloat16_values_hash_alike_in_every_wider_dtype():
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for part in every.split(100):
        hashes = {
            sampled_hash_of("w", dtype, raw(part.to(TORCH[dtype])))
            for dtype in ("BF16", "F32", "F64")
        }
        assert len(hashes) == 1


@pytest.mark.parametrize("dtype", [d for d in TORCH if d.startswith("F8")])
def test_every_8_bit_value_hashes_as_its_wider_spelling(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(TORCH[dtype])
    for part in (every[:100], every[100:200], every[200:]):
        hashes = {
            sampled_hash_of("w", wider, raw(part.to(torch.float32).to(TORCH[wider])))
            for wider in ("F16", "BF16", "F32")
        } | {sampled_hash_of("w", dtype, raw(part))}
        assert len(hashes) == 1


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_value_is_normalised_as_torch_does(dtype):
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(TORCH[dtype])
    assert sampling._NORMALISE[dtype](raw(every)) == normalised_by_torch(every)


@pytest.mark.parametrize("dtype", [d for d in TORCH if d.startswith("F8")])
def test_every_8_bit_value_is_normalised_as_torch_does(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(TORCH[dtype])
    assert sampling._NORMALISE[dtype](raw(every)) == normalised_by_torch(every)


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_random_bits_are_normalised_as_torch_does(dtype):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (8 * 20000,), dtype=torch.uint8, generator=generator)
    tensor = bits.view(TORCH[dtype])
    assert sampling._NORMALISE[dtype](raw(tensor)) == normalised_by_torch(tensor)


@modest
@given(
    st.lists(
        st.one_of(
            st.floats(),
            st.floats(-70000, 70000),
            st.floats(-1e-4, 1e-4),
            st.sampled_from([65504.0, 65519.99, 65520.0, -65520.0, 2.0**-24, 2.0**-25, -0.0]),
        ),
        max_size=20,
    )
)
def test_floats_are_normalised_as_torch_does(values):
    for dtype in ("F32", "F64"):
        tensor = torch.tensor(values, dtype=torch.float64).to(TORCH[dtype])
        assert sampling._NORMALISE[dtype](raw(tensor)) == normalised_by_torch(tensor)


def test_float64_is_rounded_twice():
    # Just above the middle of two halves: float32 rounds it to the middle, and that to even.
    value = 1.0 + 2.0**-11 + 2.0**-40
    data = struct.pack("<d", value)
    assert sampling._NORMALISE["F64"](data) == struct.pack("<e", 1.0)
    assert struct.pack("<e", value) != struct.pack("<e", 1.0)


def test_edges():
    def f32(value):
        return sampling._NORMALISE["F32"](struct.pack("<f", value))

    assert f32(-0.0) == b"\x00\x80" != f32(0.0)
    assert f32(2.0**-24) == b"\x01\x00"  # the smallest subnormal
    assert f32(2.0**-25) == b"\x00\x00"  # half of it, to even
    assert f32(65519.996) == b"\xff\x7b"  # the largest number
    assert f32(65520.0) == f32(math.inf) == b"\x00\x7c"
    assert f32(-65520.0) == f32(-math.inf) == b"\x00\xfc"
    assert sampling._NORMALISE["F64"](struct.pack("<2d", 1e300, -1e300)) == b"\x00\x7c\x00\xfc"
    # Infinities that cancel are no NaN.
    assert sampling._NORMALISE["F32"](struct.pack("<2f", math.inf, -math.inf)) == (
        b"\x00\x7c\x00\xfc"
    )


@pytest.mark.parametrize(
    ("dtype", "nans"),
    [
        ("F16", ["007e", "017c", "ffff", "00fe"]),
        ("BF16", ["c07f", "817f", "ffff"]),
        ("F32", ["0000c07f", "0100807f", "ffffffff"]),
        ("F64", ["000000000000f87f", "010000000000f07f", "ffffffffffffffff"]),
        ("F8_E4M3", ["7f", "ff"]),
        ("F8_E5M2", ["7d", "7e", "7f", "fd"]),
    ],
)
def test_the_payload_and_sign_of_a_nan_do_not_matter(dtype, nans):
    hashes = {sampled_hash_of("w", dtype, bytes.fromhex(nan)) for nan in nans}
    assert hashes == {sampled_hash_of("w", "F16", b"\x00\x7e")}


@pytest.mark.parametrize("dtype", BITS)
def test_samples_and_whole_tensors_agree(dtype):
    width = element_nbytes(dtype)
    data = counting(777 * width)
    samples = b"".join(data[i * width : (i + 1) * width] for i in sample_indices("w", 777))
    assert sampled_hash("w", dtype, 777, samples) == sampled_hash_of("w", dtype, data)


def test_buffers_of_any_kind():
    data = counting(4000)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(10, 100).numpy()
    expected = sampled_hash_of("w", "F32", data)
    for kind in (bytearray(data), memoryview(data), memoryview(b"." + data)[1:], tensor.data):
        assert sampled_hash_of("w", "F32", kind) == expected
    assert sampled_hash_of("w", "F32", torch.empty(0, 3).numpy().data) == (
        sampled_hash_of("w", "F32", b"")
    )


def test_bytes_that_are_not_whole_elements_are_refused():
    with pytest.raises(InvalidData, match="whole elements of 4 bytes, found 7"):
        sampled_hash_of("w", "F32", bytes(7))
    with pytest.raises(InvalidData, match="expected 400 bytes, found 396"):
        sampled_hash("w", "F32", 1000, bytes(396))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.up.weight", "model.layers.11"),
        ("layers.0.experts.3.weight", "layers.0"),
        ("embeddings.word.weight", "embeddings.word"),
        ("0.weight", "0"),
        ("layers.11", "layers"),
        ("weight", "weight"),
        ("", ""),
    ],
)
def test_layers(name, layer):
    assert layer_of(name) == layer


def test_another_reader_made_from_the_description():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    name, numel = "layers.3.wéight", 5000
    seed = b"warmcast sampled hash 1\0" + name.encode()
    stream = hashlib.shake_128(seed).digest(800)
    taken = b""
    for i in range(100):
        draw = int.from_bytes(stream[8 * i : 8 * i + 8], "little")
        first, after = i * numel // 100, (i + 1) * numel // 100
        taken += raw(values[first + draw * (after - first) // 2**64].to(torch.float16))
    text = b"float\0" + str(numel).encode() + b"\0" + name.encode() + b"\0"
    expected = hashlib.sha256(text + taken).hexdigest()[:32]
    assert sampled_hash_of(name, "F32", raw(values)) == expected

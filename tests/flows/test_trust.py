"""Signed manifests: made at deploy time, asked for at run time."""

from __future__ import annotations

import base64
import json
import shlex
import stat
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from warmcast.flows.run import deploy
from warmcast.flows.steps.publish import Signing
from warmcast.loader import Loader
from warmcast.manifests.command import main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.origin import Origin
from warmcast.manifests.trust import (
    PublicKey,
    Trust,
    Untrusted,
    command_signer,
    key_signer,
    message,
    read,
    write,
)

LIMIT = Deadline.never()
REF = "model@prod"


def pem(key: object) -> bytes:
    return key.private_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def keys(folder: Path, seed: int) -> tuple[Path, Path]:
    """A private key and its public one, as files."""
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    private, public = folder / f"{seed}.key", folder / f"{seed}.pub"
    private.write_bytes(pem(key))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def signing(folder: Path, seed: int) -> Signing:
    private, public = keys(folder, seed)
    return Signing(key_signer(private), PublicKey.read(public))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"weight": torch.ones(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def load(origin: str, *trust: Path) -> str:
    with Loader(origin, trust=trust) as loader:
        with loader.skeleton():
            model = torch.nn.Linear(4, 4, bias=False)
        return loader.load(model, REF).manifest


def test_a_signed_manifest_loads(source: Path, tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    manifest = deploy(source, origin, REF, signing=signing(tmp_path, 1)).manifest
    _, mine = keys(tmp_path, 1)
    _, other = keys(tmp_path, 2)
    assert load(origin, mine) == manifest.digest
    assert load(origin, other, mine) == manifest.digest
    with pytest.raises(Untrusted, match="a signature by"):
        load(origin, other)


def test_an_unsigned_one_is_refused_and_can_be_signed_later(source: Path, tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    deploy(source, origin, REF)
    _, mine = keys(tmp_path, 1)
    with pytest.raises(Untrusted, match="found none"):
        load(origin, mine)
    assert not deploy(source, origin, REF, signing=signing(tmp_path, 1)).changed
    load(origin, mine)


def test_a_manifest_without_its_signature_is_never_named(source: Path, tmp_path: Path) -> None:
    def refuse(_text: bytes, _deadline: Deadline) -> bytes:
        raise WarmcastError("the key manager is away")

    _, public = keys(tmp_path, 1)
    origin = str(tmp_path / "origin")
    with pytest.raises(WarmcastError, match="is away"):
        deploy(source, origin, REF, signing=Signing(refuse, PublicKey.read(public)))
    assert list(Origin.open(origin).refs(LIMIT)) == []


def test_a_signature_of_something_else_is_not_kept(tmp_path: Path) -> None:
    private, public = keys(tmp_path, 1)
    store = Origin.open(str(tmp_path / "origin")).store
    signature = key_signer(private)(message("a" * 64), LIMIT)
    with pytest.raises(UsageError):
        write(store, "b" * 64, PublicKey.read(public), signature, LIMIT)
    assert read(store, "b" * 64, LIMIT) == {}


def test_a_signature_moved_to_another_manifest_is_none(source: Path, tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    first = deploy(source, origin, REF, signing=signing(tmp_path, 1)).manifest
    save_file({"weight": torch.zeros(4, 4)}, source / "model.safetensors")
    second = deploy(source, origin, REF).manifest
    folder = tmp_path / "origin" / "signatures"
    (folder / second.digest).mkdir()
    for file in (folder / first.digest).iterdir():
        (folder / second.digest / file.name).write_bytes(file.read_bytes())
    _, mine = keys(tmp_path, 1)
    with pytest.raises(Untrusted, match="found signatures by"):
        load(origin, mine)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 511))
def test_no_altered_signature_passes(bit: int) -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
    public = PublicKey._named(key.public_key())
    signature = bytearray(key.sign(message("a" * 64)))
    assert public.signed("a" * 64, bytes(signature))
    signature[bit // 8] ^= 1 << bit % 8
    assert not public.signed("a" * 64, bytes(signature))


def test_what_is_signed_is_pinned() -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
    assert PublicKey._named(key.public_key()).name == "34750f98bd59fcfc"
    assert key.sign(message("a" * 64)).hex()[:32] == PINNED


@pytest.mark.parametrize("text", ["raw", "base64"])
def test_a_command_signs(source: Path, tmp_path: Path, text: str) -> None:
    private, public = keys(tmp_path, 1)
    script = tmp_path / "sign"
    script.write_text(
        f"#!/usr/bin/env python3\n"
        f"import sys, base64\n"
        f"sys.path[:0] = {json.dumps(__import__('sys').path)}\n"
        f"from cryptography.hazmat.primitives.serialization import load_pem_private_key\n"
        f"key = load_pem_private_key(open({str(private)!r}, 'rb').read(), None)\n"
        f"made = key.sign(sys.stdin.buffer.read())\n"
        f"sys.stdout.buffer.write(made if {text!r} == 'raw' else base64.b64encode(made) + b'\\n')\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    origin = str(tmp_path / "origin")
    words = [__import__("sys").executable, str(script)]
    with pytest.raises(SystemExit) as end:
        main(
            [
                *("deploy", str(source), "--origin", origin, "--ref", REF),
                *("--sign-command", shlex.join(words), "--sign-public-key", str(public)),
            ]
        )
    assert end.value.code == 0
    load(origin, public)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["false"], "exit code 0"),
        (["echo", "abc"], "64 bytes"),
        (["/no/such/command"], "No such file"),
    ],
)
def test_commands_that_do_not_sign(words: list[str], said: str) -> None:
    with pytest.raises(WarmcastError, match=said):
        command_signer(words)(b"text", LIMIT)


def test_a_command_that_hangs_ends_with_the_deadline() -> None:
    with pytest.raises(WarmcastError, match="timed out"):
        command_signer(["sleep", "100"])(b"text", Deadline.after(0.2))


def test_keys_that_are_none(tmp_path: Path) -> None:
    rsa = tmp_path / "rsa"
    rsa.write_bytes(pem(generate_private_key(65537, 2048)))
    (tmp_path / "text").write_text("no key")
    for name in ("rsa", "text", "missing"):
        with pytest.raises(UsageError, match="key"):
            PublicKey.read(tmp_path / name)
        with pytest.raises(UsageError, match="key"):
            key_signer(tmp_path / name)
        with pytest.raises(UsageError, match="key"):
            Trust.read([tmp_path / name])


def test_signatures_that_are_garbage_are_passed_over(tmp_path: Path) -> None:
    store = Origin.open(str(tmp_path / "origin")).store
    good = base64.b64encode(b"x" * 64).decode()
    store.create(f"signatures/{'a' * 64}/one.json", b'{"signature":"%%%"}', LIMIT)
    store.create(f"signatures/{'a' * 64}/two.json", b'{"signature":"%s"}' % good.encode(), LIMIT)
    assert read(store, "a" * 64, LIMIT) == {"two": b"x" * 64}


PINNED = "782abc7832251019571e79e114ad2b2e"

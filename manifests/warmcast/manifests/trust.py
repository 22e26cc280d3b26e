"""Who deployed a manifest: Ed25519 signatures of its digest, kept beside it.

    signatures/<digest>/<key>.json    {"signature": base64 of 64 bytes}

``<key>`` is the beginning of the SHA-256 of the public key. What is signed is ``CONTEXT`` and the
digest, in ASCII: a signature made for this is good for nothing else. A ref is not signed: whoever
may write to the origin can point it at another manifest that was signed before.

Source: RFC 8032; keys as PEM (RFC 8410), as ``openssl genpkey -algorithm ed25519`` writes them.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import StringConstraints

from warmcast.manifests.canonical import canonical_json, parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    InvalidManifest,
    NotFound,
    UsageError,
    WarmcastError,
)
from warmcast.manifests.manifest import Record, parse_record
from warmcast.manifests.stores import ObjectStore

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

CONTEXT = b"warmcast manifest 1\n"

_NBYTES = 64
_COMMAND = 60.0
_LIMIT = 1 << 16

Signer = Callable[[bytes, Deadline], bytes]
"""Signs a message: 64 bytes."""


class Untrusted(WarmcastError):
    """A manifest that nobody whom we trust has signed."""


class _Signature(Record):
    signature: Annotated[str, StringConstraints(max_length=128)]


def message(digest: str) -> bytes:
    """What is signed of a manifest."""
    return CONTEXT + digest.encode("ascii")


def read(store: ObjectStore, digest: str, deadline: Deadline) -> Mapping[str, bytes]:
    """The signatures of a manifest, by the names of their keys; unchecked."""
    found = {}
    for info in store.list(f"signatures/{digest}/", deadline):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        try:
            data, _ = store.read(info.key, deadline, limit=_LIMIT)
        except NotFound:
            continue
        content = parse_json(data, f"signature {name}", InvalidManifest)
        text = parse_record(_Signature, content, f"signature {name}").signature
        try:
            found[name] = base64.b64decode(text, validate=True)
        except ValueError:
            continue
    return found


def write(
    store: ObjectStore, digest: str, key: PublicKey, signature: bytes, deadline: Deadline
) -> None:
    """Keep a signature, which has to be right."""
    if not key.signed(digest, signature):
        raise UsageError(
            "signature",
            expected=f"one of manifest {digest[:12]} by key {key.name}",
            found="another",
        )
    text = base64.b64encode(signature).decode("ascii")
    store.create(
        f"signatures/{digest}/{key.name}.json", canonical_json({"signature": text}), deadline
    )


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, and the name that signatures are kept under."""

    key: Ed25519PublicKey
    name: str

    @classmethod
    def read(cls, path: Path) -> PublicKey:
        """The public key in a PEM file; that of a private key, too."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )

        data = _pem(path)
        key: object
        try:
            key = serialization.load_pem_public_key(data)
        except ValueError:
            private = _private(data, path)
            key = private.public_key() if isinstance(private, Ed25519PrivateKey) else None
        if not isinstance(key, Ed25519PublicKey):
            raise UsageError(f"key {path}", expected="an Ed25519 key in PEM", found="another")
        return cls._named(key)

    @classmethod
    def _named(cls, key: Ed25519PublicKey) -> PublicKey:
        return cls(key, hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16])

    def signed(self, digest: str, signature: bytes) -> bool:
        """Whether a signature of a manifest is this key's."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.key.verify(signature, message(digest))
        except InvalidSignature:
            return False
        return True


def key_signer(path: Path) -> Signer:
    """Signs with the private key in a PEM file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = _private(_pem(path), path)
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key {path}", expected="an Ed25519 private key in PEM", found="another")

    def sign(text: bytes, _deadline: Deadline) -> bytes:
        return key.sign(text)

    return sign


def command_signer(words: Sequence[str]) -> Signer:
    """Signs by a command, a key manager's say: the message on its standard input, 64 bytes or
    their base64 on its output.
    """

    def sign(text: bytes, deadline: Deadline) -> bytes:
        limit = min(_COMMAND, deadline.remaining())
        name = words[0]
        try:
            done = subprocess.run(
                words, input=text, capture_output=True, timeout=limit, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as cause:
            raise WarmcastError(f"--sign-command {name}", found=cause) from cause
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise WarmcastError(
                f"--sign-command {name}",
                expected="exit code 0",
                found=f"{done.returncode}: {said[-1] if said else 'no word'}",
            )
        if len(done.stdout) == _NBYTES:
            return done.stdout
        try:
            made = base64.b64decode(done.stdout.strip(), validate=True)
        except ValueError:
            made = b""
        if len(made) != _NBYTES:
            raise WarmcastError(
                f"--sign-command {name}",
                expected="a signature of 64 bytes, or its base64",
                found=f"{len(done.stdout)} bytes",
            )
        return made

    return sign


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys that are trusted: one of them has to have signed."""

    keys: tuple[PublicKey, ...]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Trust:
        """Trust the keys in some PEM files. Raises :class:`UsageError`."""
        try:
            return cls(tuple(PublicKey.read(path) for path in paths))
        except ModuleNotFoundError as cause:
            raise UsageError(
                "trusted keys",
                expected=f"the package {cause.name!r}",
                found="it is not installed",
                do="pip install 'warmcast[trust]'",
            ) from cause

    def check(self, digest: str, signatures: Mapping[str, bytes]) -> str:
        """The name of a trusted key that signed a manifest. Raises :class:`Untrusted`."""
        for key in self.keys:
            signature = signatures.get(key.name)
            if signature is not None and key.signed(digest, signature):
                return key.name
        names = ", ".join(key.name for key in self.keys)
        raise Untrusted(
            f"manifest {digest}",
            expected=f"a signature by {names}",
            found=f"signatures by {', '.join(sorted(signatures))}" if signatures else "none",
            do="deploy it with --sign-key, or do not trust it",
        )


def _pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise UsageError(f"key {path}", expected="a PEM file", found=cause.strerror) from None


def _private(data: bytes, path: Path) -> object:
    from cryptography.hazmat.primitives import serialization

    try:
        return serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError) as cause:
        raise UsageError(f"key {path}", expected="a PEM key, not encrypted", found=cause) from None

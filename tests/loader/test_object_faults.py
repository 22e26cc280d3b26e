"""What a network and an object store do wrong while a model is loaded from them.

A fault that passes costs a reading more; one that stays ends the load with one error, by the
deadline, and neither threads nor host memory stay behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.loader.models import Bag
from tests.manifests.s3_proxy import (
    Exchange,
    Fault,
    Proxy,
    cut,
    error,
    flipped_answer,
    lost,
    refused,
    stall,
    with_answer,
    without,
)
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsRefused,
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreUnreachable,
    WarmcastError,
)
from warmcast.manifests.origin import blob_key
from warmcast.manifests.stores import http, open_store

SIZE = 17 << 20  # a chunk of a manifest, and a bit
ALWAYS = 40


@pytest.fixture
def file_url(proxy: Proxy, s3_url: str) -> str:
    """The origin of ``publish`` and ``loader``: here in a bucket, behind the proxy."""
    return s3_url


@pytest.fixture
def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)


Suffer = Callable[..., str]


@pytest.fixture
def suffer(proxy: Proxy, publish, weights: torch.Tensor) -> Suffer:
    """Deploys the weights and has the next reads of them suffer faults; the ref."""

    def run(*faults: Fault) -> str:
        deployed = publish({"weight": weights})
        bucket, _, prefix = deployed.url.removeprefix("s3://").partition("/")
        manifest = deployed.manifest
        key = blob_key(manifest.file[manifest.tensors[0].file].sha256)
        proxy.fail(f"GET /{bucket}/{prefix}/{key}?".encode(), *faults)
        return deployed.ref

    return run


def empty() -> Bag:
    return Bag({"weight": torch.empty(SIZE, dtype=torch.uint8)})


def nothing_goes_on() -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("warmcast-stream")]


ONCE: dict[str, tuple[Fault, ...]] = {
    "reset": (cut(300_000, by_reset=True), cut(0, by_reset=True)),
    "ended early": (cut(1_000_000, by_reset=False),),
    "not reached": (refused, lost),
    "500": (error("500 Internal Server Error", "InternalError"),),
    "503, come again": (error("503 Slow Down", "SlowDown", "Retry-After: 0"),) * 2,
    "wrong bytes": (flipped_answer,),
    "200 for 206": (without(b"Range"),) * 2,
    "another range": (with_answer(rb"content-range: [^\r]*", b"Content-Range: bytes 0-9/99"),),
    "no such object": (error("404 Not Found", "NoSuchKey"),),
}


@pytest.mark.parametrize("fault", ONCE)
def test_what_passes(suffer: Suffer, proxy: Proxy, loader, weights: torch.Tensor, fault: str):
    ref = suffer(*ONCE[fault])
    model = empty()
    report = loader(registry=None).load(model, ref)
    assert (report.route, report.verified) == ("origin", True)
    assert torch.equal(model.weight, weights)
    assert not proxy.faults, "the fault was suffered"


def test_silence_is_given_up_for_a_new_connection(
    suffer: Suffer, proxy: Proxy, loader, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    ref = suffer(stall(0), stall(500_000))
    monkeypatch.setattr(http, "IDLE", 0.5)
    model = empty()
    loader(registry=None).load(model, ref)
    assert torch.equal(model.weight, weights)
    assert not proxy.faults


STAYS: dict[str, tuple[Fault, type[WarmcastError], str]] = {
    "reset": (cut(0, by_reset=True), StoreUnreachable, r"blobs/sha256/\w\w/\w+.*5 times"),
    "500": (error("500 Internal Server Error", "InternalError"), StoreUnreachable, "500 Internal"),
    "503": (error("503 Slow Down", "SlowDown"), StoreUnreachable, "503 SlowDown, 5 times"),
    "503, come much later": (
        error("503 Slow Down", "SlowDown", "Retry-After: 3600"),
        DeadlineExceeded,
        "503 SlowDown",
    ),
    "403": (error("403 Forbidden", "AccessDenied"), CredentialsRefused, "AccessDenied"),
    "404": (error("404 Not Found", "NoSuchKey"), NotFound, r"blobs/sha256/\w\w/\w+"),
    "wrong bytes": (flipped_answer, IntegrityError, r"model\.safetensors at byte \d+ .*twice"),
    "200 for 206": (without(b"Range"), StoreError, "ignores the range"),
    "another version": (
        with_answer(rb"etag: [^\r]*", b'ETag: "another"'),
        PreconditionFailed,
        "another",
    ),
}


@pytest.mark.parametrize("fault", STAYS)
def test_what_stays(suffer: Suffer, loader, fault: str):
    act, kind, words = STAYS[fault]
    ref = suffer(*[act] * ALWAYS)
    model = empty()
    before = model.weight
    with pytest.raises(kind, match=words) as raised:
        loader(registry=None).load(model, ref)
    assert "\n" not in str(raised.value)
    assert model.weight is before
    nothing_goes_on()


def test_silence_ends_by_the_deadline(suffer: Suffer, loader):
    ref = suffer(*[stall(1000)] * ALWAYS)
    with pytest.raises(DeadlineExceeded):
        loader(registry=None, deadline=2.0).load(empty(), ref)
    nothing_goes_on()


def test_overwritten_while_it_is_read(suffer: Suffer, loader):
    """Bytes of two versions are never mixed: the object is not the one that was opened."""

    def overwritten(exchange: Exchange) -> None:
        target = exchange.request.split(b" ", 2)[1].decode().partition("?")[0].lstrip("/")
        bucket, _, key = target.partition("/")
        root, _, key = key.partition("/")
        store = open_store(f"s3://{bucket}/{root}")
        try:
            deadline = Deadline.after(30)
            info = store.head(key, deadline)
            assert info is not None
            store.replace(key, bytes(info.size), info.etag, deadline)
        finally:
            store.close()
        cut(0, by_reset=True)(exchange)

    ref = suffer(overwritten)
    with pytest.raises((PreconditionFailed, IntegrityError), match=r"blobs/sha256|at byte"):
        loader(registry=None).load(empty(), ref)
    nothing_goes_on()

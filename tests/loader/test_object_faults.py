"""What a network and an object store do wrong while a model is loaded from them.

A fault that passes costs a reading more; one that stays ends the load with one error, by the
deadline, and neither threads nor host memory stay behind.
"""

from __future__ import annotations

import re
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
    drip,
    error,
    flipped_answer,
    lost,
    refused,
    silence,
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


def shorter(nbytes: int) -> Fault:
    """The server is asked for so many bytes less, and says truly what it answers."""

    def fault(exchange: Exchange) -> None:
        def less(match: re.Match[bytes]) -> bytes:
            return b"%s%d" % (match[1], int(match[2]) - nbytes)

        asked = re.sub(rb"(range: bytes=\d+-)(\d+)", less, exchange.request, flags=re.IGNORECASE)
        assert asked != exchange.request
        exchange.client.sendall(exchange.forward(asked))

    return fault


def truncated(nbytes: int) -> Fault:
    """The body has so many bytes less than the range that the answer's head promises."""

    def fault(exchange: Exchange) -> None:
        head, end, body = exchange.forward(exchange.request).partition(b"\r\n\r\n")
        length = b"Content-Length: %d" % (len(body) - nbytes)
        head = re.sub(rb"content-length: \d+", length, head, flags=re.IGNORECASE)
        exchange.client.sendall(head + end + body[: len(body) - nbytes])

    return fault


def endless_drip(exchange: Exchange) -> None:
    """The body byte by byte for as long as the client listens: never silent, never done."""
    data = exchange.forward(exchange.request)
    body = data.index(b"\r\n\r\n") + 4
    pause = threading.Event()
    exchange.client.sendall(data[:body])
    for place in range(body, len(data)):
        pause.wait(0.05)
        exchange.client.sendall(data[place : place + 1])  # which fails when the client has gone


ONCE: dict[str, tuple[Fault, ...]] = {
    "reset": (cut(300_000, by_reset=True), cut(0, by_reset=True)),
    "reset in the middle, again and again": (cut(300_000, by_reset=True),) * 6,
    "ended early": (cut(1_000_000, by_reset=False),),
    "dripping": (drip,),
    "not reached": (refused, lost),
    "500": (error("500 Internal Server Error", "InternalError"),),
    "503, come again": (error("503 Slow Down", "SlowDown", "Retry-After: 0"),) * 2,
    "wrong bytes": (flipped_answer,),
    "200 for 206": (without(b"Range"),),
    "a shorter range": (shorter(1000),),
    "less than it says": (truncated(1000), truncated(100_000)),
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
    ref = suffer(silence, stall(0), stall(500_000))
    for patient in (http.Http.__init__, http.read_into):
        monkeypatch.setitem(patient.__kwdefaults__, "idle", 0.5)
    model = empty()
    loader(registry=None).load(model, ref)
    assert torch.equal(model.weight, weights)
    assert not proxy.faults


STAYS: dict[str, tuple[Fault, type[WarmcastError], str]] = {
    "reset": (cut(0, by_reset=True), StoreUnreachable, r"blobs/sha256/\w\w/\w+.*5 times"),
    "reset in the middle": (cut(1, by_reset=True), StoreUnreachable, "5 times"),
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
    "a shorter range": (shorter(1000), StoreError, r"bytes at offset \d+.*bytes \d+-\d+/"),
    "less than any": (truncated(1 << 20), StoreUnreachable, r"bytes.*5 times"),
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


@pytest.mark.parametrize(
    "fault", [silence, stall(1000), endless_drip], ids=["no answer", "stall", "drip"]
)
def test_slowness_ends_by_the_deadline(suffer: Suffer, loader, fault: Fault):
    ref = suffer(*[fault] * ALWAYS)
    model = empty()
    before = model.weight
    with pytest.raises(DeadlineExceeded) as raised:
        loader(registry=None, deadline=2.0).load(model, ref)
    assert "\n" not in str(raised.value)
    assert model.weight is before
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
    with pytest.raises(PreconditionFailed, match="blobs/sha256"):
        loader(registry=None).load(empty(), ref)
    nothing_goes_on()


@pytest.mark.parametrize("request_line", ["HEAD {blob}", "GET {ref}", "GET {manifest}"])
def test_on_the_way_to_the_bytes(
    proxy: Proxy, publish, loader, weights: torch.Tensor, request_line: str
):
    """What passes is passed over before the first range, too."""
    deployed = publish({"weight": weights})
    _, _, root = deployed.url.removeprefix("s3://").partition("/")
    sha256 = deployed.manifest.file[deployed.manifest.tensors[0].file].sha256
    line = request_line.format(
        blob=blob_key(sha256),
        ref="refs/model/test.json",
        manifest=f"manifests/sha256/{deployed.manifest.digest}.json",
    )
    method, key = line.split(" ")
    bucket = deployed.url.removeprefix("s3://").partition("/")[0]
    busy = error("503 Slow Down", "SlowDown", "Retry-After: 0")
    proxy.fail(f"{method} /{bucket}/{root}/{key}".encode(), refused, lost, busy)
    model = empty()
    assert loader(registry=None).load(model, deployed.ref).verified
    assert torch.equal(model.weight, weights)
    assert not proxy.faults

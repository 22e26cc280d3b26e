"""``warmcast bench stream`` on the CPU, with a checkpoint of some megabytes."""

from __future__ import annotations

import json
import socket
from importlib.metadata import EntryPoint
from urllib.parse import urlsplit

import pytest
import torch

from warmcast.infra.bench import stream
from warmcast.infra.bench.stream import http
from warmcast.infra.bench.stream.checkpoint import make
from warmcast.infra.bench.stream.child import reads_from
from warmcast.infra.bench.wire.models import shapes
from warmcast.infra.demo.channel import Ended
from warmcast.loader import Loader
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)
CPU = torch.device("cpu")


def test_each_loader_from_each_place():
    result = stream.run(CPU, 0.03, Deadline.after(100), scale=256).record()
    cases = {(case["loader"], case["where"]): case for case in result["cases"]}
    assert {place for loader, place in cases if loader == "warmcast"} == set(stream.PLACES)
    assert ("safetensors", "warm") in cases
    assert result["skipped"] == {}
    for case in cases.values():
        assert case["checked"], case
        assert case["seconds"] > 0
        assert case["bytes"] == shapes(30_000_000, scale=256)[0].nbytes
    found = result["progressive"]
    assert found["checked"]
    assert found["ratio"] == pytest.approx(
        found["first_output_seconds"] / max(found["load_seconds"], found["compute_seconds"]),
        rel=0.05,
    )
    assert 0 < found["first_layer"] <= 1
    if "disk_read_GBps" in result["limits"]:
        limit = result["limits"]["disk_read_GBps"]
        case = cases["warmcast", "cold"]
        assert case["ratio_to_limit"] == pytest.approx(case["GBps"] / limit, rel=0.05, abs=0.01)
    assert len(result["http_reads_GBps"]) == 3
    limit = result["limits"]["http_read_GBps"]
    assert limit == max(result["http_reads_GBps"].values()) > 0
    case = cases["warmcast", "http"]
    assert case["ratio_to_limit"] == pytest.approx(case["GBps"] / limit, rel=0.05, abs=0.01)
    assert case["cpu_seconds_per_gb"] > 0


@pytest.mark.parametrize(
    ("cause", "told", "code"),
    [
        (DeadlineExceeded("no time left while waiting"), "no time left while waiting", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_what_was_measured_is_told_when_the_rest_is_not(
    cause, told, code, tmp_path, monkeypatch, capsys
):
    def end(*_):
        raise cause

    def tiny(device, _, deadline, **given):
        return run(device, 0.001, deadline, scale=2048, **given)

    run = stream.run
    monkeypatch.setattr(stream, "_progressive", end)
    monkeypatch.setattr(stream, "run", tiny)
    file = tmp_path / "x.json"
    with pytest.raises(SystemExit) as ended:
        main(
            ["bench", "stream", "--where", "warm", "--device", "cpu", "--json", str(file)], [BENCH]
        )
    assert ended.value.code == code
    assert f"Not finished: {told}" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["unfinished"] == told
    assert "warmcast" in {case["loader"] for case in result["cases"]}


def test_the_file_has_what_was_measured_so_far(tmp_path, monkeypatch):
    """Its owner may be killed, or ended twice."""
    seen = []

    def tiny(device, _, deadline, **given):
        return run(device, 0.001, deadline, scale=2048, **given)

    def case(name, where, *given):
        if file.exists():
            found = json.loads(file.read_text())
            assert found["unfinished"] == stream.MEASURING
            seen.append([case["where"] for case in found["cases"]])
        return measure(name, where, *given)

    run, measure = stream.run, stream._case
    file = tmp_path / "x.json"
    monkeypatch.setattr(stream, "run", tiny)
    monkeypatch.setattr(stream, "_case", case)
    arguments = ["--where", "tmpfs,warm,cold", "--loaders", "warmcast", "--device", "cpu"]
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "stream", *arguments, "--json", str(file)], [BENCH])
    assert seen == [["tmpfs"], ["tmpfs", "warm"]]
    found = json.loads(file.read_text())
    assert {case["loader"] for case in found["cases"]} == {"warmcast"}
    assert found["unfinished"] is None
    assert found["progressive"]["checked"]


def test_what_ends_it_before_there_is_a_figure(monkeypatch):
    def end(*_):
        raise DeadlineExceeded("no time left while making")

    monkeypatch.setattr(stream, "make", end)
    with pytest.raises(DeadlineExceeded, match="while making"):
        stream.run(CPU, 0.001, Deadline.after(60), scale=2048)


def test_wrong_bytes_are_seen(tmp_path, monkeypatch):
    """A loader that is fast and wrong is reported as wrong."""
    shape = shapes(1, scale=2048)[0]
    checkpoint = make(tmp_path, shape, Deadline.after(60))
    path = checkpoint.files[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    result = stream.Result("cpu", {}, {})
    folder = tmp_path / "child"
    folder.mkdir()
    source = stream._Source.on_disk(checkpoint)
    case = stream._case("safetensors", "warm", source, shape, result, folder, Deadline.after(60))
    assert not case.checked


def test_a_server_ends_with_its_context(tmp_path):
    """Also where what is done with it fails; what it serves is the deployment."""
    shape = shapes(1, scale=2048)[0]
    deadline = Deadline.after(60)
    checkpoint = make(tmp_path, shape, deadline)
    folder = tmp_path / "child"
    folder.mkdir()
    with (
        pytest.raises(RuntimeError, match="a loader failed"),
        http.served(checkpoint, shape.ref, folder, deadline) as server,
    ):
        port = urlsplit(server.env["AWS_ENDPOINT_URL"]).port
        assert all(rate > 0 for rate in server.reads.values())
        raise RuntimeError("a loader failed")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_checkpoint_that_cannot_be_served(tmp_path):
    """The store finds that its bytes are not what the manifest says, and the server ends."""
    shape = shapes(1, scale=2048)[0]
    deadline = Deadline.after(60)
    checkpoint = make(tmp_path, shape, deadline)
    content = bytearray(checkpoint.files[0].read_bytes())
    content[-3] ^= 1
    checkpoint.files[0].write_bytes(content)
    folder = tmp_path / "child"
    folder.mkdir()
    with (
        pytest.raises(Ended, match="CRC32C"),
        http.served(checkpoint, shape.ref, folder, deadline),
    ):
        pass


def test_who_reads_where():
    assert reads_from("warmcast") == stream.PLACES
    assert reads_from("safetensors") == ("tmpfs", "warm", "cold"), "it cannot read from a server"
    assert reads_from("no_such_loader") == ()


def test_without_an_object_server(monkeypatch, capsys):
    """It is said, and everything else is measured."""
    monkeypatch.setattr(http, "_PACKAGES", ("no-such-package",))
    result = stream.run(CPU, 0.001, Deadline.after(100), where=["http"], scale=2048)
    assert result.record()["cases"] == []
    assert "http_read_GBps" not in result.limits
    result.print()
    assert "Not measured: http: the package 'no-such-package'" in capsys.readouterr().out


def test_the_checkpoint_is_a_deployment(tmp_path):
    shape = shapes(2_000_000, scale=2048)[0]
    assert shape.layers > 1
    checkpoint = make(tmp_path, shape, Deadline.after(60))
    assert len({file.sha256 for file in checkpoint.manifest.files}) == shape.layers
    with Loader(checkpoint.origin) as loader:
        with loader.skeleton():
            model = shape.build()
        assert loader.load(model, shape.ref).verified


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gb", "-1"), "--gb"),
        (("--deadline", "0"), "--deadline"),
        (("--device", "tpu"), "--device"),
        (("--where", "warm,tape"), "--where"),
        (("--loaders", "warmcast,floppy"), "--loaders"),
        (("--json", "/no/such/folder/x.json"), "no folder"),
        (("--device", "cpu", "--gb", "10000000"), "free"),
    ],
)
def test_refusals(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", "stream", *words], [BENCH])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1

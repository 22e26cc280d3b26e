"""The commands: what they print, and the exit code for each way to be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.run import deploy
from warmcast.manifests import Mesh
from warmcast.manifests.command import main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin, blob_key


@pytest.fixture
def safetensors(source):
    state = {f"layers.{i}.w": torch.ones(4, 4) for i in range(50)}
    save_file(state, source / "model.safetensors")
    return source


@pytest.fixture
def warmcast(capsys):
    """Runs a command in this process: its exit code, output, and errors."""

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_deploy_tells_what_it_did(warmcast, safetensors, file_url, tmp_path):
    (safetensors / "model.onnx").touch()
    words = ("deploy", safetensors, "--origin", file_url, "--ref", "m@a")
    code, out, err = warmcast(*words, "--json", tmp_path / "done.json")
    assert code == 0
    assert out.startswith("m@a: published: manifest ")
    assert "3 of 3 files moved" in out
    assert "read and upload: done" in err
    assert "note: model.onnx: another framework's weights" in err
    record = json.loads((tmp_path / "done.json").read_text())
    assert record["changed"] is True
    assert record["summary"] == out.strip()
    code, out, _ = warmcast(*words)
    assert (code, "nothing changed" in out, "0 of 3 files moved (0 B)" in out) == (0, True, True)


def test_origin_from_the_environment(warmcast, safetensors, file_url, monkeypatch):
    monkeypatch.setenv("WARMCAST_ORIGIN", file_url)
    assert warmcast("deploy", safetensors, "--ref", "m@a")[0] == 0
    assert warmcast("verify", "m@a")[0] == 0


def test_mesh(warmcast, safetensors, file_url, tmp_path):
    mesh = tmp_path / "mesh.json"
    mesh.write_text(json.dumps({"dimensions": {"tp": 2}, "plan": {"layers.*.w": "tp:0"}}))
    words = ("deploy", safetensors, "--origin", file_url, "--ref", "m@a", "--mesh", mesh)
    assert warmcast(*words)[0] == 0
    result = deploy(
        safetensors, file_url, "m@a", meshes=[Mesh.grid({"tp": 2}, {"layers.*.w": "tp:0"})]
    )
    assert not result.changed
    _, out, _ = warmcast("inspect", "m@a", "--origin", file_url)
    assert "layers.*.w tp:0" in out


def test_what_is_asked_for(warmcast, safetensors, file_url):
    (safetensors / "notes.txt").write_bytes(b"x")
    words = ("deploy", safetensors, "--origin", file_url, "--ref", "m@a", "--ref", "m@b")
    asked = (
        "--ignore", "*.txt", "--ignore", "tokenizer*", "--dtype", "bfloat16", "--keep-dtype",
        "layers.1.*", "--shard-by", "layer",
    )  # fmt: skip
    code, out, err = warmcast(*words, *asked)
    assert (code, "m@b: manifest" in out) == (0, True), err
    with Origin.open(file_url) as origin:
        manifest = origin.resolve("m@b", Deadline.after(10))
    assert not {"notes.txt", "tokenizer.json"} & set(manifest.file)
    assert len({tensor.file for tensor in manifest.tensors}) > 1
    assert manifest.tensor["layers.0.w"].dtype == "BF16"
    assert manifest.tensor["layers.1.w"].dtype == "F32"


def test_inspect(warmcast, safetensors, file_url, tmp_path):
    manifest = deploy(safetensors, file_url, "m@a").manifest
    (tmp_path / "manifest.json").write_bytes(manifest.data)
    shown = [
        warmcast("inspect", target, "--origin", file_url)
        for target in ("m@a", manifest.digest, tmp_path / "manifest.json")
    ]
    assert {code for code, _, _ in shown} == {0}
    assert len({out for _, out, _ in shown}) == 1
    out = shown[0][1]
    for part in (manifest.digest, "tokenizer.json", "layers.0.w", "4×4", "10 more; --all"):
        assert part in out
    assert "layers.49.w" not in out
    assert "layers.49.w" in warmcast("inspect", "m@a", "--origin", file_url, "--all")[1]


def test_inspect_of_a_file_that_is_no_manifest(warmcast, safetensors):
    code, _, err = warmcast("inspect", safetensors / "config.json")
    assert (code, err.count("\n")) == (1, 1)
    assert "schema" in err


def test_verify(warmcast, safetensors, file_url):
    manifest = deploy(safetensors, file_url, "m@a").manifest
    code, out, _ = warmcast("verify", "m@a", "--origin", file_url)
    assert (code, "every byte is right" in out) == (0, True)
    sha256 = manifest.file["tokenizer.json"].sha256
    (Path(file_url.removeprefix("file://")) / blob_key(sha256)).unlink()
    code, out, err = warmcast("verify", "m@a", "--origin", file_url)
    assert code == 1
    assert out == f"tokenizer.json: blob {sha256}: missing\n"
    assert err.splitlines()[-1].startswith("warmcast: m@a: expected 3 files as manifest")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("deploy {source} --ref m@a", 2, "give --origin or set WARMCAST_ORIGIN"),
        ("verify m@a", 2, "give --origin or set WARMCAST_ORIGIN"),
        ("inspect m@a", 2, "give --origin or set WARMCAST_ORIGIN"),
        ("deploy {source} --origin {url}", 2, "--ref"),
        ("deploy {source} --origin ftp://x --ref m@a", 2, "expected a URL of file://"),
        ("deploy {source} --origin {url} --ref m", 2, "expected model@name"),
        ("deploy {source}/nowhere --origin {url} --ref m@a", 2, "found nothing there"),
        ("deploy {source}/config.json --origin {url} --ref m@a", 2, "found a file"),
        ("deploy {source}/empty --origin {url} --ref m@a", 1, "found no file"),
        ("deploy {source} --origin {url} --ref m@a --max-shard-size 0", 2, "such as 5GB"),
        ("deploy {source} --origin {url} --ref m@a --max-shard-size 5XB", 2, "such as 5GB"),
        ("deploy {source} --origin {url} --ref m@a --deadline 0", 2, "more than 0 seconds"),
        ("deploy {source} --origin {url} --ref m@a --deadline nan", 2, "more than 0 seconds"),
        ("deploy {source} {source} --origin {url} --ref m@a", 2, "expected one source"),
        ("deploy --origin {url} --ref m@a", 2, "expected one source, or --file, found none"),
        (
            "deploy {source} --origin {url} --ref m@a --dtype int8",
            2,
            "--dtype: expected 'bfloat16'",
        ),
        ("deploy {source} --origin {url} --ref m@a --shard-by x", 2, "--shard-by: expected 'size'"),
        ("deploy {source} --origin {url} --ref m@a --keep-dtype x", 2, "a dtype for the others"),
        ("deploy {source} --origin {url} --ref m@a --merge {source}/no", 2, "a file of rules"),
        ("deploy {source} --origin {url} --ref m@a --allow !x", 2, "allow '!x'"),
        ("deploy {source} --origin {url} --ref m@a --allow *.txt", 1, "leaves 0 of"),
        ("deploy {source} --origin {url} --ref m@a --dask tcp://x:1", 2, "--flow with it"),
        ("deploy {source} --origin {url} --ref m@a --sign-public-key x", 2, "--sign-command"),
        ("deploy {source} --origin {url} --ref m@a --sign-key {source}/no", 2, "no"),
        ("deploy -f {source}/no", 2, "expected a YAML file"),
        ("deploy {source} --origin {url} --ref m@a --mesh {source}/no", 2, "a JSON file"),
        ("deploy {source} --origin {url} --ref m@a --mesh {source}/junk", 2, "expected JSON"),
        ("deploy {source} --origin {url} --ref m@a --mesh {source}/config.json", 2, "dimensions"),
        ("deploy {source} --origin {url} --ref m@a --json {source}/no/x", 2, "found no folder"),
        ("deploy {source} --origin {url} --ref m@a --work {source}/no", 2, "work folder"),
        ("verify other@a --origin {url}", 1, "nearest are m@a"),
        ("inspect m@b --origin {url}", 1, "nearest are m@a"),
        ("inspect nothing --origin {url}", 2, "model@name, a digest or a manifest's file"),
        ("verify m --origin {url}", 2, "expected model@name"),
        ("verify {digest} --origin {url}", 1, "manifests/sha256"),
        ("deploy {source} --origin s3://warmcast-none/x --ref m@a", 1, "expected credentials"),
    ],
)
def test_bad_input(warmcast, safetensors, file_url, words, code, error):
    (safetensors / "empty").mkdir()
    (safetensors / "junk").write_bytes(b"{")
    deploy(safetensors, file_url, "m@a")
    filled = words.format(source=safetensors, url=file_url, digest="0" * 64)
    found, _, err = warmcast(*filled.split())
    assert found == code, err
    last = err.splitlines()[-1]
    assert last.startswith("warmcast: ")
    assert error in last
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(Exception, match="WARMCAST_ORIGIN"):
        main(["verify", "m@a", "--debug"])


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("1.5KiB", 1536), ("77", 77), ("2M", 2 * 10**6)],
)
def test_sizes(text, nbytes):
    from warmcast.flows.config import parse_size

    assert parse_size(text, "--size") == nbytes


def test_inspect_and_verify_import_neither_torch_nor_prefect(safetensors, file_url):
    deploy(safetensors, file_url, "m@a")
    script = """
import sys
from warmcast.manifests.command import run
run(["inspect", "m@a", "--origin", sys.argv[1]])
run(["verify", "m@a", "--origin", sys.argv[1]])
assert not {"torch", "prefect", "safetensors"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, file_url], check=True, capture_output=True)


def test_names_cannot_command_the_terminal(warmcast, source, file_url):
    save_file({"\x1b[31mred[bold]": torch.ones(1)}, source / "model.safetensors")
    deploy(source, file_url, "m@a")
    code, out, _ = warmcast("inspect", "m@a", "--origin", file_url)
    assert (code, "\x1b" in out) == (0, False)
    assert r"\x1b[31mred[bold]" in out

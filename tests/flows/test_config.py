"""``warmcast.yaml``: what it says, what it cannot say, and what is done with it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.config import ConfigFile, read_config
from warmcast.flows.convert.options import ConvertOptions
from warmcast.manifests.command import main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError
from warmcast.manifests.origin import Origin, blob_key

FULL = """\
origin: s3://bucket/prefix
defaults:
  ignore: ["*.onnx"]
  convert: {dtype: bfloat16, keep_dtype: ["*norm*"]}
  refs: [staging, prod]
models:
  team/minilm:
    upstream: hf://org/minilm?xet=no
    revision: main
    allow: ["*.safetensors", "*.json"]
    convert: {max_shard_size: 2GB, keep_dtype: []}
    meshes:
      - {tp: 4, plan: transformers, presharded: true}
      - {dimensions: {pp: 2, tp: 2}, plan: {"*.w": "tp:0"}}
    refs: [prod, prod]
    sign: {key: keys/sign.pem}
  shards:
    upstream: ./checkpoint
    revision: r7
    ignore: []
    convert:
      merge: {shards: [a.pt, b.pt], rules: {"*": {concat: 0}}}
  adapter:
    upstream: s3://elsewhere/lora
    convert: {base: "llama@prod", dtype: null, keep_dtype: []}
    sign: {command: "sign --it", public_key: /keys/public.pem}
"""


def config(tmp_path: Path, text: str):
    (tmp_path / "warmcast.yaml").write_text(text, encoding="utf-8")
    return read_config(tmp_path / "warmcast.yaml")


def test_what_it_says(tmp_path):
    found = config(tmp_path, FULL)
    assert found.origin == "s3://bucket/prefix"
    minilm, shards, adapter = found.jobs.values()
    assert (minilm.source, minilm.revision) == ("hf://org/minilm@main?xet=no", None)
    assert minilm.refs == ("team/minilm@prod",)
    assert (minilm.allow, minilm.ignore) == (("*.safetensors", "*.json"), ("*.onnx",))
    assert minilm.convert.options() == ConvertOptions(dtype="bfloat16", max_shard_nbytes=2 * 10**9)
    four, grid = minilm.requests()
    assert (four.dimensions, four.plan, four.presharded) == ({"tp": 4}, "transformers", True)
    assert (grid.dimensions, grid.plan) == ({"pp": 2, "tp": 2}, {"*.w": "tp:0"})
    assert minilm.sign.key == str(tmp_path / "keys/sign.pem")
    assert (shards.source, shards.revision) == (str(tmp_path / "checkpoint"), "r7")
    assert (shards.refs, shards.ignore) == (("shards@staging", "shards@prod"), ())
    assert shards.convert.options().merge.stages[0].shards == ("a.pt", "b.pt")
    assert shards.convert.options().keep_dtype == ("*norm*",)
    assert adapter.convert.options() == ConvertOptions(base="llama@prod")
    assert adapter.sign.public_key == "/keys/public.pem"
    assert list(found.chosen(["adapter"])) == ["adapter"]
    with pytest.raises(UsageError, match="a model of team/minilm, shards, adapter"):
        found.chosen(["other"])


def test_the_schema_agrees(tmp_path):
    import yaml

    schema = ConfigFile.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(FULL), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"models": {"m": {"upstream": "x", "more": 1}}}, schema)


def model(lines: str) -> str:
    return "models:\n  m:\n    upstream: x\n" + "".join(f"    {x}\n" for x in lines.splitlines())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ": expected a mapping, found None"),
        ("[]", ": expected a mapping, found []"),
        ("{", ":1: expected YAML"),
        ("a: b: c", ":1: expected YAML"),
        ("a: !!python/object:os.system {}", ":1: expected YAML"),
        ("a: 2020-13-45", ": expected YAML"),
        ("\x00", ": expected YAML"),
        ("models: {}", ":1: models: expected "),
        ("models: {m: {}}", ":1: models.m.upstream: expected the field, found nothing"),
        ("models: {m: {upstream: x}, m: {upstream: y}}", ":1: m: expected each key once"),
        ("models: {m: {upstream: 1}}", ":1: models.m.upstream: expected a valid string, found 1"),
        ("models: {m: x}", ":1: models.m: expected a mapping, found 'x'"),
        ("models: {1: {upstream: x}}", "models.1.[key]: expected a valid string"),
        ("models: {m@x: {upstream: x}}", "models.m@x: ref: expected model@name"),
        (model("refs: [a/b]"), ":2: models.m: ref: expected model@name"),
        (model("refs: []"), ":4: models.m.refs: "),
        (model("refs: prod"), ":4: models.m.refs: expected a valid list, found 'prod'"),
        (model("reff: [prod]"), ":4: models.m.reff: expected no such field, found ['prod']; see"),
        (model("allow:\n  - 1"), ":5: models.m.allow.0: expected a valid string, found 1"),
        (model("convert: {dtype: int8}"), ":4: models.m.convert.dtype: expected 'bfloat16'"),
        (model("convert:\n  max_shard_size: 5XB"),
         ":5: models.m.convert.max_shard_size: expected a size such as 5GB, found '5XB'"),
        (model("convert: {max_shard_size: 0}"), "max_shard_size: expected greater"),
        (model("convert: {keep_dtype: [a]}"), ":2: models.m: keep dtype: expected a dtype"),
        (model("convert: {merge: no.json}"), "no.json: expected a file of rules"),
        (model("convert: {merge: {shards: [a]}}"), "merge: rules: expected rules by pattern"),
        (model("meshes: [{tp: 2, dimensions: {tp: 2}}]"),
         ":4: models.m.meshes.0: expected either tp or dimensions, found tp, dimensions"),
        (model("meshes: [{plan: {a: tp:0}}]"), "models.m.meshes.0: expected either tp or"),
        (model("meshes: [{tp: 0}]"), "models.m.meshes.0.tp: expected greater than or equal to 1"),
        (model("meshes: [{tp: 1000000}]"), "models.m.meshes.0: expected 65536 ranks at most"),
        (model("meshes: [{tp: 2, plan: other}]"), "models.m.meshes.0.plan: expected "),
        (model("sign: {}"), ":4: models.m.sign: expected either a key or a command, found neither"),
        (model("sign: {command: x}"), "models.m.sign: expected a public_key with a command"),
        (model("revision: {}"), "models.m.revision: expected a valid string"),
        ("models: {m: {upstream: hf://a/b@c, revision: d}}", "one revision of hf://a/b@c"),
        ("origin: 1\n" + model(""), ":1: origin: expected a valid string, found 1"),
        ("a: &a [*a, *a]\n", "values at most, found more"),
        ("a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
                               for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
         "values at most, found more"),
        ("x" * (1 << 21), "bytes at most, found more"),
        ("[" * 5000, "expected YAML"),
    ],
)  # fmt: skip
def test_what_it_cannot_say(tmp_path, text, words):
    with pytest.raises(UsageError) as caught:
        config(tmp_path, text)
    line = str(caught.value)
    assert words in line
    assert "\n" not in line
    assert line.startswith(str(tmp_path / "warmcast.yaml"))


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="expected a YAML file, found No such file"):
        read_config(tmp_path / "none.yaml")


@pytest.fixture
def warmcast(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        found = capsys.readouterr()
        return ended.value.code, found.out, found.err

    return call


@pytest.fixture
def file(source, file_url, tmp_path, monkeypatch):
    """Two models that can be deployed, and between them one that cannot."""
    save_file({"w": torch.arange(16.0).view(4, 4)}, source / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "warmcast.yaml"
    path.write_text(
        f"origin: {file_url}\n"
        "models:\n"
        "  first: {upstream: source, refs: [candidate, prod], meshes: [{tp: 2, plan: {w: tp:0}}]}\n"
        "  broken: {upstream: nowhere}\n"
        "  second: {upstream: source, ignore: [tokenizer.json], convert: {dtype: float16}}\n"
    )
    return path


def refs(url):
    with Origin.open(url) as origin:
        return {
            str(ref): origin.ref(ref, Deadline.after(10)).record.manifest
            for ref in origin.refs(Deadline.after(10))
        }


def test_deploy_all(warmcast, file, file_url, tmp_path):
    code, out, err = warmcast("deploy", "-f", file, "--json", tmp_path / "done.json")
    assert code == 1
    assert "warmcast: broken: source" in err
    assert err.splitlines()[-1] == (
        "warmcast: deploy: expected every model deployed, found broken failed"
    )
    assert "of 3 models 2 published, 0 as they were, 1 failed (broken)" in out
    found = refs(file_url)
    assert set(found) == {"first@candidate", "first@prod", "second@prod"}
    assert found["first@candidate"] == found["first@prod"]
    with Origin.open(file_url) as origin:
        first = origin.manifest(found["first@prod"], Deadline.after(10))
        second = origin.manifest(found["second@prod"], Deadline.after(10))
    assert first.layouts[0].mesh.plan == {"w": "tp:0"}
    assert second.tensors[0].dtype == "F16"
    assert "tokenizer.json" not in second.file
    record = json.loads((tmp_path / "done.json").read_text())
    assert list(record["models"]) == ["first", "second"]
    assert list(record["failed"]) == ["broken"]
    assert record["models"]["first"]["other_refs"] == [
        {"ref": "first@prod", "before": None, "changed": True}
    ]
    code, out, _ = warmcast("deploy", "-f", file, "second", "first")
    assert code == 0
    assert "of 2 models 0 published, 2 as they were; 0 B moved" in out


def test_deploy_of_a_file_takes_no_other_options(warmcast, file):
    for words in (("--ref", "m@a"), ("--allow", "*"), ("--dtype", "float16"), ("--dequantise",)):
        code, _, err = warmcast("deploy", "-f", file, *words)
        assert (code, f"{words[0]}: expected it in the file" in err) == (2, True)
    assert "a model of first, broken, second" in warmcast("deploy", "-f", file, "third")[2]


def test_plan(warmcast, file, file_url, tmp_path):
    file.write_text(file.read_text().replace("  broken: {upstream: nowhere}\n", ""))
    code, out, err = warmcast("plan", "-f", file)
    assert (code, err) == (0, "")
    assert "first@candidate: nothing → a new manifest" in out
    assert "to move perhaps" in out
    assert "become safetensors" in out
    assert not Path(file_url.removeprefix("file://")).exists()
    assert warmcast("deploy", "-f", file, "first")[0] == 0
    before = refs(file_url)
    code, out, _ = warmcast("plan", "-f", file, "first", "--json", tmp_path / "plan.json")
    assert f"first@prod: {before['first@prod'][:12]} → perhaps a new manifest" in out
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["models"]["first"]["refs"][0]["now"] == before["first@candidate"]
    assert refs(file_url) == before


def test_plan_of_what_cannot_be_deployed(warmcast, file):
    code, out, err = warmcast("plan", "-f", file)
    assert (code, "failed   source" in out) == (1, True)
    assert err == "warmcast: plan: expected models that can be deployed, found broken\n"


def test_plan_of_an_upstream_that_publishes_checksums(warmcast, file, file_url, s3_url, tmp_path):
    """Nothing is read to know what moves; a deploy later, nothing would."""
    from warmcast.flows.run import deploy

    deploy(tmp_path / "source", file_url, "m@a")
    with Origin.open(file_url) as origin, Origin.open(s3_url) as elsewhere:
        manifest = origin.resolve("m@a", Deadline.after(10))
        for entry in manifest.files:
            data = (tmp_path / "source" / entry.path).read_bytes()
            elsewhere.store.create(entry.path, data, Deadline.after(10))
    file.write_text(f"origin: {file_url}\nmodels:\n  s3: {{upstream: '{s3_url}'}}\n")
    code, out, _ = warmcast("plan", "-f", file)
    assert code == 0
    assert "3 to move" in out
    assert warmcast("deploy", "-f", file)[0] == 0
    code, out, _ = warmcast("plan", "-f", file)
    now = refs(file_url)["s3@prod"][:12]
    assert f"s3@prod: {now}, stays" in out
    assert "0 of 1 models would change, 0 B to move" in out
    blob = Path(file_url.removeprefix("file://")) / blob_key(manifest.file["config.json"].sha256)
    blob.unlink()
    out = warmcast("plan", "-f", file)[1]
    assert "1 to move" in out
    assert f"s3@prod: {now} → a new manifest" in out


def test_schema(warmcast):
    code, out, _ = warmcast("plan", "--schema")
    assert (code, json.loads(out)["title"]) == (0, "ConfigFile")

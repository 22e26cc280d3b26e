"""The flows against a real Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import kubernetes_validate
import pytest
import torch
import yaml
from safetensors.torch import save, save_file

from tests.flows.hub import Web
from warmcast.flows.errors import DeployError, NoWeights, SourceUnreachable
from warmcast.flows.runner import Ticker
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    InvalidData,
    StoreError,
    StoreUnreachable,
    UsageError,
)
from warmcast.manifests.origin import Origin

ROOT = Path(__file__).parents[2]

# Prefect's own server and client, not we, use what their dependencies have deprecated, and leave
# an event queue to the garbage collector when the test server stops.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:prefect"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def deploy_flow(prefect_server):
    from warmcast.flows.prefect.deploy import deploy_flow

    return deploy_flow


@pytest.fixture
def client(prefect_server):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture
def web(monkeypatch):
    """A web server with a model at ``/m/``."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    opened = Web()
    opened.put("/m/config.json", b"{}")
    opened.put("/m/model.safetensors", save({"w": torch.arange(16.0).view(4, 4)}))
    yield opened
    opened.close()


def artifacts(client):
    """The last artifact of each key."""
    found = sorted(client.request("POST", "/artifacts/filter", json={}).json(),
                   key=lambda a: a["created"])  # fmt: skip
    return {artifact["key"]: artifact for artifact in found}


def task_runs(client):
    return client.request("POST", "/task_runs/filter", json={"limit": 200}).json()


def test_flow(deploy_flow, client, source, file_url, work):
    torch.save(
        {"layers.0.w": torch.arange(16.0).view(4, 4), "norm": torch.ones(3)}, source / "weights.pt"
    )
    options = {
        "work": str(work),
        "meshes": [{"dimensions": {"tp": 2}, "plan": {"*.w": "tp:0"}, "presharded": True}],
        "convert": {"dtype": "float16", "max_shard_size": "1MB"},
        "ignore": ["*.txt"],
    }
    first = deploy_flow(str(source), file_url, ["m@a", "m@b"], **options)
    assert first["changed"] is True
    assert first["other_refs"] == [{"ref": "m@b", "before": None, "changed": True}]
    found = artifacts(client)
    table = found["warmcast-deploy-m-a"]
    assert table["description"] == first["summary"]
    rows = {row["file"]: row["moved"] for row in json.loads(table["data"])}
    assert len(rows) == 5
    assert set(rows.values()) == {"yes"}
    assert first["manifest"] in found["warmcast-manifest-m-a"]["data"]
    stages = {row["stage"]: row for row in json.loads(found["warmcast-stages-m-a"]["data"])}
    assert {"convert", "read and upload", "lay out for 2 ranks", "the rest"} <= set(stages)
    names = {run["name"] for run in task_runs(client)}
    assert {"mirror config.json", "mirror model.safetensors", "mirror tokenizer.json"} <= names
    with Origin.open(file_url) as origin:
        manifest = origin.resolve("m@b", Deadline.after(10))
    assert {tensor.dtype for tensor in manifest.tensors} == {"F16"}
    second = deploy_flow(str(source), file_url, ["m@a", "m@b"], **options)
    assert (second["changed"], second["moved_files"]) == (False, 0)


def test_flow_that_fails_says_why(deploy_flow, source, file_url, caplog):
    with pytest.raises(NoWeights, match="top folder"):
        deploy_flow(str(source), file_url, ["m@a"])
    assert "Traceback" not in caplog.text


def test_one_failed_file_ends_the_others(deploy_flow, source, file_url):
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source.parent / "store").write_bytes(b"")
    with pytest.raises(StoreError, match="folders above it"):
        deploy_flow(str(source), file_url, ["m@a"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"convert": {"dtype": "int8"}},
        {"convert": {"more": 1}},
        {"meshes": [{"tp": 2, "dimensions": {"tp": 2}}]},
        {"sign": {}},
        {"refs": "m@a"},
        {"deadline_s": "soon"},
    ],
)
def test_parameters_are_validated(deploy_flow, wrong):
    from prefect.exceptions import ParameterTypeError

    given = {"source": "x", "origin": "file:///x", "refs": ["m@a"]} | wrong
    with pytest.raises(ParameterTypeError, match=next(iter(wrong))):
        deploy_flow.validate_parameters(given)


def test_signed(deploy_flow, source, file_url, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from warmcast.manifests.trust import PublicKey, read

    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    key = Ed25519PrivateKey.generate().private_bytes(*plain, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(key)
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    done = deploy_flow(str(source), file_url, ["m@a"], sign={"key": str(tmp_path / "key.pem")})
    with Origin.open(file_url) as origin:
        signatures = read(origin.store, done["manifest"], Deadline.after(10))
    assert set(signatures) == {PublicKey.read(tmp_path / "key.pem").name}


def test_from_the_command_line(prefect_server, client, capsys, source, file_url, tmp_path):
    """The models of a file, each a run."""
    from warmcast.manifests.command import main

    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    config = tmp_path / "warmcast.yaml"
    config.write_text("models: {a: {upstream: source}, b: {upstream: none}, c: {upstream: source}}")
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "--flow", "-f", str(config), "--origin", file_url, "--deadline", "60"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert "of 3 models 2 published, 0 as they were, 1 failed (b)" in out
    assert "warmcast: b: source" in err
    assert {"warmcast-deploy-a-prod", "warmcast-deploy-c-prod"} <= set(artifacts(client))


# Retries


def in_a_flow(function, items, retries=2, deadline=None):
    """Map a function over items as tasks of a flow; what came of it."""
    from prefect import flow

    from warmcast.flows.prefect.limits import Limit
    from warmcast.flows.prefect.tasks import Retries, Tasks

    limit = deadline or Deadline.after(60)

    @flow(persist_result=False)
    def mapping():
        ticker = Ticker(limit, lambda _: None)
        tasks = Tasks(ticker, limit, Retries(retries, 0.0), Limit(None, limit))
        return tasks.map("try {this}", function, items, str)

    return mapping()


@pytest.mark.parametrize("error", [StoreUnreachable, SourceUnreachable, ConnectionResetError])
def test_what_can_pass_is_tried_again(prefect_server, error):
    calls = []

    def twice(item):
        calls.append(item)
        if calls.count(item) < 3:
            raise error("gone for now")
        return item * 10

    assert in_a_flow(twice, [1, 2]) == [10, 20]
    assert sorted(calls) == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("error", [UsageError, InvalidData, StoreError, DeadlineExceeded])
def test_what_cannot_pass_is_not(prefect_server, error):
    calls = []

    def fail(item):
        calls.append(item)
        raise error("for ever")

    with pytest.raises(error, match="for ever"):
        in_a_flow(fail, [1])
    assert calls == [1]


def test_what_does_not_pass_ends(prefect_server):
    calls = []

    def fail(item):
        calls.append(item)
        raise StoreUnreachable("for ever")

    with pytest.raises(StoreUnreachable, match="for ever"):
        in_a_flow(fail, [1], retries=1)
    assert calls == [1, 1]


def test_a_flow_that_is_ended_leaves_nothing(prefect_server, web, file_url, work):
    """By SIGTERM, as a worker sends it to cancel a run."""
    asked, go_on = threading.Event(), threading.Event()
    web.put("/m/pytorch_model.bin", b"to be fetched into the work folder")
    web.files.pop("/m/model.safetensors")
    answer = web.answer

    def held(request):
        if request.method == "GET" and request.path == "/m/pytorch_model.bin":
            asked.set()
            go_on.wait(60)
        return answer(request)

    web.answer = held
    source = f"{web.url}/m/#files=config.json,pytorch_model.bin"
    process = subprocess.Popen(
        [sys.executable, "-m", "warmcast.manifests", "deploy", source, "--flow", "--ref", "m@a",
         "--origin", file_url, "--work", str(work)],
        env={**os.environ, "PREFECT_API_URL": prefect_server}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert asked.wait(60)
        process.terminate()
        go_on.set()  # a server that is silent for 10 s would be given up, too
        _, told = process.communicate(timeout=60)
    finally:
        go_on.set()
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert not list(work.iterdir())
    with Origin.open(file_url) as origin:
        assert not list(origin.refs(Deadline.after(10)))


# Limits and secrets


def test_limit_of_an_upstream(deploy_flow, client, web, file_url, work):
    """Its one slot is taken: no file is asked for, and it is waited for until the deadline."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    web.put("/m/x.txt", b"x")
    asked = []
    answer = web.answer
    web.answer = lambda request: asked.append((request.method, request.path)) or answer(request)
    name = "warmcast-http-127.0.0.1"
    client.create_global_concurrency_limit(
        GlobalConcurrencyLimitCreate(name=name, limit=1, active_slots=1)
    )
    source = f"{web.url}/m/#files=config.json,model.safetensors,x.txt"
    try:
        with pytest.raises(DeadlineExceeded, match=f"no slot of the concurrency limit '{name}'"):
            deploy_flow(source, file_url, ["m@a"], work=str(work), deadline_s=1.5)
    finally:
        client.delete_global_concurrency_limit_by_name(name)
    assert ("GET", "/m/x.txt") not in asked
    assert deploy_flow(source, file_url, ["m@a"], work=str(work))["moved_files"] == 3
    assert ("GET", "/m/x.txt") in asked


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("./folder", None),
        ("file:///folder", None),
        ("hf://org/repo@main", "warmcast-hf-huggingface.co"),
        ("hf://org/repo?endpoint=https://hub.local:1/x", "warmcast-hf-hub.local"),
        ("s3://Bucket_1/x", "warmcast-s3-bucket-1"),
        ("https://user@Example.com:8443/x/", "warmcast-https-example.com"),
    ],
)
def test_names_of_limits(prefect_server, source, name):
    from warmcast.flows.prefect.limits import limit_name

    assert limit_name(source) == name


def test_secrets(client, monkeypatch):
    from prefect.blocks.system import Secret

    from warmcast.flows.prefect.secrets import in_environment

    Secret(value="hush").save("warmcast-test", overwrite=True)
    monkeypatch.setenv("WARMCAST_A", "before")
    with in_environment({"WARMCAST_A": "warmcast-test", "WARMCAST_B": "warmcast-test"}):
        assert (os.environ["WARMCAST_A"], os.environ["WARMCAST_B"]) == ("hush", "hush")
    assert (os.environ["WARMCAST_A"], "WARMCAST_B" in os.environ) == ("before", False)
    with (
        pytest.raises(UsageError, match="expected a Secret block 'none-such', found none"),
        in_environment({"WARMCAST_A": "none-such"}),
    ):
        pass


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hush@host/m/",
        "https://hush@host/m/",
        "https://host/m/?X-Amz-Signature=hush",
        "https://host/m/?sig=hush",
        "s3://bucket/x?access_token=hush",
    ],
)
def test_urls_with_credentials_are_refused(prefect_server, url):
    from warmcast.flows.prefect.secrets import check_plain

    with pytest.raises(UsageError, match="a URL without credentials") as caught:
        check_plain(url, "source")
    assert "hush" not in str(caught.value)


def test_urls_without(prefect_server):
    from warmcast.flows.prefect.secrets import check_plain

    for url in ("./a@b", "hf://org/repo@main", "s3://bucket/x?endpoint=http://h:1&region=r"):
        check_plain(url, "source")


def test_a_flow_refuses_them(deploy_flow, file_url):
    with pytest.raises(UsageError, match="source: expected a URL without"):
        deploy_flow("https://host/m/?sig=hush", file_url, ["m@a"])


# Schedules


def test_mirror(prefect_server, client, web, file_url, tmp_path):
    from warmcast.flows.prefect.mirror import mirror_flow

    config = tmp_path / "warmcast.yaml"
    config.write_text(
        f"origin: {file_url}\nmodels:\n  m: {{upstream: '{web.url}/m/', refs: [prod]}}\n"
    )
    first = mirror_flow(str(config))["m"]
    assert (first["changed"], first["moved_bytes"] > 0) == (True, True)
    with Origin.open(file_url) as origin:
        assert [str(ref) for ref in origin.refs(Deadline.after(10))] == ["m@candidate"]
    read = []
    answer = web.answer
    web.answer = lambda request: (
        (read.append(request.path) if request.method == "GET" else None) or answer(request)
    )
    again = mirror_flow(str(config))["m"]
    assert (again["changed"], again["manifest"]) == (False, first["manifest"])
    assert "/m/model.safetensors" not in read
    assert artifacts(client)["warmcast-mirror"]["description"].startswith("of 1 models 0 published")
    web.put("/m/model.safetensors", save({"w": torch.zeros(4, 4)}))
    third = mirror_flow(str(config))["m"]
    assert third["changed"]
    assert third["manifest"] != first["manifest"]
    config.write_text(config.read_text() + "  broken: {upstream: ./nowhere}\n")
    with pytest.raises(DeployError, match="broken failed"):
        mirror_flow(str(config))
    rows = json.loads(artifacts(client)["warmcast-mirror"]["data"])
    assert {row["model"]: row["state"].split(":")[0] for row in rows} == {
        "m": "nothing new", "broken": "failed",
    }  # fmt: skip


def test_gc(prefect_server, client, source, file_url):
    from warmcast.flows.prefect.gc import gc_flow
    from warmcast.flows.run import deploy

    for value in (1.0, 2.0):
        save_file({"w": torch.full((3,), value)}, source / "model.safetensors")
        deploy(source, file_url, "m@a")
    found = gc_flow(file_url, history=0)
    assert (found["dry_run"], found["kept_manifests"]) == (True, 2)
    assert artifacts(client)["warmcast-gc"]["description"]


# What operators register


@pytest.fixture
def work_pool(client):
    """The work pool of infra/prefect, as the server takes it."""
    from prefect.client.schemas.actions import WorkPoolCreate

    template = json.loads((ROOT / "infra/prefect/kubernetes.json").read_text())
    return client.create_work_pool(
        WorkPoolCreate(name="warmcast", type="kubernetes", base_job_template=template)
    )


def test_deployments(prefect_server, client, work_pool):
    """``prefect deploy --all`` takes prefect.yaml, and what it registers can run."""
    from prefect.flows import load_flow_from_entrypoint

    subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        check=True, cwd=ROOT, capture_output=True, timeout=120,
        env={**os.environ, "PREFECT_API_URL": prefect_server, "DO_NOT_TRACK": "1"},
    )  # fmt: skip
    found = {d["name"]: d for d in client.request("POST", "/deployments/filter", json={}).json()}
    assert set(found) == {"deploy-on-trigger", "mirror", "gc"}
    for deployment in found.values():
        assert str(ROOT) not in json.dumps(deployment)
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        extra = {"source": "x", "refs": ["m@a"]} if flow.name == "warmcast-deploy" else {}
        flow.validate_parameters(deployment["parameters"] | extra)
    assert [s["schedule"]["cron"] for s in found["mirror"]["schedules"]] == ["17 * * * *"]
    (automation,) = client.request("POST", "/automations/filter", json={}).json()
    assert automation["trigger"]["expect"] == ["warmcast.deploy"]


def test_jobs_of_the_work_pool(prefect_server):
    """What the template makes of its defaults is a Job that Kubernetes takes."""
    from prefect.utilities.templating import apply_values

    template = json.loads((ROOT / "infra/prefect/kubernetes.json").read_text())
    values = {
        name: variable["default"]
        for name, variable in template["variables"]["properties"].items()
        if "default" in variable
    }
    values |= {"name": "warmcast-deploy", "labels": {}, "env": [{"name": "A", "value": "1"}]}
    values |= {"command": ["prefect", "flow-run", "execute"]}
    job = apply_values(template["job_configuration"], values)["job_manifest"]
    assert "{{" not in json.dumps(job)
    kubernetes_validate.validate(job, "1.31", strict=True)


def test_the_workflow_of_ci():
    workflow = yaml.safe_load((ROOT / "infra/ci/deploy.yaml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    run = next(step["run"] for step in steps if "--watch" in step.get("run", ""))
    flow, name = run.split()[3].split("/")
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert name in {deployment["name"] for deployment in deployments}
    assert flow == "warmcast-mirror"

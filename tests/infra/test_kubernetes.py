"""The Kubernetes manifests: what the schemas cannot see, and what they are there to find."""

from __future__ import annotations

import base64
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml

from infra.kubernetes import check
from warmcast.infra import servers
from warmcast.loader import environment
from warmcast.loader.errors import RegistryUnavailable
from warmcast.loader.registry import Presence, Registry, mailbox
from warmcast.manifests.deadline import Deadline

EXAMPLE = check.HERE / "example"
DOCUMENTS = check.render(EXAMPLE)
PODS = {
    d["metadata"]["name"]: d["spec"]["template"]
    for d in DOCUMENTS
    if "template" in d.get("spec", {})
}
README = (check.HERE / "README.md").read_text()

# What the agent and `warmcast prefetch` are told, and whose file a worker's settings are.
NODE = {
    *("WARMCAST_CACHE", "WARMCAST_CACHE_HIGH", "WARMCAST_CACHE_LOW", "WARMCAST_ORIGIN"),
    *("WARMCAST_REGISTRY", "WARMCAST_NODE", "WARMCAST_LISTEN", "WARMCAST_ADVERTISE"),
    *("WARMCAST_FLEET_KEY_FILE", "WARMCAST_TLS_CERT", "WARMCAST_TLS_KEY", "WARMCAST_TLS_CA"),
    *("WARMCAST_BACKGROUND_RATE", "WARMCAST_NODE_NAME"),
}
WORKER = set(re.findall(r"^WARMCAST_\w+", environment.__doc__ or "", re.MULTILINE))

KUBECTL = shutil.which("kubectl") or ""
needs_kubectl = pytest.mark.skipif(not KUBECTL, reason="needs kubectl")
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")


def of(kind: str) -> dict[str, dict[str, Any]]:
    """The documents of a kind, by name."""
    return {d["metadata"]["name"]: d for d in DOCUMENTS if d["kind"] == kind}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


ALL = [
    pytest.param(pod, container, id=f"{name}-{container['name']}")
    for name, pod in PODS.items()
    for container in containers(pod)
]


# The check


def test_the_manifests_pass() -> None:
    assert check.main([]) == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("agent.yaml", "maxUnavailable:", "maxUnavailible:", "maxUnavailible"),
        ("agent.yaml", "failureThreshold: 60", 'failureThreshold: "60"', "not of type 'integer'"),
        ("agent.yaml", "kind: DaemonSet", "kind: DemonSet", "DemonSet"),
        ("agent.yaml", "apps/v1", "extensions/v1beta1", "extensions/v1beta1"),
        ("registry.yaml", "replicas: 1", "replicas: 1\n  replicas: 2", "each key once"),
        ("registry.yaml", "kind: Service", "sort: Service", "apiVersion and kind"),
        ("registry.yaml", "\nspec:\n", "\nspec: [\n", "registry.yaml"),
        ("kustomization.yaml", "  - registry.yaml\n", "", "expected to be listed"),
        ("kustomization.yaml", "  - registry.yaml", "  - register.yaml", "No such file"),
        ("kustomization.yaml", "resources:", "namePrefix: a\nresources:", "namePrefix"),
    ],
)
def test_a_manifest_that_is_broken(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    message: str,
) -> None:
    folder = shutil.copytree(check.HERE / "base", tmp_path / "base")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    assert check.main([str(folder)]) == 1
    assert message in capsys.readouterr().err


@needs_kubectl
@pytest.mark.parametrize("folder", check.FOLDERS, ids=lambda folder: folder.name)
def test_kustomize_renders_the_same(folder: Path) -> None:
    text = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], check=True, capture_output=True, timeout=60
    ).stdout

    def key(document: dict[str, Any]) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    assert sorted(yaml.safe_load_all(text), key=key) == sorted(check.render(folder), key=key)


# What one manifest says about another


def test_mounts_and_volumes_meet() -> None:
    for pod in PODS.values():
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        mounts = {m["name"] for c in containers(pod) for m in c.get("volumeMounts", ())}
        assert sorted(mounts) == sorted(volumes)


def test_what_is_mounted_and_read_exists() -> None:
    created = secrets_of_the_readme()
    maps = {name: set(document["data"]) for name, document in of("ConfigMap").items()}
    for pod in PODS.values():
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] in created
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
        for container in containers(pod):
            for source in container.get("envFrom", ()):
                if "secretRef" in source:
                    assert source["secretRef"]["name"] in created
                else:
                    assert source["configMapRef"]["name"] in maps
            for variable in container.get("env", ()):
                if key := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert key["key"] in created[key["name"]]
        assert pod["spec"].get("serviceAccountName", "warmcast-agent") in of("ServiceAccount")


def test_files_that_variables_name_are_mounted() -> None:
    created = secrets_of_the_readme()
    pod = PODS["warmcast-agent"]
    (agent,) = pod["spec"]["containers"]
    secrets = {
        v["name"]: v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v
    }
    mounts = {m["mountPath"]: m["name"] for m in agent["volumeMounts"]}
    files = [v["value"] for v in agent["env"] if v.get("value", "").startswith("/etc/")]
    assert len(files) == 4
    for file in files:
        folder, _, name = file.rpartition("/")
        assert name in created[secrets[mounts[folder]]]


def test_agent_and_workers_share_the_folders() -> None:
    def folders(name: str) -> dict[str, str]:
        pod = PODS[name]["spec"]
        paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
        mounts = pod["containers"][0]["volumeMounts"]
        return {m["mountPath"]: paths[m["name"]] for m in mounts if m["name"] in paths}

    assert folders("minilm") == folders("warmcast-agent")
    for container in containers(PODS["minilm"]):
        for mount in container["volumeMounts"]:
            if mount["mountPath"] in folders("minilm"):
                assert mount["readOnly"]
    users = {
        PODS[name]["spec"]["securityContext"]["runAsUser"] for name in ("minilm", "warmcast-agent")
    }
    assert len(users) == 1


@pytest.mark.parametrize(("pod", "container"), ALL)
def test_variables_are_known(pod: dict[str, Any], container: dict[str, Any]) -> None:
    maps = of("ConfigMap")
    names = {
        name
        for source in container.get("envFrom", ())
        if "configMapRef" in source
        for name in maps[source["configMapRef"]["name"]]["data"]
    }
    used = " ".join(container.get("command", ()))
    for variable in container.get("env", ()):
        # Kubernetes puts in what stands before, and leaves the rest as it is written.
        for name in re.findall(r"\$\((\w+)\)", variable.get("value", "")):
            assert name in names
            used += f" ${name}"
        assert variable["name"] not in names
        names.add(variable["name"])
    known = (
        NODE | WORKER if container["image"].endswith(("/worker:1", "/warmcast:0.1.0")) else set()
    )
    for name in names - known:
        assert name.startswith("AWS_") or re.search(rf"\${name}\b", used), name


def test_urls_lead_to_services() -> None:
    seen = 0
    for pod in PODS.values():
        for variable in (v for c in containers(pod) for v in c.get("env", ())):
            if "://" in variable.get("value", ""):
                url = urlsplit(variable["value"])
                service = of("Service")[str(url.hostname)]
                assert url.port in {port["port"] for port in service["spec"]["ports"]}
                seen += 1
    assert seen == 2


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy"])
def test_services_and_policies_find_their_pods(kind: str) -> None:
    for name, document in of(kind).items():
        spec = document["spec"]
        selector = spec["selector"] if kind == "Service" else spec["podSelector"]["matchLabels"]
        (pod,) = (p for p in PODS.values() if selector.items() <= p["metadata"]["labels"].items())
        assert pod is PODS[name]
        ports = {p["name"] for c in pod["spec"]["containers"] for p in c.get("ports", ())}
        if kind == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        else:
            assert {p["port"] for rule in spec["ingress"] for p in rule["ports"]} <= ports


def test_who_reaches_the_registry() -> None:
    ((rule,),) = ([r["from"] for r in of("NetworkPolicy")["warmcast-registry"]["spec"]["ingress"]],)
    (selector,) = (peer["podSelector"] for peer in rule)
    (expression,) = selector["matchExpressions"]
    for name in ("warmcast-agent", "minilm"):
        labels = PODS[name]["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items()
        assert labels[expression["key"]] in expression["values"]


def test_who_reaches_the_agents() -> None:
    """Other agents, and workers whose own agent has gone, which trust them and have no key."""
    (rule,) = of("NetworkPolicy")["warmcast-agent"]["spec"]["ingress"]
    reached = [peer["podSelector"]["matchLabels"].items() for peer in rule["from"]]
    for name in ("warmcast-agent", "minilm"):
        labels = PODS[name]["metadata"]["labels"].items()
        assert any(selector <= labels for selector in reached)
    (authority,) = (v["secret"] for v in PODS["minilm"]["spec"]["volumes"] if "secret" in v)
    (worker,) = PODS["minilm"]["spec"]["containers"]
    (trusted,) = (v["value"] for v in worker["env"] if v["name"] == "WARMCAST_TLS_CA")
    assert [item["key"] for item in authority["items"]] == ["ca.crt"]
    assert trusted.endswith("/ca.crt")


@pytest.mark.parametrize(("pod", "container"), ALL)
def test_containers_are_confined(pod: dict[str, Any], container: dict[str, Any]) -> None:
    context = pod["spec"]["securityContext"] | container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    # The one that hands the node's folders over to the agent.
    assert context["runAsNonRoot"] is (container["name"] != "folders")
    assert "memory" in container["resources"]["limits"]
    for resources in container["resources"].values():
        assert resources.keys() <= {"cpu", "memory", "nvidia.com/gpu"}


# The README's commands


def secrets_of_the_readme() -> dict[str, set[str]]:
    """The Secrets that the README creates, and their keys."""
    commands = readme_commands().replace("\\\n", " ").splitlines()
    return {
        found[1]: set(re.findall(r"--from-(?:literal|file)=([\w.]+)", command))
        for command in commands
        if (found := re.match(r"kubectl -n warmcast create secret generic (\S+)", command))
    }


def readme_commands() -> str:
    (commands,) = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return commands


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The Secrets that kubectl makes of the README's commands, without a cluster."""
    folder = tmp_path_factory.mktemp("commands")
    kubectl = folder / "kubectl"
    kubectl.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = apply ]; then test -f "$ROOT/$3"; exit; fi\n'
        f'echo ---; exec {shutil.which("kubectl")} "$@" --dry-run=client --output=yaml\n'
    )
    kubectl.chmod(0o755)
    made = subprocess.run(
        ["/bin/sh", "-euc", readme_commands()],
        cwd=folder,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HOME": str(folder),
            "ROOT": str(check.HERE.parent.parent),
            "AWS_ACCESS_KEY_ID": "AK",
            "AWS_SECRET_ACCESS_KEY": "SK",
        },
        check=True,
        stdout=subprocess.PIPE,
        timeout=60,
    ).stdout
    return {
        secret["metadata"]["name"]: {
            key: base64.b64decode(value) for key, value in secret["data"].items()
        }
        for secret in filter(None, yaml.safe_load_all(made))
    }


@needs_kubectl
@needs_openssl
def test_the_secrets_are_made(secrets: dict[str, dict[str, bytes]]) -> None:
    assert {name: set(data) for name, data in secrets.items()} == secrets_of_the_readme()
    assert len(secrets["warmcast-fleet"]["key"]) >= 32
    assert re.fullmatch(rb"[0-9a-f]{64}", secrets["warmcast-registry"]["agent"])
    assert secrets["warmcast-registry"]["agent"] != secrets["warmcast-registry"]["worker"]


def as_run(command: list[str]) -> list[str]:
    """A container's command as Kubernetes runs it: ``$$`` is how it writes a dollar."""
    return [argument.replace("$$", "$") for argument in command]


# The registry's users

PASSWORDS = {"agent": "a" * 64, "worker": "b" * 64, "admin": "c" * 64}
ID = "0f" * 32
SENDER = Presence(
    sender="minilm-7d9f-x2x-1-ab12-00112233",
    identity=ID,
    host="h",
    device="d",
    transports=("gloo",),
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Valkey with the manifests' configuration and users, and an admin to look into it."""
    config, run = tmp_path_factory.mktemp("config"), tmp_path_factory.mktemp("run")
    for name, text in of("ConfigMap")["warmcast-registry"]["data"].items():
        (config / name).write_text(text.replace("/run/valkey", str(run)))
    (users,) = PODS["warmcast-registry"]["spec"]["initContainers"]
    *script, source, made = as_run(users["command"])
    assert (source, made) == ("/etc/valkey/users.acl", "/run/valkey/users.acl")
    secret = {name.upper(): PASSWORDS[name] for name in ("agent", "worker")}
    assert {v["name"] for v in users["env"]} == set(secret)
    acl = run / "users.acl"
    subprocess.run(
        [*script, config / "users.acl", acl],
        env={"PATH": os.defpath, **secret},
        check=True,
        timeout=60,
    )
    assert not any(password in acl.read_text() for password in PASSWORDS.values())
    with acl.open("a") as file:
        file.write(f"user admin on >{PASSWORDS['admin']} ~* +@all\n")

    def start(port: int) -> servers.Process:
        command = [servers._valkey_binary(), config / "valkey.conf"]
        process = servers.Process(
            [*command, "--bind", "127.0.0.1", "--port", str(port)], Deadline.after(30)
        )
        try:
            servers.until(process, lambda: pings(port), Deadline.after(30))
        except BaseException:
            process.stop()
            raise
        ports.append(port)
        return process

    ports: list[int] = []
    process = servers.on_free_port((0,), start)
    try:
        yield ports[-1]
    finally:
        process.stop()


def pings(port: int) -> bool:
    """Whether a server answers one that did not log in, as the probes do."""
    try:
        with redis.Redis(port=port) as client:
            return bool(client.ping())
    except redis.ConnectionError as cause:
        raise ConnectionError(str(cause)) from cause


def url(port: int, user: str) -> str:
    return f"redis://{user}:{PASSWORDS[user]}@127.0.0.1:{port}/0"


@pytest.fixture
def client(port: int, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url(port, request.param)) as client:
        yield client


@pytest.fixture
def worker(port: int) -> Iterator[Registry]:
    """The registry as workers reach it; at the end nothing must have been refused."""
    with redis.Redis.from_url(url(port, "admin")) as admin:
        admin.acl_log_reset()
        registry = Registry(url(port, "worker"))
        yield registry
        registry.close()
        assert admin.acl_log() == []


def test_a_worker_may_do_what_workers_do(worker: Registry, deadline: Deadline) -> None:
    with worker.watch(ID, deadline) as watch:
        worker.announce(SENDER, deadline)
        assert watch.wait(deadline) == "sender"
    assert worker.senders(ID, deadline) == [SENDER]
    assert worker.present(SENDER, deadline)
    for box in (mailbox(SENDER.sender), mailbox("ab/order"), f"{mailbox('ab')}:confirm"):
        worker.push(box, b"hello", deadline)
        assert worker.peek(box, deadline) == b"hello"
        assert worker.pop(box, deadline) == b"hello"
        worker.discard(box, deadline)
    worker.beat(f"{mailbox('ab')}:sender", deadline)
    assert worker.alive(f"{mailbox('ab')}:sender", deadline)
    lease = worker.acquire(ID, deadline)
    assert lease is not None
    assert worker.renew(lease, deadline)
    with worker.watch(ID, deadline) as watch:
        worker.release(lease, deadline)
        assert watch.wait(deadline) == "lease"
    worker.withdraw(SENDER, deadline)
    assert worker.senders(ID, deadline) == []


REFUSED = [
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("INFO",),
    ("ACL", "WHOAMI"),
    ("SCRIPT", "FLUSH"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("SELECT", "1"),
    ("GET", "other"),
    ("SET", "warmcast:x", "1"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("EVAL", "return redis.call('GET', 'other')", "0"),
]
AS_A_NODE = [
    ("ZADD", "warmcast:{nodes}:alive", "1", "rogue"),
    ("EVAL", "return redis.call('SET', 'warmcast:{nodes}:changes', '1')", "0"),
    ("GET", "warmcast:{nodes}:changes"),
]
AS_A_WORKER = [
    ("ZADD", f"warmcast:{{{ID}}}:senders", "1", "rogue"),
    ("GET", f"warmcast:{{{ID}}}:lease"),
    ("RPUSH", mailbox(SENDER.sender), "rogue"),
]


@pytest.mark.parametrize(
    ("client", "command"),
    [
        *(("worker", command) for command in REFUSED + AS_A_NODE),
        *(("agent", command) for command in REFUSED + AS_A_WORKER),
    ],
    indirect=["client"],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_is_refused(client: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(redis.ResponseError) as refused:
        client.execute_command(*command)
    assert re.search("permission|ACL failure", str(refused.value))


# The agent

_COMMAND = "from warmcast.manifests.command import main; main()"


@pytest.fixture
def agent(
    port: int, secrets: dict[str, dict[str, bytes]], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """An agent as its container says, in folders of its own; and its environment."""
    for name, volume in (("fleet", "warmcast-fleet"), ("tls", "warmcast-tls")):
        (tmp_path / "etc" / name).mkdir(parents=True)
        for file, content in secrets[volume].items():
            (tmp_path / "etc" / name / file).write_bytes(content)
    for folder in ("run", "cache", "origin"):
        (tmp_path / folder).mkdir()
    here = {
        "/etc/warmcast": f"{tmp_path}/etc",
        "/run/warmcast": f"{tmp_path}/run",
        "/var/lib/warmcast": f"{tmp_path}/cache",
        "warmcast-registry:6379": f"127.0.0.1:{port}",
        ":7077": f":{servers._free_port((0,))}",
    }
    (container,) = PODS["warmcast-agent"]["spec"]["containers"]
    env = of("ConfigMap")["warmcast"]["data"] | {
        "WARMCAST_ORIGIN": (tmp_path / "origin").as_uri(),
        "PATH": os.environ["PATH"],
    }
    for variable in container["env"]:
        source = variable.get("valueFrom")
        value = variable.get("value") or given(source)
        for old, new in here.items():
            value = value.replace(old, new)
        env[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], value)
    program, *arguments = container["command"]
    assert program == "warmcast"
    command = [sys.executable, "-c", _COMMAND, *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, env
        finally:
            process.kill()


def given(source: dict[str, Any]) -> str:
    """What Kubernetes puts in for a variable."""
    if "secretKeyRef" in source:
        return PASSWORDS[source["secretKeyRef"]["key"]]
    return {"status.podIP": "127.0.0.1", "spec.nodeName": "node-1"}[source["fieldRef"]["fieldPath"]]


@needs_kubectl
@needs_openssl
def test_an_agent_runs_as_its_container_says(
    port: int, agent: tuple[subprocess.Popen[str], dict[str, str]]
) -> None:
    process, env = agent
    (container,) = PODS["warmcast-agent"]["spec"]["containers"]
    kubelet = ssl.create_default_context()  # which shows no certificate, and checks none
    kubelet.check_hostname = False
    kubelet.verify_mode = ssl.CERT_NONE

    def probe(name: str) -> int:
        asked = container[name]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("https", "HTTPS")
        with closing(
            HTTPSConnection(env["WARMCAST_LISTEN"], context=kubelet, timeout=20)
        ) as connection:
            connection.request("GET", asked["path"])
            return connection.getresponse().status

    with redis.Redis.from_url(url(port, "admin")) as admin:
        admin.acl_log_reset()
        assert process.stdout is not None
        assert process.stdout.readline() == f"ready https://{env['WARMCAST_LISTEN']}\n"
        assert [probe(f"{name}Probe") for name in ("startup", "liveness", "readiness")] == [200] * 3
        address = f"https://{env['WARMCAST_LISTEN']}".encode()
        assert admin.hgetall("warmcast:{nodes}:address") == {b"node-1": address}
        process.terminate()
        assert process.wait(60) == 0
        assert admin.hgetall("warmcast:{nodes}:address") == {}
        assert admin.acl_log() == []
    with pytest.raises(ConnectionRefusedError):
        probe("livenessProbe")


def test_who_did_not_log_in_can_only_ask_for_life(port: int, deadline: Deadline) -> None:
    assert pings(port)
    with redis.Redis(port=port) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.get(f"warmcast:{{{ID}}}:lease")
    wrong = Registry(f"redis://worker:{'d' * 64}@127.0.0.1:{port}/0")
    with pytest.raises(RegistryUnavailable, match="password"):
        wrong.senders(ID, deadline)
    wrong.close()

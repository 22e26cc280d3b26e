"""Mirroring one large file from one S3 server to another, beside s5cmd and boto3.

    python tests/bench/mirror.py --tools DIR [--json PATH] [--gib 2] [--repeat 3]

``DIR`` is a virtual environment with ``s5cmd`` and ``boto3``. Two SeaweedFS servers run
on this machine and share its processor with their clients, so the figures compare clients, not
networks. All move the same file between the same servers, in turns:

- ``warmcast``: a whole deploy, manifest included. S3 publishes no SHA-256, so the blob's key is
  known last, and the server copies it there.
- ``warmcast, sha256 published``: the same where the upstream tells it, as the Hub does.
- ``s5cmd cat | pipe``: streamed through two processes, as no single s5cmd speaks to two servers.
- ``s5cmd cp, cp``: to a file in memory, and from there.
- ``boto3 get, upload``: a body that is read goes to ``upload_fileobj``. (Its transfers by the CRT
  do not find servers that are not on port 80 or 443.)

``server's own copy`` moves no byte through the client, and tells what that costs the server:
``s5cmd cp`` from bucket to bucket. Last: a deploy of 100 files that did not change.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from warmcast.flows.chunks import Lanes
from warmcast.flows.run import deploy
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.mirror import Streaming, stream_file
from warmcast.flows.steps.weights import fetch_header
from warmcast.flows.upstreams import open_upstream
from warmcast.infra.bench import record
from warmcast.infra.servers import Seaweed, seaweed
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

NAME = "model.safetensors"
LIMIT = Deadline.never()

BOTO3 = """
import json, sys, time
import boto3

a, b, name = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

def client(of):
    return boto3.client("s3", endpoint_url=of["AWS_ENDPOINT_URL"], region_name="us-east-1",
        aws_access_key_id=of["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=of["AWS_SECRET_ACCESS_KEY"])

began = time.perf_counter()
body = client(a).get_object(Bucket="upstream", Key="m/" + name)["Body"]
client(b).upload_fileobj(body, "origin", "boto3/" + name)
print(json.dumps(time.perf_counter() - began))
"""


def warmcast(source: str, origin: str) -> None:
    """A deploy, in a process of its own; prints its seconds."""
    began = time.perf_counter()
    deploy(source, origin, "m@a")
    print(json.dumps(time.perf_counter() - began))


def published(source: str, origin: str, sha256: str) -> None:
    """Mirroring alone, of a file whose SHA-256 is known before."""
    upstream = open_upstream(source, LIMIT)
    file = next(f for f in upstream.files(LIMIT) if f.path == NAME)
    header = fetch_header(upstream, file, LIMIT)
    pace = Pace()
    with Origin.open(origin) as opened:
        began = time.perf_counter()
        shared = Streaming(opened, upstream, Lanes(pace.lanes), pace)
        done = stream_file(
            shared, replace(file, sha256=sha256), header.tensors, LIMIT, lambda _: None,
            recall=lambda: None, remember=lambda _: None,
        )  # fmt: skip
        print(json.dumps(time.perf_counter() - began))
    assert done.moved
    upstream.close()


def environment(server: Seaweed, folder: Path, other: Seaweed | None = None) -> dict[str, str]:
    """The environment to reach a server, and the upstream as the profile ``upstream``."""
    found = {**os.environ, **server.env, "S3_ENDPOINT_URL": server.url}
    if other is not None:
        text = (
            f"[upstream]\naws_access_key_id={other.access_key}\n"
            f"aws_secret_access_key={other.secret_key}\n"
        )
        (folder / "credentials").write_text(text)
        found["AWS_SHARED_CREDENTIALS_FILE"] = str(folder / "credentials")
    return found


def timed(run: Callable[[], float | None]) -> dict[str, float]:
    """Seconds of the wall (by the child's own account, if it has one) and of children's CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    told = run()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": told or wall, "cpu": cpu}


def child(words: list[str], env: Mapping[str, str]) -> float | None:
    """Run a command; the seconds that it tells, if it does."""
    done = subprocess.run(words, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[:3]}: {done.stderr[-2000:]}")
    try:
        return float(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return None


def shell(line: str, env: Mapping[str, str]) -> None:
    """Run a pipeline."""
    subprocess.run(["bash", "-o", "pipefail", "-c", line], env=dict(env), check=True,  # noqa: S607
                   stdout=subprocess.DEVNULL)  # fmt: skip


def unchanged(folder: Path, upstream: Seaweed, origin: Seaweed, files: int) -> dict[str, float]:
    """Seconds of a deploy of files that did not change."""
    source = folder / "many"
    source.mkdir()
    for number in range(1, files):
        name = f"model-{number:05d}-of-{files - 1:05d}.safetensors"
        save_file({f"layers.{number}.w": torch.full((100, 100), float(number))}, source / name)
    (source / "config.json").write_text("{}")
    s5cmd = environment(upstream, folder)
    child([str(TOOLS / "bin/s5cmd"), "cp", f"{source}/", "s3://upstream/many/"], s5cmd)
    os.environ.update(environment(origin, folder, upstream))
    url = f"s3://upstream/many?endpoint={upstream.url}&profile=upstream"
    first = deploy(url, "s3://origin/many", "many@a")
    times = []
    for _ in range(3):
        again = deploy(url, "s3://origin/many", "many@a")
        assert not again.moved
        times.append(again.seconds)
    return {"files": files, "first": round(first.seconds, 2), "again": round(min(times), 2)}


CONTENDERS = (
    "warmcast",
    "warmcast, sha256 published",
    "s5cmd cat | pipe",
    "s5cmd cp, cp",
    "boto3 get, upload",
    "server's own copy: s5cmd cp",
)


def contender(
    name: str,
    upstream: Seaweed,
    origin: Seaweed,
    folder: Path,
    digest: str,
    s5cmd: Path,
    python: Path,
) -> Callable[[], float | None]:
    """What a contender runs."""
    here, there = environment(upstream, folder), environment(origin, folder, upstream)
    url = f"s3://upstream/m?endpoint={upstream.url}&profile=upstream"
    me = [sys.executable, __file__, "--child"]
    scratch = str(folder / "scratch")

    def pipe() -> None:
        shell(
            f"AWS_ACCESS_KEY_ID={upstream.access_key} AWS_SECRET_ACCESS_KEY={upstream.secret_key} "
            f"{s5cmd} --endpoint-url {upstream.url} cat s3://upstream/m/{NAME} | "
            f"{s5cmd} --endpoint-url {origin.url} pipe s3://origin/pipe/{NAME}",
            there,
        )

    def two_copies() -> None:
        child([str(s5cmd), "cp", f"s3://upstream/m/{NAME}", scratch], here)
        child([str(s5cmd), "cp", scratch, f"s3://origin/cp/{NAME}"], there)

    def own_copy() -> None:
        child([str(s5cmd), "cp", f"s3://upstream/m/{NAME}", f"s3://upstream/copy/{NAME}"], here)
        child([str(s5cmd), "rm", f"s3://upstream/copy/{NAME}"], here)

    runs: dict[str, Callable[[], float | None]] = {
        "warmcast": lambda: child([*me, url, "s3://origin/one"], there),
        "warmcast, sha256 published": lambda: child([*me, url, "s3://origin/two", digest], there),
        "s5cmd cat | pipe": pipe,
        "s5cmd cp, cp": two_copies,
        "boto3 get, upload": lambda: child(
            [str(python), "-c", BOTO3, json.dumps(upstream.env), json.dumps(origin.env), NAME],
            os.environ,
        ),
        "server's own copy: s5cmd cp": own_copy,
    }
    return runs[name]


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    global TOOLS  # noqa: PLW0603
    TOOLS = options.tools
    s5cmd, python = TOOLS / "bin/s5cmd", TOOLS / "bin/python"
    limit = Deadline.after(3600)
    with (
        seaweed(limit) as upstream,
        tempfile.TemporaryDirectory(dir="/dev/shm") as place,
    ):
        folder = Path(place)
        upstream.make_bucket("upstream")
        weights = folder / NAME
        count = int(options.gib * (1 << 30) / 8)
        save_file({f"layers.{i}.w": torch.randint(0, 1 << 62, (count // 8,)) for i in range(8)},
                  weights)  # fmt: skip
        nbytes = weights.stat().st_size
        digest = subprocess.run(
            ["sha256sum", str(weights)],  # noqa: S607
            capture_output=True, text=True, check=True,
        ).stdout.split()[0]  # fmt: skip
        child([str(s5cmd), "cp", str(weights), f"s3://upstream/m/{NAME}"],
              environment(upstream, folder))  # fmt: skip
        weights.unlink()
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.repeat):
            for name in CONTENDERS:
                # An origin of its own, so that none pays for what another left behind.
                with seaweed(limit) as origin:
                    origin.make_bucket("origin")
                    run = contender(name, upstream, origin, folder, digest, s5cmd, python)
                    rounds.setdefault(name, []).append(timed(run))
                print(name, rounds[name][-1], file=sys.stderr, flush=True)
                (folder / "scratch").unlink(missing_ok=True)
        cases = [
            {
                "what": name,
                "GBps": round(nbytes / statistics.median(r["seconds"] for r in found) / 1e9, 3),
                "best_GBps": round(nbytes / min(r["seconds"] for r in found) / 1e9, 3),
                "client_cpu_seconds_per_GB": round(
                    statistics.median(r["cpu"] for r in found) / nbytes * 1e9, 2
                ),
            }
            for name, found in rounds.items()
        ]
        with seaweed(limit) as origin:
            origin.make_bucket("origin")
            many = unchanged(folder, upstream, origin, 100)
    result = {
        "benchmark": "one file from S3 to S3, two SeaweedFS servers on the same machine",
        "machine": record.machine(),
        "bytes": nbytes,
        "cases": cases,
        "unchanged": many,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


TOOLS = Path()

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        words = sys.argv[2:]
        published(*words) if len(words) == 3 else warmcast(*words)
    else:
        main()

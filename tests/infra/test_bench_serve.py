"""``warmcast bench serve``, with a model of some megabytes, and what it takes for a limit."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from importlib.metadata import EntryPoint
from urllib.parse import urlsplit

import pytest

from warmcast.infra.bench.deliver import sendfile, serving
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)
needs_nginx = pytest.mark.skipif(not sendfile.nginx(), reason="needs nginx")


@pytest.fixture(params=[pytest.param("nginx", marks=needs_nginx), "sendfile"])
def limit(request, monkeypatch):
    """The server that is the limit, each in turn."""
    if request.param == "sendfile":
        monkeypatch.setattr(sendfile, "nginx", lambda: None)
    return request.param


@pytest.fixture
def served(limit, tmp_path):
    """Such a server, and the bytes of ``ab/file`` there."""
    (tmp_path / "root" / "ab").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    content = bytes(range(256)) * 4096
    (tmp_path / "root" / "ab" / "file").write_bytes(content)
    (tmp_path / "secret").write_bytes(content)
    with sendfile.file_server(tmp_path / "root", tmp_path / "folder", Deadline.after(60)) as server:
        yield server, content
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/ab/file", 0, 1)


def ask(server, path, begin, length):
    """The status, and the bytes."""
    with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=20)) as connection:
        asked = {"Range": f"bytes={begin}-{begin + length - 1}"}
        connection.request("GET", path, headers=asked)
        response = connection.getresponse()
        return response.status, response.read()


def test_the_limit_serves_what_is_asked_for(served):
    server, content = served
    for begin, length in ((0, len(content)), (17, 1), (4096, 300_000)):
        part = content[begin : begin + length]
        assert ask(server, "/ab/file", begin, length) == (206, part)
    for path in ("/ab/none", "/../secret", "/ab"):
        assert ask(server, path, 0, 1)[0] >= 300


def test_an_agent_beside_the_limit(limit, tmp_path, capsys):
    path = tmp_path / "serve.json"
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--gb", "0.02", "--json", str(path)], [BENCH])
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (0, "")
    result = json.loads(path.read_text())
    assert set(result) == {"machine", "limits", "agent_memory_bytes", "cases"}
    first, agent = result["cases"]
    assert (first["server"], agent["server"]) == (limit, "agent")
    assert result["limits"] == {f"{limit}_GBps": first["GBps"]}
    assert first["bytes"] == agent["bytes"] > 20_000_000
    assert first["ratio_to_limit"] == 1
    assert agent["ratio_to_limit"] == pytest.approx(agent["GBps"] / first["GBps"], abs=0.01)
    assert agent["GBps"] == pytest.approx(agent["bytes"] / agent["seconds"] / 1e9, rel=0.05)
    assert agent["cpu_seconds_per_gb"] >= 0
    assert result["agent_memory_bytes"] > 1 << 20
    assert limit in said.out
    assert "agent" in said.out


def test_another_answer_is_no_figure(served):
    """A server that refuses, or gives something else, is not fast."""
    server, content = served
    whole = {"Range": f"bytes=0-{len(content) - 1}"}
    request = serving.Request("/ab/file", whole, len(content))
    assert serving.read(server.url, [request] * 9, Deadline.after(60)) > 0
    for path, length in (("/ab/none", len(content)), ("/ab/file", len(content) - 1)):
        with pytest.raises(WarmcastError, match=path):
            serving.read(server.url, [serving.Request(path, whole, length)], Deadline.after(60))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gb", "0"), "--gb"),
        (("--deadline", "-1"), "--deadline"),
        (("--json", "/no/such/folder/x.json"), "no folder"),
        (("--gb", "10000000"), "free"),
    ],
)
def test_refusals(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *words], [BENCH])
    err = capsys.readouterr().err
    assert end.value.code != 0
    assert said in err
    assert len(err.strip().splitlines()) == 1

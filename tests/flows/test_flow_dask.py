"""Transfers by a Dask cluster of two worker processes: both work, and what ends them ends them."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest
import torch
from safetensors.torch import save

from tests.flows.hub import Web
from warmcast.flows.errors import DeployError, SourceError
from warmcast.flows.run import deploy
from warmcast.manifests.errors import DeadlineExceeded

pytestmark = [
    # Prefect's, Dask's and Tornado's own, when clients and clusters end.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def scheduler(prefect_server):
    """The address of a scheduler with two workers, processes of one thread each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from distributed import LocalCluster

        with LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster:
            yield cluster.scheduler_address


@pytest.fixture
def deploy_flow(prefect_server):
    from warmcast.flows.prefect.deploy import deploy_flow

    return deploy_flow


class Holding(Web):
    """Holds the answers to the first ranges of ``held`` files until ``open`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        self.got: list[str] = []
        self.changed = threading.Condition()
        self.together = 1
        """So many have to be asked for before any is answered."""
        self.asks = 0
        """So often has one to be asked for."""

    def _enough(self) -> bool:
        return len(set(self.got)) >= self.together and len(self.got) >= self.asks

    def answer(self, request):
        if request.method == "GET" and request.path in self.held:
            with self.changed:
                self.got.append(request.path)
                self.changed.notify_all()
                self.changed.wait_for(self._enough, 60)
        return super().answer(request)


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    opened = Holding()
    torch.manual_seed(0)
    opened.put("/m/config.json", b"{}")
    opened.put("/m/model.safetensors", save({"w": torch.randn(64, 64)}))
    for name in ("a.txt", "b.txt"):
        opened.put(f"/m/{name}", name.encode() * 1000)
    yield opened
    with opened.changed:
        opened.together = opened.asks = 0
        opened.changed.notify_all()
    opened.close()


FILES = "#files=config.json,model.safetensors,a.txt,b.txt"


def test_both_workers_transfer(deploy_flow, scheduler, web, file_url, tmp_path):
    """A worker has one file at a time, and neither is answered before both are asked for."""
    web.held = {"/m/a.txt", "/m/b.txt"}
    web.together = 2
    source = f"{web.url}/m/{FILES}"
    done = deploy_flow(source, file_url, ["m@a"], dask=scheduler, deadline_s=60)
    assert (done["changed"], done["moved_files"]) == (True, 4)
    assert set(web.got) == {"/m/a.txt", "/m/b.txt"}
    here = deploy(source, (tmp_path / "other").as_uri(), "m@a")
    assert {f.path: f.sha256 for f in here.manifest.files} == {
        file["path"]: file["sha256"] for file in done["files"]
    }
    # What they did is known to whoever deploys next.
    assert deploy(source, file_url, "m@a").moved == ()


def test_one_that_fails_ends_the_others(deploy_flow, scheduler, web, file_url):
    web.held = {"/m/a.txt"}
    answer = web.answer

    def failing(request):
        if request.method == "GET" and request.path == "/m/b.txt":
            web.files.pop("/m/b.txt", None)  # gone since it was listed
        return answer(request)

    web.answer = failing
    web.together = 1
    with pytest.raises(SourceError, match=r"b\.txt"):
        deploy_flow(f"{web.url}/m/{FILES}", file_url, ["m@a"], dask=scheduler, deadline_s=60)


def test_a_worker_that_dies(deploy_flow, scheduler, web, file_url):
    """By SIGKILL, with a file in its hands: another worker begins that file anew."""
    from distributed import Client

    web.held = {"/m/a.txt", "/m/b.txt"}
    web.asks = 3  # by two workers, and by who comes after the one that dies

    def kill():
        with web.changed:
            assert web.changed.wait_for(lambda: len(web.got) >= 2, 60)
        with Client(scheduler, set_as_default=False) as client:
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        done = deploy_flow(f"{web.url}/m/{FILES}", file_url, ["m@a"], dask=scheduler, deadline_s=60)
    finally:
        killer.join()
    assert (done["changed"], len(web.got)) == (True, 3)


def test_the_deadline_holds(deploy_flow, scheduler, web, file_url):
    web.held = {"/m/a.txt", "/m/b.txt"}
    web.together = 3  # which never are
    with pytest.raises(DeadlineExceeded):
        deploy_flow(f"{web.url}/m/{FILES}", file_url, ["m@a"], dask=scheduler, deadline_s=3)


def test_no_scheduler(deploy_flow, web, file_url):
    with pytest.raises(DeployError, match="expected an answer in 2 s"):
        deploy_flow(f"{web.url}/m/", file_url, ["m@a"], dask="tcp://127.0.0.1:1", deadline_s=2)

"""What serving a file can cost at least: a server that does nothing but ``sendfile``.

nginx with one worker, where it is installed; else a loop of this module's own, run as
``python -m warmcast.infra.bench.deliver.sendfile JSON``, of which the JSON is the folder that it
serves. Either is a process of its own, on a free port of 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from warmcast.infra.demo.channel import Channel, Child, serve
from warmcast.infra.servers import Process, on_free_port, until
from warmcast.manifests.deadline import Deadline

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)

_NGINX = """\
daemon off;
master_process off;
error_log stderr;
pid nginx.pid;
events {{}}
http {{
  sendfile on;
  access_log off;
  keepalive_requests 1000000;
  client_body_temp_path temporary;
  proxy_temp_path temporary;
  fastcgi_temp_path temporary;
  uwsgi_temp_path temporary;
  scgi_temp_path temporary;
  server {{
    listen 127.0.0.1:{port};
    root {root};
    location = /pid {{ return 200 $pid; }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class FileServer:
    """A server of a folder's files: its name, process id and URL. It knows ranges of bytes."""

    name: str
    pid: int
    url: str


def nginx() -> str | None:
    """The nginx that is installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


@contextmanager
def file_server(root: Path, folder: Path, deadline: Deadline) -> Iterator[FileServer]:
    """Serve what is below ``root``; ``folder``, empty, takes the server's log."""
    program = nginx()
    if program is None:
        module = "warmcast.infra.bench.deliver.sendfile"
        with Child("sendfile", module, [json.dumps(str(root))], os.environ, folder) as child:
            told = child.answer(deadline)
            yield FileServer("sendfile", told["pid"], f"http://127.0.0.1:{told['port']}")
            child.end()
        return
    port, process = on_free_port((0,), lambda port: _nginx(program, root, port, deadline))
    try:
        yield FileServer("nginx", process.pid, f"http://127.0.0.1:{port}")
    finally:
        process.stop()


def _nginx(program: str, root: Path, port: int, deadline: Deadline) -> tuple[int, Process]:
    opener = build_opener(ProxyHandler({}))
    process = Process(
        [program, "-p", ".", "-e", "stderr", "-c", "nginx.conf"],
        deadline,
        files={"nginx.conf": _NGINX.format(port=port, root=json.dumps(str(root.resolve())))},
    )

    def answers() -> bool:
        with opener.open(f"http://127.0.0.1:{port}/pid", timeout=1) as answer:
            return int(answer.read()) == process.pid

    try:
        until(process, answers, deadline)
    except BaseException:
        process.stop()
        raise
    return port, process


def main(channel: Channel) -> None:
    """Serve until the end."""
    root = json.loads(sys.argv[1])
    with _Threads(("127.0.0.1", 0), _handler(Path(root))) as server:
        thread = threading.Thread(target=server.serve_forever, name="sendfile", daemon=True)
        thread.start()
        channel.tell({"pid": os.getpid(), "port": server.server_address[1]})
        channel.wait_for("end")
        server.shutdown()
        thread.join()


class _Threads(ThreadingHTTPServer):
    block_on_close = False  # kept connections end with the process


def _handler(root: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = (root / self.path.lstrip("/")).resolve()
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            if not path.is_relative_to(root.resolve()) or not path.is_file() or asked is None:
                self.send_error(404)
                return
            begin, last = map(int, asked.groups())
            with path.open("rb", buffering=0) as file:
                end = min(last + 1, path.stat().st_size)
                self.send_response(206)
                self.send_header("Content-Length", str(end - begin))
                self.end_headers()
                self.wfile.flush()
                while begin < end:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)
                    if not sent:
                        raise ConnectionError("the file ends early")
                    begin += sent

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler


if __name__ == "__main__":
    serve(main)

"""A server that misbehaves as told, and a world of its own for every test."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_VARIABLES = (
    "HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN_PATH", "MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "EDGELLAMA_OFFLINE", "EDGELLAMA_ACCEPT_LICENCE", "EDGELLAMA_MODELS_DIR", "OLLAMA_MODELS", "LLAMA_CACHE",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT", "PIP_PROXY",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home with all of edgellama's folders in it, and no settings from outside."""
    folder = tmp_path_factory.mktemp("home")
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("config", "data", "cache", "state"):
        monkeypatch.setenv(f"EDGELLAMA_{name.upper()}_DIR", str(folder / name))
    return folder


Action = Callable[[http.server.BaseHTTPRequestHandler], bool]


@dataclass
class Served:
    """One file. `script` holds what happens to the next requests; after it the file is served as it should be."""

    data: bytes
    etag: str = '"v1"'
    ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    script: list[Action] = field(default_factory=list)


@dataclass
class Seen:
    path: str
    headers: dict[str, str]


class Server:
    """A loopback server. `faults` make scripts: `server.files["/x"].script = [server.drop(1000)]`."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.seen: list[Seen] = []
        self.release = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.handle(self)

            def log_message(self, *_args: Any) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_args: Any) -> None:
                pass  # clients that leave are part of the plan

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def serve(self, path: str, data: bytes, **attributes: Any) -> Served:
        self.files[path] = Served(data, **attributes)
        return self.files[path]

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}))
        served = self.files.get(request.path)
        if served is None:
            self.status(404)(request)
            return
        if served.script and served.script.pop(0)(request):
            return
        self.send(request, served, None)

    def send(self, request: http.server.BaseHTTPRequestHandler, served: Served, stop: int | None) -> None:
        """The file or the range asked for; after `stop` bytes the connection breaks."""
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", "")) if served.ranges else None
        if_range = request.headers.get("if-range", served.etag)
        start = int(asked[1]) if asked and if_range == served.etag else 0
        if asked and start >= len(served.data) and if_range == served.etag:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(served.data)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if asked and if_range == served.etag else 200)
        if asked and if_range == served.etag:
            request.send_header("Content-Range", f"bytes {start}-{len(served.data) - 1}/{len(served.data)}")
        request.send_header("Content-Length", str(len(served.data) - start))
        if served.etag:
            request.send_header("ETag", served.etag)
        for name, value in served.headers.items():
            request.send_header(name, value)
        request.end_headers()
        body = served.data[start:]
        request.wfile.write(body if stop is None else body[:stop])
        if stop is not None:
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(2)

    def drop(self, after: int) -> Action:
        def act(request: http.server.BaseHTTPRequestHandler) -> bool:
            self.send(request, self.files[request.path], after)
            return True

        return act

    def status(self, code: int, **headers: str) -> Action:
        def act(request: http.server.BaseHTTPRequestHandler) -> bool:
            request.send_response(code)
            for name, value in headers.items():
                request.send_header(name.replace("_", "-"), value)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return True

        return act

    def redirect(self, target: str, **headers: str) -> Action:
        return self.status(302, Location=target, **headers)

    def change(self, **attributes: Any) -> Action:
        """Another file from now on."""

        def act(request: http.server.BaseHTTPRequestHandler) -> bool:
            for name, value in attributes.items():
                setattr(self.files[request.path], name, value)
            return False

        return act

    def hold(self, after: int) -> Action:
        """Send the beginning, then wait until `release` is set."""

        def act(request: http.server.BaseHTTPRequestHandler) -> bool:
            data = self.files[request.path].data
            request.send_response(200)
            request.send_header("Content-Length", str(len(data)))
            request.send_header("ETag", self.files[request.path].etag)
            request.end_headers()
            request.wfile.write(data[:after])
            request.wfile.flush()
            self.release.wait(30)
            request.wfile.write(data[after:])
            return True

        return act


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.release.set()
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture
def other_server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture(scope="session")
def model_bytes(tiny_llama_gguf: Path) -> bytes:
    return tiny_llama_gguf.read_bytes()


@pytest.fixture(scope="session")
def model_sha256(model_bytes: bytes) -> str:
    return hashlib.sha256(model_bytes).hexdigest()


@pytest.fixture
def add_entry(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """`add(name, sources, file, **fields)` puts a model into a catalogue that holds nothing else."""
    from edgellama.store import catalogue

    folder = tmp_path_factory.mktemp("catalogue")
    monkeypatch.setattr(catalogue, "folder", lambda: folder)
    catalogue.load.cache_clear()

    def add(name: str, sources: list[str], file: str, **fields: Any) -> str:
        values: dict[str, Any] = {
            "name": name, "title": name, "sources": sources, "file": file, "sha256": "", "licence": "apache-2.0",
            "parameters": 1, "context_tokens": 512, "languages": ["en"], "family": "chatml", "layers": 2, "kv_heads": 1,
            "head_size": 64, "min_memory_bytes": 1,
        } | fields  # fmt: skip
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        (folder / f"{name}.toml").write_text("\n".join(lines), encoding="utf-8")
        catalogue.load.cache_clear()
        return name

    yield add
    catalogue.load.cache_clear()

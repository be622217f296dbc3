"""A hub of models on loopback, with as much of Hugging Face's API as `huggingface_hub` needs, and the ways in which hubs fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
LARGE = ".safetensors"


@dataclass
class FakeHub:
    """What it has, and what it does wrong.

    Attributes:
        files: of each model `ORG/NAME`, by their paths.
        gated: models that it shows to nobody.
        cut: bytes of a file after which a connection ends, once for each number.
        wrong: files of which it sends other bytes.
        asked: methods and paths of requests.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, directory: Path) -> None:
        """Publishes the files of a directory."""
        paths = [path for path in directory.rglob("*") if path.is_file()]
        self.files[name] = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}

    def fetched(self) -> list[str]:
        """Files whose contents were asked for, in order."""
        return [path.partition(f"/resolve/{COMMIT}/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path]


def etag(path: str, data: bytes) -> str:
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name in self.hub.gated:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to the model is restricted."})
        if name not in self.hub.files:
            return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        files = self.hub.files[name]
        if parts[0] == "api":
            if parts[4] in ("revision", "tree") and parts[5] not in ("main", COMMIT):
                return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            if parts[4] == "tree":
                return self._send(200, json.dumps([_entry(*file) for file in files.items()]).encode(), body)
            return self._send(
                200, json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}).encode(), body
            )
        file = "/".join(parts[4:])
        if file not in files:
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._send_file(file, files[file], body)

    def _send_file(self, file: str, data: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(file, data)}"', "Accept-Ranges": "bytes"}
        if file in self.hub.wrong:
            data = bytes(len(data) // 2) + data[len(data) // 2 :]
        first = 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cut[file].pop(0) if body and self.hub.cut.get(file) else None
        self._send(206 if wanted else 200, data[first:], body, headers, cut)

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True


def _entry(file: str, data: bytes) -> dict[str, object]:
    large = {"lfs": {"oid": etag(file, data), "size": len(data), "pointerSize": 130}} if file.endswith(LARGE) else {}
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest(), **large}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub without models."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

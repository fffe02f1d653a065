"""A small Hugging Face-style hub on loopback: serves folders as model and data set repositories.

`root/models/org/name` and `root/datasets/org/name` are the repositories, each with one commit. `HF_ENDPOINT` set to
`Hub.url` makes `transformers` and `datasets` load from it by their real code.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `root` while the `with` block runs; `seen` lists the paths that were asked for."""

    def __init__(self, root: Path):
        self.root = root
        self.seen: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                hub._answer(self, body=True, asked=self.rfile.read(length))

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool, asked: bytes = b"") -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.seen.append(path)
        words = path.split("/")
        if words[0] == "api" and words[1] in ("models", "datasets"):
            folder = self.root / words[1] / words[2] / words[3] if len(words) > 3 else None
            if folder is not None and folder.is_dir():
                recursive = "recursive=true" in request.path.lower()
                said = self._api(folder, words[2:4], words[4:], recursive, asked)
                self._send(request, body, json.dumps(said).encode())
                return
        else:
            kind = words.pop(0) if words[0] == "datasets" else "models"
            if len(words) > 4 and words[2] == "resolve":
                file = self.root.joinpath(kind, words[0], words[1], *words[4:])
                if file.is_file():
                    self._send(request, body, file.read_bytes())
                    return
                if (self.root / kind / words[0] / words[1]).is_dir():
                    self._send(request, body, b"", 404, {"X-Error-Code": "EntryNotFound"})
                    return
        self._send(request, body, b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    def _api(self, folder: Path, name: list[str], rest: list[str], recursive: bool, asked: bytes) -> object:
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        names = [p.relative_to(folder).as_posix() for p in files]
        if rest[:1] == ["paths-info"]:
            wanted = json.loads(asked)["paths"]
            return [_entry(folder, one) for one in wanted if (folder / one).exists()]
        if rest[:1] == ["tree"]:
            below = folder.joinpath(*rest[2:])
            inside = sorted(below.rglob("*") if recursive else below.glob("*"))
            return [_entry(folder, p.relative_to(folder).as_posix()) for p in inside]
        siblings = [{"rfilename": one} for one in names]
        return {"id": "/".join(name), "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}

    def _send(
        self, request: BaseHTTPRequestHandler, body: bool, data: bytes, code: int = 200, extra: dict | None = None
    ) -> None:
        request.send_response(code)
        etag = hashlib.sha1(data).hexdigest()
        kind = "application/json" if request.path.startswith("/api") else "application/octet-stream"
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        for key, value in {**headers, **(extra or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


def _entry(folder: Path, name: str) -> dict[str, object]:
    path = folder / name
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    return {
        "type": "file",
        "path": name,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
    }

"""A small Hugging Face-style hub on loopback: serves folders as model and data set repositories.

`root/models/org/name` and `root/datasets/org/name` are the repositories, each with one commit. `HF_ENDPOINT` set to
`Hub.url` makes `transformers` and `datasets` load from it by their real code. It answers as the real one does:

    /ORG/NAME/resolve/REVISION/FILE   a small file: 307 to /api/resolve-cache/..., 200 there, with ETag, X-Repo-Commit
                                      a large one:  302 to another host (CDN), with X-Linked-Etag and X-Linked-Size
    /api/KIND/ORG/NAME...             what is in a repository: info, revision, tree, paths-info
    no such repository                401, as for everybody who is not logged in

With a token it also takes what is uploaded: POST /api/repos/create, /api/models/.../preupload and .../commit; large
files by LFS, to the CDN's host.

Not served: Xet (no X-Xet-Hash header, so the plain way is taken; an upload needs HF_HUB_DISABLE_XET), pages of a long
tree, log-ins, commits other than the one.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".parquet", ".bin")
Reply = tuple[int, dict[str, str], bytes]


class Hub:
    """Serves `root` while the `with` block runs.

    Args:
        root: the repositories' folder.
        gated: names (org/name) of repositories that nobody may read.
        cut: large files, by name, that arrive with this many bytes missing.
        token: may create repositories and write to them; None: nobody may.

    Attributes:
        seen: the paths that were asked for, in order.
        hosts: the Host headers of those requests.
        private: names of the repositories that were created as private ones.
    """

    def __init__(
        self, root: Path, gated: Iterable[str] = (), cut: dict[str, int] | None = None, token: str | None = None
    ):
        self.root, self.gated, self.cut, self.token = root, set(gated), cut or {}, token
        self.private: set[str] = set()
        self._uploaded: dict[str, bytes] = {}  # large files, by their sha256
        self.seen: list[str] = []
        self.hosts: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def do_POST(self) -> None:
                hub._answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def do_PUT(self) -> None:
                hub._answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}"  # another origin, as a CDN is

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, asked: bytes = b"") -> None:
        url = urlsplit(request.path)
        path = unquote(url.path).strip("/")
        self.seen.append(path)
        self.hosts.append(request.headers.get("Host", ""))
        written = self._write(path, asked, request.headers.get("Authorization", ""))
        code, headers, data = written or self._reply(path.split("/"), "recursive=true" in url.query.lower(), asked)
        if code == 200 and (wanted := request.headers.get("Range")):
            first, last = wanted.removeprefix("bytes=").split("-")
            end = min(int(last or len(data) - 1), len(data) - 1)
            code, headers["Content-Range"] = 206, f"bytes {first}-{end}/{len(data)}"
            data = data[int(first) : end + 1]
        request.send_response(code)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def _reply(self, words: list[str], recursive: bool, asked: bytes) -> Reply:
        if words[0] == "cdn":
            data = self.root.joinpath(*words[1:]).read_bytes()
            return 200, {}, data[: len(data) - self.cut.get(words[-1], 0)]
        if words[:2] == ["api", "resolve-cache"]:
            return self._file(words[2], words[3:5], words[5], words[6:], final=True)
        if words[0] == "api" and words[1] in ("models", "datasets"):
            folder = self.root.joinpath(*words[1:4])
            if len(words) < 4 or not folder.is_dir():
                return _refused()
            said = _about(folder, words[2:4], words[4:], recursive, asked)
            return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()
        kind = words.pop(0) if words[0] == "datasets" else "models"
        if len(words) > 4 and words[2] == "resolve":
            return self._file(kind, words[:2], words[3], words[4:], final=False)
        return _refused()

    def _write(self, path: str, asked: bytes, authorization: str) -> Reply | None:
        """Answer a request that belongs to an upload; None for any other."""
        words = path.split("/")
        if path == "api/validate-yaml":
            return _validate(json.loads(asked)["content"])
        if words[0] == "cdn" and words[1] == "upload":
            self._uploaded[words[2]] = asked
            return 200, {}, b""
        is_commit = words[:2] == ["api", "models"] and words[4:5] in (["preupload"], ["commit"])
        if path != "api/repos/create" and not is_commit and not path.endswith(".git/info/lfs/objects/batch"):
            return None
        if self.token is None or authorization != f"Bearer {self.token}":
            return _refused()
        said = json.loads(asked) if words[4:5] != ["commit"] else [json.loads(line) for line in asked.splitlines()]
        if path == "api/repos/create":
            name = f"{said['organization']}/{said['name']}"
            made = self.root / "models" / name
            exists = made.is_dir()
            made.mkdir(parents=True, exist_ok=True)
            self.private |= {name} if said.get("visibility") == "private" else set()
            return _json({"url": f"{self.url}/{name}", "id": name}, 409 if exists else 200)
        if words[4:5] == ["preupload"]:
            modes = {one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in said["files"]}
            return _json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        if words[4:5] == ["commit"]:
            self._commit(self.root.joinpath("models", *words[2:4]), said)
            return _json(
                {"commitUrl": "/".join([self.url, *words[2:4], "commit", COMMIT]), "commitOid": COMMIT, "success": True}
            )
        actions = {one["oid"]: {"upload": {"href": f"{self.cdn}/cdn/upload/{one['oid']}"}} for one in said["objects"]}
        return _json({"objects": [one | {"actions": actions[one["oid"]]} for one in said["objects"]]})

    def _commit(self, folder: Path, operations: list[dict[str, dict[str, str]]]) -> None:
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                data = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                data = self._uploaded[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
            else:
                continue
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _file(self, kind: str, name: list[str], revision: str, path: list[str], final: bool) -> Reply:
        folder = self.root.joinpath(kind, *name)
        commit = {"X-Repo-Commit": COMMIT}
        if not folder.is_dir():
            return _refused()
        if "/".join(name) in self.gated:
            said = "Access to this model is restricted. You must be authenticated to access it."
            return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": said}, b""
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"}, b""
        file = folder.joinpath(*path)
        if not file.is_file():
            return 404, commit | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}, b""
        data = file.read_bytes()
        if file.name.endswith(LARGE):
            tag = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{tag}"'}
            where = "/".join([self.cdn, "cdn", kind, *name, *path])
            return 302, commit | linked | {"Location": where, "ETag": '"of-the-redirect"'}, b"Found. Redirecting"
        if not final:
            return 307, {"Location": "/".join(["/api/resolve-cache", kind, *name, COMMIT, *path])}, b"Redirecting"
        return 200, commit | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data


def _json(said: object, code: int = 200) -> Reply:
    return code, {"Content-Type": "application/json"}, json.dumps(said).encode()


def _validate(card: str) -> Reply:
    """Refuse a card whose metadata are not a mapping, or whose results lack what the hub asks for."""
    try:
        metadata = yaml.safe_load(card.split("---\n")[1])
        for model in metadata.get("model-index", []):
            assert model["name"]
            for result in model["results"]:
                assert result["task"]["type"]
                assert result["dataset"]["type"]
                assert result["dataset"]["name"]
                assert all({"type", "value"} <= set(metric) for metric in result["metrics"])
    except (yaml.YAMLError, AssertionError, LookupError, AttributeError, TypeError) as error:
        return _json({"errors": [{"message": repr(error)}], "warnings": []}, 400)
    return _json({"errors": [], "warnings": []})


def _refused() -> Reply:
    """What somebody not logged in hears about a repository that is not there, or not theirs."""
    said = "Invalid username or password."
    return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": said}, json.dumps({"error": said}).encode()


def _about(folder: Path, name: list[str], rest: list[str], recursive: bool, asked: bytes) -> object:
    if rest[:1] == ["paths-info"]:
        return [_entry(folder, one) for one in json.loads(asked)["paths"] if (folder / one).exists()]
    if rest[:1] == ["tree"]:
        below = folder.joinpath(*rest[2:])
        inside = sorted(below.rglob("*") if recursive else below.glob("*"))
        return [_entry(folder, p.relative_to(folder).as_posix()) for p in inside]
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
    siblings = [{"rfilename": one, "size": (folder / one).stat().st_size} for one in names]
    return {"id": "/".join(name), "sha": COMMIT, "private": False, "gated": False, "tags": [], "siblings": siblings}


def _entry(folder: Path, name: str) -> dict[str, object]:
    path = folder / name
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    data = path.read_bytes()
    entry: dict[str, object] = {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry

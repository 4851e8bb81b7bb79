"""A Hugging Face hub on this machine, for tests.

It answers what huggingface_hub asks of one, with repositories in memory: listings, files (small
ones directly, weights by a redirect, as the hub does), the creation of a repository and commits;
and it counts what was asked. A test may make files stall or come cut off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_secretsecretsecret"
LARGE = (".safetensors", ".bin", ".parquet")
STALL_SECONDS = 60.0


@dataclass
class Repository:
    """Branches with their commits, and the files of every commit."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit on a branch, with these files alone; its hash."""
        content = json.dumps(
            [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items())]
        )
        commit = hashlib.sha1(f"{len(self.commits)}{content}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The hub's state, and what was asked of it."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path."""
    stalled: set[str] = field(default_factory=set)
    """Files of which half is sent, and then nothing more."""
    cut: set[str] = field(default_factory=set)
    """Files of which half is sent as if it were all."""
    silent: bool = False
    """Nothing is answered."""
    refuses_commits: bool = False
    status: int = 0
    """What listings are answered with; 0: as they are."""
    released: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, kind: str = "models") -> Repository:
        return self.repositories.setdefault((kind, name), Repository())

    def downloads(self) -> Counter[str]:
        """How often each file's content was asked for."""
        paths = [
            path for method, path in self.asked if method == "GET" and not path.startswith("/api/")
        ]
        return Counter(path.rpartition("/")[2] for path in paths)

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a program that asks this hub, with its cache below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "RLMATH_SET_OFFLINE": "",
        }


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(?:/(?P<verb>[^/]+)(?:/(?P<rev>.+))?)?"
)
_FILE = re.compile(
    r"/(?:(?P<kind>datasets)/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)"
)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        if self._path().startswith("/api/"):
            self._api({})
        else:
            self._file(with_body=True)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._api(body)

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _note(self) -> None:
        self.hub.asked.append((self.command, self._path()))
        if self.hub.silent:
            self.hub.released.wait(STALL_SECONDS)

    # ------------------------------------------------------------ listings and commits

    def _api(self, body: Any) -> None:
        self._note()
        path = self._path()
        if self.hub.status:
            return self._json({"error": "hostile words"}, self.hub.status)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate_card(json.loads(body)["content"])
        match = _API.fullmatch(path)
        if match is None:
            return self._json({"error": f"unknown {path}"}, 404)
        repo = self._repository(match["kind"], match["name"])
        if repo is None:
            return None
        verb = match["verb"] or "revision"
        revision = match["rev"] or "main"
        commit = repo.find(revision)
        if commit is None and verb == "revision":
            return self._refuse(404, "RevisionNotFound")
        if verb == "tree" and commit is not None:
            return self._json(
                [_tree_entry(name, data) for name, data in repo.commits[commit].items()]
            )
        if verb == "revision":
            assert commit is not None
            repository = {
                "id": match["name"],
                "sha": commit,
                "siblings": [],
                "private": repo.private,
            }
            return self._json(repository | {"downloads": 0, "likes": 0, "tags": []})
        if verb == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if verb == "commit":
            return self._commit(match["name"], repo, body)
        return self._json({"error": f"unknown {path}"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "no token"}, 401)
        name = (
            f"{wanted['organization']}/{wanted['name']}"
            if wanted.get("organization")
            else wanted["name"]
        )
        if ("models", name) in self.hub.repositories:
            return self._json({"error": "it is there", "url": f"{self.hub.url}/{name}"}, 409)
        repo = self.hub.add(name)
        repo.private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        return self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _validate_card(self, card: str) -> None:
        """Check that the metadata of a model card is a mapping.

        It stands between the card's first two lines of dashes."""
        opening, metadata, *_ = card.split("---\n", 2)
        if opening or not isinstance(yaml.safe_load(metadata), dict):
            return self._json({"errors": [{"message": "no metadata"}], "warnings": []}, 400)
        return self._json({"errors": [], "warnings": []})

    def _commit(self, name: str, repo: Repository, body: bytes) -> None:
        if self.hub.refuses_commits:
            return self._json({"error": "no"}, 403)
        files = dict(repo.commits[repo.branches["main"]]) if "main" in repo.branches else {}
        for line in body.splitlines():
            operation = json.loads(line)
            if operation["key"] == "file":
                files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
        commit = repo.commit(files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        return self._json(
            {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}
        )

    def _repository(self, kind: str, name: str) -> Repository | None:
        repo = self.hub.repositories.get((kind, name))
        if repo is None:
            self._refuse(401, "RepoNotFound")
            return None
        return repo

    # ------------------------------------------------------------ files

    def _file(self, with_body: bool) -> None:
        self._note()
        path = self._path()
        if path.startswith("/cdn/"):
            _, _, digest, name = path.split("/", 3)
            contents = (
                f
                for repo in self.hub.repositories.values()
                for c in repo.commits.values()
                for f in c.values()
            )
            data = next(
                content for content in contents if hashlib.sha256(content).hexdigest() == digest
            )
            return self._content(name, data, {}, with_body)
        match = _FILE.fullmatch(path)
        repo = None if match is None else self._repository(match["kind"] or "models", match["name"])
        if match is None or repo is None:
            return None
        commit = repo.find(match["rev"])
        data = None if commit is None else repo.commits[commit].get(match["file"])
        if data is None:
            return self._refuse(404, "EntryNotFound")
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        if match["file"].endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            elsewhere = self.hub.url.replace(
                "127.0.0.1", "localhost"
            )  # as the hub's storage is another host
            headers["Location"] = f"{elsewhere}/cdn/{digest}/{match['file']}"
            return self._reply(302, b"", headers)
        return self._content(match["file"], data, headers, with_body)

    def _content(self, name: str, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start is not None:
            data = data[int(start[1]) :]
        if with_body and name in self.hub.cut:
            data = data[: len(data) // 2]
        status = 206 if start is not None else 200
        if not with_body or name not in self.hub.stalled:
            return self._reply(status, data if with_body else b"", headers, len(data))
        self._reply(status, data[: len(data) // 2], headers, len(data))
        self.wfile.flush()
        self.hub.released.wait(STALL_SECONDS)
        self.close_connection = True
        return None

    # ------------------------------------------------------------ answers

    def _reply(
        self, status: int, body: bytes, headers: Mapping[str, str], size: int | None = None
    ) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if size is None else size))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the client was ended
            self.close_connection = True

    def _json(self, what: Any, status: int = 200) -> None:
        self._reply(status, json.dumps(what).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, b"", {"X-Error-Code": code, "X-Error-Message": "\x1b[31mhostile words"})


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    tree_entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
    tree_entry["oid"] = hashlib.sha1(data).hexdigest()
    if name.endswith(LARGE):
        tree_entry["lfs"] = {
            "oid": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 130,
        }
    return tree_entry

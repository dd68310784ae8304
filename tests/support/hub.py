"""A Hub on this machine: what huggingface_hub asks the real one over HTTP when it pushes, lists and
downloads models."""

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

USER, TOKEN = "someone", "hf_of_someone"
# files that .gitattributes gives to LFS
LARGE = {".safetensors", ".onnx", ".png", ".bin", ".model", ".spm"}

Files = dict[str, bytes]


@dataclass
class Repository:
    """A repository: `commits` are {id: {path: content}}, and `branches` {name: id of a commit}."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class Hub:
    """A Hub on this machine: `repositories` by id, and `requests`, a line for each that came.

    `endpoint` is its address, for HF_ENDPOINT.
    """

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # content of large files by sha256
        self.requests: list[str] = []

    def add(self, name: str, directory: Path, branch: str = "main") -> str:
        """Commit the files of `directory` to `branch` of the repository `name`, and return the id.

        It is the only content of the commit.
        """
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
        return self.repositories.setdefault(name, Repository()).commit(files, branch)

    def files(self, name: str, revision: str = "main") -> Files:
        repository = self.repositories[name]
        return repository.commits[repository.resolve(revision)]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that uses this Hub and is logged in.

        Its cache is in `home`.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        }
        paths = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_MODULES_CACHE": str(home / "modules"),
        }
        # Without Xet, a protocol between its own library and another server, large files go the way
        # of git-lfs.
        switches = {
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return {**kept, **paths, **switches}

    def run(self, home: Path, *command: str, **settings) -> subprocess.CompletedProcess:
        """Run Python with the arguments `command` as a user of this Hub, and return the process.

        `home` has the user's cache. `settings` are further arguments of `subprocess.run`.
        """
        options = dict(capture_output=True, text=True, timeout=900, env=self.environment(home))
        return subprocess.run([sys.executable, *command], **{**options, **settings})


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """Yield a new Hub that answers during the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ------------------------------------------------------------------------------------------ answers


class HubError(Exception):
    """Raised for an answer with an error: its `status`, and the `code` that says what is
    missing."""

    def __init__(self, status: int, code: str):
        self.status, self.code = status, code


NO_REPOSITORY, NO_REVISION, NO_ENTRY = (
    HubError(404, f"{name}NotFound") for name in ("Repo", "Revision", "Entry")
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *message):
        pass  # would print a line for each request

    def do_GET(self):  # noqa: N802, the name of http.server
        address = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = parse_qs(address.query)
        try:
            for methods, pattern, answer in ROUTES:
                if self.command in methods.split() and (
                    match := re.fullmatch(pattern, address.path)
                ):
                    if (
                        self.command in ("POST", "PUT")
                        and "paths-info" not in self.path
                        and "/lfs/" not in address.path
                    ):
                        self.check_login()
                    return answer(
                        self, **{name: unquote(text) for name, text in match.groupdict().items()}
                    )
            self.reply(404, b"no such address")
        except HubError as error:
            self.reply(error.status, b"{}", {"X-Error-Code": error.code})

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def check_login(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise HubError(401, "")

    def reply(self, status: int, content: bytes = b"", headers: dict | None = None):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, content, status: int = 200):
        self.reply(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise NO_REPOSITORY
        return self.hub.repositories[name]

    def find(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self.repository(name)
        if (sha := repository.resolve(revision)) is None:
            raise NO_REVISION
        return sha, repository.commits[sha]

    # -------------------------------------------------------------------------------------- reading

    def who(self):
        self.check_login()
        self.reply_json({"type": "user", "name": USER, "orgs": []})

    def info(self, name: str, revision: str = "main"):
        sha, files = self.find(name, revision)
        card = metadata(files)
        facts = {
            "id": name,
            "modelId": name,
            "sha": sha,
            "private": False,
            "tags": card.get("tags", []),
            "cardData": card,
        }
        names = {"pipeline_tag", "library_name"} & card.keys()
        self.reply_json(
            {
                **facts,
                **{key: card[key] for key in names},
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def tree(self, name: str, revision: str, folder: str = ""):
        _, files = self.find(name, revision)
        inside = {
            path: content
            for path, content in files.items()
            if not folder or path.startswith(f"{folder}/")
        }
        if folder and not inside:
            raise NO_ENTRY
        if self.query.get("recursive", ["False"])[0].lower() not in ("true", "1"):
            start = len(folder) + 1 if folder else 0
            inside = {path: content for path, content in inside.items() if "/" not in path[start:]}
        self.reply_json([entry(path, content) for path, content in inside.items()])

    def paths(self, name: str, revision: str):
        _, files = self.find(name, revision)
        requested = parse_qs(self.body.decode()).get("paths", [])
        self.reply_json([entry(path, files[path]) for path in requested if path in files])

    def refs(self, name: str):
        branches = self.repository(name).branches.items()
        references = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": sha}
            for branch, sha in branches
        ]
        self.reply_json({"branches": references, "converts": [], "tags": []})

    def resolve(self, name: str, revision: str, path: str):
        sha, files = self.find(name, revision)
        if path not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        content = files[path]
        if Path(path).suffix not in LARGE:
            return self.reply(200, content, {"ETag": f'"{blob(content)}"', "X-Repo-Commit": sha})
        oid = hashlib.sha256(content).hexdigest()
        self.hub.large[oid] = content
        # large files lie on another host
        elsewhere = self.hub.endpoint.replace("127.0.0.1", "localhost")
        linked = {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": len(content)}
        self.reply(302, b"", {"Location": f"{elsewhere}/lfs/{oid}", "X-Repo-Commit": sha, **linked})

    def large(self, oid: str):
        self.reply(200, self.hub.large[oid], {"ETag": f'"{oid}"'})

    # -------------------------------------------------------------------------------------- writing

    def validate(self):
        self.reply_json({"errors": [], "warnings": []})

    def create(self):
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        facts = {"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name}
        if name in self.hub.repositories:
            return self.reply_json(facts, 409)
        self.hub.repositories[name] = Repository()
        self.hub.repositories[name].commit({".gitattributes": b""})
        self.reply_json(facts)

    def branch(self, name: str, branch: str):
        repository = self.repository(name)
        if branch in repository.branches:
            return self.reply_json({}, 409)
        repository.branches[branch] = repository.branches["main"]
        self.reply_json({}, 201)

    def preupload(self, name: str, revision: str):
        self.find(name, revision)
        modes = {True: "lfs", False: "regular"}
        files = [
            (file["path"], Path(file["path"]).suffix in LARGE)
            for file in json.loads(self.body)["files"]
        ]
        self.reply_json(
            {
                "files": [
                    {"path": path, "uploadMode": modes[big], "shouldIgnore": False}
                    for path, big in files
                ]
            }
        )

    def batch(self, name: str):
        objects = json.loads(self.body)["objects"]
        upload = [
            {**item, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"}}}
            for item in objects
        ]
        self.reply_json({"transfer": "basic", "objects": upload})

    def upload(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "")
        self.hub.large[oid] = self.body
        self.reply(200)

    def commit(self, name: str, revision: str):
        _, files = self.find(name, revision)
        files = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key != "header":
                raise HubError(400, "")
        sha = self.repository(name).commit(files, revision)
        self.reply_json({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})


def metadata(files: Files) -> dict:
    """Return the YAML metadata at the top of README.md in `files`, {} without any."""
    parts = files.get("README.md", b"").decode().split("---\n", 2)
    return yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else {}


def blob(content: bytes) -> str:
    """Return the id that git gives to `content`."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict:
    fields = {"type": "file", "path": path, "size": len(content), "oid": blob(content)}
    if Path(path).suffix not in LARGE:
        return fields
    return {
        **fields,
        "lfs": {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        },
    }


NAME, MODEL = r"(?P<name>[^/]+/[^/]+)", r"/api/models/(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = (
    ("GET", r"/api/whoami-v2", Handler.who),
    ("GET", MODEL, Handler.info),
    ("GET", rf"{MODEL}/revision/{REVISION}", Handler.info),
    ("GET", rf"{MODEL}/tree/{REVISION}", Handler.tree),
    ("GET", rf"{MODEL}/tree/{REVISION}/(?P<folder>.+)", Handler.tree),
    ("POST", rf"{MODEL}/paths-info/{REVISION}", Handler.paths),
    ("GET", rf"{MODEL}/refs", Handler.refs),
    ("GET HEAD", rf"/{NAME}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
    ("GET HEAD", r"/lfs/(?P<oid>\w+)", Handler.large),
    ("PUT", r"/lfs/(?P<oid>\w+)", Handler.upload),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", rf"{MODEL}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", rf"{MODEL}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("POST", rf"{MODEL}/commit/{REVISION}", Handler.commit),
)

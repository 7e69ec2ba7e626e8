"""A small model Hub on loopback, so that the real `huggingface_hub` client can be tested without a network.

Everything is kept in memory and goes away with the server. Only the standard library is needed, except that card
metadata is read with PyYAML (which `huggingface_hub` depends on). Model repositories only: no datasets, no Spaces, no
Xet (clients must set `HF_HUB_DISABLE_XET=1` to upload large files), no pagination.

| request                                            | what it does                                          |
| -------------------------------------------------- | ----------------------------------------------------- |
| `POST /api/repos/create`                           | make a repository, 409 if it exists                   |
| `POST /api/validate-yaml`                          | check the metadata of a model card, no token needed   |
| `GET /api/models/R[/revision/V]`                   | model info: sha, siblings, tags, card metadata        |
| `GET /api/models/R/tree/V[/PATH]`                  | files below a folder                                  |
| `HEAD`, `GET /R/resolve/V/PATH`                    | download: ETag, X-Repo-Commit, X-Linked-*             |
| `POST /api/models/R/branch/B`                      | make a branch                                         |
| `POST /api/models/R/preupload/V`                   | regular or LFS, from `.gitattributes` and the size    |
| `POST /R.git/info/lfs/objects/batch`, `.../verify` | where to upload large files; check one that was       |
| `PUT /lfs-upload/TICKET`                           | content of a large file; size and sha256 are checked  |
| `POST /api/models/R/commit/V`                      | ndjson commit, `?create_pr=1` opens a pull request    |

R is a repository, V a revision (branch, `refs/pr/N`, commit). As on the real Hub: writing needs a token and a
namespace of its user (401, 403); an unknown or foreign private repository is 404, or 401 without a token; a wrong
token is 401 everywhere. Anything not in the table answers 501, so that a new client call is noticed; so does a
request for another host, when the server is used as a proxy.
"""

import base64
import dataclasses
import fnmatch
import hashlib
import json
import re
import secrets
import threading
import traceback
from datetime import UTC, datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


MAX_REGULAR_SIZE = 10 * 2**20
LFS_SUFFIXES = "bin ckpt gz h5 model msgpack npy npz onnx ot parquet pickle pkl pt pth safetensors tar tgz zip".split()
GIT_ATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclasses.dataclass
class Request:
    """What a handler sees, and with its status a line of `HubServer.requests`; `path` is unquoted."""

    method: str
    path: str
    query: dict[str, str]
    headers: Any
    body: bytes = dataclasses.field(repr=False)
    status: int = 0

    @property
    def with_token(self) -> bool:
        return "Authorization" in self.headers

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


class Response(NamedTuple):
    """What a handler returns, unless it is just the JSON body of a 200."""

    body: bytes | dict | list
    status: int = 200
    headers: dict[str, str] = {}


class HubError(Exception):
    """An answer other than 2xx; `code` becomes the X-Error-Code header that clients turn into an exception class."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers["X-Error-Message"] = message.encode("ascii", "replace").decode().replace("\n", " ")
        self.response = Response({"error": message}, status, headers | ({"X-Error-Code": code} if code else {}))


@dataclasses.dataclass(frozen=True)
class File:
    """Content at some path of a commit."""

    data: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self) -> bytes:
        """What Git stores for a large file."""
        lines = "version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {len(self.data)}", ""
        return "\n".join(lines).encode()

    @cached_property
    def oid(self) -> str:
        """Git's id of the blob."""
        blob = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    @property
    def lfs_info(self) -> dict:
        info = {"oid": self.sha256, "sha256": self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        return {"lfs": info} if self.lfs else {}


class Commit(NamedTuple):
    """One commit; `tree` maps a path to its file."""

    sha: str
    date: str
    tree: dict[str, File]

    def wants_lfs(self, path: str, size: int) -> bool:
        """Whether a file added on top of this commit is stored as a large file."""
        attributes = self.tree.get(".gitattributes", File(b"")).data.decode().splitlines()
        patterns = [line.split()[0] for line in attributes if "filter=lfs" in line]
        name = path.rsplit("/", 1)[-1]
        return size > MAX_REGULAR_SIZE or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


class Repo:
    """History, references and uploaded large files of one repository."""

    def __init__(self, repo_id: str, private: bool):
        self.id, self.private, self.pulls = repo_id, private, 0
        self.commits: dict[str, Commit] = {}
        self.branches: dict[str, str] = {}  # name to sha: "main", "refs/pr/1"...
        self.lfs: dict[str, bytes] = {}  # sha256 to content
        self.commit("main", {".gitattributes": File(GIT_ATTRIBUTES)}, "initial commit")

    def find(self, revision: str) -> Commit:
        sha = self.branches.get(revision)
        if sha is None and re.fullmatch("[0-9a-f]{7,40}", revision):
            sha = next((known for known in self.commits if known.startswith(revision)), None)
        if sha is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def commit(self, branch: str, tree: dict[str, File], title: str, parent: str = "") -> str:
        tree = dict(sorted(tree.items()))
        seed = [self.id, len(self.commits), parent, title, {path: file.oid for path, file in tree.items()}]
        sha = hashlib.sha1(json.dumps(seed).encode()).hexdigest()
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.commits[sha] = Commit(sha, date, tree)
        self.branches[branch] = sha
        return sha

    def lfs_file(self, value: dict) -> File:
        """A large file that was uploaded, from the `oid` and `size` a client claims."""
        data = self.lfs.get(value["oid"])
        if data is None or value.get("size", len(data)) != len(data):
            raise HubError(404, f"LFS object {value['oid']} was not uploaded, or its size differs")
        return File(data, lfs=True)

    def apply(self, tree: dict[str, File], kind: str, value: dict):
        """Apply one line of a commit to the tree."""
        path = value["path"]
        if not path.strip("/") or path.startswith("/") or {"..", ".", ".git"} & set(path.split("/")):
            raise HubError(400, f"Invalid path: {path}")
        if kind == "file":
            tree[path] = File(base64.b64decode(value["content"], validate=True))
            if len(tree[path].data) > MAX_REGULAR_SIZE:
                raise HubError(400, f"{path} is larger than 10 MiB and must be uploaded with LFS")
        elif kind == "lfsFile":
            tree[path] = self.lfs_file(value)
        else:
            raise HubError(400, f"Unknown commit operation: {kind}")


def read_card(readme: bytes) -> tuple[dict, list[str]]:
    """Metadata of a model card, and what the Hub would refuse in it (the common cases)."""
    import yaml

    match = re.match(r"\s*---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|$)", readme.decode(errors="replace"), re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        return {}, [f"YAML: {error}"]
    if not isinstance(data or {}, dict):
        return {}, ["the metadata must be a mapping"]
    data, errors = data or {}, []
    for key in ("license", "language", "tags", "datasets", "metrics", "base_model", "library_name", "pipeline_tag"):
        if not all(isinstance(value, str) for value in as_list(data.get(key))):
            errors.append(f'"{key}" must be a string or an array of strings')
    return data, errors


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


ROUTES: list[tuple[str, re.Pattern, bool, str]] = []


def route(methods: str, pattern: str, write: bool = False):
    """Register a method of HubServer; {repo} (looked up, access checked), {rev}... become its arguments."""
    groups = {"repo": r"(?P<repo>[^/]+(?:/[^/]+)?)", "path": "(?P<path>.+)"}
    regex = re.sub(r"\{(\w+)\}", lambda m: groups.get(m[1], f"(?P<{m[1]}>[^/]+)"), pattern)

    def register(function):
        ROUTES.extend((method, re.compile(regex), write, function.__name__) for method in methods.split())
        return function

    return register


class HubServer:
    """The Hub: `with HubServer() as server:`, then point clients to `server.url` with `server.token`."""

    def __init__(self) -> None:
        self.user, self.token = "user", f"hf_{secrets.token_hex(16)}"
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self._tickets: dict[str, tuple[Repo, str, int]] = {}
        self._lock = threading.RLock()
        self._http = _HTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # For tests: look inside, and prepare repositories without a client

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path to content, large files included (and the `.gitattributes` every repository starts with)."""
        with self._lock:
            return {path: file.data for path, file in self.repos[repo_id].find(revision).tree.items()}

    def put(self, repo_id: str, files: dict[str, bytes | str], revision: str = "main", private: bool = False) -> str:
        """Commit files directly, making repository and branch if needed; returns the sha."""
        with self._lock:
            repo = self.repos.setdefault(repo_id, Repo(repo_id, private))
            head = repo.find(revision if revision in repo.branches else "main")
            data = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
            new = {path: File(content, head.wants_lfs(path, len(content))) for path, content in data.items()}
            return repo.commit(revision, head.tree | new, "put", parent=head.sha)

    # Dispatch and access

    def handle(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        """Answer one request and log it."""
        local = target.startswith("/")  # else it was sent to the server as a proxy, to get somewhere else
        path, query = urlsplit(target)[2:4] if local else (target, "")
        options = {key: values[-1] for key, values in parse_qs(query).items()}
        request = Request(method, unquote(path), options, headers, body)
        with self._lock:
            try:
                answer = self._dispatch(request, path)
                response = answer if isinstance(answer, Response) else Response(answer)
            except HubError as error:
                response = error.response
            except Exception:  # 400 and not 500, which clients try again
                response = HubError(400, f"Malformed request, or a bug: {traceback.format_exc()}").response
            request.status = response.status
            self.requests.append(request)
        return response

    def _dispatch(self, request: Request, path: str) -> Any:
        if request.headers.get("Authorization") not in (None, f"Bearer {self.token}"):
            raise HubError(401, "Invalid credentials in Authorization header")
        for method, regex, write, name in ROUTES:
            if method == request.method and (match := regex.fullmatch(path)):
                arguments: dict[str, Any] = {key: unquote(value) for key, value in match.groupdict().items()}
                if write and not request.with_token:
                    raise HubError(401, "Invalid username or password.")
                if "repo" in arguments:
                    arguments["repo"] = self._repo(request, arguments["repo"], write)
                return getattr(self, name)(request, **arguments)
        raise HubError(501, f"{request.method} {path} is not implemented by this test server")

    def _mine(self, repo_id: str) -> bool:
        return repo_id.split("/")[0] == self.user

    def _repo(self, request: Request, repo_id: str, write: bool) -> Repo:
        repo = self.repos.get(repo_id)
        if (repo is None or repo.private) and not request.with_token:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if repo is None or (repo.private and not self._mine(repo_id)):
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write and not self._mine(repo_id):
            raise HubError(403, f"You don't have the rights to write to {repo_id}")
        return repo

    # Account and repositories

    @route("POST", "/api/repos/create", write=True)
    def create_repo(self, request: Request) -> Any:
        if request.json.get("type") not in (None, "model"):
            raise HubError(501, "This test server only has model repositories")
        repo_id = f"{request.json['organization'] or self.user}/{request.json['name']}"
        if not self._mine(repo_id):
            raise HubError(403, f"You don't have the rights to create {repo_id}")
        url = f"{self.url}/{repo_id}"
        if repo_id in self.repos:
            return Response({"error": "You already created this model repo", "url": url}, 409)
        self.repos[repo_id] = Repo(repo_id, request.json.get("visibility") == "private")
        return {"url": url, "name": repo_id, "id": repo_id}

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, request: Request) -> Response:
        data, errors = read_card(request.json["content"].encode())
        warnings = [] if data or errors else ["empty or missing yaml metadata in repo card"]
        body = {"errors": errors, "warnings": warnings}
        return Response({k: [{"message": text} for text in v] for k, v in body.items()}, 400 if errors else 200)

    # Reading

    @route("GET", "/api/models/{repo}/revision/{rev}")
    @route("GET", "/api/models/{repo}")
    def model_info(self, request: Request, repo: Repo, rev: str = "main") -> dict:
        commit = repo.find(rev)
        card, _ = read_card(commit.tree.get("README.md", File(b"")).data)
        siblings = [{"rfilename": path} for path in commit.tree]
        tags = as_list(card.get("library_name")) + as_list(card.get("tags"))
        for key, prefix in {"base_model": "base_model", "license": "license", "datasets": "dataset"}.items():
            tags += [f"{prefix}:{value}" for value in as_list(card.get(key))]
        if b'"auto_map"' in commit.tree.get("config.json", File(b"")).data:
            tags.append("custom_code")
        info = {"_id": repo.id, "id": repo.id, "modelId": repo.id, "author": repo.id.split("/")[0], "sha": commit.sha}
        info |= {"private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        info |= {"lastModified": commit.date, "createdAt": next(iter(repo.commits.values())).date}
        info |= {key: card[key] for key in ("library_name", "pipeline_tag", "model-index") if key in card}
        return info | {"siblings": siblings, "tags": tags, "cardData": card}

    @route("GET", "/api/models/{repo}/tree/{rev}/{path}")
    @route("GET", "/api/models/{repo}/tree/{rev}")
    def tree(self, request: Request, repo: Repo, rev: str, path: str = "") -> list:
        folder = f"{path.strip('/')}/" if path else ""
        inside = {name: file for name, file in repo.find(rev).tree.items() if name.startswith(folder)}
        if folder and not inside:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return [
            {"type": "file", "path": name, "oid": file.oid, "size": len(file.data), **file.lfs_info}
            for name, file in inside.items()
        ]

    @route("GET HEAD", "/{repo}/resolve/{rev}/{path}")
    def resolve(self, request: Request, repo: Repo, rev: str, path: str) -> Response:
        commit = repo.find(rev)
        if path not in commit.tree:
            raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.sha)
        file = commit.tree[path]
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{file.etag}"'}
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        return Response(file.data, 200, headers)

    # Writing

    @route("POST", "/api/models/{repo}/branch/{name}", write=True)
    def create_branch(self, request: Request, repo: Repo, name: str) -> dict:
        repo.branches[name] = repo.find(request.json.get("startingPoint") or "main").sha
        return {}

    @route("POST", "/api/models/{repo}/preupload/{rev}", write=True)
    def preupload(self, request: Request, repo: Repo, rev: str) -> dict:
        head, files = repo.find(rev), []
        for path, size in ((file["path"], file["size"]) for file in request.json["files"]):
            mode = "lfs" if head.wants_lfs(path, size) else "regular"
            oid = head.tree[path].etag if path in head.tree else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files, "commitOid": head.sha}

    @route("POST", "/{repo}.git/info/lfs/objects/batch", write=True)
    def lfs_batch(self, request: Request, repo: Repo) -> dict:
        if request.json["operation"] != "upload" or "basic" not in request.json["transfers"]:
            raise HubError(501, "This test server only has basic LFS uploads")
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in request.json["objects"]]
        for wanted in objects:
            if wanted["oid"] not in repo.lfs:
                ticket = secrets.token_hex(8)
                self._tickets[ticket] = repo, wanted["oid"], wanted["size"]
                hrefs = {"upload": f"lfs-upload/{ticket}", "verify": f"{repo.id}.git/info/lfs/objects/verify"}
                wanted["actions"] = {action: {"href": f"{self.url}/{href}"} for action, href in hrefs.items()}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs-upload/{ticket}")
    def lfs_upload(self, request: Request, ticket: str) -> dict:
        """The ticket stands for the signature of a storage URL: no token here, as on the real Hub."""
        if ticket not in self._tickets:
            raise HubError(403, "Request has expired")
        repo, oid, size = self._tickets[ticket]
        if len(request.body) != size or hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The content does not have the announced size and sha256")
        repo.lfs[oid] = request.body
        return {}

    @route("POST", "/{repo}.git/info/lfs/objects/verify", write=True)
    def lfs_verify(self, request: Request, repo: Repo) -> dict:
        repo.lfs_file(request.json)
        return {}

    @route("POST", "/api/models/{repo}/commit/{rev}", write=True)
    def commit(self, request: Request, repo: Repo, rev: str) -> dict:
        head, pull = repo.find(rev), bool(request.query.get("create_pr"))
        header, *operations = (json.loads(line) for line in request.body.splitlines() if line.strip())
        if header["key"] != "header" or not header["value"]["summary"]:
            raise HubError(400, "A commit starts with a header that has a summary")
        header, tree = header["value"], dict(head.tree)
        if not head.sha.startswith(header.get("parentCommit") or ""):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        if not pull and rev not in repo.branches:
            raise HubError(400, f"{rev} is not a branch")
        for operation in operations:
            repo.apply(tree, operation["key"], operation["value"])
        if errors := read_card(tree.get("README.md", File(b"")).data)[1]:
            raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
        repo.pulls += pull
        branch = f"refs/pr/{repo.pulls}" if pull else rev
        sha = repo.commit(branch, tree, header["summary"], head.sha)
        url = f"{self.url}/{repo.id}"
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}"}
        return answer | ({"pullRequestUrl": f"{url}/discussions/{repo.pulls}"} if pull else {})


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Nothing: clients that go away are the usual cause, and a bug shows as a dropped connection."""


class _Handler(BaseHTTPRequestHandler):
    """HTTP in front of HubServer.handle, with connections kept open."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body leave together, which spares a delay per answer
    timeout = 60

    def _answer(self):
        if "Transfer-Encoding" in self.headers:  # refused by storage servers too
            self.close_connection = True
            response = HubError(411, "Content-Length is required").response
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            response = self.hub.handle(self.command, self.path, self.headers, body)
        raw = isinstance(response.body, bytes)
        data = response.body if raw else json.dumps(response.body).encode()
        headers = {"Content-Type": "application/octet-stream" if raw else "application/json"}
        self.send_response(response.status)
        for name, value in (headers | response.headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = _answer

    def log_message(self, format, *args):
        """Quiet: see HubServer.requests."""

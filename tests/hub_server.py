"""A small model Hub on loopback, so that the real `huggingface_hub` client can be tested without a network.

Everything is kept in memory and goes away with the server. Only the standard library is needed. Model repositories
only: no datasets, no Spaces, no large files (a client is told to send every file within its commit), no pagination.

| request                                            | what it does                                          |
| -------------------------------------------------- | ----------------------------------------------------- |
| `POST /api/repos/create`                           | make a repository, 409 if it exists                   |
| `POST /api/validate-yaml`                          | accept the metadata of a model card                   |
| `GET /api/models/R[/revision/V]`                   | model info: sha, siblings                             |
| `GET /api/models/R/tree/V[/PATH]`                  | files below a folder                                  |
| `HEAD`, `GET /R/resolve/V/PATH`                    | download: ETag, X-Repo-Commit                         |
| `POST /api/models/R/branch/V`                      | make a branch                                         |
| `POST /api/models/R/preupload/V`                   | how files are sent: all of them within the commit     |
| `POST /api/models/R/commit/V`                      | ndjson commit to a branch                             |

R is a repository, V a revision (branch, commit). As on the real Hub: what writes, and a private repository, needs the
token (401), and an unknown repository is 404, or 401 without a token. Anything not in the table answers 501, so that a
new client call is noticed; so does a request for another host, when the server is used as a proxy.
"""

import base64
import dataclasses
import hashlib
import json
import re
import secrets
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit


GROUPS = {"repo": r"(?P<repo>[^/]+(?:/[^/]+)?)", "rev": "(?P<rev>[^/]+)", "path": "(?P<path>.+)"}
ROUTES = {
    "POST /api/repos/create": "create",
    "POST /api/validate-yaml": "validate",
    "GET /api/models/{repo}(?:/revision/{rev})?": "info",
    "GET /api/models/{repo}/tree/{rev}(?:/{path})?": "tree",
    "(?:GET|HEAD) /{repo}/resolve/{rev}/{path}": "resolve",
    "POST /api/models/{repo}/branch/{rev}": "branch",
    "POST /api/models/{repo}/preupload/{rev}": "preupload",
    "POST /api/models/{repo}/commit/{rev}": "commit",
}
PATTERNS = {re.compile(route.format(**GROUPS)): name for route, name in ROUTES.items()}


@dataclasses.dataclass
class Request:
    """What a handler sees, and with its status a line of `HubServer.requests`; `path` is unquoted."""

    method: str
    path: str
    with_token: bool
    body: bytes = dataclasses.field(repr=False)
    status: int = 0

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

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        headers = {"X-Error-Message": message.encode("ascii", "replace").decode().replace("\n", " ")}
        self.response = Response({"error": message}, status, headers | ({"X-Error-Code": code} if code else {}))


class Repo:
    """History and branches of one repository."""

    def __init__(self, repo_id: str, private: bool = False):
        self.id, self.private = repo_id, private
        self.commits: dict[str, dict[str, bytes]] = {}  # sha to path to content
        self.branches: dict[str, str] = {}  # name to sha
        self.commit("main", {})

    def find(self, revision: str) -> str:
        """The sha of a revision."""
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def commit(self, branch: str, tree: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{self.id} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(sorted(tree.items())), sha
        return sha


class HubServer:
    """The Hub: `with HubServer() as server:`, then point clients to `server.url` with `server.token`."""

    def __init__(self) -> None:
        self.user, self.token = "user", f"hf_{secrets.token_hex(16)}"
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
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
        """Path to content."""
        with self._lock:
            repo = self.repos[repo_id]
            return dict(repo.commits[repo.find(revision)])

    def put(self, repo_id: str, files: dict[str, bytes | str]) -> str:
        """Commit files to `main` directly, making the repository if needed; returns the sha."""
        with self._lock:
            repo = self.repos.setdefault(repo_id, Repo(repo_id))
            new = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
            return repo.commit("main", repo.commits[repo.find("main")] | new)

    # Dispatch and access

    def handle(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        """Answer one request and log it."""
        path = urlsplit(target).path if target.startswith("/") else target  # a whole URL is another host's
        with_token = headers.get("Authorization") == f"Bearer {self.token}"
        request = Request(method, unquote(path), with_token, body)
        with self._lock:
            try:
                answer = self._dispatch(request, f"{method} {path}")
                response = answer if isinstance(answer, Response) else Response(answer)
            except HubError as error:
                response = error.response
            except Exception:  # 400 and not 500, which clients try again
                response = HubError(400, f"Malformed request, or a bug: {traceback.format_exc()}").response
            request.status = response.status
            self.requests.append(request)
        return response

    def _dispatch(self, request: Request, line: str) -> Any:
        for pattern, name in PATTERNS.items():
            if match := pattern.fullmatch(line):
                given: dict[str, Any] = {key: unquote(value) for key, value in match.groupdict().items() if value}
                if request.method == "POST" and name != "validate" and not request.with_token:
                    raise HubError(401, "Invalid username or password.")
                if "repo" in given:
                    given["repo"] = self._repo(request, given["repo"])
                return getattr(self, name)(request, **given)
        raise HubError(501, f"{line} is not implemented by this test server")

    def _repo(self, request: Request, repo_id: str) -> Repo:
        repo = self.repos.get(repo_id)
        if (repo is None or repo.private) and not request.with_token:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if repo is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    # Requests

    def create(self, request: Request) -> Any:
        repo_id = f"{request.json['organization'] or self.user}/{request.json['name']}"
        url = f"{self.url}/{repo_id}"
        if repo_id in self.repos:
            return Response({"error": "You already created this model repo", "url": url}, 409)
        self.repos[repo_id] = Repo(repo_id, request.json.get("visibility") == "private")
        return {"url": url, "name": repo_id, "id": repo_id}

    def validate(self, request: Request) -> dict:
        return {"errors": [], "warnings": []}

    def info(self, request: Request, repo: Repo, rev: str = "main") -> dict:
        sha = repo.find(rev)
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return {"id": repo.id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}

    def tree(self, request: Request, repo: Repo, rev: str, path: str = "") -> list:
        folder = f"{path}/" if path else ""
        inside = {name: data for name, data in repo.commits[repo.find(rev)].items() if name.startswith(folder)}
        if folder and not inside:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return [
            {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
            for name, data in inside.items()
        ]

    def resolve(self, request: Request, repo: Repo, rev: str, path: str) -> Response:
        sha = repo.find(rev)
        if path not in repo.commits[sha]:
            answer = HubError(404, "Entry not found", "EntryNotFound").response
            return answer._replace(headers=answer.headers | {"X-Repo-Commit": sha})
        data = repo.commits[sha][path]
        return Response(data, 200, {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def branch(self, request: Request, repo: Repo, rev: str) -> dict:
        repo.branches[rev] = repo.find(request.json.get("startingPoint") or "main")
        return {}

    def preupload(self, request: Request, repo: Repo, rev: str) -> dict:
        each = {"uploadMode": "regular", "shouldIgnore": False}
        return {
            "files": [{"path": file["path"], **each} for file in request.json["files"]],
            "commitOid": repo.find(rev),
        }

    def commit(self, request: Request, repo: Repo, rev: str) -> dict:
        """Lines of JSON: a header, then files with their content."""
        header, *operations = (json.loads(line) for line in request.body.splitlines())
        if header["key"] != "header" or {each["key"] for each in operations} - {"file"} or rev not in repo.branches:
            raise HubError(501, "This test server only adds files to branches")
        added = (each["value"] for each in operations)
        new = {file["path"]: base64.b64decode(file["content"], validate=True) for file in added}
        sha = repo.commit(rev, repo.commits[repo.find(rev)] | new)
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.url}/{repo.id}/commit/{sha}"}


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

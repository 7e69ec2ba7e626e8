"""A small model Hub on loopback, so that the real `huggingface_hub` client can be tested without a network.

Everything is kept in memory and goes away with the server. Model repositories only: no datasets, no Spaces, no large
files (a client is told to send every file within its commit), no pagination.

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
import secrets
import socket
import threading
from typing import Annotated, Any

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, Response


MODEL = "/api/models/{repo:path}"


@dataclasses.dataclass
class Request:
    """A line of `HubServer.requests`; `path` is unquoted, and the whole URL for another host."""

    method: str
    path: str
    with_token: bool
    status: int = 500  # until there is an answer


class HubError(fastapi.HTTPException):
    """An answer other than 2xx; clients turn `code` into an exception class."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str):
        super().__init__(status, message, {"X-Error-Message": message, "X-Error-Code": code, **headers})


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
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        # h11 reads requests for other hosts, too
        settings = uvicorn.Config(application(self), http="h11", lifespan="off", log_level="critical")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._server.should_exit = True
        self._thread.join()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path to content."""
        repo = self.repos[repo_id]
        return dict(repo.commits[repo.find(revision)])

    def put(self, repo_id: str, files: dict[str, bytes | str]) -> str:
        """Commit files to `main` directly, making the repository if needed; returns the sha."""
        repo = self.repos.setdefault(repo_id, Repo(repo_id))
        new = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        return repo.commit("main", repo.commits[repo.find("main")] | new)


def application(hub: HubServer) -> fastapi.FastAPI:
    """The requests that a Hub answers. They run one at a time, in its thread."""
    app = fastapi.FastAPI(openapi_url=None, redirect_slashes=False)
    app.router.default = JSONResponse({"error": "this is not implemented by the server of the tests"}, 501)

    def has_token(request: fastapi.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {hub.token}"

    @app.middleware("http")
    async def note(request: fastapi.Request, answer: Any) -> Response:
        noted = Request(request.method, request.scope["path"], has_token(request))
        hub.requests.append(noted)
        response: Response = await answer(request)
        noted.status = response.status_code
        return response

    async def writer(request: fastapi.Request) -> None:
        if not has_token(request):
            raise HubError(401, "Invalid username or password.")

    async def found(request: fastapi.Request, repo: str) -> Repo:
        known = hub.repos.get(repo)
        if (known is None or known.private) and not has_token(request):
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if known is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return known

    Found = Annotated[Repo, fastapi.Depends(found)]
    Content = Annotated[dict, fastapi.Body()]
    writes = {"dependencies": [fastapi.Depends(writer)]}

    @app.post("/api/repos/create", **writes)
    async def create(content: Content) -> Any:
        repo_id = f"{content.get('organization') or hub.user}/{content['name']}"
        url = f"{hub.url}/{repo_id}"
        if repo_id in hub.repos:
            return JSONResponse({"error": "You already created this model repo", "url": url}, 409)
        hub.repos[repo_id] = Repo(repo_id, content.get("visibility") == "private")
        return {"url": url, "name": repo_id, "id": repo_id}

    @app.post("/api/validate-yaml")
    async def validate() -> dict:
        return {"errors": [], "warnings": []}

    @app.get(MODEL + "/tree/{rev}/{path:path}")
    @app.get(MODEL + "/tree/{rev}")
    async def tree(repo: Found, rev: str, path: str = "") -> list:
        folder = f"{path}/" if path else ""
        inside = {name: data for name, data in repo.commits[repo.find(rev)].items() if name.startswith(folder)}
        if folder and not inside:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        return [
            {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
            for name, data in inside.items()
        ]

    @app.get(MODEL)
    @app.get(MODEL + "/revision/{rev}")  # is registered first
    async def info(repo: Found, rev: str = "main") -> dict:
        sha = repo.find(rev)
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return {"id": repo.id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}

    @app.api_route("/{repo:path}/resolve/{rev}/{path:path}", methods=["GET", "HEAD"])
    async def resolve(repo: Found, rev: str, path: str) -> Response:
        sha = repo.find(rev)
        if path not in repo.commits[sha]:
            raise HubError(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": sha})
        data = repo.commits[sha][path]
        return Response(data, headers={"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    @app.post(MODEL + "/branch/{rev}", **writes)
    async def branch(repo: Found, rev: str, content: Content) -> dict:
        repo.branches[rev] = repo.find(content.get("startingPoint") or "main")
        return {}

    @app.post(MODEL + "/preupload/{rev}", **writes)
    async def preupload(repo: Found, rev: str, content: Content) -> dict:
        each = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": file["path"], **each} for file in content["files"]], "commitOid": repo.find(rev)}

    @app.post(MODEL + "/commit/{rev}", **writes)
    async def commit(repo: Found, rev: str, request: fastapi.Request) -> dict:
        """Lines of JSON: a header, then files with their content."""
        header, *operations = (json.loads(line) for line in (await request.body()).splitlines())
        if header["key"] != "header" or {each["key"] for each in operations} - {"file"} or rev not in repo.branches:
            raise HubError(501, "This test server only adds files to branches")
        added = (each["value"] for each in operations)
        new = {file["path"]: base64.b64decode(file["content"], validate=True) for file in added}
        sha = repo.commit(rev, repo.commits[repo.find(rev)] | new)
        return {"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{repo.id}/commit/{sha}"}

    return app

"""The test Hub against the real client: what a Hub refuses is refused. What it accepts, test_hub.py sees come back."""

import hashlib
import http.client
import json
from urllib.parse import quote

import pytest


def raw(hub, method, path, body=None, token=None, **headers):
    """A request without huggingface_hub: status, headers, body."""
    connection = http.client.HTTPConnection("127.0.0.1", int(hub.url.rsplit(":", 1)[1]), timeout=10)
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    data = json.dumps(body) if isinstance(body, (dict, list)) else body
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    result = answer.status, answer.headers, answer.read()
    connection.close()
    return result


def model_info(hub, repo_id, revision="main"):
    status, _, body = raw(hub, "GET", f"/api/models/{repo_id}/revision/{quote(revision, safe='')}?blobs=1")
    assert status == 200
    return json.loads(body)


def test_access_and_cards(hub):
    """What is refused, and the exceptions that the client makes of it."""
    hub.put("user/notes", {"README.md": "hello"})
    hub.put("someone/else", {"README.md": "hello"})
    hub.put("someone/private", {"README.md": "hello"}, private=True)
    hub.run("""
        import pytest
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        api, anyone, wrong = HfApi(), HfApi(token=False), HfApi(token="hf_wrong")

        def upload(api, repo_id, path="x.txt", content=b"x"):
            api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=repo_id)

        def refused(status, function, *args, error=HfHubHTTPError):
            with pytest.raises(error) as caught:
                function(*args)
            assert caught.value.response.status_code == status

        refused(401, upload, anyone, "user/notes")
        refused(401, upload, wrong, "user/notes")
        refused(401, wrong.model_info, "user/notes")
        refused(403, upload, api, "someone/else")
        refused(404, upload, api, "user/missing", error=RepositoryNotFoundError)
        refused(401, anyone.create_repo, "user/new")
        refused(403, api.create_repo, "someone/new")
        for repo_id in ("user/missing", "missing", "someone/private"):
            refused(404, api.model_info, repo_id, error=RepositoryNotFoundError)
            refused(401, anyone.model_info, repo_id, error=RepositoryNotFoundError)
            refused(404, api.hf_hub_download, repo_id, "README.md", error=RepositoryNotFoundError)

        for metadata in ("tags: [1]", "a: [", "- a"):
            with pytest.raises(ValueError, match="Invalid metadata in README.md"):
                upload(api, "user/notes", "README.md", f"---\\n{metadata}\\n---\\ntext".encode())
        with pytest.warns(UserWarning, match="empty or missing yaml"):
            upload(api, "user/notes", "README.md", b"text")
    """)
    assert hub.files("user/notes")["README.md"] == b"text"


def test_downloads_by_hand(hub):
    sha = hub.put("user/notes", {"w.bin": b"0123456789", "t.txt": "text"})
    status, headers, body = raw(hub, "HEAD", "/user/notes/resolve/main/w.bin")
    assert (status, body, headers["Content-Length"], headers["X-Repo-Commit"]) == (200, b"", "10", sha)
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(b"0123456789").hexdigest()}"'
    assert raw(hub, "GET", "/user/notes/resolve/main/w.bin")[2] == b"0123456789"
    assert "X-Linked-Etag" not in raw(hub, "HEAD", "/user/notes/resolve/main/t.txt")[1]
    assert raw(hub, "GET", "/user/notes/resolve/main/none")[1]["X-Error-Code"] == "EntryNotFound"
    assert raw(hub, "GET", "/api/datasets/user/notes")[0] == 501


def test_lfs_uploads_are_checked(hub):
    hub.put("user/notes", {})
    data, token = b"weights", hub.token
    wanted = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
    batch = "/user/notes.git/info/lfs/objects/batch"
    payload = {"operation": "upload", "transfers": ["basic"], "objects": [wanted]}
    lines = [
        {"key": "header", "value": {"summary": "add"}},
        {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", **wanted}},
    ]
    commit = "\n".join(map(json.dumps, lines))
    assert raw(hub, "POST", batch, payload)[0] == 401
    actions = json.loads(raw(hub, "POST", batch, payload, token)[2])["objects"][0]["actions"]
    upload, verify = (actions[name]["href"].removeprefix(hub.url) for name in ("upload", "verify"))
    assert raw(hub, "POST", "/api/models/user/notes/commit/main", commit, token)[0] == 404  # not uploaded yet
    assert raw(hub, "PUT", upload, b"Weights")[0] == 400
    assert raw(hub, "PUT", upload, **{"Transfer-Encoding": "chunked"})[0] == 411
    assert raw(hub, "POST", verify, wanted, token)[0] == 404
    assert raw(hub, "PUT", upload, data)[0] == 200
    assert raw(hub, "POST", verify, wanted, token)[0] == 200
    assert "actions" not in json.loads(raw(hub, "POST", batch, payload, token)[2])["objects"][0]
    assert raw(hub, "POST", "/api/models/user/notes/commit/main", commit, token)[0] == 200
    assert hub.files("user/notes")["w.bin"] == data

    files = [{"path": "a.safetensors", "size": 1}, {"path": "a.txt", "size": 1}, {"path": "b.txt", "size": 11 * 2**20}]
    answer = json.loads(raw(hub, "POST", "/api/models/user/notes/preupload/main", {"files": files}, token)[2])
    assert [file["uploadMode"] for file in answer["files"]] == ["lfs", "regular", "lfs"]


@pytest.mark.parametrize("path", ["../x", "/x", ".git/config", ""])
def test_bad_paths_are_refused(hub, path):
    before = hub.put("user/notes", {})
    lines = [{"key": "header", "value": {"summary": "add"}}, {"key": "file", "value": {"path": path, "content": ""}}]
    commit = "\n".join(map(json.dumps, lines))
    assert raw(hub, "POST", "/api/models/user/notes/commit/main", commit, hub.token)[0] == 400
    assert model_info(hub, "user/notes")["sha"] == before


def test_client_processes(hub):
    done = hub.run(
        """
        import importlib.util, os, sys
        assert os.environ["HF_ENDPOINT"] == sys.stdin.read() + os.environ["EXPECTED"] and os.listdir() == []
        for name in ("hf_relpos", "colorsys"):
            assert importlib.util.find_spec(name) is None
            try:
                __import__(name)
            except ImportError:
                continue
            raise AssertionError(name)
        print("HF_TOKEN" in os.environ, __name__)
        """,
        without=("hf_relpos", "colorsys"),
        extra_env={"EXPECTED": hub.url, "HF_TOKEN": None},
    )
    assert done.stdout.split() == ["False", "__main__"]


def test_client_processes_cannot_leave(hub):
    hub.run("""
        import pytest
        from huggingface_hub import HfApi, get_session

        for url in ("https://huggingface.co/api/whoami-v2", "http://example.com/user/notes"):
            try:
                status = get_session().get(url).status_code
            except Exception as error:  # of httpx, or httpx2
                assert "501" in str(error), error
            else:
                assert status == 501, status
        with pytest.raises(Exception):
            HfApi(endpoint="https://huggingface.co").model_info("bert-base-uncased")
    """)
    assert [(r.status, r.path) for r in hub.requests][:2] == [
        (501, "huggingface.co:443"),
        (501, "http://example.com/user/notes"),
    ]


def test_failures_show_what_the_client_wrote(hub):
    with pytest.raises(pytest.fail.Exception, match=r"exited with 3[\s\S]*seen[\s\S]*also this"):
        hub.run("import sys; print('seen'); print('also this', file=sys.stderr); sys.exit(3)")

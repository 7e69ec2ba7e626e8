"""The test Hub against the real clients: what is pushed comes back, and what a Hub refuses is refused.

Two client processes do all the work with models (`pushed` and `loaded`), and most tests look at what they left.
"""

import hashlib
import http.client
import json
from urllib.parse import quote

import pytest
from hub_fixtures import running_hub
from huggingface_hub import ModelCard


CODE = {
    "__init__.py": "",
    "configuration_tiny.py": """
from transformers import PreTrainedConfig

class TinyConfig(PreTrainedConfig):
    model_type = "tiny-code"
    width: int = 4
""",
    "modeling_tiny.py": """
import torch
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig

class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(config.width))
        self.post_init()

    def forward(self, x):
        return x * self.scale
""",
}

PUSH = """
import json, os, sys
import huggingface_hub, torch
from huggingface_hub import ModelCard, ModelCardData, list_repo_commits, snapshot_download, upload_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, Trainer, TrainingArguments

torch.manual_seed(0)
shared = os.environ["SHARED"]
words = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat on mat".split()
open("vocab.txt", "w").write("\\n".join(words))
tokenizer = BertTokenizer("vocab.txt")
config = BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, max_position_embeddings=16)
model = BertForMaskedLM(config).eval()
batch = tokenizer(["the cat sat on a mat"], return_tensors="pt")
logits, out = {}, {}

def push(name, what, *args, **kwargs):
    out[name] = what.push_to_hub(*args, **kwargs)
    out[name + "_pr"], out[name] = out[name].pr_revision, out[name].oid

data = ModelCardData(license="mit", library_name="transformers", tags=["mine"])
card = ModelCard.from_template(data, template_str="---\\n{{ card_data }}\\n---\\n# Mine\\n")

with torch.no_grad():
    push("first", model, "user/tiny", commit_message="weights")
    push("tokenizer", tokenizer, "user/tiny")
    push("again", model, "user/tiny")
    if huggingface_hub.__version__ < "2":  # validates cards at huggingface.co, whatever HF_ENDPOINT says
        upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="user/tiny")
    else:
        card.push_to_hub("user/tiny")
    model.cls.predictions.bias += 1
    logits["main"] = model(**batch).logits
    push("after_card", model, "user/tiny", commit_message="bias")
    model.cls.predictions.bias += 1
    logits["dev"] = model(**batch).logits
    push("dev", model, "user/tiny", revision="dev")
    model.cls.predictions.bias += 1
    logits["refs/pr/1"] = model(**batch).logits
    push("pr", model, "user/tiny", create_pr=True)

out["titles"] = [commit.title for commit in list_repo_commits("user/tiny")]
folder = snapshot_download("user/tiny", revision="dev")
out["snapshot"] = {name: open(os.path.join(folder, name), "rb").read().hex() for name in os.listdir(folder)}

sys.path.insert(0, shared)
from tiny_code.modeling_tiny import TinyConfig, TinyModel
TinyConfig.register_for_auto_class()
TinyModel.register_for_auto_class("AutoModel")
custom = TinyModel(TinyConfig(width=3))
custom.scale.data += torch.arange(3)
custom.push_to_hub("user/my-code")

rows = [{**tokenizer("the dog sat"), "labels": tokenizer("the dog sat")["input_ids"]}] * 2
args = TrainingArguments("trained", max_steps=2, per_device_train_batch_size=1, report_to="none", use_cpu=True,
                         push_to_hub=True, save_steps=1, hub_strategy="every_save", disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
out["trained"] = trainer.push_to_hub(tags="tested").oid
with torch.no_grad():
    logits["trained"] = model.eval()(**batch).logits

torch.save(logits, os.path.join(shared, "logits.pt"))
json.dump(out, open(os.path.join(shared, "out.json"), "w"))
"""

LOAD = """
import json, os
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

shared = os.environ["SHARED"]
wanted = torch.load(os.path.join(shared, "logits.pt"))
out = {"difference": {}}
tokenizer = AutoTokenizer.from_pretrained("user/tiny")
batch = tokenizer(["the cat sat on a mat"], return_tensors="pt")
for name, expected in wanted.items():
    repo, revision = ("user/trained", "main") if name == "trained" else ("user/tiny", name)
    model = AutoModelForMaskedLM.from_pretrained(repo, revision=revision).eval()
    with torch.no_grad():
        out["difference"][name] = (model(**batch).logits - expected).abs().max().item()
out["fill"] = len(pipeline("fill-mask", model="user/trained")("the [MASK] sat"))

try:
    AutoModel.from_pretrained("user/my-code")
except ValueError as error:
    out["refused"] = str(error)
custom = AutoModel.from_pretrained("user/my-code", trust_remote_code=True)
out["custom"] = [type(custom).__module__, custom(torch.ones(3)).tolist()]
json.dump(out, open(os.path.join(shared, "loaded.json"), "w"))
"""


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory):
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def pushed(shared_hub, tmp_path_factory):
    """One process pushes everything; returns what it noted, and its folder."""
    shared = tmp_path_factory.mktemp("shared")
    (shared / "tiny_code").mkdir()
    for name, text in CODE.items():
        (shared / "tiny_code" / name).write_text(text)
    shared_hub.run(PUSH, extra_env={"SHARED": str(shared)})
    return json.loads((shared / "out.json").read_text()) | {"shared": shared}


@pytest.fixture(scope="module")
def loaded(shared_hub, pushed):
    """Another process, with empty caches and without the custom code, loads it all."""
    shared_hub.run(LOAD, without=("hf_relpos", "tiny_code"), extra_env={"SHARED": str(pushed["shared"])})
    return json.loads((pushed["shared"] / "loaded.json").read_text())


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


def test_pushed_files(shared_hub, pushed):
    files = shared_hub.files("user/tiny")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert json.loads(files["config.json"])["hidden_size"] == 16
    assert set(shared_hub.files("user/my-code")) >= {"configuration_tiny.py", "modeling_tiny.py", "config.json"}


def test_weights_go_through_lfs(shared_hub, pushed):
    siblings = {sibling["rfilename"]: sibling for sibling in model_info(shared_hub, "user/tiny")["siblings"]}
    weights = shared_hub.files("user/tiny")["model.safetensors"]
    assert siblings["model.safetensors"]["lfs"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert "lfs" not in siblings["config.json"]
    assert any(r.method == "PUT" and r.path.startswith("/lfs-upload/") for r in shared_hub.requests)


def test_push_without_changes_makes_no_commit(shared_hub, pushed):
    assert pushed["again"] == pushed["tokenizer"] != pushed["first"]
    assert pushed["titles"] == [
        "bias",
        "Upload README.md with huggingface_hub",
        "Upload tokenizer",
        "weights",
        "initial commit",
    ]


def test_card_survives_the_next_push(shared_hub, pushed):
    card = ModelCard(shared_hub.files("user/tiny")["README.md"].decode())
    assert card.data.license == "mit" and "# Mine" in card.text
    assert {"license:mit", "mine"} <= set(model_info(shared_hub, "user/tiny")["tags"])


def test_branch_and_pull_request_leave_main_alone(shared_hub, pushed):
    weights = {rev: shared_hub.files("user/tiny", rev)["model.safetensors"] for rev in ("main", "dev", "refs/pr/1")}
    assert len(set(weights.values())) == 3
    assert pushed["pr_pr"] == "refs/pr/1"
    assert model_info(shared_hub, "user/tiny")["sha"] == pushed["after_card"]
    assert model_info(shared_hub, "user/tiny", "dev")["sha"] == pushed["dev"]


def test_snapshot_download(shared_hub, pushed):
    assert {k: bytes.fromhex(v) for k, v in pushed["snapshot"].items()} == shared_hub.files("user/tiny", "dev")


def test_trainer_pushes(shared_hub, pushed):
    files = shared_hub.files("user/trained")
    assert {"README.md", "model.safetensors", "tokenizer.json", "training_args.bin"} <= set(files)
    assert "generated_from_trainer" in files["README.md"].decode() and "tested" in files["README.md"].decode()
    assert model_info(shared_hub, "user/trained")["sha"] == pushed["trained"]


def test_loaded_models_are_the_pushed_ones(loaded):
    assert loaded["difference"] == {"main": 0.0, "dev": 0.0, "refs/pr/1": 0.0, "trained": 0.0}
    assert loaded["fill"] == 5


def test_remote_code(shared_hub, loaded):
    module, values = loaded["custom"]
    assert values == [1.0, 2.0, 3.0]
    assert module.startswith("transformers_modules.user.my_hyphen_code")
    assert "trust_remote_code" in loaded["refused"]
    assert "custom_code" in model_info(shared_hub, "user/my-code")["tags"]


def test_every_call_is_implemented(shared_hub, pushed, loaded):
    assert [r for r in shared_hub.requests if r.status in (400, 500, 501)] == []


def test_api(hub):
    """Repositories, single files, tags, commits and settings, through HfApi."""
    hub.run("""
        import pytest
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
        )

        api, repo = HfApi(), "user/notes"
        assert api.whoami()["name"] == "user"
        url = api.create_repo("notes", private=True)
        assert url.repo_id == repo and api.create_repo(repo, exist_ok=True) == url
        with pytest.raises(HfHubHTTPError, match="409"):
            api.create_repo(repo)
        first = api.upload_file(path_or_fileobj=b"one", path_in_repo="a/b.txt", repo_id=repo)
        api.create_tag(repo, tag="v1")
        api.create_branch(repo, branch="old/one", revision="v1")
        api.upload_file(path_or_fileobj=b"three", path_in_repo="a/b.txt", repo_id=repo, commit_message="more")
        with pytest.raises(HfHubHTTPError, match="412"):
            api.delete_file("a/b.txt", repo, parent_commit=first.oid)
        for revision in ("v1", "old/one", first.oid, first.oid[:8]):
            assert open(api.hf_hub_download(repo, "a/b.txt", revision=revision)).read() == "one"
        file, folder = api.get_paths_info(repo, ["a/b.txt", "a", "x"])
        assert file.blob_id == "1d19714ffbc272ba0da6eb419d66123c20527174", file  # Git's own id
        assert folder.path == "a"
        assert [entry.path for entry in api.list_repo_tree(repo)] == [".gitattributes", "a"]
        assert [entry.path for entry in api.list_repo_tree(repo, "a")] == ["a/b.txt"]
        assert [commit.title for commit in api.list_repo_commits(repo)][::2] == ["more", "initial commit"]
        api.delete_folder("a", repo)
        assert api.list_repo_files(repo) == [".gitattributes"]
        with pytest.raises(EntryNotFoundError):
            api.hf_hub_download(repo, "a/b.txt")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(repo, revision="v2")

        anyone = HfApi(token=False)
        with pytest.raises(RepositoryNotFoundError):
            anyone.model_info(repo)
        api.update_repo_settings(repo, visibility="public")
        assert anyone.model_info(repo).private is False
        api.delete_repo(repo)
        assert not api.repo_exists(repo)
    """)


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

        for metadata in ("tags: [1]", "base_model_relation: copy", "model-index: [{results: []}]", "a: [", "- a"):
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
    status, headers, body = raw(hub, "GET", "/user/notes/resolve/main/w.bin", Range="bytes=2-4")
    assert (status, body, headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert raw(hub, "GET", "/user/notes/resolve/main/w.bin", Range="bytes=7-")[2] == b"789"
    assert raw(hub, "GET", "/user/notes/resolve/main/w.bin", Range="bytes=10-")[0] == 416
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

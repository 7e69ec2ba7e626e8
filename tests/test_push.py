"""`hf-relpos push`: what it shows, what it refuses, and what then lies on a Hub."""

import json
import os

import pytest
import torch
from huggingface_hub import ModelCard
from launching import run_code
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from hf_relpos.cli import app
from hf_relpos.conversion import convert
from hf_relpos.conversion.push import plan_upload


CARD = "---\nlicense: mit\nbase_model: google-bert/bert-base-uncased\n---\n# A model\n"
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture
def folder(tmp_path):
    """A converted tiny BERT with a whole card."""
    BertForMaskedLM(BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES)).save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "README.md").write_text("---\nlicense: mit\n---\n")
    convert(tmp_path / "stock", tmp_path / "out")
    return tmp_path / "out"


def run(*arguments):
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def plan(folder, *more):
    """Exit code, and what `--json -` says."""
    result = run(folder, "user/name", "--json", "-", *more)
    assert result.exit_code in (0, 2), result.output
    return result.exit_code, json.loads(result.stdout)


def test_what_would_be_uploaded_is_shown(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", None)
    (folder / "README.md").write_text(CARD)
    (folder / "notes.txt").write_text("mine")
    torch.save({}, folder / "optimizer.pt")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "config.json").write_text("{}")
    code, found = plan(folder)
    assert code == 0 and found["problems"] == [] and found["uploaded"] is None
    assert found["left_out"] == ["checkpoint-1/", "notes.txt", "optimizer.pt"]
    stay = {"notes.txt", "optimizer.pt", "checkpoint-1"}
    assert found["files"] == {path.name: path.stat().st_size for path in folder.iterdir() if path.name not in stay}
    assert {"model.safetensors", "config.json", "README.md", "conversion.json", "modeling_relpos_bert.py"} <= set(
        found["files"]
    )
    shown = run(folder, "user/name")
    assert shown.exit_code == 0 and "nothing was uploaded; add --yes" in shown.stdout
    assert "notes.txt" in shown.stdout


def test_the_uploaded_card_names_the_repository(folder):
    before = (folder / "README.md").read_bytes()
    card = plan_upload(folder, "user/name").card
    assert 'from_pretrained("user/name")' in card and "PATH" not in card
    assert (folder / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    "environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=["no connection", "offline"]
)
def test_an_upload_that_fails_is_one_line(folder, environment):
    code = "import sys; from hf_relpos.cli import app; app(sys.argv[1:])"
    environment = {**os.environ, "HF_TOKEN": "", **environment}
    done = run_code(code, "push", folder, "user/name", "--yes", status=2, env=environment)
    assert done.stderr.splitlines()[-1].startswith("Error: repository = 'user/name'")
    assert "Traceback" not in done.stderr and "could not be uploaded" in done.stderr


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", '{"data": "/home/jo/data"}', "config.json holds /home/jo/ of this machine"),
        ("tokenizer_config.json", '{"x": "C:\\\\Users\\\\jo"}', "tokenizer_config.json holds C:"),
        ("README.md", CARD + "hf_" + "a1" * 17, "README.md holds an access token"),
        ("README.md", CARD + "hf_oauth_" + "a1" * 17, "README.md holds an access token"),
        ("README.md", CARD + "api_org_" + "a1" * 17, "README.md holds an access token"),
        ("tokenizer.json", '{"x": "hf_jwt_' + "a1.a" * 12 + '"}', "tokenizer.json holds an access token"),
        ("README.md", CARD + "{folder}", "README.md holds {folder}"),
        ("README.md", "---\nlicense: [\n---\n", "README.md: its metadata cannot be read"),
        ("README.md", "---\nmodel-index:\n- name: x\n---\n", "README.md: its metadata cannot be read"),
    ],
)
def test_what_must_not_leave_this_machine_is_refused(folder, monkeypatch, name, content, words):
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", None)
    (folder / name).write_text(content.replace("{folder}", str(folder)))
    code, found = plan(folder)
    assert code == 2 and [words.replace("{folder}", str(folder)) in problem for problem in found["problems"]] == [True]
    assert "a1a1" not in json.dumps(found["problems"])
    refused = run(folder, "user/name", "--yes")
    assert refused.exit_code == 2 and "not uploaded" in refused.stderr


def test_addresses_and_words_are_no_paths(folder):
    (folder / "README.md").write_text(CARD + "https://host.org/Users/guide https://example.com/home/user/x")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"/home/user": 3}}}')
    assert plan(folder)[1]["problems"] == []


def test_a_sentence_encoder_without_weights_is_no_checkpoint(folder):
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert plan(folder)[0] == 0
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    result = run(folder, "user/name")
    assert result.exit_code == 2 and "is not a checkpoint" in result.stderr


def test_a_path_in_the_header_of_the_weights_is_seen(folder):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", metadata={"from": "/home/jo/model"})
    (problem,) = plan(folder)[1]["problems"]
    assert "model.safetensors" in problem and "/home/jo/" in problem


@pytest.mark.parametrize(
    "where, repository, words",
    [
        ("nowhere", "user/name", "folder = "),
        ("out", "name", "repository = 'name'"),
        ("out", "a/b/c", "repository = 'a/b/c'"),
    ],
)
def test_what_is_no_upload_is_refused(folder, where, repository, words):
    result = run(folder.parent / where, repository)
    assert result.exit_code == 2 and not result.stdout and words in result.stderr


@pytest.mark.heavy
def test_a_push(hub, folder):
    """Private, again, with a card that the Hub checks; a public repository is refused where a private one is meant."""
    hub.put("user/public", {"a.txt": "a"})
    (folder / "optimizer.pt").write_bytes(b"x")
    hub.run(
        f"""
        from typer.testing import CliRunner
        from hf_relpos.cli import app

        def push(*words):
            return CliRunner().invoke(app, ["push", {str(folder)!r}, *words])

        assert push("user/model").exit_code == 0
        done = push("user/model", "--yes", "--private")
        assert done.exit_code == 0 and "uploaded: " in done.stdout, done.output
        again = push("user/model", "--yes")
        assert again.exit_code == 0, again.output
        for words, reason in (
            (("user/public", "--yes", "--private"), "is public, but private = True"),
            (("someone/else", "--yes"), "could not be uploaded"),
        ):
            refused = push(*words)
            assert refused.exit_code == 2 and reason in refused.stderr, refused.output
        """,
        without=(),
    )
    stay = {"optimizer.pt"}
    wanted = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in stay}
    assert b'("PATH"' in wanted["README.md"]
    wanted["README.md"] = wanted["README.md"].replace(b'("PATH"', b'("user/model"')
    files = hub.files("user/model")
    assert {name: content for name, content in files.items() if name != ".gitattributes"} == wanted
    assert hub.server.repos["user/model"].private and set(hub.files("user/public")) == {".gitattributes", "a.txt"}
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "mit" and card.data.pipeline_tag == "fill-mask"
    # a dry run asks nothing
    first = next(number for number, request in enumerate(hub.requests) if request.path == "/api/repos/create")
    assert not any("user/model" in request.path for request in hub.requests[:first])

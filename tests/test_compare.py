"""`hf-relpos compare`: what it prints, writes and refuses."""

import errno
import json
from pathlib import Path

import pytest
import torch
from launching import run_command as run
from oracles import stir, tiny_model, tiny_sizes
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.cli.output import STDOUT, check_json, write_json
from hf_relpos.evaluation.compare import compare_models


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the key is remember it . cat sat mat red sun sky".split()
WORDS += [f"{n:02}" for n in range(10, 100)] + [f"##{n:03}" for n in range(1000)]


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_json_has_no_nan(capsys):
    write_json(STDOUT, {"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": float("-inf")}, "d": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [None, 1.5, [None]], "b": {"c": None}, "d": "NaN"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher and a student with tokenizers, and files of each kind."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    stir(BertForMaskedLM(BertConfig(**tiny_sizes(**sizes, initializer_range=0.2)))).save_pretrained(folder / "teacher")
    tiny_model(RelPosBertForMaskedLM, "alibi", **sizes).save_pretrained(folder / "student")
    tiny_model(RelPosBertModel, "alibi", **sizes).save_pretrained(folder / "bare")
    tiny_model(RelPosBertModel, "alibi").save_pretrained(folder / "small")
    for name in ("teacher", "student"):
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text("The cat sat. The sun is red. Remember the key.\n\n" * 200)
    (folder / "docs.tsv").write_text("id\ttext\na\tthe cat sat\nb\tred sun sky\n")
    return folder


def test_compare(folder, tmp_path):
    out = tmp_path / "out.json"
    given = ("--texts", folder / "text.txt", "--lengths", "16,48,128", "--json", out, "--tokens", 128)
    result = run("compare", folder / "teacher", folder / "student", *given)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    entries = [(entry["length"], entry["windows"], entry["reference"]) for entry in found["lengths"]]
    assert entries == [(16, 8, "teacher"), (48, 4, "teacher"), (128, 4, "windowed teacher")]
    assert found["text"] == [str(folder / "text.txt")] and found["unknown"] == 0
    assert found["lengths"][0]["masked"]["tokens"] >= 8
    for words in ("128 *", "Cosine to the source", "Masked tokens, %", f"Verdict: {found['verdict']}."):
        assert words in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_compare_by_default(folder, monkeypatch):
    """A model with itself; the lengths follow its limit, and those past it are not read."""
    monkeypatch.setenv("HOME", str(folder))
    result = run("compare", "~/teacher", folder / "teacher", "--texts", folder / "text.txt", "--tokens", 64)
    assert result.exit_code == 0, result.output
    assert "Verdict: safe up to 64 tokens; the result reads at most 64." in result.output
    assert "256 tokens not measured: the student reads at most 64 tokens" in result.output


def test_short_text_and_another_language(folder, tmp_path):
    (tmp_path / "short.txt").write_text("кот сел. " * 8)
    result = run("compare", folder / "teacher", folder / "student", "--texts", tmp_path / "short.txt")
    assert result.exit_code == 0, result.output
    # two of three tokens, but [CLS] and [SEP]
    assert "Warning: 62 % of the tokens are unknown to the tokenizer" in result.output
    assert "256 tokens not measured: the text does not fill one window of 256 tokens" in result.output


def test_each_stage_is_told_to_its_end(folder):
    told = {}
    teacher, student, text = (str(folder / name) for name in ("teacher", "student", "text.txt"))
    tell = lambda stage, *counts: told.setdefault(stage, []).append(counts)  # noqa: E731
    compare_models(teacher, student, [text], lengths=[16, 128], tokens=64, progress=tell)
    assert list(told) == ["comparing, 16 tokens", "comparing, 128 tokens"]
    assert all(counts == sorted(counts) and counts[-1][0] == counts[-1][1] for counts in told.values())


ERRORS = [
    ("teacher student --texts none.txt", "there is no such file"),
    ("teacher bare --texts text.txt --lengths 8,x", "--lengths '8,x' is not a list of"),
    ("teacher bare --texts text.txt --lengths 2", "--lengths 2 is too short: [CLS] and [SEP]"),
    ("teacher bare --texts text.txt --json no/out.json", "its folder does not exist"),
    ("bare student --texts text.txt", "bare: no tokenizer could be loaded"),
    ("small student --tokenizer teacher --texts text.txt", "the model has vocab_size = 50; give the"),
    ("nothing student --texts text.txt", "nothing: no such folder"),
    ("teacher student --texts text.txt --pooling max", "pooling = 'max'"),
    ("teacher student --texts docs.tsv --field body", "no field 'body' (it has id, text)"),
    ("teacher student --texts docs.tsv", "does not fill one window of 16 tokens"),
]


@pytest.mark.parametrize("arguments, words", ERRORS)
def test_errors_are_text_and_exit_code_2(folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    result = run("compare", *arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and words in result.stderr and "Traceback" not in result.output
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("check", [check_json, lambda path: write_json(path, {})])
def test_a_report_that_cannot_be_written(tmp_path, monkeypatch, check):
    def refuse(self, *arguments, **keywords):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    words = r"--json .*out\.json: could not be written \(Read-only.*give a file elsewhere"
    with pytest.raises(ValueError, match=words):
        check(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []

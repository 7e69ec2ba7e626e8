"""No user's file is lost: what is overwritten is wholly a checkpoint, and the source is never written into."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import assert_not_converted, write_modules
from oracles import tiny_sizes
from transformers import BertConfig, BertModel

import hf_relpos
from hf_relpos import RelPosBertConfig, RelPosBertModel
from hf_relpos.conversion import ConversionError, convert, pipeline
from hf_relpos.conversion.folder import other_files
from hf_relpos.models.saved_code.bundle import bundle
from hf_relpos.models.saved_code.remote_code import CONFIGURATION, MODELING, own_files
from hf_relpos.version import __version__


SIZES = tiny_sizes(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(ord("a") + number) for number in range(26))]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A saved tiny BERT with a vocabulary, to be copied before it is touched."""
    folder = tmp_path_factory.mktemp("overwrite") / "stock"
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


@pytest.fixture
def source(stock, tmp_path):
    return Path(shutil.copytree(stock, tmp_path / "stock"))


def refuse(words, source, out, tmp_path, **arguments):
    """Refused, and nothing anywhere below has changed."""
    assert_not_converted(source, Path(out), match=words, within=tmp_path, **{"overwrite": True, **arguments})


# --- what lies in the folder


@pytest.mark.parametrize("modules", [False, True], ids=["plain", "sentence-transformers"])
def test_a_converted_folder_is_wholly_a_checkpoint(source, tmp_path, modules):
    if modules:
        write_modules(source, "Pooling", "Normalize", pooling_mode_mean_tokens=True)
        (source / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    out = tmp_path / "out"
    convert(source, out)
    assert other_files(out) == other_files(source) == []
    convert(source, out, method="drop", overwrite=True)
    assert json.loads((out / "conversion.json").read_text())["method"] == "drop"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stock"]


def test_a_sharded_folder_is_wholly_a_checkpoint(tmp_path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 and other_files(tmp_path) == []


OTHERS = ["thesis.txt", ".env", "empty/", "model.safetensors.bak", "model-mine.safetensors", "optimizer.pt"]
OTHERS += ["1_Pooling/notes.txt"]
IN_FOLDERS = {"data/texts.txt": "data/", ".git/HEAD": ".git/", "3_Other/config.json": "3_Other/"}


@pytest.mark.parametrize("name, shown", [*zip(OTHERS, OTHERS, strict=True), *IN_FOLDERS.items()])
def test_whatever_else_lies_in_the_folder_is_kept_and_named(source, tmp_path, name, shown):
    write_modules(source, "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    out = Path(shutil.copytree(source, tmp_path / "out"))
    (out / name).parent.mkdir(exist_ok=True)
    if name.endswith("/"):
        (out / name).mkdir()
    else:
        (out / name).write_text("years of work")
    assert other_files(out) == [shown]
    refuse(rf"other files than a checkpoint \({shown}\)\. Move them, or", source, out, tmp_path)


@pytest.mark.parametrize("files", [("README.md",), ("config.json", "README.md"), ("vocab.txt",), (".gitattributes",)])
def test_files_with_names_of_a_checkpoint_are_none_without_weights(source, tmp_path, files):
    """A project's own README and configuration, say."""
    (tmp_path / "out").mkdir()
    for name in files:
        (tmp_path / "out" / name).write_text('{"port": 80}')
    refuse(r"its files .* are not a checkpoint", source, tmp_path / "out", tmp_path)
    refuse("is a file", source, tmp_path / "out" / name, tmp_path)


def test_a_file_that_comes_during_the_conversion_is_kept(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(source, out)

    def write_while_it_runs(*arguments):
        (out / "notes.md").write_text("mine")
        return build(*arguments)

    build = pipeline.build_model
    monkeypatch.setattr(pipeline, "build_model", write_while_it_runs)
    with pytest.raises(ConversionError, match=r"other files than a checkpoint \(notes\.md\)"):
        convert(source, out, method="drop", overwrite=True)
    assert (out / "notes.md").read_text() == "mine"
    assert json.loads((out / "conversion.json").read_text())["method"] == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stock"]


def test_an_empty_folder_is_written(source, tmp_path):
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


# --- source and result


APART = dict.fromkeys(("stock", "stock/../stock", "link", "."), "is the source or holds it")
APART |= dict.fromkeys(("stock/out", "link/out", "stock/inner/../out"), "lies in the source")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out, words", APART.items())
def test_source_and_result_are_apart(source, tmp_path, monkeypatch, out, words, overwrite):
    (tmp_path / "link").symlink_to(source)
    refuse(words, source, tmp_path / out, tmp_path, overwrite=overwrite)
    monkeypatch.chdir(tmp_path)
    refuse(words, "link", out, tmp_path, overwrite=overwrite)


def test_a_link_to_a_folder_stays_and_the_folder_is_replaced(source, tmp_path):
    convert(source, tmp_path / "disk" / "first")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "first")
    convert(source, tmp_path / "out", method="drop", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert json.loads((tmp_path / "disk" / "first" / "conversion.json").read_text())["method"] == "drop"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["first"]


# --- the code beside the weights


def model(**fields):
    return RelPosBertModel(RelPosBertConfig(**SIZES, **fields))


CODE = {CONFIGURATION, MODELING}


def has_map(folder):
    return "auto_map" in json.loads((folder / "config.json").read_text())


def python_files(folder):
    return {path.name for path in folder.glob("*.py")}


@pytest.mark.parametrize("content", [b"mine = True\n", b"\xff"], ids=["code", "no text"])
@pytest.mark.parametrize("name", sorted(CODE))
def test_a_file_of_the_user_stays_where_a_model_is_saved(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.warns(UserWarning, match=rf"not hf_relpos's.*{name}.*save_code = False"):
        model().save_pretrained(tmp_path)
    assert (tmp_path / name).read_bytes() == content
    assert python_files(tmp_path) == {name} and not has_map(tmp_path)
    assert hf_relpos.RelPosBertModel.from_pretrained(tmp_path)  # the weights are there
    (tmp_path / name).unlink()
    model().save_pretrained(tmp_path)
    assert has_map(tmp_path) and own_files(tmp_path) == CODE


def test_copies_of_another_release_are_replaced(tmp_path):
    model().save_pretrained(tmp_path)
    for name in CODE:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(f"hf-relpos {__version__}", "hf-relpos 0.0.1") + "\n# other\n")
    model(position_embedding_type="t5").save_pretrained(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in CODE} == bundle(model(position_embedding_type="t5").config)


def test_a_user_file_above_a_checkpoint_of_the_trainer_stays(tmp_path):
    """The checkpoint is complete but for the map, and training goes on."""
    (tmp_path / MODELING).write_text("mine")
    with pytest.warns(UserWarning, match=MODELING):
        model().save_pretrained(tmp_path / "checkpoint-3")
    assert (tmp_path / MODELING).read_text() == "mine" and python_files(tmp_path) == {MODELING}
    assert not has_map(tmp_path / "checkpoint-3") and not python_files(tmp_path / "checkpoint-3")
    assert hf_relpos.RelPosBertModel.from_pretrained(tmp_path / "checkpoint-3")

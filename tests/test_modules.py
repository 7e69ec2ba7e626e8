"""Folders of sentence-transformers: the encoder is converted, the modules around it stay as they are."""

import json
import re
from functools import partial

import pytest
import torch
from folders import assert_not_converted, contents, edit, write_modules
from launching import run_command
from safetensors.torch import save_file
from test_convert import saved
from transformers import AutoModel

from hf_relpos import RelPosBertModel
from hf_relpos.conversion import convert


def sentence_folder(folder, encoder="", dense=False):
    """A tiny BERT with mean pooling, as sentence-transformers saves it."""
    saved(folder / encoder)
    kinds = ["Pooling", "Dense", "Normalize"] if dense else ["Pooling", "Normalize"]
    write_modules(folder, *kinds, encoder=encoder, word_embedding_dimension=24)
    (folder / f"{len(kinds)}_Normalize").rmdir()  # as on the Hub, which has no empty folders
    if dense:
        (folder / "2_Dense" / "config.json").write_text('{"in_features": 24, "out_features": 8}')
        save_file({"linear.weight": torch.randn(8, 24)}, folder / "2_Dense" / "model.safetensors")
        (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')
    (folder / encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (folder / encoder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    (folder / "README.md").write_text("of the source")
    return folder


@pytest.mark.parametrize("encoder", ["", "0_Transformer"])
@pytest.mark.parametrize("dense", [False, True], ids=["pooling", "dense"])
def test_modules_are_kept(tmp_path, encoder, dense):
    source = sentence_folder(tmp_path / "stock", encoder, dense)
    report = convert(source, tmp_path / "out")
    before, after = contents(source), contents(tmp_path / "out")
    here = f"{encoder}/" if encoder else ""
    expected = {"1_Pooling/config.json", "config_sentence_transformers.json", "modules.json"}
    expected |= {f"{here}sentence_bert_config.json", f"{here}vocab.txt"}
    expected |= {"2_Dense/config.json", "2_Dense/model.safetensors"} if dense else set()
    assert set(report.files) == expected and all(after[name] == before[name] for name in expected)
    assert "2_Dense/pytorch_model.bin" not in after and after["README.md"] != before["README.md"]
    assert b"library_name: sentence-transformers" in after["README.md"]
    assert list(report.notes) == json.loads(after["conversion.json"])["notes"]
    for entry in json.loads(after["modules.json"]):
        assert (tmp_path / "out" / entry["path"]).is_dir()
    assert type(AutoModel.from_pretrained(tmp_path / "out" / encoder)) is RelPosBertModel
    convert(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out").keys() == after.keys()


LENGTHS = {"the table stays": ({}, 12, 20), "the table goes": ({"method": "drop"}, 20, 20)}


@pytest.mark.parametrize("arguments, sentence, tokenizer", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("encoder", ["", "0_Transformer"])
@pytest.mark.parametrize("listed", [True, False], ids=["in the file", "not in the file"])
def test_lengths_are_what_the_result_reads(tmp_path, encoder, listed, arguments, sentence, tokenizer):
    """The source reads 20 tokens and cuts at 12."""
    source = sentence_folder(tmp_path / "stock", encoder)
    (source / encoder / "tokenizer_config.json").write_text('{"model_max_length": 20, "do_lower_case": true}')
    if not listed:
        (source / encoder / "sentence_bert_config.json").unlink()
    convert(source, tmp_path / "out", **arguments)
    found = json.loads((tmp_path / "out" / encoder / "tokenizer_config.json").read_text())
    assert found == {"model_max_length": tokenizer, "do_lower_case": True}
    path = tmp_path / "out" / encoder / "sentence_bert_config.json"
    if listed or arguments:
        assert json.loads(path.read_text()) == {"max_seq_length": sentence}
    else:
        assert not path.exists()
    convert(source, tmp_path / "out", overwrite=True)


def test_convert_without_a_tokenizer_promises_no_sentence_transformer(tmp_path):
    """Which would make an empty tokenizer, and read every word as [UNK]."""
    source, out = sentence_folder(tmp_path / "stock"), tmp_path / "out"
    shown = run_command("convert", source, out)
    assert f"SentenceTransformer('{out}')" in shown.output
    assert "SentenceTransformer(" in (out / "README.md").read_text()
    (source / "vocab.txt").unlink()
    (source / "tokenizer_config.json").write_text("{}")
    shown = run_command("convert", source, out, "--overwrite")
    assert shown.exit_code == 0 and f"AutoModel.from_pretrained('{out}')" in shown.output, shown.output
    assert "SentenceTransformer('" not in shown.output and "has no tokenizer" in shown.output
    assert "SentenceTransformer" not in (out / "README.md").read_text()


def test_convert_a_pooling_without_a_folder(tmp_path):
    source = sentence_folder(tmp_path / "stock", "0_Transformer")
    edit_modules(source, 1, path="")
    assert convert(source, tmp_path / "out").is_sentence_encoder


def edit_modules(source, number, **fields):
    content = json.loads((source / "modules.json").read_text())
    content[number].update(fields)
    (source / "modules.json").write_text(json.dumps(content))


PATHS = ("../2_Dense", "/etc", "C:/a", None, 7, True, ["1_Pooling"], {}, "a\0b", "a\\b", "a" * 300, "\ud800")
BAG_OF_WORDS = "sentence_transformers.models.BoW"
REFUSED = {
    "pickled": (
        lambda source: (source / "2_Dense" / "model.safetensors").unlink(),
        "2_Dense: the module Dense has no model.safetensors.*as a SentenceTransformer, save it again",
    ),
    "own code": (partial(edit_modules, number=1, type="own.Pooling"), "type = 'own.Pooling' is remote code"),
    "no encoder": (partial(edit_modules, number=0, type=BAG_OF_WORDS), "0 modules have the type Transformer"),
    "not a list": (lambda source: (source / "modules.json").write_text("{}"), "holds a dict, not a JSON list"),
    "other things": (lambda source: (source / "modules.json").write_text("[1]"), "a list of other things"),
}
for path in PATHS:
    words = f"modules.json: path = {re.escape(repr(path)[:12])}.*names no folder in it"
    REFUSED[f"path {path!r}"] = (partial(edit_modules, number=2, path=path), words)


@pytest.mark.parametrize("spoil, words", REFUSED.values(), ids=REFUSED)
def test_refusals_write_nothing(tmp_path, spoil, words):
    source = sentence_folder(tmp_path / "stock", dense=True)
    spoil(source)
    assert_not_converted(source, tmp_path / "out", match=words)


@pytest.mark.parametrize("encoder", [pytest.param("", marks=pytest.mark.full), "0_Transformer"])
def test_from_the_hub(tmp_path, hub, encoder):
    """Module files are downloaded, and nothing else: no pickle, no export, no other folder."""
    source = sentence_folder(tmp_path / "stock", encoder, dense=True)
    others = {"onnx/model.safetensors": b"other", "2_Dense/own.py": "raise SystemExit", "1_Pooling/deep/a.json": "{}"}
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.put("user/sentences", {**contents(source), **others})
    hub.run(f"from hf_relpos import convert\nconvert('user/sentences', {str(tmp_path / 'out')!r})", without=())
    convert(source, tmp_path / "local")
    found, expected = contents(tmp_path / "out"), contents(tmp_path / "local")
    assert {name for name in found if not name.endswith(".py")} == {n for n in expected if not n.endswith(".py")}
    assert all(found[name] == expected[name] for name in expected.keys() - {"conversion.json", "README.md"})
    assert b"base_model: user/sentences" in found["README.md"] and b"license: mit" in found["README.md"]
    fetched = {request.path for request in hub.requests if request.method == "GET" and "/resolve/" in request.path}
    assert not [path for path in fetched if path.endswith((".bin", ".py")) or "onnx" in path or "deep" in path]


def test_an_encoder_under_the_name_of_its_head(tmp_path):
    """As all-mpnet-base-v2 and others are: config.json names a head, which the weights do not have."""
    source = sentence_folder(tmp_path / "stock")
    edit(source, architectures=["BertForMaskedLM"])
    assert convert(source, tmp_path / "out").converted_to == "RelPosBertModel"
    (source / "modules.json").unlink()
    assert_not_converted(source, tmp_path / "other", match=r"lack 6 of 44 tensors .*architecture='BertModel'")


def test_the_encoder_alone(tmp_path):
    """Its own folder is an ordinary checkpoint."""
    source = sentence_folder(tmp_path / "stock", "0_Transformer")
    report = convert(source / "0_Transformer", tmp_path / "out")
    assert report.files == ("vocab.txt",) and len(report.notes) == 1
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is RelPosBertModel

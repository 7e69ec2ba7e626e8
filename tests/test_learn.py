"""Learning from text by `convert`: options, pairs, long rows, and what is refused."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders import assert_not_converted, edit_tensors, write_modules
from launching import run_command
from oracles import tiny_config, tiny_sizes
from safetensors.torch import load_file
from tokenizers import Regex
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    RobertaTokenizer,
)

import hf_relpos
from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel, files, training
from hf_relpos.conversion import ConversionError, PoorConversionWarning, convert
from hf_relpos.conversion.build import fold
from hf_relpos.conversion.held_out import processor_name
from hf_relpos.conversion.texts import check_windows, shared_first_token
from hf_relpos.data import PairLayout, Windows, cut_windows, pair_windows, read_texts
from hf_relpos.demo import read_text
from hf_relpos.products.cpu_gemm import linear_library
from hf_relpos.schemes.encodings import sinusoid_concat


DEMO = Path(hf_relpos.__file__).parent / "demo"
# Few enough for a test.
FEW = {"steps": 4, "batch_tokens": 256, "distil_tokens": 2000}


def test_shared_first_token():
    assert shared_first_token([[2, 5], [2, 7]]) == 2
    assert shared_first_token([[2, 5], [3, 7]]) is None


# With files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The demo BERT cut down to two layers and a width that is fast, with its tokenizer; and text."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "bert")
    torch.manual_seed(0)
    sizes = tiny_sizes(vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=4, intermediate_size=64)
    model = BertForMaskedLM(BertConfig(**sizes | {"max_position_embeddings": 64}, initializer_range=0.2))
    # positions whose products tell their distance, and attention that is to such products
    model.bert.embeddings.position_embeddings.weight.data = sinusoid_concat(torch.arange(64), 32)
    for layer in model.bert.encoder.layer:
        for project in (layer.attention.self.query, layer.attention.self.key):
            project.weight.data += torch.eye(32)
    model.save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    (folder / "text.txt").write_text("\n".join(read_text("train"))[:120_000], encoding="utf-8")
    (folder / "noise.txt").write_bytes(bytes(range(256)) * 40)
    return folder


def distil(small, out, **changes):
    """`convert` by this method, of the small BERT and with its text if no `source` and no `texts` are given."""
    arguments = {"source": small / "bert", "method": "distil", "texts": small / "text.txt", **changes}
    return convert(arguments.pop("source"), out, **arguments)


def test_convert(small, tmp_path):
    """Text alone chooses the method and the scheme."""
    options = {"steps": 100, "batch_tokens": 256, "distil_tokens": 12_000}
    report = convert(small / "bert", tmp_path / "out", texts=small / "text.txt", method_options=options)
    assert (report.method, report.scheme) == ("distil", "harmonic")
    found = json.loads((tmp_path / "out" / "conversion.json").read_text(encoding="utf-8"))["details"]
    assert set(found["distillation"]["losses"]) == {"layers", "attention", "logits", "total"}
    assert found["distillation"]["steps"] == 100 and found["text"]["tokens"] > 0
    assert found["fidelity"]["lengths"][0]["length"] == 16 and found["fidelity"]["verdict"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    tables = [step for step in report.steps if step.target and "distance_embedding" in step.target]
    assert {(step.kind, step.note) for step in tables} == {("created", "trained")}
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path / "out"), RelPosBertForMaskedLM)

    # nearer than the mean vector alone, on text of its own
    drop = convert(small / "bert", tmp_path / "drop", position_embedding_type="tables", method="drop")
    assert drop.details == {}
    tokenizer = AutoTokenizer.from_pretrained(small / "bert")
    ids = torch.tensor([tokenizer("The wind was in the east, and nobody at the inn would say why.").input_ids])
    with torch.no_grad():
        models = [AutoModel.from_pretrained(each) for each in (small / "bert", tmp_path / "out", tmp_path / "drop")]
        wanted, near, far = (model(ids).last_hidden_state for model in models)
        assert (near - wanted).square().mean() < 0.5 * (far - wanted).square().mean()
        # and no limit on the length
        assert models[1](ids.repeat(1, 20)).last_hidden_state.isfinite().all()


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_cannot_be_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_relpos.conversion.folder.check_writable", full)
    monkeypatch.setattr("hf_relpos.conversion.pipeline.locate", None)  # nothing is read before
    with pytest.raises(ConversionError, match=r"/out: could not be written.*free some space"):
        distil(small, tmp_path / "out", method_options=FEW)
    assert not (tmp_path / "out").exists()


def test_positions_are_folded_exactly():
    """[CLS] gets position vector 0, all others the mean of the rest, weighted by how often they occur."""
    student = RelPosBertModel(tiny_config("harmonic", hidden_size=16, num_attention_heads=2)).double()
    table = torch.randn(24, 16, dtype=torch.float64)
    before = student.embeddings.word_embeddings.weight.detach().clone()
    types = student.embeddings.token_type_embeddings.weight.detach().clone()
    with torch.no_grad():
        fold(student, table, torch.tensor([5.0] + [1.0] * 10 + [0.0] * 13), 2)
    mean = table[1:11].mean(0)
    torch.testing.assert_close(student.embeddings.token_type_embeddings.weight, types + mean)
    words = student.embeddings.word_embeddings.weight
    torch.testing.assert_close(words[2] + mean, before[2] + table[0])
    assert torch.equal(words[3:], before[3:])


@pytest.mark.parametrize("head", ["", "ForMaskedLM"])
def test_word_embeddings_are_trained_with_predictions_alone(small, tmp_path, head):
    """Otherwise one vector is added to those of all words, and another one to [CLS]'s."""
    options = {"steps": 8, "batch_tokens": 128}
    distil(small, tmp_path / "out", architecture=f"Bert{head or 'Model'}", method_options=options)
    models = [AutoModel.from_pretrained(each) for each in (tmp_path / "out", small / "bert")]
    result, source = (model.embeddings.word_embeddings.weight for model in models)
    added = (result - source).detach()
    moved = ((added - added.median(0).values).abs().amax(1) > 1e-5).sum()
    assert moved > 10 if head else moved == 1
    before, after = (model.encoder.layer[1].output.dense for model in models)
    assert torch.equal(after.weight, before.weight) and not torch.equal(after.bias, before.bias)
    assert all(parameter.requires_grad for model in models for parameter in model.parameters())


@pytest.mark.slow
def test_products_in_bfloat16_come_as_close(small, tmp_path, monkeypatch):
    """On the same text and steps; teacher, measurement and result are in float32. A setting forbids bfloat16."""
    found, dtypes, optimize = {}, [], hf_relpos.optimize
    spy = lambda model, dtype, **more: dtypes.append(dtype) or optimize(model, dtype, **more)  # noqa: E731
    monkeypatch.setattr("hf_relpos.conversion.learn.optimize", spy)
    for bfloat16, allowed in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr("hf_relpos.conversion.learn.multiplies_bfloat16", lambda: bfloat16)  # noqa: B023
        library = replace(linear_library(), allowed=allowed)
        monkeypatch.setattr("hf_relpos.conversion.learn.linear_library", lambda: library)  # noqa: B023
        out = tmp_path / str(bfloat16)
        options = {"steps": 20, "batch_tokens": 128}
        report = convert(small / "bert", out, texts=small / "text.txt", method_options=options, overwrite=True)
        student = "bfloat16" if bfloat16 and allowed else "float32"
        assert dtypes[-4:] == [student, "float32", "float32", "float32"]
        computed = json.loads((out / "conversion.json").read_text())["details"]["computed"]
        assert computed == {"student": student, "teacher": "float32", "on": processor_name(torch.device("cpu"))}
        found[bfloat16] = torch.tensor([each.token_cosine for each in report.fidelity.lengths])
        assert all(tensor.dtype == torch.float32 for tensor in load_file(out / "model.safetensors").values())
    assert not torch.equal(found[True], found[False])
    torch.testing.assert_close(found[True], found[False], atol=5e-3, rtol=0)


@pytest.mark.slow
def test_distilled_for_long_texts(small, tmp_path):
    """One more step after each third has a row past the source's limit; the waves are as long as that needs."""

    def far(source, **more):
        options = {"steps": 24, "batch_tokens": 128, **more}
        arguments = {"source": source, "position_embedding_type": "harmonic", "overwrite": True}
        report = distil(small, tmp_path / "out", method_options=options, **arguments)
        config = AutoModel.from_pretrained(tmp_path / "out").config
        return config.position_options.get("period"), report.details["distillation"]["tokens"], report.fidelity

    period, tokens, _ = far(small / "bert")
    assert period is None and tokens < 24 * 128
    relative = tmp_path / "relative"
    convert(small / "bert", relative, position_embedding_type="relative_key", method="drop")
    for source in (small / "bert", relative):
        period, tokens, fidelity = far(source, length=256)
        assert period == 512 and 8 * 256 + 22 * 100 < tokens <= 8 * 256 + 25 * 128
        assert fidelity.lengths[-1].length == 256


@pytest.mark.slow
def test_progress_is_told_where_there_is_no_terminal(small, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("hf_relpos.console.LINE_SECONDS", 0.0)
    arguments = {"method_options": FEW, "overwrite": True}
    distil(small, tmp_path / "out", device="cpu", progress=True, **arguments)
    lines = capfd.readouterr().err.splitlines()
    assert any(re.match(r"distilling: \d+ %$", line) for line in lines)
    assert any(re.match(r"comparing, 64 tokens: \d+ %$", line) for line in lines)
    distil(small, tmp_path / "out", **arguments)
    assert "%" not in capfd.readouterr().err


def test_pairs_are_as_the_tokenizer_makes_them():
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "bert")
    layout = PairLayout.of(tokenizer)
    texts = ["The wind was in the east, and nobody at the inn would say why.", "No.", "He went home. " * 30]
    windows = Windows([tokenizer(text).input_ids for text in texts], 0.0, 0)
    assert pair_windows(windows, layout, 0.0, 64, 0) is windows is pair_windows(windows, None, 1.0, 64, 0)
    lengths, alike = set(), 0
    for seed in range(20):
        made = pair_windows(windows, layout, 1.0, 64, seed)
        assert list(map(len, made.ids)) == list(map(len, made.types)) == list(map(len, windows.ids))
        ids, types = made.ids[0], made.types[0]
        second, (begin, end) = types.index(1), (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert [ids[0], ids[second - 1], ids[-1]] == [begin, end, end] and sum(types[second:]) == len(types) - second
        text = [tokenizer.decode(part) for part in (ids[1 : second - 1], ids[second:-1])]
        as_pair = tokenizer(*text)
        if as_pair.input_ids == ids:  # where no word is cut in two
            assert as_pair.token_type_ids == types
            alike += 1
        words = windows.ids[0][1:-1]
        assert ids[1 : second - 1] == words[: second - 2] and ids[second:-1] == words[second - 1 :]
        assert made.ids[1:] == windows.ids[1:] and not any(map(any, made.types[1:])), "too short; past the limit"
        lengths.add(sum(types))
    assert len(lengths) > 5 and alike > 5
    many = Windows([windows.ids[0]] * 1000, 0.0, 0)
    assert 420 < sum(map(any, pair_windows(many, layout, 0.5, 64, 0).types)) < 580
    joined = pair_windows(many, layout, 1.0, 64, 0).joined(windows)
    assert [len(row) for row in joined.types] == [len(row) for row in joined.ids] and not any(joined.types[-1])


@pytest.mark.slow
def test_convert_keeps_pairs(small, tmp_path):
    """A token type that nothing was fitted to is far from the source; by default half of the text is pairs."""
    options = {"steps": 60, "batch_tokens": 256, "distil_tokens": 4000}
    found = {}
    for pairs in (None, 0):
        report = distil(small, tmp_path / str(pairs), method_options={**options, "pairs": pairs})
        found[pairs] = report.details["fidelity"]["pairs"]["token_cosine_by_segment"]
        fitted = report.details["text"]
        assert fitted["pair_windows"] > 0.3 * fitted["windows"] if pairs is None else fitted["pair_windows"] == 0
        card = (tmp_path / str(pairs) / "README.md").read_text(encoding="utf-8")
        assert ("--method-options pairs=0.5" in card) == (pairs == 0)
    assert found[None][1] > found[0][1]
    with pytest.raises(ConversionError, match="pairs"):
        distil(small, tmp_path / "not", method_options={"pairs": 2})


@pytest.mark.slow
def test_sources_that_read_no_pairs(small, tmp_path):
    """One whose token types are all one; a sentence encoder reads them, as it may be fine-tuned on pairs."""
    kinds = ("SentenceTransformer", "CrossEncoder", "one type")
    for kind in kinds:
        shutil.copytree(small / "bert", tmp_path / kind)
    write_modules(tmp_path / "SentenceTransformer", "Pooling")
    write_modules(tmp_path / "CrossEncoder")
    with edit_tensors(tmp_path / "one type") as tensors:
        types = tensors["bert.embeddings.token_type_embeddings.weight"]
        types[1] = types[0]
    found = {}
    for kind, pairs in [*((kind, None) for kind in kinds), ("SentenceTransformer", 0.25)]:
        options = {**FEW, "pairs": pairs}
        report = distil(small, tmp_path / f"{kind} {pairs}", source=tmp_path / kind, method_options=options)
        found[kind, pairs] = report.details["text"]["pair_windows"]
    assert found["one type", None] == 0
    assert 0 < found["SentenceTransformer", 0.25] < found["SentenceTransformer", None] == found["CrossEncoder", None]
    with pytest.raises(ConversionError, match=r"method_options\['pairs'\] = 0.5"):
        distil(small, tmp_path / "not", source=tmp_path / "one type", method_options={**FEW, "pairs": 0.5})
    assert not (tmp_path / "not").exists()


def test_layouts_of_pairs():
    def numbered(*words):
        return {word: number for number, word in enumerate(words)}

    def bert(*words):
        vocabulary = numbered("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words)
        return BertTokenizer(vocab=vocabulary, do_lower_case=False)

    unknown = PairLayout.of(bert("A", "B"))  # both words are [UNK]
    assert unknown == PairLayout.of(bert("a", "b")) == PairLayout([2], [3], [3])
    words = numbered("<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b")
    assert PairLayout.of(RobertaTokenizer(vocab=words, merges=[])) is None, "all its types are 0"
    other, special = bert("a", "b"), [("[CLS]", 2), ("[SEP]", 3)]
    template = TemplateProcessing("$A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    other.backend_tokenizer.post_processor = template
    assert PairLayout.of(other) is None, "a text alone begins otherwise"
    nothing = bert("a", "b")
    nothing.backend_tokenizer.normalizer = Replace(Regex("[ab]"), "")
    assert PairLayout.of(nothing) is None


def test_convert_for_long_texts(small, tmp_path):
    """A period that is given stays."""
    options = {**FEW, "length": 256, "window": 48}
    given = {"position_embedding_type": "harmonic", "position_options": {"period": 300}}
    report = distil(small, tmp_path / "out", method_options=options, **given)
    assert report.position_options["period"] == 300
    assert AutoModel.from_pretrained(tmp_path / "out").config.attention_window == 48
    found = report.fidelity.lengths
    assert [entry.length for entry in found] == [16, 64, 256]
    assert not report.details["text"]["notes"][1:]


# Bad input -----------------------------------------------------------------------------------------------------------


# What is given, beside the method and the text of `distil` where it does not say otherwise, and words of the error.
LONG = {"length": 1000, "distil_tokens": 1500}
REFUSED = [
    ({"texts": ["a"], "field": "body"}, r"field = 'body' \(--field\) requires files"),
    ({"texts": Path("https://example.org/a.txt")}, "texts = 'https:/example.org/a.txt'"),
    ({"texts": None}, "requires `texts`"),
    ({"method_options": LONG}, "too long for 1500 tokens"),
    ({"texts": ["A short sentence about nothing, and no more than that."] * 3}, "give at least 500"),
    ({"texts": Path("noise.txt")}, "not readable as UTF-8 text"),
    ({"texts": Path("nothing.txt")}, "no such file"),
    ({"texts": [1, 2]}, r"texts\[0\] is a int, not text"),
    ({"texts": Path("a" * 300)}, "(File name too long|no such file); check the path"),
    ({"position_embedding_type": "deberta"}, "deberta.*cannot start"),
    ({"method_options": {"stps": 5}}, "stps"),
    ({"device": "cdua"}, "device = 'cdua'"),
    ({"device": "meta"}, "device = 'meta'"),
    *(({"texts": ["a"], "seed": seed}, f"seed = {seed!r}") for seed in (-1, 2**32, 2**63, 0.5, "0")),
]


@pytest.mark.parametrize("arguments, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused_writes_nothing(small, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(small)
    with pytest.raises(ConversionError, match=words):
        distil(small, tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option, value", [("steps", 0), ("window", 0), ("distil_tokens", 3)])
def test_an_option_without_sense_is_refused_before_any_work(small, tmp_path, monkeypatch, option, value):
    monkeypatch.setattr("hf_relpos.conversion.learn.load_tokenizer", None)
    with pytest.raises(ConversionError, match=rf"method_options\['{option}'\] = {value}"):
        distil(small, tmp_path / "out", method_options={option: value})
    assert not list(tmp_path.iterdir())


# Refused before the first step ---------------------------------------------------------------------------------------


def link_out(source, patch):
    (source / "tokenizer_config.json").rename(source.parent / "elsewhere")
    (source / "tokenizer_config.json").symlink_to("../elsewhere")


def broken_length(source, patch):
    write_modules(source, "Pooling", pooling_mode_mean_tokens=True)
    (source / "sentence_bert_config.json").write_text("{")


def full_at(name):
    """The disk is full where a file of that name is written."""

    def spoil(source, patch):
        write = files.write_text
        patch.setattr(files, "write_text", lambda path, text: full() if Path(path).name == name else write(path, text))
        patch.setattr("hf_relpos.conversion.pipeline.write_text", files.write_text)

    return spoil


# What is spoilt, the folder to write, and words of the error.
LATE = {
    "link": (link_out, "out", "tokenizer_config.json: a link out of the folder"),
    "length": (broken_length, "out", "sentence_bert_config.json: not readable"),
    "weights": (lambda source, patch: patch.setattr(RelPosBertForMaskedLM, "save_pretrained", full), "out", "space"),
    "report": (full_at("conversion.json"), "out", "free some space"),
    "card": (full_at("README.md"), "out", "free some space"),
    "copy": (lambda source, patch: patch.setattr(shutil, "copyfile", full), "out", "free some space"),
    "name": (None, "o" * 240, "File name too long"),
    "parents": (None, f"new/{'p' * 300}/out", "File name too long"),
    "mounted": (lambda source, patch: patch.setattr("os.path.ismount", os.path.isdir), "there", "a disk is mounted"),
    "file": (None, "text.txt", "is a file"),
    "inside": (None, "bert/out", "lies in the source"),
}


@pytest.mark.parametrize("spoil, out, words", LATE.values(), ids=LATE)
def test_convert_refuses_before_the_first_step(small, tmp_path, monkeypatch, spoil, out, words):
    source = shutil.copytree(small / "bert", tmp_path / "bert")
    shutil.copyfile(small / "text.txt", tmp_path / "text.txt")
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(training, "distil", lambda *arguments, **options: pytest.fail("a step was made"))
    with monkeypatch.context() as patch:
        if spoil is not None:
            spoil(source, patch)
        given = {"texts": tmp_path / "text.txt", "method_options": FEW | {"length": 128}, "overwrite": True}
        assert_not_converted(source, tmp_path / out, match=words, within=tmp_path, **given)


# Poor results --------------------------------------------------------------------------------------------------------


@pytest.fixture
def poorly_trained(monkeypatch):
    """The training ends, and then noise is added to every weight."""
    train = training.distil

    def spoilt(student, *arguments, **options):
        report = train(student, *arguments, **options)
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(torch.randn_like(parameter))
        return report

    monkeypatch.setattr(training, "distil", spoilt)


def command(small, tmp_path, *more, **options):
    words = ["convert", small / "bert", tmp_path / "out", "--method", "distil"]
    for key, value in {**FEW, **options}.items():
        words += ["--method-options", f"{key}={value}"]
    return run_command(*words, *more)


@pytest.mark.slow
def test_a_poor_result_is_written_and_told(small, tmp_path, poorly_trained):
    result = command(small, tmp_path, "--texts", small / "text.txt")
    assert result.exit_code == 3 and "written to" in result.stdout and AutoModel.from_pretrained(tmp_path / "out")
    told = " ".join(result.stderr.split())
    assert re.search(r"Warning: .*was written, but .*sentence cosine .* below 0.85.*Try more steps", told)
    assert command(small, tmp_path, "--texts", small / "text.txt", "--overwrite", "--force").exit_code == 0


def test_a_text_too_short_to_check_with_is_told(small, tmp_path):
    """Its shorter lengths are checked although there is nothing for the long one."""
    (tmp_path / "short.txt").write_text((small / "text.txt").read_text(encoding="utf-8")[:7000], encoding="utf-8")
    options = {"steps": 4, "batch_tokens": 300, "length": 300}
    with pytest.warns(PoorConversionWarning, match=r"300 tokens were not checked: no held-out text"):
        report = distil(small, tmp_path / "out", texts=tmp_path / "short.txt", method_options=options)
    assert [entry.length for entry in report.fidelity.lengths] == [16, 64] and 300 in report.fidelity.skipped


def test_what_is_checked_was_not_fitted():
    """The same passages are held out whatever the lengths and the seed are."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "bert")
    texts = list(read_texts(DEMO / "text" / "train.txt.xz"))[:1500]

    def runs(part, lengths, seed):
        ids = cut_windows(tokenizer, texts, 60_000, lengths, 0.0, seed, part, passage=400).ids
        return {tuple(row[at : at + 20]) for row in ids for at in range(1, len(row) - 20)}

    checked = runs("check", (128,), 0) | runs("check", (400,), 0)
    fitted = runs("fit", (64, 128), 1) | runs("fit", (400,), 2)
    assert checked and fitted and len(checked & fitted) < 20  # phrases of the author


# Fields --------------------------------------------------------------------------------------------------------------


def test_texts_with_different_fields(small, tmp_path):
    """Each text is read by its own field, and one field serves all; unreadable files of a folder may be skipped."""
    parts, folder = (small / "text.txt").read_text(encoding="utf-8").split("\n"), tmp_path / "folder"
    folder.mkdir()
    for name, field, lines in (("a", "abstract", parts[::2]), ("b", "chapter", parts[1::2])):
        rows = [json.dumps({field: line}) for line in lines if line.strip()]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    words = ["--texts", folder / "a.jsonl", "--texts", folder / "b.jsonl"]
    for given, said in (
        ((*words, *("--field", "abstract") * 3), "3 fields for 2 texts; give one, or one for each"),
        (("--texts", folder, "--field", "abstract"), "--skip-unreadable"),
    ):
        refused = command(small, tmp_path, *given)
        assert refused.exit_code == 2 and said in refused.stderr and not (tmp_path / "out").exists()
    result = command(small, tmp_path, *words, "--field", "abstract", "--field", "chapter", "--force")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "conversion.json").read_text())["arguments"]
    assert found["field"] == ["abstract", "chapter"] and found["texts"] == ["a.jsonl", "b.jsonl"]
    words = ["--texts", folder, "--field", "abstract", "--force", "--overwrite", "--skip-unreadable"]
    result = command(small, tmp_path, *words)
    assert result.exit_code == 0 and "b.jsonl" in result.stderr, result.output
    assert "skip_unreadable=True" in (tmp_path / "out" / "README.md").read_text()


def test_another_language(small, tmp_path):
    text = ["Σὲ γνωρίζω ἀπὸ τὴν κόψι τοῦ σπαθιοῦ τὴν τρομερή, ☃ ☃ ☃ ☃ ☃ ☃ ☃ ☃ 漢字 仮名 交じり 文. " * 30] * 40
    with pytest.warns(UserWarning, match="in the language of the model"):
        distil(small, tmp_path / "out", texts=text, method_options=FEW)


def test_distances_that_were_never_seen_are_named():
    with pytest.warns(UserWarning, match="distances from 40 to 511 were not trained"):
        notes = check_windows(Windows([[1] * 40] * 300, 0.0, 12_000), 512)
    assert len(notes) == 1
    with pytest.warns(UserWarning, match="only 1,000 tokens"):
        check_windows(Windows([[1] * 500] * 2, 0.0, 50_000), 500)


BROKEN_TOKENIZERS = {
    "none": {},
    "cut": {"tokenizer.json": "{"},
    "deep": {"tokenizer.json": "[" * 200_000},
    "settings": {"tokenizer_config.json": "[]"},
    "binary": {"vocab.txt": b"\x80\xff" * 99},
    "greater": {"vocab.txt": "\n".join(["[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(100))])},
}


@pytest.mark.parametrize("files", BROKEN_TOKENIZERS.values(), ids=BROKEN_TOKENIZERS)
def test_a_tokenizer_that_is_broken(tmp_path, files):
    BertForMaskedLM(BertConfig(**tiny_sizes())).save_pretrained(tmp_path / "bert")
    for name, content in files.items():
        (tmp_path / "bert" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConversionError, match=r"bert: (no tokenizer could be loaded \(|the tokenizer has \d+ tokens)"):
        convert(tmp_path / "bert", tmp_path / "out", method="distil", texts=["some text"])
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_teacher_with_nans(small, tmp_path):
    folder = shutil.copytree(small / "bert", tmp_path / "source")
    with edit_tensors(folder) as tensors:
        tensors["bert.encoder.layer.0.output.dense.bias"][3] = float("nan")
    with pytest.raises(ConversionError, match="NaN"):
        distil(small, tmp_path / "out", source=folder)

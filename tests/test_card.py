"""What a conversion leaves for people: the model card, the pictures, and what the report says in the terminal."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders import edit, write_modules
from huggingface_hub import InferenceClient, ModelCard
from launching import run_command
from oracles import stir, tiny_sizes
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM
from transformers.pipelines import PIPELINE_REGISTRY

import hf_relpos
from hf_relpos.conversion import METHODS, convert
from hf_relpos.conversion.card import command, model_card, source_metadata
from hf_relpos.demo import CHECKPOINT, read_text
from hf_relpos.evaluation import Fidelity
from hf_relpos.models.modeling_relpos_bert import HEADS


# Few enough for a test.
OPTIONS = {"steps": 4, "batch_tokens": 256, "distil_tokens": 1500}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny BERT with a tokenizer, a card of its own and a text to learn from."""
    folder, tokenizer = tmp_path_factory.mktemp("card"), AutoTokenizer.from_pretrained(CHECKPOINT)
    torch.manual_seed(0)
    sizes = tiny_sizes(vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.2)
    stir(BertForMaskedLM(BertConfig(**sizes))).save_pretrained(folder / "stock")
    tokenizer.save_pretrained(folder / "stock")
    card = "---\nlicense: mit\nlanguage: [en, de]\npipeline_tag: fill-mask\n---\n# Theirs\n"
    (folder / "stock" / "README.md").write_text(card)
    (folder / "text.txt").write_text("\n\n".join(read_text("train")[:150]), encoding="utf-8")
    return folder / "stock"


@pytest.fixture(scope="module")
def learnt(source, tmp_path_factory):
    """The tiny BERT converted with text: folder and report."""
    out = tmp_path_factory.mktemp("learnt") / "out"
    given = {"method": "distil", "texts": source.parent / "text.txt", "method_options": OPTIONS, "seed": 3}
    given |= {"position_embedding_type": "tables", "position_options": {"out_of_range": "zero"}}
    with pytest.warns(UserWarning, match="only .* tokens"):
        return out, convert(source, out, **given)


def card_of(folder):
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def snippets(folder):
    """The code by which the card of a folder loads it, with its path."""
    use = card_of(folder).text.partition("## Limits")[0]
    found = re.findall(r"^```python\n(.*?)^```$", use, re.DOTALL | re.MULTILINE)
    return [code.replace('"PATH"', repr(str(folder))) for code in found]


def test_the_card_of_what_learnt_from_text(source, learnt):
    out, report = learnt
    card = card_of(out)
    metadata = {"library_name": "transformers", "license": "mit", "language": ["en", "de"]}
    metadata |= {"pipeline_tag": "fill-mask", "tags": ["hf_relpos", "relative-position"]}
    assert card.data.to_dict() == metadata
    # no path of the one who made it
    assert str(source.parent) not in card.content and str(out.parent) not in card.content
    assert report.verdict in card.text and METHODS["distil"].help in card.text and command(report) in card.text
    for entry in report.fidelity.lengths:
        row = f"| {entry.length} | {entry.token_cosine:.3f} | {entry.sentence_cosine:.3f}"
        assert f"{row} | {100 * entry.masked.agreement:.1f} |" in card.text
    parts = ["AutoModelForMaskedLM", "A masked language model: `stock`", "× the time of the source", "Adapters"]
    parts += ["{'out_of_range': 'zero'}", f"{report.details['text']['tokens']:,} tokens", "`text.txt`", "32 tokens"]
    for words in (*parts, "attention_window=16", report.versions["transformers"]):
        assert words in card.text, words


@pytest.mark.parametrize("window", [None, 10, 64])
def test_what_is_said_of_long_texts_is_what_was_measured(source, tmp_path, window):
    """Report, verdict and card of a conversion for 64 tokens, of which the source reads 32."""
    given = {"texts": source.parent / "text.txt", "method_options": {**OPTIONS, "length": 64, "window": window}}
    with pytest.warns(UserWarning):
        report = convert(source, tmp_path / "out", position_embedding_type="relative_key", method="distil", **given)
    card, longest = card_of(tmp_path / "out").text, report.fidelity.lengths[-1]
    assert longest.length == 64 and longest.reference != "teacher"
    assert f"{longest.token_cosine:.2f} at 64" in report.verdict
    limits = card[card.index("## Limits") :]
    assert f"{longest.token_cosine:.2f}" in limits and "beyond 64 tokens" in limits
    # half of the source's length, if none is given
    assert f"attention_window = {window or 16}" in report.notes[0] and "attention_window=" not in card
    assert "64 tokens" in report.notes[0] and report.notes[0] in card


def test_what_a_result_can_and_cannot_do(source, tmp_path):
    ids = torch.ones(1, 129, dtype=torch.long)
    kept = convert(source, tmp_path / "kept")
    assert re.search(r"reads at most 32 tokens, .*length=128", kept.notes[0])
    text = card_of(tmp_path / "kept").text
    assert f"{kept.difference:.1e}" in text and "32 tokens" in text
    assert "Adapters" not in text and "learnt" not in text
    assert kept.verdict is None and kept.fidelity is None and "Verdict" not in str(kept)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        AutoModel.from_pretrained(tmp_path / "kept")(ids)
    dropped = convert(source, tmp_path / "dropped", method="drop")
    assert re.search("any length.* until you train it", dropped.notes[0])
    assert AutoModel.from_pretrained(tmp_path / "dropped")(ids).last_hidden_state.shape[1] == 129
    again = convert(tmp_path / "dropped", tmp_path / "again")
    assert "outputs equal the source's" in again.notes[0] and "longer texts" in again.notes[0]


def test_what_the_card_says_loads(learnt):
    out, report = learnt
    (code,) = snippets(out)
    assert code.count("trust_remote_code=True") == 2
    scope = {}
    exec(code, scope)
    assert type(scope["model"]).__name__ == report.converted_to
    assert scope["tokenizer"].vocab_size == scope["model"].config.vocab_size


def test_the_card_of_a_sentence_encoder(source, tmp_path):
    """Longer texts need a window and a length."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    sentence_transformers.SentenceTransformer(str(CHECKPOINT), device="cpu").save(str(tmp_path / "stock"))
    convert(tmp_path / "stock", tmp_path / "out", method="drop")
    (code,) = snippets(tmp_path / "out")
    scope = {}
    exec(code, scope)
    assert scope["model"].encode("The sky is blue.").shape == (128,)
    text = card_of(tmp_path / "out").text
    (argument,) = re.findall(r"config_kwargs=(\{.*?\})", text)
    assert "A sentence encoder" in text and "max_seq_length" in text and "trust_remote_code" in code
    longer = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), config_kwargs=json.loads(argument))
    assert longer[0].auto_model.config.attention_window == 64


def test_the_call_in_the_card_does_it_again(learnt, source, tmp_path, monkeypatch):
    out, report = learnt
    line = command(report)
    assert line in card_of(out).text
    monkeypatch.chdir(source.parent)  # where the files lie that it names
    with pytest.warns(UserWarning, match="only .* tokens"):
        eval(line.replace("'OUT'", repr(str(tmp_path / "again"))), {"hf_relpos": hf_relpos})
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_conversion_json_holds_it_all(learnt):
    out, report = learnt
    written = json.loads((out / "conversion.json").read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    assert written["method_options"]["steps"] == OPTIONS["steps"] and written["method_options"]["pairs"] is None
    assert Fidelity.from_dict(written["details"]["fidelity"]) == report.fidelity
    assert report.verdict in str(report)


def test_the_card_of_what_was_not_measured(source, tmp_path):
    convert(source, tmp_path / "out", method="drop", position_embedding_type="shaw", position_options={"clip": 4})
    text = card_of(tmp_path / "out").text
    assert "`hf-relpos compare" in text and "Adapters" in text
    given = "position_embedding_type='shaw', position_options={'clip': 4}, method='drop'"
    assert f"hf_relpos.convert('stock', 'OUT', {given})" in text


def test_the_card_of_a_folder_without_code_and_tokenizer(source, tmp_path):
    """It says that the package is needed."""
    BertForMaskedLM.from_pretrained(source).save_pretrained(tmp_path / "stock")
    convert(edit(tmp_path / "stock", save_code=False), tmp_path / "out")
    text = card_of(tmp_path / "out").text
    assert "trust_remote_code" not in text and "requires hf_relpos" in text
    assert "okenizer" not in "".join(snippets(tmp_path / "out"))


CARDS = [
    (None, {}),
    ("no front matter", {}),
    ("---\nlicense: [\n---\n", {}),
    ("---\n- a\n- list\n---\n", {}),
    ("---\nlicense: {a: 1}\nlanguage: en\n---\n", {"language": "en"}),
    ("---\nlicense: other\nlicense_name: own\nlicense_link: x\ntags: [a]\n---\n", 3),
    (b"---\nlicense: \xff\n---\n", {}),
]


@pytest.mark.parametrize("card, found", CARDS)
def test_cards_of_sources(tmp_path, card, found):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    metadata = source_metadata(tmp_path)
    assert (len(metadata) if isinstance(found, int) else metadata) == found


@pytest.mark.parametrize("auto, head", HEADS.items(), ids=HEADS)
def test_the_task_of_a_card_is_that_of_its_head(source, learnt, auto, head):
    """One of the Hub's, of which its client has a method, and the pipeline loads the class; the source's own wins."""
    report = replace(learnt[1], converted_to=head.__name__)
    config = AutoConfig.from_pretrained(learnt[0])
    task = ModelCard(model_card(report, config, 32)).data.pipeline_tag
    assert task is None or hasattr(InferenceClient, task.replace("-", "_"))
    if task in PIPELINE_REGISTRY.supported_tasks and auto != "AutoModelForPreTraining":
        assert auto in [each.__name__ for each in PIPELINE_REGISTRY.supported_tasks[task]["pt"]]
    own = {"pipeline_tag": "zero-shot-classification"}
    assert ModelCard(model_card(report, config, 32, own)).data.pipeline_tag == own["pipeline_tag"]
    report = replace(report, arguments={**report.arguments, "architecture": "BertModel"})
    assert ModelCard(model_card(report, config, 32, own)).data.pipeline_tag == task


def test_the_card_of_a_model_of_the_hub_names_it(learnt):
    report = replace(learnt[1], source="user/bert", revision="0123456789abcdef")
    metadata = ModelCard(model_card(report, AutoConfig.from_pretrained(learnt[0]), 32)).data
    assert metadata.base_model == "user/bert" and metadata.base_model_relation == "finetune"


def test_documents_from_python_have_no_name(source, tmp_path):
    """A generator of them serves every part."""
    documents = (each for each in (source.parent / "text.txt").read_text(encoding="utf-8").split("\n\n"))
    with pytest.warns(UserWarning, match="only .* tokens"):
        report = convert(source, tmp_path / "out", method="distil", texts=documents, method_options=OPTIONS)
    assert report.details["distillation"]["tokens"] > 0 and report.fidelity.lengths
    assert report.arguments["texts"] == [] and "texts=documents" in command(report)
    assert "documents given in Python" in card_of(tmp_path / "out").text


@pytest.mark.parametrize(
    "kinds, name", [([], "AutoModelForMaskedLM.from_pretrained"), (["Pooling"], "SentenceTransformer")]
)
def test_convert_prints_how_to_load_modules(source, tmp_path, kinds, name):
    """Modules without a pooling are a CrossEncoder's, which SentenceTransformer does not load."""
    write_modules(Path(shutil.copytree(source, tmp_path / "stock")), *kinds)
    result = run_command("convert", tmp_path / "stock", tmp_path / "out")
    assert f"import hf_relpos; {name}({str(tmp_path / 'out')!r})" in result.stdout, result.output


def test_the_terminal_says_what_was_learnt_and_measured(source, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(read_text("eval")[:60]), encoding="utf-8")
    words = ["convert", source, tmp_path / "out", *"--method distil --position-embedding-type shaw --seed 1".split()]
    words += ["--texts", source.parent / "text.txt", "--texts", other, "--method-options", "steps=2"]
    result = run_command(*words, "--method-options", "batch_tokens=256")
    assert result.exit_code == 0, result.output
    details = json.loads((tmp_path / "out" / "conversion.json").read_text())["details"]
    notes, warnings = details["text"]["notes"], [line for line in result.stderr.splitlines() if "Warning" in line]
    assert len(warnings) == len(notes) >= 1
    assert warnings[0] == f"Warning: {notes[0]}" and "from_text.py" not in result.stderr
    assert notes[0] in result.stdout and details["fidelity"]["verdict"] in result.stdout
    assert AutoModel.from_pretrained(tmp_path / "out").config.position_embedding_type == "shaw"

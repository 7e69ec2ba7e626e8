"""`hf-relpos compare` and `hf-relpos evaluate`: what they print, write and refuse; scores of entities."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from launching import import_script
from oracles import stir, tiny_model
from transformers import BertConfig, BertForMaskedLM, BertTokenizer
from typer.testing import CliRunner

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel, convert
from hf_relpos.cli import app
from hf_relpos.cli.output import STDOUT, write_json
from hf_relpos.data.pairs import read_pairs
from hf_relpos.evaluation import load_encoder, rank_correlation, similarities
from hf_relpos.evaluation.compare import CompareSettings, compare_models
from hf_relpos.evaluation.evaluate import EvaluateSettings, evaluate_model
from hf_relpos.evaluation.similarity import pair_vectors
from hf_relpos.files import check_output_file, write_output_json


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"the pass key is remember it . cat sat mat red sun sky".split(),
]
WORDS += [f"{n:02}" for n in range(10, 100)] + [f"##{n:03}" for n in range(1000)]


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    # a line that says what takes long comes or not as other work on the machine has it
    monkeypatch.setattr("hf_relpos.console.FIRST_LINE_SECONDS", 600.0)


def test_json_has_no_nan(capsys):
    write_json(STDOUT, {"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": float("-inf")}, "d": "NaN"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, 1.5, [None]],
        "b": {"c": None},
        "d": "NaN",
    }


@pytest.mark.parametrize(
    "pairs, words",
    [
        ("3\tthe cat\tsun\n3.0\tred\tsky\n", ("sts.tsv", "score = 3")),
        ("1\tthe cat\tthe cat\n2\tthe cat\tthe cat\n", ("cosine = 1",)),
    ],
    ids=["scores", "cosines"],
)
def test_what_cannot_be_ranked_is_refused(folder, tmp_path, pairs, words):
    (tmp_path / "sts.tsv").write_text(pairs)
    out = tmp_path / "out.json"
    command = ["evaluate", folder / "teacher", "--sts", tmp_path / "sts.tsv", "--json", out]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 2 and not out.exists()
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher and a student with tokenizers, and files of each kind."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.2, **sizes)
    stir(BertForMaskedLM(config)).save_pretrained(folder / "teacher")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    tiny_model(RelPosBertForMaskedLM, "alibi", **sizes).save_pretrained(folder / "student")
    tiny_model(RelPosBertModel, "alibi", **sizes).save_pretrained(folder / "bare")
    tiny_model(RelPosBertModel, "alibi").save_pretrained(folder / "small")
    for name in ("teacher", "student"):
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text("The cat sat. The sun is red. Remember the key.\n\n" * 200)
    (folder / "sts.tsv").write_text("5\tthe cat sat\tthe cat sat\n1\tthe cat\tred sun sky\n3\tsun\tsun is red\n")
    (folder / "docs.tsv").write_text("id\ttext\na\tthe cat sat\nb\tred sun sky\n")
    (folder / "queries.tsv").write_text("query\tdoc\ncat\ta\nsun\tb\nsky\tb\n")
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_compare(folder, tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run(
        *("compare", folder / "teacher", folder / "student", "--text", folder / "text.txt", "--lengths", "16,48,128"),
        *("--sts", folder / "sts.tsv", "--json", out, "--plot", picture, "--tokens", 128),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [(entry["length"], entry["windows"], entry["reference"]) for entry in found["lengths"]] == [
        (16, 8, "teacher"),
        (48, 4, "teacher"),
        (128, 4, "windowed teacher"),
    ]
    assert found["text"] == [str(folder / "text.txt")] and found["unknown"] == 0
    assert len(found["lengths"][0]["divergence"]) == 2 and found["lengths"][0]["masked"]["tokens"] >= 8
    own = found["similarity"][str(folder / "sts.tsv")]
    pairs = read_pairs(folder / "sts.tsv")
    for name in ("teacher", "student"):
        cosines = similarities(pair_vectors(load_encoder(folder / name), pairs))
        assert own[name] == pytest.approx(100 * rank_correlation(cosines, [pair.score for pair in pairs]))
    assert own["difference"]["mean"] == pytest.approx(own["student"] - own["teacher"])
    assert own["sentence_cosine"]["sentence_of_min"] in {text for p in pairs for text in (p.sentence1, p.sentence2)}
    for words in ("128 *", "Cosine to the teacher", "layer 1", "Masked tokens, %", f"Verdict: {found['verdict']}."):
        assert words in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def with_window(folder, out, window):
    """A copy of the student whose configuration has the window."""
    shutil.copytree(folder / "student", out)
    content = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**content, "attention_window": window}))
    return out


def test_compare_in_a_window_and_as_it_is(folder, tmp_path):
    """The figures are those of a configuration with the window, and past the limit those without are beside them."""
    found = {}
    for name, student, more in (
        ("plain", folder / "student", ()),
        ("configured", with_window(folder, tmp_path / "windowed", 9), ()),
        ("option", folder / "student", ("--attention-window", 9)),
        ("without", tmp_path / "windowed", ("--attention-window", 0)),
    ):
        out = tmp_path / f"{name}.json"
        result = run(
            *("compare", folder / "teacher", student, "--text", folder / "text.txt", "--lengths", "16,128"),
            *("--json", out, "--plot", tmp_path / "plot.png", "--tokens", 128, *more),
        )
        assert result.exit_code == 0, result.output
        found[name] = json.loads(out.read_text())
        assert ("as it is" in result.output) == bool(more)
    assert found["option"]["lengths"] == found["configured"]["lengths"] != found["plain"]["lengths"]
    assert found["without"]["lengths"] == found["plain"]["lengths"]
    assert found["option"]["as_it_is"]["lengths"] == found["plain"]["lengths"][1:]
    assert found["without"]["as_it_is"]["lengths"] == found["configured"]["lengths"][1:]
    assert [found[name]["attention_window"] for name in ("plain", "option", "without")] == [None, 9, None]
    assert "as_it_is" not in found["plain"]


def test_evaluate_in_a_window_and_as_it_is(folder, tmp_path):
    found = {}
    for name, model, more in (
        ("plain", folder / "student", ()),
        ("configured", with_window(folder, tmp_path / "windowed", 9), ()),
        ("option", folder / "student", ("--attention-window", 9)),
    ):
        out = tmp_path / f"{name}.json"
        result = run(
            *("evaluate", model, "--mlm", folder / "text.txt", "--passkey", folder / "text.txt"),
            *("--retrieval", folder / "docs.tsv", folder / "queries.tsv", "--lengths", "64,100", "--json", out, *more),
        )
        assert result.exit_code == 0, result.output
        assert "LongEmbed" in result.output and ("as it is" in result.output) == bool(more)
        found[name] = json.loads(out.read_text())
    plain, option = found["plain"], found["option"]
    assert option["masked"] == found["configured"]["masked"] != plain["masked"]
    # the model was made for 64 tokens
    assert option["as_it_is"]["masked"] == {"100": plain["masked"]["100"]}
    assert option["as_it_is"]["passkey"] == {"100": plain["passkey"]["100"]}
    assert option["as_it_is"]["retrieval"]["full"]["mrr"] == plain["retrieval"]["full"]["mrr"]
    assert option["attention_window"] == 9 and option["as_it_is"]["attention_window"] is None


def test_compare_by_default(folder):
    """A model with itself; the lengths follow its limit, and those past it are not read."""
    result = run("compare", folder / "teacher", folder / "teacher", "--text", folder / "text.txt", "--tokens", 64)
    assert result.exit_code == 0, result.output
    assert "Verdict: safe inside 64; past 64 the result reads nothing." in result.output
    assert "256 tokens not measured: the student reads 64 tokens" in result.output


def test_short_text_and_another_language(folder, tmp_path):
    (tmp_path / "short.txt").write_text("кот сел. " * 8)
    result = run("compare", folder / "teacher", folder / "student", "--text", tmp_path / "short.txt")
    assert result.exit_code == 0, result.output
    # two of three tokens, but [CLS] and [SEP]
    assert "Warning: the tokenizer does not know 62 % of the tokens" in result.output
    assert "256 tokens not measured: the text does not fill one window of 256 tokens" in result.output


def test_evaluate(folder, tmp_path):
    out = tmp_path / "out.json"
    result = run(
        *("evaluate", folder / "student", "--sts", folder / "sts.tsv", "--mlm", folder / "text.txt"),
        *("--retrieval", folder / "docs.tsv", folder / "queries.tsv", "--passkey", folder / "text.txt"),
        *("--lengths", "64,100", "--json", out, "--max-length", 600),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["similarity"][str(folder / "sts.tsv")]["pairs"] == 3
    assert found["masked"].keys() == found["passkey"].keys() == {"64", "100"}
    assert found["passkey"]["64"].keys() == {"vector", "masked"}
    assert found["retrieval"].keys() == {"truncate", "chunks", "full"}
    # the documents are short, so that all strategies read the same
    assert found["retrieval"]["full"]["difference"]["mrr"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    for words in ("Spearman × 100", "Retrieval, 3 queries", "Masked tokens", "Passkey, %"):
        assert words in result.output


def test_progress_is_of_the_whole(folder):
    """From nothing to all, in steps forward, whatever is measured."""
    told = []
    sts, text, lengths = [folder / "sts.tsv"], str(folder / "text.txt"), [16, 60, 128]
    compare = CompareSettings(
        str(folder / "teacher"), str(folder / "student"), [text], lengths=lengths, sts=sts, attention_window=8
    )
    compare_models(compare, lambda *each: told.append(each))
    model, files = str(folder / "student"), (folder / "docs.tsv", folder / "queries.tsv")
    shares = [[completed / total for _, completed, total in told]]
    told.clear()
    evaluate = EvaluateSettings(
        model, sts, retrieval=files, mlm=text, passkey=text, lengths=[64, 100], max_length=600, attention_window=8
    )
    evaluate_model(evaluate, lambda *each: told.append(each))
    shares += [[completed / total for _, completed, total in told]]
    for each in shares:
        assert each == sorted(each) and each[0] == 0 and each[-1] == pytest.approx(1) and len(set(each)) > 5


def test_what_was_measured_goes_into_the_card(folder, tmp_path):
    """As the Hub reads it; what else the card holds stays, and a second measurement takes the place of the first."""
    out = tmp_path / "out"
    convert(folder / "teacher", out, method="drop")
    card = ModelCard.load(out / "README.md")
    other = EvalResult("fill-mask", "text", "held out", "accuracy", 0.5)
    card.data.license, card.data.model_name, card.data.eval_results = "mit", "named", [other]
    card.save(out / "README.md")
    more = (folder / "sts.tsv").read_text() + "2\tred\tmat\n"
    pairs = tmp_path / "sts.tsv"
    for text, count in ((more, 4), ((folder / "sts.tsv").read_text(), 3)):
        pairs.write_text(text)
        result = run("evaluate", out, "--sts", pairs, "--update-card", "--json", tmp_path / "found.json")
        assert result.exit_code == 0 and f"written to {out / 'README.md'}" in result.stdout
        found = json.loads((tmp_path / "found.json").read_text())["similarity"][str(pairs)]
        assert found["pairs"] == count
        metadata = metadata_load(out / "README.md")
        name, results = model_index_to_eval_results(metadata["model-index"])
        assert name == "named" and len(results) == 2 and results[0] == other
        assert results[1] == EvalResult(
            "sentence-similarity",
            "sts",
            f"sts.tsv, {count} pairs",
            "spearman_cosine",
            round(found["spearman"] / 100, 4),
            metric_name="Spearman Cosine",
            verified=False,
        )
        assert metadata["license"] == "mit" and ModelCard.load(out / "README.md").text == card.text


def test_the_card_of_what_was_converted_has_its_source_beside_it(folder, tmp_path):
    out = tmp_path / "out"
    convert(folder / "teacher", out, method="drop")
    before = ModelCard.load(out / "README.md").text
    pairs = tmp_path / "sts.tsv"
    pairs.write_text("".join(f"{n % 7}\t{n} {100 - n} the\tthe {n + 5} {90 - n}\n" for n in range(12, 50)))
    for _ in range(2):  # measured again, the section is replaced
        result = run(
            *("compare", folder / "teacher", out, "--text", folder / "text.txt", "--lengths", "16", "--tokens", "64"),
            *("--sts", pairs, "--update-card", "--json", tmp_path / "found.json"),
        )
        assert result.exit_code == 0 and f"written to {out / 'README.md'}" in result.stdout, result.output
    (found,) = json.loads((tmp_path / "found.json").read_text())["similarity"].values()
    card = ModelCard.load(out / "README.md")
    assert [each.metric_value for each in card.data.eval_results] == [round(found["student"] / 100, 4)]
    row = f"| sts.tsv | {found['pairs']} | {found['teacher']:.2f} | {found['student']:.2f} |"
    assert card.text.count(row) == 1 and found["teacher"] != found["student"]
    start = card.text.index("## Similarity of sentences")
    limits = card.text.index("## What is not promised")
    assert start < limits and card.text[:start] + card.text[limits:] == before


@pytest.mark.parametrize(
    "card, arguments, words",
    [
        (
            None,
            ["--sts", "sts.tsv"],
            "there is no such model card to update; `hf-relpos convert` writes one",
        ),
        ("---\n[\n---\n", ["--sts", "sts.tsv"], "README.md: its metadata cannot be read (while parsing"),
        ("---\n- a\n---\n", ["--sts", "sts.tsv"], "its metadata cannot be read (repo card metadata block should be"),
        ("---\nlicense: mit\n---\n", ["--mlm", "text.txt"], "--update-card writes the correlations of scored"),
        (
            "---\nlicense: mit\n---\n",
            ["--sts", "sts.tsv", "--sts", "sts.tsv"],
            "--sts: sts.tsv and another file are called 'sts', which is their name in the card; rename one",
        ),
    ],
)
def test_a_card_that_cannot_be_updated_is_refused_before_anything_is_measured(
    folder, tmp_path, monkeypatch, card, arguments, words
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("hf_relpos.evaluation.evaluate.load_encoder", None)
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    result = run("evaluate", tmp_path, *arguments, "--update-card")
    assert result.exit_code == 2 and words in result.stderr and result.stderr.startswith("Error: ")


def test_lengths_that_the_model_does_not_read_are_named(folder, tmp_path):
    out = tmp_path / "out.json"
    result = run("evaluate", folder / "teacher", "--mlm", folder / "text.txt", "--lengths", "64,1000", "--json", out)
    assert result.exit_code == 0, result.output
    assert "1,000 tokens not measured: the model reads 64 tokens" in result.output
    assert json.loads(out.read_text())["masked"].keys() == {"64"}


def test_an_absolute_model_reads_no_long_documents_at_once(folder, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--retrieval", folder / "docs.tsv", folder / "queries.tsv", "--json", out)
    assert run("evaluate", folder / "teacher", *arguments).exit_code == 0
    assert json.loads(out.read_text())["retrieval"].keys() == {"truncate", "chunks"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("compare", "teacher", "student", "--text", "none.txt"), "there is no such file"),
        (("compare", "teacher", "bare", "--text", "text.txt", "--lengths", "8,x"), "--lengths '8,x' is not a list of"),
        (("compare", "teacher", "bare", "--text", "text.txt", "--lengths", "2"), "--lengths 2: [CLS] and [SEP]"),
        (("compare", "teacher", "bare", "--text", "text.txt", "--json", "no/out.json"), "its folder does not exist"),
        (("compare", "bare", "student", "--text", "text.txt"), "bare: no tokenizer could be loaded"),
        (
            ("compare", "small", "student", "--tokenizer", "teacher", "--text", "text.txt"),
            "and small knows 50; give the",
        ),
        (("compare", "nothing", "student", "--text", "text.txt"), "nothing: no such folder"),
        (("compare", "teacher", "student", "--text", "text.txt", "--pooling", "max"), "pooling = 'max'"),
        (
            ("compare", "teacher", "student", "--text", "text.txt", "--sts", "docs.tsv"),
            "docs.tsv, line 1: 2 columns, and 'sentence2' is column 3",
        ),
        (
            ("compare", "teacher", "student", "--text", "docs.tsv", "--field", "body"),
            "no column 'body' (it has id, text)",
        ),
        (("compare", "teacher", "student", "--text", "docs.tsv"), "does not fill one window of 16 tokens"),
        (
            ("compare", "teacher", "teacher", "--text", "text.txt", "--attention-window", "4"),
            "--attention-window 4: model_type = 'bert'",
        ),
        (
            ("evaluate", "teacher", "--mlm", "text.txt", "--attention-window", "4"),
            "--attention-window 4: model_type = 'bert'",
        ),
        (("evaluate", "student"), "nothing to measure: give --sts, --retrieval, --mlm or --passkey"),
        (("evaluate", "bare", "--tokenizer", "teacher", "--mlm", "text.txt"), "has no head that predicts masked"),
        (
            ("evaluate", "teacher", "--mlm", "text.txt", "--lengths", "128"),
            "--lengths 128: the model reads 64 tokens; give shorter ones",
        ),
        (
            ("evaluate", "teacher", "--passkey", "text.txt", "--lengths", "1000000"),
            "--lengths 1000000: the model reads 64 tokens; give shorter ones",
        ),
        (
            ("evaluate", "student", "--mlm", "text.txt", "--lengths", "1000000"),
            "length = 1000000",
        ),
        (
            ("evaluate", "student", "--mlm", "https://example.org/a.txt"),
            "text = 'https://example.org/a.txt'",
        ),
    ],
)
def test_errors_are_text_and_exit_code_2(folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and words in result.stderr and "Traceback" not in result.output
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.fixture(scope="module")
def entity_scores():
    return import_script("recipes.scores").entity_scores


@pytest.mark.parametrize(
    "tags, expected",
    [
        ("O O", set()),
        ("B-a I-a O B-b", {("a", 0, 2), ("b", 3, 4)}),
        ("B-a B-a I-a", {("a", 0, 1), ("a", 1, 3)}),
        ("B-a I-b I-b", {("a", 0, 1), ("b", 1, 3)}),  # I- of another type begins an entity
        ("O I-a I-a", {("a", 1, 3)}),
        ("B-x-y I-x-y", {("x-y", 0, 2)}),
    ],
)
def test_entities(entity_scores, tags, expected):
    truth = ["O"] * len(tags.split())
    for kind, start, end in expected:
        truth[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    assert set(entity_scores([truth], [tags.split()]).values()) == ({100.0} if expected else {0.0})


def test_entity_scores(entity_scores):
    truth = ["B-a I-a O B-b".split(), "O B-a".split()]
    guess = ["B-a I-a O B-a".split(), "O O".split()]  # one right, one of the wrong type, one missed
    assert entity_scores(truth, guess) == pytest.approx({"precision": 50, "recall": 100 / 3, "f1": 40})
    assert entity_scores([["O"]], [["O"]])["f1"] == 0


@pytest.mark.parametrize(
    "check", [lambda path: check_output_file(path, "--json"), lambda path: write_output_json(path, {})]
)
def test_a_report_that_cannot_be_written(tmp_path, monkeypatch, check):
    def refuse(self, *arguments, **keywords):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(
        ValueError, match=r"--json .*out\.json: could not be written \(Read-only.*give a file elsewhere"
    ):
        check(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []

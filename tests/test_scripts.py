"""Scripts of the repository: every one starts; what the generators write is current.

All in this process, so that PyTorch is imported once. The recipes, which users run, are in test_examples.py.
"""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import SCRIPTS, import_script
from oracles import stir, tiny_sizes
from transformers import CONFIG_MAPPING, MODEL_MAPPING, BertConfig, BertModel, TrainingArguments
from wording import VOCABULARY, WORDS, save_with_tokenizer

from hf_relpos import convert
from hf_relpos.attention.backends.sdpa import Sdpa
from hf_relpos.demo import CHECKPOINT


COMMANDS = sorted(
    str(path.relative_to(SCRIPTS))
    for path in [*SCRIPTS.glob("*/*.py"), *SCRIPTS.glob("maintenance/golden/*.py")]
    if 'if __name__ == "__main__":' in path.read_text("utf-8")
)


# What fixtures and peers are made with in environments of their own, which the docstrings of those scripts describe.
ELSEWHERE = ("PoPE_pytorch", "gliner", "tensorflow", "transformers.models.deprecated")


# Every script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_starts(name, monkeypatch, capsys):
    """As `python scripts/NAME --help` from any folder, or its import where it has no options: siblings are found."""
    path = SCRIPTS / name
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    try:
        if not re.search(r"argparse|launch\(|benchmark_parser", path.read_text("utf-8")):
            assert callable(runpy.run_path(str(path))["main"])
            return
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        assert error.name.startswith(ELSEWHERE)  # and not of a sibling
        return
    assert done.value.code == 0 and "usage:" in capsys.readouterr().out.lower()


# Pages that are written by scripts ---------------------------------------------------------------------------------


def test_cards_are_what_their_results_give():
    cards = import_script("write_cards")
    stale = [path for path, text in cards.cards().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python scripts/maintenance/write_cards.py"
    stored = {str(path.relative_to(cards.RESULTS)) for path in cards.RESULTS.rglob("*.json")}
    assert stored <= set(cards.CARDS)


def test_the_table_of_schemes(tmp_path, monkeypatch):
    report = import_script("scheme_report")
    assert not report.stale(), "run: make schemes"
    assert report.added_parameters("relative_key") == 12 * 1023 * 64 and report.added_parameters("rope") == 0
    assert report.added_parameters("t5") == 32 * 12  # shared by the layers
    assert 0 < report.error("alibi") <= 1e-6 and report.error("huang_m1") is None
    row = "| `t5` | Raffel | c' | 384 | clip | sdpa | {} | transformers |\n"
    assert report.without_errors(row.format("2e-07")) == report.without_errors(row.format("0"))
    (tmp_path / "card").write_text(report.CARD.read_text("utf-8").replace("| `shaw` |", "| `show` |"), "utf-8")
    monkeypatch.setattr(report, "CARD", tmp_path / "card")
    monkeypatch.setattr(report, "PICTURES", tmp_path)
    monkeypatch.setattr(report, "SCHEMES", {"shaw": report.SCHEMES["shaw"]})
    assert report.stale() == ["docs/schemes.md", "docs/schemes/shaw.png"]


def test_the_table_of_families(tmp_path, monkeypatch):
    report = import_script("family_report")
    assert not report.is_stale(), "run: make families"
    for kind in report.NATIVE:  # what it sends to Transformers itself
        if kind in CONFIG_MAPPING:  # the oldest release that is supported has no GTE
            model = MODEL_MAPPING[CONFIG_MAPPING[kind]]
            assert model._supports_sdpa and model._supports_flash_attn, kind
    monkeypatch.setitem(report.PROBES, "roformer", [{"hidden_act": "relu"}])
    with pytest.raises(SystemExit, match=r"PROBES\['roformer'\].*not refused any more"):
        report.refusals("roformer")
    page = tmp_path / "families"
    page.write_text(report.PAGE.read_text("utf-8").replace("RoFormer", "RoFarmer"), "utf-8")
    monkeypatch.undo()
    monkeypatch.setattr(report, "PAGE", page)
    assert report.is_stale()


# Benchmarks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a small BERT of random weights, text of each kind, sentence pairs."""
    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    sizes = tiny_sizes(vocab_size=len(VOCABULARY), max_position_embeddings=32, initializer_range=0.2)
    save_with_tokenizer(stir(BertModel(BertConfig(**sizes), add_pooling_layer=False)), folder / "teacher")

    def text(seed, count):
        rng = np.random.default_rng(seed)
        return [" ".join([*rng.choice(WORDS[:-1], rng.integers(5, 12)), "."]).capitalize() for _ in range(count)]

    (folder / "held.txt").write_text("\n\n".join(" ".join(text(number, 40)) for number in range(20)))
    (folder / "train.txt").write_text("\n\n".join(" ".join(text(number, 200)) for number in range(100, 140)))
    pairs = zip(text(1, 12), text(2, 12), strict=True)
    lines = ["score\tsentence1\tsentence2", *(f"{n % 5}\t{one}\t{other}" for n, (one, other) in enumerate(pairs))]
    (folder / "pairs.tsv").write_text("\n".join(lines))
    return folder


def test_conversion_is_measured(teacher, tmp_path, monkeypatch):
    bench = import_script("bench_conversion")
    monkeypatch.setitem(bench.STUDENTS, "fast", {"method_options": {"steps": 4}})
    files = [f"--{name}={teacher / file}" for name, file in (("source", "teacher"), ("train-text", "train.txt"))]
    files += [f"--eval-text={teacher / 'held.txt'}", f"--sts={teacher / 'pairs.tsv'}", f"--out={tmp_path}"]
    bench.main([*files, *"--students fast --lengths 8 16 --window-tokens 128".split()])
    row = json.loads((tmp_path / "conversion.json").read_text())["rows"]["fast"]
    assert 0.1 < row["cosines"]["held.txt"]["16"] < 1 and len(row["correlations"]["pairs.tsv"]) == 2
    assert row["details"]["cpu_seconds"]["distillation"] > 0
    card = (tmp_path / "conversion.md").read_text()
    assert str(teacher) not in card and "| fast |" in card
    with pytest.raises(SystemExit):
        bench.main([*files, "--sts", "nothing.tsv"])


def test_pass_keys_are_looked_for(teacher, tmp_path):
    bench = import_script("bench_passkeys")
    files = [f"--{name}={teacher / 'teacher'}" for name in ("source", "converted")]
    bench.main([*files, f"--text={teacher / 'held.txt'}", f"--out={tmp_path}", "--lengths=28", "--keys=50"])
    found = json.loads((tmp_path / "passkeys.json").read_text())
    rows, beside = found["rows"], found["beside"]
    assert all(found[1] == 50 for kind in [*rows.values(), *beside.values()] for found in kind["28"].values())
    bench.main([files[0], f"--text={teacher / 'held.txt'}", f"--out={tmp_path}", "--lengths=28", "--keys=50"])
    again = json.loads((tmp_path / "passkeys.json").read_text())
    assert again["rows"] == rows and again["beside"] == beside  # only the latter are measured again
    with pytest.raises(SystemExit):
        bench.main([files[0], f"--text={teacher / 'held.txt'}", f"--out={tmp_path / 'new'}", "--keys=50"])
    assert bench.lost_to_filler(torch.ones(2, 30)) == [True, True] and not any(bench.lost_to_filler(torch.eye(30)))
    assert bench.found(torch.eye(100)) == [True] * 100 and bench.found(torch.zeros(50, 50)) == [False] * 50


def test_documents_are_found_by_their_summaries(teacher, tmp_path):
    """In QMSum's files; the score is the gain of the one right document among the first ten, and ties are lost."""
    bench = import_script("bench_documents")
    texts = (teacher / "train.txt").read_text().split("\n\n")[:24]
    for number, text in enumerate(texts):
        turns = [{"speaker": "cat", "content": turn} for turn in text.split(" . ")[:9]]
        asked = [{"query": "what", "answer": turns[-1]["content"]}]
        meeting = {"general_query_list": asked, "specific_query_list": asked, "meeting_transcripts": turns}
        part = tmp_path / "data/ALL" / bench.PARTS[number % 2]
        part.mkdir(exist_ok=True, parents=True)
        (part / f"{number}.json").write_text(json.dumps(meeting))
    convert(teacher / "teacher", tmp_path / "converted", method="drop")
    files = [f"--source={teacher / 'teacher'}", f"--converted={tmp_path / 'converted'}"]
    bench.main([*files, f"--data={tmp_path}", f"--out={tmp_path}", "--windows", "28", "16"])
    content = json.loads((tmp_path / "documents.json").read_text())
    assert content["documents"] == 24 and content["queries"] <= 24  # each summary once
    rows = content["rows"]
    assert 0 < content["beside"]["BM25"]["ndcg"] <= 1
    assert rows["source, first 16 tokens"]["vectors"] == 1 < rows["source, best of windows of 16"]["vectors"]
    assert all(row["interval"][0] <= row["ndcg"] <= row["interval"][1] for row in rows.values())
    assert "late chunking" in (tmp_path / "documents.md").read_text()
    scores = torch.eye(12).double() + torch.arange(12) / 100
    assert bench.gains(scores, torch.arange(12)).tolist() == [1.0] * 12
    ranks = 1 + torch.arange(12).flip(0)
    wanted = [1 / np.log2(1 + rank) if rank <= 10 else 0.0 for rank in ranks.tolist()]
    assert bench.gains((torch.arange(12) / 100).expand(12, -1), torch.arange(12)).tolist() == pytest.approx(wanted)
    assert bench.gains(torch.zeros(2, 12), torch.tensor([0, 1])).tolist() == [0.0, 0.0]
    with pytest.raises(SystemExit):
        bench.main([*files, f"--data={teacher}"])


def test_probes_are_run_once(tmp_path, monkeypatch):
    """And the labels of [CLS] b B b A [SEP] are those of the tasks."""
    bench = import_script("probe_schemes")
    none = bench.IGNORE_INDEX
    found = {task: label[0].tolist() for task, label in bench.labels(torch.tensor([[1, 6, 4, 6, 3, 2]])).items()}
    assert found["back"] == [none, 0, 0, 1, 6, none] and found["reverse"] == [none, 3, 6, 4, 6, none]
    assert found["first"] == [none, 1, none, 0, none, none] and found["order"] == [none, none, 0, none, 0, none]
    call = [*"--schemes none absolute --seeds 1 --steps 2".split(), f"--out={tmp_path}"]
    bench.main(call)
    monkeypatch.setattr(bench, "train", lambda *run: pytest.fail(f"{run} is repeated"))
    bench.main(call)
    runs = json.loads((tmp_path / "probes.json").read_text())["runs"]
    assert [run["scheme"] for run in runs] == ["none", "absolute"]


def test_models_are_fine_tuned_once(tmp_path, monkeypatch):
    """A run for each model, task and seed; later calls add what is missing. Differences are to the first model."""
    bench = import_script("bench_finetuning")
    done, lost = [], {"pairs": 0.5, "questions": 4.0}

    def run(task, folder, seed, data):
        name = next(name for name, known in bench.TASKS.items() if known is task)
        done.append((name, folder, seed))
        return {"score": 80.0 + seed - lost[name] * (folder == "b") * seed, "cpu": 1}

    monkeypatch.setattr(bench, "run", run)

    def call(*more, source="source"):
        models = ["--models", f"{source}=a", "converted=b", "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["bench_finetuning.py", "--data", ".", *models, "--tasks", *more])
        bench.main()
        return (tmp_path / "finetuning.md").read_text()

    call("pairs", "--seeds", "1")
    page = call("pairs", "questions", "--seeds", "0", "1")
    wanted = [(task, folder, seed) for seed in (0, 1) for task in lost for folder in "ab"]
    assert sorted(done) == sorted(wanted)
    assert "| 80.5 (2) | -0.2 ± 0.2 (2) |" in page and "| 80.5 (2) | -2.0 ± 2.0 ✗ (2) |" in page
    assert "| mean |  | -1.1 ± 1.0 ✗ |" in page
    page = call("pairs", "--seeds", "1", source="other")
    assert "## source" in page and "| task | other | converted |" in page and "| 81.0 (1) | -0.5 (1) |" in page


@pytest.mark.slow
def test_a_run_of_fine_tuning_reads_the_metric_of_its_recipe(tmp_path):
    """Of the recipe itself, on the packaged BERT."""
    bench = import_script("bench_finetuning")
    (tmp_path / "sts").mkdir()
    lines = [f"{score}\tword{score}\tword{score + 1}" for score in range(8)]
    for name in ("train", "dev"):
        (tmp_path / "sts" / f"stsb.{name}.tsv").write_text("\n".join(["score\tsentence1\tsentence2", *lines]))
    found = bench.run(bench.TASKS["pairs"], str(CHECKPOINT), 0, tmp_path)
    assert -100 <= found["score"] <= 100 and found["cpu"] >= 1


def test_encoders_are_timed_beside_peers(tmp_path, monkeypatch):
    """Graphs included; a peer that is not installed is named on the page, and other families' results are kept."""
    bench = import_script("bench_encoder")
    small = {**bench.SIZES, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    monkeypatch.setitem(bench.FAMILIES, "BERT", ("BertModel", small))
    monkeypatch.setitem(bench.FAMILIES, "MPNet", ("MPNetModel", small))
    monkeypatch.setattr(bench, "start_quietly", lambda threads: None)  # of the process that runs the tests
    monkeypatch.setattr(bench, "compiled", lambda model: model)
    monkeypatch.setattr(bench, "run_worker", lambda *command: {"MB": 5.0} if command[-1].count("/") == 1 else 5.0)
    for name in ("nncf", "ctranslate2"):
        monkeypatch.setitem(sys.modules, name, None)

    cases = ["1 × 128", bench.PADDED]

    def run(*more):
        given = ["--rounds", "1", "--out", str(tmp_path), "--cases", *cases, *more]
        monkeypatch.setattr("sys.argv", ["bench_encoder.py", *given])
        bench.main()
        found = json.loads((tmp_path / "cpu-encoder.json").read_text())["families"]
        return {key.partition(" / ")[0]: run for key, run in found.items()}

    run("--families", "MPNet")
    found = run("--families", "BERT", "--peers")
    missing, rows = found["BERT"]["absent"], found["BERT"]["times"]
    assert list(missing) == ["OpenVINO, int8", "CTranslate2", "CTranslate2, int8"]
    assert all(name in reason for name, reason in zip(("nncf", "ctranslate2"), missing.values(), strict=False))
    assert [(row["case"], row["pass"]) for row in rows] == [(case, kind) for kind in bench.PASSES for case in cases]
    assert rows[1]["errors"]["ONNX Runtime"] < 1e-5
    assert set(rows[0]["seconds"]) == set(bench.ORDER) - {*missing, "disentangled-flash", bench.ATTENTION}
    page = (tmp_path / "cpu-encoder.md").read_text()
    assert "Left out: OpenVINO, int8 (" in page and "| ONNX Runtime, int8 |" in page and "MB, padded" in page
    assert bench.alone("BERT", bench.OURS, cases[:1], 1).keys() == {"seconds", "MB"}
    assert set(found) == {"MPNet", "BERT"}


def test_a_device_is_checked_in_parts(monkeypatch):
    """A rehearsal on the CPU; and what is wrong or raises is a row, beside others that are right."""
    check = import_script("device_check")

    def rows_of(*names):
        rows = []
        for name in names:
            check.run_part(check.Part(name, "cpu", True, rows.append, lambda: None))
        return rows

    names = ["attention relative_key", "speed t5", "speed stock", "optimize bert"]
    names += ["convert", "patch_transformers", "Trainer"]
    rows = rows_of(*names)
    assert [row for row in rows if not row["ok"]] == [] and {row["part"] for row in rows} == set(names)
    said = check.summary(rows)
    assert re.search(r"\| flex_attention, 320 tokens \| \d", said) and "| relpos (chunked), 320 tokens |" in said
    assert re.search(r"\| t5, eager \| [\d,]+ \(", said) and f"{len(rows)} of {len(rows)} rows are right" in said
    run = Sdpa.run
    monkeypatch.setattr(Sdpa, "run", lambda self, call: (run(self, call)[0] * 1.2, None))
    monkeypatch.setattr(check, "read_text", lambda part: 1 / 0)
    wrong = [row for row in rows_of("attention t5", "convert") if not row["ok"]]
    kinds = {f" {dtype}, sdpa, {kind}" for dtype in ("float32", "bfloat16") for kind in ("forward", "gradients")}
    assert {row["name"].partition(",")[2] for row in wrong[:-1]} == kinds
    assert wrong[-1]["detail"].startswith("ZeroDivisionError")
    assert not check.relative_error([torch.ones(2), torch.tensor([1.0, torch.nan])], [torch.ones(2)] * 2) < 9


def test_a_part_of_the_device_check_that_does_not_end_is_a_row(tmp_path):
    check, out = import_script("device_check"), tmp_path / "found.json"
    call = ["--device=cpu", "--tiny", f"--out={out}", "--only", "patch"]
    assert check.main(call) == 0 and all(row["ok"] for row in json.loads(out.read_text())["rows"])
    assert check.main([*call, "--seconds=0.1"]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["part"] == "patch_transformers" and "its time was over" in row["detail"]


def test_training_text_shares_nothing_with_the_evaluation(teacher):
    training_passages = import_script("bench_conversion").training_passages
    held = [str(teacher / "held.txt")]
    assert len(set(training_passages([str(teacher / "train.txt")], held, 200_000, 0))) == 17
    assert training_passages(held, held, 10_000, 0) == []


# The arguments of each recipe.
RECIPES = {
    "run_mlm": "MaskedArguments",
    "run_classification": "ClassificationArguments",
    "run_ner": "TaggingArguments",
    "run_qa": "AnsweringArguments",
    "run_embedding": "EmbeddingArguments",
}


def test_every_recipe_reads_the_commands_that_train_md_shows():
    """As a reader would paste them."""
    text = (SCRIPTS.parent / "docs" / "train.md").read_text("utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^python (scripts/examples/.*)$", text, re.MULTILINE)]
    assert {Path(script).stem for script, *_ in commands} == {*RECIPES}
    parsing = import_script("recipes.arguments")
    for script, *words in commands:
        recipe = import_script(Path(script).stem)
        kinds = (parsing.ModelArguments, getattr(recipe, RECIPES[Path(script).stem]))
        *_, training = parsing.parse((*kinds, TrainingArguments), "", words)
        assert (SCRIPTS.parent / script).is_file() and training.do_eval

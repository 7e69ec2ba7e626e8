"""scripts/bench_recipes.py: its commands are ones that the recipes read, and it resumes."""

import json
import shlex
from pathlib import Path

import pytest
from launching import import_script
from transformers import TrainingArguments

from hf_relpos.demo import CHECKPOINT


@pytest.fixture(scope="module")
def bench():
    return import_script("bench_recipes")


# The arguments of each recipe.
KINDS = {
    "mlm": "MaskedArguments",
    "classification": "ClassificationArguments",
    "ner": "TaggingArguments",
    "qa": "AnsweringArguments",
    "embedding": "EmbeddingArguments",
}


def test_every_recipe_reads_the_commands_of_its_rows(bench, tmp_path):
    """As a reader of the card would paste them."""
    models, parse = import_script("recipes.arguments").ModelArguments, import_script("recipes.arguments").parse
    commands = bench.Bench(bench.parse(["--source", "minilm", "--data", str(tmp_path)]))
    assert {name for name, _ in bench.ROWS.values()} == {*KINDS, "distil"}
    for key, (name, _) in bench.ROWS.items():
        python, script, *words = shlex.split(commands.command(key))
        recipe = import_script(Path(script).stem)
        assert (python, script) == ("python", f"scripts/run_{name}.py")
        kinds = (models, getattr(recipe, KINDS[name])) if name in KINDS else (recipe.DistillationArguments,)
        *_, training = parse((*kinds, TrainingArguments), "", words)
        assert training.do_eval and training.do_train == (key != "distil/before")


def test_both_models_of_a_recipe_have_the_same_flags(bench):
    for recipe in bench.RECIPES.values():
        if {"absolute", "relative"} == set(recipe.runs):
            one, other = (set(shlex.split(run.flags)) for run in recipe.runs.values())
            assert one ^ other <= {
                *("{bert}", "{source}", "{bert-relative}", "{minilm-relative}"),
                *("--model_type", "bert", "--position_embedding_type", "t5"),
            }


def test_a_row_with_the_same_commands_is_not_run_again(bench, tmp_path, monkeypatch):
    """Figures are those of all_results.json; a student is converted once; other commands are run anew."""
    ran = []

    def run(self, words, log):
        ran.append(words[0] if words[0] != "-m" else words[2])
        out = Path(words[words.index("--output_dir") + 1] if "--output_dir" in words else words[4])
        out.mkdir(parents=True)
        figures = {"eval_f1": 0.5 + 0.01 * len(ran), "eval_precision": 0.25, "eval_recall": 0.75}
        (out / "all_results.json").write_text(json.dumps(figures))
        return 61.4

    monkeypatch.setattr(bench.Bench, "_python", run)
    monkeypatch.setitem(bench.__dict__, "ROWS", {key: row for key, row in bench.ROWS.items() if key[:4] == "ner/"})
    arguments = ["--source", "/models/minilm", "--data", str(tmp_path), "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out")]
    bench.main([*arguments, "--rows", "ner/absolute"])
    assert "Not run yet: `ner/relative`." in (tmp_path / "out" / "recipes.md").read_text()
    bench.main(arguments)
    assert ran == ["scripts/run_ner.py", "convert", "scripts/run_ner.py"]
    content = json.loads((tmp_path / "out" / "recipes.json").read_text())
    assert [row["figures"]["eval_f1"] for row in content["rows"].values()] == [0.51, 0.53]
    card = (tmp_path / "out" / "recipes.md").read_text()
    assert "Not run yet" not in card
    assert "| relative | 0.530 | 0.250 | 0.750 | 61 |" in card and card == bench.card(content)
    assert "hf-relpos convert minilm minilm-relative --text DATA/text/novels" in card and str(tmp_path) not in card
    assert "--model_name_or_path minilm-relative" in card
    monkeypatch.setitem(bench.CONVERSIONS, "minilm-relative", "convert {source} --fast --text {data}/a.txt")
    bench.main(arguments)
    assert ran[3:] == ["convert", "scripts/run_ner.py"]


@pytest.mark.full
def test_a_recipe_is_run_in_a_process_of_its_own(bench, tmp_path, monkeypatch):
    lines = "".join(f"{label}\t{text}\n" for label, text in [("yes", "the sun"), ("no", "the sea")] * 4)
    (tmp_path / "a.tsv").write_text("label\ttext\n" + lines)
    flags = "--model_name_or_path {bert} --train_file {data}/a.tsv --validation_file {data}/a.tsv --max_steps 1"
    row = bench.Run("absolute", flags + bench.TRAIN)
    monkeypatch.setitem(bench.__dict__, "ROWS", {"classification/absolute": ("classification", row)})
    arguments = ["--source", str(CHECKPOINT), "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    bench.main([*arguments, "--work", str(tmp_path / "work")])
    (entry,) = json.loads((tmp_path / "out" / "recipes.json").read_text())["rows"].values()
    assert 0 <= entry["figures"]["eval_accuracy"] <= 1 and entry["cpu_seconds"] > 1
    (tmp_path / "a.tsv").write_text("")
    with pytest.raises(SystemExit, match=r"run_classification.py failed; see .*\.log"):
        bench.main([*arguments, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "other")])

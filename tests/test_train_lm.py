"""scripts/train_lm.py: texts, segments and windows, variants of one size, whole runs, errors."""

import json
import lzma
import math
import random
import re

import pytest
import torch
from launching import SCRIPTS, import_script, run_python

from hf_relpos import RelPosBertLMHeadModel
from hf_relpos.data.masking import IGNORE_INDEX


@pytest.fixture(scope="module")
def script():
    return import_script("train_lm")


def write_texts(folder):
    """The same thirty letters, over and over."""
    rng = random.Random(0)
    line = "".join(rng.choice("abcdefgh") for _ in range(30))
    for name, count in (("train", 4000), ("valid", 500)):
        (folder / name).write_text((line * (count // 30 + 1))[:count])


def arguments(folder, *more):
    sizes = "--layers 1 --hidden 16 --heads 2 --intermediate 24 --segment 12 --memory 12 --batch 4 --eval-batch 2"
    files = ["--train", folder / "train", "--valid", folder / "valid"]
    options = ["--name", "made-up", *files, *sizes.split(), "--steps", 8, "--threads", 1]
    return [*map(str, options), "--out", str(folder / "out"), "--work", str(folder / "work"), *map(str, more)]


def test_texts(tmp_path, script):
    (tmp_path / "train").write_bytes("abé€ca".encode())
    with lzma.open(tmp_path / "valid.xz", "wb") as file:
        file.write("aXéc\r\n".encode())
    words = ["--name", "x", "--train", str(tmp_path / "train"), "--valid", str(tmp_path / "valid.xz")]
    texts = script.Texts(script.parse(words))
    assert texts.vocabulary == 256
    assert bytes(texts.parts["valid"].tolist()) == "aXéc\r\n".encode()
    texts = script.Texts(script.parse([*words, "--unit", "character"]))
    assert texts.vocabulary == 6  # a, b, c, é, €, and what is not known
    assert texts.parts["train"].tolist() == [0, 1, 3, 4, 2, 0]
    assert texts.parts["valid"].tolist() == [0, 5, 3, 2, 5, 5]
    assert texts.unknown == {"train": 0.0, "valid": 0.5}
    whole = ["--name", "x", "--text", str(tmp_path / "train"), "--split", "2", "1", "1", "--unit", "character"]
    parts = script.Texts(script.parse(whole)).parts
    assert {name: part.tolist() for name, part in parts.items()} == {"train": [0, 1], "valid": [2], "test": [2]}


def test_segments_and_windows(script):
    """Labels are the next characters, also past the end of a segment; every character is scored once."""
    text = torch.arange(50)
    segments = script.Segments(text, 3, 4, False, "some")
    assert len(segments) == 3 * 4  # 48 of 49 that have a next one
    for index, item in enumerate(segments):
        step, row = divmod(index, 3)
        assert item["input_ids"].tolist() == list(range(16 * row + 4 * step, 16 * row + 4 * step + 4))
        assert item["labels"].tolist() == (item["input_ids"] + 1).tolist() == item["shift_labels"].tolist()
        assert item["position_ids"][0] == 4 * step
    apart = script.Segments(text, 3, 4, True, "some")
    assert all(item["position_ids"].tolist() == [0, 1, 2, 3] for item in (apart[at] for at in range(len(apart))))
    scored = []
    for window in (windows := script.Windows(text, 8)):
        assert len(window["input_ids"]) == 8 and window["position_ids"].tolist() == list(range(8))
        counts = window["labels"] != IGNORE_INDEX
        assert (window["labels"] == window["input_ids"] + 1)[counts].all()
        scored += window["labels"][counts].tolist()
        if len(scored) >= 8 + 4 * (len(windows) - 1):
            break
    assert scored == list(range(1, 49))
    with pytest.raises(ValueError, match=r"the some text has 12 tokens, too few for a segment of 4 in each of 3 rows"):
        script.Segments(text[:12], 3, 4, True, "some")


def test_variants_are_equally_large(tmp_path, script):
    write_texts(tmp_path)
    args = script.parse(arguments(tmp_path, "--variants", "absolute", "t5", "transformer_xl", "alibi+memory"))
    configs = script.configs_of(args, 8)
    sizes = {variant: script.size_of(config) for variant, config in configs.items()}
    unit = args.layers * (2 * args.hidden + 1)
    assert max(sizes.values()) - min(sizes.values()) <= unit
    assert configs["transformer_xl"].intermediate_size == args.intermediate < configs["t5"].intermediate_size
    assert {variant: config.memory_length for variant, config in configs.items()} == {
        "absolute": 0,
        "t5": 0,
        "transformer_xl": 0,
        "alibi+memory": 12,
    }


def test_runs(tmp_path, script, capsys):
    write_texts(tmp_path)
    more = ["--unit", "character", "--eval-memory", 0, 24, "--steps", 60, "--lr", 0.01, "--layers", 2]
    script.main(arguments(tmp_path, *more))
    stored = json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]
    runs = {key: run["result"] for key, run in stored["runs"].items()}
    assert set(runs) == {"absolute/0", "transformer_xl/0", "transformer_xl+memory/0"}
    for key, result in runs.items():
        valid = result["valid"]
        assert result["steps"] == 60 and result["curve"][-1] < result["curve"][0]
        assert 0 < valid["bits"] < math.log2(9) and len(valid["by_place"]) == 12
        assert sum(valid["by_place"]) / 12 == pytest.approx(valid["bits"], abs=1e-4)
        if "memory" in key:
            assert set(valid["by_memory"]) == {"0", "12", "24"}
            assert valid["by_memory"]["0"] == valid["apart"] != valid["bits"] == valid["by_memory"]["12"]
        else:
            assert valid["bits"] == valid["apart"] != valid["windows"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| `transformer_xl+memory` |" in card and "![bits by position in the segment](made-up.png)" in card
    assert (tmp_path / "out" / "made-up.png").stat().st_size > 10_000

    # the figure is that of the saved model, computed here segment by segment
    model = RelPosBertLMHeadModel.from_pretrained(tmp_path / "work/made-up/transformer_xl+memory/0/model").eval()
    args = script.parse(arguments(tmp_path, *more))
    text = script.Texts(args).parts["valid"]
    length = (len(text) - 1) // 24 * 12  # of each of two rows
    rows, nexts = text[: 2 * length].view(2, -1), text[1 : 2 * length + 1].view(2, -1)
    memory, nats = None, []
    with torch.no_grad():
        for ids, labels in zip(rows.split(12, 1), nexts.split(12, 1), strict=True):
            outputs = model(ids, memory=memory)
            memory = outputs.memory
            nats.append(torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none"))
    bits = torch.cat(nats, 1).mean() / math.log(2)
    assert bits.item() == pytest.approx(runs["transformer_xl+memory/0"]["valid"]["bits"], abs=1e-4)

    # what is there is not run again; notes stay; another variant is added
    (tmp_path / "out" / "README.md").write_text(card + "By hand.\n")
    capsys.readouterr()
    script.main(arguments(tmp_path, *more, "--variants", "absolute", "alibi+memory"))
    assert "absolute/0: there already" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| `alibi+memory` |" in card and card.endswith("<!-- notes -->\nBy hand.\n")
    sizes = {
        run["result"]["parameters"]
        for run in json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]["runs"].values()
    }
    assert max(sizes) - min(sizes) <= 2 * (2 * 16 + 1)  # also of variants that were added
    with pytest.raises(
        SystemExit, match=r"--variants shaw: has [\d,]+ parameters, and the variants that were trained before"
    ):
        script.main(arguments(tmp_path, *more, "--variants", "shaw"))
    with pytest.raises(SystemExit, match=r"'made-up' was measured with lr = 0.01, and now it is 0.02"):
        script.main(arguments(tmp_path, *more, "--lr", 0.02))


def test_an_interrupted_run_goes_on(tmp_path, script, monkeypatch):
    """From the last checkpoint, with the memory; the result is that of a run that was not stopped."""
    write_texts(tmp_path)
    more = ["--variants", "transformer_xl+memory", "--training", "logging_steps=1"]
    script.main(arguments(tmp_path, *more))
    whole = json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]["runs"]["transformer_xl+memory/0"]
    again = tmp_path / "again"
    again.mkdir()
    write_texts(again)

    def stop(trainer, inputs, *args, **kwargs):
        if trainer.state.global_step == 5:
            raise KeyboardInterrupt
        return compute(trainer, inputs, *args, **kwargs)

    compute = script.StreamTrainer.compute_loss
    monkeypatch.setattr(script.StreamTrainer, "compute_loss", stop)
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments(again, *more))
    assert not (again / "out").exists()
    monkeypatch.setattr(script.StreamTrainer, "compute_loss", compute)
    script.main(arguments(again, *more))
    result = json.loads((again / "out" / "results.json").read_text())["made-up"]["runs"]["transformer_xl+memory/0"]
    assert result["result"]["resumed"] and not whole["result"]["resumed"]
    assert result["result"]["curve"] == whole["result"]["curve"]
    assert result["result"]["valid"] == whole["result"]["valid"]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--variants", "xl"], "no such scheme; known: absolute"),
        (["--variants", "absolute+memory"], "memory_length = 12"),
        (["--options", "clamp=3"], "--options clamp: no variant has it; they have clamp_len, out_of_range"),
        (["--options", "clamp_len=-3"], "clamp_len"),
        (["--heads", "3"], "hidden_size"),
        (["--segment", "500"], "the training text has 4,000 tokens|the valid text has 500 tokens"),
        (["--training", "lerning_rate=1"], "--training: .*lerning_rate"),
        (["--training", "bf16"], "write KEY=VALUE"),
        (["--text", "x", "--split", "1", "1"], "leave out --train"),
        (["--split", "1", "1"], "--split: is for --text"),
        (["--valid", "nowhere"], "nowhere: cannot be read as bytes"),
    ],
)
def test_errors(tmp_path, script, capsys, more, message):
    write_texts(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(tmp_path, *more))
    assert re.search(message, f"{stop.value}{capsys.readouterr().err}")
    assert not (tmp_path / "out").exists() and not (tmp_path / "work").exists()


def test_errors_of_texts(tmp_path, script, capsys):
    write_texts(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    for more, message in (
        (["--train", tmp_path / "empty"], "empty: is empty; give a file with text"),
        (["--train", tmp_path / "latin", "--unit", "character"], "latin: cannot be read as characters"),
    ):
        with pytest.raises(SystemExit, match=message):
            script.main(arguments(tmp_path, *more))
    words = ["--name", "x", "--text", str(tmp_path / "train"), "--split", "3000", "2000"]
    with pytest.raises(SystemExit, match=r"--split 3000 2000: 5,000 bytes, and .* has 4,000; give smaller parts"):
        script.main([*words, "--out", str(tmp_path / "out")])
    for words in ([], ["--text", "x"], ["--text", "x", "--split", "1"]):
        with pytest.raises(SystemExit):
            script.main(["--name", "x", *words])
    assert "what to read?" in capsys.readouterr().err


@pytest.mark.full
def test_two_processes_give_the_figures_of_one(tmp_path):
    """With half of the rows each, in training and in measuring."""
    write_texts(tmp_path)
    results = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        more = ["--batch", 4 // processes, "--eval-batch", 2 // processes, "--out", folder / "out", "--work", folder]
        more += ["--variants", "transformer_xl+memory", "absolute", "--training", "use_cpu=true"]
        more += ["ddp_backend=gloo"] if processes == 2 else []
        run_python(SCRIPTS / "train_lm.py", *arguments(tmp_path, *more), processes=processes)
        runs = json.loads((folder / "out" / "results.json").read_text())["made-up"]["runs"]
        assert {run["result"]["processes"] for run in runs.values()} == {processes}
        results.append({key: (run["result"]["curve"], run["result"]["valid"]["bits"]) for key, run in runs.items()})
    for variant, (curve, bits) in results[0].items():
        assert results[1][variant][0] == pytest.approx(curve, abs=1e-3)
        assert results[1][variant][1] == pytest.approx(bits, abs=1e-4)

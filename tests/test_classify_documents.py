"""scripts/classify_documents.py: pieces, frozen layers, reading piece by piece with and without a memory, errors."""

import json
import random
import sys

import pytest
import torch
from launching import SCRIPTS, import_script
from transformers import AutoModel, BertConfig, BertModel, BertTokenizer

from hf_relpos import convert


WORDS = ["the", "film", "was", "long", "and", "slow", "good", "bad", "plot", "music"]


@pytest.fixture(scope="module")
def script():
    return import_script("classify_documents")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a small BERT that reads 16 tokens, and of its conversion."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=15,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    convert(folder / "source", folder / "converted", position_embedding_type="relative_key", method="drop")
    return folder


def documents(seed, count):
    """Told apart by one word, which comes last."""
    rng = random.Random(seed)
    records = []
    for number in range(count):
        label = ("good", "bad")[number % 2]
        words = rng.choices([word for word in WORDS if word not in ("good", "bad")], k=rng.randint(8, 18))
        records.append({"label": label, "text": " ".join([*words, *[label] * 4])})
    return records


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def arguments(folder, models, *more):
    command = [
        *("--name", "made-up", "--train", folder / "train.jsonl", "--dev", folder / "dev.jsonl"),
        *("--source", models / "source", "--converted", models / "converted", "--out", folder / "out"),
        *("--work", folder / "work", "--seeds", 1, "--epochs", 10, "--lr", 0.005, "--head-lr", 0.01, "--dropout", 0),
        *("--rows", 8, "--train-layers", 2),
        *("--strategies", "truncate-8", "chunks-8", "segments-8", "memory-8", "long-32", *more),
    ]
    return [str(each) for each in command]


@pytest.fixture
def files(tmp_path, script, monkeypatch):
    """A folder with documents; sizes are taken in this process, which is quicker."""
    write(tmp_path / "train.jsonl", documents(0, 48))
    write(tmp_path / "dev.jsonl", documents(1, 16))
    monkeypatch.setattr(script, "run_worker", lambda *command: script.memory_worker(json.loads(command[-1])))
    return tmp_path


def test_pieces(script):
    ids, special = list(range(10, 23)), ([1], [2])
    assert script.Strategy.parse("chunks-6").pieces(ids, *special) == [
        [1, 10, 11, 12, 13, 2],
        [1, 14, 15, 16, 17, 2],
        [1, 18, 19, 20, 21, 2],
        [1, 22, 2],
    ]
    for name in ("segments-6", "memory-6"):
        assert script.Strategy.parse(name).pieces(ids, *special) == script.Strategy.parse("chunks-6").pieces(
            ids, *special
        )
    assert script.Strategy.parse("truncate-6").pieces(ids, *special) == [[1, 10, 11, 12, 13, 2]]
    assert script.Strategy.parse("tail-6").pieces(ids, *special) == [[1, 19, 20, 21, 22, 2]]
    assert script.Strategy.parse("long-99").pieces(ids, *special) == [[1, *ids, 2]]
    assert script.Strategy.parse("memory-6").memory == 6 and script.Strategy.parse("segments-6").memory == 0


def loaded(script, models, name):
    folder = models / ("source" if script.Strategy.parse(name).model == "source" else "converted")
    return script.load_for_strategy(script.Strategy.parse(name), folder, "--converted", 2)


@pytest.mark.parametrize("name", ["chunks-8", "segments-8", "memory-8"])
@pytest.mark.parametrize("below", [0, 1, 2])
def test_split_layers_are_the_whole(script, models, name, below):
    """States of the lower layers into the upper ones: what the whole model computes, memory included."""
    whole, split_layers = loaded(script, models, name), import_script("documents.models").split_layers
    pieces = [torch.randint(5, 15, (length,)).tolist() for length in (8, 8, 8, 3)]
    lower, upper = split_layers(whole, below)
    states, seconds = script.lower_states(lower, pieces)
    assert len(seconds) == 4 and min(seconds) > 0
    memories = {"whole": {}, "upper": {}}
    with torch.no_grad():
        for piece, state in zip(pieces, states, strict=True):
            expected = whole(torch.tensor([piece]), **memories["whole"])
            outputs = upper(inputs_embeds=state[None], **memories["upper"])
            torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-5)
            if name == "memory-8":
                memories = {"whole": {"memory": expected.memory}, "upper": {"memory": outputs.memory}}
    assert sum(len(half.encoder.layer) for half in (lower, upper)) == 3


@pytest.mark.parametrize("name", ["chunks-8", "segments-8", "memory-8", "long-64"])
def test_rows_side_by_side(script, models, name):
    """Documents in a batch get the logits that each gets alone, and the mean over tokens is that of the model."""
    torch.manual_seed(0)
    model = loaded(script, models, name)
    classifier = script.DocumentClassifier(model, 3, 0.0).eval()
    strategy = script.Strategy.parse(name)
    texts = [torch.randint(5, 15, (length,)).tolist() for length in (5, 29, 12, 13)]
    batch = [
        {"pieces": [torch.tensor(piece) for piece in strategy.pieces(ids, [2], [3])], "label": n % 3}
        for n, ids in enumerate(texts)
    ]
    with torch.no_grad():
        together = classifier(**script.collate(batch))
        alone = [classifier(**script.collate([document])) for document in batch]
        torch.testing.assert_close(
            together["logits"], torch.cat([each["logits"] for each in alone]), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(together["loss"], torch.stack([each["loss"] for each in alone]).mean())
        if name != "memory-8":
            states = [model(piece[None]).last_hidden_state[0] for piece in batch[1]["pieces"]]
            expected = classifier.head(torch.cat(states).mean(0))
            torch.testing.assert_close(together["logits"][1], expected, rtol=0, atol=1e-5)


def test_memory_reaches_on_and_gradients_do_not(script, models):
    """The first piece moves what is made of the second with a memory and not without; its states get no gradient."""
    first, second = torch.randint(5, 15, (2, 8))
    changed = first.flip(0)
    for name, moved in (("segments-8", False), ("memory-8", True)):
        lower, upper = import_script("documents.models").split_layers(loaded(script, models, name), 1)
        one, other = (script.lower_states(lower, [ids.tolist(), second.tolist()])[0][1] for ids in (first, changed))
        assert torch.equal(one, other) is not moved
        states = [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
        memory = {}
        for state in states:
            outputs = upper(inputs_embeds=state[None], **memory)
            memory = {"memory": outputs.memory} if moved else {}
        outputs.last_hidden_state.sum().backward()
        assert states[0].grad is None and states[1].grad.abs().max() > 0


def test_runs(script, files, models, capsys):
    """What the end of a document tells is learnt by all that read it; runs are added, not repeated; notes stay."""
    script.main(arguments(files, models))
    content = json.loads((files / "out" / "results.json").read_text())
    runs = content["made-up"]["runs"]
    assert list(runs) == [f"{name}/0" for name in ("truncate-8", "chunks-8", "segments-8", "memory-8", "long-32")]
    results = {key.rpartition("/")[0]: run["result"] for key, run in runs.items()}
    assert results["truncate-8"]["accuracy"] < 80
    for name in ("chunks-8", "segments-8", "memory-8", "long-32"):
        assert results[name]["accuracy"] > 95, name
    for result in results.values():
        assert len(result["right"]) == 16 and result["steps"] == 10 * 6
        assert result["accuracy"] == pytest.approx(100 * result["right"].count("1") / 16)
    lengths = [len(record["text"].split()) for record in documents(1, 16)]
    assert results["truncate-8"]["tokens"] == 16 * 8 and results["long-32"]["tokens"] == sum(lengths) + 16 * 2
    assert results["memory-8"]["tokens"] == sum(length + 2 * -(-length // 6) for length in lengths)
    card = (files / "out" / "README.md").read_text()
    assert "| `memory-8` | converted: pieces of 8, memory of 8 |" in card and "of more than 512 tokens" in card
    assert "what the memory does: `memory-8` − `segments-8`" in card and "**more**: +" in card
    assert str(files) not in card + json.dumps(content)

    (files / "out" / "README.md").write_text(card + "By hand.\n")
    capsys.readouterr()
    before = sorted((files / "work").iterdir())
    script.main(arguments(files, models, "--strategies", "tail-8", "memory-8", "--seeds", 2))
    assert "memory-8/0: there already" in capsys.readouterr().out
    again = json.loads((files / "out" / "results.json").read_text())["made-up"]["runs"]
    assert again["memory-8/0"] == runs["memory-8/0"] and {"tail-8/0", "memory-8/1"} <= set(again)
    assert again["tail-8/1"]["result"]["accuracy"] > 95
    assert (
        len(sorted((files / "work").iterdir())) == len(before) + 3
    )  # of the tail, for 48 and 16 documents; others are there
    card = (files / "out" / "README.md").read_text()
    assert card.endswith("<!-- notes -->\nBy hand.\n") and " ± " in card

    kept = {path.name: path.read_bytes() for path in (files / "out").iterdir()}
    with pytest.raises(SystemExit, match=r"measured with lr = 0.005, and now it is 0.02; choose another --name"):
        script.main(arguments(files, models, "--lr", "0.02"))
    assert {path.name: path.read_bytes() for path in (files / "out").iterdir()} == kept


@pytest.mark.full
def test_all_layers_and_rows(script, files, models):
    """Everything is trained, several documents side by side; a run is the same when it is repeated."""
    more = (
        "--train-layers",
        "all",
        "--rows",
        4,
        "--epochs",
        1,
        "--train-documents",
        32,
        "--lr",
        0.002,
        "--held-out",
        16,
    )
    command = arguments(files, models, *more)
    command = command[: command.index("--dev")] + command[command.index("--source") :]
    command[command.index("--strategies") + 1 : command.index("--train-layers")] = ["memory-8"]
    results = []
    for out in ("a", "b"):
        script.main([*command, "--out", str(files / out)])
        runs = json.loads((files / out / "results.json").read_text())["made-up"]["runs"]
        result = runs["memory-8/0"]["result"]
        results.append({key: value for key, value in result.items() if "seconds" not in key})
    assert results[0] == results[1] and results[0]["steps"] == 4 and len(results[0]["right"]) == 16
    assert not (files / "work").exists()  # nothing is frozen


def test_head_alone(script, files, models):
    """Nothing below the head is trained: it sees the mean of the model's states, over all pieces of a document."""
    args = script.parse(arguments(files, models, "--train-layers", "0", "--head-lr", "0.03"))
    models_of = script.StrategyModels(args, script.DocumentTask(args))
    for name in ("truncate-8", "chunks-8", "memory-8"):
        strategy = script.Strategy.parse(name)
        model, memory, states = loaded(script, models, name), {}, []
        with torch.no_grad():
            for piece in models_of.task.pieces(strategy, models_of.task.dev.ids[3]):
                outputs = model(torch.tensor([piece]), **memory)
                memory = {"memory": outputs.memory} if strategy.memory else {}
                states.append(outputs.last_hidden_state[0])
        lower, classifier = models_of.classifier(strategy)
        stored, seconds = models_of.pieces(strategy, lower, models_of.task.dev)
        torch.testing.assert_close(stored[3][0], torch.cat(states).mean(0, keepdim=True), rtol=0, atol=1e-5)
        assert len(stored[3]) == 1 and len(seconds[3]) == len(states)
        assert sum(parameter.numel() for parameter in classifier.parameters()) == 32 * 33 + 33 * 2
    script.main(
        arguments(
            files,
            models,
            "--train-layers",
            "0",
            "--head-lr",
            "0.03",
            "--epochs",
            20,
            "--strategies",
            "truncate-8",
            "chunks-8",
        )
    )
    runs = json.loads((files / "out" / "results.json").read_text())["made-up"]["runs"]
    assert runs["chunks-8/0"]["result"]["accuracy"] > 90 > 80 > runs["truncate-8/0"]["result"]["accuracy"]
    assert "trained: the head alone" in (files / "out" / "README.md").read_text()


@pytest.mark.full
def test_converts(script, files, models):
    """Conversions are made on text where none are given, and kept."""
    write(files / "text.jsonl", documents(2, 60))
    command = arguments(files, models, "--calibration-text", files / "text.jsonl", "--calibration-tokens", 1000)
    at = command.index("--converted")
    command = [*command[:at], *command[at + 2 :], "--epochs", "1", "--window", "4"]
    command[command.index("--strategies") + 1 : command.index("--calibration-text")] = ["memory-8", "long-32"]
    script.main(command)
    made = {path.name.partition("-")[0]: path for path in (files / "work").iterdir() if path.is_dir()}
    assert set(made) == {"converted", "converted_long"}
    models = {name: AutoModel.from_pretrained(path) for name, path in made.items()}
    assert models["converted"].config.attention_window is None
    assert models["converted_long"].config.attention_window == 4
    assert len(json.loads((files / "out" / "results.json").read_text())["made-up"]["runs"]) == 2


@pytest.mark.full
def test_memory_is_measured(script, models):
    """In a fresh process; training takes more than reading."""
    pieces = script.Strategy.parse("long-4096").pieces([7] * 4000, [2], [3])
    request = {"strategy": "long-4096", "folder": str(models / "converted"), "train_layers": 1, "window": 0}
    path = str(SCRIPTS / "classify_documents.py")
    sizes = script.run_worker(sys.executable, path, "--worker", json.dumps({**request, "pieces": pieces}))
    assert sizes["train_mb"] > sizes["read_mb"] > 1


@pytest.mark.parametrize(
    "changes, more, words",
    [
        ({"train": []}, (), r"train\.jsonl: holds no records"),
        ({"dev": []}, (), r"dev\.jsonl: holds no records"),
        ({"dev": [{"label": "good", "text": "film"}, {"label": "bad", "text": " \n"}]}, (), "document 2 is empty"),
        ({"dev": [{"label": "good", "text": "\u200b"}]}, (), "document 1 is empty: the tokenizer finds no token"),
        ({"train": [{"label": "", "text": "film"}]}, (), "document 1 has no 'label'; label it"),
        ({"train": [{"label": 1, "text": "film"}] * 3}, (), "all 3 training documents have the label '1'"),
        ({"dev": [{"label": "fine", "text": "film"}]}, (), "document 1 has the label 'fine'; .* have bad, good"),
        ({}, ("--columns", "label,body"), "no field 'body'"),
        ({}, ("--columns", "text"), "--columns text: name the label and the text"),
        ({}, ("--train-documents", "49"), "has 48 documents; ask for fewer"),
        ({}, ("--strategies", "chunks-32"), r"chunks-32: --source .* reads 16 tokens at most; give chunks-16"),
        ({}, ("--strategies", "memory-2"), "memory-2: 2 of its tokens are special ones"),
        ({}, ("--train-layers", "4"), "--train-layers 4: .* has 3 layers; give fewer, or all"),
        ({}, ("--source", "nowhere/at-all"), "nowhere/at-all"),
        ({}, ("--converted", "nowhere/at-all"), "nowhere/at-all"),
        ({}, ("--converted", "{source}"), "memory-8: --converted .* is a stock BertModel without a memory"),
        (
            {},
            ("--converted", "{kept}"),
            r"memory-8: --converted .* with the position scheme 'absolute'.* take a memory",
        ),
        ({}, ("--converted", "", "--calibration-text", "gone.txt"), "gone.txt: no such file"),
        ({}, ("--converted", ""), "segments-8: give --calibration-text to convert .* or --converted FOLDER"),
    ],
)
def test_errors_before_anything_is_written(script, files, models, changes, more, words):
    if not (models / "kept").exists():
        convert(models / "source", models / "kept", position_embedding_type="relative_key", method="keep")
    for name, records in changes.items():
        write(files / f"{name}.jsonl", records)
    more = [each.format(source=models / "source", kept=models / "kept") for each in more]
    with pytest.raises(SystemExit, match=rf"Error: .*{words}"):
        script.main(arguments(files, models, *more))
    assert sorted(path.name for path in files.iterdir()) == ["dev.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    "more, words",
    [
        (("--strategies", "memory"), "'memory' is no strategy; give one of truncate, tail"),
        (("--strategies", "chunks-0"), "'chunks-0' is no strategy"),
        (("--held-out", "8"), "one of --dev FILE and --held-out COUNT"),
        (("--rows", "3"), "--rows 3: --batch 8 is no multiple of it"),
        (("--train-layers", "none"), "--train-layers"),
        (("--dropout", "1"), "--dropout"),
    ],
)
def test_bad_arguments(script, files, models, capsys, more, words):
    with pytest.raises(SystemExit):
        script.main(arguments(files, models, *more))
    assert words in capsys.readouterr().err


def test_foreign_results(script, files, models):
    (files / "out").mkdir()
    for text in ("[1]", "not JSON", '{"made-up": {}}'):
        (files / "out" / "results.json").write_text(text)
        with pytest.raises(SystemExit, match="not a file of this script"):
            script.main(arguments(files, models))

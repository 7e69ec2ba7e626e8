"""scripts/bench_conversion.py: its rows on a tiny random BERT, what it writes, does not repeat, and refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from launching import import_script
from oracles import stir
from transformers import BertConfig, BertModel, BertTokenizer

from hf_relpos.conversion import QUALITIES


WORDS = "the cat dog sun sky bird sat ran saw was is red blue old new big . on under and a house tree road".split()


@pytest.fixture(scope="module")
def bench():
    return import_script("bench_conversion")


def sentences(seed, count):
    """Sentences of random words."""
    rng = np.random.default_rng(seed)
    return [" ".join([*rng.choice(WORDS[:-1], rng.integers(5, 12)), "."]).capitalize() for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, and text of each kind; one training document is also in the evaluation text."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, initializer_range=0.2, **sizes)
    stir(BertModel(config, add_pooling_layer=False)).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    (folder / "held.txt").write_text("\n\n".join(" ".join(sentences(number, 40)) for number in range(20)))
    (folder / "train.txt").write_text("\n\n".join(" ".join(sentences(number, 200)) for number in range(100, 140)))
    pairs = zip(sentences(1, 12), sentences(2, 12), strict=True)
    (folder / "pairs.tsv").write_text("".join(f"{n % 5}\t{one}\t{other}\n" for n, (one, other) in enumerate(pairs)))
    documents = {f"d{n}": " ".join(sentences(200 + n, 20)) for n in range(6)}
    (folder / "docs.tsv").write_text("id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in documents.items()))
    (folder / "queries.tsv").write_text("query\tdoc\n" + "".join(f"{t[:60]}\t{n}\n" for n, t in documents.items()))
    return folder


def arguments(folder, out, *more):
    command = [
        *("--source", folder / "teacher", "--out", out, "--work", out.with_name("work")),
        *("--train-text", folder / "train.txt", "--eval-text", folder / "held.txt", "--sts", folder / "pairs.tsv"),
        *("--docs", folder / "docs.tsv", "--queries", folder / "queries.tsv", "--lengths", 8, 16, 32),
        *("--window-tokens", 128, "--tokens", 600, "--steps", 2, "--batch-tokens", 64, "--long-length", 64),
        *("--documents", 2, "--window", 8, "--chunk", 16, "--masked-tokens", 1024, *more),
    ]
    return [str(each) for each in command]


CHEAP = ["fidelity/teacher", "fidelity/random", "fidelity/zero", "fidelity/fold", "fidelity/fold-distilled"]
CHEAP += ["long/interpolate", "long/hierarchical*", "long/zero*", "retrieval/truncate", "retrieval/chunks"]
CHEAP += ["retrieval/interpolate", "retrieval/hierarchical*", "demo/teacher", "demo/zero"]


def test_rows(bench, folder, tmp_path, capsys):
    out = tmp_path / "out"
    bench.main(arguments(folder, out, "--rows", *CHEAP))
    assert sorted(path.name for path in out.iterdir()) == ["conversion.json", "conversion.md", "conversion.png"]
    assert (out / "conversion.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "conversion.json").read_text())
    rows = {key: row["result"] for key, row in content["rows"].items()}
    assert not content["missing"]
    ceiling, zero = (rows[f"fidelity/{name}"]["texts"]["held.txt"] for name in ("teacher", "zero"))
    assert list(ceiling["token"]) == ["8", "16"] and set(ceiling["by_shift"]["8"]) == {"1", "4", "16"}
    assert list(zero["sentence"]) == ["8", "16", "32"] and zero["sentence"]["16"] < 0.999
    assert rows["fidelity/zero"]["sts"]["pairs.tsv"]["difference"]["mean"] == pytest.approx(
        rows["fidelity/zero"]["sts"]["pairs.tsv"]["rho"] - rows["fidelity/teacher"]["sts"]["pairs.tsv"]["rho"]
    )
    distilled = rows["fidelity/fold-distilled"]
    assert distilled["tokens"] > 0 and distilled["before"] == {
        "cpu_seconds": rows["fidelity/fold"]["cpu_seconds"],
        "tokens": 0,
    }
    assert len(rows["long/hierarchical"]["quarters"]) == 4 and "ceiling" in rows["long/hierarchical"]
    assert rows["long/hierarchical+window"]["quarters"] != rows["long/hierarchical"]["quarters"]
    assert len(rows["retrieval/chunks"]["ranks"].split()) == rows["retrieval/chunks"]["queries"] == 6
    assert rows["demo/teacher"]["accuracy"]["128"] > rows["demo/zero"]["accuracy"]["128"]
    card = (out / "conversion.md").read_text()
    assert str(folder) not in card and "| positions dropped, tables zero |" in card
    assert "| not measured |" in card and "- not selected: `fidelity/no-data`, `fidelity/calibrated`," in card

    # again, with other settings of one kind: only those rows are measured
    dates = {key: row["date"] for key, row in content["rows"].items()}
    capsys.readouterr()
    bench.main(arguments(folder, out, "--rows", *CHEAP[:3], "--masked-tokens", "512"))
    assert capsys.readouterr().out.count("there already") == 3
    bench.main(arguments(folder, out, "--rows", "fidelity/zero", "--window-tokens", "64"))
    again = json.loads((out / "conversion.json").read_text())["rows"]
    assert again["fidelity/zero"]["settings"]["window_tokens"] == 64 and list(again) == list(dates)
    assert again["fidelity/zero"]["result"]["cpu_seconds"] == rows["fidelity/zero"]["cpu_seconds"]  # not made again
    card = (out / "conversion.md").read_text()  # holds rows of the present settings, and says so
    assert "- measured with other settings: `fidelity/teacher`" in card and "ceiling: the teacher, moved" not in card

    # a student that is forgotten takes with it what started from it, and nothing else
    bench.main(arguments(folder, out, "--rows", "long/zero", "--again", "fold"))
    left = json.loads((out / "conversion.json").read_text())["rows"]
    assert set(again) - set(left) == {"fidelity/fold", "fidelity/fold-distilled"}
    kept = {path.name.partition(".")[0] for path in (tmp_path / "work").iterdir()}
    assert {"zero", "docs-chunks"} <= kept and not {"fold", "fold-distilled"} & kept


def test_a_quality(bench, folder, tmp_path, monkeypatch):
    """Its row has both texts, the time beside the source's, and what it cost; its recipe is the quality's."""
    short = replace(QUALITIES["default"], method_options={"tokens": 600, "steps": 2, "batch_tokens": 64})
    monkeypatch.setitem(QUALITIES, "default", short)
    other = folder / "other.txt"
    other.write_text("\n\n".join(" ".join(sentences(number, 40)) for number in range(300, 310)))
    out = tmp_path / "out"
    monkeypatch.setattr("conversion_quality.measuring.TIMED", (16, 32))
    bench.main(arguments(folder, out, "--rows", "quality/default", "--other-text", str(other)))
    row = json.loads((out / "conversion.json").read_text())["rows"]["quality/default"]
    assert list(row["result"]["texts"]) == ["held.txt", "other.txt"] and list(row["result"]["times"]) == ["16", "32"]
    spent = row["result"]["details"]["cpu_seconds"]
    assert row["result"]["cpu_seconds"] == pytest.approx(spent["fit"] + spent["distillation"])
    assert row["settings"]["student"]["quality"]["method_options"]["steps"] == 2
    card = (out / "conversion.md").read_text()
    assert "## Qualities: sentence cosine at 8, 16, 32 tokens" in card and "| quality `default` |" in card
    assert "| quality `default`: sentence cosine, 16-128 |" in card


def test_training_text_shares_nothing_with_the_evaluation(folder):
    """Passages come from all positions, the same for a seed, and share no run of words with the evaluation text."""
    training_passages = import_script("conversion_quality.texts").training_passages
    held = [str(folder / "held.txt")]
    texts, left_out = training_passages([str(folder / "train.txt")], held, 200_000, 0)
    assert left_out == 0 and len(texts) == 17 and len(set(texts)) == 17
    assert texts == training_passages([str(folder / "train.txt")], held, 200_000, 0)[0]
    texts, left_out = training_passages(held, held, 10_000, 0)
    assert not texts and left_out == 1


def test_goals_read_the_rows():
    """Bounds are met at their value, from above or below, and what was not measured says so."""
    module = import_script("conversion_quality.goals")
    goals = {goal.what: goal for goal in module.GOALS}
    row = {"texts": {"a": {"sentence": {"16": 0.97, "128": 0.96, "256": 0.94}}}, "cpu_seconds": 300.0, "sts": {}}
    rows = {"fidelity/calibrated": row}
    short = goals["calibrated: sentence cosine, 16-128"]
    assert short.value(rows) == 0.96 and short.reached(rows, short.must) == "reached"
    assert short.reached(rows, short.stretch) == "**not reached**" and short.reached({}, 0.5) == "not measured"
    seconds = goals["same, CPU seconds"]
    assert seconds.reached(rows, seconds.must) == "reached" and seconds.reached(rows, 299) == "**not reached**"
    ranks = {"truncate": "1 9", "chunks": "1 8", "interpolate": "9 9", "calibrated+window": "1 1"}
    results = {
        f"retrieval/{name}": {
            "documents": 9,
            "ranks": each,
            **module.Retrieval(np.array(list(map(int, each.split())))).to_dict(),
        }
        for name, each in ranks.items()
    }
    gain = module.rank_gain(results, "calibrated+window")
    assert gain["baseline"] == "chunks" and gain["ndcg@10"]["mean"] == pytest.approx((1 - 1 / np.log2(9)) / 2)
    above = goals["retrieval: nDCG@10 above the best of four"]
    assert above.reached(results, above.must) == "not measured"  # one of the four is missing
    results["retrieval/hierarchical"] = results["retrieval/interpolate"]
    assert above.reached(results, above.must) == "reached"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rows", "fidelity/nothing"], "fits none; --list names them"),
        (["--sts", "nowhere.tsv"], "nowhere.tsv: no such file"),
        (["--again", "nobody"], "--again nobody: no student of this name"),
        (["--steps", "0"], "--steps 0: give a whole number from 1 on"),
    ],
)
def test_refusals(bench, folder, tmp_path, capsys, more, words):
    with pytest.raises(SystemExit):
        bench.main(arguments(folder, tmp_path / "out", *more))
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()

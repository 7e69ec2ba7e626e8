"""scripts/train_ner.py and the files it reads: columns, tagging schemes, labels of sub-words, whole runs, errors."""

import json
import random

import pytest
import torch
from launching import import_script
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB1, IOBES, Entities
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerFast

from hf_relpos.data.conll import read_conll, tag_names, to_iob2


# EU rejects German call / Peter Blackburn ; two neighbours of one type
WORDS = [["EU", "met", "Anna", "Bo", "Lee"], ["no", "one"]]
IOB2 = [["B-ORG", "O", "B-PER", "B-PER", "I-PER"], ["O", "O"]]
SCHEMES = {
    "IOB2": IOB2,
    "IOB1": [["I-ORG", "O", "I-PER", "B-PER", "I-PER"], ["O", "O"]],
    "BIOES": [["S-ORG", "O", "S-PER", "B-PER", "E-PER"], ["O", "O"]],
    "BMES": [["S-ORG", "O", "S-PER", "B-PER", "E-PER"], ["O", "O"]],
    "BILOU": [["U-ORG", "O", "U-PER", "B-PER", "L-PER"], ["O", "O"]],
}
LAYOUTS = {
    "tab": lambda n, word, tag: f"{word}\t{tag}",
    "space": lambda n, word, tag: f"{word} {tag} ",
    "CoNLL-2003": lambda n, word, tag: f"{word} NNP {'B-NP' if n % 2 else 'I-NP'} {tag}",
    "numbered": lambda n, word, tag: f"{n}\t{word}\t{tag}",
    "tags first": lambda n, word, tag: f"{tag}\t{word}",
    "MultiCoNER": lambda n, word, tag: f"{word} _ _ {tag}",
}


@pytest.fixture(scope="module")
def script():
    return import_script("train_ner")


@pytest.fixture(scope="module")
def data():
    return import_script("tagging.data")


def conll(sentences):
    return "\n".join("".join(f"{word}\t{tag}\n" for word, tag in zip(*pair, strict=True)) for pair in sentences)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_files(tmp_path, layout, scheme):
    text = "-DOCSTART- -X- O O\n\n# id 7 domain=en\n"
    for words, tags in zip(WORDS, SCHEMES[scheme], strict=True):
        lines = [LAYOUTS[layout](n, *pair) for n, pair in enumerate(zip(words, tags, strict=True), 1)]
        text += "\r\n".join(lines) + "\n\n\n"
    (tmp_path / "a.conll").write_text(text)
    assert read_conll(tmp_path / "a.conll") == list(zip(WORDS, IOB2, strict=True))


def test_tokens_that_look_like_nothing(tmp_path):
    """An ideographic space, an empty token, a hash and a tag are tokens."""
    (tmp_path / "a.conll").write_text("\u3000\tO\n\tO\n#\tB-x\nO\tI-x\n")
    assert read_conll(tmp_path / "a.conll") == [(["\u3000", "", "#", "O"], ["O", "O", "B-x", "I-x"])]
    (tmp_path / "a.conll").write_text("\u3000 O\n# B-x\n\u00a0 O\n")
    assert read_conll(tmp_path / "a.conll") == [(["\u3000", "#", "\u00a0"], ["O", "B-x", "O"])]


def test_columns_by_number(tmp_path):
    (tmp_path / "a.conll").write_text("Anna\tB-PER\tO\nLee\tI-PER\tB-X\n")  # an outer and an inner layer
    assert read_conll(tmp_path / "a.conll")[0][1] == ["O", "B-X"]
    assert read_conll(tmp_path / "a.conll", (1, 2))[0][1] == ["B-PER", "I-PER"]
    assert tag_names(read_conll(tmp_path / "a.conll")) == ["O", "B-X", "I-X"]
    for columns in ((1, 4), (0, 1), (2, 2), (1,)):
        with pytest.raises(ValueError, match="name two of its 3 columns"):
            read_conll(tmp_path / "a.conll", columns)


def test_schemes_against_seqeval():
    """Entities are those that seqeval finds: in any tags as its default does, in valid IOB1 and BIOES strictly."""
    rng = random.Random(0)
    kinds = [f"{mark}-{kind}" for mark in "BIES" for kind in ("a", "b-c")]
    for _ in range(2000):
        tags = [rng.choice(["O", "O", *kinds]) for _ in range(9)]
        assert get_entities(to_iob2(tags)) == get_entities(tags), tags
    for scheme, tags in ((IOB1, SCHEMES["IOB1"][0]), (IOBES, SCHEMES["BIOES"][0])):
        strict = [(each.tag, each.start, each.end - 1) for each in Entities([tags], scheme).entities[0]]
        assert get_entities(to_iob2(tags)) == strict


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no sentences"),
        ("\n\n-DOCSTART- O\n", "holds no sentences"),
        ("cat\tO\nsat\n", r"line 2: 'sat' has 1 columns, line 1 has 2; give each line a token and its tag"),
        ("cat\nsat\n", r"line 1: 'cat' has 1 columns; give"),
        ("#cat\nsat\tO\n", r"line 1: '#cat' has 1 columns"),
        ("cat\tNN\nsat\tVB\n", r"no column has tags .* 'cat NN'"),
        ("cat\tO\nsat\tO\nmat\tQ-x\n", r"line 3: 'Q-x' in column 2 is no tag"),
        # not the chunks instead
        ("a\tB-NP\tO\nb\tI-NP\tB-x\nc\tB-NP\tPER\n", r"line 3: 'PER' in column 3 is no tag"),
        ("cat\tO\nsat\tB-\n", r"line 2: 'B-' in column 2 is no tag"),
    ],
)
def test_bad_files(tmp_path, text, words):
    (tmp_path / "a.conll").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.conll.*{words}"):
        read_conll(tmp_path / "a.conll")


@pytest.mark.parametrize(
    "word, shape",
    [
        *(("Anna", "capitalised"), ("A", "capitalised"), ("EU", "upper"), ("iPhone", "mixed"), ("cat", "lower")),
        *(("1984", "number"), ("B2B", "letters and digits"), ("...", "other"), ("中国", "caseless"), ("", "other")),
        *(("O'Neil", "mixed"), ("@anna", "lower"), ("C-3", "letters and digits"), ("Élan", "capitalised")),
    ],
)
def test_shapes(data, word, shape):
    assert data.SHAPES[data.shape_of(word)] == shape


def test_labels_of_subwords(data):
    """A word's tag is at its first token and nowhere else, wherever rows end; on the way back nothing is lost."""
    tokenizer = data.train_tokenizer(["walking", "talking", "walk", "ing", "atwit"] * 5, "wordpiece", 24)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    sentences = [
        ("walking \u200b talk xyzzy walkingtalkingwalking Walk".split(" "), "B-a O O B-a I-a I-a".split()),
        ("walk ing".split(), "O B-b".split()),
        (["talking"] * 9, ["O", "B-b", "I-b"] * 3),
    ]
    names = tag_names(sentences)
    rows = data.TaggedSentences(sentences, tokenizer, names, length=10, pieces=5)
    seen = []
    for row, places in zip(rows.rows, rows.first_tokens, strict=True):
        sizes = {len(row[key]) for key in row}
        assert len(sizes) == 1 and sizes.pop() <= 10
        firsts = [token for *_, token in places]
        assert firsts == [at for at, label in enumerate(row["labels"]) if label != data.IGNORE_INDEX]
        for (sentence, at, first), end in zip(places, [*firsts[1:], len(row["labels"])], strict=True):
            word, tag = (part[at] for part in sentences[sentence])
            ids = tokenizer(word)["input_ids"] or [tokenizer.unk_token_id]
            expected = ids if len(ids) <= 5 else [*ids[:4], ids[-1]]
            assert row["input_ids"][first:end] == expected
            assert row["token_type_ids"][first:end] == [data.shape_of(word)] * (end - first)
            assert names[row["labels"][first]] == tag
            seen.append((sentence, at))
    assert sorted(seen) == [(n, at) for n, (words, _) in enumerate(sentences) for at in range(len(words))]
    assert len(rows) > 3 and max(len(tokenizer(word)["input_ids"]) for words, _ in sentences for word in words) > 5
    lengths = [len(row["input_ids"]) for row in rows.rows]
    assert lengths == sorted(lengths, reverse=True)
    guesses = [[3 if label == data.IGNORE_INDEX else label for label in row["labels"]] for row in rows.rows]
    assert rows.tags(guesses, names, sentences) == [tags for _, tags in sentences]


def test_units(data):
    words = ["walking", "walked", "talking", "中国", "walking"]

    def tokens(unit, size=100):
        return Tokenizer.from_str(data.train_tokenizer(words, unit, size).to_str())

    assert tokens("word").encode("walking").ids == [2] and tokens("word").encode("walked").tokens == ["[UNK]"]
    assert tokens("character").encode("king中").tokens == ["k", "i", "n", "g", "[UNK]"]
    assert len(tokens("wordpiece").encode("talked").ids) > 1  # of pieces that were learnt
    assert "[UNK]" not in tokens("wordpiece").encode("talked").tokens
    assert tokens("character", 5).get_vocab_size() == 5


def test_unknown_tokens(data):
    tokenizer = data.train_tokenizer(["a b", "a b"], "character", 9)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    collator = data.UnknownTokenCollator(tokenizer)
    collator.unknown = 0.5
    rows = [{"input_ids": [2, 3] * n, "token_type_ids": [0, 1] * n, "labels": [0, 1] * n} for n in (40, 20)]
    batch = collator([dict(row) for row in rows])
    assert batch["labels"][1, 40:].eq(data.IGNORE_INDEX).all() and batch["input_ids"][1, 40:].eq(0).all()
    assert 0.3 < batch["input_ids"][batch["attention_mask"].bool()].eq(1).float().mean() < 0.7
    collator.unknown = 0.0
    assert collator([dict(row) for row in rows])["input_ids"].ne(1).all()


def test_comparison():
    """Welch's standard error: √(s₁²/n₁ + s₂²/n₂), here √(1/3 + 1/3)."""
    compare = import_script("tagging.card").compare_means
    assert compare([11.0, 12.0, 13.0], [1.0, 2.0, 3.0]) == "**yes**: +10.0 (standard error 0.8)"
    assert compare([1.0, 2.0, 3.0], [11.0, 12.0, 13.0]) == "**no**: -10.0 (standard error 0.8)"
    assert compare([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).startswith("too small to tell: +1.0")
    assert compare([2.0], [1.0]) == "+1.0, one seed"


NAMES = ["Anna", "Bob", "Cleo", "Dan", "Eve", "Finn"]
PLACES = ["Bonn", "Rome", "Oslo", "Kiel"]


def english(seed, count):
    """In "X of Y", X is a person, whatever the word; else a name is a place."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(count):
        one, other = rng.choice(NAMES + PLACES), rng.choice(NAMES + PLACES)
        if rng.random() < 0.5:
            sentences.append((["saw", one, "of", other, "."], ["O", "B-person", "O", "B-place", "O"]))
        else:
            sentences.append((["saw", "the", one, other], ["O", "O", "B-place", "I-place"]))
    return sentences


def chinese(seed, count):
    """Characters in BMES: 张三/李四 and a surname with one more character, places of three characters."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(count):
        person = rng.choice("张李王陈") + rng.choice("三四五明")
        place = rng.choice(["北京市", "上海市", "广东省"])
        text = f"{person}在{place}工作。" if rng.random() < 0.5 else f"他去{place}看{person}"
        tags = ["O"] * len(text)
        tags[text.index(person) : text.index(person) + 2] = ["B-PER", "E-PER"]
        tags[text.index(place) : text.index(place) + 3] = ["B-LOC", "M-LOC", "E-LOC"]
        sentences.append((list(text), tags))
    return sentences


def write(folder, sentences):
    for name, part in sentences.items():
        (folder / name).write_text(conll(part), encoding="utf-8")


def arguments(folder, out, *more, name="made-up"):
    command = [
        *("--name", name, "--train", folder / "train", "--dev", folder / "dev", "--out", out, "--work", folder / "w"),
        # every word is a token: which pieces a smaller vocabulary holds is random where they are equally frequent
        *("--hidden", 32, "--heads", 2, "--layers", 1, "--intermediate", 32, "--vocab", 120, "--dropout", 0),
        *("--epochs", 12, "--batch", 8, "--lr", 0.003, "--max-length", 16, "--seeds", 1, *more),
    ]
    return [str(each) for each in command]


def test_runs(script, tmp_path, capsys):
    """What order tells is learnt with positions and not without; runs are added, not repeated; notes stay."""
    write(tmp_path, {"train": english(0, 200), "dev": english(1, 40)})
    out = tmp_path / "out"
    script.main(arguments(tmp_path, out, "--schemes", "tener", "none"))
    content = json.loads((out / "results.json").read_text())
    runs = content["made-up"]["runs"]
    assert list(runs) == ["tener/0", "none/0"]
    assert runs["tener/0"]["result"]["f1"] > 99 > 95 > runs["none/0"]["result"]["f1"]
    assert runs["tener/0"]["result"]["steps"] == 12 * 25
    card = (out / "README.md").read_text()
    assert "| `tener`, un-scaled |" in card and "train_ner.py --name made-up --train train " in card
    assert str(tmp_path) not in card + json.dumps(content)

    (out / "README.md").write_text(card + "By hand.\n")
    capsys.readouterr()
    script.main(arguments(tmp_path, out, "--schemes", "tener", "--seeds", 2))
    assert "tener/0: there already" in capsys.readouterr().out
    again = json.loads((out / "results.json").read_text())["made-up"]["runs"]
    assert list(again) == ["tener/0", "none/0", "tener/1"]
    assert again["tener/0"] == runs["tener/0"] and again["tener/1"]["result"] != runs["tener/0"]["result"]
    card = (out / "README.md").read_text()
    assert card.endswith("<!-- notes -->\nBy hand.\n") and " ± " in card

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit, match=r"measured with lr = 0.003, and now it is 0.02; choose another --name"):
        script.main(arguments(tmp_path, out, "--lr", "0.02"))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    script.main(arguments(tmp_path, out, "--lr", "0.02", "--epochs", 1, "--schemes", "alibi", "--again"))
    assert list(json.loads((out / "results.json").read_text())["made-up"]["runs"]) == ["alibi/0"]
    assert "| `alibi` |" in (out / "README.md").read_text()


def test_same_seed_same_figures(script, tmp_path):
    write(tmp_path, {"train": english(0, 40), "dev": english(1, 10)})
    results = []
    for out in ("a", "b"):
        script.main(arguments(tmp_path, tmp_path / out, "--schemes", "shaw", "--epochs", 2, "--dropout", "0.1"))
        result = json.loads((tmp_path / out / "results.json").read_text())["made-up"]["runs"]["shaw/0"]["result"]
        results.append({key: value for key, value in result.items() if "seconds" not in key})
    assert results[0] == results[1]


def test_chinese(script, tmp_path):
    """Characters by flags alone; dev has characters that the training file lacks."""
    dev = [*chinese(1, 30), (list("龘龘在北京市"), ["O", "O", "O", "B-LOC", "M-LOC", "E-LOC"])]
    write(tmp_path, {"train": chinese(0, 200), "dev": dev})
    more = ("--unit", "character", "--schemes", "tener", "--epochs", 6, "--unknown", "0.05")
    script.main(arguments(tmp_path, tmp_path / "out", *more))
    results = json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]
    assert results["runs"]["tener/0"]["result"]["f1"] > 97
    assert "unit character" in results["about"]["tokens"] and "1.00 tokens a word" in results["about"]["tokens"]


def test_vectors_of_a_checkpoint(script, tmp_path):
    """Word vectors of a BERT, of the size of other initial weights, which do not learn."""
    write(tmp_path, {"train": english(0, 60), "dev": english(1, 10)})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "saw", "the", "of", ".", "a", "##nna", "rome"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    bert = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes), add_pooling_layer=False)
    bert.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    more = (
        "--tokenizer",
        tmp_path / "bert",
        "--vectors",
        "--epochs",
        1,
        "--schemes",
        "absolute",
        "sinusoidal",
        "shaw",
    )
    args = script.parse(arguments(tmp_path, tmp_path / "out", *more))
    task = script.TaggingTask(args)
    assert task.train.rows[0]["input_ids"][0] == vocabulary.index("saw")
    model = script.build(task, args, "shaw")
    table, expected = model.get_input_embeddings().weight, bert.get_input_embeddings().weight
    torch.testing.assert_close(table, expected * (args.init / expected.std()))
    assert not table.requires_grad and model.bert.embeddings.embeddings_project.out_features == 32
    script.main(arguments(tmp_path, tmp_path / "out", *more))
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["made-up"]["runs"]) == 3
    assert "its word vectors (24 wide), frozen" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "changes, more, words",
    [
        ({"dev": "a\tO\n"}, (), r"dev: 1 sentences and no entity"),
        ({"train": "a\tO\n"}, (), r"train: 1 sentences and no entity"),
        ({"dev": "a\tB-thing\n"}, (), r"dev: type 'thing' is none of .*train, which has person, place"),
        ({"train": ""}, (), r"train: holds no sentences"),
        ({"dev": "a\tO\tx\n\nb\n"}, (), r"line 3: 'b' has 1 columns"),
        ({}, ("--train", "gone"), r"gone: no such file"),
        ({}, ("--columns", "1", "3"), r"name two of its 2 columns"),
        ({}, ("--heads", "5"), r"hidden_size = 32 is not a multiple of num_attention_heads = 5"),
        ({}, ("--tokenizer", "nowhere/at-all"), r"nowhere/at-all"),
    ],
)
def test_errors_before_anything_is_written(script, tmp_path, changes, more, words):
    write(tmp_path, {"train": english(0, 8), "dev": english(1, 8)})
    for name, text in changes.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=rf"Error: .*{words}"):
        script.main(arguments(tmp_path, tmp_path / "out", *more))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev", "train"]


@pytest.mark.parametrize(
    "more, words",
    [
        (("--schemes", "tenor"), "--schemes tenor: no such scheme; known: none, absolute"),
        (("--vectors",), "--vectors: whose"),
        (("--pieces", "17"), "--pieces 17: a word does not fit"),
        (("--dropout", "1"), "--dropout"),
        (("--seeds", "0"), "--seeds"),
    ],
)
def test_bad_arguments(script, tmp_path, capsys, more, words):
    with pytest.raises(SystemExit):
        script.main(arguments(tmp_path, tmp_path / "out", *more))
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_foreign_results(script, tmp_path):
    write(tmp_path, {"train": english(0, 8), "dev": english(1, 8)})
    (tmp_path / "out").mkdir()
    for text in ("[1]", "not JSON", '{"made-up": {}}'):
        (tmp_path / "out" / "results.json").write_text(text)
        with pytest.raises(SystemExit, match="not a file of this script"):
            script.main(arguments(tmp_path, tmp_path / "out"))

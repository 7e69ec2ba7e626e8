"""Similarity, retrieval, passkeys and their files: known values, strategies that can be worked out by hand, errors."""

import gzip
import json
import lzma
import math
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import stir
from transformers import BertConfig, BertModel, BertTokenizer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from hf_relpos.evaluation import (
    Encoder,
    Pair,
    Query,
    Retrieval,
    average_ranks,
    difference,
    document_vectors,
    masked_accuracy,
    masked_accuracy_by_length,
    masked_windows,
    pair_vectors,
    paired_bootstrap,
    passkey_by_mask,
    passkey_by_vector,
    passkeys,
    pooling_of,
    rank_correlation,
    rank_documents,
    read_documents,
    read_pairs,
    read_queries,
    read_records,
    retrieve,
    similarities,
    spearman_difference,
)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "pass", "key", "is", "remember", "it", ".", "cat", "sat", "mat", "red", "sun", "sky", "far"]
PIECES = [f"{n:02}" for n in range(10, 100)] + [f"##{n:03}" for n in range(1000)]  # a key is two of them


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(SPECIAL + WORDS + PIECES))
    return BertTokenizer(str(path))


class Counts:
    """A model that can be worked out by hand: the state of a token is its one-hot vector.

    Its masked-token logits at every place are how often each token is in the row.
    """

    device = torch.device("cpu")

    def __init__(self, size):
        self.config = SimpleNamespace(pad_token_id=0)
        self.base_model = self
        self.size = size
        self.masked = False

    def __call__(self, input_ids, attention_mask):
        states = torch.nn.functional.one_hot(input_ids, self.size).float()
        if self.masked:
            counts = (states * attention_mask[..., None]).sum(1, keepdim=True)
            return MaskedLMOutput(logits=counts.expand_as(states))
        return BaseModelOutput(last_hidden_state=states)


@pytest.fixture
def encoder(tokenizer):
    return Encoder(Counts(len(tokenizer)), tokenizer)


def test_average_ranks():
    assert average_ranks(np.array([10.0, 30.0, 20.0])).tolist() == [1, 3, 2]
    assert average_ranks(np.array([5, 5, 1, 5, 9])).tolist() == [3, 3, 1, 3, 5]


def test_rank_correlation():
    # without ties 1 − 6 Σd² / (n (n² − 1))
    for order in permutations(range(4)):
        squares = sum((a - b) ** 2 for a, b in enumerate(order))
        assert rank_correlation(np.arange(4), np.array(order)) == pytest.approx(1 - 6 * squares / 60)
    # with ties, by hand: ranks 1 2½ 2½ 4 and 1 3 2 4; deviations −1½ 0 0 1½ and −1½ ½ −½ 1½
    assert rank_correlation(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    x = np.random.default_rng(0).normal(size=50)
    assert rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert math.isnan(rank_correlation(x, np.ones(50)))


def test_paired_bootstrap():
    gaps = np.array([0.0, 1.0] * 50)
    found = paired_bootstrap(lambda n: gaps[n].mean(), 100, draws=2000)
    assert found.mean == 0.5
    # mean of 100 draws of 0 or 1: half ± 1.96 · 0.05
    assert found.low == pytest.approx(0.402, abs=0.02) and found.high == pytest.approx(0.598, abs=0.02)
    assert paired_bootstrap(lambda n: 3.0, 10).low == 3.0


def test_spearman(encoder):
    pairs = [
        Pair(4.0, "the cat sat", "the cat sat"),
        Pair(2.0, "the cat sat", "the cat far"),
        Pair(1.0, "the cat sat", "red sun sky"),
        Pair(3.0, "the cat sat", "the sat"),
    ]
    found = similarities(pair_vectors(encoder, pairs))
    # one-hot counts with [CLS] and [SEP]: shared tokens over the root of the product of the numbers of tokens
    assert found == pytest.approx([1, 4 / 5, 2 / 5, 4 / math.sqrt(20)])
    scores = np.array([pair.score for pair in pairs])
    assert rank_correlation(found, scores) == pytest.approx(1)
    same = spearman_difference(found, found, scores, draws=50)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    worse = spearman_difference(found, -found, scores, draws=200)
    assert worse.mean == pytest.approx(-200) and worse.high <= 0


def test_vectors_do_not_depend_on_the_batch(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=12, initializer_range=0.2, **sizes)
    model = stir(BertModel(config)).eval()
    texts = ["cat", "the cat sat far", "red sun " * 20, "mat"]
    whole, single = (Encoder(model, tokenizer, batch_tokens=n).encode(texts) for n in (8192, 1))
    assert (whole - single).abs().max() < 1e-6
    with torch.no_grad():
        alone = model(**tokenizer(texts[2], return_tensors="pt", truncation=True, max_length=12)).last_hidden_state
    assert (whole[2] - alone[0].mean(0)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="max_length = 13"):
        Encoder(model, tokenizer).encode(texts, length=13)


def test_strategies(encoder, tokenizer):
    text = "the cat sat far red sun sky"  # seven tokens
    hot = torch.eye(len(tokenizer))
    ids = dict(zip(text.split(), tokenizer(text, add_special_tokens=False).input_ids, strict=True))
    edges = hot[tokenizer.cls_token_id] + hot[tokenizer.sep_token_id]

    def piece(*words):
        return (edges + sum(hot[ids[word]] for word in words)) / (2 + len(words))

    read = {
        name: document_vectors(encoder, ["mat", text], **kwargs)[1]
        for name, kwargs in {
            "full": {"strategy": "full"},
            "five": {"strategy": "full", "length": 5},
            "truncate": {"strategy": "truncate", "chunk": 5},
            "chunks": {"strategy": "chunks", "chunk": 5},
            "six": {"strategy": "chunks", "chunk": 5, "length": 6},
            "one chunk": {"strategy": "chunks", "chunk": 9},
        }.items()
    }
    expected = {
        "full": piece(*text.split()),
        "five": piece("the", "cat", "sat"),
        "truncate": piece("the", "cat", "sat"),
        "chunks": (3 * piece("the", "cat", "sat") + 3 * piece("far", "red", "sun") + piece("sky")) / 7,
        "six": (3 * piece("the", "cat", "sat") + piece("far")) / 4,
        "one chunk": piece(*text.split()),
    }
    for name, vector in expected.items():
        assert (read[name] - vector).abs().max() < 1e-6, name
    assert document_vectors(encoder, [""], "chunks").shape == (1, len(tokenizer))
    with pytest.raises(ValueError, match="strategy = 'middle'"):
        document_vectors(encoder, [text], "middle")


def test_ranks_and_measures():
    documents = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [3.0, 0.0]])
    queries = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    # the first document is as near to the third query as the fourth: the right one comes last
    ranks = rank_documents(queries, documents, torch.tensor([1, 2, 0]))
    assert ranks.tolist() == [1, 2, 2]
    assert rank_documents(torch.ones(1, 2), torch.ones(5, 2), torch.tensor([3])).tolist() == [5]
    found = Retrieval(np.array([1, 2, 11])).to_dict()
    assert found["queries"] == 3 and found["accuracy@1"] == pytest.approx(1 / 3)
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 11) / 3)
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3)) / 3)
    gains = difference(Retrieval(np.array([2, 2])), Retrieval(np.array([1, 1])), draws=20)
    assert (gains["accuracy@1"].mean, gains["accuracy@1"].low) == (1, 1) and gains["mrr"].high == 0.5
    with pytest.raises(ValueError, match="2 queries against 1"):
        difference(Retrieval(np.array([1, 2])), Retrieval(np.array([1])))


def test_retrieve(encoder):
    documents = {"a": "the cat sat", "b": "red sun sky", "c": "far " * 600 + "mat " * 600}
    queries = [Query("cat", "a"), Query("sun", "b"), Query("mat " * 4, "c")]
    assert retrieve(encoder, documents, queries).ranks.tolist() == [1, 1, 1]
    # cut before the word that tells
    assert retrieve(encoder, documents, queries, "truncate", chunk=512).ranks.tolist() == [1, 1, 3]
    with pytest.raises(ValueError, match="asks for the document 'd', which is not among the 3"):
        retrieve(encoder, documents, [Query("cat", "d")])


def test_passkeys(encoder, tokenizer):
    filler = tokenizer("cat sat mat red sun sky far " * 30, add_special_tokens=False).input_ids
    trials = passkeys(tokenizer, filler, 60, candidates=5, per_depth=3, depths=(0, 0.5, 1))
    assert len(trials) == 9 and {len(trial.row) for trial in trials} == {60}
    for trial in trials:
        key = trial.keys[trial.right]
        text = tokenizer.decode(trial.row)
        assert text.startswith("[CLS]") and text.endswith("[SEP]")
        assert text.count(key) == 2 and not any(other in text for other in trial.keys if other != key)
        assert len(set(trial.keys)) == 5 and not trial.masked
    starts = {trial.depth: tokenizer.decode(trial.row).split("the pass key")[0] for trial in trials}
    assert starts[0] == "[CLS] " and len(starts[0.5].split()) == 1 + round(0.5 * (60 - 2 - 17))
    again = passkeys(tokenizer, filler, 60, candidates=5, per_depth=3, depths=(0, 0.5, 1))
    assert again == trials
    # two pieces of the key are twice in the text, and no other candidate has both
    found = passkey_by_vector(encoder, trials)
    assert found == {"texts": 9, "accuracy": 1, "depth 0": 1, "depth 0.5": 1, "depth 1": 1, "chance": 0.2}
    with pytest.raises(ValueError, match="length = 18"):
        passkeys(tokenizer, filler, 18)
    with pytest.raises(ValueError, match="length = 60"):
        passkeys(tokenizer, filler[:3], 60)


def test_passkeys_by_mask(encoder, tokenizer):
    filler = tokenizer("cat sat mat red sun sky far " * 30, add_special_tokens=False).input_ids
    trials = passkeys(tokenizer, filler, 60, per_depth=4, masked=True)
    for trial in trials:
        assert [trial.row[place] for place in trial.masked] == [tokenizer.mask_token_id] * 2
        assert tokenizer.decode(trial.row).endswith("the pass key is [MASK] [MASK]. [SEP]")
    encoder.model.masked = True
    found = passkey_by_mask(encoder.model, tokenizer, trials)
    assert found["accuracy"] == 1 and found["chance"] == 0.1 and found["texts"] == 20
    wrong = [SimpleNamespace(**{**vars(trial), "right": (trial.right + 1) % 10}) for trial in trials]
    assert passkey_by_mask(encoder.model, tokenizer, wrong)["accuracy"] == 0


def test_masked_accuracy_by_length(encoder, tokenizer):
    encoder.model.masked = True
    encoder.model.config.max_position_embeddings = 32

    class Plain(Counts):
        def __call__(self, input_ids, attention_mask=None):
            return super().__call__(input_ids, torch.ones_like(input_ids))

    model = Plain(len(tokenizer))
    model.masked, model.config.max_position_embeddings = True, 32
    text = ["the cat sat far red sun sky mat"] * 40
    found = masked_accuracy_by_length(model, tokenizer, text, [8, 32, 64], tokens=200)
    assert list(found) == [8, 32]
    inputs, labels = masked_windows(tokenizer, text, 32, 6, np.random.default_rng(0))
    expected = masked_accuracy(model, inputs, labels)
    assert found[32] == {"windows": 6, "masked": int((labels != -100).sum()), **expected}
    asked = labels != -100
    right = model(inputs).logits.argmax(-1)[asked] == labels[asked]
    assert expected["accuracy"] == pytest.approx(100 * float(right.double().mean()))
    with pytest.raises(ValueError, match=r"lengths = \[64\]"):
        masked_accuracy_by_length(model, tokenizer, text, [64])


def test_files(tmp_path):
    def write(name, text, opener=open):
        with opener(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(text)
        return tmp_path / name

    expected = [Pair(5.0, "a b", "c"), Pair(0.5, "d", 'e "f')]
    header = write("h.tsv", 'score\tsentence1\tsentence2\n5.0\ta b\tc\n0.5\td\te "f\n')
    assert read_pairs(header) == expected
    assert read_pairs(write("n.tsv", '5.0\ta b\tc\n0.5\td\te "f\n')) == expected
    assert read_pairs(write("x.tsv.xz", '5.0\ta b\tc\n0.5\td\te "f', lzma.open)) == expected
    assert read_pairs(write("o.tsv", 'b\tx\ts\ta\nc\t-\t5\ta b\ne "f\t-\t.5\td\n'), ("s", "a", "b")) == expected
    lines = "".join(
        json.dumps({"score": p.score, "sentence1": p.sentence1, "sentence2": p.sentence2}) + "\n" for p in expected
    )
    assert read_pairs(write("j.jsonl.gz", lines, gzip.open)) == expected
    assert read_documents(write("d.jsonl", '{"id": "a", "text": "t", "more": 1}\n\n')) == {"a": "t"}
    assert read_documents(write("d.tsv", "id\ttext\na\tt\nb\tu\n")) == {"a": "t", "b": "u"}
    assert read_queries(write("q.jsonl", '{"query": "q", "doc": "a"}')) == [Query("q", "a")]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.tsv", "5.0\ta\tb\n4.0\ta\n", r"a.tsv, line 2: 2 columns, and 'sentence2' is column 3"),
        ("a.tsv", "", "a.tsv: holds no records"),
        ("a.tsv", "s\tone\ttwo\n1\ta\tb\n", r"a.tsv, record 1: score = 's' is no number; name the columns with --col"),
        ("a.tsv", "1\ta\tb\n", "one pair cannot be ranked"),
        ("a.tsv", "nan\ta\tb\n1\ta\tb\n", "score = 'nan' is no number"),
        ("a.jsonl", '{"score": 1}\n', r"a.jsonl, line 1: no field 'sentence1' \(it has score\)"),
        ("a.jsonl", "\n1 2\n", "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: a list, not an object"),
    ],
)
def test_files_that_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_pairs(tmp_path / name)


def test_other_refused_files(tmp_path):
    with pytest.raises(ValueError, match=r"none\.tsv: no such file"):
        read_pairs(tmp_path / "none.tsv")
    (tmp_path / "a.tsv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.tsv: not readable as UTF-8"):
        read_pairs(tmp_path / "a.tsv")
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(b"1\ta\tb\n" * 1000)[:-20])
    with pytest.raises(ValueError, match=r"a.tsv.xz: not readable"):
        read_pairs(tmp_path / "a.tsv.xz")
    (tmp_path / "d.tsv").write_text("id\ttext\na\tt\na\tu\n")
    with pytest.raises(ValueError, match=r"d\.tsv, record 2: id = 'a' was there before"):
        read_documents(tmp_path / "d.tsv")
    with pytest.raises(ValueError, match=r"line 1: no column 'x' \(it has id, text\)"):
        read_records(tmp_path / "d.tsv", ["x"], header=True)
    with pytest.raises(ValueError, match="name three"):
        read_pairs(tmp_path / "d.tsv", ("id", "text"))


def test_pooling_of(tmp_path):
    assert pooling_of(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    path = tmp_path / "1_Pooling" / "config.json"
    for config, expected in (
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 3}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
    ):
        path.write_text(json.dumps(config))
        assert pooling_of(tmp_path) == expected
    for config in ({"pooling_mode_max_tokens": True}, {"pooling_mode": ["mean", "cls"]}):
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="only mean and cls are known here; choose one with --pooling"):
            pooling_of(tmp_path)

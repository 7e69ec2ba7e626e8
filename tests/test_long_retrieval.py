"""Passages in the context of their text, and scripts/bench_long_retrieval.py: documents, positions, ranks, tables."""

import json
import lzma

import pytest
import torch
from launching import import_script
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_relpos import RelPosBertConfig, RelPosBertModel, demo
from hf_relpos.evaluation import Encoder, hidden_states, load_encoder, passage_vectors, windowed_hidden_states


TEXT = "The island was small. Nobody lived there.\n\nIt had a hill, and the hill had a name.\nThe end."


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a small BERT of random weights that reads 512 tokens, with the tokenizer of the demonstration."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = AutoTokenizer.from_pretrained(demo.CHECKPOINT)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).save_pretrained(folder)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(source):
    return load_encoder(source)


def test_passages_are_means_of_the_states_of_their_tokens_in_the_whole_text(encoder):
    borders = [(0, 21), (21, 41), (43, len(TEXT))]
    vectors = passage_vectors(encoder, TEXT, borders)
    ids = encoder.tokenizer(TEXT, return_tensors="pt").input_ids
    hidden = hidden_states(encoder.model, ids, torch.ones_like(ids, dtype=torch.bool))[0]
    counts = [len(encoder.tokenizer(TEXT[a:b], add_special_tokens=False).input_ids) for a, b in borders]
    assert sum(counts) == len(hidden) - 2
    torch.testing.assert_close(vectors, torch.stack([part.mean(0) for part in hidden[1:-1].split(counts)]))
    reversed_order = passage_vectors(encoder, TEXT, borders[::-1])
    torch.testing.assert_close(reversed_order, vectors.flip(0))


def test_a_text_that_is_too_long_is_read_in_windows(encoder):
    short = Encoder(encoder.model, encoder.tokenizer, max_length=12)
    ids = encoder.tokenizer(TEXT).input_ids
    assert len(ids) > 12
    hidden = windowed_hidden_states(encoder.model, ids, 12)
    torch.testing.assert_close(passage_vectors(short, TEXT, [(0, len(TEXT))])[0], hidden[1:-1].mean(0))


@pytest.mark.parametrize(
    "borders, message",
    [
        ([(0, 5), (5, 5)], r"borders\[1\] = \(5, 5\): the text has 91 characters"),
        ([(0, 92)], r"borders\[0\] = \(0, 92\)"),
        ([(41, 43)], r"borders\[0\] = \(41, 43\): no token begins"),
    ],
)
def test_borders_that_hold_no_passage(encoder, borders, message):
    with pytest.raises(ValueError, match=message):
        passage_vectors(encoder, TEXT, borders)


def test_a_tokenizer_without_offsets(encoder):
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow does not say where its tokens begin"):
        passage_vectors(Encoder(encoder.model, Slow()), TEXT, [(0, 5)])


def test_a_word_begins_after_its_space(encoder):
    """The tokenizers of SentencePiece count the space before a word as the word's."""

    class Spaced:
        is_fast = True

        def __call__(self, text, **options):
            found = encoder.tokenizer(text, **options)
            found["offset_mapping"] = [
                (max(a - 1, 0) if a and text[a - 1] == " " else a, b) for a, b in found["offset_mapping"]
            ]
            return found

    spaced = Encoder(encoder.model, Spaced())
    borders = [(0, 3), (4, 10), (11, len(TEXT))]  # The, island, …
    torch.testing.assert_close(passage_vectors(spaced, TEXT, borders), passage_vectors(encoder, TEXT, borders))


def test_positions_beyond_the_last():
    readers = import_script("long_retrieval.readers")
    for positions in (readers.grouped, readers.recurrent):
        for length in (513, 1024, 5000):
            ids = positions(length, 512)
            assert ids.shape == (length,) and ids[0] == 0 and ids[1:].min() == 1 and ids.max() <= 511
        torch.testing.assert_close(positions(512, 512), torch.arange(512))
    assert readers.grouped(1023, 512)[:6].tolist() == [0, 1, 1, 2, 2, 3]
    assert readers.recurrent(515, 512)[510:].tolist() == [510, 511, 1, 2, 3]


def test_grouped_distances():
    """Near pairs have the terms of the model itself, far ones those of nearer pairs, none of a distance never met."""
    readers = import_script("long_retrieval.readers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    options = {"position_embedding_type": "tables", "position_options": {"storage": "rows"}}
    model = RelPosBertModel(RelPosBertConfig(vocab_size=50, **options, **sizes)).eval()
    grouped = readers.group_distances(model, 1024, 512)
    ids = torch.randint(1, 50, (1, 129))
    with torch.no_grad():
        torch.testing.assert_close(grouped(ids).last_hidden_state, model(ids).last_hidden_state)
    before, after = (each.encoder.layer[0].attention.self.distance_embedding.c for each in (model, grouped))
    # 896 distances past 128 share 383 rows, 3 each
    assert after.shape[1] == 2047
    for distance, read in ((128, 128), (130, 128), (131, 129), (1023, 128 + 895 // 3)):
        assert torch.equal(after[:, 1023 + distance], before[:, 511 + read])
        assert torch.equal(after[:, 1023 - distance], before[:, 511 - read])


def test_ranks_by_the_best_of_several_vectors():
    bench = import_script("bench_long_retrieval")
    documents = [torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]])]
    questions = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 0.2]])
    # of equals, the second question's documents 0 and 2, the right one is last
    assert bench.rank(questions, documents, [0, 2, 1]).tolist() == [1, 2, 2]


@pytest.fixture
def data(tmp_path):
    """A small folder of data."""
    folder = tmp_path / "data"
    for part in ("long", "text", "sts"):
        (folder / part).mkdir(parents=True)
    articles, queries = [], []
    for number in range(12):
        answer = f"The king of country {number} is called Number {number}."
        text = f"{'It is a country by the sea. ' * (5 + number)}\n{answer} He is old.\n{'There is more of it. ' * 9}"
        articles.append({"id": f"country_{number}", "text": text})
        queries.append(
            {"query": f"Who is king of {number}?", "doc": f"country_{number}", "evidence": text.index("Number")}
        )
    with lzma.open(folder / "long/wikidocs.docs.jsonl.xz", "wt") as file:
        file.write("\n".join(map(json.dumps, articles)))
    (folder / "long/wikidocs.queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "text/wikitext2.valid.txt").write_text("The ship sailed on and on.\nNobody saw land for days.\n" * 400)
    pairs = "\n".join(f"{n % 5}\tThe cat sat {n}.\tThe dog sat {n * n}." for n in range(12))
    for name in ("dev", "train"):
        (folder / f"sts/stsb.{name}.tsv").write_text(f"score\tsentence1\tsentence2\n{pairs}\n")
    return folder


def test_articles(encoder, data):
    tasks = import_script("long_retrieval.tasks")
    articles = tasks.Articles.read(data / "long/wikidocs.docs.jsonl.xz", data / "long/wikidocs.queries.jsonl")
    assert articles.sentence(articles.questions[3]) == "The king of country 3 is called Number 3."
    assert [articles.texts["country_3"][a:b][:8] for a, b in articles.paragraphs("country_3")] == [
        "It is a ",
        "The king",
        "There is",
    ]
    drawn = articles.draw(5, seed=1)
    assert len(drawn.texts) == 5 and {q.document for q in drawn.questions} == set(drawn.texts)
    whole, start = (articles.at_length(encoder.tokenizer, length) for length in (512, 60))
    assert len(whole.questions) == 12 and max(map(len, start.rows)) == 60
    assert 0 < len(start.questions) < 12, "answers that were not read are not asked for"


def test_needles_and_pass_keys_are_in_rows_of_one_length(encoder, data):
    tasks = import_script("long_retrieval.tasks")
    articles = tasks.Articles.read(data / "long/wikidocs.docs.jsonl.xz", data / "long/wikidocs.queries.jsonl")
    haystack = tasks.read_haystack(data / "text/wikitext2.valid.txt")
    needles = tasks.needles(encoder.tokenizer, 90, 8, 0, haystack, articles)
    keys = tasks.passkeys(encoder.tokenizer, 90, 8, 0)
    for made, what in ((needles, "is called"), (keys, "pass key is")):
        assert {len(row) for row in made.rows} == {90} and made.right == list(range(8))
        texts = [encoder.tokenizer.decode(row) for row in made.rows]
        plain = [text.replace(" ", "").lower() for text in texts]
        assert all(what.replace(" ", "") in text for text in plain) and len(set(plain)) == 8


def test_cells_are_measured_once(source, data, tmp_path, monkeypatch):
    bench = import_script("bench_long_retrieval")
    told = []
    readers = ["truncate", "mean", "max", "grouped", "hierarchical", "hierarchical+window", "alone", "titled"]
    arguments = ["--source", str(source), "--data", str(data), "--lengths", "64", "600", "--count", "6"]
    arguments += ["--evidence-length", "300", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    arguments += ["--readers", *readers]
    bench.main(arguments, told.append)
    results = json.loads((tmp_path / "out/long_retrieval.json").read_text())
    assert len(told) == len(results["cells"]) == 3 * 2 * 6 + 5 + 1
    card = (tmp_path / "out/long_retrieval.md").read_text()
    for words in (
        "less that of the mean of windows, with its 95 % range",
        "## Pass key",
        "## Needle",
        "## Articles",
        "## Evidence",
        "## Short sentences",
    ):
        assert words in card
    assert (tmp_path / "out/long_retrieval.png").is_file()
    monkeypatch.setattr(bench.Bench, "measure", lambda self, cell: pytest.fail(f"{cell} was measured again"))
    bench.main(arguments, told.append)

    # another set of questions in a file of the same name is another set
    questions = data / "long/wikidocs.queries.jsonl"
    lines = questions.read_text().splitlines()
    other = tmp_path / "other" / questions.name
    other.parent.mkdir()
    other.write_text("\n".join(lines[:6]))
    again = []
    monkeypatch.setattr(
        bench.Bench, "measure", lambda self, cell: again.append(cell) or results["cells"][cell]["result"]
    )
    files = ["--documents", str(data / "long/wikidocs.docs.jsonl.xz"), "--questions", str(other)]
    bench.main([*arguments, *files], told.append)
    assert {cell.partition("/")[0] for cell in again} == {"needle", "articles", "evidence"}


def test_a_reader_that_is_not_there(capsys):
    bench = import_script("bench_long_retrieval")
    with pytest.raises(SystemExit):
        bench.main(["--source", "x", "--data", "y", "--readers", "meen"])
    assert "fits none" in capsys.readouterr().err

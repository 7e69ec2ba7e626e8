"""scripts/learn_long_documents.py: articles and their rows, an encoder in two halves, the loss, a whole run."""

import json

import numpy as np
import pytest
import torch
from launching import import_script
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_relpos import RelPosBertConfig, RelPosBertModel, demo
from hf_relpos.evaluation import Retrieval, document_vectors, hidden_states, load_encoder, passage_vectors
from hf_relpos.evaluation.encoder import pad_batch
from hf_relpos.evaluation.retrieval import pieces


script = import_script("learn_long_documents")
data = import_script("long_learning.data")
readers = import_script("long_learning.readers")
training = import_script("long_learning.training")
card = import_script("long_learning.card")
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
PARAGRAPHS = [
    "The island was small. Nobody lived there, as St. Paul said.",
    'It had a hill. "A hill?" 400 people climbed it.',
    "Then came the sea and took it all.",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A source and a converted encoder: small, of random weights, with the tokenizer of the demonstration."""
    tokenizer, found = AutoTokenizer.from_pretrained(demo.CHECKPOINT), []
    tokenizer.model_max_length = 512
    torch.manual_seed(0)
    fields = {"vocab_size": len(tokenizer), "initializer_range": 0.5, **SIZES}
    for name, model in (
        ("source", BertModel(BertConfig(**fields))),
        ("converted", RelPosBertModel(RelPosBertConfig(position_embedding_type="harmonic", **fields))),
    ):
        found.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(found[-1])
        tokenizer.save_pretrained(found[-1])
    return found


def encoder_of(folders, converted, window=6):
    encoder = load_encoder(folders[converted])
    if converted:
        encoder.model.config.attention_window = window
    return encoder


def squad(articles):
    """SQuAD's JSON of {title: [paragraph]}; each sentence answers a question."""
    return {
        "data": [
            {
                "title": title,
                "paragraphs": [
                    {
                        "context": context,
                        "qas": [
                            {"question": f"What about {title} {start}?", "answers": [{"answer_start": start + 1}]}
                            for start in data.sentence_starts(context)
                        ],
                    }
                    for context in contexts
                ],
            }
            for title, contexts in articles.items()
        ]
    }


def articles_of(tmp_path, tokenizer, contents, length=100, unit="sentence"):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(squad(contents)))
    return data.read_articles([path], tokenizer, length, unit)


def test_sentences_begin_after_a_point_and_before_a_capital_letter_or_digit():
    text = PARAGRAPHS[1]
    starts = data.sentence_starts(text)
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)] == [
        "It had a hill. ",
        '"A hill?" ',
        "400 people climbed it.",
    ]
    assert len(data.sentence_starts("It is 3.5 m high, e.g. here.")) == 1


@pytest.mark.parametrize(
    "unit, sizes, answers", [("sentence", 7, [*range(7)]), ("paragraph", 3, [0, 0, 0, 1, 1, 1, 2])]
)
def test_questions_know_the_passage_that_answers(tmp_path, folders, unit, sizes, answers):
    tokenizer = encoder_of(folders, False).tokenizer
    (article,) = articles_of(tmp_path, tokenizer, {"The_Hill": PARAGRAPHS}, unit=unit)
    assert article.title == "The Hill" and len(article.passages) == sizes
    assert [question.passage for question in article.questions] == answers
    whole = tokenizer("\n".join(PARAGRAPHS), add_special_tokens=False).input_ids
    assert [token for passage in article.passages for token in passage] == whole
    if unit == "paragraph":
        assert article.named == [False, True, False]


def test_articles_end_with_a_whole_paragraph(tmp_path, folders):
    tokenizer = encoder_of(folders, False).tokenizer
    two = len(tokenizer("\n".join(PARAGRAPHS[:2])).input_ids)
    for length, count in ((two, 2), (two - 1, 1)):
        (article,) = articles_of(tmp_path, tokenizer, {"hill": PARAGRAPHS}, length, "paragraph")
        assert len(article.passages) == count
        assert max(question.passage for question in article.questions) == count - 1


def test_questions_without_answers_and_blank_paragraphs_have_no_passage(tmp_path, folders):
    """SQuAD 2.0 has the former."""
    content = squad({"hill": [PARAGRAPHS[0], " ", PARAGRAPHS[1]]})
    _, blank, last = content["data"][0]["paragraphs"]
    blank["qas"], last["qas"][0]["answers"] = [], []
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(content))
    (article,) = data.read_articles([path], encoder_of(folders, False).tokenizer, 100, "sentence")
    assert len(article.passages) == 6 and [question.passage for question in article.questions] == [0, 1, 2, 4, 5]


def test_files_of_another_kind_are_refused_by_name(tmp_path, folders):
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"other\.json: not SQuAD's JSON \(KeyError: 'data'\)"):
        data.read_articles([path], encoder_of(folders, False).tokenizer, 100, "sentence")


def test_parts_share_no_article():
    articles = [data.Article(str(number), [[1]], [True], []) for number in range(9)]
    parts = data.split(articles, (2, 3, 4))
    assert [len(part) for part in parts] == [2, 3, 4]
    assert {article.title for part in parts for article in part} == {str(number) for number in range(9)}
    with pytest.raises(ValueError, match="2 \\+ 8 articles are asked for, and there are 9"):
        data.split(articles, (2, 8))


def read(folders, name, article, frozen=1, window=6, size=100):
    """Vectors of an article by a reader."""
    reader = readers.READERS[name]
    halves = readers.Halves(encoder_of(folders, reader.converted, window), frozen)
    layout = reader.layout(article, halves.tokenizer, size)
    return halves, layout, halves.article(layout, torch.cat(halves.below(layout.rows)))


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("converted", [False, True])
def test_two_halves_compute_what_the_model_does(folders, converted, frozen):
    encoder = encoder_of(folders, converted)
    halves = readers.Halves(encoder, frozen)
    rows = encoder.tokenize([*PARAGRAPHS, "\n".join(PARAGRAPHS)])
    for row, states in zip(rows, halves.above(halves.below(rows)), strict=True):
        torch.testing.assert_close(states.detach(), hidden_states(encoder.model, *pad_batch([row], encoder.model))[0])


def test_passages_are_read_in_the_whole_article(tmp_path, folders):
    encoder = encoder_of(folders, True)
    (article,) = articles_of(tmp_path, encoder.tokenizer, {"hill": PARAGRAPHS})
    text, borders, begin = "\n".join(PARAGRAPHS), [], 0
    for paragraph in PARAGRAPHS:
        starts = data.sentence_starts(paragraph)
        ends = [*starts[1:], len(paragraph)]
        borders += [(begin + start, begin + end) for start, end in zip(starts, ends, strict=True)]
        begin += len(paragraph) + 1
    _, _, vectors = read(folders, "converted", article)
    torch.testing.assert_close(vectors.passages.detach(), passage_vectors(encoder, text, borders))
    torch.testing.assert_close(vectors.document.detach(), encoder.encode([text])[0])
    torch.testing.assert_close(vectors.rows[0].detach(), vectors.document.detach())


def test_passages_alone_are_texts_of_their_own(tmp_path, folders):
    encoder = encoder_of(folders, False)
    (article,) = articles_of(tmp_path, encoder.tokenizer, {"hill": PARAGRAPHS}, unit="paragraph")
    for name, prefix in (("alone", ""), ("titled", "hill: ")):
        _, _, vectors = read(folders, name, article)
        expected = encoder.encode([prefix + paragraph for paragraph in PARAGRAPHS])
        torch.testing.assert_close(vectors.passages.detach(), expected)


def test_pieces_hold_the_article_in_order(tmp_path, folders):
    encoder = encoder_of(folders, False)
    (article,) = articles_of(tmp_path, encoder.tokenizer, {"hill": PARAGRAPHS})
    _, layout, _ = read(folders, "pieces", article)
    assert len(layout.rows) == 1
    layout = readers.in_rows(article, encoder.tokenizer, 10)
    assert max(map(len, layout.rows)) == 10
    tokens = [token for passage in article.passages for token in passage]
    assert [row[1:-1] for row in layout.rows] == [row[1:-1] for row in pieces([0, *tokens, 0], 10)]
    halves = readers.Halves(encoder, 1)
    vectors = halves.article(layout, torch.cat(halves.below(layout.rows)))
    torch.testing.assert_close(vectors.rows.detach(), encoder.encode_rows(layout.rows))
    # the mean of the pieces' vectors, weighted by their tokens
    weights = torch.tensor([[len(row)] for row in layout.rows])
    torch.testing.assert_close(vectors.document, (vectors.rows * weights).sum(0) / weights.sum())
    owners = layout.passage_of_token
    assert owners[owners >= 0].tolist() == [n for n, passage in enumerate(article.passages) for _ in passage]


def test_pooling_and_frozen_layers_that_do_not_fit(folders):
    with pytest.raises(ValueError, match="frozen = 3 of 3 layers"):
        readers.Halves(encoder_of(folders, False), 3)


@pytest.fixture
def readable(tmp_path, folders):
    """Halves of the converted model, and six articles as it reads them."""
    halves = readers.Halves(encoder_of(folders, True), 1)
    contents = {f"hill {n}": [f"{paragraph} Number {n} it was." for paragraph in PARAGRAPHS] for n in range(6)}
    articles = articles_of(tmp_path, halves.tokenizer, contents, unit="paragraph")
    found = []
    for article in articles:
        layout = readers.in_rows(article, halves.tokenizer, 100)
        found.append(training.Readable(article, layout, torch.cat(halves.below(layout.rows))))
    return halves, found


def test_the_loss_compares_with_all_articles_and_learns_from_the_batch(readable):
    halves, articles = readable
    bank = training.Bank(halves, articles)
    questions = torch.randn(3, 16)
    documents, passages = torch.randn(2, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
    expected_documents, expected_passages = bank.documents.clone(), bank.passages.clone()
    expected_documents[[4, 1]] = normalize(documents.detach(), dim=-1)
    expected_passages[[12, 13, 14, 3, 4, 5]] = normalize(passages.detach(), dim=-1)
    loss = bank.loss(questions, documents, passages, [4, 1], [(4, 0), (4, 2), (1, 1)])
    scaled = 20 * normalize(questions, dim=-1)
    expected = cross_entropy(scaled @ expected_documents.T, torch.tensor([4, 4, 1]))
    expected += cross_entropy(scaled @ expected_passages.T, torch.tensor([12, 14, 4]))
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(bank.documents, expected_documents)
    torch.testing.assert_close(bank.passages, expected_passages)
    loss.backward()
    assert documents.grad.abs().min() > 0 and passages.grad.abs().min() > 0
    assert not bank.documents.requires_grad


def test_training_learns_in_the_upper_half_and_saves_a_model(readable, folders, tmp_path):
    halves, articles = readable
    before = {name: tensor.clone() for name, tensor in halves.lower.state_dict().items()}
    result = training.train(halves, articles, 1e-2, epochs=4, batch=2, asked=2, seed=0)
    assert result["steps"] == 12 and result["losses"][-1] < result["losses"][0]
    for name, tensor in halves.lower.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    halves.save(tmp_path / "trained")
    encoder = load_encoder(tmp_path / "trained")
    assert encoder.model.config.attention_window == 6 and len(encoder.model.encoder.layer) == 3
    text = [encoder.tokenizer.decode(articles[0].layout.rows[0], skip_special_tokens=True)]
    with torch.no_grad():
        expected = halves.article(articles[0].layout, articles[0].below).document
    torch.testing.assert_close(document_vectors(encoder, text)[0], expected)


def test_ranks_are_those_of_every_article_and_passage(readable):
    halves, articles = readable
    found = training.retrieve(halves, articles, 2)
    assert {name: len(ranks) for name, ranks in found["ranks"].items()} == dict.fromkeys(
        ("document", "piece", "best", "passage"), 12
    )
    about = training.about_questions([each.article for each in articles], 2)
    assert about["article"] == [number for number in range(6) for _ in range(2)] and about["passages"] == 18
    # read at once, an article is a row
    assert found["ranks"]["document"] == found["ranks"]["piece"]
    assert all(1 <= rank <= 6 for rank in found["ranks"]["best"])


def test_ranges_are_over_articles():
    """Questions of one article come together: a range over 40 questions of 4 articles is that of the 4."""
    article = np.repeat(np.arange(4), 10)
    other = np.repeat([0.0, 0.0, 100.0, 100.0], 10)
    assert card.difference(np.zeros(40), other, article) == "+50.0 (+0.0 … +100.0)"


def test_measures_of_ranks():
    result = {"ranks": {"passage": "1 2 6"}}
    assert card.by_question(result, "passage", "recall@5").tolist() == [100, 100, 0]
    expected = 100 * Retrieval(np.array([1, 2, 6])).by_query()["ndcg@10"]
    assert card.by_question(result, "passage", "ndcg@10").tolist() == expected.tolist()


def test_the_rate_is_chosen_on_validation_articles():
    runs = {
        "pieces/0": {"result": {"validation": 0.9}},
        "pieces@0.1/0": {"result": {"validation": 0.5, "rate": 0.1}},
        "pieces@0.01/0": {"result": {"validation": 0.6, "rate": 0.01}},
    }
    found = card.chosen(runs)
    assert found["pieces", False] == [{"validation": 0.9}]
    assert found["pieces", True] == [{"validation": 0.6, "rate": 0.01}]


def test_a_run_is_measured_once_and_goes_on(tmp_path, folders, capsys):
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(squad({f"hill_{n}": [f"{p} It is {n}." for p in PARAGRAPHS] for n in range(7)})))
    arguments = ["--name", "hills", "--source", folders[0], "--converted", folders[1], "--questions", path]
    arguments += ["--out", tmp_path / "out", "--work", tmp_path / "work", "--frozen", 1, "--train", 3]
    arguments += ["--validation", 2, "--held-out", 2, "--epochs", 1, "--readers", "converted"]
    arguments = [str(each) for each in arguments]
    script.main([*arguments, "--rates"])
    assert capsys.readouterr().out.split(":")[0] == "converted/0"
    arguments.append("alone")
    script.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "converted@0.0001/0",
        "alone/0",
        "alone@0.0001/0",
    ]
    content = json.loads((tmp_path / "out/results.json").read_text())["hills"]
    assert str(tmp_path) not in json.dumps(content)
    assert len(content["runs"]["alone/0"]["result"]["ranks"]["passage"].split()) == len(
        content["about"]["questions"]["article"]
    )
    text = (tmp_path / "out/README.md").read_text()
    assert "| source, sentences alone, trained |" in text
    assert "| converted, at once, trained − source, sentences alone, trained |" in text
    script.main(arguments)
    assert capsys.readouterr().out == ""

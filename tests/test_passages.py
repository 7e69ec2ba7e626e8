"""Vectors of passages, read in the context of their text."""

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_relpos import demo
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
        ([(0, 5), (5, 5)], r"borders\[1\] = \(5, 5\): give 0 ≤ start < end ≤ 91"),
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

    with pytest.raises(ValueError, match="Slow does not return offsets of tokens"):
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

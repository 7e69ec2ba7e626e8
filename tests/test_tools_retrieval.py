"""Objects of other libraries under `optimize`: an encoder is found inside, computes no padding, and outputs stay.

LangChain's and LlamaIndex's embeddings, GLiNER and GLiNER2, which are not among the packages of the tests, were called
by hand: their encoders computed .18, .18, .24 and .28 of what they did with padding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from computed import computed_by
from keybert import KeyBERT
from pydantic import BaseModel, PrivateAttr
from rerankers import Reranker
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3Model, pipeline
from txtai import Embeddings
from wording import TEXTS, VOCABULARY, classifier, save_with_tokenizer

from hf_relpos import optimize


LONG = "under the old tree a big dog sat and ran and saw the sky . the house was red"
BATCH = [*TEXTS * 4, *["the cat"] * 12, LONG]
PAIRS = [(TEXTS[1], text) for text in BATCH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random classifier with a tokenizer, and a sentence encoder made of it."""
    folder = classifier(tmp_path_factory.mktemp("model"))
    SentenceTransformer(folder, device="cpu").save(f"{folder}/sentences")
    return folder


def sentences(folder):
    return SentenceTransformer(f"{folder}/sentences", device="cpu")


class Embedder(BaseModel):
    """As LangChain's and LlamaIndex's embeddings hold a model."""

    _client: Any = PrivateAttr()

    def __init__(self, folder):
        super().__init__()
        self._client = sentences(folder)


def decoder(folder):
    """Of the class Qwen3, which returns keys and values unless it is told not to, and a pipeline does not tell."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, vocab_size=len(VOCABULARY), num_key_value_heads=1, head_dim=8, pad_token_id=0)
    save_with_tokenizer(Qwen3Model(config), Path(folder, "decoder"))
    assert config.use_cache
    return pipeline("feature-extraction", f"{folder}/decoder", device="cpu", batch_size=32)


def txtai(folder):
    return Embeddings(path=f"{folder}/sentences", method="sentence-transformers", gpu=False)


def logits(model):
    return model(**AutoTokenizer.from_pretrained(model.name_or_path)(BATCH, padding=True, return_tensors="pt")).logits


def keywords(found):
    return [score for text in found.extract_keywords(BATCH, stop_words=None) for _, score in text]


def scores(found):
    return [each.score for each in sorted(found.rank(TEXTS[1], BATCH).results, key=lambda each: each.doc_id)]


# How an object is made of a folder, and how its users call it.
HOSTS = {
    "model": (lambda folder: AutoModelForSequenceClassification.from_pretrained(folder).eval(), logits),
    "pipeline": (
        lambda folder: pipeline("text-classification", folder, device="cpu", batch_size=32),
        lambda found: [each["score"] for each in found(BATCH)],
    ),
    "pipeline of a decoder": (decoder, lambda found: [each[0][0] for each in found(BATCH)]),
    "CrossEncoder": (lambda folder: CrossEncoder(folder, device="cpu"), lambda found: found.predict(PAIRS)),
    "SentenceTransformer": (sentences, lambda found: found.encode(BATCH)),
    "MultiVectorEncoder": (
        lambda folder: MultiVectorEncoder(f"{folder}/sentences", device="cpu"),
        lambda found: torch.cat([*found.encode_query(BATCH), *found.encode_document(BATCH)]),
    ),
    "dict": (lambda folder: {"a": sentences(folder)}, lambda found: found["a"].encode(BATCH)),
    "private attribute": (Embedder, lambda found: found._client.encode(BATCH)),
    "keybert": (lambda folder: KeyBERT(sentences(folder)), keywords),
    "rerankers": (lambda folder: Reranker(folder, model_type="cross-encoder", device="cpu", verbose=0), scores),
    "txtai": (txtai, lambda found: found.batchtransform(BATCH)),
}


@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_optimize_object_of_another_library(host, folder):
    make, call = HOSTS[host]
    found = make(folder)
    before = torch.as_tensor(call(found))
    assert len(before) >= len(BATCH) and before.unique().numel() > 2
    padded = computed_by(lambda: call(found)).products
    with optimize(found) as handle:
        assert [each.level for each in handle.encoders] == ["contract"] and not handle.skipped
        torch.testing.assert_close(torch.as_tensor(call(found)), before, atol=1e-5, rtol=1e-5)
        assert 0 < computed_by(lambda: call(found)).products < 0.6 * padded
    assert (torch.as_tensor(call(found)) == before).all()

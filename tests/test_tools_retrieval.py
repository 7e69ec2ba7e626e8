"""Objects of retrieval libraries under `optimize`: an encoder is found inside, and what they return stays."""

import pytest
import torch
from keybert import KeyBERT
from rerankers import Reranker
from sentence_transformers import SentenceTransformer
from txtai import Embeddings
from wording import TEXTS, classifier

from hf_relpos import optimize


BATCH = [*TEXTS * 4, "the cat", "under the old tree a big dog sat and ran and saw the sky . the house was red"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random classifier with a tokenizer, and a sentence encoder made of it."""
    folder = classifier(tmp_path_factory.mktemp("model"))
    SentenceTransformer(folder, device="cpu").save(f"{folder}/sentences")
    return folder, f"{folder}/sentences"


def keybert(folder, sentences):
    found = KeyBERT(SentenceTransformer(sentences, device="cpu"))

    def keywords():
        return [score for text in found.extract_keywords(BATCH, stop_words=None) for _, score in text]

    return found, keywords


def rerankers(folder, sentences):
    found = Reranker(folder, model_type="cross-encoder", device="cpu", verbose=0)

    def scores():
        ranked = sorted(found.rank(BATCH[0], BATCH).results, key=lambda each: each.doc_id)
        return [each.score for each in ranked]

    return found, scores


def txtai_embeddings(folder, sentences):
    found = Embeddings(path=sentences, method="sentence-transformers", gpu=False)
    found.index(BATCH)
    return found, lambda: found.batchtransform(BATCH)


@pytest.mark.parametrize("make", [keybert, rerankers, txtai_embeddings])
def test_optimize_object_of_another_library(make, folders):
    found, outputs = make(*folders)
    before = torch.as_tensor(outputs())
    assert len(before) >= len(BATCH) and before.unique().numel() > 2
    with optimize(found) as handle:
        assert [each.level for each in handle.encoders] == ["contract"] and not handle.left
        torch.testing.assert_close(torch.as_tensor(outputs()), before, atol=1e-5, rtol=1e-5)
        counts = handle.counts()
    assert counts.computed < counts.given and (torch.as_tensor(outputs()) == before).all()

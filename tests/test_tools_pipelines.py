"""The pipelines of Transformers, by the path of a saved model: what they return is what the model computes.

Texts go through in a padded batch, and are compared with each alone through the model.
"""

import pytest
import torch
from oracles import tiny_model
from selection import FEW_FEATURE_SCHEMES
from transformers import pipeline
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging
from wording import TEXTS, VOCABULARY, save_with_tokenizer

from hf_relpos.models.modeling_relpos_bert import HEADS


TOLERANCE = 1e-5


def pipeline_of(task, auto, scheme, folder, **overrides):
    """A pipeline made of a saved model, that model, and its tokenizer."""
    model = tiny_model(HEADS[auto], scheme, vocab_size=len(VOCABULARY), max_position_embeddings=40, **overrides)
    words = save_with_tokenizer(model, folder)
    with CaptureLogger(logging.get_logger("transformers.pipelines.base")) as log:
        made = pipeline(task, str(folder))
    assert type(made.model) is type(model)
    assert "not supported" not in log.out  # as for models that Transformers does not know
    return made, model, words


@torch.no_grad()
def alone(model, words, *texts):
    """The first output of the model for one text, or one pair."""
    return model(**words(*texts, return_tensors="pt"))[0][0]


def close(one, other):
    return abs(float(one) - float(other)) <= TOLERANCE


A_FEW_SCHEMES = pytest.mark.parametrize("scheme", FEW_FEATURE_SCHEMES)


@A_FEW_SCHEMES
def test_fill_mask(scheme, tmp_path):
    fill, model, words = pipeline_of("fill-mask", "AutoModelForMaskedLM", scheme, tmp_path)
    texts = [text.replace("the", "[MASK]", 1).replace("a dog", "a [MASK]") for text in TEXTS]
    for text, found in zip(texts, fill(texts, batch_size=3, top_k=4), strict=True):
        place = words(text)["input_ids"].index(words.mask_token_id)
        best = alone(model, words, text)[place].softmax(-1).topk(4)
        assert [each["token"] for each in found] == best.indices.tolist()
        assert all(close(each["score"], score) for each, score in zip(found, best.values, strict=True))


@A_FEW_SCHEMES
def test_text_classification(scheme, tmp_path):
    auto = "AutoModelForSequenceClassification"
    classify, model, words = pipeline_of("text-classification", auto, scheme, tmp_path, num_labels=3)
    for text, found in zip(TEXTS, classify(TEXTS, batch_size=3, top_k=None), strict=True):
        expected = alone(model, words, text).softmax(-1)
        scores = {each["label"]: each["score"] for each in found}
        assert all(close(scores[f"LABEL_{number}"], value) for number, value in enumerate(expected))
    pair = classify({"text": TEXTS[0], "text_pair": TEXTS[1]}, top_k=None)
    expected = alone(model, words, TEXTS[0], TEXTS[1]).softmax(-1).sort(descending=True)[0]
    assert all(close(each["score"], value) for each, value in zip(pair, expected, strict=True))


@A_FEW_SCHEMES
def test_token_classification(scheme, tmp_path):
    auto = "AutoModelForTokenClassification"
    tag, model, words = pipeline_of("token-classification", auto, scheme, tmp_path, num_labels=3)
    for text, found in zip(TEXTS, tag(TEXTS, batch_size=3, ignore_labels=[]), strict=True):
        scores, labels = alone(model, words, text)[1:-1].softmax(-1).max(-1)
        assert [each["word"] for each in found] == text.split()
        assert [each["entity"] for each in found] == [f"LABEL_{number}" for number in labels]
        assert all(close(each["score"], score) for each, score in zip(found, scores, strict=True))


@A_FEW_SCHEMES
def test_feature_extraction(scheme, tmp_path):
    extract, model, words = pipeline_of("feature-extraction", "AutoModel", scheme, tmp_path)
    for text, found in zip(TEXTS, extract(TEXTS), strict=True):
        torch.testing.assert_close(torch.tensor(found)[0], alone(model, words, text), atol=TOLERANCE, rtol=0)


@A_FEW_SCHEMES
def test_zero_shot_classification(scheme, tmp_path):
    labels = {"contradiction": 0, "neutral": 1, "entailment": 2}
    auto, task = "AutoModelForSequenceClassification", "zero-shot-classification"
    names = {number: name for name, number in labels.items()}
    choose, model, words = pipeline_of(task, auto, scheme, tmp_path, label2id=labels, id2label=names)
    candidates = ["cat", "sky", "road"]
    for text in TEXTS:
        found = choose(text, candidate_labels=candidates, hypothesis_template="the {} .")
        logits = torch.stack([alone(model, words, text, f"the {each} .")[2] for each in candidates])
        expected = dict(zip(candidates, logits.softmax(-1), strict=True))
        assert all(close(score, expected[name]) for name, score in zip(found["labels"], found["scores"], strict=True))


@A_FEW_SCHEMES
@torch.no_grad()
def test_text_generation(scheme, tmp_path):
    """Greedy, rows padded on the left, with a cache: the words that the model finds likeliest of each text alone."""
    write, model, words = pipeline_of("text-generation", "AutoModelForCausalLM", scheme, tmp_path, is_decoder=True)
    words.padding_side = write.tokenizer.padding_side = "left"
    found = write(TEXTS, batch_size=3, max_new_tokens=4, do_sample=False, return_tensors=True)
    for text, rows in zip(TEXTS, found, strict=True):
        ids = words(text, return_tensors="pt")["input_ids"]
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        generated = [token for token in rows[0]["generated_token_ids"] if token != words.pad_token_id]
        assert generated == [token for token in ids[0].tolist() if token != words.pad_token_id]

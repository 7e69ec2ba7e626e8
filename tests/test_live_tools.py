"""Live models that other libraries own: equal outputs beside the same object before the call."""

from functools import partial

import pytest
import torch
from sentence_transformers import CrossEncoder
from test_live import RELATIVE, SIZES as LIVE_SIZES, V3
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import (
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    pipeline,
)
from wording import TEXTS, VOCABULARY, save_with_tokenizer

from hf_relpos import optimize


pytestmark = pytest.mark.parametrize("accelerate", [partial(optimize, precision=None, unpad=False), optimize])
SIZES = LIVE_SIZES | {"vocab_size": len(VOCABULARY)}
V3_FIELDS = V3 | SIZES
LABELS = {"contradiction": 0, "neutral": 1, "entailment": 2}
NAMES = {number: name for name, number in LABELS.items()}
TOLERANCE = 1e-5


def saved(head, config, folder):
    """A folder with a random model and a tokenizer."""
    torch.manual_seed(0)
    save_with_tokenizer(head(config), folder)
    return str(folder)


def agree(one, other):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=TOLERANCE, rtol=0)


def test_cross_encoder_ranks_alike(accelerate, tmp_path):
    folder = saved(DebertaV2ForSequenceClassification, DebertaV2Config(**V3_FIELDS, num_labels=1), tmp_path)
    reranker = CrossEncoder(folder, device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    before = reranker.predict(pairs, batch_size=3)
    with accelerate(reranker) as handle:
        assert "(DebertaV2Model, 2 layers)" in str(handle)
        agree(reranker.predict(pairs, batch_size=3), before)
        assert reranker.rank(TEXTS[0], TEXTS)[0]["corpus_id"] == int(before.argmax())
    assert (reranker.predict(pairs, batch_size=3) == before).all()


@pytest.mark.parametrize(
    "head, config",
    [
        (DebertaV2ForSequenceClassification, DebertaV2Config(**V3_FIELDS, label2id=LABELS, id2label=NAMES)),
        (DebertaForSequenceClassification, DebertaConfig(**SIZES, **RELATIVE, label2id=LABELS, id2label=NAMES)),
    ],
)
def test_zero_shot_pipeline_answers_alike(accelerate, head, config, tmp_path):
    choose = pipeline("zero-shot-classification", saved(head, config, tmp_path), device="cpu")
    question = dict(candidate_labels=["cat", "sky", "road"], hypothesis_template="the {} .")
    before = choose(TEXTS, **question)
    assert "2 layers" in str(accelerate(choose))
    for ours, theirs in zip(choose(TEXTS, **question), before, strict=True):
        assert ours["labels"] == theirs["labels"]
        agree(ours["scores"], theirs["scores"])


def test_quantised_projections_are_used_as_they_are(accelerate):
    torch.manual_seed(0)
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**V3_FIELDS | {"share_att_key": False})).eval()
    ids = torch.randint(5, len(VOCABULARY), (3, 11))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(11) < torch.tensor([[11], [4], [8]])).long()}
    quantize_(model.deberta.encoder.layer, Int8WeightOnlyConfig())
    before = model(**inputs).logits
    assert "(DebertaV2Model, 2 layers)" in str(accelerate(model))
    agree(model(**inputs).logits, before)

"""Live models that other libraries own: equal outputs beside the same object before the call."""

from functools import partial

import pytest
import torch
from sentence_transformers import CrossEncoder
from test_live import SIZES, V3
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification
from wording import TEXTS, VOCABULARY, save_with_tokenizer

from hf_relpos import optimize


pytestmark = pytest.mark.parametrize("accelerate", [partial(optimize, dtype=None, unpad=False), optimize])
V3_FIELDS = V3 | SIZES | {"vocab_size": len(VOCABULARY)}
TOLERANCE = 1e-5


def agree(one, other):
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=TOLERANCE, rtol=0)


def test_cross_encoder_ranks_alike(accelerate, tmp_path):
    torch.manual_seed(0)
    save_with_tokenizer(DebertaV2ForSequenceClassification(DebertaV2Config(**V3_FIELDS, num_labels=1)), tmp_path)
    reranker = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    before = reranker.predict(pairs, batch_size=3)
    with accelerate(reranker) as handle:
        assert "(DebertaV2Model, 2 layers)" in str(handle)
        agree(reranker.predict(pairs, batch_size=3), before)
        assert reranker.rank(TEXTS[0], TEXTS)[0]["corpus_id"] == int(before.argmax())
    assert (reranker.predict(pairs, batch_size=3) == before).all()


def test_quantised_projections_are_used_as_they_are(accelerate):
    torch.manual_seed(0)
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**V3_FIELDS | {"share_att_key": False})).eval()
    ids = torch.randint(5, len(VOCABULARY), (3, 11))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(11) < torch.tensor([[11], [4], [8]])).long()}
    quantize_(model.deberta.encoder.layer, Int8WeightOnlyConfig())
    before = model(**inputs).logits
    assert "(DebertaV2Model, 2 layers)" in str(accelerate(model))
    agree(model(**inputs).logits, before)

"""The vocabulary head of sentence-transformers' SPLADE after `optimize`."""

import copy
import pickle

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import hf_relpos
from hf_relpos.live.splade import Logits, VocabularyHead
from hf_relpos.live.substitute import MADE_OF


WORDS = 50


class Splade(torch.nn.Module):
    def __init__(self, **options):
        from sentence_transformers.sparse_encoder.modules import SpladePooling

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        self.model = BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes)).eval()
        torch.nn.init.normal_(self.model.cls.predictions.bias)
        self.pooling = SpladePooling(**options)

    def forward(self, input_ids=None, attention_mask=None):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.pooling({"token_embeddings": logits, "attention_mask": attention_mask})


def batch(lengths=(9, 30, 0, 300), left=False):
    tokens = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = (tokens.flip(1) if left else tokens).long()
    return {"input_ids": torch.randint(1, WORDS, mask.shape) * mask, "attention_mask": mask}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "options", [{}, {"activation_function": "log1p_relu"}, {"pooling_strategy": "sum"}, {"chunk_size": 4}], ids=str
)
def test_optimize_splade_outputs(options, left, monkeypatch):
    model, inputs = Splade(**options).eval(), batch(left=left)
    monkeypatch.setattr(Logits, "computed", lambda self: 1 / 0) if "pooling_strategy" not in options else None
    with torch.no_grad():
        expected = model(**inputs)["sentence_embedding"]
        handle = hf_relpos.optimize(model)
        assert "vocabulary head" in str(handle) and type(model.model.cls.predictions.decoder) is VocabularyHead
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(each.pooling) is type(model.pooling)
            torch.testing.assert_close(each(**inputs)["sentence_embedding"], expected, rtol=0, atol=1e-5)
    handle.undo()
    assert type(model.model.cls.predictions.decoder) is torch.nn.Linear
    assert not hasattr(model.pooling, MADE_OF)


def test_optimize_splade_logits_for_other_readers():
    """Every reader but the pooling gets the values, in a plain tensor."""
    model, inputs = Splade().eval(), batch((5, 12))
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)["token_embeddings"][real]
        hf_relpos.optimize(model)
        logits = model(**inputs)["token_embeddings"]
    assert type(logits) is Logits and logits.shape == (2, 12, WORDS) and logits.dtype == torch.float32
    plain = (
        torch.from_numpy(np.asarray(logits)),
        logits.clone(),
        copy.deepcopy(logits),
        pickle.loads(pickle.dumps(logits)),
    )
    for each in plain:
        assert type(each) is torch.Tensor
        torch.testing.assert_close(each[real], expected, rtol=0, atol=1e-5)
    logits.zero_()
    assert float(logits.sum()) == 0.0


def test_optimize_splade_training_and_weights():
    """With gradients, and for weights in which tokens count by halves, as before."""
    model, inputs = Splade().eval(), batch((5, 12))
    inputs["attention_mask"] = inputs["attention_mask"].float() * torch.linspace(0.5, 1, 12)
    hf_relpos.optimize(model, padding="stock")
    stock = Splade().eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(**inputs)["sentence_embedding"], stock(**inputs)["sentence_embedding"], rtol=0, atol=1e-5
        )
    for each in (model, stock):
        each.pooling.train()
        each(**batch((5, 12)))["sentence_embedding"].sum().backward()
    assert model.model.cls.predictions.bias.grad.abs().sum() > 0

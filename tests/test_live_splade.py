"""SPLADE of sentence-transformers after `optimize`: real `SparseEncoder`s, called as their users call them."""

import copy
import inspect
import logging
import operator
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from computed import computed_by
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseStaticEmbedding, SpladePooling
from transformers import BertConfig, BertForMaskedLM
from wording import TEXTS, save_with_tokenizer

import hf_relpos
from hf_relpos.live.splade import VocabularyHead, tell
from hf_relpos.live.substitute import MADE_OF


WORDS = 2000  # more than any other product of dimensions
BATCH = [*TEXTS, "", " ".join(["the old bird saw the red sun"] * 43), "the cat"]


def splade(folder, kind=Transformer, **options):
    """A `SparseEncoder` with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, initializer_range=0.3, **sizes))
    torch.nn.init.normal_(model.cls.predictions.bias)
    save_with_tokenizer(model, folder)
    modules = [kind(str(folder), transformer_task="fill-mask"), SpladePooling(**options)]
    return SparseEncoder(modules=modules, device="cpu")


def agree(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("options", [{}, {"activation_function": "log1p_relu"}, {"chunk_size": 4}], ids=str)
def test_optimize_splade_outputs(options, left, tmp_path):
    """Of each way to call it, in every size of batch; no tensor is as large as (batch, length, words)."""
    model = splade(tmp_path, **options)
    model.tokenizer.padding_side = "left" if left else "right"
    features = model.preprocess(BATCH)
    hidden = {**features, "attention_mask": features["attention_mask"] * (torch.arange(len(BATCH)) != 2)[:, None]}
    calls = [
        *(lambda each, size=size: each.encode(BATCH, batch_size=size) for size in (1, 2, 32)),
        lambda each: each.encode_query(BATCH, max_active_dims=7),
        lambda each: each.encode_document(BATCH, convert_to_sparse_tensor=False),
        lambda each: each(dict(features))["sentence_embedding"],
        lambda each: each(dict(hidden))["sentence_embedding"],  # a row without a token
    ]
    with torch.no_grad():
        expected = [call(model).to_dense() for call in calls]
        assert computed_by(partial(calls[-1], model)).largest >= features["input_ids"].numel() * WORDS
        handle = hf_relpos.optimize(model)
        assert "vocabulary head" in str(handle) and type(model[0].model.cls.predictions.decoder) is VocabularyHead
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(each[1]) is type(model[1])
            for call, outputs in zip(calls, expected, strict=True):
                agree(call(each).to_dense(), outputs)
                assert computed_by(partial(call, each)).largest < 300 * WORDS  # the longest text has 303 tokens
    handle.undo()
    assert type(model[0].model.cls.predictions.decoder) is torch.nn.Linear and not hasattr(model[1], MADE_OF)


def test_optimize_splade_sums(tmp_path):
    """Pooling by sum, which reads all logits, is as before, and the report promises nothing."""
    model = splade(tmp_path, pooling_strategy="sum", chunk_size=4)
    expected = model.encode(BATCH).to_dense()
    assert "vocabulary head" not in str(hf_relpos.optimize(model))
    assert type(model[0].model.cls.predictions.decoder) is not VocabularyHead
    agree(model.encode(BATCH).to_dense(), expected)


def test_optimize_splade_behind_a_router(tmp_path):
    """Documents by an MLMTransformer, queries by a table of weights."""
    inner = splade(tmp_path, MLMTransformer)
    router = Router.for_query_document([SparseStaticEmbedding(inner.tokenizer, frozen=True)], list(inner))
    model = SparseEncoder(modules=[router], device="cpu")
    calls = partial(model.encode_query, BATCH), partial(model.encode_document, BATCH)
    expected = [call().to_dense() for call in calls]
    hf_relpos.optimize(inner[0].model)  # as where `hf-relpos run` has met the model by itself
    hf_relpos.optimize(model)
    for call, outputs in zip(calls, expected, strict=True):
        agree(call().to_dense(), outputs)
        assert computed_by(call).largest < 300 * WORDS


@pytest.fixture
def unread():
    """Logits that nobody has read."""
    layer = torch.nn.Linear(4, 7)
    layer.__class__ = VocabularyHead
    with torch.no_grad():
        yield layer(torch.randn(2, 3, 4))


# Answers that PyTorch looks for in memory, has not for these tensors, or warns of.
READING = set("H T imag is_coalesced is_nonzero is_pinned is_same_size is_set_to is_shared volatile".split())
METHODS = "__len__ dim ndimension size numel nelement stride storage_offset element_size dim_order get_device type"


def test_logits_metadata_needs_no_values(unread):
    """Whatever all plain tensors of a shape answer alike, properties and methods, is answered without a product."""
    one, other = torch.zeros(2, 3, 7), torch.ones(2, 3, 7)
    properties = {name for name, _ in inspect.getmembers(torch.Tensor, inspect.isgetsetdescriptor) if name[0] != "_"}
    methods = {*METHODS.split(), *(name for name in dir(torch.Tensor) if name.startswith("is_"))} - properties
    asked = {name: operator.attrgetter(name) for name in properties - READING}
    asked |= {name: operator.methodcaller(name) for name in methods - READING}
    asked |= {"torch.numel": torch.numel, "torch.is_floating_point": torch.is_floating_point}
    asked |= {"size(1)": lambda each: each.size(1), "result_type": lambda each: torch.result_type(each, one)}
    for name, ask in asked.items():
        answer = ask(one)
        if not isinstance(answer, torch.Tensor):
            assert answer == ask(other) == ask(unread) and unread.whole is None, name
    assert all(each is unread for each in (unread.float(), unread.to("cpu"), unread.to(one), unread.contiguous()))
    assert unread.whole is None and len(asked) > 50


def test_logits_for_other_readers(unread, caplog):
    """Every reader but the pooling gets the values, in a plain tensor, and the first of each kind is named."""
    tell.cache_clear()
    with caplog.at_level(logging.INFO, "hf_relpos.live"):
        expected = unread[:]
    assert ["__getitem__" in each for each in caplog.messages] == [True] and unread.whole is not None
    copies = copy.deepcopy(unread), pickle.loads(pickle.dumps(unread)), torch.from_numpy(np.asarray(unread))
    for each in (*copies, unread.clone(), unread.double().float()):
        assert type(each) is torch.Tensor and torch.equal(each, expected)
    unread.zero_()
    assert float(unread.sum()) == 0.0


@torch.no_grad()
def test_pooling_of_logits_that_were_read(tmp_path):
    """They are not computed again; what was written to them counts."""
    stock, model = splade(tmp_path), splade(tmp_path)
    hf_relpos.optimize(model, unpad=False)
    read = [each[0](each.preprocess(BATCH)) for each in (stock, model)]
    for features in read:
        features["token_embeddings"][..., 100:] = -1.0
    assert computed_by(partial(model[1], read[1])).products == 0
    agree(read[1]["sentence_embedding"], stock[1](read[0])["sentence_embedding"])
    assert float(read[1]["sentence_embedding"][:, 100:].sum()) == 0.0


def test_optimize_splade_training_and_weights(tmp_path):
    """With gradients, and for weights in which tokens count by halves, as before."""
    stock, model = splade(tmp_path), splade(tmp_path)
    hf_relpos.optimize(model, unpad=False)
    features = model.preprocess(BATCH)
    halves = {**features, "attention_mask": features["attention_mask"] * torch.linspace(0.5, 1, 303)}
    with torch.no_grad():
        agree(model(dict(halves))["sentence_embedding"], stock(dict(halves))["sentence_embedding"])
    for each in (stock, model):
        each[1].train()
        each(dict(features))["sentence_embedding"].square().mean().backward()
    agree(*([part.grad for part in each.parameters() if part.grad is not None] for each in (model, stock)))
    assert model[0].model.cls.predictions.decoder.bias.grad.abs().sum() > 0

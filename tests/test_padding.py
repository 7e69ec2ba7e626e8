"""`unpad_inputs`: the layers see real tokens only, and nothing else changes."""

import pytest
import torch
from oracles import ON_TOKENS, extra_inputs, padding, tiny_model

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel, optimize
from hf_relpos.attention import call
from hf_relpos.attention.backends.chunked import Chunked
from hf_relpos.attention.unpadding import Batch
from hf_relpos.models import modeling_relpos_bert
from hf_relpos.models.capabilities import supported_implementations
from hf_relpos.schemes import SCHEMES


pytestmark = pytest.mark.usefixtures("none_too_short", "any_padding")
LENGTH, REAL = 9, [4, 9, 1]  # not in the order of lengths


def batch(name):
    real = padding(REAL, LENGTH)
    tokens = {"input_ids": torch.randint(1, 50, real.shape) * real, "attention_mask": real.long()}
    return real, {**tokens, **extra_inputs(name, len(REAL), LENGTH)}


def tokens_of_the_layers(model):
    """How many tokens each feed-forward part is given, and the hooks that note it."""
    seen = []
    for layer in model.base_model.encoder.layer:
        layer.intermediate.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape[:2])))
    return seen


@pytest.mark.parametrize("row", [[0, 1, 1], [1, 0, 1]], ids=["begins with padding", "padding inside"])
def test_what_is_left_as_it_is(row):
    assert Batch.of(torch.tensor([row, [1, 1, 1]]) != 0) is None


def test_what_may_not_be_padding_stays(monkeypatch):
    """A hidden token that is not the padding token, such as ColBERT's, may be read; embeddings do not tell."""
    model = tiny_model(RelPosBertModel, "shaw")
    real, inputs = batch("shaw")
    asked, whole = True, {(1, sum(REAL))}

    def tokens(unpad_inputs, **changes):
        model.config.unpad_inputs = unpad_inputs
        if not unpad_inputs:
            with torch.no_grad(), optimize(model, dtype=None) as handle:
                model(**inputs | changes)
                return {real.shape if handle.counts().computed == real.numel() else (1, handle.counts().computed)}
        seen = tokens_of_the_layers(model)
        with torch.no_grad():
            model(**inputs | changes)
        for layer in model.encoder.layer:
            layer.intermediate._forward_pre_hooks.clear()
        return set(seen)

    other = inputs["input_ids"].clone()
    other[0, 8] = 7
    embeddings = {"input_ids": None, "inputs_embeds": model.embeddings.word_embeddings(inputs["input_ids"])}
    for settings in (asked, False):
        assert tokens(settings) == whole
        assert tokens(settings, input_ids=other) == {real.shape}
    assert tokens(asked, **embeddings) == whole and tokens(False, **embeddings) == {real.shape}
    monkeypatch.setattr(modeling_relpos_bert, "FEWEST_PADDING", int((~real).sum()) + 1)
    assert tokens(asked) == {real.shape}
    model.config.pad_token_id = None
    monkeypatch.setattr(modeling_relpos_bert, "FEWEST_PADDING", 0)
    assert tokens(asked) == {real.shape}


@torch.no_grad()
def assert_same_unpadded(model, real, **inputs):
    """States at tokens, and zeros at padding, which was taken out; the pooler's vectors."""
    ids = torch.randint(1, 50, real.shape) * real
    plain = model(ids, attention_mask=real.long(), **inputs)
    model.config.unpad_inputs = True
    found = model(ids, attention_mask=real.long(), **inputs)
    assert plain.last_hidden_state[~real].any() and not found.last_hidden_state[~real].any()
    assert torch.allclose(found.last_hidden_state[real], plain.last_hidden_state[real], rtol=0, atol=1e-11)
    assert torch.allclose(found.pooler_output, plain.pooler_output, rtol=0, atol=1e-11)


def test_a_single_row_is_trimmed():
    model = tiny_model(RelPosBertModel, "t5").double()
    seen = tokens_of_the_layers(model)
    assert_same_unpadded(model, padding([5], 30))
    assert seen == [(1, 30)] * 2 + [(1, 5)] * 2


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "relpos"])
@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_and_gradients_are_those_of_the_padded_batch(name, backend):
    model = tiny_model(RelPosBertForMaskedLM, name, attn_implementation="eager").double()
    if backend not in supported_implementations(model.config):
        backend = "eager"
    model.set_attn_implementation(backend)
    real, inputs = batch(name)
    labels = torch.randint(1, 50, real.shape).masked_fill(~real, -100)
    logits, gradients = {}, {}
    for unpad in (False, True):
        model.config.unpad_inputs = unpad
        model.zero_grad()
        seen = tokens_of_the_layers(model)
        out = model(**inputs, labels=labels)
        out.loss.backward()
        assert set(seen) == ({(1, sum(REAL))} if unpad else {real.shape})
        logits[unpad] = out.logits[real].detach()
        gradients[unpad] = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert torch.allclose(logits[True], logits[False], rtol=0, atol=1e-11)
    for key, gradient in gradients[False].items():
        assert torch.allclose(gradients[True][key], gradient, rtol=1e-8, atol=1e-10), key


def test_a_decoder_trains_alike():
    model = tiny_model(RelPosBertModel, "relative_key_query", is_decoder=True).double()
    assert_same_unpadded(model, padding(REAL, LENGTH), use_cache=False)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_keep_their_own_inputs(name):
    """In several groups, out of the order of the batch, which may share the terms of the longest."""
    model = tiny_model(RelPosBertModel, name, max_position_embeddings=40).double()
    types = torch.randint(0, 2, (4, 40))
    assert_same_unpadded(model, padding([20, 40, 33, 9], 40), token_type_ids=types, **extra_inputs(name, 4, 40))


@torch.no_grad()
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_keep_their_own_inputs_with_padding_on_the_left(name):
    """Of the columns where their tokens are; `verify` would leave such calls to Transformers."""
    model = tiny_model(RelPosBertModel, name, max_position_embeddings=2000).double()
    model.pooler, real = None, padding([20, 40, 33], 40).flip(1)
    given = {"position_ids": torch.arange(40).square()[None], **extra_inputs(name, 3, 40)}
    given |= {"input_ids": torch.randint(1, 50, real.shape) * real, "token_type_ids": torch.randint(0, 2, real.shape)}
    plain = model(attention_mask=real.long(), **given).last_hidden_state
    with optimize(model, dtype=None, verify="load") as handle:
        found = model(attention_mask=real.long(), **given).last_hidden_state
        assert torch.allclose(found[real], plain[real], rtol=0, atol=1e-11)
        assert bool(found[~real].any()) != ("padding is removed" in str(handle))


@pytest.mark.parametrize("name", ON_TOKENS)
def test_rows_whose_positions_have_gaps(name):
    """The longest row has fewer positions than a shorter one, whose terms it cannot have."""
    model = tiny_model(RelPosBertModel, name, max_position_embeddings=300).double()
    positions = torch.arange(40).repeat(4, 1)
    positions[0, 10:] += 200
    assert_same_unpadded(model, padding([20, 40, 33, 9], 40), position_ids=positions)


@pytest.mark.parametrize("name, forms", [("t5", 1), ("relative_key", 3)])
def test_groups_and_layers_share_what_they_can(name, forms, monkeypatch):
    """Of three groups and three layers: one form for all, or one for each layer; a backend for each group."""
    model = tiny_model(RelPosBertModel, name, unpad_inputs=True, num_hidden_layers=3)
    real = padding([40, 39, 30, 20], 40)
    made, asked = [], []
    to_toeplitz, unsupported = call.to_toeplitz, Chunked.unsupported
    monkeypatch.setattr(call, "to_toeplitz", lambda *args: made.append(args) or to_toeplitz(*args))
    monkeypatch.setattr(Chunked, "unsupported", lambda *args: asked.append(args) or unsupported(*args))
    with torch.no_grad():
        model(input_ids=torch.randint(1, 50, real.shape) * real, attention_mask=real.long())
    assert (len(made), len(asked)) == (forms, 3)

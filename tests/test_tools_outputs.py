"""What every model of Transformers can be asked for: weights, hidden states, a feed-forward in chunks."""

import pytest
import torch
from oracles import extra_inputs, padding, tiny_model
from selection import FEATURE_SCHEMES

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel


EVERY_SCHEME = pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
BACKENDS = pytest.mark.parametrize("backend", ["relpos", "eager"])


def batch(scheme, lengths=(9, 5)):
    """A padded batch of rows, the first the longest, and what the scheme needs beside it."""
    real = padding(list(lengths), lengths[0])
    ids = torch.randint(1, 50, real.shape) * real
    return {"input_ids": ids, "attention_mask": real.long(), **extra_inputs(scheme, *real.shape)}


def agree(one, other, tolerance=1e-5):
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@EVERY_SCHEME
@BACKENDS
@torch.no_grad()
def test_attentions_are_those_of_the_output(scheme, backend):
    """Weights of every layer are those of eager attention; asking for them changes no output."""
    model = tiny_model(RelPosBertModel, scheme, backend)
    inputs = batch(scheme)
    plain, asked = model(**inputs), model(**inputs, output_attentions=True)
    assert plain.attentions is None and len(asked.attentions) == 2
    agree(asked.last_hidden_state, plain.last_hidden_state)
    reference = tiny_model(RelPosBertModel, scheme, "eager")
    reference.load_state_dict(model.state_dict())
    expected = reference(**inputs, output_attentions=True).attentions
    for weights, wanted in zip(asked.attentions, expected, strict=True):
        agree(weights, wanted)


@EVERY_SCHEME
@BACKENDS
@torch.no_grad()
def test_hidden_states_are_those_between_the_layers(scheme, backend):
    model = tiny_model(RelPosBertModel, scheme, backend)
    inputs, seen = batch(scheme), []
    hooks = [layer.register_forward_hook(lambda *call: seen.append(call[-1])) for layer in model.encoder.layer]
    asked = model(**inputs, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    assert len(asked.hidden_states) == 3
    for state, expected in zip(asked.hidden_states[1:], seen, strict=True):
        assert torch.equal(state, expected)
    assert torch.equal(asked.hidden_states[-1], asked.last_hidden_state)
    plain = model(**inputs)
    assert plain.hidden_states is None and torch.equal(plain.last_hidden_state, asked.last_hidden_state)


@EVERY_SCHEME
def test_feed_forward_in_chunks_changes_nothing(scheme):
    """`chunk_size_feed_forward` rows of the sequence at a time: outputs and gradients."""
    model = tiny_model(RelPosBertForMaskedLM, scheme)
    inputs = batch(scheme)
    results = []
    for size in (0, 1, 3):
        for layer in model.bert.encoder.layer:
            layer.chunk_size_feed_forward = size
        results.append(loss_and_gradients(model, inputs))
    for loss, gradients in results[1:]:
        agree(loss, results[0][0])
        for name, gradient in gradients.items():
            agree(gradient, results[0][1][name])
    assert tiny_model(RelPosBertModel, scheme, chunk_size_feed_forward=3).encoder.layer[0].chunk_size_feed_forward == 3


def loss_and_gradients(model, inputs):
    """The loss of the input's own tokens, and the gradient of every parameter that has one."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items()}

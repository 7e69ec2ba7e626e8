"""torch.compile: one graph for all lengths, forward and backward, with the numbers of the model as it stands."""

import pytest
import torch
from oracles import STILL, extra_inputs, tiny_model
from selection import FEATURE_SCHEMES, with_full
from torch._dynamo.utils import counters

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.schemes import SCHEMES


LENGTHS = [9, 3, 16, 17, 30, 2, 12, 15, 18, 40, 7, 25, 33, 5, 48, 20]  # P = 16
# Recorded for a training batch; a graph more may be for sizes that PyTorch takes for special.
MOST_GRAPHS = 2


def batch_of(length):
    """Token ids, a mask whose last row is half padding, labels, (B, L) each; B differs, too."""
    rows = 2 + length % 3
    ids, mask = torch.randint(1, 50, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    mask[-1, (length + 1) // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def step(forward, model, arguments):
    """Logits of a training step, and the gradient of every parameter by name."""
    model.zero_grad()
    outputs = forward(**arguments)
    outputs.loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return outputs.logits.detach(), gradients


def graphs_made():
    """How many graphs torch.compile has kept since it was reset, without those that it began and gave up."""
    return counters["stats"]["unique_graphs"]


MORE_WAYS = ["eager eager", "eager sdpa", "aot_eager relpos", "inductor relpos"]


@pytest.mark.parametrize("way", with_full(["eager relpos"], MORE_WAYS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_graph_for_all_lengths(scheme, way):
    compiler, backend = way.split()
    torch._dynamo.reset()
    counters.clear()
    fields = {"num_hidden_layers": 1, "position_options": STILL.get(scheme)}
    fields |= {"max_position_embeddings": max(LENGTHS)} if SCHEMES[scheme].learned_input_table else {}
    model = tiny_model(RelPosBertForMaskedLM, scheme, backend, **fields).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    for length in LENGTHS if compiler == "eager" else LENGTHS[::4]:
        arguments = batch_of(length)
        arguments |= extra_inputs(scheme, *arguments["input_ids"].shape)
        logits, gradients = step(model, model, arguments)
        got, compiled_gradients = step(compiled, model, arguments)
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-5)
        assert gradients.keys() == compiled_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert 1 <= graphs_made() <= MOST_GRAPHS
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", with_full(["relpos"], ["eager", "sdpa"]))
@pytest.mark.parametrize("scheme", with_full(["shaw"], FEATURE_SCHEMES))
def test_dropout_is_compiled(scheme, backend):
    """Its probability, too, which `dynamic=True` makes an input of the graph; numbers are drawn anew."""
    torch._dynamo.reset()
    fields = {"num_hidden_layers": 1, "attention_probs_dropout_prob": 0.5}
    model = tiny_model(RelPosBertForMaskedLM, scheme, backend, **fields).train()
    compiled, arguments = torch.compile(model, fullgraph=True, dynamic=True, backend="eager"), batch_of(9)
    logits, _ = step(compiled, model, arguments)
    again, gradients = step(compiled, model, arguments)
    assert not torch.equal(logits, again) and logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    torch._dynamo.reset()

"""FIRE (Li et al. 2023).

    score = q_i·k_j / √d + f(ψ(|i − j|) / (ψ(max(i, j, L₀)) + 1e-6)),    ψ(x) = log(|c|·x + 1)

f is an MLP with one hidden layer of ReLUs. The paper, about causal models, divides by ψ(max(i, L₀)).
"""

import itertools
import math

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, padding, tiny_attention

from hf_relpos.attention.context import AttentionContext, Positions


def paper(module, threshold, normalizer=max, start=0):
    """The score; `normalizer` makes a number of i and j, `start` is the position of the first token."""
    W1, b1, W2, b2 = (array(getattr(module.mlp[n], name)) for n in (0, 2) for name in ("weight", "bias"))
    c, L0 = abs(module.c.item()), abs(module.L_multiplier.item()) * threshold

    def score(q, k, h, i, j):
        i, j = i + start, j + start
        share = math.log(c * abs(i - j) + 1) / (math.log(c * max(normalizer(i, j), L0) + 1) + 1e-6)
        return q @ k / math.sqrt(8) + W2[h] @ np.maximum(W1[:, 0] * share + b1, 0) + b2[h]

    return score


@pytest.mark.parametrize("normalizer, of", [("both", max), ("query", lambda i, j: i)], ids=["both", "query"])
@pytest.mark.parametrize("threshold", [512, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_equals_the_paper(shared, threshold, normalizer, of, hidden):
    options = {"shared": shared, "threshold": threshold, "normalizer": normalizer}
    layer = tiny_attention("fire", position_options=options)
    module = layer.shared_distance_embedding if shared else layer.distance_embedding.bias
    assert (layer.shared_distance_embedding is not None) == shared == (layer.distance_embedding.bias is None)
    assert layer_error(layer, hidden, REAL, paper(module, threshold, of)) <= 1e-10


def test_is_not_a_function_of_the_offset_above_the_threshold(hidden):
    """Positions matter themselves: given ones must reach it, and a cache must not restart them."""
    layer = tiny_attention("fire", position_options={"threshold": 5})
    module = layer.distance_embedding.bias
    context = AttentionContext(9, 9, positions=Positions(torch.arange(9).expand(2, -1) + 40, 9 - 1))
    assert layer_error(layer, hidden, padding([9, 9], 9), paper(module, 5, start=40), context=context) <= 1e-10
    last = module(AttentionContext(2, 9, start=9 - 2))
    assert (last - module(AttentionContext(9, 9))[:, :, -2:]).abs().max() == 0


def test_initialisation():
    module = tiny_attention("fire", dtype=torch.float32).distance_embedding.bias
    module.init_weights(0.02)
    assert module.c.item() == pytest.approx(0.1) and module.L_multiplier.item() == 1
    assert 0.8 < module.mlp[0].weight.abs().max() <= 1 and 0.15 < module.mlp[2].weight.abs().max() <= 32**-0.5


CASES = list(itertools.product(golden("fire")[0]["thresholds"], ["query", "both"]))


@torch.no_grad()
def parity(case: tuple[int, str]) -> float:
    """Largest difference from the original; with the normaliser `both`, at keys to the left."""
    _, tensors = golden("fire")
    threshold, normalizer = case
    options = {"threshold": threshold, "normalizer": normalizer}
    module = tiny_attention("fire", dtype=torch.float32, position_options=options).distance_embedding.bias
    state = {name: tensors[f"{threshold}.{name}"].view_as(parameter) for name, parameter in module.named_parameters()}
    module.load_state_dict(state, strict=True)
    error = module(AttentionContext(24, 24)) - tensors[f"{threshold}.bias"]
    return (error if normalizer == "query" else error.tril()).abs().max().item()

"""Rotations at learned rates (Zhang et al. 2025, §2 and 3.1).

score = q_i·exp(r L) k_j / √d,    L = Σ_n θ_n (b_n a_nᵀ − a_n b_nᵀ)
"""

import math

import torch
from oracles import REAL, array, golden, layer_error, tiny_attention, tiny_model

from hf_relpos import RelPosBertModel
from hf_relpos.attention.context import AttentionContext
from hf_relpos.attention.formula import content_vectors


@torch.no_grad()
def test_equals_the_paper(hidden):
    """With learned planes: those of any orthogonal basis, by which W_q and W_k of the layer are turned."""
    layer = tiny_attention("grape_m")
    log_rate = layer.distance_embedding.log_rate.normal_(0, 16)
    rates = 10000.0 ** (-torch.arange(4).double() / 4) * (log_rate / 16).exp()
    basis = torch.linalg.qr(torch.randn(8, 8).double())[0]
    half = basis[:, 1::2] @ rates.diag() @ basis[:, ::2].T

    def paper(q, k, h, i, j):
        G = torch.linalg.matrix_exp((j - i) * (half - half.T))
        return array(basis) @ q @ array(G @ basis) @ k / math.sqrt(8)

    assert layer_error(layer, hidden, REAL, paper) <= 1e-10
    assert layer_error(layer, hidden, REAL, lambda q, k, h, i, j: paper(q, k, h, j, i)) >= 1e-3


@torch.no_grad()
def test_each_layer_has_its_own_rates():
    model, ids = tiny_model(RelPosBertModel, "grape_m"), torch.randint(3, 20, (2, 9))
    rates = [layer.attention.self.distance_embedding.log_rate.normal_(0, 16) for layer in model.encoder.layer]
    assert len(rates) > 1
    states = model(ids, output_hidden_states=True).hidden_states
    for layer, before, after in zip(model.encoder.layer, states[:-1], states[1:], strict=True):
        assert (layer(before) - after).abs().max() <= 1e-5


CASES = ["half"]


@torch.no_grad()
def parity(pairing: str) -> float:
    """Largest difference from the original, in float64, which turns the other way."""
    _, tensors = golden("grape_m")
    scheme = tiny_attention("grape_m", position_options={"pairing": pairing}).distance_embedding
    scheme.log_rate.copy_(tensors["log_freq"] + 4 * torch.arange(4).double() * math.log(10000))
    context = AttentionContext(7, 7, dtype=torch.float64)
    swapped = (tensors[name].transpose(1, 2).roll(4, -1) for name in ("query", "key"))
    _, query, key = content_vectors(*swapped, scheme(context), context)
    return (query @ key.mT - tensors["scores"]).abs().max().item()

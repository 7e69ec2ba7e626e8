"""The log-spaced continuous position bias of Swin Transformer V2 (Liu et al. 2022), along one axis.

    score = q_i·k_j / √d + 16 σ(G_h(x̂)),    x̂ = sign(x) · log₂(1 + 8|x| / (window − 1)) / log₂ 8,    x = i − j

G is an MLP with one hidden layer of ReLUs.
"""

import math

import numpy as np
import pytest
import torch
from oracles import REAL, array, golden, layer_error, tiny_attention, tiny_config

from hf_relpos import RelPosBertModel
from hf_relpos.attention.context import AttentionContext


def paper(scheme, window):
    W1, b1, W2 = array(scheme.cpb_mlp[0].weight), array(scheme.cpb_mlp[0].bias), array(scheme.cpb_mlp[2].weight)

    def score(q, k, h, i, j):
        x = i - j
        relative = math.copysign(math.log2(1 + 8 * abs(x) / (window - 1)) / math.log2(8), x)
        hidden_units = np.maximum(W1[:, 0] * relative + b1, 0)
        return q @ k / math.sqrt(8) + 16 / (1 + math.exp(-(W2[h] @ hidden_units)))

    return score


@pytest.mark.parametrize("window", [None, 5, 64])
def test_equals_the_paper(window, hidden):
    """Windows shorter than the text, of its length about, and longer; P is 16."""
    layer = tiny_attention("log_cpb", position_options={"window": window, "mlp_width": 32})
    assert layer_error(layer, hidden, REAL, paper(layer.distance_embedding, window or 16)) <= 1e-10


def test_initialisation():
    config = tiny_config("log_cpb", initializer_range=0.02)
    scheme = RelPosBertModel(config).encoder.layer[0].attention.self.distance_embedding
    assert scheme.cpb_mlp[0].bias.abs().max() == 0
    for weight in (scheme.cpb_mlp[0].weight, scheme.cpb_mlp[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)


CASES = golden("log_cpb")[0]["lengths"]


@torch.no_grad()
def parity(length: int) -> float:
    """Largest difference from the original, whose bias is 8 higher throughout."""
    config, tensors = golden("log_cpb")
    options, parts = {"window": config["window"]}, [(0, "weight"), (0, "bias"), (2, "weight")]
    scheme = tiny_attention("log_cpb", dtype=torch.float32, position_options=options).distance_embedding
    scheme.load_state_dict({f"cpb_mlp.{n}.{kind}": tensors[f"{kind}.{n}"] for n, kind in parts}, strict=True)
    context = AttentionContext(length, length)
    (table,) = scheme(context).bias
    return (table.scalars(context)[0] + 8 - tensors[f"{length}.scores"]).abs().max().item()

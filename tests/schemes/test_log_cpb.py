"""The log-spaced continuous position bias of Swin Transformer V2 (Liu et al. 2022), along one axis.

    score = q_i·k_j / √d + 16 σ(G_h(x̂)),    x̂ = sign(x) · log₂(1 + 8|x| / (window − 1)) / log₂ 8,    x = i − j

G is an MLP with one hidden layer of ReLUs.
"""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, golden, layer_error, padding, tiny_attention, tiny_config

from hf_relpos.attention.context import AttentionContext


LENGTH = 18
REAL = padding([LENGTH, 11], LENGTH)


@pytest.fixture
def hidden():
    return torch.randn(2, LENGTH, 24, dtype=torch.float64)


def paper(scheme, window, sign=1, coordinate=None):
    """The score; `coordinate` replaces the map from 8|x| / (window − 1) to |x̂|."""
    W1, b1, W2 = array(scheme.cpb_mlp[0].weight), array(scheme.cpb_mlp[0].bias), array(scheme.cpb_mlp[2].weight)
    coordinate = coordinate or (lambda x: math.log2(1 + x) / math.log2(8))

    def score(q, k, h, i, j):
        x = sign * (i - j)
        relative = math.copysign(coordinate(8 * abs(x) / (window - 1)), x)
        hidden_units = np.maximum(W1[:, 0] * relative + b1, 0)
        return q @ k / math.sqrt(8) + 16 / (1 + math.exp(-(W2[h] @ hidden_units)))

    return score


@pytest.mark.parametrize("window", [None, 5, 64])
def test_equals_the_paper(window, hidden):
    """Windows shorter than the text, of its length about, and longer; P is 16."""
    layer = tiny_attention("log_cpb", position_options={"window": window, "mlp_width": 32})
    assert layer_error(layer, hidden, REAL, paper(layer.distance_embedding, window or 16)) <= 1e-10
    assert layer_error(layer, hidden, REAL, paper(layer.distance_embedding, window or 16, sign=-1)) > 1e-3
    assert layer_error(layer, hidden, REAL, paper(layer.distance_embedding, 7)) > 1e-3
    linear = paper(layer.distance_embedding, window or 16, coordinate=lambda x: x / 8)
    assert layer_error(layer, hidden, REAL, linear) > 1e-3


def test_initialisation():
    scheme = tiny_attention("log_cpb", dtype=torch.float32).distance_embedding
    scheme.init_weights(0.02)
    shapes = {name: tuple(parameter.shape) for name, parameter in scheme.named_parameters()}
    assert shapes == {"cpb_mlp.0.weight": (512, 1), "cpb_mlp.0.bias": (512,), "cpb_mlp.2.weight": (3, 512)}
    assert scheme.cpb_mlp[0].bias.abs().max() == 0
    for weight in (scheme.cpb_mlp[0].weight, scheme.cpb_mlp[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 2.0}, {"window": True}, {"mlp_width": 0}], ids=str)
def test_options_that_are_refused(options):
    with raises(ValueError, "position_options", "'log_cpb'"):
        tiny_config("log_cpb", position_options=options)


CASES = golden("log_cpb")[0]["lengths"]


@torch.no_grad()
def parity(length: int) -> float:
    """Largest difference from the original, whose bias is 8 higher throughout."""
    config, tensors = golden("log_cpb")
    scheme = tiny_attention(
        "log_cpb", dtype=torch.float32, position_options={"window": config["window"]}
    ).distance_embedding
    weights = {
        f"cpb_mlp.{n}.{kind}": tensors[f"{kind}.{n}"] for n, kind in ((0, "weight"), (0, "bias"), (2, "weight"))
    }
    scheme.load_state_dict(weights, strict=True)
    context = AttentionContext(length, length)
    (table,) = scheme(context).bias
    return (table.scalars(context)[0] + 8 - tensors[f"{length}.scores"]).abs().max().item()


@pytest.mark.parametrize("length", CASES)
def test_equals_the_original_code(length):
    """Shorter than the windows of the fixture, and longer."""
    assert parity(length) <= 5e-6
    _, tensors = golden("log_cpb")
    assert tensors[f"{length}.scores"].std() > 1  # it is no constant that is compared

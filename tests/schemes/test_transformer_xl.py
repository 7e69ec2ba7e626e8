"""Transformer-XL (Dai et al. 2019, §3.3), bidirectional.

score = [q_i·k_j + q_i·W R_{i−j} + u·k_j + v·W R_{i−j}] / √d,    R the sinusoid of the model size D, sin | cos
"""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, golden, layer_error, padding, sine_cosine, tiny_attention


def paper(layer, clamp=None, sinusoid=None, sign=1, drop=""):
    """The paper's score; the last three arguments make the mistakes that the comparison must see.

    Args:
        clamp: largest distance with an embedding of its own.
        sinusoid: distance to a vector of D; the paper's if not given.
        sign: −1 counts j − i.
        drop: "u" or "v", left out.
    """
    scheme = layer.distance_embedding
    W, u, v = array(scheme.r_net.weight), array(scheme.r_w_bias), array(scheme.r_r_bias)
    u, v = u * ("u" not in drop), v * ("v" not in drop)

    def score(q, k, h, i, j):
        distance = sign * (i - j)
        if clamp is not None:
            distance = max(-clamp, min(clamp, distance))
        R = sine_cosine(distance, 24) if sinusoid is None else sinusoid(distance)
        relation = (W @ R)[8 * h : 8 * h + 8]
        return ((q + u[h]) @ k + (q + v[h]) @ relation) / math.sqrt(8)

    return score


@pytest.fixture
def layer():
    return tiny_attention("transformer_xl")


REAL = padding([9, 5], 9)


def test_equals_the_paper(layer, hidden):
    assert layer_error(layer, hidden, REAL, paper(layer)) <= 1e-10


def test_names_and_shapes_of_the_checkpoints(layer):
    shapes = {name: tuple(p.shape) for name, p in layer.distance_embedding.named_parameters()}
    assert shapes == {"r_net.weight": (24, 24), "r_w_bias": (3, 8), "r_r_bias": (3, 8)}


def interleaved(distance):
    half = sine_cosine(distance, 24).reshape(2, 12)
    return half.T.reshape(24)


def of_head_size(distance):
    return np.tile(sine_cosine(distance, 8), 3)


MISTAKES = {
    "interleaved layout": {"sinusoid": interleaved},
    "sinusoid of size d": {"sinusoid": of_head_size},
    "j - i": {"sign": -1},
    "distance without sign": {"sinusoid": lambda distance: sine_cosine(abs(distance), 24)},
    "no u": {"drop": "u"},
    "no v": {"drop": "v"},
    "clamped": {"clamp": 3},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees(mistake, layer, hidden):
    assert layer_error(layer, hidden, REAL, paper(layer, **MISTAKES[mistake])) > 1e-2


@pytest.mark.parametrize("clamp", [1, 4])
def test_clamp_len_on_both_sides(clamp, hidden):
    layer = tiny_attention("transformer_xl", position_options={"clamp_len": clamp})
    assert layer_error(layer, hidden, REAL, paper(layer, clamp)) <= 1e-10


def test_longer_than_the_trained_range(layer):
    hidden = torch.randn(1, 30, 24, dtype=torch.float64)
    assert layer_error(layer, hidden, padding([28], 30), paper(layer)) <= 1e-10


@pytest.mark.parametrize("clamp", [0, -3, True, 2.5, "all"])
def test_clamp_len_is_a_positive_integer(clamp):
    with raises(ValueError, "position_options['clamp_len']"):
        tiny_attention("transformer_xl", position_options={"clamp_len": clamp})


@torch.no_grad()
def original_layer(sizes: dict, tensors: dict, clamp: int):
    """Our layer with the weights of the original one, which has no biases in its projections."""
    layer = tiny_attention(
        "transformer_xl",
        dtype=torch.float32,
        hidden_size=sizes["d_model"],
        num_attention_heads=sizes["n_head"],
        position_options={"clamp_len": clamp if clamp > 0 else None},
    )
    parts = tensors["qkv_net.weight"].chunk(3)
    for linear, weight in zip((layer.query, layer.key, layer.value), parts, strict=True):
        linear.weight.copy_(weight)
        linear.bias.zero_()
    layer.distance_embedding.load_state_dict(
        {name: tensors[name] for name in ("r_net.weight", "r_w_bias", "r_r_bias")}, strict=True
    )
    return layer


CASES = list(golden("attention", "transformer_xl")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original.

    It sees a memory before the queries, and no future: run all of it, hide the future, drop the memory.
    """
    sizes, tensors = golden("attention", "transformer_xl")
    settings = sizes["cases"][case]
    memory = settings["mlen"]
    layer = original_layer(sizes, tensors, settings["clamp_len"])
    hidden = tensors[f"{case}.hidden_states"].transpose(0, 1)
    if memory:
        hidden = torch.cat([tensors[f"{case}.mems"].transpose(0, 1), hidden], dim=1)
    causal = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()[None, None]
    out, weights = layer(hidden, attention_mask=causal)
    expected = tensors[f"{case}.context"].transpose(0, 1), tensors[f"{case}.attn_prob"].permute(2, 3, 0, 1)
    errors = out[:, memory:] - expected[0], weights[:, :, memory:] - expected[1]
    return max(error.abs().max().item() for error in errors)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 1e-5

"""ALiBi (Press et al. 2021, §3) and its variants for encoders (issue 5 of the authors' repository).

score = q_i·k_j / √d − m_h · distance
"""

import math

import pytest
import torch
from errors import raises
from oracles import golden, layer_error, padding, tiny_attention, tiny_config

from hf_relpos.attention.context import AttentionContext
from hf_relpos.models.capabilities import supported_implementations
from hf_relpos.schemes.alibi import alibi_slopes


TWELVE = [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
SLOPES = {2: [2**-4, 2**-8], 3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8], 12: TWELVE}


def paper(slopes, distance):
    def score(q, k, h, i, j):
        return q @ k / math.sqrt(len(q)) - slopes[h] * distance(h, j - i)

    return score


LENGTH = 16
REAL = padding([LENGTH, 9], LENGTH)


@pytest.fixture
def hidden():
    return torch.randn(2, LENGTH, 24, dtype=torch.float64)


@pytest.mark.parametrize("heads", [2, 3, 12])
def test_symmetric(heads, hidden):
    layer = tiny_attention("alibi", num_attention_heads=heads)
    assert not list(layer.distance_embedding.parameters())
    assert layer_error(layer, hidden, REAL, paper(SLOPES[heads], lambda h, r: abs(r))) <= 1e-10
    # what a causal implementation does in an encoder: nothing to the right, or less than nothing
    assert layer_error(layer, hidden, REAL, paper(SLOPES[heads], lambda h, r: max(-r, 0))) > 1e-2
    assert layer_error(layer, hidden, REAL, paper(SLOPES[heads], lambda h, r: -r)) > 1e-2


def test_plain_geometric_slopes_are_seen(hidden):
    layer = tiny_attention("alibi", num_attention_heads=12)
    plain = [2 ** (-8 * h / 12) for h in range(1, 13)]
    assert layer_error(layer, hidden, REAL, paper(plain, lambda h, r: abs(r))) > 1e-2


def test_offset(hidden):
    layer = tiny_attention("alibi", position_options={"variant": "offset"})
    assert layer_error(layer, hidden, REAL, paper(SLOPES[3], lambda h, r: -r if r <= 0 else r - 0.5)) <= 1e-10
    assert layer_error(layer, hidden, REAL, paper(SLOPES[3], lambda h, r: r if r >= 0 else -r - 0.5)) > 1e-3
    assert layer_error(layer, hidden, REAL, paper(SLOPES[3], lambda h, r: abs(r))) > 1e-3


def test_asymmetric(hidden):
    """The first two of four heads see the left, the others the right; all have the slopes of two heads."""
    layer = tiny_attention("alibi", num_attention_heads=4, position_options={"variant": "asymmetric"})

    def seen(left, right):
        hidden_far = [left, left, right, right]
        return lambda h, r: math.inf if hidden_far[h](r) else abs(r)

    def to_the_left(r):
        return r < 0

    def to_the_right(r):
        return r > 0

    # a query of padding, in a head that sees the right, has no keys: zeros here, NaN in the loop
    real = padding([LENGTH], LENGTH)
    score = paper(SLOPES[2] * 2, seen(to_the_right, to_the_left))
    assert layer_error(layer, hidden[:1], real, score) <= 1e-10
    assert layer_error(layer, hidden[:1], real, paper(SLOPES[2] * 2, seen(to_the_left, to_the_right))) > 1e-2
    assert layer_error(layer, hidden[:1], real, paper(SLOPES[4], seen(to_the_right, to_the_left))) > 1e-2
    out, weights = layer(hidden, attention_mask=REAL[:, None, None, :])
    assert out.isfinite().all() and weights[1, 2:, 9:].abs().max() == 0
    alone, _ = layer(hidden[1:, :9])
    assert (out[1:, :9] - alone).abs().max() <= 1e-12


def test_left_and_right_never_coincide_with_an_offset():
    terms = tiny_attention("alibi", position_options={"variant": "offset"}).distance_embedding(AttentionContext(9, 9))
    bias = terms.bias[0].rows
    assert all(len(row.unique()) == bias.shape[1] for row in bias)


@pytest.mark.parametrize("heads", range(1, 17))
def test_slopes_of_the_original(heads):
    _, tensors = golden("alibi")
    assert (alibi_slopes(heads) - tensors[f"slopes.{heads}"]).abs().max() <= 1e-7


CASES = [4, 12]


def biases(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and fairseq's mask: m_h·j, −inf above the diagonal; both (H, L, L)."""
    sizes, tensors = golden("alibi")
    context = AttentionContext(sizes["length"], sizes["length"])
    scheme = tiny_attention("alibi", num_attention_heads=heads).distance_embedding
    return scheme(context).bias[0].scalars(context)[0], tensors[f"mask.{heads}"]


def parity(heads: int) -> float:
    """Largest difference of the weights; m_h·j under a causal mask is −m_h·(i − j) up to a constant of the row."""
    bias, original = biases(heads)
    scores = torch.randn(bias.shape)
    ours = (scores + bias).masked_fill(original == -math.inf, -math.inf).softmax(-1)
    return (ours - (scores + original).softmax(-1)).abs().max().item()


@pytest.mark.parametrize("heads", CASES)
def test_equals_the_original_code(heads):
    assert parity(heads) <= 1e-6
    # and only there: without the mask the original would favour the end of the text
    bias, original = biases(heads)
    scores = torch.randn(bias.shape)
    assert ((scores + bias).softmax(-1) - (scores + original[:, -1:]).softmax(-1)).abs().max() > 0.1


def test_half_of_an_odd_number_of_heads():
    with raises(ValueError, "position_options['variant'] = 'asymmetric'", "num_attention_heads = 3"):
        tiny_config("alibi", position_options={"variant": "asymmetric"})
    one_sided = tiny_config("alibi", num_attention_heads=4, position_options={"variant": "asymmetric"})
    assert supported_implementations(one_sided) == ["relpos", "sdpa", "eager", "flex_attention"]
    assert supported_implementations(tiny_config("alibi")) == ["relpos", "sdpa", "eager", "flex_attention"]

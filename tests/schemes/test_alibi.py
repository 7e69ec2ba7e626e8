"""ALiBi (Press et al. 2021, §3) and its variants for encoders (issue 5 of the authors' repository).

score = q_i·k_j / √d − m_h · distance
"""

import math

import pytest
import torch
from oracles import REAL, golden, layer_error, padding, tiny_attention

from hf_relpos.attention.context import AttentionContext
from hf_relpos.schemes.alibi import alibi_slopes


TWELVE = [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
SLOPES = {2: [2**-4, 2**-8], 3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8], 12: TWELVE}


def paper(slopes, distance):
    def score(q, k, h, i, j):
        return q @ k / math.sqrt(len(q)) - slopes[h] * distance(h, j - i)

    return score


@pytest.mark.parametrize("heads", [2, 3, 12])
def test_symmetric(heads, hidden):
    layer = tiny_attention("alibi", num_attention_heads=heads)
    assert layer_error(layer, hidden, REAL, paper(SLOPES[heads], lambda h, r: abs(r))) <= 1e-10


def test_offset(hidden):
    layer = tiny_attention("alibi", position_options={"variant": "offset"})
    assert layer_error(layer, hidden, REAL, paper(SLOPES[3], lambda h, r: -r if r <= 0 else r - 0.5)) <= 1e-10


def test_asymmetric(hidden):
    """The first two of four heads see the left, the others the right; all have the slopes of two heads."""
    layer = tiny_attention("alibi", num_attention_heads=4, position_options={"variant": "asymmetric"})

    def distance(h, r):
        return abs(r) if r == 0 or (r < 0) == (h < 2) else math.inf

    # a query of padding, in a head that sees the right, has no keys: zeros here, NaN in the loop
    assert layer_error(layer, hidden[:1], padding([9], 9), paper(SLOPES[2] * 2, distance)) <= 1e-10
    out, weights = layer(hidden, attention_mask=REAL[:, None, None, :])
    assert out.isfinite().all() and weights[1, 2:, 5:].abs().max() == 0
    alone, _ = layer(hidden[1:, :5])
    assert (out[1:, :5] - alone).abs().max() <= 1e-12


@pytest.mark.parametrize("heads", range(1, 17))
def test_slopes_of_the_original(heads):
    _, tensors = golden("alibi")
    assert (alibi_slopes(heads) - tensors[f"slopes.{heads}"]).abs().max() <= 1e-7


CASES = [4, 12]


def parity(heads: int) -> float:
    """Largest difference of the weights from those of fairseq's mask, (H, L, L), −inf above the diagonal.

    Its m_h·j is −m_h·(i − j) up to a constant of the row.
    """
    sizes, tensors = golden("alibi")
    original, context = tensors[f"mask.{heads}"], AttentionContext(sizes["length"], sizes["length"])
    scheme = tiny_attention("alibi", num_attention_heads=heads).distance_embedding
    bias = scheme(context).bias[0].scalars(context)[0]
    scores = torch.randn(bias.shape)
    ours = (scores + bias).masked_fill(original == -math.inf, -math.inf).softmax(-1)
    return (ours - (scores + original).softmax(-1)).abs().max().item()


@pytest.mark.parametrize("heads", CASES)
def test_equals_the_original_code(heads):
    assert parity(heads) <= 1e-6

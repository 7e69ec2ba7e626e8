"""ALiBi (Press et al. 2021, §3) and its variants for encoders (issue 5 of the authors' repository).

score = q_i·k_j / √d − m_h · distance
"""

import math

import pytest
import torch
from oracles import REAL, golden, layer_error, tiny_attention

from hf_relpos.attention.context import AttentionContext
from hf_relpos.schemes.alibi import alibi_slopes


TWELVE = [2.0**-h for h in range(1, 9)] + [2.0 ** (-h / 2) for h in (1, 3, 5, 7)]
SLOPES = {2: [2**-4, 2**-8], 3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8], 12: TWELVE}


def paper(slopes, distance):
    def score(q, k, h, i, j):
        return q @ k / math.sqrt(len(q)) - slopes[h] * distance(h, j - i)

    return score


@pytest.mark.parametrize(
    "variant, heads, slopes, distance",
    [
        *(("symmetric", heads, SLOPES[heads], lambda h, r: abs(r)) for heads in (2, 3, 12)),
        ("offset", 3, SLOPES[3], lambda h, r: -r if r <= 0 else r - 0.5),
        # the first two of four heads see the left, the others the right; all have the slopes of two heads
        ("asymmetric", 4, SLOPES[2] * 2, lambda h, r: abs(r) if r == 0 or (r < 0) == (h < 2) else math.inf),
    ],
)
def test_equals_the_paper(variant, heads, slopes, distance, hidden):
    layer = tiny_attention("alibi", num_attention_heads=heads, position_options={"variant": variant})
    assert layer_error(layer, hidden, REAL, paper(slopes, distance)) <= 1e-10


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

"""`relative_key` and `relative_key_query`, as they were in Transformers ≤ 4.57.

relative_key:        score = (q_i·k_j + q_i·e) / √d,           e = E[i − j + P − 1]
relative_key_query:  score = (q_i·k_j + q_i·e + k_j·e) / √d
"""

import math
from pathlib import Path

import pytest
import torch
from oracles import array, layer_error, padding, tiny_attention
from safetensors.torch import load_file

from hf_relpos import RelPosBertModel


KINDS = ["relative_key", "relative_key_query"]
P = 16


def paper(layer, kind, clip=P - 1):
    """The old score; `clip` limits the distance."""
    E = array(layer.distance_embedding.weight)

    def score(q, k, h, i, j):
        e = E[max(-clip, min(clip, i - j)) + P - 1]
        return (q @ k + q @ e + (k @ e if kind == "relative_key_query" else 0.0)) / math.sqrt(8)

    return score


@pytest.mark.parametrize("clip", [None, 4])
@pytest.mark.parametrize("length", [11, P, P + 7])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_paper(kind, length, clip):
    """Short inputs, one that reaches both ends of the table, and a longer one, whose distances are clipped."""
    layer = tiny_attention(kind, position_options={"clip": clip})
    hidden, real = torch.randn(2, length, 24, dtype=torch.float64), padding([length, 6], length)
    assert layer_error(layer, hidden, real, paper(layer, kind, clip or P - 1)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_past_the_range_there_is_no_term(kind):
    """With `zero`: as with a table whose rows past `clip` are zeros."""
    layer = tiny_attention(kind, position_options={"clip": 4, "out_of_range": "zero"})
    whole = tiny_attention(kind)
    whole.load_state_dict(layer.state_dict())
    distances = torch.arange(1 - P, P).abs()
    whole.distance_embedding.weight[distances > 4] = 0
    hidden = torch.randn(1, P, 24, dtype=torch.float64)
    assert (layer(hidden)[0] - whole(hidden)[0]).abs().max() <= 1e-12


CASES = KINDS


@torch.no_grad()
def parity(kind: str) -> float:
    """Largest difference from the BERT of Transformers 4.57.6, which wrote the checkpoint."""
    folder = Path(__file__).parents[1] / "fixtures" / "legacy" / kind / "BertModel"
    stored = load_file(folder / "io.safetensors")
    inputs = {name.removeprefix("input."): tensor for name, tensor in stored.items() if name.startswith("input.")}
    out = RelPosBertModel.from_pretrained(folder)(**inputs)
    errors = (out[name] - stored[f"output.{name}"] for name in ("last_hidden_state", "pooler_output"))
    return max(error.abs().max().item() for error in errors)

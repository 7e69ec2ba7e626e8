"""`relative_key` and `relative_key_query`, as they were in Transformers ≤ 4.57.

relative_key:        score = (q_i·k_j + q_i·e) / √d,           e = E[i − j + P − 1]
relative_key_query:  score = (q_i·k_j + q_i·e + k_j·e) / √d
"""

import math
from pathlib import Path

import pytest
import torch
from errors import raises
from oracles import array, layer_error, padding, tiny_attention
from safetensors.torch import load_file

from hf_relpos import SCHEMES, RelPosBertModel


KINDS = ["relative_key", "relative_key_query"]
P = 16


def paper(layer, kind, clip=None, flipped=False):
    """The old score; `clip` limits the distance, `flipped` reads the table from its other end."""
    E = array(layer.distance_embedding.weight)

    def score(q, k, h, i, j):
        distance = j - i if flipped else i - j
        limit = P - 1 if clip is None else clip
        e = E[max(-limit, min(limit, distance)) + P - 1]
        return (q @ k + q @ e + (k @ e if kind == "relative_key_query" else 0.0)) / math.sqrt(8)

    return score


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_paper(kind):
    layer = tiny_attention(kind)
    assert [tuple(p.shape) for p in layer.distance_embedding.parameters()] == [(2 * P - 1, 8)]
    hidden, real = torch.randn(2, 11, 24, dtype=torch.float64), padding([11, 6], 11)
    assert layer_error(layer, hidden, real, paper(layer, kind)) <= 1e-10
    # the comparison must see a table read from its other end, and one kind taken for the other
    assert layer_error(layer, hidden, real, paper(layer, kind, flipped=True)) > 1e-2
    assert layer_error(layer, hidden, real, paper(layer, KINDS[1 - KINDS.index(kind)])) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_full_length_reaches_both_ends_of_the_table(kind):
    layer = tiny_attention(kind)
    hidden, real = torch.randn(1, P, 24, dtype=torch.float64), padding([P], P)
    assert layer_error(layer, hidden, real, paper(layer, kind)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_clip(kind):
    layer = tiny_attention(kind, position_options={"clip": 4})
    assert tuple(layer.distance_embedding.weight.shape) == (2 * P - 1, 8)
    hidden, real = torch.randn(1, 10, 24, dtype=torch.float64), padding([10], 10)
    assert layer_error(layer, hidden, real, paper(layer, kind, clip=4)) <= 1e-10
    assert layer_error(layer, hidden, real, paper(layer, kind)) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 4])
def test_longer_than_the_table_clips(kind, clip):
    layer = tiny_attention(kind, position_options={"clip": clip})
    hidden, real = torch.randn(1, P + 7, 24, dtype=torch.float64), padding([P + 7], P + 7)
    assert layer_error(layer, hidden, real, paper(layer, kind, clip=clip)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0, -1, True, 2.0, "4"])
def test_clip_is_a_positive_integer(kind, clip):
    with raises(ValueError, "clip"):
        tiny_attention(kind, position_options={"clip": clip})


@pytest.mark.parametrize("kind", KINDS)
def test_clip_stays_on_the_table(kind):
    tiny_attention(kind, position_options={"clip": P - 1})
    with raises(ValueError, "position_options['clip'] = 16", 15):
        tiny_attention(kind, position_options={"clip": P})


def test_names_of_the_old_checkpoints():
    for kind in KINDS:
        names = [name for name, _ in tiny_attention(kind).named_parameters() if "distance" in name]
        assert names == ["distance_embedding.weight"]
        assert SCHEMES[kind].relative


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


@pytest.mark.parametrize("kind", CASES)
def test_equals_the_original_code(kind):
    assert parity(kind) <= 1e-5

"""NEZHA (Wei et al. 2019): Shaw's two terms with one fixed table, the interleaved sinusoid of clip(j − i, ±K) + K.

e_ij = q_i·(k_j + T_r) / √d,   z_i = Σ_j α_ij (v_j + T_r)
"""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import golden, layer_error, padding, sine_cosine, tiny_attention, tiny_model

from hf_relpos import AttentionContext, RelPosBertLMHeadModel, RelPosBertModel


REAL = padding([9, 5], 9)


def interleaved(position):
    return sine_cosine(position, 8).reshape(2, 4).T.reshape(8)


def paper(clip, sign=1, shift=True, sinusoid=interleaved, values=True):
    """Score and value; every argument after the first makes a mistake that the comparison must see."""

    def row(i, j):
        r = max(-clip, min(clip, sign * (j - i)))
        return sinusoid(r + clip if shift else r)

    def score(q, k, h, i, j):
        return q @ (k + row(i, j)) / math.sqrt(8)

    def value(v, h, i, j):
        return v + row(i, j) if values else v

    return score, value


@pytest.mark.parametrize("clip", [1, 3, 64])
def test_equals_the_paper(clip, hidden):
    layer = tiny_attention("nezha", position_options={"max_relative_position": clip})
    assert layer_error(layer, hidden, REAL, *paper(clip)) <= 1e-10


MISTAKES = {
    "i - j": {"sign": -1},
    "sinusoid of r": {"shift": False},
    "sin | cos layout": {"sinusoid": lambda position: sine_cosine(position, 8)},
    "no value term": {"values": False},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees(mistake, hidden):
    layer = tiny_attention("nezha", position_options={"max_relative_position": 3})
    assert layer_error(layer, hidden, REAL, *paper(3, **MISTAKES[mistake])) > 1e-2


def test_default_reach_and_an_input_longer_than_it():
    layer = tiny_attention("nezha")
    hidden = torch.randn(1, 70, 24, dtype=torch.float64)
    assert layer_error(layer, hidden, padding([70], 70), *paper(64)) <= 1e-10


def test_nothing_is_stored():
    layer = tiny_attention("nezha")
    assert not layer.distance_embedding.state_dict() and not list(layer.distance_embedding.buffers())


CASES = list(golden("nezha")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original."""
    sizes, tensors = golden("nezha")
    layer = tiny_attention("nezha", dtype=torch.float32, position_options=sizes["cases"][case])
    layer.load_state_dict({name: tensors[name] for name in layer.state_dict()}, strict=True)
    hidden = tensors["hidden_states"]
    out, weights = layer(hidden, attention_mask=padding(sizes["real"], hidden.shape[1])[:, None, None])
    errors = out - tensors[f"{case}.out"], weights - tensors[f"{case}.weights"]
    return max(error.abs().max().item() for error in errors)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 2e-6


@torch.no_grad()
def test_longer_than_max_position_embeddings():
    """The original takes its buffer from that number and fails."""
    model = tiny_model(RelPosBertModel, "nezha", max_position_embeddings=8)
    assert model(torch.randint(1, 50, (1, 20))).last_hidden_state.isfinite().all()


@torch.no_grad()
def test_decodes_with_a_cache():
    """The original fails at the second token."""
    model = tiny_model(RelPosBertLMHeadModel, "nezha", is_decoder=True, position_options={"max_relative_position": 3})
    ids, cache, parts = torch.randint(1, 50, (2, 8)), None, []
    for chunk in ids.split([3, 1, 4], dim=1):
        step = model(chunk, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        parts.append(step.logits)
    assert (torch.cat(parts, dim=1) - model(ids, use_cache=False).logits).abs().max() <= 1e-5


def test_heads_of_odd_size_are_refused():
    with raises(ValueError, "hidden_size", "num_attention_heads"):
        tiny_attention("nezha", hidden_size=9, num_attention_heads=3)


@pytest.mark.parametrize("max_distance", [0, -1, None, True, 2.5])
def test_reach_is_a_positive_integer(max_distance):
    with raises(ValueError, "position_options['max_relative_position']"):
        tiny_attention("nezha", position_options={"max_relative_position": max_distance})


def test_tables_of_a_call_are_small():
    """One row per distance, however long the input: the original keeps (512, 512, d) in every layer."""
    layer = tiny_attention("nezha", position_options={"max_relative_position": 4})
    (table,) = layer.distance_embedding(AttentionContext(300, 300)).query_table
    assert tuple(table.rows.shape) == (1, 9, 8)
    assert np.allclose(table.rows[0, 2], interleaved(2), atol=1e-6)

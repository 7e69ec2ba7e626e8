"""XLNet (Yang et al. 2019, §2.4-2.5), bidirectional.

score = [q_i·k_j + q_i·W R_{i−j} + u·k_j + v·W R_{i−j} + (q_i + w)·g_ij] / √d,    g_ij = g_0 in one segment, else g_1
"""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import array, golden, layer_error, padding, sine_cosine, tiny_attention, tiny_model

from hf_relpos import AttentionContext, RelPosBertModel


REAL = padding([9, 6], 9)
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0, 0]])


def paper(layer, types=TYPES, clamp=None, sign=1, same=0, drop="", width=24):
    """The paper's score; the last four arguments make the mistakes that the comparison must see.

    Args:
        types: (1, L) or None: no segments.
        clamp: largest distance with an embedding of its own.
        sign: −1 counts j − i.
        same: row of `seg_embed` for one segment (Funnel has them the other way round).
        drop: any of "u", "v", "w", left out.
        width: of the sinusoid, repeated to fill D.
    """
    scheme = layer.distance_embedding
    W = array(scheme.r)
    u, v = array(scheme.r_w_bias) * ("u" not in drop), array(scheme.r_r_bias) * ("v" not in drop)

    def score(q, k, h, i, j):
        distance = sign * (i - j)
        if clamp is not None:
            distance = max(-clamp, min(clamp, distance))
        relation = np.tile(sine_cosine(distance, width), 24 // width) @ W[:, h]
        total = (q + u[h]) @ k + (q + v[h]) @ relation
        if types is not None:
            w = array(scheme.r_s_bias) * ("w" not in drop)
            segment = array(scheme.seg_embed)[same if types[0, i] == types[0, j] else 1 - same, h]
            total += (q + w[h]) @ segment
        return total / math.sqrt(8)

    return score


@pytest.fixture
def layer():
    return tiny_attention("xlnet")


def segmented(length=9, types=TYPES):
    return AttentionContext(length, length, token_type_ids=types)


def test_equals_the_paper(layer, hidden):
    assert layer_error(layer, hidden, REAL, paper(layer), context=segmented()) <= 1e-10


MISTAKES = {
    "no segments": {"types": None},
    "rows of seg_embed exchanged": {"same": 1},
    "j - i": {"sign": -1},
    "sinusoid of size d": {"width": 8},
    "no u": {"drop": "u"},
    "no v": {"drop": "v"},
    "no w": {"drop": "w"},
    "clamped": {"clamp": 3},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees(mistake, layer, hidden):
    assert layer_error(layer, hidden, REAL, paper(layer, **MISTAKES[mistake]), context=segmented()) > 1e-2


def test_without_token_types_all_is_one_segment(layer, hidden):
    assert layer_error(layer, hidden, REAL, paper(layer, types=None)) <= 1e-10
    one = torch.ones_like(TYPES)
    assert layer_error(layer, hidden, REAL, paper(layer, types=None), context=segmented(types=one)) <= 1e-10


def test_without_segments(hidden):
    layer = tiny_attention("xlnet", position_options={"segments": False})
    shapes = {name: tuple(p.shape) for name, p in layer.distance_embedding.named_parameters()}
    assert shapes == {"r": (24, 3, 8), "r_w_bias": (3, 8), "r_r_bias": (3, 8)}
    assert layer_error(layer, hidden, REAL, paper(layer, types=None), context=segmented()) <= 1e-10


def test_names_and_shapes_of_the_checkpoints(layer):
    shapes = {name: tuple(p.shape) for name, p in layer.distance_embedding.named_parameters()}
    biases = {name: (3, 8) for name in ("r_w_bias", "r_r_bias", "r_s_bias")}
    assert shapes == {"r": (24, 3, 8), "seg_embed": (2, 3, 8), **biases}


@pytest.mark.parametrize(
    "options, clamp",
    [({"clamp_len": 4}, 4), ({"out_of_range": "clip"}, 15), ({}, None)],
    ids=["clamp_len", "clip", "none"],
)
def test_past_the_trained_range(options, clamp):
    layer = tiny_attention("xlnet", position_options=options)
    hidden, types = torch.randn(1, 20, 24, dtype=torch.float64), torch.arange(20)[None] // 12
    expected = paper(layer, types, clamp=clamp)
    assert layer_error(layer, hidden, padding([18], 20), expected, context=segmented(20, types)) <= 1e-10


@pytest.mark.parametrize("clamp", [0, True, 2.5])
def test_clamp_len_is_a_positive_integer(clamp):
    with raises(ValueError, "position_options['clamp_len']"):
        tiny_attention("xlnet", position_options={"clamp_len": clamp})


@pytest.mark.parametrize("static", [False, True])
def test_cached_keys_are_in_the_segment_of_every_query(static, layer):
    """Only the types of the two new tokens are known, places 3 and 4; a static cache has room for a sixth."""
    types = torch.tensor([[0, 1]])
    start, keys = (torch.tensor([3]), 6) if static else (3, 5)
    relation = layer.distance_embedding.different(AttentionContext(2, keys, start, token_type_ids=types))
    expected = torch.tensor([[[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]]])
    assert relation.tolist() == expected[..., :keys].tolist()


@torch.no_grad()
def test_token_types_reach_the_layers():
    model = tiny_model(RelPosBertModel, "xlnet")
    model.embeddings.token_type_embeddings.weight[1] = model.embeddings.token_type_embeddings.weight[0]
    tokens, types = torch.randint(50, (2, 9)), TYPES.expand(2, -1)
    plain = model(tokens).last_hidden_state
    assert (model(tokens, token_type_ids=types).last_hidden_state - plain).abs().max() > 1e-3
    assert (model(tokens, token_type_ids=types * 0 + 1).last_hidden_state - plain).abs().max() < 1e-5


CASES = list(golden("xlnet")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original.

    It has its memory before the queries: run all of it and drop what the memory's queries give.
    """
    sizes, tensors = golden("xlnet")
    clamp, memory = sizes["cases"][case]["clamp_len"], sizes["cases"][case]["mlen"]
    layer = tiny_attention("xlnet", position_options={"clamp_len": clamp if clamp > 0 else None})
    for name, linear in {"q": layer.query, "k": layer.key, "v": layer.value}.items():
        linear.weight.copy_(tensors[name].flatten(1).T)
        linear.bias.zero_()
    names = [name for name, _ in layer.distance_embedding.named_parameters()]
    layer.distance_embedding.load_state_dict({name: tensors[name] for name in names}, strict=True)
    found = {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(case)}
    length = found["hidden_states"].shape[1]
    out, weights = layer(
        found["hidden_states"],
        attention_mask=found["real"][:, None, None, :],
        context=segmented(length, found["token_type_ids"]),
    )
    errors = out[:, memory:] - found["context"], weights[:, :, memory:] - found["attn_prob"]
    return max(error.abs().max().item() for error in errors)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 5e-7

"""Rotary positions (Su et al. 2021, eq. 15 and 34).

score = (R_i q_i)·(R_j k_j) / √d,    R_p turns the plane n by p·base^(−2n/w)
"""

import math

import numpy as np
import pytest
import torch
from oracles import golden, layer_error, padding, tiny_attention
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_relpos.attention.context import AttentionContext, Positions


def rotation(position, d, pairing="adjacent", base=10000.0, w=None):
    """R_p as a (d, d) matrix; `w` components are rotated, all if not given."""
    w = d if w is None else w
    R = np.eye(d)
    for n in range(w // 2):
        a, b = (2 * n, 2 * n + 1) if pairing == "adjacent" else (n, n + w // 2)
        angle = position * base ** (-2 * n / w)
        R[a, a] = R[b, b] = math.cos(angle)
        R[a, b], R[b, a] = -math.sin(angle), math.sin(angle)
    return R


def paper(place=lambda p: p, **how):
    """The score; `place` maps the index of a token to its position."""

    def score(q, k, h, i, j):
        d = len(q)
        return (rotation(place(i), d, **how) @ q) @ (rotation(place(j), d, **how) @ k) / math.sqrt(d)

    return score


LENGTH = 12
REAL = padding([LENGTH, 7], LENGTH)


@pytest.fixture
def hidden():
    return 3 * torch.randn(2, LENGTH, 24, dtype=torch.float64)


VARIANTS = {
    "adjacent": ({}, {}),
    "half": ({"pairing": "half"}, {"pairing": "half"}),
    "base": ({"base": 50}, {"base": 50}),
    "partial": ({"rotary_fraction": 0.5}, {"w": 4}),
    "partial half": ({"rotary_fraction": 0.5, "pairing": "half"}, {"w": 4, "pairing": "half"}),
    "one plane": ({"rotary_fraction": 0.25}, {"w": 2}),
    "linear": ({"scaling": "linear", "factor": 4.0}, {"place": lambda p: p / 4}),
    "ntk": ({"scaling": "ntk", "factor": 4}, {"base": 10000 * 4 ** (8 / 6)}),
    "ntk, one plane": ({"scaling": "ntk", "factor": 4, "rotary_fraction": 0.25}, {"w": 2}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_equals_the_paper(case, hidden):
    options, how = VARIANTS[case]
    layer = tiny_attention("rope", position_options=options)
    assert layer_error(layer, hidden, REAL, paper(**how)) <= 1e-10


def test_scores_depend_on_the_offset_only():
    layer = tiny_attention("rope")
    hidden = torch.randn(1, 9, 24, dtype=torch.float64)
    positions = torch.arange(9)[None] + 1000
    out, _ = layer(hidden)
    shifted, _ = layer(hidden, context=AttentionContext(9, 9, positions=Positions(positions, 8)))
    assert (out - shifted).abs().max() <= 1e-10


def test_positions_of_each_row(hidden):
    layer = tiny_attention("rope")
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) * 2 + 5])
    out, _ = layer(hidden, context=AttentionContext(LENGTH, LENGTH, positions=Positions(positions, 22)))
    for row in range(2):
        alone = AttentionContext(LENGTH, LENGTH, positions=Positions(positions[row : row + 1], 22))
        assert (layer(hidden[row : row + 1], context=alone)[0] - out[row]).abs().max() <= 1e-12
    assert (layer(hidden)[0] - out)[1].abs().max() > 1e-2


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@torch.no_grad()
def test_one_pairing_becomes_the_other_by_permuting_rows(fraction, hidden):
    """The rows of W_q and W_k of each head, [0, 2, 4, …, 1, 3, 5, …] of those that are rotated."""
    adjacent = tiny_attention("rope", position_options={"rotary_fraction": fraction})
    half = tiny_attention("rope", position_options={"pairing": "half", "rotary_fraction": fraction})
    half.load_state_dict(adjacent.state_dict())
    out, _ = adjacent(hidden)
    assert (half(hidden)[0] - out).abs().max() > 1e-2  # a mismatch is silent
    w = int(8 * fraction)
    order = [*range(0, w, 2), *range(1, w, 2), *range(w, 8)]
    rows = torch.tensor([8 * head + row for head in range(3) for row in order])
    for linear in (half.query, half.key):
        linear.weight.copy_(linear.weight[rows])
        linear.bias.copy_(linear.bias[rows])
    assert (half(hidden)[0] - out).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.002)])
def test_far_positions_in_half_precision(dtype, tolerance):
    """bfloat16 has no whole numbers between 2048 and 2064: angles in it would be off by radians."""
    scheme = tiny_attention("rope").distance_embedding
    vectors, positions = torch.randn(1, 3, 4, 8, dtype=torch.float64), torch.tensor([2049, 2055, 4095, 30001])
    turned = scheme.rotate(vectors.to(dtype), positions)
    assert turned.dtype == dtype
    exact = torch.stack(
        [vectors[0, :, n] @ torch.from_numpy(rotation(int(p), 8)).T for n, p in enumerate(positions)], dim=1
    )
    assert (turned.double() - exact).abs().max() <= tolerance * vectors.abs().max()


@torch.no_grad()
def roformer_error() -> float:
    """Largest difference from RoFormer."""
    sizes, tensors = golden("rope")
    layer = tiny_attention("rope", dtype=torch.float32, hidden_size=32, num_attention_heads=4)
    for name in ("query", "key", "value"):
        for part in ("weight", "bias"):
            getattr(getattr(layer, name), part).copy_(tensors[f"roformer.{name}.{part}"])
    hidden = tensors["hidden_states"]
    mask = padding([hidden.shape[1], sizes["length"]], hidden.shape[1])[:, None, None, :]
    return (layer(hidden, attention_mask=mask)[0] - tensors["roformer.out"]).abs().max().item()


CASES = ["roformer", *golden("rope")[0]["cases"]]


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from RoFormer, or from GPT-NeoX."""
    if case == "roformer":
        return roformer_error()
    sizes, tensors = golden("rope")
    layer = tiny_attention(
        "rope",
        dtype=torch.float32,
        hidden_size=32,
        num_attention_heads=4,
        position_options={"pairing": "half", **sizes["cases"][case]},
    )
    for part in ("weight", "bias"):
        fused = tensors[f"neox.query_key_value.{part}"].unflatten(0, (4, 3, 8))  # head, q k v, d
        for n, linear in enumerate((layer.query, layer.key, layer.value)):
            getattr(linear, part).copy_(fused[:, n].flatten(0, 1))
    hidden, positions = tensors["hidden_states"], tensors[f"{case}.positions"]
    mask = padding([hidden.shape[1], sizes["length"]], hidden.shape[1])[:, None, None, :]
    context = AttentionContext(20, 20, positions=Positions(positions, 57))
    return (layer(hidden, attention_mask=mask, context=context)[0] - tensors[f"{case}.out"]).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_equals_the_original_code(case):
    assert parity(case) <= 1e-6


@pytest.mark.parametrize("base, trained, factor", [(10000.0, 512, 4.0), (160000.0, 2048, 8.0), (10000.0, 64, 2.0)])
@pytest.mark.parametrize("kind", ["yarn", "proportional"])
def test_frequencies_are_those_of_transformers(kind, base, trained, factor):
    """YaRN, and p-RoPE with a quarter of the planes (`modeling_rope_utils`, in float32)."""
    stock = {
        "yarn": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    ours = {"yarn": {"scaling": "yarn", "factor": factor, "trained": trained}, "proportional": {"turned": 0.25}}
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "max_position_embeddings": trained}
    config = LlamaConfig(**sizes, rope_parameters={"rope_theta": base, **stock[kind]})
    frequencies, size = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    options = {"pairing": "half", "base": base, **ours[kind]}
    scheme = tiny_attention("rope", position_options=options, **sizes).distance_embedding
    vector = torch.zeros(1, 3, 1, 64, dtype=torch.float64)
    vector[..., :32] = 1
    x, y = scheme.rotate(vector, torch.ones(1))[0, 0, 0].chunk(2)
    assert torch.allclose(torch.atan2(y, x), frequencies.double(), rtol=0, atol=1e-6)
    assert torch.allclose(x.hypot(y), torch.full((32,), size, dtype=torch.float64))

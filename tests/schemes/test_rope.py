"""Rotary positions (Su et al. 2021, eq. 15 and 34).

score = (R_i q_i)·(R_j k_j) / √d,    R_p turns the plane n by p·base^(−2n/w)
"""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import REAL, golden, layer_error, load_projections, padding, tiny_attention, tiny_config, tiny_model
from transformers import LlamaConfig, ModernBertConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.modernbert import modeling_modernbert as modernbert
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from hf_relpos import RelPosBertModel
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


VARIANTS = {
    "adjacent": ({}, {}),
    "half": ({"pairing": "half"}, {"pairing": "half"}),
    "base": ({"rope_parameters": {"rope_theta": 50}}, {"base": 50}),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {"w": 4}),
    "both": ({"rope_parameters": {"partial_rotary_factor": 0.5}, "pairing": "half"}, {"w": 4, "pairing": "half"}),
    "one plane": ({"rope_parameters": {"partial_rotary_factor": 0.25}}, {"w": 2}),
    "linear": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, {"place": lambda p: p / 4}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_equals_the_paper(case, hidden):
    options, how = VARIANTS[case]
    assert layer_error(tiny_attention("rope", position_options=options), hidden, REAL, paper(**how)) <= 1e-10


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.002)])
def test_far_positions_in_half_precision(dtype, tolerance):
    """bfloat16 has no whole numbers between 2048 and 2064: angles in it would be off by radians."""
    scheme = tiny_attention("rope").distance_embedding
    vectors, positions = torch.randn(1, 3, 4, 8, dtype=torch.float64), torch.tensor([2049, 2055, 4095, 30001])
    turned = scheme.rotate(vectors.to(dtype), positions)
    assert turned.dtype == dtype
    exact = [vectors[0, :, n] @ torch.from_numpy(rotation(int(p), 8)).T for n, p in enumerate(positions)]
    assert (turned.double() - torch.stack(exact, dim=1)).abs().max() <= tolerance * vectors.abs().max()


CASES = ["roformer", *golden("rope")[0]["cases"]]


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from RoFormer, or from GPT-NeoX."""
    (sizes, tensors), options, context, parts = golden("rope"), {}, None, ("weight", "bias")
    if case == "roformer":
        weights = ([tensors[f"roformer.{name}.{part}"] for name in ("query", "key", "value")] for part in parts)
    else:
        options = {"pairing": "half", "rope_parameters": sizes["cases"][case]}
        context = AttentionContext(20, 20, positions=Positions(tensors[f"{case}.positions"], 57))
        fused = (tensors[f"neox.query_key_value.{part}"].unflatten(0, (4, 3, 8)) for part in parts)
        weights = (part.transpose(0, 1).flatten(1, 2) for part in fused)  # from head, q k v, d
    fields = {"hidden_size": 32, "num_attention_heads": 4, "position_options": options}
    layer, hidden = tiny_attention("rope", dtype=torch.float32, **fields), tensors["hidden_states"]
    load_projections(layer, *weights)
    mask = padding([hidden.shape[1], sizes["length"]], hidden.shape[1])[:, None, None, :]
    return (layer(hidden, attention_mask=mask, context=context)[0] - tensors[f"{case}.out"]).abs().max().item()


# D, H and d of models of Transformers; `max_position_embeddings` is what `dynamic` was trained on
SIZES = {"hidden_size": 192, "num_attention_heads": 3, "max_position_embeddings": 64}
LONGER = {"factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0] * 32, "long_factor": [1.0 + n for n in range(32)]}
WHOLE_YARN = {"attention_factor": 0.7, "beta_fast": 8, "beta_slow": 2, "truncate": False, "rope_theta": 500.0}
BY_TRANSFORMERS = {
    "yarn": {"rope_type": "yarn", **LONGER},
    "yarn, all of it": {**LONGER, "rope_type": "yarn", **WHOLE_YARN},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONGER},
    "longrope": {**LONGER, "rope_type": "longrope", **FACTORS},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def rotated(scheme, vectors, length):
    """Queries (B, H, L, d) in a batch with rows of that length."""
    context = AttentionContext(length, length, dtype=vectors.dtype)
    return scheme(context).rotate(vectors, torch.arange(vectors.shape[2]))


@pytest.mark.parametrize("length", [40, 90])
@pytest.mark.parametrize("case", BY_TRANSFORMERS)
def test_other_types_are_those_of_llama(case, length):
    """Its own rotary embedding and rotation; its angles are float32, and multiplied by positions in float64 here.

    `dynamic` has angles in float64.
    """
    parameters = {"rope_theta": 10000.0, **BY_TRANSFORMERS[case]}
    llama = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=parameters))
    vectors, positions = torch.randn(1, 3, length, 64, dtype=torch.float64), torch.arange(length)[None]
    llama(vectors, positions)  # takes the angles for this length
    angles = (positions[..., None].double() * llama.inv_freq.double()).repeat(1, 1, 2)
    cosine, sine = (llama.attention_scaling * each for each in (angles.cos(), angles.sin()))
    expected, _ = apply_rotary_pos_emb(vectors, vectors, cosine, sine)
    options = {"pairing": "half", "rope_parameters": BY_TRANSFORMERS[case]}
    scheme = tiny_attention("rope", position_options=options, **SIZES).distance_embedding
    assert (rotated(scheme, vectors, length) - expected).abs().max() <= (1e-5 if case == "dynamic" else 1e-12)


@torch.no_grad()
def test_layers_have_the_angles_of_their_kind():
    """Those of ModernBERT's local and global layers; and a model computes each layer with its own."""
    kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 160000.0, "factor": 4.0},
    }
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes = {**SIZES, "num_hidden_layers": 3}
    stock = ModernBertRotaryEmbedding(ModernBertConfig(**sizes, layer_types=layers, rope_parameters=kinds))
    options = {"pairing": "half", "rope_parameters": kinds, "layer_types": layers}
    model = tiny_model(RelPosBertModel, "rope", position_options=options, **sizes).double()
    vectors, positions = torch.randn(1, 3, 40, 64, dtype=torch.float64), torch.arange(40)[None]
    for layer, kind in zip(model.encoder.layer, layers, strict=True):
        expected, _ = modernbert.apply_rotary_pos_emb(vectors, vectors, *stock(vectors, positions, kind))
        found = rotated(layer.attention.self.distance_embedding, vectors, 40)
        assert (found - expected).abs().max() <= 1e-5  # which computes in float32
    states = model(torch.randint(1, 50, (2, 40)), output_hidden_states=True).hidden_states
    for layer, kind, before, after in zip(model.encoder.layer, layers, states, states[1:], strict=False):
        options = {"pairing": "half", "rope_parameters": kinds[kind]}
        alone = tiny_attention("rope", position_options=options, **SIZES)
        layer.attention.self.distance_embedding = alone.distance_embedding
        assert (layer(before) - after).abs().max() <= 1e-12


@torch.no_grad()
def test_one_graph_holds_every_type_and_every_length():
    for case, parameters in BY_TRANSFORMERS.items():
        if case == "longrope":
            parameters = {**parameters, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        options = {"rope_parameters": {"a": {}, "b": parameters}, "layer_types": ["a", "b"]}
        model = tiny_model(RelPosBertModel, "rope", position_options=options)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (12, 70):
            ids = torch.randint(1, 50, (2, length))
            assert (compiled(ids)[0] - model(ids)[0]).abs().max() <= 1e-6


TOO_FEW = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0]}
REFUSED = {
    "rope_teta": ({"rope_teta": 500.0}, "did you mean 'rope_theta'"),
    "a base of 0": ({"rope_theta": 0}, "= 0 is not accepted"),
    "a base past float32": ({"rope_theta": 1e25}, "= 1e+25 is not accepted"),
    "another type": ({"rope_type": "axial"}, "'axial' is not accepted", "default, linear, dynamic, yarn, longrope"),
    "dicts without names": ({"full": {"rope_theta": 1.0}}, "['full'] = {'rope_theta': 1.0}", "or layer_types"),
    "three components": ({"partial_rotary_factor": 0.4}, "rotates 3 of the 8"),
    "no components": ({"partial_rotary_factor": 0.1}, "rotates 0 of the 8"),
    "too many": ({"partial_rotary_factor": 1.5}, "rotates 12 of the 8"),
    "one plane": ({"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25}, "2 of the 8", "at least 4"),
    "no factor": ({"rope_type": "yarn"}, "'yarn' needs factor"),
    "too few factors": (TOO_FEW, "'longrope' needs long_factor for 4 planes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_are_refused(case):
    parameters, *words = REFUSED[case]
    with raises(ValueError, "position_options['rope_parameters']", *words):
        tiny_config("rope", position_options={"rope_parameters": parameters})


def test_names_of_layers_that_are_refused():
    for parameters, names, *words in (
        ({"full": {}}, ["full"], "num_hidden_layers = 2"),
        ({"full": {}}, ["full", "local"], "each an entry of rope_parameters, which has 'full'"),
        ({"full": 500.0}, ["full", "full"], "['full'] = 500.0", "give a dict"),
        ({"full": {"rope_theta": -1}}, ["full", "full"], "['full']['rope_theta'] = -1"),
    ):
        with raises(ValueError, "position_options[", *words):
            tiny_config("rope", position_options={"rope_parameters": parameters, "layer_types": names})

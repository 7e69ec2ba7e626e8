"""Sinusoids at the input (Vaswani et al. 2017, §3.5).

PE(p, 2n) = sin(p / 10000^(2n/D)),   PE(p, 2n + 1) = cos(p / 10000^(2n/D))
"""

import math

import numpy as np
import pytest
import torch
from oracles import array, golden, tiny_config, tiny_model

from hf_relpos import RelPosBertModel


LAYOUTS = ["interleaved", "concat", "t2t"]


def paper(position, width, layout):
    sines, cosines = [], []
    for n in range(width // 2):
        step = n / (width / 2 - 1) if layout == "t2t" else 2 * n / width
        sines.append(math.sin(position / 10000**step))
        cosines.append(math.cos(position / 10000**step))
    if layout == "interleaved":
        return np.array([number for pair in zip(sines, cosines, strict=True) for number in pair])
    return np.array(sines + cosines)


def vectors(positions, dtype=torch.float64, width=24, **options):
    """What is added to the word embeddings at these positions, (P, D)."""
    module = RelPosBertModel(tiny_config("sinusoidal", position_options=options, hidden_size=width)).embeddings
    content = torch.zeros(1, len(positions), width, dtype=dtype)
    return module.position_embeddings(positions[None], content, None)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_paper(layout):
    positions = torch.tensor([0, 1, 2, 3, 17, 511, 10000])
    got = array(vectors(positions, layout=layout))
    assert np.abs(got - np.stack([paper(int(p), 24, layout) for p in positions])).max() <= 1e-10
    amplified = array(vectors(positions, layout=layout, amplitude=0.25))
    assert np.abs(amplified - got / 4).max() <= 1e-12


def test_default_layout_is_the_paper_s():
    positions = torch.arange(9)
    assert torch.equal(vectors(positions), vectors(positions, layout="interleaved"))


def test_input_is_layernorm_of_word_type_and_sinusoid():
    embeddings = tiny_model(RelPosBertModel, "sinusoidal").double().embeddings
    assert not list(embeddings.position_embeddings.parameters()) and not list(embeddings.position_embeddings.buffers())
    ids, types = torch.randint(1, 50, (2, 7)), torch.randint(0, 2, (2, 7))
    got = array(embeddings(input_ids=ids, token_type_ids=types))
    word, kind = array(embeddings.word_embeddings.weight), array(embeddings.token_type_embeddings.weight)
    gain, bias = array(embeddings.LayerNorm.weight), array(embeddings.LayerNorm.bias)
    for b in range(2):
        for i in range(7):
            x = word[ids[b, i]] + kind[types[b, i]] + paper(i, 24, "interleaved")
            x = (x - x.mean()) / np.sqrt(x.var() + embeddings.LayerNorm.eps)
            assert np.abs(got[b, i] - (gain * x + bias)).max() <= 1e-10


@torch.no_grad()
def test_amplitude_in_place_of_a_factor_on_the_words():
    """LayerNorm forgets the size of the sum: √D·E + PE and E + PE/√D are the same."""
    sizes = {"layer_norm_eps": 1e-30, "position_options": {"amplitude": 24**-0.5}}
    embeddings = tiny_model(RelPosBertModel, "sinusoidal", **sizes).double().embeddings
    embeddings.token_type_embeddings.weight.zero_()
    ids = torch.randint(1, 50, (1, 7))
    positions = torch.tensor(np.stack([paper(i, 24, "interleaved") for i in range(7)]))
    expected = embeddings.LayerNorm(24**0.5 * embeddings.word_embeddings(ids) + positions)
    assert (embeddings(input_ids=ids) - expected).abs().max() <= 1e-10


CASES = LAYOUTS


@torch.no_grad()
def parity(layout: str) -> float:
    """Largest difference from DistilBERT, Transformer-XL or tensor2tensor."""
    sizes, tensors = golden("sinusoidal_t2t" if layout == "t2t" else "sinusoidal")
    got = vectors(tensors["positions"], torch.float32, sizes["hidden_size"], layout=layout)
    return (got - tensors[layout]).abs().max().item()


@pytest.mark.parametrize("layout", CASES)
def test_equals_the_original_code(layout):
    assert parity(layout) <= 5e-6  # angles of float32


@torch.no_grad()
def test_follows_position_ids():
    """A shift of all of them is not neutral, and a packed text is worth as much as a text alone."""
    model = tiny_model(RelPosBertModel, "sinusoidal")
    ids = torch.randint(1, 50, (2, 9))
    plain = model(ids).last_hidden_state
    assert (model(ids, position_ids=torch.arange(9)[None] + 4).last_hidden_state - plain).abs().max() > 1e-3
    packed = model(ids.reshape(1, -1), position_ids=torch.arange(9).repeat(2)[None]).last_hidden_state
    assert (packed.reshape(2, 9, -1) - plain).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_computed_in_float32(dtype):
    """In half precision neighbours at 2000 would have the same angles."""
    model = tiny_model(RelPosBertModel, "sinusoidal").to(dtype)
    positions = torch.arange(2040, 2060)
    content = torch.zeros(1, 20, 24, dtype=dtype)
    got = model.embeddings.position_embeddings(positions[None], content, None)[0]
    expected = np.stack([paper(int(p), 24, "interleaved") for p in positions])
    assert np.abs(array(got) - expected).max() <= 1e-3
    out = model(torch.randint(1, 50, (2, 40))).last_hidden_state
    assert out.dtype == dtype and out.isfinite().all()

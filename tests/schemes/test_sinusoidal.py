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
    assert np.abs(array(vectors(positions, layout=layout, amplitude=0.25)) - got / 4).max() <= 1e-12


@pytest.mark.parametrize("name", ["sinusoidal", "cape"])
@torch.no_grad()
def test_input_is_layernorm_of_word_type_and_sinusoid(name):
    """In the paper's layout by default, and without a factor of the words."""
    embeddings = tiny_model(RelPosBertModel, name).double().embeddings
    assert not list(embeddings.position_embeddings.parameters()) and not list(embeddings.position_embeddings.buffers())
    ids, types = torch.randint(1, 50, (2, 7)), torch.randint(0, 2, (2, 7))
    total = embeddings.word_embeddings(ids) + embeddings.token_type_embeddings(types)
    total = total + torch.tensor(np.stack([paper(i, 24, "interleaved") for i in range(7)]))
    assert (embeddings(ids, types) - embeddings.LayerNorm(total)).abs().max() <= 1e-10


CASES = LAYOUTS


@torch.no_grad()
def parity(layout: str) -> float:
    """Largest difference from DistilBERT, Transformer-XL or tensor2tensor."""
    sizes, tensors = golden("sinusoidal_t2t" if layout == "t2t" else "sinusoidal")
    got = vectors(tensors["positions"], torch.float32, sizes["hidden_size"], layout=layout)
    return (got - tensors[layout]).abs().max().item()


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

"""The directional masks of DiSAN (Shen et al. 2018): forward attends to j < i, backward to j > i, diag to j ≠ i."""

import math

import pytest
import torch
from oracles import golden, layer_error, padding, tiny_attention


DIRECTIONS = {
    "forward": lambda h, i, j: j < i,
    "backward": lambda h, i, j: j > i,
    "diag": lambda h, i, j: j != i,
    "split": lambda h, i, j: j < i if h < 2 else j > i,  # of 3 heads
}


def paper(direction):
    def score(q, k, h, i, j):
        return q @ k / math.sqrt(8) if DIRECTIONS[direction](h, i, j) else -math.inf

    return score


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equals_the_paper(direction):
    layer = tiny_attention("disan", position_options={"direction": direction})
    hidden, real = torch.randn(3, 9, 24, dtype=torch.float64), padding([9, 5, 1], 9)
    assert layer_error(layer, hidden, real, paper(direction)) <= 1e-10


CASES = ["forward", "backward", "diag"]


@torch.no_grad()
def parity(direction: str) -> float:
    """Share of the pairs, padding included, that have weight here and none in the original, or the reverse."""
    sizes, tensors = golden("disan")
    seen = tensors[direction].bool()
    layer = tiny_attention("disan", position_options={"direction": direction})
    real = padding(sizes["real"], seen.shape[-1])
    _, weights = layer(torch.randn(*real.shape, 24, dtype=torch.float64), attention_mask=real[:, None, None, :])
    return ((weights > 0) != seen[:, None]).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("mask", ["boolean", "additive", "none"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_tokens_without_a_key_get_zeros(backend, mask, dtype):
    """A plain masked softmax gives them NaN, or all keys alike."""
    layer = tiny_attention("disan", dtype=dtype, position_options={"direction": "backward"})
    layer.config._attn_implementation = backend
    hidden = (4 * torch.randn(2, 6, 24)).to(dtype).requires_grad_()
    real = padding([6, 3], 6)[:, None, None, :] if mask != "none" else torch.ones(2, 1, 1, 6).bool()
    given = {"boolean": real, "none": None}.get(mask, torch.where(real, 0.0, torch.finfo(dtype).min).to(dtype))
    out, _ = layer(hidden, attention_mask=given)
    out.float().square().sum().backward()
    empty = torch.arange(6)[None] >= torch.tensor([6, 3 if mask != "none" else 6])[:, None] - 1
    assert torch.equal((out == 0).all(-1), empty)  # the last real token looks at padding only, which it may not
    assert out.isfinite().all() and hidden.grad.isfinite().all()

"""Memory of optimized encoders: by tokens, never by the square of the tokens of a batch."""

import pytest
import torch
from encoders import ARCHITECTURES, SCHEMES, build, pad_of, tokens
from torch.profiler import ProfilerActivity, profile

from hf_relpos import optimize


pytestmark = pytest.mark.usefixtures("none_too_short", "any_padding")
LENGTHS = 8 * [60, 50, 31, 30, 12, 9, 5, 3]  # several groups of rows


def allocated(model, inputs) -> tuple[int, int, int]:
    """Bytes that a call and its backward allocate: all, the most at a time, and the most for one tensor."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        states = model(**inputs)[0]
        if states.requires_grad:
            states.sum().backward()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = torch.tensor([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    return int(sizes.clamp(min=0).sum()), int(sizes.cumsum(0).max()), int(sizes.max())


def batch(model, lengths) -> dict[str, torch.Tensor]:
    return tokens(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], pad_of(model))


OWN = [(scheme, backend) for scheme in SCHEMES for backend in ("relpos", "sdpa", "eager")]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name, backend", [*((name, None) for name in ARCHITECTURES), *OWN])
def test_twice_the_rows_take_twice_the_memory(name, backend, trains):
    model = build(name, torch.float32, **({"attn_implementation": backend} if backend else {})).train(trains)
    assert optimize(model, dtype=None).encoders
    sizes = []
    with torch.set_grad_enabled(trains):
        for lengths in (LENGTHS, 2 * LENGTHS):
            inputs = batch(model, lengths)
            model(**inputs)  # what is made once
            model.zero_grad()
            sizes.append(allocated(model, inputs))
    (total, peak, _), (total_of_two, peak_of_two, largest) = sizes
    assert total_of_two <= 2.2 * total and peak_of_two <= 2.2 * peak
    assert largest < sum(2 * LENGTHS) ** 2 / 2  # a mask between all tokens has a byte for each pair


@torch.no_grad()
def test_modernbert_takes_no_more_memory_than_transformers():
    """40 rows with 10,800 tokens: a mask between all of them would take 117 million numbers."""
    lengths = torch.linspace(512, 28, 40).long().tolist()
    assert abs(sum(lengths) - 10_800) < 50
    model = build("ModernBERT", torch.float32, max_position_embeddings=512)
    inputs = batch(model, lengths)
    _, expected, _ = allocated(model, inputs)
    assert optimize(model, dtype=None).encoders
    assert allocated(model, inputs)[1] <= expected

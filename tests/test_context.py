"""AttentionContext r = j − i of one attention call, and the sinusoid."""

import numpy as np
import pytest
import torch
from oracles import sine_cosine

from hf_relpos.schemes import AttentionContext
from hf_relpos.schemes.encodings import sinusoid_concat


CPU = torch.device("cpu")
CALLS = [(1, 1, 0), (5, 5, 0), (1, 8, 7), (3, 8, 5), (3, 20, 5), (7, 4, 0), (2, 2, 0)]


@pytest.mark.parametrize("length, keys, start", CALLS)
def test_matrix_is_key_minus_query(length, keys, start):
    context = AttentionContext(length, keys, start)
    expected = [[j - (start + row) for j in range(keys)] for row in range(length)]
    assert context.matrix(CPU).tolist() == expected
    assert context.query_positions(CPU).tolist() == list(range(start, start + length))
    assert context.key_positions(CPU).tolist() == list(range(keys))
    matrix = context.matrix(CPU)
    assert (context.low, context.high) == (matrix.min().item(), matrix.max().item())
    assert context.offsets(CPU).tolist() == list(range(context.low, context.high + 1))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one element"])
@pytest.mark.parametrize("length, keys, start", [call for call in CALLS if call[0] + call[2] <= call[1]])
def test_start_as_tensor(length, keys, start, shape):
    """A static cache keeps it on the device, where Python cannot look: the bounds hold for any start that fits."""
    context = AttentionContext(length, keys, torch.full(shape, start))
    matrix = context.matrix(CPU)
    assert torch.equal(matrix, AttentionContext(length, keys, start).matrix(CPU))
    assert isinstance(context.low, int) and isinstance(context.high, int)
    assert context.low <= matrix.min().item() and matrix.max().item() <= context.high
    assert context.offsets(CPU).tolist() == list(range(context.low, context.high + 1))


@pytest.mark.parametrize("dim", [2, 8, 24])
def test_sinusoid_is_the_formula(dim):
    positions = torch.tensor([-30, -1, 0, 1, 2, 17, 511])
    expected = np.stack([sine_cosine(position, dim) for position in positions.tolist()])
    exact = sinusoid_concat(positions, dim, torch.float64)
    assert exact.dtype == torch.float64 and exact.shape == (7, dim)
    assert np.abs(exact.numpy() - expected).max() <= 1e-12
    assert torch.equal(exact[2], torch.tensor([0.0] * (dim // 2) + [1.0] * (dim // 2), dtype=torch.float64))
    single = sinusoid_concat(positions, dim)
    assert single.dtype == torch.float32
    assert np.abs(single.numpy() - expected).max() <= 511 * 2**-23  # rounding of the angle
    half = sinusoid_concat(positions, dim, torch.float16)
    assert torch.equal(half, single.half())  # the angles are not

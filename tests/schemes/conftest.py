"""What the tests of schemes share."""

import pytest
import torch


@pytest.fixture
def hidden():
    """Hidden states for `oracles.tiny_attention`, (2, 9, 24); files about longer inputs have their own."""
    return torch.randn(2, 9, 24, dtype=torch.float64)

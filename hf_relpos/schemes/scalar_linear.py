"""The first layer of a network that takes one number."""

import torch
from torch import nn


class ScalarLinear(nn.Module):
    """x · w + b of a number x: (…, 1) to (…, W), with the parameters of `nn.Linear(1, W)`, (W, 1) and (W,).

    It is no `nn.Linear`, so that what replaces these passes it by: torchao cannot quantise rows of one weight, a
    quantised distance would be a coarser one, and an adapter of low rank would be larger than the layer.
    """

    in_features = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

"""First layer of an MLP of one number."""

import torch
from torch import nn


class ScalarLinear(nn.Module):
    """x · w + b of a number x, (…, 1) to (…, W), with the parameters of `nn.Linear(1, W)`: (W, 1) and (W,).

    It is not an `nn.Linear`, so that tools which replace linear layers skip it: torchao cannot quantise rows of one
    weight, quantisation would make distances coarser, and a low-rank adapter would be larger than the layer.
    """

    in_features = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

"""Linear layers that multiply in a lower precision than their weights have."""

import torch
from torch import nn


class Bfloat16Linear(nn.Linear):
    """`torch.nn.Linear` with float32 weights and products in bfloat16, summed in float32.

    Weights are rounded in every call, which takes a fraction of the product's time: any change of them is seen.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`, the result in the dtype of the input."""
        bias = None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), self.weight.bfloat16(), bias).to(input.dtype)

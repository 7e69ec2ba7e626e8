"""What masks hide and add: boolean, integer and additive ones."""

import torch


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Convert a boolean, integer or additive mask to a boolean one: True where a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def finite(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Raise scores below the smallest number of a type to it. The softmax of a row of -inf is NaN.

    The gradient of a score that is this number stays, as in Transformers; from PyTorch 2.14 on `clamp` drops it.
    """
    lowest = torch.finfo(dtype).min
    return scores.masked_fill(scores < lowest, lowest)

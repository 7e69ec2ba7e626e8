"""Masks as numbers: which of them hide a key."""

import torch


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask, boolean, integer or additive, as a boolean one: True where a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0

"""Which keys a mask hides, for boolean, integer and additive masks."""

import torch


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Convert a boolean, integer or additive mask to a boolean one: True where a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0

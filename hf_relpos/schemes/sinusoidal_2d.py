"""Sinusoids of rows and columns added to the input, as in the Image Transformer (Parmar et al., arXiv 1802.05751)."""

import torch
from torch import nn

from .encodings import sinusoid_t2t
from .scheme import InputScheme, Scheme
from .sinusoidal import AMPLITUDE


class GridSinusoid(InputScheme):
    """[PE(row) | PE(column) | 0], PE in tensor2tensor's layout with 2·⌊D/4⌋ features. No parameters."""

    takes_grid = True

    def forward(
        self, position_ids: torch.Tensor, content: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        precise = torch.promote_types(content.dtype, torch.float32)
        width = content.shape[-1]
        vectors = sinusoid_t2t(position_ids, width // 4 * 2, precise).flatten(-2)
        inside = (position_ids >= 0).all(-1, keepdim=True)
        return nn.functional.pad(self.settings["amplitude"] * vectors * inside, (0, width % 4))


class Sinusoidal2d(Scheme, name="sinusoidal_2d"):
    """x_i = LayerNorm(word + type + [PE(y_i) | PE(x_i)]), (y, x) the row and column of token i; nothing in attention.

    Each axis has ⌊D/4⌋ frequencies; the last D mod 4 features have no position. Tokens outside the grid have a
    negative coordinate and get a zero vector. For D < 8, where tensor2tensor divides by zero, the only frequency is 1.
    The learned variant, one table per axis, is not implemented. No parameters.
    """

    summary = "Fixed waves of row and column, added to the words"
    source = "Parmar et al. 2018, arXiv 1802.05751, §3.1; tensor2tensor add_timing_signal_nd"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False  # the input has positions from the start
    required_inputs = frozenset({"grid"})
    input_class = GridSinusoid
    options = {"amplitude": AMPLITUDE}

"""CAPE: sinusoids of augmented positions (Likhomanenko et al., arXiv 2106.03143, §3)."""

import math
from typing import Any

import torch

from .encodings import sinusoid_interleaved
from .scheme import InputScheme, Option, Scheme, choice, is_number, is_number_or_zero
from .sinusoidal import AMPLITUDE


class AugmentedSinusoid(InputScheme):
    """Sinusoids of positions, which are shifted and stretched at random in training mode. No parameters."""

    def forward(
        self, position_ids: torch.Tensor, content: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the sinusoids of the positions, augmented in training mode.

        Raises:
            ValueError: if positions are to be centred and the mask does not say which tokens are real.
        """
        positions = position_ids.to(torch.promote_types(content.dtype, torch.float32))
        if self.settings["normalize"]:
            positions = self.centred(positions, attention_mask)
        if self.training:
            positions = self.augmented(positions.expand(content.shape[:2]))
        vectors = sinusoid_interleaved(positions * self.settings["freq_scale"], content.shape[-1], positions.dtype)
        return self.settings["amplitude"] * vectors

    def centred(self, positions: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Subtract from the positions their mean over the real tokens of the row; return (1 or B, L)."""
        if attention_mask is None:
            return positions - positions.mean(-1, keepdim=True)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; position_options['normalize'] = True needs "
                "(batch, length), which tells the real tokens"
            )
        real = attention_mask.to(positions.dtype)
        return positions - (positions * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp(min=1)

    def augmented(self, positions: torch.Tensor) -> torch.Tensor:
        """Return λ (p_j + Δ + ε_j), (B, L). Δ and λ are drawn for every row, ε for every token."""
        whole, single = self.settings["max_global_shift"], self.settings["max_local_shift"]
        stretch = math.log(self.settings["max_global_scaling"])
        per_row = positions.new_empty(positions.shape[0], 1)
        if whole:
            positions = positions + torch.empty_like(per_row).uniform_(-whole, whole)
        if single:
            positions = positions + positions.new_empty(positions.shape).uniform_(-single, single)
        if stretch:
            positions = positions * torch.empty_like(per_row).uniform_(-stretch, stretch).exp()
        return positions


class Cape(Scheme, name="cape"):
    """x_j = LayerNorm(word + type + PE(p'_j)) with PE the interleaved sinusoid; nothing inside attention.

    In training p'_j = λ (p_j + Δ + ε_j), with Δ ~ U(±max_global_shift) and ln λ ~ U(±ln max_global_scaling) for every
    row of the batch, and ε_j ~ U(±max_local_shift) for every token. In evaluation p' = p. No parameters.

    The paper multiplies the word embeddings by √D. Here they are unchanged, and `amplitude` sets the balance. A packed
    row is augmented as a whole, and `normalize` centres it as a whole. Steps other than 1 and positions on a grid are
    not implemented.

    On longer inputs, by its source: generalises to longer inputs better than absolute positions do.
    """

    summary = "Fixed waves of a randomly shifted and scaled position"
    source = "Likhomanenko et al. 2021, arXiv 2106.03143, §3"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False  # the input has positions from the start
    even_size = "hidden_size"
    input_class = AugmentedSinusoid
    options = {
        "max_global_shift": Option(5.0, help="largest |Δ|, in tokens; a number from 0 on", accepts=is_number_or_zero),
        "max_local_shift": Option(0.5, help="largest |ε|, in tokens; a number from 0 on", accepts=is_number_or_zero),
        "max_global_scaling": Option(
            1.03,
            help="largest λ, whose inverse is the smallest; a number from 1 on",
            accepts=lambda value: is_number(value) and value >= 1,
        ),
        "normalize": choice(False, True, help="take the mean position of the real tokens for 0; not in decoders"),
        "freq_scale": Option(1.0, help="factor of all frequencies; a positive number", accepts=is_number),
        "amplitude": AMPLITUDE,
    }

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        if settings["normalize"] and config.is_decoder:
            raise ValueError(
                "position_options['normalize'] = True with is_decoder = True: the mean position of a text tells its "
                "length, which a decoder does not know; leave it at False"
            )

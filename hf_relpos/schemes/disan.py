"""The directional masks of DiSAN (Shen et al., arXiv 1709.04696), its only notion of position."""

from collections.abc import Mapping
from typing import Any

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Clipped, Table, Terms
from .scheme import Scheme, choice


class DiSAN(Scheme, name="disan"):
    """score = s · q_i·k_j + M_ij. M has entries 0 and −∞ and says which keys a token may attend to. No parameters.

    forward: only keys to the left, j < i. backward: only keys to the right, j > i. diag: all keys but itself, j ≠ i.
    split: the first half of the heads is forward (the larger half if H is odd) and the others are backward, as DiSAN
    puts a forward and a backward block side by side. A token with no key to attend to, such as the first one with
    forward, gets zeros. In a decoder nothing is to the right, so backward heads give only zeros.

    Combine it with a scheme that knows distances: `position_embedding_type=["disan", "shaw"]`. DiSAN's additive
    attention with a weight per feature is not implemented, since it is not a position scheme.

    On longer inputs, by its source: direction only; nothing about distances or longer inputs.
    """

    summary = "Each head sees only one side of a token"
    source = "Shen et al. 2018, arXiv 1709.04696, directional self-attention"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False
    options = {"direction": choice("split", "forward", "backward", "diag", help="which keys a token attends to")}

    @classmethod
    def is_symmetric_with(cls, settings: Mapping[str, Any]) -> bool:
        return settings["direction"] == "diag"

    @classmethod
    def memory_unsupported_reason(cls, settings: Mapping[str, Any]) -> str | None:
        if settings["direction"] == "backward":
            return "going backward a token attends only to its right, and a memory lies to the left"
        return super().memory_unsupported_reason(settings)

    def forward(self, context: AttentionContext) -> Terms:
        sees = {"forward": (True, False, False), "backward": (False, False, True), "diag": (True, False, True)}
        direction = self.settings["direction"]
        if direction == "split":
            backward = self.num_heads // 2
            by_head = [sees["forward"]] * (self.num_heads - backward) + [sees["backward"]] * backward
        else:
            by_head = [sees[direction]]
        rows = torch.tensor(by_head, device=context.device)  # left, the token itself, right
        return Terms(allow=(Table(rows, Clipped(-1, 1)),))

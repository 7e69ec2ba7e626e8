"""Rotary positions (Su et al., RoFormer, arXiv 2104.09864, eq. 15 and 34)."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .scheme import Option, Scheme, choice, integer, is_number


# α and β of YaRN: turns in the trained length from which on a plane keeps its frequency, and up to which it is scaled.
ONE_TURN, MANY_TURNS = 1, 32


class RoPE(Scheme, name="rope"):
    """score = s · (R_i q_i)·(R_j k_j) = s · q_i·R_{j−i} k_j. No parameters.

    R_p rotates plane n of a head by the angle p·θ_n, θ_n = base^(−2n/w), w being the number of rotated components.
    Which two components make a plane is a convention that the weights must follow: `adjacent` takes 2n and 2n + 1
    (RoFormer, GPT-J), `half` takes n and n + w/2 (GPT-NeoX, LLaMA, ModernBERT). Permuting the rows of the query and
    key projections in the same way converts one into the other exactly.

    For longer inputs, `linear` divides positions by `factor` (position interpolation, arXiv 2306.15595). `ntk`
    multiplies the base by factor^(w/(w−2)), which leaves the fastest plane alone and slows the slowest by `factor`.
    `dynamic` does nothing up to `trained` tokens. For the L tokens of a longer row, the longest of the batch with its
    padding, it multiplies the base by (factor · L / trained − (factor − 1))^(w/(w−2)), as NomicBERT's code does, so
    the output of a row depends on the longest row of its batch. `yarn` (Peng et al., arXiv 2309.00071, §3.2 to 3.4)
    divides the positions of planes that turn less than once in `trained` tokens by `factor`, leaves those that turn
    more than 32 times, and blends between; queries and keys grow by 0.1 ln(factor) + 1.

    `turned` is the p of p-RoPE (Barbero et al. 2024, arXiv 2410.06205, §6.1): the slowest planes, which carry content
    rather than positions, stand still.
    Rotated values, an option of RoFormer's code, are not implemented: the output would depend on absolute positions.

    On longer inputs, by its source: any length can be computed; later papers find that it does not extrapolate
    unscaled.
    """

    summary = "Queries and keys are rotated by their position"
    source = "Su et al. 2021, arXiv 2104.09864, eq. 15 and 34"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False
    options = {
        "pairing": choice("adjacent", "half", help="which components make a plane: (2n, 2n + 1) or (n, n + w/2)"),
        "base": Option(default=10000.0, help="of the angles; a positive number", accepts=is_number),
        "rotary_fraction": Option(
            default=1.0,
            help="share of each head that is rotated, its first components; above 0, at most 1",
            accepts=lambda value: is_number(value) and value <= 1,
        ),
        "turned": Option(
            default=1.0,
            help="share of the planes that turn, the fastest ones; above 0, at most 1",
            accepts=lambda value: is_number(value) and value <= 1,
        ),
        "scaling": choice(
            None, "linear", "ntk", "dynamic", "yarn", help="how to reach positions past the trained range"
        ),
        "factor": Option(default=1.0, help="how many times longer, a positive number", accepts=is_number),
        "trained": integer(None, "tokens it was trained on, for `dynamic` and `yarn`", none="max_position_embeddings"),
    }

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
        resolved = super().resolve(options, config)
        head_size = config.hidden_size // config.num_attention_heads
        width = int(head_size * resolved["rotary_fraction"])
        if width == 0 or width % 2:
            raise ValueError(
                f"position_options['rotary_fraction'] = {resolved['rotary_fraction']} rotates {width} of the "
                f"{head_size} components of a head; planes have two each, so choose a fraction that makes it even"
            )
        if resolved["scaling"] != "dynamic" and (resolved["scaling"] is None) != (resolved["factor"] == 1):
            raise ValueError(
                f"position_options['scaling'] = {resolved['scaling']!r} with factor = {resolved['factor']}: give "
                "both, the factor other than 1, or neither"
            )
        needs_trained = resolved["scaling"] in ("dynamic", "yarn")
        if resolved["trained"] is not None and not needs_trained:
            raise ValueError(
                f"position_options['trained'] = {resolved['trained']} with scaling = {resolved['scaling']!r} has no "
                "effect; leave it out, or set scaling = 'dynamic' or 'yarn'"
            )
        if needs_trained and resolved["trained"] is None:
            resolved["trained"] = config.max_position_embeddings
        return resolved

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor, length: int = 0) -> torch.Tensor:
        """Apply R_p to every vector.

        Args:
            vectors: (B, H, N, d).
            positions: (N,) or (B, N).
            length: tokens of the longest row, for `dynamic`.

        Returns:
            (B, H, N, d).
        """
        options = self.settings
        width = int(self.head_size * options["rotary_fraction"])
        base = options["base"]
        # angles of far positions need float32, whatever the dtype of the vectors
        positions = positions.to(torch.promote_types(vectors.dtype, torch.float32))
        if options["scaling"] == "linear":
            positions = positions / options["factor"]
        elif options["scaling"] == "ntk":
            base = base * options["factor"] ** (width / max(width - 2, 1))
        elif options["scaling"] == "dynamic" and length > options["trained"]:
            longer = options["factor"] * length / options["trained"] - (options["factor"] - 1)
            base = base * longer ** (width / max(width - 2, 1))
        steps = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype) / width
        frequencies, size = base**-steps, 1.0
        if options["scaling"] == "yarn":
            size = 0.1 * math.log(options["factor"]) + 1 if options["factor"] > 1 else 1.0
            frequencies = frequencies * self._blend(steps, width, base)
        if options["turned"] < 1:
            frequencies = frequencies * (
                torch.arange(width // 2, device=steps.device) < int(width // 2 * options["turned"])
            )
        angles = positions[..., None] * frequencies  # (N, w/2) or (B, N, w/2)
        angles = angles if angles.dim() == 2 else angles[:, None]
        cosine, sine = (size * angles.cos()).to(vectors.dtype), (size * angles.sin()).to(vectors.dtype)
        turned, rest = vectors[..., :width], vectors[..., width:]
        adjacent = options["pairing"] == "adjacent"
        x, y = turned.unflatten(-1, (-1, 2)).unbind(-1) if adjacent else turned.chunk(2, dim=-1)
        planes = (x * cosine - y * sine, y * cosine + x * sine)
        turned = torch.stack(planes, dim=-1).flatten(-2) if adjacent else torch.cat(planes, dim=-1)
        return turned if width == self.head_size else torch.cat([turned, rest], dim=-1)

    def _blend(self, steps: torch.Tensor, width: int, base: float) -> torch.Tensor:
        """Factors of the frequencies by YaRN, (w/2,): 1 for planes that turn often, 1 / factor for the slowest."""
        trained = self.settings["trained"]
        first, last = (
            width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (MANY_TURNS, ONE_TURN)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        planes = torch.arange(len(steps), device=steps.device, dtype=steps.dtype)
        slow = ((planes - first) / max(last - first, 1e-3)).clamp(0, 1)
        return 1 - slow + slow / self.settings["factor"]

    def forward(self, context: AttentionContext) -> Terms:
        if self.settings["scaling"] != "dynamic":
            return Terms(rotate=self.rotate)
        return Terms(rotate=functools.partial(self.rotate, length=context.longest or context.key_length))

"""Rotary positions (Su et al., RoFormer, arXiv 2104.09864, eq. 15 and 34)."""

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..attention.context import AttentionContext, precise
from ..attention.formula import Terms
from ..attention.fourier import turn_of, turned
from ..host.transformers import ROPE_INIT_FUNCTIONS
from .scheme import Option, Scheme, choice, is_number, is_number_or_zero, nearest, one_of


# Values of `rope_type`, and what each needs besides the base.
NEEDED: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "proportional": set(),
}
NUMBERS = ("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor")
NUMBERS_OF_YARN, NUMBERS_OF_LLAMA3 = ("beta_fast", "beta_slow"), ("low_freq_factor", "high_freq_factor")
LISTS = ("short_factor", "long_factor")  # with a number for each plane
ACCEPTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys((*NUMBERS, *NUMBERS_OF_YARN, *NUMBERS_OF_LLAMA3), is_number),
    **dict.fromkeys(("mscale", "mscale_all_dim"), is_number_or_zero),
    **dict.fromkeys(LISTS, lambda value: isinstance(value, list | tuple) and all(map(is_number, value))),
    "rope_type": one_of(*NEEDED),
    "truncate": one_of(True, False),
}
FIELD = "position_options['rope_parameters']"


class RoPE(Scheme, name="rope"):
    """score = s · (R_i q_i)·(R_j k_j) = s · q_i·R_{j−i} k_j. No parameters.

    R_p rotates plane n of a head by the angle p·θ_n, θ_n = base^(−2n/w), w being the number of rotated components.
    Which two components make a plane is a convention that the weights must follow: `adjacent` takes 2n and 2n + 1
    (RoFormer, GPT-J), `half` takes n and n + w/2 (GPT-NeoX, LLaMA, ModernBERT). Permuting the rows of the query and
    key projections in the same way converts one into the other exactly.

    `rope_parameters` is the field of Transformers' configurations. `rope_theta` is the base, `partial_rotary_factor`
    the share of a head that is rotated, its first components. Other angles have a `rope_type`. `linear` divides
    positions by `factor` (arXiv 2306.15595). Past the trained length, `dynamic` multiplies the base by
    (factor · L / trained − (factor − 1))^(w/(w−2)) for L tokens, as NomicBERT's code does. Transformers' functions
    compute the others, in float32: `yarn` (arXiv 2309.00071), `proportional` (p-RoPE, arXiv 2410.06205, §6.1: only
    the fastest planes turn), `longrope` and `llama3`. The trained length is `original_max_position_embeddings`, by
    default `max_position_embeddings`. L counts the longest row of a batch with its padding, so for `dynamic` and
    `longrope` the output of a row depends on the rows beside it.

    With `layer_types`, a name for each layer, `rope_parameters` holds such a dict for each name, as in ModernBERT and
    Gemma. `attention_window` does not depend on these names: it holds for all layers.
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
        "rope_parameters": Option(
            default=None,
            help="base and type of the angles, a dict as in configurations of Transformers; None for base 10,000",
            accepts=lambda value: value is None or isinstance(value, Mapping),
        ),
        "layer_types": Option(
            default=None,
            help="a list with the name of each layer's entry in rope_parameters; None for the same in all layers",
            accepts=lambda value: value is None or (isinstance(value, list | tuple) and {*map(type, value)} == {str}),
        ),
    }

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        given, names = settings["rope_parameters"] or {}, settings["layer_types"]
        if names is None:
            settings["rope_parameters"] = _checked(given, config, FIELD)
            return
        if len(names) != config.num_hidden_layers or not set(names) <= set(given):
            raise ValueError(
                f"position_options['layer_types'] = {reprlib.repr(names)}: give one name for each of the "
                f"num_hidden_layers = {config.num_hidden_layers} layers, each an entry of rope_parameters, which has "
                f"{', '.join(map(repr, given)) or 'none'}"
            )
        settings["rope_parameters"] = {
            name: _checked(of_name, config, f"{FIELD}[{name!r}]") for name, of_name in given.items()
        }

    @classmethod
    def settings_of_layer(cls, settings: Mapping[str, Any], layer: int) -> dict[str, Any]:
        if settings["layer_types"] is None:
            return dict(settings)
        parameters = settings["rope_parameters"][settings["layer_types"][layer]]
        return {**settings, "rope_parameters": parameters, "layer_types": None}

    def frequencies(self, context: AttentionContext) -> tuple[torch.Tensor, float]:
        """Angles of position 1, (w/2,), and the factor of queries and keys."""
        parameters, device = self.settings["rope_parameters"], context.device
        kind, base, factor = (parameters.get(key) for key in ("rope_type", "rope_theta", "factor"))
        length, trained = context.longest or context.key_length, parameters.get("original_max_position_embeddings")
        if kind in ("default", "linear", "dynamic"):
            width = int(self.head_size * parameters["partial_rotary_factor"])
            if kind == "dynamic" and length > trained:
                base = base * (factor * length / trained - (factor - 1)) ** (width / (width - 2))
            steps = torch.arange(0, width, 2, device=device, dtype=context.dtype) / width
            return base**-steps / (factor if kind == "linear" else 1.0), 1.0
        angles, size = ROPE_INIT_FUNCTIONS[kind](_Fields(parameters, self.head_size), device, seq_len=length)
        return angles.to(context.dtype), size

    def rotate(
        self,
        vectors: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext | None = None,
        frequencies: tuple[torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """Apply R_p to every vector.

        Args:
            vectors: (B, H, N, d).
            positions: (N,) or (B, N).
            context: of the call, which keeps what is made of the positions for other layers; None for short rows.
            frequencies: angles of position 1 and the factor; by default `frequencies` of the call.

        Returns:
            (B, H, N, d).
        """
        call = context or AttentionContext(1, 1, device=positions.device)

        # angles of far positions need float32, whatever the dtype of the vectors
        def make() -> Any:
            angles, size = frequencies or self.frequencies(call)
            turns = positions.to(precise(vectors.dtype))[..., None] * angles.to(precise(vectors.dtype))
            turns = turns if turns.dim() == 2 else turns[:, None]  # (N, w/2) or (B, 1, N, w/2)
            cosines, sines = ((size * each).to(vectors.dtype) for each in (turns.cos(), turns.sin()))
            return turn_of(cosines, sines, halves), positions  # which are kept, too: their id is of no other

        halves = self.settings["pairing"] == "half"
        turn, _ = call.once((self.signature, id(positions), vectors.dtype), make)
        width = turn[0].shape[-1]
        if width == self.head_size:
            return turned(vectors, turn, halves)
        first, rest = vectors.split([width, self.head_size - width], -1)
        return torch.cat([turned(first, turn, halves), rest], dim=-1)

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(rotate=functools.partial(self.rotate, context=context))


class _Fields:
    """What functions of Transformers read from a configuration. A graph can build it, and no SimpleNamespace."""

    def __init__(self, parameters: dict[str, Any], head_size: int) -> None:
        self.rope_parameters = parameters
        self.max_position_embeddings = parameters["original_max_position_embeddings"]
        self.head_dim = self.hidden_size = head_size
        self.num_attention_heads = 1

    def standardize_rope_params(self) -> None:
        """They are complete."""


def _checked(given: Any, config: Any, field: str) -> dict[str, Any]:
    """Entries of `rope_parameters` that are not None, with the defaults.

    Raises:
        ValueError: for an unknown entry or value, and for one that is missing.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{field} = {reprlib.repr(given)}: give a dict, as in configurations of Transformers")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    parameters |= {key: value for key, value in given.items() if value is not None}
    for key, value in parameters.items():
        if key not in ACCEPTED or not ACCEPTED[key](value):
            meant = "" if key in ACCEPTED else nearest(key, ACCEPTED.keys())
            raise ValueError(
                f"{field}[{key!r}] = {reprlib.repr(value)} is not accepted{meant}; "
                f"give {', '.join(ACCEPTED)} as in configurations of Transformers, rope_type being one of "
                f"{', '.join(NEEDED)}; or layer_types, and a dict of these for each of its names"
            )
    kind, size = parameters["rope_type"], config.hidden_size // config.num_attention_heads
    width = int(size * parameters["partial_rotary_factor"])
    least = {"dynamic": 4, "proportional": 0}.get(kind, 2)
    if width > size or width < least or (width % 2 and kind != "proportional"):
        raise ValueError(
            f"{field}['partial_rotary_factor'] = {parameters['partial_rotary_factor']} rotates {width} of the {size} "
            f"components of a head; planes have two each, so choose one that makes it even, and at least {least}"
        )
    missing = NEEDED[kind] - {key for key in parameters if key not in LISTS or len(parameters[key]) == width // 2}
    if missing:
        raise ValueError(f"{field}: rope_type = {kind!r} needs {', '.join(sorted(missing))} for {width // 2} planes")
    if kind != "default":
        trained = parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if kind == "longrope":
            parameters.setdefault("factor", config.max_position_embeddings / trained)
    return parameters

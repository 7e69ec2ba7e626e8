"""Settings and reports of a calibration, and the memory that it takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...models.configuration_relpos_bert import RelPosBertConfig
from ...schemes.scheme import is_count, is_number
from .errors import CalibrationError


# Penalties are relative to the curvature of what is fitted: smaller ones are lost in the rounding of float64, and from
# larger ones on all tables stay at zero.
PENALTIES = (1e-12, 1e3)
OUTPUTS = ("ridge", "bias", "none")


def is_penalty(value: Any) -> bool:
    """Whether a value is a penalty that has an effect and leaves one to the data."""
    return is_number(value) and PENALTIES[0] <= value <= PENALTIES[1]


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        rows: query rows of a window that the fits of scores and values read, at most; a multiple of 32.
        ridge: penalty of the tables' squares, in units of the mean curvature; inside `PENALTIES`.
        smooth: penalty of the squared difference of neighbouring distances, likewise.
        newton: Newton steps of the score fit after its first step.
        iterations: conjugate gradient iterations of each; twice as many where no preconditioner is known.
        tolerance: at which both stop early.
        output: `ridge`, `bias` or `none`: what corrects the residual stream.
        strengths: of the ridge, to choose from; the largest ones leave only the bias.
        holdout: every so many batches one is held out.
        batch_tokens: tokens in a batch.
        seed: of the choice of rows.

    Raises:
        CalibrationError: for a value out of its range.
    """

    rows: int = 32
    ridge: float = 1e-4
    smooth: float = 1e-2
    newton: int = 2
    iterations: int = 6
    tolerance: float = 1e-2
    output: str = "ridge"
    strengths: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
    holdout: int = 6
    batch_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "rows": (is_count(self.rows) and self.rows % 32 == 0, "a positive multiple of 32"),
            "ridge": (is_penalty(self.ridge), f"from {PENALTIES[0]:g} to {PENALTIES[1]:g}"),
            "smooth": (is_penalty(self.smooth), f"from {PENALTIES[0]:g} to {PENALTIES[1]:g}"),
            "newton": (is_count(self.newton + 1), "0 or more"),
            "iterations": (is_count(self.iterations), "a positive number"),
            "tolerance": (is_number(self.tolerance), "a positive number"),
            "output": (self.output in OUTPUTS, " or ".join(map(repr, OUTPUTS))),
            "strengths": (
                bool(self.strengths) and all(map(is_number, self.strengths)),
                "one positive number or several",
            ),
            "holdout": (is_count(self.holdout) and self.holdout > 1, "2 or more"),
            "batch_tokens": (is_count(self.batch_tokens), "a positive number"),
        }
        for name, (accepted, words) in ranges.items():
            if not accepted:
                raise CalibrationError(f"{name} = {getattr(self, name)!r}: give {words}")


@dataclass
class LayerReport:
    """What the calibration of one layer did.

    Attributes:
        divergence_before: KL(teacher ‖ student) of the attention on held-out text, nats per row, tables at zero; None
            where no score is fitted.
        divergence_after: the same after the fit.
        value_missing: share of the mean square difference of the heads' outputs that V leaves, on the fitted text;
            None without V.
        strength_attention: chosen ridge strength for W_o; None where only the bias, or nothing, was corrected.
        strength_output: the same for W_2.
        missing: mean square difference of the hidden states to the teacher's after the layer, relative to the
            teacher's variance, on held-out text.
    """

    layer: int
    divergence_before: float | None
    divergence_after: float | None
    value_missing: float | None
    strength_attention: float | None
    strength_output: float | None
    missing: float


@dataclass
class CalibrationReport:
    """What a calibration did.

    Attributes:
        tokens: of text, special ones included; those held out, too.
        windows: number of windows.
        embedding_missing: mean square difference of the embeddings to the teacher's, relative to the teacher's
            variance, on held-out text.
        layers: one report each.
        settings: fields of `CalibrationSettings`.
    """

    tokens: int = 0
    windows: int = 0
    embedding_missing: float = 0.0
    layers: list[LayerReport] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def estimate_memory(
    lengths: Sequence[int], settings: CalibrationSettings, config: RelPosBertConfig, limit: int, processes: int = 1
) -> int:
    """About how many bytes a process holds besides the models: hidden states, and the rows of the score fits.

    Args:
        lengths: of the windows of all processes.
        settings: of the calibration.
        config: of the student.
        limit: tokens that the teacher reads.
        processes: their number.
    """
    width, heads = config.hidden_size, config.num_attention_heads
    states = 6 * sum(lengths) * width
    rows = sum(min(settings.rows * max(1, 2 * length // limit - 1), length) * length for length in lengths)
    keys = 2 * sum(lengths) * width
    sums = 4 * 2 * config.intermediate_size**2  # float64
    attention = 4 * heads * max(lengths) ** 2
    return 4 * ((states + 5 * rows * heads + keys) // processes + sums + attention)

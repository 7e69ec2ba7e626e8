"""Settings, reports and memory use of a calibration."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...models.configuration_relpos_bert import RelPosBertConfig
from ...schemes.scheme import is_count, is_number
from ...settings import check_settings, setting, setting_of


class CalibrationError(ValueError):
    """Raised for text that is too short for a fit, or a folder that cannot be written; names the remedy."""


# Valid penalties, relative to the curvature: smaller ones are lost in the rounding of float64, and with larger ones
# all tables stay at zero.
PENALTIES = (1e-12, 1e3)
PENALTY_RANGE = f"a positive number, from {PENALTIES[0]:g} to {PENALTIES[1]:g}"
STRENGTHS = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


def is_penalty(value: Any) -> bool:
    """Whether a value is a penalty within `PENALTIES`."""
    return is_number(value) and PENALTIES[0] <= value <= PENALTIES[1]


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration. Each field has its explanation and valid values.

    Raises:
        CalibrationError: for an invalid value.
    """

    rows: int = setting(
        32,
        "most query rows of a window that the fits of scores and values read; a positive multiple of 32",
        lambda value: is_count(value) and value % 32 == 0,
    )
    ridge: float = setting(
        1e-4, f"penalty of the tables' squares, relative to their mean curvature; {PENALTY_RANGE}", is_penalty
    )
    smooth: float = setting(
        1e-2, f"penalty of the squared difference of neighbouring distances, likewise; {PENALTY_RANGE}", is_penalty
    )
    newton: int = setting(
        2,
        "Newton steps of the score fit after its first step; 0 or more",
        lambda value: type(value) is int and value >= 0,
    )
    iterations: int = setting(
        6,
        "conjugate gradient iterations of each step, twice as many without a preconditioner; a positive integer",
        is_count,
    )
    tolerance: float = setting(1e-2, "relative residual at which both stop early; a positive number", is_number)
    output: str = setting_of(("ridge", "bias", "none"), "correction of the residual stream")
    strengths: tuple[float, ...] = setting(
        STRENGTHS,
        "ridge strengths to choose from, of which the largest leave only the bias; positive numbers",
        lambda value: bool(value) and all(map(is_number, value)),
    )
    holdout: int = setting(
        6, "one batch in so many is held out; 2 or more", lambda value: is_count(value) and value > 1
    )
    batch_tokens: int = setting(2048, "tokens of a batch; a positive integer", is_count)
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self, CalibrationError)


@dataclass
class LayerReport:
    """The result of calibrating one layer.

    Attributes:
        divergence_before: KL(teacher ‖ student) of the attention on held-out text, nats per row, with tables at zero;
            None if no scores are fitted.
        divergence_after: the same after the fit.
        value_missing: share of the mean square difference of the heads' outputs that remains after the fit of V, on
            the fitted text; None without V.
        strength_attention: chosen ridge strength for W_o; None if only the bias, or nothing, was corrected.
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
    """The result of a calibration.

    Attributes:
        tokens: number of tokens, special and held-out tokens included.
        windows: number of windows.
        embedding_missing: mean square difference of the embeddings to the teacher's, relative to the teacher's
            variance, on held-out text.
        layers: one report per layer.
        settings: fields of `CalibrationSettings`.
    """

    tokens: int = 0
    windows: int = 0
    embedding_missing: float = 0.0
    layers: list[LayerReport] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def estimate_memory(
    lengths: Sequence[int], settings: CalibrationSettings, config: RelPosBertConfig, limit: int, processes: int = 1
) -> int:
    """Estimate of a process's memory in bytes without the models: hidden states, and rows of the score fits.

    Args:
        lengths: lengths of the windows of all processes.
        settings: settings of the calibration.
        config: configuration of the student.
        limit: maximum length of the teacher.
        processes: number of processes.
    """
    width, heads = config.hidden_size, config.num_attention_heads
    states = 6 * sum(lengths) * width
    rows = sum(min(settings.rows * max(1, 2 * length // limit - 1), length) * length for length in lengths)
    keys = 2 * sum(lengths) * width
    sums = 4 * 2 * config.intermediate_size**2  # float64
    attention = 4 * heads * max(lengths) ** 2
    return 4 * ((states + 5 * rows * heads + keys) // processes + sums + attention)

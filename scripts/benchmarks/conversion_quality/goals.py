"""Goals that were set before they were measured, on all-MiniLM-L6-v2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


Rows = dict[str, Any]  # key of `ROWS` to its result
Figure = Callable[[Rows], float | None]  # None without its lengths


@dataclass(frozen=True)
class Goal:
    """A figure with the bound that it is to reach.

    Attributes:
        what: in words.
        rows: that it is taken from.
        figure: function of the rows.
        bound: to reach.
        lower: whether `bound` is a lower bound, not an upper one.
    """

    what: str
    rows: tuple[str, ...]
    figure: Figure
    bound: float
    lower: bool = False

    def value(self, rows: Rows) -> float | None:
        """The figure; None where it was not measured."""
        return self.figure(rows) if all(name in rows for name in self.rows) else None

    def state(self, rows: Rows) -> str:
        """Whether the figure reaches the bound, in words."""
        value = self.value(rows)
        if value is None:
            return "not measured"
        return "reached" if (value >= self.bound if self.lower else value <= self.bound) else "**not reached**"


def sentence_cosines(rows: Rows, row: str, lengths: Sequence[int]) -> list[float]:
    """Sentence cosines at those of the lengths that were measured, on the first evaluation text."""
    cosines = next(iter(rows[row]["texts"].values()))["sentence"]
    return [cosines[str(length)] for length in lengths if str(length) in cosines]


def spearman_lost(row: dict[str, Any]) -> list[float]:
    """Points of Spearman's ρ that are lost, by set."""
    return [-entry["difference"]["mean"] for entry in row["sts"].values()]


def times_slower(rows: Rows, row: str, length: int) -> float | None:
    """Time of a student in units of the source's."""
    times = rows[row]["times"].get(str(length))
    return None if times is None else times["student"] / times["teacher"]


def accuracy_kept(rows: Rows, row: str) -> tuple[float | None, float | None]:
    """Percent of the teacher's accuracy on masked tokens: over all lengths, and at the worst; None without it."""
    if row == "demo/teacher" or "demo/teacher" not in rows:
        return None, None
    student, teacher = rows[row]["accuracy"], rows["demo/teacher"]["accuracy"]
    worst = min(100 * student[length] / teacher[length] for length in student)
    return 100 * sum(student.values()) / sum(teacher[length] for length in student), worst


LENGTHS = (16, 64, 128, 256, 512)
DEFAULT, WITHOUT_PAIRS, LONG = "quality/default", "quality/default-single", "quality/long-all"


def worst_cosine(lengths: Sequence[int]) -> Figure:
    """The smallest sentence cosine of the default."""
    return lambda rows: min(sentence_cosines(rows, DEFAULT, lengths), default=None)


def lost_by_long_rows(rows: Rows) -> float | None:
    """The largest loss of sentence cosine at a length where the default also learns from long rows."""
    pairs = zip(*(sentence_cosines(rows, row, LENGTHS) for row in (WITHOUT_PAIRS, LONG)), strict=True)
    return max((short - long for short, long in pairs), default=None)


GOALS = [
    Goal("sentence cosine, 16-128 tokens", (DEFAULT,), worst_cosine(LENGTHS[:3]), 0.985, lower=True),
    Goal("sentence cosine, 512", (DEFAULT,), worst_cosine(LENGTHS[-1:]), 0.975, lower=True),
    Goal(
        "CPU seconds of the training",
        (DEFAULT,),
        lambda rows: rows[DEFAULT]["details"]["cpu_seconds"]["distillation"],
        150,
    ),
    Goal("points of Spearman's ρ lost, worst set", (DEFAULT,), lambda rows: max(spearman_lost(rows[DEFAULT])), 0.2),
    Goal("time × source at 512 tokens", (DEFAULT,), lambda rows: times_slower(rows, DEFAULT, 512), 1.4),
    Goal("sentence cosine lost at 16-512 by long rows", (WITHOUT_PAIRS, LONG), lost_by_long_rows, 0.003),
]

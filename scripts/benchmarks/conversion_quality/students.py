"""Students, the rows that are measured of them, and their names in tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_relpos.conversion.methods import DEFAULT_QUALITY, QUALITIES
from hf_relpos.conversion.texts import PAIRS


@dataclass(frozen=True)
class Student:
    """What the converter is asked for.

    Attributes:
        label: in tables.
        arguments: of `convert`.
        long: that it is made for rows of `--long-length` tokens.
        pairs: share of the text that it reads as pairs of segments.
    """

    label: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    long: bool = False
    pairs: float = 0.0

    @property
    def learns(self) -> bool:
        """Whether it is trained on text."""
        return "method" not in self.arguments


STUDENTS = {
    "zero": Student("positions dropped", {"method": "drop", "position_embedding_type": "tables"}),
    **{name: Student(f"quality `{name}`", {"quality": name}, pairs=PAIRS) for name in QUALITIES},
    **{
        f"{name}-single": Student(f"quality `{name}`, no pairs", {"quality": name})
        for name in (DEFAULT_QUALITY, "faithful")
    },
    "default-quarter": Student(
        f"quality `{DEFAULT_QUALITY}`, a quarter as pairs", {"quality": DEFAULT_QUALITY}, pairs=0.25
    ),
    "key": Student(
        f"quality `{DEFAULT_QUALITY}`, `relative_key`",
        {"quality": DEFAULT_QUALITY, "position_embedding_type": "relative_key"},
    ),
    "long-all": Student(
        f"quality `{DEFAULT_QUALITY}`, no pairs, on long rows too", {"quality": DEFAULT_QUALITY}, long=True
    ),
}

# What is measured, each a kind of row with its students; `+window` is a student with `--window`.
KINDS = {
    "fidelity": ("teacher", "zero"),
    "quality": (*QUALITIES, "default-quarter", "default-single", "faithful-single", "key", "long-all"),
    "long": ("zero+window", DEFAULT_QUALITY, "long-all", "long-all+window"),
    "demo": ("teacher", "zero", DEFAULT_QUALITY),
}
ROWS = [f"{kind}/{name}" for kind, names in KINDS.items() for name in names]


def split_row(key: str) -> tuple[str, str, bool]:
    """Kind, student and whether it has a window: "long/zero+window" to ("long", "zero", True)."""
    kind, _, name = key.partition("/")
    student, plus, _ = name.partition("+")
    return kind, student, bool(plus)


def label(name: str) -> str:
    """The name of a student, with or without a window, in tables."""
    student, plus, _ = name.partition("+")
    words = "teacher" if student == "teacher" else STUDENTS[student].label
    return words + (", window" if plus else "")


def row_label(key: str) -> str:
    """The first cell of a row in tables."""
    return "ceiling: the teacher, moved" if key == "fidelity/teacher" else label(key.partition("/")[2])

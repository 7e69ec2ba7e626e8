"""Students, the rows that are measured of them, and their names in tables."""

from dataclasses import dataclass, field
from typing import Any

from hf_relpos.conversion import QUALITIES


@dataclass(frozen=True)
class Student:
    """How a student is made. All fields but `label` are among the settings of its rows.

    Attributes:
        label: in tables.
        method: of the converter; None for a student that starts from another one.
        scheme: position_embedding_type.
        options: position_options.
        start: the student to start from.
        then: what is done afterwards: `random` (tables N(0, 0.02)), `fold` (position vectors into the embeddings) or
            `distil`.
        needs_text: whether it is fitted or trained on text.
        quality: of the converter, which chooses all the rest; None for one that is described by the other fields.
        long: that it is also fitted to rows of `--long-length` tokens: in the attention window `--window` ("window")
            or with all keys ("all").
    """

    label: str
    method: str | None
    scheme: str | None = "tables"
    options: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    then: str | None = None
    needs_text: bool = False
    quality: str | None = None
    long: str | None = None


STUDENTS = {
    "random": Student("positions dropped, tables N(0, 0.02)", "drop", "relative_key", then="random"),
    "zero": Student("positions dropped, tables zero", "drop"),
    "fold": Student("+ mean vector and [CLS] folded in", "drop", then="fold"),
    "no-data": Student("calibrated without text, on random tokens", "calibrate"),
    "calibrated": Student("calibrated (A, B, c, V per head)", "calibrate", needs_text=True),
    "distilled": Student("calibrated, distilled", None, start="calibrated", then="distil", needs_text=True),
    "key": Student("`relative_key`, calibrated", "calibrate", "relative_key", needs_text=True),
    "key-distilled": Student(
        "`relative_key`, calibrated, distilled", None, "relative_key", start="key", then="distil", needs_text=True
    ),
    "shaw": Student("`shaw`, calibrated", "calibrate", "shaw", {"clip": 64}, needs_text=True),
    "transformer_xl": Student("`transformer_xl`, calibrated", "calibrate", "transformer_xl", needs_text=True),
    "scalar": Student("c per head (T5-like), calibrated", "calibrate", "tables", {"terms": "c"}, needs_text=True),
    "fold-distilled": Student("control: folded, distilled", None, start="fold", then="distil", needs_text=True),
    "long": Student("calibrated on long rows too, window", "calibrate", needs_text=True, long="window"),
    "long-all": Student(
        "quality `default` on long rows too", None, None, needs_text=True, quality="default", long="all"
    ),
    "interpolate": Student("table interpolated", "interpolate", None),
    "hierarchical": Student("hierarchical decomposition", "hierarchical", None),
    **{name: Student(f"quality `{name}`", None, None, needs_text=True, quality=name) for name in QUALITIES},
}
VARIANTS = {"": "all keys", "+log": "log temperature", "+window": "window"}  # of a student's attention
TEACHER_STRATEGIES = {"truncate": "teacher, cut", "chunks": "teacher, mean of chunks"}  # for long documents
BASELINES = ("truncate", "chunks", "interpolate", "hierarchical")  # of retrieval

# What is measured, each a kind of row with the students or variants of its rows.
FIDELITY = [name for name, student in STUDENTS.items() if student.scheme is not None]
LONG = [
    *("interpolate", "interpolate+log", "hierarchical", "hierarchical+log", "hierarchical+window"),
    *("zero", "zero+window", "fold", "fold+window"),
    *("calibrated", "calibrated+log", "calibrated+window", "distilled", "distilled+log", "distilled+window", "long"),
    *("long-all", "long-all+window"),
]
RETRIEVAL = [
    *(*BASELINES, "hierarchical+window", "calibrated+window", "distilled+window", "long", "calibrated", "distilled"),
    *("long-all", "long-all+window"),
]
QUALITY = [*QUALITIES, "long-all"]
DEMO = ["teacher", "zero", "fold", "no-data", "calibrated", "distilled", "key", "key-distilled"]
ROWS = [
    "fidelity/teacher",
    *(f"fidelity/{name}" for name in FIDELITY),
    *(f"quality/{name}" for name in QUALITY),
    *(f"long/{name}" for name in LONG),
    *(f"demo/{name}" for name in DEMO),
    *(f"retrieval/{name}" for name in RETRIEVAL),
]


def split_row(key: str) -> tuple[str, str, str]:
    """Kind, student and variant of a row: "long/zero+window" to ("long", "zero", "+window")."""
    kind, _, name = key.partition("/")
    student, plus, variant = name.partition("+")
    return kind, student, plus + variant


def label(name: str) -> str:
    """The name of a student, or of a variant of one, in tables."""
    student, plus, variant = name.partition("+")
    words = {"teacher": "teacher", **TEACHER_STRATEGIES}.get(student)
    return (words or STUDENTS[student].label) + (f", {VARIANTS[plus + variant]}" if plus else "")


def row_label(key: str) -> str:
    """The first cell of a row in tables."""
    return "ceiling: the teacher, moved" if key == "fidelity/teacher" else label(key.partition("/")[2])


def ancestry(name: str | None) -> list[str]:
    """A student and those that it started from."""
    names = []
    while name is not None:
        names.append(name)
        name = STUDENTS[name].start if name in STUDENTS else None
    return names

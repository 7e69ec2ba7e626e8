"""Goals that were set before they were measured, on all-MiniLM-L6-v2."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hf_relpos.evaluation import Retrieval, difference

from .students import BASELINES


Rows = dict[str, Any]  # key of `ROWS` to its result
Figure = Callable[[Rows], float | None]  # None where it was not measured


@dataclass(frozen=True)
class Goal:
    """A figure with the bounds that it is to reach.

    Attributes:
        what: in words.
        row: student that it is taken from.
        value: the figure.
        must: bound to reach; None without one.
        stretch: bound to reach if possible; None without one.
        lower: whether bounds are lower bounds, not upper ones.
    """

    what: str
    row: str
    value: Figure
    must: float | None
    stretch: float | None = None
    lower: bool = True

    def reached(self, rows: Rows, bound: float | None) -> str:
        """Whether the figure reaches a bound, in words."""
        value = self.value(rows)
        if bound is None:
            return "–"
        if value is None:
            return "not measured"
        return "reached" if (value >= bound if self.lower else value <= bound) else "**not reached**"


def worst_sentence(row: str, lengths: Sequence[int]) -> Figure:
    """The smallest sentence cosine over lengths, on the first evaluation text."""

    def value(rows: Rows) -> float | None:
        if row not in rows:
            return None
        cosines = next(iter(rows[row]["texts"].values()))["sentence"]
        return min((cosines[str(length)] for length in lengths if str(length) in cosines), default=None)

    return value


def cpu_seconds(row: str) -> Figure:
    """CPU seconds of a student, without those of the student it started from."""
    return lambda rows: rows[row]["cpu_seconds"] if row in rows else None


def spearman_lost(row: str) -> Figure:
    """Points of Spearman's ρ that are lost, mean over the sets."""

    def value(rows: Rows) -> float | None:
        sets = rows.get(row, {}).get("sts")
        return -float(np.mean([entry["difference"]["mean"] for entry in sets.values()])) if sets else None

    return value


def worst_quarter(row: str) -> Figure:
    """The smallest token cosine of a quarter of long documents."""
    return lambda rows: min(rows[row]["quarters"]) if row in rows else None


def rank_gain(rows: Rows, name: str) -> dict[str, Any] | None:
    """Differences to the best baseline (by nDCG@10) in each measure of retrieval; None without a baseline."""
    retrieval = {key.partition("/")[2]: row for key, row in rows.items() if key.startswith("retrieval/")}
    if name not in retrieval or name in BASELINES:
        return None
    size = retrieval[name]["documents"], retrieval[name]["queries"]
    comparable = [
        baseline
        for baseline in BASELINES
        if baseline in retrieval and (retrieval[baseline]["documents"], retrieval[baseline]["queries"]) == size
    ]
    if not comparable:
        return None
    best = max(comparable, key=lambda baseline: retrieval[baseline]["ndcg@10"])
    baseline, model = (
        Retrieval(np.array([int(rank) for rank in retrieval[each]["ranks"].split()])) for each in (best, name)
    )
    gains = {measure: asdict(gap) for measure, gap in difference(baseline, model).items()}
    return {"baseline": best, "of": len(comparable), **gains}


def retrieval_gain(bound: str) -> Figure:
    """The best gain in nDCG@10 over all four baselines, or the lower end of its range."""

    def value(rows: Rows) -> float | None:
        gains = [
            rank_gain(rows, name)
            for name in ("calibrated+window", "distilled+window", "calibrated", "distilled", "long")
        ]
        return max((gain["ndcg@10"][bound] for gain in gains if gain and gain["of"] == len(BASELINES)), default=None)

    return value


def accuracy_kept(row: str, worst: bool = False) -> Figure:
    """Percent of the teacher's accuracy on masked tokens: over all lengths, or at the worst."""

    def value(rows: Rows) -> float | None:
        if row not in rows or "demo/teacher" not in rows:
            return None
        student, teacher = rows[row]["accuracy"], rows["demo/teacher"]["accuracy"]
        if worst:
            return min(100 * student[length] / teacher[length] for length in student)
        return 100 * sum(student.values()) / sum(teacher[length] for length in student)

    return value


def worst_on_other_text(row: str, lengths: Sequence[int]) -> Figure:
    """The smallest sentence cosine over lengths, on text of another kind than was trained on."""

    def value(rows: Rows) -> float | None:
        if row not in rows:
            return None
        cosines = list(rows[row]["texts"].values())[-1]["sentence"]
        return min((cosines[str(length)] for length in lengths if str(length) in cosines), default=None)

    return value


def times_slower(row: str, length: int) -> Figure:
    """Time of a student in units of the source's."""

    def value(rows: Rows) -> float | None:
        times = rows.get(row, {}).get("times", {}).get(str(length))
        return None if times is None else times["student"] / times["teacher"]

    return value


def spearman_lost_at_most(row: str) -> Figure:
    """Points of Spearman's ρ that are lost, on the set that loses most."""

    def value(rows: Rows) -> float | None:
        sets = rows.get(row, {}).get("sts")
        return max(-entry["difference"]["mean"] for entry in sets.values()) if sets else None

    return value


SHORT, MIDDLE = (16, 64, 128), (256, 512)
DEFAULT = "quality/default"
GOALS = [
    Goal("quality `default`: sentence cosine, 16-128", "default", worst_sentence(DEFAULT, SHORT), 0.965),
    Goal("same, 256-512", "default", worst_sentence(DEFAULT, MIDDLE), 0.955),
    Goal("same, text of another kind, 16-512", "default", worst_on_other_text(DEFAULT, (*SHORT, *MIDDLE)), 0.95),
    Goal("same, points of Spearman lost, worst set", "default", spearman_lost_at_most(DEFAULT), 0.2, None, False),
    Goal("same, time × source at 512 tokens", "default", times_slower(DEFAULT, 512), 1.4, None, False),
    Goal("no data: sentence cosine, 16-128", "no-data", worst_sentence("fidelity/no-data", SHORT), 0.90, 0.93),
    Goal(
        "calibrated: sentence cosine, 16-128", "calibrated", worst_sentence("fidelity/calibrated", SHORT), 0.96, 0.98
    ),
    Goal("same, 256-512", "calibrated", worst_sentence("fidelity/calibrated", MIDDLE), 0.95, 0.97),
    Goal("same, CPU seconds", "calibrated", cpu_seconds("fidelity/calibrated"), 300, lower=False),
    Goal("same, points of Spearman lost, mean", "calibrated", spearman_lost("fidelity/calibrated"), 0.5, 0.2, False),
    Goal("distilled: sentence cosine, 16-128", "distilled", worst_sentence("fidelity/distilled", SHORT), 0.98, 0.99),
    Goal("same, 256-512", "distilled", worst_sentence("fidelity/distilled", MIDDLE), 0.97, 0.98),
    Goal("same, CPU seconds more", "distilled", cpu_seconds("fidelity/distilled"), 600, lower=False),
    Goal("same, points of Spearman lost, mean", "distilled", spearman_lost("fidelity/distilled"), 0.5, 0.2, False),
    Goal("long, window: token cosine, every quarter", "long", worst_quarter("long/long"), 0.85, 0.90),
    Goal("long, all keys: token cosine, every quarter", "calibrated", worst_quarter("long/calibrated"), None, 0.85),
    Goal("same, quality `default` on long rows", "long-all", worst_quarter("long/long-all"), 0.85),
    Goal("retrieval: nDCG@10 above the best of four", "best student", retrieval_gain("mean"), 1e-9),
    Goal("same, lower end of the 95 % range", "best student", retrieval_gain("low"), None, 1e-9),
    Goal("`relative_key`: sentence cosine, 16-256", "key", worst_sentence("fidelity/key", (16, 64, 128, 256)), 0.90),
    Goal("same, distilled, 16-128", "key-distilled", worst_sentence("fidelity/key-distilled", SHORT), None, 0.98),
    Goal("demo BERT: % of masked tokens kept", "calibrated", accuracy_kept("demo/calibrated"), 97.0),
    Goal("same, at the worse length", "calibrated", accuracy_kept("demo/calibrated", worst=True), 97.0),
    Goal("distilled", "distilled", accuracy_kept("demo/distilled"), 99.0),
    Goal("same, at the worse length", "distilled", accuracy_kept("demo/distilled", worst=True), 99.0),
]

"""The card of learn_long_documents.py."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from experiments.reports import markdown_sections
from numpy.typing import NDArray

from hf_relpos.evaluation import Retrieval, paired_bootstrap

from .readers import READERS, WINDOW


CARD = """# Learning on long documents

{sections}
"""
SECTION = """## {name}

`{command}`
({versions}; {machine}; {date})

The beginnings of articles, up to the last whole paragraph in {length} tokens, and questions that a {unit} of them
answers ({questions}): {train} articles to train on, {validation} to
choose the learning rate with, {held_out} held out, whose {all_asked} questions rank these {held_out} articles
and their {passages} {unit}s. Every reader begins with `{source}`, or with `{converted}`, which was converted
from it, and trains the layers above the lowest {frozen} on the same articles and questions: {epochs} epochs of batches
of {batch} articles, up to {asked} questions about each, against the vectors of all training articles (the mean of
their tokens) and of all their {unit}s, a loss for each (`scripts/long_learning/training.py`). The converted
model reads an article at once: a token sees {window} positions to both sides, and [CLS]. A {unit}'s vector is
the mean of its tokens, after the row that it is in was read.
"""
# What is shown: ranks, and the measure.
MEASURES = {
    "articles by mean vector: nDCG@10": ("document", "ndcg@10"),
    "by best row": ("piece", "ndcg@10"),
    "by best passage": ("best", "ndcg@10"),
    "passages: recall@1": ("passage", "accuracy@1"),
    "recall@5": ("passage", "recall@5"),
}
UNNAMED = "recall@1, title not in it"
# Second minus first, with whether each is trained.
DIFFERENCES = (
    (("pieces", True), ("converted", True)),
    (("alone", True), ("converted", True)),
    (("alone", True), ("pieces", True)),
    (("titled", True), ("converted", True)),
    (("pieces", False), ("converted", False)),
    (("alone", False), ("converted", False)),
    (("titled", False), ("converted", True)),
    *((((reader, False), (reader, True))) for reader in READERS),
)


def variant(reader: str, rate: float | None = None) -> str:
    """The name of a run: the reader as it is, or trained at this rate."""
    return reader if rate is None else f"{reader}@{rate:g}"


def by_question(result: Mapping[str, Any], ranks: str, measure: str) -> NDArray[Any]:
    """A measure for each question, × 100."""
    found = np.array(result["ranks"][ranks].split(), dtype=int)
    values = found <= 5 if measure == "recall@5" else Retrieval(found).by_query()[measure]
    return 100 * values.astype(float)


def chosen(runs: Mapping[str, Any]) -> dict[tuple[str, bool], list[Mapping[str, Any]]]:
    """Results of all seeds of each reader, as it is and trained at the rate that validation prefers."""
    found: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for reader in READERS:
        by_rate: dict[str, list[Mapping[str, Any]]] = {}
        for key, run in runs.items():
            name = key.rpartition("/")[0]
            if name.partition("@")[0] == reader:
                by_rate.setdefault(name, []).append(run["result"])
        if reader in by_rate:
            found[reader, False] = by_rate.pop(reader)
        if by_rate:
            found[reader, True] = max(by_rate.values(), key=lambda each: np.mean([run["validation"] for run in each]))
    return found


def over_seeds(results: Sequence[Mapping[str, Any]], ranks: str, measure: str) -> NDArray[Any]:
    """A measure for each question, the mean of the seeds."""
    return np.mean([by_question(result, ranks, measure) for result in results], axis=0)


def difference(one: NDArray[Any], other: NDArray[Any], article: NDArray[Any]) -> str:
    """The second minus the first with its 95 % range, drawing articles with all their questions."""
    counts = np.bincount(article)
    sums = np.bincount(article, weights=other - one)
    drawn = partial(_ratio, sums, counts)
    found = paired_bootstrap(drawn, len(counts))
    return f"{found.mean:+.1f} ({found.low:+.1f} … {found.high:+.1f})"


def _ratio(sums: NDArray[Any], counts: NDArray[Any], indices: NDArray[Any]) -> float:
    return float(sums[indices].sum() / counts[indices].sum())


def name_of(reader: str, trained: bool, unit: str) -> str:
    """A row's name."""
    return READERS[reader].label.format(unit=unit) + (", trained" if trained else "")


def section(name: str, entry: Mapping[str, Any]) -> str:
    """One data set of the card."""
    settings, about, runs = entry["settings"], entry["about"], chosen(entry["runs"])
    article, named = (np.array(about["questions"][key]) for key in ("article", "named"))
    rows, differences = [], []
    for (reader, trained), results in runs.items():
        shown = [f"{over_seeds(results, *measure).mean():.1f}" for measure in MEASURES.values()]
        hard = over_seeds(results, "passage", "accuracy@1")[named == 0]
        rows.append([name_of(reader, trained, settings["unit"]), *shown, f"{hard.mean():.1f}" if len(hard) else "–"])
    for one, other in DIFFERENCES:
        if one in runs and other in runs:
            cells = []
            for measure in MEASURES.values():
                left, right = (over_seeds(runs[key], *measure) for key in (one, other))
                cells.append(difference(left, right, article))
            left, right = (over_seeds(runs[key], "passage", "accuracy@1")[named == 0] for key in (one, other))
            _, renumbered = np.unique(article[named == 0], return_inverse=True)
            cells.append(difference(left, right, renumbered) if len(left) else "–")
            differences.append([f"{name_of(*other, settings['unit'])} − {name_of(*one, settings['unit'])}", *cells])
    columns = [*MEASURES, UNNAMED]
    costs = [
        [
            key.rpartition("/")[0],
            *(f"{run['result'].get(field, '–')}" for field in ("seconds_below", "seconds_an_article")),
            f"{run['result'].get('training_seconds', '–')}",
            f"{run['result'].get('steps', '–')}",
            " ".join(map(str, run["result"].get("losses", ["–"]))),
            f"{run['result']['validation']:.3f}",
        ]
        for key, run in sorted(entry["runs"].items())
    ]
    tables = [
        (f"What is found, percent, {(named == 0).sum()} questions without the title", ["", *columns], rows),
        ("Differences, with 95 % ranges over held-out articles", ["", *columns], differences),
        (
            "Runs: reader@learning rate, CPU seconds, losses, and the mean reciprocal rank on validation articles",
            ["", "lower layers, an article", "upper layers", "training", "steps", "losses", "validation"],
            costs,
        ),
    ]
    text = SECTION.format(
        name=name,
        window=WINDOW,
        all_asked=len(article),
        passages=about["questions"]["passages"],
        **{**settings, "questions": ", ".join(settings["questions"])},
        **{key: about[key] for key in ("command", "versions", "machine", "date")},
    )
    return f"{text}{markdown_sections(tables).replace('## ', '### ')}"


def card(content: Mapping[str, Any]) -> str:
    """README.md, without its notes."""
    return CARD.format(sections="\n".join(section(name, entry) for name, entry in content.items()))

"""The tables and the picture of bench_long_retrieval.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reports import Table, describe, markdown_sections

from hf_relpos.files import atomic_file


# Task to the measure that is shown, and the title of its table.
BY_LENGTH = {
    "passkey": ("accuracy@1", "Pass key: share of questions whose document is first"),
    "needle": ("accuracy@1", "Needle in other text: the same"),
    "articles": ("ndcg@10", "Articles: nDCG@10"),
}


def by_task(results: Mapping[str, Any], task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Results of a task, by reader and length."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell, entry in results["cells"].items():
        kind, length, reader = cell.split("/")
        if kind == task:
            found.setdefault(reader, {})[int(length)] = entry["result"]
    return found


def tables(results: Mapping[str, Any]) -> list[Table]:
    """A table for each task, one of accuracy by depth, and one of time."""
    sections: list[Table] = []
    for task, (measure, title) in BY_LENGTH.items():
        found = by_task(results, task)
        lengths = sorted({length for row in found.values() for length in row})
        if not lengths:
            continue
        lines = [
            [results["labels"][name], *(f"{row[n][measure]:.3f}" if n in row else "–" for n in lengths)]
            for name, row in found.items()
        ]
        sections.append((title, ["tokens", *map(str, lengths)], lines))
        quarters = [
            [
                results["labels"][name],
                *("–" if each is None else f"{each:.2f}" for each in row[max(row)]["by_quarter"]),
            ]
            for name, row in found.items()
            if max(row) == lengths[-1]
        ]
        title = f"{title.partition(':')[0]} at {lengths[-1]} tokens: first, by the quarter in which the answer is"
        sections.append((title, ["", "1", "2", "3", "4"], quarters))
        times = [
            [results["labels"][name], *(f"{row[n]['cpu_seconds']:.3f}" if n in row else "–" for n in lengths)]
            for name, row in found.items()
        ]
        sections.append(
            (f"{title.partition(' at ')[0]}: CPU seconds a document", ["tokens", *map(str, lengths)], times)
        )
    evidence = by_task(results, "evidence")
    if evidence:
        lines = []
        for name, row in evidence.items():
            for result in row.values():
                shown = [f"{result[key]:.3f}" for key in ("accuracy@1", "recall@5", "mrr")]
                lines.append([results["labels"][name], *shown, f"{result['cpu_seconds']:.2f}"])
        head = ["", "recall@1", "recall@5", "MRR", "CPU s an article"]
        sections.append(("Evidence: the paragraph that answers, among those of all articles", head, lines))
    similarity = by_task(results, "sts")
    if similarity:
        sets = list(next(iter(similarity.values()))[0]["differences"])
        lines = [
            [results["labels"][name], *(interval(row[0]["differences"][each]) for each in sets)]
            for name, row in similarity.items()
        ]
        sections.append(
            ("Short sentences: Spearman's ρ × 100 less the source's, with its 95 % range", ["", *sets], lines)
        )
    return sections


def interval(difference: Mapping[str, float]) -> str:
    """A difference with its range."""
    return f"{difference['mean']:+.2f} ({difference['low']:+.2f} … {difference['high']:+.2f})"


def card(results: Mapping[str, Any]) -> str:
    """long_retrieval.md."""
    return (
        f"# Retrieval at length\n\n{describe(results['environment'])}\nWritten by scripts/bench_long_retrieval.py, "
        f"which says what is measured.\n{markdown_sections(tables(results))}"
    )


def draw(results: Mapping[str, Any], path: Path) -> None:
    """What is found, and the time that it takes, against length."""
    from hf_relpos.plot import figure_class

    figure = figure_class()(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for place, (task, (measure, _)) in zip(axes, BY_LENGTH.items(), strict=False):
        for name, row in by_task(results, task).items():
            lengths = sorted(row)
            place.plot(lengths, [row[length][measure] for length in lengths], "o-", label=results["labels"][name])
        place.set(title=task, xscale="log", xlabel="tokens of a document", ylabel=measure)
    for name, row in by_task(results, "passkey").items():
        lengths = sorted(row)
        axes[3].plot(lengths, [row[n]["cpu_seconds"] for n in lengths], "o-", label=results["labels"][name])
    axes[3].set(title="time", xscale="log", yscale="log", xlabel="tokens of a document", ylabel="CPU seconds")
    if axes[3].lines:
        axes[3].legend(fontsize=6)
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)

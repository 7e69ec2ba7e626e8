"""The tables and the picture of bench_long_retrieval.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments.reports import Table, describe, markdown_sections

from hf_relpos.evaluation import Retrieval, difference
from hf_relpos.files import atomic_file


# Task to the measure that is shown, and the title of its table.
BY_LENGTH = {
    "passkey": ("accuracy@1", "Pass key: share of questions whose document is first"),
    "needle": ("accuracy@1", "Needle in other text: the same"),
    "articles": ("ndcg@10", "Articles: nDCG@10"),
}
BASELINE = "mean"  # the reader that others are compared with


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
        sections += against_mean(results, found, measure, title, lengths)
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
                more = "–"
                if name != BASELINE and BASELINE in evidence:
                    base = next(iter(evidence[BASELINE].values()))
                    more = interval(vars(difference(retrieval(base), retrieval(result))["accuracy@1"]), digits=3)
                lines.append([results["labels"][name], *shown, more, f"{result['cpu_seconds']:.2f}"])
        head = ["", "recall@1", "recall@5", "MRR", "recall@1 less that of the windows", "CPU s an article"]
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


def against_mean(
    results: Mapping[str, Any], found: Mapping[str, Any], measure: str, title: str, lengths: Sequence[int]
) -> list[Table]:
    """What each reader finds more than the source's mean of windows, by length, with 95 % ranges over questions."""
    if BASELINE not in found:
        return []
    base = found[BASELINE]
    lines = []
    for name, row in found.items():
        if name != BASELINE:
            cells = [
                interval(vars(difference(retrieval(base[n]), retrieval(row[n]))[measure]), digits=3)
                if n in row and n in base
                else "–"
                for n in lengths
            ]
            lines.append([results["labels"][name], *cells])
    words = f"{title.partition(':')[0]}: less that of the mean of windows, with its 95 % range"
    return [(words, ["tokens", *map(str, lengths)], lines)] if lines else []


def retrieval(result: Mapping[str, Any]) -> Retrieval:
    """The ranks that were measured."""
    return Retrieval(np.array(result["ranks"].split(), dtype=int))


def interval(difference: Mapping[str, float], digits: int = 2) -> str:
    """A difference with its range."""
    mean, low, high = (f"{difference[name]:+.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} … {high})"


def card(results: Mapping[str, Any]) -> str:
    """NAME.md, beside NAME.png."""
    return (
        f"# Retrieval at length, {_source(results)}\n\n{describe(results['environment'])}\n"
        "Written by scripts/bench_long_retrieval.py, "
        "which says what is measured, in several runs of some tasks and readers each, beside other work.\n\n"
        f"![what is found against length]({results['name']}.png)\n{markdown_sections(tables(results))}"
    )


def _source(results: Mapping[str, Any]) -> str:
    """The name of the source."""
    name: str = next(iter(results["cells"].values()))["settings"]["source"]
    return name


def draw(results: Mapping[str, Any], path: Path) -> None:
    """What is found, and the time that it takes, against length: of each task the readers of the most lengths."""
    from hf_relpos.evaluation.plot import figure_class

    drawn = {}
    for task in BY_LENGTH:
        found = by_task(results, task)
        most = max(map(len, found.values()), default=0)
        if most > 1:
            drawn[task] = {name: row for name, row in found.items() if len(row) == most}
    panels = [(task, rows, BY_LENGTH[task][0]) for task, rows in drawn.items()]
    panels += [("time", rows, "cpu_seconds") for rows in list(drawn.values())[:1]]
    names = list(dict.fromkeys(name for rows in drawn.values() for name in rows))
    figure = figure_class()(figsize=(5.5 * max(1, len(panels)), 4 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for place, (title, rows, measure) in zip(axes, panels, strict=False):
        for name, row in rows.items():
            number, lengths = names.index(name), sorted(row)
            look = {"marker": "osD^v"[number // 10 % 5], "color": f"C{number % 10}", "label": results["labels"][name]}
            place.plot(lengths, [row[length][measure] for length in lengths], **look)
        place.set(title=title, xscale="log", xlabel="tokens of a document", ylabel=measure.replace("_", " "))
        place.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        place.minorticks_off()
        if title == "time":
            place.set_yscale("log")
    handles = {label: line for place in axes for line, label in zip(*place.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=8)
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)

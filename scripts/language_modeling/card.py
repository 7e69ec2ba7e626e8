"""The card and the plot of scripts/train_lm.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiments.reports import markdown_table, mean_and_deviation
from experiments.results import by_variant

from hf_relpos.files import atomic_file

from .variants import has_memory


def mean(results: Sequence[dict[str, Any]], part: str, figure: str) -> np.ndarray:
    """Mean over seeds of a figure, or of a list of figures."""
    return np.mean([result[part][figure] for result in results], axis=0)


def section(name: str, entry: dict[str, Any]) -> str:
    """One data set."""
    variants = by_variant(entry["runs"])
    unit, segment = entry["settings"]["unit"], entry["settings"]["segment"]
    edge = max(1, segment // 8)
    lines = [f"## {name}\n", *(f"- {key}: {value}" for key, value in entry["about"].items()), ""]
    for part in ("valid", "test"):
        if not all(part in result for results in variants.values() for result in results):
            continue
        rows = []
        for variant, results in variants.items():
            by_position = mean(results, part, "by_place")
            rows.append(
                [
                    f"`{variant}`",
                    mean_and_deviation([result[part]["bits"] for result in results], 3),
                    f"{by_position[:edge].mean():.3f}",
                    f"{by_position[-edge:].mean():.3f}",
                    f"{mean(results, part, 'apart'):.3f}",
                    "" if has_memory(variant) else f"{mean(results, part, 'windows'):.3f}",
                    f"{np.mean([result['train_bits'] for result in results]):.3f}",
                    f"{results[0]['parameters']:,}",
                    f"{np.mean([result['train_cpu_seconds'] for result in results]) / 60:.1f}",
                    str(len(results)),
                ]
            )
        columns = [
            "variant",
            f"bits per {unit}, {part}",
            f"first {edge} of a segment",
            f"last {edge}",
            "separate segments",
            "overlapping windows",
            "training",
            "parameters",
            "CPU min",
            "seeds",
        ]
        lines += [markdown_table(columns, rows)]
        by_memory = {
            variant: [result[part]["by_memory"] for result in results]
            for variant, results in variants.items()
            if has_memory(variant)
        }
        if by_memory:
            lengths = sorted({int(length) for results in by_memory.values() for length in results[0]})
            rows = [
                [f"`{variant}`", *(f"{np.mean([bits[str(length)] for bits in results]):.3f}" for length in lengths)]
                for variant, results in by_memory.items()
            ]
            lines += [
                f"Bits per {unit} by the length of the memory in evaluation:\n",
                markdown_table(["variant", *map(str, lengths)], rows),
            ]
    return "\n".join([*lines, f"![bits by position in the segment]({name}.png)\n"])


def card(content: dict[str, Any]) -> str:
    """README.md: every data set."""
    intro = (
        "# Language models of characters: what a memory of segments is good for\n\n"
        "Written by `scripts/train_lm.py`; every run is in [results.json](results.json). All variants of a table have "
        "the same batches, steps and number of parameters. Variants with `+memory` carry the layer inputs of the last "
        "segments along; the others process each segment by itself. `separate segments`: the same model without a "
        "memory in evaluation. `overlapping windows`: a model without memory in windows that overlap by half, at "
        "twice the cost. Training: the last tenth of the steps. Mean ± standard deviation over seeds.\n\n"
    )
    return intro + "\n".join(section(name, entry) for name, entry in content.items())


def plot(name: str, entry: dict[str, Any], path: Path) -> None:
    """Bits by position in the segment, means of sixteenths of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = entry["settings"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    width = max(1, settings["segment"] // 16)
    centres = np.arange(width / 2, settings["segment"] - settings["segment"] % width, width)

    def curve(values: np.ndarray, label: str, **style: Any) -> None:
        axes.plot(centres, values[: len(centres) * width].reshape(-1, width).mean(1), label=label, **style)

    for number, (variant, results) in enumerate(by_variant(entry["runs"]).items()):
        style = {"color": f"C{number}", "marker": ".", "linewidth": 1.5}
        curve(mean(results, "valid", "by_place"), variant, **style)
        if has_memory(variant):
            curve(
                mean(results, "valid", "by_place_apart"), f"{variant}, without in evaluation", **style, linestyle=":"
            )
    unit = settings["unit"]
    axes.set(xlabel=f"position in the segment, {unit}s", ylabel=f"bits per {unit}", title=f"{name}, validation text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)

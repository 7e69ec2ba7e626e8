"""The card of scripts/train_ner.py."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.reports import markdown_table, mean_and_deviation
from experiments.results import by_variant

from .variants import CLAIMS, LABELS, VARIANTS


def compare_means(better: Sequence[float], worse: Sequence[float]) -> str:
    """The difference of two means, and whether it is above two of its standard errors (Welch's)."""
    difference = statistics.mean(better) - statistics.mean(worse)
    if min(len(better), len(worse)) < 2:
        return f"{difference:+.1f}, one seed"
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (better, worse)))
    word = "too small to tell" if abs(difference) < 2 * error else "**yes**" if difference > 0 else "**no**"
    return f"{word}: {difference:+.1f} (standard error {error:.1f})"


def section(name: str, entry: dict[str, Any]) -> str:
    """One data set."""
    results = by_variant(entry["runs"], VARIANTS)

    def values(variant: str, figure: str) -> list[float]:
        return [result[figure] for result in results[variant]]

    def mean(variant: str, figure: str) -> float:
        return statistics.mean(values(variant, figure))

    baseline = mean("absolute", "f1") if "absolute" in results else None
    rows = [
        [
            LABELS.get(variant, f"`{variant}`"),
            mean_and_deviation(values(variant, "f1")),
            "" if baseline is None else f"{mean(variant, 'f1') - baseline:+.1f}",
            f"{mean(variant, 'precision'):.1f}",
            f"{mean(variant, 'recall'):.1f}",
            f"{mean(variant, 'train_loss'):.4f}",
            f"{seeds[0]['parameters']:,}",
            f"{mean(variant, 'cpu_seconds'):.0f}",
            str(len(seeds)),
        ]
        for variant, seeds in results.items()
    ]
    columns = ["scheme", "F1", "− absolute", "precision", "recall", "training loss", "parameters", "CPU s", "seeds"]
    claims = [
        f"- {claim}: `{one}` over `{other}`: {compare_means(values(one, 'f1'), values(other, 'f1'))}"
        for one, other, claim in CLAIMS
        if one in results and other in results
    ]
    minutes = sum(result["cpu_seconds"] for seeds in results.values() for result in seeds) / 60
    about = [f"- {key}: {value}" for key, value in entry["about"].items()]
    return "\n".join(
        [
            f"## {name}\n",
            *about,
            f"- all runs: {minutes:.1f} CPU minutes\n",
            markdown_table(columns, rows),
            *claims,
            "",
        ]
    )


def card(content: dict[str, Any]) -> str:
    """README.md: every data set."""
    intro = (
        "# Named entities, trained from scratch: TENER's experiment\n\n"
        "Written by `scripts/train_ner.py`; every run is in [results.json](results.json). F1, precision and recall of "
        "entities by seqeval (as the CoNLL-2000 scorer counts), in percent, mean ± standard deviation over seeds, on "
        "the development file, measured once after a fixed number of epochs. All schemes have the same budget. "
        "`− absolute`: difference of the means. Training loss: of the last epoch, with dropout. A difference under "
        "two of its standard errors is called too small to tell.\n\n"
    )
    return intro + "\n".join(section(name, entry) for name, entry in content.items())

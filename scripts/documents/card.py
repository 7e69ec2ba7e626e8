"""The card of scripts/classify_documents.py."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from experiments.reports import markdown_table, mean_and_deviation
from experiments.results import by_variant

from hf_relpos.evaluation.statistics import paired_bootstrap

from .strategies import CONVERTED, LONG, MODELS, Strategy
from .task import LONG_DOCUMENT


# Kinds of strategies to compare, with the same number of tokens where there are such, and what the difference shows.
COMPARISONS = [
    ("chunks", "truncate", "what the rest of the document tells"),
    ("segments", "chunks", "what the conversion does"),
    ("memory", "segments", "what the memory does"),
    ("memory", "chunks", "memory, against the source in pieces"),
    ("long", "chunks", "all at once, against the source in pieces"),
    ("memory", "truncate", "memory, against truncation"),
    ("long", "truncate", "all at once, against truncation"),
]


def correct(results: Sequence[dict[str, Any]]) -> np.ndarray:
    """(documents,): fraction of the seeds that classified each document correctly."""
    return np.array([[int(digit) for digit in result["right"]] for result in results]).mean(0)


def compare(better: Sequence[dict[str, Any]], worse: Sequence[dict[str, Any]]) -> str:
    """The difference of two strategies on the same documents, with its 95 % range by resampling the documents."""
    one, other = correct(better), correct(worse)
    gain = paired_bootstrap(lambda drawn: 100 * float((one - other)[drawn].mean()), len(one))
    word = "too small to tell" if gain.low <= 0 <= gain.high else "**more**" if gain.mean > 0 else "**less**"
    changed = f"{int((one > other).sum())} documents better, {int((one < other).sum())} worse"
    return f"{word}: {gain.mean:+.1f} ({gain.low:+.1f} to {gain.high:+.1f}; {changed})"


def comparisons(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line for each of COMPARISONS that was measured."""
    lines = []
    for kind, other_kind, description in COMPARISONS:
        strategies = {name: Strategy.parse(name) for name in results}
        pairs = [
            (one, other)
            for one in results
            for other in results
            if (strategies[one].kind, strategies[other].kind) == (kind, other_kind)
        ]
        same_length = [pair for pair in pairs if strategies[pair[0]].length == strategies[pair[1]].length]
        for one, other in same_length or pairs:
            lines.append(f"- {description}: `{one}` − `{other}`: {compare(results[one], results[other])}")
    return lines


def section(name: str, entry: dict[str, Any]) -> str:
    """One data set."""
    results, settings = by_variant(entry["runs"]), entry["settings"]
    # without a conversion of its own, a long strategy reads with the other one
    models = {**MODELS, LONG: MODELS[CONVERTED if settings[CONVERTED] and not settings[LONG] else LONG]}
    count = len(next(iter(results.values()))[0]["right"])
    rows = []
    for key, seeds in results.items():
        strategy = Strategy.parse(key)
        memory = entry["memory"].get(key)
        long = [result["accuracy_long"] for result in seeds]
        rows.append(
            [
                f"`{key}`",
                f"{models[strategy.model]}: {strategy.description}",
                mean_and_deviation([result["accuracy"] for result in seeds]),
                "–" if None in long else mean_and_deviation(long),
                f"{statistics.mean(result['train_loss'] for result in seeds):.3f}",
                f"{seeds[0]['tokens'] / count:.0f}",
                f"{statistics.mean(result['infer_cpu_seconds'] for result in seeds):.2f}",
                f"{seeds[0]['below_cpu_seconds']:.0f} + {statistics.mean(r['train_cpu_seconds'] for r in seeds):.0f}",
                "–" if memory is None else f"{memory['read_mb']:.0f}",
                "–" if memory is None else f"{memory['train_mb']:.0f}",
                str(len(seeds)),
            ]
        )
    columns = ["strategy", "what it reads", "accuracy", f"over {LONG_DOCUMENT}", "training loss"]
    columns += ["tokens a document", "CPU s a document", "CPU s of training", "MB reading", "MB training", "seeds"]
    means = [correct(seeds).mean() for seeds in results.values()]
    errors = [100 * float((mean * (1 - mean) / count) ** 0.5) for mean in means]
    lines = [
        *comparisons(results),
        f"- standard error of one accuracy alone, over {count} documents: {min(errors):.1f} to {max(errors):.1f}",
    ]
    about = [f"- {key}: {value}" for key, value in entry["about"].items()]
    return "\n".join([f"## {name}\n", *about, "", markdown_table(columns, rows), *lines, ""])


def card(content: dict[str, Any]) -> str:
    """README.md: every data set."""
    intro = (
        "# Documents longer than a segment\n\n"
        "Written by `scripts/classify_documents.py`, which describes the strategies; every run is in "
        "[results.json](results.json). All have the same documents, head, optimiser, epochs and seeds. Accuracy in "
        "percent, mean ± standard deviation over seeds, measured once at the end of training, on all documents and on "
        f"those of more than {LONG_DOCUMENT} tokens. Strategies are compared document by document below the table, "
        "with the 95 % range of resampled documents (1,000 draws); a difference whose range holds 0 is called too "
        "small to tell. Training loss: of the last epoch, with dropout. CPU s a document: to read and classify it, "
        "frozen layers included. CPU s of training: frozen layers once for all seeds + all epochs of one seed. MB: "
        "the longest development document's, beside the model, in a fresh process; training includes reading.\n\n"
    )
    return intro + "\n".join(section(name, entry) for name, entry in content.items())

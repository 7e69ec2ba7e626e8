"""Print the results of `compare_models` as tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import print_table
from .model_fidelity import Fidelity


def print_fidelity(fidelity: Fidelity, console: Console, verbose: bool = False) -> None:
    """Print tables by length, and the lengths that were not measured; the attention's if `verbose`."""
    entries = {f"{entry.length:,}": entry for entry in fidelity.lengths}
    past = {name: entry for name, entry in entries.items() if entry.reference != "teacher"}
    rows = [(name + " *" * (name in past), str(entry.windows), *entry.cosine_cells) for name, entry in entries.items()]
    columns = ["tokens", "windows", "token", "sentence", "shifted: token", "sentence"]
    print_table(console, "Cosine to the source", columns, rows)
    notes = ["shifted: the source compared with itself when its input is shifted by some positions"]
    if past:
        notes.append(
            "* compared with the source's states of overlapping windows; shifted: with those of other windows"
        )
    notes += [f"{length:,} tokens not measured: {reason}" for length, reason in fidelity.skipped.items()]
    console.print("\n".join(notes), markup=False, highlight=False)
    quarters = [(name, *(f"{each:.3f}" for each in entry.token_cosine_by_quarter)) for name, entry in past.items()]
    if quarters:
        columns = ["tokens", "1st", "2nd", "3rd", "4th"]
        print_table(console, "Token cosine by quarter of the text", columns, quarters)
    weights = [(name, *(f"{each:.3f}" for each in entry.divergence or ())) for name, entry in entries.items()]
    weights = [row for row in weights if len(row) > 1]
    if weights and verbose:
        columns = ["tokens", *(f"layer {layer}" for layer in range(len(weights[0]) - 1))]
        print_table(console, "Attention: KL(source‖result), nats", columns, weights)
    masked = [(name, f"{e.masked.tokens:,}", *e.masked_cells) for name, e in entries.items() if e.masked]
    if masked:
        columns = ["tokens", "masked", "same prediction", "source right", "result right"]
        print_table(console, "Masked tokens, %", columns, masked)


def print_comparison(results: Mapping[str, Any], console: Console, verbose: bool = False) -> None:
    """Print the result of `compare_models` as tables, and its verdict."""
    print_fidelity(Fidelity.from_dict(results), console, verbose)
    if "as_it_is" in results:
        plain = {entry["length"]: entry for entry in results["as_it_is"]["lengths"]}
        both = [(entry, plain[entry["length"]]) for entry in results["lengths"] if entry["length"] in plain]
        rows: list[tuple[str, ...]] = [
            (f"{pair[0]['length']:,}", *(f"{e[f'{kind}_cosine']:.3f}" for kind in ("token", "sentence") for e in pair))
            for pair in both
        ]
        columns = ["tokens", "token", "as it is", "sentence", "as it is"]
        title = f"Cosine to the source's windows with attention_window = {results['attention_window']}, and as it is"
        print_table(console, title, columns, rows)
    if "similarity" in results:
        rows = []
        for name, row in results["similarity"].items():
            gap, cosine = row["difference"], row["sentence_cosine"]
            figures = [f"{row['teacher']:.2f}", f"{row['student']:.2f}"]
            figures += [f"{gap['mean']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"]
            figures += [f"{cosine['mean']:.3f} ({cosine['min']:.3f})"]
            rows.append((Path(name).name, f"{row['pairs']:,}", *figures))
        columns = ["set", "pairs", "source", "result", "difference, 95 %", "cosine (least)"]
        print_table(console, "Similarity: Spearman × 100", columns, rows)
    console.print(f"Verdict: {results['verdict']}.", markup=False, highlight=False, soft_wrap=True)

"""Print the results of `compare_models` as tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import print_table
from .fidelity_report import Fidelity


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_fidelity(fidelity: Fidelity, console: Console) -> None:
    """Print tables by length, and the lengths that were not measured."""
    past = [entry for entry in fidelity.lengths if entry.reference != "teacher"]
    rows: list[tuple[str, ...]] = []
    for entry in fidelity.lengths:
        name = f"{entry.length:,}" + (" *" if entry in past else "")
        rows.append((name, str(entry.windows), *map(_cosine, entry.cosines)))
    columns = ["tokens", "windows", "token", "sentence", "shifted: token", "sentence"]
    print_table(console, "Cosine to the teacher", columns, rows)
    notes = ["shifted: the teacher compared with itself when its input is shifted by some positions"]
    if past:
        notes.append(
            "* compared with the teacher's states of overlapping windows; shifted: with those of other windows"
        )
    notes += [f"{length:,} tokens not measured: {reason}" for length, reason in fidelity.skipped.items()]
    console.print("\n".join(notes), markup=False, highlight=False)
    if past:
        rows = [(f"{entry.length:,}", *map(_cosine, entry.token_cosine_by_quarter)) for entry in past]
        print_table(console, "Token cosine by quarter of the text", ["tokens", "1st", "2nd", "3rd", "4th"], rows)
    compared = [(entry.length, entry.divergence) for entry in fidelity.lengths if entry.divergence]
    if compared:
        columns = ["tokens", *(f"layer {layer}" for layer in range(len(compared[0][1])))]
        rows = [(f"{length:,}", *(f"{value:.3f}" for value in divergence)) for length, divergence in compared]
        print_table(console, "Attention: KL(teacher‖student), nats", columns, rows)
    rows = [
        (f"{entry.length:,}", f"{entry.masked.tokens:,}", *map(_percent, entry.masked_shares))
        for entry in fidelity.lengths
        if entry.masked
    ]
    if rows:
        columns = ["tokens", "masked", "same prediction", "teacher right", "student right"]
        print_table(console, "Masked tokens, %", columns, rows)


def print_comparison(results: Mapping[str, Any], console: Console) -> None:
    """Print the result of `compare_models` as tables, and its verdict."""
    print_fidelity(Fidelity.from_dict(results), console)
    if "as_it_is" in results:
        _print_both(results, console)
    if "similarity" in results:
        rows = []
        for name, row in results["similarity"].items():
            gap, cosine = row["difference"], row["sentence_cosine"]
            figures = [f"{row['teacher']:.2f}", f"{row['student']:.2f}"]
            figures += [f"{gap['mean']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"]
            figures += [f"{cosine['mean']:.3f} ({cosine['min']:.3f})"]
            rows.append((Path(name).name, f"{row['pairs']:,}", *figures))
        columns = ("set", "pairs", "teacher", "student", "difference, 95 %", "cosine (least)")
        print_table(console, "Similarity: Spearman × 100", columns, rows)
    console.print(f"Verdict: {results['verdict']}.", markup=False, highlight=False, soft_wrap=True)


def _print_both(results: Mapping[str, Any], console: Console) -> None:
    """Print the lengths that were measured with the given window and with the student's own."""
    plain = {entry["length"]: entry for entry in results["as_it_is"]["lengths"]}
    rows = [
        (
            f"{entry['length']:,}",
            *(
                _cosine(each[key])
                for key in ("token_cosine", "sentence_cosine")
                for each in (entry, plain[entry["length"]])
            ),
        )
        for entry in results["lengths"]
        if entry["length"] in plain
    ]
    columns = ("tokens", "token", "as it is", "sentence", "as it is")
    title = f"Cosine to the teacher's windows with attention_window = {results['attention_window']}, and as it is"
    print_table(console, title, columns, rows)

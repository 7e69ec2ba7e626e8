"""Print the results of `compare_models` and `evaluate_model` as tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import print_table
from .fidelity_report import Fidelity


PASSKEY = (
    "vector: share of texts whose vector is nearest to the statement of their own key, among those of 10 keys; "
    "masked: whose own key is the likeliest of 10 at masked tokens. LongEmbed's pass keys, in README and "
    "docs/long_inputs.md, are another task: a question ranks 50 texts, and the right one is first"
)


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


def print_evaluation(results: Mapping[str, Any], console: Console) -> None:
    """Print the result of `evaluate_model` as tables."""
    rows: list[tuple[str, ...]]
    if "similarity" in results:
        rows = [(Path(n).name, f"{r['pairs']:,}", f"{r['spearman']:.2f}") for n, r in results["similarity"].items()]
        print_table(console, "Similarity", ("set", "pairs", "Spearman × 100"), rows)
    if "retrieval" in results:
        rows = []
        for name, row in results["retrieval"].items():
            gain = row.get("difference", {}).get("ndcg@10")
            shown = f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})" if gain else ""
            rows.append((name, _percent(row["accuracy@1"]), f"{row['mrr']:.3f}", f"{row['ndcg@10']:.3f}", shown))
        count = next(iter(results["retrieval"].values()))["queries"]
        columns = ("strategy", "accuracy@1, %", "MRR", "nDCG@10", "nDCG on truncate, 95 %")
        print_table(console, f"Retrieval, {count:,} queries", columns, rows)
    if "masked" in results:
        rows = [
            (length, str(row["windows"]), f"{row['accuracy']:.2f}", f"{row['nll']:.3f}")
            for length, row in results["masked"].items()
        ]
        print_table(console, "Masked tokens", ("tokens", "windows", "accuracy, %", "nll, nats"), rows)
    if "passkey" in results:
        rows = [
            (
                length,
                method,
                _percent(row["accuracy"]),
                " ".join(_percent(v) for key, v in row.items() if key.startswith("depth")),
                _percent(row["chance"]),
            )
            for length, methods in results["passkey"].items()
            for method, row in methods.items()
        ]
        print_table(console, "Passkey, %", ("tokens", "by", "accuracy", "by depth", "chance"), rows)
        console.print(PASSKEY, markup=False, highlight=False)
    if "as_it_is" in results:
        window = results["as_it_is"]["attention_window"]
        console.print(f"\nLong texts as it is, with attention_window = {window}:", markup=False, highlight=False)
        print_evaluation(results["as_it_is"], console)

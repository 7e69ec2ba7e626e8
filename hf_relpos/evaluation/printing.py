"""Print the results of `compare_models` as tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ..console import print_table
from .model_fidelity import Fidelity


def print_comparison(results: Mapping[str, Any], console: Console) -> None:
    """Print the result of `compare_models`: tables by length, lengths that were not measured, and the verdict."""
    fidelity = Fidelity.from_dict(results)
    entries = {f"{entry.length:,}": entry for entry in fidelity.lengths}
    past = {name: entry for name, entry in entries.items() if entry.reference != "teacher"}
    rows = [(name + " *" * (name in past), str(entry.windows), *entry.cosine_cells) for name, entry in entries.items()]
    window = f", with attention_window = {size}" if (size := results.get("attention_window")) else ""
    print_table(console, f"Cosine to the source{window}", ["tokens", "windows", "token", "sentence"], rows)
    notes = [
        f"* compared with overlapping windows of the source; other windows of the source agree with these to "
        f"{entry.other_windows:.3f} at {name} tokens"
        for name, entry in past.items()
    ]
    notes += [f"{length:,} tokens not measured: {reason}" for length, reason in fidelity.skipped.items()]
    if notes:
        console.print("\n".join(notes), markup=False, highlight=False)
    masked = [(name, f"{e.masked.tokens:,}", *e.masked_cells) for name, e in entries.items() if e.masked]
    if masked:
        columns = ["tokens", "masked", "same prediction", "source right", "result right"]
        print_table(console, "Masked tokens, %", columns, masked)
    console.print(f"Verdict: {results['verdict']}.", markup=False, highlight=False, soft_wrap=True)

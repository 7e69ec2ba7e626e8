"""Print the report of a conversion in the terminal."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from ..console import print_table
from .report import ConversionReport


def print_report(report: ConversionReport, console: Console) -> None:
    """Print what was made, the agreement by length, the verdict, notes and the next steps.

    `conversion.json` has every tensor and all measurements.
    """
    given = report.arguments.get("position_options") or {}
    options = f" ({', '.join(f'{key} = {value}' for key, value in given.items())})" if given else ""
    result = f"{report.architecture} → {report.converted_to}, scheme {report.scheme}{options}"
    _print_lines(console, [f"{result}, method {report.method}"])
    if report.fidelity is not None:
        rows = [(f"{entry.length:,}", *entry.cosine_cells) for entry in report.fidelity.lengths]
        print_table(console, "Cosine to the source", ("tokens", "token", "sentence"), rows)
    text_notes = [f"Note: {note}" for note in report.details.get("text", {}).get("notes", ())]
    _print_lines(console, [report.how_close, *report.notes, *text_notes, ""])
    out = shlex.quote(report.out)
    steps = [
        f"written to {report.out}",
        f"load:     import hf_relpos; {report.loading(repr(report.out))}",
        f"compare:  hf-relpos compare {shlex.quote(report.source)} {out} --texts HELD_OUT.txt",
        f"upload:   hf upload USER/NAME {out}",
    ]
    console.print("\n".join(steps), highlight=False, markup=False, soft_wrap=True)  # commands stay whole


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    """Print prose, which breaks between words in a terminal."""
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=not console.is_terminal)

"""Print the report of a conversion in the terminal."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from ..console import print_table
from .folder import MODULES
from .report import ConversionReport


def _print_lines(console: Console, lines: Sequence[str], prose: bool = True) -> None:
    """Print lines; prose breaks between words in a terminal, commands stay whole."""
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=not (prose and console.is_terminal))


def print_report(report: ConversionReport, console: Console) -> None:
    """Print what was made, the agreement at four lengths, the verdict, notes and the next steps.

    `conversion.json` has every tensor and all measurements.
    """
    _print_lines(console, [_what(report)])
    if report.fidelity is not None:
        entries = report.fidelity.lengths
        last = len(entries) - 1
        shown = [entries[place] for place in sorted({round(step * last / 3) for step in range(4)})]
        columns = ("tokens", *(f"{entry.length:,}" for entry in shown))
        cosines = [("of tokens", *(f"{entry.token_cosine:.3f}" for entry in shown))]
        cosines += [("of sentences", *(f"{entry.sentence_cosine:.3f}" for entry in shown))]
        print_table(console, "Cosine to the source", columns, cosines)
    _print_lines(console, [*_lines(report), ""])
    _print_lines(console, _next_steps(report), prose=False)


def _next_steps(report: ConversionReport) -> list[str]:
    """How to load, compare and upload the result."""
    out = shlex.quote(report.out)
    load = f"{report.auto_class}.from_pretrained({report.out!r})"
    if MODULES in report.files and report.has_tokenizer:
        load = f"SentenceTransformer({report.out!r})"
    return [
        f"written to {report.out}",
        f"load:     import hf_relpos; {load}",
        f"compare:  hf-relpos compare {shlex.quote(report.source)} {out} --text HELD_OUT.txt",
        f"upload:   hf upload USER/NAME {out}",
    ]


def _what(report: ConversionReport) -> str:
    """Source, result, scheme with the options that were given, and method; conversion.json has all options."""
    given = report.arguments.get("position_options") or {}
    options = f" ({', '.join(f'{key} = {value}' for key, value in given.items())})" if given else ""
    result = f"{report.architecture} → {report.converted_to}, scheme {report.scheme}{options}"
    return f"{result}, method {report.method}"


def _lines(report: ConversionReport) -> list[str]:
    """The agreement in words, and notes."""
    details = report.details
    lines = []
    if report.difference is not None:
        lines.append(f"largest relative difference of outputs to the source's: {report.difference:.1e}")
    if "skipped" in (measured := details.get("fidelity", {})) and "lengths" not in measured:
        lines.append(f"fidelity not measured: {measured['skipped']}")
    if report.verdict:
        lines.append(f"Verdict: {report.verdict}.")
    lines += report.notes
    lines += [f"Note: {note}" for note in details.get("text", {}).get("notes", ())]
    return lines

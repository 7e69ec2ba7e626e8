"""Print the report of a conversion in the terminal."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ..console import new_table, print_table
from ..evaluation.printing import print_fidelity
from ..models.modeling_relpos_bert import HEADS
from ..training import DistillationReport
from .folder import MODULES
from .push import Upload
from .report import ConversionReport


# Footnote marks for notes that several tensors share.
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"


def print_report(report: ConversionReport, console: Console, verbose: bool = False) -> None:
    """Print what was made, how close it is, what it can do, and what to do next.

    Args:
        verbose: also print the tensors, one row for all layers, all measurements and what they
            cost; then the summary again.
    """
    _print_summary(report, console)
    if not verbose:
        return
    _print_tensors(report, console)
    if report.fidelity is not None:
        print_fidelity(report.fidelity, console)
    _print_lines(console, _details(report))
    _print_summary(report, console)


def _print_lines(console: Console, lines: Sequence[str], prose: bool = True) -> None:
    """Print lines; prose breaks between words in a terminal, commands stay whole."""
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=not (prose and console.is_terminal))


def _print_summary(report: ConversionReport, console: Console) -> None:
    """Print what was made, the agreement at four lengths, the verdict, notes and the next steps."""
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
    auto = next(auto for auto, head in HEADS.items() if head.__name__ == report.converted_to)
    load = f"{auto}.from_pretrained({report.out!r})"
    if MODULES in report.files:
        load = f"SentenceTransformer({report.out!r})"
    return [
        f"written to {report.out}",
        f"load:     import hf_relpos; {load}",
        f"compare:  hf-relpos compare {shlex.quote(report.source)} {out} --text HELD_OUT.txt",
        f"push:     hf-relpos push {out} USER/NAME",
    ]


def print_upload(upload: Upload, console: Console) -> None:
    """Print files with their sizes, files that stay, and problems."""
    rows = [(name, f"{size:,}") for name, size in upload.files.items()]
    total = ("together", f"{sum(upload.files.values()):,}")
    print_table(console, f"{upload.folder} → {upload.repository}", ("file", "bytes"), [*rows, total])
    if upload.left_out:
        lines = [f"stays here, as not known to belong to a checkpoint: {', '.join(upload.left_out)}"]
        _print_lines(console, lines, prose=False)
    _print_lines(console, [f"Problem: {problem}" for problem in upload.problems], prose=False)


def _print_tensors(report: ConversionReport, console: Console) -> None:
    """Print one row for the same tensor of all layers; a note of several rows becomes a footnote."""
    rows: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    for step in report.steps:
        name = (step.target or step.source or "").removeprefix("bert.")
        key = (step.kind, re.sub(r"^encoder\.layer\.\d+\.", "layer.*.", name), step.shape, step.note)
        count = rows.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += step.parameters
    notes = Counter(note for _, _, _, note in rows if note)
    shared = {note: MARKS[n % len(MARKS)] for n, note in enumerate(note for note in notes if notes[note] > 1)}

    table = new_table("", "", "tensor", "shape", "parameters", padding=(0, 1, 0, 0))
    for column in (1, 4):
        table.columns[column].justify = "right"
    for (kind, name, shape, note), (tensors, parameters) in rows.items():
        times = f"{tensors} ×" if tensors > 1 else ""
        below = f" {shared[note]}" if note in shared else f"\n{note}" if note else ""
        tensor = Text(name).append(below, style="italic")
        table.add_row(kind, times, tensor, "×".join(map(str, shape)), f"{parameters:,}")
    console.print(table)
    for note, mark in shared.items():
        console.print(f"{mark} {note}", style="italic", highlight=False, markup=False)


def _what(report: ConversionReport) -> str:
    """Source, result, method and scheme."""
    options = ", ".join(f"{key} = {value}" for key, value in report.position_options.items())
    return (
        f"{report.architecture} → {report.converted_to}, "
        + (f"quality {report.quality}, " if report.quality else "")
        + f"method {report.method}, scheme {report.scheme}"
        + (f" ({options})" if options else "")
    )


def _lines(report: ConversionReport) -> list[str]:
    """The agreement in words, and notes."""
    details = report.details
    lines = []
    if report.difference is not None:
        lines.append(f"largest difference of an output to the source's, relative: {report.difference:.1e}")
    if "skipped" in (measured := details.get("fidelity", {})) and "lengths" not in measured:
        lines.append(f"fidelity not measured: {measured['skipped']}")
    if report.verdict:
        lines.append(f"Verdict: {report.verdict}.")
    lines += report.notes
    lines += [f"Note: {note}" for note in details.get("text", {}).get("notes", ())]
    if report.left_out:
        lines.append(f"left out, as not known to belong to a checkpoint: {', '.join(report.left_out)}")
    return lines


def _details(report: ConversionReport) -> list[str]:
    """Numbers of tensors, the text, and what the conversion cost."""
    details = report.details
    lines = [
        f"{kind:8} {total['tensors']:6,} tensors {total['parameters']:14,} parameters"
        for kind, total in report.totals.items()
    ]
    if (text := details.get("text")) is not None:
        lines.append(report.text_in_words())
        pairs = " · ".join(f"{distances}: {count:,}" for distances, count in text["seen"].items())
        lines.append(f"pairs of tokens seen, by distance: {pairs}")
    if (distillation := details.get("distillation")) is not None:
        lines.append(f"distilled: {DistillationReport(**distillation).summary()}")
    lines += [report.pairs_in_words] if report.pairs_in_words else []
    if spent := details.get("cpu_seconds"):
        parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in spent.items())
        lines.append(f"processor time: {parts}")
    return [*lines, ""]

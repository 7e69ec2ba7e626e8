"""What the tables of a calibrated model earn and cost: fidelity to its source against the time of the whole model.

    python scripts/bench_calibrated.py --source all-MiniLM-L6-v2 --data DATA
    python scripts/bench_calibrated.py --source … --data … --variants 'harmonic*' 'tables ABcV'
    python scripts/bench_calibrated.py --list

Each variant is a scheme with options: which terms, how many knots or waves, coefficients of each head or shared. It is
calibrated on training text, compared with the source on the converter's own held-out passages and on a text of another
kind (cosines at each length) and on similarity sets, and timed in turns with the source at 128 and 512 tokens
(`time.thread_time`, one thread). Two to three minutes of a core each. Writes OUT/calibrated.json and .md after every
variant, and .png at the end (extra `plot`); one that is in the JSON with the same settings is not measured again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversion_quality.texts import DATA, draw_pairs
from experiments.arguments import RESULTS, check_patterns, positive_int, reproducing_command
from experiments.measuring import environment, forward_times
from experiments.process import start_quietly
from experiments.reports import Table, describe, markdown_sections, print_tables, write_report

from hf_relpos import convert
from hf_relpos.evaluation import (
    Encoder,
    FidelitySettings,
    Pair,
    fidelity,
    load_encoder,
    pair_vectors,
    rank_correlation,
    similarities,
)
from hf_relpos.evaluation.compare import windows_by_length
from hf_relpos.files import atomic_file


OTHER = "text/peps.jsonl.xz", "body"  # technical specifications
LENGTHS = (16, 64, 128, 256, 512)
TIMED = (128, 512)


@dataclass(frozen=True)
class Variant:
    """A scheme with options, and options of the method."""

    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)


def variants() -> dict[str, Variant]:
    """Name to variant: terms, then knots, then waves, then coefficients shared by the heads."""
    found = {}
    for terms in ("ABcV", "ABc", "AcV", "Ac", "cV", "c"):
        found[f"tables {terms}"] = Variant("tables", {"terms": terms})
    found["tables ABcV, 8 + 2 an octave"] = Variant("tables", {"dense": 8, "per_octave": 2})
    for waves in (8, 4, 16, 32):
        for terms in ("ABcV", "AcV", "ABc", "Ac"):
            found[f"harmonic {terms}, W = {waves}"] = Variant("harmonic", {"terms": terms, "waves": waves})
    found["tables AcV, shared"] = Variant("tables", {"terms": "AcV", "per_head": False})
    found["harmonic AcV, W = 8, shared"] = Variant("harmonic", {"terms": "AcV", "waves": 8, "per_head": False})
    found["relative_key"] = Variant("relative_key")
    return found


class Reference:
    """What all variants are compared with, read once."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.teacher = args, load_encoder(args.source, masked=False)

    @cached_property
    def windows(self) -> dict[int, Any]:
        """Of the text of another kind, by length."""
        path, count = [self.args.other], self.args.window_tokens
        return windows_by_length(self.teacher.tokenizer, path, self.args.other_field, LENGTHS, count)[0]

    @cached_property
    def pairs(self) -> dict[str, tuple[list[Pair], Any]]:
        """The pairs of each similarity set, and the teacher's cosines."""
        drawn = {path.name: draw_pairs(str(path), self.args.sts_pairs, self.args.seed) for path in self.args.sts}
        return {name: (pairs, similarities(pair_vectors(self.teacher, pairs))) for name, pairs in drawn.items()}


def measure(variant: Variant, reference: Reference, texts: list[Path], fields: list[str]) -> dict[str, Any]:
    """Fidelity, similarity sets and time of one variant."""
    args, teacher = reference.args, reference.teacher
    with tempfile.TemporaryDirectory() as folder:
        report = convert(
            args.source,
            Path(folder) / "out",
            position_embedding_type=variant.scheme,
            position_options=variant.options,
            method="calibrate",
            method_options={"tokens": args.tokens, **variant.method},
            texts=texts,
            field=fields,
            seed=args.seed,
            device="cpu",
        )
        student = load_encoder(str(Path(folder) / "out"), pooling=teacher.pooling)
    settings = FidelitySettings(teacher.pooling, divergence=False, ceiling=False)
    other = fidelity(teacher.model, student.model, reference.windows, settings).lengths
    own = report.fidelity.lengths if report.fidelity else []
    return {
        "sentence": {str(entry.length): round(entry.sentence_cosine, 4) for entry in own},
        "token": {str(entry.length): round(entry.token_cosine, 4) for entry in own},
        "other": {str(entry.length): round(entry.sentence_cosine, 4) for entry in other},
        "sts": {name: similarity_difference(student, *known) for name, known in reference.pairs.items()},
        "times": {str(length): times(teacher.model, student.model, length, args.rounds) for length in TIMED},
        "fit_cpu_seconds": round(report.details["calibration"]["cpu_seconds"], 1),
    }


def similarity_difference(student: Encoder, pairs: Sequence[Pair], expected: Any) -> float:
    """Spearman's ρ × 100 of the student less that of the teacher, whose cosines are `expected`."""
    scores = np.array([pair.score for pair in pairs])
    ours = similarities(pair_vectors(student, pairs))
    return round(100 * (rank_correlation(ours, scores) - rank_correlation(expected, scores)), 2)


def times(teacher: torch.nn.Module, student: torch.nn.Module, length: int, rounds: int) -> dict[str, float]:
    """CPU seconds of a forward pass of the source and of the variant."""
    taken = forward_times({"source": teacher, "variant": student}, length, rounds)
    return {name: round(seconds, 5) for name, seconds in taken.items()}


def ratio(row: Mapping[str, Any], length: int) -> float:
    """Time of the variant in units of the source's."""
    return row["times"][str(length)]["variant"] / row["times"][str(length)]["source"]


def on_the_front(rows: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Whether no other variant is both closer (mean sentence cosine, own text) and quicker at the longest length."""
    mean = {other: sum(row["sentence"].values()) / len(row["sentence"]) for other, row in rows.items()}
    cost = {other: ratio(row, TIMED[-1]) for other, row in rows.items()}
    return not any(mean[other] > mean[name] and cost[other] < cost[name] for other in rows)


def tables(results: dict[str, Any]) -> list[Table]:
    """One row for each variant, the quickest first; those on the front are marked."""
    rows = {name: entry["result"] for name, entry in results["variants"].items()}
    lines = []
    cosines = {"token": "token", "sentence": "sentence", "other": "sentence, text of another kind"}
    for name, row in sorted(rows.items(), key=lambda item: ratio(item[1], TIMED[-1])):
        shown = [
            " ".join(f"{row[key][str(length)]:.3f}".lstrip("0") for length in LENGTHS if str(length) in row[key])
            for key in cosines
        ]
        cost = [f"{ratio(row, length):.2f}" for length in TIMED]
        similarity = f"{sum(row['sts'].values()) / len(row['sts']):+.2f}"
        mark = "•" if on_the_front(rows, name) else ""
        lines.append([name, mark, *cost, *shown, similarity, f"{row['fit_cpu_seconds']:.0f}"])
    columns = ["variant", "front", *(f"time × source, {length}" for length in TIMED), *cosines.values()]
    return [("Fidelity and time", [*columns, "similarity sets", "fit, CPU s"], lines)]


def card(results: dict[str, Any]) -> str:
    """calibrated.md."""
    return (
        f"# Calibrated models: what their tables earn and cost\n\n{describe(results['environment'])}\n"
        f"Written by scripts/bench_calibrated.py: {results['about']}. Token and sentence cosine to the source at "
        f"{' / '.join(map(str, LENGTHS))} tokens; Spearman's ρ × 100 less the source's, mean of the similarity sets; "
        "times of the whole model, forward, 1,024 tokens in rows of one length, beside the source (SDPA) in the same "
        "process. • no other variant is both closer (mean sentence cosine, held-out passages) and quicker (512 "
        "tokens).\n"
        f"{markdown_sections(tables(results))}\n![closeness against time](calibrated.png)\n"
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Mean sentence cosine against time at the longest length."""
    from hf_relpos.evaluation.plot import figure_class

    figure = figure_class()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = {name: entry["result"] for name, entry in results["variants"].items()}
    for name, row in rows.items():
        mean = sum(row["sentence"].values()) / len(row["sentence"])
        front = on_the_front(rows, name)
        axes.plot(ratio(row, TIMED[-1]), mean, "o", color="C1" if front else "0.6")
        axes.annotate(name, (ratio(row, TIMED[-1]), mean), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axes.margins(x=0.15)  # for the names
    axes.set_xlabel(f"time of the whole model at {TIMED[-1]} tokens, × its source")
    axes.set_ylabel("mean sentence cosine to the source, 16 to 512 tokens")
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; with --list only that one is needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files named in conversion_quality/texts.py")
    parser.add_argument("--variants", nargs="+", default=["*"], help="patterns of the variants to measure")
    parser.add_argument("--list", action="store_true", help="print the names of the variants, and do nothing else")
    parser.add_argument("--tokens", type=positive_int, default=20_000, help="to calibrate on")
    parser.add_argument("--window-tokens", type=positive_int, default=4096, help="of the other text, at each length")
    parser.add_argument("--sts-pairs", type=positive_int, default=1000, help="of a similarity set at most")
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    args = parser.parse_args(arguments)
    if not args.list and not (args.source and args.data):
        parser.error("--source and --data are needed")
    check_patterns(parser, "--variants", args.variants, variants())
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.list:
        print("\n".join(variants()))
        return
    start_quietly(1)
    sources = [source.partition("#") for source in DATA["train_text"]]
    texts, fields = [args.data / path for path, _, _ in sources], [column or "text" for _, _, column in sources]
    args.other, args.other_field = args.data / OTHER[0], OTHER[1]
    args.sts = [args.data / path for path in DATA["sts"]]
    names = ", ".join(path.name for path in texts)
    path = args.out / "calibrated.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"variants": {}}
    results["about"] = (
        f"{Path(args.source).name}, {args.tokens:,} tokens of {names}; the text of another kind is {args.other.name}, "
        f"{args.window_tokens:,} tokens of each length; similarity sets: {', '.join(path.name for path in args.sts)}, "
        f"{args.sts_pairs:,} pairs of each"
    )
    settings = {"source": Path(args.source).name, "tokens": args.tokens, "window_tokens": args.window_tokens}
    settings |= {"seed": args.seed, "rounds": args.rounds, "sts_pairs": args.sts_pairs}
    omitted = ("--variants", "--out")
    command = reproducing_command("bench_calibrated.py", sys.argv[1:] if arguments is None else arguments, omitted)
    reference = Reference(args)
    results["variants"] = {name: row for name, row in results["variants"].items() if row["settings"] == settings}
    for name, variant in variants().items():
        if name in results["variants"] or not any(fnmatch(name, pattern) for pattern in args.variants):
            continue
        result = measure(variant, reference, texts, fields)
        results["environment"] = {**environment(), "command": command}
        results["variants"][name] = {"settings": settings, "result": result}
        write_report(args.out / "calibrated", results, card(results))
        print_tables(tables(results))
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

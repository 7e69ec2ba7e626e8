"""How many waves, and which terms, a calibrated `harmonic` needs to be as close to its source as `tables`; their cost.

    python scripts/compare_waves.py --source all-MiniLM-L6-v2 --data DATA                   # hours of one core
    python scripts/compare_waves.py --source … --data … --tokens 6000 --window-tokens 1024  # minutes for each student

Students are made and measured as the rows `fidelity/…` of bench_conversion.py, whose texts, sets and options these
are: cosines on text of another kind than was fitted to, the mean of all texts. Time is that of the whole encoder in
one thread, beside its source's, in turns. OUT/waves.json and .md are written after each student; one that is there
already with the same settings is not measured again.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import bench_calibrated
import bench_conversion
import torch
from conversion_quality.making import StudentMaker
from conversion_quality.measuring import Bench
from conversion_quality.students import STUDENTS, Student
from experiments.arguments import reproducing_command
from experiments.measuring import environment
from experiments.reports import Table, describe, markdown_sections, print_tables, write_report
from rich.console import Console
from transformers.utils import logging


# Waves and terms: all terms by number of waves, then terms with the default number.
COMPARED = [(8, "ABcV"), (4, "ABcV"), (16, "ABcV"), (32, "ABcV"), (8, "AcV"), (8, "ABc"), (8, "Ac")]
TIMED = (128, 512)  # tokens of a row
ROUNDS = 5


def students() -> dict[str, Student]:
    """By name: the general scheme, and those of `COMPARED`."""
    made = {"tables": STUDENTS["calibrated"]}
    for waves, letters in COMPARED:
        label = f"`harmonic`, {waves} waves, {' '.join(letters)}"
        options = {"waves": waves, "terms": letters}
        made[f"waves-{waves}-{letters}"] = replace(made["tables"], label=label, scheme="harmonic", options=options)
    return made


def forward_times(maker: StudentMaker, name: str) -> dict[str, float]:
    """Seconds of the student over those of the source, by number of tokens."""
    source, student = maker.teacher.model, maker.load(name)[0].model
    source.set_attn_implementation("sdpa")
    taken = {length: bench_calibrated.times(source, student, length, ROUNDS) for length in TIMED}
    return {str(length): round(each["variant"] / each["source"], 3) for length, each in taken.items()}


def mean_by_length(texts: dict[str, Any], what: str) -> dict[str, float]:
    """The mean of all texts that have windows of a length."""
    found: dict[str, list[float]] = {}
    for text in texts.values():
        for length, cosine in text[what].items():
            found.setdefault(length, []).append(cosine)
    return {length: sum(cosines) / len(cosines) for length, cosines in found.items()}


def tables(results: dict[str, Any]) -> list[Table]:
    """Cosines, similarity sets and time, a line for each student."""
    rows = results["students"]
    sections: list[Table] = []
    for what, title in (("sentence", "Sentence cosine"), ("token", "Token cosine")):
        cosines = {name: mean_by_length(row["result"]["texts"], what) for name, row in rows.items()}
        lengths = sorted({length for each in cosines.values() for length in each}, key=int)
        lines = []
        for name, each in cosines.items():
            shown = [f"{each[length]:.3f}" if length in each else "–" for length in lengths]
            lines.append([rows[name]["label"], *shown])
        sections.append((title, ["tokens", *lengths], lines))
    sets = list(dict.fromkeys(key for row in rows.values() for key in row["result"]["sts"]))
    lines = []
    for row in rows.values():
        differences = [row["result"]["sts"][key]["difference"]["mean"] for key in sets]
        times = [f"{ratio:.2f}" for ratio in row["time"].values()]
        lines.append([row["label"], *(f"{difference:+.2f}" for difference in differences), *times])
    head = ["", *sets, *(f"time × source, {length} tokens" for length in TIMED)]
    return [*sections, ("Similarity sets, Spearman's ρ × 100 less the source's, and time", head, lines)]


def card(results: dict[str, Any]) -> str:
    """waves.md."""
    return (
        f"# Waves for tables\n\n{describe(results['environment'])}\nWritten by scripts/compare_waves.py: "
        f"{results['source']}, calibrated on {results['tokens']:,} tokens.\n{markdown_sections(tables(results))}"
    )


def main(arguments: list[str] | None = None) -> None:
    args = bench_conversion.parse(arguments)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = args.out / "waves.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"students": {}}
    STUDENTS.update(students())
    bench = Bench(args, Console(stderr=True))
    for name, student in students().items():
        settings = json.loads(json.dumps(bench.settings(f"fidelity/{name}")))
        if content["students"].get(name, {}).get("settings") == settings:
            continue
        result = bench.measure(f"fidelity/{name}")
        times = forward_times(bench.students, name)
        content["students"][name] = {"label": student.label, "settings": settings, "result": result, "time": times}
        command = reproducing_command("compare_waves.py", sys.argv[1:] if arguments is None else arguments)
        about = {**environment(), "command": command}
        content |= {"environment": about, "tokens": args.tokens, "source": bench.origin["source"]}
        write_report(args.out / "waves", content, card(content))
        print(f"{name} done", file=sys.stderr)
    print_tables(tables(content))


if __name__ == "__main__":
    main()

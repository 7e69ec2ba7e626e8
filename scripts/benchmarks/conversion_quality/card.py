"""Tables, card and picture of scripts/benchmarks/bench_conversion.py, from what conversion.json holds."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.measuring import TIMED_TOKENS
from shared.reports import Table, markdown_sections, write_report

from .students import ROWS, label, row_label


if TYPE_CHECKING:
    pass


Rows = dict[str, Any]  # key of `ROWS` to its result


def spearman_lost(row: dict[str, Any]) -> list[float]:
    """Points of Spearman's ρ that are lost, by set."""
    return [-entry["difference"]["mean"] for entry in row["sts"].values()]


def accuracy_kept(rows: Rows, row: str) -> tuple[float | None, float | None]:
    """Percent of the teacher's accuracy on masked tokens: over all lengths, and at the worst; None without it."""
    if row == "demo/teacher" or "demo/teacher" not in rows:
        return None, None
    student, teacher = rows[row]["accuracy"], rows["demo/teacher"]["accuracy"]
    worst = min(100 * student[length] / teacher[length] for length in student)
    return 100 * sum(student.values()) / sum(teacher[length] for length in student), worst


def current_rows(content: dict[str, Any]) -> Rows:
    """The results that belong to the settings of the last run, in the order of ROWS."""
    stored = content["rows"]
    return {key: stored[key]["result"] for key in ROWS if key in stored and key not in content["missing"]}


def lengths_of(content: dict[str, Any]) -> list[int]:
    """Lengths of the windows in the rows of fidelity."""
    return next(
        (
            content["rows"][key]["settings"]["lengths"]
            for key in current_rows(content)
            if key.startswith(("fidelity/", "quality/"))
        ),
        [],
    )


def rows_of_kind(rows: Rows, kind: str) -> Rows:
    """Rows of one kind, by student and variant."""
    return {key.partition("/")[2]: row for key, row in rows.items() if key.startswith(f"{kind}/")}


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash for None."""
    return "–" if value is None else format(value, form)


def cosines(entry: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """Token and sentence cosine at each length."""
    return [" / ".join(number(entry[each].get(str(length))) for each in ("token", "sentence")) for length in lengths]


def rho(entry: dict[str, Any]) -> str:
    """Spearman's ρ, and the difference to the teacher's."""
    gap = entry.get("difference")
    more = f" ({gap['mean']:+.2f}: {gap['low']:+.2f} to {gap['high']:+.2f})" if gap else ""
    return f"{entry['rho']:.2f}{more}"


def fidelity_tables(rows: Rows, lengths: Sequence[int]) -> Iterator[Table]:
    """Cosines by text, and similarity sets."""
    fidelity = rows_of_kind(rows, "fidelity")
    cells = [
        [row_label(f"fidelity/{name}"), text, *cosines(entry, lengths)]
        for name, row in fidelity.items()
        for text, entry in row["texts"].items()
    ]
    if cells:
        yield "Token / sentence cosine to the teacher", ["student", "text", *map(str, lengths)], cells
    sets = next((row["sts"] for row in fidelity.values()), {})
    if sets:
        cells = []
        for name, row in fidelity.items():
            cells.append([label(name), *map(rho, row["sts"].values())])
        columns = ["student", *(f"{name} ({entry['pairs']:,})" for name, entry in sets.items())]
        yield "Spearman's ρ × 100 (difference to the teacher: 95 % range)", columns, cells


def quality_table(rows: Rows, lengths: Sequence[int]) -> Iterator[Table]:
    """Sentence cosine by text, points of Spearman's ρ, time of the student, and what it cost to make."""
    qualities = rows_of_kind(rows, "quality")
    cells = []
    for name, row in qualities.items():
        closeness = [
            " ".join(number(entry["sentence"].get(str(length))) for length in lengths)
            for entry in row["texts"].values()
        ]
        gaps = " ".join(f"{-lost:+.2f}" for lost in spearman_lost(row))
        times = [f"{times['student'] / times['teacher']:.2f}" for times in row["times"].values()]
        spent, tokens = row["details"]["cpu_seconds"], row["details"]["distillation"]["tokens"]
        last = list(row["times"].values())[-1:]  # of the longest rows
        passes = [f"{spent['distillation'] / (each['teacher'] * tokens / TIMED_TOKENS):.1f}" for each in last]
        costs = [f"{seconds:,.0f}" for seconds in spent.values()]
        short = label(name).removeprefix("quality ")
        cells.append([short, *closeness, gaps or "–", *times, *passes, *costs])
    if cells:
        first = next(iter(qualities.values()))
        columns = ["", *first["texts"], "Spearman's ρ × 100", *(f"time × source, {each}" for each in first["times"])]
        columns += ["training × the source's reading"] * bool(first["times"])
        columns += [f"{what}, CPU s" for what in first["details"]["cpu_seconds"]]
        yield f"Qualities: sentence cosine at {', '.join(map(str, lengths))} tokens", columns, cells


def long_table(rows: Rows) -> Iterator[Table]:
    """Token cosine by quarter."""
    long = rows_of_kind(rows, "long")
    cells = [[label(name), *map(number, row["quarters"]), number(row["token"])] for name, row in long.items()]
    for row in long.values():
        if "ceiling" in row:
            cells.append(["ceiling: the teacher, other windows", *["–"] * 4, number(row["ceiling"]["token"])])
    if cells:
        columns = ["model", "1st quarter", "2nd", "3rd", "4th", "all"]
        yield "Long documents: token cosine to the teacher's windows", columns, cells


def demo_table(rows: Rows) -> Iterator[Table]:
    """Accuracy on masked tokens."""
    models = rows_of_kind(rows, "demo")
    cells = []
    for name, row in models.items():
        kept = accuracy_kept(rows, f"demo/{name}")
        percents = [f"{percent:.2f}" for percent in row["accuracy"].values()]
        cells.append([label(name), *percents, *(number(percent, ".1f") for percent in kept)])
    if len(cells) > 2:  # more than the teacher and the control
        lengths = next(iter(models.values()))["accuracy"]
        columns = ["model", *(f"{length} tokens" for length in lengths), "% of the teacher's", "at the worse length"]
        yield "Demo BERT: masked tokens right, %", columns, cells


def result_tables(content: dict[str, Any], kind: str = "") -> list[Table]:
    """The tables of all current rows, or of those of one kind."""
    rows = {key: row for key, row in current_rows(content).items() if key.startswith(kind)}
    return [
        *fidelity_tables(rows, lengths_of(content)),
        *quality_table(rows, lengths_of(content)),
        *long_table(rows),
        *demo_table(rows),
    ]


def card(content: dict[str, Any]) -> str:
    """conversion.md."""
    about, rows = content["about"], current_rows(content)
    missing = {key: content["missing"].get(key, "not selected") for key in ROWS if key not in rows}
    by_reason = {reason: [f"`{key}`" for key in missing if missing[key] == reason] for reason in missing.values()}
    tables = result_tables(content)
    unsaid = {"source", "command"} | ({"demo BERT"} if not any("Demo" in title for title, *_ in tables) else set())
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items() if key not in unsaid)
    text = (
        f"# Conversion of {about['source']}\n\n"
        f"Written by `{about['command']}`.\n\n{facts}\n\n"
        "Cosines are means over held-out text that no student was trained on. The ceiling is how far the teacher "
        "agrees with itself when its input is moved by 1 to 64 positions.\n"
        f"{markdown_sections(tables)}"
    )
    if missing:
        text += "\n## Not measured\n\n"
        text += "".join(f"- {reason}: {', '.join(keys)}\n" for reason, keys in by_reason.items())
    return text


def save(folder: Path, content: dict[str, Any]) -> None:
    """Write conversion.json and .md."""
    write_report(folder / "conversion", content, card(content))

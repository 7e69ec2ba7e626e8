"""The figures of conversion: how much of an absolute BERT its relative copies keep, row by row.

    python scripts/benchmarks/bench_conversion.py --source all-MiniLM-L6-v2 --data DATA
    python scripts/benchmarks/bench_conversion.py --source MODEL --train-text a.txt b.jsonl#abstract \\
        --eval-text c.txt --sts d.tsv
    python scripts/benchmarks/bench_conversion.py --source … --data … --rows 'quality/*' long/long-all+window
    python scripts/benchmarks/bench_conversion.py --list    # names of the rows

Writes OUT/conversion.json and .md after every row, and .png at the end (extra `plot`). A row that is in the JSON
already, with the same settings, is not measured again; converted models are kept in WORK. The code is no setting:
after a change of it, `--again default` removes that student and what was measured of it. SOURCE is a
sentence-embedding BERT. DATA is a folder with the files in `DATA` of conversion_quality/texts.py.

Text is `FILE` or `FILE#FIELD`. Training text is cut into passages, about equally many of each file; those that share
twelve words in a row with an evaluation text are left out. Seconds are CPU seconds of this process.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from conversion_quality.card import current_rows, result_tables, save
from conversion_quality.making import NotMeasurable, forget
from conversion_quality.measuring import Bench
from conversion_quality.students import ROWS, STUDENTS, row_label
from conversion_quality.texts import DATA, SHARED_WORDS
from rich.console import Console
from shared.arguments import RESULTS, check_patterns, reproducing_command
from shared.measuring import environment, utc_now
from shared.process import start_quietly

from hf_relpos.console import print_table
from hf_relpos.schemes.scheme import is_count


COUNTS = ("long_length", "documents", "window", "threads")


def commit() -> str | None:
    """The commit of the code, where it is known."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def about(args: argparse.Namespace, arguments: Sequence[str]) -> dict[str, str]:
    """Where and when this was measured."""

    def names(sources: Sequence[str]) -> str:
        return ", ".join(Path(source.partition("#")[0]).name for source in sources)

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
    return {
        "source": Path(args.source).name,
        "command": reproducing_command(
            "bench_conversion.py", arguments, omitted=("--rows", "--again", "--out", "--work")
        ),
        "machine": f"{environment()['machine']}, {os.cpu_count()} cores, other work beside; {args.threads} thread",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "date": utc_now().partition(" ")[0],
        "seed": str(args.seed),
        "learnt from": f"{names(args.train_text)}. No passage of it shares {SHARED_WORDS} words in a row with the "
        "held-out text",
        "held out": f"{names(args.eval_text)}; {args.window_tokens:,} tokens of each length",
        "long documents": f"{args.long_length:,} tokens, {args.documents} of each held-out text; window {args.window} "
        "and [CLS]",
        "demo BERT": "learns from She (H. R. Haggard) and is measured on Treasure Island (R. L. Stevenson)",
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with paths of --data filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files named in DATA")
    parser.add_argument("--train-text", nargs="+", help="to train on")
    parser.add_argument("--eval-text", nargs="+", help="to measure on, never trained on")
    parser.add_argument("--other-text", help="of another kind, never trained on")
    parser.add_argument("--long-text", nargs="+", help="for long documents; by default --eval-text")
    parser.add_argument("--sts", nargs="+", help="scored pairs of sentences")
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    parser.add_argument("--work", type=Path, default=Path("build") / "bench_conversion", help="models")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of the rows to measure, in this order")
    parser.add_argument("--again", nargs="+", default=[], metavar="STUDENT", help="remove these and their rows")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and do nothing else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--window-tokens", type=int, default=6144, help="tokens compared at each length")
    parser.add_argument("--sts-pairs", type=int, default=1500, help="of a set at most, drawn at random; 0: all")
    parser.add_argument("--long-length", type=int, default=2048, help="tokens of long documents")
    parser.add_argument("--documents", type=int, default=4, help="long documents of each text")
    parser.add_argument("--window", type=int, default=256, help="attention_window of the rows with one")
    parser.add_argument("--masked-tokens", type=int, default=32_768, help="of the masked text at each length")
    args = parser.parse_args(arguments)
    if args.list:
        return args
    if not args.source:
        parser.error("--source is needed: a folder or Hub id of a sentence-embedding BERT")
    for name, value in DATA.items():
        if args.data and getattr(args, name) is None:
            listed = [str(args.data / each) for each in ([value] if isinstance(value, str) else value)]
            setattr(args, name, listed[0] if isinstance(value, str) else listed)
    for name in ("train_text", "eval_text", "sts"):
        setattr(args, name, getattr(args, name) or [])
    args.long_text = args.long_text or args.eval_text
    for path in [*args.train_text, *args.eval_text, *args.long_text, *args.sts, args.other_text]:
        if path and not Path(path.partition("#")[0]).exists():
            parser.error(f"{path}: no such file; check --data, or name the file with an argument of its own")
    for name in COUNTS:
        if not is_count(getattr(args, name)):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give a whole number from 1 on")
    check_patterns(parser, "--rows", args.rows, ROWS)
    unknown_students = set(args.again) - STUDENTS.keys()
    if unknown_students:
        parser.error(f"--again {min(unknown_students)}: no student of this name; known: {', '.join(STUDENTS)}")
    return args


def measure(bench: Bench, key: str, console: Console) -> dict[str, Any]:
    """A row with its cost.

    Raises:
        NotMeasurable: with the reason.
    """
    cpu_start, start = time.process_time(), time.perf_counter()
    result = bench.measure(key)
    seconds = {"cpu": round(time.process_time() - cpu_start, 1), "wall": round(time.perf_counter() - start, 1)}
    console.print(f"{key}: {seconds['cpu']} CPU s", markup=False)
    return {"date": utc_now().removesuffix(" UTC"), "row_seconds": seconds, "result": result}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.list:
        print("\n".join(ROWS))
        return
    import matplotlib  # noqa: F401  fails before time is spent on what it is to draw

    start_quietly(args.threads)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "conversion.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}
    forget(args.again, content["rows"], args.work)
    bench = Bench(args, console)
    code = commit()  # of what was loaded; the tree may change during a long run
    content["about"] = about(args, sys.argv[1:] if arguments is None else arguments)
    settings = {key: json.loads(json.dumps(bench.settings(key))) for key in ROWS}
    content["missing"] = {
        key: "measured with other settings"
        for key, row in content["rows"].items()
        if key not in settings or row["settings"] != settings[key]
    }
    for key in dict.fromkeys(key for pattern in args.rows for key in ROWS if fnmatch(key, pattern)):
        if key in current_rows(content):
            console.print(f"{key}: there already", style="dim")
            continue
        try:
            row = {"settings": settings[key], "commit": code, **measure(bench, key, console)}
        except NotMeasurable as reason:
            console.print(f"{key}: {reason}", style="yellow", markup=False)
            content["missing"][key] = str(reason)
            continue
        content["missing"].pop(key, None)
        rows = {**content["rows"], key: row}
        content["rows"] = {name: rows[name] for name in ROWS if name in rows}
        save(args.out, content)
        for title, columns, lines in result_tables(content, key.partition("/")[0]):
            print_table(console, title, columns, [line for line in lines if line[0].startswith(row_label(key))])
    save(args.out, content)
    for table in result_tables(content):
        print_table(console, *table)


if __name__ == "__main__":
    main()

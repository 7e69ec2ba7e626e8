"""Command lines of experiments and benchmarks: argument types, common options, and what is stored of them."""

import argparse
import fnmatch
import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
# Options that no result depends on.
NOT_SETTINGS = ("name", "out", "work", "seeds", "again", "threads")


def positive_int(text: str) -> int:
    """An integer ≥ 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def non_negative_int(text: str) -> int:
    """An integer ≥ 0, for argparse."""
    return 0 if text == "0" else positive_int(text)


def fraction(text: str) -> float:
    """A number in [0, 1), for argparse."""
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError
    return value


def key_value(text: str) -> tuple[str, object]:
    """KEY=VALUE, for argparse; the value is parsed as JSON where possible, and else a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def check_patterns(
    parser: argparse.ArgumentParser, option: str, patterns: Sequence[str], names: Collection[str]
) -> None:
    """End with an error for a pattern of an option that fits none of the names, which --list prints."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            parser.error(f"{option} {pattern}: fits none; --list names them")


def add_experiment_options(parser: argparse.ArgumentParser, script: str, folder: str, seeds: int, work: str) -> None:
    """Add the options that all training experiments have.

    Args:
        script: its name, that of the default folder for intermediate files.
        folder: of the results, under docs/results.
        seeds: default number of seeds.
        work: what the folder for intermediate files is for.
    """
    parser.add_argument("--name", required=True, help="of the data set, in the results")
    parser.add_argument("--seeds", type=positive_int, default=seeds, help="number of seeds, counted from 0")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / folder)
    parser.add_argument("--work", type=Path, default=Path("build") / script, help=work)
    parser.add_argument("--again", action="store_true", help="delete the stored runs of this data set")


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks of speed and memory have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; at least 3")
    parser.add_argument("--peer-python", help="Python of an environment with transformers 4.57, to time its BERT too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a request to a fresh process of the same script
    return parser


def fingerprint(path: Path) -> str:
    """Name and content of a file, in short."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def digest(*content: object) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def reproducing_command(
    script: str, arguments: Sequence[str], omitted: Sequence[str] = ("--again", "--out", "--work")
) -> str:
    """The command that repeats all runs, with the names of files in place of their paths.

    Args:
        script: its file name.
        arguments: of this run.
        omitted: options to leave out, with their values.
    """
    words, omit = [f"python scripts/{script}"], False
    for word in arguments:
        if word.startswith("--"):
            omit = word in omitted
        if not omit:
            words.append(Path(word).name if "/" in word else word)
    return " ".join(words)


def settings_of(args: argparse.Namespace, not_settings: Sequence[str] = (), **replaced: Any) -> dict[str, Any]:
    """All options that every run of a data set depends on, as JSON has them.

    Args:
        not_settings: options to leave out, besides NOT_SETTINGS: those that distinguish runs from each other.
        replaced: other values for options, such as the `fingerprint` of a file for its path.
    """
    kept = {key: value for key, value in vars(args).items() if key not in (*NOT_SETTINGS, *not_settings)}
    return json.loads(json.dumps({**kept, **replaced}))

"""Command lines of the benchmarks: argument types, common options, and what is stored of them."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"


def positive_int(text: str) -> int:
    """An integer ≥ 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks of speed and memory have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; at least 3")
    parser.add_argument("--peer-python", help="Python of an environment with transformers 4.57, to time its BERT too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a request to a fresh process of the same script
    return parser


def reproducing_command(
    script: str, arguments: Sequence[str], omitted: Sequence[str] = ("--again", "--out", "--work")
) -> str:
    """The command that repeats all runs, with the names of files in place of their paths.

    Args:
        script: its file name.
        arguments: of this run.
        omitted: options to leave out, with their values.
    """
    words, omit = [f"python scripts/benchmarks/{script}"], False
    for word in arguments:
        if word.startswith("--"):
            omit = word in omitted
        if not omit:
            words.append(shlex.quote(Path(word).name if "/" in word else word))
    return " ".join(words)

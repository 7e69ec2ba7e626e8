"""What the benchmarks share: where they run, how they take time and memory, how they show and keep results.

Also read by the Python of another environment (an older Transformers as a peer), so it imports torch and the standard
library at the top, and rich and matplotlib where they are used.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "benchmarks"
PROTOCOL = (
    "CPU seconds of the one thread that computes (time.thread_time), which other jobs on the machine change less than "
    "wall time; variants take turns in one process; the median of the rounds after the first"
)


def environment() -> dict:
    """Machine, versions, date, command and load of this run."""
    import transformers

    names = {}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.split(":", 1) for line in file if ":" in line]
        names = {key.strip(): value.strip() for key, value in lines}
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "machine": names.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{names.get('cpu family', '?')}/{names.get('model', '?')}",
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "unset"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "protocol": PROTOCOL,
    }


def take_turns(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of CPU time of each, run in turns `rounds` times after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            begin = time.thread_time()
            run()
            times[name].append(time.thread_time() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def peak_mb() -> float:
    """Largest resident size of this process so far, MB."""
    status = Path("/proc/self/status")
    if status.exists():  # where ru_maxrss begins with the size of the process that started this one
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def ask(python: str, script: str, *arguments: str) -> dict:
    """The JSON that a fresh process of that Python prints last.

    Raises:
        RuntimeError: when it fails, with what it said.
    """
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, check=False, env=settings)
    if done.returncode:
        raise RuntimeError(f"{python} {script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def error_ratio(got: Iterable[torch.Tensor], eager: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """How many times further from `exact` (float64) `got` is than `eager` in the same dtype: the largest over outputs.

    Distances are root mean squares.
    """
    ratios = []
    for ours, theirs, truth in zip(got, eager, exact, strict=True):
        truth = truth.double()
        scale = truth.square().mean().sqrt()
        ours, theirs = ((other.double() - truth).square().mean().sqrt() / scale for other in (ours, theirs))
        ratios.append(float((ours / theirs.clamp(min=1e-9)).detach()))
    return max(ratios)


def rich_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """The same in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def describe(found: dict) -> str:
    """`environment()` as a paragraph."""
    cores = f"{found['threads']} thread, load average {found['load']:.1f} on {found['cores']} cores"
    machine = f"{found['machine']} (family/model {found['cpu_family_model']}, {found['cpu_capability']}), {cores}"
    versions = f"torch {found['torch']}, transformers {found['transformers']}, Python {found['python']}"
    pages = f"huge pages {found['huge_pages']}, THP_MEM_ALLOC_ENABLE {found['THP_MEM_ALLOC_ENABLE']}"
    when = f"{found['date']}.\n\n`{found['command']}`\n\nTimes: {found['protocol']}.\n"
    return f"{machine}; {versions}; {pages}; {when}"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; at least 3")
    parser.add_argument("--peer-python", help="Python of an environment with transformers 4.57, to time its BERT too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what this script asks of fresh processes of itself
    return parser

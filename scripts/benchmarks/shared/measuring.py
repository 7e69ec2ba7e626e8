"""Machine and versions, CPU time, peak memory and errors.

Also imported by the Python of another environment (an older Transformers as a peer): torch and the standard library.
"""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .arguments import ROOT, reproducing_command


PROTOCOL = (
    "CPU seconds of the one thread that computes (time.thread_time), which other jobs on the machine change less than "
    "wall time; variants take turns in one process; the median of the rounds after the first"
)


def utc_now() -> str:
    """Date and time to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def processor() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty where there is none.

    Read by hand: neither psutil nor platform has the processor's name on Linux.
    """
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        pairs = (line.split(":", 1) for line in lines if ":" in line)
        return {key.strip(): value.strip() for key, value in pairs}
    return {}


def environment() -> dict[str, Any]:
    """Machine, versions, date, command and load of this run."""
    import transformers

    cpu = processor()
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "machine": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "unset"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": utc_now(),
        "command": reproducing_command(Path(sys.argv[0]).name, sys.argv[1:], omitted=("--out", "--worker")),
        "protocol": PROTOCOL,
    }


def time_in_turns(
    variants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median CPU seconds of each variant, run in turns `rounds` times after one warm-up round.

    Args:
        variants: by their names.
        rounds: that count.
        clock: `time.process_time` for what computes in threads of its own.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def peak_memory() -> float:
    """Largest resident size of this process so far, MB.

    Read by hand: psutil has the present size only, and ru_maxrss starts with that of the parent process on Linux.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def reset_peak_memory() -> None:
    """Count the peak from now on, where Linux allows it; no library does this."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run_worker(python: str, script: str, *arguments: str) -> Any:
    """The JSON in the last line that a script prints in a fresh process.

    Raises:
        RuntimeError: when it fails, with the end of its stderr.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise RuntimeError(f"{python} {script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def error_ratio(
    outputs: Iterable[torch.Tensor], eager: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]
) -> float:
    """Root mean square error of `outputs` ÷ that of `eager` in the same dtype, both against `exact` in float64.

    Returns:
        The largest ratio over the tensors.
    """
    ratios = []
    for output, reference, truth in zip(outputs, eager, exact, strict=True):
        truth = truth.double()
        scale = truth.square().mean().sqrt()
        error, eager_error = (
            (tensor.double() - truth).square().mean().sqrt() / scale for tensor in (output, reference)
        )
        ratios.append(float((error / eager_error.clamp(min=1e-9)).detach()))
    return max(ratios)

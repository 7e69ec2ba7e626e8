"""The scripts of the project in this process, and scripts in several, as `accelerate launch` starts them."""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType


SCRIPTS = Path(__file__).parents[1] / "scripts"
# `--cpu` starts several processes only through MPI; this starts them with torchrun, and what is started stays on CPU
LAUNCH = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)


def import_script(name: str) -> ModuleType:
    """A script by its name, or a module of a folder under scripts, as `tagging.data`."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


def run_python(*arguments: str | Path | int, processes: int = 1) -> None:
    """Run a script, or a module after `-m`, with a thread in each process.

    Args:
        arguments: script and its arguments.
        processes: 1, or 2 that know of each other.

    Raises:
        AssertionError: where it fails, with what it printed.
    """
    launch: tuple[str, ...] = ()
    if processes == 2:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            launch = (*LAUNCH, "--main_process_port", str(free.getsockname()[1]))
    done = subprocess.run(
        [sys.executable, *launch, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""The scripts of the project in this process, and scripts in processes of their own, one or two that know each other.

Processes are forked from a server that has imported PyTorch and Transformers once, which takes seconds in each process
that `accelerate launch` starts.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

from typer.testing import CliRunner, Result

from hf_relpos.cli import app


SCRIPTS = Path(__file__).parents[1] / "scripts"
HAS_FORK = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
SERVER = multiprocessing.get_context("forkserver" if HAS_FORK else "spawn")
if HAS_FORK:
    SERVER.set_forkserver_preload(["hf_relpos", "transformers.trainer"])


def import_script(name: str) -> ModuleType:
    """A script by its name, with those that it imports, now or when it is used."""
    for folder in ("examples", "benchmarks", "maintenance"):
        if str(SCRIPTS / folder) not in sys.path:
            sys.path.append(str(SCRIPTS / folder))
    return importlib.import_module(name)


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def work(arguments: list[str], env: dict[str, str], log: str) -> None:
    """Be `python *arguments`, in a process of the server."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    module = arguments[0] == "-m"
    sys.argv = arguments[1:] if module else arguments
    if not module:
        sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_code(code: str, *arguments: str | Path, status: int = 0, **settings) -> subprocess.CompletedProcess:
    """Run Python code in a new interpreter, which must end with this exit status; what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **settings)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def run_command(*arguments: object, **settings) -> Result:
    """Run `hf-relpos` in this process, with these arguments; its exit code and what it printed."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def run_python(*arguments: str | Path | int, processes: int = 1) -> None:
    """Run a script, or a module after `-m`, with a thread in each process.

    Args:
        arguments: script and its arguments.
        processes: 1, or 2 that know of each other.

    Raises:
        AssertionError: for another exit status than 0, with what they printed.
    """
    words, env = [str(argument) for argument in arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes > 1:
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    each = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else env for rank in range(processes)]
    with tempfile.NamedTemporaryFile() as log:
        codes = exit_codes([SERVER.Process(target=work, args=(words, own, log.name)) for own in each])
        if -signal.SIGSEGV in codes and processes > 1:
            # in CI, gloo's thread (`pt_gloo_runloop`) has crashed in malloc of forked processes: start them anew
            started = [subprocess.Popen([sys.executable, *words], env=own, stdout=log, stderr=log) for own in each]
            codes = [process.wait(timeout=300) for process in started]
        assert set(codes) == {0}, f"exit codes {codes}\n{Path(log.name).read_text(errors='replace')}"


def exit_codes(processes: list) -> list[int | None]:
    """Start processes, and wait for them; None for one that is killed because it takes too long."""
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=300)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()

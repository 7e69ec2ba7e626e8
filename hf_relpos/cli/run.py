"""The commands `benchmark`, which measures what it gains, and `run`, which starts a program with it."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from .. import autoload
from ..checkpoints.paths import check_source
from ..console import plain_errors
from ..data.text import check_texts
from ..deprecation import UNPAD as OLD_UNPAD
from ..host.cores import threads_of
from .options import OPTIONS, TEXT, Fields, JsonFile, advanced
from .output import command_output, loading, write_json


Dtype = StrEnum("Dtype", "float32 bfloat16 int8 auto")
DTYPE = (
    "Of linear layers; bfloat16 and int8 round, int8 most. auto: the fastest with a mean cosine of .995 or "
    "more to float32, measured on"
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # which PyTorch reads when it is imported
UNPAD = ("pad_token", "attention_mask", "auto", "never")


def _check_unpad(value: str) -> str:
    """Check --unpad, which may have a value of --padding."""
    value = OLD_UNPAD.get(value, value)
    if value not in UNPAD:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(UNPAD)}")
    return value


Unpad = Annotated[
    str,
    advanced(
        "Padding to remove. pad_token: where the mask is 0 and the token is the pad token. attention_mask: all tokens "
        "with mask 0. auto: as pad_token where outputs at padding stay, or sentence-transformers or a pipeline reads "
        "the outputs by the mask; else never.",
        "--unpad",
        metavar="|".join(UNPAD),
        callback=_check_unpad,
    ),
]


def run(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments, such as: uvicorn app:app.")],
    dtype: Annotated[Dtype, typer.Option(help=f"{DTYPE} random tokens.")] = Dtype.float32,
    unpad: Unpad = "auto",
    join: Annotated[bool, typer.Option("--join", help="Compute calls of several threads together.")] = False,
    threads: Annotated[str, typer.Option(metavar="N|auto", help="Of PyTorch. auto: the container's CPU quota.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the whole report of each model.")] = False,
    capture: Annotated[
        bool, typer.Option("--capture", help="Record a graph of each encoder at load, for short requests.")
    ] = False,
) -> None:
    """Run a Python program or server, and optimize each encoder that it loads; a line for each on stderr.

    The program and its outputs are not changed; its exit code and signals are its own. Programs that it starts are
    optimized, too. Python options that ignore the environment (-E, -I, -S) do not work.

    Examples:

    hf-relpos run -- uvicorn app:app --port 8000

    hf-relpos run --dtype int8 -- python encode.py

    hf-relpos run --join -- gunicorn -k uvicorn.workers.UvicornWorker app:app
    """
    with plain_errors():
        path = os.pathsep.join(filter(None, (os.path.dirname(autoload.__file__), os.environ.get("PYTHONPATH"))))
        environment = {autoload.OPTIMIZE: dtype, autoload.UNPAD: unpad, "PYTHONPATH": path}
        switches = {autoload.VERBOSE: verbose, autoload.JOIN: join, autoload.CAPTURE: capture}
        environment |= {name: "1" for name, is_on in switches.items() if is_on}
        if number := threads_of(threads):
            environment |= dict.fromkeys((autoload.THREADS, *THREADS), str(number))
        try:
            os.execvpe(command[0], command, os.environ | environment)
        except OSError as error:
            reason = f"{command[0]} cannot be run ({error.strerror})"
            raise ValueError(f"{reason}; give a program, such as python") from None


def benchmark(
    name: Annotated[str, typer.Argument(help="Folder or Hub repository of an encoder or a reranker.")],
    texts: Annotated[
        list[str], typer.Option(metavar="TEXT", help=f"{TEXT} Each line of .txt is a text; 256 are read. Repeatable.")
    ],
    field: Fields = None,
    dtype: Annotated[Dtype, typer.Option(help=f"{DTYPE} 32 texts of TEXT.")] = Dtype.float32,
    unpad: Unpad = "pad_token",
    trust_remote_code: Annotated[
        bool, advanced("Run the code that the checkpoint names.", "--trust-remote-code")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the speed-up of `optimize` on this CPU for your own texts: seconds and outputs, before and after.

    Nothing is written. To use it, call hf_relpos.optimize(model) in your program, or start it with hf-relpos run.

    Examples:

    hf-relpos benchmark sentence-transformers/all-MiniLM-L6-v2 --texts queries.txt

    hf-relpos benchmark BAAI/bge-reranker-base --texts queries.txt --dtype int8
    """
    with command_output(json_file, OPTIONS) as console:
        check_source(name)
        check_texts(texts, field or "text")
        with loading():
            from transformers.utils import logging

            from ..evaluation.speed import describe_gain, measure_gain

        logging.set_verbosity_error()  # no load report, since heads are omitted on purpose
        gain = measure_gain(name, texts, field or "text", str(dtype), unpad, trust_remote_code)
        console.print(describe_gain(gain), markup=False, highlight=False, soft_wrap=True)
        write_json(json_file, gain)

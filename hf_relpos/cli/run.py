"""The commands `optimize`, which measures what it gains, and `run`, which starts a program with it."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from .. import autoload
from ..checkpoints.paths import check_source
from ..console import plain_errors
from ..data.text import check_texts
from .options import OPTIONS, TEXT, Fields, JsonFile, advanced
from .output import command_output, loading, write_json


Precision = StrEnum("Precision", "float32 bfloat16 int8 auto")
Padding = StrEnum("Padding", "zeros mask stock auto")
PRECISION = (
    "Precision of linear layers; bfloat16 and int8 round, int8 most. auto: the fastest with a mean cosine of .995 or "
    "more to float32, measured on"
)
PaddingOption = Annotated[
    Padding,
    advanced(
        "zeros: remove padding, where the mask is 0 and the token is the padding token. mask: remove all tokens with "
        "mask 0. stock: keep padding. auto: zeros where outputs at padding stay, or sentence-transformers or a "
        "pipeline reads the outputs by the mask; else stock.",
        "--padding",
    ),
]


def run(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments, such as: uvicorn app:app.")],
    precision: Annotated[Precision, typer.Option(help=f"{PRECISION} random tokens.")] = Precision.float32,
    padding: PaddingOption = Padding.auto,
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

    hf-relpos run --precision int8 -- python encode.py

    hf-relpos run -- gunicorn -k uvicorn.workers.UvicornWorker app:app
    """
    with plain_errors():
        path = os.pathsep.join(filter(None, (os.path.dirname(autoload.__file__), os.environ.get("PYTHONPATH"))))
        environment = {autoload.OPTIMIZE: precision, autoload.PADDING: padding, "PYTHONPATH": path}
        environment |= {autoload.VERBOSE: "1"} if verbose else {}
        environment |= {autoload.CAPTURE: "1"} if capture else {}
        try:
            os.execvpe(command[0], command, os.environ | environment)
        except OSError as error:
            reason = f"{command[0]} cannot be run ({error.strerror})"
            raise ValueError(f"{reason}; give a program, such as python") from None


def optimize(
    name: Annotated[str, typer.Argument(help="Folder or Hub repository of an encoder or a reranker.")],
    text: Annotated[
        list[str], typer.Option(metavar="TEXT", help=f"{TEXT} Each line of .txt is a text; 256 are read. Repeatable.")
    ],
    field: Fields = None,
    precision: Annotated[Precision, typer.Option(help=f"{PRECISION} 32 texts of TEXT.")] = Precision.float32,
    padding: PaddingOption = Padding.zeros,
    trust_remote_code: Annotated[
        bool, advanced("Run the code that the checkpoint names.", "--trust-remote-code")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure what optimize gains on this CPU for your own texts: seconds and outputs, before and after.

    Nothing is written. To use it, call hf_relpos.optimize(model) in your program, or start it with hf-relpos run.

    Examples:

    hf-relpos optimize sentence-transformers/all-MiniLM-L6-v2 --text queries.txt

    hf-relpos optimize BAAI/bge-reranker-base --text queries.txt --precision int8
    """
    with command_output(json_file, OPTIONS) as console:
        check_source(name)
        check_texts(text, field or "text")
        with loading():
            from transformers.utils import logging

            from ..evaluation.speed import describe_gain, measure_gain

        logging.set_verbosity_error()  # no load report, since heads are omitted on purpose
        gain = measure_gain(name, text, field or "text", str(precision), str(padding), trust_remote_code)
        console.print(describe_gain(gain), markup=False, highlight=False, soft_wrap=True)
        write_json(json_file, gain)

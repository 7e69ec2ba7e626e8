"""The command `run`: a program with `optimize` applied to the models that it loads."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from .. import autoload
from ..console import plain_errors
from .options import advanced


Precision = StrEnum("Precision", "float32 bfloat16 int8")
Padding = StrEnum("Padding", "zeros mask stock")
PrecisionOption = Annotated[
    Precision, typer.Option(help="Of the products of linear layers: the last two round, int8 the most.")
]
PaddingOption = Annotated[
    Padding,
    advanced(
        "zeros: padding is taken out where the mask is 0 and the token is the padding token. mask: where the mask is "
        "0. stock: it stays, for programs that read hidden states of padding.",
        "--padding",
    ),
]


def run(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments, such as: uvicorn app:app.")],
    precision: PrecisionOption = Precision.float32,
    padding: PaddingOption = Padding.zeros,
) -> None:
    """Run a Python program or server with its encoders optimized as they are loaded; a line for each on stderr.

    The program is not changed, and its exit code and signals are its own. Programs that it starts are optimized, too.
    Python must not be told to ignore its environment (-E, -I, -S).
    """
    with plain_errors():
        path = os.pathsep.join(filter(None, (os.path.dirname(autoload.__file__), os.environ.get("PYTHONPATH"))))
        environment = {autoload.OPTIMIZE: precision, autoload.PADDING: padding, "PYTHONPATH": path}
        try:
            os.execvpe(command[0], command, os.environ | environment)
        except OSError as error:
            raise ValueError(
                f"{command[0]} cannot be run ({error.strerror}); give a program, such as python"
            ) from None

"""The command line, `hf-relpos`.

Commands import torch and Transformers only when they run, so help is fast. Errors that the user can correct are
printed without a traceback, with exit code 2.
"""

import io
import os
import sys
from typing import Annotated, Any

import typer

from ..console import print_message
from ..version import __version__
from . import checkpoints, doctor, evaluation, information, visualization
from .options import parse_options


__all__ = ["app", "parse_options"]

EXIT_CODES = (
    "Exit codes: 0 done; 2 for errors that you can correct, such as a wrong value, with nothing written; 3 for a "
    "written conversion that is poor by its own check; 1 for any other error."
)


class _App(typer.Typer):
    """The commands, for terminals without Unicode and output that cannot be written."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Run the command that the arguments name.

        Raises:
            SystemExit: with the exit code.
        """
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return super().__call__(*args, **settings)
        except OSError as error:
            if error.filename is not None:  # of a file, not of standard output
                raise
            print_message("Error", f"standard output could not be written ({error.strerror}); redirect it elsewhere")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
            sys.exit(1)


app = _App(no_args_is_help=True, pretty_exceptions_enable=False, epilog=EXIT_CODES)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """BERT with relative positions."""


# In the order of the help.
app.command()(checkpoints.convert)
app.command()(checkpoints.export)
app.command()(checkpoints.push)
app.command()(information.inspect)
app.command()(information.schemes)
app.command()(information.families)
app.command()(doctor.doctor)
app.command()(checkpoints.demo)
app.command()(visualization.plot)
app.command("app")(visualization.page)
app.command()(evaluation.compare)
app.command()(evaluation.evaluate)

"""The command line, `hf-relpos`.

Commands import torch and Transformers only when they run, so help is fast. Errors that the user can correct are
printed without a traceback, with exit code 2.
"""

from typing import Annotated

import typer

from ..version import __version__
from . import checkpoints, doctor, evaluation, information, visualization
from .options import parse_options


__all__ = ["app", "parse_options"]

EXIT_CODES = (
    "Exit codes: 0 done; 2 for errors that you can correct, such as a wrong value, with nothing written; 3 for a "
    "written conversion that is poor by its own check; 1 for any other error."
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, epilog=EXIT_CODES)


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

"""The command line, `hf-relpos`.

Commands import torch and Transformers only when they run, so help is fast. Errors that the user can correct are
printed without a traceback, with exit code 2.
"""

import copy
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..console import plain_errors, print_message
from ..deprecation import OPTIONS as OLD_OPTIONS
from ..version import __version__
from . import checkpoints, doctor, evaluation, information, run
from .options import parse_options


__all__ = ["app", "parse_options"]

EXIT_CODES = (
    "Exit codes: 0 for success; 2 for an error that you can correct, such as a wrong value (nothing is written); 3 "
    "for a conversion that is poor by its own check (it is written); 1 for any other error."
)
INTERRUPTED = 130  # by Ctrl-C, as shells have it


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
        except SystemExit as end:
            if end.code == INTERRUPTED:
                print_message("Interrupted", "no file is left half written; the same command starts again")
            raise
        except OSError as error:
            if error.filename is not None:  # of a file, not of standard output
                raise
            print_message("Error", f"cannot write to standard output ({error.strerror}); redirect it elsewhere")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
            sys.exit(1)


class _Command(TyperCommand):
    """A command that takes a value once, where Click takes the last of several, and options by their old names."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the command line; old names are not in the help."""
        parser = super().make_parser(ctx)
        for option in self.get_params(ctx):
            alias = copy.copy(option)
            alias.opts = [OLD_OPTIONS[name] for name in option.opts if name in OLD_OPTIONS]
            if alias.opts:
                alias.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            typer.Exit: with code 2, for an option that is given twice and is not repeatable.
        """
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for each in given:
            is_repeatable = getattr(each, "multiple", True) or getattr(each, "is_flag", True)  # not of arguments
            if not is_repeatable and given.count(each) > 1:
                with plain_errors():
                    raise ValueError(f"{each.opts[0]} is given more than once; give one value")
        for new, old in OLD_OPTIONS.items():
            if any(each.opts == [old] for each in given):
                print_message("Warning", f"{old} is now {new}; the old name works until hf_relpos 0.2.0")
        return super().parse_args(ctx, args)


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
    """Relative and rotary positions for Transformers 5: load, convert and check BERT-like encoders."""


def _add(function: Callable[..., None], name: str = "", **settings: Any) -> None:
    """A command of the function's name, or another; its help is the docstring, by paragraph."""
    # a line break would be one in the help, too
    paragraphs = [" ".join(each.split()) for each in (function.__doc__ or "").split("\n\n")]
    app.command(name or function.__name__, cls=_Command, help="\n\n".join(paragraphs), **settings)(function)


# In the order of the help.
_add(checkpoints.convert)
_add(checkpoints.export)
_add(information.inspect)
_add(information.schemes)
_add(information.families)
_add(doctor.doctor)
_add(checkpoints.demo)
_add(evaluation.compare)
_add(run.benchmark)
_add(run.benchmark, "optimize", hidden=True, deprecated="now: hf-relpos benchmark")
_add(run.run, context_settings={"allow_interspersed_args": False})  # options of the program are its own

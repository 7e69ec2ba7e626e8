"""Options of several commands, and the parsing of their values."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


# Panel of the help for options that few need; the others are in the panel "Options".
ADVANCED = "Advanced options"


def advanced(help: str, *names: str, metavar: str | None = None, **settings: Any) -> Any:
    """A `typer.Option` in the panel of those that few need."""
    return typer.Option(*names, rich_help_panel=ADVANCED, metavar=metavar, help=help, **settings)


# Arguments of `convert` that an error may begin with, and their options.
ARGUMENTS = "position_embedding_type position_options method_options texts method seed architecture revision device"
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in ARGUMENTS.split()}
TEXT = "Text: a .txt, .jsonl, .tsv or .csv file, compressed or not, or a folder of these."
FIELD = "Key or column in .jsonl, .tsv and .csv; default 'text'. Repeat it to give one for each text."
JSON = "Write the result to a JSON file; with -, to standard output, and all other output to standard error."
JsonFile = Annotated[Path | None, advanced(JSON, "--json", metavar="FILE")]
Fields = Annotated[list[str] | None, advanced(FIELD, metavar="KEY")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing OUT, after success, if it contains only a checkpoint.")
]


def parse_options(pairs: list[str], flag: str = "--position-options") -> dict[str, Any]:
    """Parse ["clip=32", "mode=log"] as {"clip": 32, "mode": "log"}; values that are not JSON are strings.

    Args:
        flag: command-line option, for errors.

    Raises:
        ValueError: for a pair without a key, and for a key that is given twice.
    """
    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise ValueError(f"{flag} {pair!r} is not of the form KEY=VALUE, such as clip=32")
        if key in options:
            raise ValueError(f"{flag} {key}= is given more than once; give one value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options

"""Commands that describe a checkpoint and list the choices: `inspect`, `schemes`, `families`."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..console import new_table, plain_errors, spinner
from .options import JsonFile
from .output import LOADING, STDOUT, check_json, console_for, write_json


def inspect(
    source: Annotated[str, typer.Argument(help="Folder or Hub repository of a checkpoint.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Describe a checkpoint, what Transformers alone does with it, and the command that converts it."""
    with plain_errors():
        from dataclasses import asdict

        with spinner(LOADING):
            from ..conversion.inspection import inspect_checkpoint

        check_json(json_file)
        found = asdict(inspect_checkpoint(source, revision))
        write_json(json_file, found)
    tables = found["tables"]
    found["tables"] = (tables[0] + (f" and {len(tables) - 1} more" if len(tables) > 1 else "")) if tables else "none"
    titles = {"trained_length": "trained length", "elsewhere": "Transformers v5", "command": "run"}
    for name, value in found.items():
        if value:
            typer.echo(f"{titles.get(name, name):16}{value}", err=json_file == STDOUT)


def schemes(
    name: Annotated[str | None, typer.Argument(help="A scheme: print its options and backends.")] = None,
    json_file: JsonFile = None,
) -> None:
    """List the position schemes; with NAME, the options of one and the backends that compute it."""
    with plain_errors():
        with spinner(LOADING):
            from ..schemes.registry import SCHEMES, find_scheme

        check_json(json_file)
        console = console_for(json_file)
        if name is None:
            table = new_table("scheme", "source")
            table.columns[0].no_wrap = True
            for each, scheme in SCHEMES.items():
                table.add_row(each, Text(scheme.source))
            console.print(table)
            write_json(json_file, {each: {"source": scheme.source} for each, scheme in SCHEMES.items()})
        else:
            find_scheme(name)
            write_json(json_file, _print_scheme(name, console))


def _print_scheme(name: str, console: Console) -> dict[str, Any]:
    """Print a scheme, and return its description."""
    from ..models.capabilities import supported_implementations
    from ..models.configuration_relpos_bert import RelPosBertConfig
    from ..schemes.registry import SCHEMES

    scheme = SCHEMES[name]
    backends = supported_implementations(RelPosBertConfig(position_embedding_type=name))
    console.print(f"{name}: {scheme.source}\nbackends: {', '.join(backends)}", markup=False, highlight=False)
    table = new_table("option", "default", "meaning")
    table.columns[0].no_wrap = True
    for key, option in scheme.options.items():
        table.add_row(key, Text(str(option.default)), Text(option.help))
    if scheme.options:
        console.print(table)
    options = {key: {"default": option.default, "help": option.help} for key, option in scheme.options.items()}
    return {"name": name, "source": scheme.source, "backends": list(backends), "options": options}


def families(
    json_file: JsonFile = None,
) -> None:
    """List the checkpoints that `convert` reads, how they are recognised, and their positions; --json adds heads."""
    with plain_errors():
        with spinner(LOADING):
            from ..families.registry import FAMILIES
            from ..families.table import COLUMNS, row

        check_json(json_file)
        rows = [
            dict(zip(COLUMNS, (cell.replace("`", "") for cell in row(name, family)), strict=True))
            for name, family in FAMILIES.items()
        ]
        shown = ("checkpoints", "told by", "positions")
        table = new_table(*shown, "direct", caption="direct: from_pretrained reads it, too")
        table.columns[-1].justify = "center"
        for each in rows:
            table.add_row(*(Text(each[column]) for column in shown), "✓" if "from_pretrained" in each["by"] else "")
        console_for(json_file).print(table)
        write_json(json_file, dict(zip(FAMILIES, rows, strict=True)))

"""Commands that describe a checkpoint and list the choices: `inspect`, `schemes`, `families`."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..checkpoints.errors import abbreviate
from ..checkpoints.paths import check_source
from ..console import new_table
from .options import JsonFile
from .output import STDOUT, command_output, loading, write_json


# What the list says of `out_of_range`.
PAST = {"clip": "last row", "zero": "no term", "extrapolate": "computed"}


def inspect(
    source: Annotated[str, typer.Argument(help="Folder or Hub repository of a checkpoint.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the checkpoint's code, and compare what it loads with the files."
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Describe a checkpoint, what Transformers alone does with it, and the command that converts it."""
    with command_output(json_file):
        check_source(source)
        with loading():
            from ..conversion.inspect_checkpoint import inspect_checkpoint

        found = inspect_checkpoint(source, revision)
        if trust_remote_code:
            found["differences"] = _differences(source, revision)
        write_json(json_file, found)
    found["tables"] = abbreviate(found["tables"], 1) or "none"
    if trust_remote_code:
        found["differences"] = _by_cause(found["differences"])
    titles = {"trained_length": "trained length", "elsewhere": "Transformers v5", "command": "run"}
    titles |= {"refused": "not converted", "differences": "with its code"}
    for name, value in found.items():
        if value:
            typer.echo(f"{titles.get(name, name):16}{value}", err=json_file == STDOUT)


def _differences(source: str, revision: str | None) -> dict[str, str]:
    """Cause and remedy of what is wrong in a model, by tensor, after a load by its own code, which is run."""
    import transformers
    from transformers import PreTrainedConfig

    from ..families.family import first_class
    from ..loaded.check import verify_weights

    config, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    known = sorted(name for name in config.get("auto_map") or () if name.startswith("AutoModel"))  # AutoModel first
    kind = getattr(transformers, known[0] if known else first_class(config), transformers.AutoModel)
    model = kind.from_pretrained(source, revision=revision, trust_remote_code=True)
    return {name: str(finding) for name, finding in verify_weights(model).items()}


def _by_cause(findings: dict[str, str]) -> str:
    """Findings in one line for each cause, or that there are none."""
    names: dict[str, list[str]] = {}
    for name, finding in findings.items():
        names.setdefault(finding, []).append(name)
    lines = (f"{abbreviate(each, 1)}: {text}" for text, each in names.items())
    return f"\n{'':16}".join(lines) or "every tensor is as in the files, or as in a new model"


def schemes(
    name: Annotated[str | None, typer.Argument(help="Scheme to describe; default: list all.")] = None,
    json_file: JsonFile = None,
) -> None:
    """List the position schemes; with NAME, print the options of one and the backends that compute it."""
    with command_output(json_file) as console:
        with loading():
            from ..schemes.registry import DEFAULT_SCHEME, PLAIN_SCHEME, SCHEMES, STOCK_SCHEME

        if name is not None:
            write_json(json_file, _print_scheme(name, console))
        else:
            first = (PLAIN_SCHEME, DEFAULT_SCHEME, STOCK_SCHEME)  # of conversions and defaults
            rows = {each: _describe_scheme(SCHEMES[each]) for each in dict.fromkeys([*first, *SCHEMES])}
            table = new_table("scheme", "what it does", "sides", "past", "target", padding=(0, 1, 0, 0))
            table.caption = (
                "sides: tells left from right · past: terms beyond the trained range (last row, no term, computed, "
                "error)\ntarget: of convert --texts · hf-relpos schemes NAME: source, options, backends"
            )
            table.columns[0].no_wrap = True
            for each, row in rows.items():
                table.add_row(
                    each,
                    Text(row["summary"]),
                    "yes" if row["direction"] else "no",
                    PAST.get(row["out_of_range"], row["out_of_range"]),
                    "yes" if row["target"] else "no",
                )
            console.print(table)
            write_json(json_file, rows)


def _describe_scheme(scheme: Any) -> dict[str, Any]:
    """What the list says of a scheme, by name of the column, and its source."""
    from ..conversion.methods import METHODS
    from ..models.configuration_relpos_bert import RelPosBertConfig

    settings = scheme.resolve({}, RelPosBertConfig())
    return {
        "summary": scheme.summary,
        "direction": not scheme.is_symmetric_with(settings),
        "out_of_range": scheme.out_of_range[0],
        "target": not METHODS["distil"].unsupported_reason(scheme),
        "source": scheme.source,
    }


def _print_scheme(name: str, console: Console) -> dict[str, Any]:
    """Print a scheme, and return its description.

    Raises:
        ValueError: for an unknown name.
    """
    from ..models.capabilities import supported_implementations
    from ..models.configuration_relpos_bert import RelPosBertConfig
    from ..schemes.registry import find_scheme

    scheme = find_scheme(name)
    backends = supported_implementations(RelPosBertConfig(position_embedding_type=name))
    title = f"{name}: {scheme.summary}" if scheme.summary else name
    lines = f"{title}\nsource: {scheme.source}\nbackends: {', '.join(backends)}"
    console.print(lines, markup=False, highlight=False)
    table = new_table("option", "default", "meaning")
    table.columns[0].no_wrap = True
    for key, option in scheme.options.items():
        table.add_row(key, Text(str(option.default)), Text(option.help))
    if scheme.options:
        console.print(table)
    options = {key: {"default": option.default, "help": option.help} for key, option in scheme.options.items()}
    return {"name": name, "source": scheme.source, "backends": backends, "options": options}


def families(json_file: JsonFile = None) -> None:
    """List the checkpoints that `convert` reads, how they are recognised, and their positions; --json adds heads."""
    with command_output(json_file) as console:
        with loading():
            from ..families.registry import FAMILIES
            from ..families.table import row

        rows = [{column: cell.replace("`", "") for column, cell in row(name).items()} for name in FAMILIES]
        shown = ("checkpoints", "told by", "positions")
        columns = ("checkpoints", "recognised by", "positions", "direct")
        table = new_table(*columns, caption="direct: from_pretrained reads it, too")
        table.columns[-1].justify = "center"
        table.columns[1].min_width = len("use_relative_position")  # the longest field, of NEZHA: not broken
        for each in rows:
            table.add_row(*(Text(each[column]) for column in shown), "✓" if "from_pretrained" in each["by"] else "")
        console.print(table)
        write_json(json_file, dict(zip(FAMILIES, rows, strict=True)))

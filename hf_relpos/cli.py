"""The command line, `hf-relpos`.

Commands import what they need when they run. What the user can correct is printed without a traceback, exit code 2.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


if TYPE_CHECKING:
    from .convert import ConversionReport

app = typer.Typer(
    help="BERT with relative positions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print what the user can correct, a bad value or a missing extra, as text; leave with exit code 2."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """["clip=32", "mode=log"] to {"clip": 32, "mode": "log"}: JSON where a value is JSON, else text.

    Raises:
        ValueError: for one without a key.
    """
    options = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not key or not found:
            raise ValueError(f"--option {pair!r} is not of the form KEY=VALUE, such as clip=32")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub repository of a BERT with absolute positions, or of a relative one.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Position scheme of the result; `hf-relpos schemes` lists them. By default the source's, or "
            "relative_key for absolute ones."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the scheme; may be repeated.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="keep (default): absolute positions stay, same outputs. drop: their mean stays, needs training. "
            "exact (default for a source that is relative already): weights are renamed, same outputs."
        ),
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Class whose head to keep, if not the one in config.json: BertModel, ….")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists, after success.")] = False,
) -> None:
    """Convert a BERT with absolute positions to a relative one, or take over a relative one."""
    with plain_errors():
        options = parse_options(option or [])
        from transformers.utils import logging

        from .convert import convert

        logging.disable_progress_bar()
        report = convert(
            source,
            out,
            position_embedding_type=scheme,
            position_options=options,
            method=method,
            architecture=architecture,
            revision=revision,
            overwrite=overwrite,
        )
    print_report(report, Console())


def print_report(report: "ConversionReport", console: Console) -> None:
    """The tensors of a report, layers put together, and a summary."""
    rows: dict[tuple, list[int]] = {}
    for step in report.steps:
        name = step.target or step.source
        key = (step.kind, re.sub(r"^(bert\.)?encoder\.layer\.\d+\.", "layer.*.", name), step.shape, step.note)
        count = rows.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += step.parameters

    table = Table("", "", "tensor", "shape", "parameters", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in (1, 4):
        table.columns[column].justify = "right"
    table.columns[2].overflow = "fold"
    for (kind, name, shape, note), (tensors, parameters) in rows.items():
        times = f"{tensors} ×" if tensors > 1 else ""
        tensor = Text(name).append(f"\n{note}" if note else "", style="italic")
        table.add_row(kind, times, tensor, "×".join(map(str, shape)), f"{parameters:,}")
    console.print(table)

    options = ", ".join(f"{key} = {value}" for key, value in report.position_options.items())
    lines = [
        f"{report.architecture} → {report.converted_to}, method {report.method}, scheme "
        f"{report.position_embedding_type}" + (f" ({options})" if options else "")
    ]
    for kind, total in report.totals.items():
        lines.append(f"{kind:8} {total['tensors']:6,} tensors {total['parameters']:14,} parameters")
    if report.difference is not None:
        lines.append(f"largest difference of an output to the source's, relative: {report.difference:.1e}")
    lines.append(f"written to {report.out}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command()
def schemes() -> None:
    """List the position schemes."""
    from .model.attention import capable_backends
    from .model.configuration_relpos_bert import RelPosBertConfig
    from .model.schemes import SCHEMES

    table = Table("scheme", "source", "options, with their defaults", "backends")
    table.columns[0].no_wrap = True
    for name, scheme in SCHEMES.items():
        options = "\n".join(f"{key} = {option.default}: {option.help}" for key, option in scheme.options.items())
        backends = ", ".join(capable_backends(RelPosBertConfig(position_embedding_type=name).position_needs))
        table.add_row(name, scheme.source, options, backends)
    Console().print(table)


@app.command()
def doctor(
    batch: Annotated[int, typer.Option(help="Rows of a batch.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a row.", min=1)] = 512,
) -> None:
    """Print versions and devices, and which way attention takes with each scheme."""
    import platform

    import torch
    import transformers

    from . import SCHEMES, RelPosBertConfig, __version__, explain_backend

    devices = ["cpu"]
    if torch.accelerator.is_available():
        devices.append(torch.accelerator.current_accelerator().type)
    versions = {
        "hf_relpos": __version__,
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "devices": ", ".join(devices),
    }
    console = Console()
    for name, value in versions.items():
        console.print(f"{name:13}{value}", markup=False, highlight=False)
    table = Table(f"BERT-base, {batch} × {length} tokens", "device", "attention", box=box.SIMPLE_HEAD)
    for name in SCHEMES:
        for device in devices:
            config = RelPosBertConfig(position_embedding_type=name)
            table.add_row(name, device, Text(explain_backend(config, batch, length, device)))
    console.print(table)


@app.command()
def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Masked language model with absolute positions: folder or Hub repository, if not our own."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the models.")] = Path("demo-out"),
    scheme: Annotated[str, typer.Option(help="Position scheme; `hf-relpos schemes` lists them.")] = "transformer_xl",
    steps: Annotated[int, typer.Option(help="Training steps of the fine-tuning.", min=1)] = 150,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Convert a BERT, show what it kept, fine-tune it, reload it."""
    with plain_errors():
        from .demo import run_demo

        run_demo(checkpoint, out=out, scheme=scheme, steps=steps, overwrite=overwrite, console=Console())


@app.command()
def plot(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub repository of a model with relative positions.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; its ending says which kind.")] = None,
    layer: Annotated[int, typer.Option(help="Number of the layer.")] = 0,
    head: Annotated[int, typer.Option(help="Number of the head.")] = 0,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text that gives the mean query and key.")
    ] = None,
) -> None:
    """Plot what the position scheme of a model adds to its attention scores."""
    with plain_errors():
        from .plot import plot_checkpoint

        Console().print(f"written to {plot_checkpoint(checkpoint, out, layer, head, text)}", markup=False)
